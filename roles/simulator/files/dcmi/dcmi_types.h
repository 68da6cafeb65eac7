/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The interface of libdcmi.so as programs that open it expect it: numbers, and structures with the compiler's natural alignment.
 */
#ifndef DCMI_TYPES_H
#define DCMI_TYPES_H

enum {
    MAX_CHIP_NAME_LEN = 32,
    TEMPLATE_NAME_LEN = 32,
    DIE_ID_COUNT = 5,
    AGENTDRV_PROF_DATA_NUM = 3,
    MAX_LENGTH = 256,
    DCMI_UTIL_RESERVED_LEN = 8,
    DCMI_VDEV_RES_NAME_LEN = 16,
    DCMI_VDEV_SIZE = 20,
    DCMI_VDEV_FOR_RESERVE = 32,
    DCMI_SOC_SPLIT_MAX = 32,
    DCMI_MAX_EVENT_NAME_LENGTH = 256,
    DCMI_MAX_EVENT_DATA_LENGTH = 32,
    DCMI_MAX_EVENT_RESV_LENGTH = 32,
    HCCS_MAX_PCS_NUM = 16,
    HCCS_RES_PCS_NUM = 64,
    IP_ADDR_LIST_LEN = 1024,
    HCCS_PING_MESH_MAX_NUM = 48,
    ADDR_MAX_LEN = 16,
    UB_PING_MESH_MAX_NUM = 48,
    UB_ADDR_MAX_LEN = 16,
    UB_DST_EIT_MAX_LEN = 64,
    DCMI_URMA_EID_MAX_COUNT = 32,
    DCMI_URMA_EID_SIZE = 16,
};

enum dcmi_ip_addr_type { DCMI_IPADDR_TYPE_V4 = 0, DCMI_IPADDR_TYPE_V6 = 1, DCMI_IPADDR_TYPE_ANY = 2 };
enum dcmi_unit_type { NPU_TYPE = 0, MCU_TYPE = 1, CPU_TYPE = 2, INVALID_TYPE = 0xFF };
enum dcmi_rdfx_detect_result { DCMI_RDFX_DETECT_OK = 0, DCMI_RDFX_DETECT_SOCK_FAIL = 1, DCMI_RDFX_DETECT_RECV_TIMEOUT = 2,
    DCMI_RDFX_DETECT_UNREACH = 3, DCMI_RDFX_DETECT_TIME_EXCEEDED = 4, DCMI_RDFX_DETECT_FAULT = 5, DCMI_RDFX_DETECT_INIT = 6,
    DCMI_RDFX_DETECT_THREAD_ERR = 7, DCMI_RDFX_DETECT_IP_SET = 8, DCMI_RDFX_DETECT_MAX = 0xFF };
enum dcmi_port_type { DCMI_VNIC_PORT = 0, DCMI_ROCE_PORT = 1, DCMI_INVALID_PORT };
enum dcmi_main_cmd { DCMI_MAIN_CMD_DVPP = 0, DCMI_MAIN_CMD_ISP, DCMI_MAIN_CMD_TS_GROUP_NUM, DCMI_MAIN_CMD_CAN, DCMI_MAIN_CMD_UART,
    DCMI_MAIN_CMD_UPGRADE = 5, DCMI_MAIN_CMD_HCCS = 16, DCMI_MAIN_CMD_TEMP = 50, DCMI_MAIN_CMD_SVM = 51, DCMI_MAIN_CMD_VDEV_MNG,
    DCMI_MAIN_CMD_SIO = 56, DCMI_MAIN_CMD_DEVICE_SHARE = 0x8001, DCMI_MAIN_CMD_MAX };
enum dcmi_freq_type { DCMI_FREQ_DDR = 1, DCMI_FREQ_CTRLCPU = 2, DCMI_FREQ_HBM = 6, DCMI_FREQ_AICORE_CURRENT_ = 7, DCMI_FREQ_AICORE_MAX = 9,
    DCMI_FREQ_VECTORCORE_CURRENT = 12 };
enum dcmi_reset_channel { OUTBAND_CHANNEL = 0, INBAND_CHANNEL };
enum dcmi_boot_status { DCMI_BOOT_STATUS_UNINIT = 0, DCMI_BOOT_STATUS_BIOS, DCMI_BOOT_STATUS_OS, DCMI_BOOT_STATUS_FINISH };
enum dcmi_multi_die_policy { DCMI_MULTI_DIE_UNION_POLICY = 0, DCMI_MULTI_DIE_INDEP_POLICY = 1, DCMI_MULTI_DIE_POLICY_MAX = 2 };
enum dcmi_device_type { DCMI_DEVICE_TYPE_DDR, DCMI_DEVICE_TYPE_SRAM, DCMI_DEVICE_TYPE_HBM, DCMI_DEVICE_TYPE_NPU,
    DCMI_DEVICE_TYPE_NONE = 0xff };
