/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The commands of an operator: load, boot, faults, and what else no call of the interface does.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

size_t machine_used_bytes(const struct machine *machine)
{
    uint32_t count = machine->chip_count <= CHIPS_MAX ? machine->chip_count : CHIPS_MAX;
    return offsetof(struct machine, chips) + count * sizeof(struct chip);
}

unsigned machine_devices(const struct machine *machine) { return machine->chip_count; }

const char *code_text(int code)
{
    switch (code) {
    case SUCCESS: return "done";
    case INVALID_ARGUMENT: return "a wrong argument";
    case NO_PERMISSION: return "not permitted";
    case INVALID_DEVICE: return "no such device";
    case NOT_FOUND: return "not found";
    case NOT_READY: return "not ready";
    case IN_CONTAINER: return "busy, or not in a container";
    case OCCUPIED: return "occupied";
    case NOT_SUPPORTED: return "not supported";
    default: return "an internal error";
    }
}

/* By physical id, by VDIE, by PCI address, by commas, or all. */
bool find_devices(const struct machine *machine, const char *selection, bool chosen[DEVICES_MAX], char *error, size_t size)
{
    char copy[1024], *rest = copy;
    memset(chosen, 0, DEVICES_MAX * sizeof *chosen);
    copy_text(copy, sizeof copy, selection);
    for (char *name = strsep(&rest, ","); name; name = strsep(&rest, ",")) {
        struct address address;
        uint64_t number;
        bool found = false, is_address = parse_address(name, &address), is_number = parse_unsigned(name, CHIPS_MAX - 1, &number);
        for (unsigned index = 0; index < machine->chip_count; index++) {
            const struct board *board = &machine->chips[index].board;
            char vdie[48];
            snprintf(vdie, sizeof vdie, "%08x%08x%08x%08x%08x", board->vdie[0], board->vdie[1], board->vdie[2], board->vdie[3], board->vdie[4]);
            if (strcmp(name, "all") == 0 || (is_number && number == board->physical) || strcasecmp(name, vdie) == 0
                || (is_address && same_address(&board->address, &address)))
                found = chosen[index] = true;
        }
        if (!found) {
            snprintf(error, size, "NPU: found \"%s\", expected a physical id, a VDIE or a PCI address of this machine", name);
            return false;
        }
    }
    return true;
}

static int run_load(int words, char **word, struct json *json, char *error, size_t size)
{
    static struct machine loaded;           /* under the process lock */
    struct machine *machine;
    (void)words;
    if (geteuid() != 0) {
        snprintf(error, size, "load: found user %u, expected root", (unsigned)geteuid());
        return NO_PERMISSION;
    }
    if (!machine_parse(word[1], &loaded, error, size))
        return INVALID_ARGUMENT;
    int result = state_create();
    if (result == SUCCESS)
        result = state_open();
    if (result == SUCCESS)
        result = state_begin_write(&machine);
    if (result != SUCCESS) {
        snprintf(error, size, "the state file beside the library cannot be made or written: %s", code_text(result));
        return result;
    }
    const uint64_t serial = machine->serial, events = machine->events_written, loads = machine->loads, faults = machine->faults_injected;
    uint64_t epoch = 0;
    for (unsigned index = 0; index < machine->chip_count; index++)
        epoch = machine->chips[index].epoch > epoch ? machine->chips[index].epoch : epoch;
    *machine = loaded;
    machine->serial = serial;
    machine->loads = loads + 1;
    machine->host_mount_namespace = own_mount_namespace();
    machine->faults_injected = faults;
    machine->events_written = events;
    machine->recover = true;
    for (unsigned index = 0; index < machine->chip_count; index++) {
        machine->chips[index].epoch = epoch;
        chip_power_on(&machine->chips[index]);
    }
    for (unsigned fault = 0; fault < CALL_FAULTS_MAX; fault++)
        state_reset_call_count(fault);
    count_nothing_yet();
    /* As the installation of the driver makes it. */
    if (!slices_save(machine)) {
        snprintf(error, size, "%s/vnpu.cfg cannot be written", machine->etc_root);
        state_abandon();
        return OPERATING_SYSTEM;
    }
    json_number(json, "npus", machine->chip_count);
    slices_commit(machine);
    return SUCCESS;
}

static int run_power_cycle(int words, char **word, struct json *json, char *error, size_t size)
{
    struct machine *machine;
    (void)json;
    if (words == 2 && strcmp(word[1], "late") != 0) {
        snprintf(error, size, "power-cycle: found \"%s\", expected late or nothing", word[1]);
        return INVALID_ARGUMENT;
    }
    int result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    for (unsigned index = 0; index < machine->chip_count; index++) {
        const bool share = machine->share_recover && machine->chips[index].share;
        chip_power_on(&machine->chips[index]);
        machine->chips[index].share = share;
    }
    if (words == 1)
        slices_replay(machine);
    slices_commit(machine);
    return SUCCESS;
}

/* What the driver's script does at a boot, which can be after other programs have started. */
static int run_recover(int words, char **word, struct json *json, char *error, size_t size)
{
    struct machine *machine;
    (void)words;
    (void)word;
    (void)json;
    int result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    slices_replay(machine);
    slices_commit(machine);
    return SUCCESS;
}

