# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A node with an NVIDIA driver in a directory, for tests of container edits."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host.system import Completed, DeviceNumber, Stamp, System

VERSION = "580.95.05"
FOLDER = "/usr/lib/x86_64-linux-gnu"
CONTROL = {"/dev/nvidiactl": (195, 255), "/dev/nvidia-uvm": (510, 0), "/dev/nvidia-uvm-tools": (510, 1)}
DEVICES = """Character devices:
  1 mem
195 nvidia
234 nvidia-caps
510 nvidia-uvm

Block devices:
195 not-this-one
"""


class Node(System):
    """A system in a directory with a table of device nodes. The directory itself has no device nodes."""

    def __init__(self, root: Path, nodes: dict[str, tuple[int, int]] | None = None) -> None:
        super().__init__(str(root))
        self.nodes = nodes or {}
        self.answers: list[Completed | AcceleratorError] = []
        self.commands: list[tuple[str, ...]] = []
        self.reads = 0
        self.file("/proc/devices", DEVICES)

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber("c", *self.nodes[path]) if path in self.nodes else None

    def make_character_device(self, path: str, major: int, minor: int, mode: int) -> bool:
        return self.nodes.setdefault(path, (major, minor)) == (major, minor)

    def remove(self, path: str) -> bool:
        return self.nodes.pop(path, None) is not None or super().remove(path)

    def fingerprint(self, paths) -> tuple[Stamp, ...]:  # type: ignore[no-untyped-def]
        paths = tuple(paths)
        found = super().fingerprint(paths)
        return tuple(self.nodes.get(path) or seen for path, seen in zip(paths, found))

    def list_directory(self, path: str) -> tuple[str, ...]:
        self.reads += 1
        return super().list_directory(path)

    def run(self, argv, timeout: float, input=None) -> Completed:  # type: ignore[no-untyped-def]  # noqa: A002
        self.commands.append(tuple(argv))
        answer = self.answers.pop(0)
        if isinstance(answer, AcceleratorError):
            raise answer
        return answer

    def file(self, path: str, text: str = "") -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def link(self, path: str, target: str) -> None:
        self.path(path).symlink_to(target)

    def listen(self, path: str) -> None:
        """Create a socket. Its path can be longer than a socket address."""
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        here = Path.cwd()
        os.chdir(target.parent)
        try:
            socket.socket(socket.AF_UNIX).bind(target.name)
        finally:
            os.chdir(here)

    def driver(self, directory: str = FOLDER, version: str = VERSION) -> None:
        """Create the files and nodes that CUDA requires."""
        self.nodes.update(CONTROL)
        for name in ("libcuda", "libnvidia-ml"):
            self.file(f"{directory}/{name}.so.{version}")
