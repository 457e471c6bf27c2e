// tests/test.cuh - what the tests share: checks, device buffers, numbers from a seed.
#ifndef TEST_CUH
#define TEST_CUH

#include "backend/cuda/launch.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <vector>

using bf16 = __nv_bfloat16;

inline int num_failed = 0;

inline bool failed(const char* file, int line, const char* condition) {
    bool is_told = num_failed++ < 10;
    if (is_told) printf("%s:%d: %s\n", file, line, condition);
    return is_told;
}
template <class... A>
inline void failed(const char* file, int line, const char* condition, const char* format, A... a) {
    if (!failed(file, line, condition)) return;
    printf("    ");
    printf(format, a...);
    printf("\n");
}

// EXPECT(condition) or EXPECT(condition, format, values...); main returns num_failed != 0.
#define EXPECT(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) failed(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__);       \
    } while (0)

// |a - b| relative to |b|, with an absolute floor; false for NaN.
inline bool is_near(double a, double b, double tolerance) {
    return fabs(a - b) <= tolerance * (1e-2 + fabs(b));
}

inline float random_float(float scale = 1.0f) {
    static uint64_t state = 1; // Knuth's MMIX generator; the upper bits are good
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (static_cast<float>(state >> 40) / (1 << 24) * 2.0f - 1.0f) * scale;
}

template <class T> std::vector<T> random_vector(size_t count, float scale = 1.0f) {
    std::vector<T> v(count);
    for (T& x : v) x = static_cast<T>(random_float(scale));
    return v;
}

// Device memory that frees itself.
template <class T> struct Device {
    T* p = nullptr;
    size_t count;

    explicit Device(size_t n) : count(n) { CUDACHECK(cudaMalloc(&p, n * sizeof(T))); }
    explicit Device(const std::vector<T>& host) : Device(host.size()) { set(host); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    ~Device() { cudaFree(p); }

    void set(const std::vector<T>& host) {
        CUDACHECK(cudaMemcpy(p, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    }
    void
    set_zero() { // done when it returns: streams that do not wait for the null stream may follow
        CUDACHECK(cudaMemset(p, 0, count * sizeof(T)));
        CUDACHECK(cudaDeviceSynchronize());
    }
    std::vector<T> get() const {
        std::vector<T> host(count);
        CUDACHECK(cudaDeviceSynchronize());
        CUDACHECK(cudaMemcpy(host.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

#endif
