/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Rules of slicing; no I/O. What a slice takes from its chip is counted; where a chip has groups, it also needs places of one.
 */
#include "simulator.h"

#include <string.h>

uint32_t slice_vid(const struct chip *chip, unsigned index) { return FIRST_VID + VIDS_PER_CHIP * chip->board.physical + index; }

bool chip_sliced(const struct chip *chip)
{
    for (unsigned index = 0; index < SLICES_MAX; index++) {
        if (chip->slices[index].serial)
            return true;
    }
    return false;
}

int template_by_name(const struct board *board, const char *name)
{
    for (unsigned index = 0; index < board->template_count; index++) {
        if (strncmp(board->templates[index].name, name, TEMPLATE_NAME_LEN) == 0)
            return (int)index;
    }
    return ABSENT;
}

/* With the first slice SR-IOV comes on, and cores move from control to AICPU; with the last they go back. */
int32_t total_of(const struct chip *chip, unsigned resource, bool sliced)
{
    if (resource == AICPU && !sliced && chip->board.sriov && chip->board.aicpu_whole)
        return (int32_t)chip->board.aicpu_whole;
    return chip->board.totals[resource];
}

int32_t free_of(const struct chip *chip, unsigned resource, bool sliced)
{
    int32_t left = total_of(chip, resource, sliced);
    for (unsigned index = 0; left != ABSENT && index < SLICES_MAX; index++) {
        if (chip->slices[index].serial)
            left -= (int32_t)chip->board.templates[chip->slices[index].template].amounts[resource];
    }
    return left;
}

uint32_t memory_free(const struct chip *chip)
{
    uint32_t used = 0;
    for (unsigned index = 0; index < SLICES_MAX; index++) {
        if (chip->slices[index].serial)
            used += chip->board.templates[chip->slices[index].template].memory;
    }
    return chip->board.memory - used;
}

/* The device splits what it has; where the driver asks for a fixed size, the template has it. */
uint64_t slice_memory(const struct board *board, const struct template *template)
{
    return template->memory_mib ? template->memory_mib : board->memory_mib * template->memory / board->memory;
}

unsigned group_places_used(const struct chip *chip, unsigned group)
{
    unsigned used = 0;
    for (unsigned index = 0; index < SLICES_MAX; index++) {
        if (chip->slices[index].serial && chip->slices[index].group == group)
            used += chip->board.templates[chip->slices[index].template].places;
    }
    return used;
}

/* A small one goes to the lowest group with another small one, else everything to the lowest that is empty. */
static bool choose_group(const struct chip *chip, const struct template *template, uint32_t *group)
{
    for (int used = GROUP_PLACES - (int)template->places; used >= 0; used--) {
        for (uint32_t each = 0; each < chip->board.groups; each++) {
            if ((*group == CHOOSE || *group == each) && group_places_used(chip, each) == (unsigned)used) {
                *group = each;
                return true;
            }
        }
    }
    return false;
}

static bool choose_vid(const struct chip *chip, uint32_t *vid)
{
    for (unsigned index = 0; index < chip->board.slices_maximum; index++) {
        if (!chip->slices[index].serial && (*vid == CHOOSE || *vid == slice_vid(chip, index))) {
            *vid = slice_vid(chip, index);
            return true;
        }
    }
    return false;
}

/* The answer is the same for a value that does not fit and for one that does not exist. */
int slice_place(const struct chip *chip, const struct template *template, uint32_t *vid, uint32_t *group, struct shortage *shortage)
{
    const struct board *board = &chip->board;
    const uint32_t first = slice_vid(chip, 0);
    *shortage = (struct shortage){ .resource = ABSENT };
    if (*vid != CHOOSE && (*vid < first || *vid >= first + board->slices_maximum))
        return INVALID_ARGUMENT;
    if (*group != CHOOSE && *group >= board->groups)
        return INVALID_ARGUMENT;
    for (int32_t resource = 0; resource < RESOURCES; resource++) {
        const int32_t left = free_of(chip, (unsigned)resource, true);
        if (left == ABSENT || (uint32_t)left >= template->amounts[resource])
            continue;
        *shortage = (struct shortage){ .resource = resource, .free = (uint32_t)left };
        return INVALID_ARGUMENT;
    }
    if (memory_free(chip) < template->memory) {
        *shortage = (struct shortage){ .resource = RESOURCES, .free = memory_free(chip) * THOUSAND };
        return INVALID_ARGUMENT;
    }
    if (!choose_vid(chip, vid))
        return *vid == CHOOSE ? INVALID_ARGUMENT : OCCUPIED;
    return !board->groups || choose_group(chip, template, group) ? SUCCESS : INVALID_ARGUMENT;
}

/* Check the modes of the machine that slices of this chip require. */
int slice_permitted(const struct machine *machine, const struct chip *chip)
{
    if (!chip->board.slices)
        return NOT_SUPPORTED;
    if (machine->vnpu_mode != MODE_DOCKER || (chip->board.needs_amp && machine->work_mode != WORK_AMP))
        return NO_PERMISSION;
    if (chip->board.needs_single_die && machine->multi_die_policy != DCMI_MULTI_DIE_INDEP_POLICY)
        return NO_PERMISSION;
    return SUCCESS;
}

bool slice_has_processes(const struct chip *chip, unsigned index)
{
    for (unsigned each = 0; each < PROCESSES_MAX; each++) {
        if (chip->processes[each].vid == slice_vid(chip, index) && lifetime_lasts(&chip->processes[each].life))
            return true;
    }
    return false;
}

bool chip_has_processes(const struct chip *chip)
{
    for (unsigned each = 0; each < PROCESSES_MAX; each++) {
        if (chip->processes[each].vid == CHOOSE && lifetime_lasts(&chip->processes[each].life))
            return true;
    }
    return false;
}
