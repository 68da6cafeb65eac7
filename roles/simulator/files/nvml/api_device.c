/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Finding devices, and who they are.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    CALL(call_begin);
    REQUIRE(count, INVALID_ARGUMENT);
    *count = visible_count();
    return SUCCESS;
}
ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2, unsigned *);

static nvmlReturn_t answer_gpu(struct call *call, int gpu, nvmlDevice_t *device)
{
    nvmlReturn_t result = call_found(call, gpu);
    *device = handle_of_gpu(call->machine, gpu);
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    CALL(call_begin);
    REQUIRE(device && visible_gpu(index) != NO_INSTANCE, INVALID_ARGUMENT);
    return answer_gpu(&call, visible_gpu(index), device);
}
ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2, unsigned, nvmlDevice_t *);

static nvmlReturn_t find_mig(const struct machine *machine, int gpu, const char *uuid, nvmlDevice_t *device)
{
    for (int instance = 0; instance < INSTANCES_MAX; instance++) {
        const struct gpu_instance *owner = &machine->gpus[gpu].instances[instance];
        for (int compute = 0; owner->serial && compute < COMPUTE_INSTANCES_MAX; compute++) {
            if (owner->compute[compute].serial && strcasecmp(owner->compute[compute].uuid, uuid) == 0
                && mig_visible(machine, gpu, instance, compute)) {
                *device = handle_of_mig(machine, gpu, instance, compute);
                return machine->gpus[gpu].lost ? GPU_IS_LOST : SUCCESS;
            }
        }
    }
    return NOT_FOUND;
}

static nvmlReturn_t find_uuid(struct call *call, const char *uuid, nvmlDevice_t *device)
{
    const struct machine *machine = call->machine;
    for (unsigned index = 0; index < visible_count(); index++) {
        int gpu = visible_gpu(index);
        if (strcasecmp(machine->gpus[gpu].board.uuid, uuid) == 0)
            return answer_gpu(call, gpu, device);
        nvmlReturn_t result = find_mig(machine, gpu, uuid, device);
        if (result != NOT_FOUND)
            return result;
    }
    return NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    CALL(call_begin);
    REQUIRE(uuid && device, INVALID_ARGUMENT);
    return find_uuid(&call, uuid, device);
}

/* A binary UUID has no prefix: it may be a GPU's or a MIG device's. */
EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    enum { ASCII = 1, BINARY = 2 };
    CALL(call_begin);
    REQUIRE(uuid && device, INVALID_ARGUMENT);
    REQUIRE(uuid->version == VERSION_WORD(nvmlUUID_t, 1), ARGUMENT_VERSION_MISMATCH);
    char text[48] = "";
    if (uuid->type == ASCII) {
        copy_text(text, sizeof uuid->value.text + 1, uuid->value.text);
        return find_uuid(&call, text, device);
    }
    REQUIRE(uuid->type == BINARY, INVALID_ARGUMENT);
    const unsigned char *b = uuid->value.bytes;
    snprintf(text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4],
             b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    nvmlReturn_t result = find_uuid(&call, text, device);
    if (result != NOT_FOUND)
        return result;
    memcpy(text, "MIG", 3);
    return find_uuid(&call, text, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device)
{
    CALL(call_begin);
    struct address address;
    REQUIRE(text && device && parse_address(text, &address), INVALID_ARGUMENT);
    for (unsigned index = 0; index < visible_count(); index++) {
        if (same_address(&call.machine->gpus[visible_gpu(index)].board.address, &address))
            return answer_gpu(&call, visible_gpu(index), device);
    }
    return NOT_FOUND;
}
ALIAS(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2, const char *, nvmlDevice_t *);

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    CALL(call_begin);
    REQUIRE(serial && *serial && device, INVALID_ARGUMENT);
    for (unsigned index = 0; index < visible_count(); index++) {
        if (strcmp(call.machine->gpus[visible_gpu(index)].board.serial, serial) == 0)
            return answer_gpu(&call, visible_gpu(index), device);
    }
    return NOT_FOUND;
}

