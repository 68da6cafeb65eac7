/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The statements about MIG, and whether what they say can be true of one board.
 */
#include "machine.h"

#include <stdio.h>
#include <string.h>

static bool parse_placements(const char *text, struct placements *placements)
{
    char copy[PATH_MAX_BYTES];
    if (strlen(text) >= sizeof copy)
        return false;
    copy_text(copy, sizeof copy, text);
    char *colon = strchr(copy, ':');
    uint64_t value;
    if (!colon || !parse_unsigned(colon + 1, 64, &value) || value == 0)
        return false;
    *colon = '\0';
    placements->size = (uint32_t)value;
    placements->count = 0;
    char *rest = copy;
    for (char *start = strsep(&rest, ","); start; start = strsep(&rest, ",")) {
        if (placements->count == PLACEMENTS_MAX || !parse_unsigned(start, 64, &value))
            return false;
        placements->start[placements->count++] = (uint32_t)value;
    }
    return true;
}

static bool parse_profile(struct parser *parser, char *value)
{
    struct profile profile = { .present = true };
    uint32_t enumeration = 0;
    char placements[PATH_MAX_BYTES] = "";
    if (!take_text(value, "name", profile.name, sizeof profile.name))
        return fail(parser, value, "name= of at most 31 bytes");
    if (!take_text(value, "placements", placements, sizeof placements) || !parse_placements(placements, &profile.placements))
        return fail(parser, placements, "placements=start,start,…:size (at most 16 starts)");
    const struct field fields[] = {
        { "enum", FIELD_U32, &enumeration, PROFILES_MAX - 1, true }, { "id", FIELD_U32, &profile.id, 255, true },
        { "memory", FIELD_U32, &profile.memory, 1 << 30, true }, { "slices", FIELD_U32, &profile.slices, 64, true },
        { "multiprocessors", FIELD_U32, &profile.multiprocessors, 10000, true },
        { "copy", FIELD_U32, &profile.engines[ENGINE_COPY], 255, false },
        { "decoder", FIELD_U32, &profile.engines[ENGINE_DECODER], 255, false },
        { "encoder", FIELD_U32, &profile.engines[ENGINE_ENCODER], 255, false },
        { "jpeg", FIELD_U32, &profile.engines[ENGINE_JPEG], 255, false },
        { "ofa", FIELD_U32, &profile.engines[ENGINE_OFA], 255, false },
        { "maximum", FIELD_U32, &profile.maximum, 64, true }, { "p2p", FIELD_BOOL, &profile.p2p, 0, false },
        { "gfx", FIELD_BOOL, &profile.gfx, 0, false },
    };
    if (!read_fields(parser, value, fields, COUNT_OF(fields)))
        return false;
    struct board *board = &section_gpu(parser)->board;
    unsigned other;
    if (board->profiles[enumeration].present || profile_by_id(board, profile.id, &other))
        return fail(parser, profile.name, "each enum and each id once in a gpu");
    board->profiles[enumeration] = profile;
    return true;
}

static bool parse_compute_profile(struct parser *parser, char *value)
{
    struct compute_profile profile = { .present = true };
    uint32_t enumeration = 0, owner = 0;
    char placements[PATH_MAX_BYTES] = "";
    if (!take_text(value, "name", profile.name, sizeof profile.name))
        return fail(parser, value, "name= of at most 31 bytes");
    if (!take_text(value, "placements", placements, sizeof placements) || !parse_placements(placements, &profile.placements))
        return fail(parser, placements, "placements=start,start,…:size (at most 16 starts)");
    const struct field fields[] = {
        { "gi", FIELD_U32, &owner, PROFILES_MAX - 1, true }, { "enum", FIELD_U32, &enumeration, COMPUTE_PROFILES_MAX - 1, true },
        { "id", FIELD_U32, &profile.id, 255, true }, { "slices", FIELD_U32, &profile.slices, 64, true },
        { "multiprocessors", FIELD_U32, &profile.multiprocessors, 10000, true },
        { "maximum", FIELD_U32, &profile.maximum, COMPUTE_INSTANCES_MAX, true },
    };
    if (!read_fields(parser, value, fields, COUNT_OF(fields)))
        return false;
    struct profile *gpu_profile = &section_gpu(parser)->board.profiles[owner];
    unsigned other;
    if (!gpu_profile->present)
        return fail(parser, profile.name, "gi= the enum of a gpu-instance-profile above");
    if (gpu_profile->compute[enumeration].present || compute_profile_by_id(gpu_profile, profile.id, &other))
        return fail(parser, profile.name, "each enum and each id once in a gpu-instance-profile");
    for (unsigned index = 0; index < profile.placements.count; index++) {
        if (profile.placements.start[index] + profile.placements.size > gpu_profile->slices)
            return fail(parser, placements, "placements inside the compute slices of the GPU instance");
    }
    gpu_profile->compute[enumeration] = profile;
    return true;
}

