// SPDX-License-Identifier: Apache-2.0
// Copyright (c) 2026 The dra.accelerators authors
// The used part of the interface of libnvfm.so.1, by NVIDIA's Fabric Manager User Guide, "Fabric Manager SDK".
#ifndef NVFM_H
#define NVFM_H

enum {
    FM_ST_SUCCESS = 0,
    FM_ST_BADPARAM = -1,
    FM_ST_GENERIC_ERROR = -2,
    FM_ST_NOT_SUPPORTED = -3,
    FM_ST_UNINITIALIZED = -4,
    FM_ST_TIMEOUT = -5,
    FM_ST_VERSION_MISMATCH = -6,
    FM_ST_IN_USE = -7,
    FM_ST_NOT_CONFIGURED = -8,
    FM_ST_CONNECTION_NOT_VALID = -9,
};

#define FM_MAX_STR_LENGTH 256
#define FM_UUID_BUFFER_SIZE 80
#define FM_DEVICE_PCI_BUS_ID_BUFFER_SIZE 32
#define FM_CMD_PORT_NUMBER 6666
#define FM_MAX_NUM_GPUS 16
#define FM_MAX_FABRIC_PARTITIONS 64
#define MAKE_FM_PARAM_VERSION(type, number) (unsigned)(sizeof(type) | ((number) << 24))

typedef void *fmHandle_t;
typedef unsigned fmFabricPartitionId_t;

typedef struct {
    unsigned version;
    char addressInfo[FM_MAX_STR_LENGTH];
    unsigned timeoutMs;
    unsigned addressIsUnixSocket;
} fmConnectParams_t;
#define fmConnectParams_version MAKE_FM_PARAM_VERSION(fmConnectParams_t, 1)

typedef struct {
    unsigned physicalId;
    char uuid[FM_UUID_BUFFER_SIZE];
    char pciBusId[FM_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
    unsigned numNvLinksAvailable;
    unsigned maxNumNvLinks;
    unsigned nvlinkLineRateMBps;
} fmFabricPartitionGpuInfo_t;

typedef struct {
    fmFabricPartitionId_t partitionId;
    unsigned isActive;
    unsigned numGpus;
    fmFabricPartitionGpuInfo_t gpuInfo[FM_MAX_NUM_GPUS];
} fmFabricPartitionInfo_t;

typedef struct {
    unsigned version;
    unsigned numPartitions;
    unsigned maxNumPartitions;
    fmFabricPartitionInfo_t partitionInfo[FM_MAX_FABRIC_PARTITIONS];
} fmFabricPartitionList_t;
#define fmFabricPartitionList_version MAKE_FM_PARAM_VERSION(fmFabricPartitionList_t, 1)

typedef struct {
    unsigned version;
    unsigned numPartitions;
    fmFabricPartitionId_t partitionIds[FM_MAX_FABRIC_PARTITIONS];
} fmActivatedFabricPartitionList_t;
#define fmActivatedFabricPartitionList_version MAKE_FM_PARAM_VERSION(fmActivatedFabricPartitionList_t, 1)

#endif
