/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The machine description: lines, pairs and errors. Which statements there are, each vendor says.
 */
#include "description.h"

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

/* Takes "name=…", "placements=…" out of the value and blanks them, so that numbers are left. */
bool take_text(char *value, const char *name, char *target, size_t size)
{
    for (char *at = strstr(value, name); at; at = strstr(at + 1, name)) {
        if ((at != value && at[-1] != ' ' && at[-1] != '\t') || at[strlen(name)] != '=')
            continue;
        size_t key = strlen(name) + 1, length = strcspn(at, " \t");
        if (length <= key || length - key >= size)
            return false;
        memcpy(target, at + key, length - key);
        target[length - key] = '\0';
        memset(at, ' ', length);
        return true;
    }
    return false;
}

static bool begin_section(struct parser *parser, const char *value)
{
    if (*value)
        return fail(parser, value, "nothing after the word that begins a device");
    if (parser->in_section && !finish_section(parser))
        return false;
    parser->in_section = true;
    parser->given = 0;
    return start_section(parser);
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
    if (strcmp(line, section_word) == 0)
        return begin_section(parser, value);
    if (!*value)
        return fail(parser, "nothing", "a value");
    return parser->in_section ? parse_section_statement(parser, value) : parse_machine_statement(parser, value);
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
    copy_text(machine->dev_root, sizeof machine->dev_root, "/dev");
    copy_text(machine->sys_root, sizeof machine->sys_root, "/sys");
    machine_defaults(machine);
    bool good = true;
    while (good && fgets(line, sizeof line, file)) {
        parser.line++;
        good = (strchr(line, '\n') || feof(file) || (parser.key = "line", fail(&parser, "more", "at most 1023 bytes")))
               && parse_line(&parser, line);
        parser.key = *parser.key ? "end of file" : "";      /* the line's memory is used again */
    }
    fclose(file);
    good = good && (!parser.in_section || finish_section(&parser)) && finish_machine(&parser);
    machine->loaded = good;
    return good;
}
