/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * How often which symbol was called, and by which process: what a bench reads. The numbers are in the shared state; a process that
 * may only read that is not counted.
 */
#include "simulator.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PID_BITS = 24 };             /* a PID is below 2²² */

static struct caller *own;          /* under the process lock; NULL: not looked for yet, or no room */
static bool looked;

static void forget_own(void)
{
    own = NULL;
    looked = false;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_own); }

static uint64_t pid_namespace(void)
{
    uint64_t started, number;
    process_identity((uint32_t)getpid(), &started, &number);
    return number;
}

static bool ended(uint64_t process, uint64_t namespace)
{
    const pid_t pid = (pid_t)(process & ((1u << PID_BITS) - 1));
    uint64_t started, number;
    if (process >> PID_BITS != namespace)
        return false;
    process_identity((uint32_t)pid, &started, &number);
    return started == 0;
}

/* A place of this process's own: a free one, else one of a process that is no more. */
static struct caller *find_own(struct counters *counters)
{
    const uint64_t namespace = pid_namespace(), self = namespace << PID_BITS | (uint64_t)getpid();
    for (int reuse = 0; reuse <= 1; reuse++) {
        for (unsigned index = 0; index < CALLERS_MAX; index++) {
            struct caller *each = &counters->callers[index];
            uint64_t process = atomic_load(&each->process);
            if (process == self || (!process && !reuse) || (process && reuse && ended(process, namespace))) {
                if (process != self && !atomic_compare_exchange_strong(&each->process, &process, self))
                    continue;
                atomic_store(&each->calls, 0);
                return each;
            }
        }
    }
    return NULL;
}

static int compare_name(const void *name, const void *entry) { return strcmp(name, *(const char *const *)entry); }

void count_call(const char *function)
{
    struct counters *counters = state_counters(true);
    const char *const *symbol = bsearch(function, symbol_names, symbol_count, sizeof *symbol_names, compare_name);
    if (!counters || !symbol)
        return;
    atomic_fetch_add_explicit(&counters->symbols[symbol - symbol_names], 1, memory_order_relaxed);
    if (!looked) {
        own = find_own(counters);
        looked = true;
    }
    if (own)
        atomic_fetch_add_explicit(&own->calls, 1, memory_order_relaxed);
}

void count_nothing_yet(void)
{
    struct counters *counters = state_counters(true);
    for (unsigned index = 0; counters && index < SYMBOLS_MAX; index++)
        atomic_store(&counters->symbols[index], 0);
    for (unsigned index = 0; counters && index < CALLERS_MAX; index++)
        atomic_store(&counters->callers[index].calls, 0);
}

void counters_show(struct json *json)
{
    const struct counters *counters = state_counters(false);
    const uint64_t namespace = pid_namespace();
    uint64_t all = 0;
    json_open(json, "functions", '{');
    for (unsigned index = 0; index < symbol_count; index++) {
        uint64_t calls = atomic_load(&counters->symbols[index]);
        if (calls)
            json_number(json, symbol_names[index], (long long)calls);
        all += calls;
    }
    json_close(json, '}');
    json_number(json, "calls", (long long)all);
    json_open(json, "processes", '[');
    for (unsigned index = 0; index < CALLERS_MAX; index++) {
        uint64_t process = atomic_load(&counters->callers[index].process), calls = atomic_load(&counters->callers[index].calls);
        if (!process || !calls)
            continue;
        json_open(json, NULL, '{');
        json_number(json, "pid", (long long)(process & ((1u << PID_BITS) - 1)));
        json_bool(json, "pid_namespace_is_own", process >> PID_BITS == namespace);
        json_number(json, "calls", (long long)calls);
        json_close(json, '}');
    }
    json_close(json, ']');
}
