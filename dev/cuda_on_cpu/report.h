// report.h - how the runtime says what is wrong outside kernels; kernel_error is in emu.h.
#ifndef EMU_REPORT_H
#define EMU_REPORT_H

#include <driver_types.h>

namespace emu {

constexpr int EXIT_BUG = 97; // the CUDA program has a bug that a check found

// "cuda_on_cpu: error: text", then ends the process with EXIT_BUG.
[[noreturn]] void host_error(const char* format, ...) __attribute__((format(printf, 1, 2)));

// What a GPU would refuse: says why on stderr and hands the code to the caller, who may handle it.
cudaError_t refuse(cudaError_t code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The program's function at this address, without parameters: a kernel's name. "?" in a stripped
// program and for libraries. From symbols.cpp.
const char* function_name(const void* code);

// Names the culprit when the process touches memory it must not: hidden device memory, the page
// behind dynamic shared memory or a stack. Not under AddressSanitizer, whose report says more.
void install_fault_handler();

// A description of the device allocation around p, or "" if there is none; from memory.cpp.
const char* describe_device_address(const void* p);

} // namespace emu

#endif
