/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * One card and its chips: a line for each thing that is known.
 */
#include "npu-smi.h"

#include <stdio.h>
#include <string.h>

enum { HCCS_LINK = 3, SIO_LINK = 6, HCCS_SWITCH_LINK = 7 };   /* of the topology */

static void show_board(const struct place *place)
{
    struct dcmi_elabel_info label;
    struct dcmi_board_info board;
    struct dcmi_pcie_info_all pci;
    struct dcmi_die_id die;
    char version[32], bus[20];
    memset(&label, 0, sizeof label);
    memset(&board, 0, sizeof board);
    memset(&pci, 0, sizeof pci);
    memset(&die, 0, sizeof die);
    if (second_interface()) {
        DCMI("dcmiv2_get_device_elabel_info", (int, struct dcmi_elabel_info *), place->logic, &label);
        DCMI("dcmiv2_get_device_die_id", (int, int, struct dcmi_die_id *), place->logic, VDIE, &die);
    } else {
        DCMI("dcmi_get_card_elabel_v2", (int, struct dcmi_elabel_info *), place->card, &label);
        DCMI("dcmi_get_device_die_v2", (int, int, int, struct dcmi_die_id *), place->card, place->chip, VDIE, &die);
    }
    ABOUT(place, "get_device_board_info", "get_device_board_info", struct dcmi_board_info, &board);
    ABOUT(place, "get_device_pcie_info_v2", "get_device_pcie_info", struct dcmi_pcie_info_all, &pci);
    control("show");
    reply_text("driver_version", version, sizeof version);
    bus_id(place, bus);
    pair("Product Name", "%s", label.product_name);
    pair("Model", "%s", label.model);
    pair("Manufacturer", "%s", label.manufacturer);
    pair("Serial Number", "%s", label.serial_number);
    pair("Software Version", "%s", version);
    pair("Firmware Version", "%s", version);
    pair("Board ID", "0x%x", board.board_id);
    pair("PCB ID", "%u", board.pcb_id);
    pair("BOM ID", "%u", board.bom_id);
    pair("Slot ID", "%u", board.slot_id);
    pair("PCIe Bus Info", "%s", bus);
    if (pci.venderid) {     /* chips on the unified bus have none */
        pair("PCI Vendor ID", "0x%04X", pci.venderid);
        pair("PCI Device ID", "0x%04X", pci.deviceid);
        pair("Subsystem Vendor ID", "0x%04X", pci.subvenderid);
        pair("Subsystem Device ID", "0x%04X", pci.subdeviceid);
    }
    pair("VDie ID", "%08X %08X %08X %08X %08X", die.soc_die[0], die.soc_die[1], die.soc_die[2], die.soc_die[3], die.soc_die[4]);
}

static void show_health(const struct place *place)
{
    unsigned health = 0xFFFFFFFFu, codes[128];
    int count = 0;
    ABOUT(place, "get_device_health", "get_device_health", unsigned, &health);
    if (second_interface())
        DCMI("dcmiv2_get_device_error_code_list", (int, int *, unsigned *, unsigned), place->logic, &count, codes, 128);
    else
        DCMI("dcmi_get_device_errorcode_v2", (int, int, int *, unsigned *, unsigned), place->card, place->chip, &count, codes, 128);
    pair("Health Status", "%s", health_word(health));
    printf("\t%-30s : %s", "Error Code", count ? "" : "NA");
    for (int index = 0; index < count; index++)
        printf("%s%08X", index ? " " : "", codes[index]);
    putchar('\n');
    pair("Error Information", "%s", count ? "injected by the simulator" : "NA");
}

static void show_rate(const struct place *place, const char *key, int type)
{
    unsigned rate = 0;
    int code = second_interface() ? DCMI("dcmiv2_get_device_utilization_rate", (int, int, unsigned *), place->logic, type, &rate)
                                  : DCMI("dcmi_get_device_utilization_rate", (int, int, int, unsigned *), place->card, place->chip, type, &rate);
    if (code == OK)
        pair(key, "%u", rate);
    else
        pair(key, "NA");
}

static void show_memory(const struct place *place, bool rates)
{
    struct dcmi_hbm_info hbm;
    struct dcmi_get_memory_info_stru memory;
    if (ABOUT(place, "get_device_hbm_info", "get_device_hbm_info", struct dcmi_hbm_info, &hbm) == OK) {
        pair("HBM Capacity(MB)", "%llu", hbm.memory_size);
        pair("HBM Clock Speed(MHz)", "%u", hbm.freq);
        if (rates)
            show_rate(place, "HBM Usage Rate(%)", 6);
        return;
    }
    memset(&memory, 0, sizeof memory);
    DCMI("dcmi_get_device_memory_info_v3", (int, int, struct dcmi_get_memory_info_stru *), place->card, place->chip, &memory);
    pair("DDR Capacity(MB)", "%llu", memory.memory_size);
    pair("DDR Clock Speed(MHz)", "%u", memory.freq);
    if (rates)
        show_rate(place, "DDR Usage Rate(%)", 1);
}

