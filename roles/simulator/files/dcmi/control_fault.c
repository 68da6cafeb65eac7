/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * "fault": faults of a chip or a call.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static const char *const healths[] = { "ok", "warning", "alarm", "critical" };

static bool word_health(struct fault *fault, int index, uint32_t *health)
{
    for (*health = HEALTH_OK; index < fault->words && *health < COUNT_OF(healths); ++*health) {
        if (strcmp(healths[*health], fault->word[index]) == 0)
            return true;
    }
    return refuse(fault, index < fault->words ? fault->word[index] : NULL, "ok, warning, alarm or critical");
}

static bool fault_health(struct fault *fault)
{
    return word_health(fault, 0, &fault->machine->chips[fault->index].health);
}

/* "error CODE [HEALTH]": add it to the chip's list, and notify the subscribers. */
static bool fault_error(struct fault *fault)
{
    struct chip *chip = &fault->machine->chips[fault->index];
    uint64_t code;
    uint32_t health = HEALTH_ALARM;
    if (!word_number(fault, 0, UINT32_MAX, "an error code such as 0x80E01801", &code)
        || (fault->words > 1 && !word_health(fault, 1, &health)))
        return false;
    if (chip->error_count == ERRORS_MAX)
        return refuse(fault, "128 errors", "room for another: clear some");
    chip->errors[chip->error_count++] = (uint32_t)code;
    chip->health = health > chip->health ? health : chip->health;
    event_add(fault->machine, fault->index, (uint32_t)code, health, 1);
    return true;
}

/* "network RESULT": of the test of its port. */
static bool fault_network(struct fault *fault)
{
    struct chip *chip = &fault->machine->chips[fault->index];
    uint64_t result;
    if (!has_port(&chip->board))
        return refuse(fault, "a chip without a network port", "one with a port");
    if (!word_number(fault, 0, DCMI_RDFX_DETECT_IP_SET, "the result of a test, 0 to 8", &result))
        return false;
    port_tested(chip, (uint32_t)result);
    return true;
}

/* "traffic SENT RECEIVED [BAD]": over its network port, in MB/s, and how many of the packets that came were bad. */
static bool fault_traffic(struct fault *fault)
{
    struct chip *chip = &fault->machine->chips[fault->index];
    uint64_t sent, received, bad = 0;
    if (!has_port(&chip->board))
        return refuse(fault, "a chip without a network port", "one with a port");
    if (!word_number(fault, 0, 1000000, "MB/s that are sent", &sent) || !word_number(fault, 1, 1000000, "MB/s that come", &received)
        || (fault->words > 2 && !word_number(fault, 2, UINT32_MAX, "a number of packets", &bad)))
        return false;
    chip->sent = (uint32_t)sent;
    chip->received = (uint32_t)received;
    chip->bad_packets = (uint32_t)bad;
    return true;
}

/* "hccs LINK ERRORS": checksums that were wrong on one of its links. */
static bool fault_hccs(struct fault *fault)
{
    const unsigned links = hccs_links(fault->machine, &fault->machine->chips[fault->index]);
    uint64_t link, errors;
    if (!links)
        return refuse(fault, "a chip whose links of HCCS are not counted", "another");
    if (!word_number(fault, 0, links - 1, "the number of a link", &link) || !word_number(fault, 1, UINT32_MAX, "a number of errors", &errors))
        return false;
    fault->machine->chips[fault->index].hccs_errors[link] = (uint32_t)errors;
    return true;
}

/* "sio ERRORS": checksums that were wrong on the link to the other die. */
static bool fault_sio(struct fault *fault)
{
    uint64_t errors;
    if (!fault->machine->chips[fault->index].board.sio)
        return refuse(fault, "a chip that is no die of a module", "one that is");
    if (!word_number(fault, 0, UINT16_MAX, "a number of errors", &errors))
        return false;
    fault->machine->chips[fault->index].sio_errors = (uint32_t)errors;
    return true;
}

static bool fault_lost(struct fault *fault)
{
    fault->machine->chips[fault->index].lost = true;
    return true;
}

/* "fragmented": free resources are fragmented. Only an empty chip accepts a slice, and is then no longer fragmented. */
static bool fault_fragmented(struct fault *fault)
{
    if (!fault->machine->chips[fault->index].board.slices)
        return refuse(fault, "a chip that cannot be sliced", "one that can");
    fault->machine->chips[fault->index].fragmented = true;
    return true;
}

/* "process PID [VID] [memory MIB]": on the chip, or on the slice. */
static bool fault_process(struct fault *fault)
{
    struct chip *chip = &fault->machine->chips[fault->index];
    uint64_t pid, vid = CHOOSE, memory = 256;
    if (fault->words >= 2 && strcmp(fault->word[fault->words - 2], "memory") == 0) {
        if (!word_number(fault, fault->words - 1, 1 << 24, "memory in MiB", &memory))
            return false;
        fault->words -= 2;
    }
    if (!word_number(fault, 0, 4194304, "a PID", &pid) || pid == 0)
        return pid ? false : refuse(fault, "0", "a PID");
    if (fault->words > 1) {
        if (!word_number(fault, 1, UINT32_MAX, "a virtual id", &vid))
            return false;
        const uint64_t index = vid - slice_vid(chip, 0);
        if (vid < slice_vid(chip, 0) || index >= SLICES_MAX || !chip->slices[index].serial)
            return refuse(fault, fault->word[1], "the virtual id of a slice of this chip");
    }
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        struct process *process = &chip->processes[index];
        if (lifetime_lasts(&process->life))
            continue;
        *process = (struct process){ .life.pid = (uint32_t)pid, .vid = (uint32_t)vid, .memory = memory };
        process_identity((uint32_t)pid, &process->life.started, &process->life.pid_namespace);
        return true;
    }
    return refuse(fault, "64 processes", "room for another");
}

const struct fault_kind fault_kinds[] = {
    { "health", fault_health }, { "error", fault_error }, { "network", fault_network }, { "traffic", fault_traffic },
    { "hccs", fault_hccs }, { "sio", fault_sio }, { "lost", fault_lost }, { "fragmented", fault_fragmented },
    { "process", fault_process }, { "call", fault_call },
    { 0 } };
