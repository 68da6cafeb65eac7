/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Library life, versions, and what concerns the whole machine.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static unsigned references;
static uint64_t scanned;            /* the load whose devices are known */

bool initialized(void) { return references > 0; }

void follow_machine(const struct machine *machine)
{
    if (machine->loads != scanned) {
        visibility_scan(machine);
        scanned = machine->loads;
    }
}

static nvmlReturn_t initialize(bool attach)
{
    process_lock();
    nvmlReturn_t result = references ? SUCCESS : state_open();
    const struct machine *machine = result == SUCCESS ? state_refresh() : NULL;
    if (result == SUCCESS && (!machine || !control_node_openable(machine)))
        result = DRIVER_NOT_LOADED;
    if (result == SUCCESS && !references) {
        scanned = 0;
        follow_machine(machine);
        client_enter(machine, attach);
    }
    references += result == SUCCESS;
    process_unlock();
    return result;
}

static void leave(void)
{
    references--;
    if (!references)
        client_leave();
}

/* Injected faults meet the initialization as well: it stays undone when they make it fail. */
static nvmlReturn_t initialize_with_faults(const char *function, bool attach)
{
    nvmlReturn_t result = initialize(attach);
    if (result == SUCCESS) {
        result = stub_answer(function, SUCCESS);
        if (result != SUCCESS) {
            process_lock();
            leave();
            process_unlock();
        }
    }
    return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return initialize_with_faults(__func__, true); }
ALIAS(nvmlInit, nvmlInit_v2, void);

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    enum { NO_GPUS = 1, NO_ATTACH = 2 };
    return flags & ~(unsigned)(NO_GPUS | NO_ATTACH) ? INVALID_ARGUMENT : initialize_with_faults(__func__, !(flags & NO_ATTACH));
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    process_lock();
    nvmlReturn_t result = references ? SUCCESS : UNINITIALIZED;
    if (references)
        leave();
    process_unlock();
    return result;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized", "Not Found",
        "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout", "Interrupt Request Issue",
        "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "The operating system has blocked the request", "RM has detected an NVML/RM version mismatch", "In use by another client",
        "Insufficient Memory", "No data", "vGPU ECC not supported", "Insufficient Resources", "Frequency not supported",
        "Argument version mismatch", "Deprecated", "Not ready", "No GPUs found", "Invalid state", "Reset type not supported" };
    return result >= 0 && (size_t)result < COUNT_OF(texts) ? texts[result] : "Unknown Error";
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    CALL(call_begin);
    return answer_text(version, length, call.machine->driver_version);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    CALL(call_begin);
    return answer_text(version, length, call.machine->nvml_version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    CALL(call_begin);
    REQUIRE(version, INVALID_ARGUMENT);
    *version = (int)call.machine->cuda_version;
    return SUCCESS;
}
ALIAS(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2, int *);

/* The branch is the release's first number: r580_00 of 580.95.05. */
EXPORT nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_t *info, unsigned length)
{
    CALL(call_begin);
    REQUIRE(info, INVALID_ARGUMENT);
    REQUIRE(info->version == VERSION_WORD(nvmlSystemDriverBranchInfo_t, 1), ARGUMENT_VERSION_MISMATCH);
    char text[40];
    snprintf(text, sizeof text, "r%.*s_00", (int)strcspn(call.machine->driver_version, "."), call.machine->driver_version);
    return answer_text(info->branch, length < sizeof info->branch ? length : sizeof info->branch, text);
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    CALL(call_begin);
    REQUIRE(name && length, INVALID_ARGUMENT);
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    REQUIRE(file, NOT_FOUND);
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = '\0';
    copy_text(name, length, text);          /* the first argument; cut where the caller has less room */
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetHicVersion(unsigned *count, nvmlHwbcEntry_t *entries)
{
    (void)entries;
    CALL(call_begin);
    REQUIRE(count, INVALID_ARGUMENT);
    *count = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlUnitGetCount(unsigned *count)
{
    CALL(call_begin);
    REQUIRE(count, INVALID_ARGUMENT);
    *count = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned *count)
{
    CALL(call_begin);
    REQUIRE(count, INVALID_ARGUMENT);
    *count = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlGetExcludedDeviceInfoByIndex(unsigned index, void *info)
{
    (void)index;
    (void)info;
    CALL(call_begin);
    return INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlSystemGetConfComputeCapabilities(nvmlConfComputeSystemCaps_t *capabilities)
{
    CALL(call_begin);
    REQUIRE(capabilities, INVALID_ARGUMENT);
    capabilities->cpuCaps = 0;
    capabilities->gpusCaps = call.machine->confidential;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetConfComputeState(nvmlConfComputeSystemState_t *state)
{
    CALL(call_begin);
    REQUIRE(state, INVALID_ARGUMENT);
    *state = (nvmlConfComputeSystemState_t){ .ccFeature = call.machine->confidential_on };
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetConfComputeSettings(nvmlSystemConfComputeSettings_t *settings)
{
    CALL(call_begin);
    REQUIRE(settings, INVALID_ARGUMENT);
    REQUIRE(settings->version == VERSION_WORD(nvmlSystemConfComputeSettings_t, 1), ARGUMENT_VERSION_MISMATCH);
    *settings = (nvmlSystemConfComputeSettings_t){
        .version = settings->version, .ccFeature = call.machine->confidential_on, .multiGpuMode = call.machine->protected_pcie };
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetConfComputeGpusReadyState(unsigned *accepting)
{
    CALL(call_begin);
    REQUIRE(accepting, INVALID_ARGUMENT);
    REQUIRE(call.machine->confidential, NOT_SUPPORTED);
    *accepting = call.machine->ready_state;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemSetConfComputeGpusReadyState(unsigned accepting)
{
    CALL(call_begin);
    REQUIRE(call.machine->confidential, NOT_SUPPORTED);
    REQUIRE(accepting <= 1, INVALID_ARGUMENT);
    WRITE_CALL();
    call.write->ready_state = accepting;
    return call_commit(&call);
}

/* GPUs whose affinity holds the CPU; the count alone where the array is missing. */
EXPORT nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned cpu, unsigned *count, nvmlDevice_t *devices)
{
    CALL(call_begin);
    REQUIRE(count && cpu < CPUS_MAX, INVALID_ARGUMENT);
    unsigned found = 0, room = devices ? *count : 0;
    for (unsigned index = 0; index < visible_count(); index++) {
        unsigned long mask[CPUS_MAX / (8 * sizeof(unsigned long))];
        const unsigned bits = 8 * sizeof *mask;
        cpu_list_to_mask(call.machine->gpus[visible_gpu(index)].board.cpu_affinity, mask, COUNT_OF(mask));
        if (!(mask[cpu / bits] >> cpu % bits & 1))
            continue;
        if (found < room)
            devices[found] = handle_of_gpu(call.machine, visible_gpu(index));
        found++;
    }
    *count = found;
    return devices && found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
