// fuzz_targets.c - see fuzz_targets.h.
#include "fuzz_targets.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "train/dataloader.h"
#include "train/safetensors.h"
#include "train/state.h"

// A message is one line, and there is one exactly when a reader refuses.
static void check_outcome(bool ok, const Error* error) {
    CHECK(ok == (error->code == 0), "%s with \"%s\"", ok ? "accepted" : "refused", error->text);
    CHECK(!strchr(error->text, '\n'), "more than one line: %s", error->text);
}

// ---- files in memory ----------------------------------------------------------------------------

// An empty file in memory, and a path to it: the readers take paths.
static int memory_file(char path[64]) {
    static int fd = -1;
    if (fd < 0) fd = memfd_create("fuzz", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 0) == 0, "no memory file");
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

static void put_bytes(int fd, const void* bytes, size_t size, size_t offset) {
    CHECK(pwrite(fd, bytes, size, (off_t)offset) == (ssize_t)size, "memory file");
}

// ---- targets ------------------------------------------------------------------------------------

// The first byte chooses: even, the rest is a whole file; odd, it is a header, which gets the right
// length before it, behind a byte that says how many bytes of data follow.
static void run_safetensors(const uint8_t* bytes, size_t size) {
    static const uint8_t data[256];
    char path[64];
    if (size < 2) return;
    int fd = memory_file(path);
    if (bytes[0] % 2 == 0) {
        put_bytes(fd, bytes + 1, size - 1, 0);
    } else {
        uint64_t header_bytes = size - 2; // little-endian, as this machine
        put_bytes(fd, &header_bytes, 8, 0);
        put_bytes(fd, bytes + 2, size - 2, 8);
        put_bytes(fd, data, bytes[1], 8 + size - 2);
    }
    SafeTensors file;
    Error error = {0};
    bool ok = safetensors_open(&file, path, &error);
    check_outcome(ok, &error);
    if (!ok) return;
    for (size_t i = 0; i < file.num_tensors; i++) {
        const SafeTensor* tensor = &file.tensors[i];
        Error read_error = {0};
        CHECK(safetensors_find(&file, tensor->name) == tensor, "%s is not found", tensor->name);
        float* out = malloc(tensor->elems * sizeof(float) + 1);
        ok = safetensors_read(&file, tensor, 0, tensor->elems, out, &read_error);
        check_outcome(ok, &read_error);
        free(out);
    }
    safetensors_close(&file);
}

static void run_tokens(const uint8_t* bytes, size_t size) {
    enum { T = 3 };
    char path[64];
    int inputs[T], targets[T];
    int fd = memory_file(path);
    put_bytes(fd, bytes, size, 0);
    DataConfig config = {"-i", path, T, 300, 1337, 1};
    DataLoader loader;
    Error error = {0};
    bool ok = dataloader_open(&loader, &config, &error);
    check_outcome(ok, &error);
    if (!ok) return;
    for (long step = 1; step <= 4; step++) {
        Error batch_error = {0};
        ok = dataloader_batch(&loader, step, 0, 0, 1, 1, inputs, targets, &batch_error);
        check_outcome(ok, &batch_error);
        for (int t = 0; t < T && ok; t++) {
            CHECK(inputs[t] >= 0 && inputs[t] < 300 && targets[t] >= 0 && targets[t] < 300,
                  "token %d", inputs[t]);
        }
    }
    dataloader_close(&loader);
}

static void run_config(const uint8_t* bytes, size_t size) {
    GPT2Config config, again;
    Error error = {0}, again_error = {0};
    bool ok = config_from_json(&config, (const char*)bytes, size, "config.json", &error);
    check_outcome(ok, &error);
    if (!ok) return;
    char* text = config_to_json(&config);
    ok = config_from_json(&again, text, strlen(text), "config.json", &again_error);
    CHECK(ok && memcmp(&config, &again, sizeof(config)) == 0, "written and read: %s",
          again_error.text);
    free(text);
}

static void run_state(const uint8_t* bytes, size_t size) {
    CheckpointState state, again;
    CheckpointFile files[NUM_CHECKPOINT_FILES], files_again[NUM_CHECKPOINT_FILES];
    Error error = {0}, again_error = {0};
    bool ok = state_from_json(&state, files, (const char*)bytes, size, "state.json", &error);
    check_outcome(ok, &error);
    if (!ok) return;
    char* text = state_to_json(&state, files);
    ok = state_from_json(&again, files_again, text, strlen(text), "state.json", &again_error);
    CHECK(ok, "written and read: %s", again_error.text);
    char* text_again = state_to_json(&again, files_again);
    CHECK(strcmp(text, text_again) == 0, "written, read and written again: another text");
    free(text);
    free(text_again);
    state_free(&state);
    state_free(&again);
}

const FuzzTarget fuzz_targets[NUM_FUZZ_TARGETS] = {{"safetensors", run_safetensors},
                                                   {"tokens", run_tokens},
                                                   {"config", run_config},
                                                   {"state", run_state}};
