# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The controller as a Deployment in inventories with several clusters: each cluster uses the variables of the cluster's nodes.

The playbooks run with their roles and modules. Two servers on this machine answer as API servers and record the
requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from cluster_playbooks import ROOT, ClusterServer, group, run_playbook
from playing import play

from tests.unit.json_server import JsonHandler, JsonServer

NAME = "dra-accelerators-controller"
#: The kinds of objects by API version: plural, kind, and whether the objects have a namespace.
KINDS = {
    "api/v1": [("namespaces", "Namespace", False), ("configmaps", "ConfigMap", True)],
    "apis/rbac.authorization.k8s.io/v1": [
        ("roles", "Role", True),
        ("rolebindings", "RoleBinding", True),
        ("clusterroles", "ClusterRole", False),
        ("clusterrolebindings", "ClusterRoleBinding", False),
    ],
    "apis/admissionregistration.k8s.io/v1": [
        ("validatingwebhookconfigurations", "ValidatingWebhookConfiguration", False),
        ("validatingadmissionpolicies", "ValidatingAdmissionPolicy", False),
        ("validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", False),
    ],
    "apis/flowcontrol.apiserver.k8s.io/v1": [("flowschemas", "FlowSchema", False)],
}
LABELS = {"app.kubernetes.io/managed-by": "dra-accelerators", "app.kubernetes.io/component": "controller"}
Json = dict[str, Any]


class ApiServer(JsonServer):
    """An API server with one object per kind in ``objects``, which records deletions and changes."""

    kubeconfig = ClusterServer.kubeconfig

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        for version, kinds in KINDS.items():
            for plural, kind, _namespaced in kinds:
                if plural in ("namespaces", "clusterroles", "validatingwebhookconfigurations"):
                    found = {"apiVersion": version.partition("/")[2], "kind": kind, "webhooks": []}
                    self.objects[f"{version}/{plural}/{NAME}"] = {
                        **found,
                        "metadata": {"name": NAME, "uid": plural, "labels": LABELS},
                    }
        self.requests: list[tuple[str, str]] = []
        self.changed: dict[str, Json] = {}
        #: Paths of GET requests that a load balancer answers with status 404.
        self.lost: set[str] = set()
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path.strip("/")
                server.requests.append(("GET", path))
                if path in server.lost:
                    self.answer(404, {"message": "default backend - 404"})
                elif path in server.objects:
                    self.answer(200, server.objects[path])
                else:
                    self.answer(*server.discover(path))

            def do_DELETE(self) -> None:
                path = urlsplit(self.path).path.strip("/")
                server.requests.append(("DELETE", path))
                found = server.objects.pop(path, None)
                self.answer(200 if found else 404, {"kind": "Status", "status": "Success" if found else "Failure"})

            def do_PATCH(self) -> None:
                path = urlsplit(self.path).path.strip("/")
                server.requests.append(("PATCH", path))
                server.objects[path] = {**server.objects[path], **self.body()}
                self.answer(200, server.objects[path])

        super().__init__(Handler)

    @property
    def deleted(self) -> set[str]:
        """Return the kinds whose object was deleted."""
        return {path.split("/")[-2] for method, path in self.requests if method == "DELETE"}

    def discover(self, path: str) -> tuple[int, Json]:
        """Return the answer to a request for versions, kinds, or a list."""
        if path == "version":
            return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            groups = [version.partition("/")[2] for version in KINDS if version.startswith("apis/")]
            versions = {each: {"groupVersion": each, "version": "v1"} for each in groups}
            listed = [
                {"name": each.partition("/")[0], "versions": [versions[each]], "preferredVersion": versions[each]}
                for each in groups
            ]
            return 200, {"kind": "APIGroupList", "groups": listed}
        if path in KINDS:
            resources = [
                {"name": plural, "singularName": "", "namespaced": namespaced, "kind": kind, "verbs": ["get", "list"]}
                for plural, kind, namespaced in KINDS[path]
            ]
            found = {"kind": "APIResourceList", "groupVersion": path.partition("/")[2], "resources": resources}
            return 200, found
        version, _slash, plural = path.rpartition("/")
        for each, kind, _namespaced in KINDS.get(version, ()):
            if each == plural:
                items = [found for key, found in self.objects.items() if key.startswith(f"{path}/")]
                return 200, {
                    "kind": f"{kind}List",
                    "apiVersion": version.partition("/")[2],
                    "metadata": {},
                    "items": items,
                }
        return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}


