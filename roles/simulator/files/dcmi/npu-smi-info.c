/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The whole machine: the summary, the list, the map of numbers, and how chips lie to each other.
 */
#include "npu-smi.h"

#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

static const char rule[] = "+---------------------------+---------------+----------------------------------------------------+";
static const char double_rule[] = "+===========================+===============+====================================================+";

static bool high_bandwidth(const struct place *place, struct dcmi_hbm_info *hbm)
{
    memset(hbm, 0, sizeof *hbm);
    return ABOUT(place, "get_device_hbm_info", "get_device_hbm_info", struct dcmi_hbm_info, hbm) == OK;
}

/* With two dies in a module, the tables show a separate physical number of chips. */
static bool has_modules(void)
{
    unsigned policy;
    if (second_interface() || !has_symbol("dcmi_get_multi_die_policy"))
        return false;
    return DCMI("dcmi_get_multi_die_policy", (unsigned *), &policy) == OK;
}

/* Without the marker of a finished installation there is a warning before everything. */
static void warn_of_installation(void)
{
    char etc[256], path[300], line[256];
    bool complete = false;
    control("show");
    reply_text("etc_root", etc, sizeof etc);
    snprintf(path, sizeof path, "%s/ascend_install.info", etc);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        complete = complete || strncmp(line, "Driver_Install_Status=complete", 30) == 0;
    if (file)
        fclose(file);
    if (!complete)
        puts("Warning: the installation of the driver is not complete; install it again.");
}

static void show_row(const struct place *place)
{
    struct dcmi_hbm_info hbm;
    struct dcmi_get_memory_info_stru memory;
    char first[64], power[16] = "NA", bus[20], pages[64], left[64], right[64], id[64];
    unsigned health = 0xFFFFFFFFu;
    int temperature = 0, deciwatt = 0;
    const struct dcmi_chip_info_v2 info = chip_info(place);
    const bool has_hbm = high_bandwidth(place, &hbm), modules = has_modules();
    memset(&memory, 0, sizeof memory);
    ABOUT(place, "get_device_health", "get_device_health", unsigned, &health);
    ABOUT(place, "get_device_temperature", "get_device_temperature", int, &temperature);
    if (ABOUT(place, "get_device_power_info", "get_device_power_info", int, &deciwatt) == OK)
        snprintf(power, sizeof power, "%.1f", deciwatt / 10.0);
    else if (modules && place->chip)
        snprintf(power, sizeof power, "-");
    if (!second_interface())
        DCMI("dcmi_get_device_memory_info_v3", (int, int, struct dcmi_get_memory_info_stru *), place->card, place->chip, &memory);
    bus_id(place, bus);
    snprintf(first, sizeof first, "%-5d %-20s", place->card, (const char *)info.chip_name);
    snprintf(pages, sizeof pages, "%lu / %lu", memory.hugepages_total - memory.hugepages_free, memory.hugepages_total);
    printf("| %-26s| %-13s | %-11s %-17d %-21s|\n", first, health_word(health), power, temperature, pages);
    if (second_interface())
        snprintf(id, sizeof id, " ");
    else if (modules)
        snprintf(id, sizeof id, "%-5d %-20u", place->chip, place->physical);
    else
        snprintf(id, sizeof id, "%-5d %-20d", place->chip, place->logic);
    if (has_hbm && !modules)
        snprintf(id, sizeof id, "%-5d", place->chip);
    snprintf(left, sizeof left, "%llu / %llu", memory.memory_size - memory.memory_available, memory.memory_size);
    snprintf(right, sizeof right, "%llu / %llu", hbm.memory_usage, hbm.memory_size);
    printf("| %-26s| %-13s | %-11d %-17s %-21s|\n", second_interface() ? "" : id, bus, 0, left, has_hbm ? right : "");
}

/* One line for each process of a chip; how many there were. */
static int show_processes_of(const struct place *place)
{
    struct dcmi_proc_mem_info processes[64];
    int number = 0;
    if (second_interface())
        DCMI("dcmiv2_get_device_proc_mem_info", (int, struct dcmi_proc_mem_info *, int *), place->logic, processes, &number);
    else
        DCMI("dcmi_get_device_resource_info", (int, int, struct dcmi_proc_mem_info *, int *), place->card, place->chip, processes, &number);
    for (int index = 0; index < number; index++) {
        char path[64], name[32] = "";
        snprintf(path, sizeof path, "/proc/%d/comm", processes[index].proc_id);
        FILE *file = fopen(path, "re");
        if (file && fgets(name, sizeof name, file))
            name[strcspn(name, "\n")] = '\0';
        if (file)
            fclose(file);
        printf("| %-8d%-18d| %-13d | %-25s| %-24lu|\n", place->card, place->chip, processes[index].proc_id, name,
               processes[index].proc_mem_usage >> 20);
    }
    return number;
}

