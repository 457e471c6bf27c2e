// backend/cpu/attention_tiles.h - products of small tiles, and how their operands are packed.
//
// Operands are 32 bits wide: one float, or two bf16 neighbours along the summed index for the dot
// product instruction of AVX-512 BF16, which sums in fp32 as well. Everything else of attention is
// the same for both. Tiles stand contiguously: with a stride of a power of two they would fall into
// few cache sets.
#ifndef BACKEND_CPU_ATTENTION_TILES_H
#define BACKEND_CPU_ATTENTION_TILES_H

#include "backend/cpu/cpu.h"
#include "backend/cpu/vector_math.h"

#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
#include <immintrin.h>
typedef uint32_t Packed;
enum { STEP = 2 }; // elements of the summed index in one Packed
#else
typedef float Packed;
enum { STEP = 1 };
#endif

enum { TILE = 64 }; // queries and keys of a tile

static inline int min_int(int a, int b) { return a < b ? a : b; }

// ---- product ------------------------------------------------------------------------------------

// c (ROWS, 16 VECTORS) = or += sum over k < K of A(m, k) * b[k][:], A(m, k) = a[m * a_row + k *
// a_col]. ROWS <= 6 and VECTORS <= 4 are constants at each call, so that the sums stay in
// registers.
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
static inline __attribute__((always_inline)) void kernel(const int ROWS, const int VECTORS, int K,
                                                         const Packed* a, size_t a_row,
                                                         size_t a_col, const Packed* b, size_t b_ld,
                                                         float* c, size_t c_ld, bool add) {
    __m512 sums[6][4];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            sums[m][v] = add ? _mm512_loadu_ps(c + (size_t)m * c_ld + 16 * v) : _mm512_setzero_ps();
        }
    }
    for (int k = 0; k < K; k++) {
        __m512bh right[4];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            right[v] = (__m512bh)_mm512_loadu_si512(b + (size_t)k * b_ld + 16 * v);
        }
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const Packed pair = a[(size_t)m * a_row + (size_t)k * a_col];
            const __m512bh left = (__m512bh)_mm512_set1_epi32((int)pair);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                sums[m][v] = _mm512_dpbf16_ps(sums[m][v], left, right[v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            _mm512_storeu_ps(c + (size_t)m * c_ld + 16 * v, sums[m][v]);
        }
    }
}
#else
static inline __attribute__((always_inline)) void
kernel(const int ROWS, const int VECTORS, int K, const Packed* a, size_t a_row, size_t a_col,
       const Packed* restrict b, size_t b_ld, float* restrict c, size_t c_ld, bool add) {
    const int COLS = 16 * VECTORS;
    float sums[6][64];
    for (int m = 0; m < ROWS; m++) {
        for (int j = 0; j < COLS; j++) sums[m][j] = add ? c[(size_t)m * c_ld + (size_t)j] : 0.0f;
    }
    for (int k = 0; k < K; k++) {
        const float* right = b + (size_t)k * b_ld;
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const float left = a[(size_t)m * a_row + (size_t)k * a_col];
#pragma omp simd
            for (int j = 0; j < COLS; j++) sums[m][j] = mul_add(left, right[j], sums[m][j]);
        }
    }
    for (int m = 0; m < ROWS; m++) {
        for (int j = 0; j < COLS; j++) c[(size_t)m * c_ld + (size_t)j] = sums[m][j];
    }
}
#endif

// 16 VECTORS columns of a product, six rows at a time
#define DEFINE_COLUMNS(VECTORS)                                                                    \
    static void columns_##VECTORS(int M, int K, const Packed* a, size_t a_row, size_t a_col,       \
                                  const Packed* b, size_t b_ld, float* c, size_t c_ld, bool add) { \
        int m = 0;                                                                                 \
        for (; m + 6 <= M; m += 6, a += 6 * a_row, c += 6 * c_ld) {                                \
            kernel(6, VECTORS, K, a, a_row, a_col, b, b_ld, c, c_ld, add);                         \
        }                                                                                          \
        for (; m + 4 <= M; m += 4, a += 4 * a_row, c += 4 * c_ld) {                                \
            kernel(4, VECTORS, K, a, a_row, a_col, b, b_ld, c, c_ld, add);                         \
        }                                                                                          \
        for (; m < M; m++, a += a_row, c += c_ld) {                                                \
            kernel(1, VECTORS, K, a, a_row, a_col, b, b_ld, c, c_ld, add);                         \
        }                                                                                          \
    }
