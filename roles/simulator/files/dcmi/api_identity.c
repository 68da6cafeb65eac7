/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The existing chips, their numbers, and their identities.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static int answer_version(const struct call *call, char *dcmi_ver, int buf_size)
{
    REQUIRE(dcmi_ver && buf_size > 0 && strlen(call->machine->driver_version) < (size_t)buf_size, INVALID_ARGUMENT);
    copy_text(dcmi_ver, (size_t)buf_size, call->machine->driver_version);
    return SUCCESS;
}

EXPORT int dcmi_get_dcmi_version(char *dcmi_ver, int buf_size)
{
    CALL(call_begin, INTERFACE_1);
    return answer_version(&call, dcmi_ver, buf_size);
}

EXPORT int dcmiv2_get_dcmi_version(char *dcmi_ver, int buf_size)
{
    CALL(call_begin, INTERFACE_2);
    return answer_version(&call, dcmi_ver, buf_size);
}

/* Cards of which this process has a chip, in their order. */
static int answer_cards(const struct call *call, int *card_num, int *card_list, int list_length)
{
    REQUIRE(card_num && card_list && list_length > 0, INVALID_ARGUMENT);
    int count = 0;
    for (unsigned number = 0; number < seen_count(); number++) {
        const int card = (int)call->machine->chips[seen_device(number)->chip].board.card;
        bool known = false;
        for (int each = 0; each < count; each++)
            known = known || card_list[each] == card;
        if (!known && count < list_length)
            card_list[count++] = card;
    }
    *card_num = count;
    return count ? SUCCESS : NOT_FOUND;
}

EXPORT int dcmi_get_card_list(int *card_num, int *card_list, int list_len)
{
    CALL(call_begin, INTERFACE_1);
    return answer_cards(&call, card_num, card_list, list_len);
}

EXPORT int dcmi_get_card_num_list(int *card_num, int *card_list, int list_length)
{
    CALL(call_begin, INTERFACE_1);
    return answer_cards(&call, card_num, card_list, list_length);
}

/* One more than the highest chip of the card that this process has; 0: the card does not exist. */
static int chips_of_card(const struct call *call, int card, bool *management)
{
    int count = 0;
    for (unsigned number = 0; number < seen_count(); number++) {
        const struct board *board = &call->machine->chips[seen_device(number)->chip].board;
        if (board->card != (unsigned)card)
            continue;
        count = (int)board->chip + 1 > count ? (int)board->chip + 1 : count;
        *management = board->management;
    }
    return count;
}

EXPORT int dcmi_get_device_num_in_card(int card_id, int *device_num)
{
    bool management = false;
    CALL(call_begin, INTERFACE_1);
    REQUIRE(device_num, INVALID_ARGUMENT);
    *device_num = chips_of_card(&call, card_id, &management);
    return *device_num ? SUCCESS : INVALID_DEVICE;
}

EXPORT int dcmi_get_device_id_in_card(int card_id, int *device_id_max, int *mcu_id, int *cpu_id)
{
    bool management = false;
    CALL(call_begin, INTERFACE_1);
    REQUIRE(device_id_max && mcu_id && cpu_id, INVALID_ARGUMENT);
    *device_id_max = chips_of_card(&call, card_id, &management);
    *mcu_id = management ? *device_id_max : -1;
    *cpu_id = -1;
    return *device_id_max ? SUCCESS : INVALID_DEVICE;
}

EXPORT int dcmiv2_get_all_device_count(int *all_device_count)
{
    CALL(call_begin, INTERFACE_2);
    REQUIRE(all_device_count, INVALID_ARGUMENT);
    *all_device_count = (int)seen_count();
    return SUCCESS;
}

EXPORT int dcmiv2_get_device_list(int *device_num, int *device_list, int list_len)
{
    CALL(call_begin, INTERFACE_2);
    REQUIRE(device_num && device_list && list_len > 0, INVALID_ARGUMENT);
    for (*device_num = 0; *device_num < (int)seen_count() && *device_num < list_len; ++*device_num)
        device_list[*device_num] = *device_num;
    return SUCCESS;
}

EXPORT int dcmi_get_device_logic_id(int *device_logic_id, int card_id, int device_id)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(device_logic_id, INVALID_ARGUMENT);
    *device_logic_id = seen_logic(call.index);
    return SUCCESS;
}

