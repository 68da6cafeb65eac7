# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Objects that one host of a cluster writes and removes for all hosts of the cluster in the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import Played, play

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_driver"
Task = dict[str, Any]
STOP = "dra.accelerators.node_driver"


def run(directory: Path, hosts: dict[str, dict[str, Any]], *tasks: Task, status: int = 0) -> Played:
    """Run tasks on hosts with the variables of the role, after it has selected the host for each cluster."""
    (directory / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    first: list[Task] = [
        {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")},
        {"ansible.builtin.include_tasks": str(ROLE / "tasks/leaders.yml")},
    ]
    played = play(directory, [*first, *tasks], {name: {**defaults, **each} for name, each in hosts.items()})
    assert played.status == status, played.output
    return played


def reported(expression: str) -> Task:
    return {"ansible.builtin.debug": {"msg": "{{ " + expression + " | to_json | b64encode }}"}}


def test_removal_includes_all_own_slices_of_the_hosts(tmp_path: Path) -> None:
    """The removal includes slices of drivers that the variables do not name."""
    slices = {
        node: {
            "slices": [
                {"managed": ours, "driver": driver, "object": f"{node}-{driver}"}
                for driver, ours in (("gpu.nvidia.com", True), ("npu.huawei.com", True), ("gpu.example.com", False))
            ]
        }
        for node in ("a1", "a2", "a3")
    }
    hosts = {node: {"dra_driver_node_name": node, "__dra_driver_left": {"nodes": slices}} for node in ("a1", "a2")}
    found = run(tmp_path, hosts, reported("__dra_driver_absent_slices")).messages["a1"]
    assert found == [f"{node}-{driver}" for node in hosts for driver in ("gpu.nvidia.com", "npu.huawei.com")]


def test_removal_looks_for_files_of_all_drivers_of_the_node(tmp_path: Path) -> None:
    """The drivers of the node come from the variables, the devices, and the slices."""
    slices = [
        {"managed": True, "driver": "npu.example.com", "object": {}},
        {"managed": False, "driver": "gpu.example.com", "object": {}},
    ]
    host = {
        "dra_driver_node_name": "a1",
        "dra_driver_node_info": {"devices": {"ascend": ["0000:c1:00.0"]}},
        "dra_driver_cluster_info": {"nodes": {"a1": {"slices": slices}}},
    }
    tasks = yaml.safe_load((ROLE / "tasks/absent.yml").read_text("utf-8"))
    (names,) = (task[STOP]["names"] for task in tasks if STOP in task)
    found = run(tmp_path, {"a1": host}, {"ansible.builtin.set_fact": {"found": names}}, reported("found")).messages[
        "a1"
    ]
    assert sorted(found) == ["gpu.nvidia.com", "npu.example.com", "npu.huawei.com"]


def test_nodes_with_waiting_claims_read_their_own_list_only(tmp_path: Path) -> None:
    """The records name the nodes, also for drivers that are pods, which have no Role for their node."""
    ahead = [{"match": {}, "mode": "dynamic", "prepared_before_binding": True}]
    hosts: dict[str, dict[str, Any]] = {
        name: {"dra_driver_node_name": name, "dra_driver_layout": layout, "dra_driver_deploy_as": form}
        for name, layout, form in (("a1", [], "service"), ("a2", ahead, "service"), ("a3", ahead, "daemonset"))
    }
    roles = (
        "__dra_driver_node_objects | selectattr('kind', 'in', ['ClusterRole', 'Role']) | map(attribute='rules') | list"
    )
    records, rules = run(tmp_path, hosts, reported(f"[__dra_driver_records, {roles}]")).messages["a1"]
    needs = {each["metadata"]["name"]: json.loads(each["data"]["needs"]) for each in records}
    assert {name: found["prepared_before_binding"] for name, found in needs.items()} == {
        "driver-a1": False,
        "driver-a2": True,
        "driver-a3": True,
    }
    assert "resourceclaims" not in str(rules)
    restored = {"ansible.builtin.set_fact": {"__dra_driver_claim_watchers": ["a2"]}}
    other = tmp_path / "restored"
    other.mkdir()
    records, restored_rules = run(other, hosts, restored, reported(f"[__dra_driver_records, {roles}]")).messages["a1"]
    watched = [each for rule in restored_rules for each in rule if each["resources"] == ["resourceclaims"]]
    assert [each["verbs"] for each in watched] == [["list", "watch"]], (
        "a failed run restores the right of an earlier driver"
    )
    lists = [each for rule in rules for each in rule if each["resources"] == ["configmaps"]]
    assert [(each["resourceNames"], each["verbs"]) for each in lists] == [
        entry
        for node in ("a2", "a3")
        for entry in (([f"waiting-claims-{node}"], ["list", "watch"]), (["waiting-claims"], ["get"]))
    ]


def test_removal_of_a_node_keeps_objects_of_nodes_with_similar_names(tmp_path: Path) -> None:
    """Earlier releases gave a node "gpu" a binding with the name of the first binding of a node "gpu-node"."""
    prefix = "dra-accelerators-driver-"

    def own(*nodes: str) -> list[dict[str, Any]]:
        named = [(kind, f"driver-{node}") for node in nodes for kind in ("ConfigMap", "ServiceAccount", "RoleBinding")]
        named += [("ClusterRole", prefix + node) for node in nodes]
        named += [("ClusterRoleBinding", f"{prefix}{node}{end}") for node in nodes for end in ("", ":node", "-node")]
        return [{"kind": kind, "metadata": {"name": name}} for kind, name in named]

    def removed(directory: Path, *others: str) -> set[tuple[str, str]]:
        directory.mkdir()
        accounts = [f"driver-{node}" for node in ("gpu", *others)]
        left = {
            "nodes": {"gpu": {"slices": []}},
            "own": own("gpu", *others),
            "accounts": accounts,
            "orphans": [],
            "driver_pods": {},
        }
        known = {"__dra_driver_left": left}
        hosts = {"h": {"dra_driver_node_name": "gpu", "__dra_driver_token_defaults": {"audiences": ["api"]}, **known}}
        found = run(directory, hosts, reported("__dra_driver_absent_objects")).messages["h"]
        return {(each["kind"], each["metadata"]["name"]) for each in found}

    all_of_gpu = {(each["kind"], each["metadata"]["name"]) for each in own("gpu")}
    assert removed(tmp_path / "alone", "other") == all_of_gpu
    assert removed(tmp_path / "similar", "gpu-node") == all_of_gpu - {("ClusterRoleBinding", f"{prefix}gpu-node")}


def test_removal_fails_if_an_object_still_exists(tmp_path: Path) -> None:
    """A load balancer answered the deletion: the run fails. The objects of another driver stay."""
    tasks = yaml.safe_load((ROLE / "tasks/absent.yml").read_text("utf-8"))
    (check,) = (each for each in tasks if each["name"] == "Fail if an object of the driver still exists")
    account, other = ({"kind": "ServiceAccount", "metadata": {"name": f"driver-{name}"}} for name in ("a1", "a2"))
    mine = {"managed": True, "object": {"kind": "ResourceSlice", "metadata": {"name": "a1-gpu"}}}
    before = {"nodes": {"a1": {"slices": [mine]}}, "own": [account, other], "accounts": ["driver-a1", "driver-a2"]}
    before |= {"orphans": [], "driver_pods": {}}
    hosts = {}
    for name, slices, own in (("gone", [], [other]), ("account", [], [account, other]), ("slice", [mine], [other])):
        after = {"nodes": {"a1": {"slices": slices}}, "own": own}
        hosts[name] = {"dra_driver_node_name": "a1", "accelerator_kubeconfig": name}
        hosts[name] |= {"__dra_driver_left": before, "__dra_driver_left_after": after}
    failed = run(tmp_path, hosts, check, status=2).failed
    assert failed.keys() == {"account", "slice"}
    assert "still has ServiceAccount driver-a1 after" in failed["account"]["msg"]
    assert "still has ResourceSlice a1-gpu after" in failed["slice"]["msg"]


def test_nodes_with_similar_names_have_separate_objects(tmp_path: Path) -> None:
    hosts = {name: {"dra_driver_node_name": name} for name in ("gpu", "gpu-node", "gpu-node-node")}
    written = run(tmp_path, hosts, reported("__dra_driver_node_objects")).messages["gpu"]
    keys = [(each["kind"], each["metadata"]["name"]) for each in written]
    assert len(set(keys)) == len(keys) == 6 * len(hosts)


def test_no_object_of_a_node_has_the_name_of_a_shared_object(tmp_path: Path) -> None:
    """Includes nodes with names like the ends of shared object names, such as "pods", "pods-node", and "claims"."""
    template_names = {
        name
        for path in ROLE.glob("templates/*.j2")
        for name in re.findall(
            r"(?:dra-accelerators-driver|driver|waiting-claims)-([a-z0-9.-]+)", path.read_text("utf-8")
        )
    }
    nodes = sorted(name.rstrip("-.") for name in template_names | {"pods", "pods-node", "pods-claims"})
    hosts: dict[str, dict[str, Any]] = {
        f"h{number}": {"dra_driver_node_name": name, "__dra_driver_recorded": {"needs": {}}}
        for number, name in enumerate(nodes)
    }
    known = "'accounts': [], 'nodes': {}, 'namespace': {'exists': true}"
    shared = "__dra_driver_shared_objects + __dra_driver_flow_objects + (lookup('ansible.builtin.template', 'pod_objects.yaml.j2') | from_yaml_all | list)"
    given = {
        "ansible.builtin.set_fact": {
            "__dra_driver_token_defaults": {"audiences": ["api"]},
            "dra_driver_cluster_info": "{{ {" + known + "} }}",
            "__dra_driver_api_endpoints": {"resources": []},
        }
    }
    (found,) = run(
        tmp_path,
        hosts,
        given,
        {**reported(f"[{shared}, __dra_driver_node_objects + __dra_driver_records]"), "run_once": True},
    ).messages.values()
    fixed, of_nodes = ({(each["kind"], each["metadata"]["name"]) for each in objects} for objects in found)
    assert len(of_nodes) == 7 * len(nodes) and {"pods", "pods-node"} <= set(nodes)
    assert not fixed & of_nodes


@pytest.mark.parametrize(
    ("nodes", "kept"),
    [
        ((), set()),
        (("pods",), {"driver-pods", "dra-accelerators-driver-pods", "dra-accelerators-driver-pods-node"}),
        (("pods-node",), {"dra-accelerators-driver-pods-node"}),
    ],
)
@pytest.mark.parametrize("variable", ["__dra_driver_recorded", "__dra_driver_left"])
def test_objects_of_pods_with_earlier_names_are_removed(
    tmp_path: Path, variable: str, nodes: tuple[str, ...], kept: set[str]
) -> None:
    """Objects of a node with this name, and objects of other owners, are kept."""
    earlier = {
        ("ClusterRole", "dra-accelerators-driver-pods"),
        ("ClusterRoleBinding", "dra-accelerators-driver-pods"),
        ("ClusterRoleBinding", "dra-accelerators-driver-pods-node"),
        ("Role", "driver-pods"),
        ("RoleBinding", "driver-pods"),
    }
    others = {("ServiceAccount", "driver-pods"), ("ClusterRole", "dra-accelerators-driver:pods")}
    own = [{"kind": kind, "metadata": {"name": name}} for kind, name in sorted(earlier | others)]
    answer = {"own": own, "accounts": [f"driver-{name}" for name in nodes], "nodes": {}, "orphans": []}
    hosts = {"h": {"dra_driver_node_name": "gpu", variable: answer}}
    (found,) = run(tmp_path, hosts, reported("__dra_driver_renamed_objects")).messages.values()
    assert {(each["kind"], each["metadata"]["name"]) for each in found} == {
        key for key in earlier if key[1] not in kept
    }


def test_hosts_whose_leader_failed_name_it(tmp_path: Path) -> None:
    """The leader removes the objects of all hosts of its cluster and has failed: its hosts name it. Hosts of other clusters continue."""
    tasks = yaml.safe_load((ROLE / "tasks/absent.yml").read_text("utf-8"))
    (last,) = (number for number, each in enumerate(tasks) if each["name"].startswith("Check whether another node"))
    known = {"__dra_driver_left": {"nodes": {}, "own": [], "accounts": [], "orphans": [], "driver_pods": {}}}
    hosts = {
        name: {"accelerator_kubeconfig": name[0], "dra_driver_node_name": name, **known}
        for name in ("a1", "a2", "b1", "b2")
    }
    fail = {"ansible.builtin.fail": {"msg": "no way"}, "when": "inventory_hostname == 'a1'"}
    played = run(tmp_path, hosts, fail, *tasks[last:], reported("__dra_driver_was_last | bool"), status=2)
    assert set(played.failed) == {"a1", "a2"} and played.messages == {"b1": True, "b2": True}, played.output
    assert "a1, which removes the objects" in played.failed["a2"]["msg"]


@pytest.mark.parametrize("needs", [{}, {"flow_control": False}, {"flow_control": True}])
def test_flow_schemas_stay_as_long_as_a_node_of_another_inventory_needs_them(
    tmp_path: Path, needs: dict[str, Any]
) -> None:
    recorded = {"__dra_driver_recorded": {"needs": needs}, "dra_driver_flow_control": False}
    shown = reported("[__dra_driver_shared_flow_control | bool, __dra_driver_own_needs.flow_control]")
    played = run(tmp_path, {"a1": {"dra_driver_node_name": "a1", **recorded}}, shown)
    assert played.messages["a1"] == [needs.get("flow_control", False), False]


REMOVAL = "Remove disabled FlowSchemas and priority levels"


@pytest.mark.parametrize(
    ("hosts", "removed"),
    [
        ({"a1": ("a", True), "a2": ("a", False)}, set()),
        ({"a1": ("a", False), "a2": ("a", True)}, set()),
        ({"a1": ("a", False), "a2": ("a", False), "b1": ("b", True)}, {"a1"}),
        ({"a1": ("a", False), "b1": ("b", False), "b2": ("b", False)}, {"a1", "b1"}),
    ],
)
def test_flow_schemas_are_removed_where_no_host_of_the_cluster_wants_them(
    tmp_path: Path, hosts: dict[str, tuple[str, bool]], removed: set[str]
) -> None:
    """A run writes or removes them once per cluster."""
    (remove, *_checks) = yaml.safe_load((ROLE / "tasks/delete_objects.yml").read_text("utf-8"))
    del remove["kubernetes.core.k8s"]
    shown = {**remove, "ansible.builtin.debug": {"msg": "removes {{ inventory_hostname }}"}}
    (tmp_path / "remove.yml").write_text(yaml.safe_dump([shown]), encoding="utf-8")
    tasks = yaml.safe_load((ROLE / "tasks/shared.yml").read_text("utf-8"))
    (call,) = (each for each in tasks if each["name"] == REMOVAL)
    call = {**call, "ansible.builtin.include_tasks": str(tmp_path / "remove.yml")}
    flows = "selectattr('kind', 'equalto', 'FlowSchema') | list | length"
    variables: dict[str, dict[str, Any]] = {
        name: {
            "accelerator_kubeconfig": cluster,
            "dra_driver_kubeconfig": cluster,
            "dra_driver_node_name": name,
            "dra_driver_flow_control": wanted,
            "__dra_driver_token_defaults": {"audiences": ["api"]},
            "__dra_driver_recorded": {"needs": {}},
            "__dra_driver_recorded_after": {"skipped": True},
        }
        for name, (cluster, wanted) in hosts.items()
    }
    played = run(tmp_path, variables, call, reported(f"[__dra_driver_leads, __dra_driver_shared_objects | {flows}]"))
    assert {name for name in hosts if f"removes {name}" in played.output} == removed, played.output
    leaders = {name: bool(written) for name, (leads, written) in played.messages.items() if leads}
    assert {name for name, written in leaders.items() if not written} == removed


CHECKS = (
    "Reject different namespaces of drivers in one cluster",
    "Reject a namespace that differs from the namespace of other drivers in the cluster",
)


@pytest.mark.parametrize(
    ("hosts", "namespaces", "words"),
    [
        ({"a1": {"dra_driver_namespace": "team"}, "a2": {"dra_driver_namespace": "team"}}, {}, []),
        # a2 is not in the run.
        ({"a1": {}, "a2": {"dra_driver_namespace": "team"}}, {}, ['"dra-accelerators" here and "team" on a2']),
        ({"a1": {"dra_driver_namespace": "team"}, "a2": {}}, {}, ['"team" here and "dra-accelerators" on a2']),
        ({"a1": {}, "a2": {"dra_driver_pod_namespace": "pods"}}, {}, ["dra_driver_pod_namespace", '"pods" on a2']),
        ({"a1": {}, "a2": {"accelerator_kubeconfig": "/b", "dra_driver_namespace": "team"}}, {}, []),
        ({"a1": {"dra_driver_namespace": "team"}}, {"services": "team"}, []),
        (
            {"a1": {"dra_driver_namespace": "team"}},
            {"services": "other"},
            ["dra_driver_namespace other", "namespace team"],
        ),
        ({"a1": {}}, {"pods": "other"}, ["dra_driver_pod_namespace other"]),
    ],
)
def test_different_namespaces_in_one_cluster_are_rejected(
    tmp_path: Path, hosts: dict[str, dict[str, Any]], namespaces: dict[str, str], words: list[str]
) -> None:
    """The admission policies have one name in the cluster and name one namespace, so a second namespace would have no policy."""
    tasks = yaml.safe_load((ROLE / "tasks/shared.yml").read_text("utf-8"))
    checks = [each for each in tasks if each["name"] in CHECKS]
    recorded = {"namespaces": {"services": "", "pods": "", **namespaces}}
    given = {"accelerator_kubeconfig": "/a", "dra_driver_kubeconfig": "/a", "__dra_driver_recorded": recorded}
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    first: list[Task] = [
        *({"ansible.builtin.include_vars": str(ROLE / path)} for path in ("vars/main.yml",)),
        {"ansible.builtin.include_tasks": str(ROLE / "tasks/leaders.yml")},
    ]
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    names = {"dra_driver_namespace", "dra_driver_pod_namespace"}
    fallback = {"vars": {name: defaults[name] for name in names - hosts["a1"].keys()}}
    block = {**fallback, "block": [*first, *checks]}
    others = {key: value for key, value in defaults.items() if key not in names and key != "dra_driver_kubeconfig"}
    played = play(
        tmp_path,
        [block],
        {name: {**others, "dra_driver_node_name": name, **given, **each} for name, each in hosts.items()},
        "--limit",
        "a1",
    )
    assert len(checks) == len(CHECKS) and played.status == (2 if words else 0), played.output
    text = str(played.failed.get("a1", {}).get("msg", ""))
    assert [each for each in words if each not in text.replace("\\", "")] == [], played.output


def test_defaults_of_the_compared_namespaces_are_those_of_the_role() -> None:
    defaults, variables = (
        yaml.safe_load((ROLE / name / "main.yml").read_text("utf-8")) for name in ("defaults", "vars")
    )
    compared = variables["__dra_driver_default_namespaces"]
    assert compared == {name: defaults[name] for name in compared}
    assert compared.keys() == variables["__dra_driver_namespaces"].keys()
