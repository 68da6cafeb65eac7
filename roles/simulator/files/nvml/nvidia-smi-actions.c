/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What the nvidia-smi stand-in does: lists, the summary, settings, reset, and MIG by hand.
 */
#include "nvidia-smi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *name_of(nvmlDevice_t device, char *text, unsigned size)
{
    if (NVML("nvmlDeviceGetName", (nvmlDevice_t, char *, unsigned), device, text, size) != SUCCESS)
        snprintf(text, size, "ERR!");
    return text;
}

enum { RESET_LIST_BYTES = 1800 };

static const char *uuid_of(nvmlDevice_t device, char *text, unsigned size)
{
    if (NVML("nvmlDeviceGetUUID", (nvmlDevice_t, char *, unsigned), device, text, size) != SUCCESS)
        snprintf(text, size, "ERR!");
    return text;
}

static bool mig_enabled(nvmlDevice_t device)
{
    unsigned current = 0, pending = 0;
    return NVML("nvmlDeviceGetMigMode", (nvmlDevice_t, unsigned *, unsigned *), device, &current, &pending) == SUCCESS && current;
}

static void list_gpu(unsigned index, nvmlDevice_t device, void *context)
{
    char name[128], uuid[96];
    unsigned count = 0;
    (void)context;
    printf("GPU %u: %s (UUID: %s)\n", index, name_of(device, name, sizeof name), uuid_of(device, uuid, sizeof uuid));
    if (!mig_enabled(device) || NVML("nvmlDeviceGetMaxMigDeviceCount", (nvmlDevice_t, unsigned *), device, &count) != SUCCESS)
        return;
    for (unsigned number = 0; number < count; number++) {
        nvmlDevice_t partition;
        if (NVML("nvmlDeviceGetMigDeviceHandleByIndex", (nvmlDevice_t, unsigned, nvmlDevice_t *), device, number, &partition) != SUCCESS)
            continue;
        const char *profile = strstr(name_of(partition, name, sizeof name), "MIG ");
        printf("  MIG %-11s Device %2u: (UUID: %s)\n", profile ? profile + 4 : name, number, uuid_of(partition, uuid, sizeof uuid));
    }
}

static void summarize_gpu(unsigned index, nvmlDevice_t device, void *context)
{
    char name[128];
    nvmlPciInfo_t pci;
    nvmlMemory_v2_t memory = {.version = VERSION_WORD(nvmlMemory_v2_t, 2)};
    unsigned temperature = 0, usage = 0, limit = 0;
    (void)context;
    memset(&pci, 0, sizeof pci);
    NVML("nvmlDeviceGetPciInfo_v3", (nvmlDevice_t, nvmlPciInfo_t *), device, &pci);
    NVML("nvmlDeviceGetMemoryInfo_v2", (nvmlDevice_t, nvmlMemory_v2_t *), device, &memory);
    NVML("nvmlDeviceGetTemperature", (nvmlDevice_t, unsigned, unsigned *), device, 0u, &temperature);
    NVML("nvmlDeviceGetPowerUsage", (nvmlDevice_t, unsigned *), device, &usage);
    NVML("nvmlDeviceGetPowerManagementLimit", (nvmlDevice_t, unsigned *), device, &limit);
    printf("| %3u  %-28.28s  %-16s  MIG %-3s  %3uC  %4u / %4u W  %7llu / %7llu MiB |\n", index, name_of(device, name, sizeof name),
           pci.busId, mig_enabled(device) ? "on" : "off", temperature, usage / 1000, limit / 1000, memory.used >> 20, memory.total >> 20);
}

static void summary(const struct options *options)
{
    char driver[96] = "";
    int cuda = 0;
    NVML("nvmlSystemGetDriverVersion", (char *, unsigned), driver, sizeof driver);
    NVML("nvmlSystemGetCudaDriverVersion_v2", (int *), &cuda);
    printf("| NVIDIA-SMI %s   Driver Version: %s   CUDA Version: %d.%d\n", driver, driver, cuda / 1000, cuda % 1000 / 10);
    for_each_gpu(options->gpus, summarize_gpu, NULL);
}

static unsigned long number(const char *text, unsigned long maximum)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (end == text || *end || value > maximum)
        fail(SUCCESS, "\"%s\" is not a number from 0 to %lu", text, maximum);
    return value;
}

