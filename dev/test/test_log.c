// dev/test/test_log.c - log.jsonl: numbers, events, resuming, a disk that is full for a while.
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "testing.h"
#include "train/json_number.h"
#include "train/log.h"

static char folder[] = "/tmp/test_log_XXXXXX";
static char path[64]; // of log.jsonl

static char* read_log(void) {
    static char text[1 << 16];
    FILE* file = fopen(path, "rb");
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[size] = '\0';
    if (file) fclose(file);
    return text;
}

static void write_log(const char* text) {
    FILE* file = fopen(path, "wb");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0, "%s: not written", path);
}

static void test_numbers(void) {
    const struct {
        double value;
        const char* text;
    } cases[] = {{0, "0"},
                 {1, "1"},
                 {-1.5, "-1.5"},
                 {0.1, "0.1"},
                 {100, "100"},
                 {1000, "1e3"},
                 {1500, "1500"},
                 {0.001, "1e-3"},
                 {0.0006, "6e-4"},
                 {0.01, "0.01"},
                 {3e-5, "3e-5"},
                 {1e22, "1e22"},
                 {1234567, "1234567"},
                 {0.1 + 0.2, "0.30000000000000004"},
                 {5e-324, "5e-324"},
                 {(double)NAN, "null"},
                 {(double)INFINITY, "null"},
                 {1.0 / 3, "0.3333333333333333"},
                 {-0.0, "-0"},
                 {1.7976931348623157e308, "1.7976931348623157e308"}};
    char text[JSON_NUMBER_CHARS], reference[40];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_number_text(cases[i].value, text);
        EXPECT(strcmp(text, cases[i].text) == 0, "%.17g: %s, expected %s", cases[i].value, text,
               cases[i].text);
    }
    uint64_t bits = 1;
    for (int i = 0; i < 200000; i++) {
        double value;
        bits = bits * 6364136223846793005u + 1442695040888963407u;
        uint64_t mixed = bits ^ bits >> 29;
        memcpy(&value, &mixed, 8);
        if (!isfinite(value)) continue;
        json_number_text(value, text);
        snprintf(reference, sizeof reference, "%.17g", value);
        if (strtod(text, NULL) != value || strlen(text) > strlen(reference)) {
            EXPECT(false, "%s for %s", text, reference);
            break;
        }
    }
    test_report("shortest numbers");
}

static StepInfo step_info(long step) {
    StepInfo info = {.step = step,
                     .loss = 2.5,
                     .grad_norm = (double)NAN,
                     .lr = 3e-4,
                     .ms = 12,
                     .mfu = (double)NAN,
                     .tokens = 1024,
                     .tokens_per_s = 1e5,
                     .elements_sent = 7,
                     .bytes_sent = 28};
    return info;
}

static cJSON* line_of(const char* text, int number) {
    for (; number > 0 && text; number--) {
        text = strchr(text, '\n');
        if (text) text++;
    }
    return text ? cJSON_ParseWithOpts(text, NULL, false) : NULL;
}

// The keys of an event, in order, with spaces between.
static void expect_keys(cJSON* event, const char* expected) {
    char keys[600] = "";
    for (cJSON* item = event ? event->child : NULL; item; item = item->next) {
        if (*keys) strcat(keys, " ");
        strcat(keys, item->string);
    }
    EXPECT(strcmp(keys, expected) == 0, "keys: %s", keys);
    cJSON_Delete(event);
}

