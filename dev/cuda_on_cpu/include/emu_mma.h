// emu_mma.h - tensor-core products and matrix loads of one warp, by the lane layout of the PTX ISA.
//
// Numbers: products of bf16 and fp16 are exact in float; the 16 of an element are added to the
// accumulator one by one in float, where a GPU adds them in groups of its own.
// Source: PTX ISA 9.0, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#ifndef EMU_MMA_H
#define EMU_MMA_H

#include "cuda_runtime.h"
#include <cuda_fp16.h>

namespace emu {

struct BF16 {
    static float value(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};
struct FP16 {
    static float value(uint16_t bits) { return __half2float(same_bits<__half>(bits)); }
};

struct Fragments {
    uint32_t a[4], b[2];
};

// D(16,8) = A(16,16) * B(16,8) + C(16,8); the layout stands in tensor_core.cuh. With g = lane / 4
// and q = lane % 4, row g of A and column g of B lie in the four lanes of group g, two neighbouring
// elements of k in each register.
template <class Type>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const float (&c)[4], Site where) {
    Fragments mine;
    memcpy(mine.a, a, sizeof a);
    memcpy(mine.b, b, sizeof b);
    const char* table = warp_exchange(~0u, &mine, sizeof mine, where);
    if (existing_lanes(~0u) != ~0u) kernel_error(where, "mma in a warp of fewer than 32 threads");

    int g = lane() / 4, q = lane() % 4;
    float sums[4];
    for (int i = 0; i < 4; i++) {
        int lower_half = i / 2; // rows g + 8
        int column = 2 * q + i % 2;
        float sum = c[i];
        for (int pair = 0; pair < 8; pair++) { // k = 2 * pair and 2 * pair + 1
            int right_half = pair / 4, owner = pair % 4;
            Fragments row = table_entry<Fragments>(table, 4 * g + owner);
            Fragments col = table_entry<Fragments>(table, 4 * column + owner);
            uint32_t x = row.a[lower_half + 2 * right_half], y = col.b[right_half];
            sum += Type::value(static_cast<uint16_t>(x)) * Type::value(static_cast<uint16_t>(y));
            sum += Type::value(static_cast<uint16_t>(x >> 16)) *
                   Type::value(static_cast<uint16_t>(y >> 16));
        }
        sums[i] = sum;
    }
    memcpy(d, sums, sizeof sums);
}

// COUNT matrices of 8 x 8 elements of 16 bits; lane l names row l % 8 of matrix l / 8.
template <int COUNT, bool TRANSPOSED>
inline void ldmatrix(uint32_t (&r)[COUNT], const void* row, Site where) {
    bool names_a_row = lane() < 8 * COUNT;
    if (names_a_row && reinterpret_cast<uintptr_t>(row) % 16 != 0) {
        kernel_error(where, "ldmatrix row address %p is not aligned to 16 bytes", row);
    }
    const char* table = warp_exchange(~0u, &row, sizeof row, where);
    int g = lane() / 4, q = lane() % 4;
    for (int m = 0; m < COUNT; m++) {
        uint16_t pair[2];
        for (int j = 0; j < 2; j++) {
            int y = TRANSPOSED ? 2 * q + j : g, x = TRANSPOSED ? g : 2 * q + j;
            pair[j] = table_entry<const uint16_t*>(table, 8 * m + y)[x];
        }
        r[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
    // The instruction reads for all lanes before any lane goes on and may overwrite the rows.
    warp_exchange(~0u, &row, 1, where);
}

} // namespace emu

#endif
