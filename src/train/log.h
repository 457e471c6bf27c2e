// train/log.h - log.jsonl in the output directory: one JSON object a line, for programs to read.
//
// A line goes out whole or is kept and tried again with the next one, so that a disk that is full
// for a while costs nothing; only one that stays full to the end is an error.
#ifndef TRAIN_LOG_H
#define TRAIN_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "backend/comm.h"
#include "core/check.h"
#include "core/ledger.h"
#include "gpt2/gpt2.h"
#include "train/options.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- what a run says of itself, to the log and to the reader ------------------------------------

typedef struct {
    const char *version, *precision, *backend;                   // "1.0", "fp32", "cpu"
    const char* device;                                          // device_description()
    const char* transport;                                       // Comm.name
    const char *reduce, *accum_dtype;                            // "exact", "fp32"
    const char *train_data, *val_data, *output_dir, *model_name; // NULL: none
    const char* fault;                                           // fault_description()
    int ranks, threads, zero_stage, recompute;
    GPT2Config model;
    size_t num_parameters;
    int batch, seq_len, grad_accum_steps;
    long total_batch_tokens, max_steps, start_step;
    uint64_t seed;
    const Options* options;                   // resolved: learning rate and schedule
    const Ledger* ledger;                     // of this rank
    size_t elements_per_step, bytes_per_step; // sent, as planned
} RunInfo;

typedef struct {
    long step;
    double loss, grad_norm, lr;
    double loss_scale;   // fp16; 0: not shown
    const char* skipped; // NULL, "nonfinite", "overflow", "outlier"
    double ms, forward_ms, backward_ms, update_ms, comm_wait_ms;
    uint64_t tokens; // consumed so far, this step included
    double tokens_per_s;
    double mfu; // fraction of the peak; NAN: no peak is known
    size_t elements_sent, bytes_sent;
} StepInfo;

typedef struct {
    long step;
    const char* reason; // "finished", "stopped", "signal", "nonfinite"
    uint64_t params_hash;
    size_t peak_bytes;
    double seconds;
    const Comm* comm; // what its collectives did, for the end table; NULL: not shown
} EndInfo;

// ---- the file -----------------------------------------------------------------------------------

typedef struct Log Log; // NULL is a log that goes nowhere: every function takes it

// output_dir/log.jsonl. keep_to_step < 0: a new file; else lines of later steps and a torn last
// line are dropped (temporary name, rename) and new ones follow. NULL with `error` set (code 4).
Log* log_open(const char* output_dir, long keep_to_step, Error* error);
// Writes what is still waiting. False: lines are lost, `error` says why (code 4).
bool log_close(Log* log, Error* error);

void log_start(Log* log, const RunInfo* run);
void log_step(Log* log, const StepInfo* step);
void log_val(Log* log, long step, double loss, uint64_t tokens);
void log_eval(Log* log, long step, const char* name, int correct, int total);
// text (NUL-terminated UTF-8), or ids where text is NULL.
void log_sample(Log* log, long step, const char* text, const int* ids, int num_ids);
void log_checkpoint(Log* log, long step, const char* dir, uint64_t bytes, double ms);
void log_checkpoint_failed(Log* log, long step, const char* reason);
void log_end(Log* log, const EndInfo* end);

#ifdef __cplusplus
}
#endif
#endif
