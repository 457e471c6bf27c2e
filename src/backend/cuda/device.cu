// backend/cuda/device.cu - one GPU: memory, two streams, events and copies.
//
// Nothing here blocks inside the CUDA runtime for long: waits poll, so that a watchdog thread and
// signals are served while the GPU works.
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/cuda/common.cuh"
#include "backend/device.h"
#include "core/fault.h"

namespace {

constexpr int NUM_STREAMS = 2, NUM_STAGING = 2;

struct Allocation {
    void* ptr;
    bool is_pinned;
};

struct Staging {
    void* host; // pinned
    size_t bytes;
    cudaEvent_t copied; // its last upload has happened
};

struct {
    bool is_open, is_frozen;
    cudaStream_t streams[NUM_STREAMS];
    Staging staging[NUM_STAGING];
    int next_staging;
    Allocation allocations[LEDGER_MAX_LINES];
    int num_allocations;
    cudaDeviceProp properties;
    int clock_khz;
    char description[400];
    void (*on_wait)(void);
} device;

double mib(size_t bytes) { return (double)bytes / (1u << 20); }

constexpr int POLL_US = 20, ON_WAIT_POLLS = 5000; // the hook runs about every 0.1 s

// Asks until `query` says that the work has happened.
template <class Query> void poll(Query query) {
    for (int polls = 1;; polls++) {
        cudaError_t status = query();
        if (status == cudaSuccess) return;
        if (status != cudaErrorNotReady) CUDACHECK(status);
        if (device.on_wait && polls % ON_WAIT_POLLS == 0) device.on_wait();
        usleep(POLL_US);
    }
}
void poll_stream(cudaStream_t stream) {
    poll([=] { return cudaStreamQuery(stream); });
}

cudaEvent_t cuda_event(event_t event) { return reinterpret_cast<cudaEvent_t>(event); }

} // namespace

// ---- the device ---------------------------------------------------------------------------------

bool device_init(const DeviceOptions* options, Error* error) {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        const char* why = status != cudaSuccess ? cudaGetErrorString(status) : "none found";
        return error_set(
            error, EXIT_USAGE,
            "no usable CUDA device (%s): check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
            "run the CPU program, train_gpt2",
            why);
    }
    // Several ranks may share a GPU (--comm mpi), so a rank beyond the last device wraps around.
    int ordinal = options->local_rank % count;
    cudaDeviceProp* p = &device.properties;
    status = cudaSetDevice(ordinal);
    if (status == cudaSuccess) status = cudaGetDeviceProperties(p, ordinal);
    if (status != cudaSuccess) {
        return error_set(error, EXIT_USAGE, "CUDA device %d cannot be used (%s)", ordinal,
                         cudaGetErrorString(status));
    }
    if (p->major < 8) {
        return error_set(error, EXIT_USAGE,
                         "CUDA device %d (%s) has compute capability %d.%d, at least 8.0 is needed",
                         ordinal, p->name, p->major, p->minor);
    }
    CUDACHECK(cudaDeviceGetAttribute(&device.clock_khz, cudaDevAttrClockRate, ordinal));
    // Communication first: its few blocks must not wait behind a grid that fills the GPU.
    int least, greatest;
    CUDACHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    for (int i = 0; i < NUM_STREAMS; i++) {
        CUDACHECK(cudaStreamCreateWithPriority(&device.streams[i], cudaStreamNonBlocking,
                                               i == STREAM_COMM ? greatest : least));
    }
    for (Staging& s : device.staging) {
        CUDACHECK(cudaEventCreateWithFlags(&s.copied, cudaEventDisableTiming));
    }
    snprintf(device.description, sizeof device.description, "%s, sm_%d%d, %d SMs, %.1f GiB",
             p->name, p->major, p->minor, p->multiProcessorCount, mib(p->totalGlobalMem) / 1024.0);
    device.is_open = true;
    return true;
}

