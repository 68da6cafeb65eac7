/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What power, resets and a change of the MIG mode do to a GPU.
 */
#include "simulator.h"

#include <string.h>

/* The driver has a table of minors, in which a GPU has an entry from its probe to its removal. */
bool gpu_holds_minor(const struct gpu *gpu, unsigned minor) { return !gpu->unbound && !gpu->unplugged && gpu->minor == minor; }

/* The lowest number that no GPU has but perhaps this one, which gives its own back first. */
static unsigned free_minor(const struct machine *machine, const struct gpu *except)
{
    for (unsigned minor = 0; minor < GPUS_MAX; minor++) {
        bool taken = false;
        for (unsigned index = 0; index < machine->gpu_count; index++)
            taken |= &machine->gpus[index] != except && gpu_holds_minor(&machine->gpus[index], minor);
        if (!taken)
            return minor;
    }
    return GPUS_MAX;
}

/* What a probe by the driver does: the lowest free minor, whichever the GPU had before. */
void gpu_take_minor(struct machine *machine, struct gpu *gpu)
{
    gpu->unbound = false;
    gpu->minor = gpu->former_minor = free_minor(machine, gpu);
}

/* The mode takes effect: the GPU has no instances. Its own handle stays valid: NVIDIA's programs keep it over the change. */
void gpu_apply_mig_mode(struct machine *machine, struct gpu *gpu, unsigned mode)
{
    gpu->mig_current = gpu->mig_pending = mode;
    gpu->compute_mode = 0;
    memset(gpu->instances, 0, sizeof gpu->instances);
    unsigned minor = machine->mode_change_moves_minor ? free_minor(machine, NULL) : GPUS_MAX;
    if (minor < GPUS_MAX) {         /* the new number is chosen before the old one is free */
        gpu->former_minor = gpu->minor;
        gpu->minor = minor;
    }
    event_add(machine, (int)(gpu - machine->gpus), 0x100, mode, NOT_TIED, NOT_TIED);
}

/* What the driver has of a GPU only as long as that is initialized. */
bool gpu_has_settings(const struct gpu *gpu)
{
    return gpu->power_limit != gpu->board.power_default || gpu->compute_mode || gpu->accounting || gpu->time_slice || gpu->workload_requested
           || gpu->locked_maximum || gpu->memory_locked_maximum || gpu->application_memory || gpu->application_graphics;
}

void gpu_deinitialize(struct gpu *gpu)
{
    gpu->power_limit = gpu->board.power_default;
    gpu->compute_mode = gpu->accounting = gpu->time_slice = 0;
    gpu->workload_requested = 0;
    gpu->locked_minimum = gpu->locked_maximum = gpu->memory_locked_minimum = gpu->memory_locked_maximum = 0;
    gpu->application_memory = gpu->application_graphics = 0;
    memset(gpu->ecc_volatile, 0, sizeof gpu->ecc_volatile);
}

/* What both a reset and a power cycle repair or make effective. */
static void settle(struct gpu *gpu)
{
    gpu->ecc_current = gpu->ecc_pending;
    memset(gpu->ecc_volatile, 0, sizeof gpu->ecc_volatile);
    if (gpu->remap_pending) {
        gpu->remap_pending = false;
        gpu->remapped_uncorrectable++;
    }
    gpu->recovery_action = 0;
    gpu->thermal = false;
    gpu->slowdown = 0;
    gpu->fabric_fault = FABRIC_WELL;
    memset(gpu->links_down, 0, sizeof gpu->links_down);
    gpu->locked_minimum = gpu->locked_maximum = gpu->memory_locked_minimum = gpu->memory_locked_maximum = 0;
    gpu->application_memory = gpu->application_graphics = 0;
}

void gpu_reset(struct machine *machine, struct gpu *gpu)
{
    settle(gpu);
    if (gpu->mig_pending != gpu->mig_current)
        gpu_apply_mig_mode(machine, gpu, gpu->mig_pending);
    else
        memset(gpu->instances, 0, sizeof gpu->instances);
    gpu->epoch++;                   /* a reset ends all handles */
}

/* first: as it comes from the factory. */
void gpu_power_on(struct gpu *gpu, bool first)
{
    const struct board *board = &gpu->board;
    if (first) {
        gpu->mig_pending = board->mig_mode;
        gpu->ecc_pending = board->ecc == 1;
    } else if (board->mig == MIG_IMMEDIATE) {
        gpu->mig_pending = 0;
    }
    gpu->mig_current = gpu->mig_pending;
    settle(gpu);
    memset(gpu->instances, 0, sizeof gpu->instances);
    memset(gpu->processes, 0, sizeof gpu->processes);
    gpu->epoch++;
    gpu->former_minor = first ? board->minor : gpu->minor;
    gpu->minor = board->minor;
    gpu->lost = gpu->unplugged;
    gpu->compute_mode = gpu->accounting = gpu->time_slice = 0;
    gpu->persistence = board->persistence;
    gpu->power_limit = board->power_default;
    gpu->workload_requested = 0;
    gpu->attached_at = now_microseconds();
}
