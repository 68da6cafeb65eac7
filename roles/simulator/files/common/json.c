/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Writing JSON into a buffer of fixed size; what does not fit is cut and remembered.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static void put(struct json *json, const char *text, size_t length)
{
    if (json->cut || json->used + length + 1 > json->size) {
        json->cut = true;
        return;
    }
    memcpy(json->text + json->used, text, length);
    json->used += length;
    json->text[json->used] = '\0';
}

static void put_quoted(struct json *json, const char *text)
{
    put(json, "\"", 1);
    for (; *text; text++) {
        unsigned char byte = (unsigned char)*text;
        char escaped[8];
        if (byte == '"' || byte == '\\' || byte < 0x20)
            put(json, escaped, (size_t)snprintf(escaped, sizeof escaped, byte < 0x20 ? "\\u%04x" : "\\%c", byte));
        else
            put(json, text, 1);
    }
    put(json, "\"", 1);
}

static void put_key(struct json *json, const char *key)
{
    if (json->need_comma)
        put(json, ", ", 2);
    json->need_comma = true;
    if (key) {
        put_quoted(json, key);
        put(json, ": ", 2);
    }
}

void json_open(struct json *json, const char *key, char bracket)
{
    put_key(json, key);
    put(json, &bracket, 1);
    json->need_comma = false;
}

void json_close(struct json *json, char bracket)
{
    put(json, &bracket, 1);
    json->need_comma = true;
}

void json_text(struct json *json, const char *key, const char *value)
{
    put_key(json, key);
    put_quoted(json, value);
}

void json_number(struct json *json, const char *key, long long value)
{
    char text[32];
    put_key(json, key);
    put(json, text, (size_t)snprintf(text, sizeof text, "%lld", value));
}

void json_bool(struct json *json, const char *key, bool value)
{
    put_key(json, key);
    put(json, value ? "true" : "false", value ? 4 : 5);
}
