// backend/cuda/matmul.cu - matrix products by cuBLASLt.
//
// cuBLASLt stores by columns: what is a (rows, cols) matrix here is its transpose there, so
// out = in * W is computed as out^T = W^T * in^T, with the first operand the weight. The algorithm
// of a shape is asked for once and kept. Split sums are allowed only by way of the workspace in
// float, so nothing is added atomically; NVIDIA promises equal bits from equal shapes on one kind
// of GPU and one version of the library (cuBLAS documentation, "Results Reproducibility"). The
// order of a sum is the library's: the rows of a weight gradient are not cut into chunks here.
//
// GELU is part of the product when fusion says so, and then taken of the float sum; apart from it,
// of the rounded pre_gelu, like gelu_forward. Where the library has no algorithm for a fused
// epilogue the rest is done apart; where it has none at all, by matmul_plain.
// Work, bytes and bound of the products are the library's; the kernels here are elsewhere.
#include <cublasLt.h>
#include <string.h>

#include "backend/cuda/common.cuh"

namespace {

#define CUBLASCHECK(call)                                                                          \
    do {                                                                                           \
        cublasStatus_t cublas_status_ = (call);                                                    \
        if (cublas_status_ != CUBLAS_STATUS_SUCCESS) {                                             \
            DIE("%s: %s", #call, cublasLtGetStatusString(cublas_status_));                         \
        }                                                                                          \
    } while (0)

constexpr cudaDataType_t NATIVE_TYPE = FLOATX_DTYPE == DTYPE_FP32   ? CUDA_R_32F
                                       : FLOATX_DTYPE == DTYPE_BF16 ? CUDA_R_16BF
                                                                    : CUDA_R_16F;

// One product, in the library's terms: d (m, n) = epilogue(op(a) (m, k) * op(b) (k, n) [+ d]), all
// stored by columns.
struct Product {
    bool trans_a, trans_b;
    int m, n, k;
    const floatX *a, *b;
    size_t lda, ldb, ldd;
    void* d;
    bool d_is_fp32, accumulate;
    cublasLtEpilogue_t epilogue;
    void* bias;  // added (m), or its gradient to be written; NULL: none
    floatX* aux; // (m, n): what GELU was taken of; NULL: none
    size_t ld_aux;
};

// All that the choice of an algorithm depends on. Compared byte by byte.
struct Key {
    size_t lda, ldb, ldd, ld_aux;
    int m, n, k, epilogue;
    uint32_t align_a, align_b, align_d;
    int trans_a, trans_b, d_is_fp32;
};

struct Plan {
    Key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    bool is_found;
};

// Shapes of a run: about 20 of training, and a few for each length of a generated text's prompt.
constexpr int MAX_PLANS = 256;

struct {
    cublasLtHandle_t handle;
    void* workspace;
    bool tf32;
    int gelu_fusion;
    Plan plans[MAX_PLANS];
    int num_plans, next_replaced;
} matmul;

// The largest power of two up to 256 that divides the address: what the library may assume.
uint32_t alignment_of(const void* p) {
    uint32_t alignment = 256;
    while (reinterpret_cast<uintptr_t>(p) % alignment != 0) alignment /= 2;
    return alignment;
}

Key key_of(const Product& p) {
    Key key;
    memset(&key, 0, sizeof key);
    key.lda = p.lda;
    key.ldb = p.ldb;
    key.ldd = p.ldd;
    key.ld_aux = p.aux ? p.ld_aux : 0;
    key.m = p.m;
    key.n = p.n;
    key.k = p.k;
    key.epilogue = p.epilogue;
    key.align_a = alignment_of(p.a);
    key.align_b = alignment_of(p.b);
    key.align_d = alignment_of(p.d);
    key.trans_a = p.trans_a;
    key.trans_b = p.trans_b;
    key.d_is_fp32 = p.d_is_fp32;
    return key;
}

template <class V>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const V& value) {
    CUBLASCHECK(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value));
}
template <class V>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const V& value) {
    CUBLASCHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

void set_pointers(cublasLtMatmulDesc_t desc, const Product& p) {
    if (p.bias) set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.aux) set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux);
}

void plan_free(Plan* plan) {
    CUBLASCHECK(cublasLtMatrixLayoutDestroy(plan->a));
    CUBLASCHECK(cublasLtMatrixLayoutDestroy(plan->b));
    CUBLASCHECK(cublasLtMatrixLayoutDestroy(plan->d));
    CUBLASCHECK(cublasLtMatmulDescDestroy(plan->desc));
}

