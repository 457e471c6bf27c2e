// dev/test/test_ops.c - every operation of the model, forward and backward, against the oracle.
//
// Shapes are awkward on purpose: C off every vector width, T = 1, B = 1, odd V below Vp, three
// heads, more rows than one chunk. Row strides are the columns, the backend's own, or neither;
// tensors.h watches the bytes between. Operations on shards: test_shard_ops.c.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "oracle.h"
#include "tensors.h"
#include "testing.h"

// ---- tools --------------------------------------------------------------------------------------

typedef enum { DATA_RANDOM, DATA_SPREAD, NUM_DATA } Data;
static const char* data_name(Data data) { return data == DATA_RANDOM ? "random" : "spread"; }

static uint64_t next_seed = 1;
static void fill(Tensor* tensor, Data data, double scale) {
    size_t count = tensor->rows * tensor->cols;
    if (data == DATA_RANDOM)
        fill_normal(tensor->values, count, scale, next_seed++);
    else
        fill_spread(tensor->values, count, scale);
}

enum { STRIDE_TIGHT, STRIDE_BACKEND, STRIDE_ODD, NUM_STRIDES };
static size_t stride_for(int kind, size_t N, size_t cols) {
    kind %= NUM_STRIDES;
    return kind == STRIDE_TIGHT     ? cols
           : kind == STRIDE_BACKEND ? ops_row_stride(N, cols)
                                    : cols + 5;
}

// Activations in and out, by a kind of stride.
static Tensor* rows_in(int N, int cols, int stride, Data data, double scale) {
    size_t n = (size_t)N, c = (size_t)cols;
    Tensor* tensor = tensor_new(TENSOR_IN, ELEM_X, n, c, stride_for(stride, n, c));
    fill(tensor, data, scale);
    return tensor;
}
static Tensor* rows_out(int N, int cols, int stride) {
    size_t n = (size_t)N, c = (size_t)cols;
    return tensor_new(TENSOR_OUT, ELEM_X, n, c, stride_for(stride, n, c));
}
static Tensor* vector(TensorUse use, Elem elem, int count) {
    return tensor_new(use, elem, 1, (size_t)count, (size_t)count);
}
static Tensor* weights(int count, Data data, double scale) {
    Tensor* tensor = vector(TENSOR_IN, ELEM_X, count);
    fill(tensor, data, scale);
    return tensor;
}
static const floatX* floats_x(const Tensor* tensor) { return (const floatX*)tensor_ptr(tensor); }
static float* floats(const Tensor* tensor) { return (float*)tensor_ptr(tensor); }
// TEST_SMALL=1 leaves out shapes of more than 400,000 multiplications: for builds in which each
// of them costs a microsecond (ThreadSanitizer under CUDA-on-CPU). Nothing is left out elsewhere.
static bool is_wanted(double multiplications) {
    return getenv("TEST_SMALL") == NULL || multiplications <= 4e5;
}

static const int* ints(const Tensor* tensor) { return (const int*)tensor_ptr(tensor); }
static const Rows NO_ROWS = {NULL, 0};

// The three ways to write a weight gradient.
enum { GRAD_SET_X, GRAD_SET_FP32, GRAD_ADD_FP32, NUM_GRAD_MODES };
static const char* grad_mode_name(int mode) {
    return mode == GRAD_SET_X ? "= floatX" : mode == GRAD_SET_FP32 ? "= fp32" : "+= fp32";
}
static Tensor* grad_out(int mode, int count) {
    Elem elem = mode == GRAD_SET_X ? ELEM_X : ELEM_FP32;
    Tensor* tensor = vector(mode == GRAD_ADD_FP32 ? TENSOR_INOUT : TENSOR_OUT, elem, count);
    if (mode == GRAD_ADD_FP32) fill(tensor, DATA_RANDOM, 3);
    return tensor;
}
static Grad grad_of(const Tensor* tensor, int mode) {
    Grad grad = {tensor_ptr(tensor), mode != GRAD_SET_X, mode == GRAD_ADD_FP32};
    return grad;
}
// What the gradient holds before: the oracle adds to it. After tensors_upload; free() it.
static double* grad_before(const Tensor* tensor, int mode) {
    double* before = new_doubles(tensor->cols);
    if (mode == GRAD_ADD_FP32) memcpy(before, tensor->values, tensor->cols * sizeof(double));
    return before;
}
static Tolerance grad_tolerance(int mode) { return mode == GRAD_SET_X ? TOL_ROUNDED : TOL_FP32; }

#define CHECK_TENSOR(tensor, ref, kind, ...)                                                       \
    test_close((tensor)->values, (ref), (tensor)->rows*(tensor)->cols, tolerance(kind), "oracle",  \
               __VA_ARGS__)

// Type of the build at the end of each case's name.
#define X dtype_name(FLOATX_DTYPE)

