// dev/test/tensors.c - the arena: layout, upload, download, and the check of what must not change.
#include "tensors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ARENA_BYTES = 64 << 20,
    MAX_TENSORS = 80, // a fold of FOLD_MAX_SOURCES
    ALIGN = 256,      // what device_alloc promises on CUDA
    GUARD = 512,      // bytes before and behind each tensor
};

static struct {
    unsigned char* device;
    unsigned char *image, *result; // host copies: as uploaded, as downloaded
    unsigned char* may_change;     // one flag per byte
    size_t used;
    bool is_encoded;
    Tensor tensors[MAX_TENSORS];
    int num_tensors;
    OpsShape shape;
    Tensor* scratch; // of the operations; NULL: they want none
} arena;

Elem elem_of(DType dtype) {
    return dtype == DTYPE_FP32 ? ELEM_FP32 : dtype == DTYPE_BF16 ? ELEM_BF16 : ELEM_FP16;
}

size_t elem_bytes(Elem elem) {
    return elem == ELEM_FP64 ? 8 : elem == ELEM_BF16 || elem == ELEM_FP16 ? 2 : 4;
}

bool tensors_init(Error* error) {
    static Ledger ledger;
    DeviceOptions options = {0, 1, 0, true};
    if (!device_init(&options, error)) return false;
    ledger_add(&ledger, MEM_TRANSIENT, "test_arena", ARENA_BYTES);
    arena.device = (unsigned char*)device_alloc(&ledger, "test_arena");
    arena.image = (unsigned char*)checked_malloc(ARENA_BYTES);
    arena.result = (unsigned char*)checked_malloc(ARENA_BYTES);
    arena.may_change = (unsigned char*)checked_malloc(ARENA_BYTES);
    return true;
}

static void forget_tensors(void) {
    for (int i = 0; i < arena.num_tensors; i++) free(arena.tensors[i].values);
    arena.num_tensors = 0;
    arena.used = GUARD;
    arena.is_encoded = false;
    arena.scratch = NULL;
}

void tensors_free(void) {
    forget_tensors();
    free(arena.image);
    free(arena.result);
    free(arena.may_change);
    device_free_all();
}

OpsShape shape_of(int B, int T, int C, int NH, int Vp) {
    OpsShape shape;
    memset(&shape, 0, sizeof shape);
    shape.B = B;
    shape.T = T;
    shape.C = C;
    shape.NH = NH;
    shape.Vp = Vp;
    shape.threads = device_threads(0, 1);
    shape.logits_rows = B * T < 1024 ? B * T : 1024;
    shape.backward = true;
    return shape;
}

void tensors_begin(const OpsShape* shape) {
    forget_tensors();
    arena.shape = *shape;
    size_t scratch_bytes = ops_scratch_bytes(shape), words = ceil_div(scratch_bytes, 4);
    CHECK(scratch_bytes % 4 == 0, "scratch of %zu bytes", scratch_bytes);
    if (words > 0) arena.scratch = tensor_new(TENSOR_OUT, ELEM_FP32, 1, words, words);
}

// ---- tensors ------------------------------------------------------------------------------------

static unsigned char* at(unsigned char* base, const Tensor* tensor, size_t row, size_t col) {
    return base + tensor->offset + (row * tensor->ld + col) * elem_bytes(tensor->elem);
}

Tensor* tensor_new(TensorUse use, Elem elem, size_t rows, size_t cols, size_t ld) {
    CHECK(arena.num_tensors < MAX_TENSORS, "more than %d tensors in a case", (int)MAX_TENSORS);
    CHECK(ld >= cols && rows > 0 && cols > 0, "(%zu,%zu) with a stride of %zu", rows, cols, ld);
    Tensor* tensor = &arena.tensors[arena.num_tensors++];
    tensor->use = use;
    tensor->elem = elem;
    tensor->rows = rows;
    tensor->cols = cols;
    tensor->ld = ld;
    tensor->offset = arena.used;
    tensor->values = new_doubles(rows * cols);

    // The last row has no gap behind it, as in a buffer that ends with it.
    size_t end = tensor->offset + ((rows - 1) * ld + cols) * elem_bytes(elem) + GUARD;
    CHECK(end <= ARENA_BYTES, "a case of more than %d bytes", (int)ARENA_BYTES);
    end = min_size(round_up(end, ALIGN), ARENA_BYTES);
    memset(arena.may_change + tensor->offset, 0, end - tensor->offset);
    for (size_t r = 0; use != TENSOR_IN && r < rows; r++)
        memset(at(arena.may_change, tensor, r, 0), 1, cols * elem_bytes(elem));
    arena.used = end;
    return tensor;
}

void tensor_protect(Tensor* tensor, size_t first, size_t count) {
    CHECK(tensor->rows == 1 && first + count <= tensor->cols, "a gap inside one row");
    memset(at(arena.may_change, tensor, 0, first), 0, count * elem_bytes(tensor->elem));
}

void* tensor_ptr(const Tensor* tensor) { return arena.device + tensor->offset; }

