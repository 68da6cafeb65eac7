/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Faults of calls: set them, and apply them to a call.
 */
#include "simulator.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static bool is_version_suffix(const char *text)
{
    return text[0] == '_' && text[1] == 'v' && text[2] >= '0' && text[2] <= '9';
}

/* A fault on X also meets X_v2; a fault on X_v2 meets only that. */
static bool fault_meets(const struct call_fault *fault, const char *function, int device)
{
    size_t length = strlen(fault->function);
    return fault->used && (fault->device == NO_DEVICE || fault->device == device) && strncmp(fault->function, function, length) == 0
           && (function[length] == '\0' || (is_version_suffix(function + length) && !strstr(fault->function, "_v")));
}

static double monotonic_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Delay the call without blocking other threads. Then read the state again. */
static bool pass_time(const struct machine **machine, double seconds)
{
    uint64_t generation = state_copy_generation();
    process_unlock();
    state_wait(generation, (int64_t)ceil(fmin(seconds, 1.0) * 1000));
    process_lock();
    *machine = state_refresh();
    return *machine != NULL;
}

/* Delay the call for the fault's time, or until the fault is cleared. */
static bool sit_out_fault(const struct machine **machine, unsigned index)
{
    const struct call_fault fault = (*machine)->faults[index];
    const double end = monotonic_seconds() + fault.delay;
    while ((*machine)->faults[index].used && (*machine)->faults[index].number == fault.number && monotonic_seconds() < end) {
        if (!pass_time(machine, end - monotonic_seconds()))
            return false;
    }
    return true;
}

/* An operation that takes its time. */
bool pass_operation(const struct machine **machine)
{
    const double end = monotonic_seconds() + (*machine)->operation_delay / 1000.0;
    while (monotonic_seconds() < end) {
        if (!pass_time(machine, end - monotonic_seconds()))
            return false;
    }
    return true;
}

/* The faults that meet this call, all or those of one device: each is sat out, and the code of the first that fails is the answer. */
int faults_take(const struct machine **machine, const char *function, int device, bool only_of_device)
{
    int code = SUCCESS;
    bool meets[CALL_FAULTS_MAX];
    for (unsigned index = 0; index < CALL_FAULTS_MAX; index++) {
        const struct call_fault *fault = &(*machine)->faults[index];
        meets[index] = fault_meets(fault, function, device) && !(only_of_device && fault->device == NO_DEVICE)
                       && (!fault->nth || state_count_call(index) == fault->nth);
        if (meets[index] && code == SUCCESS)
            code = fault->code;
    }
    for (unsigned index = 0; index < CALL_FAULTS_MAX; index++) {
        if (meets[index] && (*machine)->faults[index].delay > 0 && !sit_out_fault(machine, index))
            return DRIVER_NOT_LOADED;
    }
    return code;
}

bool refuse(struct fault *fault, const char *found, const char *expected)
{
    snprintf(fault->error, fault->size, "fault: found \"%s\", expected %s", found ? found : "nothing", expected);
    return false;
}

bool word_number(struct fault *fault, int index, uint64_t maximum, const char *what, uint64_t *value)
{
    if (index < fault->words && parse_unsigned(fault->word[index], maximum, value))
        return true;
    return refuse(fault, index < fault->words ? fault->word[index] : NULL, what);
}

static bool seconds(const char *text, double *value)
{
    char *end;
    *value = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*value) && *value >= 0 && *value <= 3600;
}

