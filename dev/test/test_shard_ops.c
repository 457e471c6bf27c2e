// dev/test/test_shard_ops.c - the operations on shards of gradients and optimizer state: AdamW,
// norm, search for non-finite values, fold, conversion.
//
// Where ops.h fixes the order of the arithmetic, results are compared bit for bit.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "oracle.h"
#include "tensors.h"
#include "testing.h"

static uint64_t next_seed = 1;

static Tensor* vector(TensorUse use, Elem elem, size_t count) {
    return tensor_new(use, elem, 1, count, count);
}
static Tensor* filled(TensorUse use, Elem elem, size_t count, double scale) {
    Tensor* tensor = vector(use, elem, count);
    fill_normal(tensor->values, count, scale, next_seed++);
    return tensor;
}
static void begin(void) {
    OpsShape shape = shape_of(1, 64, 64, 1, 64);
    tensors_begin(&shape);
}

// The type of a build's floatX, and fp32: what gradients and accumulators may be.
static const DType DTYPES[] = {DTYPE_FP32, FLOATX_DTYPE};
enum { NUM_DTYPES = FLOATX_DTYPE == DTYPE_FP32 ? 1 : 2 };

// Segments of a buffer with gaps between, on and off block and vector boundaries, one of them of
// one element, one longer than a block.
enum { BUFFER = 5003, NUM_SEGMENTS = 6 };
static const Segment SEGMENTS[NUM_SEGMENTS] = {{0, 1000, true},    {1024, 7, false},
                                               {1088, 2049, true}, {3200, 800, false},
                                               {4001, 1, true},    {4032, 971, true}};

// Gaps of what is read are NaN.
static void make_gaps(Tensor* tensor) {
    size_t end = 0;
    for (int s = 0; s <= NUM_SEGMENTS; s++) {
        size_t next = s < NUM_SEGMENTS ? SEGMENTS[s].offset : tensor->cols;
        if (tensor->use != TENSOR_IN) tensor_protect(tensor, end, next - end);
        for (size_t i = end; tensor->use == TENSOR_IN && i < next; i++)
            tensor->values[i] = (double)NAN;
        if (s < NUM_SEGMENTS) end = next + SEGMENTS[s].elems;
    }
}

// The elements of the segments, one after the other.
static size_t pack(double* out, const double* buffer) {
    size_t count = 0;
    for (int s = 0; s < NUM_SEGMENTS; s++)
        for (size_t i = 0; i < SEGMENTS[s].elems; i++)
            out[count++] = buffer[SEGMENTS[s].offset + i];
    return count;
}

// ---- AdamW --------------------------------------------------------------------------------------

static void test_adamw(DType grad_dtype, int step, bool weights_are_master) {
    AdamW adamw = {
        0.05f, 0.9f, 0.95f, 1e-8f, 0.1f, 1 - powf(0.9f, (float)step), 1 - powf(0.95f, (float)step),
        0.37f};
    begin();
    Tensor* weights = weights_are_master ? NULL : vector(TENSOR_INOUT, ELEM_X, BUFFER);
    Tensor *master = filled(TENSOR_INOUT, ELEM_FP32, BUFFER, 1),
           *m = filled(TENSOR_INOUT, ELEM_FP32, BUFFER, 0.1);
    Tensor *v = filled(TENSOR_INOUT, ELEM_FP32, BUFFER, 0.1),
           *grad = filled(TENSOR_IN, elem_of(grad_dtype), BUFFER, 1);
    for (size_t i = 0; i < BUFFER; i++) v->values[i] = step == 1 ? 0 : v->values[i] * v->values[i];
    for (size_t i = 0; step == 1 && i < BUFFER; i++) m->values[i] = 0;
    Tensor* all[] = {weights, master, m, v, grad};
    for (int i = weights ? 0 : 1; i < 5; i++) make_gaps(all[i]);
    tensors_upload();
    double *master_ref = new_doubles(BUFFER), *m_ref = new_doubles(BUFFER),
           *v_ref = new_doubles(BUFFER);
    memcpy(master_ref, master->values, BUFFER * sizeof(double));
    memcpy(m_ref, m->values, BUFFER * sizeof(double));
    memcpy(v_ref, v->values, BUFFER * sizeof(double));
    adamw_update((floatX*)tensor_ptr(weights ? weights : master), (float*)tensor_ptr(master),
                 (float*)tensor_ptr(m), (float*)tensor_ptr(v), tensor_ptr(grad), grad_dtype,
                 SEGMENTS, NUM_SEGMENTS, &adamw);
    tensors_download();

    for (int s = 0; s < NUM_SEGMENTS; s++) {
        size_t at = SEGMENTS[s].offset;
        oracle_adamw(master_ref + at, m_ref + at, v_ref + at, grad->values + at, SEGMENTS[s].elems,
                     SEGMENTS[s].decay, &adamw);
        for (size_t i = at; weights && i < at + SEGMENTS[s].elems; i++)
            EXPECT(weights->values[i] == (double)to_float(to_floatX((float)master->values[i])),
                   "weight %zu is %.9g, its master %.9g", i, weights->values[i], master->values[i]);
    }
    double *got = new_doubles(BUFFER), *expected = new_doubles(BUFFER);
    const char* const names[] = {"master", "m", "v"};
    double* const refs[] = {master_ref, m_ref, v_ref};
    for (int i = 0; i < 3; i++) {
        size_t count = pack(got, all[1 + i]->values);
        pack(expected, refs[i]);
        test_close(got, expected, count, tolerance(TOL_ADAMW), "oracle",
                   "adamw_update %s step %d grad %s%s", names[i], step, dtype_name(grad_dtype),
                   weights ? "" : ", weights are the masters");
    }
    free(master_ref), free(m_ref), free(v_ref), free(got), free(expected);
}

