// backend/cuda/common.cuh - what every CUDA source shares: the element type, 16-byte accesses,
// reductions, gradients, streams and scratch.
//
// Kernels compute in float and touch memory in packs of PACK elements of floatX, 16 bytes. A row
// whose pointer, stride or length does not allow that goes through the same code element by element
// (ALIGNED = false): lanes own the same columns and sum in the same order, so the bits are the
// same.
#ifndef BACKEND_CUDA_COMMON_CUH
#define BACKEND_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdint.h>

#include "backend/cuda/launch.cuh"
#include "backend/ops.h"

// ---- element types ------------------------------------------------------------------------------

// floatX as CUDA knows it: same bits, other name.
#if defined(PRECISION_BF16)
using Native = __nv_bfloat16;
#elif defined(PRECISION_FP16)
using Native = __half;
#else
using Native = float;
#endif
static_assert(sizeof(Native) == sizeof(floatX), "floatX and its CUDA type are the same bits");

constexpr int PACK = 16 / sizeof(Native); // elements of floatX in 16 bytes

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }

template <class T> __device__ inline T narrow(float x);
template <> __device__ inline float narrow<float>(float x) { return x; }
template <> __device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <> __device__ inline __half narrow<__half>(float x) { return __float2half_rn(x); }

inline const Native* native(const floatX* p) { return reinterpret_cast<const Native*>(p); }
inline Native* native(floatX* p) { return reinterpret_cast<Native*>(p); }

// Rows, in CUDA's type.
struct Matrix {
    Native* ptr; // NULL: none
    size_t ld;
    __device__ Native* row(size_t r) const { return ptr + r * ld; }
};
inline Matrix native(Rows rows) { return {native(rows.ptr), rows.ld}; }

// ---- packs --------------------------------------------------------------------------------------

template <int BYTES> struct ChunkOf { using type = uint4; };
template <> struct ChunkOf<8> { using type = uint2; };

// x = p[0..N), in accesses of 16 bytes (8 where that is all there is); p aligned to them.
template <class T, int N> __device__ inline void load_pack(float (&x)[N], const T* p) {
    using Chunk = typename ChunkOf<N * sizeof(T)>::type;
    constexpr int CHUNKS = N * sizeof(T) / sizeof(Chunk);
    alignas(16) T raw[N];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        reinterpret_cast<Chunk*>(raw)[i] = reinterpret_cast<const Chunk*>(p)[i];
    }
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = widen(raw[i]);
}

template <class T, int N> __device__ inline void store_pack(T* p, const float (&x)[N]) {
    using Chunk = typename ChunkOf<N * sizeof(T)>::type;
    constexpr int CHUNKS = N * sizeof(T) / sizeof(Chunk);
    alignas(16) T raw[N];
#pragma unroll
    for (int i = 0; i < N; i++) raw[i] = narrow<T>(x[i]);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        reinterpret_cast<Chunk*>(p)[i] = reinterpret_cast<const Chunk*>(raw)[i];
    }
}

// The pack that begins at p, of which only `valid` elements exist; the others read as 0.
template <bool ALIGNED, class T, int N>
__device__ inline void load(float (&x)[N], const T* p, int valid) {
    if constexpr (ALIGNED) {
        load_pack(x, p);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = i < valid ? widen(p[i]) : 0.0f;
    }
}
template <bool ALIGNED, class T, int N>
__device__ inline void store(T* p, const float (&x)[N], int valid) {
    if constexpr (ALIGNED) {
        store_pack(p, x);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (i < valid) p[i] = narrow<T>(x[i]);
        }
    }
}

inline bool is_aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
inline bool is_aligned16(Rows rows) {
    return rows.ptr == nullptr || (is_aligned16(rows.ptr) && rows.ld % PACK == 0);
}

// ---- reductions ---------------------------------------------------------------------------------

