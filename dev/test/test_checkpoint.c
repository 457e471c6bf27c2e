// test_checkpoint.c - checkpoints on one rank: the files byte for byte, every way one can be
// damaged, every moment at which a save can be killed, disks that fill up, state and config.
//
// The sharding engine is replaced by plain arrays (struct Zero below), so that what is under test
// is the files alone. Whole runs on several ranks: test_resume.py.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/fault.h"
#include "core/rng.h"
#include "testing.h"
#include "train/checkpoint.h"
#include "train/model_file.h"
#include "train/signals.h"

static char root[64]; // a directory of our own

// ---- the engine and one rank, in plain arrays ---------------------------------------------------

struct Zero {
    const ParamTable* table;
    float* state[3]; // (num_params) each, by StateKind
    int published;
};

static float* place(Zero* zero, StateKind kind, int tensor, size_t first) {
    return zero->state[kind] + zero->table->tensors[tensor].canonical_offset + first;
}

void zero_read(Zero* zero, StateKind kind, int tensor, size_t first, size_t count, float* out) {
    CHECK(count <= ZERO_IO_ELEMS && first + count <= zero->table->tensors[tensor].elems, "range");
    memcpy(out, place(zero, kind, tensor, first), count * sizeof(float));
}

void zero_write(Zero* zero, StateKind kind, int tensor, size_t first, size_t count,
                const float* in) {
    CHECK(count <= ZERO_IO_ELEMS && first + count <= zero->table->tensors[tensor].elems, "range");
    memcpy(place(zero, kind, tensor, first), in, count * sizeof(float));
}

void zero_publish(Zero* zero) { zero->published++; }

static Comm* self;

static const GPT2Config config = {.L = 2, .NH = 2, .C = 8, .V = 11, .T = 6};
static ParamTable table;

static void zero_make(Zero* zero, uint64_t seed) {
    zero->table = &table;
    zero->published = 0;
    for (int k = 0; k < 3; k++) {
        zero->state[k] = checked_malloc(table.num_params * sizeof(float));
        for (size_t i = 0; i < table.num_params; i++) {
            zero->state[k][i] = (float)rng_normal(seed, (uint64_t)k, i);
        }
    }
}

static void zero_unmake(Zero* zero) {
    for (int k = 0; k < 3; k++) free(zero->state[k]);
}

static bool same_state(const Zero* a, const Zero* b) {
    for (int k = 0; k < 3; k++) {
        if (memcmp(a->state[k], b->state[k], table.num_params * sizeof(float)) != 0) return false;
    }
    return true;
}

// ---- files --------------------------------------------------------------------------------------

static char* in_root(char out[PATH_MAX], const char* name) {
    snprintf(out, PATH_MAX, "%s/%s", root, name);
    return out;
}

static char* read_whole(const char* name, size_t* length) {
    char path[PATH_MAX];
    FILE* f = fopen(in_root(path, name), "rb");
    if (!f) return NULL;
    char* bytes = checked_malloc(1 << 20);
    *length = fread(bytes, 1, (1 << 20) - 1, f);
    bytes[*length] = '\0';
    fclose(f);
    return bytes;
}

static void write_whole(const char* name, const void* bytes, size_t length) {
    char path[PATH_MAX];
    FILE* f = fopen(in_root(path, name), "wb");
    CHECK(f && fwrite(bytes, 1, length, f) == length && fclose(f) == 0, "cannot write %s", path);
}

static bool is_there(const char* name) {
    char path[PATH_MAX];
    struct stat info;
    return lstat(in_root(path, name), &info) == 0;
}

static void run_command(const char* command) {
    char text[2 * PATH_MAX];
    snprintf(text, sizeof(text), "cd %s && %s", root, command);
    CHECK(system(text) == 0, "failed: %s", text);
}

static int count_leftovers(void) {
    char path[PATH_MAX];
    DIR* dir = opendir(in_root(path, "out"));
    int n = 0;
    for (struct dirent* e; dir && (e = readdir(dir));) n += strncmp(e->d_name, ".step_", 6) == 0;
    if (dir) closedir(dir);
    return n;
}

// ---- a run --------------------------------------------------------------------------------------

static float io_buffer[64]; // far smaller than a tensor: many pieces
static char out_dir[PATH_MAX];
static DataFile data_files[] = {{"shard \"a\"\\0001.bin", 123456, 4000000000u}, {"b.bin", 2, 0}};