static const struct compute_instance *addressed_compute(const struct call *call)
{
    return &call->gpu->instances[call->instance].compute[call->compute];
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(index, INVALID_ARGUMENT);
    *index = call.compute == NO_INSTANCE ? (unsigned)visible_index(call.gpu_index)
                                         : mig_index_seen(call.machine, call.gpu_index, call.instance, call.compute);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    return answer_text(uuid, length, call.compute == NO_INSTANCE ? call.gpu->board.uuid : addressed_compute(&call)->uuid);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    char text[NAME_MAX_BYTES + PROFILE_NAME_MAX_BYTES + 8];
    copy_text(text, sizeof text, call.gpu->board.name);
    if (call.compute != NO_INSTANCE)
        mig_device_name(call.gpu, call.instance, call.compute, text, sizeof text);
    return answer_text(name, length, text);
}

#define NUMBER_OF_GPU(function, type, accept, supported, expression)   \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, type *answer)    \
    {                                                                  \
        DEVICE_CALL(device, accept);                                   \
        REQUIRE(answer, INVALID_ARGUMENT);                             \
        const struct board *board = &call.gpu->board;                  \
        REQUIRE(supported, NOT_SUPPORTED);                             \
        *answer = (type)(expression);                                  \
        return SUCCESS;                                                \
    }

#define TEXT_OF_GPU(function, field)                                                 \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, char *text, unsigned length)   \
    {                                                                                \
        DEVICE_CALL(device, ACCEPT_ANY);                                             \
        return answer_text(text, length, call.gpu->board.field);                     \
    }

TEXT_OF_GPU(nvmlDeviceGetSerial, serial)
TEXT_OF_GPU(nvmlDeviceGetBoardPartNumber, part_number)
TEXT_OF_GPU(nvmlDeviceGetVbiosVersion, vbios_version)
TEXT_OF_GPU(nvmlDeviceGetInforomImageVersion, inforom_version)

NUMBER_OF_GPU(nvmlDeviceGetMinorNumber, unsigned, ACCEPT_GPU, board->uuid[0], call.gpu->minor)
NUMBER_OF_GPU(nvmlDeviceGetBrand, unsigned, ACCEPT_ANY, board->uuid[0], board->brand)
NUMBER_OF_GPU(nvmlDeviceGetArchitecture, unsigned, ACCEPT_ANY, board->uuid[0], board->architecture)
NUMBER_OF_GPU(nvmlDeviceGetBoardId, unsigned, ACCEPT_GPU, board->uuid[0], board->board_id)
NUMBER_OF_GPU(nvmlDeviceGetMultiGpuBoard, unsigned, ACCEPT_GPU, board->uuid[0], 0)
NUMBER_OF_GPU(nvmlDeviceGetBusType, unsigned, ACCEPT_ANY, board->uuid[0], 2)
NUMBER_OF_GPU(nvmlDeviceGetModuleId, unsigned, ACCEPT_GPU, board->module_id != ABSENT, board->module_id)
NUMBER_OF_GPU(nvmlDeviceGetNumGpuCores, unsigned, ACCEPT_GPU, board->cores != ABSENT, board->cores)
NUMBER_OF_GPU(nvmlDeviceGetMemoryBusWidth, unsigned, ACCEPT_GPU, board->memory_bus_width != ABSENT, board->memory_bus_width)
NUMBER_OF_GPU(nvmlDeviceGetNumaNodeId, unsigned, ACCEPT_ANY, board->coherent_numa_node != ABSENT, board->coherent_numa_node)
NUMBER_OF_GPU(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, ACCEPT_GPU, board->pcie_generation, board->pcie_generation)
NUMBER_OF_GPU(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, ACCEPT_GPU, board->pcie_generation, board->pcie_generation)
NUMBER_OF_GPU(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, ACCEPT_GPU, board->pcie_generation, board->pcie_generation)
NUMBER_OF_GPU(nvmlDeviceGetMaxPcieLinkWidth, unsigned, ACCEPT_GPU, board->pcie_width, board->pcie_width)
NUMBER_OF_GPU(nvmlDeviceGetCurrPcieLinkWidth, unsigned, ACCEPT_GPU, board->pcie_width, board->pcie_width)
NUMBER_OF_GPU(nvmlDeviceGetPcieLinkMaxSpeed, unsigned, ACCEPT_GPU, board->pcie_generation, board->pcie_generation)
NUMBER_OF_GPU(nvmlDeviceGetPcieReplayCounter, unsigned, ACCEPT_GPU, board->pcie_generation, 0)
NUMBER_OF_GPU(nvmlDeviceGetPcieSpeed, unsigned, ACCEPT_GPU, board->pcie_generation && board->pcie_generation <= 6,
              ((const unsigned[]){ 0, 2500, 5000, 8000, 16000, 32000, 64000 })[board->pcie_generation])
