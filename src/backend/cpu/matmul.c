// backend/cpu/matmul.c - matrix products cut into tiles that one thread owns each.
//
// The output is cut into tiles whose sizes depend on the shape alone; each is one product of one
// thread, and sums over more than CHUNK rows are made of ordered chunks, accumulated in fp32. So
// the bits do not depend on the number of threads. (A library left alone with its threads splits
// long sums among them.) What follows a product - bias, GELU - is done on the tile while it is in
// the cache.
#include "backend/cpu/matmul.h"
#include "backend/cpu/vector_math.h"

enum {
    TILE_ROWS = 512, // at most; larger tiles pack their operands less often
    TILE_COLS = 768,
    MIN_TILES = 8, // smaller tiles rather than fewer: work for as many threads
    CHUNK = 1024,  // rows of a weight gradient's sum, columns of widened operands
    STRIP = 64,    // columns of a bias gradient
    BLOCK = 16,    // of a transposition: one cache line of fp32 each way
};

// From this many rows on, an fp32 input gradient transposes its weight once, instead of every tile
// of 512 rows while it packs: measured 10 % at 4096 rows; with fewer rows, or in bf16, it costs.
enum { MIN_ROWS_TO_TRANSPOSE = 1024 };

typedef enum { NO_GELU, GELU_FORWARD, GELU_BACKWARD } GeluMode;

// out (M, N) = a (M, K) * b (K, N), then bias and GELU
typedef struct {
    int M, N, K;
    int chunk; // K is summed in chunks of that many
    Operand a, b;
    const floatX* bias;
    Grad out;
    size_t out_ld;
    GeluMode gelu;
    Rows pre_gelu; // GELU_FORWARD: written; GELU_BACKWARD: read
} Job;

typedef struct {
    int row, col, rows, cols;
} Tile;

// The work space of one thread.
typedef struct {
    char product[PRODUCT_SCRATCH_BYTES];
    float tile[TILE_ROWS * TILE_COLS];
#if !defined(PRECISION_FP32)
    float a[TILE_ROWS * CHUNK], b[CHUNK * TILE_COLS]; // widened operands
#endif
} Workspace;

static size_t transposed_ld(int C) { return ops_row_stride(MIN_ROWS_TO_TRANSPOSE, (size_t)C); }

static bool transposes(int N) { return FLOATX_DTYPE == DTYPE_FP32 && N >= MIN_ROWS_TO_TRANSPOSE; }

ScratchNeed matmul_scratch(const OpsShape* shape) {
    const size_t largest_weight = 4 * (size_t)shape->C * transposed_ld(shape->C);
    const bool transposed = shape->backward && transposes(shape->B * shape->T);
    return (ScratchNeed){.per_thread = sizeof(Workspace),
                         .shared = transposed ? largest_weight * sizeof(floatX) : 0};
}

static const floatX* operand_at(Operand operand, size_t row, size_t col) {
    return (const floatX*)operand.ptr + row * operand.row_stride + col * operand.col_stride;
}

// ---- one tile -----------------------------------------------------------------------------------

// out = gelu(pre_gelu) on a tile
static void gelu_tile(const Job* job, Tile tile) {
    for (int r = tile.row; r < tile.row + tile.rows; r++) {
        const floatX* x = row_at(job->pre_gelu, (size_t)r) + tile.col;
        floatX* out = (floatX*)job->out.ptr + (size_t)r * job->out_ld + tile.col;
#pragma omp simd
        for (int i = 0; i < tile.cols; i++) out[i] = to_floatX(gelu(to_float(x[i])));
    }
}

// Asks for the row that GELU_BACKWARD comes to next: rows are too short for the processor to guess.
static void prefetch_row(const Job* job, Tile tile, size_t row) {
    const floatX* x = row_at(job->pre_gelu, row) + tile.col;
    const floatX* out = (const floatX*)job->out.ptr + row * job->out_ld + tile.col;
    for (int i = 0; i < tile.cols; i += 64 / (int)sizeof(floatX)) {
        __builtin_prefetch(x + i);
        __builtin_prefetch(out + i, 1);
    }
}

// Writes a tile of fp32 sums where the job wants it.
static void finish_tile(const Job* job, Tile tile, float* sums) {
    for (int r = 0; r < tile.rows; r++) {
        const size_t row = (size_t)(tile.row + r);
        float* sum = sums + (size_t)r * TILE_COLS;
        if (job->bias != NULL) {
#pragma omp simd
            for (int i = 0; i < tile.cols; i++) sum[i] += to_float(job->bias[tile.col + i]);
        }
        if (job->gelu == GELU_BACKWARD) {
            if (r + 1 < tile.rows) prefetch_row(job, tile, row + 1);
            const floatX* x = row_at(job->pre_gelu, row) + tile.col;
#pragma omp simd
            for (int i = 0; i < tile.cols; i++) sum[i] *= gelu_derivative(to_float(x[i]));
        }
        if (job->gelu == GELU_FORWARD) {
            narrow(row_at(job->pre_gelu, row) + tile.col, sum, (size_t)tile.cols);
        } else {
            grad_write(job->out, row * job->out_ld + (size_t)tile.col, sum, (size_t)tile.cols);
        }
    }
}

