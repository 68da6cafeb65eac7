# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""An older generation of Ascend's driver: functions that its library lacks, the format of its npu-smi, and its code
for an occupied chip.
"""

from __future__ import annotations

#: Functions that its library lacks, chosen among those that programs can do without.
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
#: The make argument of its build.
BUILT = f"ABSENT={' '.join(LACKING)}"
#: Statements of the machine: rules that end in plus signs, and -8005 for a chip that another container uses.
STATEMENTS = {"plus-rules": True, "occupied-is-internal": True}
