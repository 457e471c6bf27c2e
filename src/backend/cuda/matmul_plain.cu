// backend/cuda/matmul_plain.cu - matrix products on CUDA cores: the fallback for shapes for which
// the library has no algorithm, and a second opinion in the tests. Written for any stride, not for
// speed.
#include "backend/cuda/common.cuh"

namespace {

constexpr int TILE = 64, DEPTH = 16, THREADS = 256, EACH = 4; // a thread computes EACH x EACH sums

// tile[k][i] = x(first + i, k0 + k), 0 outside. Neighbouring threads follow the stride that is 1.
__device__ inline void load_tile(float (*tile)[TILE], Strided x, int first, int count, int k0,
                                 int depth) {
    bool along_k = x.col == 1;
    for (int e = threadIdx.x; e < TILE * DEPTH; e += THREADS) {
        int i = along_k ? e / DEPTH : e % TILE, k = along_k ? e % DEPTH : e / TILE;
        bool inside = first + i < count && k0 + k < depth;
        tile[k][i] =
            inside ? widen(x.ptr[(size_t)(first + i) * x.row + (size_t)(k0 + k) * x.col]) : 0.0f;
    }
}

} // namespace

// Work: a block a tile of 64 x 64 of the output, over k in steps of 16. Bytes: (m n k / 32) floatX
// through L2. FLOPs: 2 m n k. Bound: shared memory (2 floats read for 4 products).
//   out (m, ld)   a (m, k)   b (n, k), the second factor transposed
__global__ void __launch_bounds__(THREADS)
    matmul_plain_kernel(Grad out, size_t ld, Strided a, Strided b, Epilogue epilogue, int m, int n,
                        int k) {
    __shared__ __align__(16) float a_tile[DEPTH][TILE], b_tile[DEPTH][TILE]; // read in packs
    int row0 = blockIdx.x * TILE, col0 = blockIdx.y * TILE;
    int y = threadIdx.x / (TILE / EACH), x = threadIdx.x % (TILE / EACH);
    float sum[EACH][EACH] = {};
    for (int k0 = 0; k0 < k; k0 += DEPTH) {
        load_tile(a_tile, a, row0, m, k0, k);
        load_tile(b_tile, b, col0, n, k0, k);
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < DEPTH; kk++) {
            float u[EACH], v[EACH];
            load_pack(u, &a_tile[kk][y * EACH]);
            load_pack(v, &b_tile[kk][x * EACH]);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] += u[i] * v[j];
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < EACH; i++) {
        int r = row0 + y * EACH + i;
        for (int j = 0; j < EACH; j++) {
            int c = col0 + x * EACH + j;
            if (r >= m || c >= n) continue;
            float value = sum[i][j];
            if (epilogue.bias) value += widen(epilogue.bias[c]);
            if (epilogue.gelu) {
                Native rounded = narrow<Native>(value);
                epilogue.pre_gelu.row(r)[c] = rounded;
                value = gelu(widen(rounded));
            }
            if (epilogue.gelu_backward)
                value *= gelu_derivative(widen(epilogue.pre_gelu.row(r)[c]));
            grad_write(out, (size_t)r * ld + c, value);
        }
    }
}

void matmul_plain(Grad out, size_t ld, Strided a, Strided b, const Epilogue& epilogue, int m, int n,
                  int k) {
    dim3 grid((unsigned)ceil_div((size_t)m, TILE), (unsigned)ceil_div((size_t)n, TILE));
    Strided b_transposed = {b.ptr, b.col, b.row};
    launch(matmul_plain_kernel, grid, THREADS, 0, compute_stream(), out, ld, a, b_transposed,
           epilogue, m, n, k);
}
