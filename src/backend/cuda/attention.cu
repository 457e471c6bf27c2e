// backend/cuda/attention.cu - causal self-attention: choice of the path, and the plain path.
//
// 16-bit types with head sizes 64, 80, 96 and 128 go through tensor cores (attention_forward.cu,
// attention_backward.cu). What is here serves fp32, every other head size and the key-value cache:
// one thread works on one query (or one key), its vectors in shared memory, element d of thread t
// at [d][t], and all threads of a warp read the same row of the other side at the same time.
// In training nothing is exchanged between threads, so bits depend on neither the number of rows
// nor the block's size.
//
// Source: Dao et al. 2022, arXiv:2205.14135; Milakov and Gimelshein 2018, arXiv:1805.02867.
#include "backend/cuda/attention.cuh"

namespace {

constexpr size_t MAX_SHARED_BYTES = 96 * 1024; // two blocks on a multiprocessor

// Threads of a block, of which each keeps `vectors` vectors of HS floats.
int threads_that_fit(int vectors, int HS) {
    int threads = 64;
    while (threads > 1 && (size_t)threads * vectors * HS * sizeof(float) > MAX_SHARED_BYTES) {
        threads /= 2;
    }
    return threads;
}

bool packs_are_aligned(int HS, Rows a, Rows b) {
    return HS % PACK == 0 && is_aligned16(a) && is_aligned16(b);
}

// A vector of the calling thread in shared memory.
struct Lane {
    float* first;
    int stride;
    __device__ float& operator[](int d) const { return first[d * stride]; }
};

template <bool ALIGNED> __device__ inline void read_vector(Lane to, const Native* from, int HS) {
    for (int d = 0; d < HS; d += PACK) {
        float x[PACK];
        load<ALIGNED>(x, from + d, HS - d);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            if (d + i < HS) to[d + i] = x[i];
        }
    }
}

template <bool ALIGNED>
__device__ inline void write_vector(Native* to, Lane from, float factor, int HS) {
    for (int d = 0; d < HS; d += PACK) {
        float x[PACK];
#pragma unroll
        for (int i = 0; i < PACK; i++) x[i] = d + i < HS ? from[d + i] * factor : 0.0f;
        store<ALIGNED>(to + d, x, HS - d);
    }
}

template <bool ALIGNED> __device__ inline float dot(Lane a, const Native* b, int HS) {
    float sum = 0.0f;
    for (int d = 0; d < HS; d += PACK) {
        float x[PACK];
        load<ALIGNED>(x, b + d, HS - d);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            if (d + i < HS) sum += a[d + i] * x[i];
        }
    }
    return sum;
}

// to += factor * b
template <bool ALIGNED>
__device__ inline void add_scaled(Lane to, float factor, const Native* b, int HS) {
    for (int d = 0; d < HS; d += PACK) {
        float x[PACK];
        load<ALIGNED>(x, b + d, HS - d);
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            if (d + i < HS) to[d + i] += factor * x[i];
        }
    }
}

} // namespace

void attention_check(int HS, bool backward) {
    size_t bytes = (backward ? 4 * (size_t)HS : 2 * (size_t)HS + 2) * sizeof(float);
    if (bytes <= device_shared_bytes()) return;
    Error error = {};
    error_set(&error, EXIT_USAGE,
              "a head of C/NH = %d elements takes %zu bytes of shared memory, a block of this GPU "
              "has %zu: use more heads",
              HS, bytes, device_shared_bytes());
    error_exit(&error);
}

// ---- forward, plain -----------------------------------------------------------------------------

