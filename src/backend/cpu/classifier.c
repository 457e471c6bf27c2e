// backend/cpu/classifier.c - cross entropy over rows of logits, in place, and sums of losses.
//
// One thread per row: maximum, sum of exponentials, then the gradient. A row of GPT-2's vocabulary
// stays in the second-level cache between the passes, so memory sees one read and one write.
#include "backend/cpu/cpu.h"
#include "backend/cpu/vector_math.h"

static float row_max(const floatX* x, int n) {
    float lanes[LANES];
    for (int j = 0; j < LANES; j++) lanes[j] = to_float(x[0]);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int j = 0; j < LANES; j++) {
            float value = to_float(x[i + j]);
            lanes[j] = value > lanes[j] ? value : lanes[j];
        }
    }
    float max = to_float(x[0]);
    for (; i < n; i++) max = to_float(x[i]) > max ? to_float(x[i]) : max;
    for (int j = 0; j < LANES; j++) max = lanes[j] > max ? lanes[j] : max;
    return max;
}

static float row_sum_exp(const floatX* x, float max, int n) {
    float lanes[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int j = 0; j < LANES; j++) lanes[j] += fast_exp(to_float(x[i + j]) - max);
    }
    for (; i < n; i++) lanes[i % LANES] += fast_exp(to_float(x[i]) - max);
    return sum_lanes(lanes);
}

void classifier_loss(float* losses, Rows logits, const int* targets, int N, int V, int Vp,
                     float dloss, bool write_dlogits) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        floatX* x = row_at(logits, (size_t)n);
        const int target = targets[n];
        if (target < 0) { // masked
            losses[n] = 0.0f;
            if (write_dlogits) memset(x, 0, (size_t)Vp * sizeof(floatX));
            continue;
        }
        const float max = row_max(x, V);
        const float sum = row_sum_exp(x, max, V);
        const float target_logit = to_float(x[target]);
        losses[n] = max + logf(sum) - target_logit;
        if (!write_dlogits) continue;

        const float scale = dloss / sum;
#pragma omp simd
        for (int i = 0; i < V; i++) x[i] = to_floatX(fast_exp(to_float(x[i]) - max) * scale);
        x[target] = to_floatX(fast_exp(target_logit - max) * scale - dloss);
        memset(x + V, 0, (size_t)(Vp - V) * sizeof(floatX));
    }
}

void loss_sum_sequences(double* seq_losses, const float* losses, int B, int T) {
    for (int b = 0; b < B; b++) {
        double sum = 0.0;
        for (int t = 0; t < T; t++) sum += (double)losses[(size_t)b * (size_t)T + (size_t)t];
        seq_losses[b] = sum;
    }
}
