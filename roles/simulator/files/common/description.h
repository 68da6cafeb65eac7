/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Tools of the description's parser. Each vendor's grammar is in the MACHINE_FORMAT.md of its directory.
 */
#ifndef DESCRIPTION_H
#define DESCRIPTION_H

#include "simulator.h"

struct parser {
    unsigned line;
    char *error;
    size_t error_size;
    struct machine *machine;
    bool in_section;                /* of a device, the newest of the machine */
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
bool take_text(char *value, const char *name, char *target, size_t size);   /* takes "name=…" out of pairs and blanks it */

/* The vendor's. */
extern const char section_word[];                    /* that begins a device */
void machine_defaults(struct machine *machine);
bool parse_machine_statement(struct parser *parser, char *value);
bool start_section(struct parser *parser);
bool parse_section_statement(struct parser *parser, char *value);
bool finish_section(struct parser *parser);
bool finish_machine(struct parser *parser);

#endif
