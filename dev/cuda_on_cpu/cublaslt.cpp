// cublaslt.cpp - cublasLtMatmul: column-major matrices, transposes, strided batches, sums in float,
// and the epilogues a transformer uses.
//
// D = epilogue(alpha * op(A) * op(B) + beta * C). Shapes, leading dimensions, types, pointers and
// the extents of all matrices are checked. What this cannot tell is whether the real library has an
// algorithm for a combination; CUDA_ON_CPU_NO_EPILOGUES=1 makes it refuse all fused epilogues
// (=all: all products), so that a program's other paths are tested. Source: cuBLAS 13.0,
// "cublasLtEpilogue_t" and "cublasLtMatmul()".
#include "emu.h"
#include "memory.h"
#include "settings.h"

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <math.h>
#include <stdio.h>
#include <vector>

namespace {

struct Layout {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t leading;
    int32_t batch_count;
    int64_t batch_stride; // elements
};

struct Matmul {
    cublasComputeType_t compute;
    cublasOperation_t op_a, op_b;
    cublasLtEpilogue_t epilogue;
    const void* bias;
    void* aux;
    int64_t aux_leading, aux_batch_stride, bias_batch_stride; // elements
    int32_t aux_type, bias_type;                              // -1: as D
    int32_t pointer_mode;
};

static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits NVIDIA's struct");
static_assert(sizeof(Matmul) <= sizeof(cublasLtMatmulDescOpaque_t), "fits NVIDIA's struct");

Layout& layout_of(cublasLtMatrixLayout_t l) { return *reinterpret_cast<Layout*>(l); }
Matmul& matmul_of(cublasLtMatmulDesc_t d) { return *reinterpret_cast<Matmul*>(d); }

// The parts that epilogues are combined of (cublasLtEpilogue_t is a set of bits).
bool has_bias(int e) { return e & CUBLASLT_EPILOGUE_BIAS; }
bool has_relu(int e) { return e & CUBLASLT_EPILOGUE_RELU; }
bool has_gelu(int e) { return e & CUBLASLT_EPILOGUE_GELU; }
bool has_aux(int e) { return e & 128; }
bool has_dgelu(int e) { return e & 64; }
bool has_bgrad_d(int e) { return e & 16; }
bool has_bgrad_a(int e) { return e & CUBLASLT_EPILOGUE_BGRADA; }
bool has_bgrad_b(int e) { return e & CUBLASLT_EPILOGUE_BGRADB; }

bool is_known_epilogue(int e) {
    switch (e) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB:
        return true;
    default:
        return false;
    }
}

// ---- elements -----------------------------------------------------------------------------------

bool is_known_type(int type) {
    return type == CUDA_R_32F || type == CUDA_R_16BF || type == CUDA_R_16F;
}
size_t element_bytes(int type) { return type == CUDA_R_32F ? 4 : 2; }

float to_float(float x) { return x; }
float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
float to_float(__half x) { return __half2float(x); }

// Calls f with a null pointer of the element type.
template <class F> auto with_type(int type, F f) {
    if (type == CUDA_R_32F) return f(static_cast<const float*>(nullptr));
    if (type == CUDA_R_16BF) return f(static_cast<const __nv_bfloat16*>(nullptr));
    return f(static_cast<const __half*>(nullptr));
}

float load(const void* p, int type, size_t i) {
    return with_type(type, [=](auto* tag) { return to_float(static_cast<decltype(tag)>(p)[i]); });
}

void store(void* p, int type, size_t i, float value) {
    if (type == CUDA_R_32F)
        static_cast<float*>(p)[i] = value;
    else if (type == CUDA_R_16BF)
        static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(value);
    else
        static_cast<__half*>(p)[i] = __float2half_rn(value);
}

