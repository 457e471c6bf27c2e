// tests/cublaslt.cu - cublasLtMatmul against loops in double: transposes, leading dimensions,
// strided batches, beta, epilogues and types, and what it refuses.
#include "test.cuh"

#include <cublasLt.h>
#include <string.h>

#define LTCHECK(call)                                                                              \
    do {                                                                                           \
        cublasStatus_t status_ = (call);                                                           \
        if (status_ != CUBLAS_STATUS_SUCCESS)                                                      \
            DIE("%s: status %d", #call, static_cast<int>(status_));                                \
    } while (0)

namespace {

cublasLtHandle_t handle;

// Sizes that no tile divides.
constexpr int M = 40, N = 19, K = 23;

template <class T> struct TypeOf;
template <> struct TypeOf<float> { static constexpr cudaDataType_t value = CUDA_R_32F; };
template <> struct TypeOf<bf16> { static constexpr cudaDataType_t value = CUDA_R_16BF; };
template <> struct TypeOf<__half> { static constexpr cudaDataType_t value = CUDA_R_16F; };

struct Matrix {
    cublasLtMatrixLayout_t layout;
    Matrix(cudaDataType_t type, int rows, int cols, int lead, int batches, size_t stride) {
        LTCHECK(cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(rows),
                                           static_cast<uint64_t>(cols), lead));
        int64_t offset = static_cast<int64_t>(stride);
        LTCHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                 &batches, sizeof batches));
        LTCHECK(cublasLtMatrixLayoutSetAttribute(
            layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset, sizeof offset));
    }
    ~Matrix() { cublasLtMatrixLayoutDestroy(layout); }
};

struct Matmul {
    cublasLtMatmulDesc_t desc;
    Matmul() { LTCHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F)); }
    ~Matmul() { cublasLtMatmulDescDestroy(desc); }
    template <class T> void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        LTCHECK(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value));
    }
};

