// train/step.h - where the model meets the engine: the only file that knows units of both.
//
// gpt2/ computes one unit from plain pointers, zero/ hands those pointers out; here the two are
// strung together. Every pass over the model, in training, evaluation and sampling, is one of these
// loops.
#ifndef TRAIN_STEP_H
#define TRAIN_STEP_H

#include "gpt2/gpt2.h"
#include "zero/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    GPT2* model;
    Zero* zero;
    long number;             // of the training step under way, from 1
    int *inputs, *targets;   // (B, T) device: the micro-batch at hand
    const floatX* embedding; // the unit's weights, held from forward to the head's backward
    double* seq_losses;      // (B) device
    double* micro_losses;    // (grad_accum_steps) device: sum of token losses of each micro-step
    float* logits_row;       // (Vp) host: the last token's logits of step_cached, as floats
    floatX* logits_bits;     // (Vp) host: the same as they come from the device
} Step;

// Adds the line "batch" to the plan, and takes its memory.
void step_plan(Ledger* ledger, int B, int T, int grad_accum_steps);
void step_init(Step* step, GPT2* model, Zero* zero, Ledger* ledger);
void step_free(Step* step);

// One micro-step. Tokens (B, T) are on the host and may be reused at once.
// Forward ends below the head; backward begins with the head, whose loss and gradient are one pass.
// dloss: gradient of what is minimised with respect to each token's loss, loss_scale / tokens.
void step_forward(Step* step, const int* inputs, const int* targets, int micro);
void step_backward(Step* step, float dloss, int micro);

// Sum of token losses of each of B sequences of length T, to the host; targets of -1 do not count.
// Collective under stage 3: every rank calls it equally often.
void step_eval(Step* step, const int* inputs, const int* targets, int B, int T, double* seq_losses);

// n more tokens of the cached sequence, at positions first_pos ...; afterwards step->logits_row
// holds the logits of what comes next. Collective under stage 3.
void step_cached(Step* step, const int* tokens, int first_pos, int n);

#ifdef __cplusplus
}
#endif
#endif
