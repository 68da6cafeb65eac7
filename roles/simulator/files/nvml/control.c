/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The private control symbol: commands of an operator of the simulator, as one line of text; the answer is one JSON object.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

/* Major compute capabilities: Ampere and Hopper. */
enum { FIRST_RESET_ALONE = 8, FIRST_RESET_WITHOUT_MANAGER = 9 };

bool find_devices(const struct machine *machine, const char *selection, bool chosen[DEVICES_MAX], char *error, size_t size)
{
    char copy[1024], *rest = copy;
    memset(chosen, 0, DEVICES_MAX * sizeof *chosen);
    copy_text(copy, sizeof copy, selection);
    for (char *name = strsep(&rest, ","); name; name = strsep(&rest, ",")) {
        struct address address;
        uint64_t index;
        bool found = false, is_address = parse_address(name, &address), is_index = parse_unsigned(name, GPUS_MAX - 1, &index);
        for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
            const struct board *board = &machine->gpus[gpu].board;
            if (strcmp(name, "all") == 0 || (is_index && index == gpu) || strcasecmp(board->uuid, name) == 0
                || (is_address && same_address(&board->address, &address)))
                found = chosen[gpu] = true;
        }
        if (!found) {
            snprintf(error, size, "GPU: found \"%s\", expected an index below %u, a UUID or a PCI address of this machine", name,
                     machine->gpu_count);
            return false;
        }
    }
    return true;
}

/* Start from the factory state, with numbers that no previous handle or event has. No previous state is kept. */
static nvmlReturn_t run_load(int words, char **word, struct json *json, char *error, size_t size)
{
    static struct machine loaded;           /* under the process lock */
    struct machine *machine;
    (void)words;
    if (geteuid() != 0) {
        snprintf(error, size, "load: found user %u, expected root", (unsigned)geteuid());
        return NO_PERMISSION;
    }
    if (!machine_parse(word[1], &loaded, error, size))
        return INVALID_ARGUMENT;
    nvmlReturn_t result = state_create();
    if (result == SUCCESS)
        result = state_open();
    if (result == SUCCESS)
        result = state_begin_write(&machine);
    if (result != SUCCESS) {
        snprintf(error, size, "the state file beside the library cannot be made or written: %s", nvmlErrorString(result));
        return result;
    }
    uint64_t serial = machine->serial, events = machine->events_written, loads = machine->loads, faults = machine->faults_injected, epoch = 0;
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++)
        epoch = machine->gpus[gpu].epoch > epoch ? machine->gpus[gpu].epoch : epoch;
    *machine = loaded;
    machine->serial = serial;
    machine->loads = loads + 1;
    machine->faults_injected = faults;
    machine->events_written = events;
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        machine->gpus[gpu].epoch = epoch;
        gpu_power_on(&machine->gpus[gpu], true);
    }
    for (unsigned fault = 0; fault < CALL_FAULTS_MAX; fault++)
        state_reset_call_count(fault);
    count_nothing_yet();
    json_number(json, "gpus", machine->gpu_count);
    capabilities_commit(machine);
    return SUCCESS;
}

static nvmlReturn_t cycle(bool repair_lost, char *error, size_t size)
{
    struct machine *machine;
    nvmlReturn_t result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        bool lost = machine->gpus[gpu].lost && !repair_lost;
        gpu_power_on(&machine->gpus[gpu], false);
        machine->gpus[gpu].lost |= lost;
        machine->gpus[gpu].unbound &= !repair_lost;     /* a boot gives every GPU to its own driver */
    }
    machine->ready_state = 0;
    capabilities_commit(machine);
    return SUCCESS;
}

static nvmlReturn_t run_power_cycle(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)word;
    (void)json;
    return cycle(true, error, size);
}

static nvmlReturn_t run_driver_reload(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)word;
    (void)json;
    return cycle(false, error, size);
}

static bool leads_to(const struct gpu *gpu, const struct gpu *peer)
{
    for (unsigned link = 0; link < LINKS_MAX; link++) {
        const struct nvlink *each = &gpu->board.links[link];
        if (each->present && each->remote == REMOTE_GPU && same_address(&each->address, &peer->board.address))
            return true;
    }
    return false;
}

static bool leads_to_switch(const struct gpu *gpu)
{
    for (unsigned link = 0; link < LINKS_MAX; link++)
        if (gpu->board.links[link].present && gpu->board.links[link].remote == REMOTE_SWITCH)
            return true;
    return false;
}

/* Whether NVLinks of a GPU require one reset of both: the tables of --gpu-reset in the manual of nvidia-smi. */
static bool is_reset_with(const struct gpu *gpu, const struct gpu *peer)
{
    const unsigned generation = gpu->board.capability_major;
    if (leads_to(gpu, peer))
        return generation < FIRST_RESET_ALONE;
    return generation < FIRST_RESET_WITHOUT_MANAGER && leads_to_switch(gpu) && leads_to_switch(peer)
           && (generation < FIRST_RESET_ALONE || !fabric_manager_runs());
}

