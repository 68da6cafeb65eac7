/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Slices: made, destroyed, and asked for. And the modes of the host that they depend on.
 */
#include "simulator.h"

#include <string.h>

enum { RESOURCE_OF_ONE = 0, RESOURCE_TOTAL = 1, RESOURCE_FREE = 2, RESOURCE_ACTIVITY = 5, SUPER_POD_COMMAND = 12, SUPER_POD_INFO = 1 };

EXPORT int dcmi_create_vdevice(int card_id, int device_id, struct dcmi_create_vdev_res_stru *vdev, struct dcmi_create_vdev_out *out)
{
    struct shortage shortage;
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(vdev && out && memchr(vdev->template_name, '\0', TEMPLATE_NAME_LEN), INVALID_ARGUMENT);
    REQUIRE(call.chip->board.slices, NOT_SUPPORTED);
    WRITE_CALL(&call);
    struct chip *chip = call.chip_write;
    int result = slice_permitted(call.machine, chip);
    REQUIRE(result == SUCCESS, result);
    const int template = template_by_name(&chip->board, vdev->template_name);
    REQUIRE(template != ABSENT && !chip->board.templates[template].vm_only, INVALID_ARGUMENT);
    /* A process that has the whole chip open prevents slices. */
    REQUIRE(!user_of(call.machine, call.index, NO_DEVICE) && !chip_has_processes(chip), BUSY);
    uint32_t vid = vdev->vdev_id, group = vdev->vfg_id;
    result = slice_place(chip, &chip->board.templates[template], &vid, &group, &shortage);
    REQUIRE(result == SUCCESS, result);
    /* Fragmentation is not visible in counters. */
    REQUIRE(!chip->fragmented || !chip_sliced(chip), INVALID_ARGUMENT);
    chip->fragmented = false;
    const unsigned index = vid - slice_vid(chip, 0);
    chip->slices[index] = (struct slice){ .serial = ++call.write->serial, .template = (uint32_t)template, .group = group };
    /* What cannot be kept over a boot is not made. */
    if (call.machine->recover && !slices_save(call.machine))
        return INTERNAL;
    const struct address *address = &chip->board.address;
    *out = (struct dcmi_create_vdev_out){ .vdev_id = vid, .pcie_bus = address->bus, .pcie_device = address->device, .vfg_id = group };
    if (chip->board.sriov) {        /* its virtual function, behind the physical one */
        out->pcie_device = address->device + (index + 1) / 8;
        out->pcie_func = (index + 1) % 8;
    }
    return call_commit_slices(&call);
}

static bool slice_used(const struct call *call, unsigned index)
{
    return slice_has_processes(call->chip, index) || user_of(call->machine, call->index, (int)index);
}

/* Whoever uses a slice loses it: real drivers do not look, unless the description says so. */
EXPORT int dcmi_set_destroy_vdevice(int card_id, int device_id, unsigned VDevid)
{
    CALL(call_begin_chip, card_id, device_id);
    REQUIRE(call.chip->board.slices, NOT_SUPPORTED);
    WRITE_CALL(&call);
    bool any = VDevid == ALL_SLICES;
    for (unsigned index = 0; index < SLICES_MAX; index++) {
        struct slice *slice = &call.chip_write->slices[index];
        if (!slice->serial || (VDevid != ALL_SLICES && VDevid != slice_vid(call.chip, index)))
            continue;
        REQUIRE(!call.machine->guard_destroy || !slice_used(&call, index), OCCUPIED);
        *slice = (struct slice){ 0 };
        any = true;
    }
    REQUIRE(any, NOT_FOUND);
    if (call.machine->recover && !slices_save(call.machine))
        return INTERNAL;
    return call_commit_slices(&call);
}

static float units(int32_t thousandths) { return thousandths == ABSENT ? 0.0f : (float)thousandths / THOUSAND; }

static void fill_media(struct dcmi_media_resource *media, const int32_t amounts[RESOURCES])
{
    *media = (struct dcmi_media_resource){ .jpegd = units(amounts[JPEGD]), .jpege = units(amounts[JPEGE]), .vpc = units(amounts[VPC]),
                                           .vdec = units(amounts[VDEC]), .pngd = units(amounts[PNGD]), .venc = units(amounts[VENC]) };
}

static void fill_computing(struct dcmi_computing_resource *computing, const int32_t amounts[RESOURCES], uint64_t memory)
{
    *computing = (struct dcmi_computing_resource){ .aic = units(amounts[AICORE]), .memory_size = memory,
                                                   .device_aicpu = (uint16_t)(amounts[AICPU] == ABSENT ? 0 : amounts[AICPU] / THOUSAND) };
}

