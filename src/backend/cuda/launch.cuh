// backend/cuda/launch.cuh - what differs between nvcc and the CPU build of a CUDA source.
//
// Every .cu of the project compiles with nvcc and, with dev/cuda_on_cpu/include found first, with a
// plain C++17 compiler. Three rules follow for kernels and their callers:
//   - a kernel is started with launch(), never with <<< >>>;
//   - dynamic shared memory is declared with DYNAMIC_SHARED, never with extern __shared__;
//   - PTX stands in tensor_core.cuh only.
#ifndef BACKEND_CUDA_LAUNCH_CUH
#define BACKEND_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>
#include <stddef.h>
#include <utility>

#include "core/check.h"

// Ends the run with the CUDA error's name and text when a runtime call fails.
#define CUDACHECK(call)                                                                            \
    do {                                                                                           \
        cudaError_t cuda_error_ = (call);                                                          \
        if (cuda_error_ != cudaSuccess) {                                                          \
            DIE("%s: %s (%s)", #call, cudaGetErrorString(cuda_error_),                             \
                cudaGetErrorName(cuda_error_));                                                    \
        }                                                                                          \
    } while (0)

#ifdef __CUDACC__

// 128 bytes: the largest alignment any kernel asks for (a swizzled tile of 128-byte rows).
#define DYNAMIC_SHARED(T, name)                                                                    \
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes_[];                        \
    T* name = reinterpret_cast<T*>(dynamic_shared_bytes_)

template <class... P, class... A>
inline cudaError_t launch_unchecked(void (*kernel)(P...), dim3 grid, dim3 block,
                                    size_t shared_bytes, cudaStream_t stream, A&&... args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, std::forward<A>(args)...);
}

#else

#define DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(emu::dyn_shared())

template <class... P, class... A>
inline cudaError_t launch_unchecked(void (*kernel)(P...), dim3 grid, dim3 block,
                                    size_t shared_bytes, cudaStream_t stream, A&&... args) {
    return emu::launch(kernel, grid, block, shared_bytes, stream, std::forward<A>(args)...);
}

#endif

// kernel<<<grid, block, shared_bytes, stream>>>(args...), and dies when the launch is refused. The
// arguments are converted to the kernel's parameter types; a template kernel is named in full:
// launch(attention_forward_kernel<64>, grid, block, bytes, stream, out, qkv, T).
// With DEBUG the host waits for the kernel, so that an error inside it is named here.
template <class... P, class... A>
inline void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, A&&... args) {
    CUDACHECK(
        launch_unchecked(kernel, grid, block, shared_bytes, stream, std::forward<A>(args)...));
#ifdef DEBUG
    CUDACHECK(cudaStreamSynchronize(stream));
#endif
}

#endif