// Work: `parts` neighbouring threads a query, each with every parts-th key (1 in training; 32 where
// queries are few); their maxima, sums and outputs are merged in order. blockIdx.x counts batch and
// head, blockIdx.y groups of queries. Query t attends to keys 0 .. first_pos + t.
// Bytes: 4 B T C floatX, K and V again for every group of queries (L2). FLOPs: 2 B T^2 C (causal
// half of 4). Bound: shared memory (three accesses for two multiply-adds).
//   out, q (B*T, C)   k, v (B*T or maxT, C)   lse (B, NH, T) or NULL
template <bool ALIGNED>
__global__ void attention_plain_forward_kernel(Matrix out, float* lse, Matrix q, Matrix k, Matrix v,
                                               int first_pos, int T, int NH, int HS, int parts) {
    DYNAMIC_SHARED(float, shared); // queries, then outputs (HS, blockDim); then max, sum (blockDim)
    int threads = blockDim.x, queries = threads / parts, part = threadIdx.x % parts;
    int t = blockIdx.y * queries + threadIdx.x / parts, h = blockIdx.x % NH;
    size_t batch = (size_t)(blockIdx.x / NH) * T;
    Lane query = {shared + threadIdx.x, threads};
    Lane output = {shared + (size_t)HS * threads + threadIdx.x, threads};
    float* maxima = shared + (size_t)2 * HS * threads;
    float* sums = maxima + threads;
    bool is_inside = t < T;
    float scale = LOG2E * rsqrtf((float)HS), top = -INFINITY, sum = 0.0f;
    if (is_inside) {
        read_vector<ALIGNED>(query, q.row(batch + t) + h * HS, HS);
        for (int d = 0; d < HS; d++) output[d] = 0.0f;
        for (int key = part; key <= first_pos + t; key += parts) {
            float score = scale * dot<ALIGNED>(query, k.row(batch + key) + h * HS, HS);
            if (score > top) {
                float shrink = exp2f(top - score);
                for (int d = 0; d < HS; d++) output[d] *= shrink;
                sum *= shrink;
                top = score;
            }
            float p = exp2f(score - top);
            sum += p;
            add_scaled<ALIGNED>(output, p, v.row(batch + key) + h * HS, HS);
        }
    }
    if (parts > 1) { // thread of part 0 gathers the others
        maxima[threadIdx.x] = top;
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (is_inside && part == 0) {
            float highest = top;
            for (int i = 1; i < parts; i++) highest = fmaxf(highest, maxima[threadIdx.x + i]);
            float shrink = exp2f(top - highest);
            sum *= shrink;
            for (int d = 0; d < HS; d++) output[d] *= shrink;
            for (int i = 1; i < parts; i++) {
                if (sums[threadIdx.x + i] == 0.0f) continue; // had no keys
                Lane other = {output.first + i, threads};
                float weight = exp2f(maxima[threadIdx.x + i] - highest);
                sum += weight * sums[threadIdx.x + i];
                for (int d = 0; d < HS; d++) output[d] += weight * other[d];
            }
            top = highest;
        }
    }
    if (is_inside && part == 0) {
        write_vector<ALIGNED>(out.row(batch + t) + h * HS, output, 1.0f / sum, HS);
        if (lse) lse[(size_t)blockIdx.x * T + t] = LN2 * (top + log2f(sum));
    }
}

namespace {

void plain_forward(Rows out, float* lse, Rows q, Rows k, Rows v, int first_pos, int B, int T, int C,
                   int NH, int parts) {
    int HS = C / NH, threads = threads_that_fit(2, HS);
    if (parts > threads) parts = threads;
    bool aligned = packs_are_aligned(HS, out, q) && packs_are_aligned(HS, k, v);
    size_t shared_bytes = (size_t)threads * (2 * HS + 2) * sizeof(float);
    dim3 grid(B * NH, (unsigned)ceil_div((size_t)T, threads / parts));
    launch_shared(aligned ? attention_plain_forward_kernel<true>
                          : attention_plain_forward_kernel<false>,
                  grid, threads, shared_bytes, native(out), lse, native(q), native(k), native(v),
                  first_pos, T, NH, HS, parts);
}

Rows columns_from(Rows rows, size_t first) { return {rows.ptr + first, rows.ld}; }

} // namespace

void attention_forward(Rows out, float* lse, Rows qkv, int B, int T, int C, int NH) {
    if (attention_flash_forward(out, lse, qkv, B, T, C, NH)) return;
    plain_forward(out, lse, qkv, columns_from(qkv, C), columns_from(qkv, 2 * C), 0, B, T, C, NH, 1);
}

// ---- with the key-value cache -------------------------------------------------------------------

