// dev/bench/bench_kernels.c - every operation of a training step alone, against what the device can
// do.
//
//   bench_kernels [tiny]       GPT-2 124M and 1558M; tiny: a model for devices that are none
//
// First the device's own peaks: a large copy and a large matrix product of random numbers. Then
// each operation with the shapes of a step: its time, what it reaches in TFLOP/s or GB/s (of the
// FLOPs and bytes that it cannot do without), the share of its bound, which is the longer of both
// at the measured peaks, and the share of the step that it takes. Last the three that cost a step
// most.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/ops.h"
#include "gpt2/gpt2.h"

// ---- shapes and memory -------------------------------------------------------------------------

typedef struct {
    const char* name;
    int B, T, C, NH, L, V, Vp, rows; // rows: of logits that exist at once
    size_t params;
} Model;

static struct {
    char* arena;
    size_t bytes, used, pattern_bytes;
    int* tokens; // (B, T), at the beginning of the arena
    size_t token_bytes;
    int copy_mib, square; // of the peaks
    double seconds;       // each operation is repeated for about this long
} bench;

// Memory of the present operation, 256-byte aligned.
static void* take(size_t bytes) {
    void* memory = bench.arena + bench.used;
    bench.used += round_up(bytes, 256);
    CHECK(bench.used <= bench.bytes, "an operation takes more than %zu bytes", bench.bytes);
    return memory;
}
static Rows rows(int N, int cols) {
    Rows r = {(floatX*)take((size_t)N * (size_t)cols * sizeof(floatX)), (size_t)cols};
    return r;
}
static floatX* weights(size_t elems) { return (floatX*)take(elems * sizeof(floatX)); }
static float* floats(size_t elems) { return (float*)take(elems * sizeof(float)); }
static Grad grad(size_t elems) {
    Grad g = {floats(elems), true, false};
    return g;
}

// Numbers in [-1, 1) everywhere: data of one kind draws less power than real ones.
static void fill_arena(void) {
    size_t filled = bench.pattern_bytes;
    size_t count = filled / sizeof(floatX);
    floatX* pattern = (floatX*)checked_malloc(filled);
    for (size_t i = 0; i < count; i++)
        pattern[i] = to_floatX((float)((i * 2654435761u >> 8) % 65536) / 32768.0f - 1.0f);
    device_upload(bench.arena, pattern, filled);
    free(pattern);
    for (; filled < bench.bytes; filled *= 2)
        device_copy(bench.arena + filled, bench.arena, min_size(filled, bench.bytes - filled),
                    STREAM_COMPUTE);
    device_synchronize();
}

// Tokens all over the vocabulary, each about B T / V times.
static void upload_tokens(const Model* m) {
    int N = m->B * m->T;
    bench.used = 0;
    bench.tokens = (int*)take((size_t)N * sizeof(int));
    bench.token_bytes = bench.used;
    int* host = (int*)checked_malloc((size_t)N * sizeof(int));
    for (int i = 0; i < N; i++) host[i] = (int)((unsigned)i * 2654435761u % (unsigned)m->V);
    device_upload(bench.tokens, host, (size_t)N * sizeof(int));
    free(host);
}

// ---- operations --------------------------------------------------------------------------------

// What one call costs at least, and how often a step makes it.
typedef struct {
    double flops, bytes, calls;
} Work;

static double elems_bytes(double elems) { return elems * (double)sizeof(floatX); }
static int num_rows(const Model* m) { return m->B * m->T; }

static Work embed(const Model* m) {
    int N = num_rows(m);
    embedding_forward(rows(N, m->C), bench.tokens, weights((size_t)m->Vp * (size_t)m->C),
                      weights((size_t)m->T * (size_t)m->C), 0, m->B, m->T, m->C);
    return (Work){0, elems_bytes(2.0 * N * m->C), 1};
}

static Work embed_backward(const Model* m) {
    int N = num_rows(m);
    embedding_backward(grad((size_t)m->Vp * (size_t)m->C), grad((size_t)m->T * (size_t)m->C),
                       rows(N, m->C), bench.tokens, m->B, m->T, m->C, m->T, m->V);
    return (Work){0, (8.0 + elems_bytes(1)) * N * m->C, 1};
}

static Work norm_forward(const Model* m) {
    int N = num_rows(m), C = m->C;
    Rows out = rows(N, C), residual = rows(N, C), a = rows(N, C), b = rows(N, C);
    layernorm_forward(out, floats((size_t)N), floats((size_t)N), residual, a, b, weights((size_t)C),
                      weights((size_t)C), N, C);
    return (Work){0, elems_bytes(4.0 * N * C), 2 * m->L + 1};
}

