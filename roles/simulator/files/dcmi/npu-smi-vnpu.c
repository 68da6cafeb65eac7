/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Slices: templates, what a chip has left, creating and destroying, and the modes of the host.
 */
#include "npu-smi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TEMPLATE_INSIDE = 90, SLICES_INSIDE = 79, THOUSANDTHS = 1000, RESOURCES = 8, TOTAL = 1, LEFT = 2, QUERY = 0, SLICING = 52 };

static const char *const resources[RESOURCES] = { "aicore", "aicpu", "vpc", "venc", "vdec", "jpegd", "jpege", "pngd" };
enum { AICORE, AICPU, VPC, VENC, VDEC, JPEGD, JPEGE, PNGD };

struct row { char name[TEMPLATE_NAME_LEN]; long long amounts[RESOURCES], memory; };

static bool read_row(const struct place *place, unsigned index, struct row *row)
{
    if (control("template %u %u", place->physical, index) != OK)
        return false;
    reply_text("name", row->name, sizeof row->name);
    row->memory = reply_number("memory");
    for (unsigned each = 0; each < RESOURCES; each++)
        row->amounts[each] = reply_number(resources[each]);
    return true;
}

/* Thousandths as a whole number, or with what decimals it needs. */
static const char *amount(long long thousandths, char text[32])
{
    if (thousandths < 0)
        snprintf(text, 32, "NA");
    else if (thousandths % THOUSANDTHS)
        snprintf(text, 32, "%g", (double)thousandths / THOUSANDTHS);
    else
        snprintf(text, 32, "%lld", thousandths / THOUSANDTHS);
    return text;
}

static void line(char fill, char edge, unsigned inside)
{
    putchar(edge);
    for (unsigned each = 0; each < inside; each++)
        putchar(fill);
    printf("%c\n", edge);
}

static void title(const char *text, unsigned inside) { printf("|%-*s|\n", (int)inside, text); }

/* A newer generation closes its double rules with bars, an older one with a plus. */
static char double_edge(void)
{
    control("show");
    return reply_number("plus_rules") == 1 ? '+' : '|';
}

static void template_cells(const char *name, const char *one, const char *two, const char *three, const char *four, const char *five,
                           const char *six)
{
    printf("|%-19s%-9s%-9s%-9s%-14s%-14s%-10s%6s|\n", name, one, two, three, four, five, six, "");
}

int show_templates(const struct options *options)
{
    struct place places[CARDS_MAX], place;
    struct row row;
    const unsigned count = find_places(places);
    if (options->chip_given)
        fail(WRONG_PARAMETER, "Parameter -c is not for template-info.");
    if (!count)
        fail(MISSING, "There is no NPU on this machine.");
    place = places[0];
    if (options->card_given)
        place = chosen_place(options);
    const struct dcmi_chip_info_v2 first = chip_info(&places[0]);
    for (unsigned each = 1; !options->card_given && each < count; each++) {
        const struct dcmi_chip_info_v2 other = chip_info(&places[each]);
        if (memcmp(&first, &other, sizeof first) != 0) {
            printf("Cards differ; this is of NPU %d. Name another with -i.\n", place.card);
            break;
        }
    }
    if (!read_row(&place, 0, &row)) {
        puts("This device does not support querying template-info.");
        return OK;
    }
    const char edge = double_edge();
    line('-', '+', TEMPLATE_INSIDE);
    title("NPU instance template info is:", TEMPLATE_INSIDE);
    line('-', '|', TEMPLATE_INSIDE);
    template_cells("Name", "AICORE", "Memory", "AICPU", "VPC", "VENC", "JPEGD");
    template_cells("", "", "GB", "", "PNGD", "VDEC", "JPEGE");
    line('=', edge, TEMPLATE_INSIDE);
    for (unsigned index = 0; read_row(&place, index, &row); index++) {
        char text[RESOURCES][32], memory[32];
        for (unsigned each = 0; each < RESOURCES; each++)
            amount(row.amounts[each], text[each]);
        snprintf(memory, sizeof memory, "%lld", row.memory);
        template_cells(row.name, text[AICORE], memory, text[AICPU], text[VPC], text[VENC], text[JPEGD]);
        template_cells("", "", "", "", text[PNGD], text[VDEC], text[JPEGE]);
        line('-', '+', TEMPLATE_INSIDE);
    }
    return OK;
}

