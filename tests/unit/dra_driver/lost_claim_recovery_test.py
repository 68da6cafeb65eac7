# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims whose records and CDI files are both lost: the driver recognizes their resources, and removes them with the claims."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER
from claim_steps import SMALL, prepare, unprepare
from dra_driver.api.client import ApiError, ApiUnreachable
from dra_driver.claims.claim_statuses import prepared_entries
from dra_driver.claims.store.records import ClaimReference
from dra_driver.core.errors import AcceleratorError, BackendUnavailable
from dra_driver.core.host.cdi import remove_spec
from dra_driver.core.host.companions import CLAIM, Companion, claim_in_environment
from machine_model import Claims, Node

API = "resource.nvidia.com/v1beta1"
SHARED = {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}


def config(kind: str, **values: Any) -> dict[str, Any]:
    return {"opaque": {"driver": DRIVER, "parameters": {"apiVersion": API, "kind": kind, **values}}}


def power(watts: int) -> dict[str, Any]:
    parameters = {"apiVersion": "dra.accelerators/v1alpha1", "kind": "DeviceSettings", "powerLimit": watts}
    return {"opaque": {"driver": DRIVER, "parameters": parameters}}


#: The device of a claim, and its configuration.
CLAIMS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "partition": (SMALL, []),
    "partition with a daemon": (SMALL, [config("MigDeviceConfig", sharing=SHARED)]),
    "whole with a daemon": ("gpu-0", [config("GpuConfig", sharing=SHARED)]),
    "settings": ("gpu-0", [power(400)]),
}
#: A configuration whose settings equal the device's default, or cannot be read.
BY_TURNS = {"time slicing": ("gpu-0", [config("GpuConfig", sharing={"strategy": "TimeSlicing"})])}


def traces(node: Node) -> tuple[Any, ...]:
    """Return the resources of claims outside the store and the files."""
    with node.gpus.state() as state:
        knobs = [entry["knobs"] for entry in state.values()]
    return (
        node.partitions(),
        node.companion_services.running(),
        knobs,
        [gpu.partitioning.enabled for gpu in node.gpus.devices()],
    )


def write_status(node: Node, claims: Claims, claim: ClaimReference) -> None:
    """Write the claim's status, as the driver does after it has prepared a claim."""
    record = node.store.claims[claim.uid]
    entries = prepared_entries(DRIVER, record, node.inventory.offers, node.store.identity)
    claims.claims[claim.namespace, claim.name]["status"]["devices"] = entries


def lose(node: Node, claim: ClaimReference) -> None:
    """Stop the driver, and delete its state directory and the claim's CDI file."""
    node.close()
    shutil.rmtree(node.folder / "state")
    remove_spec(node.system, node.service.hardware.cdi_path(claim.uid))


def play(
    directory: Path,
    kind: str,
    scenario: Callable[[Node, Claims, ClaimReference, tuple[Any, ...], tuple[Any, ...]], Awaitable[None]],
    *,
    reported: bool = True,
    away: bool = False,
) -> None:
    """Prepare a claim, lose all its files, start the driver, and run the scenario."""

    async def main() -> None:
        claims, (device, configs) = Claims(), CLAIMS[kind]
        node = Node(directory, claims)
        await node.start()
        before = traces(node)
        claim = claims.allocate("a", device, config=configs)
        assert await prepare(node, claim) == ""
        remaining = traces(node)
        if reported:
            write_status(node, claims, claim)
        lose(node, claim)
        node = Node(directory, claims)
        try:
            if away:
                claims.failures = [ApiUnreachable("the API server is away")]
            await node.start()
            assert node.store.claims == {}
            await scenario(node, claims, claim, before, remaining)
        finally:
            node.close()

    asyncio.run(main())


PAIR = {1: (0, 1), 2: (0,), 3: (1,)}


def play_fabric(
    directory: Path,
    scenario: Callable[[Node, Claims, ClaimReference], Awaitable[None]],
    *,
    is_administrators: bool = False,
    keeps_store: bool = False,
) -> None:
    """Prepare a claim for a fabric partition, lose all its files, start the driver, and run the scenario."""

    async def main() -> None:
        claims = Claims()
        node = Node(directory, claims)
        node.backend.fabric = PAIR
        node.backend.active = {1} if is_administrators else set()
        await node.start()
        claim = claims.allocate("a", "gpu-0", "gpu-1")
        assert await prepare(node, claim) == "" and node.backend.active == {1}
        write_status(node, claims, claim)
        if keeps_store:  # unprepared, and an administrator activates the same partition afterwards
            assert await unprepare(node, claim) == ""
            node.close()
        else:
            lose(node, claim)
        node = Node(directory, claims)
        node.backend.fabric, node.backend.active = PAIR, {1}
        try:
            await node.start()
            assert node.store.claims == {}
            await scenario(node, claims, claim)
        finally:
            node.close()

    asyncio.run(main())