static Work norm_backward(const Model* m) {
    int N = num_rows(m), C = m->C;
    Rows dresidual = rows(N, C), dout = rows(N, C), in = rows(N, C);
    layernorm_backward(dresidual, dresidual, grad((size_t)C), grad((size_t)C), dout, in,
                       floats((size_t)N), floats((size_t)N), weights((size_t)C), N, C);
    return (Work){0, elems_bytes(4.0 * N * C), 2 * m->L + 1};
}

// The three products of a layer that maps C to OC, `calls` times a step.
static Work product_forward(int N, int C, int OC, double calls, bool has_gelu,
                            WeightLayout layout) {
    Rows none = {NULL, 0}, in = rows(N, C), out = rows(N, OC);
    const floatX* bias = layout == WEIGHT_IN_OUT ? weights((size_t)OC) : NULL;
    Rows pre_gelu = has_gelu ? rows(N, OC) : none;
    matmul_forward(out, pre_gelu, in, weights((size_t)C * (size_t)OC), layout, bias, N, C, OC);
    double elems = (double)N * C + (double)C * OC + (has_gelu ? 2.0 : 1.0) * N * OC;
    return (Work){2.0 * N * C * OC, elems_bytes(elems), calls};
}
static Work product_input(int N, int C, int OC, double calls, bool has_gelu, WeightLayout layout) {
    Rows none = {NULL, 0}, din = rows(N, C), dout = rows(N, OC);
    Rows pre_gelu = has_gelu ? rows(N, C) : none;
    matmul_backward_input(din, dout, weights((size_t)C * (size_t)OC), layout, pre_gelu, N, C, OC);
    double elems = (has_gelu ? 2.0 : 1.0) * N * C + (double)C * OC + (double)N * OC;
    return (Work){2.0 * N * C * OC, elems_bytes(elems), calls};
}
static Work product_weight(int N, int C, int OC, double calls, WeightLayout layout) {
    Grad dweight = grad((size_t)C * (size_t)OC), dbias = {NULL, true, false};
    dweight.accumulate = layout == WEIGHT_OUT_IN; // the head's chunks add up
    if (layout == WEIGHT_IN_OUT) dbias = grad((size_t)OC);
    matmul_backward_weight(dweight, dbias, rows(N, C), rows(N, OC), layout, N, C, OC);
    double written = (dweight.accumulate ? 8.0 : 4.0) * C * OC;
    return (Work){2.0 * N * C * OC, elems_bytes((double)N * C + (double)N * OC) + written, calls};
}

#define LAYER(name, C_in, C_out, gelu_forward, gelu_backward)                                      \
    static Work name##_forward(const Model* m) {                                                   \
        return product_forward(num_rows(m), C_in, C_out, m->L, gelu_forward, WEIGHT_IN_OUT);       \
    }                                                                                              \
    static Work name##_input(const Model* m) {                                                     \
        return product_input(num_rows(m), C_in, C_out, m->L, gelu_backward, WEIGHT_IN_OUT);        \
    }                                                                                              \
    static Work name##_weight(const Model* m) {                                                    \
        return product_weight(num_rows(m), C_in, C_out, m->L, WEIGHT_IN_OUT);                      \
    }
LAYER(qkv, m->C, 3 * m->C, false, false)
LAYER(attproj, m->C, m->C, false, false)
LAYER(fc, m->C, 4 * m->C, true, false)
LAYER(fcproj, 4 * m->C, m->C, false, true)

static double head_calls(const Model* m) { return (double)num_rows(m) / m->rows; }
static Work head_forward(const Model* m) {
    return product_forward(m->rows, m->C, m->Vp, head_calls(m), false, WEIGHT_OUT_IN);
}
static Work head_input(const Model* m) {
    return product_input(m->rows, m->C, m->Vp, head_calls(m), false, WEIGHT_OUT_IN);
}
static Work head_weight(const Model* m) {
    return product_weight(m->rows, m->C, m->Vp, head_calls(m), WEIGHT_OUT_IN);
}

static Work classify(const Model* m) {
    classifier_loss(floats((size_t)m->rows), rows(m->rows, m->Vp), bench.tokens, m->rows, m->V,
                    m->Vp, 1.0f, true);
    return (Work){0, elems_bytes(2.0 * m->rows * m->Vp), head_calls(m)};
}

