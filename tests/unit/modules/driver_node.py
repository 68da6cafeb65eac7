# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node for installations of the NVIDIA driver. Its source has four versions: one does not build, and one does not load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.modules import nvidia_driver
from nvidia_machine import H100, OPEN, PROPRIETARY, FakeApt, Machine

CATALOG = [
    {
        "modules": kind,
        "build": "dkms",
        "components": "compute",
        "packages": ["nvidia-driver-cuda", name],
        "persistence": ["nvidia-persistenced"],
    }
    for kind, name in (("open", OPEN), ("proprietary", PROPRIETARY))
]
OLDER, NEWER, FAILING, UNLOADABLE = "580.65.06", "580.95.05", "590.48.66", "590.48.99"
RECORD = "var/lib/dra-accelerators/nvidia"


class Node:
    """A node on which the module runs."""

    def __init__(self, root: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = Machine(root)
        self.machine.gpu("0000:3b:00.0", H100)
        self.apt = FakeApt(self.machine, [UNLOADABLE, FAILING, NEWER, OLDER])
        self.apt.fails.add(FAILING)
        self.machine.broken_loads.add(UNLOADABLE)
        self._run = run_here
        monkeypatch.setattr(nvidia_driver, "System", lambda: self.machine)
        monkeypatch.setattr(nvidia_driver, "tool_of", lambda system, timeout: self.apt)

    def run(self, version: str = "", *, check: bool = False, **options: Any) -> dict[str, Any]:
        fixed = {
            "catalog": CATALOG,
            "state_path": "",
            "services": ["dra-accelerators-driver.service", "nvidia-persistenced.service"],
        }
        return self._run("nvidia_driver", {"version": version, **fixed, **options}, check=check, diff=True)

    def versions(self) -> set[str]:
        return {version for name, version in self.apt.installed.items() if "nvidia" in name or "cuda" in name}

    def record(self) -> dict[str, Any]:
        path = self.machine.path(f"/{RECORD}/record.json")
        return json.loads(path.read_text()) if path.exists() else {}

    def use(self) -> None:
        """Let a program hold a GPU."""
        self.machine.put_file("/dev/nvidia0", "")
        self.machine.put_file("/proc/4711/comm", "training\n")
        self.machine.path("/proc/4711/fd").mkdir()
        self.machine.path("/proc/4711/fd/5").symlink_to("/dev/null")
