// test_gpt2.cu - the whole model against an independent implementation.
//
// Golden values (dev/golden/make_golden.py): logits, of prefixes and of the key-value cache too,
// loss, every gradient, ten AdamW steps with clipping active. Then what needs no reference:
// recompute levels and ZeRO stages give the same bits, and one batch can be learnt by heart.
//
//   ./test_gpt2                        one rank
//   mpirun -np 2 ./test_gpt2           the golden batch over two ranks; any number of ranks works
//
// Like train_gpt2.cu this file is C and C++: the C compiler makes test_gpt2 (CPU) of it, nvcc
// test_gpt2cu (CUDA).
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/comm.h"
#include "dev/test/testing.h"
#include "train/schedule.h"
#include "train/step.h"

// ---- golden values ------------------------------------------------------------------------------

typedef struct {
    GPT2Config config;
    int B, T, steps;
    size_t num_params;
    double lr, beta1, beta2, eps, weight_decay, clip;
    int *tokens, *targets;  // (steps, B, T)
    float *weights, *final; // (num_params) before step 1, after the last
    float* logits;          // (B, T, V)    first batch
    float* gradients;       // (num_params) first batch, before clipping
    double *losses, *norms; // (steps)
} Golden;

static void* read_array(FILE* file, size_t count, size_t bytes_each) {
    void* out = checked_malloc(count * bytes_each);
    CHECK(fread(out, bytes_each, count, file) == count, "the golden file is too short");
    return out;
}

static void read_golden(Golden* g, const char* path) {
    FILE* file = fopen(path, "rb");
    CHECK(file, "cannot open %s: run from the folder of the sources, or give the path", path);
    int* header = (int*)read_array(file, 12, sizeof(int));
    CHECK(header[0] == 0x6E6C6467 && header[1] == 1, "%s is not a golden file, version 1", path);
    GPT2Config config = {header[2], header[3], header[4], header[5], header[6]};
    g->config = config;
    g->B = header[7];
    g->T = header[8];
    g->steps = header[9];
    g->num_params = (size_t)header[10];
    double* numbers = (double*)read_array(file, 6, sizeof(double));
    g->lr = numbers[0];
    g->beta1 = numbers[1];
    g->beta2 = numbers[2];
    g->eps = numbers[3];
    g->weight_decay = numbers[4];
    g->clip = numbers[5];
    size_t batch = (size_t)g->B * (size_t)g->T, steps = (size_t)g->steps;
    g->tokens = (int*)read_array(file, steps * batch, sizeof(int));
    g->targets = (int*)read_array(file, steps * batch, sizeof(int));
    g->weights = (float*)read_array(file, g->num_params, sizeof(float));
    g->logits = (float*)read_array(file, batch * (size_t)config.V, sizeof(float));
    g->gradients = (float*)read_array(file, g->num_params, sizeof(float));
    g->losses = (double*)read_array(file, steps, sizeof(double));
    g->norms = (double*)read_array(file, steps, sizeof(double));
    g->final = (float*)read_array(file, g->num_params, sizeof(float));
    CHECK(fgetc(file) == EOF, "%s is too long", path);
    fclose(file);
    free(header);
    free(numbers);
}

static void free_golden(Golden* g) {
    free(g->tokens), free(g->targets), free(g->weights), free(g->logits);
    free(g->gradients), free(g->losses), free(g->norms), free(g->final);
}

// ---- a trainer without options, data and files --------------------------------------------------

typedef struct {
    int stage;
    Recompute recompute;
    int B, grad_accum_steps; // the global batch has B * grad_accum_steps * world_size sequences
} Setup;

typedef struct {
    const Golden* golden;
    Comm* comm;
    Setup setup;
    Ledger ledger;
    GPT2 model;
    Zero* zero;
    Step step;
} Trainer;

// fp16 needs it for gradients below 6e-5; a power of two changes nothing else.
static const double LOSS_SCALE = FLOATX_DTYPE == DTYPE_FP16 ? 1024 : 1;

