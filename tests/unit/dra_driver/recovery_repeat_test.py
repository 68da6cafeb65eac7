# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The recovery at start with unexpected exceptions in its steps: each affects one claim, and no completed step runs again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from claim_steps import SMALL, SMALL_2, prepare, unprepare
from dra_driver.claims.hardware_executor import HardwareExecutor
from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.model import Fault
from dra_driver.supervisors.driver_state import Conditions, Shared, Snapshot, keep_running
from dra_driver.supervisors.recovery import Recovery
from machine_model import POOL, Claims, Node


class Restart:
    """A node whose driver restarts. ``reached`` records the stages and raises the exceptions in ``defects``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.claims = Claims()
        self.snapshots = Shared(Snapshot())
        self.conditions = Conditions("claims")
        self.stages: list[str] = []
        self.boot_id = "boot-1"
        #: The stages after which an exception is raised, once for each entry.
        self.defects: list[str] = []
        self.stops_at = ""
        #: The faults of devices, by index, at the first scan.
        self.faults: dict[int, Fault] = {}
        self.has_stopped, self.may_continue = threading.Event(), threading.Event()

    async def prepare_before(self, *devices: str) -> list[str]:
        """Prepare claims in an earlier run, remove their CDI files, and return their UIDs."""
        node = Node(self.directory, self.claims)
        await node.start()
        uids = []
        for number, device in enumerate(devices):
            reference = self.claims.allocate(f"old-{number}", device)
            assert await prepare(node, reference) == ""
            node.service.hardware.remove_cdi(reference.uid)
            uids.append(reference.uid)
        node.close()
        return uids

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Node]:
        """Start the driver with its recovery, and stop both at the end."""
        node = Node(self.directory, self.claims, reached=self.reached, boot_id=self.boot_id)
        node.backend.faults.update(self.faults)
        await node.scan()
        recovery = Recovery(
            node.service,
            snapshots=self.snapshots,
            conditions=self.conditions,
            reporter=node.reports,
            scan=node.scan,
            report_stage=self.stages.append,
            boot_id=node.boot_id,
        )
        work = asyncio.ensure_future(keep_running("recovery", recovery.run))
        self.scanned(node, 1.0)
        try:
            yield node
        finally:
            work.cancel()
            node.close()

    def scanned(self, node: Node, time: float) -> None:
        """Publish the result of the node's last scan."""
        assert node.survey is not None
        self.snapshots.put(Snapshot(survey=node.survey, inventory=node.survey.inventory(POOL), scanned_at=time))

    def reached(self, stage: str) -> None:
        if stage == self.stops_at:
            self.stops_at = ""
            self.has_stopped.set()
            assert self.may_continue.wait(10)
        if stage in self.defects:
            self.defects.remove(stage)
            raise ValueError(f"a defect at {stage}")


async def until(condition: Callable[[], object]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 10)