/* Change the chips of the selection. */
static int change(const char *selection, void (*act)(struct machine *, struct chip *, uint64_t), uint64_t number, char *error, size_t size)
{
    bool chosen[DEVICES_MAX];
    struct machine *machine;
    int result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    if (!find_devices(machine, selection, chosen, error, size)) {
        state_abandon();
        return NOT_FOUND;
    }
    for (unsigned index = 0; index < machine->chip_count; index++) {
        if (chosen[index])
            act(machine, &machine->chips[index], number);
    }
    slices_commit(machine);
    return SUCCESS;
}

static void set_presence(struct machine *machine, struct chip *chip, uint64_t present)
{
    (void)machine;
    if (chip->unplugged == !present)
        return;
    chip->unplugged = !present;
    chip_power_on(chip);
}

static int run_unplug(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)json;
    return change(word[1], set_presence, false, error, size);
}

static int run_plug(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)json;
    return change(word[1], set_presence, true, error, size);
}

static void set_share(struct machine *machine, struct chip *chip, uint64_t share)
{
    (void)machine;
    chip->share = share;
}

/* "device-share NPU 0|1": several containers can use one chip. The vendor's tool sets it with a call that no other program uses. */
static int run_device_share(int words, char **word, struct json *json, char *error, size_t size)
{
    uint64_t share;
    (void)words;
    (void)json;
    if (!parse_unsigned(word[2], 1, &share)) {
        snprintf(error, size, "device-share: found \"%s\", expected 0 or 1", word[2]);
        return INVALID_ARGUMENT;
    }
    return change(word[1], set_share, share, error, size);
}

static void set_share_recover(struct machine *machine, struct chip *chip, uint64_t keep)
{
    (void)chip;
    machine->share_recover = keep;
}

/* "device-share-recover 0|1": whether a boot leaves chips shared that were; of the vendor's tool alone, as the above. */
static int run_share_recover(int words, char **word, struct json *json, char *error, size_t size)
{
    uint64_t keep;
    (void)words;
    (void)json;
    if (!parse_unsigned(word[1], 1, &keep)) {
        snprintf(error, size, "device-share-recover: found \"%s\", expected 0 or 1", word[1]);
        return INVALID_ARGUMENT;
    }
    return change("all", set_share_recover, keep, error, size);
}

static void set_work_mode(struct machine *machine, struct chip *chip, uint64_t mode)
{
    (void)chip;
    machine->work_mode = (uint32_t)mode;
}

/* "work-mode amp|smp": what the management controller of the board does while the host is off. */
static int run_work_mode(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)json;
    const bool smp = strcmp(word[1], "smp") == 0;
    if (!smp && strcmp(word[1], "amp") != 0) {
        snprintf(error, size, "work-mode: found \"%s\", expected amp or smp", word[1]);
        return INVALID_ARGUMENT;
    }
    return change("all", set_work_mode, smp ? WORK_SMP : WORK_AMP, error, size);
}

static int run_clear(int words, char **word, struct json *json, char *error, size_t size)
{
    bool chosen[DEVICES_MAX];
    struct machine *machine;
    (void)json;
    const char *selection = words > 1 ? word[1] : "all";
    int result = begin_control_write(&machine, error, size);
    if (result != SUCCESS)
        return result;
    if (!find_devices(machine, selection, chosen, error, size)) {
        state_abandon();
        return NOT_FOUND;
    }
    clear_call_faults(machine, chosen, strcmp(selection, "all") == 0);
    for (unsigned index = 0; index < machine->chip_count; index++) {
        struct chip *chip = &machine->chips[index];
        if (!chosen[index])
            continue;
        for (unsigned error_index = 0; error_index < chip->error_count; error_index++)
            event_add(machine, (int)index, chip->errors[error_index], 0, 0);
        chip->health = HEALTH_OK;
        chip->error_count = 0;
        port_tested(chip, DCMI_RDFX_DETECT_OK);
        links_rest(chip);
        chip->lost = chip->unplugged;
        chip->fragmented = false;
        memset(chip->processes, 0, sizeof chip->processes);
    }
    state_commit();
    return SUCCESS;
}

const struct command commands[] = {
    { "load", run_load, 2, 2, "load PATH" },
    { "show", control_show, 1, 1, "show" },
    { "template", control_template, 3, 3, "template PHYSICAL NUMBER" },
    { "power-cycle", run_power_cycle, 1, 2, "power-cycle [late]" },
    { "recover", run_recover, 1, 1, "recover" },
    { "unplug", run_unplug, 2, 2, "unplug NPU[,NPU…]" },
    { "plug", run_plug, 2, 2, "plug NPU[,NPU…]" },
    { "device-share", run_device_share, 3, 3, "device-share NPU 0|1" },
    { "device-share-recover", run_share_recover, 2, 2, "device-share-recover 0|1" },
    { "port", control_port, 2, 2, "port PHYSICAL" },
    { "work-mode", run_work_mode, 2, 2, "work-mode amp|smp" },
    { "event-count", run_event_count, 1, 1, "event-count" },
    { "calls", run_calls, 1, 2, "calls [reset]" },
    { "clear", run_clear, 1, 2, "clear [NPU]" },
    { "fault", control_fault, 3, COMMAND_WORDS_MAX, "fault NPU health|error|network|traffic|hccs|sio|lost|fragmented|process|call …" },
    { 0 },
};