#if !defined(PRECISION_FP32)
// out (rows, cols), rows `ld` apart, = the operand's elements from (row, col) on in fp32
static void widen_operand(float* out, size_t ld, Operand operand, size_t row, size_t col, int rows,
                          int cols) {
    if (operand.col_stride == 1) {
        for (int r = 0; r < rows; r++) {
            widen(out + (size_t)r * ld, operand_at(operand, row + (size_t)r, col), (size_t)cols);
        }
        return;
    }
    for (int c = 0; c < cols; c++) {
        const floatX* in = operand_at(operand, row, col + (size_t)c);
        for (int r = 0; r < rows; r++) out[(size_t)r * ld + (size_t)c] = to_float(in[r]);
    }
}
#endif

static void run_tile(const Job* job, Tile tile) {
    Workspace* work = thread_scratch();
    const bool native = FLOATX_DTYPE == DTYPE_FP32 || product_takes_floatX();
    // Sums go straight to their place unless they must stay fp32 for longer than the place allows.
    const bool direct = native && job->gelu != GELU_BACKWARD &&
                        (job->out.is_fp32 || FLOATX_DTYPE == DTYPE_FP32 || job->K <= job->chunk);
    const int chunk = native ? job->chunk : CHUNK;

    Product product = {.M = tile.rows, .N = tile.cols, .in_dtype = FLOATX_DTYPE};
    product.out = work->tile;
    product.out_ld = TILE_COLS;
    product.out_dtype = DTYPE_FP32;
    if (direct) {
        const bool to_pre_gelu = job->gelu == GELU_FORWARD;
        product.bias = job->bias != NULL ? job->bias + tile.col : NULL;
        product.out_ld = to_pre_gelu ? job->pre_gelu.ld : job->out_ld;
        product.out_dtype = job->out.is_fp32 ? DTYPE_FP32 : FLOATX_DTYPE;
        const size_t at = (size_t)tile.row * product.out_ld + (size_t)tile.col;
        product.out = (char*)(to_pre_gelu ? job->pre_gelu.ptr : job->out.ptr) +
                      at * dtype_bytes(product.out_dtype);
    }
    for (int first = 0; first < job->K; first += chunk) {
        product.K = job->K - first < chunk ? job->K - first : chunk;
        product.a = job->a;
        product.b = job->b;
        product.a.ptr = operand_at(job->a, (size_t)tile.row, (size_t)first);
        product.b.ptr = operand_at(job->b, (size_t)first, (size_t)tile.col);
#if !defined(PRECISION_FP32)
        if (!native) {
            widen_operand(work->a, CHUNK, job->a, (size_t)tile.row, (size_t)first, tile.rows,
                          product.K);
            widen_operand(work->b, TILE_COLS, job->b, (size_t)first, (size_t)tile.col, product.K,
                          tile.cols);
            product.a = (Operand){work->a, CHUNK, 1};
            product.b = (Operand){work->b, TILE_COLS, 1};
            product.in_dtype = DTYPE_FP32;
        }
#endif
        product.accumulate = first > 0 || (direct && job->out.accumulate);
        product_run(&product, work->product);
        product.bias = NULL; // once
    }
    if (!direct) finish_tile(job, tile, work->tile);
    if (job->gelu == GELU_FORWARD) gelu_tile(job, tile);
}

static int ceil_div_int(int a, int b) { return (a + b - 1) / b; }

// Tiles of equal size, a multiple of `unit`: as few as `largest` allows.
static int tile_size(int extent, int largest, int unit) {
    const int tiles = ceil_div_int(extent, largest);
    return (int)round_up((size_t)ceil_div_int(extent, tiles), (size_t)unit);
}

static void run_job(const Job* job) {
    static const int largest[][2] = {{TILE_ROWS, TILE_COLS},
                                     {TILE_ROWS, TILE_COLS / 2},
                                     {TILE_ROWS / 2, TILE_COLS / 2},
                                     {TILE_ROWS / 2, TILE_COLS / 4}};
    int rows = 0, cols = 0, tiles_down = 0, tiles_across = 0;
    for (int i = 0; i < 4 && tiles_down * tiles_across < MIN_TILES; i++) {
        rows = tile_size(job->M, largest[i][0], 16);
        cols = tile_size(job->N, largest[i][1], 64);
        tiles_down = ceil_div_int(job->M, rows);
        tiles_across = ceil_div_int(job->N, cols);
    }
#pragma omp parallel for schedule(dynamic, 1)
    for (int t = 0; t < tiles_down * tiles_across; t++) {
        Tile tile = {.row = t % tiles_down * rows, .col = t / tiles_down * cols};
        tile.rows = job->M - tile.row < rows ? job->M - tile.row : rows;
        tile.cols = job->N - tile.col < cols ? job->N - tile.col : cols;
        run_tile(job, tile);
    }
}