enum dcmi_event_type { DCMI_DMS_FAULT_EVENT = 0 };
enum dcmi_die_type { NDIE, VDIE };

struct dcmi_chip_info {
    unsigned char chip_type[MAX_CHIP_NAME_LEN], chip_name[MAX_CHIP_NAME_LEN], chip_ver[MAX_CHIP_NAME_LEN];
    unsigned int aicore_cnt;
};

struct dcmi_chip_info_v2 {
    unsigned char chip_type[MAX_CHIP_NAME_LEN], chip_name[MAX_CHIP_NAME_LEN], chip_ver[MAX_CHIP_NAME_LEN];
    unsigned int aicore_cnt;
    unsigned char npu_name[MAX_CHIP_NAME_LEN];
};

struct dcmi_pcie_info_all {
    unsigned int venderid, subvenderid, deviceid, subdeviceid;
    int domain;
    unsigned int bdf_busid, bdf_deviceid, bdf_funcid;
    unsigned char reserve[32];
};

struct dcmi_ub_id_info {
    unsigned short device_id, vendor_id, module_vendor_id, module_id;
    unsigned char reserved[32];
};

struct dcmi_die_id {
    unsigned int soc_die[DIE_ID_COUNT];
};

struct dcmi_ecc_info {
    int enable_flag;
    unsigned int single_bit_error_cnt, double_bit_error_cnt, total_single_bit_error_cnt, total_double_bit_error_cnt,
        single_bit_isolated_pages_cnt, double_bit_isolated_pages_cnt, single_bit_next_isolated_pages_cnt,
        double_bit_next_isolated_pages_cnt;
};

struct dcmi_hbm_info {
    unsigned long long memory_size;
    unsigned int freq;
    unsigned long long memory_usage;
    int temp;
    unsigned int bandwith_util_rate;
};

struct dcmi_get_memory_info_stru {
    unsigned long long memory_size, memory_available;
    unsigned int freq;
    unsigned long hugepagesize, hugepages_total, hugepages_free;
    unsigned int utiliza;
    unsigned char reserve[60];
};

struct dcmi_ip_addr {
    union { unsigned char ip6[16]; unsigned char ip4[4]; } u_addr;
    enum dcmi_ip_addr_type ip_type;
};

struct dcmi_base_resource {
    unsigned long long token, token_max, task_timeout;
    unsigned int vfg_id;
    unsigned char vip_mode, reserved[DCMI_VDEV_FOR_RESERVE - 1];
};

struct dcmi_computing_resource {
    float aic, aiv;
    unsigned short dsa, rtsq, acsq, cdqm, c_core, ffts, sdma, pcie_dma;
    unsigned long long memory_size;
    unsigned int event_id, notify_id, stream_id, model_id;
    unsigned short topic_schedule_aicpu, host_ctrl_cpu, host_aicpu, device_aicpu, topic_ctrl_cpu_slot;
    unsigned int vdev_aicore_utilization;
    unsigned long long vdev_memory_total, vdev_memory_free;
    unsigned char reserved[DCMI_VDEV_FOR_RESERVE - DCMI_VDEV_SIZE];
};

struct dcmi_media_resource {
    float jpegd, jpege, vpc, vdec, pngd, venc;
    unsigned char reserved[DCMI_VDEV_FOR_RESERVE];
};

struct dcmi_create_vdev_out {
    unsigned int vdev_id, pcie_bus, pcie_device, pcie_func, vfg_id;
    unsigned char reserved[DCMI_VDEV_FOR_RESERVE];
};

struct dcmi_create_vdev_res_stru {
    unsigned int vdev_id, vfg_id;
    char template_name[TEMPLATE_NAME_LEN];
    unsigned char reserved[64];
};

struct dcmi_vdev_query_info {
    char name[DCMI_VDEV_RES_NAME_LEN];
    unsigned int status, is_container_used, vfid, vfg_id;
    unsigned long long container_id;
    struct dcmi_base_resource base;
    struct dcmi_computing_resource computing;
    struct dcmi_media_resource media;
};

