// nccl.cpp - NCCL's collectives over MPI, one process a rank.
//
// An operation runs when its stream gets there; those of a group start at ncclGroupEnd, sends and
// receives together. Before a collective the ranks compare what they were asked for, so that ranks
// which disagree are an error with both sides, where the real library hangs. ncclCommAbort may be
// called from another thread and ends a collective that waits for a dead rank.
//
// Sums of bf16 and fp16 are rounded at every step of MPI's tree, so their last bits differ from
// NCCL's, as NCCL's own differ between its algorithms.
//
// Limits: all ranks of MPI_COMM_WORLD create a communicator together; each process may use any
// device, the same one too.
#include "emu.h"
#include "memory.h"
#include "report.h"
#include "stream.h"

#include <atomic>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <limits.h>
#include <memory>
#include <mpi.h>
#include <nccl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

struct ncclComm {
    MPI_Comm mpi;
    int rank, size, device;
    long num_collectives = 0;
    std::atomic<bool> is_aborted{false};
};

namespace {

// ---- types and sums -----------------------------------------------------------------------------

size_t element_bytes(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 4;
    }
}

MPI_Datatype mpi_type(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
        return MPI_INT8_T;
    case ncclUint8:
        return MPI_UINT8_T;
    case ncclInt32:
        return MPI_INT32_T;
    case ncclUint32:
        return MPI_UINT32_T;
    case ncclInt64:
        return MPI_INT64_T;
    case ncclUint64:
        return MPI_UINT64_T;
    case ncclFloat32:
        return MPI_FLOAT;
    case ncclFloat64:
        return MPI_DOUBLE;
    case ncclFloat16:
    case ncclBfloat16:
        return MPI_UINT16_T; // with operations of our own
    default:
        emu::host_error("NCCL data type %d is not emulated", static_cast<int>(type));
    }
}

struct Add {
    float operator()(float a, float b) const { return a + b; }
};
struct Multiply {
    float operator()(float a, float b) const { return a * b; }
};
struct Largest {
    float operator()(float a, float b) const { return a > b ? a : b; }
};
struct Smallest {
    float operator()(float a, float b) const { return a < b ? a : b; }
};

template <class T, class F> void combine(void* in, void* in_out, int* count, MPI_Datatype*) {
    const T* a = static_cast<const T*>(in);
    T* b = static_cast<T*>(in_out);
    for (int i = 0; i < *count; i++) {
        b[i] = T(F()(static_cast<float>(a[i]), static_cast<float>(b[i])));
    }
}

template <class T, class F> MPI_Op half_op() {
    static MPI_Op op = [] {
        MPI_Op created;
        MPI_Op_create(combine<T, F>, 1, &created);
        return created;
    }();
    return op;
}

template <class F> MPI_Op op_for(ncclDataType_t type, MPI_Op built_in) {
    if (type == ncclBfloat16) return half_op<__nv_bfloat16, F>();
    if (type == ncclFloat16) return half_op<__half, F>();
    return built_in;
}

MPI_Op mpi_op(ncclRedOp_t op, ncclDataType_t type) {
    switch (op) {
    case ncclSum:
    case ncclAvg:
        return op_for<Add>(type, MPI_SUM);
    case ncclProd:
        return op_for<Multiply>(type, MPI_PROD);
    case ncclMax:
        return op_for<Largest>(type, MPI_MAX);
    case ncclMin:
        return op_for<Smallest>(type, MPI_MIN);
    default:
        emu::host_error("NCCL reduction %d is not emulated", static_cast<int>(op));
    }
}

template <class T, class Wide> void divide(void* p, size_t count, int by) {
    T* x = static_cast<T*>(p);
    for (size_t i = 0; i < count; i++) x[i] = T(static_cast<Wide>(x[i]) / static_cast<Wide>(by));
}

void finish_average(void* p, size_t count, ncclDataType_t type, ncclRedOp_t op, int ranks) {
    if (op != ncclAvg) return;
    switch (type) {
    case ncclFloat32:
        return divide<float, float>(p, count, ranks);
    case ncclFloat64:
        return divide<double, double>(p, count, ranks);
    case ncclBfloat16:
        return divide<__nv_bfloat16, float>(p, count, ranks);
    case ncclFloat16:
        return divide<__half, float>(p, count, ranks);
    case ncclInt32:
        return divide<int32_t, int32_t>(p, count, ranks);
    case ncclInt64:
        return divide<int64_t, int64_t>(p, count, ranks);
    default:
        emu::host_error("NCCL average of data type %d is not emulated", static_cast<int>(type));
    }
}

int to_count(size_t count) {
    if (count > INT_MAX) emu::host_error("NCCL: %zu elements, at most 2^31 - 1", count);
    return static_cast<int>(count);
}

// ---- waiting ------------------------------------------------------------------------------------

