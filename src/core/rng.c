// core/rng.c - normal numbers and keyed permutations from counters. See rng.h.
#include "core/rng.h"

#include <math.h>

#include "core/check.h"

double rng_normal(uint64_t seed, uint64_t stream, uint64_t counter) {
    double u = rng_uniform(seed, stream, 2 * counter),
           v = rng_uniform(seed, stream, 2 * counter + 1);
    const double two_pi = 6.283185307179586;
    return sqrt(-2.0 * log(1.0 - u)) * cos(two_pi * v); // 1 - u is in (0, 1]
}

// Four Feistel rounds over the smallest even number of bits that holds n values: a bijection of
// [0, 4^half_bits), at most 4 n values. Results outside [0, n) are sent through again until one
// falls inside; that walk follows a cycle of the bijection and so ends, after 4 turns on average at
// the most.
uint64_t rng_permute(uint64_t seed, uint64_t stream, uint64_t n, uint64_t i) {
    CHECK(i < n, "rng_permute: element %llu of %llu", (unsigned long long)i, (unsigned long long)n);
    int half_bits = 1;
    while (half_bits < 32 && (n - 1) >> (2 * half_bits) != 0) half_bits++;
    uint64_t mask = (1ull << half_bits) - 1;
    do {
        uint64_t left = i >> half_bits, right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint64_t mixed = left ^ (rng_bits(seed, stream, round << 32 | right) & mask);
            left = right;
            right = mixed;
        }
        i = left << half_bits | right;
    } while (i >= n);
    return i;
}
