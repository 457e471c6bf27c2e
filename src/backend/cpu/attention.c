// backend/cpu/attention.c - causal self-attention in tiles of 64 x 64, forward and backward.
//
// No (T, T) buffer: forward keeps a running maximum and sum per row, backward computes the
// probabilities again from lse. One (sequence, head) is the work of one thread, forward in several parts
// where there are more threads than heads; a query row is computed in the same order in every part.
// All tiles are fp32, packed contiguously: with a stride of a power of two they would fall into few
// cache sets.
//
// Source: Dao et al. 2022, arXiv:2205.14135; Milakov and Gimelshein 2018, arXiv:1805.02867.
#include <omp.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/vector_math.h"

enum {
    TILE = 64,           // queries and keys of a tile
    SCORE_LD = TILE + 0, // row stride of scores: not a power of two
};

static inline int min_int(int a, int b) { return a < b ? a : b; }

// Head size in tiles, so that kernels see whole vectors; the columns added are zero.
static size_t padded_head(int C, int NH) { return round_up((size_t)(C / NH), 16); }

// ---- product of tiles ------------------------------------------------------------------------------

// c (ROWS, COLS) = or += sum over k of A(m, k) * b[k][:], with A(m, k) = a[m * a_row + k * a_col].
// ROWS and COLS are constants at each call, so that the sums stay in registers.
static inline __attribute__((always_inline)) void kernel(const int ROWS, const int COLS, int K,
                                                         const float* a, size_t a_row, size_t a_col,
                                                         const float* restrict b, size_t b_ld,
                                                         float* restrict c, size_t c_ld, bool add) {
    float sums[6][64];
    for (int m = 0; m < ROWS; m++) {
        for (int j = 0; j < COLS; j++) sums[m][j] = add ? c[(size_t)m * c_ld + (size_t)j] : 0.0f;
    }
    for (int k = 0; k < K; k++) {
        const float* b_row = b + (size_t)k * b_ld;
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const float factor = a[(size_t)m * a_row + (size_t)k * a_col];
#pragma omp simd
            for (int j = 0; j < COLS; j++) sums[m][j] = mul_add(factor, b_row[j], sums[m][j]);
        }
    }
    for (int m = 0; m < ROWS; m++) {
        for (int j = 0; j < COLS; j++) c[(size_t)m * c_ld + (size_t)j] = sums[m][j];
    }
}

// COLS columns of the product, six rows at a time
#define DEFINE_COLUMNS(COLS)                                                                       \
    static void columns_##COLS(int M, int K, const float* a, size_t a_row, size_t a_col,           \
                               const float* b, size_t b_ld, float* c, size_t c_ld, bool add) {     \
        int m = 0;                                                                                 \
        for (; m + 6 <= M; m += 6) {                                                               \
            kernel(6, COLS, K, a + (size_t)m * a_row, a_row, a_col, b, b_ld, c + (size_t)m * c_ld, \
                   c_ld, add);                                                                     \
        }                                                                                          \
        for (; m + 4 <= M; m += 4) {                                                               \
            kernel(4, COLS, K, a + (size_t)m * a_row, a_row, a_col, b, b_ld, c + (size_t)m * c_ld, \
                   c_ld, add);                                                                     \
        }                                                                                          \
        for (; m < M; m++) {                                                                       \
            kernel(1, COLS, K, a + (size_t)m * a_row, a_row, a_col, b, b_ld, c + (size_t)m * c_ld, \
                   c_ld, add);                                                                     \
        }                                                                                          \
    }
DEFINE_COLUMNS(64)
DEFINE_COLUMNS(16)

// c (M, N) = or += A (M, K) * b (K, N); N a multiple of 16
static void tile_product(int M, int N, int K, const float* a, size_t a_row, size_t a_col,
                         const float* b, size_t b_ld, float* c, size_t c_ld, bool add) {
    int n = 0;
    for (; n + 64 <= N; n += 64) columns_64(M, K, a, a_row, a_col, b + n, b_ld, c + n, c_ld, add);
    for (; n < N; n += 16) columns_16(M, K, a, a_row, a_col, b + n, b_ld, c + n, c_ld, add);
}

// ---- packing ---------------------------------------------------------------------------------------

// out (TILE, HSp) = rows of a head in fp32 times scale; rows from `rows` on and columns from HS on are 0
static void pack_rows(float* out, const floatX* in, size_t ld, int rows, int HS, size_t HSp,
                      float scale) {
    for (int r = 0; r < TILE; r++) {
        float* o = out + (size_t)r * HSp;
        const floatX* x = in + (size_t)r * ld;
        const int cols = r < rows ? HS : 0;
#pragma omp simd
        for (int i = 0; i < cols; i++) o[i] = to_float(x[i]) * scale;
        for (int i = cols; i < (int)HSp; i++) o[i] = 0.0f;
    }
}