static Checkpoints make_checkpoints(int keep, int milestone_every) {
    Checkpoints c = {.out = out_dir,
                     .keep = keep,
                     .milestone_every = milestone_every,
                     .comm = self,
                     .table = &table,
                     .buffer = io_buffer,
                     .buffer_elems = sizeof(io_buffer) / sizeof(io_buffer[0])};
    return c;
}

static CheckpointState make_state(long step) {
    CheckpointState s = {.step = step,
                         .adam_t = step - 1,
                         .samples = (uint64_t)step * 16,
                         .seed = 18446744073709551615u,
                         .total_batch_tokens = 64,
                         .seq_len = 4,
                         .max_steps = 100,
                         .schedule = SCHEDULE_WSD,
                         .lr = 0.1 + 0.2,
                         .final_lr_frac = 1.0 / 3,
                         .warmup_steps = 7,
                         .weight_decay = 0.1,
                         .beta1 = 0.9,
                         .beta2 = 0.95,
                         .loss_scale = 65536,
                         .loss_scale_good_steps = 3,
                         .outlier_loss = {2, {1e-300, 2.5}},
                         .outlier_norm = {1, {-1.0 / 7}},
                         .model = config,
                         .data_files = data_files,
                         .num_data_files = 2};
    return s;
}

static bool same_outliers(const OutlierValues* a, const OutlierValues* b) {
    return a->count == b->count &&
           memcmp(a->values, b->values, (size_t)a->count * sizeof(double)) == 0;
}

static bool same_run(const CheckpointState* a, const CheckpointState* b) {
    bool same = a->step == b->step && a->adam_t == b->adam_t && a->samples == b->samples &&
                a->seed == b->seed && a->total_batch_tokens == b->total_batch_tokens &&
                a->seq_len == b->seq_len && a->max_steps == b->max_steps &&
                a->schedule == b->schedule && a->lr == b->lr &&
                a->final_lr_frac == b->final_lr_frac && a->warmup_steps == b->warmup_steps &&
                a->weight_decay == b->weight_decay && a->beta1 == b->beta1 &&
                a->beta2 == b->beta2 && a->loss_scale == b->loss_scale &&
                a->loss_scale_good_steps == b->loss_scale_good_steps &&
                same_outliers(&a->outlier_loss, &b->outlier_loss) &&
                same_outliers(&a->outlier_norm, &b->outlier_norm) &&
                memcmp(&a->model, &b->model, sizeof(a->model)) == 0 &&
                a->num_data_files == b->num_data_files;
    for (int i = 0; i < a->num_data_files && same; i++) {
        same = strcmp(a->data_files[i].name, b->data_files[i].name) == 0 &&
               a->data_files[i].bytes == b->data_files[i].bytes &&
               a->data_files[i].crc32 == b->data_files[i].crc32;
    }
    return same;
}

static bool save_step(long step, int keep, Zero* zero, Error* error) {
    Checkpoints checkpoints = make_checkpoints(keep, 0);
    CheckpointState state = make_state(step);
    CheckpointReport report;
    checkpoints.loaded = step - 1;
    bool ok = checkpoint_save(&checkpoints, &state, zero, &report, error);
    checkpoint_free(&checkpoints);
    return ok;
}

static bool open_out(const char* out, bool resume, bool overwrite, Error* error) {
    const Options options = {.output_dir = out, .resume = resume, .overwrite = overwrite};
    return checkpoint_open_out(&options, self, error);
}

// From here to the end, what is written to stderr goes into a file and then into `text`.
static int capture_begin(void) {
    char path[PATH_MAX];
    int kept = dup(2), fd = open(in_root(path, "warnings"), O_RDWR | O_CREAT | O_TRUNC, 0666);
    dup2(fd, 2);
    close(fd);
    return kept;
}

