/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * "fault": what goes wrong on a GPU, or in a call.
 */
#include "simulator.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { XID_FALLEN_OFF_THE_BUS = 79, XID_DOUBLE_BIT_ECC = 48, XID_ROW_REMAP_RECORDED = 63, XID_ROW_REMAP_FAILURE = 64,
       XID_RECOVERY_ACTION_CHANGED = 154 };
enum recovery { RECOVER_NONE, RECOVER_GPU_RESET, RECOVER_NODE_REBOOT, RECOVER_DRAIN_P2P, RECOVER_DRAIN_AND_RESET };
enum event_type { EVENT_SINGLE_BIT = 1, EVENT_DOUBLE_BIT = 2, EVENT_XID = 8, EVENT_CLOCKS = 0x10, EVENT_RETIREMENT_FAILURE = 0x800,
                  EVENT_FATAL_POISON = 0x2000, EVENT_UNAVAILABLE = 0x4000, EVENT_RECOVERY_ACTION = 0x8000 };

struct fault {
    int words;
    char **word;                    /* after the GPU and the kind of fault */
    struct machine *machine;
    int index;                      /* of the GPU; NO_INSTANCE for a call without a device */
    char *error;
    size_t size;
};

static bool refuse(struct fault *fault, const char *found, const char *expected)
{
    snprintf(fault->error, fault->size, "fault: found \"%s\", expected %s", found ? found : "nothing", expected);
    return false;
}

static bool word_number(struct fault *fault, int index, uint64_t maximum, const char *what, uint64_t *value)
{
    if (index < fault->words && parse_unsigned(fault->word[index], maximum, value))
        return true;
    return refuse(fault, index < fault->words ? fault->word[index] : NULL, what);
}

/* Optional ids of a GPU instance and a compute instance that exist. */
static bool instance_words(struct fault *fault, int first, uint32_t *instance, uint32_t *compute)
{
    const struct gpu *gpu = &fault->machine->gpus[fault->index];
    uint64_t gpu_instance, compute_instance;
    *instance = *compute = NOT_TIED;
    if (first >= fault->words)
        return true;
    if (!word_number(fault, first, INSTANCES_MAX - 1, "the id of a GPU instance", &gpu_instance)
        || !word_number(fault, first + 1, COMPUTE_INSTANCES_MAX - 1, "the id of a compute instance", &compute_instance))
        return false;
    if (!gpu->instances[gpu_instance].serial || !gpu->instances[gpu_instance].compute[compute_instance].serial)
        return refuse(fault, fault->word[first], "ids of an existing GPU instance and a compute instance in it");
    *instance = (uint32_t)gpu_instance;
    *compute = (uint32_t)compute_instance;
    return true;
}

static void set_recovery(struct fault *fault, uint32_t action)
{
    struct gpu *gpu = &fault->machine->gpus[fault->index];
    if (gpu->recovery_action == action)
        return;
    gpu->recovery_action = action;
    event_add(fault->machine, fault->index, EVENT_XID, XID_RECOVERY_ACTION_CHANGED, NOT_TIED, NOT_TIED);
    event_add(fault->machine, fault->index, EVENT_RECOVERY_ACTION, action, NOT_TIED, NOT_TIED);
}

/* What NVIDIA's catalogue asks for at once: a reset, a restart of the machine, or nothing of the node. */
static uint32_t recovery_of_xid(uint64_t xid)
{
    static const unsigned resets[] = { 46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158 };
    for (size_t index = 0; index < COUNT_OF(resets); index++) {
        if (resets[index] == xid)
            return xid == 95 || xid == 48 ? RECOVER_DRAIN_AND_RESET : RECOVER_GPU_RESET;
    }
    return xid == XID_FALLEN_OFF_THE_BUS ? RECOVER_NODE_REBOOT : RECOVER_NONE;
}

