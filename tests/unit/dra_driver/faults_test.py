# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A fault affects one device: its neighbors are served, its claims can be unprepared, and pending cleanup completes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from claim_steps import SMALL, prepare, run, unprepare
from dra_driver.claims.pending_cleanups import (
    PendingDestruction,
    cleanups_in,
    cleanups_to_meta,
    obsolete_cleanup_entries,
)
from dra_driver.core.errors import AcceleratorError, DeviceFaulty, InUse
from dra_driver.core.model import Fault
from hypothesis import given
from hypothesis import strategies as st
from machine_model import Claims, Node

NEIGHBOUR = "gpu-1-mig-1g10gb-19-0"
UNKNOWN = Fault("unknown-error", "NVML returned error 999")


@pytest.mark.parametrize("seen", [False, True])
def test_prepare_faulty_device_is_rejected_by_name_and_others_continue(tmp_path: Path, seen: bool) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        node.backend.faults[0] = UNKNOWN
        if seen:
            await node.scan()
        error = await prepare(node, claims.allocate("ill", SMALL))
        assert node.gpus.template(0).uuid in error
        assert "999" in error
        assert "Other devices" in error
        assert await prepare(node, claims.allocate("well", NEIGHBOUR)) == ""
        (_claim, verb, reported) = node.reports.failures[0]
        assert (verb, reported.code) == ("Prepare", "device-faulty")
        node.backend.faults.clear()
        await node.scan()
        assert await prepare(node, claims.allocate("ill", SMALL)) == ""

    run(tmp_path, scenario)


