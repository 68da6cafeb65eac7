/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The capability tree: <proc root>/capabilities/gpu<minor>/mig/{config,monitor,gi<G>/access,gi<G>/ci<C>/access} and, where the
 * description asks for it, the nodes below <dev root>/nvidia-caps.
 */
#include "simulator.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { PATH_BYTES = 2 * PATH_MAX_BYTES, MINOR_CONFIG = 1, MINOR_MONITOR = 2, MINOR_FIRST = 3, MODE_ALL = 0444, MODE_ROOT = 0400 };

/* As in the driver's mig-minors: 135 numbers for each GPU, 9 for each instance: itself and its 8 compute instances. */
unsigned capability_minor_instance(const struct gpu *gpu, int instance)
{
    return MINOR_FIRST + 135 * gpu->board.minor + 9 * (unsigned)instance;
}

unsigned capability_minor_compute(const struct gpu *gpu, int instance, int compute)
{
    return capability_minor_instance(gpu, instance) + 1 + (unsigned)compute;
}

void capability_path(const struct machine *machine, int gpu, int instance, int compute, char *path, size_t size)
{
    int length = snprintf(path, size, "%s/capabilities/gpu%u/mig/gi%d", machine->proc_root, machine->gpus[gpu].board.minor, instance);
    if (length > 0 && (size_t)length < size) {
        if (compute == NO_INSTANCE)
            snprintf(path + length, size - (size_t)length, "/access");
        else
            snprintf(path + length, size - (size_t)length, "/ci%d/access", compute);
    }
}

static bool make_folders(const char *file)
{
    char path[PATH_BYTES];
    copy_text(path, sizeof path, file);
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(path, 0755) != 0 && errno != EEXIST)
            return false;
        *slash = '/';
    }
    return true;
}

/* Written beside its place and renamed, so that nobody reads half a file. */
static void write_access(const char *path, unsigned minor, unsigned mode)
{
    char temporary[PATH_BYTES + 16], text[96];
    if (access(path, F_OK) == 0 || !make_folders(path))
        return;
    int length = snprintf(text, sizeof text, "DeviceFileMinor: %u\nDeviceFileMode: %u\nDeviceFileModify: 1\n", minor, mode);
    snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid());
    int descriptor = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
    if (descriptor < 0)
        return;
    bool written = write(descriptor, text, (size_t)length) == length;
    close(descriptor);
    if (!written || rename(temporary, path) != 0)
        unlink(temporary);
}

static void make_node(const struct machine *machine, unsigned minor, unsigned mode)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%u", machine->dev_root, minor);
    if (access(path, F_OK) == 0 || !make_folders(path))
        return;
    if (mknod(path, S_IFCHR | mode, makedev(machine->caps_major, minor)) != 0 && mknod(path, S_IFREG | mode, 0) != 0)
        return;
    if (chmod(path, mode) != 0)
        unlink(path);
}

static void remove_node(const struct machine *machine, unsigned minor)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%u", machine->dev_root, minor);
    unlink(path);
}

/* Removes <folder>/<prefix><number> with its access file for each number that is not wanted. */
static void remove_others(const char *folder, const char *prefix, const bool *wanted, int count,
                          void (*before)(const struct machine *, const struct gpu *, const char *, int), const struct machine *machine,
                          const struct gpu *gpu)
{
    DIR *directory = opendir(folder);
    if (!directory)
        return;
    size_t length = strlen(prefix);
    for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
        uint64_t number;
        if (strncmp(entry->d_name, prefix, length) != 0 || !parse_unsigned(entry->d_name + length, 1000, &number))
            continue;
        if (number < (uint64_t)count && wanted[number])
            continue;
        char path[PATH_BYTES + 300], access_file[PATH_BYTES + 310];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        snprintf(access_file, sizeof access_file, "%s/access", path);
        if (before)
            before(machine, gpu, path, (int)number);
        unlink(access_file);
        rmdir(path);
    }
    closedir(directory);
}

static void remove_compute_of(const struct machine *machine, const struct gpu *gpu, const char *path, int instance)
{
    bool none[COMPUTE_INSTANCES_MAX] = { false };
    remove_others(path, "ci", none, COMPUTE_INSTANCES_MAX, NULL, machine, gpu);
    if (machine->cap_nodes && instance < INSTANCES_MAX) {
        for (int compute = 0; compute < COMPUTE_INSTANCES_MAX; compute++)
            remove_node(machine, capability_minor_compute(gpu, instance, compute));
        remove_node(machine, capability_minor_instance(gpu, instance));
    }
}

static void sync_instance(const struct machine *machine, int index, int instance)
{
    const struct gpu *gpu = &machine->gpus[index];
    char path[PATH_BYTES];
    bool wanted[COMPUTE_INSTANCES_MAX];
    capability_path(machine, index, instance, NO_INSTANCE, path, sizeof path);
    write_access(path, capability_minor_instance(gpu, instance), MODE_ALL);
    if (machine->cap_nodes)
        make_node(machine, capability_minor_instance(gpu, instance), MODE_ALL);
    for (int compute = 0; compute < COMPUTE_INSTANCES_MAX; compute++) {
        unsigned minor = capability_minor_compute(gpu, instance, compute);
        wanted[compute] = gpu->instances[instance].compute[compute].serial != 0;
        if (wanted[compute]) {
            capability_path(machine, index, instance, compute, path, sizeof path);
            write_access(path, minor, MODE_ALL);
            if (machine->cap_nodes)
                make_node(machine, minor, MODE_ALL);
        } else if (machine->cap_nodes) {
            remove_node(machine, minor);
        }
    }
    capability_path(machine, index, instance, NO_INSTANCE, path, sizeof path);
    *strrchr(path, '/') = '\0';
    remove_others(path, "ci", wanted, COMPUTE_INSTANCES_MAX, NULL, machine, gpu);
}

/* Called with the state locked, so that the tree follows the order of the changes. */
void capabilities_sync(const struct machine *machine)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/capabilities", machine->proc_root);
    if (access(path, F_OK) == 0 ? access(path, W_OK) != 0 : !make_folders(strcat(path, "/")))
        return;
    for (unsigned index = 0; index < machine->gpu_count; index++) {
        const struct gpu *gpu = &machine->gpus[index];
        bool wanted[INSTANCES_MAX];
        if (gpu->board.mig == MIG_NONE)
            continue;
        snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig/config", machine->proc_root, gpu->board.minor);
        write_access(path, MINOR_CONFIG, MODE_ROOT);
        snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig/monitor", machine->proc_root, gpu->board.minor);
        write_access(path, MINOR_MONITOR, MODE_ALL);
        for (int instance = 0; instance < INSTANCES_MAX; instance++) {
            wanted[instance] = gpu->instances[instance].serial != 0;
            if (wanted[instance])
                sync_instance(machine, (int)index, instance);
        }
        snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig", machine->proc_root, gpu->board.minor);
        remove_others(path, "gi", wanted, INSTANCES_MAX, remove_compute_of, machine, gpu);
    }
}
