# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The driver version and the location in a super-pod, in the output of npu-smi."""

from __future__ import annotations

from dra_driver.core.vendors.ascend.attributes import SuperPod, super_pod
from dra_driver.core.vendors.ascend.families import FAMILIES
from dra_driver.core.vendors.ascend.npu_smi.npu_smi_output import parse_driver_version, parse_super_pod


def test_driver_version_is_read_from_banner() -> None:
    banner = f"| {'npu-smi 24.9.7':<40}{'Version: 24.9.rc3':<55}|\n"
    assert parse_driver_version(f"a warning line\n+---+\n{banner}+---+\n") == "24.9.rc3"
    assert parse_driver_version("| npu-smi v24.9.7 Version: 24.9.rc3|\n") == "24.9.rc3"
    assert parse_driver_version("npu-smi: no such device\n") == ""


def spod_info(**values: object) -> str:
    return "".join(f"\t{name.replace('_', ' '):<30} : {value}\n" for name, value in values.items())


def test_location_in_super_pod_is_read() -> None:
    dies, newest = FAMILIES[0xD803], FAMILIES[0xD806]
    text = spod_info(SDID=16777216, Super_Pod_Size=384, Super_Pod_ID=2, Server_Index=4)
    assert parse_super_pod(text, dies) == SuperPod(2, 4, 16777216)
    # The newest generation reports no number within the super-pod. For a server in a rack it reports the chassis only.
    assert parse_super_pod(spod_info(Super_Pod_Size=64, Super_Pod_ID=0, Server_Index=1), newest) == SuperPod(0, 1)
    assert parse_super_pod(spod_info(Super_Pod_Size=64, Super_Pod_ID=0, Chassis_ID=7), newest) == SuperPod(0, rack=7)
    assert parse_super_pod("This device does not support querying spod-info.\n", dies) is None


def test_super_pod_unknown_values_are_left_out() -> None:
    unknown, dies, newest = 0xFFFFFFFE, FAMILIES[0xD803], FAMILIES[0xD806]
    assert super_pod(dies, unknown, unknown, 0) is None and super_pod(dies, None) is None
    assert super_pod(dies, 7, unknown, 11) == SuperPod(7, None, 11)
    assert super_pod(dies, 7, 2, 11, chassis=3, kind=1) == SuperPod(7, 2, 11)  # this generation numbers no racks
    assert [super_pod(newest, 7, 2, 11, chassis=3, kind=kind) for kind in (0, 1, 2, 5)] == [
        SuperPod(7, 2, 11),
        SuperPod(7, 2, 11, 3),
        SuperPod(7, 2, 11, 3),
        SuperPod(7, 2, 11),
    ]
    assert super_pod(newest, 7, 2, 11, chassis=unknown, kind=1) == SuperPod(7, 2, 11)
