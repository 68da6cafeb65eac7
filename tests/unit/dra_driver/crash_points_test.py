# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The tables of docs/crash-points.md about claims: the state of the node after a kill at each stage, and after the next start.

A power failure is a kill of the whole node: partitions, settings, MPS daemons, kernel drivers, and CDI files are lost.
Store writes without a later sync are lost too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_model import DEFAULT_KNOBS, ModelGpus
from companion_model import ModelCompanionServices
from dra_driver.core.store.prepared_claims import prepared_claims
from dra_driver.stages import PREPARE, UNPREPARE
from machine_model import bus
from recovery_test import OF_FABRIC, World

PARTITION, SETTINGS, MPS, MACHINE = "gpu-0-mig-1g10gb-19-0", "gpu-0", "gpu-0 with MPS", "gpu-vfio-0"
PREPARED = {
    PARTITION: "prepared cdi partitioning partition",
    SETTINGS: "prepared cdi settings",
    MPS: "prepared cdi settings daemon",
    MACHINE: "prepared cdi settings vfio",  # persistence mode is off
}

#: By stage: the claim's device, and the difference from an unchanged node after a kill. Recovery undoes all of it.
OF_PREPARE = {
    "claim-fetched": (PARTITION, ""),
    "planned": (PARTITION, ""),
    "recorded-preparing": (PARTITION, "preparing"),
    "partitioning-changed": (PARTITION, "preparing partitioning"),
    "partition-created": (PARTITION, "preparing partitioning partition"),
    "settings-applied": (SETTINGS, "preparing settings"),
    "handed-over": (MACHINE, "preparing settings vfio"),
    "companion-started": (MPS, "preparing settings daemon"),
}
#: The same for stages after which recovery completes the claim.
COMPLETED = {
    "recording-prepared": (PARTITION, "prepared partitioning partition"),
    "cdi-written": (PARTITION, PREPARED[PARTITION]),
    "recorded-prepared": (PARTITION, PREPARED[PARTITION]),
}
#: The same for Unprepare: recovery restores the claim, until its record is removed.
OF_UNPREPARE = {
    "unprepare-started": (PARTITION, PREPARED[PARTITION]),
    "companions-stopped": (MPS, "prepared cdi settings"),
    "taken-back": (MACHINE, "prepared cdi settings"),
    "partition-destroyed": (PARTITION, "prepared cdi partitioning"),
    "partitioning-restored": (PARTITION, "prepared cdi"),
    "settings-restored": (SETTINGS, "prepared cdi"),
    "cdi-removed": (PARTITION, "prepared"),
}
#: A stage that is reached once for each setting of the claim.
TIMES = {"settings-restored": 2}


def node_state(disk: Path) -> str:
    """Return the differences of a node from its unchanged state, read without the driver."""
    words = [claim.state for claim in prepared_claims(str(disk / "state/state.db"))]
    words += ["cdi" for _file in (disk / "root/var/run/cdi").glob("*claim_*.json")]
    gpus = ModelGpus(disk / "gpus.json")
    with gpus.state() as state:
        first = state[gpus.template(0).uuid]
        words += ["partitioning"] * first["enabled"] + ["partition"] * len(first["partitions"])
        words += ["settings"] * (first["knobs"] != DEFAULT_KNOBS)
    words += ["daemon"] * bool(ModelCompanionServices(gpus).running())
    words += ["vfio"] * (bus(disk, gpus).driver(gpus.template(0).pci_address) == "vfio-pci")
    return " ".join(words)


def killed(directory: Path, device: str, stage: str, *, ends: bool = False) -> World:
    """Return a node whose driver was killed at a stage of preparing, or of unpreparing, a claim with this device."""
    world = World(directory)
    name = {MPS: "b", SETTINGS: "a"}.get(device, "c")
    steps = [("prepare", name, [device.split()[0]])] + [("unprepare", name, None)] * ends
    world.live(steps, (stage, TIMES.get(stage, 1), False))
    assert world.disk.name == "life-1", "the stage was never reached"
    return world


def after_start(world: World) -> str:
    world.live([], None)
    return node_state(world.disk)


def test_every_stage_has_a_row() -> None:
    assert {*OF_PREPARE, *COMPLETED} == {*PREPARE} - OF_FABRIC
    assert {*OF_UNPREPARE, "record-removed"} == {*UNPREPARE} - OF_FABRIC


@pytest.mark.parametrize("stage", OF_PREPARE)
def test_prepare_that_was_killed_is_undone(tmp_path: Path, stage: str) -> None:
    device, state = OF_PREPARE[stage]
    world = killed(tmp_path, device, stage)
    assert node_state(world.disk) == state
    assert after_start(world) == ""


@pytest.mark.parametrize("stage", COMPLETED)
def test_prepare_that_was_killed_is_completed(tmp_path: Path, stage: str) -> None:
    device, state = COMPLETED[stage]
    world = killed(tmp_path, device, stage)
    assert node_state(world.disk) == state
    assert after_start(world) == PREPARED[device]


@pytest.mark.parametrize("stage", {**OF_PREPARE, **COMPLETED})
def test_prepare_that_a_power_failure_has_ended_leaves_no_part_of_a_claim(tmp_path: Path, stage: str) -> None:
    device, _state = {**OF_PREPARE, **COMPLETED}[stage]
    world = killed(tmp_path, device, stage)
    world.reboot()
    assert after_start(world) == (PREPARED[device] if stage in COMPLETED else "")


@pytest.mark.parametrize("power_failure", [False, True])
@pytest.mark.parametrize("stage", OF_UNPREPARE)
def test_unprepare_that_was_killed_is_rolled_back(tmp_path: Path, stage: str, power_failure: bool) -> None:
    device, state = OF_UNPREPARE[stage]
    world = killed(tmp_path, device, stage, ends=True)
    assert node_state(world.disk) == state
    if power_failure:
        world.reboot()
    assert after_start(world) == PREPARED[device]


@pytest.mark.prove
@pytest.mark.parametrize("power_failure", [False, True])
@pytest.mark.parametrize("verb", ["prepare", "unprepare"])
@pytest.mark.parametrize("second", [stage for stage in (*PREPARE, *UNPREPARE) if stage not in OF_FABRIC])
def test_second_kill_in_the_recovery_changes_nothing(
    tmp_path: Path, verb: str, second: str, power_failure: bool
) -> None:
    for stage, (device, _state) in (OF_UNPREPARE if verb == "unprepare" else {**OF_PREPARE, **COMPLETED}).items():
        directory = tmp_path / stage
        directory.mkdir()
        world = killed(directory, device, stage, ends=verb == "unprepare")
        world.live([], (second, 1, power_failure))
        assert after_start(world) == ("" if stage in OF_PREPARE else PREPARED[device]), stage


@pytest.mark.parametrize("power_failure", [False, True])
def test_unprepare_whose_record_is_removed_is_complete(tmp_path: Path, power_failure: bool) -> None:
    world = killed(tmp_path, PARTITION, "record-removed", ends=True)
    assert node_state(world.disk) == ""
    if power_failure:
        world.reboot()
    assert after_start(world) == ""


@pytest.mark.parametrize("stage", ["recorded-preparing", "recording-prepared"])
def test_claim_that_changes_no_hardware_is_recorded_last(tmp_path: Path, stage: str) -> None:
    world = killed(tmp_path, "gpu-1", stage)
    assert node_state(world.disk) == ("" if stage == "recorded-preparing" else "prepared")
    assert after_start(world) == ("" if stage == "recorded-preparing" else "prepared cdi")
