# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims that are missing in the API server: the decision uses times, not counts, and is separate for each claim."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from claim_steps import SMALL, SMALL_2, prepare, run
from dra_driver.api.client import ApiError, ApiUnreachable
from dra_driver.claims.store.records import ClaimReference
from dra_driver.claims.store.tables import Change
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.core.host.companions import Companion
from dra_driver.kubelet.pod_resources import container_devices, socket_path
from dra_driver.supervisors.driver_state import Conditions, Shared, Snapshot
from dra_driver.supervisors.reconciler import (
    FULL_PASSES,
    RECONCILE_SECONDS,
    Reconciler,
    first_reconcile_pause,
    reconcile_pause,
)
from dra_driver.supervisors.recovery import Recovery
from machine_model import POOL, Claims, Node
from monitoring_test import kubelet


class Reader:
    """A reader of claims. The reads of some claims fail."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.failures: dict[str, Callable[[], Exception]] = {}
        self.reads: list[str] = []

    async def claim(self, namespace: str, name: str) -> dict[str, Any]:
        self.reads.append(name)
        if name in self.failures:
            failure = self.failures[name]
            raise failure()
        return await self._claims.claim(namespace, name)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def reconciler_of(
    node: Node, reader: Reader, clock: Callable[[], float], snapshot: Snapshot | None = None
) -> Reconciler:
    return Reconciler(
        node.service,
        source=reader,
        reporter=node.reports,
        pool=POOL,
        boot_id=node.boot_id,
        snapshots=Shared(snapshot or Snapshot()),
        clock=clock,
    )


async def three(node: Node, claims: Claims) -> list[ClaimReference]:
    found = [claims.allocate(name, device) for name, device in (("a", SMALL), ("b", SMALL_2), ("c", "gpu-1"))]
    for each in found:
        assert await prepare(node, each) == ""
    return found


FAILURES: list[Callable[[], Exception]] = [
    lambda: ApiError("no memory", status=500),
    lambda: ApiUnreachable("no answer"),
    lambda: RuntimeError("a defect"),
]


@pytest.mark.parametrize("failure", FAILURES)
def test_reconcile_repeated_for_another_claim_does_not_count(tmp_path: Path, failure: Callable[[], Exception]) -> None:
    """The first claim is missing, the read of the second one fails, and checks repeat within seconds: they do not count."""

    async def scenario(node: Node, claims: Claims) -> None:
        first, second, third = await three(node, claims)
        reader, clock = Reader(claims), Clock()
        reader.failures["b"] = failure
        reconciler = reconciler_of(node, reader, clock)
        claims.remove(first)
        for _each in range(5):
            await reconciler.reconcile()
            clock.now += 2
        assert first.uid in node.store.claims
        assert reader.reads.count("c") == 5, "a claim behind the one that fails is checked"
        clock.now += RECONCILE_SECONDS
        await reconciler.reconcile()
        assert set(node.store.claims) == {second.uid, third.uid}

    run(tmp_path, scenario)


def test_missing_claim_that_returned_starts_a_new_wait(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        first, *_others = await three(node, claims)
        clock = Clock()
        reconciler = reconciler_of(node, Reader(claims), clock)
        claims.remove(first)
        await reconciler.reconcile()
        clock.now += RECONCILE_SECONDS / 2
        claims.allocate("a", SMALL)
        await reconciler.reconcile()
        claims.remove(first)
        clock.now += RECONCILE_SECONDS / 2
        await reconciler.reconcile()
        assert first.uid in node.store.claims

    run(tmp_path, scenario)


def test_unreachable_server_gets_few_requests(tmp_path: Path) -> None:
    """Each read costs a timeout: the next try begins with the claims that were not read."""

    async def scenario(node: Node, claims: Claims) -> None:
        uids = [each.uid for each in await three(node, claims)]
        reader = Reader(claims)
        reader.failures = dict.fromkeys("abc", lambda: ApiUnreachable("no answer"))
        left = await reconciler_of(node, reader, Clock()).reconcile()
        assert reader.reads == ["a", "b"]
        assert left == [uids[2], uids[0], uids[1]]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "failure", [ApiError("404 page not found", status=404), ApiError("an answer without metadata.uid", status=502)]
)
def test_claim_whose_path_server_does_not_serve_is_not_missing(tmp_path: Path, failure: ApiError) -> None:
    """An older API server during an upgrade, or a load balancer, answers 404 without a reason: the claim is not missing."""

    async def scenario(node: Node, claims: Claims) -> None:
        uids = {each.uid for each in await three(node, claims)}
        reader, clock = Reader(claims), Clock()
        reader.failures = dict.fromkeys("abc", lambda: failure)
        reconciler = reconciler_of(node, reader, clock)
        for _each in range(3):
            await reconciler.reconcile()
            clock.now += RECONCILE_SECONDS
        assert set(node.store.claims) == uids
        assert len(node.partitions()) == 2

    run(tmp_path, scenario)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_server_that_rejects_all_reads_gets_few_requests(tmp_path: Path, status: int) -> None:
    """A node can have hundreds of claims, and after status 401 each read opens a connection: few claims are requested."""

    async def scenario(node: Node, claims: Claims) -> None:
        uids = [each.uid for each in await three(node, claims)]
        reader = Reader(claims)
        reader.failures = dict.fromkeys("abc", lambda: ApiError("rejected", status=status))
        left = await reconciler_of(node, reader, Clock()).reconcile()
        assert reader.reads == ["a", "b"]
        assert left == [uids[2], uids[0], uids[1]]

    run(tmp_path, scenario)


def test_reconcile_pauses_of_nodes_that_started_together_differ() -> None:
    """After a power failure thousands of nodes start within a minute, and each reads all its claims in each pass: passes are spread."""
    third_passes = sorted(reconcile_pause() + reconcile_pause() for _node in range(1000))
    assert third_passes[0] >= 2 * RECONCILE_SECONDS, "a claim that was missing at one pass is dropped at the next"
    assert third_passes[900] - third_passes[100] > 60


def test_first_reconcile_of_nodes_that_started_together_is_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = sorted(first_reconcile_pause() for _node in range(1000))
    assert pauses[900] - pauses[100] > RECONCILE_SECONDS / 10 and pauses[-1] <= RECONCILE_SECONDS / 4
    monkeypatch.setattr("dra_driver.supervisors.reconciler.first_reconcile_pause", lambda: 100.0)

    async def scenario(node: Node, claims: Claims) -> None:
        await three(node, claims)
        orphan = node.service.housekeeping
        requested: list[str] = []

        async def stale_files() -> list[str]:
            requested.append("files")
            return []

        monkeypatch.setattr(orphan, "stale_files", stale_files)
        reader, clock = Reader(claims), Clock()
        snapshot = Snapshot(survey=node.survey, scanned_at=1.0)
        sleeps: list[float] = []
        sleep = asyncio.sleep

        async def recorded(seconds: float) -> None:
            sleeps.append(seconds)
            clock.now += seconds
            await sleep(0)

        monkeypatch.setattr("dra_driver.supervisors.reconciler.asyncio.sleep", recorded)
        work = asyncio.ensure_future(reconciler_of(node, reader, clock, snapshot).run())
        while not sleeps:
            await sleep(0)
        assert sleeps == [100.0] and requested == ["files"] and not reader.reads, "work without requests is not delayed"
        while len(reader.reads) < 3:
            await sleep(0)
        work.cancel()

    run(tmp_path, scenario)


def test_retry_after_of_server_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.01)
    monkeypatch.setattr("dra_driver.supervisors.reconciler.first_reconcile_pause", lambda: 0.0)

    async def scenario(node: Node, claims: Claims) -> None:
        await three(node, claims)
        reader = Reader(claims)
        reader.failures = dict.fromkeys("abc", lambda: ApiError("too many requests", status=429, retry_after=0.5))
        snapshot = Snapshot(survey=node.survey, scanned_at=1.0)
        work = asyncio.ensure_future(reconciler_of(node, reader, asyncio.get_running_loop().time, snapshot).run())
        await asyncio.sleep(0.3)
        assert reader.reads == ["a"]
        reader.failures.clear()
        while len(reader.reads) < 4:
            await asyncio.sleep(0.01)
        work.cancel()

    run(tmp_path, scenario)


def test_reconcile_repeats_only_failed_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.01)
    monkeypatch.setattr("dra_driver.supervisors.reconciler.first_reconcile_pause", lambda: 0.0)

    async def scenario(node: Node, claims: Claims) -> None:
        await three(node, claims)
        reader = Reader(claims)
        reader.failures["a"] = FAILURES[0]
        snapshot = Snapshot(survey=node.survey, scanned_at=1.0)
        work = asyncio.ensure_future(reconciler_of(node, reader, asyncio.get_running_loop().time, snapshot).run())
        while reader.reads.count("a") < 3:
            await asyncio.sleep(0.01)
        reader.failures.clear()
        reads = reader.reads.count("a")
        await asyncio.sleep(0.3)
        work.cancel()
        assert reader.reads.count("a") == reads + 1
        assert reader.reads.count("b") == reader.reads.count("c") == 1

    run(tmp_path, scenario)


def test_half_prepared_claim_whose_device_was_locked_at_start_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout run locks the device while the driver starts, and the kubelet never requests the claim again: it is undone later."""
    monkeypatch.setattr("dra_driver.claims.locking.LOCK_SECONDS", 0.1)

    async def main() -> None:
        claims = Claims()
        before = Node(tmp_path, claims)
        await before.start()
        claim = claims.allocate("a", SMALL)
        assert await prepare(before, claim) == ""
        await before.store.commit(Change(put=before.store.claims[claim.uid].as_preparing()))
        before.close()
        node = Node(tmp_path, claims)
        await node.scan()
        assert node.survey is not None
        snapshot = Snapshot(survey=node.survey, inventory=node.inventory, scanned_at=1.0)
        other = DeviceLocks(str(tmp_path / "state"), "the layout run")
        recovery = Recovery(
            node.service,
            snapshots=Shared(snapshot),
            conditions=Conditions("claims"),
            reporter=node.reports,
            scan=node.scan,
            report_stage=lambda stage: None,
            boot_id=node.boot_id,
        )
        assert other.take(node.gpus.template(0).uuid)
        work = asyncio.ensure_future(recovery.run())
        while not node.service._ready.is_set():
            await asyncio.sleep(0.01)
        assert claim.uid in node.store.claims
        other.drop(node.gpus.template(0).uuid)
        await reconciler_of(node, Reader(claims), Clock()).reconcile()
        assert not node.store.claims and not node.partitions()
        work.cancel()
        node.close()

    asyncio.run(main())


