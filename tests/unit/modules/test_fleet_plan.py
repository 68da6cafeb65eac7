# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module fleet_plan: the three kinds of requests, the written file, claims to move, and refused inputs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import NodeScan
from ansible_collections.dra.accelerators.plugins.module_utils._report import node_report
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.vendor import FACTS as ASCEND

from tests import planned
from tests.fleets import with_module_versions
from tests.unit.ansible_process import PYTHON, run_ansible
from tests.unit.core import chip_model

if TYPE_CHECKING:
    from conftest import Node

ROOT = Path(__file__).resolve().parents[3]
UTILS = "ansible_collections.dra.accelerators.plugins.module_utils"
MODULES = "ansible_collections.dra.accelerators.plugins.modules"
Json = dict[str, Any]
Run = Callable[..., Json]
NPU_DRIVER = ASCEND.driver_name
LONG_AGO, NEVER = "2020-01-01T00:00:00Z", "2999-01-01T00:00:00Z"


def listed(tmp_path: Path, *documents: Json, name: str = "cluster.json") -> str:
    """Write a file with these objects and return its path."""
    path = tmp_path / name
    path.write_text(json.dumps({"kind": "List", "items": [*documents]}))
    return str(path)


def allocated(claim: Json, node: str, *devices: str, pods: tuple[str, ...] = ()) -> Json:
    results = [{"request": "device", "driver": planned.DRIVER, "pool": node, "device": each} for each in devices]
    users = [{"resource": "pods", "name": each, "uid": each} for each in pods]
    return {**claim, "status": {"allocation": {"devices": {"results": results}}, "reservedFor": users}}


def template(name: str, profile: str) -> Json:
    claim = planned.claim(name, profile)
    return {**claim, "kind": "ResourceClaimTemplate", "spec": {"spec": claim["spec"]}}


