# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The vendor of a file by its path, for the table of lines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools/lines.py"


@pytest.fixture(scope="module")
def lines() -> Any:
    spec = importlib.util.spec_from_file_location("lines_of_vendors", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "vendor", "part"),
    [
        ("plugins/module_utils/core/vendors/ascend/npu_smi/npu_smi_output.py", "ascend", "core"),
        ("plugins/module_utils/core/vendors/nvidia/nvml.py", "nvidia", "core"),
        ("plugins/module_utils/core/vendors/registry.py", "shared", "core"),
        ("plugins/modules/ascend_vnpu.py", "ascend", "modules and filters"),
        ("plugins/filter/npu_claim.py", "ascend", "modules and filters"),
        ("plugins/modules/nvidia_mig.py", "nvidia", "modules and filters"),
        ("roles/simulator/files/dcmi/vnpu.c", "ascend", "simulator"),
        ("roles/simulator/files/nvml/api_mig.c", "nvidia", "simulator"),
        ("roles/simulator/files/common/state.c", "shared", "simulator"),
        ("roles/simulator/files/machines/2xH100-2x310P.json", "nvidia", "simulator"),
        ("roles/dra_driver/files/dra_driver/claims/plan.py", "shared", "node driver and controller"),
        ("tests/simulator/npu_smi_test.py", "ascend", "tests"),
        ("tests/simulator/nvml_mig_test.py", "nvidia", "tests"),
        ("tests/unit/core/input_test.py", "shared", "tests"),
        ("examples/ascend/near-npus.yaml", "ascend", "examples and docs"),
        ("LICENSE", "shared", ""),
    ],
)
def test_vendor_and_part_of_a_file(lines: Any, path: str, vendor: str, part: str) -> None:
    assert (lines.vendor_of(path), lines.part_of(path)) == (vendor, part)


def test_table_counts_all_tracked_files(lines: Any) -> None:
    rows = lines.current_lines()
    assert set(rows) == set(lines.PARTS) and all(set(row) == {"shared", "ascend", "nvidia"} for row in rows.values())
    assert all(int(rows["core"][name]) > 1000 for name in rows["core"])
    total = sum(lines.lines_of(path) for path in lines.counted_paths(lines.tracked_paths()))
    assert sum(int(count) for row in rows.values() for count in row.values()) == total
    printed = lines.format_table(rows)
    assert len(printed) == len(rows) + 1 and len({len(line) for line in printed}) == 1
    assert (
        lines.counted_paths(["roles/dra_driver/files/dra_driver/protocol/dra_v1_pb2.py", "LICENSE", "docs/x.png"]) == []
    )