static Work attend(const Model* m) {
    int N = num_rows(m), C = m->C;
    attention_forward(rows(N, C), floats((size_t)N * (size_t)m->NH), rows(N, 3 * C), m->B, m->T, C,
                      m->NH);
    return (Work){2.0 * N * m->T * C, elems_bytes(4.0 * N * C), m->L};
}
static Work attend_backward(const Model* m) {
    int N = num_rows(m), C = m->C;
    attention_backward(rows(N, 3 * C), rows(N, C), rows(N, 3 * C), rows(N, C),
                       floats((size_t)N * (size_t)m->NH), m->B, m->T, C, m->NH);
    return (Work){5.0 * N * m->T * C, elems_bytes(8.0 * N * C), m->L};
}

static Segment everything(const Model* m) { return (Segment){0, m->params, true}; }
static Work square(const Model* m) {
    Segment all = everything(m);
    double* partials = (double*)take(ceil_div(m->params, NORM_BLOCK) * sizeof(double));
    norm_partials(partials, floats(m->params), DTYPE_FP32, m->params, &all, 1, STREAM_COMPUTE);
    return (Work){0, 4.0 * (double)m->params, 1};
}
static Work update(const Model* m) {
    Segment all = everything(m);
    AdamW adamw = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 1.0f};
    floatX* weight = weights(m->params);
    float *m1 = floats(m->params), *v = floats(m->params), *master = floats(m->params);
    adamw_update(weight, sizeof(floatX) == 4 ? (float*)weight : master, m1, v, floats(m->params),
                 DTYPE_FP32, &all, 1, &adamw);
    return (Work){16.0 * (double)m->params, (28.0 + elems_bytes(1)) * (double)m->params, 1};
}

static const struct {
    const char* name;
    Work (*run)(const Model*);
} OPERATIONS[] = {{"embedding forward", embed},
                  {"layernorm forward", norm_forward},
                  {"qkv forward", qkv_forward},
                  {"attention forward", attend},
                  {"attproj forward", attproj_forward},
                  {"fc + gelu forward", fc_forward},
                  {"fcproj forward", fcproj_forward},
                  {"head forward", head_forward},
                  {"classifier", classify},
                  {"head dinput", head_input},
                  {"head dweight", head_weight},
                  {"fcproj dinput + dgelu", fcproj_input},
                  {"fcproj dweight", fcproj_weight},
                  {"fc dinput", fc_input},
                  {"fc dweight", fc_weight},
                  {"attproj dinput", attproj_input},
                  {"attproj dweight", attproj_weight},
                  {"attention backward", attend_backward},
                  {"qkv dinput", qkv_input},
                  {"qkv dweight", qkv_weight},
                  {"layernorm backward", norm_backward},
                  {"embedding backward", embed_backward},
                  {"norm of gradients", square},
                  {"adamw", update}};
enum { NUM_OPERATIONS = sizeof OPERATIONS / sizeof OPERATIONS[0] };

// ---- clock -------------------------------------------------------------------------------------

// Calls of `run` in a row for about bench.seconds, after one to warm up; milliseconds of one.
static double time_calls(Work (*run)(const Model*), const Model* m, Work* work) {
    event_t begin = event_create(), end = event_create();
    double ms = 0;
    int calls = 1;
    for (int round = 0; round < 3; round++) { // warm up, estimate, measure
        event_record(begin, STREAM_COMPUTE);
        for (int i = 0; i < calls; i++) {
            bench.used = bench.token_bytes;
            *work = run(m);
        }
        event_record(end, STREAM_COMPUTE);
        device_synchronize();
        ms = event_elapsed_ms(begin, end) / calls;
        calls = round == 0 ? 2 : 1 + (int)(1e3 * bench.seconds / (ms + 1e-3));
    }
    event_destroy(begin);
    event_destroy(end);
    return ms;
}

static Work copy_much(const Model* m) {
    (void)m;
    size_t bytes = (size_t)bench.copy_mib << 20;
    void *to = take(bytes), *from = take(bytes);
    device_copy(to, from, bytes, STREAM_COMPUTE);
    return (Work){0, 2.0 * (double)bytes, 1};
}
static Work multiply_much(const Model* m) {
    (void)m;
    int n = bench.square;
    return product_forward(n, n, n, 1, false, WEIGHT_OUT_IN);
}

typedef struct {
    double ms, bound_ms, step_ms;
    int operation;
} Timing;

static int by_step_ms(const void* a, const void* b) {
    double x = ((const Timing*)a)->step_ms, y = ((const Timing*)b)->step_ms;
    return (x < y) - (x > y);
}

