// train/safetensors.h - the safetensors format: a strict reader by range and a header writer.
//
// A file is 8 bytes of header length (little-endian), a JSON header of that length, then the
// tensors' bytes. The reader believes nothing: header size, names, dtypes, shapes and offsets are
// checked with overflow in mind, and the tensors must tile the data without overlap, gap or
// duplicate before the first element is read. Tensor data is read in ranges, never whole. Files are
// little-endian, and so is every machine this program runs on.
//
// Source: github.com/huggingface/safetensors, "Format" in its README.
#ifndef TRAIN_SAFETENSORS_H
#define TRAIN_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "core/check.h"
#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SAFETENSORS_MAX_DIMS = 8,
    SAFETENSORS_MAX_HEADER = 32 << 20, // bytes; moments of 10,000 layers need 25 MB
};

typedef struct {
    char* name;
    char dtype[12]; // "F32", "F16", "BF16", ... as written
    int num_dims;
    uint64_t shape[SAFETENSORS_MAX_DIMS];
    uint64_t elems;
    uint64_t begin, end; // bytes, from the start of the data
} SafeTensor;

typedef struct {
    char* path;
    int fd;              // -1: parsed from memory
    uint64_t data_start; // file offset of the tensors' bytes
    SafeTensor* tensors; // (num_tensors) sorted by name
    size_t num_tensors;
} SafeTensors;

// Opens and checks everything but the elements themselves. False: one line naming the file, nothing
// to close.
bool safetensors_open(SafeTensors* file, const char* path, Error* error);
void safetensors_close(SafeTensors* file);

// The check behind safetensors_open, on a header in memory that describes data_bytes of data.
bool safetensors_parse(SafeTensors* file, const char* path, const char* header, size_t header_bytes,
                       uint64_t data_bytes, Error* error);

// The tensor of that name, or NULL.
const SafeTensor* safetensors_find(const SafeTensors* file, const char* name);

// Elements [first, first + count) of an F32, F16 or BF16 tensor as fp32.
bool safetensors_read(const SafeTensors* file, const SafeTensor* tensor, uint64_t first,
                      size_t count, float* out, Error* error);

// `count` elements of `dtype` at a byte offset of a file as fp32; errno tells why not, 0: the file
// ends. Shared with readers of other formats.
bool read_floats_at(int fd, uint64_t offset, DType dtype, size_t count, float* out);

// ---- writing ------------------------------------------------------------------------------------

// Text that grows. The header of a file of F32 tensors is written by begin, one add per tensor in
// the order of their bytes, end; `text` then holds the first `length` bytes of the file, header
// length included, padded with spaces to a multiple of 8. Free `text` with free().
typedef struct {
    char* text;
    size_t length, capacity;
    uint64_t data_bytes; // of the tensors added so far
} SafeTensorsHeader;

void safetensors_header_begin(SafeTensorsHeader* header);
void safetensors_header_add(SafeTensorsHeader* header, const char* name_prefix, const char* name,
                            int num_dims, const size_t* shape);
void safetensors_header_end(SafeTensorsHeader* header);

#ifdef __cplusplus
}
#endif
#endif
