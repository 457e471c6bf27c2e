// train/state.h - state.json and config.json: what a run must know to go on, and of what model.
//
// What a resumed run takes over beside weights and moments, and nothing about ranks, stages,
// backends, hosts or time: the same run writes the same bytes wherever it runs. Clipping,
// --adam-eps, the outlier limits and the count of skips in a row are not in it: they are the
// options', or begin anew. Readers are strict: bounded size and depth, every key once, types and
// ranges checked.
#ifndef TRAIN_STATE_H
#define TRAIN_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "core/check.h"
#include "gpt2/gpt2.h"
#include "train/options.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { STATE_FORMAT = 1 };
enum { STATE_JSON_MAX = 64 << 20 }; // bytes of state.json: 100,000 data files with long names

enum { OUTLIER_WINDOW = 128 }; // steps that the outlier statistics look back, as in llm.c

typedef struct {
    int count;                     // <= OUTLIER_WINDOW
    double values[OUTLIER_WINDOW]; // oldest first, finite
} OutlierValues;

// Which data a run reads: names without directories, so that moved files pass.
typedef struct {
    char name[256];
    uint64_t bytes;
    uint32_t crc32; // of the first and last 64 KiB
} DataFile;

typedef struct {
    long step;        // steps done
    long adam_t;      // updates done: step without the skipped ones
    uint64_t samples; // sequences consumed since the order began
    uint64_t seed;
    long total_batch_tokens;
    int seq_len;
    long max_steps;
    ScheduleKind schedule;
    double lr, final_lr_frac;
    long warmup_steps;
    double weight_decay, beta1, beta2;
    double loss_scale; // 1 unless fp16
    long loss_scale_good_steps;
    OutlierValues outlier_loss, outlier_norm;
    GPT2Config model;
    DataFile* data_files; // (num_data_files) owned by whoever filled it
    int num_data_files;
} CheckpointState;

// The files that state.json vouches for, in its order.
enum {
    CHECKPOINT_CONFIG,
    CHECKPOINT_GENERATION,
    CHECKPOINT_MODEL,
    CHECKPOINT_OPTIMIZER,
    NUM_CHECKPOINT_FILES
};
typedef struct {
    uint64_t bytes;
    uint32_t crc32;
} CheckpointFile;
const char* checkpoint_file_name(int file); // "config.json", ...

// state.json as text, to be freed with free(). Seeds beyond 2^53 are written as strings, since JSON
// readers hold numbers as doubles.
char* state_to_json(const CheckpointState* state, const CheckpointFile files[NUM_CHECKPOINT_FILES]);

// The reverse. `where` names the file in messages. On success state->data_files is to be freed
// (state_free); on failure nothing is.
bool state_from_json(CheckpointState* state, CheckpointFile files[NUM_CHECKPOINT_FILES],
                     const char* text, size_t length, const char* where, Error* error);
void state_free(CheckpointState* state);

// Fills the options that were not on the command line from the stored run (-t -d -x -l -k -u -q -c,
// betas, seed); warns of each that was given and differs. Before options_resolve.
void state_fill_options(const CheckpointState* stored, Options* options);

// Can a run of this model with these options go on from `stored`? Else the reason, code 2: another
// model, T or total batch, or one that these ranks cannot cut into micro-batches, with what they
// can. After state_fill_options and before options_resolve.
bool state_check_resume(const CheckpointState* stored, const GPT2Config* model,
                        const Options* options, int world_size, Error* error);

// Is this the data of the stored run? Else the reason, code 2; --allow-new-data is the caller's.
bool state_check_data(const CheckpointState* stored, const DataFile* files, int num_files,
                      Error* error);

// Of everything in it: ranks of one run have the same.
uint64_t state_hash(const CheckpointState* state);

// ---- config.json --------------------------------------------------------------------------------

// Texts to be freed with free().
char* config_to_json(const GPT2Config* config);
char* generation_config_to_json(const GPT2Config* config);

// Reads transformers' config.json; ignores unknown keys, refuses what the model cannot honour.
bool config_from_json(GPT2Config* config, const char* text, size_t length, const char* where,
                      Error* error);

#ifdef __cplusplus
}
#endif
#endif