static void test_events(void) {
    Error error = {0};
    Log* log = log_open(folder, -1, &error);
    EXPECT(log, "%s", error.text);
    Ledger ledger = {0};
    ledger_add(&ledger, MEM_WEIGHTS, "weights", 400);
    RunInfo run = {.version = "v",
                   .precision = "fp32",
                   .backend = "cpu",
                   .reduce = "exact",
                   .ranks = 2,
                   .threads = 1,
                   .seed = UINT64_MAX,
                   .ledger = &ledger,
                   .model = {.L = 2, .NH = 4, .C = 64, .V = 257, .T = 64}};
    log_start(log, &run);
    StepInfo step = step_info(1);
    log_step(log, &step);
    step.loss_scale = 65536, step.skipped = "overflow";
    log_step(log, &step);
    log_val(log, 1, 3.25, 640);
    log_eval(log, 1, "hellaswag", 1, 4);
    log_sample(log, 1, "caf\303\251 \"\n", NULL, 0);
    const int ids[] = {5, 6};
    log_sample(log, 1, NULL, ids, 2);
    log_checkpoint(log, 1, "step_00000001", 12345678901, 1.5);
    log_checkpoint_failed(log, 1, "disk full");
    EndInfo end = {1, "finished", 0xABC, 400, 1.25, NULL};
    log_end(log, &end);
    EXPECT(log_close(log, &error), "%s", error.text);

    const char* text = read_log();
    expect_keys(
        line_of(text, 0),
        "event version precision backend ranks threads zero_stage reduce model num_parameters "
        "batch seq_len grad_accum_steps total_batch_tokens max_steps start_step seed plan_bytes "
        "time");
    expect_keys(line_of(text, 1),
                "event step loss grad_norm lr ms forward_ms backward_ms update_ms "
                "comm_wait_ms tokens tokens_per_s mfu elements_sent bytes_sent");
    expect_keys(
        line_of(text, 2),
        "event step loss grad_norm lr loss_scale skipped ms forward_ms backward_ms update_ms "
        "comm_wait_ms tokens tokens_per_s mfu elements_sent bytes_sent");
    expect_keys(line_of(text, 3), "event step loss tokens");
    expect_keys(line_of(text, 4), "event step name correct total accuracy");
    expect_keys(line_of(text, 5), "event step text");
    expect_keys(line_of(text, 6), "event step ids");
    expect_keys(line_of(text, 7), "event step dir bytes ms");
    expect_keys(line_of(text, 8), "event step reason");
    expect_keys(line_of(text, 9), "event step reason params_hash peak_bytes seconds");
    EXPECT(strstr(text, "\"loss\":2.5,\"grad_norm\":null,\"lr\":3e-4"), "numbers of a step");
    EXPECT(strstr(text, "\"seed\":18446744073709551615"), "seed in full");
    EXPECT(strstr(text, "\"plan_bytes\":{\"weights\":400}"), "plan");
    EXPECT(strstr(text, "\"params_hash\":\"0000000000000abc\""), "16 digits");
    EXPECT(strstr(text, "\"text\":\"caf\303\251 \\\"\\n\""), "UTF-8");
    EXPECT(strstr(text, "\"bytes\":12345678901"), "large integers in full");
    test_report("keys of every event");
}

static void test_resume(void) {
    Error error = {0};
    const char* kept =
        "{\"event\":\"start\",\"start_step\":0}\n{\"event\":\"val\",\"step\":0,\"loss\":5}\n"
        "{\"event\":\"step\",\"step\":1}\n{\"event\":\"step\",\"step\":2}\n";
    char text[1000];
    snprintf(text, sizeof text,
             "%s{\"event\":\"step\",\"step\":3}\n{\"event\":\"end\",\"step\":3}\n{\"event\":\"st",
             kept);
    write_log(text);
    Log* log = log_open(folder, 2, &error);
    EXPECT(log, "%s", error.text);
    EXPECT(strcmp(read_log(), kept) == 0, "kept: %s", read_log());
    StepInfo step = step_info(3);
    log_step(log, &step);
    log_close(log, &error);
    EXPECT(strncmp(read_log(), kept, strlen(kept)) == 0 &&
               strstr(read_log(), "\"step\":3,\"loss\""),
           "new lines follow");
    test_report("a resumed run drops later steps and a torn line");

    log = log_open(folder, -1, &error);
    log_close(log, &error);
    EXPECT(*read_log() == '\0', "a new run keeps: %s", read_log());
    test_report("a new run begins a new file");
}

static void test_full_disk(void) {
    Error error = {0};
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit, small;
    getrlimit(RLIMIT_FSIZE, &limit);
    Log* log = log_open(folder, -1, &error);
    StepInfo step = step_info(1);
    log_step(log, &step);
    small = limit;
    small.rlim_cur = strlen(read_log()) + 10; // ten bytes of the next line
    setrlimit(RLIMIT_FSIZE, &small);
    fprintf(stderr, "(a warning follows) ");
    step.step = 2;
    log_step(log, &step);
    step.step = 3;
    log_step(log, &step);
    setrlimit(RLIMIT_FSIZE, &limit);
    step.step = 4;
    log_step(log, &step);
    EXPECT(log_close(log, &error), "%s", error.text);
    for (int i = 0; i < 4; i++) {
        cJSON* event = line_of(read_log(), i);
        cJSON* number = cJSON_GetObjectItem(event, "step");
        EXPECT(number && number->valueint == i + 1, "line %d", i);
        cJSON_Delete(event);
    }
    test_report("a disk that is full for a while costs nothing");

    unlink(path);
    CHECK(symlink("/dev/full", path) == 0, "symlink");
    log = log_open(folder, -1, &error);
    fprintf(stderr, "(a warning follows) ");
    log_step(log, &step);
    EXPECT(!log_close(log, &error) && error.code == EXIT_FILE_IO, "code %d", error.code);
    EXPECT(strstr(error.text, "log.jsonl"), "%s", error.text);
    unlink(path);
    test_report("a disk that stays full is an error");

    Error open_error = {0};
    EXPECT(!log_open("/nonexistent/folder", -1, &open_error), "opened");
    EXPECT(open_error.code == EXIT_FILE_IO, "code %d", open_error.code);
    test_report("a folder that is not there");
}

int main(void) {
    CHECK(mkdtemp(folder), "no temporary folder");
    snprintf(path, sizeof path, "%s/log.jsonl", folder);
    test_numbers();
    test_events();
    test_resume();
    test_full_disk();
    rmdir(folder);
    return test_finish();
}
