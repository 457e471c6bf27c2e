// backend/cpu/attention.c - causal self-attention in tiles of 64 x 64, forward and backward.
//
// No (T, T) buffer: forward keeps a running reference and sum per query, backward computes the
// probabilities again from lse. One (sequence, head) is the work of one thread, forward in several
// parts where there are more threads than heads; a query is computed in the same order in every
// part. Of tiles on the diagonal only what queries see is computed, in strips.
//
// Products leave scores unscaled; the softmax scales them, by log2(e) as well, and takes powers of
// two. Forward has queries side by side, (key, query), so that its maxima and sums stay in lanes.
//
// Source: Dao et al. 2022, arXiv:2205.14135; Milakov and Gimelshein 2018, arXiv:1805.02867.
#include <omp.h>

#include "backend/cpu/attention_tiles.h"

// Head size in tiles, so that kernels see whole vectors; the columns added are zero.
static size_t padded_head(int C, int NH) { return round_up((size_t)(C / NH), 16); }

// One head of one sequence: its keys and values, rows `ld` apart.
typedef struct {
    const floatX *k, *v;
    size_t ld;
    int HS;
    size_t HSp;
    float scale; // of the scores
} Head;

// ---- scratch ------------------------------------------------------------------------------------

// The work space of one thread, cut from its scratch. HSq = HSp / STEP.
typedef struct {
    Packed* keys;     // (TILE, HSq) per tile of keys
    Packed* values;   // (TILE / STEP, HSp) per tile of keys
    Packed *left, *q; // (TILE, HSq), (HSq, TILE)
    float* scores;    // (TILE keys, TILE queries)
    Packed* probs;    // (TILE / STEP, TILE)
    float* out;       // (TILE, HSp)
} ForwardWork;

typedef struct {
    Packed *q, *dout;                // (Tp, HSq)
    Packed *q_right, *dout_right;    // (Tp / STEP, HSp)
    float *dq, *row_dot;             // (Tp, HSp); (Tp) sum over the head of dout * out
    Packed *k, *k_t, *v_t, *k_right; // of one tile
    Packed* packed[3];               // (TILE, TILE / STEP) scores as operands
    float *dk, *dv;                  // (TILE, HSp)
    float *probs, *dscores;          // (TILE, TILE)
} BackwardWork;

// 32-bit elements of scratch, a whole number of cache lines
static void* take(char** scratch, size_t elems) {
    void* taken = *scratch;
    *scratch += round_up(elems * sizeof(float), 64);
    return taken;
}

// Cuts the work space from scratch and returns the bytes used. keys: how many are kept packed.
static size_t cut_forward(ForwardWork* work, char* scratch, size_t keys, size_t HSp) {
    char* next = scratch;
    const size_t rows = round_up(keys, TILE);
    work->keys = take(&next, rows * HSp / STEP);
    work->values = take(&next, rows * HSp / STEP);
    work->q = take(&next, TILE * HSp / STEP);
    work->left = take(&next, TILE * HSp / STEP);
    work->probs = take(&next, TILE * TILE / STEP);
    work->scores = take(&next, TILE * TILE);
    work->out = take(&next, TILE * HSp);
    return (size_t)(next - scratch);
}

static size_t cut_backward(BackwardWork* work, char* scratch, size_t T, size_t HSp) {
    char* next = scratch;
    const size_t Tp = round_up(T, TILE), tile = TILE * HSp;
    work->q = take(&next, Tp * HSp / STEP);
    work->dout = take(&next, Tp * HSp / STEP);
    work->q_right = STEP == 1 ? work->q : take(&next, Tp * HSp / STEP);
    work->dout_right = STEP == 1 ? work->dout : take(&next, Tp * HSp / STEP);
    work->dq = take(&next, Tp * HSp);
    work->row_dot = take(&next, Tp);
    work->k = take(&next, tile / STEP);
    work->k_t = take(&next, tile / STEP);
    work->v_t = take(&next, tile / STEP);
    work->k_right = take(&next, tile / STEP);
    for (int i = 0; i < 3; i++) work->packed[i] = take(&next, TILE * TILE / STEP);
    work->dk = take(&next, tile);
    work->dv = take(&next, tile);
    work->probs = take(&next, TILE * TILE);
    work->dscores = take(&next, TILE * TILE);
    return (size_t)(next - scratch);
}

ScratchNeed attention_scratch(const OpsShape* shape) {
    const size_t HSp = padded_head(shape->C, shape->NH), T = (size_t)shape->T;
    ForwardWork forward;
    BackwardWork backward;
    char origin; // only distances count
    size_t bytes = cut_forward(&forward, &origin, T, HSp);
    if (shape->backward) bytes = max_size(bytes, cut_backward(&backward, &origin, T, HSp));
    return (ScratchNeed){.per_thread = bytes, .shared = 0};
}