EXPORT int dcmi_get_card_id_device_id_from_logicid(int *card_id, int *device_id, unsigned device_logic_id)
{
    CALL(call_begin, INTERFACE_1);
    REQUIRE(card_id && device_id, INVALID_ARGUMENT);
    REQUIRE(seen_device(device_logic_id), INVALID_DEVICE);
    const struct board *board = &call.machine->chips[seen_device(device_logic_id)->chip].board;
    *card_id = (int)board->card;
    *device_id = (int)board->chip;
    return SUCCESS;
}

static int answer_physical(const struct call *call, unsigned logic, unsigned *physical)
{
    REQUIRE(physical, INVALID_ARGUMENT);
    REQUIRE(seen_device(logic), INVALID_DEVICE);
    *physical = physical_of(call->machine, seen_device(logic));
    return SUCCESS;
}

static int answer_logic(const struct call *call, unsigned physical, unsigned *logic)
{
    REQUIRE(logic, INVALID_ARGUMENT);
    for (*logic = 0; *logic < seen_count(); ++*logic) {
        if (physical_of(call->machine, seen_device(*logic)) == physical)
            return SUCCESS;
    }
    return INVALID_DEVICE;
}

EXPORT int dcmi_get_device_phyid_from_logicid(unsigned logicid, unsigned *phyid)
{
    CALL(call_begin, INTERFACE_1);
    return answer_physical(&call, logicid, phyid);
}

EXPORT int dcmi_get_device_logicid_from_phyid(unsigned phyid, unsigned *logicid)
{
    CALL(call_begin, INTERFACE_1);
    return answer_logic(&call, phyid, logicid);
}

EXPORT int dcmiv2_get_chip_phy_id_by_dev_id(unsigned dev_id, unsigned *phyid)
{
    CALL(call_begin, INTERFACE_2);
    return answer_physical(&call, dev_id, phyid);
}

EXPORT int dcmiv2_get_dev_id_by_chip_phy_id(unsigned phyid, unsigned *dev_id)
{
    CALL(call_begin, INTERFACE_2);
    return answer_logic(&call, phyid, dev_id);
}

BOTH(get_device_die_v2, get_device_die_id, (enum dcmi_die_type input_type, struct dcmi_die_id *die_id), (input_type, die_id))
{
    REQUIRE(die_id && (input_type == NDIE || input_type == VDIE), INVALID_ARGUMENT);
    memcpy(die_id->soc_die, input_type == VDIE ? call->chip->board.vdie : call->chip->board.ndie, sizeof die_id->soc_die);
    return SUCCESS;
}

BOTH(get_device_pcie_info_v2, get_device_pcie_info, (struct dcmi_pcie_info_all *pcie_info), (pcie_info))
{
    REQUIRE(pcie_info, INVALID_ARGUMENT);
    REQUIRE(!call->machine->unified_bus, NOT_SUPPORTED);
    const struct board *board = &call->chip->board;
    *pcie_info = (struct dcmi_pcie_info_all){ .venderid = board->pci_device_id & 0xFFFF, .deviceid = board->pci_device_id >> 16,
                                              .subvenderid = board->pci_subsystem_id & 0xFFFF, .subdeviceid = board->pci_subsystem_id >> 16,
                                              .domain = (int)board->address.domain, .bdf_busid = board->address.bus,
                                              .bdf_deviceid = board->address.device, .bdf_funcid = board->address.function };
    return SUCCESS;
}

EXPORT int dcmiv2_get_device_ub_id_info(int dev_id, struct dcmi_ub_id_info *ub_id_info)
{
    CALL(call_begin_device, dev_id);
    REQUIRE(ub_id_info, INVALID_ARGUMENT);
    REQUIRE(call.machine->unified_bus, NOT_SUPPORTED);
    const struct board *board = &call.chip->board;
    *ub_id_info = (struct dcmi_ub_id_info){ .device_id = (unsigned short)(board->pci_device_id >> 16), .vendor_id = board->pci_device_id & 0xFFFF,
                                            .module_vendor_id = board->pci_subsystem_id & 0xFFFF,
                                            .module_id = (unsigned short)(board->pci_subsystem_id >> 16) };
    return SUCCESS;
}

