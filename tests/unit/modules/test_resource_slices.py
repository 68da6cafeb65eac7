# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module resource_slices: written slices, unchanged slices, and refused inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

DRIVER = "fpga.example.com"
POOL: dict[str, Any] = {"driver": DRIVER, "pool": "shelf-1", "all_nodes": True}
DEVICE: dict[str, Any] = {
    "name": "fpga-0",
    "attributes": {"model": "VX-2", "lanes": 8, "ready": True, "firmware": {"version": "2.4.1"}},
    "capacity": {"memory": "16Gi"},
}


def devices(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{**copy.deepcopy(DEVICE), "name": f"fpga-{number}", **more} for number in range(count)]


def verbs(result: dict[str, Any]) -> list[str]:
    return [step["verb"] for step in result["steps"]]


def test_pool_is_published_unchanged_and_removed(publish: SimpleNamespace) -> None:
    first = publish.run(**POOL, devices=[DEVICE])
    assert first["changed"], first
    assert verbs(first) == ["create"]
    assert first["pool"] == {"driver": DRIVER, "name": "shelf-1", "generation": 1, "slices": 1, "devices": 1}
    (kept,) = publish.api.slices
    assert kept["spec"] == {
        "driver": DRIVER,
        "pool": {"name": "shelf-1", "generation": 1, "resourceSliceCount": 1},
        "allNodes": True,
        "devices": [
            {
                "name": "fpga-0",
                "attributes": {
                    "model": {"string": "VX-2"},
                    "lanes": {"int": 8},
                    "ready": {"bool": True},
                    "firmware": {"version": "2.4.1"},
                },
                "capacity": {"memory": {"value": "16Gi"}},
            }
        ],
    }
    assert first["resource_slices"] == [kept]
    writes = len(publish.api.writes)

    second = publish.run(**POOL, devices=[DEVICE])
    assert not second["changed"]
    assert second["steps"] == []
    assert second["diff"]["before"] == second["diff"]["after"]
    assert len(publish.api.writes) == writes

    gone = publish.run(driver=DRIVER, pool="shelf-1", state="absent")
    assert verbs(gone) == ["delete"]
    assert gone["pool"]["slices"] == 0
    assert publish.api.slices == []
    assert not publish.run(driver=DRIVER, pool="shelf-1", state="absent")["changed"]


def test_check_mode_removal_deletes_nothing(publish: SimpleNamespace) -> None:
    publish.run(**POOL, devices=[DEVICE])
    there, writes = publish.api.slices, len(publish.api.writes)
    dry_run = publish.run(check=True, driver=DRIVER, pool="shelf-1", state="absent")
    assert dry_run["changed"] and verbs(dry_run) == ["delete"]
    assert publish.api.slices == there and len(publish.api.writes) == writes


def test_check_mode_equals_run_and_writes_nothing(publish: SimpleNamespace) -> None:
    dry_run = publish.run(check=True, **POOL, devices=[DEVICE])
    assert dry_run["changed"]
    assert verbs(dry_run) == ["create"]
    assert dry_run["diff"]["before"] == {"slices": []}
    assert dry_run["diff"]["after"]["slices"][0]["devices"][0]["name"] == "fpga-0"
    assert publish.api.writes == []
    done = publish.run(**POOL, devices=[DEVICE])
    assert verbs(done) == verbs(dry_run)
    assert done["diff"] == dry_run["diff"]
    assert done["pool"] == dry_run["pool"]


def test_quantities_are_compared_by_value(publish: SimpleNamespace) -> None:
    publish.run(**POOL, devices=[DEVICE])
    same = {**DEVICE, "capacity": {"memory": {"value": 16 * 1024**3}}}
    assert not publish.run(**POOL, devices=[same])["changed"]


def test_change_in_one_slice_keeps_generation(publish: SimpleNamespace) -> None:
    publish.run(**POOL, devices=devices(130))
    assert len(publish.api.slices) == 2
    changed = devices(130)
    changed[-1]["attributes"]["lanes"] = 16
    result = publish.run(**POOL, devices=changed)
    assert verbs(result) == ["update"]
    assert {each["spec"]["pool"]["generation"] for each in publish.api.slices} == {1}