static void capture_end(int kept, char* text, size_t size) {
    fflush(stderr);
    ssize_t n = pread(2, text, size - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    dup2(kept, 2);
    close(kept);
}

// The step that a resumed run would start from, 0: none; and the warnings.
static long newest(char* text, size_t size) {
    char dir[PATH_MAX];
    CheckpointState state;
    Error error = {0};
    bool found;
    int kept = capture_begin();
    bool ok = checkpoint_find(out_dir, &state, dir, &found, self, &error);
    capture_end(kept, text, size);
    if (!EXPECT(ok, "%s", error.text) || !found) return 0;
    state_free(&state);
    return state.step;
}

static void fresh_out(void) { run_command("rm -rf out && mkdir out"); }

// ---- saving and loading -------------------------------------------------------------------------

static const char expected_config[] =
    "{\n  \"architectures\": [\n    \"GPT2LMHeadModel\"\n  ],\n  \"model_type\": \"gpt2\",\n"
    "  \"vocab_size\": 11,\n  \"n_positions\": 6,\n  \"n_ctx\": 6,\n  \"n_embd\": 8,\n"
    "  \"n_layer\": 2,\n  \"n_head\": 2,\n  \"n_inner\": null,\n"
    "  \"activation_function\": \"gelu_new\",\n  \"layer_norm_epsilon\": 1e-05,\n"
    "  \"initializer_range\": 0.02,\n  \"attn_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n"
    "  \"resid_pdrop\": 0.0,\n  \"scale_attn_weights\": true,\n  \"tie_word_embeddings\": true,\n"
    "  \"use_cache\": true,\n  \"bos_token_id\": 10,\n  \"eos_token_id\": 10,\n"
    "  \"torch_dtype\": \"float32\"\n}\n";

static void test_round_trip(void) {
    Zero written, read;
    zero_make(&written, 1);
    zero_make(&read, 2);
    Checkpoints checkpoints = make_checkpoints(0, 0);
    CheckpointState state = make_state(10), found_state;
    CheckpointReport report = {0};
    Error error = {0};
    char dir[PATH_MAX];
    bool found = false;
    fresh_out();
    EXPECT(checkpoint_save(&checkpoints, &state, &written, &report, &error), "%s", error.text);
    EXPECT(strcmp(report.name, "step_00000010") == 0, "%s", report.name);
    EXPECT(checkpoint_exists(&checkpoints, 10) && !checkpoint_exists(&checkpoints, 9), "exists");
    EXPECT(checkpoint_find(out_dir, &found_state, dir, &found, self, &error) && found, "%s",
           error.text);
    EXPECT(found && same_run(&state, &found_state), "the state differs");
    EXPECT(checkpoint_load(&checkpoints, dir, &read, &report, &error), "%s", error.text);
    EXPECT(same_state(&written, &read) && read.published == 1, "weights or moments differ");
    if (found) state_free(&found_state);
    checkpoint_free(&checkpoints);
    test_report("checkpoint saved and loaded, state and elements equal");

    size_t length, model_length, again_length, sum = 0;
    char* text = read_whole("out/step_00000010/config.json", &length);
    EXPECT(text && strcmp(text, expected_config) == 0, "%s", text ? text : "missing");
    free(text);
    char* model = read_whole("out/latest/model.safetensors", &model_length);
    size_t first = model ? model_length - table.num_params * sizeof(float) : 0;
    EXPECT(model && memcmp(model + first, written.state[0], model_length - first) == 0,
           "model.safetensors does not end with the elements in canonical order");
    EXPECT(model &&
               strncmp(model + 8, "{\"__metadata__\":{\"format\":\"pt\"},\"wte.weight\":", 45) == 0,
           "%.60s", model ? model + 8 : "");
    static const char* const names[] = {"config.json", "generation_config.json",
                                        "model.safetensors", "optimizer.safetensors", "state.json"};
    for (int i = 0; i < 5; i++) {
        char name[64];
        snprintf(name, sizeof(name), "out/latest/%s", names[i]);
        char* bytes = read_whole(name, &length);
        EXPECT(bytes != NULL, "%s is missing", name);
        sum += length;
        free(bytes);
    }
    EXPECT(sum > 0 && strcmp(report.name, "step_00000010") == 0, "%s", report.name);
    test_report("checkpoint files as documented");

    error = (Error){0};
    fresh_out();
    EXPECT(save_step(10, 0, &read, &error), "%s", error.text);
    char* again = read_whole("out/latest/model.safetensors", &again_length);
    EXPECT(again && again_length == model_length && memcmp(again, model, model_length) == 0,
           "load then save changes model.safetensors");
    free(again);
    free(model);
    test_report("checkpoint loaded and saved again: the same bytes");
    zero_unmake(&written);
    zero_unmake(&read);
}

static void test_keep(void) {
    Zero zero;
    zero_make(&zero, 3);
    Checkpoints checkpoints = make_checkpoints(2, 4);
    Error error = {0};
    CheckpointReport report;
    fresh_out();
    for (long step = 1; step <= 9; step++) {
        CheckpointState state = make_state(step);
        EXPECT(checkpoint_save(&checkpoints, &state, &zero, &report, &error), "%s", error.text);
    }
    for (long step = 1; step <= 9; step++) {
        bool expected = step >= 8 || step == 4;
        EXPECT(checkpoint_exists(&checkpoints, step) == expected, "step %ld", step);
    }
    EXPECT(count_leftovers() == 0, "%d temporary names", count_leftovers());
    char target[64] = "", path[PATH_MAX];
    EXPECT(readlink(in_root(path, "out/latest"), target, sizeof(target) - 1) == 13 &&
               strcmp(target, "step_00000009") == 0,
           "latest -> %s", target);
    EXPECT(checkpoint_mark_done(out_dir, 9, self, &error) && is_there("out/DONE_00000009"), "%s",
           error.text);
    checkpoint_free(&checkpoints);
    test_report("checkpoints kept: newest 2 and milestones");
    zero_unmake(&zero);
}

// A run goes on from step 6 below a damaged step 8 and a damaged step 10.
static void test_damaged_do_not_count(void) {
    Zero zero;
    zero_make(&zero, 3);
    Checkpoints checkpoints = make_checkpoints(2, 0);
    Error error = {0};
    CheckpointReport report;
    char dir[PATH_MAX];
    fresh_out();
    for (long step = 4; step <= 10; step += 2)
        EXPECT(save_step(step, 0, &zero, &error), "%s", error.text);
    EXPECT(checkpoint_load(&checkpoints, in_root(dir, "out/step_00000006"), &zero, &report, &error),
           "%s", error.text);
    EXPECT(checkpoint_exists(&checkpoints, 6) && !checkpoint_exists(&checkpoints, 8),
           "a damaged checkpoint counts as one that exists");
    CheckpointState state = make_state(9);
    EXPECT(checkpoint_save(&checkpoints, &state, &zero, &report, &error), "%s", error.text);
    EXPECT(is_there("out/step_00000006") && is_there("out/step_00000009"),
           "a damaged checkpoint takes the place of a good one");
    EXPECT(!is_there("out/step_00000004") && is_there("out/step_00000010"),
           "deleted too little or too much");
    state = make_state(10);
    EXPECT(checkpoint_save(&checkpoints, &state, &zero, &report, &error), "%s", error.text);
    EXPECT(checkpoint_exists(&checkpoints, 10) && !is_there("out/step_00000006") &&
               !is_there("out/step_00000008"),
           "step 10 is not this run's");
    checkpoint_free(&checkpoints);
    test_report("damaged checkpoints neither exist nor count as kept");
    zero_unmake(&zero);
}

// Where `latest` cannot be a symbolic link, checkpoints are complete all the same.
static void test_without_links(void) {
    Zero zero;
    zero_make(&zero, 3);
    Checkpoints checkpoints = make_checkpoints(0, 0);
    Error error = {0};
    CheckpointReport report;
    char text[4096];
    fresh_out();
    run_command("mkdir -p out/latest/x");
    int kept = capture_begin();
    for (long step = 1; step <= 2; step++) {
        CheckpointState state = make_state(step);
        EXPECT(checkpoint_save(&checkpoints, &state, &zero, &report, &error), "%s", error.text);
    }
    capture_end(kept, text, sizeof(text));
    EXPECT(strstr(text, "latest: cannot") && strchr(text, '\n') == text + strlen(text) - 1,
           "not one warning: %s", text);
    EXPECT(newest(text, sizeof(text)) == 2 && count_leftovers() == 0, "%d temporary names",
           count_leftovers());
    checkpoint_free(&checkpoints);
    test_report("checkpoints without `latest`: one warning");
    zero_unmake(&zero);
}

static void test_out(void) {
    Zero zero;
    zero_make(&zero, 4);
    Error a = {0}, b = {0}, c = {0}, d = {0}, e = {0};
    fresh_out();
    EXPECT(save_step(3, 0, &zero, &a), "%s", a.text);
    run_command("mkdir -p out/.step_00000004.tmp/folder/folder && echo x > "
                "out/.step_00000004.tmp/model.safetensors && "
                "touch out/DONE_00000003 out/keep.txt");
    EXPECT(!open_out(out_dir, false, false, &b) && b.code == EXIT_USAGE,
           "a new run into an old OUT");
    EXPECT(strstr(b.text, "--overwrite") && strstr(b.text, "-y 1"), "%s", b.text);
    EXPECT(open_out(out_dir, true, false, &c), "%s", c.text);
    EXPECT(count_leftovers() == 0 && is_there("out/step_00000003"),
           "resume cleans too much or little");
    EXPECT(open_out(out_dir, false, true, &d), "%s", d.text);
    EXPECT(is_there("out/step_00000003"), "--overwrite removes before all is checked");
    Checkpoints checkpoints = make_checkpoints(0, 0);
    checkpoint_start_anew(&checkpoints, true);
    EXPECT(!is_there("out/step_00000003") && !is_there("out/latest") &&
               !is_there("out/DONE_00000003") && is_there("out/keep.txt"),
           "--overwrite removes too much or little");
    char nested[PATH_MAX];
    EXPECT(open_out(in_root(nested, "x/y/z"), false, false, &e) && is_there("x/y/z"), "%s", e.text);
    Error f = {0}, g = {0};
    EXPECT(!open_out("/proc/nowhere", false, false, &f) && f.code == EXIT_USAGE, "%s", f.text);
    write_whole("file", "x", 1);
    EXPECT(!open_out(in_root(nested, "file"), false, false, &g) && g.code == EXIT_USAGE, "%s",
           g.text);
    test_report("output directory: made, cleaned, refused");
    zero_unmake(&zero);
}

// ---- damage -------------------------------------------------------------------------------------

static void test_damage(void) {
    static const struct {
        const char *what, *command, *problem;
    } damages[] = {
        {"truncated", "truncate -s -1 out/step_00000002/model.safetensors", "model.safetensors: "},
        {"emptied", "truncate -s 0 out/step_00000002/optimizer.safetensors", "0 bytes, expected"},
        {"grown", "echo >> out/step_00000002/config.json", "config.json: "},
        {"config of another model",
         "sed -i 's/\"n_head\": 2/\"n_head\": 4/' out/step_00000002/config.json",
         "another model than state.json"},
        {"a bit flipped",
         "printf '\\377' | dd of=out/step_00000002/optimizer.safetensors bs=1 seek=9999 "
         "conv=notrunc "
         "2>dd.log",
         "optimizer.safetensors: crc32"},
        {"deleted", "rm out/step_00000002/model.safetensors", "model.safetensors: No such file"},
        {"state deleted", "rm out/step_00000002/state.json", "state.json: No such file"},
        {"state empty", "truncate -s 0 out/step_00000002/state.json", "state.json: is not JSON"},
        {"state cut", "truncate -s 100 out/step_00000002/state.json", "state.json: is not JSON"},
        {"state of another step", "cp out/step_00000001/state.json out/step_00000002/",
         "step is 1, expected 2"},
        {"weights of another step", "cp out/step_00000001/model.safetensors out/step_00000002/",
         "crc32"},
        {"swapped files",
         "cd out/step_00000002 && mv model.safetensors x && mv optimizer.safetensors "
         "model.safetensors "
         "&& mv x optimizer.safetensors",
         "model.safetensors: "},
        {"a directory in its place",
         "rm out/step_00000002/config.json && mkdir out/step_00000002/config.json",
         "not a regular file"},
        {"a FIFO in its place",
         "rm out/step_00000002/config.json && mkfifo out/step_00000002/config.json",
         "not a regular file"},
        {"an empty directory", "rm out/step_00000002/*", "No such file"},
        {"a file of that name", "rm -r out/step_00000002 && touch out/step_00000002",
         "Not a directory"},
    };
    Zero zero, other;
    zero_make(&zero, 5);
    zero_make(&other, 6);
    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++) {
        Error error = {0};
        char text[4096];
        fresh_out();
        EXPECT(save_step(1, 0, &zero, &error) && save_step(2, 0, &other, &error), "%s", error.text);
        EXPECT(newest(text, sizeof(text)) == 2, "the newest is not found: %s", text);
        run_command(damages[i].command);
        EXPECT(newest(text, sizeof(text)) == 1, "the one before is not used");
        EXPECT(strstr(text, damages[i].problem) && strstr(text, "step_00000002 is passed over"),
               "says \"%s\", expected \"%s\"", text, damages[i].problem);
        EXPECT(strchr(text, '\n') == text + strlen(text) - 1, "more than one line: %s", text);
        run_command("rm -rf out/step_00000001 out/latest");
        EXPECT(newest(text, sizeof(text)) == 0, "a damaged checkpoint is used");
        test_report("damaged checkpoint passed over: %s", damages[i].what);
    }
    // What was passed over is replaced when the run comes there again.
    Error error = {0};
    char text[4096];
    fresh_out();
    EXPECT(save_step(1, 0, &zero, &error) && save_step(2, 0, &other, &error), "%s", error.text);
    run_command("truncate -s 0 out/step_00000002/model.safetensors");
    EXPECT(save_step(2, 2, &zero, &error), "%s", error.text);
    EXPECT(newest(text, sizeof(text)) == 2 && count_leftovers() == 0, "%s", text);
    test_report("damaged checkpoint replaced");
    zero_unmake(&zero);
    zero_unmake(&other);
}

