// train/step.c - forward, backward, evaluation and cached generation, unit by unit. See step.h.
#include "train/step.h"

#include <stdlib.h>
#include <string.h>

#include "train/watchdog.h"

// ---- memory -------------------------------------------------------------------------------------

static size_t token_bytes(int B, int T) {
    return round_up((size_t)B * (size_t)T * sizeof(int), 256);
}

void step_plan(Ledger* ledger, int B, int T, int grad_accum_steps) {
    size_t losses = ((size_t)B + (size_t)grad_accum_steps) * sizeof(double);
    ledger_add(ledger, MEM_TRANSIENT, "batch", 2 * token_bytes(B, T) + losses);
}

void step_init(Step* step, GPT2* model, Zero* zero, Ledger* ledger) {
    int B = model->shape.B, T = model->shape.T;
    char* memory = (char*)device_alloc(ledger, "batch");
    step->model = model;
    step->zero = zero;
    step->inputs = (int*)memory;
    step->targets = (int*)(memory + token_bytes(B, T));
    step->seq_losses = (double*)(memory + 2 * token_bytes(B, T));
    step->micro_losses = step->seq_losses + B;
    size_t Vp = (size_t)gpt2_padded_vocab(&model->config);
    step->logits_row = (float*)checked_malloc(Vp * sizeof(float));
    step->logits_bits = (floatX*)checked_malloc(Vp * sizeof(floatX));
}

void step_free(Step* step) {
    free(step->logits_row);
    free(step->logits_bits);
    memset(step, 0, sizeof(*step));
}

// ---- training -----------------------------------------------------------------------------------

// The embedding unit stays gathered; its holder releases it.
static const floatX* forward_below_head(Step* step, int B, int T) {
    GPT2* model = step->model;
    Zero* zero = step->zero;
    int L = model->config.L;
    const floatX* embedding = zero_gather(zero, UNIT_EMBEDDING);
    zero_prefetch(zero, unit_block(0));
    gpt2_embed_forward(model, embedding, step->inputs, B, T);
    for (int l = 0; l < L; l++) {
        const floatX* block = zero_gather(zero, unit_block(l));
        zero_prefetch(zero, l + 1 < L ? unit_block(l + 1) : -1);
        gpt2_block_forward(model, block, l, B, T);
        watchdog_tick();
        zero_release(zero, unit_block(l));
    }
    return embedding;
}

void step_forward(Step* step, const int* inputs, const int* targets, int micro) {
    int B = step->model->shape.B, T = step->model->shape.T;
    size_t bytes = (size_t)B * (size_t)T * sizeof(int);
    device_upload_async(step->inputs, inputs, bytes);
    device_upload_async(step->targets, targets, bytes);
    zero_begin_micro_step(step->zero, step->number, micro);
    step->embedding = forward_below_head(step, B, T);
}

void step_backward(Step* step, float dloss, int micro) {
    GPT2* model = step->model;
    Zero* zero = step->zero;
    int B = model->shape.B, T = model->shape.T;

    Grad dembedding = zero_grad_begin(zero, UNIT_EMBEDDING);
    gpt2_head_loss(model, step->embedding, step->targets, dloss, dembedding, B, T);
    loss_sum_sequences(step->micro_losses + micro, model->losses, 1, B * T);
    zero_release(zero, UNIT_EMBEDDING);
    for (int l = model->config.L - 1; l >= 0; l--) {
        const floatX* block = zero_gather(zero, unit_block(l));
        zero_prefetch(zero, l > 0 ? unit_block(l - 1) : -1); // before the reduction of l is queued
        gpt2_block_backward(model, block, l, zero_grad_begin(zero, unit_block(l)), B, T);
        zero_release(zero, unit_block(l));
        zero_grad_end(zero, unit_block(l));
        watchdog_tick();
    }
    gpt2_embed_backward(model, dembedding, step->inputs, B, T);
    zero_grad_end(zero, UNIT_EMBEDDING);
}

// ---- evaluation and generation ------------------------------------------------------------------

void step_eval(Step* step, const int* inputs, const int* targets, int B, int T,
               double* seq_losses) {
    size_t bytes = (size_t)B * (size_t)T * sizeof(int);
    Grad no_grad = {NULL, false, false};
    device_upload(step->inputs, inputs, bytes);
    device_upload(step->targets, targets, bytes);
    const floatX* embedding = forward_below_head(step, B, T);
    gpt2_head_loss(step->model, embedding, step->targets, 0.0f, no_grad, B, T);
    loss_sum_sequences(step->seq_losses, step->model->losses, B, T);
    zero_release(step->zero, UNIT_EMBEDDING);
    device_download(seq_losses, step->seq_losses, (size_t)B * sizeof(double));
}

void step_cached(Step* step, const int* tokens, int first_pos, int n) {
    GPT2* model = step->model;
    Zero* zero = step->zero;
    int L = model->config.L, V = model->config.V;
    device_upload(step->inputs, tokens, (size_t)n * sizeof(int));
    const floatX* embedding = zero_gather(zero, UNIT_EMBEDDING);
    zero_prefetch(zero, unit_block(0));
    gpt2_cached_embed(model, embedding, step->inputs, first_pos, n);
    for (int l = 0; l < L; l++) {
        const floatX* block = zero_gather(zero, unit_block(l));
        zero_prefetch(zero, l + 1 < L ? unit_block(l + 1) : -1);
        gpt2_cached_block(model, block, l, first_pos, n);
        zero_release(zero, unit_block(l));
    }
    gpt2_cached_logits(model, embedding, n);
    zero_release(zero, UNIT_EMBEDDING);
    device_download(step->logits_bits, model->logits.ptr, (size_t)V * sizeof(floatX));
    for (int v = 0; v < V; v++) step->logits_row[v] = to_float(step->logits_bits[v]);
}
