/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What this process may see. The device nodes decide: a node that may not be opened (EPERM, EACCES) or is not there (ENOENT)
 * belongs to a device that does not exist for the process; success and ENXIO (a node without a kernel driver behind it, where the
 * device cgroup allows it) mean that it does.
 */
#include "simulator.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int order[GPUS_MAX];         /* NVML index of this process -> place in the machine */
static unsigned order_count;

static bool capability_node_openable(const struct machine *machine, unsigned minor)
{
    char path[PATH_MAX_BYTES + 64];
    snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%u", machine->dev_root, minor);
    return openable(path, O_RDONLY);
}

/* Return whether the process can list instances: an administrator, or a process with the node of mig/config (1) or mig/monitor (2). */
bool monitor(const struct machine *machine)
{
    return administrator(machine) || capability_node_openable(machine, 1) || capability_node_openable(machine, 2);
}

bool control_node_openable(const struct machine *machine)
{
    char path[PATH_MAX_BYTES + 64];
    snprintf(path, sizeof path, "%s/nvidiactl", machine->dev_root);
    return openable(path, O_RDWR);
}

void visibility_scan(const struct machine *machine)
{
    order_count = 0;
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        char path[PATH_MAX_BYTES + 64];
        snprintf(path, sizeof path, "%s/nvidia%u", machine->dev_root, machine->gpus[gpu].minor);
        if (!machine->gpus[gpu].unplugged && openable(path, O_RDWR) && held_by_driver(machine, &machine->gpus[gpu].board.address, "0x10de", "nvidia"))
            order[order_count++] = (int)gpu;
    }
}

static bool capabilities_known(const struct machine *machine, int gpu)
{
    char path[PATH_MAX_BYTES + 64];
    snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig", machine->proc_root, machine->gpus[gpu].minor);
    return access(path, F_OK) == 0;
}

/* On the host, root opens an instance through its access file. Other users need the two capability nodes. */
bool mig_visible(const struct machine *machine, int gpu, int instance, int compute)
{
    if (administrator(machine)) {
        char path[2 * PATH_MAX_BYTES];
        capability_path(machine, gpu, instance, compute, path, sizeof path);
        if (access(path, F_OK) == 0)
            return true;
    }
    if (!capability_node_openable(machine, capability_minor_instance(&machine->gpus[gpu], instance))
        || !capability_node_openable(machine, capability_minor_compute(&machine->gpus[gpu], instance, compute)))
        return false;
    client_of_instance(machine, gpu, instance, compute);
    return true;
}

/* A process that sees all instances finds gaps in the numbers after instances were destroyed. A process that sees some of them, as in a
 * container, counts these from 0. */
unsigned mig_index_seen(const struct machine *machine, int gpu, int instance, int compute)
{
    const unsigned own = machine->gpus[gpu].instances[instance].compute[compute].mig_index;
    unsigned before = 0;
    if (administrator(machine) && capabilities_known(machine, gpu))
        return own;
    for (int i = 0; i < INSTANCES_MAX; i++) {
        const struct gpu_instance *owner = &machine->gpus[gpu].instances[i];
        for (int c = 0; owner->serial && c < COMPUTE_INSTANCES_MAX; c++)
            before += owner->compute[c].serial && owner->compute[c].mig_index < own && mig_visible(machine, gpu, i, c);
    }
    return before;
}

unsigned visible_count(void) { return order_count; }

int visible_gpu(unsigned index) { return index < order_count ? order[index] : NO_INSTANCE; }

int visible_index(int gpu)
{
    for (unsigned index = 0; index < order_count; index++) {
        if (order[index] == gpu)
            return (int)index;
    }
    return NO_INSTANCE;
}