void device_free_all(void) {
    if (!device.is_open) return;
    device_synchronize();
    while (device.num_allocations > 0) {
        Allocation a = device.allocations[--device.num_allocations];
        CUDACHECK(a.is_pinned ? cudaFreeHost(a.ptr) : cudaFree(a.ptr));
    }
    for (Staging& s : device.staging) {
        CUDACHECK(cudaFreeHost(s.host));
        CUDACHECK(cudaEventDestroy(s.copied));
    }
    for (cudaStream_t stream : device.streams) CUDACHECK(cudaStreamDestroy(stream));
    device = {};
}

// The CUDA program computes on the GPU; its host threads only feed it.
int device_threads(int requested, int) { return requested > 0 ? requested : 1; }

const char* device_backend(void) { return "cuda"; }
bool device_is_host(void) { return false; }
const char* device_description(void) { return device.description; }
int device_multiprocessors(void) { return device.properties.multiProcessorCount; }
size_t device_shared_bytes(void) { return device.properties.sharedMemPerBlockOptin; }

// A100, H100, B200 and kin, not the chips for graphics of the same generations.
bool device_is_data_centre(void) {
    const cudaDeviceProp* p = &device.properties;
    return p->major == 9 || p->major == 10 || (p->major == 8 && p->minor == 0);
}
int device_generation(void) { return device.properties.major; }

// Dense FLOPs of one multiprocessor in one cycle times clock and number. Source: NVIDIA's white
// papers on A100, H100 and Blackwell; the clock is the highest, so that the datasheet's boost
// figure results where boost is the limit (A100: 312; an H100 SXM is listed with 1830 MHz, hence
// the cap).
double device_peak_tflops(void) {
    const cudaDeviceProp* p = &device.properties;
    bool is_data_centre = device_is_data_centre();
    double ghz = device.clock_khz * 1e-6;
    if (p->major == 9 && ghz > 1.83) ghz = 1.83;
    double flops = FLOATX_DTYPE == DTYPE_FP32 ? (p->major == 8 && is_data_centre ? 128.0 : 256.0)
                   : p->major >= 10           ? (is_data_centre ? 8192.0 : 1024.0)
                   : p->major == 9            ? 4096.0
                                              : (is_data_centre ? 2048.0 : 1024.0);
    return flops * ghz * p->multiProcessorCount * 1e-3;
}

// ---- memory -------------------------------------------------------------------------------------

namespace {

[[noreturn]] void out_of_memory(const Ledger* ledger, const LedgerLine* wanted, bool is_pinned) {
    size_t free_bytes = 0, total_bytes = 0;
    cudaGetLastError(); // the failed allocation's
    CUDACHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    Error error = {};
    error_set(&error, EXIT_USAGE,
              "out of %s memory for \"%s\" (%.1f MiB): the plan takes %.1f MiB on this rank, %.1f "
              "MiB are allocated, the GPU has %.1f MiB free of %.1f; use a smaller -b or -t, a "
              "higher -r, or more ranks with -z 3",
              is_pinned ? "pinned host" : "GPU", wanted->name, mib(wanted->bytes),
              mib(ledger_total_bytes(ledger)), mib(ledger->allocated_bytes), mib(free_bytes),
              mib(total_bytes));
    error_exit(&error);
}

void* allocate(Ledger* ledger, const char* name, bool is_pinned) {
    LedgerLine* line = ledger_find(ledger, name);
    if (line == nullptr) return nullptr;
    CHECK(!device.is_frozen, "\"%s\" is allocated after step 0", name);
    CHECK(line->ptr == nullptr, "\"%s\" is allocated twice", name);
    CHECK(device.num_allocations < LEDGER_MAX_LINES, "more allocations than lines");
    void* memory = nullptr;
    cudaError_t status = is_pinned ? cudaHostAlloc(&memory, line->bytes, cudaHostAllocDefault)
                                   : cudaMalloc(&memory, line->bytes);
    if (status == cudaErrorMemoryAllocation) out_of_memory(ledger, line, is_pinned);
    CUDACHECK(status);
    int fill = debug_poison() ? 0xFF : 0;
    if (is_pinned) {
        memset(memory, fill, line->bytes);
    } else {
        // The communication stream may use the memory first: the fill has happened when this
        // returns.
        device_fill(memory, fill, line->bytes, STREAM_COMPUTE);
        poll_stream(compute_stream());
    }
    device.allocations[device.num_allocations++] = {memory, is_pinned};
    line->ptr = memory;
    ledger->allocated_bytes += line->bytes;
    return memory;
}

} // namespace

