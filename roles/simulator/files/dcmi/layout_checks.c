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
SIZE(dcmi_ub_id_info, 40);
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
SIZE(dcmi_ub_ping_mesh_operate, 1068);
SIZE(dcmi_ub_ping_mesh_info, 3552);
SIZE(dcmi_pcie_link_bandwidth_info, 88);
SIZE(dcmi_hccs_statistic_info, 512);
SIZE(dcmi_hccs_statistic_info_u64, 1024);
SIZE(dcmi_hccs_bandwidth_info, 280);
SIZE(dcmi_sio_crc_err_statistic_info, 12);
SIZE(dcmi_hccsping_mesh_operate, 1048);
SIZE(dcmi_hccsping_mesh_info, 3272);
SIZE(dcmi_urma_in4, 16);
SIZE(dcmi_urma_in6, 16);
SIZE(dcmi_urma_eid_info, 24);
SIZE(dcmi_ub_port_info, 8);
SIZE(dcmi_port_pkt_stats_info, 520);
