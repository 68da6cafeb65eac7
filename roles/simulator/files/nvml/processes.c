/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Processes that are registered as users of a GPU or of an instance.
 */
#include "simulator.h"

bool process_alive(const struct process *process) { return lifetime_lasts(&process->life); }

bool gpu_in_use(const struct gpu *gpu)
{
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        if (process_alive(&gpu->processes[index]))
            return true;
    }
    return false;
}

bool instance_in_use(const struct gpu *gpu, int instance, int compute)
{
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        const struct process *process = &gpu->processes[index];
        if (process->gpu_instance == (uint32_t)instance && (compute == NO_INSTANCE || process->compute_instance == (uint32_t)compute)
            && process_alive(process))
            return true;
    }
    return false;
}

uint64_t used_memory(const struct gpu *gpu, int instance)
{
    uint64_t used = instance == NO_INSTANCE ? gpu->board.memory_used : 0;
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        const struct process *process = &gpu->processes[index];
        if ((instance == NO_INSTANCE || process->gpu_instance == (uint32_t)instance) && process_alive(process))
            used += process->memory;
    }
    return used;
}