def workload(kind: str, name: str, template_name: str, **spec: Any) -> Json:
    pod = {"spec": {"containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template_name}]}}
    return {"kind": kind, "metadata": {"name": name}, "spec": {"template": pod, **spec}}


def served(result: Json) -> dict[str, tuple[int, int]]:
    return {each["name"]: (each["served"], each["count"]) for each in result["plan"]["wanted"]}


# ---- counts


def test_counts_become_layout_file_for_playbooks(run_here: Run, tmp_path: Path) -> None:
    devices = planned.fleet()
    options = {
        "nodes": planned.answers(devices),
        "cluster": False,
        "wanted": [{"name": "notebooks", "profile": "1g.10gb", "count": 9}, {"name": "whole", "priority": 5}],
        "hosts": {"gpu-1": "first.example.com"},
        "dest": str(tmp_path / "layouts.yml"),
    }
    shown = run_here("fleet_plan", options, check=True, diff=True)
    assert shown["changed"] and not (tmp_path / "layouts.yml").exists()
    result = run_here("fleet_plan", options, diff=True)
    assert result["changed"] and result["diff"] == shown["diff"] and result["plan"] == shown["plan"]
    text = (tmp_path / "layouts.yml").read_text()
    assert result["diff"]["before"] == "" and result["diff"]["after"] == text
    variables = yaml.safe_load(text)
    assert list(variables) == ["accelerator_layouts"] and variables["accelerator_layouts"] == result["plan"]["layouts"]
    assert {each["hosts"] for each in variables["accelerator_layouts"]} == {"first.example.com", "gpu-2"}
    for each in variables["accelerator_layouts"]:
        parse_rules(each["layout"])
    assert served(result) == {"notebooks": (9, 9), "whole": (1, 1)} and result["plan"]["touched"] == 2
    assert result["plan"]["unplaceable"] == [] and result["plan"]["solver"]["most_served"]
    assert not run_here("fleet_plan", options)["changed"]


@pytest.mark.parametrize("answer", [None, {}], ids=["not asked", "no answer"])
def test_plan_of_some_nodes_keeps_layouts_of_others(run_here: Run, tmp_path: Path, answer: Json | None) -> None:
    answers = planned.answers(planned.fleet())
    options = {"cluster": False, "dest": str(tmp_path / "layouts.yml"), "hosts": {"gpu-1": "first.example.com"}}
    wanted = [{"profile": "1g.10gb", "count": 9}]
    run_here("fleet_plan", {**options, "nodes": answers, "wanted": wanted})

    def layouts() -> dict[str, Any]:
        entries = yaml.safe_load((tmp_path / "layouts.yml").read_text())["accelerator_layouts"]
        assert [each["hosts"] for each in entries] == ["first.example.com", "gpu-2"]
        return {each["hosts"]: each["layout"] for each in entries}

    before = layouts()
    some = {name: each for name, each in answers.items() if name == "gpu-2"} | (
        {"gpu-1": answer} if answer is not None else {}
    )
    wanted = [{"profile": "3g.40gb", "count": 4}]
    done = run_here("fleet_plan", {**options, "nodes": some, "wanted": wanted})
    assert done["changed"] and [each["hosts"] for each in done["plan"]["layouts"]] == ["gpu-2"]
    assert any("keeps the layouts" in each and "first.example.com" in each for each in done["remarks"])
    after = layouts()
    assert after["first.example.com"] == before["first.example.com"] and after["gpu-2"] != before["gpu-2"]


@pytest.mark.parametrize(
    "content",
    [
        {"accelerator_layouts": [], "accelerator_proxy": {}},
        {"accelerator_layouts": [{"hosts": "gpu_*", "layout": []}]},
        {"accelerator_layouts": [{"hosts": ["gpu-1"], "layout": []}]},
        ["text"],
    ],
)
def test_plan_rejects_a_file_with_other_content(run_here: Run, tmp_path: Path, content: Any) -> None:
    (tmp_path / "layouts.yml").write_text(yaml.safe_dump(content), encoding="utf-8")
    options = {"nodes": planned.answers(planned.fleet(1)), "cluster": False, "wanted": [{"profile": "1g.10gb"}]}
    done = run_here("fleet_plan", {**options, "dest": str(tmp_path / "layouts.yml")})
    assert done["failed"] and done["error_code"] == "file-foreign"
    assert yaml.safe_load((tmp_path / "layouts.yml").read_text()) == content


def test_plan_after_its_application_changes_nothing(run_here: Run) -> None:
    devices = planned.fleet()
    options = {"cluster": False, "wanted": [{"profile": "1g.10gb", "count": 9}, {"profile": "3g.40gb", "count": 2}]}
    first = run_here("fleet_plan", {"nodes": planned.answers(devices), **options})
    after = planned.applied(devices, first["plan"]["layouts"])
    again = run_here("fleet_plan", {"nodes": planned.answers(after), **options})
    assert served(again) == served(first) and again["plan"]["touched"] == 0
    assert not any(each["changed"] for each in again["plan"]["devices"])


def test_node_report_is_accepted_as_inventory(run_here: Run, shared_node: Node, tmp_path: Path) -> None:
    options = {"vendor": ["nvidia"], "kubelet_root": str(tmp_path), "layout_file": str(tmp_path / "none.json")}
    answer = shared_node.module("accelerator_report", options)["ansible_facts"]["accelerator_report"]
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"nodes": {"gpu-1": answer, "silent": {}}}))
    wanted = [{"name": "small", "profile": "1g.10gb", "count": 6}, {"name": "whole", "count": 7, "priority": 1}]
    result = run_here("fleet_plan", {"nodes_src": str(path), "cluster": False, "wanted": wanted})
    # The fourth GPU already has four small partitions and a free large one. The others stay whole.
    assert served(result) == {"small": (6, 6), "whole": (7, 7)} and result["plan"]["unplaceable"] == []
    assert (result["plan"]["touched"], result["plan"]["destroyed"]) == (1, 1)
    (changed,) = [each for each in result["plan"]["devices"] if each["changed"]]
    assert (changed["index"], changed["goes"], changed["stays"]) == (3, {"3g.40gb": 1}, {"1g.10gb": 4})


