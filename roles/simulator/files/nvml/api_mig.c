/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * MIG mode, GPU instances and MIG device handles.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(current && pending, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.mig != MIG_NONE, NOT_SUPPORTED);
    *current = call.gpu->mig_current;
    *pending = call.gpu->mig_pending;
    return SUCCESS;
}

/* SUCCESS says that the wish is stored; the activation status says whether it is in force. */
EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(activation && mode <= 1, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.mig != MIG_NONE, NOT_SUPPORTED);
    WRITE_CALL();
    struct gpu *gpu = call.gpu_write;
    *activation = SUCCESS;
    gpu->mig_pending = mode;
    if (mode != gpu->mig_current) {
        if (gpu_in_use(gpu) || gpu_has_clients(call.gpu_index) || any_instance(gpu))
            *activation = IN_USE;
        else if (gpu->board.mig == MIG_PENDING)
            *activation = RESET_REQUIRED;
        else
            gpu_apply_mig_mode(call.write, gpu, mode);
    }
    return call_commit_instances(&call);
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(is_mig, INVALID_ARGUMENT);
    *is_mig = call.compute != NO_INSTANCE;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(count, INVALID_ARGUMENT);
    *count = call.gpu->mig_current ? call.gpu->board.compute_slices : 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(call.gpu->board.mig != MIG_NONE && call.gpu->mig_current, NOT_SUPPORTED);
    REQUIRE(mig && index < call.gpu->board.compute_slices, INVALID_ARGUMENT);
    for (int instance = 0; instance < INSTANCES_MAX; instance++) {
        const struct gpu_instance *owner = &call.gpu->instances[instance];
        for (int compute = 0; owner->serial && compute < COMPUTE_INSTANCES_MAX; compute++) {
            if (owner->compute[compute].serial && mig_visible(call.machine, call.gpu_index, instance, compute)
                && mig_index_seen(call.machine, call.gpu_index, instance, compute) == index) {
                *mig = handle_of_mig(call.machine, call.gpu_index, instance, compute);
                return SUCCESS;
            }
        }
    }
    return NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    DEVICE_CALL(mig, ACCEPT_MIG);
    REQUIRE(device, INVALID_ARGUMENT);
    *device = handle_of_gpu(call.machine, call.gpu_index);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(id, INVALID_ARGUMENT);
    REQUIRE(call.compute != NO_INSTANCE, INVALID_ARGUMENT);
    *id = (unsigned)call.instance;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(id, INVALID_ARGUMENT);
    REQUIRE(call.compute != NO_INSTANCE, INVALID_ARGUMENT);
    *id = (unsigned)call.compute;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(attributes, INVALID_ARGUMENT);
    REQUIRE(call.compute != NO_INSTANCE, NOT_SUPPORTED);
    const struct gpu_instance *owner = &call.gpu->instances[call.instance];
    const struct profile *profile = &call.gpu->board.profiles[owner->profile];
    const struct compute_profile *compute = &profile->compute[owner->compute[call.compute].profile];
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessorCount = compute->multiprocessors, .sharedCopyEngineCount = profile->engines[ENGINE_COPY],
        .sharedDecoderCount = profile->engines[ENGINE_DECODER], .sharedEncoderCount = profile->engines[ENGINE_ENCODER],
        .sharedJpegCount = profile->engines[ENGINE_JPEG], .sharedOfaCount = profile->engines[ENGINE_OFA],
        .gpuInstanceSliceCount = profile->slices, .computeInstanceSliceCount = compute->slices, .memorySizeMB = profile->memory };
    return SUCCESS;
}

/* The first structure ends before the memory. */
EXPORT nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    nvmlDeviceAttributes_t full;
    nvmlReturn_t result = nvmlDeviceGetAttributes_v2(device, attributes ? &full : NULL);
    if (result == SUCCESS)
        memcpy(attributes, &full, offsetof(nvmlDeviceAttributes_t, memorySizeMB));
    return result;
}

static nvmlReturn_t profiles_answerable(const struct call *call)
{
    REQUIRE(call->gpu->board.mig != MIG_NONE, NOT_SUPPORTED);
    REQUIRE(call->gpu->mig_current || !call->machine->profiles_need_mig_mode, NOT_SUPPORTED);
    return SUCCESS;
}

static nvmlReturn_t profile_at(const struct call *call, unsigned enumeration, const struct profile **profile)
{
    nvmlReturn_t result = profiles_answerable(call);
    REQUIRE(result == SUCCESS, result);
    REQUIRE(enumeration < PROFILES_MAX, INVALID_ARGUMENT);
    *profile = &call->gpu->board.profiles[enumeration];
    return (*profile)->present ? SUCCESS : NOT_SUPPORTED;
}

