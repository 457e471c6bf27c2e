// dev/bench/bench_step.c - where a training step of GPT-2 124M spends its time on the CPU.
//
//   bench_step B T rounds file.json
//
// A round is one real step (train/step.c, stage 0, exact), then the step's matrix products alone,
// given to oneDNN with its own threads, then a triad through memory. Rounds alternate, since
// machines change speed by the minute; of each the best counts. The floor is what cannot be
// avoided: bare products, plus 30 bytes per parameter (AdamW with its bf16 copy) at the triad's
// bandwidth.
//
// The linker's --wrap puts a clock around each operation (dev/bench/run.sh passes the flags).
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/comm.h"
#include "dev/bench/bare_products.h"
#include "train/step.h"

// ---- clocks around operations -------------------------------------------------------------------

typedef enum {
    MATMUL_FORWARD,
    MATMUL_INPUT,
    MATMUL_WEIGHT,
    HEAD_FORWARD,
    HEAD_INPUT,
    HEAD_WEIGHT,
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    LAYERNORM_FORWARD,
    LAYERNORM_BACKWARD,
    EMBEDDING,
    CLASSIFIER,
    NORM,
    ADAMW,
    FOLD,
    CONVERT,
    NUM_KINDS
} Kind;

static const char* const KIND_NAMES[NUM_KINDS] = {"matmul_forward",
                                                  "matmul_backward_input",
                                                  "matmul_backward_weight",
                                                  "head_forward",
                                                  "head_backward_input",
                                                  "head_backward_weight",
                                                  "attention_forward",
                                                  "attention_backward",
                                                  "layernorm_forward",
                                                  "layernorm_backward",
                                                  "embedding",
                                                  "classifier",
                                                  "norm",
                                                  "adamw",
                                                  "fold",
                                                  "convert"};

static double kind_seconds[NUM_KINDS];

// Defines the wrapper of an operation without result: its clock counts for `kind`.
#define TIMED(kind, name, parameters, arguments)                                                   \
    void __real_##name parameters;                                                                 \
    void __wrap_##name parameters;                                                                 \
    void __wrap_##name parameters {                                                                \
        const double begin = now_seconds();                                                        \
        __real_##name arguments;                                                                   \
        kind_seconds[kind] += now_seconds() - begin;                                               \
    }

TIMED(layout == WEIGHT_OUT_IN ? HEAD_FORWARD : MATMUL_FORWARD, matmul_forward,
      (Rows out, Rows pre_gelu, Rows in, const floatX* weight, WeightLayout layout,
       const floatX* bias, int N, int C, int OC),
      (out, pre_gelu, in, weight, layout, bias, N, C, OC))
TIMED(layout == WEIGHT_OUT_IN ? HEAD_INPUT : MATMUL_INPUT, matmul_backward_input,
      (Rows din, Rows dout, const floatX* weight, WeightLayout layout, Rows pre_gelu, int N, int C,
       int OC),
      (din, dout, weight, layout, pre_gelu, N, C, OC))
TIMED(layout == WEIGHT_OUT_IN ? HEAD_WEIGHT : MATMUL_WEIGHT, matmul_backward_weight,
      (Grad dweight, Grad dbias, Rows in, Rows dout, WeightLayout layout, int N, int C, int OC),
      (dweight, dbias, in, dout, layout, N, C, OC))
TIMED(ATTENTION_FORWARD, attention_forward,
      (Rows out, float* lse, Rows qkv, int B, int T, int C, int NH), (out, lse, qkv, B, T, C, NH))
TIMED(ATTENTION_BACKWARD, attention_backward,
      (Rows dqkv, Rows dout, Rows qkv, Rows out, const float* lse, int B, int T, int C, int NH),
      (dqkv, dout, qkv, out, lse, B, T, C, NH))
TIMED(LAYERNORM_FORWARD, layernorm_forward,
      (Rows out, float* mean, float* rstd, Rows residual, Rows a, Rows b, const floatX* weight,
       const floatX* bias, int N, int C),
      (out, mean, rstd, residual, a, b, weight, bias, N, C))
TIMED(LAYERNORM_BACKWARD, layernorm_backward,
      (Rows dinp, Rows dresidual, Grad dweight, Grad dbias, Rows dout, Rows inp, const float* mean,
       const float* rstd, const floatX* weight, int N, int C),
      (dinp, dresidual, dweight, dbias, dout, inp, mean, rstd, weight, N, C))
TIMED(EMBEDDING, embedding_forward,
      (Rows out, const int* tokens, const floatX* wte, const floatX* wpe, int first_pos, int B,
       int T, int C),
      (out, tokens, wte, wpe, first_pos, B, T, C))
