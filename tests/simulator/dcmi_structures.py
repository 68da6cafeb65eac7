# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The structures of DCMI in the memory layout of a program without its header: a table of fields, and ctypes generated
from it.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

TYPES: dict[str, Any] = {
    "u8": ctypes.c_ubyte,
    "u16": ctypes.c_ushort,
    "u32": ctypes.c_uint,
    "u64": ctypes.c_ulonglong,
    "ulong": ctypes.c_ulong,
    "int": ctypes.c_int,
    "long": ctypes.c_long,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
}

#: Type and fields, separated by semicolons. A type can be an earlier structure.
TABLE = {
    "chip_info": "u8 chip_type[32],chip_name[32],chip_ver[32]; u32 aicore_cnt",
    "chip_info_v2": "u8 chip_type[32],chip_name[32],chip_ver[32]; u32 aicore_cnt; u8 npu_name[32]",
    "pcie_info_all": "u32 venderid,subvenderid,deviceid,subdeviceid; int domain; u32 bdf_busid,bdf_deviceid,bdf_funcid; u8 reserve[32]",
    "ub_id_info": "u16 device_id,vendor_id,module_vendor_id,module_id; u8 reserved[32]",
    "die_id": "u32 soc_die[5]",
    "ecc_info": "int enable_flag; u32 single,double,total_single,total_double,s_pages,d_pages,s_next,d_next",
    "hbm_info": "u64 memory_size; u32 freq; u64 memory_usage; int temp; u32 bandwith_util_rate",
    "get_memory_info_stru": "u64 memory_size,memory_available; u32 freq; ulong hugepagesize,hugepages_total,hugepages_free;"
    " u32 utiliza; u8 reserve[60]",
    "memory_info_stru": "u64 memory_size; u32 freq,utiliza",
    "ip_addr": "u8 address[16]; u32 ip_type",
    "base_resource": "u64 token,token_max,task_timeout; u32 vfg_id; u8 vip_mode,reserved[31]",
    "computing_resource": "float aic,aiv; u16 dsa,rtsq,acsq,cdqm,c_core,ffts,sdma,pcie_dma; u64 memory_size;"
    " u32 event_id,notify_id,stream_id,model_id; u16 topic,host_ctrl_cpu,host_aicpu,device_aicpu,topic_slot;"
    " u32 vdev_aicore_utilization; u64 vdev_memory_total,vdev_memory_free; u8 reserved[12]",
    "media_resource": "float jpegd,jpege,vpc,vdec,pngd,venc; u8 reserved[32]",
    "create_vdev_out": "u32 vdev_id,pcie_bus,pcie_device,pcie_func,vfg_id; u8 reserved[32]",
    "create_vdev_res_stru": "u32 vdev_id,vfg_id; char template_name[32]; u8 reserved[64]",
    "vdev_query_info": "char name[16]; u32 status,is_container_used,vfid,vfg_id; u64 container_id; base_resource base;"
    " computing_resource computing; media_resource media",
    "vdev_query_stru": "u32 vdev_id; vdev_query_info query_info",
    "soc_free_resource": "u32 vfg_num,vfg_bitmap; base_resource base; computing_resource computing; media_resource media",
    "soc_total_resource": "u32 vdev_num,vdev_id[32],vfg_num,vfg_bitmap; base_resource base; computing_resource computing;"
    " media_resource media",
    "spod_info": "u32 sdid,scale_type,super_pod_id,server_id,chassis_id,super_pod_type,reserve[6]",
    "dms_fault_event": "u32 event_id; u16 deviceid; u8 node_type,node_id,sub_node_type,sub_node_id,severity,assertion;"
    " int event_serial_num,notify_serial_num; u64 alarm_raised_time; char event_name[256],additional_info[32]; u8 resv[32]",
    "event": "u32 type; dms_fault_event dms_event",
    "event_filter": "u64 filter_flag; u32 event_id; u8 severity,node_type,resv[32]",
    "proc_mem_info": "int proc_id; ulong proc_mem_usage",
    "board_info": "u32 board_id,pcb_id,bom_id,slot_id",
    "elabel_info": "char product_name[256],model[256],manufacturer[256],manufacturer_date[256],serial_number[256]",
    "multi_utilization_info": "u32 aic_util,aiv_util,aicore_util,npu_util,reserved[8]",
    "ub_ping_mesh_operate": "char src_eid[16],dst_eid_list[1024]; int dst_num,pkt_size,pkt_send_num,pkt_interval,timeout,task_interval,task_id",
    "ub_ping_mesh_info": "char src_eid[16],dst_eid_list[1024]; u32 suc_pkt_num[48],fail_pkt_num[48];"
    " long max_time[48],min_time[48],avg_time[48],tp95_time[48]; int reply_stat_num[48]; u64 ping_total_num[48]; int dest_num; ulong occur_time",
    "pcie_link_bandwidth_info": "int profiling_time; u32 tx_p_bw[3],tx_np_bw[3],tx_cpl_bw[3],tx_np_lantency[3],rx_p_bw[3],rx_np_bw[3],rx_cpl_bw[3]",
    "hccs_statistic_info": "u32 tx_cnt[16],rx_cnt[16],crc_err_cnt[16],retry_cnt[16],reserved_field_cnt[64]",
    "hccs_statistic_info_u64": "u64 tx_cnt[16],rx_cnt[16],crc_err_cnt[16],retry_cnt[16],reserved[64]",
    "hccs_bandwidth_info": "int profiling_time; double total_txbw,total_rxbw,tx_bandwidth[16],rx_bandwidth[16]",
    "sio_crc_err_statistic_info": "u16 tx_error_count,rx_error_count; u8 reserved[8]",
    "hccsping_mesh_operate": "char dst_addr_list[1024]; int pkt_size,pkt_send_num,pkt_interval,timeout,task_interval,task_id",
    "hccsping_mesh_info": "char dst_addr[768]; u32 suc_pkt_num[48],fail_pkt_num[48];"
    " long max_time[48],min_time[48],avg_time[48],tp95_time[48]; int reply_stat_num[48]; u64 ping_total_num[48]; int dest_num",
    "urma_in4": "ulong reserved; u32 prefix,addr",
    "urma_in6": "ulong subnet_prefix,interface_id",
    "urma_eid_info": "urma_in6 eid; u32 eid_index",
    "ub_port_info": "int udie_id,port_id",
    "port_pkt_stats_info": "int port_mode; u64 "
    "ub_glb_ipv4_pkt_cnt_rx,ub_glb_ipv6_pkt_cnt_rx,unic_ipv4_pkt_cnt_rx,unic_ipv6_pkt_cnt_rx,"
    "ub_clan_pkt_cnt_rx,ub_umoc_ctph_cnt_rx,ub_umoc_ntph_cnt_rx,ub_mem_pkt_cnt_rx,unknown_pkt_cnt_rx,"
    "drop_ind_cnt_rx,err_ind_cnt_rx,to_host_pkt_cnt_rx,to_imp_pkt_cnt_rx,to_mar_pkt_cnt_rx,"
    "to_link_pkt_cnt_rx,to_noc_pkt_cnt_rx,route_err_cnt_rx,out_err_cnt_rx,length_err_cnt_rx,"
    "rx_busi_flit_num,rx_send_ack_flit,ub_glb_ipv4_pkt_cnt_tx,ub_glb_ipv6_pkt_cnt_tx,"
    "unic_ipv4_pkt_cnt_tx,unic_ipv6_pkt_cnt_tx,ub_clan_pkt_cnt_tx,ub_umoc_ctph_cnt_tx,"
    "ub_umoc_ntph_cnt_tx,ub_mem_pkt_cnt_tx,unknown_pkt_cnt_tx,drop_ind_cnt_tx,err_ind_cnt_tx,"
    "lpbk_ind_cnt_tx,out_err_cnt_tx,length_err_cnt_tx,tx_busi_flit_num,tx_recv_ack_flit,"
    "retry_req_sum,retry_ack_sum,crc_error_sum,core_mib_rxpausepkts,core_mib_txpausepkts,"
    "core_mib_rxpfcpkts,core_mib_txpfcpkts,core_mib_rxbadpkts,core_mib_txbadpkts,"
    "core_mib_rxbadoctets,core_mib_txbadoctets"
    ",reserved[16]",
}


def _build() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, text in TABLE.items():
        fields = []
        for statement in text.split(";"):
            kind, rest = statement.split(maxsplit=1)
            base = TYPES.get(kind) or made[kind]
            for field in rest.split(","):
                match = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", field.strip())
                assert match, field
                fields.append((match[1], base * int(match[2]) if match[2] else base))
        made[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return made


STRUCTURES: dict[str, Any] = _build()


def encode(value: Any) -> Any:
    """Return a structure as JSON data. Byte arrays are strings up to their zero."""
    if isinstance(value, ctypes.Structure):
        return {field[0]: encode(getattr(value, field[0])) for field in value._fields_}
    if isinstance(value, ctypes.Array):
        if value._type_ is ctypes.c_ubyte:
            return bytes(value).split(b"\0")[0].decode("latin-1")
        return [encode(item) for item in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value
