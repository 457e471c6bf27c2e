// backend/cpu/device.c - the CPU as a device: threads, affinity, memory, and streams that are one.
//
// Work happens in the calling thread and the threads of its parallel regions; when a call returns,
// it is done. Streams therefore need nothing, and an event is a reading of the clock.
#include <errno.h>
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/device.h"
#include "backend/ops.h"
#include "core/fault.h"

// ---- threads and affinity -----------------------------------------------------------------------

static cpu_set_t affinity_mask(void) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) CPU_SET(0, &mask);
    return mask;
}

// The cores that this process may use if it asks for all: those online, less what a container
// forbids. The mask of the launcher does not count; it is the same after the call as before.
static cpu_set_t usable_cores(void) {
    const cpu_set_t given = affinity_mask();
    cpu_set_t all;
    memset(&all, 0xFF, sizeof all);
    if (sched_setaffinity(0, sizeof all, &all) != 0) return given;
    const cpu_set_t usable = affinity_mask();
    sched_setaffinity(0, sizeof given, &given);
    return usable;
}

static int omp_num_threads_variable(void) {
    const char* text = getenv("OMP_NUM_THREADS");
    long threads = text != NULL ? strtol(text, NULL, 10) : 0;
    return threads > 0 && threads < 100000 ? (int)threads : 0;
}

int device_threads(int requested, int local_size) {
    if (requested > 0) return requested;
    if (omp_num_threads_variable() > 0) return omp_num_threads_variable();
    const cpu_set_t usable = usable_cores();
    const int share = CPU_COUNT(&usable) / (local_size > 0 ? local_size : 1);
    return share > 1 ? share : 1;
}

// `count` cores of `cores` after the first `skip`.
static cpu_set_t pick_cores(const cpu_set_t* cores, int skip, int count) {
    cpu_set_t picked;
    CPU_ZERO(&picked);
    for (int core = 0; core < CPU_SETSIZE && count > 0; core++) {
        if (!CPU_ISSET(core, cores)) continue;
        if (skip > 0) {
            skip--;
        } else {
            CPU_SET(core, &picked);
            count--;
        }
    }
    return picked;
}

// A launcher may have bound this rank to fewer cores than it has threads (Open MPI binds `-np 1`
// and `-np 2` to one core a rank), which would cost half the speed in silence. Such a rank takes
// cores of its own, by its place on the host, or all of them where there are too few for that.
static void widen_affinity(const DeviceOptions* options, int threads) {
    const cpu_set_t given = affinity_mask(), usable = usable_cores();
    const int wanted = threads < CPU_COUNT(&usable) ? threads : CPU_COUNT(&usable);
    if (CPU_COUNT(&given) >= wanted) return;

    cpu_set_t mask = usable;
    if ((options->local_rank + 1) * threads <= CPU_COUNT(&usable) && options->local_size > 1) {
        mask = pick_cores(&usable, options->local_rank * threads, threads);
    }
    if (sched_setaffinity(0, sizeof mask, &mask) != 0) return;
    if (options->quiet_affinity || options->local_rank > 0) return;
    fprintf(stderr,
            "note: the launcher bound this rank to %d of %d cores; it now uses %d for %d threads\n",
            CPU_COUNT(&given), CPU_COUNT(&usable), CPU_COUNT(&mask), threads);
}

bool device_init(const DeviceOptions* options, Error* error) {
    (void)error; // a CPU is always there
    const int threads = device_threads(options->threads, options->local_size);
    widen_affinity(options, threads);
    omp_set_dynamic(0);
    omp_set_num_threads(threads);
    return true;
}

const char* device_backend(void) { return "cpu"; }
bool device_is_host(void) { return true; }

static const char* instruction_set(void) {
#if defined(__AVX512BF16__)
    return "AVX-512 BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "baseline instructions";
#endif
}

const char* device_description(void) {
    static char text[200];
    const int threads = omp_get_max_threads();
    snprintf(text, sizeof text, "%d thread%s, %s, %s", threads, threads == 1 ? "" : "s",
             instruction_set(), ops_description());
    return text;
}

