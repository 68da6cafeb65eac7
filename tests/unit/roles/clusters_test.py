# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inventories with several clusters: the playbooks ask the cluster of each host, and reject inventories that name no node or one node twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.filter.cluster_union import cluster_union
from ansible_collections.dra.accelerators.plugins.filter.node_name_conflicts import node_name_conflicts
from playing import play as play_tasks

from tests.unit.json_server import JsonHandler, JsonServer

ROOT = Path(__file__).resolve().parents[3]
Json = dict[str, Any]
UNIT = "dra-accelerators-driver.service"


class ClusterServer(JsonServer):
    """The lists of an API server: Nodes, and claims whose devices pods of a node use."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = list(nodes)
        self.claims: list[Json] = []
        self.lists: dict[str, list[Json]] = {}
        self.paths: list[str] = []
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                server.paths.append(path)
                kind, _slash, name = path.rpartition("/")
                if path == "/apis/resource.k8s.io":
                    self.answer(200, {"versions": [{"version": "v1"}]})
                elif kind == "/api/v1/nodes":
                    found = {"metadata": {"name": name, "uid": name}, "spec": {}, "status": {}}
                    self.answer(*((200, found) if name in server.nodes else (404, {"reason": "NotFound"})))
                elif kind == "/api/v1/namespaces":
                    self.answer(200, {"metadata": {"name": name}})
                else:
                    self.answer(
                        200, {"items": server.claims if name == "resourceclaims" else server.lists.get(name, [])}
                    )

        super().__init__(Handler)

    def use(self, node: str, driver: str = "gpu.nvidia.com") -> None:
        """Have a pod use a device of a node."""
        result = {"request": "r", "driver": driver, "pool": node, "device": "gpu-0"}
        status = {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": f"pod-on-{node}"}],
        }
        metadata = {"namespace": "default", "name": f"claim-on-{node}"}
        self.claims.append({"metadata": metadata, "spec": {}, "status": status})

    def kubeconfig(self, path: Path) -> str:
        access = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(access), encoding="utf-8")
        return str(path)


@pytest.fixture
def clusters() -> Iterator[tuple[ClusterServer, ClusterServer]]:
    with ClusterServer("a1", "a2") as first, ClusterServer("b1", "b2") as second:
        yield first, second


def run_playbook(folder: Path, playbook: Path, groups: Json, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}), encoding="utf-8")
    return subprocess.run(
        [
            *(Path(sys.executable).with_name("ansible-playbook"), "-i", folder / "hosts.yml", playbook),
            *("-e", json.dumps({"accelerator_become": False}), *arguments),
        ],
        env={
            **os.environ,
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
            "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            "ANSIBLE_LIBRARY": str(folder / "library"),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def group(names: list[str], **variables: Any) -> Json:
    hosts: Json = {name: {} for name in names}
    common = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    return {"hosts": hosts, "vars": {**common, **variables}}


def two_clusters(folder: Path, clusters: tuple[ClusterServer, ClusterServer]) -> Json:
    """The hosts a1 and a2 of the first cluster, and b1 and b2 of the second."""
    first, second = (server.kubeconfig(folder / f"kubeconfig-{name}") for name, server in zip("ab", clusters))
    children = {
        "first": group(["a1", "a2"], accelerator_kubeconfig=first),
        "second": group(["b1", "b2"], accelerator_kubeconfig=second),
    }
    return {"accelerator_nodes": {"children": children}}


# ---- remove

MODULE = """
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"answer": {"type": "dict"}}, supports_check_mode=True)
module.exit_json(**module.params["answer"])
"""


def removal(folder: Path, *, ours: bool = True) -> Path:
    """Write the playbook remove up to the point where a node's driver would be stopped; nodes answer that they have our driver."""
    (folder / "library").mkdir()
    (folder / "library/answer.py").write_text(MODULE, encoding="utf-8")
    node = {
        "driver": {"configuration": []},
        "units": {UNIT: {"ours": ours}, "dra-accelerators-settings.service": {"ours": False}},
        "devices": {"nvidia": ["0000:18:00.0"]},
    }
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    check = [
        {**each, "ansible.builtin.import_playbook": str(ROOT / "playbooks/check_inventory.yml")}
        for each in plays
        if "hosts" not in each
    ]
    read, take = (each for each in plays if each["name"] in ("Read what is asked for", "Take the driver away"))
    take["gather_facts"] = False
    tasks = []
    for task in take["tasks"]:
        if "dra.accelerators.node_info" in task:
            task = {"name": task["name"], "answer": {"answer": node}, "register": task["register"]}
        if "block" in task:
            names = [each["name"] for each in task["block"]]
            # Nothing is written before, apart from the cordon.
            kept = task["block"][: names.index("Delete the pods")]
            kept = [each for each in kept if "kubernetes.core.k8s" not in each]
            task = {
                "name": task["name"],
                "block": [*kept, {"ansible.builtin.debug": {"msg": "stops {{ inventory_hostname }}"}}],
            }
        tasks.append(task)
    take["tasks"] = tasks
    path = folder / "play.yml"
    path.write_text(yaml.safe_dump([*check, read, take], sort_keys=False), encoding="utf-8")
    return path


