/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Contexts and the memory that is allocated in them. Addresses are numbers that no code dereferences. The memory of a process is reported to
 * the boards, so that NVML shows it and others cannot allocate it: by the MPS daemon, or by the process itself where it may write
 * their state. In a container it may not; it counts what it has itself.
 */
#include "cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

enum { CONTEXTS_MAX = 256, CONTEXT_MIB = 16 };          /* 16: chosen */
enum { MODE_PROHIBITED = 2 };

#define FIRST_ADDRESS 0x7f0000000000ull
#define ADDRESS_STEP (2ull << 20)

struct context {
    struct cuda_device *device;                 /* NULL: free */
    bool primary;
    unsigned references;
};

struct allocation {
    struct allocation *next;
    CUdeviceptr address;
    unsigned long long bytes;
    CUcontext context;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[CONTEXTS_MAX];
static struct allocation *allocations;
static CUdeviceptr next_address = FIRST_ADDRESS;
static __thread CUcontext current;

#define LOCKED(type, call)                                                                   \
    do {                                                                                     \
        pthread_mutex_lock(&mutex);                                                          \
        type locked_result = (call);                                                         \
        pthread_mutex_unlock(&mutex);                                                        \
        return locked_result;                                                                \
    } while (0)

unsigned long long cuda_total_memory(const struct cuda_device *device)
{
    nvmlMemory_t memory = { 0 };
    nvml.memory(device->handle, &memory);
    return device->limit && device->limit < memory.total ? device->limit : memory.total;
}

/* What the device has for this process: `bytes` in all. */
static int claim(struct cuda_device *device, unsigned long long bytes)
{
    nvmlMemory_t memory = { 0 };
    if (cuda_under_mps())
        return cuda_mps_memory(device, bytes);
    int code = cuda_control("use %s %d %llu", device->uuid, (int)getpid(), ((bytes + (1u << 20) - 1) >> 20) + CONTEXT_MIB);
    if (code == SUCCESS || code == INSUFFICIENT_RESOURCES)
        return code == SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    nvml.memory(device->handle, &memory);
    return bytes + ((unsigned long long)CONTEXT_MIB << 20) <= memory.free ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The first context of this process on the device asks for it; the compute mode decides. Under MPS the server has it already. */
static int enter(struct cuda_device *device)
{
    unsigned mode = 0;
    if (device->contexts)
        return CUDA_SUCCESS;
    if (cuda_under_mps() && cuda_mps_broken())
        return CUDA_ERROR_MPS_RPC_FAILURE;
    if (nvml.compute_mode(device->handle, &mode) != 0)
        return CUDA_ERROR_UNKNOWN;
    if (cuda_under_mps())
        return mode == MODE_PROHIBITED ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_SUCCESS;
    if (cuda_control("context %s enter", device->uuid) != SUCCESS)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    int code = claim(device, 0);
    if (code != CUDA_SUCCESS)
        cuda_control("context %s leave", device->uuid);
    return code;
}

static void leave(struct cuda_device *device)
{
    if (--device->contexts || cuda_under_mps())
        return;
    cuda_control("leave %s %d", device->uuid, (int)getpid());
    cuda_control("context %s leave", device->uuid);
}

static int make(CUcontext *made, struct cuda_device *device, bool primary)
{
    for (unsigned index = 0; index < CONTEXTS_MAX; index++) {
        struct context *context = &contexts[index];
        if (context->device)
            continue;
        int code = enter(device);
        if (code != CUDA_SUCCESS)
            return code;
        *context = (struct context){ .device = device, .primary = primary, .references = 1 };
        device->contexts++;
        *made = context;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static bool known(CUcontext context)
{
    return context >= contexts && context < contexts + CONTEXTS_MAX && context->device;
}

static int unmake(CUcontext context)
{
    if (!known(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    struct cuda_device *device = context->device;
    bool freed = false;
    for (struct allocation **each = &allocations; *each;) {
        struct allocation *allocation = *each;
        if (allocation->context != context) {
            each = &allocation->next;
            continue;
        }
        device->used -= allocation->bytes;
        *each = allocation->next;
        free(allocation);
        freed = true;
    }
    if (freed)
        claim(device, device->used);
    *context = (struct context){ 0 };
    leave(device);
    if (current == context)
        current = NULL;
    return CUDA_SUCCESS;
}

static CUcontext primary_of(const struct cuda_device *device)
{
    for (unsigned index = 0; index < CONTEXTS_MAX; index++) {
        if (contexts[index].device == device && contexts[index].primary)
            return &contexts[index];
    }
    return NULL;
}

static int retain(CUcontext *made, struct cuda_device *device)
{
    *made = primary_of(device);
    if (!*made)
        return make(made, device, true);
    (*made)->references++;
    return CUDA_SUCCESS;
}

static int release(const struct cuda_device *device)
{
    CUcontext context = primary_of(device);
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    return --context->references ? CUDA_SUCCESS : unmake(context);
}

static int allocate(CUdeviceptr *address, size_t bytes)
{
    if (!known(current))
        return CUDA_ERROR_INVALID_CONTEXT;
    struct cuda_device *device = current->device;
    const unsigned long long total = cuda_total_memory(device);
    if (bytes > total || device->used > total - bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct allocation *made = malloc(sizeof *made);
    int code = made ? claim(device, device->used + bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    if (code != CUDA_SUCCESS) {
        free(made);
        return code;
    }
    *made = (struct allocation){ .next = allocations, .address = next_address, .bytes = bytes, .context = current };
    next_address += (bytes + ADDRESS_STEP - 1) / ADDRESS_STEP * ADDRESS_STEP;
    allocations = made;
    device->used += bytes;
    *address = made->address;
    return CUDA_SUCCESS;
}

static int release_memory(CUdeviceptr address)
{
    for (struct allocation **each = &allocations; *each; each = &(*each)->next) {
        struct allocation *allocation = *each;
        if (allocation->address != address)
            continue;
        struct cuda_device *device = allocation->context->device;
        device->used -= allocation->bytes;
        *each = allocation->next;
        free(allocation);
        return claim(device, device->used);
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static int memory_left(size_t *available, size_t *total)
{
    nvmlMemory_t memory = { 0 };
    if (!known(current))
        return CUDA_ERROR_INVALID_CONTEXT;
    const struct cuda_device *device = current->device;
    *total = cuda_total_memory(device);
    nvml.memory(device->handle, &memory);
    const unsigned long long own = *total > device->used ? *total - device->used : 0;
    *available = own < memory.free ? own : memory.free;
    return CUDA_SUCCESS;
}

EXPORT int cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice number)
{
    struct cuda_device *device = cuda_device_at(number);
    (void)flags;
    if (!context || !device)
        return context ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    int code = make(context, device, false);
    pthread_mutex_unlock(&mutex);
    if (code == CUDA_SUCCESS)
        current = *context;
    return code;
}

EXPORT int cuCtxDestroy_v2(CUcontext context) { LOCKED(int, unmake(context)); }

EXPORT int cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice number)
{
    struct cuda_device *device = cuda_device_at(number);
    if (!context || !device)
        return context ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
    LOCKED(int, retain(context, device));
}

EXPORT int cuDevicePrimaryCtxRelease_v2(CUdevice number)
{
    struct cuda_device *device = cuda_device_at(number);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    LOCKED(int, release(device));
}

static int set_current(CUcontext context)
{
    if (context && !known(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    current = context;
    return CUDA_SUCCESS;
}

EXPORT int cuCtxSetCurrent(CUcontext context) { LOCKED(int, set_current(context)); }

EXPORT int cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    if (!address || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(int, allocate(address, bytes));
}

EXPORT int cuMemFree_v2(CUdeviceptr address) { LOCKED(int, release_memory(address)); }

EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    if (!available || !total)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(int, memory_left(available, total));
}
