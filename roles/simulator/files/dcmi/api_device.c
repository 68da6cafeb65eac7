/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What a chip is and how it does.
 */
#include "simulator.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

static const struct template *own_template(const struct call *call)
{
    return call->slice == NO_DEVICE ? NULL : &call->chip->board.templates[call->chip->slices[call->slice].template];
}

static uint64_t memory_total(const struct call *call)
{
    const struct template *template = own_template(call);
    return template ? slice_memory(&call->chip->board, template) : call->chip->board.memory_mib;
}

/* What the idle chip takes for itself counts for the whole chip only. */
static uint64_t memory_used(const struct call *call)
{
    uint64_t used = call->slice == NO_DEVICE ? call->chip->board.memory_used : 0;
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        const struct process *process = &call->chip->processes[index];
        const bool here = call->slice == NO_DEVICE || process->vid == slice_vid(call->chip, (unsigned)call->slice);
        if (here && lifetime_lasts(&process->life))
            used += process->memory;
    }
    return used;
}

static uint32_t utilization(const struct call *call)
{
    return memory_total(call) ? (uint32_t)(memory_used(call) * 100 / memory_total(call)) : 0;
}

static void put_name(unsigned char *target, const char *text) { copy_text((char *)target, MAX_CHIP_NAME_LEN, text); }

/* In a container with a slice the name is the chip's, short, and the template's. */
static void fill_chip(const struct call *call, struct dcmi_chip_info_v2 *info)
{
    const struct board *board = &call->chip->board;
    const struct template *template = own_template(call);
    char name[2 * MAX_CHIP_NAME_LEN];
    snprintf(name, sizeof name, "%s", board->name);
    if (template) {
        size_t length = strlen(name);
        /* 310P3 is a 310P of the third bin. */
        if (length > 4 && name[length - 2] == 'P')
            name[length - 1] = '\0';
        snprintf(name + strlen(name), sizeof name - strlen(name), "%s", template->name);
    }
    put_name(info->chip_type, board->type);
    put_name(info->chip_name, name);
    put_name(info->chip_ver, board->version);
    put_name(info->npu_name, board->npu_name);
    info->aicore_cnt = template ? template->amounts[AICORE] / THOUSAND : board->aicores;
}

EXPORT int dcmi_get_device_chip_info(int card_id, int device_id, struct dcmi_chip_info *chip_info)
{
    struct dcmi_chip_info_v2 info = { .aicore_cnt = 0 };
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(chip_info, INVALID_ARGUMENT);
    fill_chip(&call, &info);
    memcpy(chip_info, &info, sizeof *chip_info);
    return SUCCESS;
}

BOTH(get_device_chip_info_v2, get_device_chip_info, (struct dcmi_chip_info_v2 *chip_info), (chip_info))
{
    REQUIRE(chip_info, INVALID_ARGUMENT);
    fill_chip(call, chip_info);
    return SUCCESS;
}

BOTH(get_device_type, get_device_type, (enum dcmi_unit_type *device_type), (device_type))
{
    (void)call;
    REQUIRE(device_type, INVALID_ARGUMENT);
    *device_type = NPU_TYPE;
    return SUCCESS;
}

BOTH(get_device_health, get_device_health, (unsigned *health), (health))
{
    REQUIRE(health, INVALID_ARGUMENT);
    *health = call->chip->health;
    return SUCCESS;
}

BOTH(get_device_errorcode_v2, get_device_error_code_list, (int *error_count, unsigned *error_code_list, unsigned list_len),
     (error_count, error_code_list, list_len))
{
    REQUIRE(error_count && error_code_list, INVALID_ARGUMENT);
    *error_count = (int)call->chip->error_count;
    for (unsigned index = 0; index < call->chip->error_count && index < list_len; index++)
        error_code_list[index] = call->chip->errors[index];
    return SUCCESS;
}

EXPORT int dcmi_get_device_errorcode(int card_id, int device_id, int *error_count, unsigned *error_code, int *error_width)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(error_count && error_code, INVALID_ARGUMENT);
    *error_count = (int)call.chip->error_count;
    memcpy(error_code, call.chip->errors, call.chip->error_count * sizeof *error_code);
    if (error_width)
        *error_width = (int)sizeof *error_code;
    return SUCCESS;
}

