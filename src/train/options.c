// train/options.c - the table of options and what reads it.
//
// One row per option: names, type, default, range and the line of --help. Defaults pass through the
// same parser as the command line, so that a row cannot disagree with itself.
#include "train/options.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "train/schedule.h"

// ---- the table ----------------------------------------------------------------------------------

typedef enum {
    SECTION, // a heading of --help
    TEXT,
    INT,
    LONG,
    REAL,
    SEED,     // uint64_t
    CHOICE,   // text out of `choices`, kept as text
    SCHEDULE, // ScheduleKind
    STAGE,    // 0..3 or "all"
    FLAG,     // takes no value
    ACCEPTED, // for recipes of llm.c: only the value in `choices` is taken, without effect
    REFUSED,  // for recipes of llm.c: no value is
} OptionType;

typedef struct {
    const char *short_name, *name; // "-b", "--micro-batch"; short_name NULL: none
    OptionType type;
    size_t field;              // offset in Options
    const char* default_value; // NULL: zero, or decided by options_resolve
    double min, max;           // of INT, LONG and REAL that are given
    const char* choices;       // "a|b|c" of CHOICE and SCHEDULE; what TEXT is
    const char* help; // of ACCEPTED and REFUSED, which are not listed: why, and the way out
} Option;

#define FIELD(name) offsetof(Options, name)
#define COUNT_MAX   2147483647.0
#define WHOLE_MAX   9007199254740992.0 // 2^53: exact in JSON
#define REAL_MAX    1e300

#define USE_LAUNCHER                                                                               \
    "ranks come from the launcher: mpirun -np 8 ./train_gpt2cu ..., or srun -n 8 ./train_gpt2cu "  \
    "..."

