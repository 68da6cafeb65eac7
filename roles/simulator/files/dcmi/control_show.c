/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * "show": the machine and all of its live state as JSON.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static void show_slices(struct json *json, const struct machine *machine, int index)
{
    const struct chip *chip = &machine->chips[index];
    json_open(json, "slices", '[');
    for (unsigned slice = 0; slice < SLICES_MAX; slice++) {
        const struct slice *each = &chip->slices[slice];
        if (!each->serial)
            continue;
        json_open(json, NULL, '{');
        json_number(json, "vid", slice_vid(chip, slice));
        json_text(json, "template", chip->board.templates[each->template].name);
        json_number(json, "group", each->group == CHOOSE ? -1 : (long long)each->group);
        json_number(json, "container", user_of(machine, index, (int)slice));
        json_close(json, '}');
    }
    json_close(json, ']');
}

static void show_port(struct json *json, const struct chip *chip)
{
    json_number(json, "link_ups", chip->link_ups);
    json_number(json, "link_downs", chip->link_downs);
    json_number(json, "sent", chip->sent);
    json_number(json, "received", chip->received);
    json_number(json, "bad_packets", chip->bad_packets);
}

static void show_chip(struct json *json, const struct machine *machine, int index)
{
    const struct chip *chip = &machine->chips[index];
    const struct board *board = &chip->board;
    char address[32], vdie[48];
    format_address_sysfs(&board->address, address);
    snprintf(vdie, sizeof vdie, "%08X%08X%08X%08X%08X", board->vdie[0], board->vdie[1], board->vdie[2], board->vdie[3], board->vdie[4]);
    json_open(json, NULL, '{');
    json_number(json, "index", index);
    json_number(json, "card", board->card);
    json_number(json, "chip", board->chip);
    json_number(json, "physical", board->physical);
    json_text(json, "name", board->name);
    json_text(json, "serial", board->serial);
    json_text(json, "vdie", vdie);
    json_text(json, "pci_address", address);
    json_number(json, "memory_mib", (long long)board->memory_mib);
    json_number(json, "health", chip->health);
    json_number(json, "network", chip->network);
    show_port(json, chip);
    json_number(json, "sio_errors", chip->sio_errors);
    json_open(json, "hccs_errors", '[');
    for (unsigned link = 0, links = hccs_links(machine, chip); link < links; link++)
        json_number(json, NULL, chip->hccs_errors[link]);
    json_close(json, ']');
    json_bool(json, "lost", chip->lost);
    json_bool(json, "unplugged", chip->unplugged);
    json_bool(json, "device_share", chip->share);
    json_bool(json, "fragmented", chip->fragmented);
    json_number(json, "container", user_of(machine, index, NO_DEVICE));
    json_open(json, "errors", '[');
    for (unsigned error = 0; error < chip->error_count; error++)
        json_number(json, NULL, chip->errors[error]);
    json_close(json, ']');
    json_open(json, "processes", '[');
    for (unsigned each = 0; each < PROCESSES_MAX; each++) {
        const struct process *process = &chip->processes[each];
        if (!lifetime_lasts(&process->life))
            continue;
        json_open(json, NULL, '{');
        json_number(json, "pid", process->life.pid);
        json_number(json, "vid", process->vid == CHOOSE ? -1 : (long long)process->vid);
        json_number(json, "memory_mib", (long long)process->memory);
        json_close(json, '}');
    }
    json_close(json, ']');
    show_slices(json, machine, index);
    json_close(json, '}');
}

int control_show(int words, char **word, struct json *json, char *error, size_t size)
{
    const struct machine *machine = state_refresh();
    (void)words;
    (void)word;
    if (!machine) {
        snprintf(error, size, "no machine is loaded; load one first");
        return DRIVER_NOT_LOADED;
    }
    json_text(json, "driver_version", machine->driver_version);
    json_text(json, "tool_version", machine->tool_version);
    json_number(json, "interface", machine->interface);
    json_text(json, "dev_root", machine->dev_root);
    json_text(json, "sys_root", machine->sys_root);
    json_text(json, "etc_root", machine->etc_root);
    json_text(json, "vnpu_mode", machine->vnpu_mode == MODE_VM ? "vm" : "docker");
    json_text(json, "work_mode", machine->work_mode == WORK_SMP ? "smp" : "amp");
    json_bool(json, "in_container", in_container(machine));
    json_bool(json, "recover", machine->recover);
    json_bool(json, "share_recover", machine->share_recover);
    json_bool(json, "plus_rules", machine->plus_rules);
    json_bool(json, "occupied_is_internal", machine->occupied_is_internal);
    json_number(json, "multi_die_policy", machine->multi_die_policy);
    json_number(json, "generation", (long long)state_copy_generation());
    json_number(json, "events", (long long)machine->events_written);
    show_call_faults(json, machine, "npu");
    json_open(json, "npus", '[');
    for (unsigned index = 0; index < machine->chip_count; index++)
        show_chip(json, machine, (int)index);
    json_close(json, ']');
    return SUCCESS;
}

/* "template PHYSICAL NUMBER": a row of the driver's own table, which no call of the interface shows. Amounts in thousandths. */
int control_template(int words, char **word, struct json *json, char *error, size_t size)
{
    static const char *const names[] = { "aicore", "aicpu", "vpc", "venc", "vdec", "jpegd", "jpege", "pngd" };
    const struct machine *machine = state_refresh();
    uint64_t physical, number;
    (void)words;
    if (!machine || !parse_unsigned(word[1], UINT32_MAX, &physical) || !parse_unsigned(word[2], TEMPLATES_MAX, &number)) {
        snprintf(error, size, "template: expected a physical id and a number, of a machine that is loaded");
        return INVALID_ARGUMENT;
    }
    for (unsigned index = 0; index < machine->chip_count; index++) {
        const struct board *board = &machine->chips[index].board;
        if (board->physical != physical || !board->slices)
            continue;
        for (unsigned each = 0; each < board->template_count; each++) {
            const struct template *template = &board->templates[each];
            if (template->vm_only || number--)
                continue;
            json_text(json, "name", template->name);
            json_number(json, "memory", template->memory);
            for (unsigned resource = 0; resource < RESOURCES; resource++)
                json_number(json, names[resource], board->totals[resource] == ABSENT ? ABSENT : (long long)template->amounts[resource]);
            return SUCCESS;
        }
    }
    snprintf(error, size, "template: found %s, expected the number of a template", word[2]);
    return NOT_FOUND;
}

/* "port PHYSICAL": data that the vendor's tool for network ports shows, and no call of the interface returns. */
int control_port(int words, char **word, struct json *json, char *error, size_t size)
{
    const struct machine *machine = state_refresh();
    uint64_t physical;
    (void)words;
    for (unsigned index = 0; machine && parse_unsigned(word[1], UINT32_MAX, &physical) && index < machine->chip_count; index++) {
        const struct chip *chip = &machine->chips[index];
        if (chip->board.physical != physical || !has_port(&chip->board))
            continue;
        json_bool(json, "up", port_is_up(chip->network));
        json_number(json, "dies", chip->board.ub_dies);
        json_number(json, "ports", chip->board.ub_ports);
        show_port(json, chip);
        return SUCCESS;
    }
    snprintf(error, size, "port: found %s, expected the physical id of a chip with a network port", word[1]);
    return NOT_FOUND;
}
