/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Numbers, addresses and lists as text.
 */
#include "simulator.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

bool parse_unsigned(const char *text, uint64_t maximum, uint64_t *value)
{
    if (!isdigit((unsigned char)text[0]))
        return false;
    char *end;
    errno = 0;
    *value = strtoull(text, &end, text[0] == '0' && (text[1] | 32) == 'x' ? 16 : 10);
    return errno == 0 && *end == '\0' && *value <= maximum;
}

bool parse_signed(const char *text, int64_t minimum, int64_t maximum, int64_t *value)
{
    if (!isdigit((unsigned char)text[0]) && text[0] != '-')
        return false;
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    return errno == 0 && end != text && *end == '\0' && *value >= minimum && *value <= maximum;
}

bool parse_address(const char *text, struct address *address)
{
    int length = 0;
    address->domain = 0;
    if (sscanf(text, "%8" SCNx32 ":%2" SCNx32 ":%2" SCNx32 ".%1" SCNx32 "%n", &address->domain, &address->bus, &address->device,
               &address->function, &length) == 4
        && text[length] == '\0')
        return address->device < 32 && address->function < 8;
    address->domain = 0;
    if (sscanf(text, "%2" SCNx32 ":%2" SCNx32 ".%1" SCNx32 "%n", &address->bus, &address->device, &address->function, &length) == 3
        && text[length] == '\0')
        return address->device < 32 && address->function < 8;
    return false;
}

bool same_address(const struct address *one, const struct address *other)
{
    return one->domain == other->domain && one->bus == other->bus && one->device == other->device && one->function == other->function;
}

void format_address(const struct address *address, char text[32])
{
    snprintf(text, 32, "%08" PRIX32 ":%02" PRIX32 ":%02" PRIX32 ".%" PRIX32, address->domain, address->bus & 0xFF,
             address->device & 0x1F, address->function & 7);
}

void format_address_legacy(const struct address *address, char text[16])
{
    snprintf(text, 16, "%04" PRIX32 ":%02" PRIX32 ":%02" PRIX32 ".%" PRIX32, address->domain & 0xFFFF, address->bus & 0xFF,
             address->device & 0x1F, address->function & 7);
}

void format_address_sysfs(const struct address *address, char text[16])
{
    snprintf(text, 16, "%04" PRIx32 ":%02" PRIx32 ":%02" PRIx32 ".%" PRIx32, address->domain & 0xFFFFF, address->bus & 0xFF,
             address->device & 0x1F, address->function & 7);
}

bool parse_uuid_bytes(const char *text, unsigned char bytes[16])
{
    size_t digits = 0;
    for (; *text; text++) {
        if (*text == '-')
            continue;
        if (!isxdigit((unsigned char)*text) || digits == 32)
            return false;
        unsigned digit = isdigit((unsigned char)*text) ? (unsigned)(*text - '0') : (unsigned)((*text | 32) - 'a' + 10);
        bytes[digits / 2] = (unsigned char)(digits % 2 ? bytes[digits / 2] << 4 | digit : digit);
        digits++;
    }
    return digits == 32;
}

void copy_text(char *target, size_t size, const char *text)
{
    size_t length = strnlen(text, size - 1);
    memcpy(target, text, length);
    memset(target + length, 0, size - length);
}

/* "0-3,8" -> bits; what lies beyond the mask is left out, as NVML does. */
void cpu_list_to_mask(const char *list, unsigned long *mask, unsigned words)
{
    const unsigned bits = 8 * sizeof(unsigned long);
    memset(mask, 0, words * sizeof *mask);
    while (*list) {
        char *end;
        unsigned long first = strtoul(list, &end, 10), last = first;
        if (end == list)
            return;
        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long cpu = first; cpu <= last && cpu < (unsigned long)words * bits; cpu++)
            mask[cpu / bits] |= 1ul << (cpu % bits);
        list = *end == ',' ? end + 1 : end;
        if (*end && *end != ',')
            return;
    }
}
