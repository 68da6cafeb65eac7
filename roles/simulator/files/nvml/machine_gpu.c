/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The statements of a "gpu" section but those about MIG.
 */
#include "machine.h"

#include <stdio.h>
#include <string.h>

#define U32(name_, target_) { name_, FIELD_U32, &(target_), UINT32_MAX, false }
#define I32(name_, target_) { name_, FIELD_I32, &(target_), INT32_MAX, false }
#define READ(...) read_fields(parser, value, (const struct field[]){ __VA_ARGS__ }, \
                              COUNT_OF(((const struct field[]){ __VA_ARGS__ })))

static bool parse_identity(struct parser *parser, char *value, bool *known)
{
    struct board *board = &section_gpu(parser)->board;
    const char *key = parser->key;
    *known = true;
    if (strcmp(key, "uuid") == 0) {
        unsigned char bytes[16];
        if (strncmp(value, "GPU-", 4) != 0 || strlen(value) != 40 || !parse_uuid_bytes(value + 4, bytes))
            return fail(parser, value, "GPU- and a UUID");
        return read_text(parser, value, board->uuid, sizeof board->uuid);
    }
    if (strcmp(key, "minor") == 0)
        return read_number(parser, value, FIELD_U32, &board->minor, GPUS_MAX - 1);
    if (strcmp(key, "name") == 0)
        return read_text(parser, value, board->name, sizeof board->name);
    if (strcmp(key, "serial") == 0)
        return read_text(parser, value, board->serial, sizeof board->serial);
    if (strcmp(key, "board-part-number") == 0)
        return read_text(parser, value, board->part_number, sizeof board->part_number);
    if (strcmp(key, "board-id") == 0)
        return read_number(parser, value, FIELD_U32, &board->board_id, UINT32_MAX);
    if (strcmp(key, "vbios-version") == 0)
        return read_text(parser, value, board->vbios_version, sizeof board->vbios_version);
    if (strcmp(key, "inforom-image-version") == 0)
        return read_text(parser, value, board->inforom_version, sizeof board->inforom_version);
    if (strcmp(key, "brand") == 0)
        return read_number(parser, value, FIELD_U32, &board->brand, 19);
    if (strcmp(key, "architecture") == 0)
        return read_number(parser, value, FIELD_U32, &board->architecture, 32);
    if (strcmp(key, "module-id") == 0)
        return read_number(parser, value, FIELD_I32, &board->module_id, 255);
    if (strcmp(key, "compute-capability") == 0) {
        int length = 0;
        if (sscanf(value, "%2u.%2u%n", &board->capability_major, &board->capability_minor, &length) != 2 || value[length])
            return fail(parser, value, "a compute capability such as 9.0");
        return true;
    }
    *known = false;
    return true;
}

static bool parse_place(struct parser *parser, char *value, bool *known)
{
    struct board *board = &section_gpu(parser)->board;
    const char *key = parser->key;
    *known = true;
    if (strcmp(key, "pci-address") == 0)
        return parse_address(value, &board->address) || fail(parser, value, "a PCI address such as 0000:1b:00.0");
    if (strcmp(key, "pci-device-id") == 0)
        return read_number(parser, value, FIELD_U32, &board->pci_device_id, UINT32_MAX);
    if (strcmp(key, "pci-subsystem-id") == 0)
        return read_number(parser, value, FIELD_U32, &board->pci_subsystem_id, UINT32_MAX);
    if (strcmp(key, "pci-class") == 0)
        return read_number(parser, value, FIELD_U32, &board->pci_class, 0xFFFFFF);
    if (strcmp(key, "pci-path") == 0)
        return read_text(parser, value, board->pci_path, sizeof board->pci_path);
    if (strcmp(key, "pcie") == 0)
        return READ(U32("generation", board->pcie_generation), U32("width", board->pcie_width));
    if (strcmp(key, "numa-node") == 0)
        return read_number(parser, value, FIELD_I32, &board->numa_node, 1023);
    if (strcmp(key, "coherent-numa-node") == 0)
        return read_number(parser, value, FIELD_I32, &board->coherent_numa_node, 1023);
    if (strcmp(key, "cpu-affinity") == 0)
        return read_text(parser, value, board->cpu_affinity, sizeof board->cpu_affinity);
    *known = false;
    return true;
}