// ---- forward ------------------------------------------------------------------------------------

// Scores may exceed their reference by this much, in powers of two, before the sums are scaled to a
// new one: it is rarely needed after the first tile.
static const float SLACK = 8.0f;

// Softmax so far of TILE queries: sum of 2^(score - reference), reference near the largest score.
typedef struct {
    float reference[TILE], sum[TILE];
} Softmax;

static inline float max_float(float a, float b) { return a > b ? a : b; }

// Scores (TILE, TILE) of keys that a query does not see become -inf. There are `keys` keys, and
// query j sees those up to j + diagonal.
static void mask(float* scores, int keys, int diagonal) {
    for (int k = max_int(0, diagonal + 1); k < TILE; k++) {
        float* s = scores + k * TILE;
        const int first = k < keys ? k - diagonal : TILE;
#pragma omp simd
        for (int j = 0; j < TILE; j++) s[j] = j >= first ? s[j] : -INFINITY;
    }
}

// Brings the references of n queries up to date with a tile of scores (TILE, TILE) and scales the
// rows of out (n, HSp) to them.
static void raise_references(Softmax* softmax, const float* restrict scores, int n, float scale,
                             float* out, size_t HSp) {
    float largest[TILE], decay[TILE];
    for (int j = 0; j < n; j++) largest[j] = -INFINITY;
    for (int k = 0; k < TILE; k += 4) {
        const float* s = scores + k * TILE;
#pragma omp simd
        for (int j = 0; j < n; j++) {
            const float first = max_float(s[j], s[TILE + j]);
            const float second = max_float(s[2 * TILE + j], s[3 * TILE + j]);
            largest[j] = max_float(largest[j], max_float(first, second));
        }
    }
    int raised = 0;
#pragma omp simd reduction(| : raised)
    for (int j = 0; j < n; j++) {
        const float old = softmax->reference[j], highest = largest[j] * scale;
        const float excess = highest - old;
        softmax->reference[j] = excess > SLACK ? highest : old;
        decay[j] = old - softmax->reference[j];
        raised |= excess > SLACK;
    }
    if (!raised) return;
    for (int j = 0; j < n; j++) {
        if (decay[j] == 0.0f) continue;
        const float factor = fast_exp2(decay[j]);
        float* o = out + (size_t)j * HSp;
        softmax->sum[j] *= factor;
#pragma omp simd
        for (size_t i = 0; i < HSp; i++) o[i] *= factor;
    }
}

// scores (TILE, TILE) of n queries become 2^(scale * score - reference).
static void exponentials(Softmax* softmax, float* restrict scores, int n, float scale) {
    for (int k = 0; k < TILE; k += 2, scores += 2 * TILE) {
#pragma omp simd
        for (int j = 0; j < n; j++) {
            const float reference = softmax->reference[j];
            const float first = fast_exp2(mul_add(scores[j], scale, -reference));
            const float second = fast_exp2(mul_add(scores[TILE + j], scale, -reference));
            scores[j] = first;
            scores[TILE + j] = second;
            softmax->sum[j] += first + second;
        }
    }
}

// Packs keys first .. first + count - 1 of a head and their values, the rest of the tile 0.
static void pack_keys(const ForwardWork* work, size_t at, const Head* head, int first, int count) {
    const size_t from = (size_t)first * head->ld, HSp = head->HSp;
    pack_left(work->keys + at, head->k + from, head->ld, count, head->HS, HSp);
    Packed* values = STEP == 1 ? work->values + at : work->left;
    pack_left(values, head->v + from, head->ld, count, head->HS, HSp);
    pack_right(work->values + at, values, HSp);
}

