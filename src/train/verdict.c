// train/verdict.c - update, skip or stop. See verdict.h.
#include "train/verdict.h"

#include <stdio.h>
#include <string.h>

#include "train/loss_scale.h"
#include "train/schedule.h"

static bool is_outlier(const OutlierValues* window, double value, double limit) {
    return limit > 0 && outlier_zscore(window, value) > limit;
}

// "step 3: the gradient of wte.weight on rank 1 is not finite (2 elements)"
static void describe(const StepMessage* message, long step, char* text, size_t size) {
    if (message->nonfinite_rank >= 0)
        snprintf(text, size,
                 "step %ld: the gradient of %s on rank %d is not finite (%zu element%s)", step,
                 message->nonfinite_tensor, message->nonfinite_rank, message->nonfinite_count,
                 message->nonfinite_count == 1 ? "" : "s");
    else
        snprintf(text, size, "step %ld: the loss is not finite", step);
}

Verdict verdict_of_step(const StepMessage* message, const CheckpointState* state,
                        const Options* options, long step, int skips_in_a_row) {
    Verdict verdict = {VERDICT_UPDATE, NULL, ""};
    if (!message->nonfinite) {
        if (is_outlier(&state->outlier_loss, message->loss, options->skip_loss_z) ||
            is_outlier(&state->outlier_norm, message->grad_norm, options->skip_grad_z)) {
            verdict.kind = VERDICT_SKIP;
            verdict.skipped = "outlier";
        }
        return verdict;
    }
    bool overflow = FLOATX_DTYPE == DTYPE_FP16 && state->loss_scale > LOSS_SCALE_FLOOR;
    bool stop = !overflow && strcmp(options->on_nan, "stop") == 0;
    bool too_many = skips_in_a_row + 1 >= options->max_skips;
    char what[160], then[96];
    describe(message, step, what, sizeof(what));
    if (stop)
        snprintf(then, sizeof(then),
                 "stopping; find the bad data or weights, lower -l, or --on-nan skip");
    else if (too_many)
        snprintf(then, sizeof(then), "stopping after --max-skips %d in a row", options->max_skips);
    else if (overflow)
        snprintf(then, sizeof(then), "skipped, the loss scale %g halves", state->loss_scale);
    else
        snprintf(then, sizeof(then), "skipped");
    verdict.kind = stop || too_many ? VERDICT_STOP : VERDICT_SKIP;
    verdict.skipped = overflow ? "overflow" : "nonfinite";
    snprintf(verdict.text, sizeof(verdict.text), "%s; %s", what, then);
    return verdict;
}

void verdict_book(const Verdict* verdict, const StepMessage* message, CheckpointState* state,
                  int* skips_in_a_row) {
    if (FLOATX_DTYPE == DTYPE_FP16)
        loss_scale_update(&state->loss_scale, &state->loss_scale_good_steps, message->nonfinite);
    if (message->nonfinite) {
        (*skips_in_a_row)++;
        return;
    }
    // Outliers, too, as in llm.c: a level that stays is the new normal, not a skip for ever.
    outlier_push(&state->outlier_loss, message->loss);
    outlier_push(&state->outlier_norm, message->grad_norm);
    if (verdict->kind != VERDICT_UPDATE) return;
    *skips_in_a_row = 0;
    state->adam_t++;
}