// clang-format off
static const Option TABLE[] = {
    {NULL, "Data and output", SECTION, 0, NULL, 0, 0, NULL, NULL},
    {"-i", "--train-data", TEXT, FIELD(train_data), NULL, 0, 0, "GLOB",
     "training shards: path or glob of .bin or .txt (tiny Shakespeare)"},
    {"-j", "--val-data", TEXT, FIELD(val_data), NULL, 0, 0, "GLOB",
     "validation shards (with -i and without -j: no validation)"},
    {"-o", "--output-dir", TEXT, FIELD(output_dir), NULL, 0, 0, "DIR",
     "folder of log.jsonl and checkpoints (without: nothing is written)"},
    {"-e", "--model", TEXT, FIELD(model), NULL, 0, 0, "MODEL",
     "dN, gpt2:dN, gpt3:cN, gpt2-xl, L=2,NH=4,C=64[,V=257][,T=128], or a model folder or file "
     "(" DEFAULT_MODEL ")"},
    {NULL, "--tokenizer", TEXT, FIELD(tokenizer), NULL, 0, 0, "FILE",
     "gpt2_tokenizer.bin for samples (beside the data, then here)"},

    {NULL, "Batch and length of the run", SECTION, 0, NULL, 0, 0, NULL, NULL},
    {"-b", "--micro-batch", INT, FIELD(micro_batch), "4", 1, 1 << 20, NULL,
     "sequences of one rank in one micro-step"},
    {"-t", "--seq-len", INT, FIELD(seq_len), NULL, 1, 1 << 20, NULL,
     "tokens of a sequence (the smaller of 1024 and the model's T)"},
    {"-d", "--total-batch-tokens", LONG, FIELD(total_batch_tokens), NULL, 1, WHOLE_MAX, NULL,
     "tokens of one step over all ranks (B * T * ranks)"},
    {"-x", "--max-steps", LONG, FIELD(max_steps), "-1", -1, WHOLE_MAX, NULL,
     "the last step, where the schedule ends; -1: one epoch"},
    {NULL, "--stop-at", LONG, FIELD(stop_at), NULL, 1, WHOLE_MAX, NULL,
     "stop after this step with a checkpoint; the schedule still ends at -x"},
    {"-a", "--overfit-batch", INT, FIELD(overfit_batch), "0", 0, 1, NULL,
     "1: every step takes the first batch"},
    {NULL, "--seed", SEED, FIELD(seed), "1337", 0, 0, NULL,
     "of weights, data order and sampling"},

    {NULL, "Optimizer", SECTION, 0, NULL, 0, 0, NULL, NULL},
    {"-l", "--lr", REAL, FIELD(lr), "3e-4", 0, REAL_MAX, NULL, "peak learning rate"},
    {"-k", "--schedule", SCHEDULE, FIELD(schedule), "cosine", 0, 0, "cosine|linear|constant|wsd",
     "of the learning rate"},
    {"-u", "--warmup-steps", LONG, FIELD(warmup_steps), "0", 0, WHOLE_MAX, NULL,
     "steps in which the learning rate rises to its peak"},
    {"-q", "--final-lr-frac", REAL, FIELD(final_lr_frac), "1", 0, 1, NULL,
     "last learning rate as a fraction of the peak"},
    {"-c", "--weight-decay", REAL, FIELD(weight_decay), "0", 0, REAL_MAX, NULL,
     "decoupled, on matrices only"},
    {NULL, "--lr-batch", LONG, FIELD(lr_batch_tokens), NULL, 1, WHOLE_MAX, NULL,
     "the total batch in tokens that -l is meant for; -l is scaled to the run's"},
    {NULL, "--lr-scale", CHOICE, FIELD(lr_scale), "linear", 0, 0, "linear|sqrt",
     "how --lr-batch scales"},
    {NULL, "--grad-clip", REAL, FIELD(grad_clip), "1", 0, REAL_MAX, NULL,
     "largest gradient norm; 0: off"},
    {NULL, "--beta1", REAL, FIELD(beta1), "0.9", 0, 0.9999999, NULL, "of AdamW"},
    {NULL, "--beta2", REAL, FIELD(beta2), "0.95", 0, 0.9999999, NULL, "of AdamW"},
    {NULL, "--adam-eps", REAL, FIELD(adam_eps), "1e-8", 1e-30, 1, NULL, "of AdamW"},
    {"-sl", "--skip-loss-z", REAL, FIELD(skip_loss_z), "0", 0, REAL_MAX, NULL,
     "skip updates whose loss lies this many deviations out; 0: off"},
    {"-sg", "--skip-grad-z", REAL, FIELD(skip_grad_z), "0", 0, REAL_MAX, NULL,
     "the same for the gradient norm"},
    {NULL, "--on-nan", CHOICE, FIELD(on_nan), "stop", 0, 0, "stop|skip",
     "what a step with numbers that are not finite does"},
    {NULL, "--max-skips", INT, FIELD(max_skips), "10", 1, COUNT_MAX, NULL,
     "so many such steps in a row end the run"},

    {NULL, "Validation, samples, checkpoints (every N steps; 0: off)", SECTION, 0, NULL, 0, 0, NULL,
     NULL},
    {"-v", "--val-every", INT, FIELD(val_every), "20", 0, COUNT_MAX, NULL, "validation"},
    {"-m", "--val-max-batches", INT, FIELD(val_max_batches), "20", -1, COUNT_MAX, NULL,
     "total batches that it covers; -1: all of -j"},
    {"-s", "--sample-every", INT, FIELD(sample_every), "20", 0, COUNT_MAX, NULL,
     "a sample of text"},
    {"-g", "--sample-tokens", INT, FIELD(sample_tokens), "64", 1, COUNT_MAX, NULL,
     "tokens of a sample and after a prompt"},
    {"-h", "--hellaswag", INT, FIELD(hellaswag), "0", 0, 1, NULL,
     "1: HellaSwag accuracy together with validation"},
    {"-n", "--save-every", INT, FIELD(save_every), "0", -1, COUNT_MAX, NULL,
     "checkpoint; at the end in any case, unless -1: never"},
    {"-nk", "--keep-checkpoints", INT, FIELD(keep_checkpoints), "0", 0, COUNT_MAX, NULL,
     "newest checkpoints to keep, 2 or more; 0: all"},
    {"-nm", "--milestone-every", INT, FIELD(milestone_every), "0", 0, COUNT_MAX, NULL,
     "never delete checkpoints of these steps"},
    {"-y", "--resume", INT, FIELD(resume), "0", 0, 1, NULL,
     "1: go on from the newest checkpoint in -o"},
    {NULL, "--overwrite", FLAG, FIELD(overwrite), NULL, 0, 0, NULL,
     "start anew in a folder that holds checkpoints"},
    {NULL, "--allow-new-data", FLAG, FIELD(allow_new_data), NULL, 0, 0, NULL,
     "resume on other data, from the start of its order"},

    {NULL, "Memory, ranks, machine", SECTION, 0, NULL, 0, 0, NULL, NULL},
    {"-z", "--zero-stage", STAGE, FIELD(zero_stage), "0", 0, 3, NULL,
     "what is sharded: 1 optimizer state, 2 and gradients, 3 and weights; all: with --plan"},
    {"-r", "--recompute", INT, FIELD(recompute), NULL, 0, 3, NULL,
     "in backward: 0 nothing, 1 GELU, 2 and LayerNorm, 3 the block (CPU 0, CUDA 1)"},
    {NULL, "--reduce", CHOICE, FIELD(reduce), NULL, 0, 0, "exact|fast",
     "exact: the same bits for every stage and number of ranks (CPU); fast (CUDA)"},
    {NULL, "--accum-dtype", CHOICE, FIELD(accum_dtype), "fp32", 0, 0, "fp32|same",
     "type in which gradients add up; same: that of the weights"},
    {NULL, "--comm", CHOICE, FIELD(comm), "auto", 0, 0, "auto|nccl|mpi|messages",
     "transport: CUDA NCCL, or MPI; CPU MPI with shared memory, or messages only"},
    {NULL, "--comm-timeout", INT, FIELD(comm_timeout), "120", 1, 86400, NULL,
     "seconds before a rank that does not come ends the run"},
    {NULL, "--threads", INT, FIELD(threads), NULL, 1, 4096, NULL,
     "CPU threads of a rank (OMP_NUM_THREADS, else cores / ranks)"},
    {NULL, "--link-mb-s", REAL, FIELD(link_mb_s), NULL, 1e-3, REAL_MAX, NULL,
     "slow the CPU transport down to MB/s, to feel a slow network"},
    {NULL, "--peak-tflops", REAL, FIELD(peak_tflops), NULL, 1e-6, REAL_MAX, NULL,
     "peak of one rank's matrix products, for mfu and --link-gb-s"},
    {"-f", "--tf32", INT, FIELD(tf32), "1", 0, 1, NULL, "CUDA, fp32: products in TF32"},
    {"-ge", "--gelu-fusion", INT, FIELD(gelu_fusion), "-1", -1, 2, NULL,
     "CUDA: GELU inside matrix products, 1 forward, 2 and backward, -1 as the GPU likes it"},
    {"-lg", "--log-gpu-every", INT, FIELD(log_gpu_every), "0", -1, COUNT_MAX, NULL,
     "CUDA: a line on clock, power and temperature every N steps"},

    {NULL, "Generation, instead of training", SECTION, 0, NULL, 0, 0, NULL, NULL},
    {NULL, "--prompt", TEXT, FIELD(prompt), NULL, 0, 0, "TEXT",
     "text that the model of -e goes on with"},
    {NULL, "--prompt-tokens", TEXT, FIELD(prompt_tokens), NULL, 0, 0, "IDS",
     "the same as token ids: ID,ID,..."},
    {NULL, "--temperature", REAL, FIELD(temperature), "1", 0, 1e6, NULL, "0: the likeliest token"},
    {NULL, "--top-k", INT, FIELD(top_k), "0", 0, COUNT_MAX, NULL,
     "draw from the k likeliest tokens; 0: from all"},

    {NULL, "Questions, without training", SECTION, 0, NULL, 0, 0, NULL, NULL},
    {NULL, "--plan", FLAG, FIELD(plan), NULL, 0, 0, NULL,
     "memory and traffic of a rank; -e also takes a parameter count (7.5B)"},
    {NULL, "--ranks", INT, FIELD(plan_ranks), NULL, 1, 1 << 20, NULL,
     "plan for so many ranks, without a launcher"},
    {NULL, "--memory-gb", REAL, FIELD(memory_gb), NULL, 1e-6, REAL_MAX, NULL,
     "plan: name the stages that fit into so many GB (1e9) a rank"},
    {NULL, "--link-gb-s", REAL, FIELD(link_gb_s), NULL, 1e-6, REAL_MAX, NULL,
     "plan: time of communication at so many GB/s a rank"},
    {NULL, "--json", FLAG, FIELD(json), NULL, 0, 0, NULL, "plan as one JSON object"},
    {NULL, "--dry-run", FLAG, FIELD(dry_run), NULL, 0, 0, NULL,
     "check everything, print start table and plan, allocate nothing"},
    {NULL, "--check-data", FLAG, FIELD(check_data), NULL, 0, 0, NULL,
     "check every token of -i and -j"},
    {NULL, "--hash", TEXT, FIELD(hash_file), NULL, 0, 0, "FILE", "params_hash of a model file"},
    {NULL, "--version", FLAG, FIELD(version), NULL, 0, 0, NULL, "what this program was built from"},
    {NULL, "--help", FLAG, FIELD(help), NULL, 0, 0, NULL, "this text"},

    {"-pi", "--init-method", ACCEPTED, 0, NULL, 0, 0, "mpi", USE_LAUNCHER},
    {"-w", "--master-weights", ACCEPTED, 0, NULL, 0, 0, "1",
     "master weights are always fp32; leave it out"},
    {"-pn", "--num-processes", REFUSED, 0, NULL, 0, 0, NULL, USE_LAUNCHER},
    {"-pr", "--process-rank", REFUSED, 0, NULL, 0, 0, NULL, USE_LAUNCHER},
    {"-pg", "--gpus-per-node", REFUSED, 0, NULL, 0, 0, NULL, USE_LAUNCHER},
    {"-ps", "--server-ip", REFUSED, 0, NULL, 0, 0, NULL, USE_LAUNCHER},
    {"-pf", "--fs-path", REFUSED, 0, NULL, 0, 0, NULL, USE_LAUNCHER},
};
// clang-format on

