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
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define ALL_GPUS UINT64_MAX
_Static_assert(GPUS_MAX <= 64, "a bit for each GPU");

enum { PATH_BYTES = 2 * PATH_MAX_BYTES, MINOR_CONFIG = 1, MINOR_MONITOR = 2, MINOR_FIRST = 3, MODE_ALL = 0444, MODE_ROOT = 0400 };

/* As in the driver's mig-minors: 135 numbers for each GPU, 9 for each instance: itself and its 8 compute instances. */
unsigned capability_minor_instance(const struct gpu *gpu, int instance)
{
    return MINOR_FIRST + 135 * gpu->minor + 9 * (unsigned)instance;
}

unsigned capability_minor_compute(const struct gpu *gpu, int instance, int compute)
{
    return capability_minor_instance(gpu, instance) + 1 + (unsigned)compute;
}

void capability_path(const struct machine *machine, int gpu, int instance, int compute, char *path, size_t size)
{
    int length = snprintf(path, size, "%s/capabilities/gpu%u/mig/gi%d", machine->proc_root, machine->gpus[gpu].minor, instance);
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

/* Written under a temporary name and renamed, so that no process reads an incomplete file. */
static void write_access(const char *path, unsigned minor, unsigned mode)
{
    char temporary[PATH_BYTES + 16], text[96];
    if (access(path, F_OK) == 0)
        return;
    int length = snprintf(text, sizeof text, "DeviceFileMinor: %u\nDeviceFileMode: %u\nDeviceFileModify: 1\n", minor, mode);
    snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid());
    int descriptor = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
    if (descriptor < 0 && errno == ENOENT && make_folders(path))
        descriptor = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
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
    if (make_folders(path))
        make_device_node(path, machine->caps_major, minor, mode);
}

static void remove_node(const struct machine *machine, unsigned minor)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%u", machine->dev_root, minor);
    unlink(path);
}

/* Remove the access file, the temporary files of killed writers, and the directory. */
static void remove_folder(const char *path)
{
    char file[PATH_BYTES + 300];
    DIR *directory = opendir(path);
    if (!directory)
        return;
    for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
        if (strncmp(entry->d_name, "access", strlen("access")) == 0
            && snprintf(file, sizeof file, "%s/%s", path, entry->d_name) < (int)sizeof file)
            unlink(file);
    }
    closedir(directory);
    rmdir(path);
}

/* Remove the directories <prefix><number> whose numbers are not in ``wanted``, and first the compute instances in them. */
static void remove_others(const char *folder, const char *prefix, const bool *wanted, unsigned count)
{
    static const bool none[COMPUTE_INSTANCES_MAX];
    DIR *directory = opendir(folder);
    if (!directory)
        return;
    size_t length = strlen(prefix);
    for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
        char path[PATH_BYTES];
        uint64_t number;
        if (strncmp(entry->d_name, prefix, length) != 0 || !parse_unsigned(entry->d_name + length, 1000, &number)
            || (number < count && wanted[number])
            || snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) >= (int)sizeof path)
            continue;
        if (strcmp(prefix, "ci") != 0)
            remove_others(path, "ci", none, COMPUTE_INSTANCES_MAX);
        remove_folder(path);
    }
    closedir(directory);
}

static void add_instance(const struct machine *machine, int index, int instance)
{
    const struct gpu *gpu = &machine->gpus[index];
    char path[PATH_BYTES];
    capability_path(machine, index, instance, NO_INSTANCE, path, sizeof path);
    write_access(path, capability_minor_instance(gpu, instance), MODE_ALL);
    if (machine->cap_nodes)
        make_node(machine, capability_minor_instance(gpu, instance), MODE_ALL);
    for (int compute = 0; compute < COMPUTE_INSTANCES_MAX; compute++) {
        if (!gpu->instances[instance].compute[compute].serial)
            continue;
        capability_path(machine, index, instance, compute, path, sizeof path);
        write_access(path, capability_minor_compute(gpu, instance, compute), MODE_ALL);
        if (machine->cap_nodes)
            make_node(machine, capability_minor_compute(gpu, instance, compute), MODE_ALL);
    }
}

