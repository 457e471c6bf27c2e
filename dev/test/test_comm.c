// dev/test/test_comm.c - every collective with data whose sums do not round, bit by bit.
//
// Run it under mpirun with any number of ranks ("messages" as argument: without shared memory).
// Integers below 2^8 are exact in fp32, bf16 and fp16, and so are their sums here.
#include <stdlib.h>
#include <string.h>

#include "backend/comm.h"
#include "backend/ops.h"
#include "core/fault.h"
#include "testing.h"

static Comm* comm;

// Small enough that the sum over the ranks of a test (at most 9) stays below 2^8.
static float value_of(int rank, size_t i) { return (float)((i * 7 + (size_t)rank * 5) % 23); }

static void store(void* buffer, DType dtype, size_t i, float value) {
    if (dtype == DTYPE_FP32) {
        ((float*)buffer)[i] = value;
    } else {
        ((floatX*)buffer)[i] = to_floatX(value);
    }
}

static float load(const void* buffer, DType dtype, size_t i) {
    return dtype == DTYPE_FP32 ? ((const float*)buffer)[i] : to_float(((const floatX*)buffer)[i]);
}

// A plan of one full buffer and one shard; memory as the case asks for it.
typedef struct {
    Ledger ledger;
    void *full, *shard;
} Buffers;

static void buffers_open(Buffers* buffers, size_t shard_elems, DType dtype, CommMemory memory) {
    memset(buffers, 0, sizeof(*buffers));
    const size_t bytes = shard_elems * dtype_bytes(dtype);
    ledger_add(&buffers->ledger, MEM_TRANSIENT, "full", bytes * (size_t)comm->world_size);
    ledger_add(&buffers->ledger, MEM_TRANSIENT, "shard", shard_elems * sizeof(float));
    ledger_add(&buffers->ledger, MEM_TRANSIENT, "exchange", comm_exchange_bytes(comm->world_size));
    buffers->full = comm->alloc(comm, &buffers->ledger, "full", memory);
    buffers->shard = comm->alloc(comm, &buffers->ledger, "shard", COMM_EXPOSED);
    comm->alloc(comm, &buffers->ledger, "exchange", COMM_STAGING);
    EXPECT(buffers->ledger.allocated_bytes == ledger_total_bytes(&buffers->ledger),
           "planned %zu bytes, took %zu", ledger_total_bytes(&buffers->ledger),
           buffers->ledger.allocated_bytes);
}

static void buffers_close(void) {
    comm->barrier(comm);
    comm->free_memory(comm);
    device_free_all();
}

static const char* memory_name(CommMemory memory) {
    return memory == COMM_ONE_COPY ? "one copy" : "exposed";
}

// in_place: the shard lies in its place in `full`; else apart from it, as at stage 3.
static void test_all_gather(size_t shard_elems, DType dtype, CommMemory memory, bool in_place) {
    Buffers buffers;
    buffers_open(&buffers, shard_elems, dtype, memory);
    char* own = in_place
                    ? (char*)buffers.full + (size_t)comm->rank * shard_elems * dtype_bytes(dtype)
                    : (char*)buffers.shard;
    for (int round = 0; round < 3; round++) { // memory is written again after it was read
        for (size_t i = 0; i < shard_elems; i++) {
            store(own, dtype, i, value_of(comm->rank + round, i));
        }
        comm->expose(comm);
        const size_t before = comm->elements_sent, bytes_before = comm->bytes_sent;
        comm->all_gather(comm, buffers.full, own, shard_elems, dtype, 0);
        const size_t sent = shard_elems * (size_t)(comm->world_size - 1);
        EXPECT(comm->elements_sent - before == sent &&
                   comm->bytes_sent - bytes_before == sent * dtype_bytes(dtype),
               "counted %zu elements", comm->elements_sent - before);
        size_t wrong = 0;
        for (int r = 0; r < comm->world_size; r++) {
            for (size_t i = 0; i < shard_elems; i++) {
                wrong += load(buffers.full, dtype, (size_t)r * shard_elems + i) !=
                         value_of(r + round, i);
            }
        }
        EXPECT(wrong == 0, "round %d: %zu elements wrong", round, wrong);
        comm->settle(comm, comm->seq);
    }
    buffers_close();
    test_report("all_gather (%d,%zu) %s %s %s", comm->world_size, shard_elems, dtype_name(dtype),
                memory_name(memory), in_place ? "in place" : "from a shard");
}

