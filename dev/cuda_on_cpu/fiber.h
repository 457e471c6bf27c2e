// fiber.h - stacks to run CUDA threads on, and the switch between them.
#ifndef EMU_FIBER_H
#define EMU_FIBER_H

#include "sanitizer.h"

#include <stddef.h>

namespace emu {

struct Fiber {
    void* stack_pointer; // while another fiber runs
    char* stack;
    size_t stack_bytes;
    void* fake_stack; // AddressSanitizer's, while another fiber runs
    Fiber* next_idle; // in a list of those that nobody uses
    Fiber* next_made; // in the list of all
};

// Stacks of CUDA threads; sanitized code needs larger frames.
constexpr size_t THREAD_STACK_BYTES = (IS_ASAN || IS_TSAN || IS_MSAN ? 256 : 64) << 10;

// A fresh stack that will call entry() when it is first switched to; entry must not return.
Fiber* fiber_create(void (*entry)(), size_t stack_bytes);

// Fills `main` for the stack the program was started on.
void fiber_init_main(Fiber* main);

// Is p in the guard page below a fiber's stack?
bool fiber_is_guard(const void* p);

// Saves the callee-saved registers on the current stack, its pointer in *save, and goes on from
// `to`. Floating-point control registers are not switched: kernels do not change them.
extern "C" void emu_switch_stack(void** save, void* to);

} // namespace emu

#endif
