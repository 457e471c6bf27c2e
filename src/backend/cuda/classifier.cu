// backend/cuda/classifier.cu - softmax, cross entropy and its gradient on rows of logits.
//
// Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).
#include "backend/cuda/common.cuh"

namespace {

// Running maximum of a set of logits and the sum of exp2((x - max) * LOG2E) over them. An empty set
// has a finite maximum, so that no difference of infinities arises.
struct Softmax {
    float max, sum;
};
constexpr float EMPTY_MAX = -3.0e38f;

__device__ inline Softmax merge(Softmax a, Softmax b) {
    float top = fmaxf(a.max, b.max);
    return {top, a.sum * exp2f((a.max - top) * LOG2E) + b.sum * exp2f((b.max - top) * LOG2E)};
}

// The merged value of the whole block, in an order that depends on the block's size alone.
__device__ inline Softmax block_merge(Softmax mine) {
    __shared__ Softmax of_warp[WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other_max = __shfl_xor_sync(~0u, mine.max, step);
        float other_sum = __shfl_xor_sync(~0u, mine.sum, step);
        mine = merge(mine, {other_max, other_sum});
    }
    if (lane == 0) of_warp[warp] = mine;
    __syncthreads();
    Softmax all = of_warp[0];
    for (int w = 1; w < warps; w++) all = merge(all, of_warp[w]);
    return all;
}

} // namespace

// Work: a block a row; a thread takes every blockDim-th pack. The second pass walks the row from
// its end: what was read last is nearest in the cache (a row of 50304 bf16 is 98 KB; two blocks of
// 1024 threads on each of 132 multiprocessors keep 26 MB of rows alive, within the 50 MB L2 of an
// H100). Bytes: 2 reads (the second from L2) and 1 write of N Vp floatX; without write_dlogits 1
// read. FLOPs: about 8 N V, 2 N V exponentials. Bound: device memory bandwidth.
//   losses (N)   logits (N, Vp)   targets (N)
template <bool ALIGNED>
__global__ void __launch_bounds__(1024)
    classifier_kernel(float* losses, Matrix logits, const int* targets, int V, int Vp, float dloss,
                      bool write_dlogits) {
    size_t r = blockIdx.x;
    Native* row = logits.row(r);
    int target = targets[r];
    int packs = (Vp + PACK - 1) / PACK, packs_of_V = (V + PACK - 1) / PACK;
    if (target < 0) { // the whole block
        if (threadIdx.x == 0) losses[r] = 0.0f;
        if (!write_dlogits) return;
        for (int k = threadIdx.x; k < packs; k += blockDim.x) {
            float zero[PACK] = {};
            store<ALIGNED>(row + k * PACK, zero, Vp - k * PACK);
        }
        return;
    }

    Softmax mine = {EMPTY_MAX, 0.0f};
    for (int k = threadIdx.x; k < packs_of_V; k += blockDim.x) {
        int c = k * PACK;
        float x[PACK], top = mine.max;
        load<ALIGNED>(x, row + c, Vp - c);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            if (c + i < V) top = fmaxf(top, x[i]);
        }
        float sum = mine.sum * exp2f((mine.max - top) * LOG2E);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            if (c + i < V) sum += exp2f((x[i] - top) * LOG2E);
        }
        mine = {top, sum};
    }
    Softmax all = block_merge(mine);
    if (threadIdx.x == 0) losses[r] = all.max + LN2 * log2f(all.sum) - widen(row[target]);
    if (!write_dlogits) return;

    __syncthreads(); // row[target] has been read
    float scale = dloss / all.sum;
    int last = packs - 1 - (int)threadIdx.x;
    for (int k = last; k >= 0; k -= blockDim.x) {
        int c = k * PACK;
        float x[PACK];
        load<ALIGNED>(x, row + c, Vp - c);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            float d = exp2f((x[i] - all.max) * LOG2E) * scale;
            if (c + i == target) d -= dloss;
            x[i] = c + i < V ? d : 0.0f;
        }
        store<ALIGNED>(row + c, x, Vp - c);
    }
}

void classifier_loss(float* losses, Rows logits, const int* targets, int N, int V, int Vp,
                     float dloss, bool write_dlogits) {
    bool aligned = Vp % PACK == 0 && is_aligned16(logits);
    // Threads from V alone: a pack each, from a warp to the block's limit.
    int threads = (int)round_up(ceil_div((size_t)V, PACK), WARP);
    if (threads > 1024) threads = 1024;
    launch(aligned ? classifier_kernel<true> : classifier_kernel<false>, N, threads, 0,
           compute_stream(), losses, native(logits), targets, V, Vp, dloss, write_dlogits);
}

// ---- sums of losses -----------------------------------------------------------------------------

// Work: a block a sequence; each thread every blockDim-th loss, then a tree: an order fixed by T
// alone. Bytes: B T floats. Bound: latency (a few microseconds).
//   seq_losses (B)   losses (B, T)
__global__ void loss_sum_kernel(double* seq_losses, const float* losses, int T) {
    __shared__ double of_warp[WARP];
    const float* row = losses + (size_t)blockIdx.x * T;
    double sum = 0.0;
    for (int t = threadIdx.x; t < T; t += blockDim.x) sum += row[t];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (unsigned w = 0; w < blockDim.x / WARP; w++) total += of_warp[w];
        seq_losses[blockIdx.x] = total;
    }
}

void loss_sum_sequences(double* seq_losses, const float* losses, int B, int T) {
    launch(loss_sum_kernel, B, 256, 0, compute_stream(), seq_losses, losses, T);
}