TIMED(EMBEDDING, embedding_backward,
      (Grad dwte, Grad dwpe, Rows dout, const int* tokens, int B, int T, int C, int maxT, int V),
      (dwte, dwpe, dout, tokens, B, T, C, maxT, V))
TIMED(CLASSIFIER, classifier_loss,
      (float* losses, Rows logits, const int* targets, int N, int V, int Vp, float dloss,
       bool write_dlogits),
      (losses, logits, targets, N, V, Vp, dloss, write_dlogits))
TIMED(NORM, norm_partials,
      (double* partials, const void* grad, DType grad_dtype, size_t elems, const Segment* segments,
       int num_segments, stream_t stream),
      (partials, grad, grad_dtype, elems, segments, num_segments, stream))
TIMED(ADAMW, adamw_update,
      (floatX * weights, float* master, float* m, float* v, const void* grad, DType grad_dtype,
       const Segment* segments, int num_segments, const AdamW* adamw),
      (weights, master, m, v, grad, grad_dtype, segments, num_segments, adamw))
TIMED(FOLD, fold,
      (void* acc, DType acc_dtype, bool accumulate, const void* const* sources, DType source_dtype,
       int num_sources, size_t elems, stream_t stream),
      (acc, acc_dtype, accumulate, sources, source_dtype, num_sources, elems, stream))

TIMED(CONVERT, convert,
      (void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t elems, stream_t stream),
      (dst, dst_dtype, src, src_dtype, elems, stream))

// ---- the step -----------------------------------------------------------------------------------

typedef struct {
    GPT2Config config;
    int B, T;
    Comm* comm;
    Ledger ledger;
    GPT2 model;
    Zero* zero;
    Step step;
    int* tokens; // (B * T + 1)
} Trainer;

typedef enum { FORWARD, BACKWARD, GRAD_NORM, UPDATE, NUM_PHASES } Phase;
static const char* const PHASE_NAMES[NUM_PHASES] = {"forward", "backward", "grad_norm", "update"};

typedef struct {
    double total, phases[NUM_PHASES], kinds[NUM_KINDS]; // seconds
} StepTimes;

static void trainer_open(Trainer* t, int B, int T) {
    Error error = {0, ""};
    const CommOptions comm_options = {.kind = "self"};
    memset(t, 0, sizeof *t);
    t->config = (GPT2Config){.L = 12, .NH = 12, .C = 768, .V = 50257, .T = 1024};
    t->B = B;
    t->T = T;
    t->comm = comm_open(&comm_options, &error);
    if (t->comm == NULL) error_exit(&error);
    const DeviceOptions device = {.local_rank = 0, .local_size = 1};
    if (!device_init(&device, &error)) error_exit(&error);

    const GPT2Shape shape = {.B = B, .T = T, .recompute = RECOMPUTE_NONE, .backward = true};
    const ZeroConfig zero = {.stage = 0,
                             .exact = true,
                             .accum_dtype = DTYPE_FP32,
                             .grad_accum_steps = 1,
                             .world_size = 1,
                             .rank = 0,
                             .training = true};
    const OpsShape ops = {.B = B,
                          .T = T,
                          .C = t->config.C,
                          .NH = t->config.NH,
                          .Vp = gpt2_padded_vocab(&t->config),
                          .threads = device_threads(0, 1),
                          .logits_rows = LOGITS_ROWS,
                          .backward = true};
    gpt2_init(&t->model, &t->config, &shape);
    zero_plan(&zero, &t->model.table, &t->ledger);
    gpt2_plan(&t->model, &t->ledger);
    step_plan(&t->ledger, B, T, 1);
    ledger_add(&t->ledger, MEM_TRANSIENT, "scratch", ops_scratch_bytes(&ops));
    ops_init(&ops, device_alloc(&t->ledger, "scratch"));
    t->comm = comm_attach_device(t->comm, &comm_options, &error);
    comm_agree(t->comm, &error);
    t->zero = zero_create(&zero, &t->model.table, t->comm, &t->ledger);
    gpt2_alloc(&t->model, &t->ledger);
    step_init(&t->step, &t->model, t->zero, &t->ledger);
    zero_init_weights(t->zero, gpt2_init_range, 1);
    zero_publish(t->zero);

    t->tokens = checked_malloc(((size_t)B * (size_t)T + 1) * sizeof(int));
    for (int i = 0; i <= B * T; i++) t->tokens[i] = (int)((long)i * 7919 % t->config.V);
}

