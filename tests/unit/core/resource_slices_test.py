# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pools: built within each limit of the API, and updated with the minimum number of writes."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
from board_model import device
from dra_driver.core.dra.device_json import attribute_json
from dra_driver.core.dra.resource_slices import (
    PoolPlan,
    PoolSpec,
    SliceContent,
    build_pool,
    dropped_fields,
    plan_pool,
    plan_removal,
    same_content,
)
from dra_driver.core.model import CounterSet, Offer, Taint, Version
from dra_driver.core.vendors.nvidia.offers import counter_set, offers
from hypothesis import given
from hypothesis import strategies as st

OWNER = {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-uid", "controller": True}
TAINT = Taint("gpu.nvidia.com/xid", "NoSchedule", "79")


class ApiServer:
    """A model of ResourceSlices in the API server: names, UIDs, versions, immutable fields, and canonical quantities."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)

    def items(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(each) for each in self.objects.values()]

    def apply(self, plan: PoolPlan) -> list[str]:
        for write in plan.writes:
            number = str(next(self._numbers))
            if write.verb == "create":
                body = copy.deepcopy(write.body)
                assert body is not None and write.name == "" and not write.preconditions
                name = f"{body['metadata']['generateName']}{int(number):05d}"
                body["metadata"].update(name=name, uid=f"uid-{number}", resourceVersion=number)
                self.objects[name] = self._stored(body)
                continue
            old = self.objects[write.name]
            assert write.preconditions == {key: old["metadata"][key] for key in ("uid", "resourceVersion")}
            if write.verb == "delete":
                assert write.body is None
                del self.objects[write.name]
                continue
            assert write.verb == "update" and write.body is not None
            body = copy.deepcopy(write.body)
            assert body["metadata"]["name"] == write.name
            for fixed in ("driver", "nodeName"):
                assert body["spec"][fixed] == old["spec"][fixed]
            assert body["spec"]["pool"]["name"] == old["spec"]["pool"]["name"]
            body["metadata"]["resourceVersion"] = number
            self.objects[write.name] = self._stored(body)
        return [write.verb for write in plan.writes]

    @staticmethod
    def _stored(body: dict[str, Any]) -> dict[str, Any]:
        for each in body["spec"].get("devices", ()):
            for taint in each.get("taints", ()):
                taint.setdefault("timeAdded", "2026-01-01T00:00:00Z")
            for capacity in each.get("capacity", {}).values():
                if capacity["value"] == "1Gi":
                    capacity["value"] = "1073741824"  # another spelling of the same value
        return body


def pool(*slices: SliceContent, name: str = "node-1") -> PoolSpec:
    return PoolSpec("gpu.nvidia.com", name, "node-1", slices)


def content(*names: str, memory: str = "1Gi", tainted: bool = False) -> SliceContent:
    taints = {"taints": [{"key": TAINT.key, "value": "79", "effect": "NoSchedule"}]} if tainted else {}
    return SliceContent(tuple({"name": name, "capacity": {"memory": {"value": memory}}, **taints} for name in names))


def settled(server: ApiServer, desired: PoolSpec) -> None:
    newest = max(each["spec"]["pool"]["generation"] for each in server.items())
    current = sorted(
        (each for each in server.items() if each["spec"]["pool"]["generation"] == newest),
        key=lambda each: str(each["metadata"]["name"]),
    )
    assert len(current) == len(server.objects) == len(desired.slices)
    for wanted, each in zip(desired.slices, current):
        assert same_content(wanted, each["spec"])
        assert each["spec"]["pool"]["resourceSliceCount"] == len(desired.slices)
        assert each["metadata"]["ownerReferences"] == [OWNER]
    assert plan_pool(desired, server.items(), owner=OWNER) == PoolPlan((), newest)


CONTENTS = st.builds(
    content,
    st.sampled_from(["gpu-0", "gpu-1"]),
    memory=st.sampled_from(["1Gi", "2Gi", "1024Mi"]),
    tainted=st.booleans(),
)


@given(st.lists(st.lists(CONTENTS, min_size=1, max_size=4), min_size=1, max_size=5))
def test_plan_pool_any_history_converges(history: list[list[SliceContent]]) -> None:
    server = ApiServer()
    generation = 0
    for contents in history:
        desired = pool(
            *(
                replace(each, devices=tuple({**d, "name": f"{d['name']}-{i}"} for d in each.devices))
                for i, each in enumerate(contents)
            )
        )
        plan = plan_pool(desired, server.items(), owner=OWNER)
        assert plan.generation >= generation
        verbs = server.apply(plan)
        assert verbs == sorted(verbs, key=["delete", "update", "create"].index)
        settled(server, desired)
        generation = plan.generation


@given(
    st.lists(CONTENTS, min_size=1, max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from(["00000-", "00001-", "00007-", "old-", "zzzzz-", "0000-"]),
            st.integers(0, 4),
            st.integers(1, 3),
        ),
        max_size=6,
    ),
)
def test_plan_pool_removes_orphaned_slices(contents: list[SliceContent], litter: list[tuple[str, int, int]]) -> None:
    server = ApiServer()
    for number, (prefix, generation, count) in enumerate(litter):
        server.objects[f"{prefix}{number}"] = {
            "metadata": {"name": f"{prefix}{number}", "uid": f"litter-{number}", "resourceVersion": "1"},
            "spec": {
                "driver": "gpu.nvidia.com",
                "nodeName": "node-1",
                "pool": {"name": "node-1", "generation": generation, "resourceSliceCount": count},
                "devices": [{"name": "gpu-9"}],
            },
        }
    desired = pool(*contents)
    before = max((generation for _prefix, generation, _count in litter), default=0)
    plan = plan_pool(desired, server.items(), owner=OWNER)
    server.apply(plan)
    assert plan.generation >= before
    settled(server, desired)


def test_plan_pool_one_changed_slice_keeps_generation() -> None:
    server = ApiServer()
    server.apply(plan_pool(pool(content("gpu-0"), content("gpu-1")), [], owner=OWNER))
    tainted = pool(content("gpu-0"), content("gpu-1", tainted=True))
    plan = plan_pool(tainted, server.items(), owner=OWNER)
    assert [write.verb for write in plan.writes] == ["update"] and plan.generation == 1
    server.apply(plan)
    settled(server, tainted)


def test_plan_pool_unchanged_taint_keeps_its_time() -> None:
    server = ApiServer()
    server.apply(plan_pool(pool(content("gpu-0", tainted=True)), [], owner=OWNER))
    plan = plan_pool(pool(content("gpu-0", memory="2Gi", tainted=True)), server.items(), owner=OWNER)
    (write,) = plan.writes
    assert write.body is not None
    assert write.body["spec"]["devices"][0]["taints"][0]["timeAdded"] == "2026-01-01T00:00:00Z"


def test_plan_pool_two_changed_slices_raise_generation() -> None:
    server = ApiServer()
    server.apply(plan_pool(pool(content("a"), content("b"), content("c")), [], owner=OWNER))
    changed = pool(content("a", memory="2Gi"), content("b", memory="2Gi"), content("c"))
    plan = plan_pool(changed, server.items(), owner=OWNER)
    assert [write.verb for write in plan.writes] == ["update"] * 3 and plan.generation == 2


def test_plan_pool_deleted_slices_are_created_again() -> None:
    server = ApiServer()
    desired = pool(content("a"), content("b"))
    server.apply(plan_pool(desired, [], owner=OWNER))
    server.objects.popitem()
    plan = plan_pool(desired, server.items(), owner=OWNER)
    assert [write.verb for write in plan.writes] == ["update", "create"] and plan.generation == 2
    server.apply(plan)
    settled(server, desired)


def test_plan_pool_missing_owner_is_restored() -> None:
    server = ApiServer()
    desired = pool(content("a"))
    server.apply(plan_pool(desired, []))
    assert plan_pool(desired, server.items()).writes == ()
    plan = plan_pool(desired, server.items(), owner=OWNER)
    assert [write.verb for write in plan.writes] == ["update"]
    server.apply(plan)
    settled(server, desired)


def test_plan_pool_other_drivers_nodes_and_pools_are_unchanged() -> None:
    server = ApiServer()
    for change in ({"driver": "npu.huawei.com"}, {"nodeName": "node-2"}, {"pool": {"name": "else", "generation": 9}}):
        spec = {"driver": "gpu.nvidia.com", "nodeName": "node-1", "pool": {"name": "node-1", "generation": 7}, **change}
        name = f"00000-{len(server.objects)}"
        server.objects[name] = {"metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "spec": spec}
    plan = plan_pool(pool(content("a")), server.items(), owner=OWNER)
    assert [write.verb for write in plan.writes] == ["create"] and plan.generation == 1


def test_plan_pool_removal_deletes_only_the_pool() -> None:
    server = ApiServer()
    server.apply(plan_pool(pool(content("a"), content("b")), [], owner=OWNER))
    server.apply(plan_pool(pool(content("c"), name="node-1/extra"), [], owner=OWNER))
    plan = plan_removal("gpu.nvidia.com", "node-1", server.items())
    assert len(plan.writes) == 2
    assert len(plan_removal("gpu.nvidia.com", None, server.items()).writes) == 3
    server.apply(plan)
    assert [each["spec"]["pool"]["name"] for each in server.items()] == ["node-1/extra"]


def h100_pool(count: int, layout: str = "separate") -> PoolSpec:
    gpus = [device("h100-80", index) for index in range(count)]
    return build_pool(
        driver="gpu.nvidia.com",
        pool="node-1",
        node_name="node-1",
        offers=[offer for gpu in gpus for offer in offers(gpu, dynamic=True)],
        counter_sets=[counter_set(gpu) for gpu in gpus],
        layout=layout,
    )


def test_build_pool_counters_have_separate_slices() -> None:
    spec = h100_pool(16)
    assert [len(each.shared_counters) for each in spec.slices] == [8, 8] + [0] * 8
    assert [len(each.devices) for each in spec.slices] == [0, 0] + [52] * 8
    assert all(not (each.devices and each.shared_counters) for each in spec.slices)


def test_build_pool_same_inventory_is_the_same_pool() -> None:
    assert h100_pool(8) == h100_pool(8)


def test_build_pool_without_devices_is_one_empty_slice() -> None:
    spec = build_pool(driver="gpu.nvidia.com", pool="n", node_name="n", offers=())
    assert [each.to_dict() for each in spec.slices] == [{}]


def test_build_pool_device_has_expected_content() -> None:
    offer = Offer(
        name="gpu-0",
        kind="device",
        device_uuid="GPU-0",
        dynamic=False,
        profile=None,
        profile_id=None,
        placement=None,
        partition_uuid=None,
        attributes={"driverVersion": Version("580.95.5"), "index": 0, "ready": True, "uuid": "GPU-0"},
        capacities={"memory": 80 * 1024**3, "decoders": 7},
        counter_set="gpu-0-counter-set",
        consumes={"memory": 1024, "memory-slice-0": 1},
        taints=(TAINT, Taint("a/b", "None")),
    )
    spec = build_pool(
        driver="gpu.nvidia.com",
        pool="n",
        node_name="n",
        offers=[offer],
        counter_sets=[
            CounterSet("gpu-0-counter-set", {"memory": 2048, "memory-slice-0": 1}),
            CounterSet("unused", {"x": 1}),
        ],
    )
    assert spec.slices[0].to_dict() == {
        "sharedCounters": [
            {"name": "gpu-0-counter-set", "counters": {"memory": {"value": "2Ki"}, "memory-slice-0": {"value": "1"}}}
        ]
    }
    assert spec.slices[1].devices == (
        {
            "name": "gpu-0",
            "attributes": {
                "driverVersion": {"version": "580.95.5"},
                "index": {"int": 0},
                "ready": {"bool": True},
                "uuid": {"string": "GPU-0"},
            },
            "capacity": {"decoders": {"value": "7"}, "memory": {"value": "80Gi"}},
            "consumesCounters": [
                {
                    "counterSet": "gpu-0-counter-set",
                    "counters": {"memory": {"value": "1Ki"}, "memory-slice-0": {"value": "1"}},
                }
            ],
            "taints": [
                {"key": "gpu.nvidia.com/xid", "effect": "NoSchedule", "value": "79"},
                {"key": "a/b", "effect": "None"},
            ],
        },
    )


def offer(name: str = "gpu-0", **changes: Any) -> Offer:
    base = Offer(name, "device", "GPU-0", False, None, None, None, None, {}, {})
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("published", "text"),
    [
        ([offer("GPU_0")], "GPU_0.*DNS label"),
        ([offer("a" * 64)], "DNS label"),
        ([offer(), offer()], "gpu-0 is in the pool twice"),
        ([offer(attributes={"a-b": 1})], "'a-b' is not a qualified name"),
        ([offer(attributes={"Bad Domain/x": 1})], "not a qualified name"),
        ([offer(attributes={"x" * 33: 1})], "not a qualified name"),
        ([offer(attributes={"text": "x" * 65})], "text has 65 bytes"),
        (
            [offer(attributes={f"a{i}": i for i in range(20)}, capacities={f"c{i}": i for i in range(13)})],
            "20 attributes and 13",
        ),
        ([offer(taints=(TAINT,) * 17)], "17 taints"),
        ([offer(counter_set="none", consumes={"x": 1})], "consumes of counter set none"),
        ([offer(counter_set="set", consumes={"y": 1})], "consumes y, which set lacks"),
    ],
)
def test_build_pool_invalid_device_is_rejected_with_its_name(published: list[Offer], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build_pool(
            driver="gpu.nvidia.com",
            pool="n",
            node_name="n",
            offers=published,
            counter_sets=[CounterSet("set", {"x": 1})],
        )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"driver": "Gpu"}, "Driver name"),
        ({"driver": "a" * 64}, "Driver name"),
        ({"pool": "a//b"}, "Pool name"),
        ({"pool": ""}, "Pool name"),
        ({"layout": "other"}, "Layout 'other'"),
        ({"counter_sets": [CounterSet("set", {f"c{i}": 1 for i in range(33)})]}, "33 counters"),
        ({"counter_sets": [CounterSet("set", {"X": 1})]}, "'X' is not a DNS label"),
        ({"counter_sets": [CounterSet("set", {"x": 1}), CounterSet("set", {"x": 1})]}, "set is in the pool twice"),
    ],
)
def test_build_pool_invalid_pool_is_rejected(changes: dict[str, Any], text: str) -> None:
    given_values: dict[str, Any] = {
        "driver": "gpu.nvidia.com",
        "pool": "n",
        "node_name": "n",
        "offers": [offer(counter_set="set", consumes={"x": 1})],
        "counter_sets": [CounterSet("set", {"x": 1})],
        **changes,
    }
    with pytest.raises(ValueError, match=text):
        build_pool(**given_values)


def test_build_pool_many_devices_use_several_slices() -> None:
    plain = [offer(f"gpu-{number}") for number in range(300)]
    spec = build_pool(driver="d", pool="n", node_name="n", offers=plain)
    assert [len(each.devices) for each in spec.slices] == [128, 128, 44]
    tainted = [replace(plain[0], taints=(TAINT,)), *plain[1:100]]
    assert [len(each.devices) for each in build_pool(driver="d", pool="n", node_name="n", offers=tainted).slices] == [
        64,
        36,
    ]


def test_dropped_fields_names_feature_gate() -> None:
    sent = {"spec": {"devices": [{"taints": [1], "consumesCounters": [1]}, {"taints": [1]}], "sharedCounters": [1]}}
    assert dropped_fields(sent, sent) == ()
    returned = {"spec": {"devices": [{}, {"taints": [1]}]}}
    assert dropped_fields(sent, returned) == (
        "taints of 1 devices (feature gate DRADeviceTaints)",
        "consumesCounters of 1 devices (feature gate DRAPartitionableDevices)",
        "1 sharedCounters (feature gate DRAPartitionableDevices)",
    )


def test_plan_pool_request_policies_are_compared_by_value() -> None:
    def with_policy(value: str, step: str) -> SliceContent:
        policy = {"default": "1Gi", "validRange": {"min": "1Gi", "step": step}}
        return SliceContent(({"name": "a", "capacity": {"memory": {"value": value, "requestPolicy": policy}}},))

    assert same_content(with_policy("2Gi", "1Mi"), with_policy("2048Mi", "1048576").to_dict())
    assert not same_content(with_policy("2Gi", "1Mi"), with_policy("2Gi", "2Mi").to_dict())


def test_build_pool_attribute_types() -> None:
    assert [attribute_json(each) for each in (True, 1, "x", Version("1.0.0"))] == [
        {"bool": True},
        {"int": 1},
        {"string": "x"},
        {"version": "1.0.0"},
    ]


NOTE = "dra.accelerators/note"


def test_plan_pool_note_is_one_write_in_the_same_generation() -> None:
    server = ApiServer()
    plain = pool(content("gpu-0"), content("gpu-1"))
    server.apply(plan_pool(plain, [], owner=OWNER))
    first, second = sorted(server.objects)
    server.objects[first]["metadata"]["annotations"] = {"example.com/theirs": "stays"}
    noted = replace(plain, notes={NOTE: "gpu-1 differs"})
    assert server.apply(plan_pool(noted, server.items(), owner=OWNER)) == ["update"]
    assert server.objects[first]["metadata"]["annotations"] == {
        "example.com/theirs": "stays",
        NOTE: "gpu-1 differs",
    }
    assert "annotations" not in server.objects[second]["metadata"]
    settled(server, noted)
    assert not plan_pool(plain, server.items(), owner=OWNER).writes, "who says nothing of notes leaves them"
    assert server.apply(plan_pool(replace(plain, notes={NOTE: ""}), server.items(), owner=OWNER)) == ["update"]
    assert server.objects[first]["metadata"]["annotations"] == {"example.com/theirs": "stays"}
    assert {each["spec"]["pool"]["generation"] for each in server.items()} == {1}
    settled(server, replace(plain, notes={NOTE: ""}))


def test_plan_pool_new_pool_has_note_from_the_start() -> None:
    server = ApiServer()
    noted = replace(pool(content("gpu-0"), content("gpu-1")), notes={NOTE: "one", "example.com/none": ""})
    assert server.apply(plan_pool(noted, [], owner=OWNER)) == ["create", "create"]
    assert [each["metadata"].get("annotations") for _name, each in sorted(server.objects.items())] == [
        {NOTE: "one"},
        None,
    ]
    settled(server, noted)