DEFINE_COLUMNS(4)
DEFINE_COLUMNS(1)

// c (M, N) = or += A (M, K) * b (K, N); N a multiple of 16, K in Packed
static inline void tile_product(int M, int N, int K, const Packed* a, size_t a_row, size_t a_col,
                                const Packed* b, size_t b_ld, float* c, size_t c_ld, bool add) {
    int n = 0;
    for (; n + 64 <= N; n += 64) columns_4(M, K, a, a_row, a_col, b + n, b_ld, c + n, c_ld, add);
    for (; n < N; n += 16) columns_1(M, K, a, a_row, a_col, b + n, b_ld, c + n, c_ld, add);
}

// ---- packing ------------------------------------------------------------------------------------

// A left operand, summed over columns: out (TILE, HSp / STEP) = rows of a head; rows from `rows` on
// and columns from HS on are 0.
static inline void pack_left(Packed* out, const floatX* in, size_t ld, int rows, int HS,
                             size_t HSp) {
    for (int r = 0; r < TILE; r++, in += ld, out += HSp / STEP) {
        const size_t cols = r < rows ? (size_t)HS : 0;
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
        memcpy(out, in, cols * sizeof(floatX));
        memset((floatX*)out + cols, 0, (HSp - cols) * sizeof(floatX));
#else
        widen(out, in, cols);
        memset(out + cols, 0, (HSp - cols) * sizeof(float));
#endif
    }
}

// out (cols, TILE) = in (TILE, cols) transposed; a left operand becomes a right one, of its
// transpose.
static inline void transpose(Packed* restrict out, const Packed* restrict in, size_t cols) {
    for (size_t i = 0; i < cols; i += 8) { // eight elements at a time: half a cache line of `in`
        for (size_t r = 0; r < TILE; r++) {
            for (size_t j = i; j < i + 8; j++) out[j * TILE + r] = in[r * cols + j];
        }
    }
}

// A right operand, summed over rows: out (TILE / STEP, HSp). With one element in a Packed that is
// the left operand itself, and nothing is to do.
static inline const Packed* pack_right(Packed* out, const Packed* left, size_t HSp) {
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
    const uint16_t* in = (const uint16_t*)left;
    for (int r = 0; r < TILE; r += 2, in += 2 * HSp, out += HSp) {
#pragma omp simd
        for (size_t i = 0; i < HSp; i++) out[i] = in[i] | (uint32_t)in[HSp + i] << 16;
    }
    return out - TILE / 2 * HSp;
#else
    (void)out;
    (void)HSp;
    return left;
#endif
}

// Scores (TILE, TILE) as a left operand (TILE, TILE / STEP).
static inline const Packed* pack_scores(Packed* out, const float* scores, int rows) {
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
    narrow((floatX*)out, scores, (size_t)rows * TILE);
    return out;
#else
    (void)out;
    (void)rows;
    return scores;
#endif
}

// The transpose of scores as a left operand: element (key, query / STEP) at [query / STEP * TILE +
// key]. Rows from `rows` on count as 0.
static inline const Packed* pack_scores_transposed(Packed* out, const float* scores, int rows) {
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
    for (int r = 0; r < rows; r += 2) {
        const float *low = scores + r * TILE, *high = low + TILE;
        Packed* pairs = out + r / 2 * TILE;
        const uint32_t keep = r + 1 < rows ? 0xFFFFu : 0;
#pragma omp simd
        for (int j = 0; j < TILE; j++) {
            pairs[j] = float_to_bf16_bits(low[j]) | (float_to_bf16_bits(high[j]) & keep) << 16;
        }
    }
    return out;
#else
    (void)out;
    (void)rows;
    return scores;
#endif
}

// rows of a head = in (rows, HSp) times scale, rounded
static inline void unpack_rows(floatX* out, size_t ld, const float* in, int rows, int HS,
                               size_t HSp, float scale) {
    for (int r = 0; r < rows; r++, in += HSp, out += ld) {
#pragma omp simd
        for (int i = 0; i < HS; i++) out[i] = to_floatX(in[i] * scale);
    }
}

#endif
