// backend/comm.h - collectives over ranks: one struct of functions, three transports.
//
// comm_self (one rank, no MPI), comm_mpi (CPU ranks, through shared memory where all are on one
// host; CUDA staged through pinned host memory), comm_nccl (CUDA). Collectives on device memory are
// queued on STREAM_COMM and take equal counts per rank: `full` holds world_size slices of
// `shard_elems` elements, slice r belongs to rank r. All ranks call the same collectives in the
// same order; each has a number (seq), which the watchdog's line and ZERO_FAULT use. Before data
// moves, the ranks compare what they are about to do: a rank that left one out or passes another
// count is named, instead of a hang or wrong data.
#ifndef BACKEND_COMM_H
#define BACKEND_COMM_H

#include <stdint.h>
#include "backend/device.h"
#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    COMM_ALL_GATHER,
    COMM_REDUCE_SCATTER,
    COMM_MESSAGE, // small, between hosts' memories
    COMM_BARRIER,
    NUM_COMM_OPS
} CommOp;
const char* comm_op_name(CommOp op); // "all_gather", ...

// Who may see a buffer. Where a transport cannot share memory, all are private.
typedef enum {
    COMM_EXPOSED,  // one per rank, read by the others during collectives
    COMM_ONE_COPY, // the same on all ranks: each writes its own slices, all_gather makes them seen
    COMM_STAGING,  // host memory (pinned) for messages
} CommMemory;

// What one kind of collective has done so far. seconds include the waiting for other ranks.
typedef struct {
    size_t calls, bytes; // bytes sent by this rank
    double seconds;
} CommStats;

typedef struct CommTable CommTable;
typedef struct Comm Comm;
struct Comm {
    const char* name; // "self", "mpi", "nccl"
    int rank, world_size;
    int local_rank, local_size; // among the ranks of this host
    long step;                  // where the run is, for messages and faults: set by the engine
    int micro;
    long seq;                         // collectives entered so far
    double wait_seconds;              // host time inside collectives, since last taken
    size_t elements_sent, bytes_sent; // by collectives on device memory
    CommStats stats[NUM_COMM_OPS];
    int timeout_seconds; // of the watchdog; 0: none
    double link_bytes_s; // 0, or collectives take at least bytes sent / this
    CommTable* table;    // what the ranks of this host are doing (comm/table.h)

    // Inside a collective, after comm_enter: returns when all ranks are in the same one, or ends
    // the run with a line that names the rank which is not.
    void (*meet)(Comm*);

    // Takes a line of the plan (device_alloc's rules hold). Collective for EXPOSED and ONE_COPY.
    void* (*alloc)(Comm*, Ledger*, const char* line, CommMemory);
    // Gives back what alloc has shared; the rest is device_free_all's.
    void (*free_memory)(Comm*);
    // Says that this rank has written to memory that others may read, before the collective that
    // reads it.
    void (*expose)(Comm*);
    // Returns when all ranks are done with the memory that collective `seq` read: before this rank
    // writes there again.
    void (*settle)(Comm*, long seq);

    // What lies at rank `rank`'s own address of this rank's EXPOSED memory, or NULL where it cannot
    // be read. Between a collective and the next, for looking after errors.
    const void* (*peer_view)(Comm*, const void* mine, int rank);

    // Every rank's slice to every rank. `shard` is this rank's; it may lie in its place in `full`.
    void (*all_gather)(Comm*, void* full, const void* shard, size_t shard_elems, DType, int unit);
    // acc (shard_elems) (+)= the sum over ranks of their slice `rank` of `full`. exact: fold() in
    // rank order; else any fixed order, and `full` may be overwritten. acc may be the own slice of
    // `full` (then the types are equal and accumulate is false).
    void (*reduce_scatter)(Comm*, void* acc, DType acc_dtype, bool accumulate, void* full,
                           size_t shard_elems, DType, bool exact, int unit);

    // Small messages between hosts' memories, blocking. all (world_size * bytes).
    void (*host_all_gather)(Comm*, void* all, const void* mine, size_t bytes);
    void (*host_broadcast)(Comm*, void* buffer, size_t bytes, int root);
    // These two are no collectives.
    void (*host_send)(Comm*, const void* buffer, size_t bytes, int to);
    void (*host_recv)(Comm*, void* buffer, size_t bytes, int from);
    void (*barrier)(Comm*);
    void (*free)(Comm*);
};

// ---- opening ------------------------------------------------------------------------------------

typedef struct {
    const char* kind;  // "auto", "nccl", "mpi", "messages" (mpi without shared memory) or "self"
    double link_mb_s;  // > 0: pretend that a rank's link carries no more than this
    bool may_be_alone; // under a launcher, seeing one rank is no error: nothing will be trained
} CommOptions;

// Connects the ranks. Without a launcher it is one rank and MPI is not started; a launcher whose
// ranks each see only themselves is an error (code 2). NULL on error. Where the transport needs a
// device (nccl), call comm_attach_device after device_init.
Comm* comm_open(const CommOptions* options, Error* error);

Comm* comm_self_create(void);
#ifndef NO_MPI
Comm* comm_mpi_create(bool shared_memory, Error* error); // starts MPI
#endif
#ifdef WITH_NCCL
Comm* comm_nccl_create(Comm* mpi, Error* error); // takes `mpi` for host messages
#endif

// Replaces the transport by the device's own where that was asked for or is the default: NCCL for
// CUDA, which ends its start-up with a self-test. On the CPU it returns `comm`. Collective; after
// an error, which not every rank need have, what it returns is good for comm_agree.
Comm* comm_attach_device(Comm* comm, const CommOptions* options, Error* error);

// ---- agreement ----------------------------------------------------------------------------------

// Agrees on the outcome of a start phase: if any rank's error is set, the lowest such rank prints
// its line and all ranks exit with its code. Collective.
void comm_agree(Comm* comm, const Error* error);

// The same for errors that a run survives: false on all ranks if any rank has an error, which
// becomes everybody's. Collective.
bool comm_all_ok(Comm* comm, Error* error);

// Do all ranks have the same value? Else an error that names the first rank which differs from rank
// 0, on every rank. Collective.
bool comm_check_same(Comm* comm, uint64_t value, const char* what, Error* error);

// ---- exchange buffer ----------------------------------------------------------------------------

// Bytes of the line "exchange": what arrives while gradients are folded from messages.
size_t comm_exchange_bytes(int world_size);

#ifdef __cplusplus
}
#endif
#endif
