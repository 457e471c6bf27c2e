// backend/cuda/tensor_core.cuh - matrix products of a warp, matrix loads, asynchronous copies.
//
// PTX under nvcc (sm_80 and later), the CPU layer's emulation of the same lane layout otherwise.
// Every function but copies and exp2_approx is an operation of the whole warp: all 32 lanes call it
// together.
//
// Fragments of D(16,8) = A(16,16) * B(16,8) + C(16,8), with g = lane / 4 and q = lane % 4; each
// 32-bit register holds two neighbouring 16-bit elements, the lower index in the lower half:
//   a[0] = A(g, 2q..2q+1)     a[1] = A(g+8, 2q..2q+1)
//   a[2] = A(g, 2q+8..2q+9)   a[3] = A(g+8, 2q+8..2q+9)
//   b[0] = B(2q..2q+1, g)     b[1] = B(2q+8..2q+9, g)
//   c[0], c[1] = C(g, 2q), C(g, 2q+1)      c[2], c[3] = C(g+8, 2q), C(g+8, 2q+1)      d as c
// Source: PTX ISA 9.0, "Matrix fragments for mma.m16n8k16 with floating point type".
#ifndef BACKEND_CUDA_TENSOR_CORE_CUH
#define BACKEND_CUDA_TENSOR_CORE_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#ifdef __CUDACC__

// D = A * B + C, products of bf16, sums in float. d may be c.
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2], const float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
                   "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The same for fp16.
__device__ inline void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2], const float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
                   "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ inline uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Four 8x8 matrices of 16-bit elements from shared memory. Lane l names row l % 8 of matrix l / 8
// (16 bytes, aligned to 16); r[i] receives elements (g, 2q) and (g, 2q+1) of matrix i.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// As above, each matrix transposed: r[i] receives elements (2q, g) and (2q+1, g).
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Two matrices, rows named by lanes 0 to 15; the other lanes' addresses are not used but must be
// valid.
__device__ inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// 2^x to about 2 units in the last place, in one instruction: results below 2^-126 become 0. exp2f,
// without fast-math, spends three more on those.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Starts a copy of 16 bytes from global to shared memory, both aligned to 16, past the L1 cache.
// The thread sees them after cp_async_wait, the other threads after a barrier that follows it.
__device__ inline void cp_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                 "l"(global)
                 : "memory");
}

// As above, but only the first valid_bytes (0 to 16) are read; zeros follow them.
__device__ inline void cp_async16_zfill(void* shared, const void* global, int valid_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(valid_bytes)
                 : "memory");
}

// Makes a group of the thread's copies started since the last commit.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the N newest groups of the thread are still under way.
template <int N> __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#else

#include <emu_mma.h>

// EMU_HERE hands the caller's file and line to the checks.
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const float (&c)[4], EMU_HERE) {
    emu::mma_m16n8k16<emu::BF16>(d, a, b, c, EMU_SITE);
}
inline void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const float (&c)[4], EMU_HERE) {
    emu::mma_m16n8k16<emu::FP16>(d, a, b, c, EMU_SITE);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMU_HERE) {
    emu::ldmatrix<4, false>(r, row, EMU_SITE);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMU_HERE) {
    emu::ldmatrix<4, true>(r, row, EMU_SITE);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row, EMU_HERE) {
    emu::ldmatrix<2, false>(r, row, EMU_SITE);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row, EMU_HERE) {
    emu::ldmatrix<2, true>(r, row, EMU_SITE);
}
inline float exp2_approx(float x) { return exp2f(x); }
inline void cp_async16(void* shared, const void* global, EMU_HERE) {
    emu::cp_async(shared, global, 16, EMU_SITE);
}
inline void cp_async16_zfill(void* shared, const void* global, int valid_bytes, EMU_HERE) {
    emu::cp_async(shared, global, valid_bytes, EMU_SITE);
}
inline void cp_async_commit() { emu::cp_commit(); }
template <int N> inline void cp_async_wait() { emu::cp_wait(N); }

#endif

#endif