enum { TABLE_SIZE = sizeof TABLE / sizeof TABLE[0] };
_Static_assert((int)TABLE_SIZE <= (int)OPTIONS_MAX, "OPTIONS_MAX holds a flag for each row");

static bool is_listed(const Option* option) {
    return option->type != SECTION && option->type != ACCEPTED && option->type != REFUSED;
}

// The row with that short or long name (length characters of `name`), or NULL.
static const Option* find_option(const char* name, size_t length) {
    for (int i = 0; i < TABLE_SIZE; i++) {
        const Option* option = &TABLE[i];
        if (option->type == SECTION) continue;
        if (strlen(option->name) == length && memcmp(option->name, name, length) == 0)
            return option;
        if (option->short_name && strlen(option->short_name) == length &&
            memcmp(option->short_name, name, length) == 0)
            return option;
    }
    return NULL;
}

bool option_given(const Options* options, const char* long_name) {
    const Option* option = find_option(long_name, strlen(long_name));
    CHECK(option, "no option is called %s", long_name);
    return options->given[option - TABLE] != NULL;
}

// ---- values -------------------------------------------------------------------------------------

static bool is_choice(const char* choices, const char* text) {
    size_t length = strlen(text);
    for (const char* c = choices; c;) {
        const char* bar = strchr(c, '|');
        size_t n = bar ? (size_t)(bar - c) : strlen(c);
        if (n == length && memcmp(c, text, n) == 0) return true;
        c = bar ? bar + 1 : NULL;
    }
    return false;
}

