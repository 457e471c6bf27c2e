// tests/bugs.cu - programs with one bug each, and their repaired twins.
//
// `bugs list` prints a line for each: name, then MODE=TEXT for every mode that must show the bug.
// TEXT is part of the report expected; "differs" stands for a result that is not the repaired
// program's. `bugs NAME` runs one, `bugs NAME fixed` its twin, `bugs fixed` all twins, in which no
// mode may report anything. test.sh knows how each mode is built and run.
#include "backend/cuda/tensor_core.cuh"
#include "test.cuh"

#include <cublasLt.h>
#include <string.h>

// ---- the stage all bugs play on -----------------------------------------------------------------

constexpr int N = 1024;

struct Stage {
    Device<float> in{random_vector<float>(N)};
    Device<float> out{N}, scratch{N};
    float* pinned = nullptr; // N floats
    cudaStream_t first, second;
    cudaEvent_t event;

    Stage() {
        out.set_zero();
        CUDACHECK(cudaMallocHost(&pinned, N * sizeof(float)));
        for (int i = 0; i < N; i++) pinned[i] = 0;
        CUDACHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
        CUDACHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
        CUDACHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        CUDACHECK(cudaDeviceSynchronize());
    }
    ~Stage() {
        CUDACHECK(cudaEventDestroy(event));
        CUDACHECK(cudaStreamDestroy(first));
        CUDACHECK(cudaStreamDestroy(second));
        CUDACHECK(cudaFreeHost(pinned));
    }
    void wait(cudaStream_t waiting, cudaStream_t awaited) {
        CUDACHECK(cudaEventRecord(event, awaited));
        CUDACHECK(cudaStreamWaitEvent(waiting, event, 0));
    }
    void fetch() { // out into pinned, in order on the first stream
        CUDACHECK(cudaMemcpyAsync(pinned, out.p, N * sizeof(float), cudaMemcpyDeviceToHost, first));
    }
};

template <class... P, class... A> void run(Stage& s, void (*kernel)(P...), int threads, A... a) {
    launch(kernel, 1, threads, 0, s.first, a...);
}

// ---- memory -------------------------------------------------------------------------------------

template <bool FIXED> __global__ void past_end_kernel(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (!FIXED || i < n) out[i] = in[i];
}
template <bool FIXED> void write_past_end(Stage& s) {
    Device<float> small(120);
    launch(past_end_kernel<FIXED>, 1, 128, 0, s.first, small.p, s.in.p, 120);
    CUDACHECK(cudaStreamSynchronize(s.first));
}
template <bool FIXED> void read_past_end(Stage& s) {
    Device<float> small(std::vector<float>(120, 1.0f));
    launch(past_end_kernel<FIXED>, 1, 128, 0, s.first, s.out.p, small.p, 120);
    CUDACHECK(cudaStreamSynchronize(s.first));
}

