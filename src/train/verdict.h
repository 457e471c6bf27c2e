// train/verdict.h - what becomes of a step: update, skip, or stop the run.
//
// Decided from the step's message and the run's state alone, so all ranks decide the same without
// another word. A skipped step keeps its number: data and schedule go on, weights and moments stay.
#ifndef TRAIN_VERDICT_H
#define TRAIN_VERDICT_H

#include "train/options.h"
#include "train/state.h"
#include "zero/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { VERDICT_UPDATE, VERDICT_SKIP, VERDICT_STOP } VerdictKind;

typedef struct {
    VerdictKind kind;
    const char* skipped; // NULL, "nonfinite", "overflow" or "outlier": for log and reader
    char text[260];      // one line for stderr; "": nothing to say
} Verdict;

// skips_in_a_row: nonfinite and overflow skips just before this step; outliers neither count nor
// reset. fp16 overflow is skipped while the loss scale can still fall; everything else that is not
// finite follows --on-nan, and --max-skips in a row stop the run.
Verdict verdict_of_step(const StepMessage* message, const CheckpointState* state,
                        const Options* options, long step, int skips_in_a_row);

// Books what the step changes for later ones: update count, outlier windows, loss scale.
void verdict_book(const Verdict* verdict, const StepMessage* message, CheckpointState* state,
                  int* skips_in_a_row);

#ifdef __cplusplus
}
#endif
#endif
