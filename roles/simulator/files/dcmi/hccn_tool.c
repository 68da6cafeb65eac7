/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * hccn_tool for simulated chips: answers queries for the network port of a chip, by its physical id, from the shared state.
 * It has two grammars: by chip, and for the 950 by chip, die, and port. Messages for missing ports, and names that the reference
 * does not contain, are chosen.
 */
#include "dcmi_types.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = -1, LANES = 4 };

static void *library;
static char reply[4096];

/* Calls a function of the library by name; every one returns int. */
#define DCMI(name, types, ...) ((int (*) types)symbol(name))(__VA_ARGS__)

/* A query and its port. */
struct question { const char *about; int physical, die, port; bool get; };

/* A chip with a port: where it is, and by which interface. */
struct chip { int card, device; bool second; };

/* The texts of test results, by number (chosen). */
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

static bool control(const char *command)
{
    return DCMI("acceleratorSimulatorControl", (const char *, char *, unsigned), command, reply, sizeof reply) == 0;
}

static unsigned told(const char *key)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *found = strstr(reply, quoted);
    if (!found)
        return 0;
    found += strlen(quoted);
    return strncmp(found, "true", 4) == 0 ? 1 : (unsigned)strtoul(found, NULL, 10);
}

static bool read_number(const char *text, int *number)
{
    char *end;
    const long found = strtol(text, &end, 10);
    *number = (int)found;
    return *text && !*end && found >= 0 && found <= 65535;
}

static bool read_question(int count, char **words, struct question *question)
{
    *question = (struct question){ .physical = NONE, .die = NONE, .port = NONE };
    for (int index = 1; index < count; index++) {
        int unused, *number = strcmp(words[index], "-i") == 0      ? &question->physical
                              : strcmp(words[index], "-u") == 0    ? &question->die
                              : strcmp(words[index], "-p") == 0    ? &question->port
                              : strcmp(words[index], "-time") == 0 ? &unused
                                                                   : NULL;
        if (number && (++index == count || !read_number(words[index], number)))
            return false;
        if (number)
            continue;
        if (strcmp(words[index], "-g") == 0)
            question->get = true;
        else
            question->about = words[index];
    }
    return question->get && question->about && question->physical != NONE;
}

static bool about(const struct question *question, const char *what) { return strcmp(question->about, what) == 0; }

/* Ends the program where there is no such chip or port. */
static struct chip find(const struct question *question)
{
    unsigned logic;
    struct chip chip = { .second = false };
    char command[32];
    if (DCMI("dcmi_init", (void)) != 0) {
        if (DCMI("dcmiv2_init", (void)) != 0)
            fail("The driver cannot be reached.");
        chip.second = true;
    }
    if (chip.second) {
        if (DCMI("dcmiv2_get_dev_id_by_chip_phy_id", (unsigned, unsigned *), (unsigned)question->physical, &logic) != 0)
            fail("There is no chip %d.", question->physical);
        chip.card = (int)logic;
    } else if (DCMI("dcmi_get_device_logicid_from_phyid", (unsigned, unsigned *), (unsigned)question->physical, &logic) != 0
               || DCMI("dcmi_get_card_id_device_id_from_logicid", (int *, int *, unsigned), &chip.card, &chip.device, logic) != 0) {
        fail("There is no chip %d.", question->physical);
    }
    snprintf(command, sizeof command, "port %d", question->physical);
    if (!control(command))
        fail("Chip %d has no network port.", question->physical);
    if (!chip.second)
        return chip;
    if (!about(question, "-dev_info")
        && (question->die == NONE || question->port == NONE || question->die >= (int)told("dies") || question->port >= (int)told("ports")))
        fail("Usage: hccn_tool -g -link|-speed|-link_stat|-stat|-bandwidth|-dev_info -i ID -u DIE -p PORT");
    return chip;
}

static enum dcmi_rdfx_detect_result health(const struct chip *chip)
{
    enum dcmi_rdfx_detect_result result = DCMI_RDFX_DETECT_OK;
    const int code = chip->second ? DCMI("dcmiv2_get_device_network_health", (int, enum dcmi_rdfx_detect_result *), chip->card, &result)
                                  : DCMI("dcmi_get_device_network_health", (int, int, enum dcmi_rdfx_detect_result *), chip->card, chip->device,
                                         &result);
    if (code != 0)
        fail("The network port cannot be asked: %d.", code);
    return result;
}