// Waits for MPI; false if the communicator was aborted meanwhile, and the request is left behind.
bool finish(ncclComm_t c, MPI_Request* request) {
    for (;;) {
        int done = 0;
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done) return true;
        if (c->is_aborted) return false;
        sched_yield();
    }
}

// ---- do the ranks agree? ------------------------------------------------------------------------

enum Call { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE };
const char* const CALL_NAMES[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                  "ncclBroadcast", "ncclReduce"};

struct Request {
    int call, count, type, op, root;
};

void print_request(int rank, const Request& r) {
    fprintf(stderr, "  rank %d: %s of %d elements of type %d, reduction %d, root %d\n", rank,
            CALL_NAMES[r.call], r.count, r.type, r.op, r.root);
}

// False if the communicator was aborted meanwhile.
bool check_agreement(ncclComm_t c, const Request& mine) {
    std::vector<Request> all(static_cast<size_t>(c->size));
    MPI_Request request;
    MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE, c->mpi,
                   &request);
    if (!finish(c, &request)) return false;
    c->num_collectives++;
    for (int rank = 0; rank < c->size; rank++) {
        const Request& other = all[static_cast<size_t>(rank)];
        if (memcmp(&mine, &other, sizeof mine) == 0) continue;
        if (c->rank == 0) {
            print_request(0, mine);
            print_request(rank, other);
            emu::host_error("NCCL: ranks disagree in collective number %ld", c->num_collectives);
        }
        MPI_Barrier(c->mpi); // rank 0 speaks and ends all
    }
    return true;
}

// ---- groups -------------------------------------------------------------------------------------

struct Message {
    bool is_send;
    void* p;
    int bytes, peer;
    ncclComm_t comm;
};

struct Group {
    int depth = 0;
    struct Collective {
        cudaStream_t stream;
        const char* name;
        std::function<void()> run;
    };
    std::vector<Collective> collectives;
    std::vector<Message> messages;
    cudaStream_t message_stream;

    void add(cudaStream_t stream, const char* name, std::function<void()> run) {
        collectives.push_back({stream, name, std::move(run)});
        if (depth == 0) start();
    }
    void add(cudaStream_t stream, const Message& message) {
        if (!messages.empty() && message_stream != stream) {
            emu::host_error("NCCL: messages of one group on two streams are not emulated");
        }
        message_stream = stream;
        messages.push_back(message);
        if (depth == 0) start();
    }
    void start();
};
Group group;

void exchange(const std::vector<Message>& messages) {
    std::vector<MPI_Request> requests(messages.size());
    for (size_t i = 0; i < messages.size(); i++) {
        const Message& m = messages[i];
        if (m.is_send)
            MPI_Isend(m.p, m.bytes, MPI_BYTE, m.peer, 0, m.comm->mpi, &requests[i]);
        else
            MPI_Irecv(m.p, m.bytes, MPI_BYTE, m.peer, 0, m.comm->mpi, &requests[i]);
    }
    for (size_t i = 0; i < messages.size(); i++) {
        if (!finish(messages[i].comm, &requests[i])) return;
    }
}

void Group::start() {
    if (!messages.empty()) {
        emu::enqueue(message_stream, "ncclSend and ncclRecv",
                     [list = std::move(messages)] { exchange(list); });
        messages.clear();
    }
    for (Collective& c : collectives) emu::enqueue(c.stream, c.name, std::move(c.run));
    collectives.clear();
}

// ---- collectives --------------------------------------------------------------------------------

// Queues `start`, which begins an MPI operation, and `end`, which follows it.
template <class Start, class End>
ncclResult_t collective(const Request& request, ncclComm_t c, cudaStream_t stream, Start start,
                        End end) {
    if (c->is_aborted) return ncclInvalidUsage;
    group.add(stream, CALL_NAMES[request.call], [=] {
        if (c->is_aborted || !check_agreement(c, request)) return;
        MPI_Request mpi_request;
        start(&mpi_request);
        if (finish(c, &mpi_request)) end();
    });
    return ncclSuccess;
}

ncclResult_t create_comm(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
    int is_initialized;
    MPI_Initialized(&is_initialized);
    if (!is_initialized) MPI_Init(nullptr, nullptr);
    if (rank < 0 || rank >= size) return ncclInvalidArgument;
    ncclComm_t c = new ncclComm;
    c->rank = rank;
    c->size = size;
    cudaGetDevice(&c->device);
    MPI_Comm_split(MPI_COMM_WORLD, atoi(id.internal), rank, &c->mpi);
    int found;
    MPI_Comm_size(c->mpi, &found);
    if (found != size) {
        MPI_Comm_free(&c->mpi);
        delete c;
        return ncclInvalidArgument;
    }
    *out = c;
    return ncclSuccess;
}

} // namespace