void plan_describe(Plan* plan, const Product& p) {
    cublasComputeType_t compute = FLOATX_DTYPE == DTYPE_FP32 && matmul.tf32
                                      ? CUBLAS_COMPUTE_32F_FAST_TF32
                                      : CUBLAS_COMPUTE_32F;
    cudaDataType_t d_type = p.d_is_fp32 ? CUDA_R_32F : NATIVE_TYPE;
    CUBLASCHECK(cublasLtMatmulDescCreate(&plan->desc, compute, CUDA_R_32F));
    set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
    if (p.bias) set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, d_type);
    if (p.aux) {
        set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)p.ld_aux);
        set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, NATIVE_TYPE);
    }
    CUBLASCHECK(cublasLtMatrixLayoutCreate(&plan->a, NATIVE_TYPE, p.trans_a ? p.k : p.m,
                                           p.trans_a ? p.m : p.k, (int64_t)p.lda));
    CUBLASCHECK(cublasLtMatrixLayoutCreate(&plan->b, NATIVE_TYPE, p.trans_b ? p.n : p.k,
                                           p.trans_b ? p.k : p.n, (int64_t)p.ldb));
    CUBLASCHECK(cublasLtMatrixLayoutCreate(&plan->d, d_type, p.m, p.n, (int64_t)p.ldd));
}

void plan_choose_algorithm(Plan* plan) {
    cublasLtMatmulPreference_t preference;
    CUBLASCHECK(cublasLtMatmulPreferenceCreate(&preference));
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)MATMUL_WORKSPACE_BYTES);
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, plan->key.align_a);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, plan->key.align_b);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plan->key.align_d);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, plan->key.align_d);
    cublasLtMatmulHeuristicResult_t result = {};
    int found = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(matmul.handle, plan->desc, plan->a, plan->b, plan->d,
                                       plan->d, preference, 1, &result, &found);
    CUBLASCHECK(cublasLtMatmulPreferenceDestroy(preference));
    plan->is_found =
        status == CUBLAS_STATUS_SUCCESS && found > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    plan->algorithm = result.algo;
}

Plan* plan_of(const Product& p) {
    Key key = key_of(p);
    for (int i = 0; i < matmul.num_plans; i++) {
        if (memcmp(&matmul.plans[i].key, &key, sizeof key) == 0) return &matmul.plans[i];
    }
    Plan* plan;
    if (matmul.num_plans < MAX_PLANS) {
        plan = &matmul.plans[matmul.num_plans++];
    } else { // the oldest gives way
        plan = &matmul.plans[matmul.next_replaced];
        matmul.next_replaced = (matmul.next_replaced + 1) % MAX_PLANS;
        plan_free(plan);
    }
    plan->key = key;
    plan_describe(plan, p);
    set_pointers(plan->desc, p);
    plan_choose_algorithm(plan);
    return plan;
}

// False: the library has no algorithm for it, and nothing was done.
bool run(const Product& p) {
    Plan* plan = plan_of(p);
    if (!plan->is_found) return false;
    set_pointers(plan->desc, p);
    float alpha = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
    cublasStatus_t status = cublasLtMatmul(
        matmul.handle, plan->desc, &alpha, p.a, plan->a, p.b, plan->b, &beta, p.d, plan->d, p.d,
        plan->d, &plan->algorithm, matmul.workspace, MATMUL_WORKSPACE_BYTES, compute_stream());
    // The library checks more here than where it proposed the algorithm.
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) {
        warn("cuBLASLt refuses a product of m %d, n %d, k %d, epilogue %d, that it has proposed an "
             "algorithm for (%s): done in another way",
             p.m, p.n, p.k, (int)p.epilogue, cublasLtGetStatusString(status));
        plan->is_found = false;
        return false;
    }
    CUBLASCHECK(status);
    return true;
}

// The library is asked for fused epilogues only where 16-byte accesses reach their operands: of a
// bias it is not told the alignment, and the stride of what GELU was taken of must be one of 8.
bool can_fuse_gelu(Rows pre_gelu) { return is_aligned16(pre_gelu) && pre_gelu.ld % 8 == 0; }
bool can_fuse_bias(const void* bias) { return is_aligned16(bias); } // NULL is

// The weight as the operand of a product that maps C inputs to OC outputs.
Strided weight_strides(const floatX* weight, WeightLayout layout, int C, int OC) {
    return layout == WEIGHT_IN_OUT ? Strided{native(weight), (size_t)OC, 1}
                                   : Strided{native(weight), 1, (size_t)C};
}
Strided transposed(Strided x) { return {x.ptr, x.col, x.row}; }

Grad plain_output(Rows rows) { return {rows.ptr, false, false}; }

} // namespace

void matmul_init(void* workspace, bool tf32, int gelu_fusion) {
    CUBLASCHECK(cublasLtCreate(&matmul.handle));
    matmul.workspace = workspace;
    matmul.tf32 = tf32;
    // Before Hopper, and on chips for graphics, products with GELU are slower than both apart.
    // Source: llm.c's -ge, pull request 653.
    bool is_faster = device_is_data_centre() && device_generation() >= 9;
    matmul.gelu_fusion = gelu_fusion >= 0 ? gelu_fusion : is_faster ? 2 : 0;
}

