// train/schedule.c - learning rate schedules, clipping, outliers.
#include "train/schedule.h"

#include <math.h>
#include <string.h>

static const char* const NAMES[] = {"cosine", "linear", "constant", "wsd"};

const char* schedule_name(ScheduleKind kind) { return NAMES[kind]; }

bool schedule_from_name(const char* name, ScheduleKind* kind) {
    for (int i = 0; i < (int)(sizeof NAMES / sizeof NAMES[0]); i++)
        if (strcmp(name, NAMES[i]) == 0) {
            *kind = (ScheduleKind)i;
            return true;
        }
    return false;
}

// Where index lies between first and last, in [0, 1].
static double progress(long index, long first, long last) {
    if (index <= first) return 0;
    if (index >= last) return 1;
    return (double)(index - first) / (double)(last - first);
}

double schedule_lr(const Schedule* s, long step) {
    if (step <= s->warmup_steps) return s->lr * (double)step / (double)s->warmup_steps;
    long index = step - 1;
    double height = 1; // of the decaying part: 1 at the peak, 0 at final_frac
    switch (s->kind) {
    case SCHEDULE_COSINE:
        height = 0.5 * (1 + cos(M_PI * progress(index, s->warmup_steps, s->max_steps)));
        break;
    case SCHEDULE_LINEAR:
        height = 1 - progress(index, s->warmup_steps, s->max_steps);
        break;
    case SCHEDULE_CONSTANT:
        return s->lr;
    case SCHEDULE_WSD: {
        // Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395); 1 - sqrt as decay over the
        // last fifth: Haegele et al. 2024, arXiv:2405.18392, section 4.
        long decay_start = s->max_steps * 4 / 5;
        height = 1 - sqrt(progress(index, decay_start, s->max_steps));
        break;
    }
    }
    return s->lr * (s->final_frac + (1 - s->final_frac) * height);
}

double clip_coefficient(double grad_norm, double clip) {
    if (clip == 0) return 1;
    double coefficient = clip / (grad_norm + 1e-6);
    return coefficient < 1 ? coefficient : 1;
}

double lr_for_batch(double lr, long from_tokens, long to_tokens, const char* rule) {
    double ratio = (double)to_tokens / (double)from_tokens;
    return lr * (strcmp(rule, "sqrt") == 0 ? sqrt(ratio) : ratio);
}

double outlier_zscore(const OutlierValues* window, double value) {
    if (window->count < OUTLIER_WINDOW) return 0;
    double mean = 0, variance = 0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) mean += window->values[i];
    mean /= OUTLIER_WINDOW;
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        double distance = window->values[i] - mean;
        variance += distance * distance;
    }
    double deviation = sqrt(variance / OUTLIER_WINDOW);
    return deviation > 0 ? (value - mean) / deviation : 0;
}

void outlier_push(OutlierValues* window, double value) {
    if (!isfinite(value)) return;
    if (window->count == OUTLIER_WINDOW) {
        memmove(window->values, window->values + 1, (OUTLIER_WINDOW - 1) * sizeof(double));
        window->count--;
    }
    window->values[window->count++] = value;
}