bool parse_mig_statement(struct parser *parser, char *value, bool *known)
{
    static const char *const kinds[] = { "none", "pending", "immediate", NULL }, *const orders[] = { "ascending", "reversed", NULL };
    struct board *board = &section_gpu(parser)->board;
    uint32_t choice = 0;
    *known = true;
    if (strcmp(parser->key, "mig") == 0)
        return read_choice(parser, value, kinds, &board->mig);
    if (strcmp(parser->key, "mig-mode") == 0)
        return read_bool(parser, value, &board->mig_mode);
    if (strcmp(parser->key, "mig-id-order") == 0) {
        bool good = read_choice(parser, value, orders, &choice);
        board->mig_reversed = choice == 1;
        return good;
    }
    if (strcmp(parser->key, "mig-slices") == 0) {
        const struct field fields[] = { { "memory", FIELD_U32, &board->memory_slices, 64, true },
                                        { "compute", FIELD_U32, &board->compute_slices, 64, true } };
        return read_fields(parser, value, fields, COUNT_OF(fields));
    }
    if (strcmp(parser->key, "gpu-instance-profile") == 0)
        return parse_profile(parser, value);
    if (strcmp(parser->key, "compute-instance-profile") == 0)
        return parse_compute_profile(parser, value);
    *known = false;
    return true;
}

static bool check_profile(struct parser *parser, const struct profile *profile)
{
    const struct board *board = &section_gpu(parser)->board;
    unsigned size = profile->placements.size, parts = board->memory_slices / size;
    if (board->memory_slices % size || (parts != 1 && parts != 2 && parts != 4 && parts != 8))
        return fail(parser, profile->name, "a placement size that is the whole, a half, a quarter or an eighth of the memory slices");
    for (unsigned index = 0; index < profile->placements.count; index++) {
        if (profile->placements.start[index] % size || profile->placements.start[index] + size > board->memory_slices)
            return fail(parser, profile->name, "placements that are multiples of their size, on the board");
    }
    for (unsigned engine = ENGINE_DECODER; engine < ENGINES; engine++) {
        if (profile->engines[engine] * profile->maximum > board->engines[engine])
            return fail(parser, profile->name, "engines of the board (statement \"engines\") that suffice for maximum= instances");
    }
    for (unsigned index = 0; index < COMPUTE_PROFILES_MAX; index++) {
        if (profile->compute[index].present)
            return true;
    }
    return fail(parser, profile->name, "a compute-instance-profile for it");
}

bool finish_mig(struct parser *parser)
{
    const struct board *board = &section_gpu(parser)->board;
    unsigned count = 0;
    parser->key = "mig";
    for (unsigned index = 0; index < PROFILES_MAX; index++)
        count += board->profiles[index].present;
    if (board->mig == MIG_NONE)
        return (!count && !board->mig_mode) || fail(parser, board->uuid, "\"mig pending\" or \"mig immediate\" where there are profiles");
    if (!count || !board->memory_slices || !board->compute_slices)
        return fail(parser, board->uuid, "mig-slices and gpu-instance-profile statements");
    for (unsigned index = 0; index < PROFILES_MAX; index++) {
        if (board->profiles[index].present && !check_profile(parser, &board->profiles[index]))
            return false;
    }
    return true;
}
