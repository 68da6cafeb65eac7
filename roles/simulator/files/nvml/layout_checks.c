/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The published sizes of NVML's structures: a build where one differs is no build.
 */
#include "nvml_types.h"

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)

SIZE(nvmlPciInfo_t, 68);
SIZE(nvmlPciInfoExt_t, 64);
SIZE(nvmlMemory_t, 24);
SIZE(nvmlMemory_v2_t, 40);
SIZE(nvmlProcessInfo_v1_t, 16);
SIZE(nvmlProcessInfo_t, 24);
SIZE(nvmlProcessDetail_t, 32);
SIZE(nvmlProcessDetailList_t, 24);
SIZE(nvmlGpuInstancePlacement_t, 8);
SIZE(nvmlGpuInstanceProfileInfo_t, 48);
SIZE(nvmlGpuInstanceProfileInfo_v2_t, 152);
SIZE(nvmlGpuInstanceProfileInfo_v3_t, 152);
SIZE(nvmlGpuInstanceInfo_t, 24);
SIZE(nvmlComputeInstanceInfo_t, 32);
SIZE(nvmlComputeInstanceProfileInfo_t, 36);
SIZE(nvmlComputeInstanceProfileInfo_v2_t, 136);
SIZE(nvmlDeviceAttributes_t, 40);
SIZE(nvmlEventData_t, 32);
SIZE(nvmlFieldValue_t, 40);
SIZE(nvmlGpuFabricInfo_v2_t, 36);
SIZE(nvmlGpuFabricInfo_v3_t, 40);
SIZE(nvmlGpuFabricInfo_v4_t, 548);
SIZE(nvmlPlatformInfo_t, 44);
SIZE(nvmlPowerValue_v2_t, 12);
SIZE(nvmlTemperature_t, 12);
SIZE(nvmlWorkloadPowerProfileInfo_t, 44);
SIZE(nvmlWorkloadPowerProfileProfilesInfo_t, 11256);
SIZE(nvmlWorkloadPowerProfileCurrentProfiles_t, 100);
SIZE(nvmlWorkloadPowerProfileRequestedProfiles_t, 36);
SIZE(nvmlWorkloadPowerProfileUpdateProfiles_t, 36);
SIZE(nvmlEccSramErrorStatus_t, 104);
SIZE(nvmlSystemConfComputeSettings_t, 20);
SIZE(nvmlPdi_t, 16);
SIZE(nvmlUUID_t, 52);
SIZE(nvmlVersioned_t, 8);
SIZE(nvmlRepairStatus_t, 12);
SIZE(nvmlSystemDriverBranchInfo_t, 84);
SIZE(nvmlAccountingStats_t, 56);
