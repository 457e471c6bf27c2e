// dev/test/test_options.c - the command line: values, ranges, names, what is refused and why.
#include <stdio.h>
#include <string.h>
#include "testing.h"
#include "train/options.h"

enum { MAX_WORDS = 64 };

static char words[1000]; // options keep pointers into it

// Parses a command line of words separated by spaces.
static bool parse(Options* options, Error* error, const char* line) {
    char* argv[MAX_WORDS];
    int argc = 0;
    argv[argc++] = (char*)"train_gpt2";
    snprintf(words, sizeof words, "%s", line);
    char* rest = words;
    for (char* word; (word = strtok_r(rest, " ", &rest));) argv[argc++] = word;
    memset(error, 0, sizeof *error);
    return options_parse(options, argc, argv, error);
}

static void accepts(Options* options, const char* line) {
    Error error;
    EXPECT(parse(options, &error, line), "'%s' refused: %s", line, error.text);
}

// The line must be refused with exit code 2 in one line that holds all of `says` (separated by |).
static void refuses(const char* line, const char* says) {
    Options options;
    Error error;
    char parts[300], *rest = parts;
    EXPECT(!parse(&options, &error, line), "'%s' accepted", line);
    EXPECT(error.code == EXIT_USAGE, "'%s': code %d", line, error.code);
    EXPECT(!strchr(error.text, '\n'), "'%s': more than one line", line);
    snprintf(parts, sizeof parts, "%s", says);
    for (char* part; (part = strtok_r(rest, "|", &rest));)
        EXPECT(strstr(error.text, part), "'%s': no '%s' in: %s", line, part, error.text);
    test_report("refused: %s", line);
}

static void test_defaults(void) {
    Options o;
    accepts(&o, "");
    EXPECT(o.micro_batch == 4 && o.seq_len == 0 && o.total_batch_tokens == 0, "batch");
    EXPECT(o.max_steps == -1 && o.schedule == SCHEDULE_COSINE && o.lr == 3e-4, "length, schedule");
    EXPECT(o.warmup_steps == 0 && o.final_lr_frac == 1 && o.weight_decay == 0, "schedule");
    EXPECT(o.val_every == 20 && o.val_max_batches == 20 && o.sample_every == 20, "every");
    EXPECT(o.sample_tokens == 64 && o.hellaswag == 0 && o.save_every == 0, "every");
    EXPECT(o.keep_checkpoints == 0 && o.milestone_every == 0 && o.resume == 0, "checkpoints");
    EXPECT(o.zero_stage == 0 && o.overfit_batch == 0, "stage");
    EXPECT(o.skip_loss_z == 0 && o.skip_grad_z == 0 && o.grad_clip == 1, "skips");
    EXPECT(o.beta1 == 0.9 && o.beta2 == 0.95 && o.adam_eps == 1e-8 && o.seed == 1337, "AdamW");
    EXPECT(strcmp(o.on_nan, "stop") == 0 && o.max_skips == 10 && o.comm_timeout == 120, "faults");
    EXPECT(strcmp(o.accum_dtype, "fp32") == 0 && o.temperature == 1 && o.top_k == 0, "rest");
    EXPECT(strcmp(o.train_data, DEFAULT_TRAIN_DATA) == 0, "train data %s", o.train_data);
    EXPECT(strcmp(o.val_data, DEFAULT_VAL_DATA) == 0, "validation data %s", o.val_data);
    EXPECT(!o.output_dir && !o.model, "nothing is written, the model is open");
    accepts(&o, "-i x.bin");
    EXPECT(!o.val_data, "-i without -j: no validation");
    accepts(&o, "-j v.bin");
    EXPECT(strcmp(o.train_data, DEFAULT_TRAIN_DATA) == 0 && strcmp(o.val_data, "v.bin") == 0, "-j");
    test_report("defaults");
}

static void test_forms(void) {
    Options o;
    accepts(&o, "-b 8 --seq-len 32 --total-batch-tokens=512 -x -1 -n -1 -m -1 -b 2 --plan -z all");
    EXPECT(o.micro_batch == 2, "the last wins: %d", o.micro_batch);
    EXPECT(o.seq_len == 32 && o.total_batch_tokens == 512 && o.max_steps == -1, "long forms");
    EXPECT(o.zero_stage == ZERO_STAGE_ALL && o.plan, "-z all");
    EXPECT(option_given(&o, "--micro-batch") && !option_given(&o, "--lr"), "given");
    accepts(&o,
            "-l 6e-4 -c 0.1 -k wsd --lr-batch 1024 --lr-scale=sqrt --seed 18446744073709551615");
    EXPECT(o.lr == 6e-4 && o.weight_decay == 0.1 && o.schedule == SCHEDULE_WSD, "numbers");
    EXPECT(o.seed == UINT64_MAX && o.lr_batch_tokens == 1024, "seed");
    accepts(&o, "--prompt -b --top-k 3"); // a prompt may look like an option
    EXPECT(strcmp(o.prompt, "-b") == 0 && o.top_k == 3, "prompt");
    // A recipe of llm.c for one node.
    accepts(&o, "-i a_*.bin -j b_*.bin -o out -v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 524288 "
                "-r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -y 1 -e d12 -pi mpi -w 1");
    EXPECT(o.hellaswag == 1 && o.resume == 1 && o.save_every == 5000, "recipe");
    accepts(&o, "-f 0 -ge 1 -lg -1 -sl 7.0 -sg 7.0 -nk 5 -nm 50000 -a 1");
    EXPECT(o.skip_loss_z == 7 && o.keep_checkpoints == 5 && o.milestone_every == 50000, "recipe 2");
    test_report("forms of options");
}