// Work: a thread an element. Bytes: 4 n C floatX. Bound: latency.
//   k_cache, v_cache (maxT, C)   qkv (n, 3C)
__global__ void append_to_cache_kernel(Native* k_cache, Native* v_cache, Matrix qkv, int first_pos,
                                       int n, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)n * C) return;
    size_t r = i / C, c = i % C;
    k_cache[(first_pos + r) * C + c] = qkv.row(r)[C + c];
    v_cache[(first_pos + r) * C + c] = qkv.row(r)[2 * C + c];
}

void attention_cached(Rows out, Rows qkv, floatX* k_cache, floatX* v_cache, int first_pos, int n,
                      int C, int NH) {
    launch(append_to_cache_kernel, (unsigned)ceil_div((size_t)n * C, 256), 256, 0, compute_stream(),
           native(k_cache), native(v_cache), native(qkv), first_pos, n, C);
    Rows k = {k_cache, (size_t)C}, v = {v_cache, (size_t)C};
    plain_forward(out, nullptr, qkv, k, v, first_pos, 1, n, C, NH, WARP);
}

// ---- backward, plain ----------------------------------------------------------------------------

// delta[b,h,t] = sum over the head's elements of dout * out: what the softmax's derivative
// subtracts. Work: a warp a row and head. Bytes: 2 N C floatX + 4 N NH. FLOPs: 2 N C. Bound: device
// memory bandwidth.
//   delta (B, NH, T)   dout, out (B*T, C)
template <bool ALIGNED>
__global__ void attention_delta_kernel(float* delta, Matrix dout, Matrix out, int N, int T, int NH,
                                       int HS) {
    size_t i = (size_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (i >= (size_t)N * NH) return; // the whole warp
    int lane = threadIdx.x % WARP, h = (int)(i % NH);
    size_t r = i / NH, b = r / T, t = r % T;
    float sum = 0.0f;
    for (int d = lane * PACK; d < HS; d += WARP * PACK) {
        float x[PACK], y[PACK];
        load<ALIGNED>(x, dout.row(r) + h * HS + d, HS - d);
        load<ALIGNED>(y, out.row(r) + h * HS + d, HS - d);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum += d + k < HS ? x[k] * y[k] : 0.0f;
    }
    sum = warp_sum(sum);
    if (lane == 0) delta[(b * NH + h) * T + t] = sum;
}

// dq = scale * sum over keys of ds * k, with p = exp(scale q.k - lse), ds = p (dout.v - delta).
// Work: a thread a query. Bytes: as the forward pass, and dout. FLOPs: 3 B T^2 C. Bound: shared
// memory.
//   dqkv, qkv (B*T, 3C)   dout (B*T, C)   lse, delta (B, NH, T)
template <bool ALIGNED>
__global__ void attention_plain_dq_kernel(Matrix dqkv, Matrix dout, Matrix qkv, const float* lse,
                                          const float* delta, int T, int C, int NH, int HS) {
    DYNAMIC_SHARED(float, shared); // q, dout, dq (HS, blockDim)
    int t = blockIdx.y * blockDim.x + threadIdx.x, h = blockIdx.x % NH;
    if (t >= T) return;
    size_t batch = (size_t)(blockIdx.x / NH) * T, row = batch + t, vector = (size_t)HS * blockDim.x;
    Lane q = {shared + threadIdx.x, (int)blockDim.x};
    Lane d_out = {q.first + vector, q.stride}, dq = {q.first + 2 * vector, q.stride};
    read_vector<ALIGNED>(q, qkv.row(row) + h * HS, HS);
    read_vector<ALIGNED>(d_out, dout.row(row) + h * HS, HS);
    for (int d = 0; d < HS; d++) dq[d] = 0.0f;

    float scale = rsqrtf((float)HS);
    float lse_t = LOG2E * lse[(size_t)blockIdx.x * T + t],
          delta_t = delta[(size_t)blockIdx.x * T + t];
    for (int key = 0; key <= t; key++) {
        const Native* k = qkv.row(batch + key) + C + h * HS;
        float p = exp2f(LOG2E * scale * dot<ALIGNED>(q, k, HS) - lse_t);
        float ds = p * (dot<ALIGNED>(d_out, k + C, HS) - delta_t);
        add_scaled<ALIGNED>(dq, ds, k, HS);
    }
    write_vector<ALIGNED>(dqkv.row(row) + h * HS, dq, scale, HS);
}

// dk = scale * sum over queries of ds * q, dv = sum of p * dout; p and ds as above.
// Work: a thread a key. Bytes: as above. FLOPs: 4 B T^2 C. Bound: shared memory.
//   dqkv, qkv (B*T, 3C)   dout (B*T, C)   lse, delta (B, NH, T)
template <bool ALIGNED>
__global__ void attention_plain_dkv_kernel(Matrix dqkv, Matrix dout, Matrix qkv, const float* lse,
                                           const float* delta, int T, int C, int NH, int HS) {
    DYNAMIC_SHARED(float, shared); // k, v, dk, dv (HS, blockDim)
    int first = blockIdx.y * blockDim.x, key = first + threadIdx.x, h = blockIdx.x % NH;
    if (key >= T) return;
    size_t batch = (size_t)(blockIdx.x / NH) * T, row = batch + key;
    size_t vector = (size_t)HS * blockDim.x;
    Lane k = {shared + threadIdx.x, (int)blockDim.x}, v = {k.first + vector, k.stride};
    Lane dk = {k.first + 2 * vector, k.stride}, dv = {k.first + 3 * vector, k.stride};
    read_vector<ALIGNED>(k, qkv.row(row) + C + h * HS, HS);
    read_vector<ALIGNED>(v, qkv.row(row) + 2 * C + h * HS, HS);
    for (int d = 0; d < HS; d++) dk[d] = dv[d] = 0.0f;

    float scale = rsqrtf((float)HS);
    for (int t = first; t < T; t++) {
        if (t < key) continue; // all threads look at the same query
        const Native* q = qkv.row(batch + t) + h * HS;
        const Native* d_out = dout.row(batch + t) + h * HS;
        float lse_t = LOG2E * lse[(size_t)blockIdx.x * T + t];
        float p = exp2f(LOG2E * scale * dot<ALIGNED>(k, q, HS) - lse_t);
        float ds = p * (dot<ALIGNED>(v, d_out, HS) - delta[(size_t)blockIdx.x * T + t]);
        add_scaled<ALIGNED>(dv, p, d_out, HS);
        add_scaled<ALIGNED>(dk, ds, q, HS);
    }
    write_vector<ALIGNED>(dqkv.row(row) + C + h * HS, dk, scale, HS);
    write_vector<ALIGNED>(dqkv.row(row) + 2 * C + h * HS, dv, 1.0f, HS);
}

size_t attention_backward_scratch_bytes(int B, int T, int NH) {
    return (size_t)B * T * NH * sizeof(float);
}

void attention_backward(Rows dqkv, Rows dout, Rows qkv, Rows out, const float* lse, int B, int T,
                        int C, int NH) {
    int HS = C / NH;
    float* delta = static_cast<float*>(scratch_take(attention_backward_scratch_bytes(B, T, NH)));
    constexpr int DELTA_WARPS = 8;
    launch(packs_are_aligned(HS, dout, out) ? attention_delta_kernel<true>
                                            : attention_delta_kernel<false>,
           (unsigned)ceil_div((size_t)B * T * NH, DELTA_WARPS), DELTA_WARPS * WARP, 0,
           compute_stream(), delta, native(dout), native(out), B * T, T, NH, HS);
    if (attention_flash_backward(dqkv, dout, qkv, lse, delta, B, T, C, NH)) return;

    bool aligned = packs_are_aligned(HS, dqkv, dout) && packs_are_aligned(HS, qkv, qkv);
    int threads = threads_that_fit(4, HS);
    dim3 grid(B * NH, (unsigned)ceil_div((size_t)T, threads));
    size_t vector_bytes = (size_t)threads * HS * sizeof(float);
    launch_shared(aligned ? attention_plain_dq_kernel<true> : attention_plain_dq_kernel<false>,
                  grid, threads, 3 * vector_bytes, native(dqkv), native(dout), native(qkv), lse,
                  delta, T, C, NH, HS);
    launch_shared(aligned ? attention_plain_dkv_kernel<true> : attention_plain_dkv_kernel<false>,
                  grid, threads, 4 * vector_bytes, native(dqkv), native(dout), native(qkv), lse,
                  delta, T, C, NH, HS);
}
