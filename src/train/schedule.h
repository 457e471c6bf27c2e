// train/schedule.h - numbers of a step that need no tensor: learning rate, clipping, outliers.
#ifndef TRAIN_SCHEDULE_H
#define TRAIN_SCHEDULE_H

#include <stdbool.h>
#include "train/options.h"
#include "train/state.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    ScheduleKind kind;
    double lr; // peak
    long warmup_steps;
    long max_steps;    // where the decay ends, whatever --stop-at says
    double final_frac; // of lr, at max_steps
} Schedule;

const char* schedule_name(ScheduleKind kind); // "cosine", "linear", "constant", "wsd"
bool schedule_from_name(const char* name, ScheduleKind* kind);

// The learning rate of step 1 .. max_steps, which uses index step - 1: linear warm-up, then the
// decay.
double schedule_lr(const Schedule* schedule, long step);

// min(1, clip / (grad_norm + 1e-6)); 1 with clip 0.
double clip_coefficient(double grad_norm, double clip);

// `lr`, meant for batches of from_tokens, for batches of to_tokens. rule "linear" or "sqrt".
// Sources: Goyal et al. 2017, arXiv:1706.02677, section 2.1 (linear); Krizhevsky 2014,
// arXiv:1404.5997, section 5 (square root).
double lr_for_batch(double lr, long from_tokens, long to_tokens, const char* rule);

// Outliers: OutlierValues (train/state.h) holds the last finite values, skipped as outliers or not,
// and is part of state.json, so that a resumed run decides as an uninterrupted one does.

// Standard deviations between value and the window's mean; 0 until the window is full or while all
// its values are equal, so that early steps are never outliers.
double outlier_zscore(const OutlierValues* window, double value);
// Appends a value; values that are not finite are ignored.
void outlier_push(OutlierValues* window, double value);

#ifdef __cplusplus
}
#endif
#endif
