// backend/cuda/gelu.cu - GELU where no matrix product carries it: recomputation, and products whose
// epilogue the library does not have.
//
// Formulas: gelu and gelu_derivative in common.cuh.
#include "backend/cuda/common.cuh"

namespace {

constexpr int GELU_THREADS = 256;

// blockIdx.x walks a row in packs, blockIdx.y the rows.
dim3 grid_of(int N, int C) {
    unsigned blocks = (unsigned)ceil_div((size_t)C, GELU_THREADS * PACK);
    return dim3(blocks, N < 65535 ? N : 65535);
}

} // namespace

// Work: a thread a pack. Bytes: 2 N C floatX. FLOPs: about 12 N C. Bound: device memory bandwidth.
//   out, in (N, C)
template <bool ALIGNED> __global__ void gelu_forward_kernel(Matrix out, Matrix in, int N, int C) {
    int c = (blockIdx.x * GELU_THREADS + threadIdx.x) * PACK;
    if (c >= C) return;
    for (int r = blockIdx.y; r < N; r += gridDim.y) {
        float x[PACK];
        load<ALIGNED>(x, in.row(r) + c, C - c);
#pragma unroll
        for (int i = 0; i < PACK; i++) x[i] = gelu(x[i]);
        store<ALIGNED>(out.row(r) + c, x, C - c);
    }
}

void gelu_forward(Rows out, Rows in, int N, int C) {
    bool aligned = C % PACK == 0 && is_aligned16(out) && is_aligned16(in);
    launch(aligned ? gelu_forward_kernel<true> : gelu_forward_kernel<false>, grid_of(N, C),
           GELU_THREADS, 0, compute_stream(), native(out), native(in), N, C);
}

// Work: a thread a pack. Bytes: 3 N C floatX. FLOPs: about 20 N C. Bound: device memory bandwidth.
//   din, pre_gelu (N, C)
template <bool ALIGNED>
__global__ void gelu_backward_kernel(Matrix din, Matrix pre_gelu, int N, int C) {
    int c = (blockIdx.x * GELU_THREADS + threadIdx.x) * PACK;
    if (c >= C) return;
    for (int r = blockIdx.y; r < N; r += gridDim.y) {
        float d[PACK], x[PACK];
        load<ALIGNED>(d, din.row(r) + c, C - c);
        load<ALIGNED>(x, pre_gelu.row(r) + c, C - c);
#pragma unroll
        for (int i = 0; i < PACK; i++) d[i] *= gelu_derivative(x[i]);
        store<ALIGNED>(din.row(r) + c, d, C - c);
    }
}

void gelu_backward_inplace(Rows din, Rows pre_gelu, int N, int C) {
    bool aligned = C % PACK == 0 && is_aligned16(din) && is_aligned16(pre_gelu);
    launch(aligned ? gelu_backward_kernel<true> : gelu_backward_kernel<false>, grid_of(N, C),
           GELU_THREADS, 0, compute_stream(), native(din), native(pre_gelu), N, C);
}