// `rows` <= TILE queries in work->q, at positions first_pos ..., attend to all keys up to their
// own. Keys and values are those in work if `packed`, else they are packed tile by tile. The result
// stands in work->out; lse (rows) may be NULL.
static void attend(const ForwardWork* work, const Head* head, bool packed, float* lse, int rows,
                   int first_pos) {
    const size_t HSp = head->HSp, HSq = HSp / STEP;
    const int columns = (int)round_up((size_t)rows, 16);
    const float scale = head->scale * LOG2_E;
    Softmax softmax;
    for (int r = 0; r < TILE; r++) {
        softmax.reference[r] = -1e30f; // below any score, but finite: differences are numbers
        softmax.sum[r] = 0.0f;
    }
    memset(work->out, 0, TILE * HSp * sizeof(float));
    const int num_keys = first_pos + rows;
    for (int first = 0; first < num_keys; first += TILE) {
        const int keys = min_int(TILE, num_keys - first), diagonal = first_pos - first;
        const bool whole = diagonal >= TILE - 1;
        const size_t at = packed ? (size_t)first * HSq : 0;
        if (!packed) pack_keys(work, 0, head, first, keys);
        tile_product(
            keys, columns, (int)HSq,
            (TileProduct){work->keys + at, HSq, 1, work->q, TILE, work->scores, TILE, false},
            whole ? WHOLE : COLS_FROM, -diagonal);
        if (!whole) mask(work->scores, keys, diagonal);
        raise_references(&softmax, work->scores, columns, scale, work->out, HSp);
        exponentials(&softmax, work->scores, columns, scale);
        const Packed* probs = pack_scores_transposed(work->probs, work->scores, keys);
        tile_product(rows, (int)HSp, (keys + STEP - 1) / STEP,
                     (TileProduct){probs, 1, TILE, work->values + at, HSp, work->out, HSp, true},
                     whole ? WHOLE : SUM_TO, diagonal);
    }
    for (int r = 0; r < rows; r++) {
        const float inverse = 1.0f / softmax.sum[r];
        float* o = work->out + (size_t)r * HSp;
#pragma omp simd
        for (size_t i = 0; i < HSp; i++) o[i] *= inverse;
        if (lse != NULL) {
            lse[r] = mul_add(softmax.reference[r], 1.0f / LOG2_E, logf(softmax.sum[r]));
        }
    }
}

