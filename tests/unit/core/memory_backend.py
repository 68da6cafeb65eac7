# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A backend in memory for tests of the executor. It follows the independent model and can fail at a selected call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import board_model
from dra_driver.core.errors import AcceleratorError, DoesNotFit, InUse, NotFound, Unsupported
from dra_driver.core.model import Device, Partition, Placement


class MemoryBackend:
    """One device. ``fail_at`` is the number of the changing call, from 0, that fails."""

    def __init__(self, board: str, device: Device, fail_at: int | None = None) -> None:
        self.board = board
        self.present = device
        self.fail_at = fail_at
        self.calls: list[str] = []
        self._next_id = 100

    def state(self) -> tuple[object, ...]:
        """Return the current layout."""
        partitions = tuple((each.profile_id, each.placement) for each in self.present.partitions)
        return (self.present.partitioning, partitions)

    def device(self, uuid: str) -> Device:
        return self.present

    def set_partitioning(self, uuid: str, enabled: bool) -> None:
        self._called(f"mode {enabled}")
        if not enabled and self.present.partitions:
            raise InUse("partitions are left")
        mode = self.present.partitioning
        now = mode.enabled if mode.needs_reset else enabled
        self.present = replace(self.present, partitioning=replace(mode, pending=enabled, enabled=now))

    def reset(self, uuids: Sequence[str]) -> None:
        self._called("reset")
        mode = self.present.partitioning
        self.present = replace(self.present, partitioning=replace(mode, enabled=mode.pending), partitions=())

    def create_partition(self, uuid: str, profile_id: int, placement: Placement) -> Partition:
        self._called(f"create {profile_id} {placement}")
        if not self.present.partitioning.enabled:
            raise Unsupported("partitioning is off")
        places = tuple((each.profile_id, each.placement.start) for each in self.present.partitions)
        if not board_model.can_exist(self.board, (*places, (profile_id, placement.start))):
            raise DoesNotFit("no room")
        profile = self.present.profile(profile_id)
        assert profile is not None
        self._next_id += 1
        made = board_model.partition(profile, placement.start, uuid, self._next_id)
        self._keep((*self.present.partitions, made))
        return made

    def destroy_partition(self, uuid: str, instance_id: int) -> None:
        self._called(f"destroy {instance_id}")
        rest = tuple(each for each in self.present.partitions if each.instance_id != instance_id)
        if len(rest) == len(self.present.partitions):
            raise NotFound("no such instance")
        self._keep(rest)

    def _keep(self, partitions: tuple[Partition, ...]) -> None:
        self.present = replace(self.present, partitions=tuple(sorted(partitions, key=lambda each: each.placement)))

    def _called(self, what: str) -> None:
        number = len(self.calls)
        self.calls.append(what)
        if number == self.fail_at:
            raise AcceleratorError("the call failed", code="injected")