// ---- killed saves and full disks ----------------------------------------------------------------

// Saves steps 2 and 3 (keeping 2) in a child that is killed at its k-th opportunity in step 3.
// True if it was killed.
static bool save_and_be_killed(Zero* zero, int k) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        char fault[64];
        Error error = {0};
        snprintf(fault, sizeof(fault), "killsave:step=3:seq=%d", k);
        setenv("ZERO_FAULT", fault, 1);
        bool ok =
            fault_init(0, &error) && save_step(2, 2, zero, &error) && save_step(3, 2, zero, &error);
        _exit(ok ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child, "waitpid");
    EXPECT(WIFSIGNALED(status) || WEXITSTATUS(status) == 0, "the save failed by itself");
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

static void test_killed(void) {
    Zero zero;
    zero_make(&zero, 7);
    int moments = 0, with_new = 0;
    for (bool killed = true; killed; moments++) {
        Error error = {0};
        char text[4096];
        fresh_out();
        EXPECT(save_step(1, 2, &zero, &error), "%s", error.text);
        killed = save_and_be_killed(&zero, moments);
        EXPECT(open_out(out_dir, true, false, &error), "%s", error.text);
        long step = newest(text, sizeof(text));
        EXPECT(step == 2 || step == 3, "killed at moment %d: step %ld is left, %s", moments, step,
               text);
        EXPECT(text[0] == '\0', "killed at moment %d: %s", moments, text);
        EXPECT(count_leftovers() == 0, "killed at moment %d: leftovers", moments);
        with_new += step == 3;
        EXPECT(killed || (step == 3 && !is_there("out/step_00000001")), "not killed, step %ld",
               step);
    }
    EXPECT(moments > 10 && with_new >= 3, "%d moments, %d after the rename", moments, with_new);
    test_report("save killed at each of its %d moments: a complete checkpoint is left",
                moments - 1);
    zero_unmake(&zero);
}

