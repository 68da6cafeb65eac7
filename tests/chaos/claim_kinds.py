# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Kinds of claims: their allocation, and the stages that they pass. Each vendor has its own kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dra_driver.stages import PREPARE, UNPREPARE

STATIC = "a partition of the layout"
#: Stages that only some kinds pass: those that change a partition, settings, a companion program, or a device's driver.
MODE = frozenset({"partitioning-changed", "partitioning-restored"})
SLICES = frozenset({"partition-created", "partition-destroyed"})
PARTITIONS = MODE | SLICES
SETTINGS = frozenset({"settings-applied", "settings-restored"})
COMPANIONS = frozenset({"companion-started", "companions-stopped"})
PASSTHROUGH = frozenset({"handed-over", "taken-back"})
#: No kind has GPUs of an NVSwitch fabric partition: fabric_claims_test.py and test_32_fabric.py kill the driver there.
FABRIC = frozenset({"fabric-activated", "fabric-deactivated"})
_OF_SOME_KINDS = PARTITIONS | SETTINGS | COMPANIONS | PASSTHROUGH | FABRIC
FIRST_SHARE, SECOND_SHARE = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"


@dataclass(frozen=True)
class Kind:
    """One kind of claims."""

    name: str
    #: The devices of the allocation, or its complete results.
    results: tuple[str | Mapping[str, Any], ...]
    config: tuple[Mapping[str, Any], ...] = ()
    #: Its stages in addition to those of all kinds.
    stages_of_kind: frozenset[str] = frozenset()
    partitions: int = 0
    #: Whether the claim is prepared before its pod is bound.
    before_binding: bool = False
    #: Kinds with a prepared claim during the whole run of this kind.
    prepared_neighbors: tuple[str, ...] = ()

    def stages(self, all_stages: tuple[str, ...]) -> tuple[str, ...]:
        """Return the stages of prepare or unprepare that a claim of this kind passes, including those of the last of several partitions."""
        found = [stage for stage in all_stages if stage not in _OF_SOME_KINDS or stage in self.stages_of_kind]
        if self.partitions > 1:
            found += [
                f"{stage}:{self.partitions}" for stage in found if stage in ("partition-created", "partition-destroyed")
            ]
        return tuple(found)

    @property
    def prepare_stages(self) -> tuple[str, ...]:
        return self.stages(PREPARE)

    @property
    def unprepare_stages(self) -> tuple[str, ...]:
        # The first stage is the kubelet's call. An abandoned claim is undone without it.
        return self.stages(UNPREPARE[1:] if self.before_binding else UNPREPARE)


def opaque(driver: str, **parameters: Any) -> dict[str, Any]:
    """Return an opaque configuration for a driver."""
    return {"opaque": {"driver": driver, "parameters": parameters}}
