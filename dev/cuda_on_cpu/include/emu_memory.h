// emu_memory.h - cache hints, fences and atomics of the CUDA language; included by cuda_runtime.h.
//
// Atomics are real ones, so that ThreadSanitizer tells them from plain accesses.
#ifndef EMU_MEMORY_H
#define EMU_MEMORY_H

#include <stdint.h>
#include <string.h>
#include <type_traits>

// ---- loads and stores with a cache hint ---------------------------------------------------------

template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldlu(const T* p) { return *p; }
template <class T> inline T __ldcv(const T* p) { return *p; }
template <class T> inline void __stwb(T* p, T value) { *p = value; }
template <class T> inline void __stcg(T* p, T value) { *p = value; }
template <class T> inline void __stcs(T* p, T value) { *p = value; }
template <class T> inline void __stwt(T* p, T value) { *p = value; }

// ---- fences -------------------------------------------------------------------------------------
// One CPU thread runs all CUDA threads, so these order nothing; a missing fence is not seen.

inline void __threadfence() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

// ---- atomics ------------------------------------------------------------------------------------

namespace emu {

template <class T> struct SameType { using type = T; };
template <class T> using NotDeduced = typename SameType<T>::type;

// *p = update(*p); returns the old value. T has 2, 4 or 8 bytes.
template <class T, class F> inline T atomic_update(T* p, F update) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "no atomic of this size");
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t,
                                    std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
    Bits* word = reinterpret_cast<Bits*>(p);
    Bits old_bits = __atomic_load_n(word, __ATOMIC_RELAXED), new_bits;
    T old_value;
    do {
        memcpy(static_cast<void*>(&old_value), &old_bits, sizeof(T));
        T new_value = update(old_value);
        memcpy(&new_bits, &new_value, sizeof(T));
    } while (!__atomic_compare_exchange_n(word, &old_bits, new_bits, false, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return old_value;
}

} // namespace emu

#define EMU_ATOMIC(name, expression)                                                               \
    template <class T> inline T name(T* p, emu::NotDeduced<T> value) {                             \
        return emu::atomic_update(p, [=](T old) { return static_cast<T>(expression); });           \
    }
EMU_ATOMIC(atomicAdd, old + value)
EMU_ATOMIC(atomicSub, old - value)
EMU_ATOMIC(atomicMin, old < value ? old : value)
EMU_ATOMIC(atomicMax, old > value ? old : value)
EMU_ATOMIC(atomicAnd, old& value)
EMU_ATOMIC(atomicOr, old | value)
EMU_ATOMIC(atomicXor, old ^ value)
EMU_ATOMIC(atomicInc, old >= value ? T(0) : old + 1)
EMU_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
EMU_ATOMIC(atomicExch, (static_cast<void>(old), value))
#undef EMU_ATOMIC

template <class T> inline T atomicCAS(T* p, emu::NotDeduced<T> expected, emu::NotDeduced<T> value) {
    return emu::atomic_update(p, [=](T old) { return old == expected ? value : old; });
}

#endif
