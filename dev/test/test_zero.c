// dev/test/test_zero.c - the engine with made-up gradients, against a plain loop over whole arrays.
//
// Run it under mpirun with any number of ranks ("messages" as argument: without shared memory). The
// reference of every case is computed by each rank alone: all micro-batches in order, no shards, no
// messages. Exact mode must give its bits for every stage, number of ranks and accumulation; memory
// and traffic must be those of the formulas.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/comm.h"
#include "core/fault.h"
#include "core/rng.h"
#include "gpt2/gpt2.h"
#include "testing.h"
#include "zero/partition.h"
#include "zero/zero.h"

enum { STEPS = 4, SKIPPED_STEP = 3, SEED = 7 };
static const char* const models[] = {
    "L=3,NH=3,C=48,V=257,T=32", // no tensor divides by 3 or 5
    "L=1,NH=1,C=4,V=3,T=1",     // smaller than one shard: most ranks own nothing
    "L=5,NH=1,C=20,V=64,T=9",   // more blocks than slots
};
enum { NUM_MODELS = sizeof(models) / sizeof(models[0]) };

static Comm* comm;
static bool shares_memory;
static const char* given_fault = ""; // ZERO_FAULT of the whole run
static ParamTable table;

static AdamW adamw_of_step(int step, double grad_norm) {
    const double clip = 0.5; // always active
    return (AdamW){.lr = 1e-2f,
                   .beta1 = 0.9f,
                   .beta2 = 0.95f,
                   .eps = 1e-8f,
                   .weight_decay = 0.1f,
                   .correction1 = 1 - powf(0.9f, (float)step),
                   .correction2 = 1 - powf(0.95f, (float)step),
                   .grad_scale = (float)fmin(1, clip / (grad_norm + 1e-6))};
}

// ---- made-up gradients --------------------------------------------------------------------------

// Part `part` of the gradient of one element in one micro-batch: noise, and a pull that depends on
// the weight, so that a wrong weight shows in the next step.
static float made_up(int step, int micro_batch, size_t canonical, int part, floatX weight) {
    const double u = rng_uniform((uint64_t)step, (uint64_t)(micro_batch * 2 + part), canonical);
    return (float)(u - 0.5) + 0.3f * to_float(weight);
}

static double made_up_loss(int step, int micro_batch) {
    return rng_uniform((uint64_t)step, 1000003, (uint64_t)micro_batch) * 3;
}

// What a kernel does: `=` or `+=` in the type that it is told.
static void write_element(Grad g, size_t at, float value, bool add_part) {
    if (g.is_fp32) {
        float* to = (float*)g.ptr + at;
        *to = g.accumulate || add_part ? *to + value : value;
    } else {
        CHECK(!g.accumulate && !add_part, "kernels do not add to floatX");
        ((floatX*)g.ptr)[at] = to_floatX(value);
    }
}

static void write_tensors(Grad g, const floatX* weights, int unit, int step, int micro_batch,
                          int part) {
    for (int t = 0; t < table.num_tensors; t++) {
        const TensorSpec* spec = &table.tensors[t];
        if (spec->unit != unit) continue;
        for (size_t i = 0; i < spec->elems; i++) {
            const size_t at = spec->unit_offset + i;
            write_element(g, at,
                          made_up(step, micro_batch, spec->canonical_offset + i, part, weights[at]),
                          part > 0);
        }
    }
}

