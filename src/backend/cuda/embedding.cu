// backend/cuda/embedding.cu - token and position embeddings.
//
// The backward pass adds rows of dout that hold the same token, without atomics and without a round
// trip to the host: positions are sorted by token (stably, so each token's positions stay in index
// order) and the sorted list is cut into segments of 64. A warp adds up a segment's runs of equal
// tokens; runs inside the segment go to dwte, the parts of runs that cross a segment's edge go to
// scratch, and a second kernel joins them in order. A token that fills the batch costs no more than
// any other.
#include "backend/cuda/common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int BUCKET = 64;        // tokens sorted by one warp
constexpr int SORT_WARPS = 4;     // of a block
constexpr int SORT_UNROLL = 4;    // loads in flight
constexpr int SEGMENT = 64;       // sorted positions added up by one warp
constexpr int TILE = WARP * PACK; // columns of a warp

} // namespace

// ---- forward ------------------------------------------------------------------------------------

// Work: a thread a pack of one row. Bytes: 3 B T C floatX (wpe from L2 after its first use).
// FLOPs: B T C. Bound: device memory bandwidth.
//   out (B*T, C)   tokens (B, T)   wte (Vp, C)   wpe (maxT, C)
template <bool ALIGNED>
__global__ void embedding_forward_kernel(Matrix out, const int* tokens, const Native* wte,
                                         const Native* wpe, int first_pos, int N, int T, int C) {
    int packs = (C + PACK - 1) / PACK;
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (size_t)N * packs) return;
    size_t r = i / packs;
    int c = (int)(i % packs) * PACK, t = (int)(r % T);
    float x[PACK], position[PACK];
    load<ALIGNED>(x, wte + (size_t)tokens[r] * C + c, C - c);
    load<ALIGNED>(position, wpe + (size_t)(first_pos + t) * C + c, C - c);
#pragma unroll
    for (int k = 0; k < PACK; k++) x[k] += position[k];
    store<ALIGNED>(out.row(r) + c, x, C - c);
}

void embedding_forward(Rows out, const int* tokens, const floatX* wte, const floatX* wpe,
                       int first_pos, int B, int T, int C) {
    bool aligned = C % PACK == 0 && is_aligned16(out) && is_aligned16(wte) && is_aligned16(wpe);
    size_t threads = (size_t)B * T * ceil_div((size_t)C, PACK);
    launch(aligned ? embedding_forward_kernel<true> : embedding_forward_kernel<false>,
           (unsigned)ceil_div(threads, THREADS), THREADS, 0, compute_stream(), native(out), tokens,
           native(wte), native(wpe), first_pos, B * T, T, C);
}

// ---- backward: positions sorted by token --------------------------------------------------------

// Work: a warp the 64 tokens of one bucket. It reads all tokens twice: first to count those of
// earlier buckets (where its part of the list begins) and its own, token by token; then to append
// its positions in index order. Bytes: V / 64 warps times 8 N, from L2 (N = 16384, V = 50257: 100
// MB). Bound: latency of L2.
//   order (N)   tokens (N)
__global__ void sort_positions_kernel(int* order, const int* tokens, int N, int V) {
    __shared__ int cursors[SORT_WARPS][BUCKET];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int* cursor = cursors[warp];
    int low = (blockIdx.x * SORT_WARPS + warp) * BUCKET;
    if (low >= V) return; // the whole warp
    for (int k = lane; k < BUCKET; k += WARP) cursor[k] = 0;
    __syncwarp();

    int earlier = 0;
    for (int i = lane; i < N; i += WARP) {
        int token = tokens[i];
        if (token < low)
            earlier++;
        else if (token < low + BUCKET)
            atomicAdd(&cursor[token - low], 1);
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) earlier += __shfl_xor_sync(~0u, earlier, step);
    __syncwarp();
    if (lane == 0) { // counts become the places where each token's positions begin
        for (int k = 0; k < BUCKET; k++) {
            int count = cursor[k];
            cursor[k] = earlier;
            earlier += count;
        }
    }
    __syncwarp();

    for (int base = 0; base < N; base += SORT_UNROLL * WARP) {
        int token[SORT_UNROLL];
#pragma unroll
        for (int k = 0; k < SORT_UNROLL; k++) {
            int i = base + k * WARP + lane;
            token[k] = i < N ? tokens[i] : -1;
        }
#pragma unroll
        for (int k = 0; k < SORT_UNROLL; k++) {
            unsigned mine = __ballot_sync(~0u, token[k] >= low && token[k] < low + BUCKET);
            for (; mine != 0; mine &= mine - 1) {
                int source = __ffs(mine) - 1;
                int t = __shfl_sync(~0u, token[k], source);
                if (lane == 0) order[cursor[t - low]++] = base + k * WARP + source;
            }
        }
    }
}

