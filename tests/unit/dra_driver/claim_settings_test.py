# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""When a claim ends, the driver restores the previous value of each device setting that the claim changed, also after failures."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from backend_model import DEFAULT_KNOBS, DRIVER
from claim_steps import prepare, run, unprepare
from dra_driver.claims.configs import SETTING_KEY
from dra_driver.claims.store.records import record_of_document
from dra_driver.claims.store.store import Store
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, Unsupported
from dra_driver.core.model import Fault
from dra_driver.core.store.prepared_claims import knobs_before_claims, prepared_claims
from machine_model import Claims, Node

SHARING = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "GpuConfig",
    "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}},
}


def config(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"opaque": {"driver": DRIVER, "parameters": parameters}, **more}


def settings(**fields: Any) -> dict[str, Any]:
    return config({"apiVersion": "dra.accelerators/v1alpha1", "kind": "DeviceSettings", **fields})


def knobs(node: Node, index: int = 0) -> dict[str, Any]:
    """Return the settings of a GPU that differ from its defaults."""
    with node.gpus.state() as state:
        now = state[node.gpus.template(index).uuid]["knobs"]
    return {name: value for name, value in now.items() if value != DEFAULT_KNOBS[name]}


def turned_by_hand(node: Node, **values: Any) -> None:
    with node.gpus.state() as state:
        state[node.gpus.template(0).uuid]["knobs"].update(values)


def recorded_settings(node: Node) -> set[str]:
    """Return the settings whose previous values are in the store."""
    return {key.rpartition(":")[2] for key in node.store.meta if key.startswith(SETTING_KEY)}


