/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * `nvidia-smi mig`: profiles, placements and instances, listed, made and destroyed by hand.
 */
#include "nvidia-smi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void with_profile(unsigned index, nvmlDevice_t device, const nvmlGpuInstanceProfileInfo_v2_t *profile, void *context);

static void for_each_profile(unsigned index, nvmlDevice_t device, with_profile *act, void *context)
{
    for (unsigned number = 0; number < PROFILE_ENUMS; number++) {
        nvmlGpuInstanceProfileInfo_v2_t profile = {.version = VERSION_WORD(nvmlGpuInstanceProfileInfo_v2_t, 2)};
        if (NVML("nvmlDeviceGetGpuInstanceProfileInfoV", (nvmlDevice_t, unsigned, nvmlGpuInstanceProfileInfo_v2_t *), device, number, &profile) == SUCCESS)
            act(index, device, &profile, context);
    }
}

static const char *short_name(const char *name) { return strncmp(name, "MIG ", 4) ? name : name + 4; }

static unsigned instances_of(nvmlDevice_t device, unsigned profile, nvmlGpuInstance_t *instances)
{
    unsigned count = MAXIMUM_INSTANCES;
    nvmlReturn_t code = NVML("nvmlDeviceGetGpuInstances", (nvmlDevice_t, unsigned, nvmlGpuInstance_t *, unsigned *), device, profile, instances, &count);
    return code == SUCCESS ? count : 0;
}

static unsigned compute_instances_of(nvmlGpuInstance_t instance, nvmlComputeInstance_t *found)
{
    unsigned total = 0;
    for (unsigned number = 0; number < COMPUTE_PROFILE_ENUMS; number++) {
        nvmlComputeInstanceProfileInfo_t profile;
        unsigned count = MAXIMUM_INSTANCES - total;
        if (NVML("nvmlGpuInstanceGetComputeInstanceProfileInfo", (nvmlGpuInstance_t, unsigned, unsigned, nvmlComputeInstanceProfileInfo_t *), instance, number, 0u, &profile) == SUCCESS &&
            NVML("nvmlGpuInstanceGetComputeInstances", (nvmlGpuInstance_t, unsigned, nvmlComputeInstance_t *, unsigned *), instance, profile.id, found + total, &count) == SUCCESS)
            total += count;
    }
    return total;
}

static void print_profile(unsigned index, nvmlDevice_t device, const nvmlGpuInstanceProfileInfo_v2_t *profile, void *context)
{
    unsigned free = 0;
    (void)context;
    NVML("nvmlDeviceGetGpuInstanceRemainingCapacity", (nvmlDevice_t, unsigned, unsigned *), device, profile->id, &free);
    printf("| %3u  MIG %-16s %3u  %2u/%-2u  %8.2f  %-3s  %4u %4u %4u  %4u %4u %4u |\n", index, short_name(profile->name), profile->id, free,
           profile->instanceCount, (double)profile->memorySizeMB / 1024, profile->isP2pSupported ? "Yes" : "No", profile->multiprocessorCount,
           profile->decoderCount, profile->encoderCount, profile->copyEngineCount, profile->jpegCount, profile->ofaCount);
}

static void print_placements(unsigned index, nvmlDevice_t device, const nvmlGpuInstanceProfileInfo_v2_t *profile, void *context)
{
    nvmlGpuInstancePlacement_t places[MAXIMUM_INSTANCES];
    unsigned count = MAXIMUM_INSTANCES;
    (void)context;
    nvmlReturn_t code = NVML("nvmlDeviceGetGpuInstancePossiblePlacements_v2", (nvmlDevice_t, unsigned, nvmlGpuInstancePlacement_t *, unsigned *), device, profile->id, places, &count);
    if (code != SUCCESS || !count)
        return;
    printf("GPU %2u Profile ID %2u Placement%s: {", index, profile->id, count > 1 ? "s" : " ");
    for (unsigned i = 0; i < count; i++)
        printf("%s%u", i ? "," : "", places[i].start);
    printf("}:%u\n", places[0].size);
}

