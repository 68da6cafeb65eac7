# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The structures of DCMI that are used, with the library's layout, and a function that reads their strings."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_float, c_int, c_ubyte, c_uint, c_ulong, c_ulonglong, c_ushort
from typing import Any


class ChipInfo(ctypes.Structure):
    """``dcmi_chip_info_v2``; the older version has no ``npu_name``."""

    _fields_ = (
        ("chip_type", c_ubyte * 32),
        ("chip_name", c_ubyte * 32),
        ("chip_version", c_ubyte * 32),
        ("cores", c_uint),
        ("npu_name", c_ubyte * 32),
    )


class UnifiedBusInfo(ctypes.Structure):
    """``dcmi_ub_id_info``."""

    _fields_ = (
        ("device", c_ushort),
        ("vendor", c_ushort),
        ("module_vendor", c_ushort),
        ("module", c_ushort),
        ("reserved", c_ubyte * 32),
    )


class PciInfo(ctypes.Structure):
    """``dcmi_pcie_info_all``."""

    _fields_ = (
        ("vendor", c_uint),
        ("subsystem_vendor", c_uint),
        ("device", c_uint),
        ("subsystem_device", c_uint),
        ("domain", c_int),
        ("bus", c_uint),
        ("slot", c_uint),
        ("function", c_uint),
        ("reserved", c_ubyte * 32),
    )


class DieId(ctypes.Structure):
    """``dcmi_die_id``."""

    _fields_ = (("words", c_uint * 5),)


class HbmInfo(ctypes.Structure):
    """``dcmi_hbm_info``; sizes in MB."""

    _fields_ = (
        ("size", c_ulonglong),
        ("frequency", c_uint),
        ("used", c_ulonglong),
        ("temperature", c_int),
        ("bandwidth_rate", c_uint),
    )


class MemoryInfo(ctypes.Structure):
    """``dcmi_get_memory_info_stru``; sizes in MB."""

    _fields_ = (
        ("size", c_ulonglong),
        ("available", c_ulonglong),
        ("frequency", c_uint),
        ("hugepage_size", c_ulong),
        ("hugepages", c_ulong),
        ("hugepages_free", c_ulong),
        ("rate", c_uint),
        ("reserved", c_ubyte * 60),
    )


class BoardInfo(ctypes.Structure):
    """``dcmi_board_info``."""

    _fields_ = (("board", c_uint), ("pcb", c_uint), ("bom", c_uint), ("slot", c_uint))


class Label(ctypes.Structure):
    """``dcmi_elabel_info``."""

    _fields_ = (
        ("product", c_char * 256),
        ("model", c_char * 256),
        ("manufacturer", c_char * 256),
        ("manufactured", c_char * 256),
        ("serial", c_char * 256),
    )


class ProcessMemory(ctypes.Structure):
    """``dcmi_proc_mem_info``; memory in bytes."""

    _fields_ = (("pid", c_int), ("memory", c_ulong))


class BaseResource(ctypes.Structure):
    """``dcmi_base_resource``."""

    _fields_ = (
        ("token", c_ulonglong),
        ("token_max", c_ulonglong),
        ("task_timeout", c_ulonglong),
        ("group", c_uint),
        ("vip_mode", c_ubyte),
        ("reserved", c_ubyte * 31),
    )


class ComputingResource(ctypes.Structure):
    """``dcmi_computing_resource``; memory in MB."""

    _fields_ = (
        ("cores", c_float),
        ("vector_cores", c_float),
        ("counts", c_ushort * 8),  # dsa, rtsq, acsq, cdqm, c_core, ffts, sdma, pcie_dma
        ("memory", c_ulonglong),
        ("ids", c_uint * 4),  # event, notify, stream, model
        ("schedule_helpers", c_ushort),
        ("host_control", c_ushort),
        ("host_helpers", c_ushort),
        ("helpers", c_ushort),  # the AICPUs of the device
        ("control_slot", c_ushort),
        ("utilization", c_uint),
        ("memory_total", c_ulonglong),
        ("memory_free", c_ulonglong),
        ("reserved", c_ubyte * 12),
    )