BOTH(get_device_temperature, get_device_temperature, (int *temperature), (temperature))
{
    REQUIRE(temperature, INVALID_ARGUMENT);
    *temperature = call->chip->board.temperature;
    return SUCCESS;
}

BOTH(get_device_voltage, get_device_voltage, (unsigned *voltage), (voltage))
{
    REQUIRE(voltage, INVALID_ARGUMENT);
    REQUIRE(call->chip->board.voltage != ABSENT, NOT_SUPPORTED);
    *voltage = (unsigned)call->chip->board.voltage;
    return SUCCESS;
}

/* The second die of a module has no separate value. */
BOTH(get_device_power_info, get_device_power_info, (int *power), (power))
{
    REQUIRE(power, INVALID_ARGUMENT);
    REQUIRE(call->chip->board.power != ABSENT && !(call->chip->board.sio && call->chip->board.chip), NOT_SUPPORTED);
    *power = call->chip->board.power;
    return SUCCESS;
}

EXPORT int dcmi_mcu_get_power_info(int card_id, int *power)
{
    CALL(call_begin_card, card_id);
    REQUIRE(power, INVALID_ARGUMENT);
    REQUIRE(call.chip->board.management && call.chip->board.power != ABSENT, NOT_SUPPORTED);
    *power = call.chip->board.power;
    return SUCCESS;
}

BOTH(get_device_frequency, get_device_frequency, (enum dcmi_freq_type input_type, unsigned *frequency), (input_type, frequency))
{
    const struct board *board = &call->chip->board;
    REQUIRE(frequency, INVALID_ARGUMENT);
    switch (input_type) {
    case DCMI_FREQ_DDR: *frequency = board->hbm ? 0 : board->frequency_memory; break;
    case DCMI_FREQ_HBM: *frequency = board->hbm ? board->frequency_memory : 0; break;
    case DCMI_FREQ_CTRLCPU: *frequency = board->frequency_control; break;
    case DCMI_FREQ_AICORE_CURRENT_: *frequency = board->frequency_aicore; break;
    case DCMI_FREQ_AICORE_MAX: *frequency = board->frequency_aicore_maximum; break;
    default: *frequency = 0; break;
    }
    return *frequency ? SUCCESS : NOT_SUPPORTED;
}

enum utilization_type { UTILIZATION_MEMORY = 1, UTILIZATION_AICORE, UTILIZATION_AICPU, UTILIZATION_CONTROL, UTILIZATION_BANDWIDTH,
                        UTILIZATION_HBM = 6, UTILIZATION_DDR = 8, UTILIZATION_HBM_BANDWIDTH = 10, UTILIZATION_VECTOR = 12, UTILIZATION_NPU };

/* Nothing computes here: only memory is used. */
BOTH(get_device_utilization_rate, get_device_utilization_rate, (int input_type, unsigned *utilization_rate), (input_type, utilization_rate))
{
    REQUIRE(utilization_rate, INVALID_ARGUMENT);
    REQUIRE(input_type >= UTILIZATION_MEMORY && input_type <= UTILIZATION_NPU, INVALID_ARGUMENT);
    REQUIRE(call->chip->board.hbm || (input_type != UTILIZATION_HBM && input_type != UTILIZATION_HBM_BANDWIDTH), NOT_SUPPORTED);
    const bool of_memory = input_type == (call->chip->board.hbm ? UTILIZATION_HBM : UTILIZATION_MEMORY);
    *utilization_rate = of_memory ? utilization(call) : 0;
    return SUCCESS;
}

BOTH(get_device_multi_utilization_rate, get_device_multi_utilization_rate, (struct dcmi_multi_utilization_info *util_info), (util_info))
{
    (void)call;
    REQUIRE(util_info, INVALID_ARGUMENT);
    *util_info = (struct dcmi_multi_utilization_info){ 0 };
    return SUCCESS;
}

BOTH(get_device_hbm_info, get_device_hbm_info, (struct dcmi_hbm_info *hbm_info), (hbm_info))
{
    REQUIRE(hbm_info, INVALID_ARGUMENT);
    REQUIRE(call->chip->board.hbm, NOT_SUPPORTED);
    *hbm_info = (struct dcmi_hbm_info){ .memory_size = memory_total(call), .freq = call->chip->board.frequency_memory,
                                        .memory_usage = memory_used(call), .temp = call->chip->board.temperature };
    return SUCCESS;
}