// ---- embedding ----------------------------------------------------------------------------------

static Tensor* token_tensor(int N, int V, bool all_equal) {
    Tensor* tokens = vector(TENSOR_IN, ELEM_INT32, N);
    fill_normal(tokens->values, (size_t)N, 1000, next_seed++);
    for (int n = 0; n < N; n++) {
        int token = abs((int)tokens->values[n]) % V;
        tokens->values[n] = all_equal ? V - 1 : n == 0 ? 0 : n == 1 ? V - 1 : token;
    }
    return tokens;
}
static int* host_ints(const Tensor* tensor) {
    int* out = (int*)checked_malloc(tensor->cols * sizeof(int));
    for (size_t i = 0; i < tensor->cols; i++) out[i] = (int)tensor->values[i];
    return out;
}

static void test_embedding(int B, int T, int C, int V, int kind) {
    int N = B * T, maxT = T + 3, first_pos = kind % 2 ? 3 : 0, mode = kind % NUM_GRAD_MODES;
    OpsShape shape = shape_of(B, T, C, 1, (int)round_up((size_t)V, 64));
    tensors_begin(&shape);
    Tensor *wte = weights(V * C, DATA_RANDOM, 1), *wpe = weights(maxT * C, DATA_SPREAD, 1);
    Tensor *tokens = token_tensor(N, V, kind == 2), *out = rows_out(N, C, kind);
    tensors_upload();
    embedding_forward(tensor_rows(out), ints(tokens), floats_x(wte), floats_x(wpe), first_pos, B, T,
                      C);
    tensors_download();
    int* ids = host_ints(tokens);
    double* ref = new_doubles((size_t)N * C);
    oracle_embedding_forward(ref, ids, wte->values, wpe->values, first_pos, B, T, C);
    CHECK_TENSOR(out, ref, TOL_ROUNDED, "embedding_forward (%d,%d,%d) from %d %s", B, T, C,
                 first_pos, X);

    tensors_begin(&shape);
    Tensor *dout = rows_in(N, C, kind, DATA_RANDOM, 1), *again = vector(TENSOR_IN, ELEM_INT32, N);
    for (int n = 0; n < N; n++) again->values[n] = ids[n];
    Tensor *dwte = grad_out(GRAD_ADD_FP32, V * C), *dwpe = grad_out(mode, maxT * C);
    tensors_upload();
    double *dwte_ref = grad_before(dwte, GRAD_ADD_FP32), *dwpe_ref = grad_before(dwpe, mode);
    Grad dwte_grad = grad_of(dwte, GRAD_ADD_FP32);
    dwte_grad.accumulate = kind % 2 == 0; // the head has written its part: added to, either way
    embedding_backward(dwte_grad, grad_of(dwpe, mode), tensor_rows(dout), ints(again), B, T, C,
                       maxT, V);
    tensors_download();
    oracle_embedding_backward(dwte_ref, dwpe_ref, dout->values, ids, B, T, C);
    CHECK_TENSOR(dwte, dwte_ref, TOL_FP32, "embedding_backward dwte (%d,%d,%d) %s", B, T, C, X);
    CHECK_TENSOR(dwpe, dwpe_ref, grad_tolerance(mode), "embedding_backward dwpe %s (%d,%d,%d) %s",
                 grad_mode_name(mode), B, T, C, X);
    free(ids), free(ref), free(dwte_ref), free(dwpe_ref);
}

static void test_embeddings(void) {
    static const int shapes[][4] = {{1, 1, 1, 3},    {2, 7, 20, 65},   {3, 5, 64, 257},
                                    {1, 65, 48, 11}, {4, 33, 129, 65}, {9, 130, 20, 7},
                                    {1, 64, 80, 33}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int kind = 0; kind < 3; kind++)
            test_embedding(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], kind);
}

// ---- LayerNorm ----------------------------------------------------------------------------------

enum { ADD_NOTHING, ADD_BRANCH, ADD_IN_PLACE, NUM_ADDS };
static const char* const add_names[] = {"alone", "a + b", "a + b in place"};