@pytest.fixture
def servers() -> Iterator[tuple[ApiServer, ApiServer]]:
    with ApiServer() as first, ApiServer() as second:
        yield first, second


@pytest.fixture
def nodes(tmp_path: Path, servers: tuple[ApiServer, ApiServer], monkeypatch: pytest.MonkeyPatch) -> Json:
    """Return the nodes a1 and a2 of the first cluster, and b1 and b2 of the second, with variables on the nodes only.

    KUBECONFIG of the operator names the first cluster.
    """
    first, second = (server.kubeconfig(tmp_path / f"kubeconfig-{name}") for name, server in zip("ab", servers))
    monkeypatch.setenv("KUBECONFIG", first)
    children = {
        "first": group(["a1", "a2"], accelerator_kubeconfig=first),
        "second": group(["b1", "b2"], accelerator_kubeconfig=second),
    }
    return {"children": children, "vars": {"dra_controller_deploy_as": "deployment"}}


def removal(directory: Path, *, shown: bool) -> Path:
    """Write the plays of remove up to the removal of the controller. With ``shown``, each host shows its cluster instead."""
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    (directory / "tasks").symlink_to(ROOT / "playbooks/tasks")
    kept = [each for each in plays if each["name"] in ("Read the variables of the nodes", "Remove the controller")]
    if shown:
        kept[1]["tasks"] = [
            {
                "ansible.builtin.debug": {
                    "msg": "removes {{ inventory_hostname }} {{ accelerator_kubeconfig | basename }}"
                }
            }
        ]
    (directory / "play.yml").write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    return directory / "play.yml"


@pytest.mark.prove
def test_remove_deletes_the_controller_from_the_cluster_of_the_nodes(
    tmp_path: Path, servers: tuple[ApiServer, ApiServer], nodes: Json
) -> None:
    """The controller is deleted in no other cluster, although the operator's KUBECONFIG names one."""
    del nodes["children"]["first"]
    done = run_playbook(tmp_path, removal(tmp_path, shown=False), {"accelerator_nodes": nodes})
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = servers
    assert not first.requests
    assert second.deleted == {"namespaces", "clusterroles", "validatingwebhookconfigurations"}, done.stdout


WEBHOOKS = "apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
CLUSTER_ROLES = "apis/rbac.authorization.k8s.io/v1/clusterroles"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("lost", "words", "deleted"),
    [
        (None, "", {"validatingwebhookconfigurations", "clusterroles", "namespaces"}),
        (WEBHOOKS, "not from an API server", set()),
        (f"{WEBHOOKS}/{NAME}", f"still has ValidatingWebhookConfiguration {NAME} after", set()),
        (CLUSTER_ROLES, "not from an API server", {"validatingwebhookconfigurations"}),
        (
            f"{CLUSTER_ROLES}/{NAME}",
            f"still has ClusterRole {NAME} after",
            {"validatingwebhookconfigurations", "namespaces"},
        ),
    ],
)
def test_removal_of_the_controller_fails_if_a_load_balancer_answers(
    tmp_path: Path,
    servers: tuple[ApiServer, ApiServer],
    monkeypatch: pytest.MonkeyPatch,
    lost: str | None,
    words: str,
    deleted: set[str],
) -> None:
    """kubernetes.core treats status 404 of a list as an empty list, and of an object as a deleted object: the removal fails."""
    # kubernetes.core caches the kinds of an API server in the directory for temporary files.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = servers[0]
    server.lost = {lost} if lost else set()
    variables = {"dra_controller_state": "absent", "__dra_controller_has_host": False}
    variables["dra_controller_kubeconfig"] = server.kubeconfig(tmp_path / "kubeconfig")
    role = {"ansible.builtin.include_role": {"name": "dra.accelerators.dra_controller"}}
    done = play(tmp_path, [role], {"n1": variables})
    assert server.deleted == deleted, done.output
    assert (done.status == 0) is (lost is None), done.output
    assert words in json.dumps(done.failed), done.output


