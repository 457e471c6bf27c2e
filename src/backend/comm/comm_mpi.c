// backend/comm/comm_mpi.c - ranks connected by MPI; on one host, by shared memory.
//
// Shared memory (all ranks on one host, device memory is host memory): buffers that others read are
// windows, and a collective is a rendezvous followed by reading the others' memory directly:
// gradients are folded out of their slots, weights copied out of their shards, without a copy in
// between. Windows are memfds, opened by the others through /proc: no name in /dev/shm that could
// be left behind, and no limit by its size. Where that does not work every buffer is private.
//
// Messages (across hosts, or CUDA): pairwise exchange, in pieces well below the 2^31 of MPI's
// counts, then the same fold() in the same rank order, so the same bits. Device memory that MPI
// cannot read passes through pinned host memory.
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/comm.h"
#include "backend/comm/table.h"
#include "backend/ops.h"
#include "core/fault.h"

#define MPICHECK(call)                                                                             \
    do {                                                                                           \
        int mpi_result_ = (call);                                                                  \
        if (mpi_result_ != MPI_SUCCESS) mpi_fail(__FILE__, __LINE__, mpi_result_);                 \
    } while (0)

NO_RETURN static void mpi_fail(const char* file, int line, int result) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(result, text, &length);
    die_at(file, line, EXIT_COMM, "MPI: %s", text);
}

enum { MAX_WINDOWS = 8 };
enum { MAX_COUNT = 1 << 30 };  // bytes in one message
enum { READ_ELEMS = 1 << 18 }; // read from others at once; their pages count as ours meanwhile

// Memory of every rank of the host, of the same size on each.
typedef struct {
    char* mine;
    char** bases; // (local_size) the same memory as seen by this rank; all equal for ONE_COPY
    size_t bytes;
    bool is_one_copy;
} Window;

typedef struct {
    Comm base;
    MPI_Comm host; // the ranks of this host
    bool shares_memory;
    bool has_shared_table;
    Window windows[MAX_WINDOWS];
    int num_windows;
    long exposed_at;    // base.seq when this rank last wrote what others read
    long rendezvous_at; // base.seq of the last rendezvous
    char* exchange;     // (comm_exchange_bytes) host: half to receive into, half to send from
    event_t staged;     // the copy that was queued last
} MpiComm;

static MpiComm* mpi(Comm* comm) { return (MpiComm*)comm; }

// ---- shared memory ------------------------------------------------------------------------------

// Maps, for each rank of the host, `bytes` that it made (owners = local_size), or what local rank 0
// made (owners = 1). The same answer on all ranks: false and nothing mapped if any of them cannot.
static bool map_shared(MPI_Comm host, int owners, size_t bytes, char** bases) {
    int local_rank, local_size;
    MPICHECK(MPI_Comm_rank(host, &local_rank));
    MPICHECK(MPI_Comm_size(host, &local_size));
    int place[2] = {(int)getpid(), -1};
    if (local_rank < owners) {
        place[1] = memfd_create("zero", MFD_CLOEXEC);
        if (place[1] >= 0 && ftruncate(place[1], (off_t)bytes) != 0) {
            close(place[1]);
            place[1] = -1;
        }
    }
    int* places = checked_malloc((size_t)local_size * sizeof(place));
    MPICHECK(MPI_Allgather(place, 2, MPI_INT, places, 2, MPI_INT, host));
    int ok = 1;
    for (int i = 0; i < local_size; i++) {
        const int owner = i < owners ? i : 0;
        char path[64];
        snprintf(path, sizeof(path), "/proc/%d/fd/%d", places[2 * owner], places[2 * owner + 1]);
        bases[i] = i < owners ? MAP_FAILED : bases[0];
        if (i >= owners) continue;
        const int fd = places[2 * owner + 1] < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
        const bool writes = owner == local_rank || owners == 1;
        if (fd >= 0) {
            bases[i] =
                mmap(NULL, bytes, writes ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
            close(fd);
        }
        ok &= bases[i] != MAP_FAILED;
    }
    free(places);
    // Also keeps every memfd open until all ranks have it.
    MPICHECK(MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, host));
    if (place[1] >= 0) close(place[1]);
    for (int i = 0; i < owners && !ok; i++) {
        if (bases[i] != MAP_FAILED) munmap(bases[i], bytes);
    }
    return ok;
}