def stopped(output: str) -> set[str]:
    return set(re.findall(r'"msg": "stops (\w+)"', output))


def failures(output: str) -> dict[str, str]:
    return dict(re.findall(r"^fatal: \[(\w+)[^\]]*\]: FAILED! => (.*)$", output, re.MULTILINE))


def test_remove_refuses_a_node_whose_pod_uses_a_claim_of_the_second_cluster(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    clusters[1].use("b2")
    done = run_playbook(tmp_path, removal(tmp_path), two_clusters(tmp_path, clusters))
    assert stopped(done.stdout) == {"a1", "a2", "b1"}, done.stdout
    assert failures(done.stdout).keys() == {"b2"} and "default/pod-on-b2 with claim claim-on-b2" in done.stdout
    # Each cluster is asked once for its own nodes before the removal, and once for claims.
    for server, own in zip(clusters, ("a", "b")):
        asked = [path for path in server.paths if path.startswith("/api/v1/nodes/")]
        assert sorted(asked) == sorted([f"/api/v1/nodes/{own}{number}" for number in (1, 2)] * 2)
        assert server.paths.count("/apis/resource.k8s.io/v1/resourceclaims") == 1


@pytest.mark.parametrize(
    ("variables", "driver"),
    [
        ({"accelerator_vendors": ["ascend"]}, "npu.huawei.com"),
        ({"dra_driver_names": ["gpu.example.com"]}, "gpu.example.com"),
    ],
)
def test_remove_refuses_a_node_whose_pod_uses_a_claim_of_another_driver_than_the_first_host(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer], variables: Json, driver: str
) -> None:
    clusters[0].use("a2", driver)
    groups = two_clusters(tmp_path, clusters)
    groups["accelerator_nodes"]["children"]["first"]["hosts"]["a2"] = variables
    done = run_playbook(tmp_path, removal(tmp_path), groups)
    assert stopped(done.stdout) == {"a1", "b1", "b2"}, done.stdout
    assert failures(done.stdout).keys() == {"a2"} and "default/pod-on-a2 with claim claim-on-a2" in done.stdout


