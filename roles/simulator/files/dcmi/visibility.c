/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The devices of this process, by its device nodes. It has a chip if it can open davinciN (N is the physical id). It has a slice
 * if it has no node of the chip, but can open davinciV (V is the virtual id), like a container with the slice.
 *
 * A container locks one byte of the file of its chip or slice. The position of the byte is that of the container's PID namespace, or mount
 * namespace. While the lock exists, no other container gets the chip or slice, and others can read which container has it. The kernel
 * releases the lock at the end of the last process of the container.
 */
#include "simulator.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FURTHER_CAPABILITIES = 0x3F };   /* 32 to 37, in the second word */

#define CONTAINERS (1ll << 32)     /* bytes of one chip or slice */
#define FIRST_OF_CHIPS (1ll << 40)
#define FIRST_OF_SLICES (1ll << 41)

static struct seen devices[DEVICES_MAX];   /* under the process lock, by logic id */
static unsigned device_count;
static uint64_t loads;

static long long first_byte(const struct machine *machine, int chip, int slice)
{
    if (slice == NO_DEVICE)
        return FIRST_OF_CHIPS + chip * CONTAINERS;
    return FIRST_OF_SLICES + (long long)machine->chips[chip].slices[slice].serial * CONTAINERS;
}

uint64_t own_mount_namespace(void)
{
    struct stat status;
    return stat("/proc/self/ns/mnt", &status) == 0 ? (uint64_t)status.st_ino : 0;
}

static long long own_container(const struct machine *machine)
{
    uint64_t started, number;
    process_identity((uint32_t)getpid(), &started, &number);
    return (long long)((machine->mount_namespaces ? own_mount_namespace() : number) % CONTAINERS);
}

static bool in_initial_user_namespace(void)
{
    unsigned long inside = 1, outside = 1, count = 0;
    FILE *file = fopen("/proc/self/uid_map", "re");
    const bool read = file && fscanf(file, "%lu %lu %lu", &inside, &outside, &count) == 3;
    if (file)
        fclose(file);
    return read && inside == 0 && outside == 0 && count == UINT32_MAX;
}

/* A container that the driver takes for the host: user 0 with all capabilities of Linux 5.1, and control groups that it may change. */
static bool privileged(const struct machine *machine)
{
    struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
    struct __user_cap_data_struct data[2] = { { 0 } };
    char path[PATH_MAX_BYTES + 64];
    struct statvfs groups;
    if (geteuid() != 0 || !in_initial_user_namespace() || syscall(SYS_capget, &header, data) != 0)
        return false;
    if (data[0].effective != UINT32_MAX || (data[1].effective & FURTHER_CAPABILITIES) != FURTHER_CAPABILITIES)
        return false;
    snprintf(path, sizeof path, "%s/fs/cgroup/memory", machine->sys_root);
    return statvfs(path, &groups) != 0 || !(groups.f_flag & ST_RDONLY);
}

static bool on_host(const struct machine *machine)
{
    if (machine->mount_namespaces)
        return own_mount_namespace() == machine->host_mount_namespace || privileged(machine);
    return administrator(machine);
}

/* Another container than this process's that has it open; 0: none. */
static long long other_container(const struct machine *machine, long long first)
{
    const long long self = own_container(machine);
    long long found = locked_in(first, self);
    if (found < 0)
        found = locked_in(first + self + 1, CONTAINERS - self - 1);
    return found < 0 ? 0 : found - first;
}

uint32_t user_of(const struct machine *machine, int chip, int slice)
{
    const long long first = first_byte(machine, chip, slice), found = locked_in(first, CONTAINERS);
    return found < 0 ? 0 : (uint32_t)(found - first);
}

bool in_container(const struct machine *machine) { return geteuid() == 0 && !on_host(machine); }

static bool node_openable(const struct machine *machine, const char *name, unsigned number)
{
    char path[PATH_MAX_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", machine->dev_root, name);
    if (number != CHOOSE)
        snprintf(path, sizeof path, "%s/%s%u", machine->dev_root, name, number);
    return openable(path, O_RDWR);
}

static void scan(const struct machine *machine)
{
    device_count = 0;
    loads = machine->loads;
    for (unsigned index = 0; index < machine->chip_count && device_count < DEVICES_MAX; index++) {
        const struct chip *chip = &machine->chips[index];
        struct seen seen = { .chip = (int)index, .slice = NO_DEVICE, .epoch = chip->epoch };
        bool found = node_openable(machine, "davinci", chip->board.physical);
        for (int slice = 0; !found && slice < SLICES_MAX; slice++) {
            if (!chip->slices[slice].serial || !node_openable(machine, "davinci", slice_vid(chip, (unsigned)slice)))
                continue;
            found = true;
            seen.slice = slice;
            seen.serial = chip->slices[slice].serial;
        }
        if (found && !chip->unplugged && held_by_driver(machine, &chip->board.address, "0x19e5", "devdrv_device_driver"))
            devices[device_count++] = seen;
    }
}

void visibility_follow(const struct machine *machine)
{
    if (loads != machine->loads)
        scan(machine);
}

/* Of a chip that is shared, several containers may have the whole. */
static bool free_for_this(const struct machine *machine, const struct seen *seen)
{
    return (seen->slice == NO_DEVICE && machine->chips[seen->chip].share) || !other_container(machine, first_byte(machine, seen->chip, seen->slice));
}

/* In a container all that is seen is opened at once, or nothing is. */
static bool take_all(const struct machine *machine)
{
    bool taken = true;
    int guard = state_descriptor();
    while (guard >= 0 && flock(guard, LOCK_EX) != 0 && errno == EINTR)
        continue;
    for (unsigned index = 0; taken && index < device_count; index++)
        taken = free_for_this(machine, &devices[index]);
    for (unsigned index = 0; taken && index < device_count; index++)
        lock_byte(first_byte(machine, devices[index].chip, devices[index].slice) + own_container(machine));
    if (guard >= 0)
        close(guard);
    return taken;
}

int visibility_enter(const struct machine *machine)
{
    if (!node_openable(machine, "davinci_manager", CHOOSE))
        return INTERNAL;
    scan(machine);
    locks_leave();
    locks_enter();
    if (!on_host(machine) && !take_all(machine))
        return machine->occupied_is_internal ? INTERNAL : OCCUPIED;
    return SUCCESS;
}

unsigned seen_count(void) { return device_count; }

const struct seen *seen_device(unsigned index) { return index < device_count ? &devices[index] : NULL; }

int seen_logic(int chip)
{
    for (unsigned index = 0; index < device_count; index++) {
        if (devices[index].chip == chip)
            return (int)index;
    }
    return NO_DEVICE;
}

uint32_t physical_of(const struct machine *machine, const struct seen *seen)
{
    const struct chip *chip = &machine->chips[seen->chip];
    return seen->slice == NO_DEVICE ? chip->board.physical : slice_vid(chip, (unsigned)seen->slice);
}
