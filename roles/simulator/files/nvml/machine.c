/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The machine description: the statements for the whole machine.
 */
#include "machine.h"

#include <stdio.h>
#include <string.h>

const char section_word[] = "gpu";

static bool parse_version(struct parser *parser, const char *text)
{
    unsigned major, minor;
    int length = 0;
    if (sscanf(text, "%3u.%2u%n", &major, &minor, &length) != 2 || text[length])
        return fail(parser, text, "a version such as 13.0");
    parser->machine->cuda_version = major * 1000 + minor * 10;
    return true;
}

bool parse_machine_statement(struct parser *parser, char *value)
{
    static const char *const administrators[] = { "capability", "root", NULL }, *const orders[] = { "ascending", "reversed", NULL };
    static const char *const keys[] = { "driver-version", "nvml-version", "cuda-version", "proc-root", "dev-root", "sys-root",
        "caps-major", "cap-nodes", "profile-info-versions", "profiles-need-mig-mode", "mode-change-moves-minor", "operation-delay",
        "confidential-computing", "mig-id-order", "clients-hold-gpus", "idle-gpus-keep-settings", "administrator" };
    struct machine *machine = parser->machine;
    size_t key = 0;
    while (key < COUNT_OF(keys) && strcmp(keys[key], parser->key) != 0)
        key++;
    if (key == COUNT_OF(keys))
        return fail(parser, parser->key, "a statement for the machine (or \"gpu\" before it)");
    if (parser->given & 1ull << key)
        return fail(parser, parser->key, "each statement once");
    parser->given |= 1ull << key;
    uint32_t choice = 0;
    switch (key) {
    case 0: return read_text(parser, value, machine->driver_version, sizeof machine->driver_version);
    case 1: return read_text(parser, value, machine->nvml_version, sizeof machine->nvml_version);
    case 2: return parse_version(parser, value);
    case 3: return read_text(parser, value, machine->proc_root, sizeof machine->proc_root);
    case 4: return read_text(parser, value, machine->dev_root, sizeof machine->dev_root);
    case 5: return read_text(parser, value, machine->sys_root, sizeof machine->sys_root);
    case 6: return read_number(parser, value, FIELD_U32, &machine->caps_major, 4095);
    case 7: return read_bool(parser, value, &machine->cap_nodes);
    case 8: return read_bool(parser, value, &machine->profile_info_versions);
    case 9: return read_bool(parser, value, &machine->profiles_need_mig_mode);
    case 10: return read_bool(parser, value, &machine->mode_change_moves_minor);
    case 11: return read_number(parser, value, FIELD_U32, &machine->operation_delay, 600000);
    case 12: return read_bool(parser, value, &machine->confidential);
    case 13:
        if (!read_choice(parser, value, orders, &choice))
            return false;
        machine->mig_reversed = choice == 1;
        return true;
    case 14: return read_bool(parser, value, &machine->clients_hold_gpus);
    case 15: return read_bool(parser, value, &machine->idle_gpus_keep_settings);
    default:
        if (!read_choice(parser, value, administrators, &choice))
            return false;
        machine->administrator_root = choice == 1;
        return true;
    }
}

bool start_section(struct parser *parser)
{
    struct machine *machine = parser->machine;
    if (!machine->driver_version[0] || !machine->cuda_version)
        return fail(parser, "no driver-version or cuda-version", "both before the first gpu");
    if (machine->gpu_count == GPUS_MAX)
        return fail(parser, "another gpu", "at most 32");
    struct gpu *gpu = &machine->gpus[machine->gpu_count++];
    memset(gpu, 0, sizeof *gpu);
    struct board *board = &gpu->board;
    board->minor = machine->gpu_count - 1;
    board->mig_reversed = machine->mig_reversed;
    board->pci_class = 0x030200;
    board->pcie_generation = 4;
    board->pcie_width = 16;
    board->numa_node = board->coherent_numa_node = board->memory_bus_width = board->cores = board->module_id = ABSENT;
    board->power_default = board->power_minimum = board->power_maximum = board->power_usage = ABSENT;
    board->temperature = 30;
    board->shutdown = board->slowdown = board->memory_maximum = board->gpu_maximum = board->fans = board->fan_speed = ABSENT;
    board->ecc = ABSENT;
    board->bar1 = 256;
    return true;
}

static bool check_unique(struct parser *parser)
{
    const struct machine *machine = parser->machine;
    for (unsigned one = 0; one < machine->gpu_count; one++) {
        for (unsigned other = 0; other < one; other++) {
            const struct board *a = &machine->gpus[one].board, *b = &machine->gpus[other].board;
            if (strcmp(a->uuid, b->uuid) == 0 || a->minor == b->minor || same_address(&a->address, &b->address))
                return fail(parser, a->uuid, "GPUs that differ in uuid, minor and pci-address");
        }
    }
    return true;
}

void machine_defaults(struct machine *machine)
{
    machine->profile_info_versions = true;
    machine->caps_major = 236;
    copy_text(machine->proc_root, sizeof machine->proc_root, "/proc/driver/nvidia");
}

bool finish_machine(struct parser *parser)
{
    struct machine *machine = parser->machine;
    if (!parser->in_section && (!machine->driver_version[0] || !machine->cuda_version))
        return fail(parser, "no driver-version or cuda-version", "both");
    if (!machine->nvml_version[0])
        snprintf(machine->nvml_version, sizeof machine->nvml_version, "%u.%.30s", machine->cuda_version / 1000, machine->driver_version);
    return check_unique(parser);
}
