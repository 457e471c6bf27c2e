// tests/kernels.cu - a dozen kernels of the usual kinds against loops in double on the host.
//
// They are plain on purpose: what is tested is that CUDA as people write it runs here and, compiled
// by nvcc, on a GPU. Shapes are small, and awkward where the kernel allows.
#include "test.cuh"

namespace {

constexpr unsigned ALL = 0xFFFFFFFFu;
constexpr float EPS = 1e-5f;

// ---- reductions ---------------------------------------------------------------------------------

__device__ inline float warp_sum(float v) {
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(ALL, v, offset);
    return v;
}
__device__ inline float warp_max(float v) {
    for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(ALL, v, offset));
    return v;
}
// Over the block, whose size is a multiple of 32; every thread gets the result.
template <bool MAX> __device__ float block_reduce(float v) {
    __shared__ float part[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    v = MAX ? warp_max(v) : warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = lane < warps ? part[lane] : (MAX ? -INFINITY : 0.0f);
    v = MAX ? warp_max(v) : warp_sum(v);
    __syncthreads();
    return v;
}

// ---- LayerNorm ----------------------------------------------------------------------------------

// One warp per row of C; out = (x - mean) * rstd * w + b.
template <class T>
__global__ void layernorm_forward_kernel(T* out, float* mean, float* rstd, const T* in, const T* w,
                                         const T* b, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const T* x = in + static_cast<size_t>(row) * C;
    float sum = 0;
    for (int i = lane; i < C; i += 32) sum += static_cast<float>(x[i]);
    float m = warp_sum(sum) / C, squares = 0;
    for (int i = lane; i < C; i += 32) {
        float d = static_cast<float>(x[i]) - m;
        squares += d * d;
    }
    float r = rsqrtf(warp_sum(squares) / C + EPS);
    if (lane == 0) {
        __stcs(mean + row, m);
        __stcs(rstd + row, r);
    }
    for (int i = lane; i < C; i += 32) {
        float n = (static_cast<float>(x[i]) - m) * r;
        out[static_cast<size_t>(row) * C + i] =
            static_cast<T>(n * static_cast<float>(w[i]) + static_cast<float>(b[i]));
    }
}

// dx =, dw and db += through shared memory and atomics. Dynamic shared memory: 2 * C floats.
template <class T>
__global__ void layernorm_backward_kernel(T* dx, float* dw, float* db, const T* dout, const T* in,
                                          const T* w, const float* mean, const float* rstd, int N,
                                          int C) {
    DYNAMIC_SHARED(float, shared);
    float *sum_dw = shared, *sum_db = shared + C;
    for (int i = threadIdx.x; i < 2 * C; i += blockDim.x) shared[i] = 0;
    __syncthreads();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int row = blockIdx.x * warps + warp; row < N; row += gridDim.x * warps) {
        const T *x = in + static_cast<size_t>(row) * C, *dy = dout + static_cast<size_t>(row) * C;
        float m = mean[row], r = rstd[row], sum = 0, sum_n = 0;
        for (int i = lane; i < C; i += 32) {
            float n = (static_cast<float>(x[i]) - m) * r;
            float d = static_cast<float>(w[i]) * static_cast<float>(dy[i]);
            sum += d;
            sum_n += d * n;
        }
        sum = warp_sum(sum) / C;
        sum_n = warp_sum(sum_n) / C;
        for (int i = lane; i < C; i += 32) {
            float n = (static_cast<float>(x[i]) - m) * r, g = static_cast<float>(dy[i]);
            atomicAdd(&sum_db[i], g);
            atomicAdd(&sum_dw[i], g * n);
            float d = static_cast<float>(w[i]) * g;
            dx[static_cast<size_t>(row) * C + i] = static_cast<T>(r * (d - sum - n * sum_n));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        atomicAdd(dw + i, sum_dw[i]);
        atomicAdd(db + i, sum_db[i]);
    }
}

void test_layernorm() {
    const int N = 13, C = 67;
    Device<bf16> x(random_vector<bf16>(N * C)), w(random_vector<bf16>(C)),
        b(random_vector<bf16>(C));
    Device<bf16> dy(random_vector<bf16>(N * C)), y(N * C), dx(N * C);
    Device<float> mean(N), rstd(N), dw(C), db(C);
    dw.set_zero();
    db.set_zero();
    launch(layernorm_forward_kernel<bf16>, (N + 3) / 4, 128, 0, nullptr, y.p, mean.p, rstd.p, x.p,
           w.p, b.p, N, C);
    launch(layernorm_backward_kernel<bf16>, 3, 64, 2 * C * sizeof(float), nullptr, dx.p, dw.p, db.p,
           dy.p, x.p, w.p, mean.p, rstd.p, N, C);

    auto hx = x.get(), hw = w.get(), hb = b.get(), hdy = dy.get(), hy = y.get(), hdx = dx.get();
    auto hdw = dw.get(), hdb = db.get();
    std::vector<double> dw_sum(C), db_sum(C);
    for (int row = 0; row < N; row++) {
        auto at = [&](const std::vector<bf16>& v, int i) {
            return static_cast<double>(static_cast<float>(v[row * C + i]));
        };
        double m = 0, v = 0, s = 0, sn = 0;
        for (int i = 0; i < C; i++) m += at(hx, i) / C;
        for (int i = 0; i < C; i++) v += (at(hx, i) - m) * (at(hx, i) - m) / C;
        double r = 1 / sqrt(v + 1e-5);
        for (int i = 0; i < C; i++) {
            double d = static_cast<float>(hw[i]) * at(hdy, i);
            s += d / C;
            sn += d * (at(hx, i) - m) * r / C;
        }
        for (int i = 0; i < C; i++) {
            double n = (at(hx, i) - m) * r, wi = static_cast<float>(hw[i]);
            EXPECT(is_near(at(hy, i), n * wi + static_cast<float>(hb[i]), 8e-3));
            EXPECT(is_near(at(hdx, i), r * (wi * at(hdy, i) - s - n * sn), 8e-3));
            dw_sum[i] += at(hdy, i) * n;
            db_sum[i] += at(hdy, i);
        }
    }
    for (int i = 0; i < C; i++) {
        EXPECT(is_near(hdw[i], dw_sum[i], 1e-4));
        EXPECT(is_near(hdb[i], db_sum[i], 1e-4));
    }
}

// ---- softmax, classifier, bias gradient ---------------------------------------------------------

__global__ void softmax_kernel(float* out, const float* in, int V) { // a block per row
    const float* x = in + static_cast<size_t>(blockIdx.x) * V;
    float *y = out + static_cast<size_t>(blockIdx.x) * V, largest = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < V; i += blockDim.x) largest = fmaxf(largest, x[i]);
    largest = block_reduce<true>(largest);
    for (int i = threadIdx.x; i < V; i += blockDim.x) sum += expf(x[i] - largest);
    sum = block_reduce<false>(sum);
    for (int i = threadIdx.x; i < V; i += blockDim.x) y[i] = expf(x[i] - largest) / sum;
}

