// device.cpp - the device a program finds: properties, limits, attributes of kernels, error texts.
//
// A fixed, documented lie: compute capability 9.0 with the limits of that architecture, but only 4
// multiprocessors, so that a grid sized by their number stays small.
#include "emu.h"
#include "report.h"
#include "settings.h"
#include "stream.h"

#include <algorithm>
#include <stdio.h>
#include <unistd.h>
#include <vector>

namespace emu {

namespace {

// CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability", 9.0.
constexpr int MULTIPROCESSORS = 4;
constexpr int MAX_BLOCK = 1024, MAX_THREADS_PER_SM = 2048, MAX_BLOCKS_PER_SM = 32;
constexpr size_t SHARED_DEFAULT = 48 << 10;
constexpr size_t SHARED_RESERVED = 1 << 10; // by the system, for every block
constexpr unsigned MAX_GRID_X = 0x7FFFFFFF, MAX_GRID_YZ = 65535;
constexpr unsigned MAX_BLOCK_Z = 64;
constexpr int HIGHEST_PRIORITY = -5; // lower numbers go first

int current_device;

size_t shared_per_sm() { return settings().shared_bytes + SHARED_RESERVED; }

bool exists(int device) { return device >= 0 && device < settings().devices; }

// ---- kernels that may use more shared memory ----------------------------------------------------

struct OptIn {
    const void* kernel;
    size_t shared_bytes;
};
std::vector<OptIn> opt_ins;

size_t shared_limit(const void* kernel) {
    for (const OptIn& o : opt_ins) {
        if (o.kernel == kernel) return o.shared_bytes;
    }
    return SHARED_DEFAULT;
}

cudaError_t set_shared_limit(const void* kernel, int bytes) {
    if (bytes < 0 || static_cast<size_t>(bytes) > settings().shared_bytes) {
        return refuse(cudaErrorInvalidValue, "kernel %s: %d bytes of shared memory, at most %zu",
                      function_name(kernel), bytes, settings().shared_bytes);
    }
    auto is_kernel = [kernel](const OptIn& o) { return o.kernel == kernel; };
    opt_ins.erase(std::remove_if(opt_ins.begin(), opt_ins.end(), is_kernel), opt_ins.end());
    opt_ins.push_back({kernel, static_cast<size_t>(bytes)});
    return cudaSuccess;
}

// ---- properties ---------------------------------------------------------------------------------

// The same for all processes of a host, different for its devices.
void fill_uuid(cudaUUID_t* uuid, int device) {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    uint64_t hash = 14695981039346656037u; // FNV-1a
    for (const char* c = host; *c; c++) {
        hash = (hash ^ static_cast<unsigned char>(*c)) * 1099511628211u;
    }
    memset(uuid, 0, sizeof *uuid);
    memcpy(uuid->bytes, &hash, sizeof hash);
    memcpy(uuid->bytes + sizeof hash, &device, sizeof device);
}

void fill_properties(cudaDeviceProp* p, int device) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "CUDA on the CPU");
    fill_uuid(&p->uuid, device);
    p->major = 9;
    p->minor = 0;
    p->multiProcessorCount = MULTIPROCESSORS;
    p->warpSize = 32;
    p->maxThreadsPerBlock = MAX_BLOCK;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = MAX_BLOCK;
    p->maxThreadsDim[2] = MAX_BLOCK_Z;
    p->maxGridSize[0] = static_cast<int>(MAX_GRID_X);
    p->maxGridSize[1] = p->maxGridSize[2] = static_cast<int>(MAX_GRID_YZ);
    p->maxThreadsPerMultiProcessor = MAX_THREADS_PER_SM;
    p->maxBlocksPerMultiProcessor = MAX_BLOCKS_PER_SM;
    p->sharedMemPerBlock = SHARED_DEFAULT;
    p->sharedMemPerBlockOptin = settings().shared_bytes;
    p->sharedMemPerMultiprocessor = shared_per_sm();
    p->reservedSharedMemPerBlock = SHARED_RESERVED;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->totalGlobalMem = settings().memory_bytes;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 5120;
    p->asyncEngineCount = 2;
    p->concurrentKernels = 1;
    p->unifiedAddressing = 1;
    p->canMapHostMemory = 1;
    p->pciDeviceID = device;
}

cudaError_t get_attribute(int* value, cudaDeviceAttr attribute, int device) {
    if (!exists(device)) return cudaErrorInvalidDevice;
    cudaDeviceProp p;
    fill_properties(&p, device);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = p.maxThreadsPerBlock;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = static_cast<int>(p.sharedMemPerBlock);
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = static_cast<int>(p.sharedMemPerBlockOptin);
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = static_cast<int>(p.sharedMemPerMultiprocessor);
        break;
    case cudaDevAttrWarpSize:
        *value = p.warpSize;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = p.multiProcessorCount;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = p.maxThreadsPerMultiProcessor;
        break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
        *value = p.maxBlocksPerMultiProcessor;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = p.major;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = p.minor;
        break;
    case cudaDevAttrL2CacheSize:
        *value = p.l2CacheSize;
        break;
    case cudaDevAttrClockRate:
        *value = 1980000;
        break; // kHz
    case cudaDevAttrMemoryClockRate:
        *value = 3201000;
        break; // kHz
    case cudaDevAttrGlobalMemoryBusWidth:
        *value = p.memoryBusWidth;
        break;
    case cudaDevAttrUnifiedAddressing:
        *value = 1;
        break;
    default:
        return refuse(cudaErrorInvalidValue, "device attribute %d is not emulated",
                      static_cast<int>(attribute));
    }
    return cudaSuccess;
}