// into_full: the sum lands in this rank's slice of `full`, as accumulators are reduced.
static void test_reduce_scatter(size_t shard_elems, DType dtype, DType acc_dtype, bool accumulate,
                                bool into_full, bool exact) {
    Buffers buffers;
    buffers_open(&buffers, shard_elems, dtype, COMM_EXPOSED);
    const size_t N = (size_t)comm->world_size;
    void* acc = into_full
                    ? (char*)buffers.full + (size_t)comm->rank * shard_elems * dtype_bytes(dtype)
                    : buffers.shard;
    for (size_t i = 0; i < shard_elems && !into_full; i++) {
        store(acc, acc_dtype, i, accumulate ? 3 : 1e4f);
    }
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < N * shard_elems; i++) {
            store(buffers.full, dtype, i, value_of(comm->rank + round, i));
        }
        comm->expose(comm);
        comm->reduce_scatter(comm, acc, acc_dtype, accumulate, buffers.full, shard_elems, dtype,
                             exact, 1);
        size_t wrong = 0;
        for (size_t i = 0; i < shard_elems; i++) {
            float sum = accumulate ? 3 : 0;
            for (int past = accumulate ? 0 : round; past <= round; past++) {
                for (int r = 0; r < comm->world_size; r++) {
                    sum += value_of(r + past, (size_t)comm->rank * shard_elems + i);
                }
            }
            wrong += load(acc, acc_dtype, i) != sum;
        }
        EXPECT(wrong == 0, "round %d: %zu elements wrong", round, wrong);
        comm->settle(comm, comm->seq);
    }
    buffers_close();
    test_report("reduce_scatter (%d,%zu) %s to %s%s%s%s", comm->world_size, shard_elems,
                dtype_name(dtype), dtype_name(acc_dtype), accumulate ? " +=" : " =",
                into_full ? " in place" : "", exact ? " exact" : " fast");
}

// Rank order: with 2^24, 1, 1, ... the sum depends on the order, and only one order is right.
static void test_rank_order(void) {
    enum { ELEMS = 3000 };
    Buffers buffers;
    buffers_open(&buffers, ELEMS, DTYPE_FP32, COMM_EXPOSED);
    for (int first = 0; first < comm->world_size; first++) {
        float expected = 0, *full = buffers.full, *acc = buffers.shard;
        for (int r = 0; r < comm->world_size; r++) expected += r == first ? 0x1p24f : 1.0f;
        for (size_t i = 0; i < (size_t)comm->world_size * ELEMS; i++) {
            full[i] = comm->rank == first ? 0x1p24f : 1.0f;
        }
        comm->expose(comm);
        comm->reduce_scatter(comm, acc, DTYPE_FP32, false, full, ELEMS, DTYPE_FP32, true, 1);
        size_t wrong = 0;
        for (size_t i = 0; i < ELEMS; i++) wrong += acc[i] != expected;
        EXPECT(wrong == 0, "the large term on rank %d: %g, expected %g", first, (double)acc[0],
               (double)expected);
        comm->settle(comm, comm->seq);
    }
    buffers_close();
    test_report("reduce_scatter adds in rank order, %d ranks", comm->world_size);
}

