/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Where GPUs sit relative to each other: PCI tree, NVLink, fabric, platform.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

enum { LEVEL_INTERNAL = 0, LEVEL_SINGLE_SWITCH = 10, LEVEL_SWITCHES = 20, LEVEL_HOST_BRIDGE = 30, LEVEL_NODE = 40, LEVEL_SYSTEM = 50 };
enum { PARTS_MAX = 16 };

/* Components of a sysfs path; a board without a path is on the root bus with its bus number. */
static unsigned split_path(const struct board *board, char storage[PATH_MAX_BYTES + 32], char *part[PARTS_MAX])
{
    char address[16], *rest = storage;
    unsigned count = 0;
    format_address_sysfs(&board->address, address);
    if (board->pci_path[0])
        copy_text(storage, PATH_MAX_BYTES, board->pci_path);
    else
        snprintf(storage, PATH_MAX_BYTES, "pci%.7s/%s", address, address);
    for (char *each = strsep(&rest, "/"); each && count < PARTS_MAX; each = strsep(&rest, "/")) {
        if (*each)
            part[count++] = each;
    }
    return count;
}

/* The nearest common ancestor: one switch (two steps to it: its downstream port and the device, or the same bridge), several
 * switches, the host bridge, the NUMA node, the system. */
static unsigned common_level(const struct board *one, const struct board *other)
{
    char storage[2][PATH_MAX_BYTES + 32], *part[2][PARTS_MAX];
    unsigned count[2] = { split_path(one, storage[0], part[0]), split_path(other, storage[1], part[1]) }, common = 0;
    while (common < count[0] && common < count[1] && strcmp(part[0][common], part[1][common]) == 0)
        common++;
    if (common == 0)
        return one->numa_node == other->numa_node && one->numa_node != ABSENT ? LEVEL_NODE : LEVEL_SYSTEM;
    if (common == 1)
        return LEVEL_HOST_BRIDGE;
    return count[0] - common <= 2 && count[1] - common <= 2 ? LEVEL_SINGLE_SWITCH : LEVEL_SWITCHES;
}

static nvmlReturn_t second_device(const struct call *call, nvmlDevice_t device, int *gpu)
{
    int instance, compute;
    nvmlReturn_t result = call_resolve(call, device, gpu, &instance, &compute);
    return result == SUCCESS && compute != NO_INSTANCE ? NOT_SUPPORTED : result;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, unsigned *level)
{
    DEVICE_CALL(one, ACCEPT_GPU);
    int gpu;
    nvmlReturn_t result = second_device(&call, other, &gpu);
    REQUIRE(result == SUCCESS, result);
    REQUIRE(level, INVALID_ARGUMENT);
    *level = gpu == call.gpu_index ? LEVEL_INTERNAL : common_level(&call.gpu->board, &call.machine->gpus[gpu].board);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, unsigned level, unsigned *count, nvmlDevice_t *devices)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(count && level <= LEVEL_SYSTEM && level % 10 == 0, INVALID_ARGUMENT);
    unsigned room = devices ? *count : 0, found = 0;
    for (unsigned index = 0; index < visible_count(); index++) {
        int gpu = visible_gpu(index);
        if (gpu == call.gpu_index || common_level(&call.gpu->board, &call.machine->gpus[gpu].board) > level)
            continue;
        if (found < room)
            devices[found] = handle_of_gpu(call.machine, gpu);
        found++;
    }
    *count = found;
    return devices && found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t one, nvmlDevice_t other, int *same)
{
    DEVICE_CALL(one, ACCEPT_GPU);
    int gpu;
    nvmlReturn_t result = second_device(&call, other, &gpu);
    REQUIRE(result == SUCCESS, result);
    REQUIRE(same, INVALID_ARGUMENT);
    *same = gpu == call.gpu_index;
    return SUCCESS;
}

static bool link_active(const struct gpu *gpu, unsigned link)
{
    return gpu->board.links[link].present && gpu->board.links[link].active && !(gpu->links_down[link / 32] >> link % 32 & 1);
}

