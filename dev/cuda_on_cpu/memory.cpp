// memory.cpp - device memory, pinned host memory, and the checks of pointers.
//
// Device memory is host memory that host code must not touch. Outside of device work all of it is
// out of reach (one mprotect; huge pages make that cheap), so a forgotten copy is a fault that
// report.cpp explains. A red zone behind every allocation shows who wrote past the end.
// Under AddressSanitizer allocations come from malloc with exactly their size and are poisoned
// instead: its reports name the line and the place of the allocation.
#include "memory.h"
#include "emu.h"
#include "report.h"
#include "sanitizer.h"
#include "settings.h"
#include "stream.h"

#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <vector>

namespace emu {

namespace {

constexpr size_t ALIGN = 256;    // of every pointer, as cudaMalloc's
constexpr size_t RED_ZONE = 256; // at least, behind every device allocation
constexpr size_t HUGE_PAGE = size_t(2) << 20;
constexpr unsigned char CANARY = 0xFE; // as a float or bf16: -1.7e38, loud in any result

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Sorted by address. Not std::map: its tree code lives in libstdc++, where MemorySanitizer does not
// see it initialise its nodes.
std::vector<Allocation> allocations;

bool is_below(const Allocation& a, uintptr_t address) { return a.address < address; }

std::vector<Allocation>::iterator first_from(uintptr_t address) {
    return std::lower_bound(allocations.begin(), allocations.end(), address, is_below);
}

void add_allocation(void* p, size_t bytes, MemoryKind kind) {
    uintptr_t address = reinterpret_cast<uintptr_t>(p);
    allocations.insert(first_from(address), {address, bytes, kind});
}

size_t device_bytes_in_use() {
    size_t sum = 0;
    for (const Allocation& a : allocations) sum += a.kind == DEVICE ? a.bytes : 0;
    return sum;
}

// ---- the arena ----------------------------------------------------------------------------------

char* arena;         // all device memory
size_t arena_bytes;  // of address space
size_t arena_opened; // high-water mark, a multiple of HUGE_PAGE

int access_depth;

bool is_hidden() { return settings().hide && access_depth == 0; }

size_t footprint(size_t bytes) { return round_up(bytes, ALIGN) + RED_ZONE; }

void create_arena() {
    install_fault_handler();
    arena_bytes = 2 * round_up(settings().memory_bytes, HUGE_PAGE); // room for red zones and gaps
    void* memory = mmap(nullptr, arena_bytes + HUGE_PAGE, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) host_error("no address space for %zu bytes", arena_bytes);
    arena = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(memory), HUGE_PAGE));
    madvise(arena, arena_bytes, MADV_HUGEPAGE);
}