def persistence(node: Node) -> list[bool]:
    with node.gpus.state() as state:
        return [entry["knobs"]["persistence"] for entry in state.values()]


@pytest.mark.parametrize("ends", [False, True])
def test_lost_fabric_partition_is_deactivated_with_its_claim(tmp_path: Path, ends: bool) -> None:
    async def scenario(node: Node, claims: Claims, claim: ClaimReference) -> None:
        if not ends:
            assert await prepare(node, claim) == "" and node.backend.active == {1}
            (record,) = node.store.claims.values()
            assert [dict(held.fabric) for held in record.devices] == [{"partition": 1, "activated": True}] * 2
        assert await unprepare(node, claim) == ""
        assert (node.backend.active, node.store.claims, node.cdi_files()) == (set(), {}, ())
        assert persistence(node) == [True, True] and node.owing() == frozenset()

    play_fabric(tmp_path, scenario)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("keeps_store", [False, True])
def test_active_fabric_partition_of_an_administrator_is_not_taken_for_a_lost_one(
    tmp_path: Path, ends: bool, keeps_store: bool
) -> None:
    async def scenario(node: Node, claims: Claims, claim: ClaimReference) -> None:
        if not ends:
            assert await prepare(node, claim) == ""
        assert await unprepare(node, claim) == ""
        assert node.backend.active == {1}

    play_fabric(tmp_path, scenario, is_administrators=not keeps_store, keeps_store=keeps_store)


def test_lost_fabric_partition_stays_active_while_api_server_or_fabric_manager_is_away(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims, claim: ClaimReference) -> None:
        claims.failures = [ApiUnreachable("the API server is away")]
        assert "fabric partition" in await unprepare(node, claim)
        node.backend.failures["fabric_partition"] = [BackendUnavailable("The fabric manager is away")]
        assert "is away" in await unprepare(node, claim)
        assert node.backend.active == {1}
        assert await unprepare(node, claim) == "" and node.backend.active == set()

    play_fabric(tmp_path, scenario)


def test_inactive_fabric_partition_of_a_lost_claim_is_activated_again(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims, claim: ClaimReference) -> None:
        node.backend.active = set()
        assert await prepare(node, claim) == "" and node.backend.active == {1}
        assert await unprepare(node, claim) == "" and node.backend.active == set()

    play_fabric(tmp_path, scenario)


@pytest.mark.parametrize("kind", CLAIMS)
def test_prepare_lost_claim_adopts_its_resources(tmp_path: Path, kind: str) -> None:
    async def scenario(
        node: Node, claims: Claims, claim: ClaimReference, before: tuple[Any, ...], remaining: tuple[Any, ...]
    ) -> None:
        assert traces(node) == remaining
        assert await prepare(node, claim) == ""
        assert traces(node) == remaining
        (record,) = node.store.claims.values()
        assert record.prepared and record.uid == claim.uid
        assert node.cdi_files() == (claim.uid,)
        assert not node.service.suspect
        assert node.scan_requests == 1
        assert await unprepare(node, claim) == ""
        assert (traces(node), node.store.claims, node.cdi_files()) == (before, {}, ())
        assert node.scan_requests == 1

    play(tmp_path, kind, scenario)


@pytest.mark.parametrize("kind", CLAIMS)
def test_unprepare_lost_claim_removes_its_resources(tmp_path: Path, kind: str) -> None:
    async def scenario(
        node: Node, claims: Claims, claim: ClaimReference, before: tuple[Any, ...], remaining: tuple[Any, ...]
    ) -> None:
        assert await unprepare(node, claim) == ""
        assert (traces(node), node.store.claims, node.cdi_files()) == (before, {}, ())
        assert await unprepare(node, claim) == ""
        assert (traces(node), node.store.claims) == (before, {})
        assert node.scan_requests == 1

    play(tmp_path, kind, scenario)


AWAY = [ApiUnreachable("the API server is away"), ApiError("404 page not found", status=404)]


@pytest.mark.parametrize("failure", AWAY)
def test_unprepare_lost_claim_without_the_api_server_removes_nothing(tmp_path: Path, failure: AcceleratorError) -> None:
    async def scenario(
        node: Node, claims: Claims, claim: ClaimReference, before: tuple[Any, ...], remaining: tuple[Any, ...]
    ) -> None:
        assert traces(node) == remaining
        claims.failures = [failure]
        assert "does not say whether it was made for the claim" in await unprepare(node, claim)
        assert traces(node) == remaining
        assert await unprepare(node, claim) == ""
        assert traces(node) == before

    play(tmp_path, "partition with a daemon", scenario, away=True)


def test_housekeeping_stops_daemons_of_a_deleted_claim(tmp_path: Path) -> None:
    async def scenario(
        node: Node, claims: Claims, claim: ClaimReference, before: tuple[Any, ...], remaining: tuple[Any, ...]
    ) -> None:
        claims.failures = [AWAY[1]]
        assert await node.service.housekeeping.orphaned_companions() == (), (
            "a server that does not serve claims says nothing of this one"
        )
        claims.remove(claim)
        assert await node.service.housekeeping.orphaned_companions() == (claim.uid,)
        await node.service.housekeeping.stop_orphaned_companions(claim.uid)
        assert (node.companion_services.running(), node.partitions()) == ({}, remaining[0])

    play(tmp_path, "partition with a daemon", scenario)