// One micro-step as train/step.c runs it; gradients are made from the weights that gather gives.
static void run_micro_step(Zero* zero, int step, int micro) {
    const int L = table.num_units - 1, micro_batch = micro * comm->world_size + comm->rank;
    zero_begin_micro_step(zero, step, micro);
    const floatX* embedding = zero_gather(zero, 0);
    zero_prefetch(zero, 1);
    for (int l = 0; l < L; l++) {
        zero_gather(zero, 1 + l);
        zero_prefetch(zero, l + 1 < L ? 2 + l : -1);
        zero_release(zero, 1 + l);
    }
    const Grad dembedding = zero_grad_begin(zero, 0);
    write_tensors(dembedding, embedding, 0, step, micro_batch, 0);
    for (int l = L - 1; l >= 0; l--) {
        const floatX* block = zero_gather(zero, 1 + l);
        zero_prefetch(zero, l > 0 ? l : -1);
        write_tensors(zero_grad_begin(zero, 1 + l), block, 1 + l, step, micro_batch, 0);
        zero_release(zero, 1 + l);
        zero_grad_end(zero, 1 + l);
    }
    write_tensors(dembedding, embedding, 0, step, micro_batch, 1); // the tied tensor's other part
    zero_release(zero, 0);
    zero_grad_end(zero, 0);
}

// ---- reference ----------------------------------------------------------------------------------

// Whole arrays, unit after unit, padded for one rank.
typedef struct {
    Partition partition;
    float *master, *m, *v;
    floatX* weights;
    void *grads, *slot;
    double loss[STEPS + 1], norm[STEPS + 1];
} Reference;

static void reference_step(Reference* ref, int step, int num_micro_batches, DType accum_dtype) {
    const size_t a = dtype_bytes(accum_dtype);
    double sum = 0, loss = 0;
    for (int k = 0; k < num_micro_batches; k++) loss += made_up_loss(step, k);
    for (int u = 0; u < table.num_units; u++) {
        const Unit* unit = &ref->partition.units[u];
        const size_t elems = unit->padded_elems;
        char* grads = (char*)ref->grads + unit->full_offset * a;
        for (int k = 0; k < num_micro_batches; k++) {
            const Grad g = {ref->slot, u == 0 || FLOATX_DTYPE == DTYPE_FP32, false};
            memset(ref->slot, 0, elems * sizeof(float));
            for (int part = 0; part < (u == 0 ? 2 : 1); part++) {
                write_tensors(g, ref->weights + unit->full_offset, u, step, k, part);
            }
            if (u == 0) {
                convert(ref->slot, FLOATX_DTYPE, ref->slot, DTYPE_FP32, elems, STREAM_COMPUTE);
            }
            const void* source = ref->slot;
            fold(grads, accum_dtype, k > 0, &source, FLOATX_DTYPE, 1, elems, STREAM_COMPUTE);
        }
        double* partials = checked_calloc(elems / NORM_BLOCK, sizeof(double));
        norm_partials(partials, grads, accum_dtype, elems, unit->all.segments, unit->all.count,
                      STREAM_COMPUTE);
        for (size_t i = 0; i < elems / NORM_BLOCK; i++) sum += partials[i];
        free(partials);
    }
    ref->loss[step] = loss / num_micro_batches;
    ref->norm[step] = sqrt(sum);
    if (step == SKIPPED_STEP) return;
    const AdamW adamw = adamw_of_step(step, ref->norm[step]);
    for (int u = 0; u < table.num_units; u++) {
        const Unit* unit = &ref->partition.units[u];
        const size_t at = unit->full_offset;
        adamw_update(ref->weights + at, ref->master + at, ref->m + at, ref->v + at,
                     (char*)ref->grads + at * a, accum_dtype, unit->all.segments, unit->all.count,
                     &adamw);
    }
}

static Reference* reference_run(int num_micro_batches, DType accum_dtype) {
    Reference* ref = checked_calloc(1, sizeof(Reference));
    partition_init(&ref->partition, &table, 1, 0);
    const size_t elems = ref->partition.padded_elems;
    ref->weights = checked_calloc(elems, sizeof(floatX));
    ref->master = FLOATX_DTYPE == DTYPE_FP32 ? (float*)(void*)ref->weights
                                             : checked_calloc(elems, sizeof(float));
    ref->m = checked_calloc(elems, sizeof(float));
    ref->v = checked_calloc(elems, sizeof(float));
    ref->grads = checked_calloc(elems, sizeof(float));
    ref->slot = checked_calloc(elems, sizeof(float));
    for (int u = 0; u < table.num_units; u++) {
        const Unit* unit = &ref->partition.units[u];
        for (int i = 0; i < unit->all.count; i++) {
            const Segment* segment = &unit->all.segments[i];
            gpt2_init_range(ref->master + unit->full_offset + segment->offset, &table,
                            unit->all.pieces[i].tensor, 0, segment->elems, SEED);
        }
    }
    if (FLOATX_DTYPE != DTYPE_FP32) {
        convert(ref->weights, FLOATX_DTYPE, ref->master, DTYPE_FP32, elems, STREAM_COMPUTE);
    }
    for (int step = 1; step <= STEPS; step++) {
        reference_step(ref, step, num_micro_batches, accum_dtype);
    }
    return ref;
}