void matmul_free(void) {
    for (int i = 0; i < matmul.num_plans; i++) plan_free(&matmul.plans[i]);
    if (matmul.handle) CUBLASCHECK(cublasLtDestroy(matmul.handle));
    matmul = {};
}

void matmul_forward(Rows out, Rows pre_gelu, Rows in, const floatX* weight, WeightLayout layout,
                    const floatX* bias, int N, int C, int OC) {
    bool is_in_out = layout == WEIGHT_IN_OUT, has_gelu = pre_gelu.ptr != nullptr;
    Product p = {};
    p.trans_a = !is_in_out;
    p.m = OC;
    p.n = N;
    p.k = C;
    p.a = weight;
    p.lda = is_in_out ? OC : C;
    p.b = in.ptr;
    p.ldb = in.ld;
    p.bias = const_cast<floatX*>(bias);

    if (has_gelu && matmul.gelu_fusion >= 1 && can_fuse_gelu(pre_gelu) && can_fuse_bias(bias)) {
        p.epilogue = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        p.d = out.ptr;
        p.ldd = out.ld;
        p.aux = pre_gelu.ptr;
        p.ld_aux = pre_gelu.ld;
        if (run(p)) return;
        p.aux = nullptr;
    }

    Rows sum = has_gelu ? pre_gelu : out;
    p.epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    p.d = sum.ptr;
    p.ldd = sum.ld;
    if (can_fuse_bias(bias) && run(p)) {
        if (has_gelu) gelu_forward(out, pre_gelu, N, OC);
        return;
    }
    Epilogue epilogue = {native(bias), native(pre_gelu), has_gelu, false};
    matmul_plain(plain_output(out), out.ld, {native(in.ptr), in.ld, 1},
                 weight_strides(weight, layout, C, OC), epilogue, N, OC, C);
}

void matmul_backward_input(Rows din, Rows dout, const floatX* weight, WeightLayout layout,
                           Rows pre_gelu, int N, int C, int OC) {
    bool is_in_out = layout == WEIGHT_IN_OUT, has_gelu = pre_gelu.ptr != nullptr;
    Product p = {};
    p.trans_a = is_in_out;
    p.m = C;
    p.n = N;
    p.k = OC;
    p.a = weight;
    p.lda = is_in_out ? OC : C;
    p.b = dout.ptr;
    p.ldb = dout.ld;
    p.d = din.ptr;
    p.ldd = din.ld;

    if (has_gelu && matmul.gelu_fusion >= 2 && can_fuse_gelu(pre_gelu)) {
        p.epilogue = CUBLASLT_EPILOGUE_DGELU;
        p.aux = pre_gelu.ptr;
        p.ld_aux = pre_gelu.ld;
        if (run(p)) return;
        p.aux = nullptr;
    }

    p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    if (run(p)) {
        if (has_gelu) gelu_backward_inplace(din, pre_gelu, N, C);
        return;
    }
    Epilogue epilogue = {nullptr, native(pre_gelu), false, has_gelu};
    matmul_plain(plain_output(din), din.ld, {native(dout.ptr), dout.ld, 1},
                 transposed(weight_strides(weight, layout, C, OC)), epilogue, N, C, OC);
}

void matmul_backward_weight(Grad dweight, Grad dbias, Rows in, Rows dout, WeightLayout layout,
                            int N, int C, int OC) {
    bool is_in_out = layout == WEIGHT_IN_OUT;
    Rows columns = is_in_out ? dout : in, rows = is_in_out ? in : dout;
    Product p = {};
    p.trans_b = true;
    p.m = is_in_out ? OC : C;
    p.n = is_in_out ? C : OC;
    p.k = N;
    p.a = columns.ptr;
    p.lda = columns.ld;
    p.b = rows.ptr;
    p.ldb = rows.ld;
    p.d = dweight.ptr;
    p.ldd = p.m;
    p.d_is_fp32 = dweight.is_fp32 || FLOATX_DTYPE == DTYPE_FP32;
    p.accumulate = dweight.is_fp32 && dweight.accumulate;

    // The library writes a bias gradient beside the product, but cannot add to one.
    bool fuses_bias = dbias.ptr && !p.accumulate && !(dbias.is_fp32 && dbias.accumulate) &&
                      dbias.is_fp32 == dweight.is_fp32 && can_fuse_bias(dbias.ptr);
    if (fuses_bias) {
        p.epilogue = is_in_out ? CUBLASLT_EPILOGUE_BGRADA : CUBLASLT_EPILOGUE_BGRADB;
        p.bias = dbias.ptr;
        if (run(p)) return;
        p.bias = nullptr;
    }

    p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    if (!run(p)) {
        matmul_plain(dweight, p.ldd, {native(rows.ptr), 1, rows.ld},
                     {native(columns.ptr), columns.ld, 1}, Epilogue{}, p.n, p.m, N);
    }
    if (dbias.ptr) bias_backward(dbias, dout, N, OC);
}
