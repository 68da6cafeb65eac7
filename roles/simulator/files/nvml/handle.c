/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Handles: tag, kind, place of the GPU and a number that is never used twice (epoch of the attachment, serial of the instance).
 * A stale handle therefore names nothing, instead of something new at the same place. The tag keeps the value outside the range
 * of user addresses, so that no garbage collector of a caller mistakes it for a pointer to its memory.
 */
#include "simulator.h"

enum kind { HANDLE_GPU = 1, HANDLE_MIG, HANDLE_INSTANCE, HANDLE_COMPUTE };

#define TAG 0x4E56ull
#define NUMBER_BITS 36

static uintptr_t encode(enum kind kind, int gpu, uint64_t number)
{
    return (uintptr_t)(TAG << 48 | (uint64_t)kind << 44 | (uint64_t)gpu << NUMBER_BITS | (number & ((1ull << NUMBER_BITS) - 1)));
}

static bool decode(const void *handle, enum kind *kind, int *gpu, uint64_t *number)
{
    uint64_t value = (uintptr_t)handle;
    *kind = (enum kind)(value >> 44 & 0xF);
    *gpu = (int)(value >> NUMBER_BITS & 0xFF);
    *number = value & ((1ull << NUMBER_BITS) - 1);
    return value >> 48 == TAG;
}

nvmlDevice_t handle_of_gpu(const struct machine *machine, int gpu)
{
    return (nvmlDevice_t)encode(HANDLE_GPU, gpu, machine->gpus[gpu].epoch);
}

nvmlDevice_t handle_of_mig(const struct machine *machine, int gpu, int instance, int compute)
{
    return (nvmlDevice_t)encode(HANDLE_MIG, gpu, machine->gpus[gpu].instances[instance].compute[compute].serial);
}

nvmlGpuInstance_t handle_of_instance(const struct machine *machine, int gpu, int instance)
{
    return (nvmlGpuInstance_t)encode(HANDLE_INSTANCE, gpu, machine->gpus[gpu].instances[instance].serial);
}

nvmlComputeInstance_t handle_of_compute(const struct machine *machine, int gpu, int instance, int compute)
{
    return (nvmlComputeInstance_t)encode(HANDLE_COMPUTE, gpu, machine->gpus[gpu].instances[instance].compute[compute].serial);
}

static nvmlReturn_t find_compute(const struct machine *machine, int gpu, uint64_t serial, int *instance, int *compute)
{
    for (int i = 0; serial && i < INSTANCES_MAX; i++) {
        const struct gpu_instance *candidate = &machine->gpus[gpu].instances[i];
        for (int c = 0; candidate->serial && c < COMPUTE_INSTANCES_MAX; c++) {
            if (candidate->compute[c].serial == serial) {
                *instance = i;
                *compute = c;
                return SUCCESS;
            }
        }
    }
    return INVALID_ARGUMENT;
}

nvmlReturn_t handle_resolve_device(const struct machine *machine, nvmlDevice_t handle, int *gpu, int *instance, int *compute)
{
    enum kind kind;
    uint64_t number;
    int index;
    if (!decode(handle, &kind, &index, &number) || (unsigned)index >= machine->gpu_count || visible_index(index) == NO_INSTANCE)
        return INVALID_ARGUMENT;
    *gpu = index;
    *instance = *compute = NO_INSTANCE;
    if (kind == HANDLE_GPU)
        return machine->gpus[index].epoch == number ? SUCCESS : INVALID_ARGUMENT;
    return kind == HANDLE_MIG ? find_compute(machine, index, number, instance, compute) : INVALID_ARGUMENT;
}

nvmlReturn_t handle_resolve_instance(const struct machine *machine, nvmlGpuInstance_t handle, int *gpu, int *instance)
{
    enum kind kind;
    uint64_t number;
    int index;
    if (!decode(handle, &kind, &index, &number) || kind != HANDLE_INSTANCE || (unsigned)index >= machine->gpu_count)
        return INVALID_ARGUMENT;
    *gpu = index;
    for (int i = 0; number && i < INSTANCES_MAX; i++) {
        if (machine->gpus[index].instances[i].serial == number) {
            *instance = i;
            return SUCCESS;
        }
    }
    return INVALID_ARGUMENT;
}

nvmlReturn_t handle_resolve_compute(const struct machine *machine, nvmlComputeInstance_t handle, int *gpu, int *instance, int *compute)
{
    enum kind kind;
    uint64_t number;
    int index;
    if (!decode(handle, &kind, &index, &number) || kind != HANDLE_COMPUTE || (unsigned)index >= machine->gpu_count)
        return INVALID_ARGUMENT;
    *gpu = index;
    return find_compute(machine, index, number, instance, compute);
}
