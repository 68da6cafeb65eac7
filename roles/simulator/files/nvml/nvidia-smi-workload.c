/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * `nvidia-smi power-profiles` of the stand-in: the workload power profiles of each GPU, one list after the other.
 */
#include "nvidia-smi.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const names[] = {
    "Max-P", "Max-Q", "Compute", "Memory Bound", "Network", "Balanced", "LLM Inference", "LLM Training", "RBM", "DCPCIe",
    "HMMA Sparse", "HMMA Dense", "Sync Balanced", "HPC", "MIG",
};

static bool print_mask(const nvmlMask255_t *mask)
{
    bool any = false;
    for (unsigned id = 0; id < sizeof names / sizeof names[0]; id++) {
        if (mask->mask[id / 32] >> id % 32 & 1) {
            printf("%u. %s\n", id, names[id]);
            any = true;
        }
    }
    return any;
}

static void list_profiles(unsigned index, nvmlDevice_t device, void *context)
{
    const struct options *options = context;
    nvmlWorkloadPowerProfileCurrentProfiles_t current = { .version = VERSION_WORD(nvmlWorkloadPowerProfileCurrentProfiles_t, 1) };
    nvmlReturn_t code = NVML("nvmlDeviceWorkloadPowerProfileGetCurrentProfiles",
                             (nvmlDevice_t, nvmlWorkloadPowerProfileCurrentProfiles_t *), device, &current);
    if (code == NOT_SUPPORTED) {
        puts("Workload Power Profiles feature is not supported on this device.");
        exit(exit_code(code));
    }
    if (code != SUCCESS)
        fail(code, "GPU %u: Unable to get Workload Power Profiles information", index);
    if (options->action == ACTION_WORKLOAD_PROFILES)
        print_mask(&current.perfProfilesMask);
    else if (options->action == ACTION_REQUESTED_PROFILES && !print_mask(&current.requestedProfilesMask))
        puts("No profiles are currently requested.");
    else if (options->action == ACTION_ENFORCED_PROFILES && !print_mask(&current.enforcedProfilesMask))
        puts("No profiles are currently engaged.");
}

bool run_workload_action(const struct options *options)
{
    if (options->action != ACTION_WORKLOAD_PROFILES && options->action != ACTION_REQUESTED_PROFILES
        && options->action != ACTION_ENFORCED_PROFILES)
        return false;
    for_each_gpu(options->gpus, list_profiles, (void *)(uintptr_t)options);
    return true;
}