def test_more_slices_raise_generation(publish: SimpleNamespace) -> None:
    publish.run(**POOL, devices=devices(3))
    result = publish.run(**POOL, devices=devices(300))
    assert verbs(result) == ["update", "create", "create"]
    assert [len(each["spec"]["devices"]) for each in publish.api.slices] == [128, 128, 44]
    assert {each["spec"]["pool"]["generation"] for each in publish.api.slices} == {2}
    assert {each["spec"]["pool"]["resourceSliceCount"] for each in publish.api.slices} == {3}
    order = [device["name"] for each in publish.api.slices for device in each["spec"]["devices"]]
    assert order == [f"fpga-{number}" for number in range(300)]
    fewer = publish.run(**POOL, devices=devices(1))
    assert verbs(fewer) == ["delete", "delete", "update"]
    assert not publish.run(**POOL, devices=devices(1))["changed"]


def test_tainted_devices_halve_slice_size(publish: SimpleNamespace) -> None:
    taint = {"key": "example.com/worn", "effect": "NoSchedule"}
    publish.run(**POOL, devices=[*devices(100), {**DEVICE, "name": "last", "taints": [taint]}])
    assert [len(each["spec"]["devices"]) for each in publish.api.slices] == [64, 37]


COUNTERS: dict[str, Any] = {
    "shared_counters": [
        {"name": "board-0", "counters": {"regions": 4}},
        {"name": "board-1", "counters": {"regions": {"value": "4"}}},
    ],
    "devices": [
        {"name": name, "consumes_counters": [{"counter_set": board, "counters": {"regions": 2}}]}
        for board, name in (("board-0", "a"), ("board-1", "b"), ("board-0", "c"))
    ],
}


def test_counters_have_separate_slices(publish: SimpleNamespace) -> None:
    publish.run(**POOL, **COUNTERS)
    first, second = (each["spec"] for each in publish.api.slices)
    assert [each["name"] for each in first["sharedCounters"]] == ["board-0", "board-1"]
    assert "devices" not in first
    assert [each["name"] for each in second["devices"]] == ["a", "b", "c"]
    assert second["devices"][0]["consumesCounters"] == [
        {"counterSet": "board-0", "counters": {"regions": {"value": "2"}}}
    ]
    assert not publish.run(**POOL, **COUNTERS)["changed"]


def test_counters_before_1_35_are_in_device_slices(publish: SimpleNamespace) -> None:
    publish.api.minor = "34+"
    publish.run(**POOL, **COUNTERS)
    found = [
        ([each["name"] for each in one["spec"]["devices"]], [each["name"] for each in one["spec"]["sharedCounters"]])
        for one in publish.api.slices
    ]
    assert sorted(found) == [(["a", "c"], ["board-0"]), (["b"], ["board-1"])]


def test_older_api_version_is_used(publish: SimpleNamespace) -> None:
    publish.api.versions = ["v1beta2", "v1beta1"]
    publish.run(**POOL, devices=[DEVICE])
    assert publish.api.slices[0]["apiVersion"] == "resource.k8s.io/v1beta2"


@pytest.mark.parametrize("versions", [[], ["v1beta1"]])
def test_unsupported_api_versions_are_rejected(publish: SimpleNamespace, versions: list[str]) -> None:
    publish.api.versions = versions
    result = publish.run(**POOL, devices=[DEVICE])
    assert result["failed"]
    assert result["error_code"] == "api-version"
    assert "v1 or v1beta2" in result["msg"]


def test_pool_without_devices_is_one_empty_slice(publish: SimpleNamespace) -> None:
    result = publish.run(**POOL)
    assert result["pool"]["slices"] == 1
    assert not publish.run(**POOL)["changed"]


