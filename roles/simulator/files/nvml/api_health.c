/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * ECC, remapped rows, retired pages, field values.
 */
#include "simulator.h"

#include <string.h>

enum { CORRECTED, UNCORRECTED, ERROR_TYPES };
enum { VOLATILE, AGGREGATE, COUNTERS };
enum { LOCATION_L1, LOCATION_L2, LOCATION_DEVICE, LOCATION_REGISTERS, LOCATION_SRAM = 7, LOCATIONS };

static uint64_t ecc_count(const struct gpu *gpu, unsigned type, unsigned counter)
{
    return counter == VOLATILE ? gpu->ecc_volatile[type] : gpu->ecc_aggregate[type];
}

static nvmlReturn_t ecc_readable(const struct gpu *gpu, unsigned type, unsigned counter)
{
    REQUIRE(type < ERROR_TYPES && counter < COUNTERS, INVALID_ARGUMENT);
    return gpu->ecc_current ? SUCCESS : NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter, unsigned long long *count)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    nvmlReturn_t result = ecc_readable(call.gpu, type, counter);
    REQUIRE(count, INVALID_ARGUMENT);
    if (result == SUCCESS)
        *count = ecc_count(call.gpu, type, counter);
    return result;
}

/* Injected errors are errors of the device memory. */
EXPORT nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, unsigned type, unsigned counter, nvmlEccErrorCounts_t *counts)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    nvmlReturn_t result = ecc_readable(call.gpu, type, counter);
    REQUIRE(counts, INVALID_ARGUMENT);
    if (result == SUCCESS)
        *counts = (nvmlEccErrorCounts_t){ .deviceMemory = ecc_count(call.gpu, type, counter) };
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type, unsigned counter, unsigned location,
                                                    unsigned long long *count)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    nvmlReturn_t result = ecc_readable(call.gpu, type, counter);
    REQUIRE(count && location < LOCATIONS, INVALID_ARGUMENT);
    REQUIRE(location <= LOCATION_REGISTERS || location == LOCATION_SRAM, NOT_SUPPORTED);
    if (result == SUCCESS)
        *count = location == LOCATION_DEVICE ? ecc_count(call.gpu, type, counter) : 0;
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, unsigned counter)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(counter < COUNTERS, INVALID_ARGUMENT);
    REQUIRE(call.gpu->ecc_current, NOT_SUPPORTED);
    WRITE_CALL();
    memset(counter == VOLATILE ? call.gpu_write->ecc_volatile : call.gpu_write->ecc_aggregate, 0, sizeof call.gpu_write->ecc_volatile);
    return call_commit(&call);
}

EXPORT nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)
{
    enum { AMPERE = 7 };
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(status, INVALID_ARGUMENT);
    REQUIRE(status->version == VERSION_WORD(nvmlEccSramErrorStatus_t, 1), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(call.gpu->ecc_current && call.gpu->board.architecture >= AMPERE, NOT_SUPPORTED);
    *status = (nvmlEccSramErrorStatus_t){ .version = status->version };
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                                              unsigned *failure)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(correctable && uncorrectable && pending && failure, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.row_remapping, NOT_SUPPORTED);
    *correctable = call.gpu->remapped_correctable;
    *uncorrectable = call.gpu->remapped_uncorrectable;
    *pending = call.gpu->remap_pending;
    *failure = call.gpu->remap_failure;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, nvmlRemappedRowsInfo_v2_t *info)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(info, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.row_remapping, NOT_SUPPORTED);
    *info = (nvmlRemappedRowsInfo_v2_t){ .corrActiveRemaps = call.gpu->remapped_correctable,
                                         .uncActiveRemaps = call.gpu->remapped_uncorrectable,
                                         .uncInactiveRemaps = call.gpu->remap_pending, .bPending = call.gpu->remap_pending,
                                         .bFailureOccurred = call.gpu->remap_failure };
    return SUCCESS;
}

/* Banks by the spare rows they have left; a failed remap means a bank without any. */
EXPORT nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *histogram)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(histogram, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.row_remapping, NOT_SUPPORTED);
    const unsigned banks = call.gpu->board.remapper_banks;
    unsigned used = call.gpu->remapped_correctable + call.gpu->remapped_uncorrectable;
    *histogram = (nvmlRowRemapperHistogramValues_t){ .high = used < banks ? used : banks, .none = call.gpu->remap_failure };
    histogram->max = banks > histogram->high + histogram->none ? banks - histogram->high - histogram->none : 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *addresses)
{
    (void)addresses;
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(cause <= 1 && count, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.page_retirement, NOT_SUPPORTED);
    *count = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *addresses,
                                                 unsigned long long *timestamps)
{
    (void)timestamps;
    return nvmlDeviceGetRetiredPages(device, cause, count, addresses);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(pending, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.page_retirement, NOT_SUPPORTED);
    *pending = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_t *status)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(status, INVALID_ARGUMENT);
    REQUIRE(status->version == VERSION_WORD(nvmlRepairStatus_t, 1), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(call.gpu->board.row_remapping, NOT_SUPPORTED);
    *status = (nvmlRepairStatus_t){ .version = status->version };
    return SUCCESS;
}

