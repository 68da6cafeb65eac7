/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Counters of the links between chips and of network ports. Nothing computes, so links have no traffic.
 */
#include "simulator.h"

#include <string.h>

enum { HCCS_COUNTS = 3, HCCS_COUNTS_WIDE = 5, SIO_COUNTS = 0 };

/* *size is the size of the buffer, and afterwards the size of its content. */
bool room(unsigned *size, size_t needed)
{
    const bool enough = *size >= needed;
    *size = (unsigned)needed;
    return enough;
}

/* Links to the other chips of the group. Chips from the second generation on count their traffic (chosen). */
unsigned hccs_links(const struct machine *machine, const struct chip *chip)
{
    unsigned links = 0;
    if (!chip->board.hbm || chip->board.needs_amp || chip->board.hccs_group == ABSENT)
        return 0;
    for (unsigned index = 0; index < machine->chip_count; index++)
        links += &machine->chips[index] != chip && machine->chips[index].board.hccs_group == chip->board.hccs_group;
    return links < HCCS_MAX_PCS_NUM ? links : HCCS_MAX_PCS_NUM;
}

static int answer_hccs(const struct call *call, bool wide, void *buffer, unsigned *size)
{
    struct dcmi_hccs_statistic_info narrow = { .tx_cnt = { 0 } };
    struct dcmi_hccs_statistic_info_u64 counts = { .tx_cnt = { 0 } };
    REQUIRE(hccs_links(call->machine, call->chip), NOT_SUPPORTED);
    REQUIRE(room(size, wide ? sizeof counts : sizeof narrow), INVALID_ARGUMENT);
    for (unsigned link = 0; link < HCCS_MAX_PCS_NUM; link++) {
        counts.crc_err_cnt[link] = call->chip->hccs_errors[link];
        narrow.crc_err_cnt[link] = call->chip->hccs_errors[link];
    }
    memcpy(buffer, wide ? (void *)&counts : (void *)&narrow, *size);
    return SUCCESS;
}

static int answer_sio(const struct call *call, void *buffer, unsigned *size)
{
    const struct dcmi_sio_crc_err_statistic_info counts = { .rx_error_count = (unsigned short)call->chip->sio_errors };
    REQUIRE(call->chip->board.sio, NOT_SUPPORTED);
    REQUIRE(room(size, sizeof counts), INVALID_ARGUMENT);
    memcpy(buffer, &counts, sizeof counts);
    return SUCCESS;
}

int link_information(const struct call *call, int main_command, unsigned sub_command, void *buffer, unsigned *size)
{
    if (main_command == DCMI_MAIN_CMD_HCCS && (sub_command == HCCS_COUNTS || sub_command == HCCS_COUNTS_WIDE))
        return answer_hccs(call, sub_command == HCCS_COUNTS_WIDE, buffer, size);
    if (main_command == DCMI_MAIN_CMD_SIO && sub_command == SIO_COUNTS)
        return answer_sio(call, buffer, size);
    return NOT_SUPPORTED;
}

/* Over how long is the caller's to say. */
EXPORT int dcmi_get_hccs_link_bandwidth_info(int card_id, int device_id, struct dcmi_hccs_bandwidth_info *hccs_bandwidth_info)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(hccs_bandwidth_info, INVALID_ARGUMENT);
    REQUIRE(hccs_links(call.machine, call.chip), NOT_SUPPORTED);
    REQUIRE(hccs_bandwidth_info->profiling_time > 0, INVALID_ARGUMENT);
    *hccs_bandwidth_info = (struct dcmi_hccs_bandwidth_info){ .profiling_time = hccs_bandwidth_info->profiling_time };
    return SUCCESS;
}

EXPORT int dcmiv2_get_port_pkt_stats_info(int dev_id, struct dcmi_ub_port_info *port, struct dcmi_port_pkt_stats_info *statistics)
{
    CALL(call_begin_device, dev_id);
    REQUIRE(port && statistics, INVALID_ARGUMENT);
    const struct board *board = &call.chip->board;
    REQUIRE(board->ub_dies, NOT_SUPPORTED);
    REQUIRE(port->udie_id >= 0 && (unsigned)port->udie_id < board->ub_dies && port->port_id >= 0
            && (unsigned)port->port_id < board->ub_ports, INVALID_ARGUMENT);
    *statistics = (struct dcmi_port_pkt_stats_info){ .core_mib_rxbadpkts = call.chip->bad_packets };
    return SUCCESS;
}
