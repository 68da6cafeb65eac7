# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Whose turn it is to serve one driver's state on this node, where an old and a new instance run beside each other.

Who holds the lock ``driver.lock`` writes the store, prepares claims and publishes. An instance that comes up beside it takes
the lock ``locks/successor.lock`` and keeps it until the holder has let go: that is how it asks. The kernel drops the locks of a
process that ends, however it ends. An instance that has handed over stays, and takes up again when nobody holds the lock any
more; it asks for nothing. A note outlives its process, so that it does not ask either when it is started again, for else two
instances would ask each other in turns. The note goes when the instance is stopped in order, and counts for one boot only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from pathlib import Path
from typing import IO

from ..core.device_locks import DeviceLocks
from ..kubelet.sockets import LOCK_UNUSABLE, SocketError, lock_instance
from ..logs import StateLog

LOG = logging.getLogger(__name__)

PART = "turn"
SUCCESSOR = "successor"
NOTE = "handed-over"
# How often an instance that has asked looks whether the lock is free, one that has handed over, and the holder who asks.
ASKING_SECONDS, STANDBY_SECONDS, LOOK_SECONDS = 0.1, 1.0, 0.5
# How often it is tried again to write a lock.
DISK_SECONDS = 2.0


class Turn:
    """One instance's turn. ``instance`` is "" for the one that is no pod."""

    def __init__(self, directory: str, instance: str, boot_id: str) -> None:
        self._directory = directory
        self._instance = instance
        self._boot_id = boot_id
        self._note = Path(directory) / NOTE
        self._asking = DeviceLocks(directory, f"instance {instance}" if instance else "the driver's service")
        self._file: IO[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is this instance's turn."""
        return self._file is not None

    def take(self) -> bool:
        """Take the turn if nobody has it, and nobody else has asked for it; returns whether it is ours.

        Raises SocketError, also where another process of this very instance has it.
        """
        if self._file is not None:
            return True
        if not self._asking.holds(SUCCESSOR) and self._asking.is_taken(SUCCESSOR):
            return False
        try:
            self._file = lock_instance(self._directory, self._instance)
        except SocketError as error:
            if error.code != "another-instance":
                raise
            return False
        return True

    async def begin(self) -> bool:
        """Take the turn if nobody has it; waits while the disk is full or read-only. Raises SocketError."""
        state = StateLog(LOG)
        while True:
            try:
                return self.take()
            except SocketError as error:
                if error.code != LOCK_UNUSABLE:
                    raise
                state.report(str(error), level=logging.ERROR)
                await asyncio.sleep(DISK_SECONDS)

    async def ask(self) -> None:
        """Ask whoever holds it to hand over, and wait until it is ours; where several ask, one after the other. Raises SocketError."""
        try:
            while True:
                if (self._asking.holds(SUCCESSOR) or self._asking.take(SUCCESSOR)) and await self.begin():
                    return
                await asyncio.sleep(ASKING_SECONDS)
        finally:
            self._asking.drop(SUCCESSOR)

    async def stand_by(self) -> None:
        """Wait until nobody holds it or asks for it, and take it. Raises SocketError."""
        while not await self.begin():
            await asyncio.sleep(STANDBY_SECONDS)

    async def asked(self) -> str:
        """Wait until another instance asks; returns which."""
        while not self._asking.is_taken(SUCCESSOR):
            await asyncio.sleep(LOOK_SECONDS)
        return self._asking.holder_of(SUCCESSOR)

    def hand_over(self) -> None:
        """Note that this instance has handed over, and let go."""
        text = json.dumps({"instance": self._instance, "boot_id": self._boot_id}) + "\n"
        try:
            self._note.write_text(text, encoding="utf-8")
        except OSError as error:
            LOG.warning("%s cannot be written: %s", self._note, error)
        self.drop()

    def drop(self) -> None:
        """Let go; nothing is noted."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @property
    def was_handed_over(self) -> bool:
        """Whether this instance handed over since the machine started, and was not stopped in order since."""
        try:
            noted = json.loads(self._note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(noted == {"instance": self._instance, "boot_id": self._boot_id})

    def forget(self) -> None:
        """Take this instance's note away: it is stopped in order, or serves again."""
        if self.was_handed_over:
            with contextlib.suppress(OSError):
                self._note.unlink()