// ---- norm and non-finite values -----------------------------------------------------------------

static void test_norm_partials(DType dtype, stream_t stream) {
    enum { NUM_BLOCKS = (BUFFER + NORM_BLOCK - 1) / NORM_BLOCK };
    begin();
    Tensor *grad = filled(TENSOR_IN, elem_of(dtype), BUFFER, 1),
           *once = vector(TENSOR_OUT, ELEM_FP64, NUM_BLOCKS);
    Tensor *halves = vector(TENSOR_OUT, ELEM_FP64, NUM_BLOCKS),
           *none = vector(TENSOR_OUT, ELEM_FP64, NUM_BLOCKS);
    make_gaps(grad);
    tensors_upload();
    // The same elements as twice as many segments: the order of the sum may not depend on them.
    Segment cut[2 * NUM_SEGMENTS];
    int num_cut = 0;
    for (int s = 0; s < NUM_SEGMENTS; s++) {
        size_t first = SEGMENTS[s].elems / 3, rest = SEGMENTS[s].elems - first;
        Segment parts[2] = {{SEGMENTS[s].offset, first, true},
                            {SEGMENTS[s].offset + first, rest, true}};
        if (first > 0) cut[num_cut++] = parts[0];
        cut[num_cut++] = parts[1];
    }
    norm_partials((double*)tensor_ptr(once), tensor_ptr(grad), dtype, BUFFER, SEGMENTS,
                  NUM_SEGMENTS, stream);
    norm_partials((double*)tensor_ptr(halves), tensor_ptr(grad), dtype, BUFFER, cut, num_cut,
                  stream);
    norm_partials((double*)tensor_ptr(none), tensor_ptr(grad), dtype, BUFFER, SEGMENTS, 0, stream);
    tensors_download();
    double* expected = new_doubles(NUM_BLOCKS);
    for (int s = 0; s < NUM_SEGMENTS; s++)
        for (size_t i = SEGMENTS[s].offset; i < SEGMENTS[s].offset + SEGMENTS[s].elems; i++)
            expected[i / NORM_BLOCK] += grad->values[i] * grad->values[i];
    for (int b = 0; b < NUM_BLOCKS; b++) {
        EXPECT(once->values[b] == halves->values[b], "block %d depends on the cut into segments",
               b);
        EXPECT(none->values[b] == 0, "block %d without segments is %g", b, none->values[b]);
    }
    test_close(once->values, expected, NUM_BLOCKS, tolerance(TOL_FP64), "oracle",
               "norm_partials %s stream %d", dtype_name(dtype), (int)stream);
    free(expected);
}

// A block that stands somewhere else has the same bits.
static void test_norm_offset(DType dtype) {
    enum { BLOCKS = 3, ELEMS = BLOCKS * NORM_BLOCK };
    begin();
    Tensor *grad = filled(TENSOR_IN, elem_of(dtype), ELEMS, 1),
           *partials = vector(TENSOR_OUT, ELEM_FP64, BLOCKS);
    for (int i = 0; i < ELEMS; i++) grad->values[i] = grad->values[i % NORM_BLOCK];
    tensors_upload();
    Segment whole = {0, ELEMS, true};
    norm_partials((double*)tensor_ptr(partials), tensor_ptr(grad), dtype, ELEMS, &whole, 1,
                  STREAM_COMPUTE);
    tensors_download();
    for (int b = 1; b < BLOCKS; b++)
        EXPECT(partials->values[b] == partials->values[0], "block %d differs from an equal block 0",
               b);
    test_report("norm_partials of equal blocks %s", dtype_name(dtype));
}