static int ask(const struct place *place, unsigned what, void *buffer, unsigned size)
{
    return DCMI("dcmi_get_device_info", (int, int, int, unsigned, void *, unsigned *), place->card, place->chip, SLICING, what, buffer, &size);
}

static const char *of_two(float left, float total, char text[32])
{
    snprintf(text, 32, "%g/%g", (double)left, (double)total);
    return text;
}

static void slice_cells(const char *const words[5])
{
    printf("|%-12s|%-12s|%-20s|%-10s|%-21s|\n", words[0], words[1], words[2], words[3], words[4]);
}

/* HBM's gigabytes are rounded up to a whole stack. */
static unsigned whole_gigabytes(unsigned long long mib, bool hbm)
{
    const unsigned gigabytes = (unsigned)((mib + 1023) / 1024);
    return !hbm ? gigabytes : gigabytes <= 32 ? 32 : 64;
}

static void show_resources(const struct place *place, const struct dcmi_soc_total_resource *total, const struct dcmi_soc_free_resource *left)
{
    struct dcmi_hbm_info hbm;
    unsigned char work_mode;
    char cells[8][32], memory[32];
    const bool has_hbm = DCMI("dcmi_get_device_hbm_info", (int, int, struct dcmi_hbm_info *), place->card, place->chip, &hbm) == OK;
    const bool first_910 = DCMI("dcmi_get_npu_work_mode", (int, unsigned char *), place->card, &work_mode) == OK;
    const float all = (float)whole_gigabytes(total->computing.memory_size, has_hbm);
    /* The free memory in the same unit, rounded to a whole number. */
    const unsigned free_memory = (unsigned)((double)left->computing.memory_size * all / (double)total->computing.memory_size + 0.5);
    snprintf(memory, sizeof memory, "%u/%u", free_memory, (unsigned)all);
    of_two(left->computing.aic, total->computing.aic, cells[AICORE]);
    of_two(left->computing.device_aicpu, total->computing.device_aicpu, cells[AICPU]);
    of_two(left->media.vpc, total->media.vpc, cells[VPC]);
    of_two(left->media.venc, total->media.venc, cells[VENC]);
    of_two(left->media.vdec, total->media.vdec, cells[VDEC]);
    of_two(left->media.jpegd, total->media.jpegd, cells[JPEGD]);
    of_two(left->media.jpege, total->media.jpege, cells[JPEGE]);
    if (first_910)
        snprintf(cells[AICPU], sizeof cells[AICPU], "NA/NA");
    printf("|%-9s%-12s%-8s%-9s%-8s%-9s%-9s%-8s%-7s|\n", "AICORE", "Memory(GB)", "AICPU", "VPC", "VENC", "VDEC", "JPEGD", "JPEGE", "PNGD");
    line('=', double_edge(), SLICES_INSIDE);
    printf("|%-9s%-12s%-8s%-9s%-8s%-9s%-9s%-8s%-7s|\n", cells[AICORE], memory, cells[AICPU], cells[VPC], cells[VENC], cells[VDEC], cells[JPEGD],
           cells[JPEGE], "NA/NA");
}