// A file size limit is a disk that fills up in the middle of a write.
static void test_full_disk(void) {
    Zero zero;
    zero_make(&zero, 8);
    char text[4096];
    struct rlimit old, limit;
    getrlimit(RLIMIT_FSIZE, &old);
    signals_install();
    fresh_out();
    Error first = {0};
    EXPECT(save_step(1, 0, &zero, &first), "%s", first.text);
    static const rlim_t bytes[] = {0, 100, 1000, 5000, 15000};
    for (int i = 0; i < 5; i++) {
        Error error = {0};
        limit = old;
        limit.rlim_cur = bytes[i];
        setrlimit(RLIMIT_FSIZE, &limit);
        bool ok = save_step(2, 1, &zero, &error);
        setrlimit(RLIMIT_FSIZE, &old);
        EXPECT(!ok && error.code == EXIT_FILE_IO && strstr(error.text, "File too large"),
               "limit %d: \"%s\"", (int)bytes[i], error.text);
        EXPECT(count_leftovers() == 0 && !is_there("out/step_00000002"), "leftovers");
        EXPECT(newest(text, sizeof(text)) == 1, "the one before is gone: %s", text);
    }
    Error again = {0};
    EXPECT(save_step(2, 1, &zero, &again), "%s", again.text);
    EXPECT(newest(text, sizeof(text)) == 2 && !is_there("out/step_00000001"), "%s", text);
    test_report("save with no room fails, leaves nothing, and works again later");

    Error gone = {0};
    run_command("rm -rf out");
    EXPECT(!save_step(3, 0, &zero, &gone) && gone.code == EXIT_FILE_IO, "%s", gone.text);
    test_report("save into a directory that has gone: an error");
    zero_unmake(&zero);
}

