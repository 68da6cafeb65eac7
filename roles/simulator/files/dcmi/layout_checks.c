/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Sizes of the interface's structures, counted by hand from their fields: a build where one differs is no build.
 */
#include "dcmi_types.h"

#define SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type)

SIZE(dcmi_chip_info, 100);
SIZE(dcmi_chip_info_v2, 132);
SIZE(dcmi_pcie_info_all, 64);
SIZE(dcmi_die_id, 20);
SIZE(dcmi_ecc_info, 36);
SIZE(dcmi_hbm_info, 32);
SIZE(dcmi_get_memory_info_stru, 112);
SIZE(dcmi_ip_addr, 20);
SIZE(dcmi_base_resource, 64);
SIZE(dcmi_computing_resource, 96);
SIZE(dcmi_media_resource, 56);
SIZE(dcmi_create_vdev_out, 52);
SIZE(dcmi_create_vdev_res_stru, 104);
SIZE(dcmi_vdev_query_info, 256);
SIZE(dcmi_vdev_query_stru, 264);
SIZE(dcmi_soc_free_resource, 224);
SIZE(dcmi_soc_total_resource, 360);
SIZE(dcmi_spod_info, 48);
SIZE(dcmi_dms_fault_event, 352);
SIZE(dcmi_event, 360);
SIZE(dcmi_event_filter, 48);
SIZE(dcmi_proc_mem_info, 16);
SIZE(dcmi_board_info, 16);
SIZE(dcmi_elabel_info, 1280);
SIZE(dcmi_multi_utilization_info, 48);
SIZE(dcmi_memory_info_stru, 16);
