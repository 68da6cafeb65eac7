/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The frame of a call: initialized? an injected fault? a live handle? a GPU that is still there? Then the answer, and for
 * changes: privilege, the lock, and the commit.
 */
#include "simulator.h"

#include <math.h>
#include <string.h>
#include <time.h>

enum { KIND_NONE, KIND_DEVICE, KIND_INSTANCE, KIND_COMPUTE };

static bool is_version_suffix(const char *text)
{
    return text[0] == '_' && text[1] == 'v' && text[2] >= '0' && text[2] <= '9';
}

/* A fault on nvmlX also meets nvmlX_v2; a fault on nvmlX_v2 meets only that. */
static bool fault_meets(const struct call_fault *fault, const char *function, int gpu)
{
    size_t length = strlen(fault->function);
    return fault->used && (fault->gpu == NO_INSTANCE || fault->gpu == gpu) && strncmp(fault->function, function, length) == 0
           && (function[length] == '\0' || (is_version_suffix(function + length) && !strstr(fault->function, "_v")));
}

static double monotonic_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* The call takes its time, without holding other threads up; what the state is after it is read anew. */
static bool pass_time(struct call *call, double seconds)
{
    uint64_t generation = state_copy_generation();
    process_unlock();
    state_wait(generation, (int64_t)ceil(fmin(seconds, 1.0) * 1000));
    process_lock();
    call->machine = state_refresh();
    return call->machine != NULL;
}

/* The fault holds the call up for its time, or until it is cleared. */
static bool sit_out_fault(struct call *call, unsigned index)
{
    const struct call_fault fault = call->machine->faults[index];
    const double end = monotonic_seconds() + fault.delay;
    while (call->machine->faults[index].used && call->machine->faults[index].number == fault.number && monotonic_seconds() < end) {
        if (!pass_time(call, end - monotonic_seconds()))
            return false;
    }
    return true;
}

static bool sit_out_operation(struct call *call)
{
    const double end = monotonic_seconds() + call->machine->operation_delay / 1000.0;
    const bool instances = strstr(call->function, "GpuInstance") || strstr(call->function, "ComputeInstance");
    const bool operation = instances && (strstr(call->function, "Create") || strstr(call->function, "Destroy"));
    while (operation && monotonic_seconds() < end) {
        if (!pass_time(call, end - monotonic_seconds()))
            return false;
    }
    return true;
}

/* The faults that meet this call, all or those of one GPU: each is sat out, and the code of the first that fails is the answer. */
static nvmlReturn_t take_faults(struct call *call, bool only_of_gpu)
{
    nvmlReturn_t code = SUCCESS;
    bool meets[CALL_FAULTS_MAX];
    for (unsigned index = 0; index < CALL_FAULTS_MAX; index++) {
        const struct call_fault *fault = &call->machine->faults[index];
        meets[index] = fault_meets(fault, call->function, call->gpu_index) && !(only_of_gpu && fault->gpu == NO_INSTANCE)
                       && (!fault->nth || state_count_call(index) == fault->nth);
        if (meets[index] && code == SUCCESS)
            code = fault->code;
    }
    for (unsigned index = 0; index < CALL_FAULTS_MAX; index++) {
        if (meets[index] && call->machine->faults[index].delay > 0 && !sit_out_fault(call, index))
            return DRIVER_NOT_LOADED;
    }
    return code;
}

static nvmlReturn_t resolve(struct call *call)
{
    nvmlReturn_t result = SUCCESS;
    call->gpu_index = call->instance = call->compute = NO_INSTANCE;
    switch (call->kind) {
    case KIND_DEVICE:
        result = handle_resolve_device(call->machine, (nvmlDevice_t)call->handle, &call->gpu_index, &call->instance, &call->compute);
        break;
    case KIND_INSTANCE:
        result = handle_resolve_instance(call->machine, (nvmlGpuInstance_t)call->handle, &call->gpu_index, &call->instance);
        break;
    case KIND_COMPUTE:
        result = handle_resolve_compute(call->machine, (nvmlComputeInstance_t)call->handle, &call->gpu_index, &call->instance,
                                        &call->compute);
        break;
    default:
        return SUCCESS;
    }
    if (call->gpu_index == NO_INSTANCE)
        return result;
    call->gpu = &call->machine->gpus[call->gpu_index];
    if (call->gpu->lost && !(call->accept & ACCEPT_LOST))
        return GPU_IS_LOST;
    return result;
}

