// backend/cpu/cpu.h - what the files of the CPU backend share: scratch, rows and gradients.
//
// Threads: an operation opens one parallel region and gives every output element, or every block of
// a fixed size, to one thread. No result depends on which thread that is.
#ifndef BACKEND_CPU_CPU_H
#define BACKEND_CPU_CPU_H

#include "backend/ops.h"

// ---- scratch: a part per thread and a part for all ----------------------------------------------

// What one operation wants; the plan takes the largest of each. An operation holds its scratch only
// while it runs.
typedef struct {
    size_t per_thread, shared; // bytes
} ScratchNeed;

ScratchNeed matmul_scratch(const OpsShape* shape);
ScratchNeed attention_scratch(const OpsShape* shape);
ScratchNeed layernorm_scratch(const OpsShape* shape);

void* thread_scratch(void); // of the calling thread, at least 64-byte aligned
void* shared_scratch(void);
size_t shared_scratch_bytes(void);

// ---- rows and gradients -------------------------------------------------------------------------

static inline floatX* row_at(Rows rows, size_t r) { return rows.ptr + r * rows.ld; }

// Writes or adds values[0..n) as elements first.. of a gradient.
static inline void grad_write(Grad grad, size_t first, const float* values, size_t n) {
    if (!grad.is_fp32) {
        floatX* out = (floatX*)grad.ptr + first;
#pragma omp simd
        for (size_t i = 0; i < n; i++) out[i] = to_floatX(values[i]);
    } else if (grad.accumulate) {
        float* out = (float*)grad.ptr + first;
#pragma omp simd
        for (size_t i = 0; i < n; i++) out[i] += values[i];
    } else {
        memcpy((float*)grad.ptr + first, values, n * sizeof(float));
    }
}

// out = fp32(in), n elements; and back.
static inline void widen(float* out, const floatX* in, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) out[i] = to_float(in[i]);
}
static inline void narrow(floatX* out, const float* in, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) out[i] = to_floatX(in[i]);
}

#endif