static void set_one(unsigned index, nvmlDevice_t device, void *context)
{
    const struct options *options = context;
    nvmlReturn_t code = SUCCESS, activation = SUCCESS;
    unsigned low, high;
    char uuid[96];
    switch (options->action) {
    case ACTION_MIG_MODE:
        code = NVML("nvmlDeviceSetMigMode", (nvmlDevice_t, unsigned, nvmlReturn_t *), device, (unsigned)number(options->value, 1), &activation);
        break;
    case ACTION_PERSISTENCE:
        code = NVML("nvmlDeviceSetPersistenceMode", (nvmlDevice_t, unsigned), device, (unsigned)number(options->value, 1));
        break;
    case ACTION_POWER_LIMIT:
        code = NVML("nvmlDeviceSetPowerManagementLimit", (nvmlDevice_t, unsigned), device, (unsigned)number(options->value, 100000) * 1000u);
        break;
    case ACTION_COMPUTE_MODE:
        code = NVML("nvmlDeviceSetComputeMode", (nvmlDevice_t, unsigned), device, (unsigned)number(options->value, 3));
        break;
    case ACTION_LOCK_CLOCKS:
        if (sscanf(options->value, "%u,%u", &low, &high) < 1)
            fail(SUCCESS, "-lgc takes MIN,MAX in MHz, not \"%s\"", options->value);
        if (!strchr(options->value, ','))
            high = low;
        code = NVML("nvmlDeviceSetGpuLockedClocks", (nvmlDevice_t, unsigned, unsigned), device, low, high);
        break;
    case ACTION_UNLOCK_CLOCKS:
        code = NVML("nvmlDeviceResetGpuLockedClocks", (nvmlDevice_t), device);
        break;
    case ACTION_TIMESLICE:
        code = control("timeslice %s %lu", uuid_of(device, uuid, sizeof uuid), number(options->value, 3));
        break;
    default:
        break;
    }
    if (code != SUCCESS)
        fail(code, "GPU %u: the setting was refused", index);
    printf(activation == SUCCESS ? "GPU %u: done.\n" : "GPU %u: the new mode is pending until the GPU is reset.\n", index);
}

static unsigned long number_at(const char *text) { return strtoul(text, NULL, 10); }

static void show_timeslice(unsigned index, nvmlDevice_t device, void *context)
{
    char uuid[96];
    (void)context;
    static const char *const slices[] = { "Default", "Short", "Medium", "Long" };
    nvmlReturn_t code = control("timeslice %s", uuid_of(device, uuid, sizeof uuid));
    const char *answer = strstr(control_reply(), "\"timeslice\": [");
    if (code != SUCCESS || !answer)
        fail(code == SUCCESS ? UNKNOWN : code, "GPU %u", index);
    printf("GPU %u: %s: time slice %s\n", index, uuid, slices[number_at(answer + strlen("\"timeslice\": [")) & 3]);
}

static void append_uuid(unsigned index, nvmlDevice_t device, void *context)
{
    char *list = context, uuid[96];
    size_t used = strlen(list);
    (void)index;
    snprintf(list + used, RESET_LIST_BYTES - used, "%s%s", used ? "," : "", uuid_of(device, uuid, sizeof uuid));
}

/* By UUID, because the machine can have other indexes than this process. GPUs that no longer respond are named like in the caller's options. */
static void reset(const struct options *options)
{
    char list[RESET_LIST_BYTES] = "";
    const char *asked = options->gpus ? options->gpus : "all";
    for_each_gpu(options->gpus, append_uuid, list);
    nvmlReturn_t code = control("gpu-reset %s", *list ? list : asked);
    if (code == IN_USE)
        fail(code, "GPU reset: a process uses the device or one linked to it; end it first");
    if (code == INVALID_ARGUMENT)
        fail(code, "GPU reset: %s: GPUs connected to it by NVLink must be reset together with it", asked);
    if (code == NOT_FOUND)
        fail(code, "GPU reset: %s: no such GPU", asked);
    if (code != SUCCESS)
        fail(code, "GPU reset was refused");
    printf("GPU %s was successfully reset.\nAll done.\n", asked);
}

static void ready_state(const char *value)
{
    unsigned accepting = 0;
    nvmlReturn_t code = value ? NVML("nvmlSystemSetConfComputeGpusReadyState", (unsigned), (unsigned)number(value, 1))
                              : NVML("nvmlSystemGetConfComputeGpusReadyState", (unsigned *), &accepting);
    if (code != SUCCESS)
        fail(code, "the ready state of confidential computing");
    if (!value)
        printf("Confidential Compute GPUs Ready state: %s\n", accepting ? "ready" : "not-ready");
}

int run_action(const struct options *options)
{
    switch (options->action) {
    case ACTION_SUMMARY: summary(options); return 0;
    case ACTION_LIST: for_each_gpu(options->gpus, list_gpu, NULL); return 0;
    case ACTION_QUERY: query(options); return 0;
    case ACTION_DETAILS: print_details(options); return 0;
    case ACTION_QUERY_PROCESSES: query_processes(options); return 0;
    case ACTION_RESET: reset(options); return 0;
    case ACTION_READY_STATE: ready_state(options->value); return 0;
    case ACTION_SHOW_TIMESLICE: for_each_gpu(options->gpus, show_timeslice, NULL); return 0;
    default: break;
    }
    if (run_mig_action(options) || run_workload_action(options))
        return 0;
    for_each_gpu(options->gpus, set_one, (void *)(uintptr_t)options);
    return 0;
}
