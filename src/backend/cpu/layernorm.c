// backend/cpu/layernorm.c - the residual addition with the LayerNorm that follows it, and its
// backward.
//
// Forward: one thread per row. Backward: one thread per CHUNK_ROWS rows, which leaves partial sums
// of dweight and dbias; these are then added in order of the chunks, a strip of columns per thread.
#include "backend/cpu/cpu.h"
#include "backend/cpu/vector_math.h"

enum { CHUNK_ROWS = 32, STRIP = 64 };

ScratchNeed layernorm_scratch(const OpsShape* shape) {
    size_t N = (size_t)shape->B * (size_t)shape->T, C = (size_t)shape->C;
    ScratchNeed need = {.per_thread = 2 * C * sizeof(float), .shared = 0};
    if (shape->backward) need.shared = ceil_div(N, CHUNK_ROWS) * 2 * C * sizeof(float);
    return need;
}

static float row_sum(const float* x, int n) {
    float lanes[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int j = 0; j < LANES; j++) lanes[j] += x[i + j];
    }
    for (; i < n; i++) lanes[i % LANES] += x[i];
    return sum_lanes(lanes);
}

static float row_sum_squared_difference(const float* x, float mean, int n) {
    float lanes[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int j = 0; j < LANES; j++) {
            float difference = x[i + j] - mean;
            lanes[j] = mul_add(difference, difference, lanes[j]);
        }
    }
    for (; i < n; i++) lanes[i % LANES] = mul_add(x[i] - mean, x[i] - mean, lanes[i % LANES]);
    return sum_lanes(lanes);
}

static float row_dot(const float* x, const float* y, int n) {
    float lanes[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int j = 0; j < LANES; j++) lanes[j] = mul_add(x[i + j], y[i + j], lanes[j]);
    }
    for (; i < n; i++) lanes[i % LANES] = mul_add(x[i], y[i], lanes[i % LANES]);
    return sum_lanes(lanes);
}

void layernorm_forward(Rows out, float* mean, float* rstd, Rows residual, Rows a, Rows b,
                       const floatX* weight, const floatX* bias, int N, int C) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        float* x = thread_scratch(); // (C) the row in fp32
        const floatX* a_row = row_at(a, (size_t)n);
        if (b.ptr != NULL) {
            const floatX* b_row = row_at(b, (size_t)n);
            floatX* sum = row_at(residual, (size_t)n);
#pragma omp simd
            for (int i = 0; i < C; i++) {
                sum[i] = to_floatX(to_float(a_row[i]) + to_float(b_row[i]));
                x[i] = to_float(sum[i]);
            }
        } else {
            widen(x, a_row, (size_t)C);
        }
        const float m = row_sum(x, C) / (float)C;
        const float variance = row_sum_squared_difference(x, m, C) / (float)C;
        const float r = 1.0f / sqrtf(variance + 1e-5f);
        floatX* o = row_at(out, (size_t)n);
#pragma omp simd
        for (int i = 0; i < C; i++) {
            float normalised = (x[i] - m) * r;
            o[i] = to_floatX(mul_add(normalised, to_float(weight[i]), to_float(bias[i])));
        }
        mean[n] = m;
        rstd[n] = r;
    }
}

// One row of backward; adds to dweight and dbias (C). normalised and dnormalised (C) are work
// space.
static void backward_row(floatX* dinp, const floatX* dresidual, float* restrict dweight,
                         float* restrict dbias, const floatX* dout, const floatX* inp, float mean,
                         float rstd, const floatX* weight, float* restrict normalised,
                         float* restrict dnormalised, int C) {
#pragma omp simd
    for (int i = 0; i < C; i++) {
        float d = to_float(dout[i]), x = (to_float(inp[i]) - mean) * rstd;
        normalised[i] = x;
        dnormalised[i] = d * to_float(weight[i]);
        dweight[i] = mul_add(d, x, dweight[i]);
        dbias[i] += d;
    }
    // The gradient loses its components along 1 and along the normalised row.
    const float along_one = row_sum(dnormalised, C) / (float)C;
    const float along_row = row_dot(dnormalised, normalised, C) / (float)C;
#pragma omp simd
    for (int i = 0; i < C; i++) {
        float d = mul_add(-normalised[i], along_row, dnormalised[i] - along_one) * rstd;
        dinp[i] = to_floatX(dresidual != NULL ? to_float(dresidual[i]) + d : d);
    }
}

void layernorm_backward(Rows dinp, Rows dresidual, Grad dweight, Grad dbias, Rows dout, Rows inp,
                        const float* mean, const float* rstd, const floatX* weight, int N, int C) {
    float* partials = shared_scratch(); // (chunks, 2, C): dweight, dbias
    const int chunks = (N + CHUNK_ROWS - 1) / CHUNK_ROWS;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int chunk = 0; chunk < chunks; chunk++) {
            float* normalised = thread_scratch();
            float* sums = partials + (size_t)chunk * 2 * (size_t)C;
            memset(sums, 0, 2 * (size_t)C * sizeof(float));
            const int end = N < (chunk + 1) * CHUNK_ROWS ? N : (chunk + 1) * CHUNK_ROWS;
            for (int n = chunk * CHUNK_ROWS; n < end; n++) {
                const size_t r = (size_t)n;
                backward_row(row_at(dinp, r), dresidual.ptr != NULL ? row_at(dresidual, r) : NULL,
                             sums, sums + C, row_at(dout, r), row_at(inp, r), mean[n], rstd[n],
                             weight, normalised, normalised + C, C);
            }
        }
#pragma omp for schedule(static)
        for (int first = 0; first < 2 * C; first += STRIP) {
            float sum[STRIP] = {0};
            const int width = 2 * C - first < STRIP ? 2 * C - first : STRIP;
            for (int chunk = 0; chunk < chunks; chunk++) {
                const float* part = partials + (size_t)chunk * 2 * (size_t)C + first;
#pragma omp simd
                for (int i = 0; i < width; i++) sum[i] += part[i];
            }
            // A strip may hold the end of dweight and the start of dbias.
            const int of_weight = first >= C ? 0 : C - first < width ? C - first : width;
            if (of_weight > 0) grad_write(dweight, (size_t)first, sum, (size_t)of_weight);
            if (of_weight < width) {
                grad_write(dbias, (size_t)(first + of_weight - C), sum + of_weight,
                           (size_t)(width - of_weight));
            }
        }
    }
}
