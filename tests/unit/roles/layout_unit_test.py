# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The order at boot of the unit that applies the MIG layout."""

from __future__ import annotations

import re
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[3] / "roles/nvidia_mig/templates/dra-accelerators-layout.service.j2"


def units(option: str) -> set[str]:
    """Return the units that an option of the unit file names."""
    lines = re.findall(rf"^{option}=(.*)$", TEMPLATE.read_text("utf-8"), re.MULTILINE)
    return {unit for line in lines for unit in line.split()}


def test_layout_unit_starts_after_daemons_of_the_driver() -> None:
    assert {"nvidia-persistenced.service", "nvidia-fabricmanager.service"} <= units("After")


def test_layout_unit_starts_before_programs_that_open_gpus() -> None:
    dcgm = {"nvidia-dcgm.service", "dcgm.service", "nvidia-dcgm-exporter.service", "dcgm-exporter.service"}
    assert dcgm | {"dra-accelerators-driver.service", "kubelet.service"} <= units("Before")


def test_layout_unit_requires_no_other_unit() -> None:
    """A node without these programs, or with a failed one, gets its layout nevertheless."""
    assert not units("Requires") | units("Wants") | units("BindsTo") | units("Requisite")
    assert not units("After") & units("Before")
