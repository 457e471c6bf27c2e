// backend/cuda/attention_backward.cu - causal attention on tensor cores, backward.
//
// With scale = 1/sqrt(HS), p = exp(scale q.k - lse), ds = p (dout.v - delta):
//   dv = sum of p dout and dk = scale sum of ds q over queries;  dq = scale sum of ds k over keys
// Two kernels, so that every sum has one owner and one order and nothing is added atomically: one
// owns 64 keys and walks over the queries from the diagonal on (dk, dv), the other owns 64 queries
// and walks over the keys up to the diagonal (dq). Both recompute p and ds: 7 products of tiles
// where 5 would do with atomics, or with partial sums of dq for every 64 keys.
//
// Work: a block (b, h, 64 keys or queries), a warp 16 of them; the longest blocks start first. The
// walking side comes in tiles of STEP rows, the next one on its way while the present one is used.
// Bytes: the owned side and the gradients once, the walking side once for each block, T / 128 times
// on average (from L2): B T C (7 + T / 32) floatX in all, and lse and delta. FLOPs: 7 B T^2 C (the
// causal half of 14). Exponentials: B NH T^2. Bound: tensor cores, or shared memory's 128 bytes a
// cycle: 256 bytes for each mma of 4096 FLOPs, and 128 more where A comes from there too.
//
// Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4; Dao 2023, arXiv:2307.08691, section 3.
#include "backend/cuda/attention.cuh"

#ifndef PRECISION_FP32 // which goes the plain path

namespace flash {

// Rows of a tile of the walking side; with 64 the products do not fit in registers.
constexpr int STEP = 32;

// The owned side's two tiles, two buffers of the walking side's two, and its statistics.
constexpr size_t backward_shared_bytes(int HS) {
    return (2 * tile_elems(HS, BLOCK_ROWS) + 4 * tile_elems(HS, STEP)) * sizeof(Native) +
           4 * STEP * sizeof(float);
}

} // namespace flash