// ---- backward: runs of equal tokens -------------------------------------------------------------

// Work: a warp a segment and 32 packs of columns. Bytes: N C floatX + for each distinct token 8 C
// (dwte read and written) + 8 C for each of the N / 64 segments. FLOPs: N C. Bound: device memory
// bandwidth.
//   dwte (Vp, C) +=   heads, tails (segments, padded_C) =   dout (N, C)
template <bool ALIGNED>
__global__ void add_segments_kernel(float* dwte, float* heads, float* tails, Matrix dout,
                                    const int* order, const int* tokens, int N, int C,
                                    int padded_C) {
    int s = blockIdx.x, c = (blockIdx.y * WARP + threadIdx.x) * PACK;
    int first = s * SEGMENT, end = min(N, first + SEGMENT);
    int token = tokens[order[first]];
    bool is_head =
        first > 0 && tokens[order[first - 1]] == token; // run began in an earlier segment
    float sum[PACK] = {};
    if (c >= C) return;
    for (int i = first; i < end; i++) {
        float x[PACK];
        load<ALIGNED>(x, dout.row(order[i]) + c, C - c);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum[k] += x[k];
        int next = i + 1 < N ? tokens[order[i + 1]] : -1;
        if (next == token && i + 1 < end) continue;
        if (is_head) {
            store_pack(heads + (size_t)s * padded_C + c, sum);
        } else if (next == token) {
            store_pack(tails + (size_t)s * padded_C + c, sum);
        } else {
            float* row = dwte + (size_t)token * C + c;
            load<ALIGNED>(x, row, C - c);
#pragma unroll
            for (int k = 0; k < PACK; k++) sum[k] += x[k];
            store<ALIGNED>(row, sum, C - c);
        }
#pragma unroll
        for (int k = 0; k < PACK; k++) sum[k] = 0.0f;
        is_head = false;
        token = next;
    }
}

// Work: a warp a segment and 32 packs of columns; only where a run begins that reaches into the
// next segment. Bytes: 4 C a part + 8 C a run. Bound: latency, of the longest run.
//   dwte (Vp, C) +=   heads, tails (segments, padded_C)
template <bool ALIGNED>
__global__ void join_segments_kernel(float* dwte, const float* heads, const float* tails,
                                     const int* order, const int* tokens, int N, int C,
                                     int padded_C) {
    int s = blockIdx.x, c = (blockIdx.y * WARP + threadIdx.x) * PACK;
    int first = s * SEGMENT, end = first + SEGMENT;
    if (end >= N || c >= C) return;
    int token = tokens[order[end - 1]];
    bool goes_on = tokens[order[end]] == token;
    bool began_earlier = first > 0 && tokens[order[first - 1]] == token;
    if (!goes_on || began_earlier) return;

    float sum[PACK];
    load_pack(sum, tails + (size_t)s * padded_C + c);
    while (goes_on) {
        s++;
        end += SEGMENT;
        float x[PACK];
        load_pack(x, heads + (size_t)s * padded_C + c);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum[k] += x[k];
        goes_on = end < N && tokens[order[end - 1]] == token && tokens[order[end]] == token;
    }
    float x[PACK];
    float* row = dwte + (size_t)token * C + c;
    load<ALIGNED>(x, row, C - c);
#pragma unroll
    for (int k = 0; k < PACK; k++) sum[k] += x[k];
    store<ALIGNED>(row, sum, C - c);
}