static StepTimes run_step(Trainer* t, long number) {
    StepTimes times = {0};
    double at[NUM_PHASES + 1];
    memset(kind_seconds, 0, sizeof kind_seconds);
    t->step.number = number;
    at[FORWARD] = now_seconds();
    step_forward(&t->step, t->tokens, t->tokens + 1, 0);
    at[BACKWARD] = now_seconds();
    step_backward(&t->step, 1.0f / (float)(t->B * t->T), 0);
    at[GRAD_NORM] = now_seconds();
    const StepMessage message =
        zero_grad_norm(t->zero, t->step.micro_losses, (size_t)t->B * (size_t)t->T, 1.0, 0);
    at[UPDATE] = now_seconds();
    CHECK(!message.nonfinite, "the loss is not finite");
    const AdamW adamw = {.lr = 1e-4f,
                         .beta1 = 0.9f,
                         .beta2 = 0.95f,
                         .eps = 1e-8f,
                         .weight_decay = 0.1f,
                         .correction1 = 0.1f,
                         .correction2 = 0.05f,
                         .grad_scale = 1.0f};
    zero_step(t->zero, &adamw);
    at[NUM_PHASES] = now_seconds();
    times.total = at[NUM_PHASES] - at[0];
    for (int p = 0; p < NUM_PHASES; p++) times.phases[p] = at[p + 1] - at[p];
    memcpy(times.kinds, kind_seconds, sizeof kind_seconds);
    return times;
}

// ---- memory bandwidth ---------------------------------------------------------------------------

enum { TRIAD_ELEMS = 16 << 20 }; // 64 MiB each of three arrays: beyond the caches

// Seconds of one pass of a = b + 3 c.
static double run_triad(float* arrays) {
    float *a = arrays, *b = arrays + TRIAD_ELEMS, *c = b + TRIAD_ELEMS;
    const double begin = now_seconds();
#pragma omp parallel for simd schedule(static)
    for (int i = 0; i < TRIAD_ELEMS; i++) a[i] = b[i] + 3.0f * c[i];
    return now_seconds() - begin;
}

// ---- report -------------------------------------------------------------------------------------

typedef struct {
    StepTimes step;
    double median_seconds;
    BareTimes bare;
    double stream_gb_s;
    double floor_seconds;
} Result;

// Floating-point operations of products and causal attention (two products forward, five backward).
static double attention_flops(const Trainer* t, int products) {
    const double pairs = (double)t->T * (t->T + 1) / 2;
    return 2.0 * products * pairs * t->config.C * t->B * t->config.L;
}

static void print_line(const char* name, double seconds, double total, double flops, double peak) {
    printf("  %-24s %9.2f ms %5.1f %%", name, seconds * 1e3, 100 * seconds / total);
    if (flops > 0)
        printf("   %7.0f GFLOP/s %5.1f %% of peak", flops / seconds * 1e-9,
               100 * flops / seconds / peak);
    printf("\n");
}

static void print_table(const Trainer* t, const Result* r) {
    const double total = r->step.total, peak = r->bare.peak_flops;
    const double tokens = (double)t->B * t->T;
    const double flops = r->bare.flops + attention_flops(t, 7);
    printf("GPT-2 124M, B=%d T=%d, %s, %s\n", t->B, t->T, dtype_name(FLOATX_DTYPE),
           device_description());
    printf("step %.1f ms (median %.1f), %.0f tokens/s, %.1f %% of the GEMM peak of this run (%.0f "
           "GFLOP/s; the best single call %.0f)\n",
           total * 1e3, r->median_seconds * 1e3, tokens / total, 100 * flops / total / peak,
           peak * 1e-9, r->bare.burst_flops * 1e-9);
    printf(
        "bare products %.1f ms, stream %.1f GB/s, floor %.1f ms: the step takes %.2f times that\n",
        r->bare.total * 1e3, r->stream_gb_s, r->floor_seconds * 1e3, total / r->floor_seconds);
    double kinds = 0;
    for (int p = 0; p < NUM_PHASES; p++)
        print_line(PHASE_NAMES[p], r->step.phases[p], total, 0, peak);
    printf("  --\n");
    for (int k = 0; k < NUM_KINDS; k++) {
        const double products = k <= HEAD_WEIGHT          ? r->bare.kind_flops[k]
                                : k == ATTENTION_FORWARD  ? attention_flops(t, 2)
                                : k == ATTENTION_BACKWARD ? attention_flops(t, 5)
                                                          : 0;
        print_line(KIND_NAMES[k], r->step.kinds[k], total, products, peak);
        if (k <= HEAD_WEIGHT)
            print_line("  the products alone", r->bare.kinds[k], total, products, peak);
        kinds += r->step.kinds[k];
    }
    print_line("everything else", total - kinds, total, 0, peak);
}

