/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Compute instances.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static const struct profile *owner_profile(const struct call *call)
{
    return &call->gpu->board.profiles[call->gpu->instances[call->instance].profile];
}

/* 0 is the only way to share engines; the published list has one entry. */
static nvmlReturn_t compute_profile_at(const struct call *call, unsigned enumeration, unsigned engines, const struct compute_profile **profile)
{
    REQUIRE(enumeration < COMPUTE_PROFILES_MAX && engines == 0, INVALID_ARGUMENT);
    *profile = &owner_profile(call)->compute[enumeration];
    return (*profile)->present ? SUCCESS : NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned enumeration, unsigned engines,
                                                                 nvmlComputeInstanceProfileInfo_t *info)
{
    CALL(call_begin_instance, instance);
    REQUIRE(info, INVALID_ARGUMENT);
    const struct compute_profile *profile = NULL;
    nvmlReturn_t result = compute_profile_at(&call, enumeration, engines, &profile);
    REQUIRE(result == SUCCESS, result);
    const uint32_t *shared = owner_profile(&call)->engines;
    *info = (nvmlComputeInstanceProfileInfo_t){
        .id = profile->id, .sliceCount = profile->slices, .instanceCount = profile->maximum,
        .multiprocessorCount = profile->multiprocessors, .sharedCopyEngineCount = shared[ENGINE_COPY],
        .sharedDecoderCount = shared[ENGINE_DECODER], .sharedEncoderCount = shared[ENGINE_ENCODER],
        .sharedJpegCount = shared[ENGINE_JPEG], .sharedOfaCount = shared[ENGINE_OFA] };
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned enumeration, unsigned engines,
                                                                  nvmlComputeInstanceProfileInfo_v2_t *info)
{
    CALL(call_begin_instance, instance);
    REQUIRE(call.machine->profile_info_versions, FUNCTION_NOT_FOUND);
    REQUIRE(info, INVALID_ARGUMENT);
    const struct compute_profile *profile = NULL;
    nvmlReturn_t result = compute_profile_at(&call, enumeration, engines, &profile);
    REQUIRE(result == SUCCESS, result);
    bool third = info->version == VERSION_WORD(nvmlComputeInstanceProfileInfo_v3_t, 3);
    REQUIRE(third || info->version == VERSION_WORD(nvmlComputeInstanceProfileInfo_v2_t, 2), ARGUMENT_VERSION_MISMATCH);
    const uint32_t *shared = owner_profile(&call)->engines;
    *info = (nvmlComputeInstanceProfileInfo_v2_t){
        .version = info->version, .id = profile->id, .sliceCount = profile->slices, .instanceCount = profile->maximum,
        .multiprocessorCount = profile->multiprocessors, .sharedCopyEngineCount = shared[ENGINE_COPY],
        .sharedDecoderCount = shared[ENGINE_DECODER], .sharedEncoderCount = shared[ENGINE_ENCODER],
        .sharedJpegCount = shared[ENGINE_JPEG], .sharedOfaCount = shared[ENGINE_OFA] };
    snprintf(info->name, sizeof info->name, "MIG %s", profile->name);
    if (third)
        ((nvmlComputeInstanceProfileInfo_v3_t *)(void *)info)->capabilities = owner_profile(&call)->gfx;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned id, unsigned *count)
{
    CALL(call_begin_instance, instance);
    REQUIRE(count, INVALID_ARGUMENT);
    unsigned enumeration;
    const struct compute_profile *profile = compute_profile_by_id(owner_profile(&call), id, &enumeration);
    REQUIRE(profile, INVALID_ARGUMENT);
    *count = remaining_compute(&call.gpu->instances[call.instance], profile, enumeration);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t instance, unsigned id,
                                                                        nvmlComputeInstancePlacement_t *placements, unsigned *count)
{
    CALL(call_begin_instance, instance);
    REQUIRE(count, INVALID_ARGUMENT);
    unsigned enumeration, room = *count;
    const struct compute_profile *profile = compute_profile_by_id(owner_profile(&call), id, &enumeration);
    REQUIRE(profile, INVALID_ARGUMENT);
    *count = profile->placements.count;
    REQUIRE(!placements || room >= *count, INSUFFICIENT_SIZE);
    for (unsigned index = 0; placements && index < *count; index++)
        placements[index] = (nvmlComputeInstancePlacement_t){ profile->placements.start[index], profile->placements.size };
    return SUCCESS;
}

static nvmlReturn_t choose_start(const struct gpu_instance *owner, const struct compute_profile *profile,
                                 const nvmlComputeInstancePlacement_t *wanted, unsigned *start)
{
    if (wanted) {
        REQUIRE(placement_listed(&profile->placements, wanted->start, wanted->size), INVALID_ARGUMENT);
        *start = wanted->start;
        return compute_placement_free(owner, wanted->start, wanted->size) ? SUCCESS : INSUFFICIENT_RESOURCES;
    }
    for (unsigned index = 0; index < profile->placements.count; index++) {
        *start = profile->placements.start[index];
        if (compute_placement_free(owner, *start, profile->placements.size))
            return SUCCESS;
    }
    return INSUFFICIENT_RESOURCES;
}

