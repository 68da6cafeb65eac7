# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A prepared claim with a new allocation gets its new devices, or a refusal that names the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from claim_steps import SMALL, prepare, run, unprepare
from dra_driver.claims.allocation import AllocatedDevice, Allocation
from dra_driver.claims.startup_recovery import prepared_devices, reallocated
from dra_driver.claims.store.records import ClaimRecord, ClaimReference, DeviceRecord
from dra_driver.core.errors import AcceleratorError
from dra_driver.supervisors.driver_state import Shared, Snapshot
from dra_driver.supervisors.reconciler import Reconciler
from hypothesis import given
from hypothesis import strategies as st
from machine_model import POOL, Claims, Node


def held(node: Node, claim: ClaimReference) -> list[str]:
    return [device.name for device in node.store.claims[claim.uid].devices]


def test_reallocated_idle_claim_is_prepared_again(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        claims.allocate("a", "gpu-1")
        assert await prepare(node, claim) == ""
        assert held(node, claim) == ["gpu-1"]
        assert [entry["name"] for entry in node.cdi(claim.uid)["devices"]] == [f"{claim.uid}-gpu-1"]
        assert node.partitions() == []
        assert await unprepare(node, claim) == ""

    run(tmp_path, scenario)


@pytest.mark.parametrize("change", [{"request": "other"}, {"shareID": "11111111-1111-1111-1111-111111111111"}])
def test_reallocated_any_changed_field_counts(tmp_path: Path, change: dict[str, str]) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-1")
        assert await prepare(node, claim) == ""
        claims.allocate("a", {"device": "gpu-1", **change})
        assert await prepare(node, claim) == ""
        (device,) = node.store.claims[claim.uid].devices
        assert (device.request, device.share_id) == (change.get("request", "r0"), change.get("shareID", ""))

    run(tmp_path, scenario)


def test_reallocated_claim_in_use_is_rejected_by_name(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0")
        assert await prepare(node, claim) == ""
        with node.gpus.state() as state:
            state[node.gpus.template(0).uuid]["pids"] = [4711]
        claims.allocate("a", "gpu-1")
        error = await prepare(node, claim)
        assert all(word in error for word in ("default/a", "gpu-0", "gpu-1", "4711"))
        assert held(node, claim) == ["gpu-0"]
        with node.gpus.state() as state:
            state[node.gpus.template(0).uuid]["pids"] = []
        assert await prepare(node, claim) == ""
        assert held(node, claim) == ["gpu-1"]

    run(tmp_path, scenario)


def test_reallocated_without_the_api_server_returns_the_stored_devices(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0")
        assert await prepare(node, claim) == ""
        claims.allocate("a", "gpu-1")
        claims.failures = [AcceleratorError("the API server is away")]
        assert await prepare(node, claim) == ""
        assert held(node, claim) == ["gpu-0"]

    run(tmp_path, scenario)


def test_reallocated_claim_is_detected_by_the_reconciler(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        reconciler = Reconciler(
            node.service,
            source=claims,
            reporter=node.reports,
            pool=POOL,
            boot_id="boot-1",
            snapshots=Shared(Snapshot()),
        )
        claim, same = claims.allocate("a", "gpu-0"), claims.allocate("same", "gpu-1-mig-1g10gb-19-0")
        assert await prepare(node, claim) == ""
        assert await prepare(node, same) == ""
        with node.gpus.state() as state:
            state[node.gpus.template(0).uuid]["pids"] = [4711]
        claims.allocate("a", "gpu-1")
        await reconciler.reconcile()
        assert held(node, claim) == ["gpu-0"]
        ((about, verb, error),) = node.reports.failures
        assert (about, verb, error.code) == (claim, "Prepare", "allocation-changed")
        with node.gpus.state() as state:
            state[node.gpus.template(0).uuid]["pids"] = []
        await reconciler.reconcile()
        assert list(node.store.claims) == [same.uid]
        assert node.cdi_files() == (same.uid,)

    run(tmp_path, scenario)


entries = st.tuples(
    st.sampled_from(["r0", "r1"]),
    st.sampled_from(["node-1", "node-2"]),
    st.sampled_from(["gpu-0", "gpu-1"]),
    st.sampled_from(["", "share"]),
)


@given(st.lists(entries, unique=True, max_size=4), st.lists(entries, unique=True, max_size=4))
def test_reallocated_order_does_not_count(before: list[tuple[str, ...]], now: list[tuple[str, ...]]) -> None:
    reference = ClaimReference("default", "a", "u")
    record = ClaimRecord(
        "u",
        "default",
        "a",
        "prepared",
        "b",
        0.0,
        tuple(
            DeviceRecord(request=request, pool=pool, name=name, device_uuid="GPU", kind="device", share_id=share)
            for request, pool, name, share in before
        ),
    )
    allocation = Allocation(
        reference, tuple(AllocatedDevice(request, pool, name, share, False, ()) for request, pool, name, share in now)
    )
    assert reallocated(record, allocation) == (sorted(before) != sorted(now))
    assert len(prepared_devices(record)) == len(before)


def test_reconciler_removes_cdi_files_without_a_claim(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        reconciler = Reconciler(
            node.service,
            source=claims,
            reporter=node.reports,
            pool=POOL,
            boot_id="boot-1",
            snapshots=Shared(Snapshot()),
        )
        claim = claims.allocate("a", "gpu-0")
        assert await prepare(node, claim) == ""
        before = sorted(tmp_path.rglob("*"))
        hardware = node.service.hardware
        node.system.write_atomic(hardware.cdi_path("0uid-gone"), b"tells nothing")
        node.system.write_atomic(f"{hardware.files.path('0uid-gone-too')}/r0.json", b"{}")
        await reconciler.reconcile()
        assert sorted(tmp_path.rglob("*")) == before and sorted(node.cdi_files()) == [claim.uid]

    run(tmp_path, scenario)