static void reference_free(Reference* ref) {
    if ((void*)ref->master != (void*)ref->weights) free(ref->master);
    free(ref->weights);
    free(ref->m);
    free(ref->v);
    free(ref->grads);
    free(ref->slot);
    partition_free(&ref->partition);
    free(ref);
}

// Element `first` of a tensor in one of the reference's arrays.
static size_t reference_at(const Reference* ref, int tensor) {
    const TensorSpec* spec = &table.tensors[tensor];
    return ref->partition.units[spec->unit].full_offset + spec->unit_offset;
}

static uint64_t reference_hash(const Reference* ref) {
    uint64_t sum = 0;
    for (int t = 0; t < table.num_tensors; t++) {
        const float* w = ref->master + reference_at(ref, t);
        for (size_t i = 0; i < table.tensors[t].elems; i++) {
            sum += mix64((table.tensors[t].canonical_offset + i) * 0x9E3779B97F4A7C15ull +
                         float_bits(w[i]));
        }
    }
    return sum;
}

// ---- an engine for one case ---------------------------------------------------------------------

typedef struct {
    ZeroConfig config;
    Ledger ledger;
    Zero* zero;
    double* losses; // (G) device
} Run;

static void run_open(Run* run, int stage, bool exact, DType accum_dtype, int G) {
    memset(run, 0, sizeof(*run));
    run->config = (ZeroConfig){.stage = stage,
                               .exact = exact,
                               .accum_dtype = accum_dtype,
                               .grad_accum_steps = G,
                               .world_size = comm->world_size,
                               .rank = comm->rank,
                               .training = true};
    zero_plan(&run->config, &table, &run->ledger);
    ledger_add(&run->ledger, MEM_TRANSIENT, "losses", sizeof(double) * (size_t)G);
    run->zero = zero_create(&run->config, &table, comm, &run->ledger);
    run->losses = device_alloc(&run->ledger, "losses");
    EXPECT(run->ledger.allocated_bytes == ledger_total_bytes(&run->ledger),
           "planned %zu bytes, allocated %zu", ledger_total_bytes(&run->ledger),
           run->ledger.allocated_bytes);
    zero_init_weights(run->zero, gpt2_init_range, SEED);
}

static void run_close(Run* run) {
    zero_destroy(run->zero);
    device_free_all();
}

static StepMessage run_step(Run* run, int step, double loss_scale) {
    const int G = run->config.grad_accum_steps;
    for (int micro = 0; micro < G; micro++) {
        run_micro_step(run->zero, step, micro);
        const double loss = made_up_loss(step, micro * comm->world_size + comm->rank);
        device_upload(run->losses + micro, &loss, sizeof(loss));
    }
    return zero_grad_norm(run->zero, run->losses, (size_t)(G * comm->world_size), loss_scale, 0);
}

static void finish_step(Run* run, int step, const StepMessage* message) {
    const AdamW adamw = adamw_of_step(step, message->grad_norm);
    if (step == SKIPPED_STEP) {
        zero_skip(run->zero);
    } else {
        zero_step(run->zero, &adamw);
    }
}

// ---- cases --------------------------------------------------------------------------------------