struct dcmi_vdev_query_stru {
    unsigned int vdev_id;
    struct dcmi_vdev_query_info query_info;
};

struct dcmi_ub_ping_mesh_operate {
    char src_eid[UB_ADDR_MAX_LEN], dst_eid_list[UB_DST_EIT_MAX_LEN][UB_ADDR_MAX_LEN];
    int dst_num, pkt_size, pkt_send_num, pkt_interval, timeout, task_interval, task_id;
};

struct dcmi_ub_ping_mesh_info {
    char src_eid[UB_ADDR_MAX_LEN], dst_eid_list[UB_DST_EIT_MAX_LEN][UB_ADDR_MAX_LEN];
    unsigned int suc_pkt_num[UB_PING_MESH_MAX_NUM], fail_pkt_num[UB_PING_MESH_MAX_NUM];
    long max_time[UB_PING_MESH_MAX_NUM], min_time[UB_PING_MESH_MAX_NUM], avg_time[UB_PING_MESH_MAX_NUM],
        tp95_time[UB_PING_MESH_MAX_NUM];
    int reply_stat_num[UB_PING_MESH_MAX_NUM];
    unsigned long long ping_total_num[UB_PING_MESH_MAX_NUM];
    int dest_num;
    unsigned long occur_time;
};

struct dcmi_soc_free_resource {
    unsigned int vfg_num, vfg_bitmap;
    struct dcmi_base_resource base;
    struct dcmi_computing_resource computing;
    struct dcmi_media_resource media;
};

struct dcmi_soc_total_resource {
    unsigned int vdev_num, vdev_id[DCMI_SOC_SPLIT_MAX], vfg_num, vfg_bitmap;
    struct dcmi_base_resource base;
    struct dcmi_computing_resource computing;
    struct dcmi_media_resource media;
};

struct dcmi_spod_info {
    unsigned int sdid, scale_type, super_pod_id, server_id, chassis_id, super_pod_type, reserve[6];
};

struct dcmi_dms_fault_event {
    unsigned int event_id;
    unsigned short deviceid;
    unsigned char node_type, node_id, sub_node_type, sub_node_id, severity, assertion;
    int event_serial_num, notify_serial_num;
    unsigned long long alarm_raised_time;
    char event_name[DCMI_MAX_EVENT_NAME_LENGTH], additional_info[DCMI_MAX_EVENT_DATA_LENGTH];
    unsigned char resv[DCMI_MAX_EVENT_RESV_LENGTH];
};

struct dcmi_event {
    enum dcmi_event_type type;
    union { struct dcmi_dms_fault_event dms_event; } event_t;
};

struct dcmi_event_filter {
    unsigned long long filter_flag;
    unsigned int event_id;
    unsigned char severity, node_type, resv[DCMI_MAX_EVENT_RESV_LENGTH];
};

struct dcmi_proc_mem_info {
    int proc_id;
    unsigned long proc_mem_usage;
};

struct dcmi_board_info {
    unsigned int board_id, pcb_id, bom_id, slot_id;
};

struct dcmi_pcie_link_bandwidth_info {
    int profiling_time;
    unsigned int tx_p_bw[AGENTDRV_PROF_DATA_NUM], tx_np_bw[AGENTDRV_PROF_DATA_NUM], tx_cpl_bw[AGENTDRV_PROF_DATA_NUM],
        tx_np_lantency[AGENTDRV_PROF_DATA_NUM], rx_p_bw[AGENTDRV_PROF_DATA_NUM], rx_np_bw[AGENTDRV_PROF_DATA_NUM],
        rx_cpl_bw[AGENTDRV_PROF_DATA_NUM];
};

struct dcmi_hccs_statistic_info {
    unsigned int tx_cnt[HCCS_MAX_PCS_NUM], rx_cnt[HCCS_MAX_PCS_NUM], crc_err_cnt[HCCS_MAX_PCS_NUM], retry_cnt[HCCS_MAX_PCS_NUM],
        reserved_field_cnt[HCCS_RES_PCS_NUM];
};

struct dcmi_hccs_statistic_info_u64 {
    unsigned long long tx_cnt[HCCS_MAX_PCS_NUM], rx_cnt[HCCS_MAX_PCS_NUM], crc_err_cnt[HCCS_MAX_PCS_NUM],
        retry_cnt[HCCS_MAX_PCS_NUM], reserved[HCCS_RES_PCS_NUM];
};