// ---- state.json ---------------------------------------------------------------------------------

static void test_state_refused(void) {
    static const struct {
        const char *from, *to, *problem;
    } edits[] = {
        {"\"format\":\t1", "\"format\":\t2", "format is 2"},
        {"\"step\":\t10", "\"step\":\t0", "step is 0"},
        {"\"step\":\t10", "\"step\":\t-1", "step is -1"},
        {"\"step\":\t10", "\"step\":\t1.5", "integer: step"},
        {"\"step\":\t10", "\"step\":\t\"10\"", "integer: step"},
        {"\"step\":\t10", "\"step\":\t1e300", "integer: step"},
        {"\"step\":\t10", "\"Step\":\t10", "has no step"},
        {"\"step\":\t10", "\"step\":\t10, \"step\":\t11", "'step' is given twice"},
        {"\"adam_t\":\t9", "\"adam_t\":\t11", "adam_t is 11"},
        {"\"samples\":\t160", "\"samples\":\tnull", "integer: samples"},
        {"\"18446744073709551615\"", "\"12x\"", "seed"},
        {"\"18446744073709551615\"", "\"\"", "seed"},
        {"\"18446744073709551615\"", "-5", "seed is -5"},
        {"\"seq_len\":\t4", "\"seq_len\":\t5000000000", "seq_len is 5000000000"},
        {"\"seq_len\":\t4", "\"seq_len\":\t8", "seq_len 8 is beyond"},
        {"\"seq_len\":\t4", "\"seq_len\":\t5", "not a multiple of seq_len"},
        {"\"wsd\"", "\"warm\"", "unknown schedule"},
        {"\"wsd\"", "7", "string: name"},
        {"[0.9, 0.95]", "[0.9]", "betas"},
        {"[0.9, 0.95]", "[0.9, 2]", "betas[1] is 2"},
        {"[0.9, 0.95]", "{\"a\": 1}", "array: betas"},
        {"2.5]", "\"x\"]", "number: "},
        {"\"NH\":\t2", "\"NH\":\t3", "NH=3 does not divide"},
        {"\"L\":\t2", "\"L\":\t2000000000", "L is 2000000000"},
        {"\"crc32\":\t4000000000", "\"crc32\":\t4294967296", "crc32 is 4294967296"},
        {"\"config.json\"", "\"config.yaml\"", "has no config.json"},
        {"\"b.bin\"", "17", "string: name"},
    };
    const CheckpointFile files[NUM_CHECKPOINT_FILES] = {{1, 2}, {3, 4}, {5, 6}, {7, 8}};
    CheckpointState state = make_state(10), again;
    CheckpointFile files_again[NUM_CHECKPOINT_FILES];
    char* text = state_to_json(&state, files);
    Error good = {0};
    if (EXPECT(state_from_json(&again, files_again, text, strlen(text), "state", &good), "%s",
               good.text)) {
        EXPECT(same_run(&state, &again) && files_again[3].crc32 == 8 && files_again[2].bytes == 5,
               "differs");
        char* twice = state_to_json(&again, files_again);
        EXPECT(strcmp(text, twice) == 0, "written again it differs");
        free(twice);
        state_free(&again);
    }
    test_report("state.json written, read, written: the same text");
    for (size_t i = 0; i < sizeof(edits) / sizeof(edits[0]); i++) {
        char* at = strstr(text, edits[i].from);
        if (!EXPECT(at != NULL, "no %s in %s", edits[i].from, text)) continue;
        char* edited = checked_malloc(strlen(text) + 100);
        size_t before = (size_t)(at - text);
        memcpy(edited, text, before);
        strcpy(edited + before, edits[i].to);
        strcat(edited, at + strlen(edits[i].from));
        Error error = {0};
        EXPECT(!state_from_json(&again, files_again, edited, strlen(edited), "state", &error) &&
                   error.code == EXIT_USAGE && strstr(error.text, edits[i].problem),
               "%s: \"%s\", expected \"%s\"", edits[i].to, error.text, edits[i].problem);
        free(edited);
    }
    for (size_t n = 0; n < strlen(text) - 1; n++) { // a closing brace and no newline at the end
        Error error = {0};
        EXPECT(!state_from_json(&again, files_again, text, n, "state", &error), "%zu bytes pass",
               n);
    }
    free(text);
    test_report("state.json refused: %zu edits and every truncation",
                sizeof(edits) / sizeof(edits[0]));
}