static void trainer_open(Trainer* t, const Golden* golden, Comm* comm, const Setup* setup) {
    Error error = {0, ""};
    DeviceOptions device = {comm->local_rank, comm->local_size, 0, true};
    if (!device_init(&device, &error)) error_exit(&error);
    memset(t, 0, sizeof *t);
    t->golden = golden;
    t->comm = comm;
    t->setup = *setup;
    GPT2Shape shape = {setup->B, golden->T, setup->recompute, true, golden->T, golden->T};
    ZeroConfig zero = {setup->stage,     true,       DTYPE_FP32, setup->grad_accum_steps,
                       comm->world_size, comm->rank, true};
    OpsShape ops;
    memset(&ops, 0, sizeof ops);
    ops.B = setup->B;
    ops.T = golden->T;
    ops.C = golden->config.C;
    ops.NH = golden->config.NH;
    ops.Vp = gpt2_padded_vocab(&golden->config);
    ops.threads = device_threads(0, comm->local_size);
    ops.logits_rows = LOGITS_ROWS;
    ops.backward = true;
    gpt2_init(&t->model, &golden->config, &shape);
    zero_plan(&zero, &t->model.table, &t->ledger);
    gpt2_plan(&t->model, &t->ledger);
    step_plan(&t->ledger, setup->B, golden->T, setup->grad_accum_steps);
    ledger_add(&t->ledger, MEM_TRANSIENT, "scratch", ops_scratch_bytes(&ops));
    ops_init(&ops, device_alloc(&t->ledger, "scratch"));
    t->zero = zero_create(&zero, &t->model.table, comm, &t->ledger);
    gpt2_alloc(&t->model, &t->ledger);
    step_init(&t->step, &t->model, t->zero, &t->ledger);
}

static void trainer_close(Trainer* t) {
    step_free(&t->step);
    zero_destroy(t->zero);
    gpt2_free(&t->model);
    ops_free();
    t->comm->free_memory(t->comm);
    device_free_all();
}

// The golden weights, m = v = 0.
static void trainer_reset(Trainer* t) {
    zero_init_weights(t->zero, gpt2_init_range, 1);
    for (int i = 0; i < t->model.table.num_tensors; i++) {
        const TensorSpec* tensor = &t->model.table.tensors[i];
        const float* in = t->golden->weights + tensor->canonical_offset;
        zero_write(t->zero, STATE_MASTER, i, 0, tensor->elems, t->comm->rank == 0 ? in : NULL);
    }
    zero_publish(t->zero);
}

static size_t global_sequences(const Trainer* t) {
    return (size_t)t->setup.B * (size_t)t->setup.grad_accum_steps * (size_t)t->comm->world_size;
}

// Forward, backward and reduction of one global batch, (global_sequences, T).
static StepMessage accumulate(Trainer* t, long number, const int* tokens, const int* targets) {
    size_t T = (size_t)t->golden->T, global_tokens = global_sequences(t) * T;
    t->step.number = number;
    for (int micro = 0; micro < t->setup.grad_accum_steps; micro++) {
        size_t place = (size_t)micro * (size_t)t->comm->world_size + (size_t)t->comm->rank;
        size_t at = place * (size_t)t->setup.B * T;
        step_forward(&t->step, tokens + at, targets + at, micro);
        step_backward(&t->step, (float)(LOSS_SCALE / (double)global_tokens), micro);
    }
    return zero_grad_norm(t->zero, t->step.micro_losses, global_tokens, LOSS_SCALE, 0);
}

static AdamW golden_adamw(const Golden* g, int number, double grad_norm) {
    AdamW adamw = {(float)g->lr,
                   (float)g->beta1,
                   (float)g->beta2,
                   (float)g->eps,
                   (float)g->weight_decay,
                   (float)(1 - pow(g->beta1, number)),
                   (float)(1 - pow(g->beta2, number)),
                   (float)(clip_coefficient(grad_norm, g->clip) / LOSS_SCALE)};
    return adamw;
}

// Element by element as double: the tensor's state on rank 0.
static double* read_state(Trainer* t, StateKind kind, int tensor) {
    size_t elems = t->model.table.tensors[tensor].elems;
    float* floats = (float*)checked_malloc(elems * sizeof(float));
    double* out = new_doubles(elems);
    zero_read(t->zero, kind, tensor, 0, elems, t->comm->rank == 0 ? floats : NULL);
    for (size_t i = 0; t->comm->rank == 0 && i < elems; i++) out[i] = (double)floats[i];
    free(floats);
    return out;
}

static double* to_doubles(const float* in, size_t count) {
    double* out = new_doubles(count);
    for (size_t i = 0; i < count; i++) out[i] = (double)in[i];
    return out;
}