static void add_gpu(const struct machine *machine, int index)
{
    const struct gpu *gpu = &machine->gpus[index];
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig/config", machine->proc_root, gpu->minor);
    write_access(path, MINOR_CONFIG, MODE_ROOT);
    snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig/monitor", machine->proc_root, gpu->minor);
    write_access(path, MINOR_MONITOR, MODE_ALL);
    for (int instance = 0; instance < INSTANCES_MAX; instance++) {
        if (gpu->instances[instance].serial)
            add_instance(machine, index, instance);
    }
}

static void remove_nodes(const struct machine *machine, const struct gpu *gpu, int instance)
{
    for (int compute = 0; compute < COMPUTE_INSTANCES_MAX; compute++) {
        if (!gpu->instances[instance].serial || !gpu->instances[instance].compute[compute].serial)
            remove_node(machine, capability_minor_compute(gpu, instance, compute));
    }
    if (!gpu->instances[instance].serial)
        remove_node(machine, capability_minor_instance(gpu, instance));
}

static void prune_gpu(const struct machine *machine, int index)
{
    const struct gpu *gpu = &machine->gpus[index];
    char path[PATH_BYTES];
    bool wanted[INSTANCES_MAX];
    for (int instance = 0; instance < INSTANCES_MAX; instance++) {
        bool compute_wanted[COMPUTE_INSTANCES_MAX];
        wanted[instance] = gpu->instances[instance].serial != 0;
        if (machine->cap_nodes)
            remove_nodes(machine, gpu, instance);
        for (int compute = 0; compute < COMPUTE_INSTANCES_MAX; compute++)
            compute_wanted[compute] = gpu->instances[instance].compute[compute].serial != 0;
        if (!wanted[instance])
            continue;
        capability_path(machine, index, instance, NO_INSTANCE, path, sizeof path);
        *strrchr(path, '/') = '\0';
        remove_others(path, "ci", compute_wanted, COMPUTE_INSTANCES_MAX);
    }
    snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig", machine->proc_root, gpu->minor);
    remove_others(path, "gi", wanted, INSTANCES_MAX);
}

/* The node of a GPU's minor: of the kind of a node that is there. */
static void add_node(const struct machine *machine, const struct gpu *gpu, const char *other)
{
    char old[PATH_BYTES], new[PATH_BYTES];
    struct stat status;
    snprintf(old, sizeof old, "%s/%s", machine->dev_root, other);
    snprintf(new, sizeof new, "%s/nvidia%u", machine->dev_root, gpu->minor);
    if (access(new, F_OK) == 0 || stat(old, &status) != 0)
        return;
    if (mknod(new, status.st_mode, makedev(major(status.st_rdev), gpu->minor)) == 0 && chmod(new, status.st_mode & 07777) != 0)
        unlink(new);
}

static void add_moved(const struct machine *machine, const struct gpu *gpu)
{
    char old[32];
    snprintf(old, sizeof old, "nvidia%u", gpu->former_minor);
    add_node(machine, gpu, old);
}

/* /proc/driver/nvidia/gpus/<address>/information names the minor. */
static void rewrite_information(const struct machine *machine, const struct gpu *gpu)
{
    char address[16], path[PATH_BYTES], text[4096], *line;
    format_address_sysfs(&gpu->board.address, address);
    snprintf(path, sizeof path, "%s/gpus/%s/information", machine->proc_root, address);
    FILE *file = fopen(path, "r+e");
    if (!file)
        return;
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    line = strstr(text, "Device Minor:");
    char *end = line ? strchr(line, '\n') : NULL;
    if (end && fseek(file, line - text, SEEK_SET) == 0) {
        int written = fprintf(file, "Device Minor: \t %u%s", gpu->minor, end);
        if (fflush(file) != 0 || written < 0 || ftruncate(fileno(file), line - text + written) != 0)
            perror(path);
    }
    fclose(file);
}

static bool minor_held(const struct machine *machine, unsigned minor)
{
    bool held = false;
    for (unsigned index = 0; index < machine->gpu_count; index++)
        held |= gpu_holds_minor(&machine->gpus[index], minor);
    return held;
}