static void print_instances(unsigned index, nvmlDevice_t device, const nvmlGpuInstanceProfileInfo_v2_t *profile, void *context)
{
    nvmlGpuInstance_t instances[MAXIMUM_INSTANCES];
    unsigned count = instances_of(device, profile->id, instances);
    for (unsigned i = 0; i < count; i++) {
        nvmlGpuInstanceInfo_t info;
        if (NVML("nvmlGpuInstanceGetInfo", (nvmlGpuInstance_t, nvmlGpuInstanceInfo_t *), instances[i], &info) != SUCCESS)
            continue;
        if (!context) {
            printf("| %3u  MIG %-16s %7u %9u   %6u:%-4u |\n", index, short_name(profile->name), profile->id, info.id, info.placement.start, info.placement.size);
            continue;
        }
        nvmlComputeInstance_t parts[MAXIMUM_INSTANCES];
        unsigned number = compute_instances_of(instances[i], parts);
        for (unsigned j = 0; j < number; j++) {
            nvmlComputeInstanceInfo_t part;
            if (NVML("nvmlComputeInstanceGetInfo_v2", (nvmlComputeInstance_t, nvmlComputeInstanceInfo_t *), parts[j], &part) == SUCCESS)
                printf("| %3u %6u  MIG %-16s %7u %9u   %6u:%-4u |\n", index, info.id, short_name(profile->name), part.profileId, part.id, part.placement.start, part.placement.size);
        }
    }
}

static void destroy_compute(nvmlGpuInstance_t instance)
{
    nvmlComputeInstance_t parts[MAXIMUM_INSTANCES];
    unsigned count = compute_instances_of(instance, parts);
    for (unsigned i = 0; i < count; i++) {
        nvmlReturn_t code = NVML("nvmlComputeInstanceDestroy", (nvmlComputeInstance_t), parts[i]);
        if (code != SUCCESS)
            fail(code, "Unable to destroy a compute instance");
        puts("Successfully destroyed compute instance");
    }
}

static void destroy_instances(unsigned index, nvmlDevice_t device, const nvmlGpuInstanceProfileInfo_v2_t *profile, void *context)
{
    const struct options *options = context;
    nvmlGpuInstance_t instances[MAXIMUM_INSTANCES];
    unsigned count = instances_of(device, profile->id, instances);
    for (unsigned i = 0; i < count; i++) {
        nvmlGpuInstanceInfo_t info;
        if (NVML("nvmlGpuInstanceGetInfo", (nvmlGpuInstance_t, nvmlGpuInstanceInfo_t *), instances[i], &info) != SUCCESS)
            continue;
        if (options->instance && (unsigned)strtoul(options->instance, NULL, 10) != info.id)
            continue;
        if (options->action == ACTION_MIG_DESTROY_COMPUTE) {
            destroy_compute(instances[i]);
            continue;
        }
        nvmlReturn_t code = NVML("nvmlGpuInstanceDestroy", (nvmlGpuInstance_t), instances[i]);
        if (code != SUCCESS)
            fail(code, "Unable to destroy GPU instance ID %u from GPU %u", info.id, index);
        printf("Successfully destroyed GPU instance ID %2u from GPU %2u\n", info.id, index);
    }
}

struct search {
    const char *name;
    unsigned id;
    nvmlGpuInstanceProfileInfo_v2_t found;
    bool any;
};

static void match(unsigned index, nvmlDevice_t device, const nvmlGpuInstanceProfileInfo_v2_t *profile, void *context)
{
    struct search *search = context;
    (void)index, (void)device;
    if (search->name ? !strcmp(search->name, short_name(profile->name)) : search->id == profile->id)
        search->found = *profile, search->any = true;
}

static void fill_with_compute(nvmlGpuInstance_t instance, unsigned multiprocessors)
{
    for (unsigned number = 0; number < COMPUTE_PROFILE_ENUMS; number++) {
        nvmlComputeInstanceProfileInfo_t profile;
        nvmlComputeInstance_t made;
        if (NVML("nvmlGpuInstanceGetComputeInstanceProfileInfo", (nvmlGpuInstance_t, unsigned, unsigned, nvmlComputeInstanceProfileInfo_t *), instance, number, 0u, &profile) != SUCCESS ||
            profile.multiprocessorCount != multiprocessors)
            continue;
        nvmlReturn_t code = NVML("nvmlGpuInstanceCreateComputeInstance", (nvmlGpuInstance_t, unsigned, nvmlComputeInstance_t *), instance, profile.id, &made);
        if (code != SUCCESS)
            fail(code, "Failed to create the compute instance");
        puts("Successfully created compute instance");
        return;
    }
    fail(NOT_SUPPORTED, "No compute instance profile fills the GPU instance");
}

