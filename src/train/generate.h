// train/generate.h - sampling text: temperature, top-k, one token after the other.
//
// Random numbers are keyed by seed, step and position, and every rank draws the same ones, so the
// text depends on neither ranks nor stage.
#ifndef TRAIN_GENERATE_H
#define TRAIN_GENERATE_H

#include "train/step.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PREFILL_TOKENS = 64 }; // prompt tokens that go through the model in one pass

typedef struct {
    double temperature; // 0: the likeliest token
    int top_k;          // 0: all
    uint64_t seed;
    long step; // of training; 0 for a prompt
} Sampling;

// Continues tokens[0 .. num_prompt) up to tokens[num_total); num_total <= cache_T of the model.
// on_token, if not NULL, is called with each new token as it comes. Collective under stage 3.
void generate(Step* step, const Sampling* sampling, int* tokens, int num_prompt, int num_total,
              void (*on_token)(int token, void* context), void* context);

// The choice itself. u: uniform in [0, 1). logits (V); scratch (V) ints.
int sample_token(const float* logits, int V, double temperature, int top_k, double u, int* scratch);

#ifdef __cplusplus
}
#endif
#endif
