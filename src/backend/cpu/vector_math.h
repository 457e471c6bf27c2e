// backend/cpu/vector_math.h - arithmetic that compilers vectorise: fused multiply-add, sums in a
// fixed order, exp, and GELU with its derivative.
//
// Inline functions of one element for use under `#pragma omp simd`: no branches, no calls.
#ifndef BACKEND_CPU_VECTOR_MATH_H
#define BACKEND_CPU_VECTOR_MATH_H

#include <math.h>

#include "core/dtype.h"

// a * b + c, rounded once where the processor can; fmaf() without that instruction is a slow call.
static inline float mul_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Sums keep this many partial sums side by side, element i in lane i % LANES, so that their order
// does not depend on the vector width, the alignment or the thread.
enum { LANES = 32 };

static inline float sum_lanes(const float lanes[LANES]) {
    float sums[LANES];
    for (int i = 0; i < LANES; i++) sums[i] = lanes[i];
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    }
    return sums[0];
}

// exp(x) for finite x: x = n ln 2 + r with |r| <= ln 2 / 2, exp(r) by a polynomial of degree 6, 2^n
// added to the exponent. At most 3 ulp from -87.3 to 88.3; outside, the value at the nearer end.
// NaN stays NaN.
static inline float fast_exp(float x) {
    float clamped = x < -87.3f ? -87.3f : x;
    clamped = clamped > 88.3f ? 88.3f : clamped;
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    float shifted = mul_add(clamped, 1.44269504f, 12582912.0f);
    float n = shifted - 12582912.0f;
    // ln 2 in two parts, so that n * ln 2 has no rounding error to speak of.
    float r = mul_add(n, -0.693145752f, clamped);
    r = mul_add(n, -1.42860677e-6f, r);
    float p = 1.3981999e-3f;
    p = mul_add(p, r, 8.3334519e-3f);
    p = mul_add(p, r, 4.1665811e-2f);
    p = mul_add(p, r, 1.6666665e-1f);
    p = mul_add(p, r, 0.5f);
    p = mul_add(p, r, 1.0f);
    p = mul_add(p, r, 1.0f);
    float result = bits_float(float_bits(p) + (float_bits(shifted) << 23));
    return x != x ? x : result;
}

// 2^x for x below 128, 0 below -126: the same with a polynomial of degree 5 for 2^r (minimax,
// relative error 1.8e-7). The power of two is a factor, so that NaN stays NaN without a test.
static inline float fast_exp2(float x) {
    float clamped = x < -127.0f ? -127.0f : x;
    float shifted =
        clamped + 12583039.0f; // 1.5 * 2^23 + 127: n with its bias stands in the low bits
    float r = clamped - (shifted - 12583039.0f);
    float p = 1.32764720e-3f;
    p = mul_add(p, r, 9.67554133e-3f);
    p = mul_add(p, r, 5.55071327e-2f);
    p = mul_add(p, r, 0.240221197f);
    p = mul_add(p, r, 0.693146967f);
    p = mul_add(p, r, 1.0f);
    return p * bits_float(float_bits(shifted) << 23);
}

// The tanh form of GELU is x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3), which has no
// cancellation for negative x. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
#define GELU_2U_LINEAR 1.5957691216f // 2 sqrt(2/pi)
#define GELU_2U_CUBIC  0.0713548163f // 2 sqrt(2/pi) 0.044715

static inline float gelu(float x) {
    float two_u = x * mul_add(GELU_2U_CUBIC, x * x, GELU_2U_LINEAR);
    float sigmoid = 1.0f / (1.0f + fast_exp(-two_u));
    return x * sigmoid;
}

// d gelu / dx = s + x s (1 - s) d(2u)/dx, with s (1 - s) written as e s^2 for e = exp(-2u).
static inline float gelu_derivative(float x) {
    float xx = x * x;
    float e = fast_exp(-x * mul_add(GELU_2U_CUBIC, xx, GELU_2U_LINEAR));
    float s = 1.0f / (1.0f + e);
    float slope = mul_add(3.0f * GELU_2U_CUBIC, xx, GELU_2U_LINEAR);
    return mul_add(x * slope, e * s * s, s);
}

#endif