/* Why these GPUs cannot be reset now, or SUCCESS. */
static nvmlReturn_t check_reset(const struct machine *machine, const bool chosen[DEVICES_MAX], char *error, size_t size)
{
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        const struct gpu *target = &machine->gpus[gpu];
        if (!chosen[gpu])
            continue;
        if (target->lost) {
            snprintf(error, size, "GPU %u is lost; expected one that answers: power-cycle the machine", gpu);
            return GPU_IS_LOST;
        }
        if (gpu_in_use(target) || gpu_has_clients((int)gpu)) {
            snprintf(error, size, "GPU %u is in use by another client; stop its processes first", gpu);
            return IN_USE;
        }
        for (unsigned other = 0; other < machine->gpu_count; other++) {
            if (other != gpu && !chosen[other] && is_reset_with(target, &machine->gpus[other])) {
                snprintf(error, size, "GPU %u is linked to GPU %u; expected both in one reset", gpu, other);
                return INVALID_ARGUMENT;
            }
        }
    }
    return SUCCESS;
}

static nvmlReturn_t run_gpu_reset(int words, char **word, struct json *json, char *error, size_t size)
{
    bool chosen[DEVICES_MAX];
    struct machine *machine;
    (void)words;
    nvmlReturn_t result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    result = find_devices(machine, word[1], chosen, error, size) ? check_reset(machine, chosen, error, size) : NOT_FOUND;
    if (result != SUCCESS) {
        state_abandon();
        return result;
    }
    json_open(json, "reset", '[');
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        if (chosen[gpu]) {
            gpu_reset(machine, &machine->gpus[gpu]);
            json_text(json, NULL, machine->gpus[gpu].board.uuid);
        }
    }
    json_close(json, ']');
    capabilities_commit(machine);
    return SUCCESS;
}

/* "driver-unbind GPU": unbind it from the driver, and release its minor. "driver-bind GPU": bind a GPU of another driver to this driver
 * again, with the lowest free minor and without any previous state. */
static nvmlReturn_t change_driver(char **word, bool bound, char *error, size_t size)
{
    bool chosen[DEVICES_MAX];
    struct machine *machine;
    nvmlReturn_t result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    if (!find_devices(machine, word[1], chosen, error, size)) {
        state_abandon();
        return NOT_FOUND;
    }
    for (unsigned index = 0; index < machine->gpu_count; index++) {
        struct gpu *gpu = &machine->gpus[index];
        bool lost = gpu->lost;
        if (!chosen[index])
            continue;
        if (bound) {
            gpu_power_on(gpu, false);
            gpu_take_minor(machine, gpu);
            gpu->lost = lost;
        } else {
            gpu->unbound = true;
        }
    }
    capabilities_commit_bound(machine, chosen);
    return SUCCESS;
}

static nvmlReturn_t run_driver_bind(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)json;
    return change_driver(word, true, error, size);
}

static nvmlReturn_t run_driver_unbind(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)json;
    return change_driver(word, false, error, size);
}

/* "unplug GPU": remove it from the machine, immediately also for processes that have it open. "plug GPU": insert it again, without any
 * previous state. */
static nvmlReturn_t change_presence(char **word, bool present, char *error, size_t size)
{
    bool chosen[DEVICES_MAX];
    struct machine *machine;
    nvmlReturn_t result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    if (!find_devices(machine, word[1], chosen, error, size)) {
        state_abandon();
        return NOT_FOUND;
    }
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        chosen[gpu] &= machine->gpus[gpu].unplugged == present;
        if (!chosen[gpu])
            continue;
        machine->gpus[gpu].unplugged = !present;
        gpu_power_on(&machine->gpus[gpu], false);
        if (present)
            gpu_take_minor(machine, &machine->gpus[gpu]);
    }
    capabilities_commit_bound(machine, chosen);
    return SUCCESS;
}

static nvmlReturn_t run_unplug(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)json;
    return change_presence(word, false, error, size);
}

static nvmlReturn_t run_plug(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)json;
    return change_presence(word, true, error, size);
}

