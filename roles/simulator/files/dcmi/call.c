/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The frame of a call: initialized? an injected fault? a chip that this process has, and that is still there? Then the answer, and
 * for changes: privilege, the lock, and the commit.
 */
#include "simulator.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ANY_CHIP = INT32_MAX - 1 };

static unsigned initialized;        /* enum interface; under the process lock */
static atomic_uint threads_inside;  /* that are in a call, asleep or not */

static void start(struct call *call, const char *function, unsigned interface)
{
    *call = (struct call){ .function = function, .index = NO_DEVICE, .slice = NO_DEVICE, .card = NO_DEVICE, .device = NO_DEVICE,
                           .interface = interface, .locked = true, .inside = true };
    atomic_fetch_add(&threads_inside, 1);
    process_lock();
}

/* A child has no thread but the one that forked. */
static void leave_all(void) { atomic_store(&threads_inside, 0); }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, leave_all); }

/* DCMI does not support several threads of a process. The behavior of a real library is not known; this one ends the process. */
static void refuse_threads(const struct call *call)
{
    if (!call->machine->single_thread || atomic_load(&threads_inside) <= 1)
        return;
    fprintf(stderr, "simulated DCMI: %s: another thread of this process is in a call\n", call->function);
    abort();
}

static int initialize(const char *function, unsigned interface)
{
    struct call call __attribute__((cleanup(call_end)));
    start(&call, function, interface);
    if (state_open() != SUCCESS || !(call.machine = state_refresh()))
        return INTERNAL;
    refuse_threads(&call);
    count_call(function);
    /* Programs that detect virtual machines and containers. A result that cannot be read is ignored. */
    if (call.machine->init_command[0] && system(call.machine->init_command) == -1)
        fprintf(stderr, "simulated DCMI: the result of a program cannot be read\n");
    int result = faults_take(&call.machine, function, NO_DEVICE, false);
    REQUIRE(result == SUCCESS, result);
    REQUIRE(call.machine->interface == interface, NOT_SUPPORTED);
    result = visibility_enter(call.machine);
    REQUIRE(result == SUCCESS, result);
    initialized = interface;
    return SUCCESS;
}

EXPORT int dcmi_init(void) { return initialize(__func__, INTERFACE_1); }

EXPORT int dcmiv2_init(void) { return initialize(__func__, INTERFACE_2); }

/* The chip that the numbers name, as this process sees it. */
static int resolve(struct call *call)
{
    const struct machine *machine = call->machine;
    call->index = call->slice = NO_DEVICE;
    call->chip = NULL;
    if (call->device == NO_DEVICE)
        return SUCCESS;
    for (unsigned number = 0; number < seen_count(); number++) {
        const struct seen *seen = seen_device(number);
        const struct chip *chip = &machine->chips[seen->chip];
        const bool named = call->interface == INTERFACE_2 ? (unsigned)call->device == number
                                                         : chip->board.card == (unsigned)call->card
                                                               && (call->device == ANY_CHIP || chip->board.chip == (unsigned)call->device);
        if (!named)
            continue;
        call->index = seen->chip;
        call->slice = seen->slice;
        call->chip = chip;
        if (chip->lost || chip->epoch != seen->epoch)
            return NOT_FOUND;
        /* It was destroyed under its container. */
        return seen->slice == NO_DEVICE || chip->slices[seen->slice].serial == seen->serial ? SUCCESS : INTERNAL;
    }
    return INVALID_DEVICE;
}

static int begin(struct call *call)
{
    if (initialized != call->interface)
        return NOT_READY;
    call->machine = state_refresh();
    REQUIRE(call->machine, INTERNAL);
    refuse_threads(call);
    visibility_follow(call->machine);
    count_call(call->function);
    resolve(call);
    int result = faults_take(&call->machine, call->function, call->index, false);
    REQUIRE(call->machine, INTERNAL);
    const bool operation = strstr(call->function, "_vdevice") && (strstr(call->function, "create") || strstr(call->function, "destroy"));
    REQUIRE(!operation || pass_operation(&call->machine), INTERNAL);
    return result == SUCCESS ? resolve(call) : result;
}

int call_begin(struct call *call, const char *function, unsigned interface)
{
    start(call, function, interface);
    return begin(call);
}

int call_begin_chip(struct call *call, const char *function, int card, int device)
{
    start(call, function, INTERFACE_1);
    call->card = card;
    call->device = device < 0 ? INT32_MAX : device;
    return begin(call);
}

int call_begin_card(struct call *call, const char *function, int card)
{
    start(call, function, INTERFACE_1);
    call->card = card;
    call->device = ANY_CHIP;
    return begin(call);
}

int call_begin_device(struct call *call, const char *function, int number)
{
    start(call, function, INTERFACE_2);
    call->device = number < 0 ? INT32_MAX : number;
    return begin(call);
}

/* From here on no other process writes. Find the chip again, because it was found in an older state. */
int call_write(struct call *call)
{
    if (geteuid() != 0)
        return NO_PERMISSION;
    if (in_container(call->machine))
        return IN_CONTAINER;
    int result = state_begin_write(&call->write);
    if (result != SUCCESS)
        return result;
    call->writing = true;
    call->machine = call->write;
    REQUIRE(call->machine->loaded, INTERNAL);
    result = resolve(call);
    if (result == SUCCESS && call->index != NO_DEVICE)
        call->chip_write = &call->write->chips[call->index];
    return result;
}

int call_commit(struct call *call)
{
    state_commit();
    call->writing = false;
    return SUCCESS;
}

int call_commit_slices(struct call *call)
{
    slices_commit(call->write);
    call->writing = false;
    return SUCCESS;
}

void call_end(struct call *call)
{
    if (call->writing)
        state_abandon();
    if (call->locked)
        process_unlock();
    if (call->inside)
        atomic_fetch_sub(&threads_inside, 1);
}

int stub_answer(const char *function, int answer)
{
    struct call call __attribute__((cleanup(call_end)));
    int result = call_begin(&call, function, strncmp(function, "dcmiv2_", 7) == 0 ? INTERFACE_2 : INTERFACE_1);
    return result == SUCCESS ? answer : result;
}