class MediaResource(ctypes.Structure):
    """``dcmi_media_resource``."""

    _fields_ = (
        ("jpegd", c_float),
        ("jpege", c_float),
        ("vpc", c_float),
        ("vdec", c_float),
        ("pngd", c_float),
        ("venc", c_float),
        ("reserved", c_ubyte * 32),
    )


class CreateSlice(ctypes.Structure):
    """``dcmi_create_vdev_res_stru``."""

    _fields_ = (("slice_id", c_uint), ("group", c_uint), ("template", c_char * 32), ("reserved", c_ubyte * 64))


class CreatedSlice(ctypes.Structure):
    """``dcmi_create_vdev_out``."""

    _fields_ = (
        ("slice_id", c_uint),
        ("bus", c_uint),
        ("slot", c_uint),
        ("function", c_uint),
        ("group", c_uint),
        ("reserved", c_ubyte * 32),
    )


class SliceInfo(ctypes.Structure):
    """``dcmi_vdev_query_info``."""

    _fields_ = (
        ("template", c_char * 16),
        ("status", c_uint),
        ("is_container_used", c_uint),
        ("function", c_uint),
        ("group", c_uint),
        ("container", c_ulonglong),
        ("base", BaseResource),
        ("computing", ComputingResource),
        ("media", MediaResource),
    )


class SliceQuery(ctypes.Structure):
    """``dcmi_vdev_query_stru``."""

    _fields_ = (("slice_id", c_uint), ("info", SliceInfo))


class TotalResource(ctypes.Structure):
    """``dcmi_soc_total_resource``."""

    _fields_ = (
        ("count", c_uint),
        ("slice_ids", c_uint * 32),
        ("groups", c_uint),
        ("group_bits", c_uint),
        ("base", BaseResource),
        ("computing", ComputingResource),
        ("media", MediaResource),
    )


class FreeResource(ctypes.Structure):
    """``dcmi_soc_free_resource``."""

    _fields_ = (
        ("groups", c_uint),
        ("group_bits", c_uint),
        ("base", BaseResource),
        ("computing", ComputingResource),
        ("media", MediaResource),
    )


class SuperPodInfo(ctypes.Structure):
    """``dcmi_spod_info``."""

    _fields_ = (
        ("number", c_uint),
        ("scale", c_uint),
        ("pod", c_uint),
        ("server", c_uint),
        ("chassis", c_uint),
        ("type", c_uint),
        ("reserved", c_uint * 6),
    )


class FaultEvent(ctypes.Structure):
    """``dcmi_dms_fault_event``."""

    _fields_ = (
        ("code", c_uint),
        ("logic_id", c_ushort),
        ("node_type", c_ubyte),
        ("node_id", c_ubyte),
        ("sub_node_type", c_ubyte),
        ("sub_node_id", c_ubyte),
        ("severity", c_ubyte),
        ("assertion", c_ubyte),
        ("serial", c_int),
        ("notify_serial", c_int),
        ("raised", c_ulonglong),
        ("name", c_char * 256),
        ("additional", c_char * 32),
        ("reserved", c_ubyte * 32),
    )


class Event(ctypes.Structure):
    """``dcmi_event``, with its only type."""

    _fields_ = (("type", c_int), ("fault", FaultEvent))


class EventFilter(ctypes.Structure):
    """``dcmi_event_filter``; all zeros select every event."""

    _fields_ = (
        ("flags", c_ulonglong),
        ("code", c_uint),
        ("severity", c_ubyte),
        ("node_type", c_ubyte),
        ("reserved", c_ubyte * 32),
    )


def text(value: Any) -> str:
    """Return the string in an array of bytes or characters, up to its zero."""
    return bytes(value).split(b"\0")[0].decode("utf-8", "replace").strip()