def test_device_access_by_node_selector_or_all_nodes(publish: SimpleNamespace) -> None:
    selector = {
        "nodeSelectorTerms": [
            {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r7"]}]},
        ]
    }
    publish.run(driver=DRIVER, pool="p", node_selector=selector, devices=[DEVICE])
    assert publish.api.slices[0]["spec"]["nodeSelector"] == selector
    assert not publish.run(driver=DRIVER, pool="p", node_selector=selector, devices=[DEVICE])["changed"]
    result = publish.run(driver=DRIVER, pool="p", all_nodes=True, devices=[DEVICE])
    assert verbs(result) == ["update"]
    assert publish.api.slices[0]["spec"].get("allNodes") is True
    assert "nodeSelector" not in publish.api.slices[0]["spec"]
    # A slice cannot be moved to a node, or from one: it is deleted and created.
    result = publish.run(driver=DRIVER, pool="p", node_name="n1", devices=[DEVICE])
    assert sorted(verbs(result)) == ["create", "delete"]
    assert publish.api.slices[0]["spec"]["nodeName"] == "n1"


def test_pool_name_defaults_to_node(publish: SimpleNamespace) -> None:
    assert publish.run(driver=DRIVER, node_name="n1")["pool"]["name"] == "n1"


def test_other_pools_are_unchanged(publish: SimpleNamespace) -> None:
    publish.run(**POOL, devices=[DEVICE])
    publish.run(**{**POOL, "pool": "shelf-2"}, devices=[DEVICE])
    publish.run(**{**POOL, "driver": "other.example.com"}, devices=[DEVICE])
    publish.run(driver=DRIVER, pool="shelf-1", state="absent")
    left = {(each["spec"]["driver"], each["spec"]["pool"]["name"]) for each in publish.api.slices}
    assert left == {(DRIVER, "shelf-2"), ("other.example.com", "shelf-1")}


SPEC = {
    "driver": DRIVER,
    "allNodes": True,
    "pool": {"name": "shelf-1", "generation": 4, "resourceSliceCount": 1},
    "devices": [{"name": "theirs"}],
}


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"managedFields": [{"manager": "fpga-controller"}]}, "fpga-controller"),
        (
            {"ownerReferences": [{"kind": "Node", "name": "n1", "uid": "u", "apiVersion": "v1"}]},
            "Node n1",
        ),
        ({}, "an unknown field manager"),
    ],
)
@pytest.mark.parametrize("options", [{**POOL, "devices": [DEVICE]}, {**POOL, "all_nodes": False, "state": "absent"}])
def test_pool_of_another_publisher_is_rejected(
    publish: SimpleNamespace, metadata: dict[str, Any], named: str, options: dict[str, Any]
) -> None:
    publish.api.add("00000-theirs", SPEC, **metadata)
    for check in (True, False):
        result = publish.run(check=check, **options)
        assert result["failed"]
        assert result["error_code"] == "foreign-pool"
        assert named in result["msg"]
        assert "force" in result["hint"]
    assert publish.api.writes == []


def test_pool_takeover_with_force(publish: SimpleNamespace) -> None:
    publish.api.add("00000-theirs", SPEC, managedFields=[{"manager": "fpga-controller"}])
    publish.run(**POOL, devices=[DEVICE], force=True)
    assert [device["name"] for each in publish.api.slices for device in each["spec"]["devices"]] == ["fpga-0"]
    assert not publish.run(**POOL, devices=[DEVICE])["changed"]


def test_manually_edited_slice_is_restored(publish: SimpleNamespace) -> None:
    publish.run(**POOL, devices=[DEVICE])
    (kept,) = publish.api.slices
    kept["spec"]["devices"][0]["attributes"]["lanes"]["int"] = 4
    kept["metadata"]["managedFields"].append({"manager": "kubectl-edit", "operation": "Update"})
    assert verbs(publish.run(**POOL, devices=[DEVICE])) == ["update"]
    assert publish.api.slices[0]["spec"]["devices"][0]["attributes"]["lanes"] == {"int": 8}


