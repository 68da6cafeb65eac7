/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * "fault": faults of a GPU or a call.
 */
#include "simulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { XID_FALLEN_OFF_THE_BUS = 79, XID_DOUBLE_BIT_ECC = 48, XID_ROW_REMAP_RECORDED = 63, XID_ROW_REMAP_FAILURE = 64,
       XID_RECOVERY_ACTION_CHANGED = 154 };
enum recovery { RECOVER_NONE, RECOVER_GPU_RESET, RECOVER_NODE_REBOOT, RECOVER_DRAIN_P2P, RECOVER_DRAIN_AND_RESET };
enum event_type { EVENT_SINGLE_BIT = 1, EVENT_DOUBLE_BIT = 2, EVENT_XID = 8, EVENT_CLOCKS = 0x10, EVENT_RETIREMENT_FAILURE = 0x800,
                  EVENT_FATAL_POISON = 0x2000, EVENT_UNAVAILABLE = 0x4000, EVENT_RECOVERY_ACTION = 0x8000 };

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

/* Xids after which the GPU asks for a recovery (Xid 154), by NVIDIA's Xid catalog, each from its first driver branch on. Which action
 * follows 63, 94, 95, and 161 is chosen. 46, 119, and 140 are not among them, although a reset is needed. */
static uint32_t recovery_of_xid(uint64_t xid, unsigned long branch)
{
    enum { EVERY = 0 };
    static const struct { unsigned xid, branch; enum recovery action; } raising[] = {
        { XID_DOUBLE_BIT_ECC, EVERY, RECOVER_DRAIN_AND_RESET }, { 62, 565, RECOVER_GPU_RESET }, { XID_ROW_REMAP_RECORDED, 565, RECOVER_DRAIN_AND_RESET },
        { XID_ROW_REMAP_FAILURE, 565, RECOVER_GPU_RESET }, { XID_FALLEN_OFF_THE_BUS, 565, RECOVER_NODE_REBOOT },
        { 94, 565, RECOVER_DRAIN_AND_RESET }, { 95, 565, RECOVER_DRAIN_AND_RESET }, { 109, 570, RECOVER_GPU_RESET }, { 110, 565, RECOVER_GPU_RESET },
        { 120, 565, RECOVER_GPU_RESET }, { 136, 565, RECOVER_GPU_RESET }, { 143, 575, RECOVER_GPU_RESET }, { 155, 565, RECOVER_GPU_RESET },
        { 156, 565, RECOVER_GPU_RESET }, { 158, EVERY, RECOVER_GPU_RESET }, { 161, 575, RECOVER_DRAIN_AND_RESET } };
    for (size_t index = 0; index < COUNT_OF(raising); index++) {
        if (raising[index].xid == xid && branch >= raising[index].branch)
            return raising[index].action;
    }
    return RECOVER_NONE;
}

static void emit_xid(struct fault *fault, uint64_t xid, uint32_t instance, uint32_t compute)
{
    event_add(fault->machine, fault->index, EVENT_XID, xid, instance, compute);
    uint32_t action = recovery_of_xid(xid, strtoul(fault->machine->driver_version, NULL, 10));
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

/* NVML's other errors, each with the recovery action that the GPU then requires (chosen: the header does not define it). */
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
        *process = (struct process){ .life.pid = (uint32_t)pid, .gpu_instance = instance, .compute_instance = compute, .memory = memory };
        process_identity((uint32_t)pid, &process->life.started, &process->life.pid_namespace);
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

/* The feature is the machine's: whichever GPU is named, all have it. A machine with it starts without accepting work. */
static bool fault_confidential(struct fault *fault)
{
    const char *mode = fault->words == 1 ? fault->word[0] : "";
    const bool on = strcmp(mode, "on") == 0, protected_pcie = strcmp(mode, "protected-pcie") == 0;
    if (!on && !protected_pcie && strcmp(mode, "off") != 0)
        return refuse(fault, fault->words ? fault->word[0] : NULL, "on, protected-pcie or off");
    fault->machine->confidential |= on || protected_pcie;
    fault->machine->confidential_on = on;
    fault->machine->protected_pcie = protected_pcie;
    fault->machine->ready_state = 0;
    return true;
}

const struct fault_kind fault_kinds[] = {
    { "xid", fault_xid }, { "ecc", fault_ecc }, { "row-remap", fault_row_remap }, { "lost", fault_lost }, { "thermal", fault_thermal },
    { "event", fault_event }, { "slowdown", fault_slowdown }, { "fabric", fault_fabric }, { "process", fault_process },
    { "nvlink", fault_link }, { "recovery-action", fault_recovery }, { "confidential-computing", fault_confidential },
    { "call", fault_call }, { 0 } };