double device_peak_tflops(void) { return 0.0; }

// ---- memory -------------------------------------------------------------------------------------

enum { ALIGNMENT = 4096 }; // a page; 64, a cache line, is what the operations need

static void* allocations[LEDGER_MAX_LINES];
static int num_allocations;
static bool is_frozen;

NO_RETURN static void die_out_of_memory(const Ledger* ledger, const LedgerLine* wanted) {
    Error error = {0};
    error_set(
        &error, EXIT_USAGE,
        "out of memory for \"%s\" (%.1f MiB): the plan takes %.1f MiB on this rank, %.1f MiB are "
        "allocated; use a smaller -b or -t, a higher -r, or more ranks with -z 3",
        wanted->name, (double)wanted->bytes / 1048576.0,
        (double)ledger_total_bytes(ledger) / 1048576.0,
        (double)ledger->allocated_bytes / 1048576.0);
    error_exit(&error);
}

void* device_alloc(Ledger* ledger, const char* name) {
    LedgerLine* line = ledger_find(ledger, name);
    if (line == NULL) return NULL;
    CHECK(!is_frozen, "\"%s\" is allocated after step 0", name);
    CHECK(line->ptr == NULL, "\"%s\" is allocated twice", name);
    CHECK(num_allocations < LEDGER_MAX_LINES, "more allocations than lines");
    void* memory = NULL;
    if (posix_memalign(&memory, ALIGNMENT, line->bytes) != 0) die_out_of_memory(ledger, line);
    memset(memory, debug_poison() ? 0xFF : 0, line->bytes);
    allocations[num_allocations++] = memory;
    line->ptr = memory;
    ledger->allocated_bytes += line->bytes;
    return memory;
}

void* device_alloc_pinned(Ledger* ledger, const char* name) { return device_alloc(ledger, name); }

void device_alloc_freeze(void) { is_frozen = true; }

void device_free_all(void) {
    while (num_allocations > 0) free(allocations[--num_allocations]);
    is_frozen = false;
}

// ---- copies, streams and events -----------------------------------------------------------------

void device_upload(void* device, const void* host, size_t bytes) { memcpy(device, host, bytes); }
void device_download(void* host, const void* device, size_t bytes) { memcpy(host, device, bytes); }
void device_upload_async(void* device, const void* host, size_t bytes) {
    memcpy(device, host, bytes);
}

enum { COPY_BLOCK = 1 << 16 }; // bytes of one thread at a time

void device_copy(void* dst, const void* src, size_t bytes, stream_t stream) {
    (void)stream;
#pragma omp parallel for schedule(static) if (bytes > 4 * COPY_BLOCK)
    for (size_t at = 0; at < bytes; at += COPY_BLOCK) {
        memcpy((char*)dst + at, (const char*)src + at, min_size(COPY_BLOCK, bytes - at));
    }
}

void device_fill(void* dst, int byte, size_t bytes, stream_t stream) {
    (void)stream;
#pragma omp parallel for schedule(static) if (bytes > 4 * COPY_BLOCK)
    for (size_t at = 0; at < bytes; at += COPY_BLOCK) {
        memset((char*)dst + at, byte, min_size(COPY_BLOCK, bytes - at));
    }
}

struct Event {
    double seconds;
};

event_t event_create(void) { return checked_calloc(1, sizeof(struct Event)); }
void event_record(event_t event, stream_t stream) {
    (void)stream;
    event->seconds = now_seconds();
}
void event_wait(event_t event, stream_t stream) {
    (void)event;
    (void)stream;
}
bool event_is_done(event_t event) {
    (void)event;
    return true;
}
void event_synchronize(event_t event) { (void)event; }
double event_elapsed_ms(event_t begin, event_t end) {
    return (end->seconds - begin->seconds) * 1e3;
}
void event_destroy(event_t event) { free(event); }
void device_synchronize(void) {}
bool device_health(char* text, size_t size) {
    (void)text;
    (void)size;
    return false;
}
void device_on_wait(void (*poll)(void)) { (void)poll; }

double now_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}
