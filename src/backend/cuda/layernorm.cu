// backend/cuda/layernorm.cu - LayerNorm, fused with the residual addition before it.
//
// One warp works on one row; a lane owns the same packs of columns in every row (pack number lane,
// lane + 32, ...), so rows need no barrier and what a lane keeps in shared memory only that lane
// reads back. Sums of a row: each lane over its packs in order, then a butterfly over the warp.
//
// Source: Ba et al. 2016, arXiv:1607.06450, eq. 4.
#include "backend/cuda/common.cuh"

namespace {

constexpr float EPS = 1e-5f;

// Rows of a block in the backward pass, from N alone: at least 32, so that the partial sums of
// dweight and dbias (16 C bytes a block, written and read) stay under a tenth of the 8 C bytes of
// each row, and about four blocks for each multiprocessor of the largest GPUs.
constexpr int MIN_BACKWARD_ROWS = 32, BACKWARD_BLOCKS = 528;
int backward_rows(int N) {
    int rows = (int)ceil_div((size_t)N, BACKWARD_BLOCKS);
    return rows < MIN_BACKWARD_ROWS ? MIN_BACKWARD_ROWS : rows;
}

// Most warps, a power of two up to `most`, whose shared memory fits; 0: not even one's does.
int warps_that_fit(int most, size_t bytes_per_block, size_t bytes_per_warp, size_t limit) {
    int warps = most;
    while (warps > 0 && bytes_per_block + warps * bytes_per_warp > limit) warps /= 2;
    return warps;
}

size_t padded(int C) { return round_up((size_t)C, PACK); } // whole packs, so that rows stay aligned

} // namespace

// ---- forward ------------------------------------------------------------------------------------

// Work: a warp a row, rows grid-strided; a block loads weight and bias once. Rows wait in shared
// memory between the passes (CACHED); rows too long for that are read again from device memory.
// Bytes: N (2 + with b: 2) C floatX + 2 C floatX a block, + 8 N. FLOPs: about 8 N C. Bound: device
// memory bandwidth.
//   residual, out, a, b (N, C)   mean, rstd (N)   weight, bias (C)
template <bool ALIGNED, bool CACHED>
__global__ void layernorm_forward_kernel(Matrix out, float* mean, float* rstd, Matrix residual,
                                         Matrix a, Matrix b, const Native* weight,
                                         const Native* bias, int N, int C, int padded_C) {
    DYNAMIC_SHARED(Native, shared); // CACHED: weight, bias, then one row for each warp
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if constexpr (CACHED) {
        for (int c = threadIdx.x * PACK; c < C; c += blockDim.x * PACK) {
            float x[PACK];
            load<ALIGNED>(x, weight + c, C - c);
            store_pack(shared + c, x);
            load<ALIGNED>(x, bias + c, C - c);
            store_pack(shared + padded_C + c, x);
        }
        __syncthreads();
        weight = shared;
        bias = shared + padded_C;
    }

    for (int r = blockIdx.x * warps + warp; r < N; r += gridDim.x * warps) {
        const Native* a_row = a.row(r);
        Native* cache = CACHED ? shared + (size_t)(2 + warp) * padded_C : nullptr;
        const Native* again = CACHED ? cache : b.ptr ? residual.row(r) : a_row;
        float sum = 0.0f;
        for (int c = lane * PACK; c < C; c += WARP * PACK) {
            float x[PACK];
            load<ALIGNED>(x, a_row + c, C - c);
            if (b.ptr) {
                float y[PACK];
                load<ALIGNED>(y, b.row(r) + c, C - c);
#pragma unroll
                for (int i = 0; i < PACK; i++) x[i] = widen(narrow<Native>(x[i] + y[i]));
                store<ALIGNED>(residual.row(r) + c, x, C - c);
            }
            if constexpr (CACHED) store_pack(cache + c, x);
#pragma unroll
            for (int i = 0; i < PACK; i++) sum += x[i];
        }
        float m = warp_sum(sum) / C;

        float squares = 0.0f;
        for (int c = lane * PACK; c < C; c += WARP * PACK) {
            float x[PACK];
            load<ALIGNED || CACHED>(x, again + c, C - c);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                float d = c + i < C ? x[i] - m : 0.0f;
                squares += d * d;
            }
        }
        float s = rsqrtf(warp_sum(squares) / C + EPS);

        for (int c = lane * PACK; c < C; c += WARP * PACK) {
            float x[PACK], w[PACK], shift[PACK];
            load<ALIGNED || CACHED>(x, again + c, C - c);
            load<ALIGNED || CACHED>(w, weight + c, C - c);
            load<ALIGNED || CACHED>(shift, bias + c, C - c);
#pragma unroll
            for (int i = 0; i < PACK; i++) x[i] = (x[i] - m) * s * w[i] + shift[i];
            store<ALIGNED>(out.row(r) + c, x, C - c);
        }
        if (lane == 0) {
            mean[r] = m;
            rstd[r] = s;
        }
    }
}

