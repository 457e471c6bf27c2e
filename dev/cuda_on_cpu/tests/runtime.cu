// tests/runtime.cu - the host API: memory, streams, events, properties, and what it refuses.
#include "test.cuh"

#include <string.h>

namespace {

__global__ void fill_kernel(float* out, float value) { out[threadIdx.x] = value; }
__global__ void shared_kernel(float* out) {
    DYNAMIC_SHARED(float, s);
    s[threadIdx.x] = 1;
    out[threadIdx.x] = s[threadIdx.x];
}

// A refusal prints a line; these are meant, so the line is thrown away.
template <class F> cudaError_t refused(F call) {
    FILE* saved = stderr;
    stderr = fopen("/dev/null", "w");
    cudaError_t error = call();
    fclose(stderr);
    stderr = saved;
    return error;
}

void test_device() {
    int count, device, can, runtime, driver, value;
    CUDACHECK(cudaGetDeviceCount(&count));
    CUDACHECK(cudaSetDevice(0));
    CUDACHECK(cudaGetDevice(&device));
    EXPECT(count == 1 && device == 0);
    EXPECT(cudaSetDevice(1) == cudaErrorInvalidDevice);
    EXPECT(cudaGetLastError() == cudaErrorInvalidDevice);
    EXPECT(cudaGetLastError() == cudaSuccess);
    CUDACHECK(cudaDeviceCanAccessPeer(&can, 0, 0));
    CUDACHECK(cudaRuntimeGetVersion(&runtime));
    CUDACHECK(cudaDriverGetVersion(&driver));
    EXPECT(runtime == CUDART_VERSION && driver >= runtime && can == 0);

    cudaDeviceProp p;
    cudaUUID_t none = {};
    CUDACHECK(cudaGetDeviceProperties(&p, 0));
    EXPECT(p.name[0] && p.major == 9 && p.multiProcessorCount == 4 && p.warpSize == 32);
    EXPECT(memcmp(&p.uuid, &none, sizeof none) != 0);
    CUDACHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    EXPECT(value == static_cast<int>(p.sharedMemPerBlockOptin));
    EXPECT(strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady") == 0);
    EXPECT(strlen(cudaGetErrorString(cudaErrorMemoryAllocation)) > 0);
}

void test_memory() {
    size_t free_before, free_after, total;
    void *device, *pinned, *too_large;
    CUDACHECK(cudaMemGetInfo(&free_before, &total));
    CUDACHECK(cudaMalloc(&device, 1 << 20));
    CUDACHECK(cudaMemGetInfo(&free_after, &total));
    EXPECT(free_before - free_after == 1 << 20 && total >= free_before);
    EXPECT(reinterpret_cast<uintptr_t>(device) % 256 == 0);
    EXPECT(cudaMalloc(&too_large, total) == cudaErrorMemoryAllocation);
    EXPECT(cudaGetLastError() == cudaErrorMemoryAllocation);
    CUDACHECK(cudaMalloc(&too_large, 0));
    CUDACHECK(cudaFree(too_large));
    CUDACHECK(cudaFree(nullptr));

    CUDACHECK(cudaHostAlloc(&pinned, 1 << 20, cudaHostAllocDefault));
    memset(pinned, 7, 1 << 20);
    CUDACHECK(cudaMemcpyAsync(device, pinned, 1 << 20, cudaMemcpyHostToDevice, nullptr));
    CUDACHECK(cudaMemsetAsync(device, 3, 16, nullptr));
    CUDACHECK(cudaMemcpyAsync(pinned, device, 1 << 20, cudaMemcpyDeviceToHost, nullptr));
    CUDACHECK(cudaDeviceSynchronize());
    const char* bytes = static_cast<const char*>(pinned);
    EXPECT(bytes[0] == 3 && bytes[15] == 3 && bytes[16] == 7 && bytes[(1 << 20) - 1] == 7);
    CUDACHECK(cudaFreeHost(pinned));

    std::vector<char> host(4096, 5);
    CUDACHECK(cudaHostRegister(host.data(), host.size(), cudaHostRegisterDefault));
    EXPECT(cudaHostRegister(host.data(), 16, 0) == cudaErrorHostMemoryAlreadyRegistered);
    CUDACHECK(cudaMemcpyAsync(device, host.data(), 4096, cudaMemcpyHostToDevice, nullptr));
    CUDACHECK(cudaHostUnregister(host.data()));
    EXPECT(cudaHostUnregister(host.data()) == cudaErrorHostMemoryNotRegistered);

    // Pageable memory may be changed as soon as an asynchronous call returns.
    std::vector<char> source(64, 9), back(64);
    CUDACHECK(cudaMemcpyAsync(device, source.data(), 64, cudaMemcpyHostToDevice, nullptr));
    memset(source.data(), 0, 64);
    CUDACHECK(cudaMemcpyAsync(back.data(), device, 64, cudaMemcpyDeviceToHost, nullptr));
    EXPECT(back[0] == 9 && back[63] == 9);
    CUDACHECK(cudaFree(device));

    cudaError_t wrong = refused([] { return cudaFree(reinterpret_cast<void*>(64)); });
    EXPECT(wrong == cudaErrorInvalidValue);
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue);
}

void test_streams() {
    int least, greatest, priority;
    unsigned flags;
    cudaStream_t stream;
    CUDACHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    EXPECT(greatest < least);
    CUDACHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    CUDACHECK(cudaStreamGetPriority(stream, &priority));
    CUDACHECK(cudaStreamGetFlags(stream, &flags));
    EXPECT(priority == greatest && flags == cudaStreamNonBlocking);

    Device<float> d(64);
    launch(fill_kernel, 1, 64, 0, stream, d.p, 4.0f);
    int polls = 0;
    while (cudaStreamQuery(stream) == cudaErrorNotReady) polls++;
    EXPECT(polls < 100);
    int value = 0;
    auto callback = [](void* p) { *static_cast<int*>(p) = 5; };
    CUDACHECK(cudaLaunchHostFunc(stream, callback, &value));
    CUDACHECK(cudaStreamSynchronize(stream));
    EXPECT(value == 5);
    EXPECT(d.get()[63] == 4.0f);
    CUDACHECK(cudaStreamDestroy(stream));

    // The null stream and a blocking stream wait for each other.
    CUDACHECK(cudaStreamCreate(&stream));
    launch(fill_kernel, 1, 64, 0, stream, d.p, 1.0f);
    launch(fill_kernel, 1, 32, 0, static_cast<cudaStream_t>(nullptr), d.p, 2.0f);
    launch(fill_kernel, 1, 16, 0, stream, d.p, 3.0f);
    std::vector<float> h = d.get();
    EXPECT(h[0] == 3.0f && h[16] == 2.0f && h[32] == 1.0f);
    CUDACHECK(cudaStreamDestroy(stream));
}

void test_events() {
    cudaStream_t stream;
    cudaEvent_t begin, end, untimed;
    float ms = -1;
    CUDACHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDACHECK(cudaEventCreate(&begin));
    CUDACHECK(cudaEventCreate(&end));
    CUDACHECK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    EXPECT(cudaEventQuery(begin) == cudaSuccess); // never recorded
    EXPECT(cudaEventElapsedTime(&ms, begin, end) == cudaErrorInvalidResourceHandle);

    Device<float> d(64);
    CUDACHECK(cudaEventRecord(begin, stream));
    for (int i = 0; i < 10; i++) launch(fill_kernel, 1, 64, 0, stream, d.p, 1.0f);
    CUDACHECK(cudaEventRecord(end, stream));
    int polls = 0;
    while (cudaEventQuery(end) == cudaErrorNotReady) polls++;
    EXPECT(polls <= 12);
    CUDACHECK(cudaEventElapsedTime(&ms, begin, end));
    EXPECT(ms >= 0 && ms < 1e5f);
    CUDACHECK(cudaEventRecord(untimed, stream));
    CUDACHECK(cudaEventSynchronize(untimed));
    EXPECT(cudaEventElapsedTime(&ms, begin, untimed) == cudaErrorInvalidResourceHandle);

    // A wait is for the record before it, not for a later one.
    cudaStream_t other;
    CUDACHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CUDACHECK(cudaEventRecord(untimed, stream));
    CUDACHECK(cudaStreamWaitEvent(other, untimed, 0));
    CUDACHECK(cudaEventRecord(untimed, stream));
    launch(fill_kernel, 1, 64, 0, other, d.p, 6.0f);
    CUDACHECK(cudaStreamSynchronize(other));
    EXPECT(d.get()[0] == 6.0f);
    for (cudaEvent_t e : {begin, end, untimed}) CUDACHECK(cudaEventDestroy(e));
    CUDACHECK(cudaStreamDestroy(other));
    CUDACHECK(cudaStreamDestroy(stream));
    cudaGetLastError();
}

void test_launches() {
    Device<float> d(1024);
    auto try_launch = [&](dim3 grid, dim3 block, size_t shared_bytes) {
        return refused([&] {
            return launch_unchecked(shared_kernel, grid, block, shared_bytes,
                                    static_cast<cudaStream_t>(nullptr), d.p);
        });
    };
    EXPECT(try_launch(1, 1024, 4096) == cudaSuccess);
    EXPECT(try_launch(1, 1025, 4100) == cudaErrorInvalidConfiguration);
    EXPECT(try_launch(1, dim3(1, 1, 65), 4096) == cudaErrorInvalidConfiguration);
    EXPECT(try_launch(dim3(1, 65536), 32, 4096) == cudaErrorInvalidConfiguration);
    EXPECT(try_launch(0, 32, 4096) == cudaErrorInvalidConfiguration);
    EXPECT(try_launch(1, 32, 64 << 10) == cudaErrorInvalidValue);
    const cudaFuncAttribute shared_limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CUDACHECK(cudaFuncSetAttribute(shared_kernel, shared_limit, 64 << 10));
    EXPECT(try_launch(1, 32, 64 << 10) == cudaSuccess);
    EXPECT(refused([&] { return cudaFuncSetAttribute(shared_kernel, shared_limit, 1 << 20); }) ==
           cudaErrorInvalidValue);

    int blocks;
    CUDACHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, shared_kernel, 256, 0));
    EXPECT(blocks == 8);
    CUDACHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, shared_kernel, 64, 60 << 10));
    EXPECT(blocks == 3);
    cudaFuncAttributes attributes;
    CUDACHECK(cudaFuncGetAttributes(&attributes, shared_kernel));
    EXPECT(attributes.maxDynamicSharedSizeBytes == 64 << 10);
    CUDACHECK(cudaDeviceSynchronize());
    cudaGetLastError();
}