// out (HSp, TILE) = the transposed tile in (TILE, HSp)
static void transpose(float* restrict out, const float* restrict in, size_t HSp) {
    for (size_t i = 0; i < HSp; i += 16) {
        for (size_t r = 0; r < TILE; r++) {
            for (size_t j = i; j < i + 16; j++) out[j * TILE + r] = in[r * HSp + j];
        }
    }
}

static void unpack_rows(floatX* out, size_t ld, const float* in, int rows, int HS, size_t HSp,
                        float scale) {
    for (int r = 0; r < rows; r++) {
        const float* x = in + (size_t)r * HSp;
        floatX* o = out + (size_t)r * ld;
#pragma omp simd
        for (int i = 0; i < HS; i++) o[i] = to_floatX(x[i] * scale);
    }
}

// One head of one sequence: its keys and values, rows `ld` apart.
typedef struct {
    const floatX *k, *v;
    size_t ld;
    int HS;
    size_t HSp;
} Head;

// keys_t (HSp, TILE) and values (TILE, HSp) = keys first .. first + count - 1, the rest 0;
// work (TILE, HSp)
static void pack_keys(float* keys_t, float* values, const Head* head, int first, int count,
                      float* work) {
    const size_t at = (size_t)first * head->ld;
    pack_rows(work, head->k + at, head->ld, count, head->HS, head->HSp, 1.0f);
    transpose(keys_t, work, head->HSp);
    pack_rows(values, head->v + at, head->ld, count, head->HS, head->HSp, 1.0f);
}

// ---- scratch ---------------------------------------------------------------------------------------

// The work space of one thread, cut from its scratch.
typedef struct {
    float *keys_t, *values; // forward: (Tp, HSp) tile after tile, keys transposed; cached: one tile
    float *q, *out, *work;  // (TILE, HSp)
    float* scores;          // (TILE, SCORE_LD)
} ForwardWork;

typedef struct {
    float *q, *dout, *dq;           // (Tp, HSp)
    float* row_dot;                 // (Tp) sum over the head of dout * out
    float *k, *k_t, *v_t, *dk, *dv; // (TILE, HSp), transposed (HSp, TILE)
    float* work;                    // (TILE, HSp)
    float *probs, *dscores;         // (TILE, SCORE_LD)
} BackwardWork;

static float* take(float** scratch, size_t elems) {
    float* taken = *scratch;
    *scratch += round_up(elems, 16);
    return taken;
}

// Cuts the work space from scratch (NULL: counts); returns the elements used. keys: those kept packed.
static size_t cut_forward(ForwardWork* work, float* scratch, size_t keys, size_t HSp) {
    float* next = scratch;
    const size_t tile = TILE * HSp;
    work->keys_t = take(&next, round_up(keys, TILE) * HSp);
    work->values = take(&next, round_up(keys, TILE) * HSp);
    work->q = take(&next, tile);
    work->out = take(&next, tile);
    work->work = take(&next, tile);
    work->scores = take(&next, TILE * SCORE_LD);
    return (size_t)(next - scratch);
}

static size_t cut_backward(BackwardWork* work, float* scratch, size_t T, size_t HSp) {
    float* next = scratch;
    const size_t Tp = round_up(T, TILE), tile = TILE * HSp;
    work->q = take(&next, Tp * HSp);
    work->dout = take(&next, Tp * HSp);
    work->dq = take(&next, Tp * HSp);
    work->row_dot = take(&next, Tp);
    work->k = take(&next, tile);
    work->k_t = take(&next, tile);
    work->v_t = take(&next, tile);
    work->dk = take(&next, tile);
    work->dv = take(&next, tile);
    work->work = take(&next, tile);
    work->probs = take(&next, TILE * SCORE_LD);
    work->dscores = take(&next, TILE * SCORE_LD);
    return (size_t)(next - scratch);
}

ScratchNeed attention_scratch(const OpsShape* shape) {
    const size_t HSp = padded_head(shape->C, shape->NH), T = (size_t)shape->T;
    ForwardWork forward;
    BackwardWork backward;
    float origin; // only distances count
    size_t elems = cut_forward(&forward, &origin, T, HSp);
    if (shape->backward) elems = max_size(elems, cut_backward(&backward, &origin, T, HSp));
    return (ScratchNeed){.per_thread = elems * sizeof(float), .shared = 0};
}

