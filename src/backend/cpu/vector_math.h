// backend/cpu/vector_math.h - arithmetic that compilers vectorise: fused multiply-add, sums in a
// fixed order, powers of two, and GELU with its derivative.
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

#define LOG2_E 1.44269504f

// 2^x for x <= 126; 0 below -126. x = n + r with |r| <= 1/2, 2^r by a polynomial of degree 5
// (minimax with 2^0 = 1, relative error 1.8e-7). 2^n is a factor, so that NaN stays NaN without a
// test.
static inline float fast_exp2(float x) {
    const float magic = 12583039.0f; // 1.5 * 2^23 + 127: added, it leaves n + 127 in the low bits
    float clamped = x < -127.0f ? -127.0f : x;
    float shifted = clamped + magic;
    float r = clamped - (shifted - magic);
    float p = 1.32764720e-3f;
    p = mul_add(p, r, 9.67554133e-3f);
    p = mul_add(p, r, 5.55071327e-2f);
    p = mul_add(p, r, 0.240221197f);
    p = mul_add(p, r, 0.693146967f);
    p = mul_add(p, r, 1.0f);
    return p * bits_float(float_bits(shifted) << 23);
}

// e^x for x <= 87: relative error 2e-7 + |x| 6e-8, from the rounding of x log2(e).
static inline float fast_exp(float x) { return fast_exp2(x * LOG2_E); }

// The tanh form of GELU is x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3), which has no
// cancellation for negative x. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
#define GELU_2U_LINEAR 1.5957691216f // 2 sqrt(2/pi)
#define GELU_2U_CUBIC  0.0713548163f // 2 sqrt(2/pi) 0.044715

// e^(-2u), at most 2^126
static inline float gelu_exp(float x) {
    float two_u = x * mul_add(GELU_2U_CUBIC * LOG2_E, x * x, GELU_2U_LINEAR * LOG2_E);
    return fast_exp2(two_u < -126.0f ? 126.0f : -two_u);
}

static inline float gelu(float x) {
    float sigmoid = 1.0f / (1.0f + gelu_exp(x));
    return x * sigmoid;
}

// d gelu / dx = s + x s (1 - s) d(2u)/dx, with s (1 - s) written as e s^2 for e = exp(-2u).
static inline float gelu_derivative(float x) {
    float e = gelu_exp(x);
    float s = 1.0f / (1.0f + e);
    float slope = mul_add(3.0f * GELU_2U_CUBIC, x * x, GELU_2U_LINEAR);
    return mul_add(x * slope, e * s * s, s);
}

#endif
