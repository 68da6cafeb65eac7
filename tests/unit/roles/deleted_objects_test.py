# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Task files that delete objects of the cluster read them again. A load balancer can answer a deletion with status 404."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters_test import ClusterServer
from playing import Played, play

ROLES = Path(__file__).resolve().parents[3] / "roles"
#: The task file, and by plural an object that it deletes and an object of another owner.
FILES = {
    "dra_driver/tasks/no_flow_control.yml": [
        ("flowschemas", "dra-accelerators-driver-claims", "dra-accelerators-controller-lease"),
        ("prioritylevelconfigurations", "dra-accelerators-driver", "other"),
    ],
    "dra_controller/tasks/no_flow_control.yml": [
        ("flowschemas", "dra-accelerators-controller-lists", "dra-accelerators-driver-claims"),
    ],
    "dra_driver/tasks/delete_objects.yml": [
        ("clusterroles", "dra-accelerators-driver-pods", "dra-accelerators-driver:pods"),
        ("rolebindings", "driver-pods", "driver-gpu"),
        ("runtimeclasses", "dra-accelerators", "other"),
    ],
}
KINDS = {"clusterroles": "ClusterRole", "rolebindings": "RoleBinding", "runtimeclasses": "RuntimeClass"}


def own(plural: str, name: str) -> dict[str, Any]:
    """Return an object of the collection as cluster_info returns it."""
    namespace = {"namespace": "dra-accelerators"} if plural == "rolebindings" else {}
    metadata = {"name": name, **namespace}
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": KINDS[plural], "metadata": metadata}


def run(directory: Path, file: str, server: ClusterServer, *arguments: str) -> Played:
    """Run a task file with the variables of its role. Nothing is deleted; the objects are read from the server."""
    role = ROLES / file.partition("/")[0]
    (directory / "templates").symlink_to(role / "templates")
    tasks = yaml.safe_load((ROLES / file).read_text("utf-8"))
    (removal,) = (each for each in tasks if "kubernetes.core.k8s" in each)
    removal["ansible.builtin.debug"] = {"msg": removal.pop("kubernetes.core.k8s")["definition"]}
    first = [{"ansible.builtin.include_vars": str(role / "vars/main.yml")}]
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text("utf-8"))
    known = [own(plural, name) for plural, name, _other in FILES[file] if plural in KINDS]
    given = {
        "dra_driver_node_name": "gpu",
        "accelerator_kubeconfig": server.kubeconfig(directory / "kubeconfig"),
        "__dra_driver_deleted": known,
    }
    return play(directory, [*first, *tasks], {"a1": {**defaults, **given}}, *arguments)


@pytest.mark.parametrize("file", list(FILES))
def test_objects_that_still_exist_after_the_deletion_are_an_error(tmp_path: Path, file: str) -> None:
    with ClusterServer() as server:
        for plural, deleted, other in FILES[file]:
            names = [
                {"metadata": own(plural, name)["metadata"]} if plural in KINDS else {"metadata": {"name": name}}
                for name in (deleted, other)
            ]
            server.lists[plural] = names
        played = run(tmp_path, file, server)
        read = {path.rpartition("/")[2] for path in server.paths}
    assert played.status == 2, played.output
    message = str(played.failed["a1"]["msg"])
    for plural, deleted, other in FILES[file]:
        assert plural in read and deleted in message and other not in message
    assert "Check the load balancer" in message


@pytest.mark.parametrize("file", list(FILES))
def test_objects_that_no_longer_exist_are_no_error(tmp_path: Path, file: str) -> None:
    with ClusterServer() as server:
        server.lists = {plural: [{"metadata": {"name": other}}] for plural, _deleted, other in FILES[file]}
        played = run(tmp_path, file, server)
        assert played.status == 0 and server.paths, played.output


@pytest.mark.parametrize("file", list(FILES))
def test_check_mode_does_not_expect_the_deletion(tmp_path: Path, file: str) -> None:
    with ClusterServer() as server:
        server.lists = {plural: [{"metadata": {"name": deleted}}] for plural, deleted, _other in FILES[file]}
        played = run(tmp_path, file, server, "--check")
        assert played.status == 0 and not server.paths, played.output