NUMBER_OF_GPU(nvmlDeviceGetDisplayMode, nvmlEnableState_t, ACCEPT_GPU, board->uuid[0], board->display)
NUMBER_OF_GPU(nvmlDeviceGetDisplayActive, nvmlEnableState_t, ACCEPT_GPU, board->uuid[0], 0)

EXPORT nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
    enum { GSP_VERSION_BYTES = 64 };
    DEVICE_CALL(device, ACCEPT_GPU);
    return answer_text(version, GSP_VERSION_BYTES, call.machine->driver_version);
}

EXPORT nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned *enabled, unsigned *enabled_by_default)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(enabled && enabled_by_default, INVALID_ARGUMENT);
    *enabled = *enabled_by_default = 1;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(major && minor, INVALID_ARGUMENT);
    *major = (int)call.gpu->board.capability_major;
    *minor = (int)call.gpu->board.capability_minor;
    return SUCCESS;
}

static void fill_pci(const struct board *board, nvmlPciInfo_t *pci)
{
    memset(pci, 0, sizeof *pci);
    format_address_legacy(&board->address, pci->busIdLegacy);
    format_address(&board->address, pci->busId);
    pci->domain = board->address.domain;
    pci->bus = board->address.bus;
    pci->device = board->address.device;
    pci->pciDeviceId = board->pci_device_id;
    pci->pciSubSystemId = board->pci_subsystem_id;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(pci, INVALID_ARGUMENT);
    fill_pci(&call.gpu->board, pci);
    return SUCCESS;
}

/* The older structures end before the long bus id. */
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(pci, INVALID_ARGUMENT);
    nvmlPciInfo_t full;
    fill_pci(&call.gpu->board, &full);
    memcpy(pci, &full, offsetof(nvmlPciInfo_t, busId));
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(pci, INVALID_ARGUMENT);
    nvmlPciInfo_t full;
    fill_pci(&call.gpu->board, &full);
    memcpy(pci, &full, offsetof(nvmlPciInfo_t, pciSubSystemId));
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(pci, INVALID_ARGUMENT);
    REQUIRE(pci->version == VERSION_WORD(nvmlPciInfoExt_t, 1), ARGUMENT_VERSION_MISMATCH);
    const struct board *board = &call.gpu->board;
    *pci = (nvmlPciInfoExt_t){ .version = pci->version, .domain = board->address.domain, .bus = board->address.bus,
                               .device = board->address.device, .pciDeviceId = board->pci_device_id,
                               .pciSubSystemId = board->pci_subsystem_id, .baseClass = board->pci_class >> 16,
                               .subClass = board->pci_class >> 8 & 0xFF };
    format_address(&board->address, pci->busId);
    return SUCCESS;
}

