# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Every systemd unit of the collection limits its memory and its processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROLES = Path(__file__).resolve().parents[3] / "roles"
#: The relief includes the driver's own template.
UNITS = [path for path in sorted(ROLES.glob("*/templates/*.service.j2")) if "relief" not in path.name]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_limits_memory_and_tasks(path: Path) -> None:
    text = path.read_text("utf-8")
    assert re.search(r"^MemoryMax=\d+(M|G|%)$", text, re.MULTILINE), path
    assert re.search(r"^TasksMax=\d+$", text, re.MULTILINE), path


def test_controller_has_file_descriptors_for_many_connections() -> None:
    """Idle connections to the webhook's port, which needs no certificate, must not cost the controller its Lease."""
    text = (ROLES / "dra_controller/templates/dra-accelerators-controller.service.j2").read_text("utf-8")
    assert "\nLimitNOFILE=65536\n" in text


def test_units_are_found() -> None:
    assert len(UNITS) >= 11