static void test_resume_rules(void) {
    CheckpointState stored = make_state(10);
    Options options = {.micro_batch = 4, .seq_len = 4, .total_batch_tokens = 64};
    Error a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};
    EXPECT(state_check_resume(&stored, &config, &options, 2, &a), "%s", a.text);
    EXPECT(!state_check_resume(&stored, &config, &options, 3, &b), "3 ranks cannot");
    EXPECT(strstr(b.text, "48 and 96") && strstr(b.text, "goes on with -b 4 and ranks 1, 2, 4"),
           "%s", b.text);
    options.micro_batch = 3;
    EXPECT(!state_check_resume(&stored, &config, &options, 2, &c) &&
               strstr(c.text, "-b 1, 2, 4, 8"),
           "%s", c.text);
    options.total_batch_tokens = 48;
    EXPECT(!state_check_resume(&stored, &config, &options, 1, &d) && strstr(d.text, "64"), "%s",
           d.text);
    options.seq_len = 2;
    EXPECT(!state_check_resume(&stored, &config, &options, 1, &e) && strstr(e.text, "-t 2"), "%s",
           e.text);
    GPT2Config other = config;
    other.V = 12;
    EXPECT(!state_check_resume(&stored, &other, &options, 1, &f) && strstr(f.text, "V=12"), "%s",
           f.text);
    EXPECT(state_check_data(&stored, data_files, 2, &g), "%s", g.text);
    DataFile files[2] = {data_files[0], data_files[1]};
    files[1].crc32++;
    EXPECT(!state_check_data(&stored, files, 2, &g) && strstr(g.text, "b.bin"), "%s", g.text);
    EXPECT(!state_check_data(&stored, files, 1, &h) && strstr(h.text, "--allow-new-data"), "%s",
           h.text);
    CheckpointState changed = make_state(10);
    EXPECT(state_hash(&changed) == state_hash(&stored), "hash");
    changed.beta2 = 0.951;
    EXPECT(state_hash(&changed) != state_hash(&stored), "hash");
    test_report("resuming: what can go on and what cannot, with what can");
}

