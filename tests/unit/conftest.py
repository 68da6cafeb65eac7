# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What holds for all unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Where modules keep their records on a node.
RECORDS = Path("/var/lib/dra-accelerators")


def records() -> dict[str, int]:
    """What is there on this machine, each with the time of its last change."""
    found = {}
    for path in RECORDS.rglob("*") if RECORDS.is_dir() else ():
        try:
            found[str(path)] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_of_this_machine() -> Iterator[None]:
    """A test keeps its records in folders of its own, and not where a real node has them."""
    before = records()
    yield
    assert records() == before, f"a test has written to {RECORDS} of this machine"


@pytest.fixture(autouse=True)
def as_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules run as on a node, also where tests of an action have brought the controller's code into this process.

    Ansible's modules would hand their warnings to the controller's display then, and return none.
    """
    internal = sys.modules.get("ansible.module_utils._internal")
    if hasattr(internal, "is_controller"):
        monkeypatch.setattr(internal, "is_controller", False)