def test_npus_are_planned_with_the_same_options(run_here: Run, tmp_path: Path) -> None:
    chips = tuple(chip_model.device("310P", (), physical) for physical in range(2))
    answer = node_report.Answer("ascend", NPU_DRIVER, NodeScan(tuple(map(with_module_versions, chips)), (), ()))
    node = node_report.node_report([answer], None, "test", planned.VERSIONS)
    selector = (
        f"device.driver == '{NPU_DRIVER}' && device.capacity['{NPU_DRIVER}'].aiCores.compareTo(quantity('4')) == 0"
    )
    npu = {
        "kind": "DeviceClass",
        "metadata": {"name": "npu"},
        "spec": {"selectors": [{"cel": {"expression": selector}}]},
    }
    claim = planned.claim("quarter")
    claim["spec"]["devices"]["requests"][0]["exactly"] = {"deviceClassName": "npu", "count": 3}
    result = run_here(
        "fleet_plan",
        {
            "nodes": {"npu-1": json.loads(json.dumps(node))},
            "cluster": False,
            "src": [listed(tmp_path, npu, claim)],
            "wanted": [{"name": "small", "profile": "vir02", "count": 2}],
        },
    )
    assert served(result) == {"small": (2, 2), "ResourceClaim default/quarter": (1, 1)}
    for each in result["plan"]["layouts"]:
        parse_rules(each["layout"])
    assert {each["vendor"] for each in result["plan"]["devices"]} == {"ascend"}


# ---- manifests


def test_manifests_count_pods_replicas_and_claims(run_here: Run, tmp_path: Path) -> None:
    directory = tmp_path / "manifests"
    (directory / "more").mkdir(parents=True)
    first = [
        template("small", "1g.10gb"),
        workload("Deployment", "web", "small", replicas=5),
        workload("Job", "batch", "small", parallelism=2),
    ]
    (directory / "web.yaml").write_text(yaml.safe_dump_all(first))
    second = [
        planned.claim("shared", "3g.40gb"),
        planned.pod("one", "shared"),
        planned.pod("two", "shared"),
        planned.claim("alone"),
        {"kind": "ConfigMap", "metadata": {"name": "nothing"}},
    ]
    (directory / "more" / "pods.json").write_text(json.dumps({"items": second}))
    result = run_here(
        "fleet_plan",
        {
            "nodes": planned.answers(planned.fleet()),
            "cluster_src": [listed(tmp_path, *planned.CLASSES)],
            "src": [str(directory)],
        },
    )
    assert served(result) == {
        "Deployment default/web and 1 more": (7, 7),
        "Pod default/one": (1, 1),
        "ResourceClaim default/alone": (1, 1),
    }
    assert result["plan"]["wanted"][0]["wants"].startswith("device of class mig.nvidia.com with ")


