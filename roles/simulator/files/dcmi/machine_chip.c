/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The statements of an "npu" section: one chip.
 */
#include "machine.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define READ(...) read_fields(parser, value, (const struct field[]){ __VA_ARGS__ }, \
                              COUNT_OF(((const struct field[]){ __VA_ARGS__ })))
#define U32(name_, target_) { name_, FIELD_U32, &(target_), UINT32_MAX, false }

/* "7" or "0.5" in thousandths. */
static bool read_amount(struct parser *parser, const char *text, int32_t *amount)
{
    char *end;
    const double number = strtod(text, &end);
    if (end == text || *end || !isfinite(number) || number < 0 || number > 1000000)
        return fail(parser, text, "a number from 0 to 1000000, with up to three decimals");
    *amount = (int32_t)lround(number * THOUSAND);
    return true;
}

/* Read "aicore=8 aicpu=7 …" from the value's pairs. Missing amounts stay unchanged. */
static bool read_amounts(struct parser *parser, char *value, int32_t amounts[RESOURCES])
{
    static const char *const names[] = { "aicore", "aicpu", "vpc", "venc", "vdec", "jpegd", "jpege", "pngd" };
    for (unsigned resource = 0; resource < RESOURCES; resource++) {
        char text[32];
        if (take_text(value, names[resource], text, sizeof text) && !read_amount(parser, text, &amounts[resource]))
            return false;
    }
    return true;
}

static bool parse_template(struct parser *parser, char *value)
{
    struct board *board = section_board(parser);
    if (board->template_count == TEMPLATES_MAX)
        return fail(parser, value, "at most 16 templates");
    struct template *template = &board->templates[board->template_count];
    int32_t amounts[RESOURCES] = { 0 };
    *template = (struct template){ .places = GROUP_PLACES };
    if (!take_text(value, "name", template->name, sizeof template->name))
        return fail(parser, value, "name= of at most 31 bytes");
    if (template_by_name(board, template->name) < (int)board->template_count && template_by_name(board, template->name) != ABSENT)
        return fail(parser, template->name, "each template once");
    if (!read_amounts(parser, value, amounts)
        || !READ({ "memory", FIELD_U32, &template->memory, 100000, true }, { "mib", FIELD_U64, &template->memory_mib, 1 << 30, false },
                 { "places", FIELD_U32, &template->places, GROUP_PLACES, false }, { "vm-only", FIELD_BOOL, &template->vm_only, 1, false }))
        return false;
    for (unsigned resource = 0; resource < RESOURCES; resource++)
        template->amounts[resource] = (uint32_t)amounts[resource];
    board->template_count++;
    return (template->memory && template->places && template->amounts[AICORE]) || fail(parser, template->name, "memory, places and aicore above 0");
}

static bool parse_slices(struct parser *parser, char *value)
{
    struct board *board = section_board(parser);
    int32_t whole = 0;
    char text[32];
    board->slices = true;
    if (take_text(value, "aicpu-whole", text, sizeof text) && !read_amount(parser, text, &whole))
        return false;
    board->aicpu_whole = (uint32_t)whole;
    return READ({ "maximum", FIELD_U32, &board->slices_maximum, SLICES_MAX, true }, { "groups", FIELD_U32, &board->groups, GROUPS_MAX, false },
                { "needs-amp", FIELD_BOOL, &board->needs_amp, 1, false }, { "needs-single-die", FIELD_BOOL, &board->needs_single_die, 1, false },
                { "sriov", FIELD_BOOL, &board->sriov, 1, false });
}

static bool parse_die(struct parser *parser, const char *value, uint32_t words[DIE_ID_COUNT])
{
    int length = 0;
    if (sscanf(value, "%8" SCNx32 "%8" SCNx32 "%8" SCNx32 "%8" SCNx32 "%8" SCNx32 "%n", &words[0], &words[1], &words[2], &words[3], &words[4],
               &length) != DIE_ID_COUNT || length != 40 || value[length])
        return fail(parser, value, "40 hexadecimal digits");
    return true;
}

