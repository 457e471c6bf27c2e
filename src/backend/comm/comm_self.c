// backend/comm/comm_self.c - one rank: every collective has already happened.
#include <stdlib.h>
#include <string.h>

#include "backend/comm.h"
#include "backend/comm/table.h"
#include "backend/ops.h"

static void* self_alloc(Comm* comm, Ledger* ledger, const char* line, CommMemory memory) {
    (void)comm;
    return memory == COMM_STAGING ? device_alloc_pinned(ledger, line) : device_alloc(ledger, line);
}

static void self_free_memory(Comm* comm) { (void)comm; }

static void self_meet(Comm* comm) { (void)comm; }

static void self_expose(Comm* comm) { (void)comm; }

static void self_settle(Comm* comm, long seq) {
    (void)comm;
    (void)seq;
}

static const void* self_peer_view(Comm* comm, const void* mine, int rank) {
    (void)comm;
    (void)mine;
    (void)rank;
    return NULL;
}

static void self_all_gather(Comm* comm, void* full, const void* shard, size_t shard_elems,
                            DType dtype, int unit) {
    if (!comm_enter(comm, COMM_ALL_GATHER, unit, shard_elems)) return;
    if (shard != full) device_copy(full, shard, shard_elems * dtype_bytes(dtype), STREAM_COMM);
    comm_leave(comm, COMM_ALL_GATHER, 0, 0);
}

static void self_reduce_scatter(Comm* comm, void* acc, DType acc_dtype, bool accumulate, void* full,
                                size_t shard_elems, DType dtype, bool exact, int unit) {
    (void)exact;
    if (!comm_enter(comm, COMM_REDUCE_SCATTER, unit, shard_elems)) return;
    const void* source = full;
    if (acc != full) {
        fold(acc, acc_dtype, accumulate, &source, dtype, 1, shard_elems, STREAM_COMM);
    }
    comm_leave(comm, COMM_REDUCE_SCATTER, 0, 0);
}

static void self_host_all_gather(Comm* comm, void* all, const void* mine, size_t bytes) {
    if (!comm_enter(comm, COMM_MESSAGE, COMM_NO_UNIT, bytes)) return;
    memcpy(all, mine, bytes);
    comm_leave(comm, COMM_MESSAGE, 0, 0);
}

static void self_host_broadcast(Comm* comm, void* buffer, size_t bytes, int root) {
    (void)comm;
    (void)buffer;
    (void)bytes;
    (void)root;
}

static void self_host_send(Comm* comm, const void* buffer, size_t bytes, int to) {
    (void)comm;
    (void)buffer;
    DIE("%zu bytes to rank %d of 1", bytes, to);
}

static void self_host_recv(Comm* comm, void* buffer, size_t bytes, int from) {
    (void)comm;
    (void)buffer;
    DIE("%zu bytes from rank %d of 1", bytes, from);
}

static void self_barrier(Comm* comm) { (void)comm; }

static void self_free(Comm* comm) {
    free(comm->table);
    free(comm);
}

Comm* comm_self_create(void) {
    Comm* comm = checked_calloc(1, sizeof(Comm));
    *comm = (Comm){.name = "self",
                   .world_size = 1,
                   .local_size = 1,
                   .table = table_create_private(),
                   .meet = self_meet,
                   .alloc = self_alloc,
                   .free_memory = self_free_memory,
                   .expose = self_expose,
                   .settle = self_settle,
                   .peer_view = self_peer_view,
                   .all_gather = self_all_gather,
                   .reduce_scatter = self_reduce_scatter,
                   .host_all_gather = self_host_all_gather,
                   .host_broadcast = self_host_broadcast,
                   .host_send = self_host_send,
                   .host_recv = self_host_recv,
                   .barrier = self_barrier,
                   .free = self_free};
    return comm;
}