static bool starts_number(const char* text) {
    return *text == '-' || *text == '+' || *text == '.' || (*text >= '0' && *text <= '9');
}

// Whole text as a number; hexadecimal, "inf" and "nan" are not.
static bool parse_whole(const char* text, long* value) {
    char* end;
    errno = 0;
    *value = strtol(text, &end, 10);
    return starts_number(text) && end != text && *end == '\0' && errno == 0;
}
static bool parse_real(const char* text, double* value) {
    char* end;
    *value = strtod(text, &end);
    return starts_number(text) && end != text && *end == '\0' && isfinite(*value) &&
           !strpbrk(text, "xX");
}
static bool parse_seed(const char* text, uint64_t* value) {
    char* end;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0;
}

static bool in_range(const Option* option, const char* as, double value, const char* text,
                     Error* error) {
    if (value >= option->min && value <= option->max) return true;
    if (value < option->min && option->max >= COUNT_MAX)
        return error_set(error, EXIT_USAGE, "%s %s is out of range, expected %.15g or more", as,
                         text, option->min);
    return error_set(error, EXIT_USAGE, "%s %s is out of range, expected %.15g to %.15g", as, text,
                     option->min, option->max);
}

// Checks `text` and stores it in its field. `as` is the name that was used, for messages; NULL for
// a default, which need not be in range.
static bool set_value(Options* options, const Option* option, const char* as, const char* text,
                      Error* error) {
    void* field = (char*)options + option->field;
    long whole = 0;
    double real = 0;
    switch (option->type) {
    case TEXT:
        *(const char**)field = text;
        return true;
    case INT:
    case LONG:
        if (!parse_whole(text, &whole))
            return error_set(error, EXIT_USAGE, "%s %s is not a whole number", as, text);
        if (as && !in_range(option, as, (double)whole, text, error)) return false;
        if (option->type == INT)
            *(int*)field = (int)whole;
        else
            *(long*)field = whole;
        return true;
    case REAL:
        if (!parse_real(text, &real))
            return error_set(error, EXIT_USAGE, "%s %s is not a number", as, text);
        if (as && !in_range(option, as, real, text, error)) return false;
        *(double*)field = real;
        return true;
    case SEED:
        if (!parse_seed(text, field))
            return error_set(error, EXIT_USAGE, "%s %s is not a whole number from 0 to 2^64 - 1",
                             as, text);
        return true;
    case CHOICE:
    case SCHEDULE:
        if (!is_choice(option->choices, text))
            return error_set(error, EXIT_USAGE, "%s %s is unknown, expected %s", as, text,
                             option->choices);
        if (option->type == CHOICE)
            *(const char**)field = text;
        else
            schedule_from_name(text, field);
        return true;
    case STAGE:
        if (strcmp(text, "all") == 0) {
            *(int*)field = ZERO_STAGE_ALL;
            return true;
        }
        if (!parse_whole(text, &whole) || whole < 0 || whole > 3)
            return error_set(error, EXIT_USAGE, "%s %s is unknown, expected 0, 1, 2, 3 or all", as,
                             text);
        *(int*)field = (int)whole;
        return true;
    case ACCEPTED:
        if (strcmp(text, option->choices) == 0) return true;
        return error_set(error, EXIT_USAGE, "%s %s is refused, %s", as, text, option->help);
    case REFUSED:
        return error_set(error, EXIT_USAGE, "%s is refused, %s", as, option->help);
    case FLAG:
        *(bool*)field = true;
        return true;
    case SECTION:
        break;
    }
    DIE("row %s has no type", option->name);
}

