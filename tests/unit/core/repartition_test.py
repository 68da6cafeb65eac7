# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Operations of a repartitioning disturb only the users that they have to. Compared with every possible arrangement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from board_model import Place, all_states, device, multiset
from dra_driver.core.errors import AcceleratorError, InUse
from dra_driver.core.host.system import System
from dra_driver.core.model import Device, Placement, Process
from dra_driver.core.partitioning.layout_execute import execute
from dra_driver.core.partitioning.layout_plan import CreatePartition, DestroyPartition, plan_layout
from dra_driver.core.partitioning.rules import Rule, parse_rules
from dra_driver.core.repartition import record as records
from dra_driver.core.repartition.operations import (
    Operation,
    driver_rules,
    plan_operations,
    publish_equally,
    remaining_claims,
)
from dra_driver.core.repartition.record import Moment, Record, Watch
from dra_driver.core.repartition.settings_changes import IdleSettings, idle_settings
from dra_driver.core.schema import Boolean
from dra_driver.core.settings.knobs import Knob
from dra_driver.core.settings.settings_plan import parse_settings
from dra_driver.core.store.prepared_claims import PreparedPartition
from dra_driver.core.vendors.nvidia import offers
from hypothesis import given
from hypothesis import strategies as st
from layout_plan_test import linked, rule_of, states_by_multiset
from memory_backend import MemoryBackend