static bool parse_figures(struct parser *parser, char *value, bool *known)
{
    static const char *const memories[] = { "ddr", "hbm", NULL };
    struct board *board = section_board(parser);
    const char *key = parser->key;
    uint32_t choice = 0;
    *known = true;
    if (strcmp(key, "memory") == 0) {
        char text[32];
        if (!take_text(value, "kind", text, sizeof text) || !read_choice(parser, text, memories, &choice))
            return fail(parser, value, "kind=ddr or kind=hbm");
        board->hbm = choice == 1;
        return READ({ "mib", FIELD_U64, &board->memory_mib, 1 << 30, true }, { "gb", FIELD_U32, &board->memory, 100000, true },
                    { "used", FIELD_U64, &board->memory_used, 1 << 30, false });
    }
    if (strcmp(key, "frequency") == 0)
        return READ(U32("memory", board->frequency_memory), U32("aicore", board->frequency_aicore),
                    U32("aicore-maximum", board->frequency_aicore_maximum), U32("control", board->frequency_control));
    if (strcmp(key, "totals") == 0)
        return read_amounts(parser, value, board->totals) && (!value[strspn(value, " \t")] || fail(parser, value, "amounts of resources"));
    if (strcmp(key, "slices") == 0)
        return parse_slices(parser, value);
    if (strcmp(key, "template") == 0)
        return parse_template(parser, value);
    if (strcmp(key, "super-pod") == 0) {
        board->super_pod = true;
        return READ(U32("sdid", board->sdid), U32("scale", board->scale), U32("id", board->super_pod_id), U32("server", board->server_id),
                    U32("chassis", board->chassis_id), U32("type", board->super_pod_type));
    }
    if (strcmp(key, "ids") == 0)
        return READ(U32("board", board->board_id), U32("pcb", board->pcb_id), U32("bom", board->bom_id), U32("mainboard", board->mainboard_id),
                    U32("slot", board->slot));
    if (strcmp(key, "ub-ports") == 0)
        return READ({ "dies", FIELD_U32, &board->ub_dies, 8, true }, { "each", FIELD_U32, &board->ub_ports, 64, true });
    if (strcmp(key, "pci-address") == 0)
        return parse_address(value, &board->address) || fail(parser, value, "a PCI address such as 0000:1b:00.0");
    if (strcmp(key, "vdie") == 0)
        return parse_die(parser, value, board->vdie);
    if (strcmp(key, "ndie") == 0)
        return parse_die(parser, value, board->ndie);
    *known = false;
    return true;
}

bool parse_section_statement(struct parser *parser, char *value)
{
    struct board *board = section_board(parser);
    const struct { const char *key; char *target; size_t size; } texts[] = {
        { "type", board->type, sizeof board->type }, { "name", board->name, sizeof board->name },
        { "version", board->version, sizeof board->version }, { "npu-name", board->npu_name, sizeof board->npu_name },
        { "product", board->product, sizeof board->product }, { "model", board->model, sizeof board->model },
        { "manufacturer", board->manufacturer, sizeof board->manufacturer },
        { "manufactured", board->manufactured, sizeof board->manufactured }, { "serial", board->serial, sizeof board->serial },
        { "pci-path", board->pci_path, sizeof board->pci_path }, { "cpu-affinity", board->cpu_affinity, sizeof board->cpu_affinity },
        { "ip", board->ip, sizeof board->ip } };
    const struct field numbers[] = {
        { "card", FIELD_U32, &board->card, 63, false }, { "chip", FIELD_U32, &board->chip, 3, false },
        { "physical", FIELD_U32, &board->physical, CHIPS_MAX - 1, false }, { "aicores", FIELD_U32, &board->aicores, 1000, false },
        { "pci-device-id", FIELD_U32, &board->pci_device_id, UINT32_MAX, false },
        { "pci-subsystem-id", FIELD_U32, &board->pci_subsystem_id, UINT32_MAX, false }, { "numa-node", FIELD_I32, &board->numa_node, 1023, false },
        { "hccs-group", FIELD_I32, &board->hccs_group, 1023, false }, { "temperature", FIELD_I32, &board->temperature, 200, false },
        { "power", FIELD_I32, &board->power, 100000, false }, { "voltage", FIELD_I32, &board->voltage, 10000, false },
        { "management-controller", FIELD_BOOL, &board->management, 1, false }, { "sio", FIELD_BOOL, &board->sio, 1, false } };
    for (size_t index = 0; index < COUNT_OF(texts); index++) {
        if (strcmp(parser->key, texts[index].key) == 0)
            return read_text(parser, value, texts[index].target, texts[index].size);
    }
    for (size_t index = 0; index < COUNT_OF(numbers); index++) {
        if (strcmp(parser->key, numbers[index].name) == 0)
            return read_number(parser, value, numbers[index].type, numbers[index].target, numbers[index].maximum);
    }
    bool known, good = parse_figures(parser, value, &known);
    return good && (known || fail(parser, parser->key, "a statement for an npu"));
}

bool finish_section(struct parser *parser)
{
    const struct board *board = section_board(parser);
    parser->key = section_word;
    const char *missing = !board->type[0] ? "type" : !board->name[0] ? "name" : !board->pci_device_id ? "pci-device-id"
        : !board->memory_mib || !board->memory ? "memory" : !board->aicores ? "aicores" : !board->serial[0] ? "serial" : NULL;
    if (missing)
        return fail(parser, board->name, missing);
    if (board->slices && (board->totals[AICORE] == ABSENT || board->totals[AICPU] == ABSENT))
        return fail(parser, board->name, "totals with aicore and aicpu, of what is sliced");
    return true;
}