static nvmlReturn_t profile_named(const struct call *call, unsigned id, const struct profile **profile, unsigned *enumeration)
{
    nvmlReturn_t result = profiles_answerable(call);
    REQUIRE(result == SUCCESS, result);
    *profile = profile_by_id(&call->gpu->board, id, enumeration);
    return *profile ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned enumeration, nvmlGpuInstanceProfileInfo_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    const struct profile *profile = NULL;
    nvmlReturn_t result = profile_at(&call, enumeration, &profile);
    REQUIRE(result == SUCCESS, result);
    *info = (nvmlGpuInstanceProfileInfo_t){
        .id = profile->id, .isP2pSupported = profile->p2p, .sliceCount = profile->slices, .instanceCount = profile->maximum,
        .multiprocessorCount = profile->multiprocessors, .copyEngineCount = profile->engines[ENGINE_COPY],
        .decoderCount = profile->engines[ENGINE_DECODER], .encoderCount = profile->engines[ENGINE_ENCODER],
        .jpegCount = profile->engines[ENGINE_JPEG], .ofaCount = profile->engines[ENGINE_OFA], .memorySizeMB = profile->memory };
    return SUCCESS;
}

static nvmlReturn_t fill_profile(const struct profile *profile, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    enum { CAPABLE_P2P = 1, CAPABLE_GFX = 2 };
    char name[PROFILE_NAME_MAX_BYTES + 8];
    snprintf(name, sizeof name, "MIG %s", profile->name);
    if (info->version == VERSION_WORD(nvmlGpuInstanceProfileInfo_v2_t, 2)) {
        *info = (nvmlGpuInstanceProfileInfo_v2_t){
            .version = info->version, .id = profile->id, .isP2pSupported = profile->p2p, .sliceCount = profile->slices,
            .instanceCount = profile->maximum, .multiprocessorCount = profile->multiprocessors,
            .copyEngineCount = profile->engines[ENGINE_COPY], .decoderCount = profile->engines[ENGINE_DECODER],
            .encoderCount = profile->engines[ENGINE_ENCODER], .jpegCount = profile->engines[ENGINE_JPEG],
            .ofaCount = profile->engines[ENGINE_OFA], .memorySizeMB = profile->memory };
        copy_text(info->name, sizeof info->name, name);
        return SUCCESS;
    }
    REQUIRE(info->version == VERSION_WORD(nvmlGpuInstanceProfileInfo_v3_t, 3), ARGUMENT_VERSION_MISMATCH);
    nvmlGpuInstanceProfileInfo_v3_t *third = (nvmlGpuInstanceProfileInfo_v3_t *)(void *)info;
    *third = (nvmlGpuInstanceProfileInfo_v3_t){
        .version = third->version, .id = profile->id, .sliceCount = profile->slices, .instanceCount = profile->maximum,
        .multiprocessorCount = profile->multiprocessors, .copyEngineCount = profile->engines[ENGINE_COPY],
        .decoderCount = profile->engines[ENGINE_DECODER], .encoderCount = profile->engines[ENGINE_ENCODER],
        .jpegCount = profile->engines[ENGINE_JPEG], .ofaCount = profile->engines[ENGINE_OFA], .memorySizeMB = profile->memory,
        .capabilities = (profile->p2p ? CAPABLE_P2P : 0u) | (profile->gfx ? CAPABLE_GFX : 0u) };
    copy_text(third->name, sizeof third->name, name);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned enumeration, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(call.machine->profile_info_versions, FUNCTION_NOT_FOUND);
    REQUIRE(info, INVALID_ARGUMENT);
    const struct profile *profile = NULL;
    nvmlReturn_t result = profile_at(&call, enumeration, &profile);
    return result == SUCCESS ? fill_profile(profile, info) : result;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned id, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(call.machine->profile_info_versions, FUNCTION_NOT_FOUND);
    REQUIRE(info, INVALID_ARGUMENT);
    const struct profile *profile = NULL;
    unsigned enumeration;
    nvmlReturn_t result = profile_named(&call, id, &profile, &enumeration);
    return result == SUCCESS ? fill_profile(profile, info) : result;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned id, nvmlGpuInstancePlacement_t *placements,
                                                                  unsigned *count)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(count, INVALID_ARGUMENT);
    const struct profile *profile = NULL;
    unsigned enumeration;
    nvmlReturn_t result = profile_named(&call, id, &profile, &enumeration);
    REQUIRE(result == SUCCESS, result);
    unsigned room = *count;
    *count = profile->placements.count;
    REQUIRE(!placements || room >= *count, INSUFFICIENT_SIZE);
    for (unsigned index = 0; placements && index < *count; index++)
        placements[index] = (nvmlGpuInstancePlacement_t){ profile->placements.start[index], profile->placements.size };
    return SUCCESS;
}
ALIAS(nvmlDeviceGetGpuInstancePossiblePlacements, nvmlDeviceGetGpuInstancePossiblePlacements_v2, nvmlDevice_t, unsigned,
      nvmlGpuInstancePlacement_t *, unsigned *);

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned id, unsigned *count)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(count, INVALID_ARGUMENT);
    const struct profile *profile = NULL;
    unsigned enumeration;
    nvmlReturn_t result = profile_named(&call, id, &profile, &enumeration);
    REQUIRE(result == SUCCESS, result);
    REQUIRE(call.gpu->mig_current, NOT_SUPPORTED);
    *count = remaining_instances(call.gpu, profile, enumeration);
    return SUCCESS;
}

