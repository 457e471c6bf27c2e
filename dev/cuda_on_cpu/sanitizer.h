// sanitizer.h - what the compilers' sanitizers must be told; empty functions in other builds.
//
// AddressSanitizer is told which stack runs; MemorySanitizer, which memory became undefined;
// ThreadSanitizer sees every CUDA thread and every stream as a thread of its own ("fiber") that is
// ordered only by the barriers, warp operations and events of the program. For the last the whole
// runtime is compiled without -fsanitize=thread and with -DEMU_TSAN: its own bookkeeping is shared
// by all fibers and must stay out of sight.
#ifndef EMU_SANITIZER_H
#define EMU_SANITIZER_H

#include <stddef.h>

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define EMU_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if __has_feature(memory_sanitizer)
#define EMU_MSAN 1
#include <sanitizer/msan_interface.h>
#endif
#ifdef EMU_TSAN
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* key);
void __tsan_release(void* key);
}
#endif

namespace emu {

#ifdef EMU_ASAN
constexpr bool IS_ASAN = true;
inline void asan_before_switch(void** fake_stack, const void* stack, size_t bytes) {
    __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
}
inline void asan_after_switch(void* fake_stack) {
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}
inline void asan_forbid(const void* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void asan_allow(const void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
#else
constexpr bool IS_ASAN = false;
inline void asan_before_switch(void**, const void*, size_t) {}
inline void asan_after_switch(void*) {}
inline void asan_forbid(const void*, size_t) {}
inline void asan_allow(const void*, size_t) {}
#endif

#ifdef EMU_MSAN
constexpr bool IS_MSAN = true;
inline void msan_set_undefined(const void* p, size_t bytes) { __msan_allocated_memory(p, bytes); }
inline void msan_check_defined(const void* p, size_t bytes) {
    __msan_check_mem_is_initialized(p, bytes);
}
// For a text that came from code which is not instrumented.
inline void msan_set_text_defined(const char* text) { __msan_unpoison_string(text); }
#else
constexpr bool IS_MSAN = false;
inline void msan_set_undefined(const void*, size_t) {}
inline void msan_check_defined(const void*, size_t) {}
inline void msan_set_text_defined(const char*) {}
#endif

// A key is any byte that lives as long as it is used; release publishes what the running fiber has
// done, acquire makes the running fiber come after all that was released.
#ifdef EMU_TSAN
constexpr bool IS_TSAN = true;
using TsanKey = char;
inline void* tsan_current() { return __tsan_get_current_fiber(); }
inline void* tsan_create(const char* name) {
    void* fiber = __tsan_create_fiber(0);
    __tsan_set_fiber_name(fiber, name);
    return fiber;
}
inline void tsan_switch(void* fiber) { __tsan_switch_to_fiber(fiber, 1); } // 1: orders nothing
inline void tsan_acquire(TsanKey* key) { __tsan_acquire(key); }
inline void tsan_release(TsanKey* key) { __tsan_release(key); }
#else
constexpr bool IS_TSAN = false;
struct TsanKey {};
inline void* tsan_current() { return nullptr; }
inline void* tsan_create(const char*) { return nullptr; }
inline void tsan_switch(void*) {}
inline void tsan_acquire(TsanKey*) {}
inline void tsan_release(TsanKey*) {}
#endif

} // namespace emu

#endif
