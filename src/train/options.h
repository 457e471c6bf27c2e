// train/options.h - the command line: one table that parses, checks and explains every option.
//
// options_parse knows the command line alone. What an option means for a model, a number of ranks
// or a backend is settled later by options_resolve, after a resumed run has put in what it stored.
#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include "backend/comm.h"
#include "backend/device.h"
#include "core/check.h"
#include "gpt2/gpt2.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DEFAULT_TRAIN_DATA "data/tinyshakespeare/tiny_shakespeare_train.bin"
#define DEFAULT_VAL_DATA   "data/tinyshakespeare/tiny_shakespeare_val.bin"
#define DEFAULT_MODEL      "d12"

enum { OPTIONS_MAX = 96 };
enum { ZERO_STAGE_ALL = -1 }; // -z all, with --plan

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } ScheduleKind;

// Text fields point into argv, or are NULL where the default is decided by options_resolve.
typedef struct {
    // data and output
    const char *train_data, *val_data; // -i -j; val NULL: no validation
    const char *output_dir, *model;    // -o -e; NULL: nothing is written, DEFAULT_MODEL
    const char* tokenizer;             // --tokenizer; NULL: look for it
    // batch
    int micro_batch, seq_len; // -b -t (0: min(1024, model T))
    long total_batch_tokens;  // -d (0: B*T*ranks)
    int grad_accum_steps;     // from options_resolve: total batch / (B*T*ranks)
    long max_steps, stop_at;  // -x (-1: one epoch), --stop-at (0: off)
    // learning rate
    ScheduleKind schedule; // -k
    double lr;             // -l
    long warmup_steps;     // -u
    double final_lr_frac;  // -q
    double weight_decay;   // -c
    long lr_batch_tokens;  // --lr-batch
    const char* lr_scale;  // --lr-scale linear|sqrt
    double grad_clip, beta1, beta2, adam_eps;
    // when
    int val_every, val_max_batches, sample_every, sample_tokens, hellaswag; // -v -m -s -g -h
    int save_every, keep_checkpoints, milestone_every, resume;              // -n -nk -nm -y
    bool overwrite, allow_new_data;
    int overfit_batch; // -a
    // engine
    int zero_stage, recompute;        // -z, -r (-1: 1 on CUDA, 0 on the CPU)
    const char *reduce, *accum_dtype; // exact|fast (NULL: by backend), fp32|same
    const char* comm;                 // nccl|mpi, CUDA only
    double skip_loss_z, skip_grad_z;  // -sl -sg
    const char* on_nan;               // stop|skip
    int max_skips;
    int comm_timeout; // seconds
    double link_mb_s, link_gb_s, peak_tflops, memory_gb;
    uint64_t seed;
    int threads;
    // generation
    const char *prompt, *prompt_tokens;
    double temperature;
    int top_k;
    // modes
    bool plan, json, help, version, check_data, dry_run;
    int plan_ranks;                       // --ranks (0: the ranks of this run)
    const char* hash_file;                // --hash
    int tf32, gelu_fusion, log_gpu_every; // -f -ge -lg
    const char* given[OPTIONS_MAX];       // text by place in the table, see option_given; NULL: not
} Options;

// A prompt instead of training?
static inline bool wants_prompt(const Options* o) { return o->prompt || o->prompt_tokens; }

// Fills defaults, then the command line; the last of an option given twice wins. False: one line in
// `error`, code 2. Options that are accepted without effect warn.
bool options_parse(Options* options, int argc, char** argv, Error* error);

// Was the option with that long name ("--micro-batch") on the command line? An unknown name dies.
bool option_given(const Options* options, const char* long_name);

void options_print_help(void); // stdout

// What was given on the command line, as a shell takes it, without -z and questions. stdout
void options_print_given(const Options* options);

// What follows from the model, the ranks and the backend ("cpu" or "cuda"): sequence length, total
// batch, grad_accum_steps, recompute level, reduction; and that all of it fits together. A total
// batch that does not divide names the two nearest that do.
bool options_resolve(Options* options, const GPT2Config* model, int world_size, const char* backend,
                     Error* error);

// The learning rate: -l, or with --lr-batch -l scaled to the run's total batch. After
// options_resolve.
double options_scaled_lr(const Options* options);

CommOptions options_comm(const Options* options);
DeviceOptions options_device(const Options* options, int local_rank, int local_size);

#ifdef __cplusplus
}
#endif
#endif
