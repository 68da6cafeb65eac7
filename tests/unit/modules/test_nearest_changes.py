# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verify each proposed change: apply it to the cluster's objects or to a model of the boards, then explain the pod again."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import planned
from tests.oracles.allocation_cases import MODELS, Case, make_case
from tests.unit.core import board_model

Json = dict[str, Any]
UTILS = "ansible_collections.dra.accelerators.plugins.module_utils"
FITS, NO = "fits", "no"
SMALL = "1g.10gb"


def module(name: str) -> Any:
    return importlib.import_module(f"{UTILS}.{name}")


def explained(objects: Iterable[Json], wanted: Json, nodes: Mapping[str, Any] | None = None) -> Any:
    """Return the explanation of a pod or a claim in a cluster with these objects."""
    explanations = module("_scheduling.explain_sources")
    found = explanations.Objects()
    for each in objects:
        found.add(each["kind"], each, "default")
    explainer = explanations.explainer_of(found, nodes)
    return explainer.pod(wanted) if wanted["kind"] == "Pod" else explainer.claim(wanted)


def named(objects: Iterable[Json], name: str) -> Json:
    (found,) = [each for each in objects if f"default/{each['metadata']['name']}" == name]
    return found


# ---- claims that end or move, and taints


def with_devices(claim: Json, devices: Sequence[Json]) -> Json:
    """Return the claim with an allocation of these devices."""
    results = []
    for number, one in enumerate(devices):
        result = {key: one[key] for key in ("request", "driver", "pool", "device")}
        if one["consumed"]:
            result.update(shareID=f"0a7f6a1e-52ae-41de-9a3b-{number:012x}", consumedCapacity=one["consumed"])
        results.append(result)
    return {**claim, "status": {"allocation": {"devices": {"results": results}}}}


def without_devices(claim: Json) -> Json:
    return {**claim, "status": {}}


def devices_on(explanation: Any, node: str) -> list[Json]:
    found = {one["node"]: one for one in explanation.to_dict()["nodes"]}[node]
    assert found["verdict"] == FITS, (node, found)
    return list(found["devices"])


def after_moves(case: Case, change: Any) -> Counter[str]:
    """Apply a change that frees claims, move the claims it lists as movable, and count the cases by kind."""
    base = [*case.nodes, *case.slices, *case.classes, *case.rules, case.pod]
    held = [each for each in case.held if f"default/{each['metadata']['name']}" not in change.claims]
    devices = devices_on(explained([*base, *held, *case.wanted], case.pod), change.node)
    seen = Counter({"freed": 1})
    mine = [
        with_devices(each, [one for one in devices if one["claim"] == f"default/{each['metadata']['name']}"])
        for each in case.wanted
    ]
    watching = {"r" + str(number) for number in range(3)} if "adminAccess" in str(case.wanted) else set()
    for name in change.claims:
        claim = without_devices(named(case.held, name))
        found = explained([*base, *held, *mine, claim], claim)
        fitting = {one["node"] for one in found.to_dict()["nodes"] if one["verdict"] == FITS} - {change.node}
        if name in change.moves:
            held.append(with_devices(claim, devices_on(found, change.moves[name])))
            seen["moved"] += 1
        elif not watching and "adminAccess" not in str(claim):
            assert not fitting, f"{name} could go to {fitting}"
            seen["stays"] += 1
    return seen


def case_with_users_gone(seed: int) -> Case:
    """Return a case without ``reservedFor``, so that only the devices limit where a claim can move."""
    case = make_case(seed)
    case.held = [
        {**each, "status": {key: value for key, value in each["status"].items() if key != "reservedFor"}}
        for each in case.held
    ]
    return case


def changes_of(case: Case) -> Any:
    return explained(
        [*case.nodes, *case.slices, *case.classes, *case.rules, *case.held, *case.wanted, case.pod], case.pod
    )


