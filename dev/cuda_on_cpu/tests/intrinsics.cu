// tests/intrinsics.cu - the CUDA language: indices, barriers with a vote, warp operations, atomics,
// conversions and bits, in a grid and block of three dimensions.
#include "test.cuh"

namespace {

// Counters in device memory, zero at first.
struct Counters {
    int first_bad_line, threads, largest_index, by_cas;
    float sum;
    bf16 half_sum;
    unsigned bits_or, bits_and, wrapped;
    unsigned long long wide;
};

constexpr unsigned ALL = 0xFFFFFFFFu;

#define CHECK_HERE(condition)                                                                      \
    do {                                                                                           \
        if (!(condition) && bad_line == 0) bad_line = __LINE__;                                    \
    } while (0)

__device__ int check_shuffles(int lane) {
    int bad_line = 0;
    CHECK_HERE(__shfl_sync(ALL, lane, 5) == 5);
    CHECK_HERE(__shfl_sync(ALL, lane, 2, 8) == (lane & ~7) + 2);
    CHECK_HERE(__shfl_sync(ALL, lane, 10, 8) == (lane & ~7) + 2); // modulo the width
    CHECK_HERE(__shfl_up_sync(ALL, lane, 1) == (lane ? lane - 1 : 0));
    CHECK_HERE(__shfl_up_sync(ALL, lane, 3, 8) == (lane % 8 < 3 ? lane : lane - 3));
    CHECK_HERE(__shfl_down_sync(ALL, lane, 4, 16) == (lane % 16 + 4 < 16 ? lane + 4 : lane));
    CHECK_HERE(__shfl_xor_sync(ALL, static_cast<double>(lane), 9) == (lane ^ 9));
    CHECK_HERE(__shfl_xor_sync(ALL, 1ull << lane, 3) == 1ull << (lane ^ 3));
    CHECK_HERE(__shfl_xor_sync(ALL, lane, 16, 8) == (lane < 16 ? lane : lane - 16));
    CHECK_HERE(static_cast<float>(__shfl_sync(ALL, __float2bfloat16(2.0f * lane), 7)) == 14.0f);
    return bad_line;
}

__device__ int check_votes(int lane) {
    int bad_line = 0;
    CHECK_HERE(__ballot_sync(ALL, lane % 3 == 0) == 0x49249249u);
    CHECK_HERE(__any_sync(ALL, lane == 7));
    CHECK_HERE(!__any_sync(ALL, lane > 40));
    CHECK_HERE(__all_sync(ALL, lane < 32));
    CHECK_HERE(!__all_sync(ALL, lane < 31));
    CHECK_HERE(__reduce_add_sync(ALL, static_cast<unsigned>(lane)) == 496);
    CHECK_HERE(__reduce_add_sync(ALL, -lane) == -496);
    CHECK_HERE(__reduce_max_sync(ALL, lane - 5) == 26);
    CHECK_HERE(__reduce_min_sync(ALL, lane - 5) == -5);
    CHECK_HERE(__reduce_or_sync(ALL, 1u << lane) == ALL);
    CHECK_HERE(__reduce_and_sync(ALL, ALL ^ (1u << lane)) == 0);
    CHECK_HERE(__reduce_xor_sync(ALL, 1u << lane) == ALL);
    if (lane < 16) {
        CHECK_HERE(__shfl_xor_sync(0xFFFFu, lane, 1) == (lane ^ 1));
        CHECK_HERE(__reduce_add_sync(0xFFFFu, 1) == 16);
        CHECK_HERE(__all_sync(0xFFFFu, 1));
    } else {
        CHECK_HERE(__shfl_xor_sync(0xFFFF0000u, lane, 1) == (lane ^ 1));
        CHECK_HERE(__ballot_sync(0xFFFF0000u, 1) == 0xFFFF0000u);
    }
    __syncwarp();
    return bad_line;
}

__device__ int check_numbers() {
    int bad_line = 0;
    CHECK_HERE(__half2float(__float2half(1.5f)) == 1.5f);
    CHECK_HERE(__bfloat162float(__float2bfloat16_rn(1.00390625f)) == 1.0f); // to even
    CHECK_HERE(__bfloat1622float2(__floats2bfloat162_rn(1.0f, 2.0f)).y == 2.0f);
    CHECK_HERE(__popc(0xF0u) == 4 && __popcll(~0ull) == 64);
    CHECK_HERE(__clz(1) == 31 && __clz(0) == 32 && __clzll(1) == 63);
    CHECK_HERE(__ffs(8) == 4 && __ffs(0) == 0 && __brev(1u) == 0x80000000u);
    CHECK_HERE(__umulhi(0x80000000u, 6u) == 3 && __mulhi(-2, 5) == -1);
    CHECK_HERE(__float_as_uint(1.0f) == 0x3F800000u && __int_as_float(0x40000000) == 2.0f);
    CHECK_HERE(__funnelshift_l(0x80000000u, 1u, 1) == 3u && __funnelshift_r(0, 1u, 1) == 1u << 31);
    CHECK_HERE(fabsf(rsqrtf(4.0f) - 0.5f) < 1e-6f && fabsf(__expf(0.0f) - 1.0f) < 1e-6f);
    CHECK_HERE(__saturatef(2.0f) == 1.0f && __saturatef(-1.0f) == 0.0f && min(3, 4) == 3);
    CHECK_HERE(fmaxf(1.0f, 2.0f) == 2.0f && isnan(__int_as_float(0x7FC00000)));
    return bad_line;
}

__global__ void language_kernel(Counters* c, float4* vectors) {
    int x = threadIdx.x, y = threadIdx.y, z = threadIdx.z;
    int thread = x + (y + z * blockDim.y) * blockDim.x;
    int num_threads = blockDim.x * blockDim.y * blockDim.z;
    int block = blockIdx.x + (blockIdx.y + blockIdx.z * gridDim.y) * gridDim.x;
    int lane = thread % warpSize, bad_line = 0;

    for (int line : {check_shuffles(lane), check_votes(lane), check_numbers()}) {
        if (line) bad_line = line;
    }
    CHECK_HERE(__syncthreads_count(thread % 2) == num_threads / 2);
    CHECK_HERE(__syncthreads_or(thread == 3));
    CHECK_HERE(!__syncthreads_or(0));
    CHECK_HERE(!__syncthreads_and(thread != 3));
    CHECK_HERE(__syncthreads_and(1));

    atomicAdd(&c->threads, 1);
    atomicMax(&c->largest_index, block * num_threads + thread);
    atomicAdd(&c->sum, 0.5f);
    if (thread == 0) atomicAdd(&c->half_sum, __float2bfloat16(1.0f));
    atomicOr(&c->bits_or, 1u << lane);
    atomicAnd(&c->bits_and, ~(1u << (lane & 15)));
    atomicInc(&c->wrapped, 9u);
    atomicAdd(&c->wide, 1ull << 32);
    int old, now = atomicAdd(&c->by_cas, 0);
    do {
        old = now;
        now = atomicCAS(&c->by_cas, old, old + 2);
    } while (now != old);

    float4* mine = vectors + block * num_threads + thread;
    float4 v = __ldcs(mine);
    CHECK_HERE(v.x == 0 && v.w == 0);
    __stcs(mine, make_float4(1, 2, 3, static_cast<float>(thread)));
    CHECK_HERE(__ldg(mine).w == static_cast<float>(thread));
    if (bad_line) atomicExch(&c->first_bad_line, bad_line);
}

// A warp that is not full: operations name the lanes that are there.
__global__ void partial_warp_kernel(int* out) {
    int lane = threadIdx.x;
    int sum = __reduce_add_sync(ALL, lane);
    int next = __shfl_sync(0x000FFFFFu, lane, min(lane + 1, 19));
    out[lane] = sum + (lane < 19 ? next : 0) + (__all_sync(ALL, 1) ? 1000 : 0);
}

} // namespace