static nvmlReturn_t begin(struct call *call, const char *function, int kind, const void *handle, unsigned accept)
{
    *call = (struct call){ .function = function, .gpu_index = NO_INSTANCE, .instance = NO_INSTANCE, .compute = NO_INSTANCE,
                           .kind = kind, .handle = handle, .accept = accept, .locked = true };
    process_lock();
    if (!initialized())
        return UNINITIALIZED;
    call->machine = state_refresh();
    if (!call->machine)
        return DRIVER_NOT_LOADED;
    follow_machine(call->machine);
    count_call(function);
    resolve(call);
    nvmlReturn_t result = take_faults(call, false);
    if (!call->machine || !sit_out_operation(call))
        return DRIVER_NOT_LOADED;
    if (result == SUCCESS)
        result = resolve(call);
    if (result == SUCCESS && kind == KIND_DEVICE && !(accept & (call->compute == NO_INSTANCE ? ACCEPT_GPU : ACCEPT_MIG)))
        result = accept == ACCEPT_MIG ? INVALID_ARGUMENT : NOT_SUPPORTED;
    return result;
}

nvmlReturn_t call_begin(struct call *call, const char *function) { return begin(call, function, KIND_NONE, NULL, 0); }

nvmlReturn_t call_begin_device(struct call *call, const char *function, nvmlDevice_t device, unsigned accept)
{
    return begin(call, function, KIND_DEVICE, device, accept);
}

nvmlReturn_t call_begin_instance(struct call *call, const char *function, nvmlGpuInstance_t instance)
{
    return begin(call, function, KIND_INSTANCE, instance, 0);
}

nvmlReturn_t call_begin_compute(struct call *call, const char *function, nvmlComputeInstance_t instance)
{
    return begin(call, function, KIND_COMPUTE, instance, 0);
}

nvmlReturn_t call_found(struct call *call, int gpu)
{
    call->gpu_index = gpu;
    nvmlReturn_t result = take_faults(call, true);
    if (result != SUCCESS)
        return result;
    return (unsigned)gpu < call->machine->gpu_count && !call->machine->gpus[gpu].lost ? SUCCESS : GPU_IS_LOST;
}

nvmlReturn_t call_resolve(const struct call *call, nvmlDevice_t device, int *gpu, int *instance, int *compute)
{
    nvmlReturn_t result = handle_resolve_device(call->machine, device, gpu, instance, compute);
    if (result == SUCCESS && call->machine->gpus[*gpu].lost)
        return GPU_IS_LOST;
    return result;
}

/* From here on nobody else writes; the handle is looked up again, because it was found in an older state. */
nvmlReturn_t call_write(struct call *call)
{
    if (!administrator(call->machine))
        return NO_PERMISSION;
    nvmlReturn_t result = state_begin_write(&call->write);
    if (result != SUCCESS)
        return result;
    call->writing = true;
    call->machine = call->write;
    if (!call->machine->loaded)
        return DRIVER_NOT_LOADED;
    result = resolve(call);
    if (result == SUCCESS && call->gpu_index != NO_INSTANCE)
        call->gpu_write = &call->write->gpus[call->gpu_index];
    return result;
}

nvmlReturn_t call_commit(struct call *call)
{
    state_commit();
    call->writing = false;
    return SUCCESS;
}

nvmlReturn_t call_commit_instances(struct call *call)
{
    capabilities_commit(call->write);
    call->writing = false;
    return SUCCESS;
}

void call_end(struct call *call)
{
    if (call->writing)
        state_abandon();
    if (call->locked)
        process_unlock();
}

nvmlReturn_t stub_answer(const char *function, nvmlReturn_t answer)
{
    struct call call __attribute__((cleanup(call_end)));
    nvmlReturn_t result = call_begin(&call, function);
    return result == SUCCESS ? answer : result;
}