def run(tmp_path: Path, scenario: Callable[[Restart], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Restart(tmp_path))

    asyncio.run(main())


def test_exception_in_restore_does_not_undo_claim_prepared_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a claim is prepared, the restore of another one fails and the supervisor restarts: the new claim stays prepared."""
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.05)

    async def scenario(restart: Restart) -> None:
        (old,) = await restart.prepare_before(SMALL)
        restart.defects = ["cdi-written"]
        async with restart.running() as node:
            await until(lambda: not restart.defects and not restart.conditions.problems)
            restart.stops_at = "recorded-preparing"
            new = restart.claims.allocate("new", "gpu-1-mig-1g10gb-19-0")
            preparing = asyncio.ensure_future(prepare(node, new))
            await until(restart.has_stopped.is_set)
            await asyncio.sleep(0.3)  # in this time the supervisor ran again
            restart.may_continue.set()
            assert await preparing == ""
            await asyncio.sleep(0.3)
            assert node.store.claims[new.uid].prepared
            assert new.uid in node.cdi_files()
            assert restart.stages.count("recovery-planned") == 1
            (failure,) = node.reports.failures
            assert failure[0].uid == old and "ValueError" in str(failure[2])

    run(tmp_path, scenario)


def test_exception_in_one_restore_leaves_the_others(tmp_path: Path) -> None:
    async def scenario(restart: Restart) -> None:
        uids = await restart.prepare_before(SMALL, SMALL_2, "gpu-1")
        restart.defects = ["cdi-written"]
        async with restart.running() as node:
            await until(lambda: restart.stages.count("recovery-step-done") == 3)
            assert len(node.service.suspect) == 1
            (failed,) = node.service.suspect
            reference = node.store.claims[failed].reference
            assert await prepare(node, reference) == "", "the kubelet's call repeats the failed step"
            assert sorted(node.cdi_files()) == sorted(uids)

    run(tmp_path, scenario)


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
@pytest.mark.parametrize("state", ["deleted", "new UID", "deallocated", "exists", "no answer"])
def test_claim_of_an_old_store_is_restored_only_if_it_may_exist(tmp_path: Path, boot_id: str, state: str) -> None:
    """A copy of the store was restored after its claims had ended: the API server is queried before partitions are created."""

    async def scenario(restart: Restart) -> None:
        (old,) = await restart.prepare_before(SMALL)
        copy = (tmp_path / "state/state.db").read_bytes()
        node = Node(tmp_path, restart.claims)
        await node.start()
        assert await unprepare(node, node.store.claims[old].reference) == ""
        assert node.partitions() == []
        node.close()
        (tmp_path / "state/state.db").write_bytes(copy)
        claim = restart.claims.claims["default", "old-0"]
        if state == "deleted":
            del restart.claims.claims["default", "old-0"]
        elif state == "new UID":
            claim["metadata"]["uid"] = "another"
        elif state == "deallocated":
            del claim["status"]["allocation"]
        elif state == "no answer":
            restart.claims.failures = [BackendUnavailable("the API server is away")] * 9
        restart.boot_id = boot_id
        async with restart.running() as node:
            await until(lambda: "recovery-step-done" in restart.stages)
            exists = state in ("exists", "no answer")
            assert (len(node.partitions()), list(node.cdi_files())) == ((1, [old]) if exists else (0, []))
            assert old in node.store.claims, "the reconciler releases it"

    run(tmp_path, scenario)


def test_claim_of_an_old_store_that_has_ended_is_not_restored_when_its_device_recovers(tmp_path: Path) -> None:
    async def scenario(restart: Restart) -> None:
        (old,) = await restart.prepare_before(SMALL)
        copy = (tmp_path / "state/state.db").read_bytes()
        node = Node(tmp_path, restart.claims)
        await node.start()
        reference = node.store.claims[old].reference
        assert await unprepare(node, reference) == ""
        node.close()
        (tmp_path / "state/state.db").write_bytes(copy)
        restart.claims.remove(reference)
        restart.faults[0] = Fault("unknown-error", "999")
        async with restart.running() as node:
            await until(lambda: restart.stages.count("recovery-step-done") == 1)
            node.backend.faults.clear()
            await node.scan()
            restart.scanned(node, 2.0)
            await until(lambda: restart.stages.count("recovery-step-done") == 2)
            assert node.partitions() == [] and not node.cdi_files()

    run(tmp_path, scenario)


def test_exception_before_the_first_served_claim_repeats_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.05)

    async def scenario(restart: Restart) -> None:
        (old,) = await restart.prepare_before(SMALL)
        async with restart.running() as node:
            failures = [RuntimeError("the directory cannot be listed")]
            list_uids = HardwareExecutor.invalid_cdi_uids

            def uids(hardware: HardwareExecutor) -> tuple[str, ...]:
                if failures:
                    raise failures.pop()
                return list_uids(hardware)

            monkeypatch.setattr(HardwareExecutor, "invalid_cdi_uids", uids)
            await until(lambda: old in node.cdi_files())
            assert not failures

    run(tmp_path, scenario)


def test_unexpected_error_of_a_recovered_device_does_not_block_claims(tmp_path: Path) -> None:
    async def scenario(restart: Restart) -> None:
        (old,) = await restart.prepare_before(SMALL)
        async with restart.running() as node:
            await until(lambda: old in node.cdi_files())
            # A claim was unprepared during a fault of its device: the cleanup of its partition is pending.
            reference = node.store.claims[old].reference
            node.backend.faults[0] = Fault("unknown-error", "999")
            await node.scan()
            assert await unprepare(node, reference) == ""
            assert node.owing()
            node.backend.faults.clear()
            restart.defects = ["partition-destroyed"]
            node.service.set_ready("the hardware does not answer")
            await node.scan()
            restart.scanned(node, 2.0)
            await until(lambda: not restart.defects)
            new = restart.claims.allocate("new", "gpu-1")
            assert await prepare(node, new) == ""

    run(tmp_path, scenario)