// ---- the command line ---------------------------------------------------------------------------

// Edits that turn a into b (Levenshtein 1966), for names.
static int edit_distance(const char* a, const char* b) {
    enum { LONGEST = 40 };
    int row[LONGEST + 1];
    int na = (int)strlen(a), nb = (int)strlen(b);
    if (na > LONGEST || nb > LONGEST) return LONGEST;
    for (int j = 0; j <= nb; j++) row[j] = j;
    for (int i = 1; i <= na; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[nb];
}

static bool unknown_option(const char* argument, size_t length, Error* error) {
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)(length < 60 ? length : 60), argument);
    const char* nearest = NULL;
    int least = ((int)strlen(name) + 1) / 2;
    for (int i = 0; i < TABLE_SIZE; i++) {
        if (!is_listed(&TABLE[i])) continue;
        const char* names[2] = {TABLE[i].name, TABLE[i].short_name};
        for (int n = 0; n < 2; n++) {
            int distance = names[n] ? edit_distance(name, names[n]) : least;
            if (distance < least) least = distance, nearest = names[n];
        }
    }
    if (nearest)
        return error_set(error, EXIT_USAGE, "unknown option %s, did you mean %s? --help lists all",
                         name, nearest);
    return error_set(error, EXIT_USAGE, "unknown option %s, --help lists all", name);
}

