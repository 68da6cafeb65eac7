/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What this process may see. The device nodes decide: a node that may not be opened (EPERM, EACCES) or is not there (ENOENT)
 * belongs to a device that does not exist for the process; success and ENXIO (a node without a kernel driver behind it, where the
 * device cgroup allows it) mean that it does.
 */
#include "simulator.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int order[GPUS_MAX];         /* NVML index of this process -> place in the machine */
static unsigned order_count;

static bool openable(const char *path, int flags)
{
    int descriptor = open(path, flags | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return errno == ENXIO || errno == ENODEV;
    close(descriptor);
    return true;
}

static bool has_administration_capability(void)
{
    struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
    struct __user_cap_data_struct data[2] = { { 0 } };
    return syscall(SYS_capget, &header, data) == 0 && (data[CAP_SYS_ADMIN / 32].effective & 1u << CAP_SYS_ADMIN % 32);
}

bool administrator(const struct machine *machine)
{
    return machine->administrator_root ? geteuid() == 0 : has_administration_capability();
}

static bool capability_node_openable(const struct machine *machine, unsigned minor)
{
    char path[PATH_MAX_BYTES + 64];
    snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%u", machine->dev_root, minor);
    return openable(path, O_RDONLY);
}

/* May list instances: an administrator, or who was given the node of mig/config (1) or mig/monitor (2). */
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

/* A GPU that sysfs knows and that another driver, or none, holds is not NVML's. */
static bool held_by_nvidia(const struct machine *machine, const struct gpu *gpu)
{
    char address[16], path[PATH_MAX_BYTES + 96], text[PATH_MAX_BYTES] = "";
    format_address_sysfs(&gpu->board.address, address);
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/vendor", machine->sys_root, address);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return true;
    ssize_t length = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    if (length < 6 || strncmp(text, "0x10de", 6) != 0)
        return true;
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/driver", machine->sys_root, address);
    length = readlink(path, text, sizeof text - 1);
    if (length < 0)
        return false;
    text[length] = '\0';
    return strcmp(basename(text), "nvidia") == 0;
}

void visibility_scan(const struct machine *machine)
{
    order_count = 0;
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        char path[PATH_MAX_BYTES + 64];
        snprintf(path, sizeof path, "%s/nvidia%u", machine->dev_root, machine->gpus[gpu].minor);
        if (!machine->gpus[gpu].unplugged && openable(path, O_RDWR) && held_by_nvidia(machine, &machine->gpus[gpu]))
            order[order_count++] = (int)gpu;
    }
}

static bool capabilities_known(const struct machine *machine, int gpu)
{
    char path[PATH_MAX_BYTES + 64];
    snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig", machine->proc_root, machine->gpus[gpu].minor);
    return access(path, F_OK) == 0;
}

/* On the host root reaches an instance through its access file; anybody else needs the two capability nodes. */
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

/* Whoever sees all of them finds holes where instances are gone; who sees some, as in a container, counts these from 0. */
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