constexpr int WARP = 32;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f; // exp(x) = exp2(LOG2E x)

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
__device__ inline double warp_sum(double x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// ---- gradients ----------------------------------------------------------------------------------

// Element i of a weight gradient, written the way its Grad says.
__device__ inline void grad_write(const Grad& grad, size_t i, float value) {
    if (!grad.is_fp32) {
        static_cast<Native*>(grad.ptr)[i] = narrow<Native>(value);
    } else if (grad.accumulate) {
        static_cast<float*>(grad.ptr)[i] += value;
    } else {
        static_cast<float*>(grad.ptr)[i] = value;
    }
}

// grad (cols) (=|+=) the sum of partials (num_partials, stride) over its rows, in an order that
// depends on num_partials alone. On the compute stream.
void sum_partials(Grad grad, const float* partials, size_t stride, int num_partials, int cols);

// dbias (cols) (=|+=) the column sums of dout (N, cols), by way of scratch.
void bias_backward(Grad dbias, Rows dout, int N, int cols);
size_t bias_backward_scratch_bytes(int N, int cols);

// ---- GELU ---------------------------------------------------------------------------------------

// 0.5 x (1 + tanh(u)) = x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3): one exponential and
// one division. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
__device__ inline float gelu_sigmoid(float x) {
    constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
    float u = SQRT_2_OVER_PI * x * (1.0f + 0.044715f * x * x);
    return __fdividef(1.0f, 1.0f + __expf(-2.0f * u));
}
__device__ inline float gelu(float x) { return x * gelu_sigmoid(x); }

// d gelu / dx = s + x s (1 - s) 2 du/dx with s = sigmoid(2u).
__device__ inline float gelu_derivative(float x) {
    constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
    float s = gelu_sigmoid(x);
    float du = SQRT_2_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
    return s + x * s * (1.0f - s) * 2.0f * du;
}

// din *= gelu'(pre_gelu), in place. (N, C)
void gelu_backward_inplace(Rows din, Rows pre_gelu, int N, int C);

// ---- matrix products without the library --------------------------------------------------------

// A matrix by its two strides: element (i, j) = ptr[i * row + j * col].
struct Strided {
    const Native* ptr;
    size_t row, col;
};

// What happens to a sum before it is stored; in this order.
struct Epilogue {
    const Native* bias; // (n) added, or NULL
    Matrix
        pre_gelu; // (m, n) with gelu: receives the sum; with gelu_backward: the factor's argument
    bool gelu;    // store gelu of the rounded sum
    bool gelu_backward; // multiply with gelu'(pre_gelu)
};

// out (m, n) = epilogue(a (m, k) * b (k, n)): for shapes for which the library has no algorithm.
// Out is a Grad, or floatX with `=`. Every sum runs over k in order.
void matmul_plain(Grad out, size_t ld, Strided a, Strided b, const Epilogue& epilogue, int m, int n,
                  int k);

// ---- streams, scratch, launches -----------------------------------------------------------------

cudaStream_t cuda_stream(stream_t stream);
cudaStream_t compute_stream(void);
int device_multiprocessors(void);

// Dynamic shared memory of a block: what needs no permission, and the most this GPU gives a kernel
// that has no static shared memory (99 KB: sm_86, sm_89, sm_120; 163: sm_80; 227: sm_90, sm_100).
constexpr size_t FREE_SHARED_BYTES = 48 * 1024;
size_t device_shared_bytes(void);
bool device_is_data_centre(void);
int device_generation(void); // the major number of its compute capability: 8 Ampere, 9 Hopper

// The operations' scratch, shared by all operations of the compute stream: valid until the next
// operation asks. Dies when ops_init planned less.
void* scratch_take(size_t bytes);

// Parts of ops_scratch_bytes, each beside the kernels that use it.
size_t layernorm_backward_scratch_bytes(int N, int C);
size_t attention_backward_scratch_bytes(int B, int T, int NH);
size_t embedding_backward_scratch_bytes(int N, int C);
constexpr size_t MATMUL_WORKSPACE_BYTES = (size_t)32 << 20; // NVIDIA's advice for sm_90

// Ends the run where not even one query or key of a head of HS elements fits in shared memory.
void attention_check(int HS, bool backward);

void matmul_init(void* workspace, bool tf32, int gelu_fusion);
void matmul_free(void);

// launch() with more dynamic shared memory than needs no permission.
template <class... P, class... A>
inline void launch_shared(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                          A&&... args) {
    if (shared_bytes > FREE_SHARED_BYTES) {
        CUDACHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)shared_bytes));
    }
    launch(kernel, grid, block, shared_bytes, compute_stream(), std::forward<A>(args)...);
}

#endif
