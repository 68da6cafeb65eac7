/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The nodes of slices on the host: vdavinciV, V a virtual id. In a container such a node has the name davinciV.
 */
#include "simulator.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EVERYBODY_MAY = 0666, PERMISSIONS = 07777 };

/* A node has the owner, the group, and the mode of its chip's node, as the driver's manager of devices gives them. */
static void make_node(const struct machine *machine, const char *path, uint32_t physical, uint32_t vid)
{
    char chip[PATH_MAX_BYTES + 64];
    struct stat status;
    if (access(path, F_OK) == 0)
        return;
    make_device_node(path, machine->slice_major, vid, EVERYBODY_MAY);
    snprintf(chip, sizeof chip, "%s/davinci%u", machine->dev_root, physical);
    if (stat(chip, &status) == 0 && (chown(path, status.st_uid, status.st_gid) != 0 || chmod(path, status.st_mode & PERMISSIONS) != 0))
        unlink(path);
}

static void follow(const struct machine *machine, bool make)
{
    for (unsigned index = 0; machine->slice_nodes && index < machine->chip_count; index++) {
        const struct chip *chip = &machine->chips[index];
        for (unsigned slice = 0; slice < chip->board.slices_maximum; slice++) {
            char path[PATH_MAX_BYTES + 64];
            snprintf(path, sizeof path, "%s/vdavinci%u", machine->dev_root, slice_vid(chip, slice));
            if (make && chip->slices[slice].serial)
                make_node(machine, path, chip->board.physical, slice_vid(chip, slice));
            if (!make && !chip->slices[slice].serial)
                unlink(path);
        }
    }
}

/* Nodes are created before their slice becomes visible, and removed after it. A process that is killed in between leaves an extra node,
 * never a slice without a node, and the next change removes it. All of this happens under the lock, in the order of the changes. */
void slices_commit(const struct machine *machine)
{
    follow(machine, true);
    state_publish();
    follow(machine, false);
    state_unlock();
}