// loss = -log p[target]; logits are replaced by (p - 1[target]) * scale; columns V to Vp become 0.
template <class T>
__global__ void __launch_bounds__(256)
    classifier_kernel(T* logits, float* loss, const int* targets, float scale, int V, int Vp) {
    T* x = logits + static_cast<size_t>(blockIdx.x) * Vp;
    int target = targets[blockIdx.x];
    float largest = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < V; i += blockDim.x) { // online, arXiv:1805.02867
        float v = static_cast<float>(x[i]), m = fmaxf(largest, v);
        sum = sum * expf(largest - m) + expf(v - m);
        largest = m;
    }
    float m = block_reduce<true>(largest);
    sum = block_reduce<false>(largest == -INFINITY ? 0.0f : sum * expf(largest - m));
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + m - static_cast<float>(x[target]);
    __syncthreads();
    for (int i = threadIdx.x; i < Vp; i += blockDim.x) {
        float p = i < V ? expf(static_cast<float>(x[i]) - m) / sum : 0.0f;
        x[i] = static_cast<T>((p - (i == target ? 1.0f : 0.0f)) * scale);
    }
}

// db += column sums of dout; a block of (32, 8) threads for 32 columns.
template <class T> __global__ void bias_grad_kernel(float* db, const T* dout, int N, int C) {
    __shared__ float partial[8][33];
    int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (column < C) {
        for (int row = threadIdx.y; row < N; row += 8) {
            sum += static_cast<float>(dout[static_cast<size_t>(row) * C + column]);
        }
    }
    partial[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < C) {
        for (int i = 1; i < 8; i++) sum += partial[i][threadIdx.x];
        db[column] += sum;
    }
}

