/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Clients: processes that have a GPU or a MIG device open. A real driver detects them by their open files. Here each client has
 * read locks on bytes far behind the end of the state file, one byte for each GPU and each instance. Every process with the
 * library has that file, also in a container, where it is mounted read-only. The kernel releases a lock when its process ends.
 *
 * In a container, where capability nodes determine the existing devices, the initialization opens all of them, like a CUDA context. An
 * administrator on the host can see all devices. He opens the devices whose memory or processes he queries, like a monitor, and the
 * GPUs only if the description says so.
 *
 * CUDA contexts are locks of the same kind on other bytes: exclusive mode allows only the first process with a context. Check and lock
 * must be one step: during both, the process locks the file itself, which a reader can do too.
 *
 * An initialized library has all visible GPUs attached, by further bytes: without persistence mode the driver deinitializes a GPU when
 * its last client closes it, and the GPU's settings return to the defaults. A killed client does not report its end, so the next client
 * checks this too.
 */
#include "simulator.h"

#include <errno.h>
#include <sys/file.h>
#include <unistd.h>

#define FIRST_GPU (1ll << 40)
#define FIRST_INSTANCE (1ll << 41)
#define FIRST_CONTEXT_OF_GPU (1ll << 42)
#define FIRST_CONTEXT_OF_INSTANCE (3ll << 41)
#define FIRST_ATTACHED_GPU (5ll << 40)
#define FABRIC_MANAGER (7ll << 40)

enum { COMPUTE_PROHIBITED = 2, COMPUTE_EXCLUSIVE_PROCESS = 3 };

void client_of_gpu(int gpu) { lock_byte(FIRST_GPU + gpu); }

void client_of_instance(const struct machine *machine, int gpu, int instance, int compute)
{
    const struct gpu_instance *owner = &machine->gpus[gpu].instances[instance];
    lock_byte(FIRST_INSTANCE + (long long)owner->serial);
    if (compute != NO_INSTANCE)
        lock_byte(FIRST_INSTANCE + (long long)owner->compute[compute].serial);
}

void client_enter(const struct machine *machine, bool attach)
{
    settle_idle_gpus();
    locks_enter();
    const bool all = !administrator(machine);
    for (unsigned index = 0; attach && index < visible_count(); index++) {
        const int gpu = visible_gpu(index);
        lock_byte(FIRST_ATTACHED_GPU + gpu);
        if (all || machine->clients_hold_gpus)
            client_of_gpu(gpu);
        for (int instance = 0; instance < INSTANCES_MAX; instance++) {
            for (int compute = 0; compute < COMPUTE_INSTANCES_MAX; compute++) {
                if (machine->gpus[gpu].instances[instance].compute[compute].serial)
                    mig_visible(machine, gpu, instance, compute);   /* opens what it finds by its nodes */
            }
        }
    }
}

void client_leave(void)
{
    locks_leave();
    settle_idle_gpus();
}

static bool is_idle(const struct machine *machine, int index)
{
    const struct gpu *gpu = &machine->gpus[index];
    return !gpu->persistence && gpu_has_settings(gpu) && !gpu_in_use(gpu) && !byte_locked(FIRST_ATTACHED_GPU + index)
           && !gpu_has_clients(index) && !byte_locked(FIRST_CONTEXT_OF_GPU + index);
}

/* This process has no locks now. A client that starts at this time changes no setting before it has its lock, or while the state is locked. */
void settle_idle_gpus(void)
{
    const struct machine *machine = state_refresh();
    struct machine *written;
    bool found = false;
    for (unsigned index = 0; machine && machine->loaded && !machine->idle_gpus_keep_settings && index < machine->gpu_count; index++)
        found |= is_idle(machine, (int)index);
    if (!found || state_begin_write(&written) != SUCCESS)
        return;
    for (unsigned index = 0; index < written->gpu_count; index++) {
        if (is_idle(written, (int)index))
            gpu_deinitialize(&written->gpus[index]);
    }
    state_commit();
}

bool fabric_manager_runs(void) { return byte_locked(FABRIC_MANAGER); }

bool gpu_has_clients(int gpu) { return byte_locked(FIRST_GPU + gpu); }

bool instance_has_clients(const struct machine *machine, int gpu, int instance, int compute)
{
    const struct gpu_instance *owner = &machine->gpus[gpu].instances[instance];
    return byte_locked(FIRST_INSTANCE + (long long)(compute == NO_INSTANCE ? owner->serial : owner->compute[compute].serial));
}

static long long context_byte(const struct machine *machine, int gpu, int instance, int compute)
{
    if (compute == NO_INSTANCE)
        return FIRST_CONTEXT_OF_GPU + gpu;
    return FIRST_CONTEXT_OF_INSTANCE + (long long)machine->gpus[gpu].instances[instance].compute[compute].serial;
}

bool context_enter(const struct machine *machine, int gpu, int instance, int compute)
{
    const long long byte = context_byte(machine, gpu, instance, compute);
    const uint32_t mode = machine->gpus[gpu].compute_mode;
    if (mode == COMPUTE_PROHIBITED)
        return false;
    int guard = state_descriptor();
    while (guard >= 0 && flock(guard, LOCK_EX) != 0 && errno == EINTR)
        continue;
    const bool entered = (mode != COMPUTE_EXCLUSIVE_PROCESS || !byte_locked(byte)) && lock_byte(byte);
    if (guard >= 0)
        close(guard);
    return entered;
}

void context_leave(const struct machine *machine, int gpu, int instance, int compute)
{
    unlock_byte(context_byte(machine, gpu, instance, compute));
}
