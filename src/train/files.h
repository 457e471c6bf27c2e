// train/files.h - files of others, opened and read with care.
#ifndef TRAIN_FILES_H
#define TRAIN_FILES_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/check.h"

#ifdef __cplusplus
extern "C" {
#endif

// Opens a regular file for reading and tells its size. -1: error set, code 2. A FIFO does not
// block.
int open_regular(const char* path, uint64_t* bytes, Error* error);

// Reads exactly `bytes` at `offset`. False: errno says why, 0 that the file ends before.
bool read_at(int fd, void* out, size_t bytes, uint64_t offset);

// Writes "dir/name" to `out` and returns it.
char* path_join(char out[PATH_MAX], const char* dir, const char* name);

#ifdef __cplusplus
}
#endif
#endif
