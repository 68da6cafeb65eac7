/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Processes that are registered as users of a GPU or of an instance.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* Start time in clock ticks; 0 when there is no such process. */
static uint64_t start_time(uint32_t pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    char *rest = strrchr(text, ')');       /* the name may hold blanks and parentheses */
    unsigned long long started = 0;
    if (!rest || sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &started) != 1)
        return 0;
    return started;
}

static uint64_t own_pid_namespace(void)
{
    struct stat status;
    return stat("/proc/self/ns/pid", &status) == 0 ? (uint64_t)status.st_ino : 0;
}

void process_identity(uint32_t pid, uint64_t *started, uint64_t *pid_namespace)
{
    *started = start_time(pid);
    *pid_namespace = own_pid_namespace();
}

/* One that was really there when it was registered is gone when it ended; another PID namespace cannot tell. */
bool process_alive(const struct process *process)
{
    if (!process->pid)
        return false;
    if (!process->started || process->pid_namespace != own_pid_namespace())
        return true;
    if (process->holder && start_time(process->holder) != process->holder_started)
        return false;
    return start_time(process->pid) == process->started;
}

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
