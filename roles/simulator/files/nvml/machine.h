/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What the parts of the description's parser share. The grammar is in MACHINE_FORMAT.md.
 */
#ifndef MACHINE_H
#define MACHINE_H

#include "description.h"

static inline struct gpu *section_gpu(const struct parser *parser) { return &parser->machine->gpus[parser->machine->gpu_count - 1]; }

bool parse_mig_statement(struct parser *parser, char *value, bool *known);
bool finish_mig(struct parser *parser);

#endif