// ---- logits -------------------------------------------------------------------------------------

// Logits of step_eval's last pass, which are still there: (rows, V).
static double* download_logits(const Trainer* t, size_t rows) {
    size_t V = (size_t)t->golden->config.V, ld = t->model.logits.ld;
    floatX* bits = (floatX*)checked_malloc(rows * ld * sizeof(floatX));
    double* out = new_doubles(rows * V);
    device_download(bits, t->model.logits.ptr, ((rows - 1) * ld + V) * sizeof(floatX));
    for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < V; v++) out[r * V + v] = (double)to_float(bits[r * ld + v]);
    free(bits);
    return out;
}

static double largest_difference(const double* a, const float* b, size_t count) {
    double largest = 0;
    for (size_t i = 0; i < count; i++) largest = fmax(largest, fabs(a[i] - (double)b[i]));
    return largest;
}

// The first `length` positions of sequence b: a prefix gives the logits of the whole.
static void check_logits(Trainer* t, int b, int length) {
    const Golden* g = t->golden;
    size_t at = (size_t)b * (size_t)g->T, count = (size_t)length * (size_t)g->config.V;
    double seq_loss;
    step_eval(&t->step, g->tokens + at, g->targets + at, 1, length, &seq_loss);
    double* logits = download_logits(t, (size_t)length);
    const float* golden_logits = g->logits + at * (size_t)g->config.V;
    double* ref = to_doubles(golden_logits, count);
    double difference = largest_difference(logits, golden_logits, count);
    EXPECT(FLOATX_DTYPE != DTYPE_FP32 || difference < 1e-4, "logits differ by %.2e", difference);
    test_close(logits, ref, count, tolerance(TOL_MODEL), "golden", "logits of sequence %d, T=%d %s",
               b, length, dtype_name(FLOATX_DTYPE));
    free(logits);
    free(ref);
}

// Token by token after a prompt, through the key-value cache.
static void check_cache(Trainer* t, int prompt) {
    const Golden* g = t->golden;
    size_t V = (size_t)g->config.V, rows = (size_t)(g->T - prompt + 1);
    double* logits = new_doubles(rows * V);
    for (int first = 0, n; first < g->T; first += n) {
        n = first == 0 ? prompt : 1;
        step_cached(&t->step, g->tokens + first, first, n);
        size_t row = (size_t)(first + n - prompt);
        for (size_t v = 0; v < V; v++) logits[row * V + v] = (double)t->step.logits_row[v];
    }
    double* ref = to_doubles(g->logits + (size_t)(prompt - 1) * V, rows * V);
    test_close(logits, ref, rows * V, tolerance(TOL_MODEL), "golden",
               "logits of the cache, prompt of %d %s", prompt, dtype_name(FLOATX_DTYPE));
    free(logits);
    free(ref);
}

// ---- gradients and steps ------------------------------------------------------------------------

// An update with lr = 0 and beta1 = 0 changes no weight and leaves the gradient in m. The tokens
// are those of the first batch, any number of times over.
static void check_gradients(Trainer* t, const int* tokens, const int* targets) {
    const Golden* g = t->golden;
    AdamW probe = {0, 0, 0, 1, 0, 1, 1, (float)(1 / LOSS_SCALE)};
    trainer_reset(t);
    StepMessage message = accumulate(t, 1, tokens, targets);
    double limit = tolerance(TOL_MODEL_LOSS);
    EXPECT(fabs(message.loss - g->losses[0]) < limit, "loss %.7f, golden %.7f", message.loss,
           g->losses[0]);
    EXPECT(!message.nonfinite, "a gradient is not finite");
    test_report("loss of the first batch %.6f, golden %.6f", message.loss, g->losses[0]);
    zero_step(t->zero, &probe);
    for (int i = 0; i < t->model.table.num_tensors; i++) {
        const TensorSpec* tensor = &t->model.table.tensors[i];
        double* got = read_state(t, STATE_M, i);
        double* ref = to_doubles(g->gradients + tensor->canonical_offset, tensor->elems);
        if (t->comm->rank == 0)
            test_close(got, ref, tensor->elems, tolerance(TOL_MODEL), "golden", "gradient of %s %s",
                       tensor->name, dtype_name(FLOATX_DTYPE));
        free(got);
        free(ref);
    }
}

