// emu_warp.h - barriers and warp operations of the CUDA language; included by cuda_runtime.h.
//
// All warp operations are one rendezvous (emu::warp_exchange) and a look at its table. What CUDA
// leaves undefined is an error here: lanes of one mask at different lines, a mask without the
// caller, a mask that names exited lanes, a source lane outside the mask.
// Source: CUDA C++ Programming Guide 13.0, "Synchronization", "Warp Vote", "Warp Shuffle".
#ifndef EMU_WARP_H
#define EMU_WARP_H

#include "emu.h"

// ---- barriers -----------------------------------------------------------------------------------

inline void __syncthreads(EMU_HERE) { emu::sync_block(EMU_SITE); }
inline int __syncthreads_count(int p, EMU_HERE) {
    return emu::sync_block_reduce(emu::REDUCE_COUNT, p != 0, EMU_SITE);
}
inline int __syncthreads_and(int p, EMU_HERE) {
    return emu::sync_block_reduce(emu::REDUCE_AND, p != 0, EMU_SITE);
}
inline int __syncthreads_or(int p, EMU_HERE) {
    return emu::sync_block_reduce(emu::REDUCE_OR, p != 0, EMU_SITE);
}
inline void __syncwarp(unsigned mask = ~0u, EMU_HERE) {
    emu::warp_exchange(mask, nullptr, 0, EMU_SITE);
}

// ---- shuffles -----------------------------------------------------------------------------------

namespace emu {

// What `source` deposited; `value` is the calling lane's own.
template <class T> inline T shuffle(unsigned mask, const T& value, int source, Site where) {
    static_assert(sizeof(T) <= 8, "CUDA shuffles at most 8 bytes");
    const char* table = warp_exchange(mask, &value, sizeof value, where);
    if (!(mask >> source & 1))
        kernel_error(where, "shuffle reads lane %d, not in its mask", source);
    return table_entry<T>(table, source);
}

inline void check_width(int width, Site where) {
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
        kernel_error(where, "shuffle width %d is not a power of two up to 32", width);
    }
}

} // namespace emu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_HERE) {
    emu::check_width(width, EMU_SITE);
    int segment = emu::lane() & ~(width - 1);
    return emu::shuffle(mask, value, segment | (source & (width - 1)), EMU_SITE);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMU_HERE) {
    emu::check_width(width, EMU_SITE);
    int lane = emu::lane(), source = lane ^ lane_mask;
    bool in_later_segment = (source & ~(width - 1)) > (lane & ~(width - 1));
    return emu::shuffle(mask, value, in_later_segment ? lane : source, EMU_SITE);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    emu::check_width(width, EMU_SITE);
    int lane = emu::lane(), source = lane + static_cast<int>(delta);
    bool past_segment = source >= (lane & ~(width - 1)) + width;
    return emu::shuffle(mask, value, past_segment ? lane : source, EMU_SITE);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    emu::check_width(width, EMU_SITE);
    int lane = emu::lane(), source = lane - static_cast<int>(delta);
    bool before_segment = source < (lane & ~(width - 1));
    return emu::shuffle(mask, value, before_segment ? lane : source, EMU_SITE);
}

// ---- votes and reductions -----------------------------------------------------------------------

inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_HERE) {
    int mine = predicate != 0;
    const char* table = emu::warp_exchange(mask, &mine, sizeof mine, EMU_SITE);
    unsigned votes = 0, lanes = emu::existing_lanes(mask);
    for (int i = 0; i < 32; i++) {
        if ((lanes >> i & 1) && emu::table_entry<int>(table, i)) votes |= 1u << i;
    }
    return votes;
}
inline int __any_sync(unsigned mask, int predicate, EMU_HERE) {
    return __ballot_sync(mask, predicate, emu_file, emu_line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMU_HERE) {
    return __ballot_sync(mask, predicate, emu_file, emu_line) == emu::existing_lanes(mask);
}

namespace emu {

template <class T, class F> inline T reduce_lanes(unsigned mask, T value, Site where, F combine) {
    const char* table = warp_exchange(mask, &value, sizeof value, where);
    unsigned lanes = existing_lanes(mask);
    int first = __builtin_ctz(lanes);
    T result = table_entry<T>(table, first);
    for (int i = first + 1; i < 32; i++) {
        if (lanes >> i & 1) result = combine(result, table_entry<T>(table, i));
    }
    return result;
}

} // namespace emu

#define EMU_WARP_REDUCTION(name, T, expression)                                                    \
    inline T name(unsigned mask, T value, EMU_HERE) {                                              \
        return emu::reduce_lanes(mask, value, EMU_SITE,                                            \
                                 [](T a, T b) { return static_cast<T>(expression); });             \
    }
EMU_WARP_REDUCTION(__reduce_add_sync, unsigned, a + b)
EMU_WARP_REDUCTION(__reduce_min_sync, unsigned, a < b ? a : b)
EMU_WARP_REDUCTION(__reduce_max_sync, unsigned, a > b ? a : b)
EMU_WARP_REDUCTION(__reduce_add_sync, int, static_cast<unsigned>(a) + static_cast<unsigned>(b))
EMU_WARP_REDUCTION(__reduce_min_sync, int, a < b ? a : b)
EMU_WARP_REDUCTION(__reduce_max_sync, int, a > b ? a : b)
EMU_WARP_REDUCTION(__reduce_and_sync, unsigned, a& b)
EMU_WARP_REDUCTION(__reduce_or_sync, unsigned, a | b)
EMU_WARP_REDUCTION(__reduce_xor_sync, unsigned, a ^ b)
#undef EMU_WARP_REDUCTION

#endif
