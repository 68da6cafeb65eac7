/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * libcuda.so.1: what programs ask it before any work: is there a driver, which version, how many devices. The answers are NVML's.
 */
#include <dlfcn.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NOT_INITIALIZED = 3, CUDA_ERROR_NO_DEVICE = 100 };

static struct {
    int (*init)(void);
    int (*shutdown)(void);
    int (*version)(int *version);
    int (*count)(unsigned *count);
    int (*handle)(unsigned index, void **device);
    int (*mig_mode)(void *device, unsigned *current, unsigned *pending);
    int (*mig_count)(void *device, unsigned *count);
    int (*mig_handle)(void *device, unsigned index, void **mig);
} nvml;

static int ready;

static int load(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library)
        return 0;
    *(void **)&nvml.init = dlsym(library, "nvmlInit_v2");
    *(void **)&nvml.shutdown = dlsym(library, "nvmlShutdown");
    *(void **)&nvml.version = dlsym(library, "nvmlSystemGetCudaDriverVersion_v2");
    *(void **)&nvml.count = dlsym(library, "nvmlDeviceGetCount_v2");
    *(void **)&nvml.handle = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&nvml.mig_mode = dlsym(library, "nvmlDeviceGetMigMode");
    *(void **)&nvml.mig_count = dlsym(library, "nvmlDeviceGetMaxMigDeviceCount");
    *(void **)&nvml.mig_handle = dlsym(library, "nvmlDeviceGetMigDeviceHandleByIndex");
    return nvml.init && nvml.shutdown && nvml.version && nvml.count && nvml.handle && nvml.mig_mode && nvml.mig_count && nvml.mig_handle;
}

/* CUDA sees one MIG device at most; it hides the whole GPUs then. A GPU in MIG mode itself is no CUDA device. */
static int devices(void)
{
    unsigned count = 0, whole = 0;
    if (nvml.count(&count) != 0)
        return 0;
    for (unsigned index = 0; index < count; index++) {
        unsigned current = 0, pending = 0, slots = 0;
        void *device, *mig;
        if (nvml.handle(index, &device) != 0)
            continue;
        if (nvml.mig_mode(device, &current, &pending) != 0 || !current) {
            whole++;
            continue;
        }
        nvml.mig_count(device, &slots);
        for (unsigned slot = 0; slot < slots; slot++) {
            if (nvml.mig_handle(device, slot, &mig) == 0)
                return 1;
        }
    }
    return (int)whole;
}

EXPORT int cuInit(unsigned flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!ready && (!load() || nvml.init() != 0))
        return CUDA_ERROR_NO_DEVICE;
    ready = 1;
    return devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT int cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    if (!ready && (!load() || nvml.init() != 0)) {
        *version = 0;
        return CUDA_SUCCESS;
    }
    ready = 1;
    return nvml.version(version) == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

EXPORT int cuDeviceGetCount(int *count)
{
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    if (!ready)
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = devices();
    return CUDA_SUCCESS;
}