/* Linked to each other, or both to switches. */
static bool linked(const struct gpu *one, const struct gpu *other)
{
    bool one_switched = false, other_switched = false;
    for (unsigned link = 0; link < LINKS_MAX; link++) {
        if (link_active(one, link) && one->board.links[link].remote == REMOTE_GPU
            && same_address(&one->board.links[link].address, &other->board.address))
            return true;
        one_switched |= link_active(one, link) && one->board.links[link].remote == REMOTE_SWITCH;
        other_switched |= link_active(other, link) && other->board.links[link].remote == REMOTE_SWITCH;
    }
    return one_switched && other_switched;
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other, unsigned index, unsigned *status)
{
    enum { INDEX_READ, INDEX_WRITE, INDEX_NVLINK, INDEX_ATOMICS, INDEX_PCI, INDEXES };
    enum { STATUS_OK = 0, STATUS_TOPOLOGY_NOT_SUPPORTED = 3, STATUS_NOT_SUPPORTED = 5 };
    DEVICE_CALL(one, ACCEPT_GPU);
    int gpu;
    nvmlReturn_t result = second_device(&call, other, &gpu);
    REQUIRE(result == SUCCESS, result);
    REQUIRE(status && index < INDEXES && gpu != call.gpu_index, INVALID_ARGUMENT);
    const struct gpu *peer = &call.machine->gpus[gpu];
    bool by_link = linked(call.gpu, peer), near = common_level(&call.gpu->board, &peer->board) <= LEVEL_HOST_BRIDGE;
    if (call.gpu->mig_current || peer->mig_current)
        *status = STATUS_NOT_SUPPORTED;
    else if (index == INDEX_NVLINK || index == INDEX_ATOMICS)
        *status = by_link ? STATUS_OK : STATUS_NOT_SUPPORTED;
    else if (index == INDEX_PCI)
        *status = near ? STATUS_OK : STATUS_TOPOLOGY_NOT_SUPPORTED;
    else
        *status = by_link || near ? STATUS_OK : STATUS_TOPOLOGY_NOT_SUPPORTED;
    return SUCCESS;
}

static nvmlReturn_t find_link(const struct call *call, unsigned index, const struct nvlink **link)
{
    REQUIRE(index < LINKS_MAX, INVALID_ARGUMENT);
    *link = &call->gpu->board.links[index];
    for (unsigned other = 0; other < LINKS_MAX; other++) {
        if (call->gpu->board.links[other].present)
            return (*link)->present ? SUCCESS : INVALID_ARGUMENT;
    }
    return NOT_SUPPORTED;
}

#define LINK_CALL(...)                                                   \
    const struct nvlink *link = NULL;                                    \
    nvmlReturn_t link_result = find_link(&call, number, &link);          \
    REQUIRE(link_result == SUCCESS, link_result)

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned number, nvmlEnableState_t *active)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    LINK_CALL();
    REQUIRE(active, INVALID_ARGUMENT);
    *active = link_active(call.gpu, number);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned number, unsigned *version)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    LINK_CALL();
    REQUIRE(version, INVALID_ARGUMENT);
    *version = link->version;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned number, unsigned capability, unsigned *answer)
{
    enum { P2P, SYSTEM_MEMORY, P2P_ATOMICS, SYSTEM_MEMORY_ATOMICS, SLI_BRIDGE, VALID, CAPABILITIES };
    DEVICE_CALL(device, ACCEPT_GPU);
    LINK_CALL();
    REQUIRE(answer && capability < CAPABILITIES, INVALID_ARGUMENT);
    bool to_cpu = link->remote == REMOTE_CPU;
    *answer = capability == VALID || (capability == SYSTEM_MEMORY && to_cpu) || (capability == SYSTEM_MEMORY_ATOMICS && to_cpu)
              || ((capability == P2P || capability == P2P_ATOMICS) && !to_cpu);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned number, unsigned *type)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    LINK_CALL();
    REQUIRE(type, INVALID_ARGUMENT);
    *type = (unsigned)link->remote;
    return SUCCESS;
}

