// dev/test/kernel_accesses.cu - bytes that the memory-bound kernels read and write in device
// memory, against the least that their operation needs.
//
// The kernels under test are compiled with clang's -fsanitize=thread, which calls __tsan_readN or
// __tsan_writeN before every load and store; these calls are answered here, where those into device
// memory are added up. Everything else is compiled as usual. The count knows no caches: a value
// read twice counts twice. The compiler turns some copies into calls of memcpy, memmove and memset,
// which the linker leads here (--wrap). test_kernels.py builds and runs this.
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/ops.h"

// ---- counting -----------------------------------------------------------------------------------

static struct {
    const char *begin, *end; // device memory
    size_t read, written;
} device_memory;

static void count_read(const void* p, size_t bytes) {
    if (p >= device_memory.begin && p < device_memory.end) device_memory.read += bytes;
}
static void count_write(const void* p, size_t bytes) {
    if (p >= device_memory.begin && p < device_memory.end) device_memory.written += bytes;
}

#define HOOKS(bytes)                                                                               \
    void __tsan_read##bytes(void* p) { count_read(p, bytes); }                                     \
    void __tsan_write##bytes(void* p) { count_write(p, bytes); }                                   \
    void __tsan_unaligned_read##bytes(void* p) { count_read(p, bytes); }                           \
    void __tsan_unaligned_write##bytes(void* p) { count_write(p, bytes); }
extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_init(void) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
// The atomics of find_nonfinite, which is not measured.
uint64_t __tsan_atomic64_load(const volatile uint64_t* p, int) { return *p; }
uint64_t __tsan_atomic64_compare_exchange_val(volatile uint64_t* p, uint64_t expected,
                                              uint64_t value, int, int) {
    uint64_t old = *p;
    if (old == expected) *p = value;
    return old;
}
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
    count_read(from, bytes);
    count_write(to, bytes);
    return __real_memcpy(to, from, bytes);
}
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
    count_read(from, bytes);
    count_write(to, bytes);
    return __real_memmove(to, from, bytes);
}
void* __real_memset(void* to, int byte, size_t bytes);
void* __wrap_memset(void* to, int byte, size_t bytes) {
    count_write(to, bytes);
    return __real_memset(to, byte, bytes);
}
}

// ---- device memory ------------------------------------------------------------------------------

static char* next_free;

static void* take(size_t bytes) {
    void* p = next_free;
    next_free += round_up(bytes, 256);
    CHECK(next_free <= device_memory.end, "the arena is too small");
    return p;
}
static Rows take_rows(int N, int cols) {
    return {(floatX*)take((size_t)N * cols * sizeof(floatX)), (size_t)cols};
}
static floatX* take_vector(int n) { return (floatX*)take(n * sizeof(floatX)); }
static float* take_floats(size_t n) { return (float*)take(n * sizeof(float)); }

// ---- cases --------------------------------------------------------------------------------------

static int num_passed, num_failed;

// Ends a case: what was counted since the last call against the least, and how much more is
// allowed.
static void report(const char* name, double least_read, double least_written, double limit) {
    device_synchronize();
    double counted = (double)(device_memory.read + device_memory.written);
    double least = least_read + least_written;
    bool is_ok = counted <= limit * least && counted >= least;
    printf("%s %-44s read %9zu (least %9.0f), written %9zu (least %9.0f): %.3f of %.2f\n",
           is_ok ? "ok    " : "FAILED", name, device_memory.read, least_read, device_memory.written,
           least_written, counted / least, limit);
    is_ok ? num_passed++ : num_failed++;
    device_memory.read = device_memory.written = 0;
}

static const Rows NONE = {NULL, 0};
static const double X = sizeof(floatX);

