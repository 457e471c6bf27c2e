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
#define BF16_DOT
typedef uint32_t Packed;
enum { STEP = 2 }; // elements of the summed index in one Packed
#else
typedef float Packed;
enum { STEP = 1 };
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

enum { TILE = 64 }; // queries and keys of a tile

static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }

// ---- product ------------------------------------------------------------------------------------

// c (M, N) = or += the sum over k of A(m, k) * b[k][:] with A(m, k) = a[m * a_row + k * a_col].
typedef struct {
    const Packed* a;
    size_t a_row, a_col;
    const Packed* b;
    size_t b_ld;
    float* c;
    size_t c_ld;
    bool add;
} TileProduct;

// ROWS <= 6 rows and 16 VECTORS <= 64 columns of a product: constants at each call, so that the
// sums stay in registers.
#if defined(__AVX512F__)
static inline __m512 multiply_add(Packed left, __m512 right, __m512 sum) {
#if defined(BF16_DOT)
    const __m512i pairs = _mm512_set1_epi32((int)left);
    return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)right);
#else
    return _mm512_fmadd_ps(_mm512_set1_ps(left), right, sum);
#endif
}

static inline __attribute__((always_inline)) void kernel(const int ROWS, const int VECTORS, int K,
                                                         const TileProduct* p) {
    const Packed *a = p->a, *b = p->b;
    const size_t a_row = p->a_row, a_col = p->a_col, b_ld = p->b_ld, c_ld = p->c_ld;
    float* c = p->c;
    __m512 sums[6][4];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            sums[m][v] =
                p->add ? _mm512_loadu_ps(c + (size_t)m * c_ld + 16 * v) : _mm512_setzero_ps();
        }
    }
    for (int k = 0; k < K; k++, a += a_col, b += b_ld) {
        __m512 right[4];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) right[v] = _mm512_loadu_ps((const float*)b + 16 * v);
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const Packed left = a[(size_t)m * a_row];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                sums[m][v] = multiply_add(left, right[v], sums[m][v]);
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
static inline __attribute__((always_inline)) void kernel(const int ROWS, const int VECTORS, int K,
                                                         const TileProduct* p) {
    const int COLS = 16 * VECTORS;
    const Packed *a = p->a, *restrict b = p->b;
    const size_t a_row = p->a_row, a_col = p->a_col, b_ld = p->b_ld, c_ld = p->c_ld;
    float* restrict c = p->c;
    float sums[6][64];
    for (int m = 0; m < ROWS; m++) {
        for (int j = 0; j < COLS; j++) sums[m][j] = p->add ? c[(size_t)m * c_ld + (size_t)j] : 0.0f;
    }
    for (int k = 0; k < K; k++, a += a_col, b += b_ld) {
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const float left = a[(size_t)m * a_row];
#pragma omp simd
            for (int j = 0; j < COLS; j++) sums[m][j] = mul_add(left, b[j], sums[m][j]);
        }
    }
    for (int m = 0; m < ROWS; m++) {
        for (int j = 0; j < COLS; j++) c[(size_t)m * c_ld + (size_t)j] = sums[m][j];
    }
}
#endif

// What of a product on the diagonal is needed: row m stops or begins at element m + diagonal.
typedef enum {
    WHOLE,
    SUM_TO,    // A(m, k) is 0 for k > m + diagonal
    SUM_FROM,  // A(m, k) is 0 for k < m + diagonal
    COLS_TO,   // columns > m + diagonal of c are not wanted
    COLS_FROM, // columns < m + diagonal of c are not wanted
} Part;

// ROWS rows of a product, from row m on
static inline __attribute__((always_inline)) void strip(const int ROWS, int m, int N, int K,
                                                        TileProduct p, Part part, int diagonal) {
    const int from = max_int(0, m + diagonal), to = max_int(0, m + ROWS + diagonal);
    p.a += (size_t)m * p.a_row;
    p.c += (size_t)m * p.c_ld;
    int first = part == COLS_FROM ? from / 16 * 16 : 0;
    if (part == COLS_TO) N = min_int(N, (to + 15) / 16 * 16);
    if (part == SUM_TO) K = min_int(K, (to + STEP - 1) / STEP);
    if (part == SUM_FROM) {
        const int skipped = min_int(K, from / STEP);
        p.a += (size_t)skipped * p.a_col;
        p.b += (size_t)skipped * p.b_ld;
        K -= skipped;
    }
    p.b += first;
    p.c += first;
    for (; first < N; first += 64, p.b += 64, p.c += 64) {
        switch (min_int(4, (N - first) / 16)) {
        case 4:
            kernel(ROWS, 4, K, &p);
            break;
        case 3:
            kernel(ROWS, 3, K, &p);
            break;
        case 2:
            kernel(ROWS, 2, K, &p);
            break;
        default:
            kernel(ROWS, 1, K, &p);
        }
    }
}

// N a multiple of 16, K in Packed
static void tile_product(int M, int N, int K, TileProduct p, Part part, int diagonal) {
    int m = 0;
    for (; m + 6 <= M; m += 6) strip(6, m, N, K, p, part, diagonal);
    for (; m + 4 <= M; m += 4) strip(4, m, N, K, p, part, diagonal);
    for (; m < M; m++) strip(1, m, N, K, p, part, diagonal);
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

#if defined(BF16_DOT)
// 16 pairs of elements that stand one below the other. Denormals become 0, as the product takes
// them.
static inline void store_pairs(Packed* out, __m512 upper, __m512 lower) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(lower, upper);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, both));
}
#endif

// A right operand, summed over rows: out (TILE / STEP, HSp). With one element in a Packed that is
// the left operand itself, and nothing is to do.
static inline const Packed* pack_right(Packed* out, const Packed* left, size_t HSp) {
#if defined(BF16_DOT)
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
#if defined(BF16_DOT)
    for (int i = 0; i < rows * TILE; i += 32) {
        const __m512 low = _mm512_loadu_ps(scores + i), high = _mm512_loadu_ps(scores + i + 16);
        _mm512_storeu_si512(out + i / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    return out;
#else
    (void)out;
    (void)rows;
    return scores;
#endif
}

// The transpose of scores as a left operand: element (column, row / STEP) at [row / STEP * TILE +
// column]. Rows from `rows` on count as 0.
static inline const Packed* pack_scores_transposed(Packed* out, const float* scores, int rows) {
#if defined(BF16_DOT)
    for (int r = 0; r < rows; r += 2, scores += 2 * TILE, out += TILE) {
        for (int j = 0; j < TILE; j += 16) {
            const __m512 lower =
                r + 1 < rows ? _mm512_loadu_ps(scores + TILE + j) : _mm512_setzero_ps();
            store_pairs(out + j, _mm512_loadu_ps(scores + j), lower);
        }
    }
    return out - (rows + 1) / 2 * TILE;
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