static void show_usages(const struct place *place)
{
    show_memory(place, true);
    show_rate(place, "Aicore Usage Rate(%)", 2);
    show_rate(place, "Aicpu Usage Rate(%)", 3);
    show_rate(place, "Ctrlcpu Usage Rate(%)", 4);
}

static void show_common(const struct place *place)
{
    int temperature = 0, power = 0;
    show_usages(place);
    ABOUT(place, "get_device_temperature", "get_device_temperature", int, &temperature);
    pair("Temperature(C)", "%d", temperature);
    if (ABOUT(place, "get_device_power_info", "get_device_power_info", int, &power) == OK)
        pair("NPU Real-time Power(W)", "%.1f", power / 10.0);
    else
        pair("NPU Real-time Power(W)", "NA");
}

static void show_memory_alone(const struct place *place) { show_memory(place, false); }

static void show_processes(const struct place *place)
{
    struct dcmi_proc_mem_info processes[64];
    int count = 0;
    if (second_interface())
        DCMI("dcmiv2_get_device_proc_mem_info", (int, struct dcmi_proc_mem_info *, int *), place->logic, processes, &count);
    else
        DCMI("dcmi_get_device_resource_info", (int, int, struct dcmi_proc_mem_info *, int *), place->card, place->chip, processes, &count);
    for (int index = 0; index < count; index++) {
        pair("Process id", "%d", processes[index].proc_id);
        pair("Process memory(MB)", "%lu", processes[index].proc_mem_usage >> 20);
    }
    if (!count)
        pair("Process id", "NA");
}

/* Super-pods of these kinds consist of racks. For other kinds the tool shows the server. */
static bool in_rack(unsigned type)
{
    return type == 1 || type == 2;
}

static void show_super_pod(const struct place *place)
{
    struct dcmi_spod_info pod;
    unsigned size = sizeof pod;
    int code = second_interface()
                   ? DCMI("dcmiv2_get_device_info", (int, int, unsigned, void *, unsigned *), place->logic, 12, 1, &pod, &size)
                   : DCMI("dcmi_get_device_info", (int, int, int, unsigned, void *, unsigned *), place->card, place->chip, 12, 1, &pod, &size);
    if (code != OK) {
        puts("This device does not support querying spod-info.");
        return;
    }
    if (!second_interface())
        pair("SDID", "%u", pod.sdid);
    pair("Super Pod Size", "%u", pod.scale_type);
    pair("Super Pod ID", "%u", pod.super_pod_id);
    if (second_interface() && in_rack(pod.super_pod_type))
        pair("Chassis ID", "%u", pod.chassis_id);
    else
        pair("Server Index", "%u", pod.server_id);
}

/* The time over which links are measured, and the texts of the counters, are chosen. */
enum { MEASURED_MILLISECONDS = 1000, STATISTICS_WIDE = 5 };

static bool link_counts(const struct place *place, int main_command, unsigned sub_command, void *buffer, unsigned size)
{
    return !second_interface()
           && DCMI("dcmi_get_device_info", (int, int, int, unsigned, void *, unsigned *), place->card, place->chip, main_command, sub_command,
                   buffer, &size) == OK;
}

/* As many as the chip has: one for each other chip of its group. */
static unsigned links_of(const struct place *place)
{
    struct place places[CARDS_MAX];
    unsigned links = 0;
    for (unsigned each = 0, count = find_places(places); each < count; each++) {
        int kind = NONE;
        if (DCMI("dcmi_get_topo_info_by_device_id", (int, int, int, int, int *), place->card, place->chip, places[each].card, places[each].chip,
                 &kind) == OK)
            links += kind == HCCS_LINK || kind == SIO_LINK || kind == HCCS_SWITCH_LINK;
    }
    return links < HCCS_MAX_PCS_NUM ? links : HCCS_MAX_PCS_NUM;
}

static void show_counts(const char *key, const unsigned long long counts[], unsigned links)
{
    printf("\t%-30s :", key);
    for (unsigned link = 0; link < links; link++)
        printf(" %llu", counts[link]);
    putchar('\n');
}

static void show_hccs(const struct place *place)
{
    struct dcmi_hccs_statistic_info_u64 counts;
    if (!link_counts(place, DCMI_MAIN_CMD_HCCS, STATISTICS_WIDE, &counts, sizeof counts)) {
        puts("This device does not support querying hccs.");
        return;
    }
    const unsigned links = links_of(place);
    pair("HCCS Links", "%u", links);
    show_counts("Tx Packets", counts.tx_cnt, links);
    show_counts("Rx Packets", counts.rx_cnt, links);
    show_counts("CRC Errors", counts.crc_err_cnt, links);
    show_counts("Retries", counts.retry_cnt, links);
}