static bool parse_arguments(Options* options, int argc, char** argv, Error* error) {
    for (int i = 1; i < argc; i++) {
        const char* argument = argv[i];
        if (argument[0] != '-' || argument[1] == '\0')
            return error_set(error, EXIT_USAGE,
                             "unexpected argument '%s', options begin with - or --", argument);
        const char* equals = strncmp(argument, "--", 2) == 0 ? strchr(argument, '=') : NULL;
        size_t length = equals ? (size_t)(equals - argument) : strlen(argument);
        const Option* option = find_option(argument, length);
        if (!option) return unknown_option(argument, length, error);

        char as[64];
        snprintf(as, sizeof as, "%.*s", (int)length, argument);
        const char* value = equals ? equals + 1 : NULL;
        if (option->type == FLAG) {
            if (value) return error_set(error, EXIT_USAGE, "%s takes no value, got %s", as, value);
        } else if (!value) {
            if (i + 1 == argc) return error_set(error, EXIT_USAGE, "%s needs a value", as);
            value = argv[++i];
            bool is_prompt = option->field == FIELD(prompt);
            if (!is_prompt && *value == '-' && find_option(value, strlen(value)))
                return error_set(error, EXIT_USAGE, "%s needs a value, got the option %s", as,
                                 value);
        }
        if (value && !*value)
            return error_set(error, EXIT_USAGE, "%s needs a value, got empty text", as);
        if (!set_value(options, option, as, value, error)) return false;
        options->given[option - TABLE] = value ? value : "";
    }
    return true;
}

// What options forbid each other.
static bool check_together(const Options* o, Error* error) {
    if (o->keep_checkpoints == 1)
        return error_set(
            error, EXIT_USAGE,
            "-nk 1 is refused, a run that survives a crash while saving needs 2 or more");
    if (o->resume && !o->output_dir)
        return error_set(error, EXIT_USAGE, "-y 1 needs -o, the folder to resume from");
    if (o->resume && wants_prompt(o))
        return error_set(error, EXIT_USAGE,
                         "-y 1 goes on with training, a prompt takes its model from -e DIR");
    if (o->resume && o->overwrite)
        return error_set(error, EXIT_USAGE, "-y 1 and --overwrite exclude each other");
    if (o->zero_stage == ZERO_STAGE_ALL && !o->plan)
        return error_set(error, EXIT_USAGE,
                         "-z all is for --plan, a run has one stage: 0, 1, 2 or 3");
    if (o->json && !o->plan) return error_set(error, EXIT_USAGE, "--json is for --plan");
    if (o->plan_ranks && !o->plan && !o->dry_run)
        return error_set(error, EXIT_USAGE,
                         "--ranks is for --plan and --dry-run; a run takes its ranks from the "
                         "launcher: mpirun -np %d",
                         o->plan_ranks);
    if (o->check_data && (wants_prompt(o) || o->plan))
        return error_set(error, EXIT_USAGE,
                         "--check-data reads -i and -j, which --plan and a prompt do not");
    if (o->prompt && o->prompt_tokens)
        return error_set(error, EXIT_USAGE, "--prompt and --prompt-tokens exclude each other");
    if (option_given(o, "--lr-scale") && !o->lr_batch_tokens)
        return error_set(error, EXIT_USAGE,
                         "--lr-scale needs --lr-batch, the batch that -l is for");
    return true;
}