int show_slices(const struct options *options)
{
    struct dcmi_soc_total_resource total;
    struct dcmi_soc_free_resource left;
    const struct place place = chosen_place(options);
    if (!options->chip_given)
        fail(WRONG_PARAMETER, "Parameter -c is required.");
    int code = ask(&place, TOTAL, &total, sizeof total);
    if (code == OK)
        code = ask(&place, LEFT, &left, sizeof left);
    if (code == UNSUPPORTED) {
        puts("This device does not support querying info-vnpu.");
        return OK;
    }
    if (code != OK)
        fail(code, "Failed to query info-vnpu. ret is %d", code);
    line('-', '+', SLICES_INSIDE);
    title("NPU resource static info as follow:", SLICES_INSIDE);
    title("Format: Free/Total", SLICES_INSIDE);
    show_resources(&place, &total, &left);
    line('-', '+', SLICES_INSIDE);
    char number[40];
    snprintf(number, sizeof number, "Total number of vnpu: %u", total.vdev_num);
    title(number, SLICES_INSIDE);
    line('-', '+', SLICES_INSIDE);
    slice_cells((const char *const[]){ "Vnpu ID", "Vgroup ID", "Container ID", "Status", "Template Name" });
    for (unsigned each = 0; each < total.vdev_num; each++) {
        struct dcmi_vdev_query_stru query = { .vdev_id = total.vdev_id[each] };
        char vid[16], group[16] = "NA", container[24], status[16];
        if (ask(&place, QUERY, &query, sizeof query) != OK)
            continue;
        snprintf(vid, sizeof vid, "%u", query.vdev_id);
        if (query.query_info.vfg_id != CHOOSE)
            snprintf(group, sizeof group, "%u", query.query_info.vfg_id);
        snprintf(container, sizeof container, "%012llx", query.query_info.container_id & 0xFFFFFFFFFFFFull);
        snprintf(status, sizeof status, "%u", query.query_info.status);
        line('-', '+', SLICES_INSIDE);
        slice_cells((const char *const[]){ vid, group, container, status, query.query_info.name });
    }
    line('-', '+', SLICES_INSIDE);
    return OK;
}

int show_mode(const struct options *options, bool *known)
{
    int mode = 0;
    unsigned value = 0;
    unsigned char work_mode = 0;
    *known = true;
    if (strcmp(options->type, "vnpu-mode") == 0) {
        DCMI("dcmi_get_vdevice_mode", (int *), &mode);
        pair("vnpu-mode", "%s", mode ? "VM" : "docker");
    } else if (strcmp(options->type, "vnpu-cfg-recover") == 0) {
        DCMI("dcmi_get_vnpu_config_recover_mode", (unsigned *), &value);
        pair("vnpu config recover mode", "%s", value ? "Enable" : "Disable");
    } else if (strcmp(options->type, "work-mode") == 0) {
        const struct place place = chosen_place(options);
        if (DCMI("dcmi_get_npu_work_mode", (int, unsigned char *), place.card, &work_mode) != OK)
            puts("This device does not support querying work-mode.");
        else
            pair("Work Mode", "%s", work_mode ? "SMP" : "AMP");
    } else if (strcmp(options->type, "multi-die-policy") == 0) {
        if (!has_symbol("dcmi_get_multi_die_policy") || DCMI("dcmi_get_multi_die_policy", (unsigned *), &value) != OK)
            puts("This device does not support querying multi-die-policy.");
        else
            pair("Multi Die Policy", "%u", value);
    } else if (strcmp(options->type, "device-share-cfg-recover") == 0) {
        control("show");
        pair("device-share config recover mode", "%s", reply_number("share_recover") == 1 ? "Enable" : "Disable");
    } else if (strcmp(options->type, "device-share") == 0) {
        const struct place place = chosen_place(options);
        unsigned size = sizeof value;
        if (second_interface())
            DCMI("dcmiv2_get_device_info", (int, int, unsigned, void *, unsigned *), place.logic, DCMI_MAIN_CMD_DEVICE_SHARE, 0, &value, &size);
        else
            DCMI("dcmi_get_device_info", (int, int, int, unsigned, void *, unsigned *), place.card, place.chip, DCMI_MAIN_CMD_DEVICE_SHARE,
                 0, &value, &size);
        pair("Device-share Status", "%s", value ? "True" : "False");
    } else {
        *known = false;
    }
    return OK;
}

static int result(int code, const char *done, const char *wrong)
{
    pair("Status", "%s", code == OK ? "OK" : "Fail");
    pair("Message", "%s", code == OK ? done : wrong);
    return code;
}

static bool refused_in_container(void)
{
    control("show");
    if (reply_number("in_container") != 1)
        return false;
    puts("This command is not supported in a container.");
    return true;
}

static void too_few(const char *what, float left)
{
    fail(UNSUPPORTED, "Insufficient number of %s available, unallocated %s number: %g.", what, what, (double)left);
}

