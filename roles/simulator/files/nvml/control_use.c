/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * "use", "leave", "context": reports of the simulated CUDA and MPS to the boards about processes that compute.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

struct place { int gpu, instance, compute; };

static bool find_place(const struct machine *machine, const char *uuid, struct place *place, char *error, size_t size)
{
    for (place->gpu = 0; (unsigned)place->gpu < machine->gpu_count; place->gpu++) {
        const struct gpu *gpu = &machine->gpus[place->gpu];
        place->instance = place->compute = NO_INSTANCE;
        if (strcasecmp(gpu->board.uuid, uuid) == 0)
            return true;
        for (place->instance = 0; place->instance < INSTANCES_MAX; place->instance++) {
            for (place->compute = 0; place->compute < COMPUTE_INSTANCES_MAX; place->compute++) {
                const struct compute_instance *each = &gpu->instances[place->instance].compute[place->compute];
                if (each->serial && strcasecmp(each->uuid, uuid) == 0)
                    return true;
            }
        }
    }
    snprintf(error, size, "found \"%.64s\", expected the UUID of a GPU or of a MIG device", uuid);
    return false;
}

static bool at(const struct process *process, const struct place *place)
{
    return process->gpu_instance == (uint32_t)place->instance && process->compute_instance == (uint32_t)place->compute;
}

/* The process's entry; else, where one may be made, a free one; else NULL. */
static struct process *entry(struct gpu *gpu, const struct place *place, uint32_t pid, bool make)
{
    struct process *unused = NULL;
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        struct process *each = &gpu->processes[index];
        const bool alive = process_alive(each);
        if (alive && each->life.pid == pid && at(each, place))
            return each;
        if (!alive && !unused)
            unused = each;
    }
    return make ? unused : NULL;
}

static bool fits(const struct gpu *gpu, const struct place *place, uint64_t already, uint64_t memory)
{
    const uint64_t total = place->instance == NO_INSTANCE ? gpu->board.memory_total - gpu->board.memory_reserved
                                                          : gpu->board.profiles[gpu->instances[place->instance].profile].memory;
    return used_memory(gpu, place->instance) - already + memory <= total;
}

static nvmlReturn_t change(struct machine *machine, char **word, uint64_t pid, const uint64_t *memory, uint64_t holder, char *error,
                           size_t size)
{
    struct place place;
    if (!find_place(machine, word[1], &place, error, size))
        return NOT_FOUND;
    struct gpu *gpu = &machine->gpus[place.gpu];
    struct process *process = entry(gpu, &place, (uint32_t)pid, memory != NULL);
    if (!memory) {
        if (process)
            *process = (struct process){ 0 };
        return SUCCESS;
    }
    if (!process) {
        snprintf(error, size, "found 64 processes, expected room for another");
        return INSUFFICIENT_RESOURCES;
    }
    if (!fits(gpu, &place, process_alive(process) ? process->memory : 0, *memory)) {
        snprintf(error, size, "found %s MiB, expected what the device has left", word[3]);
        return INSUFFICIENT_RESOURCES;
    }
    struct process used = { .life.pid = (uint32_t)pid, .gpu_instance = (uint32_t)place.instance,
                            .compute_instance = (uint32_t)place.compute, .memory = *memory, .life.holder = (uint32_t)holder };
    process_identity((uint32_t)pid, &used.life.started, &used.life.pid_namespace);
    if (!used.life.started) {
        snprintf(error, size, "found PID %s, expected one of a process", word[2]);  /* it has ended since */
        return NOT_FOUND;
    }
    if (holder) {
        uint64_t unused;
        process_identity((uint32_t)holder, &used.life.holder_started, &unused);
    }
    *process = used;
    return SUCCESS;
}

static nvmlReturn_t change_state(char **word, uint64_t pid, const uint64_t *memory, uint64_t holder, char *error, size_t size)
{
    struct machine *machine;
    nvmlReturn_t result = state_begin_write(&machine);
    if (result != SUCCESS)
        return result;
    result = machine->loaded ? change(machine, word, pid, memory, holder, error, size) : DRIVER_NOT_LOADED;
    if (result == SUCCESS)
        state_commit();
    else
        state_abandon();
    return result;
}

/* "use UUID PID MIB [HOLDER]": the process has that much of the device, as long as it and the holder live. */
nvmlReturn_t control_use(int words, char **word, struct json *json, char *error, size_t size)
{
    uint64_t pid, memory, holder = 0;
    (void)json;
    if (!parse_unsigned(word[2], 4194304, &pid) || !pid || !parse_unsigned(word[3], 1 << 24, &memory)
        || (words > 4 && !parse_unsigned(word[4], 4194304, &holder))) {
        snprintf(error, size, "use: expected a PID, MiB, and perhaps another PID");
        return INVALID_ARGUMENT;
    }
    return change_state(word, pid, &memory, holder, error, size);
}

/* "leave UUID PID": it has nothing there any more. */
nvmlReturn_t control_leave(int words, char **word, struct json *json, char *error, size_t size)
{
    uint64_t pid;
    (void)words;
    (void)json;
    if (!parse_unsigned(word[2], 4194304, &pid) || !pid) {
        snprintf(error, size, "leave: found \"%.64s\", expected a PID", word[2]);
        return INVALID_ARGUMENT;
    }
    return change_state(word, pid, NULL, 0, error, size);
}

/* "context UUID enter|leave": of this process itself, which may be any user's and in a container. */
nvmlReturn_t control_context(int words, char **word, struct json *json, char *error, size_t size)
{
    struct place place;
    const struct machine *machine = state_refresh();
    (void)words;
    (void)json;
    if (!machine)
        return DRIVER_NOT_LOADED;
    if (!find_place(machine, word[1], &place, error, size))
        return NOT_FOUND;
    if (strcmp(word[2], "enter") == 0)
        return context_enter(machine, place.gpu, place.instance, place.compute) ? SUCCESS : IN_USE;
    context_leave(machine, place.gpu, place.instance, place.compute);
    return SUCCESS;
}