static void create(unsigned index, nvmlDevice_t device, void *context)
{
    const struct options *options = context;
    char list[512];
    snprintf(list, sizeof list, "%s", options->value);
    for (char *save, *word = strtok_r(list, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        char *colon = strchr(word, ':'), *end;
        if (colon)
            *colon++ = '\0';
        struct search search = {.id = (unsigned)strtoul(word, &end, 10)};
        if (*end)
            search.name = word;
        for_each_profile(index, device, match, &search);
        if (!search.any)
            fail(NOT_FOUND, "GPU %u has no GPU instance profile %s", index, word);
        nvmlGpuInstance_t made;
        nvmlGpuInstanceInfo_t info;
        nvmlReturn_t code;
        if (colon) {
            nvmlGpuInstancePlacement_t places[MAXIMUM_INSTANCES];
            unsigned count = MAXIMUM_INSTANCES;
            code = NVML("nvmlDeviceGetGpuInstancePossiblePlacements_v2", (nvmlDevice_t, unsigned, nvmlGpuInstancePlacement_t *, unsigned *), device, search.found.id, places, &count);
            nvmlGpuInstancePlacement_t place = {(unsigned)strtoul(colon, NULL, 10), code == SUCCESS && count ? places[0].size : 0};
            code = NVML("nvmlDeviceCreateGpuInstanceWithPlacement", (nvmlDevice_t, unsigned, const nvmlGpuInstancePlacement_t *, nvmlGpuInstance_t *), device, search.found.id, &place, &made);
        } else
            code = NVML("nvmlDeviceCreateGpuInstance", (nvmlDevice_t, unsigned, nvmlGpuInstance_t *), device, search.found.id, &made);
        if (code != SUCCESS)
            fail(code, "Unable to create a GPU instance on GPU %u using profile %s", index, word);
        NVML("nvmlGpuInstanceGetInfo", (nvmlGpuInstance_t, nvmlGpuInstanceInfo_t *), made, &info);
        printf("Successfully created GPU instance ID %2u on GPU %2u using profile MIG %s (ID %2u)\n", info.id, index, short_name(search.found.name), search.found.id);
        if (options->with_compute_instance)
            fill_with_compute(made, search.found.multiprocessorCount);
    }
}

static void list(unsigned index, nvmlDevice_t device, void *context)
{
    const struct options *options = context;
    switch (options->action) {
    case ACTION_MIG_PROFILES: for_each_profile(index, device, print_profile, NULL); break;
    case ACTION_MIG_PLACEMENTS: for_each_profile(index, device, print_placements, NULL); break;
    case ACTION_MIG_INSTANCES: for_each_profile(index, device, print_instances, NULL); break;
    case ACTION_MIG_COMPUTE_INSTANCES: for_each_profile(index, device, print_instances, (void *)(uintptr_t)options); break;
    default: for_each_profile(index, device, destroy_instances, (void *)(uintptr_t)options); break;
    }
}

bool run_mig_action(const struct options *options)
{
    void *context = (void *)(uintptr_t)options;
    switch (options->action) {
    case ACTION_MIG_PROFILES:
        puts("| GPU  Name                  ID  Free/Total  Memory GiB  P2P    SM  DEC  ENC    CE  JPEG OFA |");
        break;
    case ACTION_MIG_INSTANCES:
        puts("| GPU  Name                 Profile  Instance   Placement  |\n|                              ID       ID     Start:Size |");
        break;
    case ACTION_MIG_COMPUTE_INSTANCES:
        puts("| GPU  GPU instance  Name    Profile  Compute instance  Placement Start:Size |");
        break;
    case ACTION_MIG_CREATE:
        for_each_gpu(options->gpus, create, context);
        return true;
    case ACTION_MIG_PLACEMENTS:
    case ACTION_MIG_DESTROY_COMPUTE:
    case ACTION_MIG_DESTROY:
        break;
    default:
        return false;
    }
    for_each_gpu(options->gpus, list, context);
    return true;
}