static void show_processes(const struct place places[CARDS_MAX], unsigned count)
{
    int of_card = 0;
    puts(rule);
    printf("| %-8s%-18s| %-13s | %-25s| %-24s|\n", "NPU", "Chip", "Process id", "Process name", "Process memory(MB)");
    puts(double_rule);
    for (unsigned each = 0; each < count; each++) {
        of_card += show_processes_of(&places[each]);
        if (each + 1 < count && places[each + 1].card == places[each].card)
            continue;
        if (!of_card) {
            char sentence[80];
            snprintf(sentence, sizeof sentence, "No running processes found in NPU %d", places[each].card);
            printf("| %-95s|\n", sentence);
        }
        puts(double_rule);
        of_card = 0;
    }
}

int show_summary(void)
{
    struct place places[CARDS_MAX];
    struct dcmi_hbm_info hbm;
    char tool[32], driver[32];
    const unsigned count = find_places(places);
    warn_of_installation();
    control("show");
    reply_text("tool_version", tool, sizeof tool);
    reply_text("driver_version", driver, sizeof driver);
    const bool has_hbm = count && high_bandwidth(&places[0], &hbm);
    puts("+------------------------------------------------------------------------------------------------+");
    printf("| npu-smi %-33sVersion: %-45s|\n", tool, driver);
    puts(rule);
    printf("| %-26s| %-13s | %-11s %-17s %-21s|\n", second_interface() ? "NPU ID Name" : "NPU   Name", "Health", "Power(W)", "Temp(C)",
           "Hugepages-Usage(page)");
    printf("| %-26s| %-13s | %-11s %-17s %-21s|\n",
           second_interface() ? "" : !has_hbm ? "Chip  Device" : has_modules() ? "Chip  Phy-ID" : "Chip", "Bus-Id",
           second_interface() ? "NPU Util(%)" : "AICore(%)", "Memory-Usage(MB)", has_hbm ? "HBM-Usage(MB)" : "");
    puts(double_rule);
    for (unsigned each = 0; each < count; each++) {
        show_row(&places[each]);
        puts(each + 1 < count && places[each + 1].card == places[each].card ? rule : double_rule);
    }
    show_processes(places, count);
    return OK;
}

int show_list(void)
{
    struct place places[CARDS_MAX];
    const unsigned count = find_places(places);
    struct dcmi_hbm_info hbm;
    unsigned cards = 0;
    for (unsigned each = 0; each < count; each++)
        cards += !each || places[each].card != places[each - 1].card;
    if (!count) {
        puts("There is no NPU on this machine.");
        return OK;
    }
    pair("Total Count", "%u\n", cards);
    for (unsigned each = 0; each < count; each++) {
        struct dcmi_elabel_info label;
        unsigned chips = 1;
        if (each && places[each].card == places[each - 1].card)
            continue;
        while (each + chips < count && places[each + chips].card == places[each].card)
            chips++;
        pair("NPU ID", "%d", places[each].card);
        /* Boards that are cards, and not part of the server. */
        if (!high_bandwidth(&places[each], &hbm)
            && DCMI("dcmi_get_card_elabel_v2", (int, struct dcmi_elabel_info *), places[each].card, &label) == OK) {
            pair("Product Name", "%s", label.product_name);
            pair("Serial Number", "%s", label.serial_number);
        }
        if (!second_interface())
            pair("Chip Count", "%u", chips);
        putchar('\n');
    }
    return OK;
}

static void show_words(const char *const words[], unsigned count)
{
    putchar('\t');
    for (unsigned each = 0; each < count; each++)
        printf("%-30s", words[each]);
    putchar('\n');
}