static bool parse_link(struct parser *parser, char *value)
{
    static const char *const remotes[] = { "gpu", "cpu", "switch", NULL }, *const states[] = { "inactive", "active", NULL };
    char *rest = value, *number = strsep(&rest, " \t");
    uint64_t index;
    if (!parse_unsigned(number, LINKS_MAX - 1, &index) || section_gpu(parser)->board.links[index].present)
        return fail(parser, number, "the number of a link, each once, 0 to 35");
    struct nvlink *link = &section_gpu(parser)->board.links[index];
    *link = (struct nvlink){ .present = true, .active = true, .version = 4, .remote = REMOTE_SWITCH };
    for (char *word = strsep(&rest, " \t"); word; word = strsep(&rest, " \t")) {
        char *text;
        uint32_t choice = 0;
        bool good = !*word;
        if ((text = pair_value(word, "version")))
            good = read_number(parser, text, FIELD_U32, &link->version, 16);
        else if ((text = pair_value(word, "speed")))
            good = read_number(parser, text, FIELD_U32, &link->speed, 1000000);
        else if ((text = pair_value(word, "state"))) {
            good = read_choice(parser, text, states, &choice);
            link->active = choice == 1;
        } else if ((text = pair_value(word, "remote"))) {
            good = read_choice(parser, text, remotes, &choice);
            link->remote = (int32_t)choice;
        } else if ((text = pair_value(word, "address")))
            good = parse_address(text, &link->address) || fail(parser, text, "a PCI address");
        else if (*word)
            good = fail(parser, word, "pairs out of: version state remote address speed");
        if (!good)
            return false;
    }
    return true;
}

static bool parse_fabric(struct parser *parser, char *value)
{
    struct board *board = &section_gpu(parser)->board;
    char *cluster = strstr(value, "cluster=");
    if (cluster) {
        size_t length = strcspn(cluster, " \t");
        char text[64] = "";
        if (length >= sizeof text)
            return fail(parser, cluster, "cluster=UUID");
        memcpy(text, cluster, length);
        if (!parse_uuid_bytes(text + strlen("cluster="), board->fabric_cluster))
            return fail(parser, text, "cluster=UUID");
        memset(cluster, ' ', length);
    }
    return READ(U32("state", board->fabric_state), I32("status", board->fabric_status), U32("clique", board->fabric_clique),
                U32("health-mask", board->fabric_health_mask), U32("health-summary", board->fabric_health_summary));
}

static bool parse_platform(struct parser *parser, char *value)
{
    struct board *board = &section_gpu(parser)->board;
    char *rest = value;
    board->platform = true;
    for (char *word = strsep(&rest, " \t"); word; word = strsep(&rest, " \t")) {
        char *text;
        bool good = !*word;
        if ((text = pair_value(word, "chassis")))
            good = (strlen(text) <= 16 && memcpy(board->platform_chassis, text, strlen(text))) || fail(parser, text, "at most 16 bytes");
        else if ((text = pair_value(word, "ib-guid")))
            good = parse_uuid_bytes(text, board->platform_ib_guid) || fail(parser, text, "32 hexadecimal digits");
        else if ((text = pair_value(word, "slot")))
            good = read_number(parser, text, FIELD_U32, &board->platform_slot, 255);
        else if ((text = pair_value(word, "tray")))
            good = read_number(parser, text, FIELD_U32, &board->platform_tray, 255);
        else if ((text = pair_value(word, "host")))
            good = read_number(parser, text, FIELD_U32, &board->platform_host, 255);
        else if ((text = pair_value(word, "peer-type")))
            good = read_number(parser, text, FIELD_U32, &board->platform_peer, 255);
        else if ((text = pair_value(word, "module")))
            good = read_number(parser, text, FIELD_U32, &board->platform_module, 255);
        else if (*word)
            good = fail(parser, word, "pairs out of: chassis ib-guid slot tray host peer-type module");
        if (!good)
            return false;
    }
    return true;
}

