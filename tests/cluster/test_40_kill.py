# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Kill the driver at each stage: after its restart every claim is prepared or completely cleaned up.

Both nodes are tested at once: on one the pod stays, on the other it is deleted before the driver restarts. The stages
that leave the most state behind are part of every run. All others, and other kinds of devices, are tested by `make
prove`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, zip_longest
from typing import Any

import pytest
from dra_driver.stages import PREPARE, UNPREPARE

from tests.cluster.cluster import Cluster
from tests.cluster.killer import Killer, together
from tests.cluster.manifests import dynamic, mps, settings, static

#: Stages of claims with a dynamic partition only.
OF_PARTITIONS = {"partitioning-changed", "partition-created", "partition-destroyed", "partitioning-restored"}
#: Stages of claims with device settings only.
OF_SETTINGS = {"settings-applied", "settings-restored"}
#: Stages of claims whose containers share a device through a companion program only.
OF_COMPANIONS = {"companion-started", "companions-stopped"}
#: Stages of claims with a GPU for a virtual machine only: killed in test_31_passthrough.py.
OF_PASSTHROUGH = {"handed-over", "taken-back"}
#: Stages of claims whose GPUs are a partition of the NVSwitch fabric only: killed in test_32_fabric.py.
OF_FABRIC = {"fabric-activated", "fabric-deactivated"}
#: Stages after which a partition has no CDI file, the CDI file or its record may be missing, or the kubelet has no
#: answer.
SHORT = {"partition-created", "cdi-written", "recorded-prepared"}
DYNAMIC = ("mig.nvidia.com", dynamic("1g.10gb"))
KINDS = {
    "whole": ("gpu.nvidia.com", None, 1, 0),
    "settings": ("gpu.nvidia.com", None, 1, 0),
    "static": ("mig.nvidia.com", static("1g.10gb"), 1, 0),
    "two": (*DYNAMIC, 2, 2),
    "mps": (*DYNAMIC, 1, 1),
}
#: The config of each kind's claims, and the additional stages.
CONFIGURED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "settings": (settings(powerLimit=300, graphicsClocks={"minimum": 900, "maximum": 1200}), OF_SETTINGS),
    "mps": (mps("MigDeviceConfig", defaultActiveThreadPercentage=50), OF_COMPANIONS),
}


def turned(cluster: Cluster, node: str) -> list[tuple[str, ...]]:
    """Return the power limit and clock of each GPU of a node."""
    fields = cluster.run(node, "nvidia-smi", "--query-gpu=power.limit,clocks.gr", "--format=csv,noheader")
    return [tuple(line.split(", ")) for line in fields.splitlines()]


@pytest.fixture()
def killers(clean: Cluster) -> Iterator[list[Killer]]:
    made = [Killer(clean, node) for node in clean.nodes()]
    yield made
    for each in made:
        if each.armed:
            each.disarm()


def cases() -> list[Any]:
    """Return every stage of prepare with one of unprepare. Those that take long are marked ``prove``."""
    return [
        pytest.param(prepare, unprepare, marks=() if prepare in SHORT else pytest.mark.prove)
        for prepare, unprepare in zip(unconfigured(PREPARE), cycle(unconfigured(UNPREPARE)))
    ]


def unconfigured(stages: Iterable[str]) -> list[str]:
    return [stage for stage in stages if stage not in OF_SETTINGS | OF_COMPANIONS | OF_PASSTHROUGH | OF_FABRIC]


@pytest.mark.parametrize(("prepare", "unprepare"), cases())
def test_killed_at_a_stage(killers: list[Killer], prepare: str, unprepare: str) -> None:
    """Kill the driver while it prepares for a pod that stays and for one that is deleted, then while it unprepares the
    first claim.
    """
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


def test_cases_contain_every_stage() -> None:
    of_kinds = {stage for _kind, *stages in cases_of_kinds() for stage in stages}
    assert of_kinds >= {*PREPARE, *UNPREPARE} - OF_PASSTHROUGH - OF_FABRIC
    assert {stage for case in cases() for stage in case.values} == set(unconfigured((*PREPARE, *UNPREPARE)))
    assert sum(not case.marks for case in cases()) == len(SHORT)


def cases_of_kinds() -> list[tuple[str, str, str]]:
    """Return kind of device, prepare stage or "", unprepare stage or "", for every stage of each kind."""
    cases = []
    for kind, (_class, _expression, _count, made) in KINDS.items():
        prepare, unprepare = (
            [
                stage
                for stage in stages
                if (made or stage not in OF_PARTITIONS)
                and stage not in OF_PASSTHROUGH | OF_FABRIC
                and (stage not in OF_SETTINGS | OF_COMPANIONS or stage in CONFIGURED.get(kind, ({}, set()))[1])
            ]
            for stages in (PREPARE, UNPREPARE)
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
    config = [CONFIGURED[kind][0]] if kind in CONFIGURED else []
    documents = killer.documents("kind", device_class, expression, count, config)
    if prepare:
        killer.arm(prepare)
    cluster.apply(*documents)
    if prepare:
        killer.wait_killed()
        killer.disarm()
    cluster.wait_running("kind", timeout=240)
    assert (killer.made(), len(cluster.cdi_files(killer.node))) == (made, 1)
    assert turned(cluster, killer.node).count(("300.00 W", "900 MHz")) == (kind == "settings")
    assert sum("mps@" in unit for unit in cluster.companions(killer.node)) == (kind == "mps")
    if unprepare:
        killer.arm(unprepare)
    killer.delete(documents)
    if unprepare:
        killer.wait_killed()
        killer.disarm()
    killer.wait_nothing_left("kind")
    assert set(turned(cluster, killer.node)) == {("700.00 W", "345 MHz")}


@pytest.mark.prove
# A claim with a written CDI file is prepared: its recovery has no stage.
@pytest.mark.parametrize(
    ("prepare", "recovery"),
    [
        ("partition-created", "recovery-planned"),
        ("partition-created", "recovery-step-done"),
        ("cdi-written", "recovery-planned"),
    ],
)
def test_killed_again_during_recovery(killers: list[Killer], prepare: str, recovery: str) -> None:
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