def crowded(seed: int) -> Case:
    """Return three nodes with devices of two models. Claims hold most of them, by model or for any device."""
    chance, case = random.Random(seed), Case("crowded")
    case.classes = [{"kind": "DeviceClass", "metadata": {"name": "any"}, "spec": {}}]
    for node in ("n0", "n1", "n2"):
        case.nodes.append({"kind": "Node", "metadata": {"name": node}})
        models = [chance.choice(MODELS) for _device in range(chance.randint(1, 3))]
        devices = [{"name": f"d{at}", "attributes": {"model": {"string": one}}} for at, one in enumerate(models)]
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": case.driver, "nodeName": node, "pool": pool, "devices": devices}
        case.slices.append({"kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec})
        for device, model in zip(devices, models, strict=True):
            if chance.random() < 0.7:
                claim = claim_for(case, f"held-{len(case.held)}", chance.choice(("", model)), 1)
                one = {"request": "r0", "driver": case.driver, "pool": node, "device": device["name"], "consumed": {}}
                case.held.append(with_devices(claim, [one]))
    case.wanted = [claim_for(case, "wanted", chance.choice(("", *MODELS)), chance.choice((1, 2, 2, 3)))]
    case.pod = planned.pod("wants", "wanted")
    return case


def claim_for(case: Case, name: str, model: str, count: int) -> Json:
    expression = f"device.attributes['{case.driver}'].model == '{model}'"
    exactly: Json = {"deviceClassName": "any", "count": count, "allocationMode": "ExactCount"}
    exactly["selectors"] = [{"cel": {"expression": expression}}] if model else []
    spec = {"devices": {"requests": [{"name": "r0", "exactly": exactly}]}}
    return {"kind": "ResourceClaim", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


@given(seed=st.integers(0, 100_000))
@pytest.mark.parametrize("kind", [case_with_users_gone, crowded])
def test_changes_of_ended_or_moved_claims_make_room(kind: Any, seed: int) -> None:
    case = kind(seed)
    for change in changes_of(case).changes:
        if change.kind == "free-claims":
            after_moves(case, change)


@pytest.mark.prove
def test_changes_cases_cover_moved_and_ended_claims() -> None:
    """Assert that the property test above covers both movable claims and claims that have to end."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        case = crowded(seed)
        for change in changes_of(case).changes:
            if change.kind == "free-claims":
                seen += after_moves(case, change)
    assert seen["moved"] >= 5 and seen["stays"] >= 5, seen


def test_changes_claim_moves_only_where_its_pods_fit() -> None:
    """One device on each of two nodes: the pod that holds the first device moves only to a node where it fits."""
    case = Case("moves")
    case.classes = [{"kind": "DeviceClass", "metadata": {"name": "any"}, "spec": {}}]
    for node, model in (("n0", "alpha"), ("n1", "beta")):
        case.nodes.append({"kind": "Node", "metadata": {"name": node, "labels": {"zone": node}}})
        device = {"name": "d", "attributes": {"model": {"string": model}}}
        spec = {"driver": case.driver, "nodeName": node, "devices": [device]}
        spec["pool"] = {"name": node, "generation": 1, "resourceSliceCount": 1}
        case.slices.append({"kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec})
    one = {"request": "r0", "driver": case.driver, "pool": "n0", "device": "d", "consumed": {}}
    held = with_devices(claim_for(case, "held", "", 1), [one])
    case.wanted, case.pod = [claim_for(case, "wanted", "alpha", 1)], planned.pod("wants", "wanted")
    base = [*case.nodes, *case.slices, *case.classes, *case.wanted, case.pod]

    def moves_of(*more: Json, **status: Any) -> tuple[str, Json]:
        (change,) = explained([*base, {**held, "status": {**held["status"], **status}}, *more], case.pod).changes
        return change.text, dict(change.moves)

    moves = "it fits when default/held ends, or is moved to node n1, which has room for it"
    ends = "it fits when default/held ends"
    users = {"reservedFor": [{"resource": "pods", "name": "user", "uid": "u"}]}
    running = planned.pod("user", "held", nodeName="n0")
    pinned = planned.pod("user", "held", nodeName="n0", nodeSelector={"zone": "n0"})
    assert moves_of() == moves_of(running, **users) == (moves, {"default/held": "n1"})
    # A pinned pod, an unknown pod, and a pod with a second claim that cannot move with it.
    assert moves_of(pinned, **users) == moves_of(**users) == (ends, {})
    beside = with_devices(claim_for(case, "beside", "", 1), [])
    where = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["n0"]}]}]}
    beside["status"]["allocation"]["nodeSelector"] = where
    assert moves_of(planned.pod("user", "held", "beside", nodeName="n0"), beside, **users) == (ends, {})


# ---- devices that have to be partitioned


def published_as(devices: planned.Devices, node: str, uuid: str) -> str:
    """Return the name under which a node publishes the device with a UUID."""
    for each in planned.slices(devices):
        for one in each["spec"].get("devices") or ():
            if each["spec"]["nodeName"] == node and (one["attributes"].get("uuid") or {}).get("string") == uuid:
                return str(one["name"])
    raise AssertionError(f"{node} does not publish {uuid}")


def holding(devices: planned.Devices, held: Mapping[str, Sequence[str]]) -> list[Json]:
    """Return claims that hold the devices with these UUIDs, by node."""
    found = []
    for node, uuids in held.items():
        for uuid in uuids:
            name = published_as(devices, node, uuid)
            claim = planned.claim(f"held-{len(found)}", SMALL if "mig" in name else "")
            result = {"request": "device", "driver": planned.DRIVER, "pool": node, "device": name}
            found.append({**claim, "status": {"allocation": {"devices": {"results": [result]}}}})
    return found


def cluster(devices: planned.Devices, claims: Iterable[Json]) -> list[Json]:
    nodes = [{"kind": "Node", "metadata": {"name": node}} for node in devices]
    return [*planned.CLASSES, *nodes, *planned.slices(devices), *claims]


STATES = st.sampled_from([each for each in board_model.all_states(planned.BOARD) if len(each) < 6])
PROFILES = {entry["id"]: entry["name"] for entry in board_model.board(planned.BOARD)["mig"]["profiles"]}


@st.composite
def gpus(draw: st.DrawFn) -> tuple[tuple[tuple[int, int], ...], frozenset[tuple[int, int]], bool, bool]:
    """Draw a GPU: its partitions, the held ones, whether a claim holds the whole GPU, and whether MIG is enabled."""
    places = draw(st.one_of(st.just(()), STATES))
    held = frozenset(place for place in places if draw(st.booleans()))
    enabled = bool(places) or draw(st.booleans())
    return places, held, not enabled and draw(st.booleans()), enabled


def room(gpu: Any, profile: str) -> int:
    """Return how many partitions of a profile fit next to the held ones. Without a profile: 1 if the whole GPU is free, or 0."""
    _places, held, occupied, _enabled = gpu
    if occupied:
        return 0
    if not profile:
        return int(not held)
    number = next(key for key, name in PROFILES.items() if name == profile)
    states = [each for each in board_model.all_states(planned.BOARD) if held <= set(each)]
    return max(sum(place[0] == number for place in set(state) - held) for state in states)


@given(
    fleet=st.lists(gpus(), min_size=1, max_size=2),
    profile=st.sampled_from(["", *sorted({name for name in PROFILES.values() if "+" not in name})]),
    count=st.integers(1, 3),
)
def test_repartition_change_is_named_and_makes_devices_fit(fleet: Any, profile: str, count: int) -> None:
    made = [
        planned.gpu(number, number, places=places, enabled=enabled)
        for number, (places, _held, _occupied, enabled) in enumerate(fleet)
    ]
    devices = {"gpu-1": made}
    held: list[str] = []
    for device, (_places, those, occupied, _enabled) in zip(made, fleet, strict=True):
        held += [one.uuid for one in device.partitions if (one.profile_id, one.placement.start) in those]
        held += [device.uuid] if occupied else []
    claims = holding(devices, {"gpu-1": held})
    wanted = planned.claim("wanted", profile, count=count)
    found = explained(cluster(devices, [*claims, wanted]), wanted, planned.answers(devices))
    cuts = [each for each in found.changes if each.kind == "repartition"]
    if found.verdict != NO:
        assert not cuts
        return
    easier = any(each.kind in ("tolerate", "free-claims") for each in found.changes)
    has_room = sum(room(each, profile) for each in fleet) >= count
    without_claims = sum(room((each[0], frozenset(), False, each[3]), profile) for each in fleet) >= count
    assert easier or bool(cuts) == (has_room or without_claims)
    for change in cuts:
        assert bool(change.claims) == (not has_room), change.text
        does_what_it_says(devices, claims, wanted, change)
    nothing = [each.text for each in found.changes if each.kind == "nothing"]
    assert all("no other partitioning of them provides it" in text for text in nothing)


def does_what_it_says(devices: planned.Devices, claims: Sequence[Json], wanted: Json, change: Any) -> None:
    """Partition the boards as a change says, into existing states with the held partitions, and assert that devices fit then."""
    left = [each for each in claims if f"default/{each['metadata']['name']}" not in change.claims]
    used = {one["device"] for each in left for one in each["status"]["allocation"]["devices"]["results"]}
    moves_of = change.text.removeprefix("make ").partition(" on node ")[0]
    after = list(devices["gpu-1"])
    names = {one["uuid"]["string"]: name for name, one in attributes(devices).items() if "uuid" in one}
    for words in moves_of.split(" and "):
        parts, _of, label = words.partition(" of ")
        number = next(at for at, each in enumerate(after) if label in (f"gpu-1/gpu-{each.minor}", f"gpu-1/{each.uuid}"))
        device = after[number]
        if parts == "whole":
            assert not any(names[one.uuid] in used for one in device.partitions)
            after[number] = planned.gpu(number, number, enabled=False)
            continue
        assert names.get(device.uuid) not in used
        kept = {(one.profile_id, one.placement.start) for one in device.partitions if names[one.uuid] in used}
        counts: Counter[str] = Counter()
        for part in parts.replace(" in addition to ", ", ").split(", "):
            amount, _x, name = part.partition(" x ")
            counts[name] += int(amount)
        states = [
            each
            for each in board_model.all_states(planned.BOARD)
            if kept <= set(each) and Counter(PROFILES[one[0]] for one in each) == counts
        ]
        assert states, f"no board can be cut so: {change.text}"
        after[number] = replace(planned.gpu(number, number, places=states[0], enabled=True), index=number)
    changed = {"gpu-1": after}
    names_after = attributes(changed)
    # A held partition keeps its place, and so its name.
    assert used <= set(names_after)
    again = explained(cluster(changed, [*left, wanted]), wanted)
    assert again.verdict == FITS, (change.text, again)


def attributes(devices: planned.Devices) -> dict[str, Json]:
    """Return the published attributes of each device, by device name."""
    return {
        one["name"]: one["attributes"] for each in planned.slices(devices) for one in each["spec"].get("devices") or ()
    }


def test_repartition_change_uses_unused_whole_gpu() -> None:
    devices = planned.fleet(1)
    taken = holding(devices, {"gpu-1": [devices["gpu-1"][0].uuid]})
    wanted = planned.claim("wanted", SMALL, count=7)
    (change,) = explained(cluster(devices, [*taken, wanted]), wanted, planned.answers(devices)).changes[:1]
    assert (change.kind, change.node, change.device, change.claims) == ("repartition", "gpu-1", "gpu-1/gpu-1", ())
    assert change.text.startswith("make 7 x 1g.10gb of gpu-1/gpu-1 on node gpu-1, which takes nothing from any claim: ")
    assert "dra.accelerators.plan" in change.text and "dra.accelerators.repartition" in change.text
    # A taint on the GPU also applies to its partitions.
    taint = {"key": "worn", "value": "yes", "effect": "NoSchedule"}
    rule = {
        "kind": "DeviceTaintRule",
        "metadata": {"name": "r"},
        "spec": {"deviceSelector": {"driver": planned.DRIVER, "pool": "gpu-1", "device": "gpu-1"}, "taint": taint},
    }
    tainted = explained([*cluster(devices, [*taken, wanted]), rule], wanted, planned.answers(devices))
    assert not any(each.kind == "repartition" and not each.claims for each in tainted.changes)


def test_repartition_change_names_possible_node() -> None:
    devices = planned.fleet(4, 1)
    taken = holding(devices, {node: [devices[node][0].uuid] for node in ("gpu-1", "gpu-2", "gpu-4")})
    wanted = planned.claim("wanted", SMALL, count=7)
    objects = cluster(devices, [*taken, wanted])
    (change,) = [
        one for one in explained(objects, wanted, planned.answers(devices)).changes if one.kind == "repartition"
    ]
    assert (change.node, change.device, change.claims) == ("gpu-3", "gpu-3/gpu-0", ())
    # Without the report of gpu-3 only the other nodes, which are alike, can be repartitioned.
    only = {node: each for node, each in planned.answers(devices).items() if node != "gpu-3"}
    (ends,) = [one for one in explained(objects, wanted, only).changes if one.kind == "repartition"]
    assert (ends.node, len(ends.claims)) == ("gpu-1", 1) and f"when {ends.claims[0]} ends" in ends.text


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            None,
            "whether a different partitioning would help is unknown for the nodes: dra.accelerators.plan queries them",
        ),
        ({}, "whether a different partitioning would help is unknown for gpu-1: dra.accelerators.plan queries them"),
    ],
)
def test_repartition_unknown_makes_no_proposal(nodes: Any, words: str) -> None:
    devices = planned.fleet(1)
    wanted = planned.claim("wanted", SMALL)
    (change,) = explained(cluster(devices, [wanted]), wanted, nodes).changes
    assert change.kind == "nothing" and words in change.text
    never = planned.claim("never", "9g.90gb")
    (known,) = explained(cluster(devices, [never]), never, planned.answers(devices)).changes
    assert known.kind == "nothing" and "no other partitioning of them provides it" in known.text
    every = planned.claim("every", SMALL)
    every["spec"]["devices"]["requests"][0]["exactly"]["allocationMode"] = "All"
    (all_of_them,) = explained(cluster(devices, [every]), every, planned.answers(devices)).changes
    assert "is unknown for gpu-1" in all_of_them.text


def test_explain_admin_access_claim_has_no_repartition() -> None:
    """Such a claim allocates no device exclusively, so no partitioning is proposed for it."""
    devices = planned.fleet(1)
    wanted = planned.claim("watching", "9g.90gb")
    wanted["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"] = True
    found = explained(cluster(devices, [wanted]), wanted, planned.answers(devices))
    assert found.verdict == NO and not any(each.kind == "repartition" for each in found.changes)