def test_pods_get_layouts_only_on_possible_nodes(run_here: Run, tmp_path: Path) -> None:
    devices = planned.fleet()
    claims = [planned.claim(name, "1g.10gb") for name in ("any", "there", "tolerant", "nowhere")]
    taint = {"key": "only", "value": "some", "effect": "NoSchedule"}
    nodes: list[Json] = [
        {"kind": "Node", "metadata": {"name": "gpu-1", "labels": {"zone": "a"}}, "spec": {"taints": [taint]}},
        {"kind": "Node", "metadata": {"name": "gpu-2", "labels": {"zone": "b"}}},
        # A node without accelerators or without an answer.
        {"kind": "Node", "metadata": {"name": "other", "labels": {"zone": "c"}}},
    ]
    tolerations = [{"key": "only", "operator": "Exists"}]
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    pods = [
        planned.pod("any", "any", since=LONG_AGO, tolerations=tolerations),
        planned.pod("there", "there", since=LONG_AGO, nodeSelector={"zone": "b"}, tolerations=tolerations),
        planned.pod("tolerant", "tolerant", since=LONG_AGO, tolerations=tolerations, affinity=affinity),
        planned.pod("nowhere", "nowhere", since=LONG_AGO, nodeSelector={"zone": "c"}),
    ]
    files = [listed(tmp_path, *planned.CLASSES, *claims, *pods, *nodes, *planned.slices(devices))]
    options = {"nodes": planned.answers(devices), "cluster_src": files, "pending_for": "0s"}
    result = run_here("fleet_plan", options)
    given = {name: each["node"] for each in result["plan"]["devices"] for name in each["given"]}
    assert given["Pod default/there"] == "gpu-2" and given["Pod default/tolerant"] == "gpu-1"
    assert result["plan"]["touched"] == 2 and "Pod default/any" in given
    (lacking,) = result["plan"]["unplaceable"]
    assert (lacking["name"], lacking["code"]) == ("Pod default/nowhere", "not-planned")
    assert lacking["message"].startswith("Its pod may go to no node of the fleet: the pod does not tolerate the node's")
    assert result["remarks"] == [
        "Pod default/there: planned without 1 of 2 nodes: the pod's nodeSelector wants zone=b (gpu-1)",
        "Pod default/tolerant: planned without 1 of 2 nodes: the pod's node affinity does not select it (gpu-2)",
    ]
    # More claims than the selected node can serve, while the other node stays empty.
    many = [planned.claim(f"many-{number}", "3g.40gb") for number in range(6)]
    crowd = [
        planned.pod(one["metadata"]["name"], one["metadata"]["name"], since=LONG_AGO, nodeSelector={"zone": "b"})
        for one in many
    ]
    files = [listed(tmp_path, *planned.CLASSES, *many, *crowd, *nodes, *planned.slices(devices))]
    short = run_here("fleet_plan", {**options, "cluster_src": files})["plan"]
    assert [each["served"] for each in short["wanted"]] == [4]
    assert {each["node"] for each in short["devices"] if each["changed"]} == {"gpu-2"}
    (lacking,) = short["unplaceable"]
    assert lacking["message"].startswith("What its pod may go to of the fleet has room for 4 of them")


def test_without_cluster_node_selection_is_left_to_scheduler(run_here: Run, tmp_path: Path) -> None:
    pod = planned.pod("p", "c", nodeSelector={"zone": "b"})
    src = [listed(tmp_path, *planned.CLASSES, planned.claim("c", "1g.10gb"), pod)]
    result = run_here("fleet_plan", {"nodes": planned.answers(planned.fleet()), "cluster": False, "src": src})
    assert served(result) == {"Pod default/p": (1, 1)}
    assert result["remarks"] == [
        "Pod default/p: its pod's nodeSelector is left to the scheduler, since no node of the cluster is known here"
    ]


def test_selector_by_uuid_matches_static_partitions_only(run_here: Run, tmp_path: Path) -> None:
    """A claim can select by UUID: static partitions have one before allocation, dynamic partitions do not."""
    uuid = f"has(device.attributes['{planned.DRIVER}'].uuid)"
    claims = [planned.claim("there", "1g.10gb"), planned.claim("then", "1g.10gb"), planned.claim("any", "1g.10gb")]
    for claim, more in zip(claims, (f" && {uuid}", f" && !{uuid}", ""), strict=True):
        claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"][0]["cel"]["expression"] += more
    options = {"cluster": False, "src": [listed(tmp_path, *planned.CLASSES, *claims)]}
    nodes = planned.answers(planned.fleet(1))
    without = run_here("fleet_plan", {"nodes": nodes, **options})
    names = [f"ResourceClaim default/{each}" for each in ("there", "then", "any")]
    assert served(without) == dict(zip(names, ((1, 1), (0, 1), (1, 1)), strict=True))
    (lacking,) = without["plan"]["unplaceable"]
    assert lacking["name"] == names[1] and lacking["message"].startswith("No device of the fleet is or can be cut into")
    nodes["gpu-1"]["devices"][1]["rule"] = {"mode": "dynamic"}
    result = run_here("fleet_plan", {"nodes": nodes, **options})
    assert served(result) == dict.fromkeys(names, (1, 1))
    # Dynamic partitions need no layout change.
    assert [(each["mode"], each["changed"]) for each in result["plan"]["devices"]] == [
        ("static", True),
        ("dynamic", False),
    ]