void set_arena_access(bool open) {
    if (arena_opened) mprotect(arena, arena_opened, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// The lowest gap of the arena that is large enough, or null.
char* find_gap(size_t bytes) {
    uintptr_t begin = reinterpret_cast<uintptr_t>(arena);
    for (const Allocation& a : allocations) {
        if (a.kind != DEVICE) continue;
        if (begin + footprint(bytes) <= a.address) break;
        begin = a.address + footprint(a.bytes);
    }
    uintptr_t end = reinterpret_cast<uintptr_t>(arena) + arena_bytes;
    return begin + footprint(bytes) <= end ? reinterpret_cast<char*>(begin) : nullptr;
}

// ---- allocation ---------------------------------------------------------------------------------

void* allocate_with_malloc(size_t bytes) {
    void* p = nullptr;
    return posix_memalign(&p, ALIGN, std::max<size_t>(bytes, 1)) == 0 ? p : nullptr;
}

void* allocate_in_arena(size_t bytes) {
    if (!arena) create_arena();
    char* p = find_gap(bytes);
    if (!p) return nullptr;
    DeviceAccess access;
    size_t needed = round_up(static_cast<size_t>(p - arena) + footprint(bytes), HUGE_PAGE);
    if (needed > arena_opened) {
        arena_opened = needed;
        set_arena_access(true);
    }
    memset(p + bytes, CANARY, footprint(bytes) - bytes);
    msan_set_undefined(p, bytes);
    return p;
}

cudaError_t allocate(void** out, size_t bytes, MemoryKind kind) {
    *out = nullptr;
    if (settings().devices == 0) return cudaErrorNoDevice;
    if (kind == DEVICE && bytes > settings().memory_bytes - device_bytes_in_use()) {
        return cudaErrorMemoryAllocation;
    }
    bool in_arena = kind == DEVICE && !IS_ASAN;
    void* p = in_arena ? allocate_in_arena(bytes) : allocate_with_malloc(bytes);
    if (!p) return cudaErrorMemoryAllocation;
    if (settings().poison) {
        DeviceAccess access;
        memset(p, 0xFF, bytes); // NaN in float, bf16 and fp16
    }
    add_allocation(p, bytes, kind);
    if (kind == DEVICE && is_hidden()) asan_forbid(p, bytes);
    *out = p;
    return cudaSuccess;
}

cudaError_t release(void* p, MemoryKind kind, const char* call) {
    if (!p) return cudaSuccess;
    auto a = first_from(reinterpret_cast<uintptr_t>(p));
    if (a == allocations.end() || a->address != reinterpret_cast<uintptr_t>(p) || a->kind != kind) {
        return refuse(cudaErrorInvalidValue, "%s(%p): not allocated, or freed before", call, p);
    }
    synchronize_all(); // as the real call does
    check_redzones(call, nullptr);
    if (kind == DEVICE) asan_allow(p, a->bytes);
    allocations.erase(a);
    if (kind == PINNED || IS_ASAN) free(p);
    return cudaSuccess;
}

} // namespace

// ---- access -------------------------------------------------------------------------------------

static void set_access(bool open) {
    if (!settings().hide) return;
    if (!IS_ASAN) {
        set_arena_access(open);
        return;
    }
    for (const Allocation& a : allocations) {
        if (a.kind != DEVICE) continue;
        const void* p = reinterpret_cast<const void*>(a.address);
        if (open)
            asan_allow(p, a.bytes);
        else
            asan_forbid(p, a.bytes);
    }
}

DeviceAccess::DeviceAccess() {
    if (access_depth++ == 0) set_access(true);
}
DeviceAccess::~DeviceAccess() {
    if (--access_depth == 0) set_access(false);
}

const Allocation* find_allocation(const void* p) {
    uintptr_t address = reinterpret_cast<uintptr_t>(p);
    auto next =
        std::upper_bound(allocations.begin(), allocations.end(), address,
                         [](uintptr_t value, const Allocation& a) { return value < a.address; });
    if (next == allocations.begin()) return nullptr;
    const Allocation* a = &*(next - 1);
    return address - a->address < std::max<size_t>(a->bytes, 1) ? a : nullptr;
}

void check_redzones(const char* name, const void* kernel) {
    if (IS_ASAN) return;
    static const std::string pattern(ALIGN + RED_ZONE, static_cast<char>(CANARY));
    DeviceAccess access;
    for (const Allocation& a : allocations) {
        if (a.kind != DEVICE) continue;
        const char* end = reinterpret_cast<const char*>(a.address + a.bytes);
        if (memcmp(end, pattern.data(), footprint(a.bytes) - a.bytes) == 0) continue;
        size_t i = 0;
        while (end[i] == pattern[i]) i++;
        host_error("%s %s wrote %zu bytes past the end of a device allocation of %zu bytes", name,
                   kernel ? function_name(kernel) : "", i, a.bytes);
    }
}

const char* describe_device_address(const void* p) {
    static char text[100];
    const char* c = static_cast<const char*>(p);
    if (!arena || c < arena || c >= arena + arena_bytes) return "";
    const Allocation* a = find_allocation(p);
    if (a) {
        snprintf(text, sizeof text, "byte %zu of an allocation of %zu bytes",
                 static_cast<size_t>(reinterpret_cast<uintptr_t>(p) - a->address), a->bytes);
    } else {
        snprintf(text, sizeof text, "not allocated, or freed");
    }
    return text;
}

void check_pointer(const void* kernel, int index, const void* p) {
    if (!p || find_allocation(p)) return;
    if (find_allocation(static_cast<const char*>(p) - 1)) return; // the end of an allocation
    host_error("kernel %s: argument %d is %p, memory that a device cannot reach",
               function_name(kernel), index, p);
}

void check_range(const char* what, const void* p, size_t bytes) {
    const Allocation* a = find_allocation(p);
    if (!a) host_error("%s: %p is memory that a device cannot reach", what, p);
    size_t left = a->address + a->bytes - reinterpret_cast<uintptr_t>(p);
    if (bytes > left) host_error("%s: needs %zu bytes, its allocation has %zu", what, bytes, left);
}

// ---- copies -------------------------------------------------------------------------------------

namespace {

// Is [p, p + bytes) inside one allocation, if it begins in one?
bool fits(const void* p, size_t bytes) {
    const Allocation* a = find_allocation(p);
    return !a || reinterpret_cast<uintptr_t>(p) + bytes <= a->address + a->bytes;
}

bool is_device(const void* p) {
    const Allocation* a = find_allocation(p);
    return a && a->kind == DEVICE;
}

bool kind_agrees(const void* to, const void* from, cudaMemcpyKind kind) {
    switch (kind) {
    case cudaMemcpyHostToHost:
        return !is_device(to) && !is_device(from);
    case cudaMemcpyHostToDevice:
        return is_device(to) && !is_device(from);
    case cudaMemcpyDeviceToHost:
        return !is_device(to) && is_device(from);
    case cudaMemcpyDeviceToDevice:
        return is_device(to) && is_device(from);
    case cudaMemcpyDefault:
        return true;
    }
    return false;
}

// Pageable memory is read or written before the call returns, as on a GPU; what is pinned is read
// and written when the stream gets there.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                 bool wait) {
    if (bytes == 0) return cudaSuccess;
    if (!kind_agrees(to, from, kind)) {
        return refuse(cudaErrorInvalidValue, "copy from %p to %p: not the kind of memory named",
                      from, to);
    }
    if (!fits(to, bytes) || !fits(from, bytes)) {
        return refuse(cudaErrorInvalidValue, "copy of %zu bytes from %p to %p: past the end", bytes,
                      from, to);
    }
    bool from_pageable = !find_allocation(from), to_pageable = !find_allocation(to);
    bool to_host = !is_device(to);
    if (from_pageable && !wait) {
        const char* bytes_now = static_cast<const char*>(from);
        std::vector<char> staged(bytes_now, bytes_now + bytes);
        enqueue(stream, "copy",
                [to, staged = std::move(staged)] { memcpy(to, staged.data(), staged.size()); });
    } else {
        enqueue(stream, "copy", [=] {
            memmove(to, from, bytes);
            if (to_host) msan_check_defined(to, bytes); // results that leave the device
        });
    }
    if (wait || to_pageable) synchronize(stream);
    return cudaSuccess;
}

cudaError_t fill(void* to, int value, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    if (!find_allocation(to) || !fits(to, bytes)) {
        return refuse(cudaErrorInvalidValue, "memset of %zu bytes at %p: not device memory", bytes,
                      to);
    }
    enqueue(stream, "memset", [=] { memset(to, value, bytes); });
    return cudaSuccess;
}

cudaError_t register_host(void* p, size_t bytes) {
    if (!p || !bytes) return cudaErrorInvalidValue;
    const char* last = static_cast<const char*>(p) + bytes - 1;
    if (find_allocation(p) || find_allocation(last)) return cudaErrorHostMemoryAlreadyRegistered;
    add_allocation(p, bytes, REGISTERED);
    return cudaSuccess;
}

cudaError_t unregister_host(void* p) {
    auto a = first_from(reinterpret_cast<uintptr_t>(p));
    bool found = a != allocations.end() && a->address == reinterpret_cast<uintptr_t>(p);
    if (!found || a->kind != REGISTERED) return cudaErrorHostMemoryNotRegistered;
    synchronize_all();
    allocations.erase(a);
    return cudaSuccess;
}

} // namespace

} // namespace emu