BOTH(get_device_board_info, get_device_board_info, (struct dcmi_board_info *board_info), (board_info))
{
    REQUIRE(board_info, INVALID_ARGUMENT);
    const struct board *board = &call->chip->board;
    *board_info = (struct dcmi_board_info){ .board_id = board->board_id, .pcb_id = board->pcb_id, .bom_id = board->bom_id, .slot_id = board->slot };
    return SUCCESS;
}

BOTH(get_mainboard_id, get_mainboard_id, (unsigned *mainboard_id), (mainboard_id))
{
    REQUIRE(mainboard_id, INVALID_ARGUMENT);
    *mainboard_id = call->chip->board.mainboard_id;
    return SUCCESS;
}

EXPORT int dcmi_get_product_type(int card_id, int device_id, char *product_type_str, int buf_size)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(product_type_str && buf_size > 0 && strlen(call.chip->board.product) < (size_t)buf_size, INVALID_ARGUMENT);
    copy_text(product_type_str, (size_t)buf_size, call.chip->board.product);
    return SUCCESS;
}

static int answer_label(const struct call *call, struct dcmi_elabel_info *elabel_info)
{
    REQUIRE(elabel_info, INVALID_ARGUMENT);
    const struct board *board = &call->chip->board;
    copy_text(elabel_info->product_name, MAX_LENGTH, board->product);
    copy_text(elabel_info->model, MAX_LENGTH, board->model);
    copy_text(elabel_info->manufacturer, MAX_LENGTH, board->manufacturer);
    copy_text(elabel_info->manufacturer_date, MAX_LENGTH, board->manufactured);
    copy_text(elabel_info->serial_number, MAX_LENGTH, board->serial);
    return SUCCESS;
}

EXPORT int dcmi_get_card_elabel_v2(int card_id, struct dcmi_elabel_info *elabel_info)
{
    CALL(call_begin_card, card_id);
    return answer_label(&call, elabel_info);
}

EXPORT int dcmiv2_get_device_elabel_info(int dev_id, struct dcmi_elabel_info *elabel_info)
{
    CALL(call_begin_device, dev_id);
    return answer_label(&call, elabel_info);
}

static int answer_affinity(const struct call *call, char *affinity_cpu, int *length)
{
    REQUIRE(affinity_cpu && length, INVALID_ARGUMENT);
    const char *list = call->chip->board.cpu_affinity;
    REQUIRE(list[0], NOT_SUPPORTED);
    copy_text(affinity_cpu, strlen(list) + 1, list);
    *length = (int)strlen(list);
    return SUCCESS;
}

EXPORT int dcmi_get_affinity_cpu_info_by_device_id(int card_id, int device_id, char *affinity_cpu, int *length)
{
    CALL(call_begin_chip, card_id, device_id);
    return answer_affinity(&call, affinity_cpu, length);
}

EXPORT int dcmiv2_get_affinity_cpu_info_by_dev_id(int dev_id, char *affinity_cpu, int *len)
{
    CALL(call_begin_device, dev_id);
    return answer_affinity(&call, affinity_cpu, len);
}

EXPORT int dcmi_get_topo_info_by_device_id(int card_id1, int device_id1, int card_id2, int device_id2, int *topo_type)
{
    int other = NO_DEVICE;
    CALL(call_begin_chip, card_id1, device_id1);
    REQUIRE(topo_type, INVALID_ARGUMENT);
    REQUIRE(call.machine->topology, NOT_SUPPORTED);
    for (unsigned number = 0; number < seen_count(); number++) {
        const struct board *board = &call.machine->chips[seen_device(number)->chip].board;
        if (board->card == (unsigned)card_id2 && board->chip == (unsigned)device_id2)
            other = seen_device(number)->chip;
    }
    REQUIRE(other != NO_DEVICE, INVALID_DEVICE);
    *topo_type = topology_between(call.chip, &call.machine->chips[other]);
    return SUCCESS;
}

/* The nearest chip of the other half: the cards whose networks stand in for each other. */
EXPORT int dcmi_get_netdev_brother_device(int card_id, int device_id, int *brother_card_id)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(brother_card_id, INVALID_ARGUMENT);
    REQUIRE(call.chip->board.ip[0], NOT_SUPPORTED);
    const int brother = (int)(call.chip->board.card ^ 1u);
    bool management;
    REQUIRE(chips_of_card(&call, brother, &management), NOT_FOUND);
    *brother_card_id = brother;
    return SUCCESS;
}
