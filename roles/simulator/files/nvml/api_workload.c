/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Workload power profiles: which ones a board has, which are requested, and which of those hold. A request is lost when the
 * driver is unloaded.
 */
#include "simulator.h"

#include <string.h>

static nvmlMask255_t mask_of(uint32_t profiles) { return (nvmlMask255_t){ { profiles } }; }

/* Those of a caller's profiles that a board has; false where it names others. */
static bool own_profiles(const struct board *board, const nvmlMask255_t *mask, uint32_t *profiles)
{
    for (size_t word = 1; word < COUNT_OF(mask->mask); word++) {
        if (mask->mask[word])
            return false;
    }
    *profiles = mask->mask[0];
    return (*profiles & ~board->workload_profiles) == 0;
}

/* Of two that conflict the one with the smaller number as its priority holds. */
static uint32_t enforced(const struct gpu *gpu)
{
    const struct board *board = &gpu->board;
    uint32_t held = gpu->workload_requested;
    for (unsigned id = 0; id < WORKLOAD_PROFILES_MAX; id++) {
        for (unsigned other = 0; other < WORKLOAD_PROFILES_MAX; other++) {
            if ((gpu->workload_requested >> id & 1) && (gpu->workload_requested >> other & 1)
                && (board->workload_conflicts[id] >> other & 1) && board->workload_priority[other] < board->workload_priority[id])
                held &= ~(1u << id);
        }
    }
    return held;
}

EXPORT nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetProfilesInfo(nvmlDevice_t device, nvmlWorkloadPowerProfileProfilesInfo_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    REQUIRE(info->version == VERSION_WORD(nvmlWorkloadPowerProfileProfilesInfo_t, 1), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(call.gpu->board.workload_profiles, NOT_SUPPORTED);
    const struct board *board = &call.gpu->board;
    memset(info->perfProfile, 0, sizeof info->perfProfile);
    info->perfProfilesMask = mask_of(board->workload_profiles);
    for (unsigned id = 0; id < WORKLOAD_PROFILES_MAX; id++) {
        if (board->workload_profiles >> id & 1)
            info->perfProfile[id] = (nvmlWorkloadPowerProfileInfo_t){
                .version = VERSION_WORD(nvmlWorkloadPowerProfileInfo_t, 1), .profileId = id,
                .priority = board->workload_priority[id], .conflictingMask = mask_of(board->workload_conflicts[id]) };
    }
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(nvmlDevice_t device, nvmlWorkloadPowerProfileCurrentProfiles_t *current)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(current, INVALID_ARGUMENT);
    REQUIRE(current->version == VERSION_WORD(nvmlWorkloadPowerProfileCurrentProfiles_t, 1), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(call.gpu->board.workload_profiles, NOT_SUPPORTED);
    current->perfProfilesMask = mask_of(call.gpu->board.workload_profiles);
    current->requestedProfilesMask = mask_of(call.gpu->workload_requested);
    current->enforcedProfilesMask = mask_of(enforced(call.gpu));
    return SUCCESS;
}

enum { OPERATION_CLEAR, OPERATION_SET, OPERATION_OVERWRITE };

static nvmlReturn_t update(struct call *call, unsigned operation, const nvmlMask255_t *mask)
{
    uint32_t profiles;
    REQUIRE(call->gpu->board.workload_profiles, NOT_SUPPORTED);
    REQUIRE(operation <= OPERATION_OVERWRITE && own_profiles(&call->gpu->board, mask, &profiles), INVALID_ARGUMENT);
    nvmlReturn_t result = call_write(call);
    REQUIRE(result == SUCCESS, result);
    uint32_t *requested = &call->gpu_write->workload_requested;
    *requested = operation == OPERATION_CLEAR ? *requested & ~profiles : operation == OPERATION_SET ? *requested | profiles : profiles;
    return call_commit(call);
}

#define CHANGE(function, operation)                                                                                             \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, nvmlWorkloadPowerProfileRequestedProfiles_t *requested)                   \
    {                                                                                                                           \
        DEVICE_CALL(device, ACCEPT_GPU);                                                                                        \
        REQUIRE(requested, INVALID_ARGUMENT);                                                                                   \
        REQUIRE(requested->version == VERSION_WORD(nvmlWorkloadPowerProfileRequestedProfiles_t, 1), ARGUMENT_VERSION_MISMATCH); \
        return update(&call, operation, &requested->requestedProfilesMask);                                                     \
    }

CHANGE(nvmlDeviceWorkloadPowerProfileSetRequestedProfiles, OPERATION_SET)
CHANGE(nvmlDeviceWorkloadPowerProfileClearRequestedProfiles, OPERATION_CLEAR)

/* The one of these structures that has no version. */
EXPORT nvmlReturn_t nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1(nvmlDevice_t device, nvmlWorkloadPowerProfileUpdateProfiles_t *change)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(change, INVALID_ARGUMENT);
    return update(&call, change->operation, &change->updateProfilesMask);
}