static void test_layernorm_forward(int N, int C, int add, Data data, int stride) {
    OpsShape shape = shape_of(1, N, C, 1, 64);
    tensors_begin(&shape);
    Tensor* a = rows_in(N, C, stride, data, 2);
    for (size_t i = 0; i < (size_t)N * C; i++) a->values[i] += 0.5;
    Tensor *b = NULL, *residual = NULL;
    if (add != ADD_NOTHING) b = rows_in(N, C, stride + 1, DATA_RANDOM, 1);
    if (add == ADD_BRANCH) residual = rows_out(N, C, stride + 2);
    if (add == ADD_IN_PLACE) {
        residual = tensor_new(TENSOR_INOUT, ELEM_X, a->rows, a->cols,
                              stride_for(stride, a->rows, a->cols));
        memcpy(residual->values, a->values, a->rows * a->cols * sizeof(double));
    }
    Tensor *weight = weights(C, DATA_RANDOM, 1), *bias = weights(C, DATA_RANDOM, 1);
    Tensor *out = rows_out(N, C, stride + 1), *mean = vector(TENSOR_OUT, ELEM_FP32, N);
    Tensor* rstd = vector(TENSOR_OUT, ELEM_FP32, N);
    tensors_upload();
    Rows residual_rows = residual ? tensor_rows(residual) : NO_ROWS;
    layernorm_forward(tensor_rows(out), floats(mean), floats(rstd), residual_rows,
                      add == ADD_IN_PLACE ? residual_rows : tensor_rows(a),
                      b ? tensor_rows(b) : NO_ROWS, floats_x(weight), floats_x(bias), N, C);
    tensors_download();

    size_t count = (size_t)N * C;
    double *sum = new_doubles(count), *ref = new_doubles(count);
    double *mean_ref = new_doubles((size_t)N), *rstd_ref = new_doubles((size_t)N);
    for (size_t i = 0; i < count; i++) {
        float total = (float)a->values[i] + (b ? (float)b->values[i] : 0);
        sum[i] = (double)to_float(to_floatX(total));
        if (residual)
            EXPECT(residual->values[i] == sum[i], "residual %zu: %g + %g = %g", i, a->values[i],
                   b->values[i], residual->values[i]);
    }
    oracle_layernorm_forward(ref, mean_ref, rstd_ref, sum, weight->values, bias->values, N, C);
    const char *how = add_names[add], *which = data_name(data);
    CHECK_TENSOR(out, ref, TOL_ROUNDED, "layernorm_forward out %s (%d,%d) %s %s", how, N, C, which,
                 X);
    CHECK_TENSOR(mean, mean_ref, TOL_FP32, "layernorm_forward mean %s (%d,%d) %s %s", how, N, C,
                 which, X);
    CHECK_TENSOR(rstd, rstd_ref, TOL_FP32, "layernorm_forward rstd %s (%d,%d) %s %s", how, N, C,
                 which, X);
    free(sum), free(ref), free(mean_ref), free(rstd_ref);
}

static void test_layernorm_backward(int N, int C, int add, int mode, Data data, int stride) {
    OpsShape shape = shape_of(1, N, C, 1, 64);
    size_t count = (size_t)N * C;
    tensors_begin(&shape);
    Tensor *inp = rows_in(N, C, stride, data, 2), *dout = rows_in(N, C, stride + 1, DATA_RANDOM, 1);
    Tensor* weight = weights(C, DATA_RANDOM, 1);
    Tensor *mean = vector(TENSOR_IN, ELEM_FP32, N), *rstd = vector(TENSOR_IN, ELEM_FP32, N);
    Tensor* dresidual = add == ADD_BRANCH ? rows_in(N, C, stride + 2, DATA_RANDOM, 1) : NULL;
    Tensor* dinp = tensor_new(add == ADD_IN_PLACE ? TENSOR_INOUT : TENSOR_OUT, ELEM_X, inp->rows,
                              inp->cols, stride_for(stride, inp->rows, inp->cols));
    if (add == ADD_IN_PLACE) fill(dinp, DATA_RANDOM, 1), dresidual = dinp;
    Tensor *dweight = grad_out(mode, C), *dbias = grad_out(mode, C);
    double* ref = new_doubles(count); // first the forward's output, then the gradient
    round_to(inp->values, count, FLOATX_DTYPE);
    oracle_layernorm_forward(ref, mean->values, rstd->values, inp->values, weight->values,
                             weight->values, N, C);
    tensors_upload();
    for (size_t i = 0; i < count; i++) ref[i] = dresidual ? dresidual->values[i] : 0;
    double *dweight_ref = grad_before(dweight, mode), *dbias_ref = grad_before(dbias, mode);
    layernorm_backward(tensor_rows(dinp), dresidual ? tensor_rows(dresidual) : NO_ROWS,
                       grad_of(dweight, mode), grad_of(dbias, mode), tensor_rows(dout),
                       tensor_rows(inp), floats(mean), floats(rstd), floats_x(weight), N, C);
    tensors_download();
    oracle_layernorm_backward(ref, dweight_ref, dbias_ref, dout->values, inp->values,
                              weight->values, N, C);
    const char *how = grad_mode_name(mode), *which = data_name(data);
    CHECK_TENSOR(dinp, ref, TOL_ROUNDED, "layernorm_backward dinp %s (%d,%d) %s %s", add_names[add],
                 N, C, which, X);
    CHECK_TENSOR(dweight, dweight_ref, grad_tolerance(mode),
                 "layernorm_backward dweight %s (%d,%d) %s %s", how, N, C, which, X);
    CHECK_TENSOR(dbias, dbias_ref, grad_tolerance(mode),
                 "layernorm_backward dbias %s (%d,%d) %s %s", how, N, C, which, X);
    free(ref), free(dweight_ref), free(dbias_ref);
}

