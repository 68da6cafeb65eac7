/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The machine description: lines, pairs, errors, and the statements for the whole machine.
 */
#include "machine.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

bool fail(struct parser *parser, const char *found, const char *expected)
{
    snprintf(parser->error, parser->error_size, "line %u: %s: found \"%s\", expected %s", parser->line, parser->key, found, expected);
    return false;
}

bool read_number(struct parser *parser, const char *text, enum field_type type, void *target, int64_t maximum)
{
    char expected[96];
    uint64_t number = 0;
    int64_t signed_number = 0;
    bool negative = type == FIELD_I32 || type == FIELD_I64;
    if (type == FIELD_BOOL)
        return read_bool(parser, text, target);
    if (negative ? !parse_signed(text, -1, maximum, &signed_number) : !parse_unsigned(text, (uint64_t)maximum, &number)) {
        snprintf(expected, sizeof expected, "a whole number from %d to %lld", negative ? -1 : 0, (long long)maximum);
        return fail(parser, text, expected);
    }
    switch (type) {
    case FIELD_U32: *(uint32_t *)target = (uint32_t)number; break;
    case FIELD_U64: *(uint64_t *)target = number; break;
    case FIELD_I32: *(int32_t *)target = (int32_t)signed_number; break;
    default: *(int64_t *)target = signed_number; break;
    }
    return true;
}

bool read_bool(struct parser *parser, const char *text, bool *value)
{
    *value = strcmp(text, "yes") == 0;
    return *value || strcmp(text, "no") == 0 || fail(parser, text, "yes or no");
}

bool read_choice(struct parser *parser, const char *text, const char *const *choices, uint32_t *value)
{
    char expected[128] = "one of";
    for (uint32_t index = 0; choices[index]; index++) {
        if (strcmp(text, choices[index]) == 0) {
            *value = index;
            return true;
        }
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), " %s", choices[index]);
    }
    return fail(parser, text, expected);
}

bool read_text(struct parser *parser, const char *text, char *target, size_t size)
{
    char expected[64];
    if (*text && strlen(text) < size) {
        copy_text(target, size, text);
        return true;
    }
    snprintf(expected, sizeof expected, "a text of 1 to %zu bytes", size - 1);
    return fail(parser, text, expected);
}

char *pair_value(char *word, const char *name)
{
    size_t length = strlen(name);
    return strncmp(word, name, length) == 0 && word[length] == '=' ? word + length + 1 : NULL;
}

bool read_fields(struct parser *parser, char *value, const struct field *fields, size_t count)
{
    uint64_t given = 0;
    char *rest = value, expected[256] = "pairs out of:";
    for (size_t index = 0; index < count; index++)
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), " %s", fields[index].name);
    for (char *word = strsep(&rest, " \t"); word; word = strsep(&rest, " \t")) {
        size_t index = 0;
        if (!*word)
            continue;
        while (index < count && !pair_value(word, fields[index].name))
            index++;
        if (index == count)
            return fail(parser, word, expected);
        if (given & 1ull << index)
            return fail(parser, word, "each pair once");
        given |= 1ull << index;
        if (!read_number(parser, pair_value(word, fields[index].name), fields[index].type, fields[index].target, fields[index].maximum))
            return false;
    }
    for (size_t index = 0; index < count; index++) {
        if (fields[index].required && !(given & 1ull << index))
            return fail(parser, "nothing", fields[index].name);
    }
    return true;
}

static bool parse_version(struct parser *parser, const char *text)
{
    unsigned major, minor;
    int length = 0;
    if (sscanf(text, "%3u.%2u%n", &major, &minor, &length) != 2 || text[length])
        return fail(parser, text, "a version such as 13.0");
    parser->machine->cuda_version = major * 1000 + minor * 10;
    return true;
}

static bool parse_machine_statement(struct parser *parser, char *value)
{
    static const char *const administrators[] = { "capability", "root", NULL }, *const orders[] = { "ascending", "reversed", NULL };
    static const char *const keys[] = { "driver-version", "nvml-version", "cuda-version", "proc-root", "dev-root", "sys-root",
        "caps-major", "cap-nodes", "profile-info-versions", "profiles-need-mig-mode", "mode-change-moves-minor", "operation-delay",
        "confidential-computing", "mig-id-order", "clients-hold-gpus", "administrator" };
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
    default:
        if (!read_choice(parser, value, administrators, &choice))
            return false;
        machine->administrator_root = choice == 1;
        return true;
    }
}

static bool start_gpu(struct parser *parser, const char *value)
{
    struct machine *machine = parser->machine;
    if (*value)
        return fail(parser, value, "nothing after \"gpu\"");
    if (!machine->driver_version[0] || !machine->cuda_version)
        return fail(parser, "no driver-version or cuda-version", "both before the first gpu");
    if (parser->gpu && !finish_gpu(parser))
        return false;
    if (machine->gpu_count == GPUS_MAX)
        return fail(parser, "another gpu", "at most 32");
    parser->gpu = &machine->gpus[machine->gpu_count++];
    parser->given = 0;
    memset(parser->gpu, 0, sizeof *parser->gpu);
    struct board *board = &parser->gpu->board;
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

static bool parse_line(struct parser *parser, char *line)
{
    line += strspn(line, " \t");
    size_t length = strlen(line);
    while (length && strchr(" \t\r\n", line[length - 1]))
        line[--length] = '\0';
    if (!*line || *line == '#')
        return true;
    char *value = line + strcspn(line, " \t");
    if (*value)
        *value++ = '\0';
    value += strspn(value, " \t");
    bool first = !*parser->key;
    parser->key = line;
    if (first)
        return (strcmp(line, "format") == 0 && strcmp(value, "1") == 0) || fail(parser, line, "\"format 1\" as the first statement");
    if (strcmp(line, "gpu") == 0)
        return start_gpu(parser, value);
    if (!*value)
        return fail(parser, "nothing", "a value");
    return parser->gpu ? parse_gpu_statement(parser, value) : parse_machine_statement(parser, value);
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

bool machine_parse(const char *path, struct machine *machine, char *error, size_t size)
{
    char line[1024];
    struct parser parser = { .error = error, .error_size = size, .machine = machine, .key = "" };
    FILE *file = fopen(path, "re");
    if (!file) {
        snprintf(error, size, "%s: %s; expected a readable machine description", path, strerror(errno));
        return false;
    }
    memset(machine, 0, sizeof *machine);
    machine->profile_info_versions = true;
    machine->caps_major = 236;
    copy_text(machine->proc_root, sizeof machine->proc_root, "/proc/driver/nvidia");
    copy_text(machine->dev_root, sizeof machine->dev_root, "/dev");
    copy_text(machine->sys_root, sizeof machine->sys_root, "/sys");
    bool good = true;
    while (good && fgets(line, sizeof line, file)) {
        parser.line++;
        good = (strchr(line, '\n') || feof(file) || (parser.key = "line", fail(&parser, "more", "at most 1023 bytes")))
               && parse_line(&parser, line);
        parser.key = *parser.key ? "end of file" : "";      /* the line's memory is used again */
    }
    fclose(file);
    if (good && !parser.gpu && (!machine->driver_version[0] || !machine->cuda_version))
        good = fail(&parser, "no driver-version or cuda-version", "both");
    if (good && parser.gpu)
        good = finish_gpu(&parser) && check_unique(&parser);
    if (!machine->nvml_version[0])
        snprintf(machine->nvml_version, sizeof machine->nvml_version, "%u.%.30s", machine->cuda_version / 1000, machine->driver_version);
    machine->loaded = good;
    return good;
}
