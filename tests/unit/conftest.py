# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What holds for all unit tests."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def as_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules run as on a node, also where tests of an action have brought the controller's code into this process.

    Ansible's modules would hand their warnings to the controller's display then, and return none.
    """
    internal = sys.modules.get("ansible.module_utils._internal")
    if hasattr(internal, "is_controller"):
        monkeypatch.setattr(internal, "is_controller", False)
