// dev/test/test_threads.c - the bits of every operation at 1, 2, 3, 8 and 16 threads are the same.
//
// Every operation runs once with one thread; then all outputs are overwritten and must come back
// byte for byte with more threads than the machine may have. Shapes: 4096 rows, so that sums over
// rows take several chunks, and odd ones. What the results are worth is for test_ops.c to say.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device.h"
#include "backend/ops.h"
#include "testing.h"

static const int THREADS[] = {1, 2, 3, 8, 16};
enum { NUM_COUNTS = 5, MAX_OUTPUTS = 64 };

typedef struct {
    int B, T, C, NH, V;
} Case;

// ---- tensors ------------------------------------------------------------------------------------

typedef struct {
    const char* name;
    char *bytes, *reference;
    size_t size;
} Output;

static Output outputs[MAX_OUTPUTS];
static int num_outputs;
static uint64_t next_seed;

static void* new_bytes(size_t size) {
    void* bytes = NULL;
    CHECK(posix_memalign(&bytes, 64, size) == 0, "out of memory");
    return bytes;
}

static void* new_output(const char* name, size_t size) {
    CHECK(num_outputs < MAX_OUTPUTS, "too many outputs");
    Output* output = &outputs[num_outputs++];
    *output = (Output){name, new_bytes(size), new_bytes(size), size};
    return output->bytes;
}

static Rows output_rows(const char* name, size_t N, size_t cols) {
    const size_t ld = ops_row_stride(N, cols);
    return (Rows){new_output(name, N * ld * sizeof(floatX)), ld};
}

static void fill_floats(floatX* out, size_t count, double scale) {
    double* values = new_doubles(count);
    fill_normal(values, count, scale, next_seed++);
    for (size_t i = 0; i < count; i++) out[i] = to_floatX((float)values[i]);
    free(values);
}

static floatX* input(size_t count, double scale) {
    floatX* values = new_bytes(count * sizeof(floatX));
    fill_floats(values, count, scale);
    return values;
}

static Rows input_rows(size_t N, size_t cols) {
    const size_t ld = ops_row_stride(N, cols);
    return (Rows){input(N * ld, 1.0), ld};
}

// Tensors of one case. Weights serve every product whose shape they fit.
typedef struct {
    Rows x, y, wide, qkv, logits; // (N, C), (N, C), (N, 4C), (N, 3C), (N, Vp)
    floatX *weight, *bias, *wte, *wpe;
    int *tokens, *targets;
    Segment segments[2];
    size_t elems;
} Inputs;

static void inputs_init(Inputs* in, const Case* c) {
    const size_t N = (size_t)c->B * (size_t)c->T, C = (size_t)c->C, Vp = round_up((size_t)c->V, 64);
    next_seed = 1;
    in->x = input_rows(N, C);
    in->y = input_rows(N, C);
    in->wide = input_rows(N, 4 * C);
    in->qkv = input_rows(N, 3 * C);
    in->logits = input_rows(N, Vp);
    in->weight = input(4 * C * C, 0.1);
    in->bias = input(4 * C, 1.0);
    in->wte = input(Vp * C, 0.1);
    in->wpe = input((size_t)c->T * C, 0.1);
    in->tokens = new_bytes(N * sizeof(int));
    in->targets = new_bytes(N * sizeof(int));
    for (size_t n = 0; n < N; n++) {
        in->tokens[n] = (int)(n * n % (size_t)c->V);
        in->targets[n] = n % 7 == 3 ? -1 : (int)(n * 31 % (size_t)c->V);
    }
    in->elems = 4 * C * C;
    in->segments[0] = (Segment){0, in->elems / 3, true};
    in->segments[1] = (Segment){in->elems / 3 + 5, in->elems - in->elems / 3 - 5, false};
}

