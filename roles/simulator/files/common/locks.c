/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Read locks on bytes far behind the end of the state file: every process that has the library has that file, in a container as well,
 * where it is bound read-only, and a lock ends with its process, however that ends.
 */
#include "simulator.h"

#include <fcntl.h>
#include <unistd.h>

static int own = -1;                /* under the process lock; its locks are not in this process's own way */

void locks_enter(void) { own = state_descriptor(); }

void locks_leave(void)
{
    if (own >= 0)
        close(own);
    own = -1;
}

bool lock_byte(long long byte)
{
    struct flock range = { .l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1 };
    return own >= 0 && fcntl(own, F_OFD_SETLK, &range) == 0;
}

void unlock_byte(long long byte)
{
    struct flock range = { .l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1 };
    if (own >= 0)
        fcntl(own, F_OFD_SETLK, &range);
}

long long locked_in(long long first, long long length)
{
    int descriptor = own >= 0 ? own : state_descriptor();
    struct flock range = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = first, .l_len = length };
    bool found = length > 0 && descriptor >= 0 && fcntl(descriptor, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
    if (descriptor != own && descriptor >= 0)
        close(descriptor);
    return found ? range.l_start : -1;
}

bool byte_locked(long long byte) { return locked_in(byte, 1) >= 0; }