// Work: a thread a pack of one position. Bytes: B T C floatX + the gradient. FLOPs: B T C. Bound:
// device memory bandwidth.
//   dwpe (maxT, C)   dout (B*T, C)
template <bool ALIGNED>
__global__ void position_backward_kernel(Grad dwpe, Matrix dout, int B, int T, int C, int rows) {
    int packs = (C + PACK - 1) / PACK;
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (size_t)rows * packs) return;
    size_t t = i / packs;
    int c = (int)(i % packs) * PACK;
    float sum[PACK] = {};
    for (int b = 0; b < B && t < (size_t)T; b++) {
        float x[PACK];
        load<ALIGNED>(x, dout.row((size_t)b * T + t) + c, C - c);
#pragma unroll
        for (int k = 0; k < PACK; k++) sum[k] += x[k];
    }
    for (int k = 0; k < PACK && c + k < C; k++) grad_write(dwpe, t * C + c + k, sum[k]);
}

namespace {

struct SegmentScratch {
    size_t segments, padded_C, order_bytes, part_bytes;
};
SegmentScratch segment_scratch(int N, int C) {
    size_t segments = ceil_div((size_t)N, SEGMENT), padded_C = round_up((size_t)C, PACK);
    return {segments, padded_C, round_up((size_t)N * sizeof(int), 256),
            segments * padded_C * sizeof(float)};
}

} // namespace

size_t embedding_backward_scratch_bytes(int N, int C) {
    SegmentScratch s = segment_scratch(N, C);
    return s.order_bytes + 2 * s.part_bytes;
}

void embedding_backward(Grad dwte, Grad dwpe, Rows dout, const int* tokens, int B, int T, int C,
                        int maxT, int V) {
    CHECK(dwte.is_fp32, "the gradient of wte is kept in fp32");
    int N = B * T;
    SegmentScratch size = segment_scratch(N, C);
    char* scratch = static_cast<char*>(scratch_take(embedding_backward_scratch_bytes(N, C)));
    int* order = reinterpret_cast<int*>(scratch);
    float* heads = reinterpret_cast<float*>(scratch + size.order_bytes);
    float* tails = reinterpret_cast<float*>(scratch + size.order_bytes + size.part_bytes);
    float* dwte_rows = static_cast<float*>(dwte.ptr);
    cudaStream_t stream = compute_stream();

    launch(sort_positions_kernel, (unsigned)ceil_div((size_t)V, SORT_WARPS * BUCKET),
           SORT_WARPS * WARP, 0, stream, order, tokens, N, V);

    bool aligned = C % PACK == 0 && is_aligned16(dout) && is_aligned16(dwte_rows);
    dim3 grid((unsigned)size.segments, (unsigned)ceil_div((size_t)C, TILE));
    launch(aligned ? add_segments_kernel<true> : add_segments_kernel<false>, grid, WARP, 0, stream,
           dwte_rows, heads, tails, native(dout), order, tokens, N, C, (int)size.padded_C);
    launch(aligned ? join_segments_kernel<true> : join_segments_kernel<false>, grid, WARP, 0,
           stream, dwte_rows, heads, tails, order, tokens, N, C, (int)size.padded_C);

    bool is_added = dwpe.is_fp32 && dwpe.accumulate;
    int rows = is_added ? T : maxT;
    size_t threads = rows * ceil_div((size_t)C, PACK);
    launch(aligned ? position_backward_kernel<true> : position_backward_kernel<false>,
           (unsigned)ceil_div(threads, THREADS), THREADS, 0, stream, dwpe, native(dout), B, T, C,
           rows);
}