cudaError_t max_active_blocks(int* blocks, const void* kernel, int threads, size_t shared_bytes) {
    *blocks = 0;
    if (threads < 1) return cudaErrorInvalidValue;
    if (threads > MAX_BLOCK || shared_bytes > shared_limit(kernel)) return cudaSuccess;
    int by_threads = MAX_THREADS_PER_SM / ((threads + 31) / 32 * 32);
    int by_shared = static_cast<int>(shared_per_sm() / (shared_bytes + SHARED_RESERVED));
    *blocks = std::min({by_threads, by_shared, MAX_BLOCKS_PER_SM});
    return cudaSuccess;
}

// ---- error texts --------------------------------------------------------------------------------

struct ErrorText {
    cudaError_t code;
    const char *name, *text;
};
#define ERROR_TEXT(code, text)                                                                     \
    { code, #code, text }
constexpr ErrorText ERROR_TEXTS[] = {
    ERROR_TEXT(cudaSuccess, "no error"),
    ERROR_TEXT(cudaErrorInvalidValue, "invalid argument"),
    ERROR_TEXT(cudaErrorMemoryAllocation, "out of memory"),
    ERROR_TEXT(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR_TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR_TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR_TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR_TEXT(cudaErrorNotReady, "device not ready"),
    ERROR_TEXT(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ERROR_TEXT(cudaErrorHostMemoryAlreadyRegistered,
               "part or all of the requested memory range is already mapped"),
    ERROR_TEXT(cudaErrorHostMemoryNotRegistered,
               "pointer does not correspond to a registered memory region"),
};
#undef ERROR_TEXT

const ErrorText* find_text(cudaError_t code) {
    for (const ErrorText& e : ERROR_TEXTS) {
        if (e.code == code) return &e;
    }
    return nullptr;
}

} // namespace

cudaError_t check_launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes) {
    if (settings().devices == 0) return set_last_error(cudaErrorNoDevice);
    unsigned long threads = static_cast<unsigned long>(block.x) * block.y * block.z;
    if (threads < 1 || threads > static_cast<unsigned long>(MAX_BLOCK) || block.z > MAX_BLOCK_Z) {
        return set_last_error(refuse(cudaErrorInvalidConfiguration,
                                     "kernel %s: a block of (%u,%u,%u) threads",
                                     function_name(kernel), block.x, block.y, block.z));
    }
    if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > MAX_GRID_X || grid.y > MAX_GRID_YZ ||
        grid.z > MAX_GRID_YZ) {
        return set_last_error(refuse(cudaErrorInvalidConfiguration,
                                     "kernel %s: a grid of (%u,%u,%u) blocks",
                                     function_name(kernel), grid.x, grid.y, grid.z));
    }
    if (shared_bytes > shared_limit(kernel)) {
        return set_last_error(refuse(cudaErrorInvalidValue,
                                     "kernel %s: %zu bytes of shared memory, %zu allowed "
                                     "(cudaFuncAttributeMaxDynamicSharedMemorySize)",
                                     function_name(kernel), shared_bytes, shared_limit(kernel)));
    }
    return cudaSuccess;
}

} // namespace emu

using namespace emu;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = settings().devices;
    return *count ? cudaSuccess : set_last_error(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
    if (settings().devices == 0) return set_last_error(cudaErrorNoDevice);
    if (!exists(device)) return set_last_error(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    if (settings().devices == 0) return set_last_error(cudaErrorNoDevice);
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    if (!exists(device)) return set_last_error(cudaErrorInvalidDevice);
    fill_properties(p, device);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return set_last_error(get_attribute(value, attribute, device));
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    if (!exists(device)) return set_last_error(cudaErrorInvalidDevice);
    snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", static_cast<unsigned>(device));
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = HIGHEST_PRIORITY;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    if (!exists(device) || !exists(peer)) return set_last_error(cudaErrorInvalidDevice);
    *can = device != peer;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess; // hints
    return set_last_error(set_shared_limit(kernel, value));
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void* kernel) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = MAX_BLOCK;
    out->maxDynamicSharedSizeBytes = static_cast<int>(shared_limit(kernel));
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int threads, size_t shared_bytes) {
    return set_last_error(max_active_blocks(blocks, kernel, threads, shared_bytes));
}

const char* cudaGetErrorName(cudaError_t code) {
    const ErrorText* e = find_text(code);
    return e ? e->name : "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t code) {
    const ErrorText* e = find_text(code);
    return e ? e->text : "an error that is not emulated";
}

} // extern "C"