static void check_state(Run* run, const Reference* ref) {
    const float* const arrays[] = {ref->master, ref->m, ref->v};
    float* got = checked_malloc(table.num_params * sizeof(float));
    for (int kind = STATE_MASTER; kind <= STATE_V; kind++) {
        for (int t = 0; t < table.num_tensors; t++) {
            const size_t elems = table.tensors[t].elems;
            zero_read(run->zero, (StateKind)kind, t, 0, elems, comm->rank == 0 ? got : NULL);
            EXPECT(comm->rank != 0 ||
                       memcmp(got, arrays[kind] + reference_at(ref, t), elems * 4) == 0,
                   "state %d of %s differs", kind, table.tensors[t].name);
        }
    }
    free(got);
    EXPECT(zero_params_hash(run->zero) == reference_hash(ref), "params_hash");
}

static void check_weights(Run* run, const Reference* ref) {
    for (int u = 0; u < table.num_units; u++) {
        const Unit* unit = &ref->partition.units[u];
        const floatX* weights = zero_gather(run->zero, u);
        // All of the unit, padding too: it must be zero.
        EXPECT(memcmp(weights, ref->weights + unit->full_offset,
                      table.unit_elems[u] * sizeof(floatX)) == 0,
               "gathered weights of unit %d differ", u);
        zero_release(run->zero, u);
    }
    zero_drop_slots(run->zero);
}

static void test_exact(int stage, int G, DType accum_dtype, const Reference* ref,
                       const char* model) {
    Run run;
    run_open(&run, stage, true, accum_dtype, G);
    for (int step = 1; step <= STEPS; step++) {
        const StepMessage message = run_step(&run, step, 1);
        EXPECT(message.loss == ref->loss[step], "step %d: loss %.17g, reference %.17g", step,
               message.loss, ref->loss[step]);
        EXPECT(message.grad_norm == ref->norm[step], "step %d: norm %.17g, reference %.17g", step,
               message.grad_norm, ref->norm[step]);
        EXPECT(!message.nonfinite && message.nonfinite_rank == -1, "step %d: not finite", step);
        finish_step(&run, step, &message);
    }
    check_weights(&run, ref);
    check_state(&run, ref);
    run_close(&run);
    test_report("exact %s stage %d, %d ranks x %d micro-steps, accumulators %s", model, stage,
                comm->world_size, G, dtype_name(accum_dtype));
}

static void test_fast(int stage, int G, DType accum_dtype, const Reference* ref,
                      const char* model) {
    Run run;
    run_open(&run, stage, false, accum_dtype, G);
    // One rounding of floatX in another place, or of the accumulator's type in another order.
    const double tolerance = FLOATX_DTYPE == DTYPE_FP32 ? 1e-5 : 1e-2;
    for (int step = 1; step <= STEPS; step++) {
        const StepMessage message = run_step(&run, step, 1);
        EXPECT(message.loss == ref->loss[step], "step %d: loss %.17g, reference %.17g", step,
               message.loss, ref->loss[step]);
        EXPECT(fabs(message.grad_norm / ref->norm[step] - 1) < tolerance,
               "step %d: norm %.9g, reference %.9g", step, message.grad_norm, ref->norm[step]);
        finish_step(&run, step, &message);
    }
    run_close(&run);
    test_report("fast %s stage %d, %d ranks x %d micro-steps, accumulators %s", model, stage,
                comm->world_size, G, dtype_name(accum_dtype));
}

