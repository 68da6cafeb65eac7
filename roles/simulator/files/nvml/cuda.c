/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * libcuda.so.1: what programs ask it before any work, and how much of a device they may have. The answers are NVML's and, where a
 * control daemon of MPS listens, that daemon's. Nothing computes.
 */
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

struct cuda_nvml nvml;
struct cuda_device cuda_devices[CUDA_DEVICES_MAX];
unsigned cuda_device_count;
int cuda_ready;

static bool load(void)
{
    static const struct { void *function; const char *name; } wanted[] = {
        { &nvml.init, "nvmlInit_v2" },
        { &nvml.version, "nvmlSystemGetCudaDriverVersion_v2" },
        { &nvml.count, "nvmlDeviceGetCount_v2" },
        { &nvml.handle, "nvmlDeviceGetHandleByIndex_v2" },
        { &nvml.mig_mode, "nvmlDeviceGetMigMode" },
        { &nvml.mig_count, "nvmlDeviceGetMaxMigDeviceCount" },
        { &nvml.mig_handle, "nvmlDeviceGetMigDeviceHandleByIndex" },
        { &nvml.uuid, "nvmlDeviceGetUUID" },
        { &nvml.name, "nvmlDeviceGetName" },
        { &nvml.memory, "nvmlDeviceGetMemoryInfo" },
        { &nvml.attributes, "nvmlDeviceGetAttributes_v2" },
        { &nvml.cores, "nvmlDeviceGetNumGpuCores" },
        { &nvml.capability, "nvmlDeviceGetCudaComputeCapability" },
        { &nvml.compute_mode, "nvmlDeviceGetComputeMode" },
        { &nvml.control, "acceleratorSimulatorControl" },
    };
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    for (size_t index = 0; library && index < sizeof wanted / sizeof wanted[0]; index++) {
        void *found = dlsym(library, wanted[index].name);
        if (!found)
            return false;
        memcpy(wanted[index].function, &found, sizeof found);
    }
    return library != NULL;
}

static bool prepare(void)
{
    if (!cuda_ready && load() && nvml.init() == 0)
        cuda_ready = pthread_atfork(NULL, NULL, cuda_contexts_forget) == 0;
    return cuda_ready;
}

EXPORT int cuInit(unsigned flags)
{
    static struct cuda_device found[CUDA_CANDIDATES_MAX];
    bool connected = false;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!prepare())
        return CUDA_ERROR_NO_DEVICE;
    if (cuda_under_mps() || cuda_device_count)
        return CUDA_SUCCESS;
    unsigned count = cuda_find_devices(found, CUDA_CANDIDATES_MAX);
    int code = count ? cuda_mps_connect(found, count, &connected) : CUDA_ERROR_NO_DEVICE;
    if (code != CUDA_SUCCESS)
        return code;
    if (!connected)
        cuda_device_count = cuda_choose_devices(found, count, cuda_devices, true);
    return cuda_device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT int cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    if (!prepare()) {
        *version = 0;
        return CUDA_SUCCESS;
    }
    return nvml.version(version) == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

EXPORT int cuDeviceGetCount(int *count)
{
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    if (!cuda_ready)
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = (int)cuda_device_count;
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGet(CUdevice *device, int ordinal)
{
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!cuda_device_at(ordinal))
        return cuda_ready ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_NOT_INITIALIZED;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int length, CUdevice number)
{
    const struct cuda_device *device = cuda_device_at(number);
    char full[96] = "";
    if (!name || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device || nvml.name(device->handle, full, sizeof full) != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    strncpy(name, full, (size_t)length - 1);
    name[length - 1] = '\0';
    return CUDA_SUCCESS;
}

static int digit(char text)
{
    return text >= '0' && text <= '9' ? text - '0' : (text | 32) >= 'a' && (text | 32) <= 'f' ? (text | 32) - 'a' + 10 : -1;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice number)
{
    const struct cuda_device *device = cuda_device_at(number);
    unsigned digits = 0;
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    memset(uuid, 0, 16);
    for (const char *text = device->uuid + strlen("GPU-"); *text && digits < 32; text++) {
        if (digit(*text) >= 0) {
            uuid[digits / 2] = (unsigned char)(uuid[digits / 2] << 4 | digit(*text));
            digits++;
        }
    }
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetUuid(unsigned char uuid[16], CUdevice number) __attribute__((alias("cuDeviceGetUuid_v2")));

/* For the MPS server: NVML's name of the device. */
EXPORT int acceleratorSimulatorDeviceName(char *uuid, int length, CUdevice number)
{
    const struct cuda_device *device = cuda_device_at(number);
    if (!device || length < (int)sizeof device->uuid)
        return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid, device->uuid, sizeof device->uuid);
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, CUdevice number)
{
    const struct cuda_device *device = cuda_device_at(number);
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = cuda_total_memory(device);
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, CUdevice number)
{
    enum { MAX_THREADS_PER_BLOCK = 1, WARP_SIZE = 10, MULTIPROCESSOR_COUNT = 16, COMPUTE_MODE = 20, UNIFIED_ADDRESSING = 41,
           CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
    const struct cuda_device *device = cuda_device_at(number);
    int major = 0, minor = 0;
    unsigned mode = 0;
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    nvml.capability(device->handle, &major, &minor);
    nvml.compute_mode(device->handle, &mode);
    switch (attribute) {
    case MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case WARP_SIZE: *value = 32; break;
    case MULTIPROCESSOR_COUNT: *value = (int)cuda_mps_share(device->multiprocessors); break;
    case COMPUTE_MODE: *value = (int)mode; break;
    case UNIFIED_ADDRESSING: *value = 1; break;
    case CAPABILITY_MAJOR: *value = major; break;
    case CAPABILITY_MINOR: *value = minor; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORT int cuGetErrorName(int code, const char **name)
{
    static const struct { int code; const char *name; } names[] = {
#define NAMED(name) { name, #name }
        NAMED(CUDA_SUCCESS), NAMED(CUDA_ERROR_INVALID_VALUE), NAMED(CUDA_ERROR_OUT_OF_MEMORY), NAMED(CUDA_ERROR_NOT_INITIALIZED),
        NAMED(CUDA_ERROR_DEVICE_UNAVAILABLE), NAMED(CUDA_ERROR_NO_DEVICE), NAMED(CUDA_ERROR_INVALID_DEVICE),
        NAMED(CUDA_ERROR_INVALID_CONTEXT), NAMED(CUDA_ERROR_NOT_SUPPORTED), NAMED(CUDA_ERROR_MPS_CONNECTION_FAILED),
        NAMED(CUDA_ERROR_MPS_RPC_FAILURE), NAMED(CUDA_ERROR_UNKNOWN),
    };
    for (size_t index = 0; name && index < sizeof names / sizeof names[0]; index++) {
        if (names[index].code == code) {
            *name = names[index].name;
            return CUDA_SUCCESS;
        }
    }
    if (name)
        *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}