@pytest.mark.parametrize(
    ("limit", "removed"),
    [
        ((), ["a1 kubeconfig-a", "b1 kubeconfig-b"]),
        (("--limit", "second"), ["b1 kubeconfig-b"]),
        # The nodes that are not in the run still need the controller of their cluster.
        (("--limit", "a1,second"), ["b1 kubeconfig-b"]),
        (("--limit", "b2"), []),
    ],
)
def test_remove_keeps_the_controller_of_nodes_that_are_not_in_the_run(
    tmp_path: Path, nodes: Json, limit: tuple[str, ...], removed: list[str]
) -> None:
    done = run_playbook(tmp_path, removal(tmp_path, shown=True), {"accelerator_nodes": nodes}, *limit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r'"msg": "removes (.*)"', done.stdout)) == removed, done.stdout


def test_remove_keeps_a_deployment_whose_controllers_are_not_in_the_run(tmp_path: Path, nodes: Json) -> None:
    """The group accelerator_controllers has hosts for the first cluster only: its Deployment stays without them in the run."""
    first = nodes["children"]["first"]["vars"]["accelerator_kubeconfig"]
    controllers = group(["c1", "c2"], accelerator_kubeconfig=first, dra_controller_deploy_as="deployment")
    groups = {"accelerator_nodes": nodes, "accelerator_controllers": controllers}
    done = run_playbook(tmp_path, removal(tmp_path, shown=True), groups, "--limit", "accelerator_nodes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r'"msg": "removes (.*)"', done.stdout) == ["b1 kubeconfig-b"], done.stdout


IMAGES = ("Remove the image of the controller's pods", "Remove the driver's image")


@pytest.mark.parametrize(
    ("form", "is_last", "removed"),
    [
        ("deployment", True, {"a1": IMAGES[1:], "c1": IMAGES}),
        ("deployment", False, {"a1": IMAGES[1:], "c1": ()}),
        # Services have no image.
        ("service", False, {"a1": IMAGES[1:], "c1": IMAGES[1:]}),
    ],
)
def test_remove_keeps_an_image_that_the_pods_of_a_controller_can_use(
    tmp_path: Path, form: str, is_last: bool, removed: dict[str, tuple[str, ...]]
) -> None:
    """The play of the controllers has set the fact for c1 only: images that the pods can use stay."""
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    tasks = [each for play in plays for task in play.get("tasks", ()) for each in (task, *task.get("block", ()))]
    shown: list[Json] = [
        {"ansible.builtin.set_fact": {"__dra_controller_was_last": is_last}, "when": "inventory_hostname == 'c1'"}
    ]
    for name in IMAGES:
        (task,) = (each for each in tasks if each["name"] == name)
        words = f"{{{{ inventory_hostname }}}}: {name}"
        shown.append({"when": task["when"], "ansible.builtin.debug": {"msg": words}})
    variables = {"driver_image_delivery": "import", "dra_controller_deploy_as": form, "accelerator_pod": True}
    play = {"hosts": "all", "gather_facts": False, "vars": variables, "tasks": shown}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False), encoding="utf-8")
    groups = {"accelerator_controllers": group(["c1"]), "accelerator_nodes": group(["a1"])}
    done = run_playbook(tmp_path, tmp_path / "play.yml", groups)
    assert done.returncode == 0, done.stdout + done.stderr
    for host, names in removed.items():
        assert tuple(re.findall(f'"msg": "{host}: (.*)"', done.stdout)) == names, done.stdout


def controller(directory: Path) -> Path:
    """Write the plays of the playbook controller. Each host shows its cluster instead of the tasks after the checks."""
    plays = yaml.safe_load((ROOT / "playbooks/controller.yml").read_text("utf-8"))
    (directory / "tasks").symlink_to(ROOT / "playbooks/tasks")
    plays[0]["ansible.builtin.import_playbook"] = str(ROOT / "playbooks/check_inventory.yml")
    names = [each["name"] for each in plays[-1]["tasks"]]
    kept = plays[-1]["tasks"][: names.index("Use the offline bundle")]
    words = "{{ inventory_hostname }} {{ accelerator_kubeconfig | default('default') | basename }} {{ hosted }}"
    (include,) = (
        each for each in plays[-1]["tasks"] if "dra_controller" in str(each.get("ansible.builtin.include_role"))
    )
    shown = {"hosted": include["vars"]["__dra_controller_has_host"]}
    plays[-1]["tasks"] = [*kept, {"ansible.builtin.debug": {"msg": f"runs on {words}"}, "vars": shown}]
    (directory / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False), encoding="utf-8")
    return directory / "play.yml"