/* The program compares the template with the free resources before it calls the library. The library checks groups and ids. */
static void check_free(const struct place *place, const char *name)
{
    struct dcmi_soc_free_resource left;
    struct row row;
    const int code = ask(place, LEFT, &left, sizeof left);
    if (code != OK)
        fail(code, "Failed to query the free resources.");
    const float media[RESOURCES] = { [VPC] = left.media.vpc, [VENC] = left.media.venc, [VDEC] = left.media.vdec,
                                     [JPEGD] = left.media.jpegd, [JPEGE] = left.media.jpege };
    for (unsigned index = 0; read_row(place, index, &row); index++) {
        if (strcmp(row.name, name) != 0)
            continue;
        if (row.amounts[AICORE] > (long long)(left.computing.aic * THOUSANDTHS + 0.5f))
            too_few("cores", left.computing.aic);
        if (row.amounts[AICPU] > (long long)left.computing.device_aicpu * THOUSANDTHS)
            too_few("AICPU", left.computing.device_aicpu);
        for (unsigned each = VPC; each <= JPEGE; each++) {
            if (row.amounts[each] > (long long)(media[each] * THOUSANDTHS + 0.5f))
                fail(UNSUPPORTED, "Insufficient number of DVPP available, unallocated DVPP number: VPC %g, VENC %g, VDEC %g, JPEGD %g, JPEGE %g.",
                     (double)media[VPC], (double)media[VENC], (double)media[VDEC], (double)media[JPEGD], (double)media[JPEGE]);
        }
        return;
    }
    exit(exit_code(WRONG_PARAMETER));   /* an unknown template: it says nothing */
}

static int create(const struct options *options)
{
    struct dcmi_create_vdev_res_stru wanted = { .vdev_id = options->vid, .vfg_id = options->group };
    struct dcmi_create_vdev_out made;
    int mode = 0;
    unsigned char work_mode = 0;
    const struct place place = chosen_place(options);
    if (!options->chip_given)
        fail(WRONG_PARAMETER, "Parameter -c is required.");
    if (refused_in_container())
        return OK;
    if (!options->template || strlen(options->template) >= sizeof wanted.template_name)
        fail(WRONG_PARAMETER, "Parameter -f is required: the name of a template.");
    const struct dcmi_chip_info_v2 info = chip_info(&place);
    if (options->group_given && strncmp((const char *)info.chip_name, "310P", 4) != 0)
        fail(WRONG_PARAMETER, "Parameter -g is not for this device.");
    DCMI("dcmi_get_vdevice_mode", (int *), &mode);
    if (mode) {
        puts("This command is not for the VM mode.");
        return OK;
    }
    if (DCMI("dcmi_get_npu_work_mode", (int, unsigned char *), place.card, &work_mode) == OK && work_mode)
        fail(UNSUPPORTED, "NPU works in SMP mode, which does not support vnpu creation.");
    check_free(&place, options->template);
    strcpy(wanted.template_name, options->template);
    int code = DCMI("dcmi_create_vdevice", (int, int, struct dcmi_create_vdev_res_stru *, struct dcmi_create_vdev_out *), place.card, place.chip,
                    &wanted, &made);
    if (code != OK)
        fail(code, "Failed to create vnpu.");
    return result(OK, "Create vnpu success", NULL);
}

static bool exists(const struct place *place, unsigned vid)
{
    struct dcmi_soc_total_resource total;
    bool found = false;
    const int code = ask(place, TOTAL, &total, sizeof total);
    for (unsigned each = 0; code == OK && each < total.vdev_num; each++)
        found |= total.vdev_id[each] == vid;
    return found;
}

static int destroy(const struct options *options)
{
    char done[64];
    const struct place place = chosen_place(options);
    if (!options->chip_given || !options->vid_given)
        fail(WRONG_PARAMETER, "Parameters -c and -v are required.");
    if (refused_in_container())
        return OK;
    if (!exists(&place, options->vid))
        fail(WRONG_PARAMETER, "Parameter -v names no vnpu of this chip.");
    int code = DCMI("dcmi_set_destroy_vdevice", (int, int, unsigned), place.card, place.chip, options->vid);
    if (code != OK)
        fail(code, "Failed to destroy vnpu %u.", options->vid);
    snprintf(done, sizeof done, "Destroy vnpu %u success", options->vid);
    return result(code, done, NULL);
}