// State bytes of the plan and traffic of the run, by the formulas of zero/README.md.
static void test_formulas(int stage, bool exact, int G, DType accum_dtype, const char* model) {
    Run run;
    run_open(&run, stage, exact, accum_dtype, G);
    const size_t N = (size_t)comm->world_size, L = (size_t)table.num_units - 1;
    const size_t P = zero_padded_params(&table, comm->world_size);
    const size_t w = sizeof(floatX), a = dtype_bytes(accum_dtype);
    const size_t o = FLOATX_DTYPE == DTYPE_FP32 ? 8 : 12;
    EXPECT(ledger_kind_bytes(&run.ledger, MEM_WEIGHTS) == w * P / (stage == 3 ? N : 1), "weights");
    EXPECT(ledger_kind_bytes(&run.ledger, MEM_GRADS) == a * P / (stage >= 2 ? N : 1), "grads");
    EXPECT(ledger_kind_bytes(&run.ledger, MEM_OPTIMIZER) == o * P / (stage >= 1 ? N : 1),
           "optimizer");

    Partition partition;
    partition_init(&partition, &table, comm->world_size, comm->rank);
    const size_t E = partition.units[0].padded_elems, B = partition.units[1].padded_elems;
    const size_t slots = run.ledger.num_lines && ledger_find(&run.ledger, "weight_slots")
                             ? (ledger_find(&run.ledger, "weight_slots")->bytes / w) / B
                             : 0;
    const size_t reductions = !exact && stage < 2 ? 1 : (size_t)G;
    size_t elements = P * reductions, bytes = P * reductions * (!exact && stage < 2 ? a : w);
    if (stage == 0) elements += P, bytes += P * a;
    if (stage == 1 || stage == 2) elements += P, bytes += P * w;
    if (stage == 3) {
        const size_t gathered = E + (2 * L - slots) * B + (size_t)(G - 1) * 2 * (L - slots) * B;
        elements += gathered, bytes += gathered * w;
        EXPECT(elements <= 3 * (size_t)G * P, "more than 3 G P");
    }
    elements = elements * (N - 1) / N, bytes = bytes * (N - 1) / N;

    size_t planned_elements, planned_bytes;
    zero_traffic(&run.config, &table, &planned_elements, &planned_bytes);
    EXPECT(planned_elements == elements && planned_bytes == bytes,
           "plan sends %zu elements, %zu bytes; formula %zu, %zu", planned_elements, planned_bytes,
           elements, bytes);
    for (int step = 1; step < SKIPPED_STEP; step++) {
        const StepMessage message = run_step(&run, step, 1);
        finish_step(&run, step, &message);
        for (int u = 0; u < table.num_units; u++) { // an evaluation, which is not counted
            zero_gather(run.zero, u);
            zero_release(run.zero, u);
        }
        zero_drop_slots(run.zero);
        size_t sent_elements, sent_bytes;
        zero_take_counters(run.zero, &sent_elements, &sent_bytes);
        EXPECT(sent_elements == elements && sent_bytes == bytes,
               "step %d: sent %zu elements, %zu bytes; planned %zu, %zu", step, sent_elements,
               sent_bytes, elements, bytes);
    }
    partition_free(&partition);
    run_close(&run);
    test_report("formulas %s stage %d %s, %d ranks x %d, accumulators %s: %zu elements a step",
                model, stage, exact ? "exact" : "fast", comm->world_size, G,
                dtype_name(accum_dtype), elements);
}

// A NaN on one rank: the same decision on all, named after the tensor, nothing changed by the skip.
static void test_nan(int stage, bool exact) {
    char text[100];
    Error error = {0};
    snprintf(text, sizeof(text), "nan:rank=%d:step=2:tensor=h.0.mlp.c_fc.weight",
             comm->world_size - 1);
    setenv("ZERO_FAULT", text, 1);
    CHECK(fault_init(comm->rank, &error), "%s", error.text);
    Run run;
    run_open(&run, stage, exact, DTYPE_FP32, 2);
    StepMessage message = run_step(&run, 1, 1);
    EXPECT(!message.nonfinite, "step 1 is bad");
    finish_step(&run, 1, &message);
    const uint64_t before = zero_params_hash(run.zero);
    message = run_step(&run, 2, 1);
    EXPECT(message.nonfinite && !isfinite(message.grad_norm), "the NaN was not seen");
    EXPECT(strcmp(message.nonfinite_tensor, "h.0.mlp.c_fc.weight") == 0, "tensor '%s'",
           message.nonfinite_tensor);
    EXPECT(message.nonfinite_count == 1, "%zu elements", message.nonfinite_count);
    // Through shared memory the rank that made it is found, with messages its owner is named.
    EXPECT(shares_memory ? message.nonfinite_rank == comm->world_size - 1
                         : message.nonfinite_rank >= 0 && message.nonfinite_rank < comm->world_size,
           "rank %d", message.nonfinite_rank);
    zero_skip(run.zero);
    EXPECT(zero_params_hash(run.zero) == before, "a skipped step has changed weights");
    message = run_step(&run, 3, 1);
    EXPECT(!message.nonfinite, "the NaN has outlived its step");
    run_close(&run);
    setenv("ZERO_FAULT", given_fault, 1);
    CHECK(fault_init(comm->rank, &error), "%s", error.text);
    test_report("NaN on rank %d, stage %d %s", comm->world_size - 1, stage,
                exact ? "exact" : "fast");
}