double gelu(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) { return (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5; }
bool has(int epilogue, int part) { return (epilogue & part) != 0; }

// One product in every detail. TI: type of A and B; TO: of C, D, bias and the auxiliary matrix.
template <class TI, class TO>
void test_matmul(bool ta, bool tb, int batches, cublasLtEpilogue_t e, double tolerance) {
    const int lead_a = (ta ? K : M) + 3, lead_b = (tb ? N : K) + 5, lead_d = M + 8;
    const size_t stride_a = static_cast<size_t>(lead_a) * 50,
                 stride_b = static_cast<size_t>(lead_b) * 40;
    const size_t stride_d = static_cast<size_t>(lead_d) * 20, count = static_cast<size_t>(batches);
    Device<TI> A(random_vector<TI>(stride_a * count)), B(random_vector<TI>(stride_b * count));
    Device<TO> D(random_vector<TO>(stride_d * count)), bias(random_vector<TO>(64));
    Device<TO> aux(random_vector<TO>(static_cast<size_t>(lead_d) * N, 2));
    auto a = A.get(), b = B.get();
    auto c = D.get(), bias_in = bias.get(), aux_in = aux.get();

    Matmul mm;
    mm.set(CUBLASLT_MATMUL_DESC_TRANSA, ta ? CUBLAS_OP_T : CUBLAS_OP_N);
    mm.set(CUBLASLT_MATMUL_DESC_TRANSB, tb ? CUBLAS_OP_T : CUBLAS_OP_N);
    mm.set(CUBLASLT_MATMUL_DESC_EPILOGUE, e);
    mm.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void*>(bias.p));
    mm.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(aux.p));
    mm.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(lead_d));
    Matrix la(TypeOf<TI>::value, ta ? K : M, ta ? M : K, lead_a, batches, stride_a);
    Matrix lb(TypeOf<TI>::value, tb ? N : K, tb ? K : N, lead_b, batches, stride_b);
    Matrix ld(TypeOf<TO>::value, M, N, lead_d, batches, stride_d);
    float alpha = 0.7f, beta = 0.3f;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int num_found;
    LTCHECK(cublasLtMatmulPreferenceCreate(&preference));
    LTCHECK(cublasLtMatmulAlgoGetHeuristic(handle, mm.desc, la.layout, lb.layout, ld.layout,
                                           ld.layout, preference, 1, &found, &num_found));
    EXPECT(num_found == 1);
    LTCHECK(cublasLtMatmulPreferenceDestroy(preference));
    LTCHECK(cublasLtMatmul(handle, mm.desc, &alpha, A.p, la.layout, B.p, lb.layout, &beta, D.p,
                           ld.layout, D.p, ld.layout, &found.algo, nullptr, 0, nullptr));

    auto d = D.get(), bias_out = bias.get(), aux_out = aux.get();
    auto check = [&](const char* what, double got, double expected) {
        EXPECT(fabs(got - expected) <= tolerance * (1 + fabs(expected)),
               "%s: %g, expected %g; transposes %d %d, epilogue %d", what, got, expected, ta, tb,
               static_cast<int>(e));
    };
    auto value = [](auto x) { return static_cast<double>(static_cast<float>(x)); };
    for (size_t batch = 0; batch < count; batch++) {
        auto at_a = [&](int m, int k) {
            return value(
                a[batch * stride_a + static_cast<size_t>(ta ? k + m * lead_a : m + k * lead_a)]);
        };
        auto at_b = [&](int k, int n) {
            return value(
                b[batch * stride_b + static_cast<size_t>(tb ? n + k * lead_b : k + n * lead_b)]);
        };
        std::vector<double> grad(M);
        for (int n = 0; n < N; n++) {
            for (int m = 0; m < M; m++) {
                size_t i = static_cast<size_t>(m + n * lead_d), at = batch * stride_d + i;
                double v = 0;
                for (int k = 0; k < K; k++) v += at_a(m, k) * at_b(k, n);
                v = 0.7 * v + 0.3 * value(c[at]);
                if (has(e, CUBLASLT_EPILOGUE_BIAS)) v += value(bias_in[static_cast<size_t>(m)]);
                if (e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
                    check("auxiliary matrix", value(aux_out[i]), v);
                    v = gelu(v);
                }
                if (e == CUBLASLT_EPILOGUE_DGELU || e == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
                    v *= gelu_slope(value(aux_in[i]));
                }
                grad[static_cast<size_t>(m)] += v;
                check("D", value(d[at]), v);
            }
        }
        for (int m = 0; m < M && e == CUBLASLT_EPILOGUE_DGELU_BGRAD; m++) {
            check("bias gradient", value(bias_out[static_cast<size_t>(m)]),
                  grad[static_cast<size_t>(m)]);
        }
        for (int m = 0; m < M && e == CUBLASLT_EPILOGUE_BGRADA; m++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += at_a(m, k);
            check("row sums of A", value(bias_out[static_cast<size_t>(m)]), sum);
        }
        for (int n = 0; n < N && e == CUBLASLT_EPILOGUE_BGRADB; n++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += at_b(k, n);
            check("column sums of B", value(bias_out[static_cast<size_t>(n)]), sum);
        }
    }
    // What lies between the columns is not D's.
    for (int i = M; i < lead_d; i++) {
        EXPECT(value(d[static_cast<size_t>(i)]) == value(c[static_cast<size_t>(i)]));
    }
}

template <class TI, class TO> void test_types(double tolerance) {
    const cublasLtEpilogue_t epilogues[] = {
        CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,        CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        CUBLASLT_EPILOGUE_DGELU,   CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA,
        CUBLASLT_EPILOGUE_BGRADB};
    for (bool ta : {false, true}) {
        for (bool tb : {false, true}) {
            for (cublasLtEpilogue_t e : epilogues) test_matmul<TI, TO>(ta, tb, 1, e, tolerance);
            test_matmul<TI, TO>(ta, tb, 3, CUBLASLT_EPILOGUE_DEFAULT, tolerance);
        }
    }
}

