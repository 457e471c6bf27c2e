// core/rng.h - random numbers as pure functions of a key and a counter.
//
// No state: element i of tensor t is the same number on whatever rank, thread or machine draws it.
#ifndef CORE_RNG_H
#define CORE_RNG_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
// generators"), a bijection of 64 bits.
static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// 64 random bits for (seed, stream, counter). Different streams are independent sequences.
static inline uint64_t rng_bits(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint64_t key = mix64(seed + 0x9E3779B97F4A7C15ull * (stream + 1));
    return mix64(key + 0x9E3779B97F4A7C15ull * (counter + 1));
}

// Uniform in [0, 1) with 53 bits.
static inline double rng_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
    return (double)(rng_bits(seed, stream, counter) >> 11) * 0x1p-53;
}

// Standard normal (Box and Muller 1958).
double rng_normal(uint64_t seed, uint64_t stream, uint64_t counter);

// A bijection of [0, n) chosen by (seed, stream): where element i goes. Feistel network with cycle
// walking, so that no index array is needed. n >= 1, i < n.
uint64_t rng_permute(uint64_t seed, uint64_t stream, uint64_t n, uint64_t i);

// Streams, so that no two uses share a sequence.
enum {
    RNG_INIT = 0,         // + tensor index
    RNG_SAMPLE = 1 << 20, // + step: sampling of tokens
    RNG_SHARDS = 1 << 28, // + epoch: order of the shards; samples inside a shard mix the shard in
};

#ifdef __cplusplus
}
#endif
#endif