static bool confirmed(const char *question)
{
    char line_read[16] = "";
    printf("%s [Y/N]", question);
    fflush(stdout);
    return fgets(line_read, sizeof line_read, stdin) && (line_read[0] == 'Y' || line_read[0] == 'y');
}

static int set_share(const struct options *options, unsigned value)
{
    const struct place place = chosen_place(options);
    if (!confirmed("The containers that share the device see each other's memory. Go on?"))
        return OK;
    return result(control("device-share %u %u", place.physical, value), "The device-share status of the chip is set successfully", "Failed");
}

/* Slices of virtual machines: nothing here makes any, so none is there. */
static int reset_slice(const struct options *options)
{
    int mode = 0;
    const struct place place = chosen_place(options);
    if (!options->chip_given || !options->vid_given)
        fail(WRONG_PARAMETER, "Parameters -c and -v are required.");
    const struct dcmi_chip_info_v2 info = chip_info(&place);
    DCMI("dcmi_get_vdevice_mode", (int *), &mode);
    const bool supported = strncmp((const char *)info.chip_name, "910B", 4) == 0;
    if (!supported || !mode) {
        puts(supported ? "This command is for the VM mode alone." : "This device does not support this setting.");
        return OK;
    }
    return result(MISSING, NULL, "The vnpu does not exist");
}

static int reset(const struct options *options)
{
    const struct place place = chosen_place(options);
    if (!confirmed("The chip is reset. Go on?"))
        return OK;
    int code = second_interface() ? DCMI("dcmiv2_reset_device", (int, int), place.logic, INBAND_CHANNEL)
                                  : DCMI("dcmi_set_device_reset", (int, int, int), place.card, place.chip, INBAND_CHANNEL);
    return result(code, "Request to reset the chip is sent", code == OCCUPIED ? "The resource is occupied" : "Failed");
}

bool about_sharing(const char *type) { return strcmp(type, "device-share") == 0 || strcmp(type, "device-share-cfg-recover") == 0; }

int set_something(const struct options *options)
{
    const char *type = options->type ? options->type : "";
    if (strcmp(type, "reset") == 0)
        return reset(options);
    if (second_interface() && !about_sharing(type))
        fail(WRONG_PARAMETER, "The type \"%s\" is not known.", type);
    if (strcmp(type, "create-vnpu") == 0)
        return create(options);
    if (strcmp(type, "destroy-vnpu") == 0)
        return destroy(options);
    if (strcmp(type, "reset-vnpu") == 0)
        return reset_slice(options);
    const bool mode = strcmp(type, "vnpu-mode") == 0, recover = strcmp(type, "vnpu-cfg-recover") == 0,
               policy = strcmp(type, "multi-die-policy") == 0, share = strcmp(type, "device-share") == 0, share_recover = strcmp(type, "device-share-cfg-recover") == 0;
    if (!mode && !recover && !policy && !share && !share_recover)
        fail(WRONG_PARAMETER, "The type \"%s\" is not known.", type);
    if (!options->value || (strcmp(options->value, "0") != 0 && strcmp(options->value, "1") != 0))
        fail(WRONG_PARAMETER, "Parameter -d is required: 0 or 1.");
    const unsigned value = (unsigned)(options->value[0] - '0');
    if (share)
        return set_share(options, value);
    if (share_recover)
        return result(control("device-share-recover %u", value), "Set device-share config recover mode success", "Failed");
    int code = mode ? DCMI("dcmi_set_vdevice_mode", (int), (int)value)
               : recover ? DCMI("dcmi_set_vnpu_config_recover_mode", (unsigned), value)
               : !has_symbol("dcmi_set_multi_die_policy") ? UNSUPPORTED
                                                          : DCMI("dcmi_set_multi_die_policy", (unsigned), value);
    if (code == UNSUPPORTED || code == REFUSED_IN_CONTAINER) {
        puts(code == UNSUPPORTED ? "This device does not support this setting." : "This command is not supported in a container.");
        return OK;
    }
    return result(code, mode ? "Set vnpu mode success" : recover ? "Set vnpu config recover mode success" : "Set multi die policy success",
                  code == OCCUPIED ? "The resource is occupied" : "Failed");
}