// What the weights have moved since the start, against what the golden ones have.
static void check_updates(Trainer* t) {
    const Golden* g = t->golden;
    for (int i = 0; i < t->model.table.num_tensors; i++) {
        const TensorSpec* tensor = &t->model.table.tensors[i];
        const float *before = g->weights + tensor->canonical_offset,
                    *after = g->final + tensor->canonical_offset;
        double* got = read_state(t, STATE_MASTER, i);
        double* ref = new_doubles(tensor->elems);
        for (size_t e = 0; e < tensor->elems; e++) {
            got[e] -= (double)before[e];
            ref[e] = (double)after[e] - (double)before[e];
        }
        if (t->comm->rank == 0)
            test_close(got, ref, tensor->elems, tolerance(TOL_MODEL), "golden",
                       "%d updates of %s %s", g->steps, tensor->name, dtype_name(FLOATX_DTYPE));
        free(got);
        free(ref);
    }
}

static void check_steps(Trainer* t) {
    const Golden* g = t->golden;
    size_t batch = (size_t)g->B * (size_t)g->T;
    trainer_reset(t);
    for (int s = 0; s < g->steps; s++) {
        size_t at = (size_t)s * batch;
        StepMessage message = accumulate(t, s + 1, g->tokens + at, g->targets + at);
        AdamW adamw = golden_adamw(g, s + 1, message.grad_norm);
        zero_step(t->zero, &adamw);
        double limit = tolerance(TOL_MODEL_LOSS),
               norm_error = fabs(message.grad_norm / g->norms[s] - 1);
        EXPECT(fabs(message.loss - g->losses[s]) < limit, "loss %.7f, golden %.7f", message.loss,
               g->losses[s]);
        EXPECT(norm_error < tolerance(TOL_MODEL_NORM), "norm %.7f, golden %.7f", message.grad_norm,
               g->norms[s]);
        test_report("step %2d   loss %.6f, golden %.6f   norm %.6f, golden %.6f %s", s + 1,
                    message.loss, g->losses[s], message.grad_norm, g->norms[s],
                    dtype_name(FLOATX_DTYPE));
    }
    check_updates(t);
}

// ---- without a reference ------------------------------------------------------------------------

enum { NUM_STEPS = 5 };
typedef struct {
    double losses[NUM_STEPS], norms[NUM_STEPS];
    uint64_t hash; // of all masters
} Outcome;

// A few steps on sequences of the golden batches, as many at a time as the setup wants.
static Outcome short_run(const Golden* g, Comm* comm, const Setup* setup) {
    Trainer t;
    Outcome outcome;
    trainer_open(&t, g, comm, setup);
    trainer_reset(&t);
    size_t T = (size_t)g->T, sequences = global_sequences(&t), pool = (size_t)(g->steps * g->B);
    int* tokens = (int*)checked_malloc(2 * sequences * T * sizeof(int));
    int* targets = tokens + sequences * T;
    for (int s = 0; s < NUM_STEPS; s++) {
        for (size_t i = 0; i < sequences; i++) {
            size_t from = ((size_t)s * sequences + i) % pool * T;
            memcpy(tokens + i * T, g->tokens + from, T * sizeof(int));
            memcpy(targets + i * T, g->targets + from, T * sizeof(int));
        }
        StepMessage message = accumulate(&t, s + 1, tokens, targets);
        AdamW adamw = golden_adamw(g, s + 1, message.grad_norm);
        zero_step(t.zero, &adamw);
        outcome.losses[s] = message.loss;
        outcome.norms[s] = message.grad_norm;
    }
    outcome.hash = zero_params_hash(t.zero);
    free(tokens);
    trainer_close(&t);
    return outcome;
}

static void check_same(const Outcome* a, const Outcome* b) {
    for (int s = 0; s < NUM_STEPS; s++) {
        EXPECT(a->losses[s] == b->losses[s], "loss %d: %.17g and %.17g", s + 1, a->losses[s],
               b->losses[s]);
        EXPECT(a->norms[s] == b->norms[s], "norm %d: %.17g and %.17g", s + 1, a->norms[s],
               b->norms[s]);
    }
    EXPECT(a->hash == b->hash, "weights %016llx and %016llx", (unsigned long long)a->hash,
           (unsigned long long)b->hash);
}