void* device_alloc(Ledger* ledger, const char* name) { return allocate(ledger, name, false); }
void* device_alloc_pinned(Ledger* ledger, const char* name) { return allocate(ledger, name, true); }
void device_alloc_freeze(void) { device.is_frozen = true; }

// ---- copies -------------------------------------------------------------------------------------

cudaStream_t cuda_stream(stream_t stream) { return device.streams[stream]; }
cudaStream_t compute_stream(void) { return device.streams[STREAM_COMPUTE]; }

void device_upload(void* dst, const void* host, size_t bytes) {
    CUDACHECK(cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, compute_stream()));
    poll_stream(compute_stream());
}

void device_download(void* host, const void* src, size_t bytes) {
    CUDACHECK(cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, compute_stream()));
    poll_stream(compute_stream());
}

void device_copy(void* dst, const void* src, size_t bytes, stream_t stream) {
    CUDACHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, cuda_stream(stream)));
}

void device_fill(void* dst, int byte, size_t bytes, stream_t stream) {
    CUDACHECK(cudaMemsetAsync(dst, byte, bytes, cuda_stream(stream)));
}

void device_upload_async(void* dst, const void* host, size_t bytes) {
    Staging* s = &device.staging[device.next_staging];
    device.next_staging = (device.next_staging + 1) % NUM_STAGING;
    poll([=] { return cudaEventQuery(s->copied); });
    if (bytes > s->bytes) {
        CUDACHECK(cudaFreeHost(s->host));
        CUDACHECK(cudaHostAlloc(&s->host, bytes, cudaHostAllocDefault));
        s->bytes = bytes;
    }
    memcpy(s->host, host, bytes);
    CUDACHECK(cudaMemcpyAsync(dst, s->host, bytes, cudaMemcpyHostToDevice, compute_stream()));
    CUDACHECK(cudaEventRecord(s->copied, compute_stream()));
}

// ---- events -------------------------------------------------------------------------------------

event_t event_create(void) {
    cudaEvent_t event;
    CUDACHECK(cudaEventCreateWithFlags(&event, cudaEventDefault)); // with time: event_elapsed_ms
    return reinterpret_cast<event_t>(event);
}

void event_record(event_t event, stream_t stream) {
    CUDACHECK(cudaEventRecord(cuda_event(event), cuda_stream(stream)));
}

void event_wait(event_t event, stream_t stream) {
    CUDACHECK(cudaStreamWaitEvent(cuda_stream(stream), cuda_event(event), 0));
}

bool event_is_done(event_t event) {
    cudaError_t status = cudaEventQuery(cuda_event(event));
    if (status != cudaErrorNotReady) CUDACHECK(status);
    return status == cudaSuccess;
}

void event_synchronize(event_t event) {
    poll([=] { return cudaEventQuery(cuda_event(event)); });
}

double event_elapsed_ms(event_t begin, event_t end) {
    float ms = 0.0f;
    CUDACHECK(cudaEventElapsedTime(&ms, cuda_event(begin), cuda_event(end)));
    return ms;
}

void event_destroy(event_t event) { CUDACHECK(cudaEventDestroy(cuda_event(event))); }

void device_on_wait(void (*on_wait)(void)) { device.on_wait = on_wait; }

void device_synchronize(void) {
    for (cudaStream_t stream : device.streams) poll_stream(stream);
}

double now_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}
