/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The nodes of slices on the host: vdavinciV, V a virtual id. In a container such a node has the name davinciV.
 */
#include "simulator.h"

#include <stdio.h>
#include <unistd.h>

enum { EVERYBODY_MAY = 0666 };

static void follow(const struct machine *machine, bool make)
{
    for (unsigned index = 0; machine->slice_nodes && index < machine->chip_count; index++) {
        const struct chip *chip = &machine->chips[index];
        for (unsigned slice = 0; slice < chip->board.slices_maximum; slice++) {
            char path[PATH_MAX_BYTES + 64];
            snprintf(path, sizeof path, "%s/vdavinci%u", machine->dev_root, slice_vid(chip, slice));
            if (make && chip->slices[slice].serial)
                make_device_node(path, machine->slice_major, slice_vid(chip, slice), EVERYBODY_MAY);
            if (!make && !chip->slices[slice].serial)
                unlink(path);
        }
    }
}

/* Nodes come before the slice is there for others and go after it is gone: a process that is killed in between leaves a node too many,
 * never a slice without one, and the next change puts that right. All of it under the lock, in the order of the changes. */
void slices_commit(const struct machine *machine)
{
    follow(machine, true);
    state_publish();
    follow(machine, false);
    state_unlock();
}