// Loss scale and signals travel with the message.
static void test_message(int stage) {
    Run run;
    run_open(&run, stage, true, DTYPE_FP32, 1);
    const StepMessage plain = run_step(&run, 1, 1);
    zero_skip(run.zero);
    run_micro_step(run.zero, 1, 0);
    const double loss = comm->rank == 0 ? (double)NAN : 1;
    device_upload(run.losses, &loss, sizeof(loss));
    const StepMessage scaled =
        zero_grad_norm(run.zero, run.losses, 1, 1024, comm->rank == comm->world_size - 1 ? 15 : 0);
    zero_skip(run.zero);
    EXPECT(scaled.grad_norm == plain.grad_norm / 1024, "norm %g, scaled %g", plain.grad_norm,
           scaled.grad_norm);
    EXPECT(scaled.signal == 15 && plain.signal == 0, "signal %d", scaled.signal);
    EXPECT(scaled.nonfinite && scaled.nonfinite_rank == -1, "a bad loss is not bad");
    run_close(&run);
    test_report("message: loss scale, signal, bad loss, stage %d", stage);
}

// Values written in pieces are read back, published and hashed.
static void test_write(int stage) {
    Run run;
    run_open(&run, stage, true, DTYPE_FP32, 1);
    float* values = checked_malloc(table.num_params * sizeof(float));
    uint64_t hash = 0;
    for (size_t i = 0; i < table.num_params; i++) {
        values[i] = (float)(rng_uniform(SEED, 99, i) - 0.5);
        hash += mix64(i * 0x9E3779B97F4A7C15ull + float_bits(values[i]));
    }
    float* got = checked_malloc(table.num_params * sizeof(float));
    for (int t = 0; t < table.num_tensors; t++) {
        const TensorSpec* spec = &table.tensors[t];
        const float* of_tensor = values + spec->canonical_offset;
        const size_t half = spec->elems / 2;
        const bool is_root = comm->rank == 0;
        zero_write(run.zero, STATE_MASTER, t, 0, half, is_root ? of_tensor : NULL);
        zero_write(run.zero, STATE_MASTER, t, half, spec->elems - half,
                   is_root ? of_tensor + half : NULL);
        zero_write(run.zero, STATE_V, t, 0, spec->elems, is_root ? of_tensor : NULL);
        zero_read(run.zero, STATE_V, t, half, spec->elems - half, is_root ? got : NULL);
        EXPECT(!is_root || memcmp(got, of_tensor + half, (spec->elems - half) * 4) == 0, "v of %s",
               spec->name);
    }
    zero_publish(run.zero);
    EXPECT(zero_params_hash(run.zero) == hash, "hash of what was written");
    for (int t = 0; t < table.num_tensors; t++) {
        const TensorSpec* spec = &table.tensors[t];
        const floatX* weights = zero_gather(run.zero, spec->unit) + spec->unit_offset;
        size_t wrong = 0;
        for (size_t i = 0; i < spec->elems; i++) {
            const floatX expected = to_floatX(values[spec->canonical_offset + i]);
            wrong += memcmp(&weights[i], &expected, sizeof(floatX)) != 0;
        }
        EXPECT(wrong == 0, "%zu weights of %s are not those written", wrong, spec->name);
        zero_release(run.zero, spec->unit);
    }
    free(values);
    free(got);
    run_close(&run);
    test_report("write, read, publish, hash, stage %d", stage);
}

