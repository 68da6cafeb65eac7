# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Compare the disturbances of the same layout change on a node: with this collection's plan, and with the steps of
nvidia-mig-parted.

The steps of nvidia-mig-parted were read in its sources (NVIDIA/mig-parted, cmd/nvidia-mig-parted/apply/mode.go and
config.go, pkg/mig/config/config.go). The implementation here is our own. If the mode of any GPU differs, each GPU of
the layout is cleared and its mode is set. If one of them needs a reset for that, all GPUs of the node are reset at
once. Then each GPU whose profile counts differ from the desired ones is cleared and partitioned again, without control
of the placements. It evicts no pod: pods must leave the cleared GPUs first, or the GPU refuses. So each pod on them
counts as disturbed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dra_driver.core.model import Device
from dra_driver.core.partitioning.rules import parse_rules
from dra_driver.core.repartition.operations import plan_operations
from dra_driver.core.store.prepared_claims import PreparedPartition
from dra_driver.core.vendors.nvidia import offers

from tests.unit.core.board_model import device

#: Layout of one GPU: number of partitions by profile, or None for a whole GPU with MIG off.
Layout = Mapping[str, int] | None


@dataclass(frozen=True)
class Outcome:
    """The disturbances of a change. ``touched`` counts GPUs that are changed in any way."""

    destroyed: int = 0
    touched: int = 0
    pods: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.destroyed + other.destroyed, self.touched + other.touched, self.pods + other.pods)


class _Backend:
    """The pure functions of a backend that a plan uses."""

    vendor, driver_name, grouping = "nvidia", "gpu.nvidia.com", None
    offers = staticmethod(offers.offers)


def node(board: str, layouts: Sequence[tuple[tuple[int, int], ...] | None], pairs: bool = False) -> tuple[Device, ...]:
    """Return the GPUs of a node, from the placements (profile ID and start) of each GPU's partitions, or None for MIG
    off.

    With ``pairs``, neighbors are linked directly, so that they are reset together.
    """
    gpus = [
        device(board, index, enabled=places is not None, places=places or ()) for index, places in enumerate(layouts)
    ]
    if not pairs:
        return tuple(gpus)
    return tuple(replace(each, linked=(gpus[number ^ 1].pci_address,)) for number, each in enumerate(gpus))


def pods_on(gpus: Sequence[Device]) -> tuple[PreparedPartition, ...]:
    """Return one pod on each partition and on each GPU with MIG off."""
    found = []
    for each in gpus:
        if not each.partitioning.enabled:
            found.append(PreparedPartition(f"pods/{each.index}", each.uuid))
        found += [
            PreparedPartition(
                f"pods/{each.index}-{part.instance_id}", each.uuid, part.uuid, part.profile_id, part.placement
            )
            for part in each.partitions
        ]
    return tuple(found)


def disturbances_of_collection(gpus: Sequence[Device], wanted: Sequence[Layout], prefer: str = "pods") -> Outcome:
    """Return the disturbances of this collection's plan.

    Raises AssertionError for a layout that does not fit.
    """
    rules: list[dict[str, Any]] = [
        {"match": {"index": each.index}, "mode": "whole"}
        if layout is None
        else {"match": {"index": each.index}, "mode": "static", "partitions": dict(layout)}
        for each, layout in zip(gpus, wanted)
    ]
    held = pods_on(gpus)
    operations, errors = plan_operations(_Backend(), gpus, parse_rules(rules), held, prefer=prefer)  # type: ignore[arg-type]
    assert not errors, errors
    return Outcome(
        destroyed=sum(len(each.deleted) for each in operations),
        touched=sum(len(each.devices) for each in operations),
        pods=sum(len(each.claims) for each in operations),
    )


def disturbances_of_mig_parted(gpus: Sequence[Device], wanted: Sequence[Layout]) -> Outcome:
    """Return the disturbances of nvidia-mig-parted's steps."""
    modes = [(each.partitioning.enabled, layout is not None) for each, layout in zip(gpus, wanted)]
    switched = {number for number, (now, then) in enumerate(modes) if now != then}
    cleared = set(range(len(gpus))) if switched else set()
    reset = {number for number in range(len(gpus)) if any(gpus[each].partitioning.needs_reset for each in switched)}
    cleared |= {
        number
        for number, (each, layout) in enumerate(zip(gpus, wanted))
        if layout is not None and Counter(part.profile for part in each.partitions) != Counter(layout)
    }
    emptied = {number for number in cleared if gpus[number].partitions}
    whole = {number for number in switched | reset if not gpus[number].partitioning.enabled}
    destroyed = sum(len(gpus[number].partitions) for number in cleared)
    filled = {number for number in cleared if wanted[number]}
    return Outcome(destroyed, len(emptied | filled | switched | reset), destroyed + len(whole))
