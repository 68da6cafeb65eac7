/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Events: a ring in the shared state, and event sets that remember what they have seen. A set belongs to one process; what
 * happens in any process reaches every set that registered for it.
 */
#include "simulator.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SINGLE_BIT_ECC 0x1ull
#define DOUBLE_BIT_ECC 0x2ull
#define PSTATE 0x4ull
#define XID 0x8ull
#define CLOCK 0x10ull
#define MIG_CONFIGURATION 0x100ull
#define ERROR_EVENTS 0xFE00ull      /* storm, DRAM retirement and failure, poison, GPU unavailable, recovery action */

struct event_set {
    struct event_set *next;
    uint64_t seen;
    uint64_t types[GPUS_MAX];
};

static struct event_set *sets;      /* under the process lock: a set that was freed is known as such */

static bool known_set(nvmlEventSet_t set)
{
    for (struct event_set *each = sets; each; each = each->next) {
        if (each == set)
            return true;
    }
    return false;
}

void event_add(struct machine *machine, int gpu, uint64_t type, uint64_t data, uint32_t instance, uint32_t compute)
{
    uint64_t sequence = ++machine->events_written;
    machine->events[sequence % EVENTS_MAX] = (struct event){ .sequence = sequence, .type = type, .data = data, .gpu = (uint32_t)gpu,
                                                             .gpu_instance = instance, .compute_instance = compute };
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    CALL(call_begin);
    REQUIRE(set, INVALID_ARGUMENT);
    struct event_set *created = calloc(1, sizeof *created);
    REQUIRE(created, MEMORY);
    created->seen = call.machine->events_written;
    created->next = sets;
    sets = created;
    *set = created;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    CALL(call_begin);
    for (struct event_set **each = &sets; *each; each = &(*each)->next) {
        if (*each == set) {
            *each = set->next;
            free(set);
            return SUCCESS;
        }
    }
    return INVALID_ARGUMENT;
}

static uint64_t supported_types(const struct gpu *gpu)
{
    uint64_t types = PSTATE | XID | CLOCK | ERROR_EVENTS;
    if (gpu->board.ecc != ABSENT)
        types |= SINGLE_BIT_ECC | DOUBLE_BIT_ECC;
    if (gpu->board.mig != MIG_NONE)
        types |= MIG_CONFIGURATION;
    return types;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(types, INVALID_ARGUMENT);
    *types = supported_types(call.gpu);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(known_set(set), INVALID_ARGUMENT);
    REQUIRE((types & ~supported_types(call.gpu)) == 0, NOT_SUPPORTED);
    for (unsigned gpu = 0; set->seen < call.machine->events_written && gpu <= GPUS_MAX; gpu++) {
        if (gpu == GPUS_MAX)
            set->seen = call.machine->events_written;      /* first registration: earlier events are not delivered */
        else if (set->types[gpu])
            break;
    }
    set->types[call.gpu_index] |= types;
    return SUCCESS;
}

/* The oldest event that the set has registered for and not seen. */
static bool next_event(const struct machine *machine, struct event_set *set, nvmlEventData_t *data)
{
    if (machine->events_written > EVENTS_MAX && set->seen < machine->events_written - EVENTS_MAX)
        set->seen = machine->events_written - EVENTS_MAX;  /* a slow reader loses the oldest */
    while (set->seen < machine->events_written) {
        const struct event *event = &machine->events[++set->seen % EVENTS_MAX];
        if (event->gpu >= machine->gpu_count || !(set->types[event->gpu] & event->type))
            continue;
        *data = (nvmlEventData_t){ .device = handle_of_gpu(machine, (int)event->gpu), .eventType = event->type,
                                   .eventData = event->data, .gpuInstanceId = event->gpu_instance,
                                   .computeInstanceId = event->compute_instance };
        return true;
    }
    return false;
}

/* A GPU that fell off the bus sends no more events. Waiting processes get this as an error. */
static bool lost_gpu(const struct machine *machine, const struct event_set *set)
{
    for (unsigned gpu = 0; gpu < machine->gpu_count; gpu++) {
        if (set->types[gpu] && machine->gpus[gpu].lost)
            return true;
    }
    return false;
}

static int64_t monotonic_milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static nvmlReturn_t wait_for_event(const char *function, nvmlEventSet_t set, nvmlEventData_t *data, unsigned milliseconds)
{
    int64_t deadline = monotonic_milliseconds() + milliseconds;
    for (bool first = true;; first = false) {
        uint64_t generation;
        {
            struct call call __attribute__((cleanup(call_end)));
            nvmlReturn_t result = call_begin(&call, first ? function : "event wait");
            if (result != SUCCESS)
                return result;
            REQUIRE(data && known_set(set), INVALID_ARGUMENT);
            generation = state_copy_generation();
            if (next_event(call.machine, set, data))
                return SUCCESS;
            if (lost_gpu(call.machine, set))
                return GPU_IS_LOST;
        }
        int64_t left = deadline - monotonic_milliseconds();
        if (left <= 0)
            return TIMEOUT;
        state_wait(generation, left < 1000 ? left : 1000);
    }
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned milliseconds)
{
    return wait_for_event(__func__, set, data, milliseconds);
}

/* The first version's structure ends before the instance ids. */
EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned milliseconds)
{
    nvmlEventData_t full;
    nvmlReturn_t result = wait_for_event(__func__, set, data ? &full : NULL, milliseconds);
    if (result == SUCCESS)
        memcpy(data, &full, offsetof(nvmlEventData_t, gpuInstanceId));
    return result;
}
