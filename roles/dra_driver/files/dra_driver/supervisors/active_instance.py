# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Select the active instance of one driver on this node, when an old and a new instance run at the same time.

The instance with the lock ``driver.lock`` is active: it writes the store, prepares claims, and publishes. A new
instance requests a handover by the lock ``locks/successor.lock``, which it keeps until the active one has released its
lock. The kernel releases the locks of an ended process. After a handover the old instance becomes the standby: it takes
over when the lock is free, and never requests it. A note file survives its process, so a restarted standby does not
request it either. Otherwise two instances would hand over to each other forever. The note is deleted when the instance
stops regularly, and is valid for one boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from ..core.discovery.device_locks import DeviceLocks
from ..core.errors import AcceleratorError
from ..kubelet.sockets import LOCK_UNUSABLE, SocketError, lock_instance
from ..logs import StateLog

LOG = logging.getLogger(__name__)

PART = "turn"
SUCCESSOR = "successor"
NOTE = "handed-over"
# Seconds between checks: of a requesting instance for the free lock, of a standby for the same, and of the active one
# for requests.
ASKING_SECONDS, STANDBY_SECONDS, CHECK_SECONDS = 0.1, 1.0, 0.5
# Seconds between attempts to write a lock file.
DISK_SECONDS = 2.0


class Turn:
    """The lock of the active instance. ``instance`` is "" if this instance is not a pod."""

    def __init__(self, directory: str, instance: str, boot_id: str) -> None:
        self._directory = directory
        self._instance = instance
        self._boot_id = boot_id
        self._note = Path(directory) / NOTE
        self._asking = DeviceLocks(directory, f"instance {instance}" if instance else "the driver's service")
        self._file: IO[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this instance is active."""
        return self._file is not None

    def take(self) -> bool:
        """Become active if no instance is, and no other one has requested it. Return whether this instance is active.

        Raises SocketError, also if another process of the same instance is active.
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
        """Become active if no instance is. Wait while the disk is full or read-only. Raises SocketError."""
        return await self._retry(self.take)

    async def _retry(self, attempt: Callable[[], bool]) -> bool:
        """Return the result of an attempt, which is repeated while a lock cannot be used, as on a full disk. Raises SocketError."""
        state = StateLog(LOG)
        while True:
            try:
                return attempt()
            except AcceleratorError as error:
                if error.code != LOCK_UNUSABLE:
                    raise
                state.report(str(error), level=logging.ERROR)
                await asyncio.sleep(DISK_SECONDS)

    async def ask(self) -> None:
        """Request a handover from the active instance, and wait for it.

        Several requests are served one after the other. Raises SocketError.
        """
        try:
            while not await self._retry(self._take_as_successor):
                await asyncio.sleep(ASKING_SECONDS)
        finally:
            self._asking.drop(SUCCESSOR)

    def _take_as_successor(self) -> bool:
        return (self._asking.holds(SUCCESSOR) or self._asking.take(SUCCESSOR)) and self.take()

    async def stand_by(self) -> None:
        """Wait until no instance is active or requests it, and become active. Raises SocketError."""
        while not await self.begin():
            await asyncio.sleep(STANDBY_SECONDS)

    async def asked(self) -> str:
        """Wait until another instance requests a handover. Return its name."""
        while not await self._retry(partial(self._asking.is_taken, SUCCESSOR)):
            await asyncio.sleep(CHECK_SECONDS)
        return self._asking.holder_of(SUCCESSOR)

    def hand_over(self) -> None:
        """Write the note of a handover, and release the lock."""
        text = json.dumps({"instance": self._instance, "boot_id": self._boot_id}) + "\n"
        try:
            self._note.write_text(text, encoding="utf-8")
        except OSError as error:
            LOG.warning("%s cannot be written: %s", self._note, error)
        self.drop()

    def drop(self) -> None:
        """Release the lock without a note."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @property
    def was_handed_over(self) -> bool:
        """Return whether this instance handed over in this boot, and has not stopped regularly since."""
        try:
            noted = json.loads(self._note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(noted == {"instance": self._instance, "boot_id": self._boot_id})

    def forget(self) -> None:
        """Delete this instance's note, because it stops regularly or is active again."""
        if self.was_handed_over:
            with contextlib.suppress(OSError):
                self._note.unlink()