def test_unprepare_lost_claim_keeps_a_partition_not_in_its_status(tmp_path: Path) -> None:
    async def scenario(
        node: Node, claims: Claims, claim: ClaimReference, before: tuple[Any, ...], remaining: tuple[Any, ...]
    ) -> None:
        for ends in (False, True):
            assert await unprepare(node, claim) == ""
            assert traces(node) == remaining
            if not ends:
                assert await prepare(node, claim) == ""
                assert [held.created for held in node.store.claims[claim.uid].devices] == [False]

    play(tmp_path, "partition", scenario, reported=False)


@pytest.mark.parametrize("by_hand", [{}, {"powerLimit": 400}], ids=["as it came", "as an administrator has set it"])
@pytest.mark.parametrize("kind", {**CLAIMS, **BY_TURNS})
def test_prepare_lost_claim_creates_removed_resources_again(tmp_path: Path, kind: str, by_hand: dict[str, Any]) -> None:
    """A claim keeps its status while it keeps its devices: the status alone does not prove that its resources exist.

    Neither does a setting that already has the claim's value, by default or from an administrator. The administrator's
    value is restored.
    """

    async def main() -> None:
        claims, (device, configs) = Claims(), {**CLAIMS, **BY_TURNS}[kind]
        node = Node(tmp_path, claims)
        with node.gpus.state() as state:
            for entry in state.values():
                entry["knobs"].update(by_hand)
        await node.start()
        before = traces(node)
        claim = claims.allocate("a", device, config=configs)
        assert await prepare(node, claim) == ""
        write_status(node, claims, claim)
        whole = node.store.claims[claim.uid], dict(node.store.meta)
        for _time in range(2):
            assert await unprepare(node, claim) == ""
            assert traces(node) == before
            assert await unprepare(node, claim) == ""
            assert traces(node) == before and node.store.claims == {}
            assert await prepare(node, claim) == ""
            again = node.store.claims[claim.uid]
            assert (replace(again, created_at=whole[0].created_at, devices=()), node.store.meta) == (
                replace(whole[0], devices=()),
                whole[1],
            )
        assert node.scan_requests == 0  # the claim did not count as lost
        assert await unprepare(node, claim) == ""
        assert traces(node) == before
        node.close()

    asyncio.run(main())


def test_prepare_lost_claim_killed_driver_has_the_claim_after_restart(tmp_path: Path) -> None:
    async def scenario(
        node: Node, claims: Claims, claim: ClaimReference, before: tuple[Any, ...], remaining: tuple[Any, ...]
    ) -> None:
        node.companion_services.failures.append(ApiUnreachable("it does not answer"))
        assert "it does not answer" in await prepare(node, claim)
        assert traces(node) == remaining and node.store.claims[claim.uid].prepared
        again = Node(tmp_path, claims)
        await again.start()
        assert traces(again) == remaining and again.cdi_files() == (claim.uid,)
        assert await unprepare(again, claim) == ""
        assert traces(again) == before
        again.close()

    play(tmp_path, "partition with a daemon", scenario)


def test_companion_environment_names_its_claim() -> None:
    companion = Companion("mps", "uid.0", (), {"A": "b"}, claim="default/a")
    assert claim_in_environment(companion.environment_text) == "default/a"
    assert claim_in_environment(Companion("mps", "uid.0", (), {"A": "b"}).environment_text) == ""
    assert CLAIM not in Companion("mps", "uid.0", (), {"A": "b"}).environment_text


@pytest.mark.parametrize(
    "entry",
    [
        {"conditions": [{"type": "Ready", "status": "False"}]},
        {"conditions": [{"type": "Ready", "status": "True"}], "driver": "other.example.com"},
        {"conditions": [{"type": "Ready", "status": "True"}], "device": "gpu-0-mig-1g10gb-19-1"},
        {"conditions": [{"type": "Ready", "status": "True"}], "data": {"uuid": ["GPU"], "madeForClaim": True}},
        {"conditions": [{"type": "Ready", "status": "True"}], "data": "nothing"},
    ],
)
def test_unprepare_lost_claim_with_a_foreign_status_removes_nothing(tmp_path: Path, entry: dict[str, Any]) -> None:
    async def scenario(
        node: Node, claims: Claims, claim: ClaimReference, before: tuple[Any, ...], remaining: tuple[Any, ...]
    ) -> None:
        place = {"driver": DRIVER, "pool": "node-1", "device": SMALL}
        claims.claims["default", "a"]["status"]["devices"] = [{**place, **entry}]
        assert await unprepare(node, claim) == ""
        assert traces(node) == remaining

    play(tmp_path, "partition", scenario, reported=False)
