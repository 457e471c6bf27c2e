// train/options.h - the command line: one table that parses, checks and explains every option.
#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include "core/check.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } ScheduleKind;

// Field by field CONTRACT's options. `given` bits tell an option that was on the command line from a
// default: resume needs that.
typedef struct {
    // data and output
    const char *train_data, *val_data, *output_dir, *model; // -i -j -o -e; NULL: not given
    const char* tokenizer;                                   // --tokenizer
    // batch
    int micro_batch, seq_len;       // -b -t (0: min(1024, model T))
    long total_batch_tokens;        // -d (0: B*T*ranks)
    long max_steps, stop_at;        // -x (-1: one epoch), --stop-at (0: off)
    // learning rate
    ScheduleKind schedule;          // -k
    double lr;                      // -l
    long warmup_steps;              // -u
    double final_lr_frac;           // -q
    double weight_decay;            // -c
    long lr_batch_tokens;           // --lr-batch
    const char* lr_scale;           // --lr-scale linear|sqrt
    double grad_clip, beta1, beta2, adam_eps;
    // when
    int val_every, val_max_batches, sample_every, sample_tokens, hellaswag; // -v -m -s -g -h
    int save_every, keep_checkpoints, milestone_every, resume;              // -n -nk -nm -y
    bool overwrite, allow_new_data;
    int overfit_batch; // -a
    // engine
    int zero_stage, recompute;            // -z (-1: all, --plan only), -r
    const char *reduce, *accum_dtype;     // exact|fast, fp32|same
    const char* comm;                     // CUDA: nccl|mpi
    double skip_loss_z, skip_grad_z;      // -sl -sg
    const char* on_nan;                   // stop|skip
    int max_skips;
    int comm_timeout;                     // seconds
    double link_mb_s, link_gb_s, peak_tflops, memory_gb;
    uint64_t seed;
    int threads;
    // generation
    const char *prompt, *prompt_tokens;
    double temperature;
    int top_k;
    // modes
    bool plan, json, help, version, check_data, dry_run;
    int plan_ranks;        // --ranks
    const char* hash_file; // --hash
    int tf32, gelu_fusion, log_gpu_every; // -f -ge -lg
    uint64_t given;        // bit per option, see option_given
} Options;

// Fills defaults, then the command line. False: one line in `error`, code 2.
bool options_parse(Options* options, int argc, char** argv, Error* error);
// Was the option with that long name ("--micro-batch") on the command line?
bool option_given(const Options* options, const char* long_name);
void options_print_help(void); // stdout

#ifdef __cplusplus
}
#endif
#endif