def test_remove_refuses_a_driver_whose_node_is_missing(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    """Also the first host of its cluster, which asks for the others."""
    clusters[1].nodes.remove("b1")
    clusters[1].use("b2")
    done = run_playbook(tmp_path, removal(tmp_path), two_clusters(tmp_path, clusters))
    assert stopped(done.stdout) == {"a1", "a2"}, done.stdout
    assert failures(done.stdout).keys() == {"b1", "b2"}
    assert "no Node b1" in failures(done.stdout)["b1"] and "accelerator_kubeconfig" in failures(done.stdout)["b1"]
    assert "claim-on-b2" in failures(done.stdout)["b2"]


def test_remove_of_a_host_without_driver_and_node_succeeds(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    clusters[1].nodes.remove("b1")
    done = run_playbook(tmp_path, removal(tmp_path, ours=False), two_clusters(tmp_path, clusters))
    assert stopped(done.stdout) == {"a1", "a2", "b1", "b2"} and done.returncode == 0, done.stdout


def test_remove_goes_on_in_one_cluster_where_another_does_not_answer(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    groups = two_clusters(tmp_path, clusters)
    away = yaml.safe_load((tmp_path / "kubeconfig-b").read_text("utf-8"))
    away["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "kubeconfig-b").write_text(yaml.safe_dump(away), encoding="utf-8")
    done = run_playbook(tmp_path, removal(tmp_path), groups)
    assert stopped(done.stdout) == {"a1", "a2"}, done.stdout
    assert failures(done.stdout).keys() == {"b1", "b2"}
    assert all("127.0.0.1" in text and "Nothing was removed" in text for text in failures(done.stdout).values())


# ---- the inventory

PLAYBOOKS = ["site", "remove", "repartition", "upgrade", "report", "plan", "device_plugin_migration"]


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_empty_group_fails(tmp_path: Path, playbook: str) -> None:
    done = run_playbook(tmp_path, ROOT / f"playbooks/{playbook}.yml", {"acelerator_nodes": group(["a1"])})
    assert done.returncode != 0, done.stdout
    assert "The group accelerator_nodes of the inventory has no hosts" in done.stdout
    assert "acelerator_nodes" in done.stdout


@pytest.mark.parametrize("limit", [(), ("--limit", "b1")])
def test_same_node_name_in_one_cluster_fails(tmp_path: Path, limit: tuple[str, ...]) -> None:
    """Also if the run is limited to one of the hosts."""
    hosts = group(["a1", "b1", "c1"], accelerator_kubeconfig=str(tmp_path / "kubeconfig"))
    hosts["hosts"] = {name: {"accelerator_node_name": "gpu-1"} for name in ("a1", "b1")} | {"c1": {}}
    done = run_playbook(tmp_path, ROOT / "playbooks/site.yml", {"accelerator_nodes": hosts}, *limit)
    assert done.returncode != 0 and "Prepare the nodes" not in done.stdout, done.stdout
    assert f"Hosts a1, b1 have the same Node gpu-1 of the cluster {tmp_path}/kubeconfig." in done.stdout


@pytest.mark.parametrize("variable", ["accelerator_node_name", "accelerator_kubeconfig_context"])
def test_hosts_whose_name_or_cluster_is_unknown_are_no_conflict(tmp_path: Path, variable: str) -> None:
    """Such as templates with facts, which hosts outside of the limit do not have. Other hosts are compared."""
    hosts = group(["a1", "b1", "c1", "d1"], accelerator_kubeconfig="/k", accelerator_node_name="gpu-1")
    hosts["vars"][variable] = "{{ known }}"
    passes = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert passes.returncode == 0, passes.stdout + passes.stderr
    hosts["hosts"] |= {name: {"known": "gpu-1"} for name in ("a1", "b1")}
    fails = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert fails.returncode != 0 and "Hosts a1, b1 have the same Node gpu-1" in fails.stdout, fails.stdout


def test_union_leaves_out_hosts_whose_value_or_cluster_is_unknown(tmp_path: Path) -> None:
    hosts = {
        "a": {"accelerator_vendors": ["ascend"]},
        "b": {"accelerator_vendors": "{{ nowhere }}"},
        "c": {"accelerator_vendors": ["one", "{{ nowhere }}"]},
        "d": {"accelerator_vendors": ["other"], "accelerator_kubeconfig": "{{ nowhere }}"},
        "e": {},
    }
    words = "dra.accelerators.cluster_union(hostvars, groups['accelerator_nodes'], api, ['accelerator_vendors'], ['nvidia'])"
    show = {"ansible.builtin.debug": {"msg": f"{{{{ [] | {words} | to_json | b64encode }}}}"}}
    api = {"kubeconfig": os.environ.get("KUBECONFIG", ""), "context": ""}
    played = play_tasks(tmp_path, [{**show, "vars": {"api": api}, "run_once": True}], hosts)
    assert played.told == {"a": ["ascend", "nvidia"]}, played.output


def test_templates_that_older_versions_return_are_unknown() -> None:
    """ansible-core 2.18 returns a template that it cannot evaluate."""
    hostvars = {name: {"accelerator_node_name": "{{ nowhere }}"} for name in "ab"} | {"c": {}}
    assert not node_name_conflicts(list(hostvars), hostvars)
    api = {"kubeconfig": os.environ.get("KUBECONFIG", ""), "context": ""}
    vendors = {"a": {"vendors": ["one", "{{ nowhere }}"]}, "b": {"vendors": "{{ nowhere }}"}, "c": {"vendors": ["x"]}}
    assert cluster_union([], vendors, list(vendors), api, ["vendors"]) == ["x"]


def test_same_node_name_in_two_clusters_passes(tmp_path: Path) -> None:
    hosts = group(
        ["a1", "b1", "c1"], accelerator_kubeconfig=str(tmp_path / "kubeconfig"), accelerator_node_name="gpu-1"
    )
    hosts["hosts"]["b1"] = {"accelerator_kubeconfig": str(tmp_path / "other")}
    hosts["hosts"]["c1"] = {"accelerator_kubeconfig_context": "second"}
    done = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert done.returncode == 0, done.stdout


# ---- the answer of another host


def test_host_answer_names_the_failed_host_and_its_error(tmp_path: Path) -> None:
    fail = {"ansible.builtin.fail": {"msg": "no way"}, "register": "asked", "when": "inventory_hostname == 'a1'"}
    take = {"dra.accelerators.host_answer": {"host": "a1", "name": "asked"}}
    play = {"hosts": "all", "gather_facts": False, "tasks": [fail, take]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = run_playbook(tmp_path, tmp_path / "play.yml", {"accelerator_nodes": group(["a1", "a2"])})
    assert "Host a1 has no usable result asked: no way" in failures(done.stdout)["a2"]


# ---- nodes that are gone


def gone_play(folder: Path) -> Path:
    """Write the play of remove for nodes that are gone; the objects are shown instead of removed."""
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    (play,) = (each for each in plays if each["name"] == "Remove the objects of nodes that are gone")
    removal = play["tasks"][-1]
    removal["ansible.builtin.debug"] = {"msg": removal.pop("kubernetes.core.k8s")["definition"]}
    check = {"ansible.builtin.import_playbook": str(ROOT / "playbooks/check_inventory.yml")}
    (folder / "play.yml").write_text(yaml.safe_dump([check, play], sort_keys=False), encoding="utf-8")
    return folder / "play.yml"


@pytest.mark.parametrize("living", [False, True])
def test_remove_gone_removes_the_objects_of_the_named_nodes_alone(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer], living: bool
) -> None:
    server = clusters[0]
    if living:
        server.nodes.append("gone")
    for path, prefix, suffix in (
        ("serviceaccounts", "driver-", ""),
        ("clusterroles", "dra-accelerators-driver-", ""),
        ("clusterrolebindings", "dra-accelerators-driver-", "-node"),
    ):
        server.lists[path] = [{"metadata": {"name": f"{prefix}{node}{suffix}"}} for node in ("gone", "a1", "gone-2")]
    server.lists["validatingadmissionpolicies"] = [{"metadata": {"name": "dra-accelerators-driver-slices"}}]
    variables = {
        "accelerator_kubeconfig": server.kubeconfig(tmp_path / "kubeconfig"),
        "accelerator_remove_gone": ["gone"],
        "ansible_python_interpreter": sys.executable,
    }
    done = run_playbook(tmp_path, gone_play(tmp_path), {"web": {}}, "-e", json.dumps(variables))
    removed = set(re.findall(r'"name": "((?:dra-accelerators-)?driver-[^"]*)"', done.stdout))
    if living:
        assert done.returncode != 0 and "still has the Nodes gone" in done.stdout and not removed, done.stdout
    else:
        assert done.returncode == 0, done.stdout
        assert removed == {"driver-gone", "dra-accelerators-driver-gone", "dra-accelerators-driver-gone-node"}


@pytest.mark.parametrize("controllers", [False, True])
@pytest.mark.parametrize(
    ("nodes", "gone", "words", "removes"),
    [
        (False, True, (), False),
        (True, True, ("--limit", "localhost"), False),
        (True, True, ("--limit", "a1,localhost"), True),
        (True, True, (), True),
        (True, False, (), True),
    ],
)
def test_controller_stays_if_only_nodes_that_are_gone_are_removed(
    tmp_path: Path, nodes: bool, gone: bool, words: tuple[str, ...], removes: bool, controllers: bool
) -> None:
    """With a Deployment, and with localhost in the group of the controllers; the hosts are shown instead of a removal."""
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    first = [each for each in plays if each["name"] in ("Read what is asked for", "Take the controller away")]
    for each in first:
        if each["name"] == "Take the controller away":
            each["tasks"] = [{"ansible.builtin.debug": {"msg": "removes the controller"}}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(first, sort_keys=False), encoding="utf-8")
    groups = {"accelerator_controllers" if controllers else "web": group(["localhost"])}
    if nodes:
        groups["accelerator_nodes"] = group(["a1", "a2"])
    variables = {"dra_controller_form": "deployment", **({"accelerator_remove_gone": ["gone"]} if gone else {})}
    done = run_playbook(tmp_path, tmp_path / "play.yml", groups, "-e", json.dumps(variables), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("removes the controller" in done.stdout) is removes, done.stdout


def test_report_of_two_clusters_is_refused(tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]) -> None:
    file = {"accelerator_report_file": str(tmp_path / "out.md")}
    groups = two_clusters(tmp_path, clusters)
    done = run_playbook(tmp_path, ROOT / "playbooks/report.yml", groups, "-e", json.dumps(file))
    assert done.returncode != 0 and "belong to 2 clusters" in done.stdout and "--limit" in done.stdout, done.stdout
    assert not (tmp_path / "out.md").exists()


def test_plan_of_two_clusters_is_refused(tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]) -> None:
    groups = two_clusters(tmp_path, clusters)
    done = run_playbook(tmp_path, ROOT / "playbooks/plan.yml", groups)
    assert done.returncode != 0 and "belong to 2 clusters" in done.stdout and "--limit" in done.stdout, done.stdout
