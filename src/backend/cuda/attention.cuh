// backend/cuda/attention.cuh - attention on tensor cores: tiles in shared memory and the products
// of a warp with them.
//
// A tile holds neighbouring rows of one head, HS elements each, 8 elements (16 bytes) of padding
// behind each row: the strides 144, 176, 208 and 272 bytes put the 8 rows of an ldmatrix on 8
// different groups of 4 banks. A warp owns 16 rows of one operand; what it shares with the other
// warps of its block is the other operand.
#ifndef BACKEND_CUDA_ATTENTION_CUH
#define BACKEND_CUDA_ATTENTION_CUH

#include <type_traits>

#include "backend/cuda/common.cuh"
#include "backend/cuda/tensor_core.cuh"

// False: the type, head size or alignment is not for tensor cores, and nothing was done.
//   delta (B, NH, T): see attention_delta_kernel
#ifdef PRECISION_FP32
inline bool attention_flash_forward(Rows, float*, Rows, int, int, int, int) { return false; }
inline bool attention_flash_backward(Rows, Rows, Rows, const float*, const float*, int, int, int,
                                     int) {
    return false;
}
#else
bool attention_flash_forward(Rows out, float* lse, Rows qkv, int B, int T, int C, int NH);
bool attention_flash_backward(Rows dqkv, Rows dout, Rows qkv, const float* lse, const float* delta,
                              int B, int T, int C, int NH);

namespace flash {

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int WARP_ROWS = 16;                 // of an mma
constexpr int BLOCK_ROWS = WARPS * WARP_ROWS; // 64 queries, or keys, that a block owns

// Elements from row to row of a tile.
__host__ __device__ constexpr int stride(int HS) { return HS + 8; }
__host__ __device__ constexpr int tile_elems(int HS, int rows) { return rows * stride(HS); }

inline bool is_supported(int HS, Rows a, Rows b, Rows c) {
    return (HS == 64 || HS == 80 || HS == 96 || HS == 128) && is_aligned16(a) && is_aligned16(b) &&
           is_aligned16(c);
}

// Starts copying rows [first, first + ROWS) of a matrix of T rows into a tile; rows from T on are
// 0.
template <int HS, int ROWS>
__device__ inline void copy_tile(Native* tile, const Native* matrix, size_t ld, int first, int T) {
    constexpr int CHUNKS = HS / PACK;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS * PACK;
        bool is_inside = first + r < T;
        const Native* from = matrix + (is_inside ? (size_t)(first + r) * ld : 0) + c;
        cp_async16_zfill(tile + r * stride(HS) + c, from, is_inside ? 16 : 0);
    }
}

// ---- fragments ----------------------------------------------------------------------------------

__device__ inline void mma(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (std::is_same_v<Native, __half>)
        mma_m16n8k16_fp16(sum, a, b, sum);
    else
        mma_m16n8k16_bf16(sum, a, b, sum);
}

// Two neighbouring elements in one register.
__device__ inline uint32_t pair(float low, float high) {
    if constexpr (std::is_same_v<Native, __half>) {
        __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&both);
    } else {
        __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&both);
    }
}

// A (16, 16) = tile[0..16)[k0..k0+16).
template <int HS> __device__ inline void load_a(uint32_t (&a)[4], const Native* tile, int k0) {
    int lane = threadIdx.x % WARP;
    ldmatrix_x4(a, tile + lane % 16 * stride(HS) + k0 + lane / 16 * 8);
}

// sum (16, N) += a (16, 16) * b (16, N) with b(k, n) = tile[n][k0 + k].
template <int HS, int N>
__device__ inline void mma_rows(float (&sum)[N / 8][4], const uint32_t (&a)[4], const Native* tile,
                                int k0) {
    int lane = threadIdx.x % WARP;
    const Native* from = tile + (lane / 16 * 8 + lane % 8) * stride(HS) + k0 + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < N; n += 16) {
        uint32_t r[4];
        ldmatrix_x4(r, from + n * stride(HS));
        mma(sum[n / 8], a, {r[0], r[1]});
        mma(sum[n / 8 + 1], a, {r[2], r[3]});
    }
}

// sum (16, N) += rows (16, HS) * tile (N, HS)^T, both in shared memory.
template <int HS, int N>
__device__ inline void multiply_rows(float (&sum)[N / 8][4], const Native* rows,
                                     const Native* tile) {
#pragma unroll
    for (int k0 = 0; k0 < HS; k0 += 16) {
        uint32_t a[4];
        load_a<HS>(a, rows, k0);
        mma_rows<HS, N>(sum, a, tile, k0);
    }
}

// sum (16, HS) += p (16, K) * tile (K, HS): the sums of one product, rounded, are the A of the
// next.
template <int HS, int K>
__device__ inline void multiply_columns(float (&sum)[HS / 8][4], const float (&p)[K / 8][4],
                                        const Native* tile) {
    int lane = threadIdx.x % WARP;
    const Native* from = tile + lane % 16 * stride(HS) + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        const float(&left)[4] = p[k / 8];
        const float(&right)[4] = p[k / 8 + 1];
        uint32_t a[4] = {pair(left[0], left[1]), pair(left[2], left[3]), pair(right[0], right[1]),
                         pair(right[2], right[3])};
#pragma unroll
        for (int n = 0; n < HS; n += 16) {
            uint32_t r[4];
            ldmatrix_x4_trans(r, from + k * stride(HS) + n);
            mma(sum[n / 8], a, {r[0], r[1]});
            mma(sum[n / 8 + 1], a, {r[2], r[3]});
        }
    }
}

// Writes sum * (factor of row g, factor of row g + 8), 16 rows of a head of which `valid` exist, by
// way of 16 rows of shared memory that no other warp reads any more.
template <int HS>
__device__ inline void store_rows(Native* out, size_t ld, const float (&sum)[HS / 8][4],
                                  float factor_g, float factor_g8, Native* rows, int valid) {
    int lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < HS / 8; n++) {
        Native* at = rows + g * stride(HS) + n * 8 + 2 * q;
        *reinterpret_cast<uint32_t*>(at) = pair(sum[n][0] * factor_g, sum[n][1] * factor_g);
        *reinterpret_cast<uint32_t*>(at + 8 * stride(HS)) =
            pair(sum[n][2] * factor_g8, sum[n][3] * factor_g8);
    }
    __syncwarp();
    constexpr int CHUNKS = HS / PACK;
#pragma unroll
    for (int i = lane; i < WARP_ROWS * CHUNKS; i += WARP) {
        int r = i / CHUNKS, c = i % CHUNKS * PACK;
        if (r < valid) {
            *reinterpret_cast<uint4*>(out + (size_t)r * ld + c) =
                *reinterpret_cast<const uint4*>(rows + r * stride(HS) + c);
        }
    }
}

} // namespace flash

#endif // PRECISION_FP32
#endif