static void emit_xid(struct fault *fault, uint64_t xid, uint32_t instance, uint32_t compute)
{
    event_add(fault->machine, fault->index, EVENT_XID, xid, instance, compute);
    uint32_t action = recovery_of_xid(xid);
    if (action > fault->machine->gpus[fault->index].recovery_action)
        set_recovery(fault, action);
}

static bool fault_xid(struct fault *fault)
{
    uint64_t xid;
    uint32_t instance, compute;
    if (!word_number(fault, 0, 1023, "an XID below 1024", &xid) || !instance_words(fault, 1, &instance, &compute))
        return false;
    emit_xid(fault, xid, instance, compute);
    return true;
}

static bool fault_ecc(struct fault *fault)
{
    struct gpu *gpu = &fault->machine->gpus[fault->index];
    uint64_t count = 1;
    bool uncorrected = fault->words && strcmp(fault->word[0], "dbe") == 0;
    if (!uncorrected && (!fault->words || strcmp(fault->word[0], "sbe") != 0))
        return refuse(fault, fault->words ? fault->word[0] : NULL, "sbe or dbe");
    if (fault->words > 1 && !word_number(fault, 1, 1000000, "a count", &count))
        return false;
    if (!gpu->ecc_current)
        return refuse(fault, "ECC off", "a GPU with ECC on");
    gpu->ecc_volatile[uncorrected] += count;
    gpu->ecc_aggregate[uncorrected] += count;
    event_add(fault->machine, fault->index, uncorrected ? EVENT_DOUBLE_BIT : EVENT_SINGLE_BIT, count, NOT_TIED, NOT_TIED);
    if (uncorrected)
        emit_xid(fault, XID_DOUBLE_BIT_ECC, NOT_TIED, NOT_TIED);
    return true;
}

static bool fault_row_remap(struct fault *fault)
{
    struct gpu *gpu = &fault->machine->gpus[fault->index];
    if (!gpu->board.row_remapping)
        return refuse(fault, gpu->board.name, "a board with row remapping");
    if (fault->words == 1 && strcmp(fault->word[0], "pending") == 0) {
        gpu->remap_pending = true;
        emit_xid(fault, XID_ROW_REMAP_RECORDED, NOT_TIED, NOT_TIED);
        set_recovery(fault, RECOVER_DRAIN_AND_RESET);   /* what runs may go on */
        return true;
    }
    if (fault->words == 1 && strcmp(fault->word[0], "failure") == 0) {
        gpu->remap_failure = true;
        emit_xid(fault, XID_ROW_REMAP_FAILURE, NOT_TIED, NOT_TIED);
        return true;
    }
    return refuse(fault, fault->words ? fault->word[0] : NULL, "pending or failure");
}

static bool fault_lost(struct fault *fault)
{
    emit_xid(fault, XID_FALLEN_OFF_THE_BUS, NOT_TIED, NOT_TIED);
    fault->machine->gpus[fault->index].lost = true;
    return true;
}

static bool fault_thermal(struct fault *fault)
{
    fault->machine->gpus[fault->index].thermal = true;
    event_add(fault->machine, fault->index, EVENT_CLOCKS, 0, NOT_TIED, NOT_TIED);
    return true;
}

/* NVML's other errors, each with what the GPU asks for after it (chosen: the header does not tell). */
static bool fault_event(struct fault *fault)
{
    static const struct { const char *name; uint64_t type; uint32_t recovery; } events[] = {
        { "retirement-failure", EVENT_RETIREMENT_FAILURE, RECOVER_DRAIN_AND_RESET },
        { "fatal-poison", EVENT_FATAL_POISON, RECOVER_GPU_RESET },
        { "unavailable", EVENT_UNAVAILABLE, RECOVER_GPU_RESET },
    };
    for (size_t index = 0; fault->words == 1 && index < COUNT_OF(events); index++) {
        if (strcmp(events[index].name, fault->word[0]) == 0) {
            event_add(fault->machine, fault->index, events[index].type, 0, NOT_TIED, NOT_TIED);
            set_recovery(fault, events[index].recovery);
            return true;
        }
    }
    return refuse(fault, fault->words ? fault->word[0] : NULL, "retirement-failure, fatal-poison or unavailable");
}

