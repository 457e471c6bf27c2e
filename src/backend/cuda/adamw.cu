// backend/cuda/adamw.cu - the optimizer step on a shard.
//
// Source: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2 (decay times lr).
#include "backend/cuda/common.cuh"
#include "backend/cuda/segments.cuh"

namespace {

constexpr int ADAMW_THREADS = 256;
constexpr int GROUP = 8; // elements of a thread: 16 bytes of 16-bit types, twice 16 bytes of floats

// The number of each segment's first block.
struct FirstBlocks {
    unsigned of[SegmentTable::MAX];
};

} // namespace

// Work: a thread the 8 elements of one aligned group, a block 256 groups of one segment, all
// segments in one launch; a group at the ragged end of a segment goes element by element.
// Bytes an element: reads 12 + grad, writes 12 + weights (28 with fp32 gradients and 16-bit
// weights). FLOPs: about 16 an element. Bound: device memory bandwidth.
template <class G, bool ALIGNED>
__global__ void adamw_kernel(Native* weights, float* master, float* m, float* v, const G* grad,
                             const __grid_constant__ SegmentTable table,
                             const __grid_constant__ FirstBlocks first_block, AdamW p) {
    int s = 0; // this block's segment
    while (s + 1 < table.count && first_block.of[s + 1] <= blockIdx.x) s++;
    SegmentRange segment = table.at[s];
    size_t block = blockIdx.x - first_block.of[s];
    size_t at = (segment.begin / GROUP + block * ADAMW_THREADS + threadIdx.x) * GROUP;
    if (at >= segment.end) return;
    bool weights_are_master = reinterpret_cast<float*>(weights) == master; // the fp32 build
    float decay = segment.decay ? p.weight_decay : 0.0f;
    auto update = [&](float& w, float& m1, float& v1, float g) {
        g *= p.grad_scale;
        m1 = p.beta1 * m1 + (1.0f - p.beta1) * g;
        v1 = p.beta2 * v1 + (1.0f - p.beta2) * g * g;
        float step = m1 / p.correction1 / (sqrtf(v1 / p.correction2) + p.eps);
        w -= p.lr * (step + decay * w);
    };
    if (ALIGNED && at >= segment.begin && at + GROUP <= segment.end) {
        float w[GROUP], m1[GROUP], v1[GROUP], g[GROUP];
        load_pack(w, master + at);
        load_pack(m1, m + at);
        load_pack(v1, v + at);
        load_pack(g, grad + at);
#pragma unroll
        for (int i = 0; i < GROUP; i++) update(w[i], m1[i], v1[i], g[i]);
        store_pack(master + at, w);
        store_pack(m + at, m1);
        store_pack(v + at, v1);
        if (!weights_are_master) store_pack(weights + at, w);
    } else {
        for (int i = 0; i < GROUP; i++) {
            size_t e = at + i;
            if (e < segment.begin || e >= segment.end) continue;
            float w = master[e], m1 = m[e], v1 = v[e];
            update(w, m1, v1, widen(grad[e]));
            master[e] = w;
            m[e] = m1;
            v[e] = v1;
            if (!weights_are_master) weights[e] = narrow<Native>(w);
        }
    }
}

namespace {

template <class G>
void update_segments(floatX* weights, float* master, float* m, float* v, const void* grad,
                     const Segment* segments, int num_segments, const AdamW& adamw) {
    bool aligned = is_aligned16(weights) && is_aligned16(master) && is_aligned16(m) &&
                   is_aligned16(v) && is_aligned16(grad);
    auto kernel = aligned ? adamw_kernel<G, true> : adamw_kernel<G, false>;
    for_each_table(segments, num_segments, [&](const SegmentTable& table, size_t) {
        FirstBlocks first_block = {};
        unsigned blocks = 0;
        for (int s = 0; s < table.count; s++) {
            size_t groups = ceil_div(table.at[s].end, GROUP) - table.at[s].begin / GROUP;
            first_block.of[s] = blocks;
            blocks += (unsigned)ceil_div(groups, ADAMW_THREADS);
        }
        launch(kernel, blocks, ADAMW_THREADS, 0, compute_stream(), native(weights), master, m, v,
               static_cast<const G*>(grad), table, first_block, adamw);
    });
}

} // namespace

void adamw_update(floatX* weights, float* master, float* m, float* v, const void* grad,
                  DType grad_dtype, const Segment* segments, int num_segments, const AdamW* adamw) {
    switch (grad_dtype) {
    case DTYPE_FP32:
        update_segments<float>(weights, master, m, v, grad, segments, num_segments, *adamw);
        break;
    case DTYPE_BF16:
        update_segments<__nv_bfloat16>(weights, master, m, v, grad, segments, num_segments, *adamw);
        break;
    case DTYPE_FP16:
        update_segments<__half>(weights, master, m, v, grad, segments, num_segments, *adamw);
        break;
    }
}