static void test_find_nonfinite(DType dtype) {
    static const size_t inside[] = {3136, 4001,
                                    5002}; // last of a segment, the short one, the very last
    static const double bad[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    for (int num_bad = 0; num_bad <= 3; num_bad++) {
        begin();
        Tensor* grad = filled(TENSOR_IN, elem_of(dtype), BUFFER, 1);
        make_gaps(grad); // NaN, which must not count
        for (int i = 0; i < num_bad; i++) grad->values[inside[2 - i]] = bad[i];
        tensors_upload();
        size_t count = 99;
        long found = find_nonfinite(tensor_ptr(grad), dtype, SEGMENTS, NUM_SEGMENTS, &count);
        tensors_download();
        long expected = num_bad == 0 ? -1 : (long)inside[3 - num_bad];
        EXPECT(found == expected, "position %ld, not %ld", found, expected);
        EXPECT(count == (size_t)num_bad, "%zu found, not %d", count, num_bad);
        test_report("find_nonfinite %d of them, %s", num_bad, dtype_name(dtype));
    }
}

// ---- fold and conversion ------------------------------------------------------------------------

static double rounded(double value, DType dtype) {
    round_to(&value, 1, dtype);
    return value;
}

static void test_fold(DType acc_dtype, DType source_dtype, bool accumulate, int num_sources,
                      size_t elems, int own) { // own: the source that is acc itself, or -1
    begin();
    const void* pointers[FOLD_MAX_SOURCES];
    Tensor* sources[FOLD_MAX_SOURCES];
    Tensor* acc =
        filled(accumulate || own >= 0 ? TENSOR_INOUT : TENSOR_OUT, elem_of(acc_dtype), elems, 100);
    for (int s = 0; s < num_sources; s++) {
        sources[s] =
            s == own ? acc : filled(TENSOR_IN, elem_of(source_dtype), elems, s % 3 ? 1 : 30);
    }
    for (int s = 0; s < num_sources; s++) pointers[s] = tensor_ptr(sources[s]);
    tensors_upload();
    double* expected = new_doubles(elems);
    for (size_t i = 0; i < elems; i++) {
        float sum = accumulate ? (float)acc->values[i] : 0;
        for (int s = 0; s < num_sources; s++) {
            float term = (float)sources[s]->values[i];
            sum = (float)rounded((double)(s == 0 && !accumulate ? term : sum + term), acc_dtype);
        }
        expected[i] = (double)sum;
    }
    fold(tensor_ptr(acc), acc_dtype, accumulate, pointers, source_dtype, num_sources, elems,
         elems % 2 ? STREAM_COMPUTE : STREAM_COMM);
    tensors_download();
    for (size_t i = 0; i < elems; i++)
        if (!EXPECT(acc->values[i] == expected[i], "element %zu: %.9g, not %.9g", i, acc->values[i],
                    expected[i]))
            break;
    test_report("fold %d x %zu %s into %s %s%s, bit for bit", num_sources, elems,
                dtype_name(source_dtype), accumulate ? "+=" : "=", dtype_name(acc_dtype),
                own >= 0 ? " in place" : "");
    free(expected);
}

static void test_folds(void) {
    static const int nums[] = {1, 2, 3, 7, FOLD_MAX_SOURCES};
    static const size_t elems[] = {1, 17, 1000, 1024, 4099};
    for (int a = 0; a < NUM_DTYPES; a++)
        for (int s = 0; s < NUM_DTYPES; s++)
            for (int n = 0; n < 5; n++) {
                if (nums[n] > FOLD_MAX_SOURCES) continue; // HOSTILE
                test_fold(DTYPES[a], DTYPES[s], false, nums[n], elems[n], -1);
                test_fold(DTYPES[a], DTYPES[s], true, nums[n], elems[4 - n], -1);
                if (a != s) continue;
                test_fold(DTYPES[a], DTYPES[s], false, nums[n], elems[(n + 2) % 5], 0);
                test_fold(DTYPES[a], DTYPES[s], false, nums[n], elems[n], nums[n] / 2);
            }
}

// Rounding to nearest, ties to even, from its definition: the value in units of the last place.
static double nearest(double value, DType dtype) {
    int digits = dtype == DTYPE_FP32 ? 24 : dtype == DTYPE_BF16 ? 8 : 11;
    int lowest = dtype == DTYPE_FP16 ? -14 : -126; // exponent of the smallest normal number
    double above = dtype == DTYPE_FP16 ? 0x1p16 : 0x1p128;
    if (!isfinite(value) || value == 0) return value;
    int exponent = ilogb(value) > lowest ? ilogb(value) : lowest;
    double ulp = ldexp(1, exponent - digits + 1), result = rint(value / ulp) * ulp;
    return fabs(result) >= above ? copysign((double)INFINITY, value) : result;
}

// Values of interest as fp32 bits: zeros, denormals, ties up and down in bf16 and fp16 and their
// neighbours, the borders of the ranges, infinities, NaN whose payload lies in the low bits only.
static const uint32_t SPECIAL[] = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x00018000,
    0x007FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0x3F801000,
    0x3F803000, 0x3F801001, 0x3F800FFF, 0xBF803000, 0x33000000, 0x33000001, 0x33800000, 0x33C00000,
    0x387FC000, 0x387FE000, 0x387FFFFF, 0x38800000, 0x38801000, 0x33BFFFFF, 0x477FE000, 0x477FEFFF,
    0x477FF000, 0x47800000, 0xC77FF000, 0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x7F800000, 0xFF800000, 0x7F800001, 0x7F808000, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0x7FBFFFFF};