static void print_model(const Model* m, double peak_flops, double peak_bytes) {
    Timing timings[NUM_OPERATIONS];
    double step_ms = 0;
    OpsShape shape;
    memset(&shape, 0, sizeof shape);
    shape.B = m->B, shape.T = m->T, shape.C = m->C, shape.NH = m->NH, shape.Vp = m->Vp;
    shape.threads = device_threads(0, 1);
    shape.logits_rows = m->rows;
    shape.backward = true;
    shape.gelu_fusion = -1; // as the trainer's default
    Ledger ledger = {0};
    ledger_add(&ledger, MEM_TRANSIENT, "scratch", ops_scratch_bytes(&shape));
    ops_init(&shape, device_alloc(&ledger, "scratch"));
    fill_arena();
    upload_tokens(m);
    printf("\n%s: B %d, T %d, C %d, NH %d, L %d, %s\n", m->name, m->B, m->T, m->C, m->NH, m->L,
           ops_description());
    printf("%-24s %9s %10s %9s %8s %7s %8s\n", "operation", "ms", "TFLOP/s", "GB/s", "of bound",
           "calls", "ms a step");
    for (int i = 0; i < NUM_OPERATIONS; i++) {
        Work work;
        double ms = time_calls(OPERATIONS[i].run, m, &work);
        double flops_ms = work.flops / peak_flops * 1e3, bytes_ms = work.bytes / peak_bytes * 1e3;
        timings[i] = (Timing){ms, flops_ms > bytes_ms ? flops_ms : bytes_ms, ms * work.calls, i};
        step_ms += timings[i].step_ms;
        printf("%-24s %9.4f %10.1f %9.1f %7.0f%% %7.0f %8.2f\n", OPERATIONS[i].name, ms,
               work.flops / ms * 1e-9, work.bytes / ms * 1e-6, 100 * timings[i].bound_ms / ms,
               work.calls, timings[i].step_ms);
    }
    qsort(timings, NUM_OPERATIONS, sizeof timings[0], by_step_ms);
    printf("%s: %.2f ms in all operations of a step; the most in", m->name, step_ms);
    for (int i = 0; i < 3; i++)
        printf("%s %s (%.0f%% of the step, at %.0f%% of its bound)", i ? "," : "",
               OPERATIONS[timings[i].operation].name, 100 * timings[i].step_ms / step_ms,
               100 * timings[i].bound_ms / timings[i].ms);
    printf("\n");
    ops_free();
}

int main(int argc, char** argv) {
    bool tiny = argc > 1 && strcmp(argv[1], "tiny") == 0;
    Error error = {0, ""};
    DeviceOptions options = {0, 1, 0, true};
    if (!device_init(&options, &error)) error_exit(&error);
    // AdamW of 1558M is measured on a part of the parameters that is many times any cache.
    Model models[] = {{"124M", 32, 1024, 768, 12, 12, 50257, 50304, LOGITS_ROWS, 124000000},
                      {"1558M", 16, 1024, 1600, 25, 48, 50257, 50304, LOGITS_ROWS, 200000000}};
    Model tiny_model = {"tiny", 1, 64, 64, 1, 2, 250, 256, 64, 100000};
    bench.bytes = tiny ? (size_t)8 << 20 : (size_t)6 << 30;
    bench.pattern_bytes = tiny ? (size_t)1 << 20 : (size_t)16 << 20;
    bench.copy_mib = tiny ? 1 : 2048;
    bench.square = tiny ? 64 : 8192;
    bench.seconds = tiny ? 0 : 0.05;
    Ledger ledger = {0};
    ledger_add(&ledger, MEM_TRANSIENT, "arena", bench.bytes);
    bench.arena = (char*)device_alloc(&ledger, "arena");

    OpsShape shape;
    memset(&shape, 0, sizeof shape);
    shape.B = shape.T = shape.C = shape.NH = shape.Vp = 1;
    Ledger scratch = {0};
    ledger_add(&scratch, MEM_TRANSIENT, "scratch", ops_scratch_bytes(&shape));
    ops_init(&shape, device_alloc(&scratch, "scratch"));
    fill_arena();
    Work work;
    double copy_ms = time_calls(copy_much, NULL, &work), peak_bytes = work.bytes / copy_ms * 1e3;
    double product_ms = time_calls(multiply_much, NULL, &work);
    double peak_flops = work.flops / product_ms * 1e3;
    ops_free();
    printf("%s: copies %.0f GB/s, products of %d x %d %s %.0f TFLOP/s\n", device_description(),
           peak_bytes * 1e-9, bench.square, bench.square, dtype_name(FLOATX_DTYPE),
           peak_flops * 1e-12);
    int num_models = tiny ? 1 : (int)(sizeof models / sizeof models[0]);
    for (int i = 0; i < num_models; i++)
        print_model(tiny ? &tiny_model : &models[i], peak_flops, peak_bytes);
    device_free_all();
    return 0;
}