// Every recompute level and every stage, against level 0 and stage 0.
static void check_same_bits(const Golden* g, Comm* comm) {
    Setup base = {0, RECOMPUTE_NONE, 1, 2};
    Outcome first = short_run(g, comm, &base);
    static const Recompute levels[] = {RECOMPUTE_GELU, RECOMPUTE_GELU_LAYERNORM, RECOMPUTE_BLOCK};
    for (int i = 0; i < 3; i++) {
        Setup setup = base;
        setup.recompute = levels[i];
        Outcome outcome = short_run(g, comm, &setup);
        check_same(&outcome, &first);
        test_report("recompute %d gives the bits of 0, %016llx", (int)levels[i],
                    (unsigned long long)outcome.hash);
    }
    for (int stage = 1; stage <= 3; stage++) {
        Setup setup = base;
        setup.stage = stage;
        Outcome outcome = short_run(g, comm, &setup);
        check_same(&outcome, &first);
        test_report("stage %d gives the bits of stage 0 on %d ranks, %016llx", stage,
                    comm->world_size, (unsigned long long)outcome.hash);
    }
}

// From a fresh initialisation; 50 steps are about twice what it takes.
static void check_overfit(const Golden* g, Comm* comm) {
    enum { MAX_STEPS = 50 };
    Setup setup = {0, RECOMPUTE_NONE, 1, 1};
    Trainer t;
    trainer_open(&t, g, comm, &setup);
    zero_init_weights(t.zero, gpt2_init_range, 42);
    double loss = INFINITY;
    int number = 0;
    while (loss >= 0.1 && number < MAX_STEPS) {
        StepMessage message = accumulate(&t, ++number, g->tokens, g->targets);
        AdamW adamw = golden_adamw(g, number, message.grad_norm);
        zero_step(t.zero, &adamw);
        loss = message.loss;
    }
    EXPECT(loss < 0.1, "the loss is %.4f after %d steps", loss, number);
    test_report("one batch by heart: loss %.4f after %d steps %s", loss, number,
                dtype_name(FLOATX_DTYPE));
    trainer_close(&t);
}

static void check_golden(const Golden* g, Comm* comm, int grad_accum_steps) {
    Setup setup = {0, RECOMPUTE_NONE, g->B / grad_accum_steps / comm->world_size, grad_accum_steps};
    Trainer t;
    trainer_open(&t, g, comm, &setup);
    trainer_reset(&t);
    for (int b = 0; b < g->B; b++) check_logits(&t, b, g->T);
    check_logits(&t, 0, 1);
    check_logits(&t, 1, 7);
    check_cache(&t, 1);
    check_cache(&t, 5);
    check_gradients(&t, g->tokens, g->targets);
    check_steps(&t);
    trainer_close(&t);
}

// More rows than the classifier takes at once: the golden batch again and again has its loss and
// gradients.
static void check_many_rows(const Golden* g, Comm* comm) {
    int batch = g->B * g->T, copies = 3 * LOGITS_ROWS / batch, B = copies * g->B;
    Setup setup = {0, RECOMPUTE_NONE, B, 1};
    Trainer t;
    trainer_open(&t, g, comm, &setup);
    size_t count = global_sequences(&t) * (size_t)g->T;
    int* tokens = (int*)checked_malloc(2 * count * sizeof(int));
    int* targets = tokens + count;
    for (size_t i = 0; i < count; i++) {
        tokens[i] = g->tokens[i % (size_t)batch];
        targets[i] = g->targets[i % (size_t)batch];
    }
    check_gradients(&t, tokens, targets);
    free(tokens);
    trainer_close(&t);
}

int main(int argc, char** argv) {
    Error error = {0, ""};
    CommOptions options;
    Golden golden;
    memset(&options, 0, sizeof options);
    options.kind = "auto";
    Comm* comm = comm_open(&options, &error);
    if (!comm) error_exit(&error);
    test_set_rank(comm->rank);
    read_golden(&golden, argc > 1 ? argv[1] : "dev/golden/gpt2_tiny.bin");

    // The golden batch can be cut into B parts at most.
    for (int parts = 1; parts <= golden.B; parts++)
        if (golden.B % (parts * comm->world_size) == 0) check_golden(&golden, comm, parts);
    check_many_rows(&golden, comm);
    check_same_bits(&golden, comm);
    if (comm->world_size <= golden.B) check_overfit(&golden, comm);
    free_golden(&golden);
    int failed = test_finish();
    comm->free(comm);
    return failed;
}