// ---- config.json --------------------------------------------------------------------------------

static void test_config(void) {
    static const struct {
        const char *from, *to, *problem; // problem NULL: accepted
    } edits[] = {
        {"\"gelu_new\"", "\"relu\"",
         "activation_function is \"relu\", this trainer computes \"gelu_new\" only"},
        {"\"n_inner\": null", "\"n_inner\": 32", NULL},
        {"\"n_inner\": null", "\"n_inner\": 33", "n_inner"},
        {"\"n_inner\": null", "\"unknown\": [1, {\"a\": null}]", NULL},
        {"1e-05", "1e-6", "layer_norm_epsilon"},
        {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", "tie_word_embeddings"},
        {"\"use_cache\": true", "\"scale_attn_by_inverse_layer_idx\": true", "scale_attn_by"},
        {"\"use_cache\": true", "\"reorder_and_upcast_attn\": true", "reorder_and"},
        {"\"use_cache\": true", "\"add_cross_attention\": true", "add_cross"},
        {"\"use_cache\": true", "\"add_cross_attention\": false", NULL},
        {"\"scale_attn_weights\": true", "\"scale_attn_weights\": false", "scale_attn_weights"},
        {"\"gpt2\"", "\"llama\"", "model_type"},
        {"\"n_embd\": 8", "\"n_embd\": 9", "does not divide"},
        {"\"n_embd\": 8", "\"n_embd\": -8", "n_embd is -8"},
        {"\"n_embd\": 8", "\"n_embd\": 8.5", "integer: n_embd"},
        {"\"n_head\": 2", "\"n_heads\": 2", "has no n_head"},
        {"\"n_head\": 2", "\"n_head\": 2, \"n_head\": 4", "given twice"},
        {"\"vocab_size\": 11", "\"vocab_size\": 99999999999", "vocab_size"},
    };
    for (size_t i = 0; i < sizeof(edits) / sizeof(edits[0]); i++) {
        char text[4096];
        const char* at = strstr(expected_config, edits[i].from);
        CHECK(at, "no %s", edits[i].from);
        snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - expected_config), expected_config,
                 edits[i].to, at + strlen(edits[i].from));
        GPT2Config read;
        Error error = {0};
        bool ok = config_from_json(&read, text, strlen(text), "config", &error);
        EXPECT(ok == !edits[i].problem, "%s: %s", edits[i].to, error.text);
        EXPECT(ok ? memcmp(&read, &config, sizeof(config)) == 0
                  : strstr(error.text, edits[i].problem) != NULL,
               "%s: \"%s\"", edits[i].to, error.text);
    }
    test_report("config.json read, refused: %zu edits", sizeof(edits) / sizeof(edits[0]));
}

int main(void) {
    // Memory where there is some: hundreds of saves wait for the disk otherwise.
    const char* base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(root, sizeof(root), "%s/test_checkpoint.%d", base, (int)getpid());
    CHECK(mkdir(root, 0777) == 0, "cannot make %s", root);
    in_root(out_dir, "out");
    self = comm_self_create();
    gpt2_param_table(&table, &config);
    test_round_trip();
    test_keep();
    test_damaged_do_not_count();
    test_without_links();
    test_out();
    test_damage();
    test_killed();
    test_full_disk();
    test_state_refused();
    test_resume_rules();
    test_config();
    param_table_free(&table);
    self->free(self);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", root);
    return system(command) != 0 ? 1 : test_finish();
}
