/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Processes on a GPU or a MIG device, in every version of the structures.
 */
#include "simulator.h"

#include <string.h>

enum { FIRST = 1, CURRENT = 3 };

static bool belongs(const struct call *call, const struct process *process)
{
    if (!process_alive(process))
        return false;
    return call->compute == NO_INSTANCE
           || (process->gpu_instance == (uint32_t)call->instance
               && (process->compute_instance == (uint32_t)call->compute || process->compute_instance == NOT_TIED));
}

static nvmlReturn_t list_processes(const struct call *call, unsigned *count, void *list, int version)
{
    REQUIRE(count, INVALID_ARGUMENT);
    unsigned room = list ? *count : 0, found = 0;
    if (call->compute != NO_INSTANCE)
        client_of_instance(call->machine, call->gpu_index, call->instance, call->compute);
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        const struct process *process = &call->gpu->processes[index];
        if (!belongs(call, process))
            continue;
        if (found < room && version == FIRST)
            ((nvmlProcessInfo_v1_t *)list)[found] = (nvmlProcessInfo_v1_t){ process->life.pid, process->memory * MIB };
        else if (found < room)
            ((nvmlProcessInfo_t *)list)[found] = (nvmlProcessInfo_t){ process->life.pid, process->memory * MIB, process->gpu_instance,
                                                                       process->compute_instance };
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESS_LIST(function, type, version, none)                                               \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *count, type *list)                \
    {                                                                                             \
        DEVICE_CALL(device, ACCEPT_ANY);                                                          \
        if (none) {                                                                               \
            REQUIRE(count, INVALID_ARGUMENT);                                                     \
            *count = 0;                                                                           \
            return SUCCESS;                                                                       \
        }                                                                                         \
        return list_processes(&call, count, list, version);                                       \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, FIRST, false)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t, CURRENT, false)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, CURRENT, false)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, FIRST, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t, CURRENT, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, CURRENT, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, FIRST, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t, CURRENT, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, CURRENT, true)

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list)
{
    enum { MODE_COMPUTE, MODE_GRAPHICS, MODE_MPS, MODE_ALL };
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(list, INVALID_ARGUMENT);
    REQUIRE(list->version == VERSION_WORD(nvmlProcessDetailList_t, 1), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(list->mode <= MODE_ALL, INVALID_ARGUMENT);
    unsigned room = list->procArray ? list->numProcArrayEntries : 0, found = 0;
    for (unsigned index = 0; index < PROCESSES_MAX && (list->mode == MODE_COMPUTE || list->mode == MODE_ALL); index++) {
        const struct process *process = &call.gpu->processes[index];
        if (!belongs(&call, process))
            continue;
        if (found < room)
            list->procArray[found] = (nvmlProcessDetail_t){ .pid = process->life.pid, .usedGpuMemory = process->memory * MIB,
                                                            .gpuInstanceId = process->gpu_instance,
                                                            .computeInstanceId = process->compute_instance };
        found++;
    }
    list->numProcArrayEntries = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* No sample is newer than any time: nothing runs on silicon that is not there. */
EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, void *samples, unsigned *count, unsigned long long since)
{
    (void)samples;
    (void)since;
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(count, INVALID_ARGUMENT);
    REQUIRE(!call.gpu->mig_current, NOT_SUPPORTED);
    *count = 0;
    return NOT_FOUND;
}