bool options_parse(Options* options, int argc, char** argv, Error* error) {
    memset(options, 0, sizeof *options);
    for (int i = 0; i < TABLE_SIZE; i++)
        if (TABLE[i].default_value) {
            bool ok = set_value(options, &TABLE[i], NULL, TABLE[i].default_value, error);
            CHECK(ok, "default of %s: %s", TABLE[i].name, error->text);
        }
    options->recompute = -1;
    if (!parse_arguments(options, argc, argv, error)) return false;
    if (options->help || options->version) return true;
    if (!options->train_data) {
        options->train_data = DEFAULT_TRAIN_DATA;
        if (!options->val_data) options->val_data = DEFAULT_VAL_DATA;
    }
    return check_together(options, error);
}

// ---- help ---------------------------------------------------------------------------------------

enum { HELP_COLUMN = 36, HELP_WIDTH = 100 };

static const char* placeholder(const Option* option) {
    switch (option->type) {
    case FLAG:
        return "";
    case INT:
    case LONG:
    case SEED:
    case STAGE:
        return "N";
    case REAL:
        return "X";
    default:
        return option->choices;
    }
}

// Prints words from HELP_COLUMN on, starting at `column` of the current line.
static void print_wrapped(const char* text, int column) {
    if (column >= HELP_COLUMN) printf("\n"), column = 0;
    printf("%*s", HELP_COLUMN - column, "");
    column = HELP_COLUMN;
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column + 1 + length > HELP_WIDTH) {
            printf("\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        }
        column += printf("%s%.*s", column == HELP_COLUMN ? "" : " ", length, text);
        text += length + (text[length] == ' ');
    }
    printf("\n");
}

void options_print_help(void) {
    printf("GPT-2 training on one CPU or GPU, or on many ranks with ZeRO stages 0 to 3.\n"
           "  ./train_gpt2 -i text.txt -e L=4,NH=4,C=128,T=128 -x 200 -o out\n"
           "  mpirun -np 8 ./train_gpt2cu -z 2 -e gpt2 -i 'train_*.bin' -j 'val_*.bin' -d 524288\n"
           "Defaults in parentheses. Short options take a value as in -b 8; long ones as in\n"
           "--micro-batch 8 or --micro-batch=8. The last of an option given twice counts.\n");
    for (int i = 0; i < TABLE_SIZE; i++) {
        const Option* option = &TABLE[i];
        if (option->type == SECTION) printf("\n%s\n", option->name);
        if (!is_listed(option)) continue;
        int column = printf("  %3s%c %s %s", option->short_name ? option->short_name : "",
                            option->short_name ? ',' : ' ', option->name, placeholder(option));
        char text[300];
        snprintf(text, sizeof text, option->default_value ? "%s (%s)" : "%s", option->help,
                 option->default_value);
        print_wrapped(text, column);
    }
    printf("\nExit codes: 0 finished, 1 internal error, 2 bad arguments or input, 3 stopped on "
           "numbers\n"
           "that are not finite, 4 file error, 5 communication failure or time-out.\n");
}

// A space and the text, in quotes where a shell would take it for more than text.
static void print_quoted(const char* text) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_+-.,:=/";
    bool quotes = text[strspn(text, plain)] != '\0';
    fputs(quotes ? " '" : " ", stdout);
    for (; *text; text++) *text == '\'' ? fputs("'\\''", stdout) : putchar(*text);
    if (quotes) putchar('\'');
}