static bool parse_memory_clock(struct parser *parser, char *value)
{
    struct board *board = &section_gpu(parser)->board;
    if (board->memory_clock_count == MEMORY_CLOCKS_MAX)
        return fail(parser, value, "at most 8 memory clocks");
    struct memory_clock *clock = &board->memory_clocks[board->memory_clock_count++];
    char *rest = value, *memory = strsep(&rest, " \t");
    clock->step = 15;
    if (!read_number(parser, memory, FIELD_U32, &clock->memory, 100000))
        return false;
    value = rest ? rest : memory + strlen(memory);
    if (!READ({ "minimum", FIELD_U32, &clock->minimum, 100000, true }, { "maximum", FIELD_U32, &clock->maximum, 100000, true },
              { "step", FIELD_U32, &clock->step, 100000, false }))
        return false;
    return (clock->step && clock->minimum <= clock->maximum) || fail(parser, memory, "minimum not above maximum and a step of 1 or more");
}

static bool parse_workload_profile(struct parser *parser, char *value)
{
    struct board *board = &section_gpu(parser)->board;
    char *rest = value, *number = strsep(&rest, " \t");
    uint64_t id;
    if (!parse_unsigned(number, WORKLOAD_PROFILES_MAX - 1, &id) || board->workload_profiles >> id & 1)
        return fail(parser, number, "the number of a workload power profile, each once, 0 to 31");
    board->workload_profiles |= 1u << id;
    value = rest ? rest : number + strlen(number);
    return READ({ "priority", FIELD_U32, &board->workload_priority[id], 255, true },
                { "conflicts", FIELD_U32, &board->workload_conflicts[id], UINT32_MAX, false });
}

static bool parse_nature(struct parser *parser, char *value, bool *known)
{
    static const char *const eccs[] = { "no", "yes", "unsupported", NULL }, *const modes[] = { "none", "hmm", "ats", NULL };
    struct board *board = &section_gpu(parser)->board;
    const char *key = parser->key;
    *known = true;
    if (strcmp(key, "memory") == 0)
        return READ({ "total", FIELD_U64, &board->memory_total, 1 << 30, true },
                    { "reserved", FIELD_U64, &board->memory_reserved, 1 << 30, false },
                    { "used", FIELD_U64, &board->memory_used, 1 << 30, false });
    if (strcmp(key, "memory-bus-width") == 0)
        return read_number(parser, value, FIELD_I32, &board->memory_bus_width, 65536);
    if (strcmp(key, "bar1-memory") == 0)
        return read_number(parser, value, FIELD_U64, &board->bar1, 1 << 30);
    if (strcmp(key, "cores") == 0)
        return read_number(parser, value, FIELD_I32, &board->cores, 1000000);
    if (strcmp(key, "power") == 0)
        return READ({ "default", FIELD_I64, &board->power_default, 100000000, true },
                    { "minimum", FIELD_I64, &board->power_minimum, 100000000, true },
                    { "maximum", FIELD_I64, &board->power_maximum, 100000000, true },
                    { "usage", FIELD_I64, &board->power_usage, 100000000, false });
    if (strcmp(key, "temperature") == 0)
        return READ(I32("gpu", board->temperature), I32("shutdown", board->shutdown), I32("slowdown", board->slowdown),
                    I32("memory-maximum", board->memory_maximum), I32("gpu-maximum", board->gpu_maximum));
    if (strcmp(key, "fan") == 0)
        return READ(I32("count", board->fans), I32("speed", board->fan_speed));
    if (strcmp(key, "clocks") == 0)
        return READ(U32("graphics", board->clocks[0]), U32("sm", board->clocks[1]), U32("memory", board->clocks[2]),
                    U32("video", board->clocks[3]));
    if (strcmp(key, "maximum-clocks") == 0)
        return READ(U32("graphics", board->maximum_clocks[0]), U32("sm", board->maximum_clocks[1]),
                    U32("memory", board->maximum_clocks[2]), U32("video", board->maximum_clocks[3]));
    if (strcmp(key, "ecc") == 0) {
        uint32_t choice = 0;
        bool good = read_choice(parser, value, eccs, &choice);
        board->ecc = choice == 2 ? ABSENT : (int32_t)choice;
        return good;
    }
    if (strcmp(key, "row-remapping") == 0)
        return read_bool(parser, value, &board->row_remapping);
    if (strcmp(key, "page-retirement") == 0)
        return read_bool(parser, value, &board->page_retirement);
    if (strcmp(key, "persistence") == 0)
        return read_bool(parser, value, &board->persistence);
    if (strcmp(key, "display-mode") == 0)
        return read_bool(parser, value, &board->display);
    if (strcmp(key, "application-clocks") == 0)
        return READ(U32("graphics", board->application_clocks[0]), U32("memory", board->application_clocks[2]));
    if (strcmp(key, "row-remapper-banks") == 0)
        return read_number(parser, value, FIELD_U32, &board->remapper_banks, 65535);
    if (strcmp(key, "addressing-mode") == 0)
        return read_choice(parser, value, modes, &board->addressing_mode);
    if (strcmp(key, "fabric") == 0)
        return parse_fabric(parser, value);
    if (strcmp(key, "platform") == 0)
        return parse_platform(parser, value);
    if (strcmp(key, "engines") == 0)
        return READ(U32("copy", board->engines[ENGINE_COPY]), U32("decoder", board->engines[ENGINE_DECODER]),
                    U32("encoder", board->engines[ENGINE_ENCODER]), U32("jpeg", board->engines[ENGINE_JPEG]),
                    U32("ofa", board->engines[ENGINE_OFA]));
    *known = false;
    return true;
}