static int answer_one(const struct call *call, struct dcmi_vdev_query_stru *query, bool activity)
{
    const struct chip *chip = call->chip;
    const unsigned index = query->vdev_id - slice_vid(chip, 0);
    REQUIRE(query->vdev_id >= slice_vid(chip, 0) && index < SLICES_MAX && chip->slices[index].serial, NOT_FOUND);
    const struct slice *slice = &chip->slices[index];
    const struct template *template = &chip->board.templates[slice->template];
    struct dcmi_vdev_query_info *info = &query->query_info;
    const uint32_t container = user_of(call->machine, call->index, (int)index);
    int32_t amounts[RESOURCES];
    memcpy(amounts, template->amounts, sizeof amounts);
    memset(info, 0, sizeof *info);
    copy_text(info->name, sizeof info->name, template->name);
    info->is_container_used = info->status = slice_used(call, index);
    info->vfid = index;
    info->vfg_id = slice->group;
    info->container_id = container ? container : info->status ? 0xFFFFFFFFFFFFull : 0;
    fill_computing(&info->computing, amounts, slice_memory(&chip->board, template));
    fill_media(&info->media, amounts);
    if (activity) {
        uint64_t used = 0;
        for (unsigned each = 0; each < PROCESSES_MAX; each++) {
            if (chip->processes[each].vid == query->vdev_id && lifetime_lasts(&chip->processes[each].life))
                used += chip->processes[each].memory;
        }
        info->computing.vdev_memory_total = slice_memory(&chip->board, template);
        info->computing.vdev_memory_free = info->computing.vdev_memory_total - used;
    }
    return SUCCESS;
}

static int answer_total(const struct call *call, struct dcmi_soc_total_resource *total)
{
    const struct chip *chip = call->chip;
    int32_t amounts[RESOURCES];
    memset(total, 0, sizeof *total);
    for (unsigned index = 0; index < SLICES_MAX; index++) {
        if (chip->slices[index].serial)
            total->vdev_id[total->vdev_num++] = slice_vid(chip, index);
    }
    for (unsigned resource = 0; resource < RESOURCES; resource++)
        amounts[resource] = total_of(chip, resource, chip_sliced(chip));
    total->vfg_num = chip->board.groups;
    total->vfg_bitmap = (1u << chip->board.groups) - 1;
    fill_computing(&total->computing, amounts, chip->board.memory_mib);
    fill_media(&total->media, amounts);
    return SUCCESS;
}

static int answer_free(const struct call *call, struct dcmi_soc_free_resource *left)
{
    const struct chip *chip = call->chip;
    int32_t amounts[RESOURCES];
    uint64_t memory = chip->board.memory_mib;
    memset(left, 0, sizeof *left);
    for (unsigned index = 0; index < SLICES_MAX; index++) {
        if (chip->slices[index].serial)
            memory -= slice_memory(&chip->board, &chip->board.templates[chip->slices[index].template]);
    }
    for (unsigned resource = 0; resource < RESOURCES; resource++)
        amounts[resource] = free_of(chip, resource, chip_sliced(chip));
    for (unsigned group = 0; group < chip->board.groups; group++) {
        if (!group_places_used(chip, group)) {
            left->vfg_num++;
            left->vfg_bitmap |= 1u << group;
        }
    }
    fill_computing(&left->computing, amounts, memory);
    fill_media(&left->media, amounts);
    return SUCCESS;
}

static int answer_super_pod(const struct call *call, struct dcmi_spod_info *info)
{
    const struct board *board = &call->chip->board;
    REQUIRE(board->super_pod, NOT_SUPPORTED);
    *info = (struct dcmi_spod_info){ .sdid = board->sdid, .scale_type = board->scale, .super_pod_id = board->super_pod_id,
                                     .server_id = board->server_id, .chassis_id = board->chassis_id,
                                     .super_pod_type = board->super_pod_type };
    return SUCCESS;
}