static void inputs_free(Inputs* in) {
    void* all[] = {in->x.ptr, in->y.ptr, in->wide.ptr, in->qkv.ptr, in->logits.ptr, in->weight,
                   in->bias,  in->wte,   in->wpe,      in->tokens,  in->targets};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

// ---- the operations -----------------------------------------------------------------------------

typedef struct {
    Rows embedded, residual, norm, qkv, pre_gelu, gelu, att, attention, din, dnorm, dqkv, logits,
        cached;
    float *mean, *rstd, *lse, *losses, *dwte, *dwpe, *dqkv_w, *dqkv_b, *dln_w, *dln_b, *master, *m,
        *v, *folded;
    double *seq_losses, *partials;
    floatX *dproj_w, *dproj_b, *weights, *converted, *k_cache, *v_cache;
} Results;

static void results_init(Results* r, const Case* c, size_t elems) {
    const size_t N = (size_t)c->B * (size_t)c->T, C = (size_t)c->C, Vp = round_up((size_t)c->V, 64);
    const size_t f = sizeof(float), x = sizeof(floatX);
    num_outputs = 0;
    r->embedded = output_rows("embedding_forward", N, C);
    r->residual = output_rows("layernorm_forward residual", N, C);
    r->norm = output_rows("layernorm_forward out", N, C);
    r->mean = new_output("layernorm_forward mean", N * f);
    r->rstd = new_output("layernorm_forward rstd", N * f);
    r->qkv = output_rows("matmul_forward", N, 3 * C);
    r->pre_gelu = output_rows("matmul_forward pre_gelu", N, 4 * C);
    r->gelu = output_rows("matmul_forward gelu", N, 4 * C);
    r->logits = output_rows("matmul_forward head, classifier_loss", N, Vp);
    r->losses = new_output("classifier_loss losses", N * f);
    r->seq_losses = new_output("loss_sum_sequences", (size_t)c->B * sizeof(double));
    r->attention = output_rows("attention_forward", N, C);
    r->lse = new_output("attention_forward lse", N * (size_t)c->NH * f);
    r->dqkv = output_rows("attention_backward", N, 3 * C);
    r->cached = output_rows("attention_cached", (size_t)c->T, C);
    r->k_cache = new_output("attention_cached keys", (size_t)c->T * C * x);
    r->v_cache = new_output("attention_cached values", (size_t)c->T * C * x);
    r->din = output_rows("matmul_backward_input", N, C);
    r->att = output_rows("matmul_backward_input gelu", N, 4 * C);
    r->dqkv_w = new_output("matmul_backward_weight dweight fp32", 3 * C * C * f);
    r->dqkv_b = new_output("matmul_backward_weight dbias fp32", 3 * C * f);
    r->dproj_w = new_output("matmul_backward_weight dweight floatX", C * C * x);
    r->dproj_b = new_output("matmul_backward_weight dbias floatX", C * x);
    r->dwte = new_output("matmul_backward_weight head, embedding_backward", Vp * C * f);
    r->dwpe = new_output("embedding_backward dwpe", (size_t)c->T * C * f);
    r->dnorm = output_rows("layernorm_backward dinp", N, C);
    r->dln_w = new_output("layernorm_backward dweight", C * f);
    r->dln_b = new_output("layernorm_backward dbias", C * f);
    r->weights = new_output("adamw_update weights", elems * x);
    r->master = new_output("adamw_update master", elems * f);
    r->m = new_output("adamw_update m", elems * f);
    r->v = new_output("adamw_update v", elems * f);
    r->partials = new_output("norm_partials", ceil_div(elems, NORM_BLOCK) * sizeof(double));
    r->folded = new_output("fold", elems * f);
    r->converted = new_output("convert", elems * x);
}

static void run_model_operations(const Inputs* in, const Results* r, const Case* c) {
    const int B = c->B, T = c->T, C = c->C, NH = c->NH, N = B * T, V = c->V;
    const int Vp = (int)round_up((size_t)V, 64);
    const Rows none = {NULL, 0};
    const Grad no_grad = {NULL, false, false};
    embedding_forward(r->embedded, in->tokens, in->wte, in->wpe, 0, B, T, C);
    layernorm_forward(r->norm, r->mean, r->rstd, r->residual, in->x, in->y, in->weight, in->bias, N,
                      C);
    matmul_forward(r->qkv, none, in->x, in->weight, WEIGHT_IN_OUT, in->bias, N, C, 3 * C);
    matmul_forward(r->gelu, r->pre_gelu, in->x, in->weight, WEIGHT_IN_OUT, in->bias, N, C, 4 * C);
    attention_forward(r->attention, r->lse, in->qkv, B, T, C, NH);
    attention_backward(r->dqkv, in->x, in->qkv, r->attention, r->lse, B, T, C, NH);
    attention_cached(r->cached, in->qkv, r->k_cache, r->v_cache, 0, (T + 1) / 2, C, NH);
    matmul_forward(r->logits, none, in->x, in->wte, WEIGHT_OUT_IN, NULL, N, C, Vp);
    classifier_loss(r->losses, r->logits, in->targets, N, V, Vp, 1.0f / (float)N, true);
    loss_sum_sequences(r->seq_losses, r->losses, B, T);

    matmul_backward_weight((Grad){r->dwte, true, false}, no_grad, in->x, r->logits, WEIGHT_OUT_IN,
                           N, C, Vp);
    embedding_backward((Grad){r->dwte, true, true}, (Grad){r->dwpe, true, false}, in->x, in->tokens,
                       B, T, C, T, V);
    matmul_backward_input(r->din, in->qkv, in->weight, WEIGHT_IN_OUT, none, N, C, 3 * C);
    matmul_backward_input(r->att, in->x, in->weight, WEIGHT_IN_OUT, in->wide, N, 4 * C, C);
    matmul_backward_weight((Grad){r->dqkv_w, true, false}, (Grad){r->dqkv_b, true, false}, in->x,
                           in->qkv, WEIGHT_IN_OUT, N, C, 3 * C);
    matmul_backward_weight((Grad){r->dproj_w, false, false}, (Grad){r->dproj_b, false, false},
                           in->x, in->y, WEIGHT_IN_OUT, N, C, C);
    layernorm_backward(r->dnorm, in->y, (Grad){r->dln_w, true, false},
                       (Grad){r->dln_b, true, false}, in->x, r->residual, r->mean, r->rstd,
                       in->weight, N, C);
}

static void run_shard_operations(const Inputs* in, const Results* r) {
    const size_t elems = in->elems;
    const AdamW adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 0.5f};
    const void* sources[] = {in->weight, in->weight};
    for (size_t i = 0; i < elems; i++) r->master[i] = r->m[i] = to_float(in->weight[i]);
    memset(r->v, 0, elems * sizeof(float));
    adamw_update(r->weights, r->master, r->m, r->v, in->weight, FLOATX_DTYPE, in->segments, 2,
                 &adamw);
    norm_partials(r->partials, in->weight, FLOATX_DTYPE, elems, in->segments, 2, STREAM_COMPUTE);
    fold(r->folded, DTYPE_FP32, false, sources, FLOATX_DTYPE, 2, elems, STREAM_COMPUTE);
    convert(r->converted, FLOATX_DTYPE, r->folded, DTYPE_FP32, elems, STREAM_COMPUTE);
}