// A block may ask for `kb` of shared memory, not for more.
void test_shared_limit(int kb) {
    const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    cudaDeviceProp p;
    CUDACHECK(cudaGetDeviceProperties(&p, 0));
    EXPECT(p.sharedMemPerBlockOptin == static_cast<size_t>(kb) << 10);
    EXPECT(p.sharedMemPerMultiprocessor == static_cast<size_t>(kb + 1) << 10);
    CUDACHECK(cudaFuncSetAttribute(shared_kernel, limit, kb << 10));
    EXPECT(refused([=] { return cudaFuncSetAttribute(shared_kernel, limit, (kb << 10) + 1); }) ==
           cudaErrorInvalidValue);
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue);
}

void test_without_device() { // CUDA_ON_CPU_DEVICES=0
    int count = -1;
    void* p;
    EXPECT(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0);
    EXPECT(cudaSetDevice(0) == cudaErrorNoDevice);
    EXPECT(cudaMalloc(&p, 64) == cudaErrorNoDevice);
}

} // namespace

int main(int argc, char** argv) {
    if (argc > 1 && strcmp(argv[1], "no_device") == 0) {
        test_without_device();
    } else if (argc > 1 && strcmp(argv[1], "shared_99") == 0) { // CUDA_ON_CPU_SHARED_KB=99
        test_shared_limit(99);
    } else {
        test_device();
        test_memory();
        test_streams();
        test_events();
        test_launches();
        test_shared_limit(227);
    }
    return num_failed != 0;
}
