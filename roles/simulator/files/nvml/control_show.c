/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * "show": the machine and all of its live state as JSON.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static void show_compute(struct json *json, const struct machine *machine, int index, int instance)
{
    const struct gpu *gpu = &machine->gpus[index];
    const struct gpu_instance *owner = &gpu->instances[instance];
    const struct profile *profile = &gpu->board.profiles[owner->profile];
    json_open(json, "compute_instances", '[');
    for (int compute = 0; compute < COMPUTE_INSTANCES_MAX; compute++) {
        const struct compute_instance *each = &owner->compute[compute];
        char path[2 * PATH_MAX_BYTES];
        if (!each->serial)
            continue;
        capability_path(machine, index, instance, compute, path, sizeof path);
        json_open(json, NULL, '{');
        json_number(json, "id", compute);
        json_number(json, "profile_id", profile->compute[each->profile].id);
        json_text(json, "profile", profile->compute[each->profile].name);
        json_number(json, "start", each->start);
        json_number(json, "size", each->size);
        json_number(json, "mig_index", each->mig_index);
        json_text(json, "uuid", each->uuid);
        json_number(json, "capability_minor", capability_minor_compute(gpu, instance, compute));
        json_text(json, "capability", path);
        json_close(json, '}');
    }
    json_close(json, ']');
}

static void show_instances(struct json *json, const struct machine *machine, int index)
{
    const struct gpu *gpu = &machine->gpus[index];
    json_open(json, "gpu_instances", '[');
    for (int instance = 0; instance < INSTANCES_MAX; instance++) {
        const struct gpu_instance *each = &gpu->instances[instance];
        char path[2 * PATH_MAX_BYTES];
        if (!each->serial)
            continue;
        capability_path(machine, index, instance, NO_INSTANCE, path, sizeof path);
        json_open(json, NULL, '{');
        json_number(json, "id", instance);
        json_number(json, "profile_id", gpu->board.profiles[each->profile].id);
        json_text(json, "profile", gpu->board.profiles[each->profile].name);
        json_number(json, "start", each->start);
        json_number(json, "size", each->size);
        json_number(json, "capability_minor", capability_minor_instance(gpu, instance));
        json_text(json, "capability", path);
        json_bool(json, "open", instance_has_clients(machine, index, instance, NO_INSTANCE));
        show_compute(json, machine, index, instance);
        json_close(json, '}');
    }
    json_close(json, ']');
}

static void show_processes(struct json *json, const struct gpu *gpu)
{
    json_open(json, "processes", '[');
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        const struct process *process = &gpu->processes[index];
        if (!process_alive(process))
            continue;
        json_open(json, NULL, '{');
        json_number(json, "pid", process->life.pid);
        if (process->gpu_instance != NOT_TIED)
            json_number(json, "gpu_instance", process->gpu_instance);
        if (process->compute_instance != NOT_TIED)
            json_number(json, "compute_instance", process->compute_instance);
        json_number(json, "memory_mib", (long long)process->memory);
        json_close(json, '}');
    }
    json_close(json, ']');
}

static void show_gpu(struct json *json, const struct machine *machine, int index)
{
    static const char *const capabilities[] = { "none", "pending", "immediate" };
    const struct gpu *gpu = &machine->gpus[index];
    const struct board *board = &gpu->board;
    char address[32];
    format_address(&board->address, address);
    json_open(json, NULL, '{');
    json_number(json, "index", index);
    json_number(json, "minor", gpu->minor);
    json_text(json, "uuid", board->uuid);
    json_text(json, "name", board->name);
    json_text(json, "serial", board->serial);
    json_text(json, "pci_address", address);
    json_number(json, "memory_mib", (long long)board->memory_total);
    json_text(json, "mig", capabilities[board->mig]);
    json_number(json, "mig_mode_current", gpu->mig_current);
    json_number(json, "mig_mode_pending", gpu->mig_pending);
    json_number(json, "ecc_current", gpu->ecc_current);
    json_number(json, "ecc_pending", gpu->ecc_pending);
    json_number(json, "compute_mode", gpu->compute_mode);
    json_number(json, "persistence_mode", gpu->persistence);
    json_number(json, "time_slice", gpu->time_slice);
    json_number(json, "power_limit_mw", gpu->power_limit);
    json_number(json, "power_limit_default_mw", board->power_default);
    json_number(json, "locked_clock_minimum_mhz", gpu->locked_minimum);
    json_number(json, "locked_clock_maximum_mhz", gpu->locked_maximum);
    json_number(json, "locked_memory_clock_minimum_mhz", gpu->memory_locked_minimum);
    json_number(json, "locked_memory_clock_maximum_mhz", gpu->memory_locked_maximum);
    json_number(json, "workload_profiles", board->workload_profiles);
    json_number(json, "workload_profiles_requested", gpu->workload_requested);
    json_bool(json, "lost", gpu->lost);
    json_bool(json, "unplugged", gpu->unplugged);
    json_bool(json, "thermal", gpu->thermal);
    json_number(json, "slowdown", gpu->slowdown);
    json_number(json, "fabric_fault", gpu->fabric_fault);
    json_number(json, "ecc_corrected", (long long)gpu->ecc_aggregate[0]);
    json_number(json, "ecc_uncorrected", (long long)gpu->ecc_aggregate[1]);
    json_bool(json, "row_remap_pending", gpu->remap_pending);
    json_bool(json, "row_remap_failure", gpu->remap_failure);
    json_number(json, "recovery_action", gpu->recovery_action);
    json_bool(json, "open", gpu_has_clients(index));
    show_processes(json, gpu);
    show_instances(json, machine, index);
    json_close(json, '}');
}

nvmlReturn_t control_show(struct json *json)
{
    const struct machine *machine = state_refresh();
    if (!machine)
        return DRIVER_NOT_LOADED;
    json_text(json, "driver_version", machine->driver_version);
    json_text(json, "nvml_version", machine->nvml_version);
    json_number(json, "cuda_version", machine->cuda_version);
    json_text(json, "proc_root", machine->proc_root);
    json_text(json, "dev_root", machine->dev_root);
    json_text(json, "sys_root", machine->sys_root);
    json_number(json, "caps_major", machine->caps_major);
    json_number(json, "generation", (long long)state_copy_generation());
    json_number(json, "events", (long long)machine->events_written);
    show_call_faults(json, machine, "gpu");
    json_open(json, "gpus", '[');
    for (unsigned index = 0; index < machine->gpu_count; index++)
        show_gpu(json, machine, (int)index);
    json_close(json, ']');
    return SUCCESS;
}