// Refusals print a line each; these are meant.
void test_refusals() {
    FILE* saved = stderr;
    stderr = fopen("/dev/null", "w");
    Device<float> d(64 * 64);
    float alpha = 1, beta = 0;
    auto run = [&](Matmul& mm, const Matrix& a, const Matrix& b, const Matrix& c) {
        return cublasLtMatmul(handle, mm.desc, &alpha, d.p, a.layout, d.p, b.layout, &beta, d.p,
                              c.layout, d.p, c.layout, nullptr, nullptr, 0, nullptr);
    };
    Matrix square(CUDA_R_32F, 8, 8, 8, 1, 0), wide(CUDA_R_32F, 8, 16, 8, 1, 0);
    Matrix short_lead(CUDA_R_32F, 8, 8, 7, 1, 0), integer(CUDA_R_32I, 8, 8, 8, 1, 0);
    Matrix halves(CUDA_R_16BF, 8, 8, 8, 1, 0), two(CUDA_R_32F, 8, 8, 8, 2, 64);
    Matmul plain, no_bias, no_aux, wrong_lead;
    EXPECT(run(plain, square, square, square) == CUBLAS_STATUS_SUCCESS);
    EXPECT(run(plain, wide, square, square) == CUBLAS_STATUS_INVALID_VALUE);
    EXPECT(run(plain, short_lead, square, square) == CUBLAS_STATUS_INVALID_VALUE);
    EXPECT(run(plain, integer, square, square) == CUBLAS_STATUS_INVALID_VALUE);
    EXPECT(run(plain, halves, square, square) == CUBLAS_STATUS_INVALID_VALUE);
    EXPECT(run(plain, two, square, square) == CUBLAS_STATUS_INVALID_VALUE);
    no_bias.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    EXPECT(run(no_bias, square, square, square) == CUBLAS_STATUS_INVALID_VALUE);
    no_aux.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DGELU);
    EXPECT(run(no_aux, square, square, square) == CUBLAS_STATUS_INVALID_VALUE);
    wrong_lead.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DGELU);
    wrong_lead.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(d.p));
    wrong_lead.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(12));
    EXPECT(run(wrong_lead, square, square, square) == CUBLAS_STATUS_INVALID_VALUE);
    int64_t too_long = 0;
    EXPECT(cublasLtMatmulDescSetAttribute(plain.desc, CUBLASLT_MATMUL_DESC_TRANSA, &too_long,
                                          sizeof too_long) == CUBLAS_STATUS_INVALID_VALUE);
    CUDACHECK(cudaDeviceSynchronize());
    fclose(stderr);
    stderr = saved;
}

// CUDA_ON_CPU_NO_EPILOGUES: how many algorithms there are for a plain and a fused product.
void test_no_epilogues(int expected_plain) {
    Device<float> bias(8);
    Matrix square(CUDA_R_32F, 8, 8, 8, 1, 0);
    Matmul plain, fused;
    fused.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    fused.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void*>(bias.p));
    auto num_found = [&](const Matmul& mm) {
        cublasLtMatmulHeuristicResult_t result;
        int found = -1;
        cublasLtMatmulAlgoGetHeuristic(handle, mm.desc, square.layout, square.layout, square.layout,
                                       square.layout, nullptr, 1, &result, &found);
        return found;
    };
    EXPECT(num_found(plain) == expected_plain);
    EXPECT(num_found(fused) == 0);
}

} // namespace

int main(int argc, char** argv) {
    LTCHECK(cublasLtCreate(&handle));
    if (argc > 1 && strcmp(argv[1], "no_epilogues") == 0) {
        test_no_epilogues(1);
    } else if (argc > 1 && strcmp(argv[1], "no_products") == 0) {
        test_no_epilogues(0);
    } else {
        // Tolerances: rounding of the result to its type; float sums of 23 products.
        test_types<float, float>(1e-5);
        test_types<bf16, float>(1e-5);
        test_types<bf16, bf16>(1.0 / 128);
        test_types<__half, __half>(1.0 / 1024);
        test_refusals();
    }
    LTCHECK(cublasLtDestroy(handle));
    return num_failed != 0;
}