static nvmlReturn_t create_compute(struct call *call, unsigned id, const nvmlComputeInstancePlacement_t *wanted, nvmlComputeInstance_t *created)
{
    REQUIRE(created, INVALID_ARGUMENT);
    nvmlReturn_t result = call_write(call);
    REQUIRE(result == SUCCESS, result);
    unsigned enumeration, start;
    const struct compute_profile *profile = compute_profile_by_id(owner_profile(call), id, &enumeration);
    REQUIRE(profile, INVALID_ARGUMENT);
    struct gpu_instance *owner = &call->gpu_write->instances[call->instance];
    result = choose_start(owner, profile, wanted, &start);
    REQUIRE(result == SUCCESS, result);
    REQUIRE(remaining_compute(owner, profile, enumeration) > 0, INSUFFICIENT_RESOURCES);
    int compute = 0;
    while (compute < COMPUTE_INSTANCES_MAX && owner->compute[compute].serial)
        compute++;
    REQUIRE(compute < COMPUTE_INSTANCES_MAX, INSUFFICIENT_RESOURCES);
    owner->compute[compute] = (struct compute_instance){ .serial = ++call->write->serial, .profile = enumeration, .start = start,
                                                         .size = profile->placements.size, .mig_index = free_mig_index(call->gpu) };
    mig_uuid(call->gpu, call->instance, compute, owner->compute[compute].uuid);
    event_add(call->write, call->gpu_index, 0x100, 1, (uint32_t)call->instance, (uint32_t)compute);
    *created = handle_of_compute(call->write, call->gpu_index, call->instance, compute);
    return call_commit_instances(call);
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *compute)
{
    CALL(call_begin_instance, instance);
    return create_compute(&call, id, NULL, compute);
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t instance, unsigned id,
                                                                      const nvmlComputeInstancePlacement_t *placement,
                                                                      nvmlComputeInstance_t *compute)
{
    CALL(call_begin_instance, instance);
    REQUIRE(placement, INVALID_ARGUMENT);
    return create_compute(&call, id, placement, compute);
}

EXPORT nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance)
{
    CALL(call_begin_compute, instance);
    WRITE_CALL();
    REQUIRE(!instance_in_use(call.gpu, call.instance, call.compute)
            && !instance_has_clients(call.machine, call.gpu_index, call.instance, call.compute), IN_USE);
    call.gpu_write->instances[call.instance].compute[call.compute] = (struct compute_instance){ 0 };
    event_add(call.write, call.gpu_index, 0x100, 0, (uint32_t)call.instance, (uint32_t)call.compute);
    return call_commit_instances(&call);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *computes, unsigned *count)
{
    CALL(call_begin_instance, instance);
    REQUIRE(computes && count, INVALID_ARGUMENT);
    REQUIRE(monitor(call.machine), NO_PERMISSION);
    unsigned enumeration;
    REQUIRE(compute_profile_by_id(owner_profile(&call), id, &enumeration), INVALID_ARGUMENT);
    const struct gpu_instance *owner = &call.gpu->instances[call.instance];
    *count = 0;
    for (int compute = 0; compute < COMPUTE_INSTANCES_MAX; compute++) {
        if (owner->compute[compute].serial && owner->compute[compute].profile == enumeration)
            computes[(*count)++] = handle_of_compute(call.machine, call.gpu_index, call.instance, compute);
    }
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *compute)
{
    CALL(call_begin_instance, instance);
    REQUIRE(compute, INVALID_ARGUMENT);
    REQUIRE(monitor(call.machine), NO_PERMISSION);
    REQUIRE(id < COMPUTE_INSTANCES_MAX && call.gpu->instances[call.instance].compute[id].serial, NOT_FOUND);
    *compute = handle_of_compute(call.machine, call.gpu_index, call.instance, (int)id);
    return SUCCESS;
}

/* .device is the MIG device handle. */
EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    CALL(call_begin_compute, instance);
    REQUIRE(info, INVALID_ARGUMENT);
    const struct compute_instance *target = &call.gpu->instances[call.instance].compute[call.compute];
    *info = (nvmlComputeInstanceInfo_t){ .device = handle_of_mig(call.machine, call.gpu_index, call.instance, call.compute),
                                         .gpuInstance = handle_of_instance(call.machine, call.gpu_index, call.instance),
                                         .id = (unsigned)call.compute, .profileId = owner_profile(&call)->compute[target->profile].id,
                                         .placement = { target->start, target->size } };
    return SUCCESS;
}

/* The first structure ends before the placement. */
EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    nvmlComputeInstanceInfo_t full;
    nvmlReturn_t result = nvmlComputeInstanceGetInfo_v2(instance, info ? &full : NULL);
    if (result == SUCCESS)
        memcpy(info, &full, offsetof(nvmlComputeInstanceInfo_t, placement));
    return result;
}
