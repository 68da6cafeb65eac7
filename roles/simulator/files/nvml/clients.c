/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Clients: processes that have a GPU or a MIG device open. A real driver sees them by the files that they hold open. Here each holds
 * read locks on bytes far behind the end of the state file, a byte for each GPU and for each instance: every process that has the
 * library has that file, in a container as well, where it is bound read-only; and a lock ends with its process, however that ends.
 *
 * In a container, where capability nodes say what exists, the initialization opens all of it, as a CUDA context does. An administrator
 * on the host, who may see everything, holds what he asks for its memory or its processes, as a monitor does, and his GPUs only where
 * the description says so.
 *
 * CUDA contexts are locks of the same kind on other bytes: in exclusive mode the first process that has one is the only one. For who
 * looks and then locks that has to be one step: he holds the file itself meanwhile, which a reader may as well.
 *
 * An initialized library has all GPUs that it sees attached, by further bytes: without persistence mode the driver deinitializes a GPU when
 * its last client closes it, and the settings of that GPU are the default. A client that was killed says nothing, so the next one looks, too.
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

/* This process has no locks now. A client that comes meanwhile sets nothing before its lock is there, nor while the state is locked. */
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
