// train/loss_scale.c - dynamic loss scaling for fp16. See loss_scale.h.
#include "train/loss_scale.h"

double loss_scale_initial(DType dtype) { return dtype == DTYPE_FP16 ? LOSS_SCALE_INITIAL : 1.0; }

void loss_scale_update(double* scale, long* good_steps, bool overflow) {
    if (overflow) {
        *scale = *scale / 2 > LOSS_SCALE_FLOOR ? *scale / 2 : LOSS_SCALE_FLOOR;
        *good_steps = 0;
    } else if (++*good_steps == LOSS_SCALE_GROWTH) {
        *scale = *scale * 2 < LOSS_SCALE_CEILING ? *scale * 2 : LOSS_SCALE_CEILING;
        *good_steps = 0;
    }
}