// ---- the operations -----------------------------------------------------------------------------

// The weight as a (C, OC) matrix, or transposed as (OC, C).
static Operand weight_in_out(const floatX* weight, WeightLayout layout, int C, int OC) {
    if (layout == WEIGHT_IN_OUT) return (Operand){weight, (size_t)OC, 1};
    return (Operand){weight, 1, (size_t)C};
}
static Operand transposed(Operand operand) {
    return (Operand){operand.ptr, operand.col_stride, operand.row_stride};
}

void matmul_forward(Rows out, Rows pre_gelu, Rows in, const floatX* weight, WeightLayout layout,
                    const floatX* bias, int N, int C, int OC) {
    run_job(&(Job){
        .M = N,
        .N = OC,
        .K = C,
        .chunk = C,
        .a = {in.ptr, in.ld, 1},
        .b = weight_in_out(weight, layout, C, OC),
        .bias = bias,
        .out = {.ptr = out.ptr},
        .out_ld = out.ld,
        .gelu = pre_gelu.ptr != NULL ? GELU_FORWARD : NO_GELU,
        .pre_gelu = pre_gelu,
    });
}

// The weight (C, OC), rows OC apart, as (OC, C) in shared scratch.
static Operand transpose_weight(const floatX* weight, int C, int OC) {
    floatX* out = shared_scratch();
    const size_t ld = transposed_ld(C);
#pragma omp parallel for schedule(static)
    for (int o = 0; o < OC; o += BLOCK) {
        const int height = OC - o < BLOCK ? OC - o : BLOCK;
        for (int c = 0; c < C; c += BLOCK) {
            const int width = C - c < BLOCK ? C - c : BLOCK;
            floatX block[BLOCK][BLOCK];
            for (int j = 0; j < width; j++) {
                const floatX* in = weight + (size_t)(c + j) * (size_t)OC + o;
                for (int i = 0; i < height; i++) block[i][j] = in[i];
            }
            for (int i = 0; i < height; i++) {
                memcpy(out + (size_t)(o + i) * ld + c, block[i], (size_t)width * sizeof(floatX));
            }
        }
    }
    return (Operand){out, ld, 1};
}

void matmul_backward_input(Rows din, Rows dout, const floatX* weight, WeightLayout layout,
                           Rows pre_gelu, int N, int C, int OC) {
    const bool transpose = layout == WEIGHT_IN_OUT && transposes(N) &&
                           (size_t)OC * transposed_ld(C) * sizeof(floatX) <= shared_scratch_bytes();
    run_job(&(Job){
        .M = N,
        .N = C,
        .K = OC,
        .chunk = OC,
        .a = {dout.ptr, dout.ld, 1},
        .b = transpose ? transpose_weight(weight, C, OC)
                       : transposed(weight_in_out(weight, layout, C, OC)),
        .out = {.ptr = din.ptr},
        .out_ld = din.ld,
        .gelu = pre_gelu.ptr != NULL ? GELU_BACKWARD : NO_GELU,
        .pre_gelu = pre_gelu,
    });
}

// dbias (+)= column sums of dout, a strip of columns per thread
static void bias_gradient(Grad dbias, Rows dout, int N, int OC) {
#pragma omp parallel for schedule(static)
    for (int first = 0; first < OC; first += STRIP) {
        const int width = OC - first < STRIP ? OC - first : STRIP;
        float total[STRIP] = {0};
        for (int begin = 0; begin < N; begin += CHUNK) {
            const int end = N - begin < CHUNK ? N : begin + CHUNK;
            float sum[STRIP] = {0};
            for (int n = begin; n < end; n++) {
                const floatX* d = row_at(dout, (size_t)n) + first;
#pragma omp simd
                for (int i = 0; i < width; i++) sum[i] += to_float(d[i]);
            }
            for (int i = 0; i < width; i++) total[i] += sum[i];
        }
        grad_write(dbias, (size_t)first, total, (size_t)width);
    }
}

void matmul_backward_weight(Grad dweight, Grad dbias, Rows in, Rows dout, WeightLayout layout,
                            int N, int C, int OC) {
    const bool in_out = layout == WEIGHT_IN_OUT;
    const Rows left = in_out ? in : dout, right = in_out ? dout : in;
    run_job(&(Job){
        .M = in_out ? C : OC,
        .N = in_out ? OC : C,
        .K = N,
        .chunk = CHUNK,
        .a = {left.ptr, 1, left.ld},
        .b = {right.ptr, right.ld, 1},
        .out = dweight,
        .out_ld = (size_t)(in_out ? OC : C),
    });
    if (dbias.ptr != NULL) bias_gradient(dbias, dout, N, OC);
}
