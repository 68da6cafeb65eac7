# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Wait for the events of GPUs: NVML's events for errors and for changes of partitioning."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Callable

from ....discovery.device_workers import Lanes
from ....errors import AcceleratorError, DeviceFaulty
from ....model import NO_ANSWER, Notice
from ..board_facts import BoardFacts
from ..nvml import NO_INSTANCE, Nvml
from . import xids

LANE = "events"
# Seconds. A wait is split into parts of this length. The end of a watch can take this long, and a claim whose GPU is
# bound to another driver waits for it.
PART_SECONDS = 1.0
# Seconds. The time by which NVML may exceed the requested wait, and the deadline for the registration of one GPU.
CALL_SECONDS = 10.0
# Seconds. The pause after a failed part, and its limit. It doubles with each consecutive failure.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
# Seconds. A change event this soon after a change by this process belongs to that change.
OWN_CHANGE_SECONDS = 2.0
# Seconds. The pause after an event of this process's change. The other events of that change follow at once and are
# read together.
GATHER_SECONDS = 0.05
# The maximum number of events that are returned together.
MOST_EVENTS = 64

# From the header nvml.h, nvmlEventType…
XID = 0x8
MIG_CONFIGURATION = 0x100
_NAMES: Mapping[int, str] = MappingProxyType(
    {
        0x2: "double-bit ECC error",
        XID: "Xid",
        MIG_CONFIGURATION: "change of its MIG configuration",
        0x800: "failure to retire memory",
        0x2000: "fatal poison error",
        0x4000: "error that makes it unavailable",
        0x8000: "change of the recovery action that it needs",
    }
)