static void* mpi_alloc(Comm* comm, Ledger* ledger, const char* name, CommMemory memory) {
    MpiComm* m = mpi(comm);
    if (memory == COMM_STAGING) {
        void* staging = device_alloc_pinned(ledger, name);
        if (strcmp(name, "exchange") == 0) m->exchange = staging;
        return staging;
    }
    LedgerLine* line = ledger_find(ledger, name);
    if (!line || !m->shares_memory) return device_alloc(ledger, name);
    CHECK(m->num_windows < MAX_WINDOWS, "more than %d windows", MAX_WINDOWS);
    CHECK(!line->ptr, "\"%s\" is allocated twice", name);
    Window* window = &m->windows[m->num_windows];
    window->bytes = line->bytes;
    window->is_one_copy = memory == COMM_ONE_COPY;
    window->bases = checked_calloc((size_t)comm->local_size, sizeof(char*));
    if (!map_shared(m->host, window->is_one_copy ? 1 : comm->local_size, line->bytes,
                    window->bases)) {
        free(window->bases);
        return device_alloc(ledger, name);
    }
    window->mine = window->bases[comm->local_rank];
    m->num_windows++;
    // Large pages, where the system has them for shared memory: shmem_enabled = advise.
    for (int r = 0; r < comm->local_size; r++)
        madvise(window->bases[r], line->bytes, MADV_HUGEPAGE);
    line->ptr = window->mine;
    ledger->allocated_bytes += line->bytes;
    if (debug_poison()) {
        device_fill(window->mine, 0xFF, line->bytes, STREAM_COMPUTE);
        if (window->is_one_copy) comm->barrier(comm); // before anybody writes values
    }
    return window->mine;
}

static void mpi_free_memory(Comm* comm) {
    MpiComm* m = mpi(comm);
    while (m->num_windows > 0) {
        Window* window = &m->windows[--m->num_windows];
        for (int r = 0; r < comm->local_size; r++) {
            if (r == 0 || !window->is_one_copy) munmap(window->bases[r], window->bytes);
        }
        free(window->bases);
    }
}

// The window that `ptr` lies in, or NULL.
static const Window* find_window(const MpiComm* m, const void* ptr) {
    for (int i = 0; i < m->num_windows; i++) {
        const Window* window = &m->windows[i];
        if ((const char*)ptr >= window->mine && (const char*)ptr < window->mine + window->bytes) {
            return window;
        }
    }
    return NULL;
}

static const void* mpi_peer_view(Comm* comm, const void* mine, int rank) {
    const Window* window = find_window(mpi(comm), mine);
    return window ? window->bases[rank] + ((const char*)mine - window->mine) : NULL;
}

// Gives back the page table entries of another rank's memory that this rank has read. The memory
// itself stays; without this, peak resident memory would show every rank's buffers as this rank's.
static void forget_pages(const void* ptr, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (uintptr_t)ptr / page * page;
    const uintptr_t end = ((uintptr_t)ptr + bytes + page - 1) / page * page;
    madvise((void*)begin, end - begin, MADV_DONTNEED);
}

// ---- meeting ------------------------------------------------------------------------------------

// All ranks are in this collective and in the same one, else the run ends with a line.
static void mpi_meet(Comm* comm) {
    MpiComm* m = mpi(comm);
    if (m->has_shared_table) table_rendezvous(comm);
    m->rendezvous_at = comm->seq;
    if (m->has_shared_table && comm->local_size == comm->world_size) return;
    const CommEntry* mine = &table_record(comm)->history[comm->seq % TABLE_HISTORY];
    CommEntry* entries = checked_malloc((size_t)comm->world_size * sizeof(CommEntry));
    MPICHECK(MPI_Allgather(mine, sizeof(CommEntry), MPI_BYTE, entries, sizeof(CommEntry), MPI_BYTE,
                           MPI_COMM_WORLD));
    table_compare_entries(comm->table, entries, comm->world_size);
    free(entries);
}