static bool fault_slowdown(struct fault *fault)
{
    enum { HARDWARE = 0x8, POWER_BRAKE = 0x80 };    /* of nvmlClocksEventReason… */
    struct gpu *gpu = &fault->machine->gpus[fault->index];
    if (fault->words == 1 && strcmp(fault->word[0], "hardware") == 0)
        gpu->slowdown = HARDWARE;
    else if (fault->words == 1 && strcmp(fault->word[0], "power-brake") == 0)
        gpu->slowdown = HARDWARE | POWER_BRAKE;
    else
        return refuse(fault, fault->words ? fault->word[0] : NULL, "hardware or power-brake");
    event_add(fault->machine, fault->index, EVENT_CLOCKS, 0, NOT_TIED, NOT_TIED);
    return true;
}

static bool fault_fabric(struct fault *fault)
{
    static const char *const faults[] = { [FABRIC_NOT_STARTED] = "not-started", [FABRIC_JOINING] = "joining",
                                          [FABRIC_FAILED] = "failed", [FABRIC_ROUTES] = "routes", [FABRIC_MENDING] = "mending",
                                          [FABRIC_PLACE] = "place", [FABRIC_BANDWIDTH] = "bandwidth" };
    struct gpu *gpu = &fault->machine->gpus[fault->index];
    if (!gpu->board.fabric_state)
        return refuse(fault, gpu->board.name, "a GPU that is attached to a fabric");
    for (uint32_t number = FABRIC_NOT_STARTED; fault->words == 1 && number < COUNT_OF(faults); number++) {
        if (strcmp(faults[number], fault->word[0]) == 0) {
            gpu->fabric_fault = number;
            return true;
        }
    }
    return refuse(fault, fault->words ? fault->word[0] : NULL, "not-started, joining, failed, routes, mending, place or bandwidth");
}

static bool fault_process(struct fault *fault)
{
    struct gpu *gpu = &fault->machine->gpus[fault->index];
    uint64_t pid, memory = 256;
    uint32_t instance, compute;
    if (fault->words >= 2 && strcmp(fault->word[fault->words - 2], "memory") == 0) {
        if (!word_number(fault, fault->words - 1, 1 << 24, "memory in MiB", &memory))
            return false;
        fault->words -= 2;
    }
    if (!word_number(fault, 0, 4194304, "a PID", &pid) || pid == 0 || !instance_words(fault, 1, &instance, &compute))
        return pid ? false : refuse(fault, "0", "a PID");
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        struct process *process = &gpu->processes[index];
        if (process_alive(process))
            continue;
        *process = (struct process){ .pid = (uint32_t)pid, .gpu_instance = instance, .compute_instance = compute, .memory = memory };
        process_identity((uint32_t)pid, &process->started, &process->pid_namespace);
        return true;
    }
    return refuse(fault, "64 processes", "room for another");
}

static bool fault_link(struct fault *fault)
{
    struct gpu *gpu = &fault->machine->gpus[fault->index];
    uint64_t link;
    if (!word_number(fault, 0, LINKS_MAX - 1, "the number of a link", &link) || !gpu->board.links[link].present)
        return refuse(fault, fault->words ? fault->word[0] : NULL, "the number of a link of this GPU");
    uint32_t bit = 1u << link % 32;
    if (fault->words == 2 && strcmp(fault->word[1], "down") == 0)
        gpu->links_down[link / 32] |= bit;
    else if (fault->words == 2 && strcmp(fault->word[1], "up") == 0)
        gpu->links_down[link / 32] &= ~bit;
    else
        return refuse(fault, fault->words > 1 ? fault->word[1] : NULL, "down or up");
    if (strcmp(fault->word[1], "down") == 0)
        event_add(fault->machine, fault->index, EVENT_XID, 74, NOT_TIED, NOT_TIED);
    return true;
}

