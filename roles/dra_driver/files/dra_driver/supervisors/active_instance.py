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

PART = "turn"  # the published name of this part in the status and the metrics
SUCCESSOR = "successor"  # the name of the lock of a requesting instance
NOTE = "handed-over"  # the name of the note file
# Seconds between two checks whether the lock is free, of a requesting instance and of a standby.
REQUEST_SECONDS, STANDBY_SECONDS = 0.1, 1.0
# Seconds between two checks of the active instance for requests.
CHECK_SECONDS = 0.5
# Seconds between attempts to write a lock file.
DISK_SECONDS = 2.0


class ActiveInstanceLock:
    """The lock of the active instance in the driver's state directory. ``instance`` is the pod's instance name, "" outside a pod."""

    def __init__(self, directory: str, instance: str, boot_id: str) -> None:
        self._directory = directory
        self._instance = instance
        self._boot_id = boot_id
        self._note_path = Path(directory) / NOTE
        self._request_locks = DeviceLocks(directory, f"instance {instance}" if instance else "the driver's service")
        self._file: IO[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this instance is active: it has the lock."""
        return self._file is not None

    def try_acquire(self) -> bool:
        """Take the lock if it is free and no other instance has requested it. Return whether this instance is active.

        Raises SocketError, also if another process with the same instance name is active.
        """
        if self._file is not None:
            return True
        if not self._request_locks.holds(SUCCESSOR) and self._request_locks.is_taken(SUCCESSOR):
            return False
        try:
            self._file = lock_instance(self._directory, self._instance)
        except SocketError as error:
            if error.code != "another-instance":
                raise
            return False
        return True

    async def acquire_or_wait_for_disk(self) -> bool:
        """Take the lock if it is free. Wait while the disk is full or read-only. Return whether this instance is active.

        Raises SocketError.
        """
        return await self._retry(self.try_acquire)

    async def _retry(self, attempt: Callable[[], bool]) -> bool:
        """Return the result of ``attempt``. Repeat it while lock files cannot be written, for example on a full disk.

        Raises SocketError.
        """
        state = StateLog(LOG)
        while True:
            try:
                return attempt()
            except AcceleratorError as error:
                if error.code != LOCK_UNUSABLE:
                    raise
                state.report(str(error), level=logging.ERROR)
                await asyncio.sleep(DISK_SECONDS)

    async def request_handover(self) -> None:
        """Request a handover from the active instance, and wait until this instance is active.

        The active instance serves one request at a time. Raises SocketError.
        """
        try:
            while not await self._retry(self._try_acquire_as_successor):
                await asyncio.sleep(REQUEST_SECONDS)
        finally:
            self._request_locks.drop(SUCCESSOR)

    def _try_acquire_as_successor(self) -> bool:
        return (self._request_locks.holds(SUCCESSOR) or self._request_locks.take(SUCCESSOR)) and self.try_acquire()

    async def wait_until_free(self) -> None:
        """Wait until the lock is free and not requested, and take it. Raises SocketError."""
        while not await self.acquire_or_wait_for_disk():
            await asyncio.sleep(STANDBY_SECONDS)

    async def wait_for_request(self) -> str:
        """Wait until another instance requests a handover. Return its name."""
        while not await self._retry(partial(self._request_locks.is_taken, SUCCESSOR)):
            await asyncio.sleep(CHECK_SECONDS)
        return self._request_locks.holder_of(SUCCESSOR)

    def hand_over(self) -> None:
        """Write the note file, and release the lock."""
        text = json.dumps({"instance": self._instance, "boot_id": self._boot_id}) + "\n"
        try:
            self._note_path.write_text(text, encoding="utf-8")
        except OSError as error:
            LOG.warning("%s cannot be written: %s", self._note_path, error)
        self.release()

    def release(self) -> None:
        """Release the lock without writing a note file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @property
    def was_handed_over(self) -> bool:
        """Return whether this instance handed over in this boot, and has not stopped regularly since."""
        try:
            note = json.loads(self._note_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(note == {"instance": self._instance, "boot_id": self._boot_id})

    def delete_note(self) -> None:
        """Delete the note file of this instance, because it stops regularly or is active again."""
        if self.was_handed_over:
            with contextlib.suppress(OSError):
                self._note_path.unlink()
