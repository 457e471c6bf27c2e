// fiber.cpp - stacks to run CUDA threads on, and the switch between them (x86-64 System V ABI).
//
// The switch ends in `ret`, not in an indirect jump: all fibers are left at the same place, so the
// processor's return prediction stays right. ucontext would cost a system call per switch.
#include "fiber.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifndef __x86_64__
#error "the fiber switch is written for x86-64"
#endif

asm(R"(
.text
.globl emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size emu_switch_stack, .-emu_switch_stack
)");

namespace emu {

namespace {

constexpr size_t PAGE = 4096;
constexpr int SAVED_REGISTERS = 6;

// A list through the fibers, not a vector: ThreadSanitizer would see one CUDA thread move what
// another has written when it grows.
Fiber* all_fibers;
size_t num_fibers;

} // namespace

Fiber* fiber_create(void (*entry)(), size_t stack_bytes) {
    void* memory = mmap(nullptr, stack_bytes + PAGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("cuda_on_cpu: no memory for a thread's stack");
        exit(97);
    }
    char* guard = static_cast<char*>(memory);
    mprotect(guard, PAGE, PROT_NONE);
    Fiber* fiber = new Fiber{nullptr, guard + PAGE, stack_bytes, nullptr, nullptr, all_fibers};
    all_fibers = fiber;

    // Stacks are a power of two apart: shift their tops over the sets of the cache.
    size_t shift = num_fibers++ % 61 * 64;
    uintptr_t top = (reinterpret_cast<uintptr_t>(fiber->stack) + stack_bytes - shift) & ~63ull;
    uintptr_t* frame = reinterpret_cast<uintptr_t*>(top);
    *--frame = 0; // entry's return address: there is none
    *--frame = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < SAVED_REGISTERS; i++) *--frame = 0;
    fiber->stack_pointer = frame;
    return fiber;
}

void fiber_init_main(Fiber* main) {
    pthread_attr_t attributes;
    void* stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &main->stack_bytes);
    pthread_attr_destroy(&attributes);
    main->stack = static_cast<char*>(stack);
}

bool fiber_is_guard(const void* p) {
    const char* c = static_cast<const char*>(p);
    for (const Fiber* f = all_fibers; f; f = f->next_made) {
        if (c >= f->stack - PAGE && c < f->stack) return true;
    }
    return false;
}

} // namespace emu
