// backend/cuda/reduce.cu - sums and conversions over flat buffers, and the sums over rows that
// weight gradients need. Every order is fixed; nothing is added atomically but integers.
#include "backend/cuda/common.cuh"
#include "backend/cuda/segments.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int GROUP = 8; // elements of a thread: 16 bytes of 16-bit types, twice 16 bytes of floats

unsigned blocks_for(size_t groups) {
    return (unsigned)min_size(ceil_div(groups, THREADS), 1u << 20);
}

} // namespace

// ---- partial sums of weight gradients -----------------------------------------------------------

// Work: a block 32 columns; warp w adds every 32nd partial from w on, then the warps' sums are
// added in order. Bytes: num_partials cols floats + the gradient. Bound: latency (small).
//   grad (cols)   partials (num_partials, stride)
__global__ void __launch_bounds__(1024)
    sum_partials_kernel(Grad grad, const float* partials, size_t stride, int num_partials,
                        int cols) {
    __shared__ float of_warp[WARP][WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    int c = blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (c < cols) {
        for (int p = warp; p < num_partials; p += warps) sum += partials[p * stride + c];
    }
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && c < cols) {
        for (int w = 1; w < warps; w++) sum += of_warp[w][lane];
        grad_write(grad, c, sum);
    }
}

void sum_partials(Grad grad, const float* partials, size_t stride, int num_partials, int cols) {
    int warps = num_partials < WARP ? num_partials : WARP;
    launch(sum_partials_kernel, (unsigned)ceil_div((size_t)cols, WARP), warps * WARP, 0,
           compute_stream(), grad, partials, stride, num_partials, cols);
}

namespace {

constexpr int BIAS_WARPS = 8, BIAS_COLUMNS = WARP * PACK;

// Rows of a chunk, from N alone: at least 128, so that a partial (8 bytes, written and read) is a
// small part of the chunk's column, at most the 1024 rows of the contract.
int bias_chunk_rows(int N) {
    int rows = (int)round_up(ceil_div((size_t)N, 32), BIAS_WARPS);
    return rows < 128 ? 128 : rows > 1024 ? 1024 : rows;
}

} // namespace

// Work: a block a chunk of rows and 32 packs of columns; each warp every 8th row of the chunk, then
// the warps' sums are added in order. Bytes: N cols floatX + 8 cols a chunk. Bound: device memory
// bandwidth.
//   partials (chunks, cols)   dout (N, cols)
template <bool ALIGNED>
__global__ void bias_backward_kernel(float* partials, Matrix dout, int N, int cols,
                                     int chunk_rows) {
    __shared__ __align__(16) float of_warp[BIAS_WARPS][BIAS_COLUMNS]; // written in packs
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int c = blockIdx.x * BIAS_COLUMNS + lane * PACK;
    float sum[PACK] = {};
    if (c < cols) {
        int end = min(N, ((int)blockIdx.y + 1) * chunk_rows);
        for (int r = blockIdx.y * chunk_rows + warp; r < end; r += BIAS_WARPS) {
            float x[PACK];
            load<ALIGNED>(x, dout.row(r) + c, cols - c);
#pragma unroll
            for (int i = 0; i < PACK; i++) sum[i] += x[i];
        }
    }
    store_pack(&of_warp[warp][lane * PACK], sum);
    __syncthreads();
    for (int i = threadIdx.x; i < BIAS_COLUMNS; i += BIAS_WARPS * WARP) {
        int column = blockIdx.x * BIAS_COLUMNS + i;
        if (column >= cols) break;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < BIAS_WARPS; w++) total += of_warp[w][i];
        partials[(size_t)blockIdx.y * cols + column] = total;
    }
}

size_t bias_backward_scratch_bytes(int N, int cols) {
    return ceil_div((size_t)N, bias_chunk_rows(N)) * cols * sizeof(float);
}

void bias_backward(Grad dbias, Rows dout, int N, int cols) {
    bool aligned = cols % PACK == 0 && is_aligned16(dout);
    float* partials = static_cast<float*>(scratch_take(bias_backward_scratch_bytes(N, cols)));
    int chunk_rows = bias_chunk_rows(N), chunks = (int)ceil_div((size_t)N, chunk_rows);
    dim3 grid((unsigned)ceil_div((size_t)cols, BIAS_COLUMNS), chunks);
    launch(aligned ? bias_backward_kernel<true> : bias_backward_kernel<false>, grid,
           BIAS_WARPS * WARP, 0, compute_stream(), partials, native(dout), N, cols, chunk_rows);
    sum_partials(dbias, partials, cols, chunks, cols);
}

// ---- the norm -----------------------------------------------------------------------------------