void attention_forward(Rows out, float* lse, Rows qkv, int B, int T, int C, int NH) {
    const int HS = C / NH, query_tiles = (T + TILE - 1) / TILE;
    const size_t HSp = padded_head(C, NH);
    // Every part packs the keys it needs; its queries are every parts-th tile.
    const int parts = min_int(query_tiles, (omp_get_max_threads() + B * NH - 1) / (B * NH));
#pragma omp parallel for schedule(dynamic, 1)
    for (int unit = 0; unit < B * NH * parts; unit++) {
        const int part = unit % parts, h = unit / parts % NH, b = unit / parts / NH;
        const floatX* q = row_at(qkv, (size_t)b * (size_t)T) + (size_t)h * (size_t)HS;
        const Head head = {q + C, q + 2 * C, qkv.ld, HS, HSp, 1.0f / sqrtf((float)HS)};
        ForwardWork work;
        cut_forward(&work, thread_scratch(), (size_t)T, HSp);
        int packed = 0; // tiles of keys
        for (int tile = part; tile < query_tiles; tile += parts) {
            for (; packed <= tile; packed++) {
                const int first = packed * TILE;
                pack_keys(&work, (size_t)first * HSp / STEP, &head, first,
                          min_int(TILE, T - first));
            }
            const int t = tile * TILE, rows = min_int(TILE, T - t);
            const size_t row = (size_t)b * (size_t)T + (size_t)t;
            pack_left(work.left, q + (size_t)t * qkv.ld, qkv.ld, rows, HS, HSp);
            transpose(work.q, work.left, HSp / STEP);
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
        const Head head = {k_cache + column,       v_cache + column, (size_t)C, HS, HSp,
                           1.0f / sqrtf((float)HS)};
        ForwardWork work;
        cut_forward(&work, thread_scratch(), TILE, HSp);
        pack_left(work.left, row_at(qkv, (size_t)first) + column, qkv.ld, rows, HS, HSp);
        transpose(work.q, work.left, HSp / STEP);
        attend(&work, &head, false, NULL, rows, first_pos + first);
        unpack_rows(row_at(out, (size_t)first) + column, out.ld, work.out, rows, HS, HSp, 1.0f);
    }
}

// ---- backward -----------------------------------------------------------------------------------

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

// Row by row, probs becomes 2^(scale * score - lse), 0 where row r does not see the key (the first
// visible + r are seen), and dscores, which holds dprobs, becomes probs * (dprobs - row_dot).
static inline __attribute__((always_inline)) void
probabilities(float* restrict probs, float* restrict dscores, float scale, const float* lse,
              const float* row_dot, int rows, int visible) {
    for (int r = 0; r < rows; r++, probs += TILE, dscores += TILE) {
        const float log2_sum = lse[r] * LOG2_E, D = row_dot[r];
#pragma omp simd
        for (int j = 0; j < TILE; j++) {
            float prob = fast_exp2(mul_add(probs[j], scale, -log2_sum));
            prob = j < visible + r ? prob : 0.0f;
            probs[j] = prob;
            dscores[j] = j < visible + r ? prob * (dscores[j] - D) : 0.0f;
        }
    }
}

static float dot(const floatX* a, const floatX* b, int n) {
    float lanes[LANES] = {0};
    for (int i = 0; i < n; i += LANES) {
        const int width = min_int(LANES, n - i);
#pragma omp simd
        for (int j = 0; j < width; j++) {
            lanes[j] = mul_add(to_float(a[i + j]), to_float(b[i + j]), lanes[j]);
        }
    }
    return sum_lanes(lanes);
}

// Packs queries and output gradients of the whole sequence, and sums dout * out over each row.
static void prepare_queries(const BackwardWork* work, const BackwardHead* head) {
    const size_t HSp = head->HSp;
    for (int first = 0; first < head->T; first += TILE) {
        const int rows = min_int(TILE, head->T - first);
        const size_t at = (size_t)first * HSp / STEP, t = (size_t)first;
        const floatX* dout = head->dout + t * head->dout_ld;
        pack_left(work->q + at, head->q + t * head->qkv_ld, head->qkv_ld, rows, head->HS, HSp);
        pack_left(work->dout + at, dout, head->dout_ld, rows, head->HS, HSp);
        pack_right(work->q_right + at, work->q + at, HSp);
        pack_right(work->dout_right + at, work->dout + at, HSp);
        for (size_t r = 0; r < (size_t)rows; r++) {
            work->row_dot[t + r] =
                dot(dout + r * head->dout_ld, head->out + (t + r) * head->out_ld, head->HS);
        }
    }
    memset(work->dq, 0, round_up((size_t)head->T, TILE) * HSp * sizeof(float));
}

// One tile of keys against all queries that see it: its dk and dv, and its part of every dq.
static void backward_keys(const BackwardWork* work, const BackwardHead* head, int first) {
    const int keys = min_int(TILE, head->T - first), HSp = (int)head->HSp, HSq = HSp / STEP;
    const size_t ld = head->HSp, ldq = ld / STEP, from = (size_t)first * head->qkv_ld;
    pack_left(work->k, head->v + from, head->qkv_ld, keys, head->HS, ld);
    transpose(work->v_t, work->k, ldq);
    pack_left(work->k, head->k + from, head->qkv_ld, keys, head->HS, ld);
    transpose(work->k_t, work->k, ldq);
    const Packed* k_right = pack_right(work->k_right, work->k, ld);
    for (int t = first; t < head->T; t += TILE) {
        const int rows = min_int(TILE, head->T - t), row_steps = (rows + STEP - 1) / STEP;
        const size_t at = (size_t)t * ldq;
        const bool whole = t > first;
        tile_product(rows, TILE, HSq,
                     (TileProduct){work->q + at, ldq, 1, work->k_t, TILE, work->probs, TILE, false},
                     whole ? WHOLE : COLS_TO, 0);
        tile_product(
            rows, TILE, HSq,
            (TileProduct){work->dout + at, ldq, 1, work->v_t, TILE, work->dscores, TILE, false},
            whole ? WHOLE : COLS_TO, 0);
        const float scale = head->scale * LOG2_E;
        if (whole) {
            probabilities(work->probs, work->dscores, scale, head->lse + t, work->row_dot + t, rows,
                          TILE);
        } else {
            probabilities(work->probs, work->dscores, scale, head->lse + t, work->row_dot + t, rows,
                          1);
        }
        const Packed* probs_t = pack_scores_transposed(work->packed[0], work->probs, rows);
        const Packed* dscores_t = pack_scores_transposed(work->packed[1], work->dscores, rows);
        const Packed* dscores = pack_scores(work->packed[2], work->dscores, rows);
        tile_product(
            keys, HSp, row_steps,
            (TileProduct){probs_t, 1, TILE, work->dout_right + at, ld, work->dv, ld, whole},
            whole ? WHOLE : SUM_FROM, 0);
        tile_product(keys, HSp, row_steps,
                     (TileProduct){dscores_t, 1, TILE, work->q_right + at, ld, work->dk, ld, whole},
                     whole ? WHOLE : SUM_FROM, 0);
        tile_product(rows, HSp, (keys + STEP - 1) / STEP,
                     (TileProduct){dscores, TILE / STEP, 1, k_right, ld, work->dq + (size_t)t * ld,
                                   ld, true},
                     whole ? WHOLE : SUM_TO, 0);
    }
    const size_t out = (size_t)first * head->dqkv_ld;
    unpack_rows(head->dk + out, head->dqkv_ld, work->dk, keys, head->HS, ld, head->scale);
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