static void test_layernorms(void) {
    static const int shapes[][2] = {{1, 1},    {1, 5},   {3, 16},    {7, 20},   {2, 64},
                                    {65, 129}, {64, 80}, {130, 768}, {1100, 48}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int add = 0; add < NUM_ADDS; add++)
            for (int i = 0; i < NUM_GRAD_MODES; i++) {
                int N = shapes[s][0], C = shapes[s][1], mode = (add + i) % NUM_GRAD_MODES;
                if (!is_wanted(20.0 * N * C)) continue;
                Data data = i == 1 ? DATA_SPREAD : DATA_RANDOM;
                if (i < 2) test_layernorm_forward(N, C, add, data, (int)s + add);
                test_layernorm_backward(N, C, add, mode, data, (int)s + i);
            }
}

// ---- matrix products ----------------------------------------------------------------------------

static const char* layout_name(WeightLayout layout) {
    return layout == WEIGHT_IN_OUT ? "(C,OC)" : "(OC,C)";
}
static OpsShape matmul_shape(int N, int C, int OC, int gelu_fusion) {
    int widest = C > OC ? C : OC;
    OpsShape shape = shape_of(1, N, widest, 1, (int)round_up((size_t)widest, 64));
    shape.gelu_fusion = gelu_fusion;
    return shape;
}

static void test_matmul_forward(int N, int C, int OC, WeightLayout layout, bool with_bias,
                                bool with_gelu, Data data, int stride) {
    OpsShape shape = matmul_shape(N, C, OC, stride % 3);
    tensors_begin(&shape);
    Tensor *in = rows_in(N, C, stride, data, 1),
           *weight = weights(C * OC, DATA_RANDOM, 1 / sqrt(C));
    Tensor *bias = with_bias ? weights(OC, DATA_RANDOM, 1) : NULL,
           *out = rows_out(N, OC, stride + 1);
    Tensor* pre_gelu = with_gelu ? rows_out(N, OC, stride + 2) : NULL;
    tensors_upload();
    matmul_forward(tensor_rows(out), with_gelu ? tensor_rows(pre_gelu) : NO_ROWS, tensor_rows(in),
                   floats_x(weight), layout, bias ? floats_x(bias) : NULL, N, C, OC);
    tensors_download();
    size_t count = (size_t)N * OC;
    double* ref = new_doubles(count);
    oracle_matmul_forward(ref, in->values, weight->values, layout, bias ? bias->values : NULL, N, C,
                          OC);
    const char* how = with_bias ? "bias" : "no bias";
    CHECK_TENSOR(with_gelu ? pre_gelu : out, ref, TOL_ROUNDED,
                 "matmul_forward %s %s%s (%d,%d,%d) %s %s", layout_name(layout), how,
                 with_gelu ? " pre_gelu" : "", N, C, OC, data_name(data), X);
    if (with_gelu) {
        oracle_gelu_forward(ref, pre_gelu->values, count);
        CHECK_TENSOR(out, ref, TOL_ROUNDED, "matmul_forward %s %s gelu (%d,%d,%d) %s %s",
                     layout_name(layout), how, N, C, OC, data_name(data), X);
    }
    free(ref);
}

static void test_matmul_backward(int N, int C, int OC, WeightLayout layout, bool with_bias,
                                 bool with_gelu, int mode, Data data, int stride) {
    OpsShape shape = matmul_shape(N, C, OC, stride % 3);
    tensors_begin(&shape);
    Tensor *dout = rows_in(N, OC, stride, DATA_RANDOM, 1), *in = rows_in(N, C, stride + 1, data, 1);
    Tensor *weight = weights(C * OC, DATA_RANDOM, 1 / sqrt(OC)), *din = rows_out(N, C, stride + 2);
    Tensor* pre_gelu = with_gelu ? rows_in(N, C, stride, DATA_RANDOM, 2) : NULL;
    Tensor *dweight = grad_out(mode, C * OC), *dbias = with_bias ? grad_out(mode, OC) : NULL;
    tensors_upload();
    double* dweight_ref = grad_before(dweight, mode);
    double* dbias_ref = dbias ? grad_before(dbias, mode) : new_doubles((size_t)OC);
    Grad no_grad = {NULL, mode != GRAD_SET_X, mode == GRAD_ADD_FP32};
    matmul_backward_input(tensor_rows(din), tensor_rows(dout), floats_x(weight), layout,
                          with_gelu ? tensor_rows(pre_gelu) : NO_ROWS, N, C, OC);
    matmul_backward_weight(grad_of(dweight, mode), dbias ? grad_of(dbias, mode) : no_grad,
                           tensor_rows(in), tensor_rows(dout), layout, N, C, OC);
    tensors_download();
    size_t count = (size_t)N * C;
    double* ref = new_doubles(count);
    oracle_matmul_backward(ref, dweight_ref, dbias_ref, dout->values, in->values, weight->values,
                           layout, N, C, OC);
    if (with_gelu) oracle_gelu_backward(ref, ref, pre_gelu->values, count);
    const char *how = grad_mode_name(mode), *which = data_name(data);
    CHECK_TENSOR(din, ref, with_gelu ? TOL_ROUNDED_TWICE : TOL_ROUNDED,
                 "matmul_backward_input %s%s (%d,%d,%d) %s", layout_name(layout),
                 with_gelu ? " gelu'" : "", N, C, OC, X);
    CHECK_TENSOR(dweight, dweight_ref, grad_tolerance(mode),
                 "matmul_backward_weight %s dweight %s (%d,%d,%d) %s %s", layout_name(layout), how,
                 N, C, OC, which, X);
    if (dbias)
        CHECK_TENSOR(dbias, dbias_ref, grad_tolerance(mode),
                     "matmul_backward_weight %s dbias %s (%d,%d,%d) %s %s", layout_name(layout),
                     how, N, C, OC, which, X);
    free(ref), free(dweight_ref), free(dbias_ref);
}

