// core/dtype.h - floatX: the type of weights, activations and gradient slots, chosen by
// `make PRECISION=fp32|bf16|fp16`.
//
// floatX is `float`, or a struct of 16 bits that every compiler takes, C and C++ alike; the CPU
// backend widens to float to compute, the CUDA backend casts to __nv_bfloat16 or __half at its
// door. Rounding is to nearest even; NaN stays NaN. One definition for all builds and both
// backends, since the vector instructions for bf16 flush denormals and would give other bits.
#ifndef CORE_DTYPE_H
#define CORE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

static inline uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
static inline float bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static inline uint16_t float_to_bf16_bits(float x) {
    uint32_t u = float_bits(x);
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    uint32_t quiet_nan = (u >> 16) | 0x40u;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}
static inline float bf16_bits_to_float(uint16_t b) { return bits_float((uint32_t)b << 16); }

// IEEE binary16. Branch-free selects, so that compilers vectorise loops over it.
static inline uint16_t float_to_fp16_bits(float x) {
    uint32_t u = float_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
    // Normal results: rebias the exponent by 112 and round the 13 dropped bits to nearest even; a
    // carry out of the top becomes infinity by itself.
    uint32_t normal = (a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13;
    // Subnormal results (below 2^-14): adding 0.5 aligns the last place to 2^-24 and rounds.
    uint32_t subnormal = float_bits(bits_float(a) + 0.5f) - 0x3F000000u;
    uint32_t h = a < 0x38800000u ? subnormal : normal;
    h = a >= 0x47800000u ? 0x7C00u : h;                       // 65536 and above, infinity
    h = a > 0x7F800000u ? 0x7E00u | ((a >> 13) & 0x3FFu) : h; // NaN
    return (uint16_t)(sign | h);
}
static inline float fp16_bits_to_float(uint16_t b) {
    uint32_t sign = (uint32_t)(b & 0x8000u) << 16, a = b & 0x7FFFu;
    uint32_t normal = (a << 13) + 0x38000000u;
    uint32_t subnormal = float_bits((float)(int32_t)a * 0x1p-24f);
    uint32_t special = (a << 13) | 0x7F800000u;
    uint32_t u = a < 0x400u ? subnormal : normal;
    u = a >= 0x7C00u ? special : u;
    return bits_float(sign | u);
}

typedef enum { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 } DType;

static inline size_t dtype_bytes(DType t) { return t == DTYPE_FP32 ? 4 : 2; }
static inline const char* dtype_name(DType t) {
    return t == DTYPE_FP32 ? "fp32" : t == DTYPE_BF16 ? "bf16" : "fp16";
}

#if defined(PRECISION_BF16)
typedef struct {
    uint16_t bits;
} floatX;
#define FLOATX_DTYPE DTYPE_BF16
#define FLOATX_TAG   dtype_tag_bf16
static inline floatX to_floatX(float x) {
    floatX y = {float_to_bf16_bits(x)};
    return y;
}
static inline float to_float(floatX x) { return bf16_bits_to_float(x.bits); }
#elif defined(PRECISION_FP16)
typedef struct {
    uint16_t bits;
} floatX;
#define FLOATX_DTYPE DTYPE_FP16
#define FLOATX_TAG   dtype_tag_fp16
static inline floatX to_floatX(float x) {
    floatX y = {float_to_fp16_bits(x)};
    return y;
}
static inline float to_float(floatX x) { return fp16_bits_to_float(x.bits); }
#elif defined(PRECISION_FP32)
typedef float floatX;
#define FLOATX_DTYPE DTYPE_FP32
#define FLOATX_TAG   dtype_tag_fp32
static inline floatX to_floatX(float x) { return x; }
static inline float to_float(floatX x) { return x; }
#else
#error "define PRECISION_FP32, PRECISION_BF16 or PRECISION_FP16 (make PRECISION=...)"
#endif

// Defined once, in core/check.c; every object refers to it, so that objects of two precisions do
// not link together.
extern const int FLOATX_TAG;
static const int* const dtype_tag_reference __attribute__((used)) = &FLOATX_TAG;

#ifdef __cplusplus
}
#endif
#endif
