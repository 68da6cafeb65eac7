/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Fault events: one thread of the process waits for changes of the shared state, and notifies every subscriber of new events.
 */
#include "simulator.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { SUBSCRIBERS_MAX = 64, FILTER_EVENT = 1, FILTER_SEVERITY = 2, WAIT_MILLISECONDS = 1000 };

typedef void (*told)(struct dcmi_event *fault_event);

static struct subscriber { told tell; int chip; struct dcmi_event_filter filter; } subscribers[SUBSCRIBERS_MAX];   /* chip NO_DEVICE: all */
static unsigned subscriber_count;   /* under the process lock, as all of these */
static bool running;
static uint64_t told_of;

/* A child has no thread but the one that forked. */
static void forget_all(void)
{
    running = false;
    subscriber_count = 0;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_all); }

static bool wanted(const struct subscriber *subscriber, const struct event *event)
{
    const struct dcmi_event_filter *filter = &subscriber->filter;
    return (subscriber->chip == NO_DEVICE || subscriber->chip == (int)event->chip) && seen_logic((int)event->chip) != NO_DEVICE
           && (!(filter->filter_flag & FILTER_EVENT) || filter->event_id == event->code)
           && (!(filter->filter_flag & FILTER_SEVERITY) || event->severity >= filter->severity);
}

/* The lock is not held while a subscriber's function runs, because it can call the library. */
static void tell(const struct event *event)
{
    struct dcmi_event told_event;
    memset(&told_event, 0, sizeof told_event);
    told_event.type = DCMI_DMS_FAULT_EVENT;
    struct dcmi_dms_fault_event *fault = &told_event.event_t.dms_event;
    fault->event_id = event->code;
    fault->deviceid = (unsigned short)seen_logic((int)event->chip);
    fault->severity = (unsigned char)event->severity;
    fault->assertion = (unsigned char)event->assertion;
    fault->event_serial_num = fault->notify_serial_num = (int)event->sequence;
    fault->alarm_raised_time = event->time;
    snprintf(fault->event_name, sizeof fault->event_name, "simulated fault 0x%08X", event->code);
    for (unsigned index = 0; index < subscriber_count; index++) {
        const struct subscriber subscriber = subscribers[index];
        if (!wanted(&subscriber, event))
            continue;
        process_unlock();
        subscriber.tell(&told_event);
        process_lock();
    }
}

static void *watch(void *nothing)
{
    for (;;) {
        process_lock();
        const struct machine *machine = state_refresh();
        const uint64_t generation = state_copy_generation(), newest = machine ? machine->events_written : told_of;
        while (machine && told_of < newest) {
            const struct event event = machine->events[++told_of % EVENTS_MAX];
            if (event.sequence == told_of)
                tell(&event);
            machine = state_refresh();
        }
        process_unlock();
        state_wait(generation, WAIT_MILLISECONDS);
    }
    return nothing;
}

static int subscribe(const struct call *call, struct dcmi_event_filter filter, told tell_whom)
{
    pthread_t thread;
    REQUIRE(tell_whom && subscriber_count < SUBSCRIBERS_MAX, INVALID_ARGUMENT);
    subscribers[subscriber_count++] = (struct subscriber){ .tell = tell_whom, .chip = call->index, .filter = filter };
    if (running)
        return SUCCESS;
    told_of = call->machine->events_written;
    running = pthread_create(&thread, NULL, watch, NULL) == 0 && pthread_detach(thread) == 0;
    return running ? SUCCESS : INTERNAL;
}

/* Card and device -1: all chips. */
EXPORT int dcmi_subscribe_fault_event(int card_id, int device_id, struct dcmi_event_filter filter, told f_name)
{
    struct call call __attribute__((cleanup(call_end)));
    int result = card_id == -1 ? call_begin(&call, __func__, INTERFACE_1) : call_begin_chip(&call, __func__, card_id, device_id);
    return result == SUCCESS ? subscribe(&call, filter, f_name) : result;
}

EXPORT int dcmiv2_subscribe_fault_event(int dev_id, struct dcmi_event_filter filter, told f_name)
{
    struct call call __attribute__((cleanup(call_end)));
    int result = dev_id == -1 ? call_begin(&call, __func__, INTERFACE_2) : call_begin_device(&call, __func__, dev_id);
    return result == SUCCESS ? subscribe(&call, filter, f_name) : result;
}

/* A reset takes others along: of the first 910 the ring, of the second all chips with HCCS, of modules the dies of both associated cards, of
 * pairs the card. */
static bool reset_together(const struct chip *one, const struct chip *other)
{
    const struct board *a = &one->board, *b = &other->board;
    if (one == other)
        return true;
    if (a->sio)
        return b->sio && a->card / 2 == b->card / 2;
    if (a->hccs_group == ABSENT || b->hccs_group == ABSENT)
        return false;
    return a->sriov ? b->sriov : a->hccs_group == b->hccs_group;
}

/* A reset clears injected faults. It fails if any of its chips has slices or processes. */
static int reset(struct call *call)
{
    WRITE_CALL(call);
    /* Of a pair only the first chip takes the call. */
    REQUIRE(call->chip->board.hbm || call->chip->board.hccs_group == ABSENT || !call->chip->board.chip, NOT_SUPPORTED);
    for (unsigned index = 0; index < call->machine->chip_count; index++) {
        const struct chip *chip = &call->machine->chips[index];
        REQUIRE(!reset_together(call->chip, chip) || (!chip_sliced(chip) && !chip_has_processes(chip)
                                                      && !user_of(call->machine, (int)index, NO_DEVICE)), BUSY);
    }
    for (unsigned index = 0; index < call->machine->chip_count; index++) {
        struct chip *chip = &call->write->chips[index];
        if (!reset_together(call->chip, chip))
            continue;
        for (unsigned error = 0; error < chip->error_count; error++)
            event_add(call->write, (int)index, chip->errors[error], 0, 0);
        chip->health = HEALTH_OK;
        chip->error_count = 0;
    }
    return call_commit(call);
}

EXPORT int dcmi_set_device_reset(int card_id, int device_id, enum dcmi_reset_channel channel_type)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(channel_type == OUTBAND_CHANNEL || channel_type == INBAND_CHANNEL, INVALID_ARGUMENT);
    return reset(&call);
}

EXPORT int dcmiv2_reset_device(int dev_id, enum dcmi_reset_channel channel_type)
{
    CALL(call_begin_device, dev_id);
    REQUIRE(channel_type == OUTBAND_CHANNEL || channel_type == INBAND_CHANNEL, INVALID_ARGUMENT);
    return reset(&call);
}