// Four chunks of 1024 rows that sum to 256, 0.5, 0.5 and 0.5: 257.5 in fp32, but 256 if a sum of
// chunks were ever rounded to bf16 before the end.
static void test_matmul_chunks(int mode) {
    enum { N = 4096, C = 16, OC = 16 };
    OpsShape shape = matmul_shape(N, C, OC, 0);
    tensors_begin(&shape);
    Tensor *in = rows_in(N, C, STRIDE_ODD, DATA_RANDOM, 1),
           *dout = rows_in(N, OC, STRIDE_BACKEND, DATA_RANDOM, 1);
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            in->values[n * C + c] = 1;
            dout->values[n * OC + c] = n < 1024 ? 0.25 : 0.5 / 1024;
        }
    Tensor *dweight = grad_out(mode, C * OC), *dbias = grad_out(mode, OC);
    tensors_upload();
    double *dweight_ref = grad_before(dweight, mode), *dbias_ref = grad_before(dbias, mode);
    matmul_backward_weight(grad_of(dweight, mode), grad_of(dbias, mode), tensor_rows(in),
                           tensor_rows(dout), WEIGHT_IN_OUT, N, C, OC);
    tensors_download();
    for (int i = 0; i < C * OC; i++) {
        float sum = (float)dweight_ref[i] + 257.5f, bias_sum = (float)dbias_ref[i % OC] + 257.5f;
        double expected = (double)(mode == GRAD_SET_X ? to_float(to_floatX(sum)) : sum);
        double expected_bias =
            (double)(mode == GRAD_SET_X ? to_float(to_floatX(bias_sum)) : bias_sum);
        // With +=, where the old value enters the sum is left open, by one rounding.
        double slack = mode == GRAD_ADD_FP32 ? 0x1p-14 : 0;
        EXPECT(fabs(dweight->values[i] - expected) <= slack, "dweight %d: %.9g, not %.9g", i,
               dweight->values[i], expected);
        EXPECT(fabs(dbias->values[i % OC] - expected_bias) <= slack, "dbias %d: %.9g, not %.9g",
               i % OC, dbias->values[i % OC], expected_bias);
    }
    test_report("matmul_backward_weight chunks are added in fp32, %s %s", grad_mode_name(mode), X);
    free(dweight_ref), free(dbias_ref);
}

static void test_matmuls(void) {
    // The last ones are wider or longer than a tile of the output, or a chunk of the sum.
    static const int shapes[][3] = {{1, 1, 1},      {1, 5, 7},     {7, 20, 33},     {63, 48, 144},
                                    {64, 64, 256},  {65, 80, 17},  {130, 129, 257}, {1, 192, 577},
                                    {33, 320, 64},  {3, 600, 400}, {5, 1100, 65},   {1025, 33, 20},
                                    {2100, 16, 24}, {1100, 64, 65}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int i = 0; i < 8; i++) {
            int N = shapes[s][0], C = shapes[s][1], OC = shapes[s][2], stride = (int)s + i;
            if (!is_wanted((double)N * C * OC)) continue;
            WeightLayout layout = i & 1 ? WEIGHT_OUT_IN : WEIGHT_IN_OUT;
            Data data = (s + (size_t)i / 3) % 2 ? DATA_SPREAD : DATA_RANDOM;
            test_matmul_forward(N, C, OC, layout, i & 2, i & 4, data, stride);
            if (i < 6) test_matmul_backward(N, C, OC, layout, i != 1, i >= 4, i / 2, data, stride);
        }
    for (int mode = 0; mode < NUM_GRAD_MODES; mode++)
        if (is_wanted(4096.0 * 16 * 16)) test_matmul_chunks(mode);
}

