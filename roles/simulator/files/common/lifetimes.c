/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Processes that use something here: who they are, and whether they still are.
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

/* A process that existed at its registration counts until it ends. From another PID namespace, its end is not visible. */
bool lifetime_lasts(const struct lifetime *life)
{
    if (!life->pid)
        return false;
    if (!life->started || life->pid_namespace != own_pid_namespace())
        return true;
    if (life->holder && start_time(life->holder) != life->holder_started)
        return false;
    return start_time(life->pid) == life->started;
}