// ---- forward ---------------------------------------------------------------------------------------

// One row of scores becomes exp(score - new maximum), of its first `visible` keys; the rest 0. Called
// with a constant for whole tiles, so that they do without masks.
static inline __attribute__((always_inline)) void softmax_row(float* restrict s, int visible,
                                                              float* max, float* sum,
                                                              float* restrict out, size_t HSp) {
    float row_max = *max;
#pragma omp simd reduction(max : row_max)
    for (int j = 0; j < TILE; j++) {
        float score = j < visible ? s[j] : -INFINITY;
        row_max = score > row_max ? score : row_max;
    }
    float row_sum = 0.0f;
#pragma omp simd reduction(+ : row_sum)
    for (int j = 0; j < TILE; j++) {
        s[j] = j < visible ? fast_exp(s[j] - row_max) : 0.0f;
        row_sum += s[j];
    }
    if (row_max == *max) { // nothing to scale
        *sum += row_sum;
        return;
    }
    const float decay = fast_exp(*max - row_max);
    *max = row_max;
    *sum = mul_add(*sum, decay, row_sum);
#pragma omp simd
    for (size_t i = 0; i < HSp; i++) out[i] *= decay;
}

// scores (TILE, SCORE_LD) of one tile become exp(score - maximum so far); max and sum (TILE) are brought
// up to date and the rows of out (TILE, HSp) scaled to the new maximum. Row 0 sees the first `visible`
// keys of the tile, each further row one more.
static void online_softmax(float* scores, int rows, int visible, float* max, float* sum, float* out,
                           size_t HSp) {
    for (int r = 0; r < rows; r++) {
        float *s = scores + (size_t)r * SCORE_LD, *o = out + (size_t)r * HSp;
        if (visible + r >= TILE) {
            softmax_row(s, TILE, &max[r], &sum[r], o, HSp);
        } else {
            softmax_row(s, visible + r, &max[r], &sum[r], o, HSp);
        }
    }
}

// `rows` <= TILE queries in work->q, at positions first_pos ..., attend to all keys up to their own.
// Keys and values are those in work if `packed`, else they are packed tile by tile. The result stands in
// work->out; lse (rows) may be NULL.
static void attend(const ForwardWork* work, const Head* head, bool packed, float* lse, int rows,
                   int first_pos) {
    const size_t HSp = head->HSp;
    float max[TILE], sum[TILE];
    for (int r = 0; r < TILE; r++) {
        max[r] = -1e30f; // below any score, but finite: differences are numbers
        sum[r] = 0.0f;
    }
    memset(work->out, 0, TILE * HSp * sizeof(float));
    const int num_keys = first_pos + rows;
    for (int first = 0; first < num_keys; first += TILE) {
        const int count = min_int(TILE, num_keys - first);
        const size_t at = packed ? (size_t)first * HSp : 0;
        if (!packed) pack_keys(work->keys_t, work->values, head, first, count, work->work);
        tile_product(rows, TILE, (int)HSp, work->q, HSp, 1, work->keys_t + at, TILE, work->scores,
                     SCORE_LD, false);
        online_softmax(work->scores, rows, first_pos + 1 - first, max, sum, work->out, HSp);
        tile_product(rows, (int)HSp, count, work->scores, SCORE_LD, 1, work->values + at, HSp,
                     work->out, HSp, true);
    }
    for (int r = 0; r < rows; r++) {
        const float inverse = 1.0f / sum[r];
        float* o = work->out + (size_t)r * HSp;
#pragma omp simd
        for (size_t i = 0; i < HSp; i++) o[i] *= inverse;
        if (lse != NULL) lse[r] = max[r] + logf(sum[r]);
    }
}