static void* (*real_alloc)(Comm*, Ledger*, const char*, CommMemory);

// The last rank is late between taking memory and what it does with it first.
static void* late_alloc(Comm* c, Ledger* ledger, const char* name, CommMemory memory) {
    void* taken = real_alloc(c, ledger, name, memory);
    if (c->rank == c->world_size - 1) usleep(20 * 1000);
    return taken;
}

// Without training nothing but zero_publish makes the ranks meet.
static void test_late_without_training(int stage) {
    Run run = {.config = {.stage = stage,
                          .exact = true,
                          .grad_accum_steps = 1,
                          .world_size = comm->world_size,
                          .rank = comm->rank}};
    zero_plan(&run.config, &table, &run.ledger);
    real_alloc = comm->alloc;
    comm->alloc = late_alloc;
    run.zero = zero_create(&run.config, &table, comm, &run.ledger);
    comm->alloc = real_alloc;
    zero_init_weights(run.zero, gpt2_init_range, SEED);
    float* values = checked_malloc(table.num_params * sizeof(float));
    for (int t = 0; t < table.num_tensors; t++) {
        const TensorSpec* spec = &table.tensors[t];
        const floatX* weights = zero_gather(run.zero, spec->unit) + spec->unit_offset;
        gpt2_init_range(values, &table, t, 0, spec->elems, SEED);
        size_t wrong = 0;
        for (size_t i = 0; i < spec->elems; i++)
            wrong += to_float(weights[i]) != to_float(to_floatX(values[i]));
        EXPECT(wrong == 0, "%zu weights of %s are not those written", wrong, spec->name);
        zero_release(run.zero, spec->unit);
    }
    free(values);
    run_close(&run);
    test_report("a late rank, without training, stage %d", stage);
}

// ---- main ---------------------------------------------------------------------------------------

static void test_model(const char* model) {
    GPT2Config config;
    Error error = {0};
    CHECK(gpt2_config_parse(&config, model, 257, NULL, &error), "%s", error.text);
    gpt2_param_table(&table, &config);
    const int num_types = FLOATX_DTYPE == DTYPE_FP32 ? 1 : 2;
    const DType types[] = {DTYPE_FP32, FLOATX_DTYPE};
    for (int i = 0; i < num_types; i++) {
        // 12 micro-batches where the ranks divide them, else one or two a rank.
        const int most = 12 % comm->world_size == 0 ? 12 / comm->world_size : 2;
        for (int G = 1; G <= most; G += most > 1 ? most - 1 : 1) {
            Reference* ref = reference_run(G * comm->world_size, types[i]);
            for (int stage = 0; stage <= 3; stage++) {
                test_exact(stage, G, types[i], ref, model);
                test_fast(stage, G, types[i], ref, model);
                test_formulas(stage, true, G, types[i], model);
                test_formulas(stage, false, G, types[i], model);
            }
            reference_free(ref);
        }
    }
    for (int stage = 0; stage <= 3; stage++) {
        test_nan(stage, true);
        test_nan(stage, false);
        test_message(stage);
        test_write(stage);
        test_late_without_training(stage);
    }
    param_table_free(&table);
}

int main(int argc, char** argv) {
    Error error = {0};
    const char* way = argc > 1 ? argv[1] : "";
    const CommOptions options = {.kind = strcmp(way, "messages") == 0 ? way : "auto"};
    comm = comm_open(&options, &error);
    CHECK(comm, "%s", error.text);
    shares_memory = comm->local_size == comm->world_size && strcmp(way, "messages") != 0;
    test_set_rank(comm->rank);
    if (getenv("ZERO_FAULT")) given_fault = strdup(getenv("ZERO_FAULT"));
    const DeviceOptions device = {
        .local_rank = comm->local_rank, .local_size = comm->local_size, .quiet_affinity = true};
    CHECK(fault_init(comm->rank, &error) && device_init(&device, &error), "%s", error.text);
    for (int i = 0; i < NUM_MODELS; i++) test_model(models[i]);
    const int result = test_finish();
    comm->free(comm);
    return result;
}