def test_unprepare_faulty_device_is_undone_after_it_recovers(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        node.backend.faults[0] = UNKNOWN
        await node.scan()
        assert await unprepare(node, claim) == ""
        assert (node.store.claims, node.cdi_files()) == ({}, ())
        assert len(node.partitions()) == 1
        gpu = node.gpus.template(0).uuid
        assert node.service.unprepare_runner.ownership.cleanups == (PendingDestruction(gpu, (19, 0, 1)),)
        # The partition does not count as an administrator's, neither now nor when the device answers again.
        node.backend.faults.clear()
        await node.scan()
        assert "gpu-0" in node.inventory.offers
        await node.service.housekeeping.settle(gpu)
        assert (node.partitions(), node.service.unprepare_runner.ownership.cleanups) == ([], ())
        assert not node.gpus.devices()[0].partitioning.enabled
        assert set(node.store.meta) == {"schema_version"}

    run(tmp_path, scenario)


def test_pending_cleanup_that_blocks_a_claim_runs_first(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        first = claims.allocate("first", SMALL)
        assert await prepare(node, first) == ""
        node.backend.faults[0] = UNKNOWN
        assert await unprepare(node, first) == ""
        node.backend.faults.clear()
        second = claims.allocate("second", SMALL)
        assert await prepare(node, second) == ""
        assert len(node.partitions()) == 1
        assert any(name == "destroy_partition" for name, _arguments in node.backend.calls)
        assert node.service.unprepare_runner.ownership.cleanups == ()
        assert node.store.claims[second.uid].devices[0].created
        assert await unprepare(node, second) == ""
        assert node.partitions() == []

    run(tmp_path, scenario)


def test_pending_cleanup_of_a_partition_in_use_stays(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        node.backend.faults[0] = UNKNOWN
        assert await unprepare(node, claim) == ""
        node.backend.faults.clear()
        gpu = node.gpus.template(0).uuid
        with node.gpus.state() as state:
            state[gpu]["partitions"][0]["pids"] = [4711]
        with pytest.raises(InUse):
            await node.service.housekeeping.settle(gpu)
        assert len(node.service.unprepare_runner.ownership.cleanups) == 1
        with node.gpus.state() as state:
            state[gpu]["partitions"][0]["pids"] = []
        await node.service.housekeeping.settle(gpu)
        assert (node.partitions(), node.service.unprepare_runner.ownership.cleanups) == ([], ())

    run(tmp_path, scenario)


def test_unprepare_failed_destruction_becomes_pending_cleanup(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        node.backend.failures["destroy_partition"] = [DeviceFaulty("it hangs", code="no-answer")]
        assert await unprepare(node, claim) == ""
        assert (node.store.claims, node.cdi_files()) == ({}, ())
        assert len(node.service.unprepare_runner.ownership.cleanups) == 1
        assert node.gpus.devices()[0].partitioning.enabled
        await node.service.housekeeping.settle(node.gpus.template(0).uuid)
        assert node.partitions() == []
        assert not node.gpus.devices()[0].partitioning.enabled

    run(tmp_path, scenario)


def late(node: Node, method: str) -> threading.Event:
    """Block the next call of a method in its device's thread beyond its deadline. The call ends when the returned event is set."""
    gate, backend = threading.Event(), node.backend
    real = getattr(backend, method)

    def hang(uuid: str, *arguments: Any) -> Any:
        def call() -> Any:
            found = real(uuid, *arguments)
            assert gate.wait(30)
            time.sleep(0.05)  # simulates a busy processor
            return found

        setattr(backend, method, real)
        return backend.on_lane(uuid, call, 0.05)

    setattr(backend, method, hang)
    return gate


def test_prepare_hanging_device_is_rejected_as_faulty(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        gate = late(node, "device")
        for name in ("meets it", "comes after"):
            assert "has not returned" in await prepare(node, claims.allocate(name.replace(" ", "-"), SMALL))
            _claim, verb, reported = node.reports.failures[-1]
            assert (verb, reported.code) == ("Prepare", "device-faulty") and "Repair the device" in reported.hint
        assert not node.store.claims and await prepare(node, claims.allocate("on-another", "gpu-1")) == ""
        gate.set()
        assert await asyncio.to_thread(node.backend.rests)
        assert await prepare(node, claims.allocate("later", SMALL)) == ""

    run(tmp_path, scenario)


def test_unprepare_hanging_device_becomes_pending_cleanup_and_stops_changes(
    tmp_path: Path,
) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        gate = late(node, "destroy_partition")
        assert await unprepare(node, claim) == ""
        assert (node.store.claims, node.cdi_files()) == ({}, ())
        assert len(node.service.unprepare_runner.ownership.cleanups) == 1
        # While the call hangs, the claim is refused at once. Then it is prepared again, and the hung call does not
        # continue with the earlier claim.
        assert "has not returned" in await prepare(node, claim)
        gate.set()
        assert await asyncio.to_thread(node.backend.rests)
        assert node.gpus.devices()[0].partitioning.enabled, "the later call set the mode"
        assert await prepare(node, claim) == ""
        assert len(node.partitions()) == 1 and node.service.unprepare_runner.ownership.cleanups == ()
        assert len(node.cdi_files()) == 1
        assert await unprepare(node, claim) == ""
        assert node.partitions() == []
        assert not node.gpus.devices()[0].partitioning.enabled

    run(tmp_path, scenario)


def test_prepare_device_hangs_in_mode_change_gets_no_partition_later(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        gate = late(node, "set_partitioning")
        assert "has not returned" in await prepare(node, claim)
        assert (node.store.claims, node.cdi_files()) == ({}, ())
        gate.set()
        assert await asyncio.to_thread(node.backend.rests)
        assert node.partitions() == []
        assert await prepare(node, claim) == ""
        assert len(node.partitions()) == 1

    run(tmp_path, scenario)


def test_prepare_device_fails_after_creation_leaves_pending_cleanup_and_no_record(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        real = node.backend.create_partition

        def falls_ill(*arguments: Any) -> Any:
            real(*arguments)
            node.backend.faults[0] = UNKNOWN
            raise DeviceFaulty("NVML returned error 999")

        node.backend.create_partition = falls_ill  # type: ignore[method-assign]
        assert "999" in await prepare(node, claims.allocate("a", SMALL))
        node.backend.create_partition = real  # type: ignore[method-assign]
        assert (node.store.claims, node.cdi_files(), len(node.partitions())) == ({}, (), 1)
        node.backend.faults.clear()
        await node.service.housekeeping.settle(node.gpus.template(0).uuid)
        assert node.partitions() == []

    run(tmp_path, scenario)


@pytest.mark.parametrize("undoing", ["works", "fails"])
def test_unexpected_exception_fails_one_claim_and_is_logged_with_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, undoing: str
) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        faulty, healthy = claims.allocate("ill", SMALL), claims.allocate("well", NEIGHBOUR)
        real, destroy = node.backend.device_edits, node.backend.destroy_partition

        def edits(device: Any, partition: Any, monitoring: bool) -> Any:
            if device.index == 0:
                raise ZeroDivisionError("surprise")
            return real(device, partition, monitoring)

        def fails(*_arguments: Any) -> Any:
            raise KeyError("another surprise")

        node.backend.device_edits = edits  # type: ignore[method-assign]
        if undoing == "fails":
            node.backend.destroy_partition = fails  # type: ignore[method-assign]
        outcomes = await node.service.prepare([faulty, healthy])
        assert outcomes[healthy.uid].error == ""
        assert "ZeroDivisionError: surprise" in outcomes[faulty.uid].error
        ((claim, verb, _error),) = node.reports.failures
        assert (claim, verb) == (faulty, "Prepare")
        reported = [record.exc_info[0] for record in caplog.records if record.exc_info]
        expected = [KeyError, ZeroDivisionError] if undoing == "fails" else [ZeroDivisionError]
        assert reported == expected
        held = {uid: record.prepared for uid, record in node.store.claims.items()}
        assert held == {healthy.uid: True, **({faulty.uid: False} if undoing == "fails" else {})}
        # After the fault ends, the next prepare succeeds, independent of leftovers.
        node.backend.device_edits, node.backend.destroy_partition = real, destroy  # type: ignore[method-assign]
        assert await prepare(node, faulty) == ""
        assert len(node.partitions()) == 2

    run(tmp_path, scenario)


def test_prepare_hanging_device_does_not_delay_others(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        import threading

        gate = threading.Event()
        real, faulty = node.backend.device, node.gpus.template(0).uuid

        def hangs(uuid: str) -> Any:
            if uuid == faulty:
                assert gate.wait(30)
            return real(uuid)

        node.backend.device = hangs  # type: ignore[method-assign]
        stuck = [claims.allocate(f"stuck-{number}", f"gpu-0-mig-1g10gb-19-{number}") for number in range(7)]
        waiting = asyncio.gather(*(prepare(node, claim) for claim in stuck))
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(prepare(node, claims.allocate("well", NEIGHBOUR)), 10) == ""
        await asyncio.wait_for(node.scan(), 10)
        assert not waiting.done()
        gate.set()
        assert await waiting == [""] * 7

    run(tmp_path, scenario)


@pytest.mark.parametrize("driver", ["gone", "there"])
def test_unprepare_claim_of_the_previous_boot_does_not_wait_for_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    monkeypatch.setattr("dra_driver.claims.operations.READY_SECONDS", 0.01)
    claims = Claims()
    claim = claims.allocate("a", SMALL)

    async def before() -> None:
        node = Node(tmp_path, claims)
        await node.start()
        assert await prepare(node, claim) == ""
        node.close()

    async def after() -> None:
        from backend_model import ModelGpus

        ModelGpus(tmp_path / "gpus.json").reboot()
        node = Node(tmp_path, claims, boot_id="boot-2")
        node.backend.present = driver == "there"
        node.service.set_ready("The NVIDIA driver is not loaded")
        assert await unprepare(node, claim) == ""
        assert (node.store.claims, node.cdi_files(), node.service.unprepare_runner.ownership.cleanups) == ({}, (), ())
        assert node.reports.failures == []
        node.close()

    asyncio.run(before())
    asyncio.run(after())


def test_unprepare_claim_restored_in_this_boot_waits_for_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.claims.operations.READY_SECONDS", 0.01)
    claims = Claims()
    claim = claims.allocate("a", SMALL)

    async def before() -> None:
        node = Node(tmp_path, claims)
        await node.start()
        assert await prepare(node, claim) == ""
        node.close()

    async def killed_while_restoring() -> None:
        from backend_model import ModelGpus

        ModelGpus(tmp_path / "gpus.json").reboot()
        node = Node(tmp_path, claims, boot_id="boot-2")
        real = node.backend.create_partition

        def killed(*arguments: Any) -> Any:
            real(*arguments)
            raise AcceleratorError("killed here")

        node.backend.create_partition = killed  # type: ignore[method-assign]
        await node.scan()
        with pytest.raises(AcceleratorError):
            await node.service.restore(claim.uid)
        node.close()

    async def after() -> None:
        node = Node(tmp_path, claims, boot_id="boot-2")
        node.backend.present = False
        node.service.set_ready("The NVIDIA driver is not loaded")
        assert "not loaded" in await unprepare(node, claim)
        node.backend.present = True
        await node.start()
        assert await unprepare(node, claim) == ""
        assert node.partitions() == []
        assert set(node.store.meta) == {"schema_version"}
        node.close()

    for life in (before, killed_while_restoring, after):
        asyncio.run(life())


cleanups = st.builds(
    PendingDestruction,
    st.sampled_from(["GPU-0", "GPU-1", "GPU-5-a:b"]),
    st.tuples(st.integers(0, 99), st.integers(0, 7), st.integers(1, 8)),
)


@given(st.sets(cleanups, max_size=5), st.sets(cleanups, max_size=5))
def test_pending_cleanup_is_stored_and_void_after_a_reboot(
    now: set[PendingDestruction], previous: set[PendingDestruction]
) -> None:
    meta = {"schema_version": "1", **cleanups_to_meta(previous - now, "boot-1"), **cleanups_to_meta(now, "boot-2")}
    assert set(cleanups_in(meta, "boot-2")) == now
    assert set(obsolete_cleanup_entries(meta, "boot-2")) == {cleanup.key for cleanup in previous - now}
    # Where partitions survive a reboot, pending cleanup does too.
    assert set(cleanups_in(meta, None)) == now | previous and obsolete_cleanup_entries(meta, None) == {}