Rows tensor_rows(const Tensor* tensor) {
    CHECK(tensor->elem == ELEM_X, "rows of a tensor that is not floatX");
    Rows rows = {(floatX*)tensor_ptr(tensor), tensor->ld};
    return rows;
}

void tensor_set_bits(Tensor* tensor, size_t index, uint32_t bits) {
    CHECK(arena.is_encoded, "bits set before the values");
    uint16_t half = (uint16_t)bits;
    unsigned char* p = at(arena.image, tensor, index / tensor->cols, index % tensor->cols);
    if (elem_bytes(tensor->elem) == 2)
        memcpy(p, &half, 2);
    else
        memcpy(p, &bits, 4);
}

uint32_t tensor_bits(const Tensor* tensor, size_t index, Elem elem) {
    CHECK(tensor->rows == 1, "bits of a vector");
    uint16_t half;
    uint32_t word;
    unsigned char* p = arena.result + tensor->offset + index * elem_bytes(elem);
    memcpy(&half, p, 2);
    if (elem_bytes(elem) == 2) return half;
    memcpy(&word, p, 4);
    return word;
}

// ---- the way to the device and back -------------------------------------------------------------

static void encode(unsigned char* to, Elem elem, double value) {
    float single = (float)value;
    uint16_t half = elem == ELEM_BF16 ? float_to_bf16_bits(single) : float_to_fp16_bits(single);
    int32_t integer = elem == ELEM_INT32 ? (int32_t)value : 0;
    if (elem == ELEM_FP64)
        memcpy(to, &value, 8);
    else if (elem == ELEM_FP32)
        memcpy(to, &single, 4);
    else if (elem == ELEM_INT32)
        memcpy(to, &integer, 4);
    else
        memcpy(to, &half, 2);
}

static double decode(const unsigned char* from, Elem elem) {
    double value;
    float single;
    uint16_t half;
    int32_t integer;
    switch (elem) {
    case ELEM_FP64:
        memcpy(&value, from, 8);
        return value;
    case ELEM_FP32:
        memcpy(&single, from, 4);
        return (double)single;
    case ELEM_INT32:
        memcpy(&integer, from, 4);
        return integer;
    case ELEM_BF16:
        memcpy(&half, from, 2);
        return (double)bf16_bits_to_float(half);
    case ELEM_FP16:
        memcpy(&half, from, 2);
        return (double)fp16_bits_to_float(half);
    }
    DIE("no element type %d", (int)elem);
}

static void decode_all(unsigned char* base) {
    for (int i = 0; i < arena.num_tensors; i++) {
        Tensor* t = &arena.tensors[i];
        if (t == arena.scratch) continue;
        for (size_t r = 0; r < t->rows; r++)
            for (size_t c = 0; c < t->cols; c++)
                t->values[r * t->cols + c] = decode(at(base, t, r, c), t->elem);
    }
}

// NaN in every type, with a payload that depends on the place: a NaN that is computed from one gap
// and written to another shows.
static void fill_with_nan(unsigned char* bytes, size_t count) {
    for (size_t i = 0; i < count / 2; i++) {
        uint32_t hash = (uint32_t)i * 2654435761u; // Knuth's multiplicative hash
        uint16_t word = (uint16_t)(0x7FC0u | (hash & 0x80000000u) >> 16 | (hash >> 25 & 0x3Fu));
        memcpy(bytes + 2 * i, &word, 2);
    }
}

void tensors_encode(void) {
    fill_with_nan(arena.image, arena.used);
    memset(arena.may_change, 0, GUARD);
    for (int i = 0; i < arena.num_tensors; i++) {
        Tensor* t = &arena.tensors[i];
        for (size_t r = 0; t->use != TENSOR_OUT && r < t->rows; r++)
            for (size_t c = 0; c < t->cols; c++) {
                double value = t->values[r * t->cols + c];
                if (!isnan(value)) encode(at(arena.image, t, r, c), t->elem, value);
            }
    }
    arena.is_encoded = true;
}

void tensors_upload(void) {
    if (!arena.is_encoded) tensors_encode();
    decode_all(arena.image);
    device_upload(arena.device, arena.image, arena.used);
    device_synchronize(); // for operations on the other stream
    ops_init(&arena.shape, arena.scratch ? tensor_ptr(arena.scratch) : NULL);
}

void tensors_download(void) {
    device_synchronize();
    device_download(arena.result, arena.device, arena.used);
    ops_free();
    decode_all(arena.result);
    for (size_t i = 0; i < arena.used; i++) {
        if (arena.may_change[i] || arena.image[i] == arena.result[i]) continue;
        int n = 0; // the tensor before which or in which the byte lies
        while (n + 1 < arena.num_tensors && arena.tensors[n + 1].offset <= i) n++;
        const Tensor* t = &arena.tensors[n];
        EXPECT(false, "byte %ld of tensor %d (%zu,%zu) with a stride of %zu was overwritten",
               (long)i - (long)t->offset, n, t->rows, t->cols, t->ld);
        return;
    }
}