/* The tree of a minor that no GPU has any more. */
static void remove_tree(const struct machine *machine, unsigned minor)
{
    char path[PATH_BYTES];
    static const char *const parts[] = { "/mig/config", "/mig/monitor", "/mig", "" };
    static const bool none[INSTANCES_MAX];
    snprintf(path, sizeof path, "%s/capabilities/gpu%u/mig", machine->proc_root, minor);
    remove_others(path, "gi", none, INSTANCES_MAX);
    for (size_t part = 0; part < COUNT_OF(parts); part++) {
        snprintf(path, sizeof path, "%s/capabilities/gpu%u%s", machine->proc_root, minor, parts[part]);
        remove(path);
    }
}

static void prune_moved(const struct machine *machine, const struct gpu *gpu)
{
    char path[PATH_BYTES];
    rewrite_information(machine, gpu);
    if (minor_held(machine, gpu->former_minor))
        return;
    snprintf(path, sizeof path, "%s/nvidia%u", machine->dev_root, gpu->former_minor);
    unlink(path);
    remove_tree(machine, gpu->former_minor);
}

static bool moved(const struct gpu *gpu) { return gpu->minor != gpu->former_minor; }

static bool wanted(uint64_t gpus, unsigned index) { return gpus >> index & 1; }

/* Commit, and update the tree of these GPUs to the state; also of those whose last writer was killed, or could not write there.
 * Files are created before their instance becomes visible, and removed after it. A process that is killed in between leaves an extra
 * file, never an instance without a file, and the next change removes it. All of this happens under the lock, in the order of the
 * changes. */
static void commit(const struct machine *machine, uint64_t gpus)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/capabilities/", machine->proc_root);
    const bool there = access(path, F_OK) == 0;
    const bool writable = there ? access(path, W_OK) == 0 : make_folders(path);
    gpus |= there ? state_unfollowed() : ALL_GPUS;
    state_set_unfollowed(gpus);
    for (unsigned index = 0; writable && index < machine->gpu_count; index++) {
        const struct gpu *gpu = &machine->gpus[index];
        if (!gpu_holds_minor(gpu, gpu->minor))
            continue;
        if (moved(gpu))
            add_moved(machine, gpu);
        if (gpu->board.mig != MIG_NONE && (wanted(gpus, index) || moved(gpu)))
            add_gpu(machine, (int)index);
    }
    state_publish();
    for (unsigned index = 0; writable && index < machine->gpu_count; index++) {
        const struct gpu *gpu = &machine->gpus[index];
        if (!gpu_holds_minor(gpu, gpu->minor)) {
            const unsigned freed[] = { gpu->minor, gpu->former_minor };
            for (size_t each = 0; wanted(gpus, index) && each < COUNT_OF(freed); each++) {
                if (!minor_held(machine, freed[each]))
                    remove_tree(machine, freed[each]);
            }
            continue;
        }
        if (gpu->board.mig != MIG_NONE && (wanted(gpus, index) || moved(gpu)))
            prune_gpu(machine, (int)index);
        if (moved(gpu))
            prune_moved(machine, gpu);
    }
    if (writable)
        state_set_unfollowed(0);
    state_unlock();
}

void capabilities_commit(const struct machine *machine) { commit(machine, ALL_GPUS); }

void capabilities_commit_of(const struct machine *machine, int gpu) { commit(machine, (uint64_t)1 << gpu); }

/* After the driver has got or lost these GPUs. NVIDIA's programs make the nodes of minors, and leave them when a GPU goes. */
void capabilities_commit_bound(const struct machine *machine, const bool *gpus)
{
    for (unsigned index = 0; index < machine->gpu_count; index++) {
        const struct gpu *gpu = &machine->gpus[index];
        if (gpus[index] && gpu_holds_minor(gpu, gpu->minor)) {
            add_node(machine, gpu, "nvidiactl");
            rewrite_information(machine, gpu);
        }
    }
    commit(machine, ALL_GPUS);
}
