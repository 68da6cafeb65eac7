# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Fixtures for all unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: The directory of the modules' records on a node.
RECORDS = Path("/var/lib/dra-accelerators")


def records() -> dict[str, int]:
    """Return the existing records on this machine with their modification times (ns)."""
    found = {}
    for path in RECORDS.rglob("*") if RECORDS.is_dir() else ():
        try:
            found[str(path)] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_of_this_machine() -> Iterator[None]:
    """Assert that a test keeps its records in temporary directories, not in the directory of a real node."""
    before = records()
    yield
    assert records() == before, f"a test has written to {RECORDS} of this machine"


@pytest.fixture(autouse=True)
def as_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run modules as on a node, also after tests of an action have loaded the controller's code into this process.

    Otherwise Ansible's modules would pass their warnings to the controller's display, and return none.
    """
    internal = sys.modules.get("ansible.module_utils._internal")
    if hasattr(internal, "is_controller"):
        monkeypatch.setattr(internal, "is_controller", False)
