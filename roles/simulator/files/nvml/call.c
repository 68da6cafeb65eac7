/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The frame of a call: initialized? an injected fault? a live handle? a GPU that is still there? Then the answer, and for
 * changes: privilege, the lock, and the commit.
 */
#include "simulator.h"

#include <string.h>

enum { KIND_NONE, KIND_DEVICE, KIND_INSTANCE, KIND_COMPUTE };

static bool sit_out_operation(struct call *call)
{
    const bool instances = strstr(call->function, "GpuInstance") || strstr(call->function, "ComputeInstance");
    return !instances || !(strstr(call->function, "Create") || strstr(call->function, "Destroy")) || pass_operation(&call->machine);
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
    nvmlReturn_t result = faults_take(&call->machine, call->function, call->gpu_index, false);
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
    nvmlReturn_t result = faults_take(&call->machine, call->function, call->gpu_index, true);
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

/* From here on no other process writes. Find the handle again, because it was found in an older state. */
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
    capabilities_commit_of(call->write, call->gpu_index);
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

nvmlReturn_t answer_text(char *target, unsigned size, const char *text)
{
    if (!target)
        return INVALID_ARGUMENT;
    if (text[0] == '\0')
        return NOT_SUPPORTED;
    size_t length = strlen(text);
    if (length + 1 > size)
        return INSUFFICIENT_SIZE;
    memcpy(target, text, length + 1);
    return SUCCESS;
}