int show_map(void)
{
    struct place places[CARDS_MAX];
    const unsigned count = find_places(places);
    const bool modules = has_modules();
    if (second_interface())
        show_words((const char *const[]){ "NPU ID", "Slot ID", "Chip ID", "Chip Phy-ID", "Chip Name" }, 5);
    else if (modules)
        show_words((const char *const[]){ "NPU ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name" }, 5);
    else
        show_words((const char *const[]){ "NPU ID", "Chip ID", "Chip Logic ID", "Chip Name" }, 4);
    for (unsigned each = 0; each < count; each++) {
        const struct dcmi_chip_info_v2 info = chip_info(&places[each]);
        char card[16], chip[16], logic[16], physical[16], slot[16] = "0", name[72];
        struct dcmi_board_info board;
        snprintf(card, sizeof card, "%d", places[each].card);
        snprintf(chip, sizeof chip, "%d", places[each].chip);
        snprintf(logic, sizeof logic, "%d", places[each].logic);
        snprintf(physical, sizeof physical, "%u", places[each].physical);
        snprintf(name, sizeof name, "%s %s", (const char *)info.chip_type, (const char *)info.chip_name);
        if (second_interface()) {
            if (DCMI("dcmiv2_get_device_board_info", (int, struct dcmi_board_info *), places[each].logic, &board) == OK)
                snprintf(slot, sizeof slot, "%u", board.slot_id);
            show_words((const char *const[]){ card, slot, chip, physical, name }, 5);
        } else if (modules) {
            show_words((const char *const[]){ card, chip, logic, physical, name }, 5);
        } else {
            show_words((const char *const[]){ card, chip, logic, name }, 4);
        }
        int highest = 0, management = NONE, processor = NONE;
        const bool last = each + 1 == count || places[each + 1].card != places[each].card;
        if (last && !second_interface()
            && DCMI("dcmi_get_device_id_in_card", (int, int *, int *, int *), places[each].card, &highest, &management, &processor) == OK
            && management != NONE) {
            snprintf(chip, sizeof chip, "%d", management);
            show_words((const char *const[]){ card, chip, "-", "Mcu" }, 4);
        }
    }
    return OK;
}

static const char *cell(const struct place *one, const struct place *other)
{
    static const char *const names[] = { "X", "SYS", "PHB", "HCCS", "PXB", "PIX", "SIO", "HCCS_SW", "UB", "NA" };
    int kind = NONE;
    if (one == other)
        return "X";
    if (second_interface())
        return "UB";
    if (DCMI("dcmi_get_topo_info_by_device_id", (int, int, int, int, int *), one->card, one->chip, other->card, other->chip, &kind) != OK
        || kind < 0 || kind > 9)
        return "NA";
    return names[kind];
}

int show_topology(void)
{
    struct place places[CARDS_MAX];
    struct utsname machine;
    const unsigned count = find_places(places);
    const bool modules = has_modules();
    struct dcmi_hbm_info hbm;
    const struct dcmi_chip_info_v2 info = count ? chip_info(&places[0]) : (struct dcmi_chip_info_v2){ 0 };
    uname(&machine);
    if (strcmp(machine.machine, "x86_64") == 0
        && (!count || !high_bandwidth(&places[0], &hbm) || strcmp((const char *)info.chip_name, "910") == 0)) {
        puts("This device does not support querying topo.");
        return OK;
    }
    int kind = NONE;
    if (!second_interface() && count > 1
        && DCMI("dcmi_get_topo_info_by_device_id", (int, int, int, int, int *), places[0].card, places[0].chip, places[1].card, places[1].chip, &kind)
               == UNSUPPORTED)
        fail(UNSUPPORTED, "Failed to query topo.");
    printf("\t%-12s", "");
    for (unsigned each = 0; each < count; each++) {
        char head[24];
        snprintf(head, sizeof head, modules ? "Phy-ID%u" : "NPU%u", modules ? places[each].physical : (unsigned)places[each].logic);
        printf("%-12s", head);
    }
    /* Modules of two dies have no such column on Arm. */
    const bool affinities = !modules || strcmp(machine.machine, "aarch64") != 0;
    puts(affinities ? "CPU Affinity" : "");
    for (unsigned each = 0; each < count; each++) {
        char head[24], affinity[256] = "NA";
        int length;
        snprintf(head, sizeof head, modules ? "Phy-ID%u" : "NPU%u", modules ? places[each].physical : (unsigned)places[each].logic);
        printf("\t%-12s", head);
        for (unsigned other = 0; other < count; other++)
            printf("%-12s", cell(&places[each], &places[other]));
        if (second_interface())
            DCMI("dcmiv2_get_affinity_cpu_info_by_dev_id", (int, char *, int *), places[each].logic, affinity, &length);
        else
            DCMI("dcmi_get_affinity_cpu_info_by_device_id", (int, int, char *, int *), places[each].card, places[each].chip, affinity, &length);
        puts(affinities ? affinity : "");
    }
    puts("\nLegend:\n\n"
         "  X    = itself\n"
         "  SYS  = the way leads from one NUMA node to another\n"
         "  PHB  = the way leads through the PCIe host bridge of one CPU\n"
         "  PIX  = the way leads through one PCIe switch\n"
         "  PXB  = the way leads through several PCIe switches\n"
         "  HCCS = linked by HCCS; HCCS_SW through its switch\n"
         "  SIO  = two dies of one module\n"
         "  NA   = nothing is known");
    return OK;
}
