// cuda_runtime.h - NVIDIA's header of that name, for a C++17 compiler and no GPU.
//
// Found first on the include path, it gives a .cu file the CUDA language as plain C++: keywords,
// thread indices, shared memory, barriers, warp operations, atomics and intrinsics. The types and
// functions of the host API are those of NVIDIA's own cuda_runtime_api.h, so the compiler checks
// every signature; the sources beside this folder implement them.
#ifndef EMU_CUDA_RUNTIME_H
#define EMU_CUDA_RUNTIME_H

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- keywords -----------------------------------------------------------------------------------
// __global__, __device__, __host__ and __constant__ are already empty for a host compiler.

// Static shared memory is one static variable, since blocks run one after another. All of it lies
// in sections that sh.ld gathers, so that the runtime can fill it before every block. Each variable
// has a section of its own: gcc refuses inline and plain functions in the same one.
#undef __shared__
#define EMU_QUOTE_(x) #x
#define EMU_QUOTE(x)  EMU_QUOTE_(x)
#define __shared__    static __attribute__((section(".cudashared." EMU_QUOTE(__COUNTER__))))

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#undef __noinline__
#define __noinline__ __attribute__((noinline))

// ---- names that CUDA has at global scope --------------------------------------------------------

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
constexpr int warpSize = 32;

#include "emu.h"
#include "emu_math.h"
#include "emu_memory.h"
#include "emu_warp.h"

// ---- typed forms of the host API ----------------------------------------------------------------
// NVIDIA's cuda_runtime.h gives them to C++; cuda_runtime_api.h has the untyped ones only.

template <class T> inline cudaError_t cudaMalloc(T** p, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void**>(p), bytes);
}
template <class T> inline cudaError_t cudaMallocHost(T** p, size_t bytes, unsigned flags = 0) {
    return cudaHostAlloc(reinterpret_cast<void**>(p), bytes, flags);
}
template <class T> inline cudaError_t cudaHostAlloc(T** p, size_t bytes, unsigned flags) {
    return cudaHostAlloc(reinterpret_cast<void**>(p), bytes, flags);
}
template <class T>
inline cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <class T> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, T* kernel) {
    return cudaFuncGetAttributes(out, reinterpret_cast<const void*>(kernel));
}
template <class T>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, T* kernel,
                                                                 int threads, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks, reinterpret_cast<const void*>(kernel), threads, shared_bytes);
}

#endif
