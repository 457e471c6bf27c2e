// train/generate.c - sampling text. See generate.h.
#include "train/generate.h"

#include <math.h>
#include <stdlib.h>

#include "core/rng.h"

// Places the k ids with the largest logits first (ties: the smaller id), by quickselect. The order
// of comparison depends on the logits alone.
static bool precedes(const float* logits, int a, int b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void select_largest(const float* logits, int* ids, int n, int k) {
    int low = 0, high = n - 1;
    while (low < high) {
        int pivot = ids[low + (high - low) / 2], i = low, j = high;
        while (i <= j) {
            while (precedes(logits, ids[i], pivot)) i++;
            while (precedes(logits, pivot, ids[j])) j--;
            if (i > j) break;
            int swapped = ids[i];
            ids[i++] = ids[j];
            ids[j--] = swapped;
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            return;
    }
}

static int argmax(const float* logits, int V) {
    int best = 0;
    for (int v = 1; v < V; v++) {
        if (precedes(logits, v, best)) best = v;
    }
    return best;
}

static int compare_ints(const void* a, const void* b) { return *(const int*)a - *(const int*)b; }

int sample_token(const float* logits, int V, double temperature, int top_k, double u,
                 int* scratch) {
    int best = argmax(logits, V);
    if (temperature == 0.0 || top_k == 1) return best;
    int n = V;
    for (int v = 0; v < V; v++) scratch[v] = v;
    if (top_k > 0 && top_k < V) {
        n = top_k;
        select_largest(logits, scratch, V, n);
        qsort(scratch, (size_t)n, sizeof(int),
              compare_ints); // one order, whatever the selection did
    }
    double max = (double)logits[best], sum = 0;
    for (int i = 0; i < n; i++) sum += exp(((double)logits[scratch[i]] - max) / temperature);
    double target = u * sum, cumulative = 0;
    for (int i = 0; i < n; i++) {
        cumulative += exp(((double)logits[scratch[i]] - max) / temperature);
        if (cumulative > target) return scratch[i];
    }
    return best; // rounding left u * sum beyond the last term, or the logits are not finite
}

void generate(Step* step, const Sampling* sampling, int* tokens, int num_prompt, int num_total,
              void (*on_token)(int token, void* context), void* context) {
    int V = step->model->config.V, max_rows = step->model->shape.cache_rows;
    CHECK(num_total <= step->model->shape.cache_T, "generate: %d tokens, room for %d", num_total,
          step->model->shape.cache_T);
    int* scratch = (int*)checked_malloc((size_t)V * sizeof(int));
    int done = 0;
    for (int known = num_prompt; known < num_total; known++) {
        while (done < known) { // the prompt in pieces, then one token at a time
            int n = known - done < max_rows ? known - done : max_rows;
            step_cached(step, tokens + done, done, n);
            done += n;
        }
        double u =
            rng_uniform(sampling->seed, RNG_SAMPLE + (uint64_t)sampling->step, (uint64_t)known);
        tokens[known] =
            sample_token(step->logits_row, V, sampling->temperature, sampling->top_k, u, scratch);
        if (!isfinite(step->logits_row[tokens[known]]) && known == num_prompt)
            warn("the model's logits are not finite: what it generates means nothing");
        if (on_token) on_token(tokens[known], context);
    }
    free(scratch);
}
