/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The part of NVML's binary interface that this library implements: numbers and memory layouts, in our own words.
 * Layouts are checked against their published sizes in layout_checks.c.
 */
#ifndef NVML_TYPES_H
#define NVML_TYPES_H

#include <stdint.h>

typedef int nvmlReturn_t;
typedef unsigned int nvmlEnableState_t;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, ALREADY_INITIALIZED = 5,
    NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, INSUFFICIENT_POWER = 8, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, IRQ_ISSUE = 11,
    LIBRARY_NOT_FOUND = 12, FUNCTION_NOT_FOUND = 13, CORRUPTED_INFOROM = 14, GPU_IS_LOST = 15, RESET_REQUIRED = 16,
    OPERATING_SYSTEM = 17, LIB_RM_VERSION_MISMATCH = 18, IN_USE = 19, MEMORY = 20, NO_DATA = 21, VGPU_ECC_NOT_SUPPORTED = 22,
    INSUFFICIENT_RESOURCES = 23, FREQ_NOT_SUPPORTED = 24, ARGUMENT_VERSION_MISMATCH = 25, DEPRECATED = 26, NOT_READY = 27,
    GPU_NOT_FOUND = 28, INVALID_STATE = 29, RESET_TYPE_NOT_SUPPORTED = 30, UNKNOWN = 999
};

/* A handle is an encoded number, never a pointer that code dereferences. */
typedef struct handle_target *nvmlDevice_t;
typedef struct gpu_instance_target *nvmlGpuInstance_t;
typedef struct compute_instance_target *nvmlComputeInstance_t;
typedef struct event_set *nvmlEventSet_t;

#define VERSION_WORD(type, version) ((unsigned)(sizeof(type) | ((unsigned)(version) << 24)))

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned version, domain, bus, device, pciDeviceId, pciSubSystemId, baseClass, subClass;
    char busId[32];
} nvmlPciInfoExt_t;

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned long long bar1Total, bar1Free, bar1Used; } nvmlBAR1Memory_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;