using emu::set_last_error;

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) {
    return set_last_error(emu::allocate(p, bytes, emu::DEVICE));
}
cudaError_t cudaFree(void* p) { return set_last_error(emu::release(p, emu::DEVICE, "cudaFree")); }
cudaError_t cudaMallocHost(void** p, size_t bytes) {
    return set_last_error(emu::allocate(p, bytes, emu::PINNED));
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
    return set_last_error(emu::allocate(p, bytes, emu::PINNED));
}
cudaError_t cudaFreeHost(void* p) {
    return set_last_error(emu::release(p, emu::PINNED, "cudaFreeHost"));
}
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
    return set_last_error(emu::register_host(p, bytes));
}
cudaError_t cudaHostUnregister(void* p) { return set_last_error(emu::unregister_host(p)); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    bool between_devices = kind == cudaMemcpyDeviceToDevice; // these do not wait on a GPU either
    return set_last_error(emu::copy(to, from, bytes, kind, nullptr, !between_devices));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return set_last_error(emu::copy(to, from, bytes, kind, stream, false));
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    return set_last_error(emu::fill(p, value, bytes, nullptr));
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    return set_last_error(emu::fill(p, value, bytes, stream));
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *total_bytes = emu::settings().memory_bytes;
    *free_bytes = *total_bytes - emu::device_bytes_in_use();
    return cudaSuccess;
}

} // extern "C"