static void answer_number(nvmlFieldValue_t *field, bool supported, uint64_t number)
{
    field->nvmlReturn = supported ? SUCCESS : NOT_SUPPORTED;
    field->valueType = VALUE_UNSIGNED_INT;
    field->value.uiVal = (unsigned)number;
}

static void answer_long(nvmlFieldValue_t *field, bool supported, uint64_t number)
{
    field->nvmlReturn = supported ? SUCCESS : NOT_SUPPORTED;
    field->valueType = VALUE_UNSIGNED_LONG_LONG;
    field->value.ullVal = number;
}

static bool health_field(const struct machine *machine, const struct gpu *gpu, nvmlFieldValue_t *field)
{
    enum { ECC_CURRENT = 1, ECC_PENDING, SINGLE_VOLATILE, DOUBLE_VOLATILE, SINGLE_AGGREGATE, DOUBLE_AGGREGATE, SINGLE_VOLATILE_DEVICE = 11,
           DOUBLE_VOLATILE_DEVICE, SINGLE_AGGREGATE_DEVICE = 22, DOUBLE_AGGREGATE_DEVICE, RETIRED_SINGLE = 29, RETIRED_DOUBLE,
           RETIRED_PENDING, PCIE_REPLAY = 94, REMAPPED_CORRECTABLE = 142, REMAPPED_UNCORRECTABLE, REMAPPED_PENDING, REMAPPED_FAILURE,
           RESETLESS_MIG = 184, INDEPENDENT_MIG_QUERY = 199, RESET_STATUS = 226, DRAIN_AND_RESET_STATUS = 227, RECOVERY_ACTION = 230 };
    bool ecc = gpu->board.ecc != ABSENT, counting = gpu->ecc_current, rows = gpu->board.row_remapping;
    switch (field->fieldId) {
    case ECC_CURRENT: answer_long(field, ecc, gpu->ecc_current); break;
    case ECC_PENDING: answer_long(field, ecc, gpu->ecc_pending); break;
    case SINGLE_VOLATILE:
    case SINGLE_VOLATILE_DEVICE: answer_long(field, counting, gpu->ecc_volatile[CORRECTED]); break;
    case DOUBLE_VOLATILE:
    case DOUBLE_VOLATILE_DEVICE: answer_long(field, counting, gpu->ecc_volatile[UNCORRECTED]); break;
    case SINGLE_AGGREGATE:
    case SINGLE_AGGREGATE_DEVICE: answer_long(field, counting, gpu->ecc_aggregate[CORRECTED]); break;
    case DOUBLE_AGGREGATE:
    case DOUBLE_AGGREGATE_DEVICE: answer_long(field, counting, gpu->ecc_aggregate[UNCORRECTED]); break;
    case RETIRED_SINGLE:
    case RETIRED_DOUBLE:
    case RETIRED_PENDING: answer_number(field, gpu->board.page_retirement, 0); break;
    case PCIE_REPLAY: answer_number(field, true, 0); break;
    case REMAPPED_CORRECTABLE: answer_long(field, rows, gpu->remapped_correctable); break;
    case REMAPPED_UNCORRECTABLE: answer_long(field, rows, gpu->remapped_uncorrectable); break;
    case REMAPPED_PENDING: answer_long(field, rows, gpu->remap_pending); break;
    case REMAPPED_FAILURE: answer_long(field, rows, gpu->remap_failure); break;
    case RESETLESS_MIG: answer_number(field, gpu->board.mig != MIG_NONE, gpu->board.mig == MIG_IMMEDIATE); break;
    case INDEPENDENT_MIG_QUERY: answer_number(field, gpu->board.mig != MIG_NONE, !machine->profiles_need_mig_mode); break;
    case RESET_STATUS: answer_number(field, true, gpu->recovery_action == 1); break;
    case DRAIN_AND_RESET_STATUS: answer_number(field, true, gpu->recovery_action == 4); break;
    case RECOVERY_ACTION: answer_number(field, true, gpu->recovery_action); break;
    default: return false;
    }
    return true;
}

/* Each field has its own result; the call fails only as a whole. */
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(values && count > 0, INVALID_ARGUMENT);
    for (int index = 0; index < count; index++) {
        nvmlFieldValue_t *field = &values[index];
        field->timestamp = (long long)now_microseconds();
        field->latencyUsec = 0;
        field->nvmlReturn = NOT_SUPPORTED;
        field->value.ullVal = 0;
        field->valueType = VALUE_UNSIGNED_INT;
        if (!health_field(call.machine, call.gpu, field) && !power_field(call.gpu, field))
            link_field(call.gpu, field);
    }
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceClearFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(values && count > 0, INVALID_ARGUMENT);
    for (int index = 0; index < count; index++)
        values[index].nvmlReturn = NOT_SUPPORTED;      /* nothing that is counted here can be cleared this way */
    return SUCCESS;
}
