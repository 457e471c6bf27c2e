// backend/comm.h - collectives over ranks: one struct of functions, three transports.
//
// comm_self (one rank, no MPI), comm_mpi (CPU ranks; CUDA staged through pinned host memory),
// comm_nccl (CUDA). Collectives on device memory are queued on STREAM_COMM, take equal counts per
// rank and work in place: `full` holds world_size slices of `shard_elems`, rank r's own is slice r.
#ifndef BACKEND_COMM_H
#define BACKEND_COMM_H

#include "backend/device.h"
#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

// What a collective is for: named in the watchdog's line, counted by kind.
typedef struct {
    int unit;
    long step;
    int micro;
} CommTag;

typedef struct Comm Comm;
struct Comm {
    const char* name; // "self", "mpi", "nccl"
    int rank, world_size;
    int local_rank, local_size; // among the ranks of this host
    double wait_seconds;        // host time spent waiting for others, since last taken

    // Every rank's slice to every rank.
    void (*all_gather)(Comm*, void* full, size_t shard_elems, DType, CommTag);
    // Sums slice r of all ranks into slice r of rank r, in the transport's own order (fast).
    void (*reduce_scatter)(Comm*, void* full, size_t shard_elems, DType, CommTag);
    // acc (shard_elems) (+)= slice `rank` of every rank's `full`, in rank order (exact; see fold()).
    void (*fold_scatter)(Comm*, void* acc, DType acc_dtype, bool accumulate, const void* full,
                         size_t shard_elems, DType, CommTag);
    void (*broadcast)(Comm*, void* buffer, size_t elems, DType, int root, CommTag);

    // Small host messages, blocking. all (world_size * bytes).
    void (*host_all_gather)(Comm*, void* all, const void* mine, size_t bytes);
    void (*host_broadcast)(Comm*, void* buffer, size_t bytes, int root);
    void (*host_send)(Comm*, const void* buffer, size_t bytes, int to);
    void (*host_recv)(Comm*, void* buffer, size_t bytes, int from);
    void (*barrier)(Comm*);
    void (*free)(Comm*);
};

// Agrees on the outcome of a start phase: if any rank's error is set, the lowest such rank prints its
// line and all ranks exit with its code. Collective.
void comm_agree(Comm* comm, const Error* error);

#ifdef __cplusplus
}
#endif
#endif
