# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The older one of two generations of Ascend's driver: what its library lacks, how its npu-smi draws, and how it says what is occupied."""

from __future__ import annotations

#: What its library does not have yet; chosen among what programs do without.
LACKING = (
    "dcmi_get_device_boot_status",
    "dcmi_get_device_chip_info_v2",
    "dcmi_get_device_multi_utilization_rate",
    "dcmi_get_device_multi_utilization_rate_period",
    "dcmi_get_device_network_health",
    "dcmi_get_hccs_link_bandwidth_info",
    "dcmi_get_mainboard_id",
    "dcmi_get_multi_die_policy",
    "dcmi_get_spod_node_status",
    "dcmi_set_multi_die_policy",
    "dcmi_set_spod_node_status",
)
#: The word of its build.
BUILT = f"ABSENT={' '.join(LACKING)}"
#: Statements of the machine: rules that end in plus signs, and -8005 to whom another container keeps from a chip.
STATEMENTS = {"plus-rules": True, "occupied-is-internal": True}
