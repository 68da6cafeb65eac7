# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Simulate disks that lose power: a file system in an image that is copied while mounted. A mounted copy is the disk
after the power cut.

The loop device writes to the image only what the file system has sent to its disk. Data only in the page cache is not
in the copy.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.unit.crash_steps import at_each_step

ROOT = Path(__file__).resolve().parents[2]
#: By file system: size in MiB (the minimum of mkfs.xfs), and options to mount a copy with the same UUID next to the
#: original.
KINDS = {"ext4": (512, "loop"), "xfs": (512, "loop,nouuid")}
#: btrfs cannot be mounted together with a copy of itself.
FILE_SYSTEMS = {**KINDS, "btrfs": (256, "loop")}
_fsync = os.fsync


class Disk:
    """A mounted file system and its copies. ``node`` is the mount point."""

    def __init__(self, folder: Path, kind: str) -> None:
        subprocess.run([ROOT / "tests/tools/packages", "disks"], check=True)
        self.folder = folder
        self.image = folder / "disk"
        self.node = folder / "node"
        self.cuts = 0
        size, self._options = FILE_SYSTEMS[kind]
        with self.image.open("wb") as file:
            file.truncate(size * 1024 * 1024)
        subprocess.run([f"mkfs.{kind}", "-q", self.image], check=True, timeout=60)
        self.node.mkdir()

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Mount the disk, and unmount it at the end."""
        with self._mounted(self.image, self.node) as node:
            yield node

    def sync(self) -> None:
        """Write everything to the disk."""
        subprocess.run(["sync", "--file-system", self.node], check=True, timeout=120)

    def commit_journal(self) -> None:
        """Make the file system commit its journal, as it does every few seconds: names are then on the disk, unsynced
        data is not.
        """
        descriptor = os.open(self.node / ".journal", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(descriptor, b"x")
            _fsync(descriptor)
        finally:
            os.close(descriptor)

    def cut(self, number: int) -> None:
        """Copy the current image."""
        copy = ["cp", "--sparse=always", self.image, self.folder / f"cut-{number}.disk"]
        subprocess.run(copy, check=True, timeout=120)

    @contextlib.contextmanager
    def after(self, number: int) -> Iterator[Path]:
        """Mount a copy, and delete it at the end."""
        image, place = self.folder / f"cut-{number}.disk", self.folder / f"cut-{number}"
        place.mkdir()
        try:
            with self._mounted(image, place):
                yield place
        finally:
            place.rmdir()
            image.unlink()

    @contextlib.contextmanager
    def _mounted(self, image: Path, place: Path) -> Iterator[Path]:
        subprocess.run(["mount", "-o", self._options, image, place], check=True, timeout=60)
        try:
            yield place
        finally:
            subprocess.run(["umount", place], check=True, timeout=120)

    def cut_at_each_step(self, work: Callable[[], object], below: str = "") -> Iterator[tuple[str, Path]]:
        """Cut the power before each file operation of ``work``, after the last, and again after the journal is
        committed.

        Yields each step ("end" for the last two) with the mounted disk after the cut. Only files in the node's
        directory ``below`` count.
        """

        def act(number: int) -> None:
            self.commit_journal()
            self.cut(number)

        steps = at_each_step(work, self.node / below if below else self.node, act)
        assert steps
        self.cut(len(steps))
        self.commit_journal()
        self.cut(len(steps) + 1)
        for number, step in enumerate([*steps, "end", "end"]):
            with self.after(number) as node:
                yield step, node
