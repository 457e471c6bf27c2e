// test_fuzz_corpus.c - replays the inputs kept from fuzzing (dev/fuzz/corpus) through the readers.
//
// A reader that misbehaves ends the program: a CHECK, a sanitizer or a signal says where.
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz_targets.h"
#include "testing.h"

enum { INPUT_MAX = 1 << 20 };

static void replay(const FuzzTarget* target) {
    char folder[64], path[400];
    uint8_t* bytes = checked_malloc(INPUT_MAX);
    int count = 0;
    snprintf(folder, sizeof(folder), "dev/fuzz/corpus/%s", target->name);
    DIR* dir = opendir(folder);
    EXPECT(dir != NULL, "no %s: run this from the project's root", folder);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        FILE* file = fopen(path, "rb");
        CHECK(file, "cannot read %s", path);
        size_t size = fread(bytes, 1, INPUT_MAX, file);
        fclose(file);
        // An exact allocation, so that a sanitizer sees a read beyond the end.
        uint8_t* exact = checked_malloc(size);
        memcpy(exact, bytes, size);
        target->run(exact, size);
        free(exact);
        count++;
    }
    if (dir) closedir(dir);
    free(bytes);
    EXPECT(count > 0, "%s is empty", folder);
    test_report("fuzz corpus %s replayed: %d inputs", target->name, count);
}

int main(void) {
    for (int i = 0; i < NUM_FUZZ_TARGETS; i++) replay(&fuzz_targets[i]);
    return test_finish();
}
