/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * nvidia-smi --query-compute-apps: the processes of each GPU, those on its MIG devices among them.
 */
#include "nvidia-smi.h"

#include <stdio.h>
#include <string.h>

enum column { COLUMN_UUID, COLUMN_PID, COLUMN_NAME, COLUMN_MEMORY };
enum { COLUMNS_MAX = 16, PROCESSES_SHOWN_MAX = 128, NAME_BYTES = 256 };

static const struct { const char *name, *other, *heading; enum column column; } columns[] = {
    { "gpu_uuid", "gpu_uuid", "gpu_uuid", COLUMN_UUID },
    { "pid", "pid", "pid", COLUMN_PID },
    { "process_name", "name", "process_name", COLUMN_NAME },
    { "used_gpu_memory", "used_memory", "used_gpu_memory [MiB]", COLUMN_MEMORY },
};

struct listing {
    unsigned chosen[COLUMNS_MAX], count;
    bool header, units;
};

static unsigned find_column(const char *name)
{
    for (unsigned index = 0; index < sizeof columns / sizeof columns[0]; index++) {
        if (!strcmp(columns[index].name, name) || !strcmp(columns[index].other, name))
            return index;
    }
    fail(SUCCESS, "Field \"%s\" is not a valid field to query; gpu_uuid, pid, process_name and used_gpu_memory are", name);
}

static void print_process(const struct listing *listing, const char *uuid, const nvmlProcessInfo_t *process)
{
    for (unsigned index = 0; index < listing->count; index++) {
        char name[NAME_BYTES] = "";
        fputs(index ? ", " : "", stdout);
        switch (columns[listing->chosen[index]].column) {
        case COLUMN_UUID: fputs(uuid, stdout); break;
        case COLUMN_PID: printf("%u", process->pid); break;
        case COLUMN_MEMORY: printf("%llu%s", process->usedGpuMemory >> 20, listing->units ? " MiB" : ""); break;
        default:
            if (NVML("nvmlSystemGetProcessName", (unsigned, char *, unsigned), process->pid, name, sizeof name) != SUCCESS)
                snprintf(name, sizeof name, "[Not Found]");
            fputs(name, stdout);
        }
    }
    putchar('\n');
}

static void print_processes(unsigned index, nvmlDevice_t device, void *context)
{
    nvmlProcessInfo_t processes[PROCESSES_SHOWN_MAX];
    unsigned count = PROCESSES_SHOWN_MAX;
    char uuid[96] = "";
    nvmlReturn_t code = NVML("nvmlDeviceGetComputeRunningProcesses_v3", (nvmlDevice_t, unsigned *, nvmlProcessInfo_t *), device, &count,
                             processes);
    if (code != SUCCESS)
        fail(code, "Unable to list the processes of GPU %u", index);
    NVML("nvmlDeviceGetUUID", (nvmlDevice_t, char *, unsigned), device, uuid, sizeof uuid);
    for (unsigned each = 0; each < count; each++)
        print_process(context, uuid, &processes[each]);
}

void query_processes(const struct options *options)
{
    struct listing listing = { .header = true, .units = true };
    char list[1024];
    snprintf(list, sizeof list, "%s", options->value);
    for (char *save, *word = strtok_r(list, ", ", &save); word; word = strtok_r(NULL, ", ", &save)) {
        if (listing.count == COLUMNS_MAX)
            fail(SUCCESS, "at most %d fields can be asked for at once", COLUMNS_MAX);
        listing.chosen[listing.count++] = find_column(word);
    }
    read_format(options, "--query-compute-apps", &listing.header, &listing.units);
    for (unsigned index = 0; listing.header && index < listing.count; index++)
        printf("%s%s%s", index ? ", " : "", columns[listing.chosen[index]].heading, index + 1 == listing.count ? "\n" : "");
    for_each_gpu(options->gpus, print_processes, &listing);
}