static void mpi_expose(Comm* comm) { mpi(comm)->exposed_at = comm->seq; }

static void mpi_barrier(Comm* comm) {
    if (!comm_enter(comm, COMM_BARRIER, COMM_NO_UNIT, 0)) return;
    mpi_meet(comm);
    comm_leave(comm, COMM_BARRIER, 0, 0);
}

static void mpi_settle(Comm* comm, long seq) {
    if (mpi(comm)->shares_memory && seq > 0 && mpi(comm)->rendezvous_at <= seq) mpi_barrier(comm);
}

// ---- messages -----------------------------------------------------------------------------------

static void wait_for_staging(MpiComm* m) {
    if (!m->staged) m->staged = event_create();
    event_record(m->staged, STREAM_COMM);
    event_synchronize(m->staged);
}

// Sends to one rank while receiving from another; both buffers are device memory.
static void exchange_with(MpiComm* m, const char* send, int to, char* receive, int from,
                          size_t bytes) {
    const bool direct = device_is_host();
    const size_t half = comm_exchange_bytes(m->base.world_size) / 2;
    const size_t most = direct ? MAX_COUNT : half;
    for (size_t done = 0; done < bytes; done += most) {
        const int n = (int)min_size(most, bytes - done);
        const char* source = send + done;
        if (!direct) {
            device_copy(m->exchange + half, source, (size_t)n, STREAM_COMM);
            wait_for_staging(m); // also for what was copied out of the other half before
            source = m->exchange + half;
        }
        MPICHECK(MPI_Sendrecv(source, n, MPI_BYTE, to, 0, direct ? receive + done : m->exchange, n,
                              MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        if (!direct) device_copy(receive + done, m->exchange, (size_t)n, STREAM_COMM);
    }
}

static void gather_by_messages(MpiComm* m, char* full, size_t shard_bytes) {
    const int N = m->base.world_size, rank = m->base.rank;
    for (int distance = 1; distance < N; distance++) {
        const int to = (rank + distance) % N, from = (rank + N - distance) % N;
        exchange_with(m, full + (size_t)rank * shard_bytes, to, full + (size_t)from * shard_bytes,
                      from, shard_bytes);
    }
}

static void reduce_by_messages(MpiComm* m, void* acc, DType acc_dtype, bool accumulate,
                               const char* full, size_t shard_elems, DType dtype,
                               const void** sources) {
    const int N = m->base.world_size, rank = m->base.rank;
    const bool direct = device_is_host();
    const size_t size = dtype_bytes(dtype), half = comm_exchange_bytes(N) / 2;
    const size_t slot_elems = half / (size_t)(N - 1) / size / 64 * 64; // whole cache lines
    for (size_t done = 0; done < shard_elems; done += slot_elems) {
        const size_t n = min_size(slot_elems, shard_elems - done);
        for (int distance = 1; distance < N; distance++) {
            const int to = (rank + distance) % N, from = (rank + N - distance) % N;
            char* receive = m->exchange + (size_t)(distance - 1) * slot_elems * size;
            const char* send = full + ((size_t)to * shard_elems + done) * size;
            if (!direct) {
                device_copy(m->exchange + half, send, n * size, STREAM_COMM);
                wait_for_staging(m); // also for the fold of what was received before
                send = m->exchange + half;
            }
            MPICHECK(MPI_Sendrecv(send, (int)(n * size), MPI_BYTE, to, 0, receive, (int)(n * size),
                                  MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            sources[from] = receive;
        }
        sources[rank] = full + ((size_t)rank * shard_elems + done) * size;
        comm_fold(&m->base, (char*)acc + done * dtype_bytes(acc_dtype), acc_dtype, accumulate,
                  sources, dtype, n, m->exchange + half);
    }
    if (!direct) wait_for_staging(m);
}

// ---- collectives on device memory ---------------------------------------------------------------

static void gather_by_reading(const MpiComm* m, const Window* window, char* full, const char* shard,
                              size_t shard_elems, size_t size) {
    const int rank = m->base.rank;
    const bool in_place = shard == full + (size_t)rank * shard_elems * size;
    for (int step = 1; step < m->base.world_size; step++) {
        const int from = (rank + step) % m->base.world_size; // not all from the same at once
        char* to = full + (size_t)from * shard_elems * size;
        // Where the shard lies in its full buffer, the others' lie elsewhere in theirs.
        const char* mine = in_place ? to : shard;
        const char* source = window->bases[from] + (mine - window->mine);
        for (size_t done = 0; done < shard_elems; done += READ_ELEMS) {
            const size_t n = min_size(READ_ELEMS, shard_elems - done) * size;
            device_copy(to + done * size, source + done * size, n, STREAM_COMM);
            forget_pages(source + done * size, n);
        }
    }
}

static void mpi_all_gather(Comm* comm, void* full, const void* shard, size_t shard_elems,
                           DType dtype, int unit) {
    MpiComm* m = mpi(comm);
    if (!comm_enter(comm, COMM_ALL_GATHER, unit, shard_elems)) return;
    const size_t size = dtype_bytes(dtype), shard_bytes = shard_elems * size;
    const Window* window = find_window(m, shard);
    // What has not been written since all ranks last met can be read without meeting again.
    if (!window || m->rendezvous_at <= m->exposed_at) mpi_meet(comm);
    char* own = (char*)full + (size_t)comm->rank * shard_bytes;
    if (own != shard) device_copy(own, shard, shard_bytes, STREAM_COMM);
    if (!window) {
        gather_by_messages(m, full, shard_bytes);
    } else if (!window->is_one_copy) {
        gather_by_reading(m, window, full, shard, shard_elems, size);
    }
    comm_leave(comm, COMM_ALL_GATHER, shard_elems * (size_t)(comm->world_size - 1), size);
}

static void mpi_reduce_scatter(Comm* comm, void* acc, DType acc_dtype, bool accumulate, void* full,
                               size_t shard_elems, DType dtype, bool exact, int unit) {
    (void)exact; // rank order costs nothing here
    MpiComm* m = mpi(comm);
    if (!comm_enter(comm, COMM_REDUCE_SCATTER, unit, shard_elems)) return;
    mpi_meet(comm);
    const int N = comm->world_size;
    const size_t size = dtype_bytes(dtype);
    const Window* window = find_window(m, full);
    const void** sources = checked_malloc((size_t)N * sizeof(void*));
    if (!window) {
        reduce_by_messages(m, acc, acc_dtype, accumulate, full, shard_elems, dtype, sources);
    }
    for (size_t done = 0; window && done < shard_elems; done += READ_ELEMS) {
        const size_t n = min_size(READ_ELEMS, shard_elems - done);
        const size_t offset = (size_t)((const char*)full - window->mine) +
                              ((size_t)comm->rank * shard_elems + done) * size;
        for (int r = 0; r < N; r++) sources[r] = window->bases[r] + offset;
        comm_fold(comm, (char*)acc + done * dtype_bytes(acc_dtype), acc_dtype, accumulate, sources,
                  dtype, n, m->exchange);
        for (int r = 0; r < N; r++) {
            if (r != comm->rank) forget_pages(sources[r], n * size);
        }
    }
    free(sources);
    comm_leave(comm, COMM_REDUCE_SCATTER, shard_elems * (size_t)(N - 1), size);
}

// ---- small messages -----------------------------------------------------------------------------

static void mpi_host_all_gather(Comm* comm, void* all, const void* mine, size_t bytes) {
    CHECK(bytes <= MAX_COUNT, "a message of %zu bytes", bytes);
    if (!comm_enter(comm, COMM_MESSAGE, COMM_NO_UNIT, bytes)) return;
    mpi_meet(comm);
    MPICHECK(MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD));
    comm_leave(comm, COMM_MESSAGE, 0, 0);
}

static void mpi_host_broadcast(Comm* comm, void* buffer, size_t bytes, int root) {
    CHECK(bytes <= MAX_COUNT, "a message of %zu bytes", bytes);
    if (!comm_enter(comm, COMM_MESSAGE, COMM_NO_UNIT, bytes)) return;
    mpi_meet(comm);
    MPICHECK(MPI_Bcast(buffer, (int)bytes, MPI_BYTE, root, MPI_COMM_WORLD));
    comm_leave(comm, COMM_MESSAGE, 0, 0);
}

static void mpi_host_send(Comm* comm, const void* buffer, size_t bytes, int to) {
    (void)comm;
    CHECK(bytes <= MAX_COUNT, "a message of %zu bytes", bytes);
    MPICHECK(MPI_Send(buffer, (int)bytes, MPI_BYTE, to, 1, MPI_COMM_WORLD));
}

static void mpi_host_recv(Comm* comm, void* buffer, size_t bytes, int from) {
    (void)comm;
    CHECK(bytes <= MAX_COUNT, "a message of %zu bytes", bytes);
    MPICHECK(MPI_Recv(buffer, (int)bytes, MPI_BYTE, from, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
}

// ---- life ---------------------------------------------------------------------------------------

static void mpi_abort(int code) {
    MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code);
}

static CommTable* reports; // of this process's host, once there is one
static bool may_report(void) { return !reports || table_may_report(reports); }

static void mpi_free(Comm* comm) {
    MpiComm* m = mpi(comm);
    mpi_free_memory(comm);
    if (m->staged) event_destroy(m->staged);
    // comm->table stays: the watchdog looks at it for as long as the process lives.
    MPI_Comm_free(&m->host);
    MPI_Finalize();
    free(m);
}

static void open_table(MpiComm* m) {
    Comm* comm = &m->base;
    char** bases = checked_calloc((size_t)comm->local_size, sizeof(char*));
    m->has_shared_table = map_shared(m->host, 1, table_bytes(comm->local_size), bases);
    comm->table = m->has_shared_table ? (CommTable*)bases[0] : table_create_private();
    free(bases);
    if (m->has_shared_table && comm->local_rank == 0) {
        table_init(comm->table, comm->local_size, true);
    }
    MPICHECK(MPI_Barrier(m->host));
    reports = comm->table;
    table_record(comm)->rank = comm->rank;
    table_record(comm)->pid = (int)getpid();
}

Comm* comm_mpi_create(bool shared_memory, Error* error) {
    int provided;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
        error_set(error, EXIT_COMM, "MPI could not be started");
        return NULL;
    }
    int world_size;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPICHECK(MPI_Comm_size(MPI_COMM_WORLD, &world_size));
    if (world_size == 1) { // nobody to talk to
        MPI_Finalize();
        return comm_self_create();
    }
    check_set_abort_hook(mpi_abort, may_report);
    MpiComm* m = checked_calloc(1, sizeof(MpiComm));
    Comm* comm = &m->base;
    *comm = (Comm){.name = "mpi",
                   .world_size = world_size,
                   .meet = mpi_meet,
                   .alloc = mpi_alloc,
                   .free_memory = mpi_free_memory,
                   .expose = mpi_expose,
                   .settle = mpi_settle,
                   .peer_view = mpi_peer_view,
                   .all_gather = mpi_all_gather,
                   .reduce_scatter = mpi_reduce_scatter,
                   .host_all_gather = mpi_host_all_gather,
                   .host_broadcast = mpi_host_broadcast,
                   .host_send = mpi_host_send,
                   .host_recv = mpi_host_recv,
                   .barrier = mpi_barrier,
                   .free = mpi_free};
    MPICHECK(MPI_Comm_rank(MPI_COMM_WORLD, &comm->rank));
    MPICHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, comm->rank, MPI_INFO_NULL,
                                 &m->host));
    MPICHECK(MPI_Comm_rank(m->host, &comm->local_rank));
    MPICHECK(MPI_Comm_size(m->host, &comm->local_size));
    open_table(m);
    m->shares_memory = shared_memory && m->has_shared_table && device_is_host() &&
                       comm->local_size == comm->world_size;
    return comm;
}
