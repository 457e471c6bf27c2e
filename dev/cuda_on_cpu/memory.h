// memory.h - which memory a device can reach, and when the host may touch it.
#ifndef EMU_MEMORY_TABLE_H
#define EMU_MEMORY_TABLE_H

#include <stddef.h>
#include <stdint.h>

namespace emu {

enum MemoryKind { DEVICE, PINNED, REGISTERED };

struct Allocation {
    uintptr_t address;
    size_t bytes;
    MemoryKind kind;
};

// The allocation that p points into; null for pageable host memory.
const Allocation* find_allocation(const void* p);

// Ends the run unless [p, p + bytes) lies in one allocation; `what` names the user: "cublasLt: A".
void check_range(const char* what, const void* p, size_t bytes);

// While one of these lives, device work goes on: device memory is open.
class DeviceAccess {
  public:
    DeviceAccess();
    ~DeviceAccess();
    DeviceAccess(const DeviceAccess&) = delete;
    DeviceAccess& operator=(const DeviceAccess&) = delete;
};

// Ends the run if something wrote past the end of a device allocation. What ran last is the
// culprit: `kernel`, or the operation `name` where that is null.
void check_redzones(const char* name, const void* kernel);

} // namespace emu

#endif
