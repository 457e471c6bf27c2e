// train/dataloader.h - token shards: which sample comes when, and that every token is a token.
//
// A shard is a file of tokens: .bin with llm.c's header (uint16: magic 20240520, version 1; uint32:
// 20240801, 7) or .txt (each byte is a token). A sample is T+1 tokens at stride T inside one shard.
// The order is a pure function of (seed, epoch, number of shards and samples): nothing is stored
// but the shard order of one epoch. Neither ranks nor micro-batches change it.
//
// Files are read with pread and not mapped: a file that shrinks is an error and not a signal, and
// resident memory stays what the plan says.
#ifndef TRAIN_DATALOADER_H
#define TRAIN_DATALOADER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "core/check.h"
#include "train/state.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char* path;
    const char* name; // path without directories
    uint64_t file_bytes;
    int header_bytes; // 0 or 1024
    int token_bytes;  // 1, 2 or 4
    uint64_t num_tokens;
    uint64_t num_samples; // floor((num_tokens - 1) / T)
} Shard;

typedef struct {
    const char* option;  // "-i" or "-j": named in messages
    const char* pattern; // a path or a glob
    int T, V;
    uint64_t seed;
    uint64_t samples_per_step; // S = total batch tokens / T; validation: 1
} DataConfig;

typedef struct {
    DataConfig config;
    Shard* shards; // (num_shards), sorted by path, each with at least one sample
    int num_shards;
    uint64_t num_samples;   // of one epoch
    uint64_t ordered_epoch; // the epoch that order and first_sample describe; UINT64_MAX: none
    int* order;             // (num_shards) shard at each place
    uint64_t* first_sample; // (num_shards + 1) samples of the epoch before each place
    int open_shard, fd;     // the one open file; -1: none
    unsigned char* raw;     // ((T + 1) * 4) bytes of a sample as stored
} DataLoader;

// Vocabulary of a descriptor that names none: 257 for .txt (bytes and an end-of-text), else 50257.
int dataloader_default_vocab(const char* pattern);

// Does the pattern match a file?
bool dataloader_exists(const char* pattern);

// Finds the shards, checks header, size and (up to 256 MiB of tokens in all) every token. Shards
// too short for a sample are left out with a warning. Fewer than samples_per_step samples in all:
// an error with path, have and need. Errors: code 2, path, field, value and what was expected.
bool dataloader_open(DataLoader* loader, const DataConfig* config, Error* error);
void dataloader_close(DataLoader* loader);

// Checks every token of every shard, whatever the size (--check-data).
bool dataloader_check(DataLoader* loader, Error* error);

// Steps of one epoch: floor(samples / samples_per_step).
long dataloader_epoch_steps(const DataLoader* loader);

// Micro-batch `micro` of `rank` in step (1-based): sequences (micro * world_size + rank) * B + b of
// the step's S. Token ids are checked before they are handed out.
//   inputs, targets (B, T) host; targets are the inputs one token later
bool dataloader_batch(DataLoader* loader, long step, int micro, int rank, int world_size, int B,
                      int* inputs, int* targets, Error* error);

// Sequences that validation covers: min(all, max_batches * total_batch_tokens / T); -1: all.
uint64_t dataloader_val_count(const DataLoader* loader, long max_batches, long total_batch_tokens);
// Sequence `index` in file order.  inputs, targets (T) host
bool dataloader_val_sequence(DataLoader* loader, uint64_t index, int* inputs, int* targets,
                             Error* error);

// Every shard's name, size and crc32 (of the first 64 KiB followed by the last 64 KiB), for
// state.json. files (num_shards), to be freed by the caller; NULL with `error` set.
DataFile* dataloader_identity(DataLoader* loader, Error* error);

#ifdef __cplusplus
}
#endif
#endif
