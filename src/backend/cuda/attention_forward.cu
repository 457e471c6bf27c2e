// backend/cuda/attention_forward.cu - causal attention on tensor cores, forward.
//
// A block owns 64 queries of one head and walks over tiles of 64 keys up to the diagonal; the next
// tile of K and V is on its way (cp.async, two buffers) while the present one is multiplied. Scores
// and probabilities live in registers only.
//
// Work: a block (b, h, 64 queries), a warp 16 of them; blocks with the longest rows start first.
// Bytes: q and out once, K and V once for each block of queries up to its diagonal, T / 128 times
// on average (from L2): B T C (2 + T / 64) floatX in all, and 4 B NH T of lse. FLOPs: 2 B T^2 C
// (the causal half of 4), and half a tile a block on the diagonal. Exponentials: B NH T^2 / 2.
// Bound: tensor cores, or shared memory's 128 bytes a cycle: each mma of 4096 FLOPs takes 256 bytes
// of K or V from there, two cycles, which is its time on a multiprocessor of sm_80.
//
// Source: Dao et al. 2022, arXiv:2205.14135, algorithm 1; Dao 2023, arXiv:2307.08691, section 3.
#include "backend/cuda/attention.cuh"

#ifndef PRECISION_FP32 // which goes the plain path

namespace flash {

constexpr int KEYS = 64; // of a tile

constexpr size_t forward_shared_bytes(int HS) {
    return (tile_elems(HS, BLOCK_ROWS) + 4 * tile_elems(HS, KEYS)) * sizeof(Native);
}

} // namespace flash

// Registers: out HS / 2, scores 32, queries HS / 4 a thread. Shared memory: 320 rows of 2 (HS + 8)
// bytes: 45 KB for HS 64 (four blocks on a multiprocessor), 85 KB for 128 (two).
//   out (B*T, C)   lse (B, NH, T)   qkv (B*T, 3C)   C = NH * HS
template <int HS>
__global__ void __launch_bounds__(flash::THREADS, HS <= 64   ? 4
                                                  : HS <= 80 ? 3
                                                             : 2)
    attention_forward_kernel(Matrix out, float* lse, Matrix qkv, int T, int NH) {
    using namespace flash;
    DYNAMIC_SHARED(Native, shared);
    Native* q_tile = shared;
    Native* kv_tiles = shared + tile_elems(HS, BLOCK_ROWS); // (2 buffers, K and V)
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    int b = blockIdx.x / NH, h = blockIdx.x % NH, C = NH * HS;
    int first_query = (gridDim.y - 1 - blockIdx.y) * BLOCK_ROWS, my_query = first_query + warp * 16;
    const Native* queries = qkv.row((size_t)b * T) + h * HS;
    auto copy_keys = [&](int tile) {
        Native* to = kv_tiles + tile % 2 * 2 * tile_elems(HS, KEYS);
        copy_tile<HS, KEYS>(to, queries + C, qkv.ld, tile * KEYS, T);
        copy_tile<HS, KEYS>(to + tile_elems(HS, KEYS), queries + 2 * C, qkv.ld, tile * KEYS, T);
        cp_async_commit();
    };
    copy_tile<HS, BLOCK_ROWS>(q_tile, queries, qkv.ld, first_query, T);
    copy_keys(0);

    float scale = LOG2E * rsqrtf((float)HS); // scores are powers of two
    uint32_t q_fragments[HS / 16][4];
    float sum[HS / 8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.0f, 0.0f};
    Native* my_rows = q_tile + warp * 16 * stride(HS);
    int last = min(first_query + BLOCK_ROWS - 1, T - 1) / KEYS;
    for (int tile = 0; tile <= last; tile++) {
        if (tile < last) {
            copy_keys(tile + 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const Native* k_tile = kv_tiles + tile % 2 * 2 * tile_elems(HS, KEYS);
        const Native* v_tile = k_tile + tile_elems(HS, KEYS);
        if (tile == 0) {
#pragma unroll
            for (int k = 0; k < HS / 16; k++) load_a<HS>(q_fragments[k], my_rows, k * 16);
        }
        float scores[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < HS / 16; k++)
            mma_rows<HS, KEYS>(scores, q_fragments[k], k_tile, k * 16);

        if (tile * KEYS + KEYS - 1 > my_query) { // the diagonal crosses: no key after its query
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = tile * KEYS + n * 8 + 2 * q + i % 2;
                    if (key > my_query + g + i / 2 * 8) scores[n][i] = -INFINITY;
                }
            }
        }

        // Rows g and g + 8 lie in the four lanes of group g. Every row has a key in the first tile,
        // so its maximum is finite from then on.
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = row_max[half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            float shrink = exp2_approx((row_max[half] - top) * scale), total = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = exp2_approx(scores[n][i] * scale - top * scale);
                    total += scores[n][i];
                }
            }
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                sum[n][2 * half] *= shrink;
                sum[n][2 * half + 1] *= shrink;
            }
            row_sum[half] = row_sum[half] * shrink + total;
            row_max[half] = top;
        }
        multiply_columns<HS, KEYS>(sum, scores, v_tile);
        __syncthreads(); // this buffer is read; the next copy may overwrite it
    }

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = row_sum[half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        inverse[half] = 1.0f / total;
        int query = my_query + g + half * 8;
        if (q == 0 && query < T) {
            lse[(size_t)blockIdx.x * T + query] = LN2 * (row_max[half] * scale + log2f(total));
        }
    }
    store_rows<HS>(out.row((size_t)b * T + my_query) + h * HS, out.ld, sum, inverse[0], inverse[1],
                   my_rows, T - my_query);
}

namespace flash {

template <int HS> void forward(Rows out, float* lse, Rows qkv, int B, int T, int NH) {
    dim3 grid(B * NH, (unsigned)ceil_div((size_t)T, BLOCK_ROWS));
    launch_shared(attention_forward_kernel<HS>, grid, THREADS, forward_shared_bytes(HS),
                  native(out), lse, native(qkv), T, NH);
}

} // namespace flash

bool attention_flash_forward(Rows out, float* lse, Rows qkv, int B, int T, int C, int NH) {
    int HS = C / NH;
    if (!flash::is_supported(HS, out, qkv, qkv)) return false;
    switch (HS) {
    case 64:
        flash::forward<64>(out, lse, qkv, B, T, NH);
        break;
    case 80:
        flash::forward<80>(out, lse, qkv, B, T, NH);
        break;
    case 96:
        flash::forward<96>(out, lse, qkv, B, T, NH);
        break;
    case 128:
        flash::forward<128>(out, lse, qkv, B, T, NH);
        break;
    }
    return true;
}

#endif