void options_print_given(const Options* options) {
    for (int i = 0; TABLE[i].field != FIELD(plan) || TABLE[i].type != FLAG; i++) {
        const Option* option = &TABLE[i];
        const char* text = options->given[i];
        if (!text || option->type == STAGE) continue;
        printf(" %s", option->short_name ? option->short_name : option->name);
        if (option->type != FLAG) print_quoted(text);
    }
}

// ---- what follows from model, ranks and backend -------------------------------------------------

static bool resolve_batch(Options* o, int world_size, Error* error) {
    long rank_tokens = (long)o->micro_batch * o->seq_len;
    if (rank_tokens > INT_MAX)
        return error_set(error, EXIT_USAGE, "-b %d x -t %d = %ld tokens, expected at most %d",
                         o->micro_batch, o->seq_len, rank_tokens, INT_MAX);
    long tokens = rank_tokens * world_size;
    if (!o->total_batch_tokens) o->total_batch_tokens = tokens;
    long below = o->total_batch_tokens / tokens * tokens;
    if (below != o->total_batch_tokens) {
        char nearest[96], smaller[24] = "";
        long of_one_each = (long)o->seq_len * world_size; // with -b 1
        if (below == 0 && o->total_batch_tokens % of_one_each == 0)
            snprintf(smaller, sizeof smaller, "; or -b %ld", o->total_batch_tokens / of_one_each);
        if (below == 0) below = tokens;
        snprintf(nearest, sizeof nearest, "%ld or %ld%s", below, below + tokens, smaller);
        return error_set(error, EXIT_USAGE,
                         "-d %ld is not a multiple of B * T * ranks = %d * %d * %d = %ld, the "
                         "nearest that are: %s",
                         o->total_batch_tokens, o->micro_batch, o->seq_len, world_size, tokens,
                         nearest);
    }
    long steps = o->total_batch_tokens / tokens;
    if (steps > 1 << 20)
        return error_set(error, EXIT_USAGE,
                         "-d %ld takes %ld micro-steps, expected at most %d; use "
                         "a larger -b or more ranks",
                         o->total_batch_tokens, steps, 1 << 20);
    o->grad_accum_steps = (int)steps;
    return true;
}

bool options_resolve(Options* options, const GPT2Config* model, int world_size, const char* backend,
                     Error* error) {
    bool is_cuda = strcmp(backend, "cuda") == 0;
    if (!options->seq_len) options->seq_len = model->T < 1024 ? model->T : 1024;
    if (options->seq_len > model->T)
        return error_set(error, EXIT_USAGE, "-t %d is above the model's T of %d", options->seq_len,
                         model->T);
    if (!resolve_batch(options, world_size, error)) return false;
    if (options->recompute < 0) options->recompute = is_cuda ? RECOMPUTE_GELU : RECOMPUTE_NONE;
    if (!options->reduce) options->reduce = is_cuda ? "fast" : "exact";
    static const char* const cuda_only[] = {"--tf32", "--gelu-fusion", "--log-gpu-every"};
    for (size_t i = 0; !is_cuda && i < sizeof cuda_only / sizeof cuda_only[0]; i++)
        if (option_given(options, cuda_only[i]))
            warn("%s is ignored, it is for CUDA and this is the CPU program", cuda_only[i]);
    return true;
}

double options_scaled_lr(const Options* options) {
    if (!options->lr_batch_tokens) return options->lr;
    return lr_for_batch(options->lr, options->lr_batch_tokens, options->total_batch_tokens,
                        options->lr_scale);
}

CommOptions options_comm(const Options* options) {
    const bool trains = !(options->help || options->version || options->hash_file ||
                          options->plan || options->dry_run || options->check_data);
    CommOptions comm = {options->comm, options->link_mb_s, !trains};
    return comm;
}

DeviceOptions options_device(const Options* options, int local_rank, int local_size) {
    DeviceOptions device = {0};
    device.local_rank = local_rank;
    device.local_size = local_size;
    device.threads = options->threads;
    return device;
}
