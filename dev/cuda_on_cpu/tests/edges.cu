// tests/edges.cu - a program of three streams in which every wait is needed.
//
// The host writes two pinned buffers in turn; one stream uploads them, one fills the slots of a
// ring from them, one uses the slots and hands the result back. test.sh takes each wait away in
// turn (CUDA_ON_CPU_DROP_EDGE) and expects wrong sums or a data race.
#include "test.cuh"

// Few threads: ThreadSanitizer keeps apart about 250 at a time, over all streams.
constexpr int THREADS = 16, SLOTS = 2, STEPS = 9;

// slot = scale * in
__global__ void fill_kernel(float* slot, const float* in, float scale) {
    slot[threadIdx.x] = scale * in[threadIdx.x];
}
// sum += slot, and the slot is left as garbage
__global__ void use_kernel(float* sum, float* slot) {
    sum[threadIdx.x] += slot[threadIdx.x];
    slot[threadIdx.x] = -1e6f;
}

struct Edge {
    cudaEvent_t event;
    Edge() { CUDACHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
    ~Edge() { CUDACHECK(cudaEventDestroy(event)); }
    void record(cudaStream_t stream) { CUDACHECK(cudaEventRecord(event, stream)); }
    void wait(cudaStream_t stream) { CUDACHECK(cudaStreamWaitEvent(stream, event, 0)); }
    void wait_on_host() { CUDACHECK(cudaEventSynchronize(event)); }
};

int main() {
    cudaStream_t loader, filler, user;
    CUDACHECK(cudaStreamCreateWithFlags(&loader, cudaStreamNonBlocking));
    CUDACHECK(cudaStreamCreateWithFlags(&filler, cudaStreamNonBlocking));
    CUDACHECK(cudaStreamCreateWithFlags(&user, cudaStreamNonBlocking));
    float *upload[2], *result;
    for (float*& p : upload) CUDACHECK(cudaMallocHost(&p, THREADS * sizeof(float)));
    CUDACHECK(cudaMallocHost(&result, THREADS * sizeof(float)));
    {
        const size_t bytes = THREADS * sizeof(float);
        Device<float> in0(THREADS), in1(THREADS), slot0(THREADS), slot1(THREADS), sum(THREADS);
        float *in[2] = {in0.p, in1.p}, *slot[SLOTS] = {slot0.p, slot1.p};
        Edge uploaded[2], consumed[2], ready[SLOTS], freed[SLOTS], fetched;
        sum.set_zero();
        CUDACHECK(cudaDeviceSynchronize());

        double expected = 0;
        for (int step = 0; step < STEPS; step++) {
            int b = step % 2, s = step % SLOTS;
            uploaded[b].wait_on_host(); // the pinned buffers are free again
            for (int i = 0; i < THREADS; i++) upload[b][i] = static_cast<float>(step + 1);
            consumed[b].wait(loader); // so is the input on the device
            CUDACHECK(cudaMemcpyAsync(in[b], upload[b], bytes, cudaMemcpyHostToDevice, loader));
            uploaded[b].record(loader);
            uploaded[b].wait(filler);
            freed[s].wait(filler); // the slot was used
            launch(fill_kernel, 1, THREADS, 0, filler, slot[s], in[b], 2.0f);
            consumed[b].record(filler);
            ready[s].record(filler);
            ready[s].wait(user);
            launch(use_kernel, 1, THREADS, 0, user, sum.p, slot[s]);
            freed[s].record(user);
            expected += 2.0 * (step + 1);
        }
        CUDACHECK(cudaMemcpyAsync(result, sum.p, bytes, cudaMemcpyDeviceToHost, user));
        fetched.record(user);
        fetched.wait_on_host();
        for (int i = 0; i < THREADS; i++) {
            EXPECT(result[i] == expected, "%g, expected %g", static_cast<double>(result[i]),
                   expected);
            if (num_failed) break;
        }
        CUDACHECK(cudaDeviceSynchronize());
    }
    for (float* p : upload) CUDACHECK(cudaFreeHost(p));
    CUDACHECK(cudaFreeHost(result));
    CUDACHECK(cudaStreamDestroy(loader));
    CUDACHECK(cudaStreamDestroy(filler));
    CUDACHECK(cudaStreamDestroy(user));
    return num_failed != 0;
}
