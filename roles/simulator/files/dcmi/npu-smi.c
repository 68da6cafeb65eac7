/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * npu-smi for simulated chips: the calls that administrators and node software make, answered through DCMI, so that it shows what any
 * of its clients would see, inside a container as well. The exit status is the low byte of the code; some refusals exit 0, as they do on
 * real machines. Two grammars: by card and chip, and for the 950 by the number of a device alone.
 */
#include "npu-smi.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *library;
static bool second;
static char reply[1 << 16];

void *symbol(const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        fail(UNSUPPORTED, "The library does not have %s.", name);
    return found;
}

bool has_symbol(const char *name) { return dlsym(library, name) != NULL; }

bool second_interface(void) { return second; }

/* The program's own numbers begin a thousand lower. */
int exit_code(int code) { return code == OK ? 0 : (code - 1000) & 0xFF; }

void fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
    exit(exit_code(code));
}

void pair(const char *key, const char *format, ...)
{
    va_list arguments;
    printf("\t%-30s : ", key);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

int control(const char *format, ...)
{
    char command[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    return DCMI("acceleratorSimulatorControl", (const char *, char *, unsigned), command, reply, sizeof reply);
}

static const char *reply_value(const char *key)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *found = strstr(reply, quoted);
    return found ? found + strlen(quoted) : NULL;
}

long long reply_number(const char *key)
{
    const char *value = reply_value(key);
    return value && strncmp(value, "true", 4) == 0 ? 1 : value ? strtoll(value, NULL, 10) : NONE;
}

const char *reply_text(const char *key, char *text, unsigned size)
{
    const char *value = reply_value(key);
    size_t length = value && *value == '"' ? strcspn(value + 1, "\"") : 0;
    snprintf(text, size, "%.*s", (int)length, length ? value + 1 : "");
    return text;
}

unsigned find_places(struct place places[CARDS_MAX])
{
    int cards[CARDS_MAX], count = 0;
    unsigned found = 0;
    if (second) {
        DCMI("dcmiv2_get_device_list", (int *, int *, int), &count, cards, CARDS_MAX);
        for (int each = 0; each < count; each++) {
            places[found] = (struct place){ .card = cards[each], .chip = 0, .logic = cards[each] };
            DCMI("dcmiv2_get_chip_phy_id_by_dev_id", (unsigned, unsigned *), (unsigned)cards[each], &places[found].physical);
            found++;
        }
        return found;
    }
    DCMI("dcmi_get_card_list", (int *, int *, int), &count, cards, CARDS_MAX);
    for (int each = 0; each < count; each++) {
        for (int chip = 0; chip < CHIPS_OF_CARD_MAX && found < CARDS_MAX; chip++) {
            struct place place = { .card = cards[each], .chip = chip };
            if (DCMI("dcmi_get_device_logic_id", (int *, int, int), &place.logic, place.card, chip) != OK)
                continue;
            DCMI("dcmi_get_device_phyid_from_logicid", (unsigned, unsigned *), (unsigned)place.logic, &place.physical);
            places[found++] = place;
        }
    }
    return found;
}

struct place chosen_place(const struct options *options)
{
    struct place places[CARDS_MAX];
    unsigned count = find_places(places);
    if (!options->card_given)
        fail(WRONG_PARAMETER, "Parameter -i is required.");
    for (unsigned each = 0; each < count; each++) {
        if (places[each].card == options->card && (!options->chip_given || places[each].chip == options->chip))
            return places[each];
    }
    fail(WRONG_PARAMETER, "There is no chip with -i %d -c %d.", options->card, options->chip_given ? options->chip : 0);
}

struct dcmi_chip_info_v2 chip_info(const struct place *place)
{
    struct dcmi_chip_info_v2 info;
    memset(&info, 0, sizeof info);
    /* An older library has the shorter structure alone, with which the longer one begins. */
    if (!second && !has_symbol("dcmi_get_device_chip_info_v2"))
        DCMI("dcmi_get_device_chip_info", (int, int, struct dcmi_chip_info_v2 *), place->card, place->chip, &info);
    else
        ABOUT(place, "get_device_chip_info_v2", "get_device_chip_info", struct dcmi_chip_info_v2, &info);
    return info;
}

const char *health_word(unsigned health)
{
    static const char *const words[] = { "OK", "Warning", "Alarm", "Critical" };
    return health < sizeof words / sizeof words[0] ? words[health] : "UNKNOWN";
}

void bus_id(const struct place *place, char text[20])
{
    struct dcmi_pcie_info_all pci;
    if (ABOUT(place, "get_device_pcie_info_v2", "get_device_pcie_info", struct dcmi_pcie_info_all, &pci) == OK)
        snprintf(text, 20, "%04X:%02X:%02X.%X", pci.domain & 0xFFFF, pci.bdf_busid & 0xFF, pci.bdf_deviceid & 0x1F, pci.bdf_funcid & 7);
    else
        snprintf(text, 20, "NA");
}

static bool number(const char *text, unsigned *value)
{
    char *end;
    unsigned long found = strtoul(text, &end, 10);
    *value = (unsigned)found;
    return *text >= '0' && *text <= '9' && !*end && found < CHOOSE;
}

static void read_number(const char *option, const char *text, unsigned maximum, unsigned *value)
{
    if (!number(text, value) || *value > maximum)
        fail(WRONG_PARAMETER, "The value \"%s\" of parameter %s is invalid.", text, option);
}

static void read_options(int count, char **words, struct options *options)
{
    *options = (struct options){ .verb = words[1], .card = NONE, .chip = NONE, .physical = NONE, .vid = CHOOSE, .group = CHOOSE };
    for (int index = 2; index < count; index++) {
        const char *option = words[index];
        unsigned value = 0;
        if (strcmp(option, "-l") == 0 || strcmp(option, "-m") == 0) {
            /* -m of a setting has a value: how a reset goes. */
            if (options->type && index + 1 < count)
                options->mode = words[++index];
            else if (option[1] == 'l')
                options->list = true;
            else
                options->map = true;
            continue;
        }
        if (option[0] != '-' || strlen(option) != 2 || !strchr("ticfvgdp", option[1]) || (second && option[1] == 'c'))
            fail(WRONG_PARAMETER, "Parameter %s is not known.", option);
        if (++index == count)
            fail(WRONG_PARAMETER, "Parameter %s needs a value.", option);
        const char *text = words[index];
        switch (option[1]) {
        case 't': options->type = text; break;
        case 'f': options->template = text; break;
        case 'd': options->value = text; break;
        case 'i':
            read_number(option, text, CARDS_MAX - 1, &value);
            options->card = (int)value;
            options->card_given = true;
            break;
        case 'c':
            read_number(option, text, CHIPS_OF_CARD_MAX - 1, &value);
            options->chip = (int)value;
            options->chip_given = true;
            break;
        case 'p':
            read_number(option, text, 65535, &value);
            options->physical = (int)value;
            break;
        case 'v':
            if (!number(text, &options->vid))
                fail(WRONG_PARAMETER, "The vnpu id \"%s\" is invalid.", text);
            options->vid_given = true;
            break;
        default:
            read_number(option, text, 3, &options->group);
            options->group_given = true;
        }
    }
}

static int show(const struct options *options)
{
    bool known = false;
    if (options->list)
        return show_list();
    if (options->map)
        return show_map();
    if (!options->type)
        return options->card_given ? show_of_chip(options) : show_summary();
    if (strcmp(options->type, "topo") == 0)
        return show_topology();
    if (!second && strcmp(options->type, "template-info") == 0)
        return show_templates(options);
    if (!second && strcmp(options->type, "info-vnpu") == 0)
        return show_slices(options);
    int code = second && !about_sharing(options->type) ? OK : show_mode(options, &known);
    return known ? code : show_of_chip(options);
}

int main(int count, char **words)
{
    struct options options;
    if (count < 2 || strcmp(words[1], "-h") == 0 || strcmp(words[1], "--help") == 0) {
        puts("Usage: npu-smi info [-l | -m | -t TYPE [-i ID] [-c ID] [-p ID]]\n"
             "       npu-smi set -t TYPE [-i ID] [-c ID] [-f TEMPLATE] [-v ID] [-g GROUP] [-d VALUE] [-m MODE]");
        return 0;
    }
    library = dlopen("libdcmi.so", RTLD_NOW);
    if (!library)
        fail(-8005, "dcmi module initialize failed. ret is -8005");
    control("show");
    second = reply_number("interface") == 2;
    if (strcmp(words[1], "-v") == 0) {
        char version[32];
        printf("npu-smi version: %s\n", reply_text("tool_version", version, sizeof version));
        return 0;
    }
    if (strcmp(words[1], "info") != 0 && strcmp(words[1], "set") != 0)
        fail(WRONG_PARAMETER, "\"%s\" is not known; see npu-smi -h.", words[1]);
    int code = second ? DCMI("dcmiv2_init", (void)) : DCMI("dcmi_init", (void));
    if (code != OK)
        fail(code, "dcmi module initialize failed. ret is %d", code);
    read_options(count, words, &options);
    return exit_code(strcmp(words[1], "info") == 0 ? show(&options) : set_something(&options));
}
