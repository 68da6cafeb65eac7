/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The rules of partitioning: overlap in memory slices, instances for each profile, the budget of media engines, the choice of
 * a placement, and the numbers and names that follow from one. Nothing here reads or writes anything but its arguments.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static bool overlap(unsigned start, unsigned size, unsigned other_start, unsigned other_size)
{
    return start < other_start + other_size && other_start < start + size;
}

const struct profile *profile_by_id(const struct board *board, unsigned id, unsigned *enumeration)
{
    for (unsigned index = 0; index < PROFILES_MAX; index++) {
        if (board->profiles[index].present && board->profiles[index].id == id) {
            *enumeration = index;
            return &board->profiles[index];
        }
    }
    return NULL;
}

const struct compute_profile *compute_profile_by_id(const struct profile *profile, unsigned id, unsigned *enumeration)
{
    for (unsigned index = 0; index < COMPUTE_PROFILES_MAX; index++) {
        if (profile->compute[index].present && profile->compute[index].id == id) {
            *enumeration = index;
            return &profile->compute[index];
        }
    }
    return NULL;
}

bool placement_listed(const struct placements *placements, unsigned start, unsigned size)
{
    for (unsigned index = 0; size == placements->size && index < placements->count; index++) {
        if (placements->start[index] == start)
            return true;
    }
    return false;
}

bool placement_free(const struct gpu *gpu, unsigned start, unsigned size)
{
    for (unsigned id = 0; id < INSTANCES_MAX; id++) {
        const struct gpu_instance *instance = &gpu->instances[id];
        if (instance->serial && overlap(start, size, instance->start, instance->size))
            return false;
    }
    return true;
}

/* How often the engines that are left suffice for the profile. */
static unsigned engines_left(const struct gpu *gpu, const struct profile *profile)
{
    unsigned times = INSTANCES_MAX;
    for (unsigned engine = ENGINE_DECODER; engine < ENGINES; engine++) {
        unsigned used = 0;
        for (unsigned id = 0; id < INSTANCES_MAX; id++) {
            if (gpu->instances[id].serial)
                used += gpu->board.profiles[gpu->instances[id].profile].engines[engine];
        }
        unsigned left = gpu->board.engines[engine] > used ? gpu->board.engines[engine] - used : 0;
        if (profile->engines[engine] && left / profile->engines[engine] < times)
            times = left / profile->engines[engine];
    }
    return times;
}

bool engines_free(const struct gpu *gpu, const struct profile *profile) { return engines_left(gpu, profile) > 0; }

unsigned instances_of_profile(const struct gpu *gpu, unsigned profile)
{
    unsigned count = 0;
    for (unsigned id = 0; id < INSTANCES_MAX; id++)
        count += gpu->instances[id].serial && gpu->instances[id].profile == profile;
    return count;
}

bool any_instance(const struct gpu *gpu)
{
    for (unsigned id = 0; id < INSTANCES_MAX; id++) {
        if (gpu->instances[id].serial)
            return true;
    }
    return false;
}

bool any_compute(const struct gpu_instance *instance)
{
    for (unsigned id = 0; id < COMPUTE_INSTANCES_MAX; id++) {
        if (instance->compute[id].serial)
            return true;
    }
    return false;
}

/* Placements of one profile are of one size, so taking the free ones by rising start fits the most. */
unsigned remaining_instances(const struct gpu *gpu, const struct profile *profile, unsigned enumeration)
{
    unsigned fitting = 0, next = 0, present = instances_of_profile(gpu, enumeration);
    for (unsigned start = 0; start < gpu->board.memory_slices; start++) {
        if (start >= next && placement_listed(&profile->placements, start, profile->placements.size)
            && placement_free(gpu, start, profile->placements.size)) {
            fitting++;
            next = start + profile->placements.size;
        }
    }
    unsigned maximum = profile->maximum > present ? profile->maximum - present : 0, engines = engines_left(gpu, profile);
    fitting = fitting < maximum ? fitting : maximum;
    return fitting < engines ? fitting : engines;
}