static void test_refusals(void) {
    refuses("-b", "-b needs a value");
    refuses("-b 0", "-b 0|1 to");
    refuses("-v 9999999999", "-v 9999999999|0 to 2147483647");
    refuses("-b x", "-b x|whole number");
    refuses("-b 1e3", "-b 1e3|whole number");
    refuses("-d 99999999999999999999", "-d|whole number");
    refuses("--micro-batch=", "--micro-batch|needs a value");
    refuses("-l nan", "-l nan");
    refuses("-l inf", "-l inf");
    refuses("-l -1", "-l -1|0 or more");
    refuses("-l 0x10", "-l 0x10");
    refuses("-q 1.5", "-q 1.5|0 to 1");
    refuses("--beta2 1", "--beta2 1");
    refuses("-k cosin", "-k cosin|cosine|linear|constant|wsd");
    refuses("--reduce slow", "exact|fast");
    refuses("-z 4", "-z 4|0, 1, 2, 3");
    refuses("-z all", "-z all|--plan");
    refuses("-x -2", "-x -2");
    refuses("--micro-batc 3", "--micro-batc|--micro-batch");
    refuses("-zz 3", "-zz|--help");
    refuses("--seeed=3", "--seeed|--seed");
    refuses("-seed 3", "-seed|--seed");
    refuses("stray", "stray");
    refuses("--plan=1", "--plan takes no value");
    refuses("-i -j x", "-i needs a value|-j");
    refuses("-nk 1", "-nk 1|2");
    refuses("-y 1", "-y 1|-o");
    refuses("-y 2 -o out", "-y 2");
    refuses("-y 1 -o out --prompt a", "-y 1|prompt|-e");
    refuses("--json", "--json|--plan");
    refuses("--ranks 4", "--ranks|mpirun -np 4");
    refuses("--prompt a --prompt-tokens 1", "--prompt-tokens");
    refuses("--lr-scale sqrt", "--lr-batch");
    refuses("-pi tcp", "-pi tcp|mpirun|srun");
    refuses("-pi fs", "-pi fs|mpirun|srun");
    refuses("-pn 8", "-pn|mpirun");
    refuses("-pr 0", "-pr|mpirun");
    refuses("-pg 8", "-pg|mpirun");
    refuses("-ps 10.0.0.1", "-ps|mpirun");
    refuses("-pf /x", "-pf|mpirun");
    refuses("-w 0", "-w 0|fp32");
    refuses("--seed -1", "--seed -1");
}

static void test_resolve(void) {
    const GPT2Config model = {.L = 2, .NH = 4, .C = 64, .V = 257, .T = 2048};
    const GPT2Config small = {.L = 2, .NH = 4, .C = 64, .V = 257, .T = 64};
    Options o;
    Error error = {0};
    accepts(&o, "");
    EXPECT(options_resolve(&o, &model, 3, "cpu", &error), "%s", error.text);
    EXPECT(o.seq_len == 1024 && o.total_batch_tokens == 4 * 1024 * 3, "derived batch");
    EXPECT(o.grad_accum_steps == 1 && o.recompute == 0, "derived");
    EXPECT(strcmp(o.reduce, "exact") == 0, "reduce %s", o.reduce);
    accepts(&o, "-b 2 -d 1024");
    EXPECT(options_resolve(&o, &small, 2, "cuda", &error), "%s", error.text);
    EXPECT(o.seq_len == 64 && o.grad_accum_steps == 4 && o.recompute == 1, "derived on CUDA");
    EXPECT(strcmp(o.reduce, "fast") == 0, "reduce %s", o.reduce);

    accepts(&o, "-t 65");
    EXPECT(!options_resolve(&o, &small, 1, "cpu", &error) && strstr(error.text, "65") &&
               strstr(error.text, "64"),
           "above T: %s", error.text);
    error.code = 0;
    accepts(&o, "-b 4 -t 32 -d 1000");
    EXPECT(!options_resolve(&o, &small, 2, "cpu", &error) && strstr(error.text, "768 or 1024"),
           "does not divide: %s", error.text);
    error.code = 0;
    accepts(&o, "-b 4 -t 32 -d 100");
    EXPECT(!options_resolve(&o, &small, 2, "cpu", &error) && strstr(error.text, "256 or 512"),
           "less than one micro-step: %s", error.text);
    EXPECT(!strstr(error.text, "or -b"), "32 tokens of 2 ranks do not divide 100: %s", error.text);
    error.code = 0;
    accepts(&o, "-b 4 -t 32 -d 128");
    EXPECT(!options_resolve(&o, &small, 2, "cpu", &error) &&
               strstr(error.text, "256 or 512; or -b 2"),
           "a smaller batch would do: %s", error.text);
    error.code = 0;
    accepts(&o, "-b 1048576 -t 2048");
    EXPECT(!options_resolve(&o, &model, 2, "cpu", &error) &&
               strstr(error.text, "2147483648 tokens, expected at most 2147483647"),
           "tokens of a micro-batch that an int does not hold: %s", error.text);
    test_report("what follows from model, ranks and backend");

    accepts(&o, "-l 1e-3 --lr-batch 1000 --lr-scale sqrt");
    o.total_batch_tokens = 4000;
    EXPECT(options_scaled_lr(&o) == 2e-3, "sqrt: %g", options_scaled_lr(&o));
    accepts(&o, "-l 1e-3 --lr-batch 1000");
    o.total_batch_tokens = 4000;
    EXPECT(options_scaled_lr(&o) == 4e-3, "linear: %g", options_scaled_lr(&o));
    accepts(&o, "-l 1e-3");
    EXPECT(options_scaled_lr(&o) == 1e-3, "none: %g", options_scaled_lr(&o));
    test_report("learning rate scaled to the batch");
}

int main(void) {
    test_defaults();
    test_forms();
    test_refusals();
    test_resolve();
    return test_finish();
}
