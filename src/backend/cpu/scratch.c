// backend/cpu/scratch.c - the scratch memory of the operations, and the strides of activations.
//
// One line of the plan holds everything: a part for each thread, then a part shared by all.
// Operations run one after another and hold nothing between calls, so the parts are as large as the
// largest need.
#include <omp.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/matmul.h"

enum { SCRATCH_ALIGN = 4096 }; // a page: threads do not share one

static struct {
    char* base;
    ScratchNeed parts; // bytes, rounded up
    int threads;
} scratch;

static ScratchNeed largest_need(const OpsShape* shape) {
    const ScratchNeed needs[] = {matmul_scratch(shape), attention_scratch(shape),
                                 layernorm_scratch(shape)};
    ScratchNeed largest = {0, 0};
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++) {
        largest.per_thread = max_size(largest.per_thread, needs[i].per_thread);
        largest.shared = max_size(largest.shared, needs[i].shared);
    }
    largest.per_thread = round_up(largest.per_thread, SCRATCH_ALIGN);
    largest.shared = round_up(largest.shared, SCRATCH_ALIGN);
    return largest;
}

size_t ops_scratch_bytes(const OpsShape* shape) {
    ScratchNeed need = largest_need(shape);
    return (size_t)shape->threads * need.per_thread + need.shared;
}

void ops_init(const OpsShape* shape, void* memory) {
    CHECK(omp_get_max_threads() <= shape->threads, "scratch for %d threads, but %d will run",
          shape->threads, omp_get_max_threads());
    scratch.base = memory;
    scratch.parts = largest_need(shape);
    scratch.threads = shape->threads;
    product_init();
}

void ops_free(void) {
    product_free();
    scratch.base = NULL;
}

const char* ops_description(void) { return product_description(); }

void* thread_scratch(void) {
    return scratch.base + (size_t)omp_get_thread_num() * scratch.parts.per_thread;
}

void* shared_scratch(void) {
    return scratch.base + (size_t)scratch.threads * scratch.parts.per_thread;
}

size_t shared_scratch_bytes(void) { return scratch.parts.shared; }

// Rows of 2304 or 3072 elements are multiples of 512 bytes to 4 KiB apart, so that walking down a
// column hits few cache sets: one cache line more cures it. Short fp32 products are the exception,
// measured: with padded rows the library does not copy its left matrix, which costs din a third.
size_t ops_row_stride(size_t N, size_t cols) {
    if (sizeof(floatX) == 4 && N <= 512) return cols;
    return cols + 64 / sizeof(floatX);
}