/* Where there is HBM, this pair is nothing. */
EXPORT int dcmi_get_device_memory_info_v3(int card_id, int device_id, struct dcmi_get_memory_info_stru *memory_info)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(memory_info, INVALID_ARGUMENT);
    memset(memory_info, 0, sizeof *memory_info);
    memory_info->hugepagesize = 2048;
    if (call.chip->board.hbm)
        return SUCCESS;
    memory_info->memory_size = memory_total(&call);
    memory_info->memory_available = memory_total(&call) - memory_used(&call);
    memory_info->freq = call.chip->board.frequency_memory;
    memory_info->utiliza = utilization(&call);
    return SUCCESS;
}

EXPORT int dcmi_get_memory_info(int card_id, int device_id, struct dcmi_memory_info_stru *device_memory_info)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(device_memory_info, INVALID_ARGUMENT);
    *device_memory_info = (struct dcmi_memory_info_stru){ 0 };
    if (!call.chip->board.hbm)
        *device_memory_info = (struct dcmi_memory_info_stru){ .memory_size = memory_total(&call), .freq = call.chip->board.frequency_memory,
                                                              .utiliza = utilization(&call) };
    return SUCCESS;
}

BOTH(get_device_resource_info, get_device_proc_mem_info, (struct dcmi_proc_mem_info *proc_info, int *proc_num), (proc_info, proc_num))
{
    REQUIRE(proc_info && proc_num, INVALID_ARGUMENT);
    *proc_num = 0;
    for (unsigned index = 0; index < PROCESSES_MAX; index++) {
        const struct process *process = &call->chip->processes[index];
        const bool here = call->slice == NO_DEVICE || process->vid == slice_vid(call->chip, (unsigned)call->slice);
        if (here && lifetime_lasts(&process->life))
            proc_info[(*proc_num)++] = (struct dcmi_proc_mem_info){ .proc_id = (int)process->life.pid, .proc_mem_usage = process->memory * MIB };
    }
    return SUCCESS;
}

BOTH(get_device_ecc_info, get_device_ecc_info, (enum dcmi_device_type input_type, struct dcmi_ecc_info *device_ecc_info),
     (input_type, device_ecc_info))
{
    REQUIRE(device_ecc_info, INVALID_ARGUMENT);
    REQUIRE(input_type == DCMI_DEVICE_TYPE_NPU || input_type == (call->chip->board.hbm ? DCMI_DEVICE_TYPE_HBM : DCMI_DEVICE_TYPE_DDR),
            NOT_SUPPORTED);
    *device_ecc_info = (struct dcmi_ecc_info){ .enable_flag = 1 };
    return SUCCESS;
}

BOTH(get_device_boot_status, get_device_boot_status, (enum dcmi_boot_status *boot_status), (boot_status))
{
    (void)call;
    REQUIRE(boot_status, INVALID_ARGUMENT);
    *boot_status = DCMI_BOOT_STATUS_FINISH;
    return SUCCESS;
}

BOTH(get_device_network_health, get_device_network_health, (enum dcmi_rdfx_detect_result *result), (result))
{
    REQUIRE(result, INVALID_ARGUMENT);
    REQUIRE(has_port(&call->chip->board), NOT_SUPPORTED);
    *result = (enum dcmi_rdfx_detect_result)call->chip->network;
    return SUCCESS;
}

EXPORT int dcmi_get_device_ip(int card_id, int device_id, enum dcmi_port_type input_type, int port_id, struct dcmi_ip_addr *ip,
                              struct dcmi_ip_addr *mask)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(ip && mask && port_id == 0 && (input_type == DCMI_ROCE_PORT || input_type == DCMI_VNIC_PORT), INVALID_ARGUMENT);
    REQUIRE(input_type == DCMI_ROCE_PORT && call.chip->board.ip[0], NOT_SUPPORTED);
    memset(ip, 0, sizeof *ip);
    memset(mask, 0, sizeof *mask);
    REQUIRE(inet_pton(AF_INET, call.chip->board.ip, ip->u_addr.ip4) == 1, INTERNAL);
    memset(mask->u_addr.ip4, 255, 3);
    return SUCCESS;
}

BOTH(get_device_outband_channel_state, get_device_outband_channel_state, (int *channel_state), (channel_state))
{
    (void)call;
    REQUIRE(channel_state, INVALID_ARGUMENT);
    *channel_state = 1;
    return SUCCESS;
}
