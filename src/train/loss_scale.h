// train/loss_scale.h - dynamic loss scaling for fp16: gradients are multiplied by a scale that
// keeps them inside the type's range.
//
// An overflow (a non-finite gradient, agreed over all ranks by the step's message) halves the
// scale, once; LOSS_SCALE_GROWTH steps without one double it. bf16 and fp32 have the range of fp32
// and use 1. Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
#ifndef TRAIN_LOSS_SCALE_H
#define TRAIN_LOSS_SCALE_H

#include <stdbool.h>
#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LOSS_SCALE_INITIAL 65536.0    // 2^16: the first steps find the right size from above
#define LOSS_SCALE_FLOOR   1.0        // below it a non-finite gradient is not the scale's fault
#define LOSS_SCALE_CEILING 16777216.0 // 2^24: beyond it nothing is left to gain
enum { LOSS_SCALE_GROWTH = 1000 };    // steps without overflow before the scale doubles

double loss_scale_initial(DType dtype);

// After a step of an fp16 run. good_steps counts the steps without overflow since the last change.
void loss_scale_update(double* scale, long* good_steps, bool overflow);

#ifdef __cplusplus
}
#endif
#endif
