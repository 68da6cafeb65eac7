# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The summary of all chips in the layouts of four generations, with invented values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from dra_driver.core.vendors.ascend.attributes import SuperPod, super_pod
from dra_driver.core.vendors.ascend.families import FAMILIES
from dra_driver.core.vendors.ascend.npu_smi.npu_smi_output import UnreadOutput
from dra_driver.core.vendors.ascend.npu_smi.npu_smi_summary import (
    ProcessRow,
    SummaryRow,
    place_in_super_pod,
    summary,
)
from hypothesis import given
from hypothesis import strategies as st

PARTS = (27, 15, 52)


def line(*parts: str) -> str:
    return "|" + "|".join(f" {text:<{width - 1}}" for text, width in zip(parts, PARTS)) + "|\n"


def rule(mark: str) -> str:
    return "+" + "+".join(mark * width for width in PARTS) + "+\n"


def table(heads: tuple[tuple[str, str, str], tuple[str, str, str]], *chips: Sequence[tuple[str, str, str]]) -> str:
    body = "".join(line(*each) for chip in chips for each in chip) + rule("=")
    banner = f"| {'npu-smi 24.9.7':<40}{'Version: 24.9.rc3':<55}|\n"
    return "a warning line\n" + rule("-") + banner + rule("-") + "".join(line(*h) for h in heads) + rule("=") + body


PROCESSES = (
    "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
    "+===========================+===============+==========================+=========================+\n"
    "| 4       1                 | 4711          | train                    | 812                     |\n"
    "+===========================+===============+==========================+=========================+\n"
    "| No process uses NPU 5                                                                          |\n"
)
HBM = (
    ("NPU   Name", "Health", "Power(W)    Temp(C)           Hugepages-Usage(page)"),
    ("Chip", "Bus-Id", "AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)"),
)


def test_summary_hbm_chips_with_processes() -> None:
    text = table(
        HBM,
        [
            ("4     910B3", "OK", "91.5        45                0    / 15"),
            ("1", "0000:C1:00.0", "37          0    / 0          3180 / 65536"),
        ],
        [
            ("5     910B3", "Alarm", "-           NA                0/0"),
            ("0", "0000:C2:00.0", "0           0/0               0/ 65536"),
        ],
    )
    found = summary(text + PROCESSES)
    assert (found.tool, found.driver) == ("24.9.7", "24.9.rc3")
    assert found.chips == (
        SummaryRow(4, 1, "910B3", "OK", None, None, "0000:C1:00.0", 91.5, 45.0, 37.0, 3180, 65536),
        SummaryRow(5, 0, "910B3", "Alarm", None, None, "0000:C2:00.0", None, None, 0.0, 0, 65536),
    )
    assert found.processes == (ProcessRow(4, 1, 4711, "train", 812),)
    assert summary(text).processes == ()


def test_summary_310p_and_container_with_slice() -> None:
    heads = (HBM[0], ("Chip / Device", "Bus-Id", "AICore(%)   Memory-Usage(MB)"))
    rows = [
        ("8     310Pvir01", "OK", "NA          48                0    / 0"),
        ("0     3", "0000:3B:00.0", "0           1621 / 2690"),
    ]
    (found,) = summary(table(heads, rows)).chips
    assert (found.name, found.chip, found.logic_id, found.memory_total) == ("310Pvir01", 0, 3, 2690)
    assert found.physical_id is None and found.power is None


@pytest.mark.parametrize("names", ["Chip  Phy-ID", "Chip Phy-ID", "Chip / Phy-ID"])
def test_summary_module_of_two_dies(names: str) -> None:
    heads = (HBM[0], (names, "Bus-Id", HBM[1][2]))
    rows = [
        ("3     Ascend910", "OK", "170.2       40                0    / 0"),
        ("0     6", "0000:9D:00.0", "0           0    / 0          100  / 65536"),
        ("3     Ascend910", "OK", "-           41                0    / 0"),
        ("1     7", "0000:9F:00.0", "0           0    / 0          100  / 65536"),
    ]
    found = summary(table(heads, rows)).chips
    assert [(each.card, each.chip, each.physical_id) for each in found] == [(3, 0, 6), (3, 1, 7)]


def test_summary_generation_without_chip_column() -> None:
    heads = (
        ("NPU ID    Name", "Health", "Power(W)    Temp(C)           Hugepages-Usage(page)"),
        ("", "Bus-Id", "NPU Util(%)  Memory-Usage(MB)  HBM-Usage(MB)"),
    )
    rows = [
        ("2         950", "OK", "300.0       50                0    / 0"),
        ("", "NA", "12           0/0               5 / 131072"),
    ]
    (found,) = summary(table(heads, rows)).chips
    assert (found.card, found.chip, found.bus_id, found.busy, found.memory_total) == (2, 0, "", 12.0, 131072)


def spod_info(**values: object) -> str:
    return "".join(f"\t{name.replace('_', ' '):<30} : {value}\n" for name, value in values.items())


def test_place_in_super_pod_is_read() -> None:
    dies, newest = FAMILIES[0xD803], FAMILIES[0xD806]
    text = spod_info(SDID=16777216, Super_Pod_Size=384, Super_Pod_ID=2, Server_Index=4)
    assert place_in_super_pod(text, dies) == SuperPod(2, 4, 16777216)
    # The newest generation reports no number within the super-pod. For a server in a rack it reports the chassis only.
    assert place_in_super_pod(spod_info(Super_Pod_Size=64, Super_Pod_ID=0, Server_Index=1), newest) == SuperPod(0, 1)
    assert place_in_super_pod(spod_info(Super_Pod_Size=64, Super_Pod_ID=0, Chassis_ID=7), newest) == SuperPod(0, rack=7)
    assert place_in_super_pod("This device does not support querying spod-info.\n", dies) is None


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


@given(st.text("|+-=:/ \nNPUHealthPower(W)Chip0123456789", max_size=200))
def test_readers_any_text_raises_only_unread_output(text: str) -> None:
    try:
        summary(text)
    except UnreadOutput:
        return