typedef struct { unsigned pid; unsigned long long usedGpuMemory; } nvmlProcessInfo_v1_t;
typedef struct { unsigned pid; unsigned long long usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_t;
typedef struct { unsigned version, mode, numProcArrayEntries; nvmlProcessDetail_t *procArray; } nvmlProcessDetailList_t;

typedef struct { unsigned start, size; } nvmlGpuInstancePlacement_t;
typedef nvmlGpuInstancePlacement_t nvmlComputeInstancePlacement_t;

typedef struct {
    unsigned id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount, encoderCount,
        jpegCount, ofaCount;
    unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;

typedef struct {
    unsigned version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount,
        encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;

typedef struct {
    unsigned version, id, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount, encoderCount, jpegCount,
        ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
    unsigned capabilities;
} nvmlGpuInstanceProfileInfo_v3_t;

typedef struct { nvmlDevice_t device; unsigned id, profileId; nvmlGpuInstancePlacement_t placement; } nvmlGpuInstanceInfo_t;

typedef struct {
    unsigned id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount,
        sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;

typedef struct {
    unsigned version, id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount,
        sharedEncoderCount, sharedJpegCount, sharedOfaCount;
    char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;

typedef struct {
    unsigned version, id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount,
        sharedEncoderCount, sharedJpegCount, sharedOfaCount;
    char name[96];
    unsigned capabilities;
} nvmlComputeInstanceProfileInfo_v3_t;

typedef struct {
    nvmlDevice_t device;
    nvmlGpuInstance_t gpuInstance;
    unsigned id, profileId;
    nvmlComputeInstancePlacement_t placement;
} nvmlComputeInstanceInfo_t;

typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount,
        gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef union {
    double dVal;
    unsigned uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    long long sllVal;
    int siVal;
    unsigned short usVal;
} nvmlValue_t;

enum { VALUE_UNSIGNED_INT = 1, VALUE_UNSIGNED_LONG_LONG = 3, VALUE_SIGNED_INT = 5 };

typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    int valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct { unsigned char clusterUuid[16]; nvmlReturn_t status; unsigned cliqueId; unsigned char state; } nvmlGpuFabricInfo_t;
typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
} nvmlGpuFabricInfo_v2_t;
typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;
typedef struct { unsigned char type; unsigned id; } nvmlGpuFabricClique_t;
typedef struct {
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    nvmlGpuFabricClique_t cliques[64];
    unsigned numCliques;
    unsigned char state;
    unsigned healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v4_t;

typedef struct {
    unsigned version;
    unsigned char ibGuid[16], chassisSerialNumber[16];
    unsigned char slotNumber, trayIndex, hostId, peerType, moduleId;
} nvmlPlatformInfo_t;

typedef struct { unsigned version, powerScope, powerValueMw; } nvmlPowerValue_v2_t;
typedef struct { unsigned version; int sensorType, temperature; } nvmlTemperature_t;
typedef struct { unsigned version; int marginTemperature; } nvmlMarginTemperature_t;
typedef struct { unsigned version, value; } nvmlVersioned_t;
typedef struct { unsigned version; unsigned long long value; } nvmlPdi_t;
typedef struct { unsigned version, type; union { char text[41]; unsigned char bytes[16]; } value; } nvmlUUID_t;
typedef struct { unsigned version, bChannelRepairPending, bTpcRepairPending; } nvmlRepairStatus_t;
typedef struct { unsigned corrActiveRemaps, corrInactiveRemaps, uncActiveRemaps, uncInactiveRemaps, bPending, bFailureOccurred; }
    nvmlRemappedRowsInfo_v2_t;
typedef struct { unsigned max, high, partial, low, none; } nvmlRowRemapperHistogramValues_t;
typedef struct { unsigned long long l1Cache, l2Cache, deviceMemory, registerFile; } nvmlEccErrorCounts_t;

typedef struct {
    unsigned version;
    unsigned long long aggregateUncParity, aggregateUncSecDed, aggregateCor, volatileUncParity, volatileUncSecDed, volatileCor,
        aggregateUncBucketL2, aggregateUncBucketSm, aggregateUncBucketPcie, aggregateUncBucketMcu, aggregateUncBucketOther;
    unsigned bThresholdExceeded;
} nvmlEccSramErrorStatus_t;

typedef struct { unsigned version, environment, ccFeature, devToolsMode, multiGpuMode; } nvmlSystemConfComputeSettings_t;
typedef struct { unsigned environment, ccFeature, devToolsMode; } nvmlConfComputeSystemState_t;
typedef struct { unsigned cpuCaps, gpusCaps; } nvmlConfComputeSystemCaps_t;
typedef struct { unsigned version; char branch[80]; } nvmlSystemDriverBranchInfo_t;
typedef struct { unsigned long long referenceTime, violationTime; } nvmlViolationTime_t;
typedef struct { unsigned mask[8]; } nvmlMask255_t;
typedef struct { unsigned version, profileId, priority; nvmlMask255_t conflictingMask; } nvmlWorkloadPowerProfileInfo_t;
typedef struct {
    unsigned version;
    nvmlMask255_t perfProfilesMask;
    nvmlWorkloadPowerProfileInfo_t perfProfile[255];
} nvmlWorkloadPowerProfileProfilesInfo_t;
typedef struct { unsigned version; nvmlMask255_t perfProfilesMask, requestedProfilesMask, enforcedProfilesMask; }
    nvmlWorkloadPowerProfileCurrentProfiles_t;
typedef struct { unsigned version; nvmlMask255_t requestedProfilesMask; } nvmlWorkloadPowerProfileRequestedProfiles_t;
typedef struct { unsigned operation; nvmlMask255_t updateProfilesMask; } nvmlWorkloadPowerProfileUpdateProfiles_t;
typedef struct { unsigned version, isNvleEnabled; } nvmlNvLinkInfo_v1_t;
typedef struct { unsigned isC2cEnabled; } nvmlC2cModeInfo_t;
typedef struct { unsigned unitCount, driverVersion; } nvmlHwbcEntry_t;
typedef struct {
    unsigned gpuUtilization, memoryUtilization;
    unsigned long long maxMemoryUsage, time, startTime;
    unsigned isRunning, reserved[5];
} nvmlAccountingStats_t;

#endif