BOARD = "h100-80"
STATIC = {"mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}}


class Offers:
    """The pure functions of a backend that a plan calls."""

    vendor, driver_name, grouping = "nvidia", "gpu.nvidia.com", None
    offers = staticmethod(offers.offers)


def plan(
    devices: list[Device],
    rules: list[dict[str, Any]],
    prepared: list[PreparedPartition] | None = None,
    pods: dict[str, int] | None = None,
    former: list[dict[str, Any]] | None = None,
    prefer: str = "pods",
    idle_settings: dict[str, IdleSettings] | None = None,
) -> tuple[tuple[Operation, ...], tuple[AcceleratorError, ...]]:
    return plan_operations(
        Offers(),  # type: ignore[arg-type]
        devices,
        parse_rules(rules),
        prepared or [],
        pods,
        parse_rules(former or []),
        prefer,
        idle_settings,
    )


def only(gpu: Device, rule: dict[str, Any], prepared: list[PreparedPartition] | None = None, **more: Any) -> Operation:
    (found,), errors = plan([gpu], [{"match": {}, **rule}], prepared, **more)
    assert not errors
    return found


def holding(gpu: Device, number: int, claim: str, *, created: bool = False) -> PreparedPartition:
    part = gpu.partitions[number]
    return PreparedPartition(claim, gpu.uuid, part.uuid, part.profile_id, part.placement, created)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[tuple[Place, ...], dict[int, int], tuple[tuple[int, int], ...]]:
    """Draw a current state, the number of pods per partition, and the desired multiset."""
    states = all_states(BOARD)
    present = draw(st.sampled_from(states))
    users = {number: draw(st.integers(0, 3)) for number in range(len(present))}
    return present, users, multiset(draw(st.sampled_from(states)))


@given(scenes(), st.sampled_from(("pods", "partitions")))
def test_plan_disturbs_minimum_in_preferred_order(
    scene: tuple[tuple[Place, ...], dict[int, int], tuple[tuple[int, int], ...]], prefer: str
) -> None:
    present, users, target = scene
    gpu = device(BOARD, enabled=True, places=present)
    place_of = {number: (each.profile_id, each.placement.start) for number, each in enumerate(gpu.partitions)}
    count = {place_of[number]: pods for number, pods in users.items()}
    prepared = [holding(gpu, number, f"team/{number}") for number, pods in users.items() if pods]
    pods = {f"team/{number}": each for number, each in users.items() if each}
    rule = rule_of(gpu, target)
    document = {
        "mode": "static",
        "partitions": [{"profile": each.profile, "count": each.count} for each in rule.partitions],
    }
    found, errors = plan([gpu], [{"match": {}, **document}], prepared, pods, prefer=prefer)
    candidates = states_by_multiset(BOARD)[target]
    gone = [set(present) - candidate for candidate in candidates]
    rank = (0, 1) if prefer == "pods" else (1, 0)

    def cost(places: set[Place]) -> tuple[int, int]:
        both = (sum(count[place] for place in places), len(places))
        return both[rank[0]], both[rank[1]]

    least = min(cost(each) for each in gone)
    assert not errors
    if not found:
        assert least == (0, 0) and multiset(present) == target
        return
    going = {(each.partition.profile_id, each.partition.placement.start) for each in found[0].deleted}
    assert cost(going) == least
    assert sorted(found[0].claims) == sorted({claim for each in found[0].deleted for claim in each.claims})
    # The recorded layout with its places gives the same plan, even when claims have ended in between.
    left = [each for each in prepared if each.claim not in found[0].claims]
    wanted = parse_rules([dict(each) for each in found[0].wanted])
    again = plan_layout(gpu, wanted[0], prepared=left)
    assert again.steps == found[0].steps
    backend = MemoryBackend(BOARD, gpu)
    execute(backend, again)  # type: ignore[arg-type]
    # The plan for the previous layout restores the previous partitions.
    former = parse_rules([dict(each) for each in found[0].former])
    execute(backend, plan_layout(backend.present, former[0]))  # type: ignore[arg-type]
    assert {(each.profile_id, each.placement.start) for each in backend.present.partitions} == set(present)


@pytest.mark.parametrize(("prefer", "partitions", "pods"), [("pods", 3, 0), ("partitions", 2, 1)])
def test_plan_preference_decides_between_pods_and_partitions(prefer: str, partitions: int, pods: int) -> None:
    gpu = device(BOARD, places=((19, 0), (19, 2), (20, 3), (19, 4)))
    wanted = {"mode": "static", "partitions": {"2g.20gb": 2, "1g.10gb": 1, "1g.10gb+me": 1}}
    held = [holding(gpu, number, "team/a") for number, each in enumerate(gpu.partitions) if each.placement.start == 0]
    found = only(gpu, wanted, held, prefer=prefer)
    assert (len(found.deleted), len(found.claims)) == (partitions, pods)


def test_plan_claims_on_kept_partitions_stay() -> None:
    gpu = device(BOARD, places=((9, 4), (19, 0), (19, 1), (19, 2), (19, 3)))
    prepared = [holding(gpu, number, f"team/{number}") for number in range(5)]
    found = only(gpu, {"mode": "static", "partitions": {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}}, prepared)
    assert len(found.deleted) == 2 and len(found.claims) == 2 and not found.ends_use
    kept = {
        "gpu-0-mig-3g40gb-9-4",
        *(f"gpu-0-mig-1g10gb-19-{part.placement.start}" for _u, part in found.kept if part.profile_id == 19),
    }
    gone = {f"gpu-0-mig-1g10gb-19-{each.partition.placement.start}" for each in found.deleted}
    assert not kept & set(found.names) and gone <= set(found.names)


def test_plan_dynamic_to_static_claim_partition_ends_with_claim() -> None:
    gpu = device(BOARD, places=((19, 0),))
    found = only(gpu, STATIC, [holding(gpu, 0, "team/a", created=True)])
    assert found.claims == ("team/a",) and not any(isinstance(each, DestroyPartition) for each in found.steps)
    assert len([each for each in found.steps if isinstance(each, CreatePartition)]) == 5
    # The rollback returns the GPU to dynamic mode.
    assert found.former[0]["mode"] == "dynamic"


def test_plan_dynamic_to_whole_ends_claims() -> None:
    gpu = device(BOARD, places=((19, 0),))
    found = only(gpu, {"mode": "whole"}, [holding(gpu, 0, "team/a", created=True)])
    assert found.ends_use and found.claims == ("team/a",) and not found.resets


def test_plan_whole_device_with_claim_is_drained_before_mode_change() -> None:
    gpu = device(BOARD)
    found = only(gpu, STATIC, [PreparedPartition("team/whole", gpu.uuid)])
    assert found.ends_use and found.claims == ("team/whole",) and found.former[0]["mode"] == "whole"
    assert "gpu-0" in found.names


def test_plan_empty_device_to_dynamic_has_no_operation() -> None:
    assert plan([device(BOARD)], [{"match": {}, "mode": "dynamic"}]) == ((), ())


def test_plan_devices_reset_together_are_one_operation() -> None:
    gpus = linked("a30", {0: (1,), 1: (0,)})
    gpus[0] = replace(device("a30", 0, places=((5, 0),)), linked=gpus[0].linked)
    held = PreparedPartition("team/train", gpus[0].uuid, gpus[0].partitions[0].uuid)
    rules = [{"match": {"index": 1}, "mode": "static", "partitions": {"1g.6gb": 1}}]
    (found,), errors = plan(gpus, rules, [held])
    assert not errors and found.resets and found.ends_use
    assert found.uuids == (gpus[0].uuid, gpus[1].uuid) and found.claims == ("team/train",)
    # The neighbor has no rule, and the rollback restores its previous mode.
    assert [each["match"]["uuid"] for each in found.wanted] == [[gpus[1].uuid]]
    assert [each["mode"] for each in found.former] == ["static", "whole"]
    assert {"gpu-0-mig-4g24gb-0-0", "gpu-1"} & set(found.names) == {"gpu-1"}
    assert any(name.startswith("gpu-0-mig-") for name in found.names)


def test_plan_processes_without_claim_are_rejected() -> None:
    gpu = device(BOARD, places=((9, 4),))
    part = replace(gpu.partitions[0], processes=(Process(4711, "python3"),))
    _found, (error,) = plan([replace(gpu, partitions=(part,))], [{"match": {}, "mode": "whole"}])
    assert isinstance(error, InUse) and error.pids == (4711,) and "no pod to evict" in error.hint


def test_plan_error_of_one_device_keeps_others() -> None:
    gpus = [device(BOARD, 0, enabled=True), device(BOARD, 1, enabled=True)]
    rules = [
        {"match": {"index": 0}, "mode": "static", "partitions": {"7g.80gb": 2}},
        {"match": {}, "mode": "static", "partitions": {"7g.80gb": 1}},
    ]
    (found,), (error,) = plan(gpus, rules)
    assert found.uuids == (gpus[1].uuid,) and error.code == "does-not-fit"


def test_driver_rules_change_device_by_device() -> None:
    gpus = [device(BOARD, number) for number in range(3)]
    new = parse_rules([{"match": {"index": [0, 1]}, "mode": "dynamic"}, {"match": {}, "mode": "whole", "shares": 4}])
    old = parse_rules([{"match": {}, "mode": "whole"}])
    documents = driver_rules(gpus, new, old, {gpus[1].uuid})
    assert [each["mode"] for each in documents] == ["dynamic", "whole", "whole"] and documents[2]["shares"] == 4
    assert parse_rules([dict(each) for each in documents])[0].match.uuid == (gpus[0].uuid,)
    assert not publish_equally(gpus[0], new, old) and publish_equally(gpus[0], new, new)


# ---- the record of an operation


def record(**changes: Any) -> Record:
    facts: dict[str, Any] = {
        "operation": "repartition-1",
        "devices": ("GPU-0",),
        "step": "draining",
        "until": 1000.0,
        "wanted": ({"match": {}, "mode": "whole"},),
        "former": ({"match": {}, "mode": "dynamic"},),
        "names": ("gpu-0",),
    }
    return Record(**{**facts, **changes})


def test_record_round_trips(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    (tmp_path / "state").mkdir()
    assert records.read(system, "/state") is None
    records.write(system, "/state", record())
    assert records.read(system, "/state") == record()
    assert (tmp_path / "state" / records.FILE).stat().st_mode & 0o777 == 0o600
    assert records.remove(system, "/state") and not records.remove(system, "/state")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"devices": None},
        {"step": "sleeping"},
        {"until": "soon"},
        {"boottime": float("nan")},
        {"wanted": [3]},
    ],
)
def test_parse_invalid_record_is_named(change: dict[str, Any]) -> None:
    text = json.dumps({"version": 1, **record().to_dict(), **change})
    with pytest.raises(AcceleratorError) as caught:
        records.parse(text, "/x/repartition.json")
    assert caught.value.code == "damaged-record" and "/x/repartition.json" in str(caught.value)