void test_classifier() {
    const int N = 5, V = 77, Vp = 80;
    Device<float> in(random_vector<float>(N * V, 3)), out(N * V), loss(N), db(Vp);
    Device<bf16> logits(random_vector<bf16>(N * Vp, 3));
    std::vector<int> chosen = {3, 0, 76, 33, 40};
    Device<int> targets(chosen);
    db.set_zero();
    auto h_in = in.get();
    auto h_logits = logits.get();
    launch(softmax_kernel, N, 64, 0, nullptr, out.p, in.p, V);
    launch(classifier_kernel<bf16>, N, 96, 0, nullptr, logits.p, loss.p, targets.p, 0.5f, V, Vp);
    launch(bias_grad_kernel<bf16>, (Vp + 31) / 32, dim3(32, 8), 0, nullptr, db.p, logits.p, N, Vp);
    auto h_out = out.get(), h_loss = loss.get(), h_db = db.get();
    auto h_grad = logits.get();
    for (int n = 0; n < N; n++) {
        double sum = 0, sum_logits = 0;
        for (int i = 0; i < V; i++) {
            sum += exp(h_in[n * V + i]);
            sum_logits += exp(static_cast<float>(h_logits[n * Vp + i]));
        }
        for (int i = 0; i < V; i++) {
            EXPECT(is_near(h_out[n * V + i], exp(h_in[n * V + i]) / sum, 1e-5));
        }
        double picked = static_cast<float>(h_logits[n * Vp + chosen[n]]);
        EXPECT(is_near(h_loss[n], log(sum_logits) - picked, 1e-5));
        for (int i = 0; i < Vp; i++) {
            double p = i < V ? exp(static_cast<float>(h_logits[n * Vp + i])) / sum_logits : 0;
            double expected = (p - (i == chosen[n])) * 0.5;
            EXPECT(is_near(static_cast<float>(h_grad[n * Vp + i]), expected, 8e-3));
        }
    }
    for (int i = 0; i < Vp; i++) {
        double sum = 0;
        for (int n = 0; n < N; n++) sum += static_cast<float>(h_grad[n * Vp + i]);
        EXPECT(is_near(h_db[i], sum, 1e-5));
    }
}

// ---- elementwise --------------------------------------------------------------------------------

