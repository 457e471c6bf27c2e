// fuzz_targets.h - the four readers of files that nobody vouches for, each as a function of bytes.
//
// dev/fuzz/ hands them to libFuzzer; test_fuzz_corpus.c replays the kept inputs. A target returns
// when the reader has refused the bytes or has read all there is; whatever else happens is a
// finding.
#ifndef DEV_TEST_FUZZ_TARGETS_H
#define DEV_TEST_FUZZ_TARGETS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char* name; // of its folder in dev/fuzz/corpus
    void (*run)(const uint8_t* bytes, size_t size);
} FuzzTarget;

enum { NUM_FUZZ_TARGETS = 4 };
extern const FuzzTarget fuzz_targets[NUM_FUZZ_TARGETS];

#endif