def test_programs_without_claims_are_ended_although_a_device_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.claims.locking.LOCK_SECONDS", 0.1)

    async def scenario(node: Node, claims: Claims) -> None:
        uuid = node.gpus.template(0).uuid
        for owner in (f"device-{uuid}", "e0uid-gone"):
            node.companion_services.start(Companion("mps", f"{owner}.0", (), {"CUDA_VISIBLE_DEVICES": uuid}))
        other = DeviceLocks(str(tmp_path / "state"), "the layout run")
        assert other.take(uuid)
        reconciler = reconciler_of(node, Reader(claims), Clock())
        await reconciler.reconcile()
        assert set(node.companion_services.running()) == {f"device-{uuid}.0"}
        other.drop(uuid)
        await reconciler.reconcile()
        assert node.companion_services.running() == {}

    run(tmp_path, scenario)


def test_claims_in_use_are_read_in_one_of_several_passes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("s")

    async def scenario(node: Node, claims: Claims) -> None:
        first, second, _third = await three(node, claims)
        reader, clock = Reader(claims), Clock()
        reconciler = Reconciler(
            node.service,
            source=reader,
            reporter=node.reports,
            pool=POOL,
            boot_id=node.boot_id,
            snapshots=Shared(Snapshot()),
            clock=clock,
            query_used_devices=functools.partial(container_devices, socket_path(str(root))),
        )

        async def reads_of_passes() -> list[list[str]]:
            found = []
            for _each in range(FULL_PASSES):
                reader.reads.clear()
                await reconciler.reconcile()
                found.append(sorted(reader.reads))
            return sorted(found)

        with kubelet(root) as shown:
            # Claim a as prepared, claim b with a device that is not its own, and claim c without devices.
            shown.pods = [("pod-a", "a", SMALL), ("pod-b", "b", "gpu-3")]
            await reconciler.reconcile()
            assert sorted(reader.reads) == ["a", "b", "c"], "all are read after a start"
            assert await reads_of_passes() == [["a", "b", "c"], *[["b", "c"]] * (FULL_PASSES - 1)]
            # A missing claim is read until it is dropped, independent of the kubelet's answer.
            claims.remove(first)
            await reads_of_passes()
            clock.now += RECONCILE_SECONDS
            await reconciler.reconcile()
            assert first.uid not in node.store.claims
        assert await reads_of_passes() == [["b", "c"]] * FULL_PASSES, "the kubelet does not answer"
        assert second.uid in node.store.claims

    run(tmp_path, scenario)