struct Wrapped { // pointers inside a struct are not seen when a kernel is launched
    const float* p;
};
__global__ void copy_wrapped_kernel(float* out, Wrapped in) {
    out[threadIdx.x] = in.p[threadIdx.x];
}
template <bool FIXED> void use_after_free(Stage& s) {
    Device<float> freed(std::vector<float>(64, 1.0f));
    float* p = freed.p;
    if (!FIXED) {
        CUDACHECK(cudaFree(freed.p));
        freed.p = nullptr;
    }
    run(s, past_end_kernel<true>, 64, s.out.p, static_cast<const float*>(p), 64);
    CUDACHECK(cudaStreamSynchronize(s.first));
}
template <bool FIXED> void use_after_free_in_struct(Stage& s) {
    Device<float> freed(std::vector<float>(64, 1.0f));
    Wrapped w = {freed.p};
    if (!FIXED) {
        CUDACHECK(cudaFree(freed.p));
        freed.p = nullptr;
    }
    run(s, copy_wrapped_kernel, 64, s.out.p, w);
    CUDACHECK(cudaStreamSynchronize(s.first));
}
template <bool FIXED> void double_free(Stage&) {
    float* p;
    CUDACHECK(cudaMalloc(&p, 64));
    CUDACHECK(cudaFree(p));
    if (!FIXED) CUDACHECK(cudaFree(p));
}
template <bool FIXED> void device_memory_leak(Stage&) {
    float* p;
    CUDACHECK(cudaMalloc(&p, 64));
    if (FIXED) CUDACHECK(cudaFree(p));
    p = nullptr;
}
template <bool FIXED> void host_reads_device_memory(Stage& s) {
    if (FIXED) {
        s.fetch();
        CUDACHECK(cudaStreamSynchronize(s.first));
        printf("read %g\n", s.pinned[3]);
    } else {
        printf("read %g\n", s.out.p[3]);
    }
}
template <bool FIXED> void host_pointer_to_kernel(Stage& s) {
    std::vector<float> host(64, 1.0f);
    const float* in = FIXED ? s.in.p : host.data();
    run(s, past_end_kernel<true>, 64, s.out.p, in, 64);
}
template <bool FIXED> void copy_past_end(Stage& s) {
    std::vector<float> host(N + 1, 1.0f);
    size_t bytes = (FIXED ? N : N + 1) * sizeof(float);
    CUDACHECK(cudaMemcpy(s.out.p, host.data(), bytes, cudaMemcpyHostToDevice));
}
template <bool FIXED> void copy_of_wrong_kind(Stage& s) {
    cudaMemcpyKind kind = FIXED ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
    CUDACHECK(cudaMemcpyAsync(s.out.p, s.in.p, 64, kind, s.first));
}
template <bool FIXED> __global__ void misaligned_kernel(float* out, const float* in) {
    float4 v = *reinterpret_cast<const float4*>(in + 4 * threadIdx.x);
    *reinterpret_cast<float4*>(out + 4 * threadIdx.x + (FIXED ? 0 : 1)) = v;
}
template <bool FIXED> void misaligned_vector_store(Stage& s) {
    run(s, misaligned_kernel<FIXED>, 16, s.out.p, s.in.p);
}
template <bool FIXED> __global__ void null_kernel(float* out, Wrapped in) {
    out[threadIdx.x] = FIXED && !in.p ? 0.0f : in.p[threadIdx.x];
}
template <bool FIXED> void null_pointer_in_kernel(Stage& s) {
    run(s, null_kernel<FIXED>, 32, s.out.p, Wrapped{nullptr});
}

// ---- shared memory ------------------------------------------------------------------------------