// Registers: dk and dv HS, two products of STEP / 2 a thread. Shared memory: 256 rows of 2 (HS + 8)
// bytes and 512 of statistics: 37 KB for HS 64 (three blocks on a multiprocessor, by registers),
// 69 KB for 128 (two).
//   dqkv, qkv (B*T, 3C)   dout (B*T, C)   lse, delta (B, NH, T)   C = NH * HS
template <int HS>
__global__ void __launch_bounds__(flash::THREADS, HS <= 80 ? 3 : 2)
    attention_backward_kv_kernel(Matrix dqkv, Matrix dout, Matrix qkv, const float* lse,
                                 const float* delta, int T, int NH) {
    using namespace flash;
    DYNAMIC_SHARED(Native, shared);
    Native* k_tile = shared;
    Native* v_tile = k_tile + tile_elems(HS, BLOCK_ROWS);
    Native* walking = v_tile + tile_elems(HS, BLOCK_ROWS); // (2 buffers, q and dout)
    float* statistics =
        reinterpret_cast<float*>(walking + 4 * tile_elems(HS, STEP)); // (2, lse, delta)
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, C = NH * HS;
    int first_key = blockIdx.y * BLOCK_ROWS, my_key = first_key + warp * 16;
    const Native* queries = qkv.row((size_t)b * T) + h * HS;
    const Native* douts = dout.row((size_t)b * T) + h * HS;

    auto copy_queries = [&](int tile) {
        Native* to = walking + tile % 2 * 2 * tile_elems(HS, STEP);
        copy_tile<HS, STEP>(to, queries, qkv.ld, tile * STEP, T);
        copy_tile<HS, STEP>(to + tile_elems(HS, STEP), douts, dout.ld, tile * STEP, T);
        cp_async_commit();
    };
    // Thread i < STEP holds lse (in powers of two) of a tile's query i, thread STEP + i its delta.
    // Queries from T on get p = exp2(-inf) = 0.
    auto read_statistic = [&](int tile) {
        int query = tile * STEP + (int)threadIdx.x % STEP;
        size_t at = (size_t)blockIdx.x * T + query;
        if (threadIdx.x < STEP) return query < T ? LOG2E * lse[at] : INFINITY;
        return threadIdx.x < 2 * STEP && query < T ? delta[at] : 0.0f;
    };
    auto keep_statistic = [&](int tile, float value) {
        if (threadIdx.x < 2 * STEP) statistics[tile % 2 * 2 * STEP + threadIdx.x] = value;
    };

    int tile = first_key / STEP, last = (T - 1) / STEP;
    copy_tile<HS, BLOCK_ROWS>(k_tile, queries + C, qkv.ld, first_key, T);
    copy_tile<HS, BLOCK_ROWS>(v_tile, queries + 2 * C, qkv.ld, first_key, T);
    copy_queries(tile);
    keep_statistic(tile, read_statistic(tile));

    float scale = rsqrtf((float)HS), scale2 = LOG2E * scale;
    float dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    Native* my_k = k_tile + warp * 16 * stride(HS);
    Native* my_v = v_tile + warp * 16 * stride(HS);
    for (; tile <= last; tile++) {
        float next_statistic = 0.0f;
        if (tile < last) {
            copy_queries(tile + 1);
            next_statistic = read_statistic(tile + 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const Native* q_tile = walking + tile % 2 * 2 * tile_elems(HS, STEP);
        const Native* dout_tile = q_tile + tile_elems(HS, STEP);
        const float* lse_tile = statistics + tile % 2 * 2 * STEP;
        const float* delta_tile = lse_tile + STEP;
        if (tile * STEP + STEP > my_key) { // some query of the tile sees a key of the warp
            float p[STEP / 8][4] = {}, ds[STEP / 8][4] = {}; // (16 keys, STEP queries)
            multiply_rows<HS, STEP>(p, my_k, q_tile);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    p[n][i] = exp2_approx(p[n][i] * scale2 - lse_tile[n * 8 + 2 * q + i % 2]);
                }
            }
            if (tile * STEP < my_key + 15) { // the diagonal crosses: no query before its key
#pragma unroll
                for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int query = tile * STEP + n * 8 + 2 * q + i % 2;
                        if (query < my_key + g + i / 2 * 8) p[n][i] = 0.0f;
                    }
                }
            }
            multiply_columns<HS, STEP>(dv, p, dout_tile);
            multiply_rows<HS, STEP>(ds, my_v, dout_tile);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    ds[n][i] = p[n][i] * (ds[n][i] - delta_tile[n * 8 + 2 * q + i % 2]);
                }
            }
            multiply_columns<HS, STEP>(dk, ds, q_tile);
        }
        keep_statistic(tile + 1, next_statistic); // its buffer was last read a barrier ago
        __syncthreads(); // this buffer is read; the next copy may overwrite it
    }

    Native* out = dqkv.row((size_t)b * T + my_key) + h * HS;
    store_rows<HS>(out + C, dqkv.ld, dk, scale, scale, my_k, T - my_key);
    store_rows<HS>(out + 2 * C, dqkv.ld, dv, 1.0f, 1.0f, my_v, T - my_key);
}