/* The ids of the remote device are known where it is a GPU of this machine. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned number, nvmlPciInfo_t *pci)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    LINK_CALL();
    REQUIRE(pci, INVALID_ARGUMENT);
    REQUIRE(link_active(call.gpu, number), NOT_SUPPORTED);
    *pci = (nvmlPciInfo_t){ .domain = link->address.domain, .bus = link->address.bus, .device = link->address.device };
    format_address(&link->address, pci->busId);
    format_address_legacy(&link->address, pci->busIdLegacy);
    for (unsigned gpu = 0; gpu < call.machine->gpu_count; gpu++) {
        if (same_address(&call.machine->gpus[gpu].board.address, &link->address)) {
            pci->pciDeviceId = call.machine->gpus[gpu].board.pci_device_id;
            pci->pciSubSystemId = call.machine->gpus[gpu].board.pci_subsystem_id;
        }
    }
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned number, nvmlPciInfo_t *pci)
{
    nvmlPciInfo_t full;
    nvmlReturn_t result = nvmlDeviceGetNvLinkRemotePciInfo_v2(device, number, pci ? &full : NULL);
    if (result == SUCCESS)
        memcpy(pci, &full, offsetof(nvmlPciInfo_t, pciSubSystemId));
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned number, unsigned counter, unsigned long long *value)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    LINK_CALL();
    REQUIRE(counter < 5 && value, INVALID_ARGUMENT);
    *value = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkInfo(nvmlDevice_t device, nvmlNvLinkInfo_v1_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    REQUIRE(info->version == VERSION_WORD(nvmlNvLinkInfo_v1_t, 1), ARGUMENT_VERSION_MISMATCH);
    info->isNvleEnabled = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetC2cModeInfoV(nvmlDevice_t device, nvmlC2cModeInfo_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    info->isC2cEnabled = call.gpu->board.coherent_numa_node != ABSENT;
    return SUCCESS;
}

/* Hopper and later know it, on boards that have NVLink; there the state NOT_SUPPORTED is an answer, not an error. */
static nvmlReturn_t fabric_answerable(const struct call *call)
{
    enum { HOPPER = 9 };
    bool links = false;
    for (unsigned link = 0; link < LINKS_MAX; link++)
        links |= call->gpu->board.links[link].present;
    return links && call->gpu->board.architecture >= HOPPER ? SUCCESS : NOT_SUPPORTED;
}

struct fabric { uint32_t state, mask, summary; int32_t status; };

/* The board's place in its fabric, or what an injected fault makes of it. In the mask two bits each say that the bandwidth is
 * degraded, that routes are being recovered, that they are unhealthy, that access timed out (1: so, 2: not so); then what is
 * wrong with the configuration (1: nothing). */
