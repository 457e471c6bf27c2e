// backend/cpu/reduce.c - passes over gradients: norm, search for non-finite numbers, fold,
// conversion.
//
// Each works on blocks of a fixed number of elements, one thread per block, so no result depends on
// the threads. The streams are one on the CPU.
#include "backend/cpu/cpu.h"
#include "backend/cpu/vector_math.h"

enum { BLOCK = 4096 };

// fp32 values of elements first .. first + n of a buffer of either type
static void load_block(float* out, const void* from, DType dtype, size_t first, size_t n) {
    if (dtype == DTYPE_FP32) {
        memcpy(out, (const float*)from + first, n * sizeof(float));
    } else if (dtype == DTYPE_BF16) {
        const uint16_t* bits = (const uint16_t*)from + first;
#pragma omp simd
        for (size_t i = 0; i < n; i++) out[i] = bf16_bits_to_float(bits[i]);
    } else {
        const uint16_t* bits = (const uint16_t*)from + first;
#pragma omp simd
        for (size_t i = 0; i < n; i++) out[i] = fp16_bits_to_float(bits[i]);
    }
}

// The same without a copy where the elements are fp32 already.
static const float* floats_at(const void* from, DType dtype, size_t first, size_t n,
                              float* buffer) {
    if (dtype == DTYPE_FP32) return (const float*)from + first;
    load_block(buffer, from, dtype, first, n);
    return buffer;
}

static void store_block(void* to, DType dtype, size_t first, const float* values, size_t n) {
    if (dtype == DTYPE_FP32) {
        float* out = (float*)to + first;
        if (out != values) memcpy(out, values, n * sizeof(float));
    } else if (dtype == DTYPE_BF16) {
        uint16_t* bits = (uint16_t*)to + first;
#pragma omp simd
        for (size_t i = 0; i < n; i++) bits[i] = float_to_bf16_bits(values[i]);
    } else {
        uint16_t* bits = (uint16_t*)to + first;
#pragma omp simd
        for (size_t i = 0; i < n; i++) bits[i] = float_to_fp16_bits(values[i]);
    }
}

static void round_block(float* values, DType dtype, size_t n) {
    if (dtype == DTYPE_BF16) {
#pragma omp simd
        for (size_t i = 0; i < n; i++) {
            values[i] = bf16_bits_to_float(float_to_bf16_bits(values[i]));
        }
    } else if (dtype == DTYPE_FP16) {
#pragma omp simd
        for (size_t i = 0; i < n; i++) {
            values[i] = fp16_bits_to_float(float_to_fp16_bits(values[i]));
        }
    }
}

// ---- norm ---------------------------------------------------------------------------------------

// In an order that depends on the build alone: x is a whole block at a multiple of 64 bytes.
static double sum_of_squares(const float* x) {
    x = __builtin_assume_aligned(x, 64);
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < NORM_BLOCK; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

// The first segment that ends after element `at`; segments stand in ascending order.
static int first_segment_after(const Segment* segments, int num_segments, size_t at) {
    int low = 0, high = num_segments;
    while (low < high) {
        int middle = (low + high) / 2;
        if (segments[middle].offset + segments[middle].elems > at) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

void norm_partials(double* partials, const void* grad, DType grad_dtype, size_t elems,
                   const Segment* segments, int num_segments, stream_t stream) {
    (void)stream;
#pragma omp parallel for schedule(static)
    for (size_t block = 0; block < ceil_div(elems, NORM_BLOCK); block++) {
        const size_t begin = block * NORM_BLOCK, end = min_size(begin + NORM_BLOCK, elems);
        _Alignas(64) float values[NORM_BLOCK];
        int s = first_segment_after(segments, num_segments, begin);
        const bool whole = s < num_segments && segments[s].offset <= begin &&
                           segments[s].offset + segments[s].elems >= begin + NORM_BLOCK;
        const float* in_place = (const float*)grad + begin;
        if (whole && grad_dtype == DTYPE_FP32 && (uintptr_t)in_place % 64 == 0) {
            partials[block] = sum_of_squares(in_place);
            continue;
        }
        if (!whole) memset(values, 0, sizeof values);
        for (; s < num_segments && segments[s].offset < end; s++) {
            const size_t from = max_size(begin, segments[s].offset);
            const size_t to = min_size(end, segments[s].offset + segments[s].elems);
            load_block(values + (from - begin), grad, grad_dtype, from, to - from);
        }
        partials[block] = sum_of_squares(values);
    }
}

long find_nonfinite(const void* grad, DType grad_dtype, const Segment* segments, int num_segments,
                    size_t* count) {
    long first_found = -1;
    *count = 0;
    for (int s = 0; s < num_segments; s++) {
        for (size_t first = 0; first < segments[s].elems; first += BLOCK) {
            const size_t n = min_size(BLOCK, segments[s].elems - first);
            float values[BLOCK];
            load_block(values, grad, grad_dtype, segments[s].offset + first, n);
            for (size_t i = 0; i < n; i++) {
                if (isfinite(values[i])) continue;
                const long at = (long)(segments[s].offset + first + i);
                if (first_found < 0 || at < first_found) first_found = at;
                ++*count;
            }
        }
    }
    return first_found;
}

// ---- fold and conversion ------------------------------------------------------------------------

void fold(void* acc, DType acc_dtype, bool accumulate, const void* const* sources,
          DType source_dtype, int num_sources, size_t elems, stream_t stream) {
    (void)stream;
    CHECK(num_sources >= 1 && num_sources <= FOLD_MAX_SOURCES, "%d sources", num_sources);
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < elems; first += BLOCK) {
        const size_t n = min_size(BLOCK, elems - first);
        float sum[BLOCK], term[BLOCK];
        const void* start = accumulate ? acc : sources[0];
        const DType start_dtype = accumulate ? acc_dtype : source_dtype;
        const float* so_far = sum;
        if (acc_dtype == DTYPE_FP32) {
            so_far = floats_at(start, start_dtype, first, n, sum);
        } else {
            load_block(sum, start, start_dtype, first, n);
        }
        for (int s = accumulate ? 0 : 1; s < num_sources; s++) {
            const float* next = floats_at(sources[s], source_dtype, first, n, term);
            if (acc_dtype != DTYPE_FP32) round_block(sum, acc_dtype, n); // what acc would hold
#pragma omp simd
            for (size_t i = 0; i < n; i++) sum[i] = so_far[i] + next[i];
            so_far = sum;
        }
        store_block(acc, acc_dtype, first, so_far, n);
    }
}

// In place and to a narrower type, elements [a, 2a) are written where [a/2, a) were read: ranges
// that double, one after another, each by all threads.
void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t elems,
             stream_t stream) {
    (void)stream;
    const bool in_place = dst == src && dst_dtype != src_dtype;
#pragma omp parallel
    for (size_t from = 0, to = in_place ? BLOCK : elems; from < elems; from = to, to *= 2) {
        const size_t end = min_size(to, elems);
#pragma omp for schedule(static)
        for (size_t first = from; first < end; first += BLOCK) {
            const size_t n = min_size(BLOCK, elems - first);
            float buffer[BLOCK];
            const float* values = buffer;
            if (in_place) { // the first block is written over itself
                load_block(buffer, src, src_dtype, first, n);
            } else {
                values = floats_at(src, src_dtype, first, n, buffer);
            }
            store_block(dst, dst_dtype, first, values, n);
        }
    }
}