/* call FUNCTION fail CODE [nth N], call FUNCTION delay SECONDS [nth N], call FUNCTION hang [nth N] */
bool fault_call(struct fault *fault)
{
    struct call_fault call = { .used = true, .device = fault->index };
    int64_t code = 0;
    uint64_t nth = 0;
    const bool hang = fault->words > 1 && strcmp(fault->word[1], "hang") == 0;
    const int given = hang ? 2 : 3;
    if (fault->words != given && fault->words != given + 2)
        return refuse(fault, "call", "call FUNCTION fail CODE|delay SECONDS|hang [nth N]");
    if (strncmp(fault->word[0], FUNCTION_PREFIX, strlen(FUNCTION_PREFIX)) != 0 || strlen(fault->word[0]) >= sizeof call.function)
        return refuse(fault, fault->word[0], "the full name of an " INTERFACE_NAME " function");
    copy_text(call.function, sizeof call.function, fault->word[0]);
    if (hang) {
        call.delay = HUGE_VAL;
    } else if (strcmp(fault->word[1], "fail") == 0) {
        if (!parse_signed(fault->word[2], FAULT_CODE_MINIMUM, FAULT_CODE_MAXIMUM, &code) || code == SUCCESS)
            return refuse(fault, fault->word[2], "an " INTERFACE_NAME " error number");
        call.code = (int32_t)code;
    } else if (strcmp(fault->word[1], "delay") != 0 || !seconds(fault->word[2], &call.delay)) {
        return refuse(fault, fault->word[1], "fail CODE, delay and 0 to 3600 seconds, or hang");
    }
    if (fault->words == given + 2) {
        if (strcmp(fault->word[given], "nth") != 0 || !word_number(fault, given + 1, UINT32_MAX, "a number from 1", &nth) || nth == 0)
            return refuse(fault, fault->word[given], "nth and a number from 1");
        call.nth = (uint32_t)nth;
    }
    for (unsigned index = 0; index < CALL_FAULTS_MAX; index++) {
        if (fault->machine->faults[index].used)
            continue;
        call.number = ++fault->machine->faults_injected;
        fault->machine->faults[index] = call;
        state_reset_call_count(index);
        return true;
    }
    return refuse(fault, "64 injected call faults", "room for another: clear some");
}

static bool apply(const char *kind, struct fault *fault)
{
    char expected[256] = "one of";
    for (const struct fault_kind *each = fault_kinds; each->name; each++) {
        if (strcmp(each->name, kind) == 0)
            return each->apply(fault);
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), " %s", each->name);
    }
    return refuse(fault, kind, expected);
}

int control_fault(int words, char **word, struct json *json, char *error, size_t size)
{
    bool chosen[DEVICES_MAX], good = true;
    struct machine *machine;
    (void)json;
    int result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    struct fault fault = { .words = words - 3, .word = word + 3, .machine = machine, .index = NO_DEVICE, .error = error, .size = size };
    if (strcmp(word[1], "all") == 0 && strcmp(word[2], "call") == 0) {
        good = apply(word[2], &fault);
    } else {
        good = find_devices(machine, word[1], chosen, error, size);
        for (unsigned device = 0; good && device < machine_devices(machine); device++) {
            fault.index = (int)device;
            fault.words = words - 3;
            good = !chosen[device] || apply(word[2], &fault);
        }
    }
    if (good)
        state_commit();
    else
        state_abandon();
    return good ? SUCCESS : INVALID_ARGUMENT;
}

void clear_call_faults(struct machine *machine, const bool chosen[DEVICES_MAX], bool all)
{
    for (unsigned index = 0; index < CALL_FAULTS_MAX; index++) {
        struct call_fault *fault = &machine->faults[index];
        if (fault->used && (fault->device == NO_DEVICE ? all : chosen[fault->device]))
            *fault = (struct call_fault){ 0 };
    }
}

void show_call_faults(struct json *json, const struct machine *machine, const char *device_key)
{
    json_open(json, "call_faults", '[');
    for (unsigned index = 0; index < CALL_FAULTS_MAX; index++) {
        const struct call_fault *fault = &machine->faults[index];
        if (!fault->used)
            continue;
        json_open(json, NULL, '{');
        json_number(json, device_key, fault->device);
        json_text(json, "function", fault->function);
        json_number(json, "code", fault->code);
        json_number(json, "delay_milliseconds", isinf(fault->delay) ? -1 : (long long)(fault->delay * 1000));
        json_number(json, "nth", fault->nth);
        json_close(json, '}');
    }
    json_close(json, ']');
}