void layernorm_forward(Rows out, float* mean, float* rstd, Rows residual, Rows a, Rows b,
                       const floatX* weight, const floatX* bias, int N, int C) {
    if (b.ptr == nullptr) residual = a;
    bool aligned = C % PACK == 0 && is_aligned16(out) && is_aligned16(residual) &&
                   is_aligned16(a) && is_aligned16(b) && is_aligned16(weight) && is_aligned16(bias);
    size_t row_bytes = padded(C) * sizeof(Native);
    int warps = warps_that_fit(8, 2 * row_bytes, row_bytes, FREE_SHARED_BYTES);
    bool cached = warps > 0;
    if (!cached) warps = 8;

    auto kernel = aligned ? (cached ? layernorm_forward_kernel<true, true>
                                    : layernorm_forward_kernel<true, false>)
                          : (cached ? layernorm_forward_kernel<false, true>
                                    : layernorm_forward_kernel<false, false>);
    size_t shared_bytes = cached ? (2 + warps) * row_bytes : 0;
    // Two rows a warp or more, so that weight and bias are a small part of what is read.
    int blocks =
        (int)min_size(ceil_div((size_t)N, 2 * warps), (size_t)device_multiprocessors() * 16);
    launch(kernel, blocks, warps * WARP, shared_bytes, compute_stream(), native(out), mean, rstd,
           native(residual), native(a), native(b), native(weight), native(bias), N, C,
           (int)padded(C));
}

// ---- backward -----------------------------------------------------------------------------------