def test_unprepare_restores_the_previous_settings(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        turned_by_hand(node, powerLimit=650.5, computeMode="ExclusiveProcess")
        claim = claims.allocate("a", "gpu-0", config=[config(SHARING), settings(powerLimit=300)])
        assert await prepare(node, claim) == ""
        assert knobs(node) == {"powerLimit": 300, "timeSlice": "Short"}
        assert knobs(node, 1) == {}
        assert recorded_settings(node) == {"powerLimit", "computeMode", "timeSlice"}
        assert await unprepare(node, claim) == ""
        assert knobs(node) == {"powerLimit": 650.5, "computeMode": "ExclusiveProcess"}
        assert (recorded_settings(node), node.store.claims) == (set(), {})

    run(tmp_path, scenario)


def test_workload_profiles_of_a_claim_replace_previous_ones_and_are_stored(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        turned_by_hand(node, workloadProfiles=["max-p"])

        def share(name: str, number: int, *profiles: str) -> Any:
            given = {"device": "gpu-0", "shareID": f"{number}1111111-1111-1111-1111-111111111111"}
            return claims.allocate(name, given, config=[settings(workloadProfiles=list(profiles))])

        claim, again = share("one", 1, "max-q", "compute"), share("two", 2, "compute", "max-q")
        other = share("other", 3, "max-q")
        assert await prepare(node, claim) == ""
        assert knobs(node) == {"workloadProfiles": ["compute", "max-q"]}
        (record,) = node.store.claims.values()
        assert record_of_document(record.document) == record
        assert await prepare(node, again) == ""
        assert "wants workloadProfiles of device" in await prepare(node, other)
        assert await unprepare(node, claim) == await unprepare(node, again) == ""
        assert (knobs(node), recorded_settings(node)) == ({"workloadProfiles": ["max-p"]}, set())

    run(tmp_path, scenario)


def test_prepare_without_settings_reads_no_knobs(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        assert await prepare(node, claims.allocate("a", "gpu-0")) == ""
        assert not {"knobs", "set_knobs"} & {name for name, _arguments in node.backend.calls}
        (record,) = node.store.claims.values()
        assert '"settings"' not in record.document  # releases without settings can read the record
        assert record_of_document(record.document) == record

    run(tmp_path, scenario)


def test_prepare_unsupported_value_is_rejected_with_the_range(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0", config=[settings(powerLimit=800, memoryClocks={"maximum": 1000})])
        error = await prepare(node, claim)
        assert "cannot set device gpu-0 (GPU-" in error
        assert "powerLimit is 800; expected a whole number from 200 to 700 W" in error
        assert "memoryClocks is not supported by this device" in error
        assert (knobs(node), recorded_settings(node), node.store.claims, node.cdi_files()) == ({}, set(), {}, ())

    run(tmp_path, scenario)


def test_prepare_failed_setting_rolls_back_the_previous_ones(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0", "gpu-1", config=[settings(powerLimit=300)])
        set_knobs, count = node.backend.set_knobs, 0

        def failing(uuid: str, values: Any) -> None:
            nonlocal count
            count += 1
            if count == 2:
                raise AcceleratorError("the board said no")
            set_knobs(uuid, values)

        node.backend.set_knobs = failing
        assert "the board said no" in await prepare(node, claim)
        assert (knobs(node), knobs(node, 1), recorded_settings(node), node.store.claims) == ({}, {}, set(), {})
        assert await prepare(node, claim) == ""
        assert knobs(node) == knobs(node, 1) == {"powerLimit": 300}

    run(tmp_path, scenario)


def test_unprepare_faulty_device_restores_settings_after_it_recovers(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        first, second = claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)]), claims.allocate("b", "gpu-0")
        assert await prepare(node, first) == ""
        node.backend.faults[0] = Fault("lost", "It is lost")
        assert await unprepare(node, first) == ""
        uuid = node.gpus.template(0).uuid
        assert (node.owing(), recorded_settings(node)) == (frozenset({uuid}), {"powerLimit"})
        del node.backend.faults[0]
        # The next claim finds the device with its previous settings.
        assert await prepare(node, second) == ""
        assert (knobs(node), recorded_settings(node), node.owing()) == ({}, set(), frozenset())

    run(tmp_path, scenario)


@pytest.mark.parametrize("error", [BackendUnavailable("no library"), AcceleratorError("the tool is missing")])
def test_unprepare_failed_restore_becomes_pending_cleanup(tmp_path: Path, error: AcceleratorError) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0", config=[settings(powerLimit=300, graphicsClocks={"maximum": 900})])
        assert await prepare(node, claim) == ""
        node.backend.failures["set_knobs"] = [error]
        assert await unprepare(node, claim) == ""
        assert (node.store.claims, len(recorded_settings(node)), len(knobs(node))) == ({}, 1, 1)
        uuid = node.gpus.template(0).uuid
        assert node.owing() == {uuid}
        await node.service.housekeeping.settle(uuid)
        assert (knobs(node), recorded_settings(node), node.owing()) == ({}, set(), frozenset())

    run(tmp_path, scenario)


def test_prepare_device_with_failed_restore_is_rejected_with_the_reason(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        first, second = claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)]), claims.allocate("b", "gpu-0")
        assert await prepare(node, first) == ""
        node.backend.failures["set_knobs"] = [AcceleratorError("the board said no")] * 2
        assert await unprepare(node, first) == ""
        before = dict(node.store.meta)
        error = await prepare(node, second)
        assert "powerLimit of" in error and "which a claim had set, cannot be set back" in error
        assert (node.store.meta, node.store.claims) == (before, {})
        assert await prepare(node, second) == ""  # the board accepts changes again
        assert (knobs(node), recorded_settings(node)) == ({}, set())

    run(tmp_path, scenario)


def test_prepare_unsupported_knob_leaves_no_pending_cleanup(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", "gpu-0", config=[settings(graphicsClocks={"maximum": 900})])
        node.backend.failures["set_knobs"] = [Unsupported("the board is too old")] * 2
        assert "too old" in await prepare(node, claim)
        assert (recorded_settings(node), node.owing(), node.store.claims) == (set(), frozenset(), {})

    run(tmp_path, scenario)


def test_unprepare_another_claim_keeps_the_settings(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        one = claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)])
        watcher = claims.allocate("watch", {"device": "gpu-0", "adminAccess": True})
        assert [await prepare(node, each) for each in (one, watcher)] == ["", ""]
        assert await unprepare(node, watcher) == ""
        await node.service.housekeeping.settle(node.gpus.template(0).uuid)
        assert (knobs(node), recorded_settings(node)) == ({"powerLimit": 300}, {"powerLimit"})

    run(tmp_path, scenario)


