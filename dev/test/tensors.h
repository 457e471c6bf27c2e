// dev/test/tensors.h - the tensors of one case on the device, with every other byte watched.
//
// A case lays its tensors out in one arena (one line of the memory plan), uploads them, calls the
// operation and downloads everything again. What the operation had no right to write - inputs, gaps
// between rows, guards between tensors - must come back bit for bit. Gaps, guards and outputs start
// as NaN, so that a read out of place or an element left unwritten shows in the result.
//
//   tensors_begin(&shape);
//   Tensor* x = tensor_new(TENSOR_IN, ELEM_X, rows, cols, ld);          // fill x->values
//   tensors_upload();
//   some_op(tensor_rows(y), tensor_rows(x), ...);
//   tensors_download();                                                 // look at y->values
//
// The operations get scratch of exactly the bytes they ask for, inside the arena like the rest.
#ifndef DEV_TEST_TENSORS_H
#define DEV_TEST_TENSORS_H

#include "backend/ops.h"
#include "testing.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { ELEM_FP32, ELEM_BF16, ELEM_FP16, ELEM_INT32, ELEM_FP64 } Elem;
Elem elem_of(DType dtype);
#define ELEM_X (elem_of(FLOATX_DTYPE))

typedef enum { TENSOR_IN, TENSOR_OUT, TENSOR_INOUT } TensorUse;

typedef struct {
    TensorUse use;
    Elem elem;
    size_t rows, cols, ld; // row r begins at element r * ld
    size_t offset;         // of its first byte in the arena
    double* values; // (rows, cols) dense. Before upload: what to put there, rounded by the upload.
                    // After download: what the device holds.
} Tensor;

// Takes the device and the arena; false: no usable device.
bool tensors_init(Error* error);
void tensors_free(void);

// One micro-batch of that size, for training, with this machine's threads.
OpsShape shape_of(int B, int T, int C, int NH, int Vp);

// Forgets the tensors of the case before. `shape` covers what the case calls.
void tensors_begin(const OpsShape* shape);
Tensor* tensor_new(TensorUse use, Elem elem, size_t rows, size_t cols, size_t ld);

// Elements of a written tensor of one row that are not to be touched: a gap. They should hold
// numbers where an operation works in place, since NaN may come out of it as it went in.
void tensor_protect(Tensor* tensor, size_t first, size_t count);

// Writes all values into the host's image of the arena; tensors_upload does so if it is not done.
void tensors_encode(void);
// Then the operations are ready (ops_init).
void tensors_upload(void);
// Ends the use of operations. A failed EXPECT if a byte outside the written tensors has changed.
void tensors_download(void);

void* tensor_ptr(const Tensor* tensor); // on the device
Rows tensor_rows(const Tensor* tensor); // of a floatX tensor
size_t elem_bytes(Elem elem);

// Raw bits, for what doubles do not tell apart: set after tensors_encode and before tensors_upload,
// read after tensors_download.
void tensor_set_bits(Tensor* tensor, size_t index, uint32_t bits);
uint32_t tensor_bits(const Tensor* tensor, size_t index,
                     Elem elem); // of the buffer read as `elem`s

#ifdef __cplusplus
}
#endif
#endif