template <bool FIXED> __global__ void static_shared_kernel(float* out, int n) {
    __shared__ float array[32];
    float* s = array; // not by its index, which the compiler can check by itself
    if (!FIXED || static_cast<int>(threadIdx.x) + 1 < n) s[threadIdx.x + 1] = 1;
    if (threadIdx.x == 0) s[0] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
__global__ void static_shared_plain_kernel(float* out, int n) { // clang sees it here as well
    __shared__ float array[32];
    float* s = array;
    if (static_cast<int>(threadIdx.x) + 1 < n) s[threadIdx.x + 1] = 1;
    if (threadIdx.x == 0) s[0] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
template <bool FIXED> void past_static_shared(Stage& s) {
    run(s, static_shared_plain_kernel, 32, s.out.p, FIXED ? 32 : 33);
}
template <bool FIXED> void past_static_shared_in_template(Stage& s) {
    run(s, static_shared_kernel<FIXED>, 32, s.out.p, 32);
}
__global__ void dynamic_shared_kernel(float* out) {
    DYNAMIC_SHARED(float, s);
    s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
template <bool FIXED> void past_dynamic_shared(Stage& s) {
    launch(dynamic_shared_kernel, 1, 64, (FIXED ? 64 : 63) * sizeof(float), s.first, s.out.p);
}
template <bool FIXED> void far_past_dynamic_shared(Stage& s) {
    launch(dynamic_shared_kernel, 1, 64, (FIXED ? 64 : 8) * sizeof(float), s.first, s.out.p);
}
template <bool FIXED> void shared_above_limit(Stage& s) {
    int bytes = 64 << 10;
    if (FIXED) {
        CUDACHECK(cudaFuncSetAttribute(dynamic_shared_kernel,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    } else {
        CUDACHECK(cudaFuncSetAttribute(dynamic_shared_kernel,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, 48 << 10));
    }
    launch(dynamic_shared_kernel, 1, 64, static_cast<size_t>(bytes), s.first, s.out.p);
}
template <bool FIXED> __global__ void uninitialised_shared_kernel(float* out) {
    __shared__ float s[64];
    if (FIXED || threadIdx.x < 60) s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
template <bool FIXED> void uninitialised_shared(Stage& s) {
    run(s, uninitialised_shared_kernel<FIXED>, 64, s.out.p);
}
template <bool FIXED> void uninitialised_global(Stage& s) {
    if (FIXED) s.scratch.set_zero();
    run(s, past_end_kernel<true>, 64, s.out.p, static_cast<const float*>(s.scratch.p), 64);
}
template <bool FIXED> __global__ void uninitialised_local_kernel(float* out, const float* in) {
    float local[4];
    for (int i = 0; i < (FIXED ? 4 : 3); i++) local[i] = in[i];
    out[threadIdx.x] = local[(threadIdx.x * 3) % 4];
}
template <bool FIXED> void uninitialised_local(Stage& s) {
    run(s, uninitialised_local_kernel<FIXED>, 32, s.out.p, s.in.p);
}

// ---- barriers -----------------------------------------------------------------------------------

template <bool FIXED> __global__ void read_too_early_kernel(float* out, const float* in) {
    __shared__ float s[128];
    s[threadIdx.x] = in[threadIdx.x];
    if (FIXED) __syncthreads();
    out[threadIdx.x] = s[(threadIdx.x + 40) % 128];
}
template <bool FIXED> void missing_barrier_before_read(Stage& s) {
    run(s, read_too_early_kernel<FIXED>, 128, s.out.p, s.in.p);
}
template <bool FIXED> __global__ void overwrite_too_early_kernel(float* out, const float* in) {
    __shared__ float s[128];
    unsigned t = threadIdx.x;
    float sum = 0;
    for (int k = 1; k <= 4; k++) {
        s[t] = in[t] * static_cast<float>(k);
        __syncthreads();
        sum += s[127 - t];
        if (FIXED) __syncthreads();
    }
    out[t] = sum;
}
template <bool FIXED> void missing_barrier_after_read(Stage& s) {
    run(s, overwrite_too_early_kernel<FIXED>, 128, s.out.p, s.in.p);
}
template <bool FIXED> __global__ void syncwarp_kernel(float* out, const float* in) {
    __shared__ float s[32];
    s[threadIdx.x] = in[threadIdx.x];
    if (FIXED) __syncwarp();
    out[threadIdx.x] = s[threadIdx.x ^ 1];
}
template <bool FIXED> void missing_syncwarp(Stage& s) {
    run(s, syncwarp_kernel<FIXED>, 32, s.out.p, s.in.p);
}
// A shuffle lets lanes meet but orders no memory accesses.
template <bool FIXED> __global__ void shuffle_as_barrier_kernel(float* out, const float* in) {
    __shared__ float s[32];
    s[threadIdx.x] = in[threadIdx.x];
    float v = __shfl_xor_sync(~0u, 1.0f, 1);
    if (FIXED) __syncwarp();
    out[threadIdx.x] = v * s[threadIdx.x ^ 1];
}
template <bool FIXED> void shuffle_instead_of_syncwarp(Stage& s) {
    run(s, shuffle_as_barrier_kernel<FIXED>, 32, s.out.p, s.in.p);
}
template <bool FIXED> __global__ void exited_at_barrier_kernel(float* out) {
    if (FIXED || threadIdx.x < 16) __syncthreads();
    out[threadIdx.x] = 1;
}
template <bool FIXED> void barrier_without_some_threads(Stage& s) {
    run(s, exited_at_barrier_kernel<FIXED>, 64, s.out.p);
}
template <bool FIXED> __global__ void two_barriers_kernel(float* out) {
    if (!FIXED && (threadIdx.x & 1)) {
        out[threadIdx.x] = 1;
        __syncthreads();
    } else {
        __syncthreads();
        out[threadIdx.x] = 2;
    }
}
template <bool FIXED> void two_different_barriers(Stage& s) {
    run(s, two_barriers_kernel<FIXED>, 64, s.out.p);
}
template <bool FIXED> __global__ void deadlock_kernel(float* out) {
    if (!FIXED && threadIdx.x < 16)
        __syncwarp();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}
template <bool FIXED> void warp_and_block_wait_for_each_other(Stage& s) {
    run(s, deadlock_kernel<FIXED>, 32, s.out.p);
}

// ---- warp operations ----------------------------------------------------------------------------

template <bool FIXED> __global__ void exited_lanes_kernel(float* out, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    unsigned mask = FIXED ? (1u << n) - 1 : ~0u;
    out[i] = __shfl_xor_sync(mask, static_cast<float>(i), 1);
}
template <bool FIXED> void shuffle_with_exited_lanes(Stage& s) {
    run(s, exited_lanes_kernel<FIXED>, 32, s.out.p, 20);
}
template <bool FIXED> __global__ void both_arms_kernel(float* out) {
    float v = static_cast<float>(threadIdx.x);
    unsigned low = FIXED ? 0x0000FFFFu : ~0u, high = FIXED ? 0xFFFF0000u : ~0u;
    if (threadIdx.x < 16)
        v = __shfl_down_sync(low, v, 1, 16);
    else
        v = __shfl_down_sync(high, v, 2, 16);
    out[threadIdx.x] = v;
}
template <bool FIXED> void shuffle_in_both_arms(Stage& s) {
    run(s, both_arms_kernel<FIXED>, 32, s.out.p);
}
template <bool FIXED> __global__ void source_outside_kernel(float* out) {
    float v = 0;
    if (threadIdx.x < 16) v = __shfl_sync(0xFFFFu, 1.0f, FIXED ? 2 : 20);
    out[threadIdx.x] = v;
}
template <bool FIXED> void shuffle_from_outside_the_mask(Stage& s) {
    run(s, source_outside_kernel<FIXED>, 32, s.out.p);
}
template <bool FIXED> __global__ void caller_outside_kernel(float* out) {
    out[threadIdx.x] = __shfl_sync(FIXED ? ~0u : 0x7FFFFFFFu, 1.0f, 0);
}
template <bool FIXED> void caller_outside_its_mask(Stage& s) {
    run(s, caller_outside_kernel<FIXED>, 32, s.out.p);
}
template <bool FIXED> __global__ void width_kernel(float* out) {
    out[threadIdx.x] = __shfl_down_sync(~0u, 1.0f, 1, FIXED ? 16 : 24);
}
template <bool FIXED> void shuffle_width_24(Stage& s) { run(s, width_kernel<FIXED>, 32, s.out.p); }

// ---- between blocks -----------------------------------------------------------------------------

template <bool FIXED> __global__ void add_kernel(float* out, const float* in) {
    float v = in[blockIdx.x];
    if (threadIdx.x != 0) return;
    if (FIXED)
        atomicAdd(out, v);
    else
        *out += v;
}
template <bool FIXED> void blocks_add_without_atomic(Stage& s) {
    launch(add_kernel<FIXED>, 16, 32, 0, s.first, s.out.p, s.in.p);
}
template <bool FIXED> __global__ void same_place_kernel(float* out) {
    if (threadIdx.x == 0) out[FIXED ? blockIdx.x : 0] = static_cast<float>(blockIdx.x);
}
template <bool FIXED> void blocks_write_one_place(Stage& s) {
    launch(same_place_kernel<FIXED>, 4, 32, 0, s.first, s.out.p);
}
template <bool FIXED> __global__ void store_and_atomic_kernel(int* counter) {
    if (threadIdx.x != 0) return;
    if (FIXED || blockIdx.x)
        atomicAdd(counter, 1);
    else
        *counter = 1;
}
template <bool FIXED> void plain_store_beside_atomics(Stage& s) {
    launch(store_and_atomic_kernel<FIXED>, 4, 32, 0, s.first, reinterpret_cast<int*>(s.out.p));
}

// ---- arithmetic and stack -----------------------------------------------------------------------

__global__ void overflow_kernel(float* out, int big) {
    out[threadIdx.x] = static_cast<float>(big + static_cast<int>(threadIdx.x));
}
template <bool FIXED> void signed_overflow(Stage& s) {
    run(s, overflow_kernel, 32, s.out.p, FIXED ? 1 : 0x7FFFFFF0);
}
__global__ void deep_kernel(float* out, int words) {
    volatile float* local = static_cast<float*>(__builtin_alloca(sizeof(float) * words));
    for (int i = words - 1; i >= 0; i -= 16) local[i] = 1;
    out[threadIdx.x] = local[words - 1];
}
template <bool FIXED> void stack_overflow(Stage& s) {
    run(s, deep_kernel, 1, s.out.p, FIXED ? 64 : 1 << 18);
}

// ---- tensor cores and asynchronous copies -------------------------------------------------------

template <bool FIXED> __global__ void missing_wait_kernel(float* out, const float* in) {
    __shared__ __align__(16) float s[128];
    unsigned t = threadIdx.x;
    cp_async16(s + 4 * t, in + 4 * t);
    cp_async_commit();
    if (FIXED) cp_async_wait<0>();
    __syncthreads();
    for (int j = 0; j < 4; j++) out[4 * t + j] = s[127 - (4 * t + j)];
}
template <bool FIXED> void missing_wait_for_copy(Stage& s) {
    run(s, missing_wait_kernel<FIXED>, 32, s.out.p, s.in.p);
}
// Two buffers in turn. BARRIER: nobody refills a buffer that others still read; PENDING: groups
// that may be under way while the other buffer is read.
template <bool BARRIER, int PENDING>
__global__ void double_buffer_kernel(float* out, const float* in, int tiles) {
    __shared__ __align__(16) float s[2][128];
    unsigned t = threadIdx.x;
    float sum = 0;
    cp_async16(s[0] + 4 * t, in + 4 * t);
    cp_async_commit();
    for (int k = 0; k < tiles; k++) {
        if (k + 1 < tiles) cp_async16(s[(k + 1) % 2] + 4 * t, in + 128 * (k + 1) + 4 * t);
        cp_async_commit();
        cp_async_wait<PENDING>();
        __syncthreads();
        for (int j = 0; j < 128; j += 8) sum += s[k % 2][(t + j) % 128];
        if (BARRIER) __syncthreads();
    }
    out[t] = sum;
}
template <bool FIXED> void copy_into_buffer_being_read(Stage& s) {
    run(s, double_buffer_kernel<FIXED, 1>, 32, s.out.p, s.in.p, 8);
}
template <bool FIXED> void wait_for_the_wrong_group(Stage& s) {
    run(s, double_buffer_kernel < true, FIXED ? 1 : 2 >, 32, s.out.p, s.in.p, 8);
}
template <bool FIXED> __global__ void misaligned_copy_kernel(float* out, const float* in) {
    __shared__ __align__(16) float s[132];
    cp_async16(s + 4 * threadIdx.x + (FIXED ? 0 : 2), in + 4 * threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = s[4 * threadIdx.x + 2];
}
template <bool FIXED> void misaligned_async_copy(Stage& s) {
    run(s, misaligned_copy_kernel<FIXED>, 32, s.out.p, s.in.p);
}
template <bool FIXED> __global__ void ldmatrix_kernel(float* out, int shift) {
    __shared__ __align__(16) uint16_t s[16 * 24];
    for (unsigned i = threadIdx.x; i < 16 * 24; i += 32) s[i] = static_cast<uint16_t>(i);
    if (FIXED) __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, s + threadIdx.x % 16 * 24 + threadIdx.x / 16 * 8 + shift);
    out[threadIdx.x] = static_cast<float>(r[0] + r[3]);
}
template <bool FIXED> void misaligned_ldmatrix(Stage& s) {
    run(s, ldmatrix_kernel<true>, 32, s.out.p, FIXED ? 0 : 4);
}
template <bool FIXED> void missing_syncwarp_before_ldmatrix(Stage& s) {
    run(s, ldmatrix_kernel<FIXED>, 32, s.out.p, 0);
}
__global__ void partial_warp_mma_kernel(float* out) {
    uint32_t a[4] = {}, b[2] = {};
    float c[4] = {};
    mma_m16n8k16_bf16(c, a, b, c);
    out[threadIdx.x] = c[0];
}
template <bool FIXED> void mma_in_half_a_warp(Stage& s) {
    run(s, partial_warp_mma_kernel, FIXED ? 32 : 16, s.out.p);
}

// ---- streams and the host -----------------------------------------------------------------------

__global__ void fill_kernel(float* out, float value) { out[threadIdx.x] = value; }

template <bool FIXED> void missing_event_before_read(Stage& s) { // the second stream writes
    launch(fill_kernel, 1, 64, 0, s.second, s.scratch.p, 2.0f);
    if (FIXED) s.wait(s.first, s.second);
    run(s, past_end_kernel<true>, 64, s.out.p, static_cast<const float*>(s.scratch.p), 64);
    s.fetch();
    CUDACHECK(cudaStreamSynchronize(s.first));
}
template <bool FIXED> void missing_event_before_overwrite(Stage& s) { // the first stream reads
    run(s, past_end_kernel<true>, 64, s.out.p, static_cast<const float*>(s.in.p), 64);
    if (FIXED) s.wait(s.second, s.first);
    launch(fill_kernel, 1, 64, 0, s.second, s.in.p, 7.0f);
    s.fetch();
    CUDACHECK(cudaStreamSynchronize(s.first));
}
template <bool FIXED> void result_used_without_synchronisation(Stage& s) {
    run(s, fill_kernel, 64, s.out.p, 2.0f);
    s.fetch();
    if (FIXED) CUDACHECK(cudaStreamSynchronize(s.first));
    printf("checksum %g\n", s.pinned[0] + s.pinned[1]);
}
template <bool FIXED> void pinned_source_overwritten(Stage& s) {
    for (int i = 0; i < N; i++) s.pinned[i] = 1;
    CUDACHECK(
        cudaMemcpyAsync(s.out.p, s.pinned, N * sizeof(float), cudaMemcpyHostToDevice, s.first));
    if (FIXED) CUDACHECK(cudaStreamSynchronize(s.first));
    for (int i = 0; i < N; i++) s.pinned[i] = 5; // the next batch
}
template <bool FIXED> void stream_used_after_destruction(Stage& s) {
    cudaStream_t stream;
    CUDACHECK(cudaStreamCreate(&stream));
    if (!FIXED) CUDACHECK(cudaStreamDestroy(stream));
    launch(fill_kernel, 1, 64, 0, stream, s.out.p, 1.0f);
    if (FIXED) CUDACHECK(cudaStreamDestroy(stream));
}
template <bool FIXED> void block_of_1056_threads(Stage& s) {
    run(s, past_end_kernel<true>, FIXED ? 1024 : 1056, s.out.p, static_cast<const float*>(s.in.p),
        N);
}
template <bool FIXED> void empty_grid(Stage& s) {
    launch(fill_kernel, FIXED ? 1 : 0, 64, 0, s.first, s.out.p, 1.0f);
}
template <bool FIXED> void matmul_past_end(Stage& s) { // a 32 x 33 product in memory of 32 x 32
    const uint64_t m = 32, k = 32, n = FIXED ? 32 : 33;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t matmul;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&a, CUDA_R_32F, m, k, m);
    cublasLtMatrixLayoutCreate(&b, CUDA_R_32F, k, n, k);
    cublasLtMatrixLayoutCreate(&d, CUDA_R_32F, m, n, m);
    Device<float> wide(k * n);
    wide.set_zero();
    float alpha = 1, beta = 0;
    cublasLtMatmul(handle, matmul, &alpha, s.in.p, a, wide.p, b, &beta, s.out.p, d, s.out.p, d,
                   nullptr, nullptr, 0, s.first);
    CUDACHECK(cudaStreamSynchronize(s.first));
    cublasLtMatrixLayoutDestroy(a);
    cublasLtMatrixLayoutDestroy(b);
    cublasLtMatrixLayoutDestroy(d);
    cublasLtMatmulDescDestroy(matmul);
    cublasLtDestroy(handle);
}

// ---- the list -----------------------------------------------------------------------------------

struct Bug {
    const char* name;
    void (*broken)(Stage&);
    void (*fixed)(Stage&);
    const char* modes;
};
#define BUG(name, modes)                                                                           \
    { #name, name < false>, name < true>, modes }
const Bug BUGS[] = {
    BUG(write_past_end, "plain=past_the_end asan=buffer-overflow"),
    BUG(read_past_end, "asan=buffer-overflow"),
    BUG(use_after_free, "plain=cannot_reach"),
    BUG(use_after_free_in_struct, "asan=use-after-free"),
    BUG(double_free, "plain=freed_before"),
    BUG(device_memory_leak, "asan=LeakSanitizer"),
    BUG(host_reads_device_memory, "plain=host_code_touches asan=poison"),
    BUG(host_pointer_to_kernel, "plain=cannot_reach"),
    BUG(copy_past_end, "plain=past_the_end"),
    BUG(copy_of_wrong_kind, "plain=not_the_kind"),
    BUG(misaligned_vector_store, "asan=misaligned_address"),
    BUG(null_pointer_in_kernel, "plain=touches_memory_that_is_not_there"),
    BUG(past_static_shared, "asan=insufficient_space"),
    BUG(past_static_shared_in_template, "asan=insufficient_space"),
    BUG(past_dynamic_shared, "plain=dynamic_shared_memory asan=heap-buffer-overflow"),
    BUG(far_past_dynamic_shared, "plain=dynamic_shared_memory asan=heap-buffer-overflow"),
    BUG(shared_above_limit, "plain=bytes_of_shared_memory"),
    BUG(uninitialised_shared, "poison=differs msan=uninitialized"),
    BUG(uninitialised_global, "poison=differs msan=uninitialized"),
    BUG(uninitialised_local, "msan=uninitialized"),
    BUG(missing_barrier_before_read, "orders=differs poison=differs tsan=race msan=uninitialized"),
    BUG(missing_barrier_after_read, "orders=differs tsan=race"),
    BUG(missing_syncwarp, "orders=differs poison=differs tsan=race msan=uninitialized"),
    BUG(shuffle_instead_of_syncwarp, "tsan=race"),
    BUG(barrier_without_some_threads, "plain=exited"),
    BUG(two_different_barriers, "plain=divergent_block_barrier"),
    BUG(warp_and_block_wait_for_each_other, "plain=deadlock"),
    BUG(shuffle_with_exited_lanes, "plain=that_have_exited"),
    BUG(shuffle_in_both_arms, "plain=divergent_warp_operation"),
    BUG(shuffle_from_outside_the_mask, "plain=not_in_its_mask"),
    BUG(caller_outside_its_mask, "plain=not_in_its_own_mask"),
    BUG(shuffle_width_24, "plain=power_of_two"),
    BUG(blocks_add_without_atomic, "tsan=race"),
    BUG(blocks_write_one_place, "orders=differs tsan=race"),
    BUG(plain_store_beside_atomics, "tsan=race"),
    BUG(signed_overflow, "asan=signed_integer_overflow"),
    BUG(stack_overflow, "plain=overflows_the_stack"),
    BUG(missing_wait_for_copy, "poison=differs msan=uninitialized"),
    BUG(copy_into_buffer_being_read, "early=differs tsan_early=race"),
    BUG(wait_for_the_wrong_group, "poison=differs msan=uninitialized"),
    BUG(misaligned_async_copy, "plain=aligned_to_16"),
    BUG(misaligned_ldmatrix, "plain=aligned_to_16"),
    BUG(missing_syncwarp_before_ldmatrix, "tsan=race"),
    BUG(mma_in_half_a_warp, "plain=fewer_than_32"),
    BUG(missing_event_before_read, "lazy=differs tsan=race"),
    BUG(missing_event_before_overwrite, "ahead=differs tsan=race"),
    BUG(result_used_without_synchronisation, "lazy=differs tsan=race"),
    BUG(pinned_source_overwritten, "lazy=differs tsan=race"),
    BUG(stream_used_after_destruction, "plain=was_destroyed"),
    BUG(block_of_1056_threads, "plain=a_block_of"),
    BUG(empty_grid, "plain=a_grid_of"),
    BUG(matmul_past_end, "plain=its_allocation_has"),
};

void play(void (*act)(Stage&)) {
    Stage stage;
    act(stage);
    CUDACHECK(cudaDeviceSynchronize());
    std::vector<float> out = stage.out.get();
    double sum = 0;
    for (int i = 0; i < N; i++) sum += out[static_cast<size_t>(i)] * (1 + i % 7);
    printf("checksum %.9g\n", sum);
}

int main(int argc, char** argv) {
    const char* name = argc > 1 ? argv[1] : "list";
    bool want_fixed = argc > 2 && strcmp(argv[2], "fixed") == 0;
    for (const Bug& bug : BUGS) {
        if (strcmp(name, "list") == 0) printf("%s %s\n", bug.name, bug.modes);
        if (strcmp(name, "fixed") == 0) play(bug.fixed);
        if (strcmp(name, bug.name) == 0) play(want_fixed ? bug.fixed : bug.broken);
    }
    return 0;
}
