/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What the parts of the nvidia-smi stand-in share.
 */
#ifndef NVIDIA_SMI_H
#define NVIDIA_SMI_H

#include "nvml_types.h"

#include <stdbool.h>

enum action {
    ACTION_SUMMARY, ACTION_HELP, ACTION_LIST, ACTION_HELP_QUERY, ACTION_QUERY, ACTION_DETAILS, ACTION_QUERY_PROCESSES, ACTION_RESET, ACTION_MIG_MODE,
    ACTION_PERSISTENCE,
    ACTION_POWER_LIMIT, ACTION_COMPUTE_MODE, ACTION_LOCK_CLOCKS, ACTION_UNLOCK_CLOCKS, ACTION_TIMESLICE, ACTION_SHOW_TIMESLICE,
    ACTION_MIG_PROFILES, ACTION_MIG_PLACEMENTS, ACTION_MIG_INSTANCES, ACTION_MIG_COMPUTE_INSTANCES, ACTION_MIG_CREATE,
    ACTION_MIG_DESTROY_COMPUTE, ACTION_MIG_DESTROY, ACTION_WORKLOAD_PROFILES, ACTION_REQUESTED_PROFILES, ACTION_ENFORCED_PROFILES,
    ACTION_READY_STATE
};

struct options {
    enum action action;
    const char *group, *gpus, *value, *format, *instance;
    bool with_compute_instance;
    unsigned loop;                  /* s; 0: once */
};

/* Calls an NVML function by name; every one returns nvmlReturn_t. */
#define NVML(name, types, ...) ((nvmlReturn_t (*) types)nvml_symbol(name))(__VA_ARGS__)

#define PROFILE_ENUMS 18u
#define COMPUTE_PROFILE_ENUMS 9u
#define MAXIMUM_INSTANCES 32u

void *nvml_symbol(const char *name);
const char *nvml_text(nvmlReturn_t code);
int exit_code(nvmlReturn_t code);
void fail(nvmlReturn_t code, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
/* One command to the library's private entry; returns an NVML error number. */
nvmlReturn_t control(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* What the last command answered: a JSON object. */
const char *control_reply(void);
/* Calls `act` for the GPUs named in `wanted` (index, UUID or bus id, by commas; NULL: all); returns how many. */
unsigned for_each_gpu(const char *wanted, void (*act)(unsigned, nvmlDevice_t, void *), void *context);

void list_query_fields(void);
void query(const struct options *options);
/* Reads --format of a query; ends the program for what it does not know, or without csv. */
void read_format(const struct options *options, const char *query_option, bool *header, bool *units);
void query_processes(const struct options *options);
void print_details(const struct options *options);
int run_action(const struct options *options);
bool run_mig_action(const struct options *options);
bool run_workload_action(const struct options *options);

#endif