static struct fabric fabric_of(const struct gpu *gpu)
{
    enum { NOT_STARTED = 1, IN_PROGRESS, COMPLETED, UNHEALTHY = 2, LIMITED = 3, MASK_WELL = 0x1AA };
    static const struct fabric faults[] = {
        [FABRIC_NOT_STARTED] = { .state = NOT_STARTED, .mask = MASK_WELL },
        [FABRIC_JOINING] = { .state = IN_PROGRESS, .mask = MASK_WELL },
        [FABRIC_FAILED] = { .state = COMPLETED, .status = UNKNOWN, .mask = MASK_WELL, .summary = UNHEALTHY },
        [FABRIC_ROUTES] = { .state = COMPLETED, .mask = 0x19A, .summary = UNHEALTHY },
        [FABRIC_MENDING] = { .state = COMPLETED, .mask = 0x1A6, .summary = UNHEALTHY },
        [FABRIC_PLACE] = { .state = COMPLETED, .mask = 0x2AA, .summary = UNHEALTHY },
        [FABRIC_BANDWIDTH] = { .state = COMPLETED, .mask = 0x1A9, .summary = LIMITED },
    };
    const struct board *board = &gpu->board;
    if (gpu->fabric_fault == FABRIC_WELL)
        return (struct fabric){ .state = board->fabric_state, .mask = board->fabric_health_mask,
                                .summary = board->fabric_health_summary, .status = board->fabric_status };
    struct fabric fault = faults[gpu->fabric_fault];
    if (!board->fabric_health_summary)
        fault.summary = 0;              /* Hopper has none */
    return fault;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    REQUIRE(fabric_answerable(&call) == SUCCESS, NOT_SUPPORTED);
    const struct board *board = &call.gpu->board;
    const struct fabric fabric = fabric_of(call.gpu);
    *info = (nvmlGpuFabricInfo_t){ .status = fabric.status, .cliqueId = board->fabric_clique, .state = (unsigned char)fabric.state };
    memcpy(info->clusterUuid, board->fabric_cluster, sizeof info->clusterUuid);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    bool third = info->version == VERSION_WORD(nvmlGpuFabricInfo_v3_t, 3);
    REQUIRE(third || info->version == VERSION_WORD(nvmlGpuFabricInfo_v2_t, 2), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(fabric_answerable(&call) == SUCCESS, NOT_SUPPORTED);
    const struct board *board = &call.gpu->board;
    const struct fabric fabric = fabric_of(call.gpu);
    info->status = fabric.status;
    info->cliqueId = board->fabric_clique;
    info->state = (unsigned char)fabric.state;
    info->healthMask = fabric.mask;
    memcpy(info->clusterUuid, board->fabric_cluster, sizeof info->clusterUuid);
    if (third)
        ((nvmlGpuFabricInfo_v3_t *)(void *)info)->healthSummary = (unsigned char)fabric.summary;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo_v4(nvmlDevice_t device, nvmlGpuFabricInfo_v4_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    REQUIRE(fabric_answerable(&call) == SUCCESS, NOT_SUPPORTED);
    const struct board *board = &call.gpu->board;
    const struct fabric fabric = fabric_of(call.gpu);
    *info = (nvmlGpuFabricInfo_v4_t){ .status = fabric.status, .state = (unsigned char)fabric.state, .numCliques = fabric.state == 3,
                                      .healthMask = fabric.mask, .healthSummary = (unsigned char)fabric.summary };
    info->cliques[0].id = board->fabric_clique;
    memcpy(info->clusterUuid, board->fabric_cluster, sizeof info->clusterUuid);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPlatformInfo(nvmlDevice_t device, nvmlPlatformInfo_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    REQUIRE(info->version == VERSION_WORD(nvmlPlatformInfo_t, 2) || info->version == VERSION_WORD(nvmlPlatformInfo_t, 1),
            ARGUMENT_VERSION_MISMATCH);
    const struct board *board = &call.gpu->board;
    REQUIRE(board->platform, NOT_SUPPORTED);
    *info = (nvmlPlatformInfo_t){ .version = info->version, .slotNumber = (unsigned char)board->platform_slot,
                                  .trayIndex = (unsigned char)board->platform_tray, .hostId = (unsigned char)board->platform_host,
                                  .peerType = (unsigned char)board->platform_peer, .moduleId = (unsigned char)board->platform_module };
    memcpy(info->ibGuid, board->platform_ib_guid, sizeof info->ibGuid);
    memcpy(info->chassisSerialNumber, board->platform_chassis, sizeof info->chassisSerialNumber);
    return SUCCESS;
}

/* Readings of the field values about links; the scope is the link. */
void link_field(const struct gpu *gpu, nvmlFieldValue_t *field)
{
    enum { SPEED_COMMON = 90, LINK_COUNT = 91, SWITCH_LINKS = 147, SPEED = 164, STATE = 165, VERSION = 166, CHIP_TO_CHIP_LINKS = 170 };
    unsigned links = 0, switched = 0, speed = 0;
    for (unsigned link = 0; link < LINKS_MAX; link++) {
        links += gpu->board.links[link].present;
        switched += link_active(gpu, link) && gpu->board.links[link].remote == REMOTE_SWITCH;
        speed = gpu->board.links[link].present ? gpu->board.links[link].speed : speed;
    }
    const struct nvlink *scope = field->scopeId < LINKS_MAX ? &gpu->board.links[field->scopeId] : NULL;
    bool known = scope && scope->present;
    switch (field->fieldId) {
    case SPEED_COMMON: field->value.uiVal = speed; break;
    case LINK_COUNT: field->value.uiVal = links; break;
    case SWITCH_LINKS: field->value.uiVal = switched; break;
    case CHIP_TO_CHIP_LINKS:
        field->value.uiVal = gpu->board.coherent_numa_node != ABSENT;
        field->nvmlReturn = SUCCESS;
        return;
    case SPEED: field->value.uiVal = known && link_active(gpu, field->scopeId) ? scope->speed : 0; break;
    case STATE: field->value.uiVal = known && link_active(gpu, field->scopeId); break;
    case VERSION: field->value.uiVal = known ? scope->version : 0; break;
    default: return;
    }
    if (field->fieldId >= SPEED && links && !known)
        field->nvmlReturn = INVALID_ARGUMENT;
    else
        field->nvmlReturn = links ? SUCCESS : NOT_SUPPORTED;
}