@pytest.mark.parametrize(
    ("limit", "hosts"),
    [
        ((), {"a1 kubeconfig-a False", "b1 kubeconfig-b False"}),
        (("--limit", "b1"), {"b1 kubeconfig-b False"}),
    ],
)
def test_controller_without_hosts_has_the_variables_of_a_node_of_each_cluster(
    tmp_path: Path, nodes: Json, limit: tuple[str, ...], hosts: set[str]
) -> None:
    done = run_playbook(tmp_path, controller(tmp_path), {"accelerator_nodes": nodes}, *limit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line for line in hosts if f'"msg": "runs on {line}"' in done.stdout} == hosts, done.stdout
    assert done.stdout.count("runs on") == len(hosts), done.stdout


@pytest.mark.parametrize(
    ("limit", "group_of_controllers", "variables", "left_out"),
    [
        ("b2", False, {}, "b1"),
        ("a2,b1", False, {}, "a1"),
        ("c2", True, {}, "c1"),
        ("c1", True, {}, ""),
        ("c1", True, {"driver_image_delivery": "import"}, "c2"),
        ("c1", True, {"driver_image_delivery": "import", "dra_controller_image": "registry/image:1"}, ""),
        ("c2", True, {"dra_controller_deploy_as": "service"}, ""),
        ("c2", True, {"dra_controller_state": "absent"}, ""),
    ],
)
def test_controller_rejects_a_limit_without_the_host_that_the_deployment_has_the_variables_of(
    tmp_path: Path, nodes: Json, limit: str, group_of_controllers: bool, variables: Json, left_out: str
) -> None:
    """Another host would give the pods of the Deployment other settings, so a limit without its host is rejected."""
    groups = {"accelerator_nodes": nodes}
    if group_of_controllers:
        first = nodes["children"]["first"]["vars"]["accelerator_kubeconfig"]
        common = {"accelerator_kubeconfig": first, "dra_controller_deploy_as": "deployment", **variables}
        groups["accelerator_controllers"] = group(["c1", "c2"], **common)
    done = run_playbook(tmp_path, controller(tmp_path), groups, "--limit", limit)
    assert (f"--limit {limit} leaves out {left_out}." in done.stdout) is bool(left_out), done.stdout + done.stderr
    assert (done.returncode != 0) is bool(left_out) and ("runs on c" in done.stdout) is (not left_out), done.stdout


def test_controller_rejects_a_limit_without_its_hosts_and_nodes(tmp_path: Path, nodes: Json) -> None:
    groups = {"accelerator_nodes": nodes, "web": group(["web-1"])}
    done = run_playbook(tmp_path, controller(tmp_path), groups, "--limit", "web-1")
    assert done.returncode != 0, done.stdout
    assert "The limit web-1 contains no host of the group accelerator_nodes" in done.stdout, done.stdout


def test_controller_of_a_second_cluster_needs_no_hosts(tmp_path: Path, nodes: Json) -> None:
    first = nodes["children"]["first"]["vars"]["accelerator_kubeconfig"]
    controllers = group(["c1"], accelerator_kubeconfig=first)
    groups = {"accelerator_nodes": nodes, "accelerator_controllers": controllers}
    done = run_playbook(tmp_path, controller(tmp_path), groups)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("c1 kubeconfig-a True", "b1 kubeconfig-b False"):
        assert json.dumps(f"runs on {line}") in done.stdout, done.stdout
    assert done.stdout.count("runs on") == 2


@pytest.mark.parametrize(
    ("variables", "accepted"),
    [
        ({}, False),
        ({"accelerator_kubeconfig": "/other"}, False),
        ({"dra_controller_kubeconfig": "/b"}, True),
        (
            {
                "dra_controller_kubeconfig": "/other",
                "dra_controller_drivers": ["gpu.nvidia.com"],
                "dra_controller_driver_namespace": "drivers",
            },
            True,
        ),
    ],
)
def test_controller_in_a_cluster_without_nodes_is_rejected(tmp_path: Path, variables: Json, accepted: bool) -> None:
    """The kubeconfig of the group accelerator_nodes does not apply to the hosts of the controller: they need their own."""
    groups = {
        "accelerator_nodes": group(["n1"], accelerator_kubeconfig="/b"),
        "accelerator_controllers": group(["c1"], **variables),
    }
    done = run_playbook(tmp_path, controller(tmp_path), groups)
    assert ("runs on c1" in done.stdout) is accepted, done.stdout + done.stderr
    assert ("no host of the group accelerator_nodes has this" in done.stdout) is not accepted