static void measure_layernorm(int N, int C) {
    Rows out = take_rows(N, C), residual = take_rows(N, C), a = take_rows(N, C),
         b = take_rows(N, C);
    floatX *weight = take_vector(C), *bias = take_vector(C);
    float *mean = take_floats(N), *rstd = take_floats(N);
    double rows = (double)N * C * X;

    layernorm_forward(out, mean, rstd, NONE, a, NONE, weight, bias, N, C);
    report("layernorm_forward", rows + 2 * C * X, rows + 8.0 * N, 1.1);
    layernorm_forward(out, mean, rstd, residual, a, b, weight, bias, N, C);
    report("residual + layernorm_forward", 2 * rows + 2 * C * X, 2 * rows + 8.0 * N, 1.1);

    Grad dweight = {take(C * sizeof(float)), true, false},
         dbias = {take(C * sizeof(float)), true, false};
    layernorm_backward(a, a, dweight, dbias, out, residual, mean, rstd, weight, N, C);
    report("layernorm_backward", 3 * rows + 8.0 * N + C * X, rows + 8.0 * C, 1.1);
}

static void measure_bias(int N, int C, int OC) {
    Rows in = take_rows(N, C), dout = take_rows(N, OC);
    Grad dweight = {take((size_t)C * OC * sizeof(float)), true, true};
    Grad dbias = {take(OC * sizeof(float)), true, true};
    matmul_backward_weight(dweight, dbias, in, dout, WEIGHT_IN_OUT, N, C,
                           OC); // product not counted
    report("bias gradient, added", (double)N * OC * X + 4.0 * OC, 4.0 * OC, 1.1);
}

static void measure_adamw(size_t elems) {
    size_t first = elems / 3; // neither segment begins and ends on a pack's edge
    Segment segments[] = {{0, first, true}, {first, elems - first, false}};
    AdamW adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 1.0f};
    floatX* weights = (floatX*)take(elems * sizeof(floatX));
    float *master = take_floats(elems), *m = take_floats(elems), *v = take_floats(elems);
    float* grad = take_floats(elems);
    bool has_master = sizeof(floatX) != sizeof(float);
    adamw_update(weights, has_master ? master : (float*)weights, m, v, grad, DTYPE_FP32, segments,
                 2, &adamw);
    report("adamw_update", 16.0 * elems, (has_master ? 12 + X : 12) * (double)elems, 1.1);
}

// At most two reads and one write of a row; 5 % for losses and targets (read by every thread).
static void measure_classifier(int N, int V, int Vp) {
    Rows logits = take_rows(N, Vp);
    int* targets = (int*)take(N * sizeof(int));
    float* losses = take_floats(N);
    double rows = (double)N * Vp * X;
    classifier_loss(losses, logits, targets, N, V, Vp, 1.0f / N, true);
    report("classifier_loss with dlogits", 2 * (double)N * V * X, rows, 1.05);
    classifier_loss(losses, logits, targets, N, V, Vp, 0.0f, false);
    report("classifier_loss", (double)N * V * X, 4.0 * N, 1.05);
}

int main(void) {
    constexpr size_t ARENA_BYTES = (size_t)128 << 20;
    Error error = {};
    DeviceOptions options = {0, 1, 0, true};
    if (!device_init(&options, &error)) error_exit(&error);
    Ledger ledger = {};
    ledger_add(&ledger, MEM_TRANSIENT, "arena", ARENA_BYTES);
    next_free = (char*)device_alloc(&ledger, "arena");
    device_memory.begin = next_free;
    device_memory.end = next_free + ARENA_BYTES;
    OpsShape shape = {};
    shape.B = 1;
    shape.T = 1024;
    shape.C = 768;
    shape.NH = 12;
    shape.Vp = 50304;
    shape.backward = true;
    ops_init(&shape, take(ops_scratch_bytes(&shape)));
    device_memory.read = device_memory.written = 0;

    measure_layernorm(1024, 768);
    measure_bias(1024, 16, 3072);
    measure_adamw(100000);
    measure_classifier(4, 50257, 50304);

    ops_free();
    device_free_all();
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0;
}
