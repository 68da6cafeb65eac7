# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Task files that delete objects of the cluster read them again. A load balancer can answer a deletion with status 404."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_playbooks import ClusterServer
from playing import Played, play

ROLES = Path(__file__).resolve().parents[3] / "roles"
#: By role the objects to delete, by plural, and an object of the same kind with another name.
ROLE_OBJECTS = {
    "dra_driver": {
        "flowschemas": ("dra-accelerators-driver-claims", "dra-accelerators-controller-lease"),
        "clusterroles": ("dra-accelerators-driver-pods", "dra-accelerators-driver:pods"),
        "rolebindings": ("driver-pods", "driver-gpu"),
        "runtimeclasses": ("dra-accelerators", "other"),
        "daemonsets": ("dra-accelerators-12345678", "dra-accelerators-87654321"),
    },
    "dra_controller": {"flowschemas": ("dra-accelerators-controller-lists", "")},
}
KINDS = {
    "flowschemas": "FlowSchema",
    "clusterroles": "ClusterRole",
    "rolebindings": "RoleBinding",
    "runtimeclasses": "RuntimeClass",
    "daemonsets": "DaemonSet",
}
NAMESPACED = ("rolebindings", "daemonsets")
FLOW_SCHEMAS = [
    {"api_version": "flowcontrol.apiserver.k8s.io/v1", "kind": "FlowSchema", "label_selector": "a=b"},
]


def item(plural: str, name: str) -> dict[str, Any]:
    """Return an object as an item of a list of the API server, which has no kind."""
    return {"metadata": {"name": name, **({"namespace": "dra-accelerators"} if plural in NAMESPACED else {})}}


def run(directory: Path, role: str, server: ClusterServer, *arguments: str, deletes: bool = False) -> Played:
    """Run ``delete_objects.yml`` with the variables of its role. The server loses all objects or none."""
    tasks = yaml.safe_load((ROLES / role / "tasks/delete_objects.yml").read_text("utf-8"))
    (removal,) = (each for each in tasks if "kubernetes.core.k8s" in each)
    definition = removal.pop("kubernetes.core.k8s")["definition"]
    if deletes:
        removal["ansible.builtin.uri"] = {"url": server.url, "method": "DELETE"}
    else:
        removal["ansible.builtin.debug"] = {"msg": definition}
    first = [{"ansible.builtin.include_vars": str(ROLES / role / "vars/main.yml")}]
    defaults = yaml.safe_load((ROLES / role / "defaults/main.yml").read_text("utf-8"))
    known = [{"kind": KINDS[plural], **item(plural, name)} for plural, (name, _other) in ROLE_OBJECTS[role].items()]
    given = {
        "dra_driver_node_name": "gpu",
        "accelerator_kubeconfig": server.kubeconfig(directory / "kubeconfig"),
        "__dra_driver_deleted": known,
        "__dra_controller_deleted_lists": FLOW_SCHEMAS,
    }
    return play(directory, [*first, *tasks], {"a1": {**defaults, **given}}, *arguments)


def lists(role: str) -> dict[str, list[dict[str, Any]]]:
    """Return the objects of the API server by plural."""
    return {plural: [item(plural, each) for each in pair if each] for plural, pair in ROLE_OBJECTS[role].items()}


@pytest.mark.parametrize("role", list(ROLE_OBJECTS))
def test_objects_that_still_exist_after_the_deletion_are_an_error(tmp_path: Path, role: str) -> None:
    with ClusterServer() as server:
        server.lists = lists(role)
        played = run(tmp_path, role, server)
        read = {path.rpartition("/")[2] for path in server.paths}
    assert played.status == 2, played.output
    message = str(played.failed["a1"]["msg"])
    assert read == set(ROLE_OBJECTS[role])
    for deleted, other in ROLE_OBJECTS[role].values():
        assert deleted in message and (not other or other not in message)
    assert "Check the load balancer" in message


@pytest.mark.parametrize("role", list(ROLE_OBJECTS))
def test_objects_that_no_longer_exist_are_no_error(tmp_path: Path, role: str) -> None:
    with ClusterServer() as server:
        server.lists = lists(role)
        played = run(tmp_path, role, server, deletes=True)
        assert played.status == 0 and server.paths and not server.lists, played.output


@pytest.mark.parametrize("role", list(ROLE_OBJECTS))
def test_check_mode_does_not_expect_the_deletion(tmp_path: Path, role: str) -> None:
    with ClusterServer() as server:
        server.lists = lists(role)
        played = run(tmp_path, role, server, "--check")
        assert played.status == 0, played.output
        assert len(server.paths) == (0 if role == "dra_driver" else 1)


def test_controller_objects_that_do_not_exist_are_neither_deleted_nor_read_again(tmp_path: Path) -> None:
    with ClusterServer() as server:
        server.lists = {"deployments": [item("deployments", "other")]}
        played = run(tmp_path, "dra_controller", server, deletes=True)
        assert played.status == 0 and server.lists and len(server.paths) == 1, played.output