#define VERSIONED_NUMBER(function, expression)                                                    \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, nvmlVersioned_t *answer)                    \
    {                                                                                             \
        DEVICE_CALL(device, ACCEPT_ANY);                                                          \
        REQUIRE(answer, INVALID_ARGUMENT);                                                        \
        REQUIRE(answer->version == VERSION_WORD(nvmlVersioned_t, 1), ARGUMENT_VERSION_MISMATCH);  \
        answer->value = (expression);                                                             \
        return SUCCESS;                                                                           \
    }

VERSIONED_NUMBER(nvmlDeviceGetCapabilities, call.gpu->board.coherent_numa_node != ABSENT)
VERSIONED_NUMBER(nvmlDeviceGetAddressingMode, call.gpu->board.addressing_mode)

/* The identifier that survives changes of the UUID's form: here the UUID's own first half. */
EXPORT nvmlReturn_t nvmlDeviceGetPdi(nvmlDevice_t device, nvmlPdi_t *pdi)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(pdi, INVALID_ARGUMENT);
    REQUIRE(pdi->version == VERSION_WORD(nvmlPdi_t, 1), ARGUMENT_VERSION_MISMATCH);
    unsigned char bytes[16];
    REQUIRE(parse_uuid_bytes(call.gpu->board.uuid + strlen("GPU-"), bytes), UNKNOWN);
    memcpy(&pdi->value, bytes, sizeof pdi->value);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned words, unsigned long *nodes, unsigned scope)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(nodes && words && scope <= 1, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.numa_node != ABSENT, NOT_SUPPORTED);
    char list[16];
    snprintf(list, sizeof list, "%d", call.gpu->board.numa_node);
    cpu_list_to_mask(list, nodes, words);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned words, unsigned long *cpus, unsigned scope)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(cpus && words && scope <= 1, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.cpu_affinity[0], NOT_SUPPORTED);
    cpu_list_to_mask(call.gpu->board.cpu_affinity, cpus, words);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned words, unsigned long *cpus)
{
    return nvmlDeviceGetCpuAffinityWithinScope(device, words, cpus, 0);
}

static uint64_t free_memory(uint64_t total, uint64_t taken) { return total > taken ? total - taken : 0; }

/* A process that queries the memory of a MIG device has the device open from then on. */
static void memory_of(const struct call *call, uint64_t *total, uint64_t *reserved, uint64_t *used)
{
    if (call->compute != NO_INSTANCE)
        client_of_instance(call->machine, call->gpu_index, call->instance, call->compute);
    const struct gpu *gpu = call->gpu;
    *total = call->compute == NO_INSTANCE ? gpu->board.memory_total : gpu->board.profiles[gpu->instances[call->instance].profile].memory;
    *reserved = call->compute == NO_INSTANCE ? gpu->board.memory_reserved : 0;
    *used = used_memory(gpu, call->instance);
}

/* The first version of this call counts reserved memory as used. */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(memory, INVALID_ARGUMENT);
    uint64_t total, reserved, used;
    memory_of(&call, &total, &reserved, &used);
    memory->total = total * MIB;
    memory->free = free_memory(total, reserved + used) * MIB;
    memory->used = memory->total - memory->free;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(memory, INVALID_ARGUMENT);
    REQUIRE(memory->version == VERSION_WORD(nvmlMemory_v2_t, 2), ARGUMENT_VERSION_MISMATCH);
    uint64_t total, reserved, used;
    memory_of(&call, &total, &reserved, &used);
    memory->total = total * MIB;
    memory->reserved = reserved * MIB;
    memory->free = free_memory(total, reserved + used) * MIB;
    memory->used = memory->total - memory->reserved - memory->free;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(memory, INVALID_ARGUMENT);
    uint64_t total = call.gpu->board.bar1;
    if (call.compute != NO_INSTANCE)
        total = total * call.gpu->instances[call.instance].size / call.gpu->board.memory_slices;
    memory->bar1Total = memory->bar1Free = total * MIB;
    memory->bar1Used = 0;
    return SUCCESS;
}