@pytest.mark.parametrize("check", [True, False])
def test_rejected_slice_changes_nothing(publish: SimpleNamespace, check: bool) -> None:
    publish.run(**POOL, devices=devices(2))
    before = copy.deepcopy(publish.api.objects)
    wrong = devices(200)
    publish.api.drop = _refuse_device("fpga-199")
    result = publish.run(check=check, **POOL, devices=wrong)
    assert result["failed"]
    assert result["status"] == 422
    assert "fpga-199" in result["msg"]
    assert publish.api.objects == before


def _refuse_device(name: str) -> Callable[[dict[str, Any]], None]:
    from api_server import Refused

    def refuse(spec: dict[str, Any]) -> None:
        if any(each["name"] == name for each in spec.get("devices", ())):
            raise Refused(422, "Invalid", f"spec.devices[71]: Invalid value: {name}")

    return refuse


def test_rejection_without_validation_reports_written_slices(publish: SimpleNamespace) -> None:
    publish.api.drop = _refuse_device("fpga-199")
    result = publish.run(**POOL, devices=devices(200), validate=False)
    assert result["failed"]
    assert result["error_code"] == "partly-written"
    assert [step["verb"] for step in result["steps"]] == ["create"]
    assert "run the module again" in result["msg"]
    publish.api.drop = lambda spec: None
    assert publish.run(**POOL, devices=devices(200), validate=False)["changed"]
    assert not publish.run(**POOL, devices=devices(200))["changed"]


def test_concurrent_write_is_planned_again(publish: SimpleNamespace) -> None:
    publish.run(**POOL, devices=[DEVICE])
    done: list[str] = []

    def meddle(method: str) -> None:
        if not done:
            done.append(method)
            publish.api.slices[0]["metadata"]["resourceVersion"] = "1000"

    publish.api.before_write = meddle
    changed = {**DEVICE, "capacity": {"memory": "8Gi"}}
    assert verbs(publish.run(**POOL, devices=[changed])) == ["update"]
    assert done == ["PUT"]
    assert publish.api.slices[0]["spec"]["devices"][0]["capacity"]["memory"]["value"] == "8Gi"


def test_dropped_fields_are_named_without_repeated_changes(publish: SimpleNamespace) -> None:
    def drop(spec: dict[str, Any]) -> None:
        for each in spec.get("devices", ()):
            each.pop("taints", None)

    publish.api.drop = drop
    tainted = {**DEVICE, "taints": [{"key": "example.com/worn", "effect": "NoSchedule"}]}
    first = publish.run(**POOL, devices=[tainted])
    assert first["changed"]
    assert "DRADeviceTaints" in first["dropped_fields"][0]
    assert "did not keep taints" in str(first["warnings"])
    second = publish.run(**POOL, devices=[tainted])
    assert not second["changed"]
    assert "DRADeviceTaints" in second["dropped_fields"][0]