void attention_forward(Rows out, float* lse, Rows qkv, int B, int T, int C, int NH) {
    const int HS = C / NH, query_tiles = (T + TILE - 1) / TILE;
    const size_t HSp = padded_head(C, NH);
    const float scale = 1.0f / sqrtf((float)HS);
    // Every part packs the keys it needs; its queries are every parts-th tile.
    const int parts = min_int(query_tiles, (omp_get_max_threads() + B * NH - 1) / (B * NH));
#pragma omp parallel for schedule(dynamic, 1)
    for (int unit = 0; unit < B * NH * parts; unit++) {
        const int part = unit % parts, h = unit / parts % NH, b = unit / parts / NH;
        const floatX* q = row_at(qkv, (size_t)b * (size_t)T) + (size_t)h * (size_t)HS;
        const Head head = {q + C, q + 2 * C, qkv.ld, HS, HSp};
        ForwardWork work;
        cut_forward(&work, thread_scratch(), (size_t)T, HSp);
        int packed_tiles = 0;
        for (int tile = part; tile < query_tiles; tile += parts) {
            for (; packed_tiles <= tile; packed_tiles++) {
                const int first = packed_tiles * TILE;
                pack_keys(work.keys_t + (size_t)first * HSp, work.values + (size_t)first * HSp,
                          &head, first, min_int(TILE, T - first), work.work);
            }
            const int t = tile * TILE, rows = min_int(TILE, T - t);
            const size_t row = (size_t)b * (size_t)T + (size_t)t;
            pack_rows(work.q, q + (size_t)t * qkv.ld, qkv.ld, rows, HS, HSp, scale);
            attend(&work, &head, true, lse + ((size_t)b * (size_t)NH + (size_t)h) * (size_t)T + t,
                   rows, t);
            unpack_rows(row_at(out, row) + (size_t)h * (size_t)HS, out.ld, work.out, rows, HS, HSp,
                        1.0f);
        }
    }
}

void attention_cached(Rows out, Rows qkv, floatX* k_cache, floatX* v_cache, int first_pos, int n,
                      int C, int NH) {
    const int HS = C / NH, query_tiles = (n + TILE - 1) / TILE;
    const size_t HSp = padded_head(C, NH);
    const float scale = 1.0f / sqrtf((float)HS);
    for (int i = 0; i < n; i++) {
        const floatX* row = row_at(qkv, (size_t)i);
        const size_t at = (size_t)(first_pos + i) * (size_t)C;
        memcpy(k_cache + at, row + C, (size_t)C * sizeof(floatX));
        memcpy(v_cache + at, row + 2 * C, (size_t)C * sizeof(floatX));
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int unit = 0; unit < NH * query_tiles; unit++) {
        const int h = unit % NH, first = unit / NH * TILE, rows = min_int(TILE, n - first);
        const size_t column = (size_t)h * (size_t)HS;
        const Head head = {k_cache + column, v_cache + column, (size_t)C, HS, HSp};
        ForwardWork work;
        cut_forward(&work, thread_scratch(), TILE, HSp);
        pack_rows(work.q, row_at(qkv, (size_t)first) + column, qkv.ld, rows, HS, HSp, scale);
        attend(&work, &head, false, NULL, rows, first_pos + first);
        unpack_rows(row_at(out, (size_t)first) + column, out.ld, work.out, rows, HS, HSp, 1.0f);
    }
}

// ---- backward --------------------------------------------------------------------------------------

// Where one head of one sequence stands: element 0 of row 0.
typedef struct {
    const floatX *q, *k, *v, *out, *dout;
    floatX *dq, *dk, *dv;
    size_t qkv_ld, out_ld, dout_ld, dqkv_ld;
    const float* lse; // (T)
    int T, HS;
    size_t HSp;
    float scale;
} BackwardHead;

// One row: probs becomes exp(scores - lse) for its first `visible` keys, the rest 0, and dscores, which
// holds dprobs, becomes probs * (dprobs - row_dot).
static inline __attribute__((always_inline)) void probabilities_row(float* restrict probs,
                                                                    float* restrict dscores,
                                                                    float lse, float row_dot,
                                                                    int visible) {
#pragma omp simd
    for (int j = 0; j < TILE; j++) {
        float prob = j < visible ? fast_exp(probs[j] - lse) : 0.0f;
        probs[j] = prob;
        dscores[j] = prob * (dscores[j] - row_dot);
    }
}

// The rows of a tile; row 0 sees the first `visible` keys, each further row one more.
static void probabilities(float* probs, float* dscores, const float* lse, const float* row_dot,
                          int rows, int visible) {
    for (int r = 0; r < rows; r++) {
        float *p = probs + (size_t)r * SCORE_LD, *d = dscores + (size_t)r * SCORE_LD;
        if (visible + r >= TILE) {
            probabilities_row(p, d, lse[r], row_dot[r], TILE);
        } else {
            probabilities_row(p, d, lse[r], row_dot[r], visible + r);
        }
    }
}