/* The compute policy has no public NVML call: "timeslice GPU" shows it, "timeslice GPU N" sets it. */
static nvmlReturn_t run_timeslice(int words, char **word, struct json *json, char *error, size_t size)
{
    bool chosen[DEVICES_MAX];
    struct machine *machine = NULL;
    uint64_t slice = 0;
    if (words == 3 && !parse_unsigned(word[2], 3, &slice)) {
        snprintf(error, size, "timeslice: found \"%s\", expected 0 (default), 1 (short), 2 (medium) or 3 (long)", word[2]);
        return INVALID_ARGUMENT;
    }
    const struct machine *present = state_refresh();
    nvmlReturn_t result = words == 3 ? begin_control_write(&machine, error, size) : present ? SUCCESS : DRIVER_NOT_LOADED;
    if (result != SUCCESS)
        return result;
    if (machine && !administrator(machine))
        result = NO_PERMISSION;
    else if (!find_devices(machine ? machine : present, word[1], chosen, error, size))
        result = NOT_FOUND;
    json_open(json, "timeslice", '[');
    for (unsigned gpu = 0; result == SUCCESS && gpu < (machine ? machine : present)->gpu_count; gpu++) {
        const struct gpu *shown = &(machine ? machine : present)->gpus[gpu];
        if (chosen[gpu] && machine && shown->mig_current) {
            snprintf(error, size, "GPU %u is in MIG mode; expected a whole GPU", gpu);
            result = NOT_SUPPORTED;
        } else if (chosen[gpu]) {
            if (machine)
                machine->gpus[gpu].time_slice = (uint32_t)slice;
            json_number(json, NULL, shown->time_slice);
        }
    }
    json_close(json, ']');
    if (machine && result == SUCCESS)
        state_commit();
    else if (machine)
        state_abandon();
    return result;
}

static nvmlReturn_t run_show(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)word;
    nvmlReturn_t result = control_show(json);
    if (result != SUCCESS)
        snprintf(error, size, "no machine is loaded; load one first");
    return result;
}

static nvmlReturn_t run_clear(int words, char **word, struct json *json, char *error, size_t size)
{
    bool chosen[DEVICES_MAX];
    struct machine *machine;
    (void)json;
    nvmlReturn_t result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    if (!find_devices(machine, words > 1 ? word[1] : "all", chosen, error, size)) {
        state_abandon();
        return NOT_FOUND;
    }
    const bool all = words == 1 || strcmp(word[1], "all") == 0;
    clear_call_faults(machine, chosen, all);
    machine->confidential_on &= !all;
    machine->protected_pcie &= !all;
    for (unsigned index = 0; index < machine->gpu_count; index++) {
        struct gpu *gpu = &machine->gpus[index];
        if (!chosen[index])
            continue;
        gpu->thermal = gpu->remap_pending = gpu->remap_failure = false;
        gpu->lost = gpu->unplugged;
        gpu->recovery_action = gpu->slowdown = gpu->fabric_fault = 0;
        memset(gpu->ecc_volatile, 0, sizeof gpu->ecc_volatile);
        memset(gpu->ecc_aggregate, 0, sizeof gpu->ecc_aggregate);
        memset(gpu->links_down, 0, sizeof gpu->links_down);
        memset(gpu->processes, 0, sizeof gpu->processes);
    }
    state_commit();
    return SUCCESS;
}

size_t machine_used_bytes(const struct machine *machine)
{
    uint32_t count = machine->gpu_count <= GPUS_MAX ? machine->gpu_count : GPUS_MAX;
    return offsetof(struct machine, gpus) + count * sizeof(struct gpu);
}

unsigned machine_devices(const struct machine *machine) { return machine->gpu_count; }

const char *code_text(int code) { return nvmlErrorString(code); }

const struct command commands[] = {
    { "load", run_load, 2, 2, "load PATH" },
    { "show", run_show, 1, 1, "show" },
    { "power-cycle", run_power_cycle, 1, 1, "power-cycle" },
    { "driver-reload", run_driver_reload, 1, 1, "driver-reload" },
    { "driver-bind", run_driver_bind, 2, 2, "driver-bind GPU[,GPU…]" },
    { "driver-unbind", run_driver_unbind, 2, 2, "driver-unbind GPU[,GPU…]" },
    { "unplug", run_unplug, 2, 2, "unplug GPU[,GPU…]" },
    { "plug", run_plug, 2, 2, "plug GPU[,GPU…]" },
    { "gpu-reset", run_gpu_reset, 2, 2, "gpu-reset GPU[,GPU…]" },
    { "timeslice", run_timeslice, 2, 3, "timeslice GPU[,GPU…] [0|1|2|3]" },
    { "event-count", run_event_count, 1, 1, "event-count" },
    { "calls", run_calls, 1, 2, "calls [reset]" },
    { "clear", run_clear, 1, 2, "clear [GPU]" },
    { "use", control_use, 4, 5, "use UUID PID MIB [HOLDER]" },
    { "leave", control_leave, 3, 3, "leave UUID PID" },
    { "context", control_context, 3, 3, "context UUID enter|leave" },
    { "fault", control_fault, 3, COMMAND_WORDS_MAX, "fault GPU xid|ecc|event|row-remap|lost|thermal|slowdown|fabric|process|call|nvlink|recovery-action|confidential-computing …" },
    { 0 },
};