static void write_json(const Trainer* t, const Result* r, int rounds, const char* path) {
    FILE* file = fopen(path, "w");
    CHECK(file != NULL, "cannot write %s", path);
    const double tokens = (double)t->B * t->T;
    fprintf(file,
            "{\"model\": \"124M\", \"precision\": \"%s\", \"B\": %d, \"T\": %d, \"rounds\": %d, "
            "\"threads\": %d, \"products\": \"%s\",\n \"step_ms\": %.3f, \"median_step_ms\": %.3f, "
            "\"tokens_per_s\": %.1f, \"percent_of_gemm_peak\": %.2f, \"gemm_peak_gflops\": %.1f, "
            "\"gemm_best_call_gflops\": %.1f,\n "
            "\"bare_products_ms\": %.3f, \"stream_gb_s\": %.2f, \"floor_ms\": %.3f, "
            "\"ratio_to_floor\": "
            "%.4f",
            dtype_name(FLOATX_DTYPE), t->B, t->T, rounds, omp_get_max_threads(), ops_description(),
            r->step.total * 1e3, r->median_seconds * 1e3, tokens / r->step.total,
            100 * (r->bare.flops + attention_flops(t, 7)) / r->step.total / r->bare.peak_flops,
            r->bare.peak_flops * 1e-9, r->bare.burst_flops * 1e-9, r->bare.total * 1e3,
            r->stream_gb_s, r->floor_seconds * 1e3, r->step.total / r->floor_seconds);
    fprintf(file, ",\n \"phase_ms\": {");
    for (int p = 0; p < NUM_PHASES; p++) {
        fprintf(file, "%s\"%s\": %.3f", p > 0 ? ", " : "", PHASE_NAMES[p], r->step.phases[p] * 1e3);
    }
    fprintf(file, "},\n \"kind_ms\": {");
    for (int k = 0; k < NUM_KINDS; k++) {
        fprintf(file, "%s\"%s\": %.3f", k > 0 ? ", " : "", KIND_NAMES[k], r->step.kinds[k] * 1e3);
    }
    fprintf(file, "},\n \"bare_ms\": {");
    for (int k = 0; k < NUM_BARE_KINDS; k++) {
        fprintf(file, "%s\"%s\": %.3f", k > 0 ? ", " : "", KIND_NAMES[k], r->bare.kinds[k] * 1e3);
    }
    fprintf(file, "}}\n");
    CHECK(fclose(file) == 0, "cannot write %s", path);
}

static int compare_doubles(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

int main(int argc, char** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s B T rounds file.json\n", argv[0]);
        return EXIT_USAGE;
    }
    const int B = atoi(argv[1]), T = atoi(argv[2]), rounds = atoi(argv[3]);
    Trainer trainer;
    trainer_open(&trainer, B, T);
    BareProducts* bare = bare_products_new(&trainer.config, B * T, LOGITS_ROWS);
    float* arrays = checked_calloc(3 * (size_t)TRIAD_ELEMS, sizeof(float));
    double* totals = checked_malloc((size_t)rounds * sizeof(double));

    Result result = {.step = {.total = 1e30}, .bare = {.total = 1e30}};
    run_step(&trainer, 1); // creates primitives
    for (int round = 0; round < rounds; round++) {
        const StepTimes step = run_step(&trainer, round + 2);
        totals[round] = step.total;
        if (step.total < result.step.total) result.step = step;
        bare_products_run(bare, &result.bare);
        for (int i = 0; i < 3; i++) {
            const double gb_s = 3.0 * sizeof(float) * TRIAD_ELEMS / run_triad(arrays) * 1e-9;
            if (gb_s > result.stream_gb_s) result.stream_gb_s = gb_s;
        }
        fprintf(stderr, "round %d of %d: %.1f ms\n", round + 1, rounds, step.total * 1e3);
    }
    qsort(totals, (size_t)rounds, sizeof(double), compare_doubles);
    result.median_seconds = totals[rounds / 2];
    result.floor_seconds = result.bare.total + 30.0 * (double)trainer.model.table.num_params /
                                                   (result.stream_gb_s * 1e9);
    print_table(&trainer, &result);
    write_json(&trainer, &result, rounds, argv[4]);

    bare_products_free(bare);
    free(arrays);
    free(totals);
    free(trainer.tokens);
    step_free(&trainer.step);
    zero_destroy(trainer.zero);
    gpt2_free(&trainer.model);
    ops_free();
    device_free_all();
    return EXIT_FINISHED;
}