// Packs queries and output gradients of the whole sequence, and sums dout * out over each row.
static void prepare_queries(const BackwardWork* work, const BackwardHead* head) {
    const size_t HSp = head->HSp;
    for (int first = 0; first < head->T; first += TILE) {
        const int rows = min_int(TILE, head->T - first);
        const size_t at = (size_t)first * HSp, t = (size_t)first;
        pack_rows(work->q + at, head->q + t * head->qkv_ld, head->qkv_ld, rows, head->HS, HSp,
                  head->scale);
        pack_rows(work->dout + at, head->dout + t * head->dout_ld, head->dout_ld, rows, head->HS,
                  HSp, 1.0f);
        pack_rows(work->work, head->out + t * head->out_ld, head->out_ld, rows, head->HS, HSp,
                  1.0f);
        for (size_t r = 0; r < TILE; r++) {
            const float *d = work->dout + at + r * HSp, *o = work->work + r * HSp;
            float lanes[16] = {0};
            for (size_t i = 0; i < HSp; i += 16) {
#pragma omp simd
                for (size_t j = 0; j < 16; j++) lanes[j] = mul_add(d[i + j], o[i + j], lanes[j]);
            }
            for (int width = 8; width > 0; width /= 2) {
                for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
            }
            work->row_dot[t + r] = lanes[0];
        }
    }
    memset(work->dq, 0, round_up((size_t)head->T, TILE) * HSp * sizeof(float));
}

// One tile of keys against all queries that see it: its dk and dv, and its part of every dq.
static void backward_keys(const BackwardWork* work, const BackwardHead* head, int first) {
    const int keys = min_int(TILE, head->T - first), HSp = (int)head->HSp;
    const size_t ld = head->HSp, at = (size_t)first * head->qkv_ld;
    pack_rows(work->work, head->v + at, head->qkv_ld, keys, head->HS, ld, 1.0f);
    transpose(work->v_t, work->work, ld);
    pack_rows(work->k, head->k + at, head->qkv_ld, keys, head->HS, ld, 1.0f);
    transpose(work->k_t, work->k, ld);
    for (int t = first; t < head->T; t += TILE) {
        const int rows = min_int(TILE, head->T - t);
        const float *q = work->q + (size_t)t * ld, *dout = work->dout + (size_t)t * ld;
        const bool add = t > first;
        tile_product(rows, TILE, HSp, q, ld, 1, work->k_t, TILE, work->probs, SCORE_LD, false);
        tile_product(rows, TILE, HSp, dout, ld, 1, work->v_t, TILE, work->dscores, SCORE_LD, false);
        probabilities(work->probs, work->dscores, head->lse + t, work->row_dot + t, rows,
                      t + 1 - first);
        tile_product(keys, HSp, rows, work->probs, 1, SCORE_LD, dout, ld, work->dv, ld, add);
        tile_product(keys, HSp, rows, work->dscores, 1, SCORE_LD, q, ld, work->dk, ld, add);
        tile_product(rows, HSp, keys, work->dscores, SCORE_LD, 1, work->k, ld,
                     work->dq + (size_t)t * ld, ld, true);
    }
    const size_t out = (size_t)first * head->dqkv_ld;
    unpack_rows(head->dk + out, head->dqkv_ld, work->dk, keys, head->HS, ld, 1.0f);
    unpack_rows(head->dv + out, head->dqkv_ld, work->dv, keys, head->HS, ld, 1.0f);
}

void attention_backward(Rows dqkv, Rows dout, Rows qkv, Rows out, const float* lse, int B, int T,
                        int C, int NH) {
    const int HS = C / NH;
#pragma omp parallel for schedule(dynamic, 1)
    for (int unit = 0; unit < B * NH; unit++) {
        const size_t row = (size_t)(unit / NH) * (size_t)T, column = (size_t)(unit % NH * HS);
        const floatX* q = row_at(qkv, row) + column;
        floatX* dq = row_at(dqkv, row) + column;
        const BackwardHead head = {
            .q = q,
            .k = q + C,
            .v = q + 2 * C,
            .out = row_at(out, row) + column,
            .dout = row_at(dout, row) + column,
            .dq = dq,
            .dk = dq + C,
            .dv = dq + 2 * C,
            .qkv_ld = qkv.ld,
            .out_ld = out.ld,
            .dout_ld = dout.ld,
            .dqkv_ld = dqkv.ld,
            .lse = lse + (size_t)unit * (size_t)T,
            .T = T,
            .HS = HS,
            .HSp = padded_head(C, NH),
            .scale = 1.0f / sqrtf((float)HS),
        };
        BackwardWork work;
        cut_backward(&work, thread_scratch(), (size_t)T, head.HSp);
        prepare_queries(&work, &head);
        for (int first = 0; first < T; first += TILE) backward_keys(&work, &head, first);
        unpack_rows(dq, dqkv.ld, work.dq, T, HS, head.HSp, head.scale);
    }
}