def test_alternatives_priorities_and_unplannable_requests(run_here: Run, tmp_path: Path) -> None:
    flexible = planned.claim("flexible")
    flexible["spec"]["devices"]["requests"] = [
        {
            "name": "gpu",
            "firstAvailable": [
                {
                    "name": "none",
                    "deviceClassName": "mig.nvidia.com",
                    "selectors": [{"cel": {"expression": f"device.attributes['{planned.DRIVER}'].profile == '9g'"}}],
                },
                {"name": "whole", "deviceClassName": planned.DRIVER},
            ],
        }
    ]
    everything = planned.claim("everything")
    everything["spec"]["devices"]["requests"][0]["exactly"] = {
        "deviceClassName": planned.DRIVER,
        "allocationMode": "All",
    }
    watching = planned.claim("watching")
    watching["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"] = True
    bound = planned.claim("bound", count=2)
    bound["spec"]["devices"]["constraints"] = [{"matchAttribute": "resource.kubernetes.io/pcieRoot"}]
    unknown = planned.claim("unknown")
    unknown["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "no.such.class"
    urgent = {"kind": "PriorityClass", "metadata": {"name": "urgent"}, "value": 1000}
    manifests = [urgent, flexible, everything, watching, bound, unknown]
    manifests.append(planned.pod("first", "flexible", priorityClassName="urgent"))
    manifests.append(planned.pod("lost", "nowhere"))
    result = run_here(
        "fleet_plan",
        {
            "nodes": planned.answers(planned.fleet(1)),
            "cluster": False,
            "src": [listed(tmp_path, *planned.CLASSES, *manifests)],
        },
    )
    assert served(result) == {"Pod default/first": (1, 1), "ResourceClaim default/bound": (0, 1)}
    assert {(each["name"], each["code"]) for each in result["plan"]["unplaceable"]} == {
        ("ResourceClaim default/bound", "taken-by-others"),
        ("ResourceClaim default/everything", "not-planned"),
        ("ResourceClaim default/unknown", "not-planned"),
    }
    assert any("pcieRoot" in each for each in result["remarks"])
    assert "Pod default/lost: ResourceClaim nowhere does not exist in namespace default" in result["remarks"]


# ---- pending pods and claims


def test_pending_pods_become_a_plan_with_obstacles(run_here: Run, tmp_path: Path) -> None:
    devices = planned.fleet(1)
    (gpu,) = [each for each in planned.slices(devices)[0]["spec"]["devices"] if each["name"] == "gpu-0"]
    held = allocated(planned.claim("running"), "gpu-1", gpu["name"], pods=("runner",))
    names = [f"small-{number}" for number in range(9)]
    objects = [
        *planned.CLASSES,
        *planned.slices(devices),
        {"kind": "Node", "metadata": {"name": "gpu-1"}},
        held,
        *(planned.claim(name, "1g.10gb") for name in names),
        *(planned.pod(name, name, since=LONG_AGO) for name in names),
        planned.claim("late", "1g.10gb"),
        planned.pod("late", "late", since=NEVER),
        planned.claim("gated", "1g.10gb"),
        planned.pod("gated", "gated", since=LONG_AGO, schedulingGates=[{"name": "later"}]),
    ]
    options = {
        "nodes": planned.answers(devices),
        "cluster_src": [listed(tmp_path, *objects)],
        "pending_for": "1d",
        "dest": str(tmp_path / "layouts.yml"),
    }
    result = run_here("fleet_plan", options)
    name = "Pod default/small-0 and 8 more"
    assert served(result) == {name: (7, 9)}
    (lacking,) = result["plan"]["unplaceable"]
    assert (lacking["count"], lacking["code"]) == (2, "held")
    assert lacking["why"].startswith("Pod default/small-0: no node has devices for it now.")
    assert [each["mode"] for each in result["plan"]["devices"]] == ["whole", "static"]
    assert any("2 without a place" in line for line in result["table"])
    # Pods in other namespaces do not count.
    other = run_here("fleet_plan", {**options, "namespace": "other"})
    assert other["plan"]["wanted"] == [] and other["plan"]["touched"] == 0


def test_moved_claims_need_consent_and_name_their_pods(run_here: Run, tmp_path: Path) -> None:
    devices = planned.applied(
        planned.fleet(2, 1),
        [
            {
                "hosts": node,
                "layout": [{"match": {}, "mode": "static", "partitions": [{"profile": "3g.40gb", "placement": 0}]}],
            }
            for node in ("gpu-1", "gpu-2")
        ],
    )
    published = {each["spec"]["nodeName"]: each["spec"]["devices"][0]["name"] for each in planned.slices(devices)}
    held = [
        allocated(planned.claim(f"part-{node}", "3g.40gb"), node, name, pods=(f"pod-{node}",))
        for node, name in published.items()
    ]
    options = {
        "nodes": planned.answers(devices),
        "cluster_src": [listed(tmp_path, *planned.slices(devices), *held)],
        "wanted": [{"name": "whole"}],
    }
    stays = run_here("fleet_plan", options)
    assert served(stays) == {"whole": (0, 1)} and stays["plan"]["moves"] == [] and stays["plan"]["touched"] == 0
    moves = run_here("fleet_plan", {**options, "most_moves": 1})
    assert served(moves) == {"whole": (1, 1)}
    (move,) = moves["plan"]["moves"]
    assert move["claim"] == f"default/part-{move['from']['node']}" and move["from"]["node"] != move["to"]["node"]
    assert moves["plan"]["pods"] == [f"default/pod-{move['from']['node']}"]
    assert any(f"default/pod-{move['from']['node']}" in line and "moves from" in line for line in moves["table"])


# ---- the solver


def test_without_solver_module_fails_before_reading(
    run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module(f"{MODULES}.fleet_plan"), "HAS_HIGHS", False)
    dest = tmp_path / "layouts.yml"
    # A missing file and an invalid request would be reported if the module read them.
    options = {"nodes_src": str(tmp_path / "none.json"), "wanted": [{"memory": "much"}], "dest": str(dest)}
    result = run_here("fleet_plan", options)
    assert result["failed"] and result["error_code"] == "missing-package" and not dest.exists()
    assert "Failed to import the required Python library (highspy)" in result["msg"]
    assert run_here("fleet_plan", options, check=True)["error_code"] == "missing-package"


def test_plan_ended_by_time_limit_has_its_bound(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    optimization = importlib.import_module(f"{UTILS}._planner.optimization")
    solve = optimization._run

    def end_with_bound(columns: Any, rows: Any, costs: Any, _seconds: float) -> Any:
        return dataclasses.replace(solve(columns, rows, costs, 600.0), bound=8.4, proven=False)

    options = {
        "nodes": planned.answers(planned.fleet(1, 1)),
        "cluster": False,
        "wanted": [{"profile": "1g.10gb", "count": 9}],
        "time_limit": 5,
    }
    monkeypatch.setattr(optimization, "_run", end_with_bound)
    result = run_here("fleet_plan", options)
    assert served(result) == {"1g.10gb": (7, 9)}
    assert result["plan"]["solver"] == {
        "most_served": False,
        "least_changed": False,
        "remark": "the time limit of 5 s is over",
        "bounds": [{"priority": 0, "served": 7, "at_most": 8, "gap": 1}],
    }
    assert result["table"][-1] == (
        "Upper limit of what more could be served: 1 of priority 0. Not proven: the time limit of 5 s is over."
    )
    monkeypatch.setattr(optimization, "_run", lambda *_arguments: optimization._Found([], float("inf"), False))
    failed = run_here("fleet_plan", options)
    assert failed["failed"] and failed["error_code"] == "time-limit" and "Increase time_limit" in failed["msg"]


# ---- refused inputs


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"pending_for": "a day", "cluster_src": ["/dev/null"]}, "invalid-duration", "90m"),
        ({"pending_for": "1d", "cluster_src": [], "cluster": False}, "no-cluster", "cluster_src"),
        ({"nodes": None, "nodes_src": "none.json"}, "manifest-unreadable", "none.json"),
        ({"nodes": {"n": {"devices": [{"uuid": "x"}]}}}, "invalid-inventory", "accelerator_report"),
        ({"wanted": [{"memory": "much"}]}, "invalid-wish", "key memory"),
        ({"dest": "/no/such/folder/layouts.yml"}, "file-unwritable", "/no/such/folder"),
    ],
)
def test_invalid_options_are_rejected(run_here: Run, change: Json, code: str, says: str) -> None:
    options = {"nodes": planned.answers(planned.fleet(1)), "cluster": False, "wanted": [{"profile": "1g.10gb"}]}
    result = run_here("fleet_plan", {key: each for key, each in {**options, **change}.items() if each is not None})
    assert result["failed"] and result["error_code"] == code and says in result["msg"]


