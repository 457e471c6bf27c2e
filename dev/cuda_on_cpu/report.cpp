// report.cpp - error reports: kernel, block, threads and places, and faults of the processor.
#include "report.h"
#include "block.h"

#include <execinfo.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace emu {

namespace {

constexpr int MAX_THREAD_LINES = 12;

const char* state_name(State state) {
    switch (state) {
    case NOT_STARTED:
        return "not started";
    case RUNNING:
        return "running";
    case AT_BARRIER:
        return "waits at the block barrier";
    case AT_WARP_OP:
        return "waits at the warp operation";
    case EXITED:
        return "exited";
    }
    return "?";
}

void print_block() {
    fprintf(stderr, "  kernel %s, block (%u,%u,%u)", function_name(machine.kernel), blockIdx.x,
            blockIdx.y, blockIdx.z);
    if (const Thread* t = machine.current) {
        fprintf(stderr, ", thread (%u,%u,%u)", t->index.x, t->index.y, t->index.z);
    }
    fprintf(stderr, "\n");
}

bool alike(const Thread* a, const Thread* b) {
    return a->state == b->state && a->site.line == b->site.line && a->mask == b->mask;
}

// One line for each run of neighbouring threads that are alike.
void print_threads() {
    int lines = 0;
    for (int first = 0, next; first < machine.num_threads; first = next) {
        const Thread* t = &machine.threads[first];
        for (next = first + 1; next < machine.num_threads; next++) {
            if (!alike(t, &machine.threads[next])) break;
        }
        if (++lines > MAX_THREAD_LINES) {
            fprintf(stderr, "  ...\n");
            return;
        }
        fprintf(stderr, "  threads %d to %d: %s", first, next - 1, state_name(t->state));
        if (t->state == AT_BARRIER || t->state == AT_WARP_OP) {
            fprintf(stderr, " at %s:%d", t->site.file, t->site.line);
        }
        if (t->state == AT_WARP_OP) fprintf(stderr, " with mask %08x", t->mask);
        fprintf(stderr, "\n");
    }
}

void print_line(const char* kind, Site where, const char* format, va_list arguments) {
    fflush(stdout);
    fprintf(stderr, "cuda_on_cpu: %s: ", kind);
    if (where.file) fprintf(stderr, "%s:%d: ", where.file, where.line);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
}

[[noreturn]] void leave() {
    fflush(stderr);
    _exit(EXIT_BUG); // no destructors: the program is in the middle of a kernel or a call
}

} // namespace

void kernel_error(Site where, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print_line("error", where, format, arguments);
    va_end(arguments);
    print_block();
    print_threads();
    leave();
}

void host_error(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print_line("error", {}, format, arguments);
    va_end(arguments);
    leave();
}

cudaError_t refuse(cudaError_t code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print_line("refused", {}, format, arguments);
    va_end(arguments);
    return code;
}

// ---- faults -------------------------------------------------------------------------------------

namespace {

void on_fault(int signal_number, siginfo_t* info, void*) {
    const void* p = info->si_addr;
    bool in_kernel = machine.current != nullptr;
    const char* allocation = describe_device_address(p);
    if (!in_kernel && !*allocation) { // not ours: the default action, at the same instruction
        signal(signal_number, SIG_DFL);
        return;
    }
    fflush(stdout);
    if (!in_kernel) {
        fprintf(stderr, "cuda_on_cpu: error: host code touches device memory at %p (%s)\n", p,
                allocation);
        void* frames[16];
        int depth = backtrace(frames, 16);
        for (int i = 1; i < depth; i++) { // 0 is this function
            const char* name = function_name(frames[i]);
            if (*name != '?') fprintf(stderr, "  in %s\n", name);
        }
        leave();
    }
    const char* what = "touches memory that is not there";
    if (is_past_dynamic_shared(p))
        what = "reads or writes past its dynamic shared memory";
    else if (fiber_is_guard(p))
        what = "overflows the stack of a thread";
    fprintf(stderr, "cuda_on_cpu: error: kernel %s, at address %p\n", what, p);
    print_block();
    leave();
}

} // namespace

void install_fault_handler() {
    if (IS_ASAN) return;
    static char handler_stack[64 << 10]; // the fault may be an overflow of the one in use
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

} // namespace emu