static void test_gelu(int N, int C, Data data, int stride) {
    OpsShape shape = shape_of(1, N, (int)ceil_div((size_t)C, 4), 1, 64);
    tensors_begin(&shape);
    Tensor *in = rows_in(N, C, stride, data, data == DATA_SPREAD ? 12 : 2),
           *out = rows_out(N, C, stride + 1);
    tensors_upload();
    gelu_forward(tensor_rows(out), tensor_rows(in), N, C);
    tensors_download();
    double* ref = new_doubles((size_t)N * C);
    oracle_gelu_forward(ref, in->values, (size_t)N * C);
    CHECK_TENSOR(out, ref, TOL_ROUNDED, "gelu_forward (%d,%d) %s %s", N, C, data_name(data), X);
    free(ref);
}

// ---- attention ----------------------------------------------------------------------------------

typedef struct {
    int B, T, C, NH;
} Heads;

// Columns [part * C, part * C + C) of a (N, 3C) array.
static void copy_part(double* out, const double* qkv, int part, const Heads* at) {
    for (int n = 0; n < at->B * at->T; n++)
        memcpy(out + (size_t)n * at->C, qkv + ((size_t)n * 3 + part) * at->C,
               at->C * sizeof(double));
}

static void test_attention_forward(const Heads* at, Data data, double scale, int stride) {
    int N = at->B * at->T, C = at->C;
    OpsShape shape = shape_of(at->B, at->T, C, at->NH, 64);
    tensors_begin(&shape);
    Tensor *qkv = rows_in(N, 3 * C, stride, data, scale), *out = rows_out(N, C, stride + 1);
    Tensor* lse = vector(TENSOR_OUT, ELEM_FP32, at->B * at->NH * at->T);
    tensors_upload();
    attention_forward(tensor_rows(out), floats(lse), tensor_rows(qkv), at->B, at->T, C, at->NH);
    tensors_download();
    double *ref = new_doubles((size_t)N * C), *lse_ref = new_doubles(lse->cols);
    oracle_attention_forward(ref, lse_ref, qkv->values, at->B, at->T, C, at->NH);
    CHECK_TENSOR(out, ref, TOL_ATTENTION, "attention_forward out B%d T%d NH%d HS%d %s of %g %s",
                 at->B, at->T, at->NH, C / at->NH, data_name(data), scale, X);
    CHECK_TENSOR(lse, lse_ref, TOL_FP32, "attention_forward lse B%d T%d NH%d HS%d %s of %g %s",
                 at->B, at->T, at->NH, C / at->NH, data_name(data), scale, X);
    free(ref), free(lse_ref);
}

static void test_attention_backward(const Heads* at, Data data, double scale, int stride) {
    int N = at->B * at->T, C = at->C;
    size_t count = (size_t)N * C;
    OpsShape shape = shape_of(at->B, at->T, C, at->NH, 64);
    tensors_begin(&shape);
    Tensor *qkv = rows_in(N, 3 * C, stride, data, scale),
           *dout = rows_in(N, C, stride + 1, DATA_RANDOM, 1);
    Tensor *out = rows_in(N, C, stride + 2, DATA_RANDOM, 1), *dqkv = rows_out(N, 3 * C, stride + 1);
    Tensor* lse = vector(TENSOR_IN, ELEM_FP32, at->B * at->NH * at->T);
    round_to(qkv->values, 3 * count, FLOATX_DTYPE);
    oracle_attention_forward(out->values, lse->values, qkv->values, at->B, at->T, C, at->NH);
    tensors_upload();
    attention_backward(tensor_rows(dqkv), tensor_rows(dout), tensor_rows(qkv), tensor_rows(out),
                       floats(lse), at->B, at->T, C, at->NH);
    tensors_download();
    double *ref = new_doubles(3 * count), *part_ref = new_doubles(count),
           *part = new_doubles(count);
    oracle_attention_backward(ref, dout->values, qkv->values, at->B, at->T, C, at->NH);
    static const char* const names[] = {"dq", "dk", "dv"};
    for (int p = 0; p < 3; p++) {
        copy_part(part_ref, ref, p, at);
        copy_part(part, dqkv->values, p, at);
        if (at->T == 1 && p < 2) { // the softmax of one score is constant
            for (size_t i = 0; i < count; i++)
                EXPECT(fabs(part[i]) < 1e-4, "%s %zu is %g, not about 0", names[p], i, part[i]);
            continue;
        }
        test_close(part, part_ref, count, tolerance(TOL_ATTENTION_BACKWARD), "oracle",
                   "attention_backward %s B%d T%d NH%d HS%d %s of %g %s", names[p], at->B, at->T,
                   at->NH, C / at->NH, data_name(data), scale, X);
    }
    free(ref), free(part_ref), free(part);
}

