/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What the process may do, and which device nodes it may open.
 */
#include "simulator.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

bool openable(const char *path, int flags)
{
    int descriptor = open(path, flags | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return errno == ENXIO || errno == ENODEV;
    close(descriptor);
    return true;
}

bool has_administration_capability(void)
{
    struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
    struct __user_cap_data_struct data[2] = { { 0 } };
    return syscall(SYS_capget, &header, data) == 0 && (data[CAP_SYS_ADMIN / 32].effective & 1u << CAP_SYS_ADMIN % 32);
}

bool administrator(const struct machine *machine)
{
    return machine->administrator_root ? geteuid() == 0 : has_administration_capability();
}

void make_device_node(const char *path, unsigned major_number, unsigned minor_number, unsigned mode)
{
    if (access(path, F_OK) == 0)
        return;
    if (mknod(path, S_IFCHR | mode, makedev(major_number, minor_number)) != 0 && mknod(path, S_IFREG | mode, 0) != 0)
        return;
    if (chmod(path, mode) != 0)
        unlink(path);
}

bool held_by_driver(const struct machine *machine, const struct address *place, const char *vendor, const char *driver)
{
    char address[16], path[PATH_MAX_BYTES + 96], text[PATH_MAX_BYTES] = "";
    format_address_sysfs(place, address);
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/vendor", machine->sys_root, address);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return true;
    ssize_t length = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    if (length < 6 || strncmp(text, vendor, 6) != 0)
        return true;
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/driver", machine->sys_root, address);
    length = readlink(path, text, sizeof text - 1);
    if (length < 0)
        return false;
    text[length] = '\0';
    return strcmp(basename(text), driver) == 0;
}