static void show_address(const struct chip *chip)
{
    struct dcmi_ip_addr address, mask;
    memset(&address, 0, sizeof address);
    memset(&mask, 0, sizeof mask);
    if (DCMI("dcmi_get_device_ip", (int, int, enum dcmi_port_type, int, struct dcmi_ip_addr *, struct dcmi_ip_addr *), chip->card,
             chip->device, DCMI_ROCE_PORT, 0, &address, &mask) != 0)
        fail("The port has no address.");
    const unsigned char *ip = address.u_addr.ip4, *bits = mask.u_addr.ip4;
    printf("ipaddr:%u.%u.%u.%u\nnetmask:%u.%u.%u.%u\n", ip[0], ip[1], ip[2], ip[3], bits[0], bits[1], bits[2], bits[3]);
}

/* A table in the second grammar; the first one knows no unit but this. */
static void show_speed(const struct question *question, bool second, bool up)
{
    static const char rule[] = "+---------+---------+---------+------------------+";
    if (!second) {
        puts(up ? "Speed: 200000 Mb/s" : "Speed: Unknown!");
        return;
    }
    printf("%s\n| udie id | port id | type    | speed            |\n%s\n", rule, rule);
    printf("| %-7d | %-7d | ub      | %-16s |\n%s\n", question->die, question->port, up ? "400000 Mb/s" : "NA", rule);
}

static void show_link_statistics(const struct question *question)
{
    printf("[device %d]link up count : %u\n[device %d]link down count : %u\n", question->physical, told("link_ups"), question->physical,
           told("link_downs"));
}

static void show_statistics(bool second)
{
    puts("packet statistics:");
    if (second) {
        printf("core_mib_rxbadpkts:%u\ncore_mib_txbadpkts:0\ncore_mib_rxpausepkts:0\ncore_mib_txpausepkts:0\n", told("bad_packets"));
        return;
    }
    printf("mac_tx_total_pkt_num:0\nmac_rx_total_pkt_num:%u\nmac_tx_bad_pkt_num:0\nmac_rx_bad_pkt_num:%u\n", told("bad_packets"), told("bad_packets"));
}

/* No light comes in over a link that is down. */
static void show_optical(bool up)
{
    printf("optical info:\n%-20s: present\n%-20s: 45 C\n%-20s: 3299.20 mV\n", "present", "temperature", "Vcc");
    for (int lane = 0; lane < LANES; lane++) {
        printf("Tx Power%-12d: 1.0150 mW\n", lane);
        printf("Rx Power%-12d: %s mW\n", lane, up ? "0.9230" : "0.0000");
    }
}

static void show_ports(void)
{
    static const char rule[] = "+---------+---------+---------+";
    printf("%s\n| die id  | port id | type    |\n%s\n", rule, rule);
    for (unsigned die = 0; die < told("dies"); die++) {
        for (unsigned port = 0; port < told("ports"); port++)
            printf("| %-7u | %-7u | ub      |\n", die, port);
    }
    puts(rule);
}

int main(int count, char **words)
{
    struct question question;
    if (!read_question(count, words, &question))
        fail("Usage: hccn_tool -i ID -link|-speed|-link_stat|-stat|-optical|-bandwidth|-ip|-net_health -g");
    library = dlopen("libdcmi.so", RTLD_NOW);
    if (!library)
        fail("The driver cannot be reached.");
    const struct chip chip = find(&question);
    const enum dcmi_rdfx_detect_result result = health(&chip);
    const bool up = told("up");
    if (about(&question, "-link"))
        printf("link status: %s\n", up ? "UP" : "DOWN");
    else if (about(&question, "-speed"))
        show_speed(&question, chip.second, up);
    else if (about(&question, "-link_stat"))
        show_link_statistics(&question);
    else if (about(&question, "-stat"))
        show_statistics(chip.second);
    else if (about(&question, "-bandwidth"))
        printf("Bandwidth TX: %u.00 MB/sec\nBandwidth RX: %u.00 MB/sec\n", told("sent"), told("received"));
    else if (about(&question, "-dev_info") && chip.second)
        show_ports();
    else if (about(&question, "-optical") && !chip.second)
        show_optical(up);
    else if (about(&question, "-ip") && !chip.second)
        show_address(&chip);
    else if (about(&question, "-net_health") && !chip.second)
        printf("net health status: %s\n", (unsigned)result < sizeof healths / sizeof healths[0] ? healths[result] : "Unknown");
    else
        fail("%s is not supported.", question.about);
    return 0;
}