// All operations with that many threads and exactly the scratch they ask for.
static void run_operations(const Inputs* in, const Results* results, const Case* c, int threads) {
    const DeviceOptions options = {.local_size = 1, .threads = threads, .quiet_affinity = true};
    const OpsShape shape = {.B = c->B,
                            .T = c->T,
                            .C = c->C,
                            .NH = c->NH,
                            .Vp = (int)round_up((size_t)c->V, 64),
                            .threads = threads,
                            .logits_rows = c->B * c->T,
                            .backward = true};
    Error error = {0};
    CHECK(device_init(&options, &error), "%s", error.text);
    for (int i = 0; i < num_outputs; i++) memset(outputs[i].bytes, 0x3C, outputs[i].size);
    void* scratch = new_bytes(ops_scratch_bytes(&shape));
    memset(scratch, 0xFF, ops_scratch_bytes(&shape));
    ops_init(&shape, scratch);
    run_model_operations(in, results, c);
    run_shard_operations(in, results);
    ops_free();
    free(scratch);
}

// ---- cases --------------------------------------------------------------------------------------

static void test_case(const Case* c) {
    Inputs inputs;
    Results results;
    inputs_init(&inputs, c);
    results_init(&results, c, inputs.elems);
    bool equal[MAX_OUTPUTS][NUM_COUNTS];
    for (int k = 0; k < NUM_COUNTS; k++) {
        run_operations(&inputs, &results, c, THREADS[k]);
        for (int i = 0; i < num_outputs; i++) {
            if (k == 0) memcpy(outputs[i].reference, outputs[i].bytes, outputs[i].size);
            equal[i][k] = memcmp(outputs[i].reference, outputs[i].bytes, outputs[i].size) == 0;
        }
    }
    for (int i = 0; i < num_outputs; i++) {
        for (int k = 0; k < NUM_COUNTS; k++) {
            EXPECT(equal[i][k], "%s: %d threads give other bytes than one", outputs[i].name,
                   THREADS[k]);
        }
        test_report(
            "threads %s (%d,%d,%d) NH %d V %d %s   bytes equal at 1,2,3,8,16   ref=1 thread",
            outputs[i].name, c->B, c->T, c->C, c->NH, c->V, dtype_name(FLOATX_DTYPE));
        free(outputs[i].bytes);
        free(outputs[i].reference);
    }
    inputs_free(&inputs);
}

int main(void) {
    if (!device_is_host()) {
        test_skip("threads: the operations run on another device");
        return test_finish();
    }
    const Case cases[] = {
        {4, 1024, 192, 3, 1031}, // sums over 4096 rows
        {3, 129, 130, 2, 257},   // one more than two attention tiles
        {2, 333, 65, 5, 131},
        {1, 1, 40, 4, 67},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) test_case(&cases[i]);
    return test_finish();
}