/* Every key but the repeated ones may stand once in a section. */
static bool once(struct parser *parser)
{
    static const char *const keys[] = { "uuid", "minor", "name", "serial", "board-part-number", "board-id", "vbios-version",
        "inforom-image-version", "brand", "architecture", "module-id", "compute-capability", "pci-address", "pci-device-id",
        "pci-subsystem-id", "pci-class", "pci-path", "pcie", "numa-node", "coherent-numa-node", "cpu-affinity", "memory",
        "memory-bus-width", "bar1-memory", "cores", "power", "temperature", "fan", "clocks", "maximum-clocks", "application-clocks", "ecc", "row-remapping",
        "row-remapper-banks",
        "page-retirement", "persistence", "display-mode", "addressing-mode", "fabric", "platform", "engines", "mig", "mig-mode",
        "mig-slices", "mig-id-order" };
    for (size_t index = 0; index < COUNT_OF(keys); index++) {
        if (strcmp(parser->key, keys[index]) != 0)
            continue;
        if (parser->given & 1ull << index)
            return fail(parser, parser->key, "each statement once in a gpu");
        parser->given |= 1ull << index;
    }
    return true;
}

bool parse_section_statement(struct parser *parser, char *value)
{
    bool known = false, good = once(parser);
    good = good && parse_identity(parser, value, &known);
    if (good && !known)
        good = parse_place(parser, value, &known);
    if (good && !known)
        good = parse_nature(parser, value, &known);
    if (good && !known)
        good = parse_mig_statement(parser, value, &known);
    if (!good || known)
        return good;
    if (strcmp(parser->key, "nvlink") == 0)
        return parse_link(parser, value);
    if (strcmp(parser->key, "memory-clock") == 0)
        return parse_memory_clock(parser, value);
    if (strcmp(parser->key, "workload-profile") == 0)
        return parse_workload_profile(parser, value);
    return fail(parser, parser->key, "a statement for a gpu");
}

bool finish_section(struct parser *parser)
{
    struct board *board = &section_gpu(parser)->board;
    parser->key = "gpu";
    const char *missing = !board->uuid[0] ? "uuid" : !board->name[0] ? "name" : !board->architecture ? "architecture"
        : !board->capability_major ? "compute-capability" : !board->pci_device_id ? "pci-device-id" : !board->memory_total ? "memory"
        : !(parser->given & 1ull << 12) ? "pci-address" : NULL;
    if (missing)
        return fail(parser, *board->uuid ? board->uuid : "a gpu without uuid", missing);
    if (board->memory_reserved + board->memory_used > board->memory_total)
        return fail(parser, board->uuid, "memory reserved + used not above total");
    if (board->power_default != ABSENT && (board->power_default < board->power_minimum || board->power_default > board->power_maximum))
        return fail(parser, board->uuid, "power minimum <= default <= maximum");
    for (unsigned id = 0; id < WORKLOAD_PROFILES_MAX; id++) {
        if (board->workload_conflicts[id] & ~board->workload_profiles)
            return fail(parser, board->uuid, "workload profiles that conflict with ones of the same board");
    }
    board->application_clocks[1] = board->application_clocks[0];
    for (size_t type = 0; type < COUNT_OF(board->application_clocks); type++) {
        if (!board->application_clocks[type])
            board->application_clocks[type] = board->maximum_clocks[type];
    }
    if (!board->board_id)
        board->board_id = (board->address.domain & 0xFFFF) << 16 | board->address.bus << 8;
    return finish_mig(parser);
}