// Work: a block of 128 threads a NORM_BLOCK, a thread 8 neighbours; then a tree over threads.
// Bytes: elems of grad + 8 a block. FLOPs: 2 an element, in double. Bound: device memory bandwidth
// (on GPUs with few double-precision units: those).
//   partials (ceil(elems / 1024))   grad (elems)
template <class G, bool ALIGNED>
__global__ void norm_partials_kernel(double* partials, const G* grad, size_t elems,
                                     const __grid_constant__ SegmentTable table) {
    __shared__ double of_warp[NORM_BLOCK / GROUP / WARP];
    size_t block_begin = (size_t)blockIdx.x * NORM_BLOCK;
    size_t block_end = block_begin + NORM_BLOCK < elems ? block_begin + NORM_BLOCK : elems;
    size_t at = block_begin + threadIdx.x * GROUP;
    double sum = 0.0;
    for (int s = 0; s < table.count; s++) {
        size_t begin = table.at[s].begin, end = table.at[s].end;
        if (end <= block_begin || begin >= block_end) continue;
        float g[GROUP] = {};
        if (ALIGNED && at >= begin && at + GROUP <= end) {
            load_pack(g, grad + at);
        } else {
            for (int i = 0; i < GROUP; i++) {
                if (at + i >= begin && at + i < end) g[i] = widen(grad[at + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++) sum += (double)g[i] * g[i];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (double x : of_warp) total += x;
        partials[blockIdx.x] = total;
    }
}

namespace {

// Calls run(grad in its own type).
template <class Run> void with_type(const void* p, DType dtype, Run run) {
    switch (dtype) {
    case DTYPE_FP32:
        run(static_cast<const float*>(p));
        break;
    case DTYPE_BF16:
        run(static_cast<const __nv_bfloat16*>(p));
        break;
    case DTYPE_FP16:
        run(static_cast<const __half*>(p));
        break;
    }
}

} // namespace

void norm_partials(double* partials, const void* grad, DType grad_dtype, size_t elems,
                   const Segment* segments, int num_segments, stream_t stream) {
    CHECK(num_segments <= SegmentTable::MAX, "%d segments, at most %d", num_segments,
          SegmentTable::MAX);
    if (elems == 0) return;
    unsigned blocks = (unsigned)ceil_div(elems, NORM_BLOCK);
    SegmentTable table = {};
    for_each_table(segments, num_segments, [&](const SegmentTable& t, size_t) { table = t; });
    with_type(grad, grad_dtype, [&](auto* g) {
        using G = std::remove_const_t<std::remove_pointer_t<decltype(g)>>;
        launch(is_aligned16(g) ? norm_partials_kernel<G, true> : norm_partials_kernel<G, false>,
               blocks, NORM_BLOCK / GROUP, 0, cuda_stream(stream), partials, g, elems, table);
    });
}

// ---- non-finite elements ------------------------------------------------------------------------

namespace {

struct NonFinite {
    unsigned long long first, count;
};

} // namespace

// Work: a thread every gridDim * 256th element of each segment. For the error path: speed is no
// aim.
template <class G>
__global__ void find_nonfinite_kernel(NonFinite* found, const G* grad,
                                      const __grid_constant__ SegmentTable table) {
    for (int s = 0; s < table.count; s++) {
        size_t stride = (size_t)gridDim.x * THREADS;
        for (size_t i = table.at[s].begin + (size_t)blockIdx.x * THREADS + threadIdx.x;
             i < table.at[s].end; i += stride) {
            if (!isfinite(widen(grad[i]))) {
                atomicMin(&found->first, (unsigned long long)i);
                atomicAdd(&found->count, 1ull);
            }
        }
    }
}

long find_nonfinite(const void* grad, DType grad_dtype, const Segment* segments, int num_segments,
                    size_t* count) {
    NonFinite result = {~0ull, 0};
    NonFinite* found = static_cast<NonFinite*>(scratch_take(sizeof(NonFinite)));
    device_upload(found, &result, sizeof result);
    with_type(grad, grad_dtype, [&](auto* g) {
        using G = std::remove_const_t<std::remove_pointer_t<decltype(g)>>;
        for_each_table(segments, num_segments, [&](const SegmentTable& table, size_t largest) {
            launch(find_nonfinite_kernel<G>, (unsigned)min_size(ceil_div(largest, THREADS), 1024),
                   THREADS, 0, compute_stream(), found, g, table);
        });
    });
    device_download(&result, found, sizeof result);
    *count = (size_t)result.count;
    return result.count > 0 ? (long)result.first : -1;
}

// ---- folding ------------------------------------------------------------------------------------

namespace {

struct FoldSources {
    const void* at[FOLD_MAX_SOURCES];
    int count;
};

} // namespace

// Work: a thread 8 neighbours of all sources. Bytes: elems (sources + acc written, + read with
// accumulate). FLOPs: one a source and element. Bound: device memory bandwidth.
template <class A, class S, bool ALIGNED>
__global__ void fold_kernel(A* acc, bool accumulate, const __grid_constant__ FoldSources sources,
                            size_t elems) {
    size_t stride = (size_t)gridDim.x * THREADS * GROUP;
    for (size_t at = ((size_t)blockIdx.x * THREADS + threadIdx.x) * GROUP; at < elems;
         at += stride) {
        int valid = elems - at < GROUP ? (int)(elems - at) : GROUP;
        bool whole = ALIGNED && valid == GROUP;
        float sum[GROUP] = {};
        auto read = [&](float(&x)[GROUP], auto* p) {
            if (whole)
                load_pack(x, p + at);
            else
                load<false>(x, p + at, valid);
        };
        if (accumulate) read(sum, acc);
        for (int s = 0; s < sources.count; s++) {
            float x[GROUP];
            read(x, static_cast<const S*>(sources.at[s]));
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                sum[i] = widen(narrow<A>(s == 0 && !accumulate ? x[i] : sum[i] + x[i]));
            }
        }
        if (whole)
            store_pack(acc + at, sum);
        else
            store<false>(acc + at, sum, valid);
    }
}

void fold(void* acc, DType acc_dtype, bool accumulate, const void* const* sources,
          DType source_dtype, int num_sources, size_t elems, stream_t stream) {
    CHECK(num_sources <= FOLD_MAX_SOURCES, "%d sources, at most %d", num_sources, FOLD_MAX_SOURCES);
    if (elems == 0 || num_sources == 0) return;
    FoldSources table = {};
    bool aligned = is_aligned16(acc);
    for (int s = 0; s < num_sources; s++) {
        table.at[s] = sources[s];
        aligned = aligned && is_aligned16(sources[s]);
    }
    table.count = num_sources;
    with_type(acc, acc_dtype, [&](auto* a) {
        using A = std::remove_const_t<std::remove_pointer_t<decltype(a)>>;
        with_type(sources[0], source_dtype, [&](auto* s) {
            using S = std::remove_const_t<std::remove_pointer_t<decltype(s)>>;
            launch(aligned ? fold_kernel<A, S, true> : fold_kernel<A, S, false>,
                   blocks_for(ceil_div(elems, GROUP)), THREADS, 0, cuda_stream(stream),
                   static_cast<A*>(acc), accumulate, table, elems);
        });
    });
}

// ---- conversion ---------------------------------------------------------------------------------

// Elements [begin, end), a thread 8 neighbours. All threads of a block have read before one writes.
// Bytes: one read and one write of each element. Bound: device memory bandwidth.
template <class D, class S, bool ALIGNED>
__global__ void convert_kernel(D* dst, const S* src, size_t begin, size_t end) {
    size_t at = begin + ((size_t)blockIdx.x * THREADS + threadIdx.x) * GROUP;
    int valid = at < end ? (int)(end - at < GROUP ? end - at : GROUP) : 0;
    bool whole = ALIGNED && valid == GROUP;
    float x[GROUP];
    if (whole)
        load_pack(x, src + at);
    else
        load<false>(x, src + at, valid);
    __syncthreads();
    if (whole)
        store_pack(dst + at, x);
    else
        store<false>(dst + at, x, valid);
}

void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t elems,
             stream_t stream) {
    bool in_place = dst == src;
    if (elems == 0 || (in_place && dst_dtype == src_dtype)) return;
    bool aligned = is_aligned16(dst) && is_aligned16(src);
    bool narrows_in_place = in_place && dtype_bytes(dst_dtype) < dtype_bytes(src_dtype);
    with_type(dst, dst_dtype, [&](auto* d) {
        using D = std::remove_const_t<std::remove_pointer_t<decltype(d)>>;
        with_type(src, src_dtype, [&](auto* s) {
            using S = std::remove_const_t<std::remove_pointer_t<decltype(s)>>;
            auto kernel = aligned ? convert_kernel<D, S, true> : convert_kernel<D, S, false>;
            // Narrowing in place: elements [begin, 2 begin) land on [begin / 2, begin), which an
            // earlier launch has read. The first launch is one block, whose barrier keeps the
            // order.
            constexpr size_t BLOCK = (size_t)THREADS * GROUP;
            size_t begin = 0, end = narrows_in_place ? min_size(BLOCK, elems) : elems;
            while (begin < elems) {
                launch(kernel, (unsigned)ceil_div(end - begin, BLOCK), THREADS, 0,
                       cuda_stream(stream), static_cast<D*>(dst), s, begin, end);
                begin = end;
                end = min_size(2 * begin, elems);
            }
        });
    });
}
