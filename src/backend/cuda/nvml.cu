// backend/cuda/nvml.cu - clock, power and temperature of the GPU, from NVIDIA's management library.
//
// The library belongs to the driver, not to the CUDA toolkit, so it is opened at run time and its
// few declarations stand here. Source: NVML API reference (docs.nvidia.com/deploy/nvml-api).
#include <dlfcn.h>
#include <stdio.h>

#include "backend/cuda/common.cuh"
#include "backend/device.h"

namespace {

using nvmlDevice_t = void*;
constexpr int SUCCESS = 0;                  // NVML_SUCCESS
constexpr int CLOCK_SM = 1, SENSOR_GPU = 0; // NVML_CLOCK_SM, NVML_TEMPERATURE_GPU

struct {
    bool is_open, is_missing;
    nvmlDevice_t device;
    int (*init)();
    int (*handle_by_bus_id)(const char*, nvmlDevice_t*);
    int (*clock)(nvmlDevice_t, int, unsigned*);
    int (*power)(nvmlDevice_t, unsigned*);
    int (*temperature)(nvmlDevice_t, int, unsigned*);
} nvml;

template <class F> bool load(void* library, const char* name, F** function) {
    *function = reinterpret_cast<F*>(dlsym(library, name));
    return *function != nullptr;
}

bool open_library() {
    int ordinal;
    char bus_id[32];
    CUDACHECK(cudaGetDevice(&ordinal));
    CUDACHECK(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, ordinal));
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    return library && load(library, "nvmlInit_v2", &nvml.init) &&
           load(library, "nvmlDeviceGetHandleByPciBusId_v2", &nvml.handle_by_bus_id) &&
           load(library, "nvmlDeviceGetClockInfo", &nvml.clock) &&
           load(library, "nvmlDeviceGetPowerUsage", &nvml.power) &&
           load(library, "nvmlDeviceGetTemperature", &nvml.temperature) && nvml.init() == SUCCESS &&
           nvml.handle_by_bus_id(bus_id, &nvml.device) == SUCCESS;
}

} // namespace

bool device_health(char* text, size_t size) {
    if (nvml.is_missing) return false;
    if (!nvml.is_open && !open_library()) {
        nvml.is_missing = true;
        warn("-lg: libnvidia-ml.so.1 cannot be used, so clock, power and temperature are unknown");
        return false;
    }
    nvml.is_open = true;
    unsigned mhz = 0, milliwatts = 0, celsius = 0;
    if (nvml.clock(nvml.device, CLOCK_SM, &mhz) != SUCCESS ||
        nvml.power(nvml.device, &milliwatts) != SUCCESS ||
        nvml.temperature(nvml.device, SENSOR_GPU, &celsius) != SUCCESS)
        return false;
    snprintf(text, size, "SM clock %u MHz | %.0f W | %u C", mhz, milliwatts * 1e-3, celsius);
    return true;
}