/* How many placements of all profiles, now free, would no longer be. */
static unsigned removed_placements(const struct gpu *gpu, unsigned start, unsigned size)
{
    unsigned removed = 0;
    for (unsigned index = 0; index < PROFILES_MAX; index++) {
        const struct profile *profile = &gpu->board.profiles[index];
        for (unsigned place = 0; profile->present && place < profile->placements.count; place++) {
            unsigned other = profile->placements.start[place];
            removed += placement_free(gpu, other, profile->placements.size) && overlap(start, size, other, profile->placements.size);
        }
    }
    return removed;
}

nvmlReturn_t check_placement(const struct gpu *gpu, const struct profile *profile, unsigned enumeration, unsigned start, unsigned size)
{
    if (!placement_listed(&profile->placements, start, size))
        return INVALID_ARGUMENT;
    if (!placement_free(gpu, start, size) || instances_of_profile(gpu, enumeration) >= profile->maximum || !engines_free(gpu, profile))
        return INSUFFICIENT_RESOURCES;
    return SUCCESS;
}

nvmlReturn_t choose_placement(const struct gpu *gpu, const struct profile *profile, unsigned enumeration, unsigned *start)
{
    unsigned fewest = ~0u;
    for (unsigned index = 0; index < profile->placements.count; index++) {
        unsigned candidate = profile->placements.start[index];
        if (check_placement(gpu, profile, enumeration, candidate, profile->placements.size) != SUCCESS)
            continue;
        unsigned removed = removed_placements(gpu, candidate, profile->placements.size);
        if (removed < fewest || (removed == fewest && candidate < *start)) {
            fewest = removed;
            *start = candidate;
        }
    }
    return fewest == ~0u ? INSUFFICIENT_RESOURCES : SUCCESS;
}

/* Ids by size class: the whole board 0, halves 1–2, quarters 3–6, eighths 7–14. */
int instance_id(const struct board *board, unsigned start, unsigned size)
{
    unsigned parts = board->memory_slices / size, index = start / size;
    if (board->mig_reversed)
        index = (index + parts / 2) % parts;
    return (int)(parts - 1 + index);
}

bool compute_placement_free(const struct gpu_instance *instance, unsigned start, unsigned size)
{
    for (unsigned id = 0; id < COMPUTE_INSTANCES_MAX; id++) {
        const struct compute_instance *compute = &instance->compute[id];
        if (compute->serial && overlap(start, size, compute->start, compute->size))
            return false;
    }
    return true;
}

unsigned remaining_compute(const struct gpu_instance *instance, const struct compute_profile *profile, unsigned enumeration)
{
    unsigned fitting = 0, next = 0, present = 0;
    for (unsigned start = 0; start < 64; start++) {
        if (start >= next && placement_listed(&profile->placements, start, profile->placements.size)
            && compute_placement_free(instance, start, profile->placements.size)) {
            fitting++;
            next = start + profile->placements.size;
        }
    }
    for (unsigned id = 0; id < COMPUTE_INSTANCES_MAX; id++)
        present += instance->compute[id].serial && instance->compute[id].profile == enumeration;
    unsigned maximum = profile->maximum > present ? profile->maximum - present : 0;
    return fitting < maximum ? fitting : maximum;
}

/* The lowest index that no MIG device of the GPU has: destroying one leaves a hole until the next is made. */
unsigned free_mig_index(const struct gpu *gpu)
{
    bool taken[MIG_INDEXES_MAX] = { false };
    for (unsigned id = 0; id < INSTANCES_MAX; id++) {
        for (unsigned compute = 0; gpu->instances[id].serial && compute < COMPUTE_INSTANCES_MAX; compute++) {
            if (gpu->instances[id].compute[compute].serial)
                taken[gpu->instances[id].compute[compute].mig_index % MIG_INDEXES_MAX] = true;
        }
    }
    unsigned index = 0;
    while (index + 1 < MIG_INDEXES_MAX && taken[index])
        index++;
    return index;
}

void mig_device_name(const struct gpu *gpu, int instance, int compute, char *name, size_t size)
{
    const struct gpu_instance *owner = &gpu->instances[instance];
    snprintf(name, size, "%s MIG %s", gpu->board.name,
             gpu->board.profiles[owner->profile].compute[owner->compute[compute].profile].name);
}
