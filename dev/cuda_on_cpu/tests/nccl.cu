// tests/nccl.cu - NCCL over MPI: every operation, on exact data (small integers), in place and out.
#include "test.cuh"

#include <atomic>
#include <mpi.h>
#include <nccl.h>
#include <string.h>
#include <thread>
#include <unistd.h>

#define NCCLCHECK(call)                                                                            \
    do {                                                                                           \
        ncclResult_t result_ = (call);                                                             \
        if (result_ != ncclSuccess) DIE("%s: %s", #call, ncclGetErrorString(result_));             \
    } while (0)

namespace {

constexpr int COUNT = 1000; // elements of a rank's part
int rank, size;
ncclComm_t comm;
cudaStream_t stream;

template <class T> struct TypeOf;
template <> struct TypeOf<float> { static constexpr ncclDataType_t value = ncclFloat32; };
template <> struct TypeOf<double> { static constexpr ncclDataType_t value = ncclFloat64; };
template <> struct TypeOf<bf16> { static constexpr ncclDataType_t value = ncclBfloat16; };
template <> struct TypeOf<__half> { static constexpr ncclDataType_t value = ncclFloat16; };
template <> struct TypeOf<int32_t> { static constexpr ncclDataType_t value = ncclInt32; };

// What rank r holds in element i: integers so small that every sum is exact in every type.
double held(int r, int i) { return i % 7 + r; }
double sum_of(int i) {
    double sum = 0;
    for (int r = 0; r < size; r++) sum += held(r, i);
    return sum;
}

template <class T> std::vector<T> own_data() {
    std::vector<T> v(static_cast<size_t>(COUNT * size));
    for (int i = 0; i < COUNT * size; i++) v[static_cast<size_t>(i)] = T(float(held(rank, i)));
    return v;
}

template <class T, class F>
void expect_all(const char* what, const Device<T>& d, int begin, int count, F expected) {
    CUDACHECK(cudaStreamSynchronize(stream));
    std::vector<T> v = d.get();
    for (int i = begin; i < begin + count; i++) {
        double x = static_cast<double>(static_cast<float>(v[static_cast<size_t>(i)]));
        EXPECT(x == expected(i), "%s: rank %d of %d, element %d is %g, expected %g", what, rank,
               size, i, x, expected(i));
        if (num_failed) return;
    }
}

template <class T> void test_reductions() {
    const ncclDataType_t type = TypeOf<T>::value;
    const size_t n = static_cast<size_t>(COUNT * size);
    Device<T> a(own_data<T>()), b(n);
    auto sum = [](int i) { return sum_of(i); };

    NCCLCHECK(ncclAllReduce(a.p, b.p, n, type, ncclSum, comm, stream));
    expect_all("all-reduce", b, 0, COUNT * size, sum);
    NCCLCHECK(ncclAllReduce(a.p, b.p, n, type, ncclMax, comm, stream));
    expect_all("maximum", b, 0, COUNT * size, [](int i) { return held(size - 1, i); });
    NCCLCHECK(ncclAllReduce(a.p, b.p, n, type, ncclMin, comm, stream));
    expect_all("minimum", b, 0, COUNT * size, [](int i) { return held(0, i); });

    b.set_zero();
    NCCLCHECK(ncclReduce(a.p, b.p, n, type, ncclSum, size - 1, comm, stream));
    if (rank == size - 1) expect_all("reduce", b, 0, COUNT * size, sum);

    NCCLCHECK(ncclReduceScatter(a.p, b.p, COUNT, type, ncclSum, comm, stream));
    auto own_sum = [](int i) { return sum_of(rank * COUNT + i); };
    expect_all("reduce-scatter", b, 0, COUNT, own_sum);

    T* own_part = a.p + rank * COUNT;
    NCCLCHECK(ncclReduceScatter(a.p, own_part, COUNT, type, ncclSum, comm, stream));
    expect_all("reduce-scatter in place", a, rank * COUNT, COUNT, sum);
    NCCLCHECK(ncclAllGather(own_part, a.p, COUNT, type, comm, stream));
    expect_all("all-gather in place", a, 0, COUNT * size, sum);

    a.set(own_data<T>());
    CUDACHECK(cudaDeviceSynchronize());
    NCCLCHECK(ncclAllReduce(a.p, a.p, n, type, ncclSum, comm, stream));
    expect_all("all-reduce in place", a, 0, COUNT * size, sum);
}

void test_average() { // of numbers whose average is exact
    Device<float> a(std::vector<float>(8, static_cast<float>(2 * rank)));
    NCCLCHECK(ncclAllReduce(a.p, a.p, 8, ncclFloat32, ncclAvg, comm, stream));
    expect_all("average", a, 0, 8, [](int) { return size - 1.0; });
}

void test_moves() {
    const size_t n = static_cast<size_t>(COUNT * size);
    Device<float> a(own_data<float>()), b(n);
    int root = size - 1, left = (rank + size - 1) % size, right = (rank + 1) % size;

    NCCLCHECK(ncclBroadcast(a.p, b.p, n, ncclFloat32, root, comm, stream));
    expect_all("broadcast", b, 0, COUNT * size, [=](int i) { return held(root, i); });
    NCCLCHECK(ncclAllGather(a.p + rank * COUNT, b.p, COUNT, ncclFloat32, comm, stream));
    expect_all("all-gather", b, 0, COUNT * size, [](int i) { return held(i / COUNT, i); });

    NCCLCHECK(ncclGroupStart());
    NCCLCHECK(ncclSend(a.p, COUNT, ncclFloat32, right, comm, stream));
    NCCLCHECK(ncclRecv(b.p, COUNT, ncclFloat32, left, comm, stream));
    NCCLCHECK(ncclGroupEnd());
    expect_all("send and receive", b, 0, COUNT, [=](int i) { return held(left, i); });

    Device<float> c(own_data<float>());
    NCCLCHECK(ncclGroupStart());
    NCCLCHECK(ncclAllReduce(a.p, b.p, n, ncclFloat32, ncclSum, comm, stream));
    NCCLCHECK(ncclBcast(c.p, n, ncclFloat32, 0, comm, stream));
    NCCLCHECK(ncclGroupEnd());
    expect_all("all-reduce of a group", b, 0, COUNT * size, [](int i) { return sum_of(i); });
    expect_all("broadcast of a group", c, 0, COUNT * size, [](int i) { return held(0, i); });
    EXPECT(ncclGroupEnd() == ncclInvalidUsage);
}

void test_communicator() {
    int n, r, version;
    ncclResult_t error;
    NCCLCHECK(ncclCommCount(comm, &n));
    NCCLCHECK(ncclCommUserRank(comm, &r));
    NCCLCHECK(ncclGetVersion(&version));
    NCCLCHECK(ncclCommGetAsyncError(comm, &error));
    EXPECT(n == size && r == rank && version == NCCL_VERSION_CODE && error == ncclSuccess);
}

ncclComm_t create(const ncclUniqueId& id) {
    ncclComm_t c;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    NCCLCHECK(ncclCommInitRankConfig(&c, size, id, rank, &config));
    return c;
}

// One rank never comes; another thread of the others ends their collective.
void test_abort(const ncclUniqueId& id) {
    if (size == 1) return;
    ncclComm_t c = create(id);
    if (rank == 0) {
        MPI_Barrier(MPI_COMM_WORLD);
        NCCLCHECK(ncclCommAbort(c));
        return;
    }
    Device<float> a(std::vector<float>(8, 1.0f));
    std::thread watchdog([c] {
        usleep(50000);
        ncclCommAbort(c);
    });
    NCCLCHECK(ncclAllReduce(a.p, a.p, 8, ncclFloat32, ncclSum, c, stream));
    CUDACHECK(cudaStreamSynchronize(stream));
    watchdog.join();
    ncclResult_t error;
    NCCLCHECK(ncclCommGetAsyncError(c, &error));
    EXPECT(error != ncclSuccess);
    MPI_Barrier(MPI_COMM_WORLD);
}

} // namespace

// "nccl disagree": rank 0 asks for another count than the others, which must be an error.
int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    ncclUniqueId ids[2];
    for (ncclUniqueId& id : ids) {
        if (rank == 0) NCCLCHECK(ncclGetUniqueId(&id));
        MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    }
    CUDACHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    comm = create(ids[0]);
    if (argc > 1 && strcmp(argv[1], "disagree") == 0) {
        Device<float> a(64);
        a.set_zero();
        size_t count = rank == 0 ? 64 : 32;
        NCCLCHECK(ncclAllReduce(a.p, a.p, count, ncclFloat32, ncclSum, comm, stream));
        CUDACHECK(cudaStreamSynchronize(stream));
    } else {
        test_communicator();
        test_reductions<float>();
        test_reductions<double>();
        test_reductions<bf16>();
        test_reductions<__half>();
        test_reductions<int32_t>();
        test_average();
        test_moves();
        test_abort(ids[1]);
    }
    NCCLCHECK(ncclCommDestroy(comm));
    CUDACHECK(cudaStreamDestroy(stream));
    int failed = num_failed;
    MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Finalize();
    return failed != 0;
}
