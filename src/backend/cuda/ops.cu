// backend/cuda/ops.cu - set-up of the operations: scratch and library handles.
//
// Scratch is the matrix products' workspace and one region that the other operations of the compute
// stream use in turn: each needs it only until its own last kernel, and the stream keeps the order.
#include <cublasLt.h>
#include <stdio.h>

#include "backend/cuda/common.cuh"

namespace {

struct {
    char* scratch;
    size_t region_bytes;
} ops;

size_t region_bytes(const OpsShape* shape) {
    size_t bytes = 256; // find_nonfinite
    if (!shape->backward) return bytes;
    int N = shape->B * shape->T, C = shape->C;
    bytes = max_size(bytes, layernorm_backward_scratch_bytes(N, C));
    bytes = max_size(bytes, bias_backward_scratch_bytes(N, 4 * C));
    bytes = max_size(bytes, attention_backward_scratch_bytes(shape->B, shape->T, shape->NH));
    bytes = max_size(bytes, embedding_backward_scratch_bytes(N, C));
    return round_up(bytes, 256);
}

} // namespace

size_t ops_row_stride(size_t, size_t cols) { return cols; }

size_t ops_scratch_bytes(const OpsShape* shape) {
    return MATMUL_WORKSPACE_BYTES + region_bytes(shape);
}

void ops_init(const OpsShape* shape, void* scratch) {
    ops.scratch = static_cast<char*>(scratch);
    ops.region_bytes = region_bytes(shape);
    attention_check(shape->C / shape->NH, shape->backward);
    matmul_init(scratch, shape->tf32, shape->gelu_fusion);
}

void ops_free(void) {
    matmul_free();
    ops.scratch = nullptr;
    ops.region_bytes = 0;
}

const char* ops_description(void) {
    static char text[64];
    size_t version = cublasLtGetVersion();
    snprintf(text, sizeof text, "cuBLASLt %zu.%zu.%zu %s", version / 10000, version / 100 % 100,
             version % 100, dtype_name(FLOATX_DTYPE));
    return text;
}

void* scratch_take(size_t bytes) {
    CHECK(bytes <= ops.region_bytes, "scratch of %zu bytes, planned were %zu", bytes,
          ops.region_bytes);
    return ops.scratch + MATMUL_WORKSPACE_BYTES;
}
