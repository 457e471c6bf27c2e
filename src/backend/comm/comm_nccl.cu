// backend/comm/comm_nccl.cu - ranks connected by NCCL; MPI carries their small host messages.
//
// It takes an open MPI transport and replaces what touches device memory: same Comm, same sequence
// numbers, same table, so the watchdog and ZERO_FAULT see no difference. Before each collective the
// ranks' hosts meet (about 10 microseconds on one host), so that a rank which is elsewhere is named
// before the GPUs can hang on it. All NCCL calls go to STREAM_COMM, from one thread, in one order.
// No rank calls ncclCommAbort, which can hang itself: the end of the process frees the GPU.
//
// Exact reductions bring the pieces by grouped send and receive and add them with fold(), in rank
// order; fast ones are ncclReduceScatter.
#include <cuda_runtime.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/comm.h"
#include "backend/comm/table.h"
#include "backend/cuda/common.cuh"
#include "backend/ops.h"
#include "core/fault.h"

#define NCCLCHECK(call)                                                                            \
    do {                                                                                           \
        ncclResult_t nccl_result_ = (call);                                                        \
        if (nccl_result_ != ncclSuccess) nccl_fail(__FILE__, __LINE__, #call, nccl_result_);       \
    } while (0)

namespace {

// Collectives whose end on the GPU is watched, and how many the host may queue ahead of it: enough
// for the weights of all units after a step, few enough for what lies between them not to fill a
// stream's queue, whose next launch would block. No more than the table remembers.
constexpr int RING = TABLE_HISTORY;

constexpr unsigned INIT_SECONDS = 120, SELF_TEST_SECONDS = 30; // longer ones are hangs

#define ADVICE                                                                                     \
    "usual causes: broken peer access between GPUs (try NCCL_P2P_DISABLE=1), the wrong network "   \
    "between hosts (NCCL_SOCKET_IFNAME), a small /dev/shm in a container; NCCL_DEBUG=WARN says "   \
    "more, --comm mpi does without NCCL"

struct {
    ncclComm_t nccl;
    Comm* comm;
    char place[120]; // "rank 1 (host gpu07, CUDA device 1)"
    void (*mpi_free)(Comm*);
    char* exchange;          // (comm_exchange_bytes) device: what arrives in exact reductions
    event_t done[RING];      // the end of collective seq is done[seq % RING]
    long queued[RING];       // seq, or 0
    double progress_seconds; // when one was queued or seen to have ended last
} state;

NO_RETURN void nccl_fail(const char* file, int line, const char* call, ncclResult_t result) {
    const char* detail = state.nccl ? ncclGetLastError(state.nccl) : "";
    die_at(file, line, EXIT_COMM, "NCCL: %s: %s%s%s; " ADVICE, call, ncclGetErrorString(result),
           detail[0] ? ": " : "", detail);
}

ncclDataType_t nccl_type(DType dtype) {
    return dtype == DTYPE_FP32 ? ncclFloat32 : dtype == DTYPE_BF16 ? ncclBfloat16 : ncclFloat16;
}

cudaStream_t stream() { return cuda_stream(STREAM_COMM); }

// ---- watching the GPU ---------------------------------------------------------------------------

// False: this rank is to leave the collective out. It first waits, by polling, for the one whose
// place in the ring this one takes.
bool begin(Comm* comm, CommOp op, int unit, size_t elems) {
    int slot = (int)((comm->seq + 1) % RING);
    if (state.queued[slot]) event_synchronize(state.done[slot]);
    if (!comm_enter(comm, op, unit, elems)) return false;
    comm->meet(comm);
    return true;
}

void end(Comm* comm, CommOp op, size_t shard_elems, DType dtype) {
    int slot = (int)(comm->seq % RING);
    if (!state.done[slot]) state.done[slot] = event_create();
    event_record(state.done[slot], STREAM_COMM);
    state.queued[slot] = comm->seq;
    state.progress_seconds = now_seconds(); // the host may have been elsewhere for long
    comm_leave(comm, op, shard_elems * (size_t)(comm->world_size - 1), dtype_bytes(dtype));
}

// Runs now and then while the host waits for the GPU: errors that NCCL has met meanwhile, and
// collectives that all ranks have queued but that do not end.
void on_wait() {
    ncclResult_t result = ncclSuccess;
    NCCLCHECK(ncclCommGetAsyncError(state.nccl, &result));
    if (result != ncclSuccess && result != ncclInProgress)
        nccl_fail(__FILE__, __LINE__, "asynchronous error", result);

    long oldest = 0; // that has not ended
    bool progress = false;
    for (int slot = 0; slot < RING; slot++) {
        long seq = state.queued[slot];
        if (seq == 0) continue;
        if (event_is_done(state.done[slot])) {
            state.queued[slot] = 0;
            progress = true;
        } else if (oldest == 0 || seq < oldest) {
            oldest = seq;
        }
    }
    double now = now_seconds();
    if (progress || oldest == 0) state.progress_seconds = now;
    int timeout = state.comm->timeout_seconds;
    if (timeout == 0 || now - state.progress_seconds < timeout) return;
    char text[120];
    comm_entry_text(&table_record(state.comm)->history[oldest % TABLE_HISTORY], text, sizeof text);
    table_fail(state.comm->table,
               "all ranks have queued %s, but %s has not finished it for %d s; " ADVICE, text,
               state.place, timeout);
}

// ---- memory -------------------------------------------------------------------------------------

// The exchange buffer is device memory here: NCCL sends from it. The step's messages stay on the
// host.
void* nccl_alloc(Comm*, Ledger* ledger, const char* line, CommMemory kind) {
    bool is_exchange = strcmp(line, "exchange") == 0;
    if (kind == COMM_STAGING && !is_exchange) return device_alloc_pinned(ledger, line);
    void* memory = device_alloc(ledger, line);
    if (is_exchange) state.exchange = static_cast<char*>(memory);
    return memory;
}

void nccl_free_memory(Comm*) {}
void nccl_expose(Comm*) {}       // events order what NCCL reads: it reads this rank's memory only
void nccl_settle(Comm*, long) {} // by its own calls
const void* nccl_peer_view(Comm*, const void*, int) { return nullptr; }

// ---- collectives on device memory ---------------------------------------------------------------

void nccl_all_gather(Comm* comm, void* full, const void* shard, size_t shard_elems, DType dtype,
                     int unit) {
    if (!begin(comm, COMM_ALL_GATHER, unit, shard_elems)) return;
    NCCLCHECK(ncclAllGather(shard, full, shard_elems, nccl_type(dtype), state.nccl, stream()));
    end(comm, COMM_ALL_GATHER, shard_elems, dtype);
}

// Pieces of slice `rank` of every rank's `full`, added in rank order.
void fold_from_all(const Comm* comm, char* acc, DType acc_dtype, bool accumulate, const char* full,
                   size_t shard_elems, DType dtype) {
    int N = comm->world_size, rank = comm->rank;
    size_t size = dtype_bytes(dtype);
    // A slot for each rank; nothing arrives in the own one, which is comm_fold's to spare.
    size_t slot_elems = comm_exchange_bytes(N) / (size_t)N / size / 64 * 64;
    const void** sources = static_cast<const void**>(checked_malloc((size_t)N * sizeof(void*)));
    for (size_t done = 0; done < shard_elems; done += slot_elems) {
        size_t n = min_size(slot_elems, shard_elems - done);
        NCCLCHECK(ncclGroupStart());
        for (int r = 0; r < N; r++) {
            const char* piece = full + ((size_t)r * shard_elems + done) * size;
            char* slot = state.exchange + (size_t)r * slot_elems * size;
            sources[r] = r == rank ? piece : slot;
            if (r == rank) continue;
            NCCLCHECK(ncclSend(piece, n, nccl_type(dtype), r, state.nccl, stream()));
            NCCLCHECK(ncclRecv(slot, n, nccl_type(dtype), r, state.nccl, stream()));
        }
        NCCLCHECK(ncclGroupEnd());
        comm_fold(comm, acc + done * dtype_bytes(acc_dtype), acc_dtype, accumulate, sources, dtype,
                  n, state.exchange + (size_t)rank * slot_elems * size);
    }
    free(sources);
}

void nccl_reduce_scatter(Comm* comm, void* acc, DType acc_dtype, bool accumulate, void* full,
                         size_t shard_elems, DType dtype, bool exact, int unit) {
    if (!begin(comm, COMM_REDUCE_SCATTER, unit, shard_elems)) return;
    if (exact) {
        fold_from_all(comm, static_cast<char*>(acc), acc_dtype, accumulate,
                      static_cast<const char*>(full), shard_elems, dtype);
    } else {
        // In place in `full`, unless the sum may go straight to its place.
        char* own =
            static_cast<char*>(full) + (size_t)comm->rank * shard_elems * dtype_bytes(dtype);
        bool direct = acc_dtype == dtype && !accumulate;
        NCCLCHECK(ncclReduceScatter(full, direct ? acc : own, shard_elems, nccl_type(dtype),
                                    ncclSum, state.nccl, stream()));
        const void* source = own;
        if (!direct) fold(acc, acc_dtype, accumulate, &source, dtype, 1, shard_elems, STREAM_COMM);
    }
    end(comm, COMM_REDUCE_SCATTER, shard_elems, dtype);
}

// ---- opening ------------------------------------------------------------------------------------

struct Facts { // of one rank, compared before the communicator is made
    char host[64];
    cudaUUID_t gpu;
    int driver, runtime, nccl;
};

bool same_version(const Facts* all, int N, const char* what, int Facts::*version, Error* error) {
    for (int r = 1; r < N; r++) {
        if (all[r].*version == all[0].*version) continue;
        return error_set(error, EXIT_USAGE,
                         "%s is %d on rank 0 (%s) and %d on rank %d (%s): use the same everywhere",
                         what, all[0].*version, all[0].host, all[r].*version, r, all[r].host);
    }
    return true;
}

bool distinct_gpus(const Facts* all, int N, Error* error) {
    for (int a = 0; a < N; a++) {
        for (int b = a + 1; b < N; b++) {
            if (strcmp(all[a].host, all[b].host) != 0) continue;
            if (memcmp(&all[a].gpu, &all[b].gpu, sizeof all[a].gpu) != 0) continue;
            return error_set(
                error, EXIT_USAGE,
                "ranks %d and %d on %s share one GPU, which NCCL cannot: start at most "
                "one rank per GPU, or use --comm mpi",
                a, b, all[a].host);
        }
    }
    return true;
}

bool check_facts(Comm* comm, Error* error) {
    Facts mine;
    memset(&mine, 0, sizeof mine);
    int ordinal = 0;
    cudaDeviceProp properties;
    gethostname(mine.host, sizeof mine.host - 1);
    CUDACHECK(cudaGetDevice(&ordinal));
    snprintf(state.place, sizeof state.place, "rank %d (host %s, CUDA device %d)", comm->rank,
             mine.host, ordinal);
    CUDACHECK(cudaGetDeviceProperties(&properties, ordinal));
    mine.gpu = properties.uuid;
    CUDACHECK(cudaDriverGetVersion(&mine.driver));
    CUDACHECK(cudaRuntimeGetVersion(&mine.runtime));
    NCCLCHECK(ncclGetVersion(&mine.nccl));
    int N = comm->world_size;
    Facts* all = static_cast<Facts*>(checked_malloc((size_t)N * sizeof(Facts)));
    comm->host_all_gather(comm, all, &mine, sizeof mine);
    bool ok = same_version(all, N, "the CUDA driver's version", &Facts::driver, error) &&
              same_version(all, N, "the CUDA runtime's version", &Facts::runtime, error) &&
              same_version(all, N, "NCCL's version", &Facts::nccl, error) &&
              distinct_gpus(all, N, error);
    free(all);
    return ok;
}

// ---- start-up -----------------------------------------------------------------------------------

// Ends the run with a line unless it is destroyed in time. A thread, because NCCL may connect, and
// hang, inside a call.
struct TimeLimit {
    const char* what;
    unsigned seconds;
    pthread_t thread;

    TimeLimit(const char* what_, unsigned seconds_) : what(what_), seconds(seconds_) {
        CHECK(pthread_create(&thread, nullptr, expire, this) == 0, "no thread for a time limit");
    }
    ~TimeLimit() {
        pthread_cancel(thread);
        pthread_join(thread, nullptr);
    }
    static void* expire(void* self) {
        const TimeLimit* limit = static_cast<TimeLimit*>(self);
        for (unsigned left = limit->seconds; left > 0;) left = sleep(left); // signals wake it
        table_fail(state.comm->table, "%s has not ended for %u s on %s; " ADVICE, limit->what,
                   limit->seconds, state.place);
    }
};

// Element i of what a rank sends; sums over all ranks stay below 2^31.
int test_value(int rank, size_t i) { return 31 * rank + (int)i; }

// NCCL connects peers and takes memory at the first use of each kind of operation: here, before the
// plan fills the GPU, and with known numbers.
//   sent      (N, slice)        slice r goes to rank r
//   results   (2*N + 1, slice)  by all_gather (N), by messages (N), by reduce_scatter
void use_every_kind(const Comm* comm, const int* sent, int* results, size_t slice) {
    size_t full = (size_t)comm->world_size * slice, own = (size_t)comm->rank * slice;
    size_t num_results = 2 * full + slice;
    void* memory = nullptr;
    CUDACHECK(cudaMalloc(&memory, (full + num_results) * sizeof(int)));
    int* send = static_cast<int*>(memory);
    int *gathered = send + full, *received = gathered + full, *sum = received + full;
    device_upload(send, sent, full * sizeof(int));
    NCCLCHECK(ncclAllGather(send + own, gathered, slice, ncclInt32, state.nccl, stream()));
    device_copy(received + own, send + own, slice * sizeof(int), STREAM_COMM);
    NCCLCHECK(ncclGroupStart());
    for (int r = 0; r < comm->world_size; r++) {
        if (r == comm->rank) continue;
        size_t at = (size_t)r * slice;
        NCCLCHECK(ncclSend(send + at, slice, ncclInt32, r, state.nccl, stream()));
        NCCLCHECK(ncclRecv(received + at, slice, ncclInt32, r, state.nccl, stream()));
    }
    NCCLCHECK(ncclGroupEnd());
    NCCLCHECK(ncclReduceScatter(send, sum, slice, ncclInt32, ncclSum, state.nccl, stream()));
    device_synchronize();
    device_download(results, gathered, num_results * sizeof(int));
    CUDACHECK(cudaFree(memory));
}

void self_test(const Comm* comm, Error* error) {
    constexpr size_t SLICE = 256;
    size_t full = (size_t)comm->world_size * SLICE, num_results = 2 * full + SLICE;
    int* sent = static_cast<int*>(checked_calloc(full + 2 * num_results, sizeof(int)));
    int *expected = sent + full, *found = expected + num_results;
    bool is_faulty = fault_now(FAULT_LINK, -1, -1), is_late = fault_delay_ms() > 0;
    for (size_t i = 0; i < full; i++) {
        int r = (int)(i / SLICE);
        int to_this = test_value(r, (size_t)comm->rank * SLICE + i % SLICE);
        sent[i] = test_value(comm->rank, i) + (is_faulty && !is_late);
        expected[i] = test_value(r, i);
        expected[full + i] = to_this;
        expected[2 * full + i % SLICE] += to_this;
    }
    if (is_faulty && is_late) usleep((useconds_t)fault_delay_ms() * 1000);
    {
        TimeLimit limit("NCCL's self-test", SELF_TEST_SECONDS);
        use_every_kind(comm, sent, found, SLICE);
    }
    size_t i = 0;
    while (i < num_results && found[i] == expected[i]) i++;
    if (i < num_results) {
        const char* call = i < full       ? "ncclAllGather"
                           : i < 2 * full ? "ncclSend and ncclRecv"
                                          : "ncclReduceScatter";
        char source[32] = "";
        if (i < 2 * full) snprintf(source, sizeof source, " from rank %zu", i % full / SLICE);
        error_set(error, EXIT_COMM,
                  "NCCL's self-test on %s: %s brought %d instead of %d%s; " ADVICE, state.place,
                  call, found[i], expected[i], source);
    }
    free(sent);
}

void nccl_free(Comm* comm) {
    device_on_wait(nullptr);
    NCCLCHECK(ncclCommDestroy(state.nccl));
    for (event_t event : state.done) {
        if (event) event_destroy(event);
    }
    void (*mpi_free)(Comm*) = state.mpi_free;
    state = {};
    mpi_free(comm);
}

} // namespace

Comm* comm_nccl_create(Comm* mpi, Error* error) {
    if (!check_facts(mpi, error)) return mpi; // the same on all ranks; the caller agrees and ends
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (mpi->rank == 0) NCCLCHECK(ncclGetUniqueId(&id));
    mpi->host_broadcast(mpi, &id, sizeof id, 0);
    state.comm = mpi;
    {
        TimeLimit limit("ncclCommInitRank", INIT_SECONDS);
        NCCLCHECK(ncclCommInitRank(&state.nccl, mpi->world_size, id, mpi->rank));
    }
    state.mpi_free = mpi->free;
    mpi->name = "nccl";
    mpi->alloc = nccl_alloc;
    mpi->free_memory = nccl_free_memory;
    mpi->expose = nccl_expose;
    mpi->settle = nccl_settle;
    mpi->peer_view = nccl_peer_view;
    mpi->all_gather = nccl_all_gather;
    mpi->reduce_scatter = nccl_reduce_scatter;
    mpi->free = nccl_free;
    device_on_wait(on_wait);
    self_test(mpi, error);
    return mpi;
}
