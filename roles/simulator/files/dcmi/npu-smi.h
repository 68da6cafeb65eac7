/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What the parts of the npu-smi stand-in share.
 */
#ifndef NPU_SMI_H
#define NPU_SMI_H

#include "dcmi_types.h"

#include <stdbool.h>

enum { CARDS_MAX = 64, CHIPS_OF_CARD_MAX = 4, NONE = -1 };
/* Codes of the library, and those of the program that have no counterpart there. */
enum { OK = 0, WRONG_PARAMETER = -8001, NOT_PERMITTED = -8002, MISSING = -8008, REFUSED_IN_CONTAINER = -8013, OCCUPIED = -8020,
       UNSUPPORTED = -8255 };
#define CHOOSE 0xFFFFFFFFu

struct options {
    const char *verb, *type, *template, *value, *mode;
    int card, chip, physical;
    unsigned vid, group;
    bool card_given, chip_given, vid_given, group_given, list, map;
};

/* A chip as the tables show it. */
struct place { int card, chip, logic; unsigned physical; };

/* Calls a function of the library by name; every one returns int. */
#define DCMI(name, types, ...) ((int (*) types)symbol(name))(__VA_ARGS__)
/* One about a chip, under its first or its second name. */
#define ABOUT(place, name, second, type, target)                                             \
    (second_interface() ? DCMI("dcmiv2_" second, (int, type *), (place)->logic, target)      \
                        : DCMI("dcmi_" name, (int, int, type *), (place)->card, (place)->chip, target))

void *symbol(const char *name);
bool has_symbol(const char *name);                           /* older libraries lack some */
bool second_interface(void);
int exit_code(int code);
/* Says it in one sentence and ends with the code's exit status. */
void fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
void pair(const char *key, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* One command to the library's private entry; a number or a text of what it answered. */
int control(const char *format, ...) __attribute__((format(printf, 1, 2)));
long long reply_number(const char *key);
const char *reply_text(const char *key, char *text, unsigned size);

unsigned find_places(struct place places[CARDS_MAX]);
struct place chosen_place(const struct options *options);    /* by -i and -c; ends the program if it does not exist */
struct dcmi_chip_info_v2 chip_info(const struct place *place);
const char *health_word(unsigned health);
void bus_id(const struct place *place, char text[20]);

int show_summary(void);
int show_list(void);
int show_map(void);
int show_topology(void);
int show_of_chip(const struct options *options);
int show_templates(const struct options *options);
int show_slices(const struct options *options);
int show_mode(const struct options *options, bool *known);
bool about_sharing(const char *type);                        /* what both grammars have */
int set_something(const struct options *options);

#endif