static bool fault_recovery(struct fault *fault)
{
    uint64_t action;
    if (!word_number(fault, 0, 7, "a recovery action from 0 to 7", &action))
        return false;
    set_recovery(fault, (uint32_t)action);
    return true;
}

static bool seconds(const char *text, double *value)
{
    char *end;
    *value = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*value) && *value >= 0 && *value <= 3600;
}

/* call FUNCTION fail CODE [nth N], call FUNCTION delay SECONDS [nth N], call FUNCTION hang [nth N] */
static bool fault_call(struct fault *fault)
{
    struct call_fault call = { .used = true, .gpu = fault->index };
    uint64_t code = 0, nth = 0;
    const bool hang = fault->words > 1 && strcmp(fault->word[1], "hang") == 0;
    const int given = hang ? 2 : 3;
    if (fault->words != given && fault->words != given + 2)
        return refuse(fault, "call", "call FUNCTION fail CODE|delay SECONDS|hang [nth N]");
    if (strncmp(fault->word[0], "nvml", 4) != 0 || strlen(fault->word[0]) >= sizeof call.function)
        return refuse(fault, fault->word[0], "the full name of an NVML function");
    copy_text(call.function, sizeof call.function, fault->word[0]);
    if (hang) {
        call.delay = HUGE_VAL;
    } else if (strcmp(fault->word[1], "fail") == 0) {
        if (!word_number(fault, 2, UNKNOWN, "an NVML error number", &code) || code == SUCCESS)
            return refuse(fault, fault->word[2], "an NVML error number");
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
    static const struct { const char *name; bool (*apply)(struct fault *); } kinds[] = {
        { "xid", fault_xid }, { "ecc", fault_ecc }, { "row-remap", fault_row_remap }, { "lost", fault_lost },
        { "thermal", fault_thermal }, { "event", fault_event }, { "slowdown", fault_slowdown }, { "fabric", fault_fabric },
        { "process", fault_process }, { "nvlink", fault_link }, { "recovery-action", fault_recovery }, { "call", fault_call } };
    for (size_t index = 0; index < COUNT_OF(kinds); index++) {
        if (strcmp(kinds[index].name, kind) == 0)
            return kinds[index].apply(fault);
    }
    return refuse(fault, kind, "xid, ecc, event, row-remap, lost, thermal, slowdown, fabric, process, nvlink, recovery-action or call");
}

nvmlReturn_t control_fault(int words, char **word, struct json *json, char *error, size_t size)
{
    bool chosen[GPUS_MAX], good = true;
    struct machine *machine;
    (void)json;
    nvmlReturn_t result = state_begin_write(&machine);
    if (result != SUCCESS || !machine->loaded) {
        snprintf(error, size, "%s", result == NO_PERMISSION ? "the state cannot be written; expected root, on the host"
                                                            : "no machine is loaded; load one first");
        state_abandon();
        return result == SUCCESS ? DRIVER_NOT_LOADED : result;
    }
    struct fault fault = { .words = words - 3, .word = word + 3, .machine = machine, .index = NO_INSTANCE, .error = error, .size = size };
    if (strcmp(word[1], "all") == 0 && strcmp(word[2], "call") == 0) {
        good = apply(word[2], &fault);
    } else {
        good = find_gpus(machine, word[1], chosen, error, size);
        for (unsigned gpu = 0; good && gpu < machine->gpu_count; gpu++) {
            fault.index = (int)gpu;
            fault.words = words - 3;
            good = !chosen[gpu] || apply(word[2], &fault);
        }
    }
    if (good)
        state_commit();
    else
        state_abandon();
    return good ? SUCCESS : INVALID_ARGUMENT;
}