int main() {
    dim3 grid(3, 2, 2), block(8, 4, 4);
    const int threads = 128, blocks = 12;
    Device<Counters> counters(1);
    Device<float4> vectors(threads * blocks);
    counters.set_zero();
    vectors.set_zero();
    Counters start = {};
    start.bits_and = ALL;
    CUDACHECK(cudaMemcpy(counters.p, &start, sizeof start, cudaMemcpyHostToDevice));
    launch(language_kernel, grid, block, 0, nullptr, counters.p, vectors.p);
    Counters c = counters.get()[0];
    EXPECT(c.first_bad_line == 0, "line %d", c.first_bad_line);
    EXPECT(c.threads == threads * blocks && c.largest_index == threads * blocks - 1);
    EXPECT(c.by_cas == 2 * threads * blocks && c.sum == 0.5f * threads * blocks);
    EXPECT(static_cast<float>(c.half_sum) == blocks);
    EXPECT(c.bits_or == ALL && c.bits_and == 0xFFFF0000u);
    EXPECT(c.wrapped == threads * blocks % 10);
    EXPECT(c.wide == static_cast<unsigned long long>(threads * blocks) << 32);
    std::vector<float4> v = vectors.get();
    EXPECT(v.back().x == 1 && v.back().w == threads - 1);

    Device<int> out(20);
    launch(partial_warp_kernel, 1, 20, 0, nullptr, out.p);
    std::vector<int> h = out.get();
    for (int i = 0; i < 20; i++) {
        EXPECT(h[static_cast<size_t>(i)] == 190 + (i < 19 ? i + 1 : 0) + 1000);
    }
    return num_failed != 0;
}