struct dcmi_hccs_bandwidth_info {
    int profiling_time;
    double total_txbw, total_rxbw, tx_bandwidth[HCCS_MAX_PCS_NUM], rx_bandwidth[HCCS_MAX_PCS_NUM];
};

struct dcmi_sio_crc_err_statistic_info {
    unsigned short tx_error_count, rx_error_count;
    unsigned char reserved[8];
};

struct dcmi_elabel_info {
    char product_name[MAX_LENGTH], model[MAX_LENGTH], manufacturer[MAX_LENGTH], manufacturer_date[MAX_LENGTH],
        serial_number[MAX_LENGTH];
};

struct dcmi_hccsping_mesh_operate {
    char dst_addr_list[IP_ADDR_LIST_LEN];
    int pkt_size, pkt_send_num, pkt_interval, timeout, task_interval, task_id;
};

struct dcmi_hccsping_mesh_info {
    char dst_addr[HCCS_PING_MESH_MAX_NUM][ADDR_MAX_LEN];
    unsigned int suc_pkt_num[HCCS_PING_MESH_MAX_NUM], fail_pkt_num[HCCS_PING_MESH_MAX_NUM];
    long max_time[HCCS_PING_MESH_MAX_NUM], min_time[HCCS_PING_MESH_MAX_NUM], avg_time[HCCS_PING_MESH_MAX_NUM],
        tp95_time[HCCS_PING_MESH_MAX_NUM];
    int reply_stat_num[HCCS_PING_MESH_MAX_NUM];
    unsigned long long ping_total_num[HCCS_PING_MESH_MAX_NUM];
    int dest_num;
};

struct dcmi_multi_utilization_info {
    unsigned int aic_util, aiv_util, aicore_util, npu_util, reserved[DCMI_UTIL_RESERVED_LEN];
};

struct dcmi_urma_in4 {
    unsigned long reserved;
    unsigned int prefix, addr;
};

struct dcmi_urma_in6 {
    unsigned long subnet_prefix, interface_id;
};

typedef union dcmi_urma_eid {
    unsigned char raw[DCMI_URMA_EID_SIZE];
    struct dcmi_urma_in4 in4;
    struct dcmi_urma_in6 in6;
} dcmi_urma_eid_t;

struct dcmi_urma_eid_info {
    dcmi_urma_eid_t eid;
    unsigned int eid_index;
};
typedef struct dcmi_urma_eid_info dcmi_urma_eid_info_t;

struct dcmi_ub_port_info {
    int udie_id, port_id;
};

struct dcmi_port_pkt_stats_info {
    int port_mode;
    unsigned long long ub_glb_ipv4_pkt_cnt_rx, ub_glb_ipv6_pkt_cnt_rx, unic_ipv4_pkt_cnt_rx, unic_ipv6_pkt_cnt_rx,
        ub_clan_pkt_cnt_rx, ub_umoc_ctph_cnt_rx, ub_umoc_ntph_cnt_rx, ub_mem_pkt_cnt_rx, unknown_pkt_cnt_rx, drop_ind_cnt_rx,
        err_ind_cnt_rx, to_host_pkt_cnt_rx, to_imp_pkt_cnt_rx, to_mar_pkt_cnt_rx, to_link_pkt_cnt_rx, to_noc_pkt_cnt_rx,
        route_err_cnt_rx, out_err_cnt_rx, length_err_cnt_rx, rx_busi_flit_num, rx_send_ack_flit, ub_glb_ipv4_pkt_cnt_tx,
        ub_glb_ipv6_pkt_cnt_tx, unic_ipv4_pkt_cnt_tx, unic_ipv6_pkt_cnt_tx, ub_clan_pkt_cnt_tx, ub_umoc_ctph_cnt_tx,
        ub_umoc_ntph_cnt_tx, ub_mem_pkt_cnt_tx, unknown_pkt_cnt_tx, drop_ind_cnt_tx, err_ind_cnt_tx, lpbk_ind_cnt_tx,
        out_err_cnt_tx, length_err_cnt_tx, tx_busi_flit_num, tx_recv_ack_flit, retry_req_sum, retry_ack_sum, crc_error_sum,
        core_mib_rxpausepkts, core_mib_txpausepkts, core_mib_rxpfcpkts, core_mib_txpfcpkts, core_mib_rxbadpkts, core_mib_txbadpkts,
        core_mib_rxbadoctets, core_mib_txbadoctets, reserved[16];
};

struct dcmi_memory_info_stru {
    unsigned long long memory_size;
    unsigned int freq, utiliza;
};

#endif