// With n = (inp - mean) * rstd and g = dout * weight, means over the row:
//   dinp = dresidual + (g - mean(g) - n * mean(g n)) * rstd;  dweight += dout * n;  dbias += dout
//
// Work: a block takes `rows` neighbouring rows, a warp every warps-th of them; each lane adds its
// columns of dweight and dbias into the warp's own sums, which the block adds warp by warp and
// writes as one row of partials. Sums and rows lie in shared memory (CACHED); for rows too long for
// that a block is one warp, sums go straight to the partials and rows are read twice.
// Bytes: N 4 C floatX (with dresidual) + 16 C floats and C floatX a block. FLOPs: about 14 N C.
// Bound: device memory bandwidth.
//   dinp, dresidual, dout, inp (N, C)   partials (blocks, 2, padded_C)
template <bool ALIGNED, bool CACHED>
__global__ void layernorm_backward_kernel(Matrix dinp, Matrix dresidual, float* partials,
                                          Matrix dout, Matrix inp, const float* mean,
                                          const float* rstd, const Native* weight, int N, int C,
                                          int padded_C, int rows) {
    DYNAMIC_SHARED(float, shared); // CACHED: for each warp dweight, dbias; then weight and the rows
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    float* partial = partials + (size_t)blockIdx.x * 2 * padded_C;
    float* sums = CACHED ? shared + (size_t)warp * 2 * padded_C : partial;
    Native* dout_cache = nullptr;
    Native* inp_cache = nullptr;
    if constexpr (CACHED) {
        Native* shared_weight = reinterpret_cast<Native*>(shared + (size_t)warps * 2 * padded_C);
        for (int c = threadIdx.x * PACK; c < C; c += blockDim.x * PACK) {
            float w[PACK];
            load<ALIGNED>(w, weight + c, C - c);
            store_pack(shared_weight + c, w);
        }
        weight = shared_weight;
        dout_cache = shared_weight + (size_t)(1 + 2 * warp) * padded_C;
        inp_cache = dout_cache + padded_C;
    }
    for (int c = lane * PACK; c < C; c += WARP * PACK) {
        float zero[PACK] = {};
        store_pack(sums + c, zero);
        store_pack(sums + padded_C + c, zero);
    }
    __syncthreads();

    int end = min(N, ((int)blockIdx.x + 1) * rows);
    for (int r = blockIdx.x * rows + warp; r < end; r += warps) {
        const Native* dout_row = dout.row(r);
        const Native* inp_row = inp.row(r);
        float statistic = lane < 2 ? (lane == 0 ? mean : rstd)[r] : 0.0f;
        float m = __shfl_sync(~0u, statistic, 0);
        float s = __shfl_sync(~0u, statistic, 1);
        float sum_g = 0.0f, sum_gn = 0.0f;
#pragma unroll 2 // so that loads of two packs are on their way
        for (int c = lane * PACK; c < C; c += WARP * PACK) {
            float d[PACK], x[PACK], w[PACK], dweight[PACK], dbias[PACK];
            load<ALIGNED>(d, dout_row + c, C - c);
            load<ALIGNED>(x, inp_row + c, C - c);
            load<ALIGNED || CACHED>(w, weight + c, C - c);
            load_pack(dweight, sums + c);
            load_pack(dbias, sums + padded_C + c);
            if constexpr (CACHED) {
                store_pack(dout_cache + c, d);
                store_pack(inp_cache + c, x);
            }
#pragma unroll
            for (int i = 0; i < PACK; i++) { // beyond the row's end d is 0
                float n = (x[i] - m) * s, g = c + i < C ? d[i] * w[i] : 0.0f;
                sum_g += g;
                sum_gn += g * n;
                dweight[i] += d[i] * n;
                dbias[i] += d[i];
            }
            store_pack(sums + c, dweight);
            store_pack(sums + padded_C + c, dbias);
        }
        float mean_g = warp_sum(sum_g) / C, mean_gn = warp_sum(sum_gn) / C;

        for (int c = lane * PACK; c < C; c += WARP * PACK) {
            float d[PACK], x[PACK], w[PACK], carried[PACK] = {};
            load<ALIGNED || CACHED>(d, (CACHED ? dout_cache : dout_row) + c, C - c);
            load<ALIGNED || CACHED>(x, (CACHED ? inp_cache : inp_row) + c, C - c);
            load<ALIGNED || CACHED>(w, weight + c, C - c);
            if (dresidual.ptr) load<ALIGNED>(carried, dresidual.row(r) + c, C - c);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                float n = (x[i] - m) * s;
                x[i] = carried[i] + (d[i] * w[i] - mean_g - n * mean_gn) * s;
            }
            store<ALIGNED>(dinp.row(r) + c, x, C - c);
        }
    }

    if constexpr (CACHED) {
        __syncthreads();
        for (int c = threadIdx.x * 4; c < 2 * padded_C; c += blockDim.x * 4) {
            float total[4] = {};
            for (int w = 0; w < warps; w++) {
                float x[4];
                load_pack(x, shared + (size_t)w * 2 * padded_C + c);
#pragma unroll
                for (int i = 0; i < 4; i++) total[i] += x[i];
            }
            store_pack(partial + c, total);
        }
    }
}

size_t layernorm_backward_scratch_bytes(int N, int C) {
    return ceil_div((size_t)N, backward_rows(N)) * 2 * padded(C) * sizeof(float);
}

void layernorm_backward(Rows dinp, Rows dresidual, Grad dweight, Grad dbias, Rows dout, Rows inp,
                        const float* mean, const float* rstd, const floatX* weight, int N, int C) {
    bool aligned = C % PACK == 0 && is_aligned16(dinp) && is_aligned16(dresidual) &&
                   is_aligned16(dout) && is_aligned16(inp) && is_aligned16(weight);
    size_t row_bytes = padded(C) * sizeof(Native);
    size_t warp_bytes = 2 * padded(C) * sizeof(float) + 2 * row_bytes;
    // More shared memory, more warps: the order of the sums, and so the last bits of dweight and
    // dbias, depend on the model of the GPU.
    int warps = warps_that_fit(16, row_bytes, warp_bytes, device_shared_bytes());
    bool cached = warps > 0;
    if (!cached) warps = 1;

    auto kernel = aligned ? (cached ? layernorm_backward_kernel<true, true>
                                    : layernorm_backward_kernel<true, false>)
                          : (cached ? layernorm_backward_kernel<false, true>
                                    : layernorm_backward_kernel<false, false>);
    float* partials = static_cast<float*>(scratch_take(layernorm_backward_scratch_bytes(N, C)));
    int rows = backward_rows(N), blocks = (int)ceil_div((size_t)N, rows);
    launch_shared(kernel, blocks, warps * WARP, cached ? row_bytes + warps * warp_bytes : 0,
                  native(dinp), native(dresidual), partials, native(dout), native(inp), mean, rstd,
                  native(weight), N, C, (int)padded(C), rows);
    sum_partials(dweight, partials, 2 * padded(C), blocks, C);
    sum_partials(dbias, partials + padded(C), 2 * padded(C), blocks, C);
}
