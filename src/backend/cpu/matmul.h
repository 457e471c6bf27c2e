// backend/cpu/matmul.h - one matrix product in one thread: what matmul.c builds on.
//
// matmul_dnnl.c gives it to oneDNN; matmul_plain.c, linked instead with `make DNNL=0`, is our own.
#ifndef BACKEND_CPU_MATMUL_H
#define BACKEND_CPU_MATMUL_H

#include "backend/cpu/cpu.h"

// Element (r, c) stands at ptr[r * row_stride + c * col_stride]; one of the strides is 1.
typedef struct {
    const void* ptr;
    size_t row_stride, col_stride;
} Operand;

// out (M, N) = or += a (M, K) * b (K, N) + bias (N), accumulated in fp32.
typedef struct {
    int M, N, K;
    DType in_dtype; // of a, b and bias: fp32, or floatX where product_takes_floatX()
    Operand a, b;
    const void* bias; // NULL: none
    void* out;
    size_t out_ld;
    DType out_dtype; // fp32, or in_dtype
    bool accumulate; // fp32 only
} Product;

enum { PRODUCT_SCRATCH_BYTES = 2 << 20 }; // of one thread

void product_init(void); // for omp_get_max_threads() threads
void product_free(void);
const char* product_description(void);

// False where floatX has no products, or slower ones than fp32: operands are then widened before.
bool product_takes_floatX(void);

// Runs in the calling thread, alone. Equal arguments give equal bits on every thread.
void product_run(const Product* product, void* scratch);

#endif