def test_unknown_keys_are_sent_unchanged(publish: SimpleNamespace) -> None:
    publish.run(**POOL, devices=[{**DEVICE, "fieldOfTomorrow": {"depth": [1, 2]}}])
    assert publish.api.slices[0]["spec"]["devices"][0]["fieldOfTomorrow"] == {"depth": [1, 2]}
    strict = {query.get("fieldValidation") for method, _path, query, _b in publish.api.requests if method == "POST"}
    assert strict == {"Strict"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"devices": [{"attributes": {}}]}, "devices[0]"),
    ({"devices": [{"name": "Bad_Name"}]}, "Bad_Name"),
    ({"devices": [{"name": "a"}, {"name": "a"}]}, "twice"),
    ({"devices": [{"name": "a", "attributes": {"speed": 1.5}}]}, "speed"),
    ({"devices": [{"name": "a", "attributes": {"speed": None}}]}, "speed"),
    ({"devices": [{"name": "a", "attributes": {"speed": {"int": 1, "bool": True}}}]}, "speed"),
    ({"devices": [{"name": "a", "attributes": ["speed"]}]}, "attributes"),
    ({"devices": [{"name": "a", "attributes": {"1st": 1}}]}, "1st"),
    ({"devices": [{"name": "a", "attributes": {"text": "x" * 65}}]}, "text"),
    ({"devices": [{"name": "a", "attributes": {f"n{number}": 1 for number in range(33)}}]}, "33"),
    ({"devices": [{"name": "a", "capacity": {"memory": "16 GB"}}]}, "16 GB"),
    ({"devices": [{"name": "a", "capacity": {"memory": True}}]}, "memory"),
    ({"devices": [{"name": "a", "capacity": {"memory": {}}}]}, "memory"),
    ({"devices": [{"name": "a", "consumes_counters": {"counter_set": "b"}}]}, "consumesCounters"),
    ({"devices": [{"name": "a", "consumes_counters": [{"counters": {"c": 1}}]}]}, "counterSet"),
    ({"devices": [{"name": "a", "consumes_counters": [{"counter_set": "b", "counters": {"c": 1}}]}]}, "pool lacks"),
    ({"shared_counters": [{"name": "b", "counters": {}}]}, "0 counters"),
    ({"shared_counters": [{"name": "b", "counters": {"c": "many"}}]}, "many"),
    ({"shared_counters": [{"counters": {"c": 1}}]}, "shared_counters[0]"),
    ({"driver": "Not A Driver"}, "Not A Driver"),
    ({"pool": "UPPER"}, "UPPER"),
    ({"node_name": "n1"}, "exactly one"),
    ({"all_nodes": False}, "exactly one"),
    ({"all_nodes": False, "node_selector": {"nodeSelectorTerms": []}}, "one term"),
    ({"all_nodes": False, "node_selector": {"matchLabels": {}}}, "nodeSelectorTerms"),
    ({"state": "query"}, "state"),
    ({"pool": None}, "pool"),
    ({"devices": "fpga"}, "devices"),
]


@pytest.mark.parametrize(("options", "named"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_invalid_options_are_rejected_before_any_request(
    publish: SimpleNamespace, options: dict[str, Any], named: str
) -> None:
    result = publish.run(**{**POOL, **options})
    assert result["failed"]
    assert named in result["msg"]
    assert publish.api.requests == []


def test_invalid_token_is_rejected(publish: SimpleNamespace) -> None:
    publish.api.token = "another"
    result = publish.run(**POOL, devices=[DEVICE])
    assert result["failed"]
    assert result["status"] == 401
    assert "let-me-in" not in str(result)


def test_unreachable_server_is_reported(publish: SimpleNamespace, run_here: Callable[..., dict[str, Any]]) -> None:
    publish.api.__exit__()
    result = run_here("resource_slices", {**POOL, "host": publish.api.url, "api_key": "x"})
    assert result["failed"]
    assert result["error_code"] == "api-unreachable"


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (None, {}),
        ("not: a: kubeconfig", {}),
        ("[]", {}),
        ("apiVersion: v1\nkind: Config\nclusters: []\ncontexts: []\nusers: []\n", {"context": "nowhere"}),
        ("apiVersion: v1\nkind: Config\n", {}),
    ],
)
def test_unusable_kubeconfig_is_rejected(
    run_here: Callable[..., dict[str, Any]], tmp_path: Any, content: str | None, options: dict[str, Any]
) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    result = run_here("resource_slices", {**POOL, "kubeconfig": str(path), **options})
    assert result["failed"]
    assert result["error_code"] == "kubeconfig", result
    assert str(path) in result["msg"]


def test_kubeconfig_is_used(publish: SimpleNamespace, run_here: Callable[..., dict[str, Any]], tmp_path: Any) -> None:
    path = tmp_path / "config"
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: here\n"
        f"clusters: [{{name: c, cluster: {{server: '{publish.api.url}'}}}}]\n"
        "users: [{name: u, user: {token: let-me-in}}]\n"
        "contexts: [{name: here, context: {cluster: c, user: u}}]\n"
    )
    result = run_here("resource_slices", {**POOL, "devices": [DEVICE], "kubeconfig": str(path)})
    assert result["changed"], result