// The whole sequence, in pieces: a prompt, one more piece, then token by token.
static void test_attention_cached(const Heads* at, int prompt, int stride) {
    int T = at->T, C = at->C, maxT = T + 3;
    OpsShape shape = shape_of(1, T, C, at->NH, 64);
    tensors_begin(&shape);
    Tensor *qkv = rows_in(T, 3 * C, stride, DATA_RANDOM, 1), *out = rows_out(T, C, stride + 1);
    Tensor *whole = rows_out(T, C, stride + 2), *lse = vector(TENSOR_OUT, ELEM_FP32, at->NH * T);
    Tensor *k_cache = vector(TENSOR_INOUT, ELEM_X, maxT * C),
           *v_cache = vector(TENSOR_INOUT, ELEM_X, maxT * C);
    for (int i = 0; i < maxT * C; i++) k_cache->values[i] = v_cache->values[i] = (double)NAN;
    tensor_protect(k_cache, (size_t)T * C, 3 * (size_t)C);
    tensor_protect(v_cache, (size_t)T * C, 3 * (size_t)C);
    tensors_upload();
    attention_forward(tensor_rows(whole), floats(lse), tensor_rows(qkv), 1, T, C, at->NH);
    for (int first = 0, n; first < T; first += n) {
        n = first == 0 ? prompt : first == prompt && prompt + 2 <= T ? 2 : 1;
        Rows out_piece = tensor_rows(out), qkv_piece = tensor_rows(qkv);
        out_piece.ptr += (size_t)first * out_piece.ld;
        qkv_piece.ptr += (size_t)first * qkv_piece.ld;
        attention_cached(out_piece, qkv_piece, (floatX*)tensor_ptr(k_cache),
                         (floatX*)tensor_ptr(v_cache), first, n, C, at->NH);
    }
    tensors_download();
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) {
            const double* row = qkv->values + (size_t)t * 3 * C;
            EXPECT(k_cache->values[t * C + c] == row[C + c], "key %d of position %d", c, t);
            EXPECT(v_cache->values[t * C + c] == row[2 * C + c], "value %d of position %d", c, t);
        }
    test_close(out->values, whole->values, (size_t)T * C, tolerance(TOL_ATTENTION),
               "attention_forward", "attention_cached T%d NH%d HS%d prompt of %d %s", T, at->NH,
               C / at->NH, prompt, X);
    double *ref = new_doubles((size_t)T * C), *lse_ref = new_doubles(lse->cols);
    oracle_attention_forward(ref, lse_ref, qkv->values, 1, T, C, at->NH);
    CHECK_TENSOR(out, ref, TOL_ATTENTION, "attention_cached T%d NH%d HS%d prompt of %d %s", T,
                 at->NH, C / at->NH, prompt, X);
    free(ref), free(lse_ref);
}

static void test_attentions(void) {
    static const int head_sizes[] = {1, 5, 16, 20, 33, 64, 80, 96, 128};
    static const int lengths[] = {1, 7, 63, 64, 65, 130};
    for (int h = 0; h < 9; h++)
        for (int t = 0; t < 6; t++) {
            int NH = (h + t) % 4 == 0 ? 1 : 3, B = (h + t) % 3 == 0 ? 2 : 1;
            Heads at = {B, lengths[t], NH * head_sizes[h], NH};
            if (!is_wanted((double)B * at.T * at.T * at.C)) continue;
            test_attention_forward(&at, DATA_RANDOM, 1, h + t);
            test_attention_backward(&at, DATA_RANDOM, 1, h + t);
            if (t % 2) test_attention_cached(&at, at.T / 2 > 0 ? at.T / 2 : 1, h + t);
        }
    Heads some = {2, 65, 3 * 20, 3}, one = {1, 1, 64, 1};
    test_attention_forward(&some, DATA_SPREAD, 2, 1);
    test_attention_backward(&some, DATA_SPREAD, 2, 1);
    test_attention_forward(&some, DATA_RANDOM, 2, 2); // scores of some 10: a few keys take it all
    test_attention_backward(&some, DATA_RANDOM, 2, 2);
    // The largest score grows from tile to tile: what was summed before is scaled to it.
    Heads longer = {1, 200, 2 * 20, 2};
    test_attention_forward(&longer, DATA_RANDOM, 4, 1);
    // Scores of some 1e5, which overflow exp if the largest is not taken off first: the softmax
    // is 1 at one key. Their rounding errors are far below the distance to the next key.
    test_attention_forward(&some, DATA_SPREAD, 1000, 0);
    test_attention_cached(&one, 1, 2);
}

// ---- classifier ---------------------------------------------------------------------------------

enum { TARGETS_SOME_MASKED, TARGETS_ALL_MASKED, NUM_TARGETS };