template <class T> __global__ void gelu_kernel(T* out, const T* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = static_cast<float>(in[i]);
    out[i] = static_cast<T>(0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))));
}
// Eight bf16 at a time.
__global__ void residual_kernel(bf16* out, const bf16* a, const bf16* b) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    uint4 va = *reinterpret_cast<const uint4*>(a + i), vb = *reinterpret_cast<const uint4*>(b + i);
    const bf16 *xa = reinterpret_cast<const bf16*>(&va), *xb = reinterpret_cast<const bf16*>(&vb);
    __align__(16) bf16 sum[8];
    for (int k = 0; k < 8; k++) {
        sum[k] = __float2bfloat16_rn(__bfloat162float(xa[k]) + __bfloat162float(xb[k]));
    }
    *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(sum);
}
// beta1 0.9, beta2 0.95, first step, arXiv:1711.05101.
__global__ void adamw_kernel(float* p, bf16* rounded, float* m, float* v, const float* g, size_t n,
                             float lr, float decay) {
    size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    m[i] = 0.9f * m[i] + 0.1f * g[i];
    v[i] = 0.95f * v[i] + 0.05f * g[i] * g[i];
    p[i] -= lr * (m[i] / 0.1f / (sqrtf(v[i] / 0.05f) + 1e-8f) + decay * p[i]);
    rounded[i] = __float2bfloat16_rn(p[i]);
}
// Sum of squares in two steps: a partial sum per block, then one block in fixed order.
__global__ void norm_partial_kernel(float* partial, const float* x, size_t n) {
    float sum = 0;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        sum += x[i] * x[i];
    }
    sum = block_reduce<false>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
__global__ void norm_final_kernel(float* out, const float* partial, int n) {
    float sum = block_reduce<false>(static_cast<int>(threadIdx.x) < n ? partial[threadIdx.x] : 0);
    if (threadIdx.x == 0) *out = sqrtf(sum);
}
__global__ void transpose_kernel(float* out, const float* in, int rows, int cols) { // (32, 8)
    __shared__ float tile[32][33];
    int x = blockIdx.x * 32 + threadIdx.x, y0 = blockIdx.y * 32;
    for (int y = threadIdx.y; y < 32; y += 8) {
        if (x < cols && y0 + y < rows) tile[y][threadIdx.x] = in[(y0 + y) * cols + x];
    }
    __syncthreads();
    int row = y0 + threadIdx.x;
    for (int y = threadIdx.y; y < 32; y += 8) {
        int column = blockIdx.x * 32 + y;
        if (row < rows && column < cols) out[column * rows + row] = tile[threadIdx.x][y];
    }
}

void test_elementwise() {
    const int n = 1000, padded = 1024, rows = 45, cols = 39;
    Device<bf16> a(random_vector<bf16>(padded, 3)), b(random_vector<bf16>(padded)), out(n);
    Device<bf16> sum(padded), rounded(n);
    Device<float> p(random_vector<float>(n)), m(n), v(n), g(random_vector<float>(n)), partial(5);
    Device<float> norm(1), matrix(random_vector<float>(rows * cols)), transposed(rows * cols);
    m.set_zero();
    v.set_zero();
    auto before = p.get();
    launch(gelu_kernel<bf16>, (n + 255) / 256, 256, 0, nullptr, out.p, a.p, n);
    launch(residual_kernel, padded / 8 / 64, 64, 0, nullptr, sum.p, a.p, b.p);
    launch(adamw_kernel, (n + 127) / 128, 128, 0, nullptr, p.p, rounded.p, m.p, v.p, g.p, n, 0.01f,
           0.1f);
    launch(norm_partial_kernel, 5, 64, 0, nullptr, partial.p, g.p, n);
    launch(norm_final_kernel, 1, 32, 0, nullptr, norm.p, partial.p, 5);
    launch(transpose_kernel, dim3((cols + 31) / 32, (rows + 31) / 32), dim3(32, 8), 0, nullptr,
           transposed.p, matrix.p, rows, cols);
    auto ha = a.get(), hb = b.get(), h_out = out.get(), h_sum = sum.get();
    auto hp = p.get(), hg = g.get(), h_in = matrix.get(), h_t = transposed.get();
    auto h_rounded = rounded.get();
    double squares = 0;
    for (int i = 0; i < n; i++) {
        double x = static_cast<float>(ha[i]), y = static_cast<float>(hb[i]);
        double gelu = 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        EXPECT(is_near(static_cast<float>(h_out[i]), gelu, 8e-3));
        EXPECT(is_near(static_cast<float>(h_sum[i]), x + y, 8e-3));
        double update = hg[i] / (fabs(hg[i]) + 1e-8) + 0.1 * before[i];
        EXPECT(is_near(hp[i], before[i] - 0.01 * update, 1e-5));
        EXPECT(is_near(static_cast<float>(h_rounded[i]), hp[i], 4e-3));
        squares += static_cast<double>(hg[i]) * hg[i];
    }
    EXPECT(is_near(norm.get()[0], sqrt(squares), 1e-5));
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) EXPECT(h_t[c * rows + r] == h_in[r * cols + c]);
    }
}