static nvmlReturn_t create_instance(struct call *call, unsigned id, const nvmlGpuInstancePlacement_t *wanted, nvmlGpuInstance_t *created)
{
    const struct profile *profile = NULL;
    unsigned enumeration, start;
    REQUIRE(created, INVALID_ARGUMENT);
    REQUIRE(call->gpu->board.mig != MIG_NONE && call->gpu->mig_current, NOT_SUPPORTED);
    nvmlReturn_t result = call_write(call);
    REQUIRE(result == SUCCESS, result);
    REQUIRE(call->gpu->mig_current, NOT_SUPPORTED);
    result = profile_named(call, id, &profile, &enumeration);
    REQUIRE(result == SUCCESS, result);
    struct gpu *gpu = call->gpu_write;
    REQUIRE(any_instance(gpu) || !gpu_in_use(gpu), IN_USE);
    if (wanted) {
        start = wanted->start;
        result = check_placement(gpu, profile, enumeration, start, wanted->size);
    } else {
        result = choose_placement(gpu, profile, enumeration, &start);
    }
    REQUIRE(result == SUCCESS, result);
    int instance = instance_id(&gpu->board, start, profile->placements.size);
    gpu->instances[instance] = (struct gpu_instance){ .serial = ++call->write->serial, .profile = enumeration, .start = start,
                                                      .size = profile->placements.size };
    event_add(call->write, call->gpu_index, 0x100, 1, (uint32_t)instance, NOT_TIED);
    *created = handle_of_instance(call->write, call->gpu_index, instance);
    return call_commit_instances(call);
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    return create_instance(&call, id, NULL, instance);
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned id, const nvmlGpuInstancePlacement_t *placement,
                                                             nvmlGpuInstance_t *instance)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(placement, INVALID_ARGUMENT);
    return create_instance(&call, id, placement, instance);
}

EXPORT nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
    CALL(call_begin_instance, instance);
    WRITE_CALL();
    struct gpu_instance *target = &call.gpu_write->instances[call.instance];
    REQUIRE(!any_compute(target) && !instance_in_use(call.gpu, call.instance, NO_INSTANCE)
            && !instance_has_clients(call.machine, call.gpu_index, call.instance, NO_INSTANCE), IN_USE);
    *target = (struct gpu_instance){ 0 };
    event_add(call.write, call.gpu_index, 0x100, 0, (uint32_t)call.instance, NOT_TIED);
    return call_commit_instances(&call);
}

/* Listing needs administration or mig/monitor, as finding one by its id. */
EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances, unsigned *count)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(instances && count, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.mig != MIG_NONE && call.gpu->mig_current, NOT_SUPPORTED);
    REQUIRE(monitor(call.machine), NO_PERMISSION);
    const struct profile *profile = NULL;
    unsigned enumeration;
    nvmlReturn_t result = profile_named(&call, id, &profile, &enumeration);
    REQUIRE(result == SUCCESS, result);
    *count = 0;
    for (int instance = 0; instance < INSTANCES_MAX; instance++) {
        if (call.gpu->instances[instance].serial && call.gpu->instances[instance].profile == enumeration)
            instances[(*count)++] = handle_of_instance(call.machine, call.gpu_index, instance);
    }
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(instance, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.mig != MIG_NONE && call.gpu->mig_current, NOT_SUPPORTED);
    REQUIRE(monitor(call.machine), NO_PERMISSION);
    REQUIRE(id < INSTANCES_MAX && call.gpu->instances[id].serial, NOT_FOUND);
    *instance = handle_of_instance(call.machine, call.gpu_index, (int)id);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    CALL(call_begin_instance, instance);
    REQUIRE(info, INVALID_ARGUMENT);
    const struct gpu_instance *target = &call.gpu->instances[call.instance];
    *info = (nvmlGpuInstanceInfo_t){ .device = handle_of_gpu(call.machine, call.gpu_index), .id = (unsigned)call.instance,
                                     .profileId = call.gpu->board.profiles[target->profile].id,
                                     .placement = { target->start, target->size } };
    return SUCCESS;
}