// tanh approximation, arXiv:1606.08415; 0.7978845608 = sqrt(2 / pi).
float gelu(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
float gelu_slope(float x) {
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    float inner_slope = 0.7978845608f * (1 + 3 * 0.044715f * x * x);
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * inner_slope;
}

// ---- one matrix product -------------------------------------------------------------------------

constexpr size_t TILE_M = 32, TILE_N = 8;

// Widens op(X) into panels of `width` rows of the product: element (i, k) of panel p at
// p * width * K + k * width + i. Row i of the product steps by `step_i` in memory, k by `step_k`.
std::vector<float> pack(const void* x, int type, size_t rows, size_t K, size_t step_i,
                        size_t step_k, size_t width) {
    std::vector<float> panels((rows + width - 1) / width * width * K);
    with_type(type, [&](auto* tag) {
        auto* elements = static_cast<decltype(tag)>(x);
        for (size_t i = 0; i < rows; i++) {
            float* out = &panels[i / width * width * K + i % width];
            for (size_t k = 0; k < K; k++) {
                out[k * width] = to_float(elements[i * step_i + k * step_k]);
            }
        }
    });
    return panels;
}

// sums[n][m] = sum over k of a[k][m] * b[k][n]; the compiler keeps the tile in registers.
void multiply_tile(float (*sums)[TILE_M], const float* a, const float* b, size_t K) {
    float tile[TILE_N][TILE_M] = {};
    for (size_t k = 0; k < K; k++) {
        for (size_t n = 0; n < TILE_N; n++) {
            for (size_t m = 0; m < TILE_M; m++) tile[n][m] += a[m] * b[n];
        }
        a += TILE_M;
        b += TILE_N;
    }
    memcpy(sums, tile, sizeof tile);
}

// sums[i] over k of the packed panels, stored to the bias pointer.
void store_row_sums(const std::vector<float>& panels, size_t rows, size_t K, size_t width,
                    void* out, int type) {
    for (size_t i = 0; i < rows; i++) {
        const float* x = &panels[i / width * width * K + i % width];
        float sum = 0;
        for (size_t k = 0; k < K; k++) sum += x[k * width];
        store(out, type, i, sum);
    }
}

struct Operands {
    const char *a, *b, *c;
    char *d, *bias, *aux;
    Layout layout_a, layout_b, layout_c, layout_d;
    float alpha, beta;

    // The same matrices of another batch.
    Operands of_batch(const Matmul& mm, int i) const;
};

int bias_type_of(const Matmul& mm, const Layout& d) {
    return mm.bias_type < 0 ? d.type : mm.bias_type;
}
int aux_type_of(const Matmul& mm, const Layout& d) {
    return mm.aux_type < 0 ? d.type : mm.aux_type;
}

Operands Operands::of_batch(const Matmul& mm, int i) const {
    auto offset = [i](const Layout& l) {
        return i * l.batch_stride * static_cast<int64_t>(element_bytes(l.type));
    };
    auto extra = [i](int64_t stride, int type) {
        return i * stride * static_cast<int64_t>(element_bytes(type));
    };
    Operands o = *this;
    o.a += offset(layout_a);
    o.b += offset(layout_b);
    o.c += offset(layout_c);
    o.d += offset(layout_d);
    if (o.bias) o.bias += extra(mm.bias_batch_stride, bias_type_of(mm, layout_d));
    if (o.aux) o.aux += extra(mm.aux_batch_stride, aux_type_of(mm, layout_d));
    return o;
}

void multiply(const Matmul& mm, const Operands& o) {
    const Layout &la = o.layout_a, &lb = o.layout_b, &lc = o.layout_c, &ld = o.layout_d;
    const bool ta = mm.op_a != CUBLAS_OP_N, tb = mm.op_b != CUBLAS_OP_N;
    const size_t M = ld.rows, N = ld.cols, K = ta ? la.rows : la.cols;
    const size_t lead_a = static_cast<size_t>(la.leading), lead_b = static_cast<size_t>(lb.leading);
    const size_t lead_c = static_cast<size_t>(lc.leading), lead_d = static_cast<size_t>(ld.leading);
    const size_t lead_aux = static_cast<size_t>(mm.aux_leading);
    const int bias_type = bias_type_of(mm, ld), aux_type = aux_type_of(mm, ld);
    const int e = mm.epilogue;

    std::vector<float> a = pack(o.a, la.type, M, K, ta ? lead_a : 1, ta ? 1 : lead_a, TILE_M);
    std::vector<float> b = pack(o.b, lb.type, N, K, tb ? 1 : lead_b, tb ? lead_b : 1, TILE_N);
    std::vector<float> bias_grad(has_bgrad_d(e) ? M : 0);

    auto finish = [&](size_t m, size_t n, float sum) {
        float v = o.alpha * sum;
        if (o.beta != 0) v += o.beta * load(o.c, lc.type, m + n * lead_c);
        if (has_bias(e)) v += load(o.bias, bias_type, m);
        if (has_relu(e)) v = v > 0 ? v : 0;
        if (has_gelu(e)) {
            if (has_aux(e)) store(o.aux, aux_type, m + n * lead_aux, v);
            v = gelu(v);
        }
        if (has_dgelu(e)) v *= gelu_slope(load(o.aux, aux_type, m + n * lead_aux));
        if (has_bgrad_d(e)) bias_grad[m] += v;
        store(o.d, ld.type, m + n * lead_d, v);
    };
    for (size_t n0 = 0; n0 < N; n0 += TILE_N) {
        for (size_t m0 = 0; m0 < M; m0 += TILE_M) {
            float sums[TILE_N][TILE_M];
            multiply_tile(sums, a.data() + m0 * K, b.data() + n0 * K, K);
            for (size_t n = n0; n < std::min(N, n0 + TILE_N); n++) {
                for (size_t m = m0; m < std::min(M, m0 + TILE_M); m++) {
                    finish(m, n, sums[n - n0][m - m0]);
                }
            }
        }
    }
    for (size_t m = 0; m < bias_grad.size(); m++) store(o.bias, bias_type, m, bias_grad[m]);
    if (has_bgrad_a(e)) store_row_sums(a, M, K, TILE_M, o.bias, bias_type);
    if (has_bgrad_b(e)) store_row_sums(b, N, K, TILE_N, o.bias, bias_type);
}

// ---- checks -------------------------------------------------------------------------------------

cublasStatus_t refuse(const char* why, cublasStatus_t code = CUBLAS_STATUS_INVALID_VALUE) {
    fprintf(stderr, "cuda_on_cpu: refused: cublasLt: %s\n", why);
    return code;
}

cublasStatus_t check_layouts(const Matmul& mm, const Layout& a, const Layout& b, const Layout& c,
                             const Layout& d) {
    bool ta = mm.op_a != CUBLAS_OP_N, tb = mm.op_b != CUBLAS_OP_N;
    uint64_t m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols;
    uint64_t k_of_b = tb ? b.cols : b.rows, n = tb ? b.rows : b.cols;
    if (k != k_of_b || d.rows != m || d.cols != n || c.rows != m || c.cols != n) {
        return refuse("shapes do not agree");
    }
    for (const Layout* l : {&a, &b, &c, &d}) {
        if (!is_known_type(l->type)) return refuse("type is not emulated");
        if (l->leading < static_cast<int64_t>(l->rows)) {
            return refuse("leading dimension is smaller than the number of rows");
        }
        if (l->batch_count != d.batch_count) return refuse("batch counts differ");
    }
    if (a.type != b.type || c.type != d.type) return refuse("types of A and B, or C and D, differ");

    int e = mm.epilogue;
    if (!is_known_epilogue(e)) return refuse("epilogue is not emulated");
    bool uses_aux = has_aux(e);
    if (uses_aux && (!mm.aux || mm.aux_leading % 8 || mm.aux_leading < static_cast<int64_t>(m))) {
        return refuse("auxiliary pointer, or its leading dimension (a multiple of 8, >= rows)");
    }
    bool uses_bias = has_bias(e) || has_bgrad_d(e) || has_bgrad_a(e) || has_bgrad_b(e);
    if (uses_bias && !mm.bias) return refuse("bias pointer");
    if (mm.pointer_mode != CUBLASLT_POINTER_MODE_HOST)
        return refuse("pointer mode is not emulated");
    switch (mm.compute) {
    case CUBLAS_COMPUTE_32F:
    case CUBLAS_COMPUTE_32F_PEDANTIC:
    case CUBLAS_COMPUTE_32F_FAST_TF32:
    case CUBLAS_COMPUTE_32F_FAST_16BF:
        break;
    default:
        return refuse("compute type is not emulated", CUBLAS_STATUS_NOT_SUPPORTED);
    }
    const emu::Settings& s = emu::settings();
    if (s.no_products || (s.no_epilogues && e != CUBLASLT_EPILOGUE_DEFAULT)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

void check_matrix(const char* name, const void* p, const Layout& l) {
    if (l.rows == 0 || l.cols == 0) return;
    size_t last = (l.cols - 1) * static_cast<size_t>(l.leading) + l.rows +
                  static_cast<size_t>(l.batch_count - 1) * static_cast<size_t>(l.batch_stride);
    emu::check_range(name, p, last * element_bytes(l.type));
}

void check_pointers(const Matmul& mm, const Operands& o) {
    check_matrix("cublasLtMatmul: A", o.a, o.layout_a);
    check_matrix("cublasLtMatmul: B", o.b, o.layout_b);
    check_matrix("cublasLtMatmul: D", o.d, o.layout_d);
    if (o.beta != 0) check_matrix("cublasLtMatmul: C", o.c, o.layout_c);
    int e = mm.epilogue;
    const Layout& d = o.layout_d;
    if (has_bias(e) || has_bgrad_d(e) || has_bgrad_a(e) || has_bgrad_b(e)) {
        size_t count = has_bgrad_b(e) ? d.cols : d.rows;
        size_t last =
            static_cast<size_t>(d.batch_count - 1) * static_cast<size_t>(mm.bias_batch_stride) +
            count;
        emu::check_range("cublasLtMatmul: bias", o.bias, last * element_bytes(bias_type_of(mm, d)));
    }
    if (has_aux(e)) {
        Layout aux = d;
        aux.type = static_cast<cudaDataType_t>(aux_type_of(mm, d));
        aux.leading = mm.aux_leading;
        aux.batch_stride = mm.aux_batch_stride;
        check_matrix("cublasLtMatmul: auxiliary matrix", o.aux, aux);
    }
}

template <class T> cublasStatus_t assign(T& field, const void* value, size_t bytes) {
    if (bytes != sizeof field) return refuse("size of an attribute");
    memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

// Answers a query for one number of an algorithm: nothing of it is ever split.
cublasStatus_t answer(uint32_t value, void* out, size_t bytes, size_t* written) {
    if (bytes < sizeof value) return refuse("size of an attribute");
    memcpy(out, &value, sizeof value);
    if (written) *written = sizeof value;
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

extern "C" {

// ---- handles and descriptors --------------------------------------------------------------------

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = reinterpret_cast<cublasLtHandle_t>(new char);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete reinterpret_cast<char*>(handle);
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t leading) {
    *l = new cublasLtMatrixLayoutOpaque_t{};
    layout_of(*l) = {type, rows, cols, leading, 1, 0};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    delete l;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
    Layout& layout = layout_of(l);
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        return assign(layout.batch_count, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        return assign(layout.batch_stride, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD:
        return assign(layout.leading, value, bytes);
    default:
        return refuse("layout attribute is not emulated");
    }
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    if (scale != CUDA_R_32F) return refuse("scale type is not emulated");
    *d = new cublasLtMatmulDescOpaque_t{};
    Matmul& mm = matmul_of(*d);
    mm.compute = compute;
    mm.op_a = mm.op_b = CUBLAS_OP_N;
    mm.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    mm.aux_type = mm.bias_type = -1;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    delete d;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    Matmul& mm = matmul_of(d);
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return assign(mm.op_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return assign(mm.op_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return assign(mm.epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return assign(mm.bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return assign(mm.bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE:
        return assign(mm.bias_batch_stride, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return assign(mm.aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return assign(mm.aux_leading, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE:
        return assign(mm.aux_batch_stride, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE:
        return assign(mm.aux_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        return assign(mm.pointer_mode, value, bytes);
    default:
        return refuse("matmul attribute is not emulated");
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    *p = new cublasLtMatmulPreferenceOpaque_t{};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    delete p;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
    return CUBLAS_STATUS_SUCCESS; // there is one algorithm, and it needs no workspace
}

// ---- algorithms and products --------------------------------------------------------------------

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t dd,
                                              cublasLtMatmulPreference_t, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
    *found = 0;
    cublasStatus_t status =
        check_layouts(matmul_of(d), layout_of(a), layout_of(b), layout_of(c), layout_of(dd));
    if (status != CUBLAS_STATUS_SUCCESS || wanted < 1) return status;
    results[0] = {};
    results[0].state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* out, size_t bytes, size_t* written) {
    switch (attribute) {
    case CUBLASLT_ALGO_CONFIG_SPLITK_NUM:
        return answer(1, out, bytes, written);
    case CUBLASLT_ALGO_CONFIG_ID:
    case CUBLASLT_ALGO_CONFIG_TILE_ID:
    case CUBLASLT_ALGO_CONFIG_STAGES_ID:
    case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME:
        return answer(0, out, bytes, written);
    default:
        return refuse("algorithm attribute is not emulated");
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t dd,
                              const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
    Matmul mm = matmul_of(d);
    Operands o = {};
    o.layout_a = layout_of(a);
    o.layout_b = layout_of(b);
    o.layout_c = layout_of(c);
    o.layout_d = layout_of(dd);
    cublasStatus_t status = check_layouts(mm, o.layout_a, o.layout_b, o.layout_c, o.layout_d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (emu::settings().late_refusal && mm.epilogue != CUBLASLT_EPILOGUE_DEFAULT) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    o.a = static_cast<const char*>(A);
    o.b = static_cast<const char*>(B);
    o.c = static_cast<const char*>(C);
    o.d = static_cast<char*>(D);
    o.bias = static_cast<char*>(const_cast<void*>(mm.bias));
    o.aux = static_cast<char*>(mm.aux);
    o.alpha = *static_cast<const float*>(alpha);
    o.beta = *static_cast<const float*>(beta);
    check_pointers(mm, o);
    emu::enqueue(stream, "cublasLtMatmul", [=] {
        for (int i = 0; i < o.layout_d.batch_count; i++) multiply(mm, o.of_batch(mm, i));
    });
    return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "CUBLAS_STATUS_UNKNOWN";
    }
}
const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "an unsupported value or parameter was passed";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "the functionality is not supported";
    default:
        return "a status that is not emulated";
    }
}

} // extern "C"
