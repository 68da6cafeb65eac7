/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Modes of a GPU: compute, persistence, ECC, accounting, virtualization.
 */
#include "simulator.h"

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(mode, INVALID_ARGUMENT);
    *mode = call.gpu->compute_mode;
    return SUCCESS;
}

/* With MIG on, only the handle of a MIG device is valid. Mode 1 (exclusive thread) no longer exists. */
EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned mode)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(mode <= 3, INVALID_ARGUMENT);
    REQUIRE(mode != 1 && (call.compute != NO_INSTANCE || !call.gpu->mig_current), NOT_SUPPORTED);
    WRITE_CALL();
    call.gpu_write->compute_mode = mode;
    return call_commit(&call);
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(mode, INVALID_ARGUMENT);
    *mode = call.gpu->persistence;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(mode <= 1, INVALID_ARGUMENT);
    WRITE_CALL();
    call.gpu_write->persistence = mode;
    return call_commit(&call);
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(current && pending, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.ecc != ABSENT, NOT_SUPPORTED);
    *current = call.gpu->ecc_current;
    *pending = call.gpu->ecc_pending;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(mode, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.ecc != ABSENT, NOT_SUPPORTED);
    *mode = (nvmlEnableState_t)call.gpu->board.ecc;
    return SUCCESS;
}

/* In force after the next reset. */
EXPORT nvmlReturn_t nvmlDeviceSetEccMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(mode <= 1, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.ecc != ABSENT, NOT_SUPPORTED);
    WRITE_CALL();
    call.gpu_write->ecc_pending = mode;
    return call_commit(&call);
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(mode, INVALID_ARGUMENT);
    *mode = call.gpu->accounting;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(mode <= 1, INVALID_ARGUMENT);
    WRITE_CALL();
    call.gpu_write->accounting = mode;
    return call_commit(&call);
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned *size)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(size, INVALID_ARGUMENT);
    *size = 4000;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned *count, unsigned *pids)
{
    (void)pids;
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(count, INVALID_ARGUMENT);
    REQUIRE(call.gpu->accounting, NOT_SUPPORTED);
    *count = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid, nvmlAccountingStats_t *stats)
{
    (void)pid;
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(stats, INVALID_ARGUMENT);
    return call.gpu->accounting ? NOT_FOUND : NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, unsigned *mode)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(mode, INVALID_ARGUMENT);
    *mode = 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAPIRestriction(nvmlDevice_t device, unsigned api, nvmlEnableState_t *restricted)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(api <= 1 && restricted, INVALID_ARGUMENT);
    REQUIRE(api == 0, NOT_SUPPORTED);
    *restricted = 1;
    return SUCCESS;
}