static void show_rates(const char *key, const double rates[], unsigned links)
{
    printf("\t%-30s :", key);
    for (unsigned link = 0; link < links; link++)
        printf(" %.2f", rates[link]);
    putchar('\n');
}

static void show_hccs_bandwidth(const struct place *place)
{
    struct dcmi_hccs_bandwidth_info rates = { .profiling_time = MEASURED_MILLISECONDS };
    if (second_interface() || !has_symbol("dcmi_get_hccs_link_bandwidth_info")
        || DCMI("dcmi_get_hccs_link_bandwidth_info", (int, int, struct dcmi_hccs_bandwidth_info *), place->card, place->chip, &rates) != OK) {
        puts("This device does not support querying hccs-bw.");
        return;
    }
    const unsigned links = links_of(place);
    pair("Profiling Time(ms)", "%d", rates.profiling_time);
    pair("Total Tx Bandwidth(GB/s)", "%.2f", rates.total_txbw);
    pair("Total Rx Bandwidth(GB/s)", "%.2f", rates.total_rxbw);
    show_rates("Tx Bandwidth(GB/s)", rates.tx_bandwidth, links);
    show_rates("Rx Bandwidth(GB/s)", rates.rx_bandwidth, links);
}

static bool show_sio(const struct place *place)
{
    struct dcmi_sio_crc_err_statistic_info counts;
    if (!link_counts(place, DCMI_MAIN_CMD_SIO, 0, &counts, sizeof counts)) {
        puts("This device does not support querying sio-info.");
        return false;
    }
    pair("Tx Errors", "%u", counts.tx_error_count);
    pair("Rx Errors", "%u", counts.rx_error_count);
    return true;
}

static void show_sio_of(const struct place *place) { show_sio(place); }

/* Without a number it is about all modules. */
static int show_sio_of_all(void)
{
    struct place places[CARDS_MAX];
    for (unsigned each = 0, count = find_places(places); each < count; each++) {
        pair("NPU ID", "%d", places[each].card);
        pair("Chip ID", "%d", places[each].chip);
        if (!show_sio(&places[each]))
            break;
        putchar('\n');
    }
    return OK;
}

int show_of_chip(const struct options *options)
{
    static const struct { const char *type; void (*show)(const struct place *); } types[] = {
        { "board", show_board }, { "health", show_health }, { "usages", show_usages }, { "common", show_common },
        { "memory", show_memory_alone }, { "proc-mem", show_processes }, { "spod-info", show_super_pod },
        { "hccs", show_hccs }, { "hccs-bw", show_hccs_bandwidth }, { "sio-info", show_sio_of } };
    struct place places[CARDS_MAX];
    if (options->type && strcmp(options->type, "phyid-remap") == 0) {
        for (unsigned each = 0, count = find_places(places); each < count; each++) {
            if ((int)places[each].physical != options->physical)
                continue;
            if (second_interface())
                printf("\tChip Phy-ID:%u\n\tNPU ID:%d\n\tSlot ID:0\n\tChip ID:%d\n", places[each].physical, places[each].card, places[each].chip);
            else
                printf("\tChip Physical ID:%u\n\tChip Logic ID:%d\n\tNPU ID:%d\n\tChip ID:%d\n", places[each].physical, places[each].logic,
                       places[each].card, places[each].chip);
            return OK;
        }
        fail(WRONG_PARAMETER, "There is no chip of the physical id %d.", options->physical);
    }
    if (options->type && strcmp(options->type, "sio-info") == 0 && !options->card_given)
        return show_sio_of_all();
    for (unsigned type = 0; type < sizeof types / sizeof types[0]; type++) {
        if (!options->type || strcmp(options->type, types[type].type) != 0)
            continue;
        const struct place first = chosen_place(options);
        pair("NPU ID", "%d", first.card);
        if (options->chip_given || second_interface()) {
            types[type].show(&first);
            return OK;
        }
        /* All chips of the card, each after its number. */
        const unsigned count = find_places(places);
        unsigned chips = 0;
        for (unsigned each = 0; each < count; each++)
            chips += places[each].card == first.card;
        pair("Chip Count", "%u", chips);
        for (unsigned each = 0; each < count; each++) {
            if (places[each].card != first.card)
                continue;
            putchar('\n');
            types[type].show(&places[each]);
            pair("Chip ID", "%d", places[each].chip);
        }
        return OK;
    }
    static const char *const unsupported[] = { "ecc", "flash", "pcie-err" };
    for (unsigned type = 0; options->type && type < sizeof unsupported / sizeof unsupported[0]; type++) {
        if (strcmp(options->type, unsupported[type]) == 0) {
            printf("This device does not support querying %s.\n", options->type);
            return OK;
        }
    }
    fail(WRONG_PARAMETER, "The type \"%s\" is not known.", options->type ? options->type : "");
}