extern "C" {

// ---- communicators ------------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static int number = 0;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d", number++);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int size, ncclUniqueId id, int rank) {
    return create_comm(c, size, id, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
    return create_comm(c, size, id, rank); // nothing in the configuration changes results
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
    emu::synchronize_all();
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    emu::synchronize_all();
    MPI_Comm_free(&c->mpi);
    delete c;
    return ncclSuccess;
}
// Makes no MPI call and frees nothing: another thread may be inside a collective.
ncclResult_t ncclCommAbort(ncclComm_t c) {
    c->is_aborted = true;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* error) {
    *error = c->is_aborted ? ncclSystemError : ncclSuccess;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int* count) {
    *count = c->size;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) {
    *rank = c->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* device) {
    *device = c->device;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclSystemError:
        return "unhandled system error";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    default:
        return "an error that is not emulated";
    }
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGroupStart() {
    group.depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) return ncclInvalidUsage;
    if (--group.depth == 0) group.start();
    return ncclSuccess;
}

// ---- operations ---------------------------------------------------------------------------------

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    emu::check_range("ncclAllReduce: send", send, count * element_bytes(type));
    emu::check_range("ncclAllReduce: receive", receive, count * element_bytes(type));
    const void* from = send == receive ? MPI_IN_PLACE : send;
    return collective(
        {ALL_REDUCE, to_count(count), type, op, 0}, c, stream,
        [=](MPI_Request* r) {
            MPI_Iallreduce(from, receive, to_count(count), mpi_type(type), mpi_op(op, type), c->mpi,
                           r);
        },
        [=] { finish_average(receive, count, type, op, c->size); });
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    size_t bytes = count * element_bytes(type);
    emu::check_range("ncclReduceScatter: send", send, bytes * static_cast<size_t>(c->size));
    emu::check_range("ncclReduceScatter: receive", receive, bytes);
    // In place the result is a part of `send`, which MPI does not take.
    auto sum = std::make_shared<std::vector<char>>(bytes);
    return collective(
        {REDUCE_SCATTER, to_count(count), type, op, 0}, c, stream,
        [=](MPI_Request* r) {
            MPI_Ireduce_scatter_block(send, sum->data(), to_count(count), mpi_type(type),
                                      mpi_op(op, type), c->mpi, r);
        },
        [=] {
            finish_average(sum->data(), count, type, op, c->size);
            memcpy(receive, sum->data(), bytes);
        });
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t c, cudaStream_t stream) {
    size_t bytes = count * element_bytes(type);
    emu::check_range("ncclAllGather: send", send, bytes);
    emu::check_range("ncclAllGather: receive", receive, bytes * static_cast<size_t>(c->size));
    const char* own_part = static_cast<char*>(receive) + static_cast<size_t>(c->rank) * bytes;
    const void* from = send == own_part ? MPI_IN_PLACE : send;
    return collective(
        {ALL_GATHER, to_count(count), type, 0, 0}, c, stream,
        [=](MPI_Request* r) {
            MPI_Iallgather(from, to_count(count), mpi_type(type), receive, to_count(count),
                           mpi_type(type), c->mpi, r);
        },
        [] {});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t c, cudaStream_t stream) {
    size_t bytes = count * element_bytes(type);
    if (c->rank == root) emu::check_range("ncclBroadcast: send", send, bytes);
    emu::check_range("ncclBroadcast: receive", receive, bytes);
    return collective(
        {BROADCAST, to_count(count), type, 0, root}, c, stream,
        [=](MPI_Request* r) {
            if (c->rank == root && send != receive) memcpy(receive, send, bytes);
            MPI_Ibcast(receive, to_count(count), mpi_type(type), root, c->mpi, r);
        },
        [] {});
}
ncclResult_t ncclBcast(void* p, size_t count, ncclDataType_t type, int root, ncclComm_t c,
                       cudaStream_t stream) {
    return ncclBroadcast(p, p, count, type, root, c, stream);
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t stream) {
    bool is_root = c->rank == root;
    emu::check_range("ncclReduce: send", send, count * element_bytes(type));
    if (is_root) emu::check_range("ncclReduce: receive", receive, count * element_bytes(type));
    const void* from = is_root && send == receive ? MPI_IN_PLACE : send;
    return collective(
        {REDUCE, to_count(count), type, op, root}, c, stream,
        [=](MPI_Request* r) {
            MPI_Ireduce(from, receive, to_count(count), mpi_type(type), mpi_op(op, type), root,
                        c->mpi, r);
        },
        [=] {
            if (is_root) finish_average(receive, count, type, op, c->size);
        });
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t stream) {
    size_t bytes = count * element_bytes(type);
    emu::check_range("ncclSend", send, bytes);
    group.add(stream, {true, const_cast<void*>(send), to_count(bytes), peer, c});
    return ncclSuccess;
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t stream) {
    size_t bytes = count * element_bytes(type);
    emu::check_range("ncclRecv", receive, bytes);
    group.add(stream, {false, receive, to_count(bytes), peer, c});
    return ncclSuccess;
}

} // extern "C"
