// backend/cpu/gelu.c - GELU, when it is computed again; otherwise matmul.c applies it to its tiles.
#include "backend/cpu/cpu.h"
#include "backend/cpu/vector_math.h"

void gelu_forward(Rows out, Rows in, int N, int C) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        floatX* o = row_at(out, (size_t)n);
        const floatX* x = row_at(in, (size_t)n);
#pragma omp simd
        for (int i = 0; i < C; i++) o[i] = to_floatX(gelu(to_float(x[i])));
    }
}
