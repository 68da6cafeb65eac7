/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The machine description: the statements for the whole machine, and what the chips of one have to be together.
 */
#include "machine.h"

#include <stdio.h>
#include <string.h>

const char section_word[] = "npu";

bool parse_machine_statement(struct parser *parser, char *value)
{
    static const char *const administrators[] = { "capability", "root", "mount-namespace", NULL }, *const interfaces[] = { "none", "1", "2", NULL },
                      *const modes[] = { "docker", "vm", NULL }, *const works[] = { "amp", "smp", NULL },
                      *const policies[] = { "union", "independent", NULL };
    static const char *const keys[] = { "driver-version", "tool-version", "dev-root", "sys-root", "etc-root", "interface", "vnpu-mode",
        "work-mode", "multi-die-policy", "guard-destroy", "occupied-is-internal", "plus-rules", "operation-delay", "slice-nodes",
        "slice-major", "single-thread", "unified-bus", "topology", "init-command", "administrator" };
    struct machine *machine = parser->machine;
    size_t key = 0;
    while (key < COUNT_OF(keys) && strcmp(keys[key], parser->key) != 0)
        key++;
    if (key == COUNT_OF(keys))
        return fail(parser, parser->key, "a statement for the machine (or \"npu\" before it)");
    if (parser->given & 1ull << key)
        return fail(parser, parser->key, "each statement once");
    parser->given |= 1ull << key;
    uint32_t choice = 0;
    switch (key) {
    case 0: return read_text(parser, value, machine->driver_version, sizeof machine->driver_version);
    case 1: return read_text(parser, value, machine->tool_version, sizeof machine->tool_version);
    case 2: return read_text(parser, value, machine->dev_root, sizeof machine->dev_root);
    case 3: return read_text(parser, value, machine->sys_root, sizeof machine->sys_root);
    case 4: return read_text(parser, value, machine->etc_root, sizeof machine->etc_root);
    case 5: return read_choice(parser, value, interfaces, &machine->interface) && (machine->interface || fail(parser, value, "1 or 2"));
    case 6: return read_choice(parser, value, modes, &machine->vnpu_mode);
    case 7: return read_choice(parser, value, works, &machine->work_mode);
    case 8: return read_choice(parser, value, policies, &machine->multi_die_policy);
    case 9: return read_bool(parser, value, &machine->guard_destroy);
    case 10: return read_bool(parser, value, &machine->occupied_is_internal);
    case 11: return read_bool(parser, value, &machine->plus_rules);
    case 12: return read_number(parser, value, FIELD_U32, &machine->operation_delay, 600000);
    case 13: return read_bool(parser, value, &machine->slice_nodes);
    case 14: return read_number(parser, value, FIELD_U32, &machine->slice_major, 4095);
    case 15: return read_bool(parser, value, &machine->single_thread);
    case 16: return read_bool(parser, value, &machine->unified_bus);
    case 17: return read_bool(parser, value, &machine->topology);
    case 18: return read_text(parser, value, machine->init_command, sizeof machine->init_command);
    default:
        if (!read_choice(parser, value, administrators, &choice))
            return false;
        machine->administrator_root = choice == 1;
        machine->mount_namespaces = choice == 2;
        return true;
    }
}

void machine_defaults(struct machine *machine)
{
    machine->interface = INTERFACE_1;
    machine->slice_nodes = machine->topology = true;
    machine->slice_major = 237;
    copy_text(machine->etc_root, sizeof machine->etc_root, "/etc");
}

bool start_section(struct parser *parser)
{
    struct machine *machine = parser->machine;
    if (!machine->driver_version[0])
        return fail(parser, "no driver-version", "it before the first npu");
    if (machine->chip_count == CHIPS_MAX)
        return fail(parser, "another npu", "at most 64");
    struct chip *chip = &machine->chips[machine->chip_count];
    memset(chip, 0, sizeof *chip);
    struct board *board = &chip->board;
    board->card = board->physical = machine->chip_count++;
    board->numa_node = board->hccs_group = board->power = board->voltage = ABSENT;
    board->temperature = 40;
    for (unsigned resource = 0; resource < RESOURCES; resource++)
        board->totals[resource] = ABSENT;
    return true;
}

bool finish_machine(struct parser *parser)
{
    struct machine *machine = parser->machine;
    if (!machine->driver_version[0])
        return fail(parser, "no driver-version", "it");
    if (!machine->tool_version[0])
        copy_text(machine->tool_version, sizeof machine->tool_version, machine->driver_version);
    for (unsigned one = 0; one < machine->chip_count; one++) {
        for (unsigned other = 0; other < one; other++) {
            const struct board *a = &machine->chips[one].board, *b = &machine->chips[other].board;
            if (a->physical == b->physical || (a->card == b->card && a->chip == b->chip) || same_address(&a->address, &b->address)
                || memcmp(a->vdie, b->vdie, sizeof a->vdie) == 0)
                return fail(parser, a->name, "chips that differ in physical id, card and chip, pci-address and vdie");
        }
    }
    return true;
}