static void test_host_messages(void) {
    const int N = comm->world_size;
    int* all = checked_calloc((size_t)N, sizeof(int));
    for (int round = 0; round < 50; round++) {
        const int mine = comm->rank * 1000 + round;
        comm->host_all_gather(comm, all, &mine, sizeof(mine));
        for (int r = 0; r < N; r++)
            EXPECT(all[r] == r * 1000 + round, "rank %d sent %d", r, all[r]);
        int value = comm->rank == round % N ? round : -1;
        comm->host_broadcast(comm, &value, sizeof(value), round % N);
        EXPECT(value == round, "broadcast from %d gave %d", round % N, value);
        comm->barrier(comm);
    }
    free(all);
    test_report("host_all_gather, host_broadcast, barrier, %d ranks", N);

    enum { WORDS = 100000 };
    int* words = checked_calloc(WORDS, sizeof(int));
    for (int r = 1; r < N; r++) {
        for (int i = 0; i < WORDS && comm->rank == 0; i++) words[i] = r + i;
        if (comm->rank == 0) comm->host_send(comm, words, WORDS * sizeof(int), r);
        if (comm->rank == r) comm->host_recv(comm, words, WORDS * sizeof(int), 0);
    }
    int wrong = 0;
    for (int i = 0; i < WORDS && comm->rank > 0; i++) wrong += words[i] != comm->rank + i;
    EXPECT(wrong == 0, "%d of %d words wrong", wrong, WORDS);
    free(words);
    test_report("host_send, host_recv, %d ranks", N);
}

static void test_agreement(void) {
    Error error = {0};
    EXPECT(comm_check_same(comm, 42, "settings", &error), "the same is not the same");
    const int last = comm->world_size - 1;
    const bool same = comm_check_same(comm, comm->rank == last && last > 0, "settings", &error);
    EXPECT(same == (last == 0), "a difference was not seen");
    EXPECT(last == 0 || (error.code == EXIT_USAGE && strstr(error.text, "settings on rank")),
           "message '%s'", error.text);
    Error mine = {0};
    EXPECT(comm_all_ok(comm, &mine), "no error is an error");
    if (comm->rank == last) error_set(&mine, EXIT_FILE_IO, "rank %d", last);
    EXPECT(!comm_all_ok(comm, &mine) && mine.code == EXIT_FILE_IO, "an error was not seen");
    comm_agree(comm, &(Error){0});
    test_report("agreement on errors and settings, %d ranks", comm->world_size);
}

int main(int argc, char** argv) {
    Error error = {0};
    const CommOptions options = {.kind = argc > 1 ? argv[1] : "auto"};
    comm = comm_open(&options, &error);
    CHECK(comm, "%s", error.text);
    test_set_rank(comm->rank);
    const DeviceOptions device = {
        .local_rank = comm->local_rank, .local_size = comm->local_size, .quiet_affinity = true};
    CHECK(fault_init(comm->rank, &error) && device_init(&device, &error), "%s", error.text);

    const size_t sizes[] = {1024, 5 * 1024, 700 * 1024}; // the last is read in pieces
    for (int i = 0; i < 3; i++) {
        for (int type = 0; type < 2; type++) {
            const DType dtype = type == 0 ? DTYPE_FP32 : FLOATX_DTYPE;
            if (type == 1 && dtype == DTYPE_FP32) continue;
            test_all_gather(sizes[i], dtype, COMM_EXPOSED, true);
            test_all_gather(sizes[i], dtype, COMM_EXPOSED, false);
            test_all_gather(sizes[i], dtype, COMM_ONE_COPY, true);
            test_reduce_scatter(sizes[i], dtype, DTYPE_FP32, false, false, true);
            test_reduce_scatter(sizes[i], dtype, DTYPE_FP32, true, false, true);
            test_reduce_scatter(sizes[i], dtype, DTYPE_FP32, true, false, false);
            test_reduce_scatter(sizes[i], dtype, dtype, false, true, false);
        }
    }
    test_rank_order();
    test_host_messages();
    test_agreement();
    const int result = test_finish();
    comm->free(comm);
    return result;
}
