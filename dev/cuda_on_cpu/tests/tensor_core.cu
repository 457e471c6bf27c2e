// tests/tensor_core.cu - mma, ldmatrix and cp.async: single products in both types, and a GEMM.
//
// The lane layout is checked twice: with fragments filled by the tables of the PTX ISA, and by the
// strides of CuTe's MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>, written down there independently.
#include "backend/cuda/tensor_core.cuh"
#include "test.cuh"

#include <type_traits>

namespace {

__device__ inline uint16_t bits_of(bf16 x) { return __bfloat16_as_ushort(x); }
__device__ inline uint16_t bits_of(__half x) { return __half_as_ushort(x); }

template <class T> __device__ uint32_t pack(T low, T high) {
    return bits_of(low) | static_cast<uint32_t>(bits_of(high)) << 16;
}

template <class T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    const float (&c)[4]) {
    if constexpr (sizeof(T) != 2)
        return;
    else if constexpr (std::is_same_v<T, bf16>)
        mma_m16n8k16_bf16(d, a, b, c);
    else
        mma_m16n8k16_fp16(d, a, b, c);
}

// ---- one product of a warp ----------------------------------------------------------------------
// A (16,16), B (16,8), C and D (16,8), row-major.

__device__ void load_c(float (&c)[4], const float* C, int lane) {
    for (int i = 0; i < 4; i++) c[i] = C[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2];
}
__device__ void store_d(float* D, const float (&d)[4], int lane) {
    for (int i = 0; i < 4; i++) D[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

template <class T>
__global__ void by_table_kernel(float* D, const T* A, const T* B, const float* C) {
    int lane = threadIdx.x, g = lane / 4, q = lane % 4;
    uint32_t a[4], b[2];
    float c[4], d[4];
    for (int r = 0; r < 4; r++) {
        const T* x = A + (g + 8 * (r % 2)) * 16 + 2 * q + 8 * (r / 2);
        a[r] = pack(x[0], x[1]);
    }
    for (int r = 0; r < 2; r++) {
        const T* x = B + (2 * q + 8 * r) * 8 + g;
        b[r] = pack(x[0], x[8]);
    }
    load_c(c, C, lane);
    mma<T>(d, a, b, c);
    store_d(D, d, lane);
}

// A through ldmatrix, B out of its row-major tile through ldmatrix.trans; X4: with the four-matrix
// form for B as well, of which two are used.
template <class T, bool X4>
__global__ void by_ldmatrix_kernel(float* D, const T* A, const T* B, const float* C) {
    __shared__ __align__(16) uint16_t sa[16 * 16], sb[16 * 8];
    int lane = threadIdx.x;
    for (int i = lane; i < 16 * 16; i += 32) sa[i] = bits_of(A[i]);
    for (int i = lane; i < 16 * 8; i += 32) sb[i] = bits_of(B[i]);
    __syncwarp();
    uint32_t a[4], b[2], b4[4];
    float c[4];
    ldmatrix_x4(a, sa + lane % 16 * 16 + lane / 16 * 8);
    if (X4) {
        ldmatrix_x4_trans(b4, sb + lane % 16 * 8);
        b[0] = b4[0];
        b[1] = b4[1];
    } else {
        ldmatrix_x2_trans(b, sb + lane % 16 * 8);
    }
    load_c(c, C, lane);
    mma<T>(c, a, b, c); // D over C
    store_d(D, c, lane);
}

// CuTe: element v of thread (t0, t1) lies at m + 16 k in A, n + 8 k in B, m + 16 n in C, where
//   A ((4,8),(2,2,2)) : ((32,1),(16,8,128))   B ((4,8),(2,2)) : ((16,1),(8,64))
//   C ((4,8),(2,2)) : ((32,1),(16,8))
template <class T>
__global__ void by_cute_kernel(float* D, const T* A, const T* B, const float* C) {
    int t0 = threadIdx.x % 4, t1 = threadIdx.x / 4;
    auto at_a = [&](int v) { // row m, column k of the row-major matrix
        int i = t0 * 32 + t1 + v % 2 * 16 + v / 2 % 2 * 8 + v / 4 * 128;
        return A[i % 16 * 16 + i / 16];
    };
    auto at_b = [&](int v) {
        int i = t0 * 16 + t1 + v % 2 * 8 + v / 2 * 64;
        return B[i / 8 * 8 + i % 8];
    };
    auto index_c = [&](int v) {
        int i = t0 * 32 + t1 + v % 2 * 16 + v / 2 * 8;
        return i % 16 * 8 + i / 16;
    };
    uint32_t a[4], b[2];
    float c[4], d[4];
    for (int i = 0; i < 4; i++) a[i] = pack(at_a(2 * i), at_a(2 * i + 1));
    for (int i = 0; i < 2; i++) b[i] = pack(at_b(2 * i), at_b(2 * i + 1));
    for (int i = 0; i < 4; i++) c[i] = C[index_c(i)];
    mma<T>(d, a, b, c);
    for (int i = 0; i < 4; i++) D[index_c(i)] = d[i];
}

// Elements (row, column) of an 8x8 matrix through the plain two-matrix form.
__global__ void ldmatrix_x2_kernel(int* out) {
    __shared__ __align__(16) uint16_t s[16 * 8];
    int lane = threadIdx.x;
    for (int i = lane; i < 16 * 8; i += 32) s[i] = static_cast<uint16_t>(i);
    __syncwarp();
    uint32_t r[2];
    ldmatrix_x2(r, s + lane % 16 * 8);
    out[2 * lane] = static_cast<int>(r[0]);
    out[2 * lane + 1] = static_cast<int>(r[1]);
}

// Small integers: all sums are exact, whatever their order.
template <class T> std::vector<T> integers(int count, int range) {
    std::vector<T> v(static_cast<size_t>(count));
    for (T& x : v) x = static_cast<T>(floorf(random_float(static_cast<float>(range))));
    return v;
}

template <class T> void test_product(const char* type) {
    Device<T> A(integers<T>(256, 30)), B(integers<T>(128, 30));
    Device<float> C(integers<float>(128, 100)), D(128);
    auto a = A.get(), b = B.get();
    auto c = C.get();
    auto check = [&](const char* how, void (*kernel)(float*, const T*, const T*, const float*)) {
        D.set_zero();
        launch(kernel, 1, 32, 0, nullptr, D.p, A.p, B.p, C.p);
        auto d = D.get();
        for (int m = 0; m < 16; m++) {
            for (int n = 0; n < 8; n++) {
                float sum = c[m * 8 + n];
                for (int k = 0; k < 16; k++) {
                    sum += static_cast<float>(a[m * 16 + k]) * static_cast<float>(b[k * 8 + n]);
                }
                EXPECT(d[m * 8 + n] == sum, "%s %s (%d,%d)", type, how, m, n);
            }
        }
    };
    check("by table", by_table_kernel<T>);
    check("by ldmatrix x4", by_ldmatrix_kernel<T, true>);
    check("by ldmatrix x2", by_ldmatrix_kernel<T, false>);
    check("by CuTe", by_cute_kernel<T>);
}

void test_ldmatrix_x2() {
    Device<int> out(64);
    launch(ldmatrix_x2_kernel, 1, 32, 0, nullptr, out.p);
    auto h = out.get();
    for (int lane = 0; lane < 32; lane++) {
        int first = lane / 4 * 8 + lane % 4 * 2;
        EXPECT(h[2 * lane] == (first | (first + 1) << 16));
        EXPECT(h[2 * lane + 1] == ((first + 64) | (first + 65) << 16));
    }
}

// ---- GEMM ---------------------------------------------------------------------------------------

constexpr int TILE = 64, TILE_K = 32, LEAD = TILE_K + 8; // padded rows: no bank conflicts

// C (M,N) = A (M,K) * B (N,K)^T for N a multiple of 64, K of 32 and any M. Four warps of 32 x 32,
// two buffers in turn; rows past M are filled with zeros.
template <class T>
__global__ void __launch_bounds__(128)
    gemm_kernel(float* C, const T* A, const T* B, int M, int N, int K) {
    DYNAMIC_SHARED(T, shared); // 2 * 2 * TILE * LEAD
    auto tile_a = [&](int buffer) { return shared + buffer * 2 * TILE * LEAD; };
    auto tile_b = [&](int buffer) { return tile_a(buffer) + TILE * LEAD; };
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int m0 = blockIdx.y * TILE, n0 = blockIdx.x * TILE;
    const int warp_m = warp % 2 * 32, warp_n = warp / 2 * 32;
    auto load = [&](int buffer, int k0) {
        for (int i = thread; i < TILE * TILE_K / 8; i += 128) {
            int row = i / 4, column = i % 4 * 8;
            bool inside = m0 + row < M;
            const T* source = A + static_cast<size_t>(inside ? m0 + row : 0) * K + k0 + column;
            cp_async16_zfill(tile_a(buffer) + row * LEAD + column, source, inside ? 16 : 0);
            cp_async16(tile_b(buffer) + row * LEAD + column,
                       B + static_cast<size_t>(n0 + row) * K + k0 + column);
        }
        cp_async_commit();
    };
    float sums[2][4][4] = {};
    load(0, 0);
    for (int k0 = 0, buffer = 0; k0 < K; k0 += TILE_K, buffer ^= 1) {
        if (k0 + TILE_K < K) {
            load(buffer ^ 1, k0 + TILE_K);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        for (int k = 0; k < TILE_K; k += 16) {
            uint32_t a[2][4], b[2][4];
            for (int i = 0; i < 2; i++) {
                int row = warp_m + 16 * i + lane % 16;
                ldmatrix_x4(a[i], tile_a(buffer) + row * LEAD + k + lane / 16 * 8);
            }
            for (int j = 0; j < 2; j++) {
                int row = warp_n + 16 * j + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b[j], tile_b(buffer) + row * LEAD + k + lane / 8 % 2 * 8);
            }
            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < 4; j++) {
                    uint32_t b_half[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                    mma<T>(sums[i][j], a[i], b_half, sums[i][j]);
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 4; j++) {
            for (int e = 0; e < 4; e++) {
                int m = m0 + warp_m + 16 * i + lane / 4 + e / 2 * 8;
                int n = n0 + warp_n + 8 * j + lane % 4 * 2 + e % 2;
                if (m < M) C[static_cast<size_t>(m) * N + n] = sums[i][j][e];
            }
        }
    }
}

template <class T> void test_gemm() {
    const int M = 83, N = 128, K = 96;
    Device<T> A(random_vector<T>(M * K)), B(random_vector<T>(N * K));
    Device<float> C(M * N);
    launch(gemm_kernel<T>, dim3(N / TILE, (M + TILE - 1) / TILE), 128, 4 * TILE * LEAD * sizeof(T),
           nullptr, C.p, A.p, B.p, M, N, K);
    auto a = A.get(), b = B.get();
    auto c = C.get();
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            double sum = 0;
            for (int k = 0; k < K; k++) {
                sum += static_cast<double>(static_cast<float>(a[m * K + k])) *
                       static_cast<float>(b[n * K + k]);
            }
            EXPECT(fabs(c[m * N + n] - sum) <= 1e-5, "(%d,%d): %g, expected %g", m, n,
                   static_cast<double>(c[m * N + n]), sum);
        }
    }
}

} // namespace

int main() {
    test_product<bf16>("bf16");
    test_product<__half>("fp16");
    test_ldmatrix_x2();
    test_gemm<bf16>();
    test_gemm<__half>();
    return num_failed != 0;
}
