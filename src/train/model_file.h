// train/model_file.h - weights to start from: a Hugging Face GPT-2 directory or file, or llm.c's.
//
// Directories: config.json with model.safetensors, or model.safetensors.index.json and its shards
// (F32, F16, BF16; names with or without "transformer."). A checkpoint's step_* directory is one of
// them. llm.c files: versions 3 (fp32) and 5 (bf16), whose weights are [out, in] and are transposed
// into the published [in, out] as they are read. Nothing is held whole: tensors are read by range.
#ifndef TRAIN_MODEL_FILE_H
#define TRAIN_MODEL_FILE_H

#include "backend/comm.h"
#include "gpt2/gpt2.h"
#include "train/safetensors.h"
#include "zero/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// Open on rank 0; the other ranks know `config` and `total_batch_tokens` only.
typedef struct {
    GPT2Config config;       // NH = 0 where a lone .safetensors file leaves it open
    long total_batch_tokens; // of the run whose checkpoint the folder is; 0: not one of ours
    ParamTable table;
    char* path;
    SafeTensors* shards; // (num_shards), llm.c: none
    int num_shards;
    const char* prefix; // of tensor names in the file: "" or "transformer."
    int bin_fd;         // llm.c file, else -1
    int bin_version;
    int bin_padded_vocab;
    bool is_open;
} ModelFile;

// Opens what `path` names and checks it against its config: every tensor there, no unknown one,
// shapes right. Collective; the same result on all ranks.
bool model_file_open(ModelFile* file, const char* path, Comm* comm, Error* error);
void model_file_close(ModelFile* file);

// Reads a config.json.
bool model_file_config(GPT2Config* config, const char* path, Error* error);

// Elements [first, first + count) of tensor `tensor` of file->table as fp32, in published layout.
// On the rank that opened it.
bool model_file_read(const ModelFile* file, int tensor, size_t first, size_t count, float* out,
                     Error* error);

// All weights onto all ranks through `buffer` (buffer_elems, rank 0), then zero_publish. `table` is
// the running model's. Collective.
bool model_file_load(const ModelFile* file, Zero* zero, const ParamTable* table, float* buffer,
                     size_t buffer_elems, Comm* comm, Error* error);

// What zero_params_hash gives for the weights of that file; one process.
bool model_file_hash(const char* path, uint64_t* hash, Error* error);

#ifdef __cplusplus
}
#endif
#endif
