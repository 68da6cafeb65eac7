/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Tools of the description's parser. The grammar is in MACHINE_FORMAT.md.
 */
#ifndef MACHINE_H
#define MACHINE_H

#include "simulator.h"

enum { WORDS_MAX = 24 };

struct parser {
    unsigned line;
    char *error;
    size_t error_size;
    struct machine *machine;
    struct gpu *gpu;                /* of the section, or NULL */
    const char *key;
    uint64_t given;                 /* bit set of the section's single statements that were seen */
};

/* A pair's key and where its number goes; flags say what it is. */
enum field_type { FIELD_U32, FIELD_U64, FIELD_I32, FIELD_I64, FIELD_BOOL };
struct field { const char *name; enum field_type type; void *target; int64_t maximum; bool required; };

bool fail(struct parser *parser, const char *found, const char *expected);
bool read_fields(struct parser *parser, char *value, const struct field *fields, size_t count);
bool read_number(struct parser *parser, const char *text, enum field_type type, void *target, int64_t maximum);
bool read_bool(struct parser *parser, const char *text, bool *value);
bool read_choice(struct parser *parser, const char *text, const char *const *choices, uint32_t *value);
bool read_text(struct parser *parser, const char *text, char *target, size_t size);
char *pair_value(char *word, const char *name);      /* the value of "name=value", or NULL */
bool parse_gpu_statement(struct parser *parser, char *value);
bool parse_mig_statement(struct parser *parser, char *value, bool *known);
bool finish_gpu(struct parser *parser);
bool finish_mig(struct parser *parser);

#endif
