# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""NVIDIA's driver as what is installed, loaded and unloaded, for machines that come without one.

The kernel module is a text with the lines ``version=580.95.05`` and ``loads=yes``, or ``loads=no`` for one that no kernel takes. A start
of the machine loads what is installed, as a kernel does that finds its GPUs; later ``load`` and ``unload`` do it, and what is installed meanwhile
waits for them.
"""

from __future__ import annotations

from pathlib import Path

from .errors import SimulatorError

#: The version that is loaded, nothing where none is; a start of the machine takes the file away.
LOADED = "/run/accelerator-simulator-nvidia"


class KernelModule:
    """The module whose text is at ``path``, on the machine below ``root``."""

    def __init__(self, root: str, path: str) -> None:
        self.path = Path(root + path)
        self._loaded = Path(root + LOADED)

    def installed(self) -> str:
        """The version that would be loaded; empty where none is installed. A SimulatorError where no kernel takes it."""
        if not self.path.is_file():
            return ""
        said = dict(line.partition("=")[::2] for line in self.path.read_text(encoding="utf-8").splitlines())
        if not said.get("version"):
            raise SimulatorError(f"{self.path} has no line version=…: it is no stand-in of a kernel module")
        if said.get("loads") == "no":
            raise SimulatorError(f"{self.path}: the kernel does not take version {said['version']}")
        return said["version"]

    def version(self) -> str:
        """The version that is loaded, or that a start of the machine loads; empty where none is."""
        if self._loaded.is_file():
            return self._loaded.read_text(encoding="utf-8").strip()
        try:
            return self.installed()
        except SimulatorError:
            return ""

    def begin(self) -> None:
        """Keep what a start of the machine has loaded."""
        self._note(self.version())

    def load(self) -> None:
        """Load what is installed; what is loaded already stays. A SimulatorError where there is nothing, or nothing that loads."""
        if self.version() and self._loaded.is_file():
            return
        version = self.installed()
        if not version:
            raise SimulatorError(f"{self.path} does not exist: no kernel module is installed")
        self._note(version)

    def unload(self) -> None:
        """Unload it; there need not be any."""
        self._note("")

    def _note(self, version: str) -> None:
        self._loaded.parent.mkdir(parents=True, exist_ok=True)
        self._loaded.write_text(f"{version}\n", encoding="utf-8")