enum { NUM_SPECIAL = sizeof SPECIAL / sizeof SPECIAL[0] };

static void test_convert(DType to, DType from, size_t elems, bool in_place) {
    begin();
    Tensor* src = filled(in_place ? TENSOR_INOUT : TENSOR_IN, elem_of(from), elems, 1);
    Tensor* dst = in_place ? src : vector(TENSOR_OUT, elem_of(to), elems);
    tensors_encode();
    for (size_t i = 0; i < elems && i < NUM_SPECIAL; i++) {
        uint32_t bits = SPECIAL[i];
        if (from != DTYPE_FP32)
            bits = bits >> 16 | (bits & 0x8001); // keeps signs and low bits apart
        tensor_set_bits(src, i, bits);
    }
    tensors_upload();
    double* before = new_doubles(elems);
    memcpy(before, src->values, elems * sizeof(double));
    convert(tensor_ptr(dst), to, tensor_ptr(src), from, elems,
            elems % 2 ? STREAM_COMPUTE : STREAM_COMM);
    tensors_download();
    for (size_t i = 0; i < elems; i++) {
        uint32_t bits = tensor_bits(dst, i, elem_of(to));
        double got = to == DTYPE_FP32   ? (double)bits_float(bits)
                     : to == DTYPE_BF16 ? (double)bf16_bits_to_float((uint16_t)bits)
                                        : (double)fp16_bits_to_float((uint16_t)bits);
        double expected = nearest(before[i], to);
        bool same =
            isnan(expected) ? isnan(got) : got == expected && signbit(got) == signbit(expected);
        if (!EXPECT(same, "element %zu: %.17g became %.9g, not %.9g", i, before[i], got, expected))
            break;
    }
    test_report("convert %zu %s to %s%s", elems, dtype_name(from), dtype_name(to),
                in_place ? " in place" : "");
    free(before);
}

static void test_converts(void) {
    static const size_t elems[] = {1, 16, 1000, 4099, 1000003}; // several threads
    for (int t = 0; t < NUM_DTYPES; t++)
        for (int f = 0; f < NUM_DTYPES; f++)
            for (int e = 0; e < 5; e++) {
                test_convert(DTYPES[t], DTYPES[f], elems[e], false);
                if (dtype_bytes(DTYPES[t]) <= dtype_bytes(DTYPES[f]))
                    test_convert(DTYPES[t], DTYPES[f], elems[e], true);
            }
}

int main(void) {
    Error error = {0, ""};
    if (!tensors_init(&error)) error_exit(&error);
    for (int d = 0; d < NUM_DTYPES; d++) {
        test_adamw(DTYPES[d], 1, false);
        test_adamw(DTYPES[d], 10, false);
        test_norm_partials(DTYPES[d], STREAM_COMPUTE);
        test_norm_partials(DTYPES[d], STREAM_COMM);
        test_norm_offset(DTYPES[d]);
        test_find_nonfinite(DTYPES[d]);
    }
    if (FLOATX_DTYPE == DTYPE_FP32) test_adamw(DTYPE_FP32, 10, true);
    test_folds();
    test_converts();
    tensors_free();
    return test_finish();
}
