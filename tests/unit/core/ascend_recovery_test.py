# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Slices of /etc/vnpu.cfg that the vendor's script creates at boot."""

from __future__ import annotations

from pathlib import Path

import pytest
from dra_driver.core.host.system import System
from dra_driver.core.vendors.ascend.recovery import describe_unrestored, parse

TEXT = """vnpu_config_recover:enable
[vnpu-config start]
0:100:npu-smi set -t create-vnpu -i 0 -c 0 -f vir01 -v 100 -g 3
3:151:npu-smi set -t create-vnpu -i 1 -c 1 -f vir04 -v 151 -g 2
3:152:npu-smi set -t create-vnpu -i 1 -c 1 -f vir02 -v 152 -g 3
[vnpu-config end]
"""


def test_slices_are_read_by_the_physical_id_of_their_chip() -> None:
    assert parse(TEXT) == {0: frozenset({100}), 3: frozenset({151, 152})}


@pytest.mark.parametrize(
    "text", ["", "vnpu_config_recover:enable\n", TEXT.replace(":enable", ":disable"), "3:151:rm -rf /\n"]
)
def test_slices_without_line_or_with_recovery_off_are_not_restored(text: str) -> None:
    assert parse(text) == {}


def test_machine_without_file_or_uptime_restores_nothing(tmp_path: Path) -> None:
    assert describe_unrestored(System(str(tmp_path)), tuple) == ""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("3.0 1.0\n")
    assert describe_unrestored(System(str(tmp_path)), tuple) == ""
