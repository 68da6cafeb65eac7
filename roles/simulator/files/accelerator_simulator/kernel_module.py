# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Simulate the installation, loading, and unloading of NVIDIA's driver, for machines without a driver.

The kernel module is a text file with the lines ``version=580.95.05`` and ``loads=yes``, or ``loads=no`` for a module
that the kernel rejects. A boot loads the installed module, like a kernel that detects its GPUs. Afterwards only
``load`` and ``unload`` change the loaded version, so a module installed later is not loaded automatically.
"""

from __future__ import annotations

from pathlib import Path

from .errors import SimulatorError

#: The loaded version, empty if none is loaded. A boot removes the file.
LOADED = "/run/accelerator-simulator-nvidia"


class KernelModule:
    """The module whose text is at ``path``, on the machine below ``root``."""

    def __init__(self, root: str, path: str) -> None:
        self.path = Path(root + path)
        self._loaded = Path(root + LOADED)

    def installed(self) -> str:
        """Return the installed version; empty if none is installed. Raise a SimulatorError if the kernel rejects it."""
        if not self.path.is_file():
            return ""
        said = dict(line.partition("=")[::2] for line in self.path.read_text(encoding="utf-8").splitlines())
        if not said.get("version"):
            raise SimulatorError(f"{self.path} has no line version=…: it is no stand-in of a kernel module")
        if said.get("loads") == "no":
            raise SimulatorError(f"{self.path}: the kernel does not take version {said['version']}")
        return said["version"]

    def version(self) -> str:
        """Return the loaded version, or the version that a boot loads; empty for no module."""
        if self._loaded.is_file():
            return self._loaded.read_text(encoding="utf-8").strip()
        try:
            return self.installed()
        except SimulatorError:
            return ""

    def begin(self) -> None:
        """Record the version that the boot has loaded."""
        self._note(self.version())

    def load(self) -> None:
        """Load the installed version unless one is loaded. Raise a SimulatorError for a missing or rejected module."""
        if self.version() and self._loaded.is_file():
            return
        version = self.installed()
        if not version:
            raise SimulatorError(f"{self.path} does not exist: no kernel module is installed")
        self._note(version)

    def unload(self) -> None:
        """Unload the module, if one is loaded."""
        self._note("")

    def _note(self, version: str) -> None:
        self._loaded.parent.mkdir(parents=True, exist_ok=True)
        self._loaded.write_text(f"{version}\n", encoding="utf-8")