static void test_classifier(int N, int V, int targets_kind, Data data, double scale, bool write,
                            int stride) {
    int Vp = (int)round_up((size_t)V, 64);
    const float dloss = 0.375f;
    OpsShape shape = shape_of(1, N, 1, 1, Vp);
    tensors_begin(&shape);
    size_t ld = stride_for(stride, (size_t)N, (size_t)Vp);
    Tensor* logits =
        tensor_new(write ? TENSOR_INOUT : TENSOR_IN, ELEM_X, (size_t)N, (size_t)Vp, ld);
    fill(logits, data, scale);
    for (int n = 0; n < N; n++) // padding must not count, whatever it holds
        for (int v = V; v < Vp; v++) logits->values[(size_t)n * Vp + v] = 3 * scale;
    Tensor *targets = vector(TENSOR_IN, ELEM_INT32, N), *losses = vector(TENSOR_OUT, ELEM_FP32, N);
    for (int n = 0; n < N; n++)
        targets->values[n] = targets_kind == TARGETS_ALL_MASKED || n % 5 == 3 ? -1
                             : n == 0                                         ? V - 1
                                                                              : (n * 7) % V;
    tensors_upload();
    double *losses_ref = new_doubles((size_t)N), *dlogits_ref = new_doubles((size_t)N * Vp);
    int* ids = host_ints(targets);
    oracle_classifier(losses_ref, dlogits_ref, logits->values, ids, N, V, Vp, (double)dloss);
    classifier_loss(floats(losses), tensor_rows(logits), ints(targets), N, V, Vp, dloss, write);
    tensors_download();
    const char* masked = targets_kind == TARGETS_ALL_MASKED ? ", all masked" : "";
    CHECK_TENSOR(losses, losses_ref, TOL_FP32, "classifier_loss losses (%d,%d) %s of %g%s %s", N, V,
                 data_name(data), scale, masked, X);
    if (write) {
        for (int n = 0; n < N; n++)
            for (int v = 0; v < Vp; v++) {
                double got = logits->values[(size_t)n * Vp + v];
                EXPECT(got == 0 || (v < V && ids[n] >= 0), "dlogit %d of row %d is %g, not 0", v, n,
                       got);
            }
        CHECK_TENSOR(logits, dlogits_ref, TOL_ROUNDED,
                     "classifier_loss dlogits (%d,%d) %s of %g%s %s", N, V, data_name(data), scale,
                     masked, X);
    }
    free(losses_ref), free(dlogits_ref), free(ids);
}

static void test_loss_sum(int B, int T) {
    OpsShape shape = shape_of(B, T, 1, 1, 64);
    tensors_begin(&shape);
    Tensor *losses = vector(TENSOR_IN, ELEM_FP32, B * T), *sums = vector(TENSOR_OUT, ELEM_FP64, B);
    fill(losses, DATA_RANDOM, 5);
    tensors_upload();
    loss_sum_sequences((double*)tensor_ptr(sums), floats(losses), B, T);
    tensors_download();
    for (int b = 0; b < B; b++) {
        double sum = 0;
        for (int t = 0; t < T; t++) sum += losses->values[b * T + t];
        EXPECT(sums->values[b] == sum, "sequence %d: %.17g, not %.17g", b, sums->values[b], sum);
    }
    test_report("loss_sum_sequences (%d,%d) %s, bit for bit", B, T, X);
}

static void test_classifiers(void) {
    static const int shapes[][2] = {{1, 1},   {1, 7},    {3, 64},    {7, 257},
                                    {65, 65}, {130, 33}, {1030, 17}, {2, 50257}};
    for (int s = 0; s < 8; s++)
        for (int write = 0; write < 2; write++) {
            if (!is_wanted(20.0 * shapes[s][0] * shapes[s][1])) continue;
            test_classifier(shapes[s][0], shapes[s][1], TARGETS_SOME_MASKED, DATA_RANDOM, 3, write,
                            s + write);
            test_classifier(shapes[s][0], shapes[s][1], TARGETS_SOME_MASKED, DATA_SPREAD, 20, write,
                            s + write);
        }
    test_classifier(65, 257, TARGETS_ALL_MASKED, DATA_RANDOM, 3, true, 1);
    test_classifier(7, 257, TARGETS_SOME_MASKED, DATA_RANDOM, 1000, true,
                    2); // overflows a naive exp
    test_loss_sum(1, 1);
    test_loss_sum(3, 1025);
    test_loss_sum(65, 7);
}

int main(void) {
    Error error = {0, ""};
    if (!tensors_init(&error)) error_exit(&error);
    test_embeddings();
    test_layernorms();
    test_matmuls();
    test_gelu(1, 1, DATA_RANDOM, 0);
    test_gelu(7, 20, DATA_RANDOM, 1);
    test_gelu(65, 257, DATA_SPREAD, 2);
    test_gelu(1030, 64, DATA_RANDOM, 1);
    test_attentions();
    test_classifiers();
    tensors_free();
    return test_finish();
}