BOTH(get_device_info, get_device_info, (enum dcmi_main_cmd main_cmd, unsigned sub_cmd, void *buf, unsigned *size),
     (main_cmd, sub_cmd, buf, size))
{
    REQUIRE(buf && size, INVALID_ARGUMENT);
    if (main_cmd == DCMI_MAIN_CMD_DEVICE_SHARE) {
        REQUIRE(room(size, sizeof(unsigned)), INVALID_ARGUMENT);
        *(unsigned *)buf = call->chip->share;
        return SUCCESS;
    }
    if ((int)main_cmd == SUPER_POD_COMMAND && sub_cmd == SUPER_POD_INFO) {
        REQUIRE(room(size, sizeof(struct dcmi_spod_info)), INVALID_ARGUMENT);
        return answer_super_pod(call, buf);
    }
    if (main_cmd != DCMI_MAIN_CMD_VDEV_MNG)
        return link_information(call, (int)main_cmd, sub_cmd, buf, size);
    REQUIRE(call->chip->board.slices, NOT_SUPPORTED);
    switch (sub_cmd) {
    case RESOURCE_OF_ONE:
    case RESOURCE_ACTIVITY:
        REQUIRE(room(size, sizeof(struct dcmi_vdev_query_stru)), INVALID_ARGUMENT);
        return answer_one(call, buf, sub_cmd == RESOURCE_ACTIVITY);
    case RESOURCE_TOTAL:
        REQUIRE(room(size, sizeof(struct dcmi_soc_total_resource)), INVALID_ARGUMENT);
        return answer_total(call, buf);
    case RESOURCE_FREE:
        REQUIRE(room(size, sizeof(struct dcmi_soc_free_resource)), INVALID_ARGUMENT);
        return answer_free(call, buf);
    default:
        return NOT_SUPPORTED;
    }
}

static bool any_slice(const struct machine *machine)
{
    for (unsigned index = 0; index < machine->chip_count; index++) {
        if (chip_sliced(&machine->chips[index]))
            return true;
    }
    return false;
}

EXPORT int dcmi_get_vdevice_mode(int *mode)
{
    CALL(call_begin, INTERFACE_1);
    REQUIRE(mode, INVALID_ARGUMENT);
    *mode = (int)call.machine->vnpu_mode;
    return SUCCESS;
}

EXPORT int dcmi_set_vdevice_mode(int mode)
{
    CALL(call_begin, INTERFACE_1);
    REQUIRE(mode == MODE_DOCKER || mode == MODE_VM, INVALID_ARGUMENT);
    WRITE_CALL(&call);
    REQUIRE(!any_slice(call.machine), OCCUPIED);
    /* Not supported with two dies in a module, and only with the work mode AMP. */
    for (unsigned index = 0; mode == MODE_VM && index < call.machine->chip_count; index++)
        REQUIRE(!call.machine->chips[index].board.sio && call.machine->work_mode == WORK_AMP, NOT_SUPPORTED);
    call.write->vnpu_mode = (unsigned)mode;
    return call_commit(&call);
}

EXPORT int dcmi_get_vnpu_config_recover_mode(unsigned *mode)
{
    CALL(call_begin, INTERFACE_1);
    REQUIRE(mode, INVALID_ARGUMENT);
    *mode = call.machine->recover;
    return SUCCESS;
}

EXPORT int dcmi_set_vnpu_config_recover_mode(unsigned mode)
{
    CALL(call_begin, INTERFACE_1);
    REQUIRE(mode <= 1, INVALID_ARGUMENT);
    WRITE_CALL(&call);
    call.write->recover = mode == 1;
    REQUIRE(slices_save(call.machine), INTERNAL);
    return call_commit(&call);
}

EXPORT int dcmi_get_npu_work_mode(int card_id, unsigned char *work_mode)
{
    CALL(call_begin_card, card_id);
    REQUIRE(work_mode, INVALID_ARGUMENT);
    REQUIRE(call.chip->board.needs_amp, NOT_SUPPORTED);
    *work_mode = (unsigned char)call.machine->work_mode;
    return SUCCESS;
}

static bool has_modules(const struct machine *machine)
{
    return machine->chip_count && machine->chips[0].board.sio;
}

EXPORT int dcmi_get_multi_die_policy(unsigned *policy)
{
    CALL(call_begin, INTERFACE_1);
    REQUIRE(policy, INVALID_ARGUMENT);
    REQUIRE(has_modules(call.machine), NOT_SUPPORTED);
    *policy = call.machine->multi_die_policy;
    return SUCCESS;
}

EXPORT int dcmi_set_multi_die_policy(unsigned policy)
{
    CALL(call_begin, INTERFACE_1);
    REQUIRE(policy < DCMI_MULTI_DIE_POLICY_MAX, INVALID_ARGUMENT);
    REQUIRE(has_modules(call.machine), NOT_SUPPORTED);
    WRITE_CALL(&call);
    REQUIRE(!any_slice(call.machine), OCCUPIED);
    call.write->multi_die_policy = policy;
    return call_commit(&call);
}
