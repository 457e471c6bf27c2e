// train/report.h - what a reader sees: start table, a line a step, a bar on a terminal, end table.
//
// Only rank 0 reports: the other ranks pass a Report whose `out` is NULL, and nothing is printed.
// Memory in MiB and GiB (2^20, 2^30), rates in GB/s (1e9).
#ifndef TRAIN_REPORT_H
#define TRAIN_REPORT_H

#include <stdio.h>
#include "train/log.h"
#include "train/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    FILE* out;        // stdout; stderr with --prompt; NULL: silent
    bool is_terminal; // draw the bar
    long max_steps;
    size_t memory_bytes; // of this rank, as planned
    double mean_ms;      // running mean of step times, for the time that is left
    long steps_seen;
    double first_loss, last_loss, last_val_loss; // NAN: none
} Report;

void report_init(Report* report, FILE* out);
void report_start(Report* report, const RunInfo* run);
void report_step(Report* report, const StepInfo* step);
void report_val(Report* report, long step, double loss, uint64_t tokens);
void report_eval(Report* report, long step, const char* name, int correct, int total);
void report_sample(Report* report, long step, const Tokenizer* tokenizer, const int* ids,
                   int num_ids);
void report_checkpoint(Report* report, long step, const char* dir, uint64_t bytes, double ms);
// A line of text that is not a warning: "resumed at step 10 from out/step_00000010".
void report_note(Report* report, const char* fmt, ...) PRINTF_LIKE(2, 3);
void report_end(Report* report, const EndInfo* end);

// "3.1 GiB", "512.0 MiB", "1.5 KiB", "12 B"
enum { REPORT_BYTES_CHARS = 24 };
const char* report_bytes(double bytes, char text[REPORT_BYTES_CHARS]);

#ifdef __cplusplus
}
#endif
#endif
