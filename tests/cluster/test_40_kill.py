# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The driver killed between each pair of stages: after its restart every claim ends prepared or cleanly gone.

Both nodes at once: on one the pod stays wanted, on the other nobody wants it any more when the driver comes back. The stages
that leave the most behind are part of every run; all the others, and other kinds of devices, are left to `make prove`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, zip_longest
from typing import Any

import pytest
from dra_driver.stages import PREPARE, UNPREPARE

from tests.cluster.cluster import Cluster
from tests.cluster.killer import Killer, together
from tests.cluster.manifests import dynamic, static

#: Stages that only a claim goes through for which a partition is made.
OF_PARTITIONS = {"partitioning-changed", "partition-created", "partition-destroyed", "partitioning-restored"}
#: A partition without a file, a file without a record, a record of which the kubelet has not heard.
SHORT = {"partition-created", "cdi-written", "recorded-prepared"}
DYNAMIC = ("mig.nvidia.com", dynamic("1g.10gb"))
KINDS = {
    "whole": ("gpu.nvidia.com", None, 1, 0),
    "static": ("mig.nvidia.com", static("1g.10gb"), 1, 0),
    "two": (*DYNAMIC, 2, 2),
}


@pytest.fixture()
def killers(clean: Cluster) -> Iterator[list[Killer]]:
    made = [Killer(clean, node) for node in clean.nodes()]
    yield made
    for each in made:
        if each.armed:
            each.disarm()


def cases() -> list[Any]:
    """Every stage of preparing with one of unpreparing; the long ones have the mark of `make prove`."""
    return [
        pytest.param(prepare, unprepare, marks=() if prepare in SHORT else pytest.mark.prove)
        for prepare, unprepare in zip(PREPARE, cycle(UNPREPARE))
    ]


@pytest.mark.parametrize(("prepare", "unprepare"), cases())
def test_killed_at_a_stage(killers: list[Killer], prepare: str, unprepare: str) -> None:
    """While preparing, of a pod that stays wanted and of one that is not; then while the first one's claim is given back."""
    wanted, unwanted = killers
    cluster = wanted.cluster
    stays, leaves = wanted.documents("stays", *DYNAMIC), unwanted.documents("leaves", *DYNAMIC)
    together(*(lambda killer=killer: killer.arm(prepare) for killer in killers))
    cluster.apply(*stays, *leaves)
    together(*(killer.wait_killed for killer in killers))
    unwanted.delete(leaves)
    together(*(killer.disarm for killer in killers))

    def is_prepared_once() -> None:
        cluster.wait_running("stays", timeout=240)
        assert (wanted.made(), len(cluster.cdi_files(wanted.node))) == (1, 1)
        wanted.arm(unprepare)
        wanted.delete(stays)
        wanted.wait_killed()
        wanted.disarm()
        wanted.wait_nothing_left("stays")

    together(is_prepared_once, lambda: unwanted.wait_nothing_left("leaves"))


def test_every_stage_is_among_the_cases() -> None:
    assert {stage for case in cases() for stage in case.values} == {*PREPARE, *UNPREPARE}
    assert sum(not case.marks for case in cases()) == len(SHORT)


def cases_of_kinds() -> list[tuple[str, str, str]]:
    """Kind of device, a stage of preparing or "", a stage of unpreparing or "": every stage that the kind goes through."""
    cases = []
    for kind, (_class, _expression, _count, made) in KINDS.items():
        prepare, unprepare = (
            [stage for stage in stages if made or stage not in OF_PARTITIONS] for stages in (PREPARE, UNPREPARE)
        )
        if made > 1:
            prepare += ["partition-created:2"]
            unprepare += ["partition-destroyed:2"]
        cases += [(kind, *pair) for pair in zip_longest(prepare, unprepare, fillvalue="")]
    return cases


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "prepare", "unprepare"), cases_of_kinds())
def test_killed_at_a_stage_of_every_kind(killers: list[Killer], kind: str, prepare: str, unprepare: str) -> None:
    killer = killers[0]
    cluster = killer.cluster
    device_class, expression, count, made = KINDS[kind]
    documents = killer.documents("kind", device_class, expression, count)
    if prepare:
        killer.arm(prepare)
    cluster.apply(*documents)
    if prepare:
        killer.wait_killed()
        killer.disarm()
    cluster.wait_running("kind", timeout=240)
    assert (killer.made(), len(cluster.cdi_files(killer.node))) == (made, 1)
    if unprepare:
        killer.arm(unprepare)
    killer.delete(documents)
    if unprepare:
        killer.wait_killed()
        killer.disarm()
    killer.wait_nothing_left("kind")


@pytest.mark.prove
@pytest.mark.parametrize("recovery", ["recovery-planned", "recovery-step-done"])
@pytest.mark.parametrize("prepare", ["partition-created", "cdi-written"])
def test_killed_again_while_it_recovers(killers: list[Killer], prepare: str, recovery: str) -> None:
    killer = killers[0]
    cluster = killer.cluster
    documents = killer.documents("twice", *DYNAMIC)
    killer.arm(prepare)
    cluster.apply(*documents)
    killer.wait_killed()
    killer.arm(recovery, serves=False)
    killer.wait_killed()
    killer.disarm()
    cluster.wait_running("twice", timeout=240)
    assert (killer.made(), len(cluster.cdi_files(killer.node))) == (1, 1)
    killer.delete(documents)
    killer.wait_nothing_left("twice")
