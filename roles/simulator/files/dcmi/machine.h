/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What the parts of the description's parser share. The grammar is in MACHINE_FORMAT.md.
 */
#ifndef MACHINE_H
#define MACHINE_H

#include "description.h"

static inline struct board *section_board(const struct parser *parser)
{
    return &parser->machine->chips[parser->machine->chip_count - 1].board;
}

#endif