def test_unprepare_last_claim_of_a_shared_device_restores_the_settings(tmp_path: Path) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        def share(name: str, number: int, **fields: Any) -> Any:
            given = {"device": "gpu-0", "shareID": f"{number}1111111-1111-1111-1111-111111111111"}
            return claims.allocate(name, given, config=[settings(**fields)])

        one, two = share("one", 1, powerLimit=300, computeMode="Default"), share("two", 2, powerLimit=300)
        other = share("other", 3, powerLimit=400)
        assert [await prepare(node, each) for each in (one, two)] == ["", ""]
        error = await prepare(node, other)
        assert "wants powerLimit of device GPU-" in error and "claim default/one, which shares it, has set 300" in error
        assert await unprepare(node, one) == ""
        assert (knobs(node), recorded_settings(node), node.owing()) == (
            {"powerLimit": 300},
            {"powerLimit"},
            frozenset(),
        )
        assert await unprepare(node, two) == ""
        assert (knobs(node), recorded_settings(node)) == ({}, set())
        assert await prepare(node, other) == ""
        assert knobs(node) == {"powerLimit": 400}

    run(tmp_path, scenario)


def test_restore_after_a_reboot_sets_the_claims_settings_again(tmp_path: Path) -> None:
    claims = Claims()

    async def life(boot: str, unprepared: bool) -> None:
        node = Node(tmp_path, claims, boot_id=boot)
        claim = claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)])
        if boot == "boot-1":
            turned_by_hand(node, powerLimit=500.0)  # the reboot resets this as well
        else:
            node.gpus.reboot()
        await node.start()
        assert await prepare(node, claim) == ""
        assert knobs(node) == {"powerLimit": 300}
        if unprepared:
            assert await unprepare(node, claim) == ""
            assert (knobs(node), recorded_settings(node)) == ({}, set())
        node.close()

    asyncio.run(life("boot-1", unprepared=False))
    asyncio.run(life("boot-2", unprepared=True))


def test_restarted_driver_sets_the_settings_of_prepared_claims_again(tmp_path: Path) -> None:
    claims = Claims()

    async def life(first: bool) -> None:
        node = Node(tmp_path, claims)
        claim = claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)])
        await node.start()
        if first:
            assert await prepare(node, claim) == ""
            turned_by_hand(node, powerLimit=400)
        else:
            assert knobs(node) == {"powerLimit": 300}
            assert await unprepare(node, claim) == ""
            assert knobs(node) == {}
        node.close()

    asyncio.run(life(first=True))
    asyncio.run(life(first=False))


def test_unprepare_after_a_lost_store_sets_the_defaults(tmp_path: Path) -> None:
    """After a loss of the store, the CDI file still has the claim's settings. The device gets its default values."""

    async def scenario(node: Node, claims: Claims) -> None:
        turned_by_hand(node, powerLimit=500.0)
        claim = claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)])
        assert await prepare(node, claim) == ""
        (record,) = node.store.claims.values()
        rebuilt = Store.rebuild(str(tmp_path / "other.db"), [record_of_document(record.document)], {})
        assert rebuilt.claims[claim.uid].devices[0].settings == {"powerLimit": 300}
        rebuilt.close()
        for key in [key for key in node.store.meta if key.startswith(SETTING_KEY)]:
            del node.store.meta[key]
        assert await unprepare(node, claim) == ""
        assert (knobs(node), recorded_settings(node)) == ({}, set())

    run(tmp_path, scenario)


def test_prepared_claims_returns_set_and_previous_values(tmp_path: Path) -> None:
    """Other programs that change settings of the node read the claim's values and the previous values from the store."""

    async def scenario(node: Node, claims: Claims) -> None:
        turned_by_hand(node, powerLimit=650.5)
        uuid = node.gpus.template(0).uuid
        assert await prepare(node, claims.allocate("a", "gpu-0", config=[settings(powerLimit=300)])) == ""
        assert await prepare(node, claims.allocate("b", "gpu-1")) == ""
        store, boot = str(node.store.path), node.boot_id
        assert knobs_before_claims(store, boot) == {(uuid, "powerLimit"): 650.5}
        assert knobs_before_claims(store, "another") == {}
        found = {claim.name: claim.devices[0].settings for claim in prepared_claims(store)}
        assert found == {"a": ("powerLimit",), "b": ()}
        with contextlib.closing(sqlite3.connect(store)) as connection:
            connection.execute("UPDATE meta SET value = replace(value, '650', '250') WHERE key LIKE 'setting:%'")
            connection.commit()
        with pytest.raises(AcceleratorError, match="was changed: its checksum"):
            knobs_before_claims(store, boot)

    run(tmp_path, scenario)
    assert knobs_before_claims(str(tmp_path / "none.db"), "any") == {}