BOOT = Moment("boot-1", 10_000.0, 1_700_000_000.0)


def at(seconds: float, *, boot: str = "boot-1", wall: float = 0.0) -> Moment:
    """Return the moment ``seconds`` later. ``wall`` is the clock adjustment in seconds."""
    return Moment(boot, BOOT.boottime + seconds, BOOT.wall + seconds + wall)


def test_watch_holds_devices_until_expiry(tmp_path: Path) -> None:
    now = [BOOT]
    watch = Watch(str(tmp_path), clock=lambda: now[0])
    known = ("GPU-0", "GPU-1")
    assert watch.held(known) == frozenset() and not watch.is_active() and watch.expired() is None
    watch.refuse({"GPU-0"})
    records.write(System(), str(tmp_path), record().held_for(600, BOOT))
    assert watch.held(known) == {"GPU-0"} and watch.is_active() and watch.expired() is None
    watch.refuse({"GPU-1"})
    with pytest.raises(InUse) as caught:
        watch.refuse({"GPU-1", "GPU-0"})
    assert caught.value.code == "device-repartitioned" and "repartition-1" in str(caught.value)
    now[0] = at(599)
    assert watch.is_active()
    now[0] = at(600)
    assert watch.held(known) == frozenset() and not watch.is_active() and watch.expired() is not None
    watch.refuse({"GPU-0"})
    records.remove(System(), str(tmp_path))
    assert watch.held(known) == frozenset() and watch.expired() is None


