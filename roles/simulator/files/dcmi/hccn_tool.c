/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * hccn_tool for simulated chips: what programs ask about the network port of a chip, by its physical id, answered through DCMI.
 * The sentences of what is not there are chosen.
 */
#include "dcmi_types.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *library;

/* Calls a function of the library by name; every one returns int. */
#define DCMI(name, types, ...) ((int (*) types)symbol(name))(__VA_ARGS__)

/* The words of the tests' results, by their numbers; chosen. */
static const char *const healths[] = { "Success", "Socket fail", "Receive timeout", "Unreachable", "Time exceeded", "Fault", "Init",
                                       "Thread error", "Detect IP set" };

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

static void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
    exit(1);
}

static void *symbol(const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        fail("The library does not have %s.", name);
    return found;
}

static void show_address(int card, int chip)
{
    struct dcmi_ip_addr address, mask;
    memset(&address, 0, sizeof address);
    memset(&mask, 0, sizeof mask);
    if (DCMI("dcmi_get_device_ip", (int, int, enum dcmi_port_type, int, struct dcmi_ip_addr *, struct dcmi_ip_addr *), card, chip,
             DCMI_ROCE_PORT, 0, &address, &mask) != 0)
        fail("The port has no address.");
    const unsigned char *ip = address.u_addr.ip4, *bits = mask.u_addr.ip4;
    printf("ipaddr:%u.%u.%u.%u\nnetmask:%u.%u.%u.%u\n", ip[0], ip[1], ip[2], ip[3], bits[0], bits[1], bits[2], bits[3]);
}

int main(int count, char **words)
{
    const char *question = NULL;
    unsigned logic, physical = 0;
    int card, chip;
    bool chosen = false, asks = false;
    for (int index = 1; index < count; index++) {
        if (strcmp(words[index], "-i") == 0 && index + 1 < count) {
            char *end;
            physical = (unsigned)strtoul(words[++index], &end, 10);
            chosen = *words[index] && !*end;
        } else if (strcmp(words[index], "-g") == 0) {
            asks = true;
        } else {
            question = words[index];
        }
    }
    if (!chosen || !asks || !question)
        fail("Usage: hccn_tool -i ID -link|-speed|-ip|-net_health -g");
    library = dlopen("libdcmi.so", RTLD_NOW);
    if (!library || DCMI("dcmi_init", (void)) != 0)
        fail("The driver cannot be reached.");
    if (DCMI("dcmi_get_device_logicid_from_phyid", (unsigned, unsigned *), physical, &logic) != 0
        || DCMI("dcmi_get_card_id_device_id_from_logicid", (int *, int *, unsigned), &card, &chip, logic) != 0)
        fail("There is no chip %u.", physical);
    enum dcmi_rdfx_detect_result result = DCMI_RDFX_DETECT_OK;
    if (DCMI("dcmi_get_device_network_health", (int, int, enum dcmi_rdfx_detect_result *), card, chip, &result) != 0)
        fail("Chip %u has no network port.", physical);
    if (strcmp(question, "-link") == 0)
        printf("link status: %s\n", result == DCMI_RDFX_DETECT_OK || result == DCMI_RDFX_DETECT_IP_SET ? "UP" : "DOWN");
    else if (strcmp(question, "-speed") == 0)
        puts("Speed: 200000 Mb/s");
    else if (strcmp(question, "-ip") == 0)
        show_address(card, chip);
    else if (strcmp(question, "-net_health") == 0)
        printf("net health status: %s\n", (unsigned)result < sizeof healths / sizeof healths[0] ? healths[result] : "Unknown");
    else
        fail("%s is not supported.", question);
    return 0;
}
