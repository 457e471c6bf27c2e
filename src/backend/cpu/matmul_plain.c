// backend/cpu/matmul_plain.c - one product in one thread without a library (`make DNNL=0`).
//
// For other systems, and a second opinion in the tests. Operands come as fp32; b is packed in
// panels of COLS columns, so that a panel of the sum's length stays in the cache, and ROWS x COLS
// sums stay in registers.
#include "backend/cpu/matmul.h"
#include "backend/cpu/vector_math.h"

enum { ROWS = 6, COLS = 64, DEPTH = 256 }; // DEPTH x COLS of b: 64 KiB

void product_init(void) {}
void product_free(void) {}
const char* product_description(void) {
    return FLOATX_DTYPE == DTYPE_FP32 ? "own products" : "own products, widened to fp32";
}
bool product_takes_floatX(void) { return FLOATX_DTYPE == DTYPE_FP32; }

static float element(Operand operand, size_t row, size_t col) {
    return ((const float*)operand.ptr)[row * operand.row_stride + col * operand.col_stride];
}

// panel (depth, COLS) = b from (k, n) on, columns from `cols` on 0
static void pack_b(float* panel, Operand b, int k, int n, int depth, int cols) {
    for (int i = 0; i < depth; i++) {
        float* out = panel + (size_t)i * COLS;
        for (int j = 0; j < COLS; j++) {
            out[j] = j < cols ? element(b, (size_t)(k + i), (size_t)(n + j)) : 0.0f;
        }
    }
}

// block (depth, ROWS) = a from (m, k) on, transposed, rows from `rows` on 0
static void pack_a(float* block, Operand a, int m, int k, int rows, int depth) {
    for (int i = 0; i < depth; i++) {
        for (int r = 0; r < ROWS; r++) {
            block[i * ROWS + r] = r < rows ? element(a, (size_t)(m + r), (size_t)(k + i)) : 0.0f;
        }
    }
}

// sums (ROWS, COLS) += block^T * panel
static void multiply(float sums[ROWS][COLS], const float* restrict block,
                     const float* restrict panel, int depth) {
    float local[ROWS][COLS];
    memcpy(local, sums, sizeof local);
    for (int i = 0; i < depth; i++) {
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const float factor = block[i * ROWS + r];
#pragma omp simd
            for (int j = 0; j < COLS; j++) {
                local[r][j] = mul_add(factor, panel[(size_t)i * COLS + (size_t)j], local[r][j]);
            }
        }
    }
    memcpy(sums, local, sizeof local);
}

// One block of the output, ROWS x COLS at most: its sum over depth, on top of what is there if
// `add`.
static void update_block(const Product* product, const float* block, const float* panel, int m,
                         int n, int rows, int cols, int depth, bool add) {
    float sums[ROWS][COLS] = {{0}};
    const float* bias = product->bias;
    for (int r = 0; r < rows; r++) {
        const float* out = (float*)product->out + (size_t)(m + r) * product->out_ld + n;
        if (add) {
            memcpy(sums[r], out, (size_t)cols * sizeof(float));
        } else if (bias != NULL) {
            memcpy(sums[r], bias + n, (size_t)cols * sizeof(float));
        }
    }
    multiply(sums, block, panel, depth);
    for (int r = 0; r < rows; r++) {
        memcpy((float*)product->out + (size_t)(m + r) * product->out_ld + n, sums[r],
               (size_t)cols * sizeof(float));
    }
}

void product_run(const Product* product, void* scratch) {
    float *panel = scratch, *block = panel + DEPTH * COLS;
    for (int k = 0; k < product->K; k += DEPTH) {
        const int depth = product->K - k < DEPTH ? product->K - k : DEPTH;
        const bool add = product->accumulate || k > 0;
        for (int n = 0; n < product->N; n += COLS) {
            const int cols = product->N - n < COLS ? product->N - n : COLS;
            pack_b(panel, product->b, k, n, depth, cols);
            for (int m = 0; m < product->M; m += ROWS) {
                const int rows = product->M - m < ROWS ? product->M - m : ROWS;
                pack_a(block, product->a, m, k, rows, depth);
                update_block(product, block, panel, m, n, rows, cols, depth, add);
            }
        }
    }
}