class Watch:
    """NVML's event set. It is created by the first wait and freed by ``close``."""

    def __init__(self, nvml: Nvml, lanes: Lanes) -> None:
        self._nvml = nvml
        self._lanes = lanes
        self._lock = threading.Lock()
        self._set: Any = None
        self._types: dict[str, int] = {}  # the registered event types by UUID
        self._handles: dict[int | None, str] = {}
        self._change_counts: dict[str, int] = {}
        self._own_changes: dict[str, float] = {}  # the time of this process's last change of a GPU
        self._listened_at = float("-inf")
        self._failures = 0
        self._closing = threading.Event()
        self._waiting = threading.Lock()

    def begin(self) -> None:
        """Allow waiting again after ``close``."""
        self._closing.clear()

    def close(self) -> None:
        """End all waits, and free the event set."""
        self._closing.set()
        if not self._waiting.acquire(timeout=PART_SECONDS + 2 * CALL_SECONDS):
            return  # it hangs in NVML, and ends with that call
        try:
            with contextlib.suppress(AcceleratorError):
                self._release_set()
        finally:
            self._waiting.release()

    @contextlib.contextmanager
    def own_change(self, uuid: str) -> Iterator[None]:
        """Suppress the events of a change of a GPU's partitioning inside the context."""
        with self._lock:
            self._own_changes[uuid] = float("inf")
        try:
            yield
        finally:
            with self._lock:
                self._change_counts[uuid] = self._change_counts.get(uuid, 0) + 1
                self._own_changes[uuid] = time.monotonic()

    def change_count(self, uuid: str) -> int | None:
        """Return a number that differs after each possible change of the partitioning; None if changes would be missed."""
        with self._lock:
            is_listening = time.monotonic() - self._listened_at < PART_SECONDS + CALL_SECONDS
            if not is_listening or not self._types.get(uuid, 0) & MIG_CONFIGURATION:
                return None
            return self._change_counts.get(uuid, 0)

    def wait(self, boards: Callable[[], Sequence[BoardFacts]], seconds: float) -> tuple[Notice, ...]:
        """Wait up to ``seconds`` until one of the GPUs reports an event, and return the events.

        ``boards`` is called for each part of the wait, so that a recovered GPU is registered within seconds.
        """
        deadline, pause = time.monotonic() + seconds, 0.0
        while not self._closing.is_set():
            left = deadline - time.monotonic()
            if left <= 0 or not self._waiting.acquire(timeout=left):
                break
            try:
                notices = () if self._closing.is_set() else self._wait_part(boards(), min(left, PART_SECONDS))
                self._failures = 0
            except AcceleratorError as error:
                # The driver lost a GPU of the set, or NVML has no events. The next wait creates a new set with the healthy
                # GPUs.
                with contextlib.suppress(AcceleratorError):
                    self._release_set()
                pause = min(PAUSE_SECONDS * 2**self._failures, LONGEST_PAUSE_SECONDS)
                self._failures = min(self._failures + 1, 10)
                if isinstance(error, DeviceFaulty) and self._failures == 1:
                    return (Notice("", str(error)),)
            finally:
                self._waiting.release()
            if self._failures:
                self._closing.wait(min(pause, max(deadline - time.monotonic(), 0)))
            elif notices:
                return notices
        return ()

    def forget(self, uuid: str) -> None:
        """Register a GPU again at the next wait, because its handle has changed."""
        with self._lock:
            self._types.pop(uuid, None)

    def _wait_part(self, boards: Sequence[BoardFacts], seconds: float) -> tuple[Notice, ...]:
        self._register(boards)
        listen = partial(self._listen, int(seconds * 1000))
        return self._lanes.run(LANE, listen, seconds + CALL_SECONDS, doing="Waiting for events")

    def _register(self, boards: Sequence[BoardFacts]) -> None:
        with self._lock:
            has_set = self._set is not None
            new = [board for board in boards if board.uuid not in self._types]
        if not has_set:
            self._lanes.run(LANE, self._create_set, CALL_SECONDS, doing="Creating NVML's event set")
        for board in new if has_set else boards:
            doing = f"Registering for the events of GPU {board.uuid}"
            try:
                self._lanes.run(board.uuid, partial(self._register_board, board, doing), CALL_SECONDS, doing=doing)
            except AcceleratorError as error:
                if error.code != NO_ANSWER:
                    self._store_types(board, 0)

    def _create_set(self) -> None:
        created = self._nvml.call("nvmlEventSetCreate", doing="Creating NVML's event set")
        with self._lock:
            self._set = created
            self._types.clear()
            self._handles.clear()

    def _register_board(self, board: BoardFacts, doing: str) -> None:
        found = self._nvml.call("nvmlDeviceGetSupportedEventTypes", board.handle, doing=doing)
        types = int(getattr(found, "value", found)) & sum(_NAMES)
        if types:
            self._nvml.call("nvmlDeviceRegisterEvents", board.handle, types, self._set, doing=doing)
        self._store_types(board, types)

    def _store_types(self, board: BoardFacts, types: int) -> None:
        with self._lock:
            self._types[board.uuid] = types
            self._handles[_address(board.handle)] = board.uuid
            self._change_counts[board.uuid] = (
                self._change_counts.get(board.uuid, 0) + 1
            )  # earlier changes were not detected

    def _listen(self, milliseconds: int) -> tuple[Notice, ...]:
        """Wait for the first event to report, and return it with all other pending events. Runs on the events lane."""
        notices: list[Notice] = []
        until = time.monotonic() + milliseconds / 1000
        while len(notices) < MOST_EVENTS:
            left = 0 if notices else max(int((until - time.monotonic()) * 1000), 0)
            try:
                data = self._nvml.call("nvmlEventSetWait_v2", self._set, left, doing="Waiting for events")
            except AcceleratorError as error:
                if error.code != NO_ANSWER and not notices:
                    raise
                break  # the time is over, or the events read before are returned first
            notice = self._notice(data)
            if notice is not None:
                notices.append(notice)
            elif not notices:
                # Each wakeup of this thread would take the interpreter from the thread that makes the change.
                time.sleep(max(min(GATHER_SECONDS, until - time.monotonic()), 0))
        with self._lock:
            self._listened_at = time.monotonic()
        return tuple(notices)

    def _notice(self, data: Any) -> Notice | None:
        kind, number = int(data.eventType), int(data.eventData)
        with self._lock:
            uuid = self._handles.get(_address(data.device), "")
            is_own_change = time.monotonic() - self._own_changes.get(uuid, float("-inf")) < OWN_CHANGE_SECONDS
            self._change_counts[uuid] = self._change_counts.get(uuid, 0) + 1
        if kind == MIG_CONFIGURATION and is_own_change:
            return None
        instance = int(data.gpuInstanceId)
        instance_id = None if instance == NO_INSTANCE else instance
        if kind == XID:
            description, sign = xids.describe(number), xids.sign_of_xid(number, instance_id)
        else:
            description, sign = _NAMES.get(kind, f"event {kind:#x}"), xids.sign_of_event(kind, instance_id)
        return Notice(uuid, f"GPU {uuid or 'of unknown UUID'} reports {description}", sign)

    def _release_set(self) -> None:
        with self._lock:
            self._listened_at = float("-inf")
            has_set = self._set is not None
        if has_set and LANE not in self._lanes.hung():
            self._lanes.run(LANE, self._free_set, CALL_SECONDS, doing="Freeing NVML's event set")

    def _free_set(self) -> None:
        with self._lock:
            freed, self._set = self._set, None
            self._types.clear()
            self._handles.clear()
            self._listened_at = float("-inf")
        if freed is not None and self._nvml.is_open:
            self._nvml.call("nvmlEventSetFree", freed, doing="Freeing NVML's event set")


def _address(handle: Any) -> int | None:
    """Return the address of a handle, which identifies it."""
    return ctypes.cast(handle, ctypes.c_void_p).value
