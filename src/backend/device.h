// backend/device.h - where tensors live and in which order work on them happens.
//
// Two streams: work on one stream happens in order; between streams only events order it. On the
// CPU both streams are the calling thread, everything has happened when a call returns, and events
// cost nothing; the CUDA backend maps them one to one. One device per process.
#ifndef BACKEND_DEVICE_H
#define BACKEND_DEVICE_H

#include "core/check.h"
#include "core/ledger.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { STREAM_COMPUTE, STREAM_COMM } stream_t;
typedef struct Event* event_t;

typedef struct {
    int local_rank, local_size; // this rank among the ranks of its host
    int threads;                // CPU threads asked for; 0 = this rank's share of the host
    bool quiet_affinity;        // do not report a widened affinity mask
} DeviceOptions;

// Chooses the device (CUDA: GPU local_rank) or sets thread count and affinity (CPU: threads =
// online cores / local_size unless given by options or OMP_NUM_THREADS; a rank whose mask is
// smaller than its share widens it, before the first parallel region, and says so). False: no
// usable device.
bool device_init(const DeviceOptions* options, Error* error);
void device_free_all(void); // every allocation of device_alloc, streams, handles

// Threads a rank would use: --threads, else OMP_NUM_THREADS, else max(1, online cores /
// local_size).
int device_threads(int requested, int local_size);

const char* device_backend(void); // "cpu" or "cuda"
bool device_is_host(void);        // device memory is host memory (CPU)
// "2 threads, AVX-512 BF16, oneDNN 2.6.3" | "NVIDIA H200, ..."
const char* device_description(void);

// Peak of matrix products in TFLOP/s for floatX, 0 where unknown (the CPU).
double device_peak_tflops(void);

// One line on clock, power and temperature of the device. False where they are not known: the CPU,
// or no NVML (one warning).
bool device_health(char* text, size_t size);

// Allocates the ledger's line of that name, once, with exactly its bytes, at least 64-byte aligned
// (CUDA: 256); zeroed, or NaN under ZERO_DEBUG=poison. A name that is not a line returns NULL (the
// line was 0 bytes). Out of memory: one line with the plan, exit code 2.
void* device_alloc(Ledger* ledger, const char* name);

// The same for host memory that messages pass through: pinned on CUDA, device_alloc on the CPU.
void* device_alloc_pinned(Ledger* ledger, const char* name);

// After this, device_alloc dies: all allocation happens before step 0.
void device_alloc_freeze(void);

// Copies between host and device, ordered on the compute stream; both return when the host buffer
// may be used again (upload: reused; download: read). Download is a host sync.
void device_upload(void* device, const void* host, size_t bytes);
void device_download(void* host, const void* device, size_t bytes);
// device_copy also takes pinned host memory on either side.
void device_copy(void* dst, const void* src, size_t bytes, stream_t stream);
void device_fill(void* dst, int byte, size_t bytes, stream_t stream); // byte 0xFF = NaN in floatX

// Uploads without waiting, for token batches: two pinned staging buffers, each reused only after
// its earlier upload has happened.
void device_upload_async(void* device, const void* host, size_t bytes);

event_t event_create(void);
void event_record(event_t event, stream_t stream);   // marks what has been queued so far
void event_wait(event_t event, stream_t stream);     // later work on stream waits for the mark
bool event_is_done(event_t event);                   // has the marked work happened?
void event_synchronize(event_t event);               // the host waits for the mark; polls
double event_elapsed_ms(event_t begin, event_t end); // both done; host clock on the CPU
void event_destroy(event_t event);
void device_synchronize(void); // polls; for the end of a step and shutdown

// `poll` is called now and then while the host waits for the device, to see whether what it waits
// for can still come; NULL: nothing. Never called on the CPU.
void device_on_wait(void (*poll)(void));

double now_seconds(void); // monotonic host clock

#ifdef __cplusplus
}
#endif
#endif