// ---- attention ----------------------------------------------------------------------------------

// Causal; qkv (T, 3, NH, HS); one thread per query, K and V through shared memory, online softmax
// (arXiv:2205.14135). Dynamic shared memory: 2 * blockDim.x * HS floats.
template <class T, int HS>
__global__ void attention_kernel(T* out, const T* qkv, int length, int NH, float scale) {
    DYNAMIC_SHARED(float, shared);
    const int tile = blockDim.x, head = blockIdx.y, stride = 3 * NH * HS;
    const int query = blockIdx.x * tile + threadIdx.x;
    float *keys = shared, *values = shared + tile * HS;
    const T* base = qkv + head * HS;
    float q[HS], o[HS], largest = -INFINITY, sum = 0;
    for (int i = 0; i < HS; i++) {
        q[i] = query < length ? static_cast<float>(base[query * stride + i]) * scale : 0;
        o[i] = 0;
    }
    for (int first = 0; first <= static_cast<int>(blockIdx.x) * tile; first += tile) {
        __syncthreads();
        for (int i = threadIdx.x; i < tile * HS; i += tile) {
            int row = first + i / HS;
            const T* source = base + row * stride + i % HS;
            keys[i] = row < length ? static_cast<float>(source[NH * HS]) : 0;
            values[i] = row < length ? static_cast<float>(source[2 * NH * HS]) : 0;
        }
        __syncthreads();
        for (int j = 0; j < tile && first + j <= query; j++) {
            float s = 0;
            for (int i = 0; i < HS; i++) s += q[i] * keys[j * HS + i];
            float m = fmaxf(largest, s), keep = expf(largest - m), p = expf(s - m);
            sum = sum * keep + p;
            largest = m;
            for (int i = 0; i < HS; i++) o[i] = o[i] * keep + p * values[j * HS + i];
        }
    }
    if (query >= length) return;
    for (int i = 0; i < HS; i++) {
        out[(query * NH + head) * HS + i] = static_cast<T>(o[i] / sum);
    }
}

void test_attention() {
    constexpr int HS = 16;
    const int length = 41, NH = 2, tile = 32, stride = 3 * NH * HS;
    Device<bf16> qkv(random_vector<bf16>(length * stride)), out(length * NH * HS);
    launch(attention_kernel<bf16, HS>, dim3((length + tile - 1) / tile, NH), tile,
           2 * tile * HS * sizeof(float), nullptr, out.p, qkv.p, length, NH, 0.25f);
    auto h = qkv.get(), h_out = out.get();
    auto at = [&](int t, int which, int head, int i) {
        return static_cast<double>(
            static_cast<float>(h[t * stride + (which * NH + head) * HS + i]));
    };
    for (int head = 0; head < NH; head++) {
        for (int t = 0; t < length; t++) {
            std::vector<double> o(HS);
            double sum = 0;
            for (int k = 0; k <= t; k++) {
                double s = 0;
                for (int i = 0; i < HS; i++) s += at(t, 0, head, i) * at(k, 1, head, i) * 0.25;
                sum += exp(s);
                for (int i = 0; i < HS; i++) o[i] += exp(s) * at(k, 2, head, i);
            }
            for (int i = 0; i < HS; i++) {
                double got = static_cast<float>(h_out[(t * NH + head) * HS + i]);
                EXPECT(is_near(got, o[i] / sum, 8e-3));
            }
        }
    }
}

} // namespace

int main() {
    test_layernorm();
    test_classifier();
    test_elementwise();
    test_attention();
    return num_failed != 0;
}
