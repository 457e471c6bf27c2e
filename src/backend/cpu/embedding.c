// backend/cpu/embedding.c - token and position embeddings, forward and backward.
//
// Backward gives each strip of columns to one thread, which walks all positions in order: tokens
// that repeat are summed in index order without locks.
#include "backend/cpu/cpu.h"

enum { STRIP = 64 }; // columns of one thread at a time: 256 bytes of fp32

void embedding_forward(Rows out, const int* tokens, const floatX* wte, const floatX* wpe,
                       int first_pos, int B, int T, int C) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < B * T; n++) {
        floatX* o = row_at(out, (size_t)n);
        const floatX* token = wte + (size_t)tokens[n] * (size_t)C;
        const floatX* position = wpe + (size_t)(first_pos + n % T) * (size_t)C;
#pragma omp simd
        for (int i = 0; i < C; i++) o[i] = to_floatX(to_float(token[i]) + to_float(position[i]));
    }
}

static void strip_of_dwte(float* dwte, Rows dout, const int* tokens, int N, int C, int first,
                          int width) {
    for (int n = 0; n < N; n++) {
        float* d = dwte + (size_t)tokens[n] * (size_t)C + first;
        const floatX* g = row_at(dout, (size_t)n) + first;
#pragma omp simd
        for (int i = 0; i < width; i++) d[i] += to_float(g[i]);
    }
}

static void strip_of_dwpe(Grad dwpe, Rows dout, int B, int T, int C, int maxT, int first,
                          int width) {
    float sum[STRIP];
    for (int t = 0; t < maxT; t++) {
        memset(sum, 0, sizeof sum);
        for (int b = 0; t < T && b < B; b++) {
            const floatX* g = row_at(dout, (size_t)b * (size_t)T + (size_t)t) + first;
#pragma omp simd
            for (int i = 0; i < width; i++) sum[i] += to_float(g[i]);
        }
        grad_write(dwpe, (size_t)t * (size_t)C + (size_t)first, sum, (size_t)width);
    }
}

void embedding_backward(Grad dwte, Grad dwpe, Rows dout, const int* tokens, int B, int T, int C,
                        int maxT, int V) {
    CHECK(dwte.is_fp32, "the gradient of wte (%d, %d) must be fp32: the head wrote its part", V, C);
#pragma omp parallel for schedule(static)
    for (int first = 0; first < C; first += STRIP) {
        int width = C - first < STRIP ? C - first : STRIP;
        strip_of_dwte(dwte.ptr, dout, tokens, B * T, C, first, width);
        strip_of_dwpe(dwpe, dout, B, T, C, maxT, first, width);
    }
}