def test_selectors_need_published_device_facts(run_here: Run, tmp_path: Path) -> None:
    nodes = planned.answers(planned.fleet(1))
    for kind in nodes["gpu-1"]["kinds"].values():
        del kind["published"]
    src = listed(tmp_path, *planned.CLASSES, planned.claim("one"))
    result = run_here("fleet_plan", {"nodes": nodes, "cluster": False, "src": [src]})
    assert result["error_code"] == "invalid-inventory" and "dra.accelerators.plan" in result["msg"]


def test_empty_directory_and_unnamed_objects_are_rejected(run_here: Run, tmp_path: Path) -> None:
    options = {"nodes": planned.answers(planned.fleet(1)), "cluster": False}
    (tmp_path / "empty").mkdir()
    result = run_here("fleet_plan", {**options, "src": [str(tmp_path / "empty")]})
    assert result["error_code"] == "manifest-unreadable" and ".yaml" in result["msg"]
    result = run_here("fleet_plan", {**options, "src": [listed(tmp_path, {"kind": "Pod"})]})
    assert result["error_code"] == "manifest-unreadable" and "metadata.name" in result["msg"]


# ---- the page


def sections() -> dict[str, tuple[str, str]]:
    """Return the input and the text of each example in docs/plan.md, by heading."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    found = re.findall(r"\n### ([^\n]+)\n.*?```yaml\n(.*?)```\s+```text\n(.*?)```", page, re.DOTALL)
    (written,) = re.findall(r"\n## The file\n.*?```yaml\n(.*?)```", page, re.DOTALL)
    return {**{title: (given, text) for title, given, text in found}, "The file": ("", written)}


def test_examples_of_the_page_match(run_here: Run, tmp_path: Path) -> None:
    devices, page = planned.fleet(), sections()
    nodes = [{"kind": "Node", "metadata": {"name": name}} for name in devices]
    (tmp_path / "manifests.yaml").write_text(page["Manifests"][0])
    (tmp_path / "waiting.yaml").write_text(page["Pending claims"][0])
    cluster = listed(tmp_path, *planned.CLASSES, *nodes, *planned.slices(devices))
    ways: dict[str, Json] = {
        "Counts": {"wanted": yaml.safe_load(page["Counts"][0])["accelerator_plan_wanted"]},
        "Manifests": {"src": [str(tmp_path / "manifests.yaml")]},
        "Pending claims": {"cluster_src": [cluster, str(tmp_path / "waiting.yaml")], "pending_for": "1d"},
    }
    for title, options in ways.items():
        dest = {"dest": str(tmp_path / "layouts.yml")} if title == "Counts" else {}
        result = run_here(
            "fleet_plan", {"nodes": planned.answers(devices), "cluster_src": [cluster], **options, **dest}
        )
        assert "\n".join(result["table"]) + "\n" == page[title][1], title
    assert (tmp_path / "layouts.yml").read_text() == page["The file"][1]


# ---- the playbook


def test_playbook_shows_plan_and_writes_it_on_request(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps({"nodes": planned.answers(planned.fleet())}))
    hosts = {"first.example.com": {"accelerator_node_name": "gpu-1"}, "gpu-2": {}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"accelerator_nodes": {"hosts": hosts}}))
    variables = {
        "accelerator_plan_nodes_src": str(nodes),
        "accelerator_plan_cluster": False,
        "accelerator_plan_wanted": [{"name": "notebooks", "profile": "1g.10gb", "count": 8}],
        "accelerator_plan_file": str(tmp_path / "layouts.yml"),
        "ansible_python_interpreter": str(PYTHON),
        "accelerator_become": False,
    }

    def play(*words: str, **more: Any) -> str:
        return run_ansible(
            [
                *(Path(sys.executable).with_name("ansible-playbook"), "--inventory", tmp_path / "hosts.yml"),
                *(ROOT / "playbooks/plan.yml", "--extra-vars", json.dumps({**variables, **more}), *words),
            ],
            env={**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path / "l"), "ANSIBLE_REMOTE_TEMP": str(tmp_path / "r")},
            check=True,
        ).stdout

    shown = play()
    assert "2 of 4 devices change; 2 are unchanged." in shown and "accelerator_plan_write=true" in shown
    assert "changed=0" in shown and not (tmp_path / "layouts.yml").exists()
    foreseen = play("--check", "--diff")
    assert "+accelerator_layouts:" in foreseen and "changed=1" in foreseen and not (tmp_path / "layouts.yml").exists()
    shown = play(accelerator_plan_write=True)
    assert "changed=1" in shown and "2 of 4 devices change" in shown
    assert "changed=0" in play(accelerator_plan_write=True)
    written = yaml.safe_load((tmp_path / "layouts.yml").read_text())["accelerator_layouts"]
    assert [each["hosts"] for each in written] == ["first.example.com", "gpu-2"]


def test_playbook_computes_the_plan_once() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/plan.yml").read_text("utf-8"))
    tasks = [task for play in plays for task in play.get("tasks", ())]
    assert len([task for task in tasks if "dra.accelerators.fleet_plan" in task]) == 1


@pytest.mark.prove
def test_playbook_does_not_query_nodes_outside_limit(tmp_path: Path) -> None:
    common = {"ansible_python_interpreter": str(PYTHON), "ansible_connection": "local"}
    hosts = {"first.example.com": {**common, "accelerator_node_name": "gpu-1"}, "gpu-2": common}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"accelerator_nodes": {"hosts": hosts}}))
    variables = {
        "accelerator_plan_cluster": False,
        "accelerator_plan_wanted": [{"name": "notebooks", "profile": "1g.10gb", "count": 1}],
        "accelerator_plan_keep_nodes": str(tmp_path / "nodes.json"),
        "accelerator_become": False,
        "accelerator_kubelet_root": str(tmp_path),
    }
    done = run_ansible(
        [
            *(
                Path(sys.executable).with_name("ansible-playbook"),
                "--inventory",
                tmp_path / "hosts.yml",
                "--limit",
                "gpu-2",
            ),
            *(ROOT / "playbooks/plan.yml", "--extra-vars", json.dumps(variables)),
        ],
        env={**os.environ, "ANSIBLE_LOCAL_TEMP": str(tmp_path / "l"), "ANSIBLE_REMOTE_TEMP": str(tmp_path / "r")},
    )
    assert done.returncode == 0 and "gpu-1 was not queried in this run." in done.stdout, done.stdout
    kept = json.loads((tmp_path / "nodes.json").read_text())["nodes"]
    assert kept["gpu-1"] == {} and kept["gpu-2"]["answered_at"]