// Registers: dq HS / 2, two products of STEP / 2 a thread. Shared memory: as above.
//   dqkv, qkv (B*T, 3C)   dout (B*T, C)   lse, delta (B, NH, T)   C = NH * HS
template <int HS>
__global__ void __launch_bounds__(flash::THREADS, HS <= 80 ? 3 : 2)
    attention_backward_q_kernel(Matrix dqkv, Matrix dout, Matrix qkv, const float* lse,
                                const float* delta, int T, int NH) {
    using namespace flash;
    DYNAMIC_SHARED(Native, shared);
    Native* q_tile = shared;
    Native* dout_tile = q_tile + tile_elems(HS, BLOCK_ROWS);
    Native* walking = dout_tile + tile_elems(HS, BLOCK_ROWS); // (2 buffers, K and V)
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, C = NH * HS;
    int first_query = (gridDim.y - 1 - blockIdx.y) * BLOCK_ROWS, my_query = first_query + warp * 16;
    const Native* queries = qkv.row((size_t)b * T) + h * HS;
    const Native* douts = dout.row((size_t)b * T) + h * HS;
    auto copy_keys = [&](int tile) {
        Native* to = walking + tile % 2 * 2 * tile_elems(HS, STEP);
        copy_tile<HS, STEP>(to, queries + C, qkv.ld, tile * STEP, T);
        copy_tile<HS, STEP>(to + tile_elems(HS, STEP), queries + 2 * C, qkv.ld, tile * STEP, T);
        cp_async_commit();
    };
    copy_tile<HS, BLOCK_ROWS>(q_tile, queries, qkv.ld, first_query, T);
    copy_tile<HS, BLOCK_ROWS>(dout_tile, douts, dout.ld, first_query, T);
    copy_keys(0);

    float row_lse[2], row_delta[2]; // of rows g and g + 8; rows from T on are not stored
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = my_query + g + half * 8;
        size_t at = (size_t)blockIdx.x * T + query;
        row_lse[half] = query < T ? LOG2E * lse[at] : 0.0f;
        row_delta[half] = query < T ? delta[at] : 0.0f;
    }
    float scale = rsqrtf((float)HS), scale2 = LOG2E * scale;
    float dq[HS / 8][4] = {};
    Native* my_q = q_tile + warp * 16 * stride(HS);
    const Native* my_dout = dout_tile + warp * 16 * stride(HS);
    int last = min(first_query + BLOCK_ROWS - 1, T - 1) / STEP;
    for (int tile = 0; tile <= last; tile++) {
        if (tile < last) {
            copy_keys(tile + 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const Native* k_tile = walking + tile % 2 * 2 * tile_elems(HS, STEP);
        const Native* v_tile = k_tile + tile_elems(HS, STEP);
        if (tile * STEP < my_query + 16) { // some query of the warp sees a key of the tile
            float p[STEP / 8][4] = {}, ds[STEP / 8][4] = {}; // (16 queries, STEP keys)
            multiply_rows<HS, STEP>(p, my_q, k_tile);
            multiply_rows<HS, STEP>(ds, my_dout, v_tile);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    p[n][i] = exp2_approx(p[n][i] * scale2 - row_lse[i / 2]);
                    ds[n][i] = p[n][i] * (ds[n][i] - row_delta[i / 2]);
                }
            }
            if (tile * STEP + STEP - 1 > my_query) { // the diagonal crosses: no key after its query
#pragma unroll
                for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int key = tile * STEP + n * 8 + 2 * q + i % 2;
                        if (key > my_query + g + i / 2 * 8) ds[n][i] = 0.0f;
                    }
                }
            }
            multiply_columns<HS, STEP>(dq, ds, k_tile);
        }
        __syncthreads(); // this buffer is read; the next copy may overwrite it
    }
    store_rows<HS>(dqkv.row((size_t)b * T + my_query) + h * HS, dqkv.ld, dq, scale, scale, my_q,
                   T - my_query);
}

namespace flash {

template <int HS>
void backward(Rows dqkv, Rows dout, Rows qkv, const float* lse, const float* delta, int B, int T,
              int NH) {
    dim3 grid(B * NH, (unsigned)ceil_div((size_t)T, BLOCK_ROWS));
    size_t shared_bytes = backward_shared_bytes(HS);
    launch_shared(attention_backward_kv_kernel<HS>, grid, THREADS, shared_bytes, native(dqkv),
                  native(dout), native(qkv), lse, delta, T, NH);
    launch_shared(attention_backward_q_kernel<HS>, grid, THREADS, shared_bytes, native(dqkv),
                  native(dout), native(qkv), lse, delta, T, NH);
}

} // namespace flash

bool attention_flash_backward(Rows dqkv, Rows dout, Rows qkv, const float* lse, const float* delta,
                              int B, int T, int C, int NH) {
    int HS = C / NH;
    if (!flash::is_supported(HS, dqkv, dout, qkv)) return false;
    switch (HS) {
    case 64:
        flash::backward<64>(dqkv, dout, qkv, lse, delta, B, T, NH);
        break;
    case 80:
        flash::backward<80>(dqkv, dout, qkv, lse, delta, B, T, NH);
        break;
    case 96:
        flash::backward<96>(dqkv, dout, qkv, lse, delta, B, T, NH);
        break;
    case 128:
        flash::backward<128>(dqkv, dout, qkv, lse, delta, B, T, NH);
        break;
    }
    return true;
}

#endif