@pytest.mark.parametrize("wall", [-1e9, -3600.0, 3600.0, 1e9])
def test_watch_clock_change_keeps_hold(wall: float) -> None:
    held = record().held_for(600, BOOT)
    assert held.holds(at(1, wall=wall)) and held.remaining(at(1, wall=wall)) == 599
    assert not held.holds(at(601, wall=wall))


def test_watch_reboot_restarts_hold() -> None:
    held = record().held_for(600, BOOT)
    for uptime, holds in ((5.0, True), (599.0, True), (600.0, False), (20_000.0, False)):
        assert held.holds(Moment("boot-2", uptime, BOOT.wall + 3)) is holds


def test_watch_hold_is_limited() -> None:
    assert not record().held_for(records.LONGEST_SECONDS + 1, BOOT).holds(BOOT)


def test_watch_record_of_earlier_release_holds_by_time_of_day() -> None:
    older = record(until=BOOT.wall + 60)
    assert older.holds(at(59)) and not older.holds(at(60))


@pytest.mark.parametrize("text", ["", "{", '{"version": 2}', "\udcff"])
def test_watch_unreadable_record_holds_all_devices(tmp_path: Path, text: str) -> None:
    watch = Watch(str(tmp_path), clock=lambda: BOOT)
    (tmp_path / records.FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert watch.held(("GPU-0", "GPU-1")) == {"GPU-0", "GPU-1"}
    assert watch.is_active() and watch.expired() is None
    with pytest.raises(InUse) as caught:
        watch.refuse({"GPU-1"})
    assert caught.value.code == "device-repartitioned" and records.FILE in str(caught.value)
    assert "remove the file" in caught.value.hint
    (tmp_path / records.FILE).unlink()
    assert not watch.is_active()
    watch.refuse({"GPU-1"})


def test_rule_round_trips() -> None:
    rules = [
        {
            "match": {},
            "mode": "static",
            "partitions": [{"profile": "1g.10gb", "placement": 3}, {"profile": "1g.10gb", "count": 2}],
        },
        {"match": {}, "mode": "whole", "shares": 4},
        {"match": {}, "mode": "dynamic", "passthrough": True, "prepared_before_binding": True},
        {"match": {}, "mode": "whole", "composed": False},
    ]
    gpu = device(BOARD)
    for rule in rules:
        (documents,) = driver_rules([gpu], parse_rules([rule]), (), ())
        again: Rule = parse_rules([dict(documents)])[0]
        assert replace(again, match=parse_rules([rule])[0].match) == parse_rules([rule])[0]


# ---- claims that the driver still has prepared


def held_of(operation: Operation, prepared: list[PreparedPartition]) -> tuple[str, ...]:
    document = operation.to_dict()
    going = [(each["device_uuid"], each["start"], each["size"]) for each in document["going"]]
    return remaining_claims(prepared, parse_rules(document["wanted"]), going, operation.ends_use, operation.uuids)


def test_held_of_claims_on_deleted_partitions_only() -> None:
    gpu = device(BOARD, places=((9, 4), (19, 0), (19, 1), (19, 2), (19, 3)))
    prepared = [holding(gpu, number, f"team/{number}") for number in range(5)]
    found = only(gpu, {"mode": "static", "partitions": {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}}, prepared)
    assert sorted(held_of(found, prepared)) == sorted(found.claims)
    assert held_of(found, [each for each in prepared if each.claim not in found.claims]) == ()
    # A partition of another device with the same places does not delay the operation.
    assert held_of(found, [replace(each, device_uuid="GPU-other") for each in prepared]) == ()


def test_held_of_all_claims_if_everything_is_deleted() -> None:
    gpu = device(BOARD)
    found = only(gpu, STATIC, [PreparedPartition("team/whole", gpu.uuid)])
    assert held_of(found, [PreparedPartition("team/late", gpu.uuid)]) == ("team/late",)


def test_held_of_dynamic_to_static_includes_later_claims() -> None:
    gpu = device(BOARD, places=((19, 0),))
    found = only(gpu, STATIC, [holding(gpu, 0, "team/a", created=True)])
    late = replace(holding(gpu, 0, "team/late", created=True), placement=Placement(6, 1), partition_uuid="MIG-late")
    assert held_of(found, [late]) == ("team/late",)


# ---- settings that need an idle device


ECC_OFF = IdleSettings({"ecc": False}, {"ecc": True})


def test_plan_ecc_change_drains_resets_and_restores_layout() -> None:
    gpu = device(BOARD, places=((9, 4), (19, 0)))
    held = holding(gpu, 0, "team/a")
    rule = {"mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 1}}
    found = only(gpu, rule, [held], idle_settings={gpu.uuid: ECC_OFF})
    assert (
        found.resets and found.ends_use and found.claims == ("team/a",) and len(found.deleted) == 2 and not found.kept
    )
    documents = found.to_dict()
    assert [each["step"] for each in documents["steps"]] == [
        *["destroy_partition"] * 2,
        "set",
        "reset_device",
        *["create_partition"] * 2,
    ]
    assert documents["settings"] == [{"match": {"uuid": [gpu.uuid]}, "ecc": False}]
    assert documents["former_settings"] == [{"match": {"uuid": [gpu.uuid]}, "ecc": True}]
    # The GPU is emptied in its mode, then its partitions are created at the same places.
    backend = MemoryBackend(BOARD, gpu)
    execute(backend, plan_layout(gpu, parse_rules(list(documents["emptied"]))[0]))  # type: ignore[arg-type]
    assert backend.present.partitions == () and backend.present.partitioning.enabled
    execute(backend, plan_layout(backend.present, parse_rules([dict(found.wanted[0])])[0]))  # type: ignore[arg-type]
    assert {each.key for each in backend.present.partitions} == {each.key for each in gpu.partitions}


def test_plan_ecc_change_drains_devices_reset_together() -> None:
    gpus = [*linked("a30", {0: (1,), 1: (0,)}), device("a30", 2)]
    held = [PreparedPartition("team/pair", gpus[1].uuid), PreparedPartition("team/far", gpus[2].uuid)]
    (found,), errors = plan(gpus, [{"match": {}, "mode": "whole"}], held, idle_settings={gpus[0].uuid: ECC_OFF})
    assert not errors and found.uuids == (gpus[0].uuid, gpus[1].uuid) and found.claims == ("team/pair",)
    assert [each["match"]["uuid"] for each in found.settings] == [[gpus[0].uuid]] and found.to_dict()["emptied"] == []


def test_plan_compute_mode_drains_without_reset() -> None:
    gpu = device(BOARD)
    held = PreparedPartition("team/a", gpu.uuid)
    change = IdleSettings({"compute_mode": "ExclusiveProcess"}, {"compute_mode": "Default"})
    found = only(gpu, {"mode": "whole"}, [held], idle_settings={gpu.uuid: change})
    assert found.claims == ("team/a",) and found.ends_use and not found.resets
    assert [each["step"] for each in found.to_dict()["steps"]] == ["set"]


def test_plan_drained_dynamic_device_claim_partition_ends_with_claim() -> None:
    gpu = device(BOARD, places=((19, 0),))
    held = holding(gpu, 0, "team/a", created=True)
    found = only(gpu, {"mode": "dynamic"}, [held], idle_settings={gpu.uuid: ECC_OFF})
    assert found.claims == ("team/a",) and len(found.deleted) == 1
    assert not any(isinstance(each, CreatePartition | DestroyPartition) for each in found.steps)


@pytest.mark.parametrize(
    ("wanted", "knob", "changes"),
    [
        ({"ecc": True}, {"ecc": (True, True)}, {}),
        ({"ecc": False}, {"ecc": (True, True)}, {"ecc": False}),
        ({"ecc": True}, {"ecc": (True, False)}, {"ecc": True}),  # another tool has a pending change
        ({"ecc": False}, {}, {}),  # a board without ECC
        ({"power_limit": 400}, {"powerLimit": (700, None)}, {}),
        (
            {"compute_mode": "ExclusiveProcess"},
            {"computeMode": ("Default", None)},
            {"compute_mode": "ExclusiveProcess"},
        ),
        ({"compute_mode": "Default"}, {"computeMode": ("ExclusiveProcess", None)}, {}),
        ({"compute_mode": "ExclusiveProcess"}, {"computeMode": ("Default", "MIG is on")}, {}),
    ],
)
def test_idle_settings_lists_settings_that_need_an_idle_device(
    wanted: dict[str, Any], knob: dict[str, tuple[Any, Any]], changes: dict[str, Any]
) -> None:
    knobs = {
        name: Knob(value, Boolean(), blocked=more) if isinstance(more, str) else Knob(value, Boolean(), more)
        for name, (value, more) in knob.items()
    }
    found = idle_settings(device(BOARD), knobs, parse_settings([{"match": {}, **wanted}]))
    assert (dict(found.wanted) if found else {}) == changes
    assert idle_settings(device(BOARD), knobs, ()) is None
