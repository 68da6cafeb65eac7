# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook upgrade on three nodes: refusals before the first change, the order of nodes, and its messages at the end.

Models replace the roles that change drivers, which have their own tests. The real module evicts the pods through a
model API server.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from migration_world import pod

from tests.unit.ansible_process import PYTHON, run_ansible
from tests.unit.json_server import JsonHandler, JsonServer

DRIVER = "gpu.nvidia.com"
NODES = ("a", "b", "c")
Json = dict[str, Any]
#: A model of a role: it plans, and in the second phase it changes the driver, which fails on one node.
ROLE = """
- ansible.builtin.set_fact:
    __ROLE_plan: {steps: "{{ ['exchange ROLE'] if inventory_hostname in old else [] }}", packages: [], reboot_required: false}
- when: not (__ROLE_plan_only | default(false))
  block:
    - name: Exchange it
      ansible.builtin.assert:
        that: inventory_hostname not in broken
        quiet: true
        fail_msg: it does not load
    - ansible.builtin.debug:
        msg: "exchanged ROLE on {{ inventory_hostname }}, drain {{ __ROLE_drain.consent }}, {{ __ROLE_drain.timeout }}"
"""


class Cluster(JsonServer):
    """Three Nodes with a GPU each. The pods of ``users`` use the GPUs of their nodes."""

    def __init__(self) -> None:
        self.users: dict[str, Json] = {}
        self.writes: list[str] = []
        cluster = self

        class Handler(JsonHandler):
            def take(self) -> None:
                self.body()
                self.answer(*cluster.answer(self.command, urlsplit(self.path).path, urlsplit(self.path).query))

            do_GET = do_POST = do_PUT = do_DELETE = take  # noqa: N815 http.server's names

        super().__init__(Handler)

    def answer(self, method: str, path: str, query: str) -> tuple[int, Json]:
        if method != "GET" and "dryRun" not in query:
            self.writes.append(f"{method} {path}")
        if method == "POST":
            return 201, {"metadata": {"name": "r", "managedFields": [{"manager": "dra.accelerators.device-drain"}]}}
        last = path.rpartition("/")[2]
        if path == "/apis/resource.k8s.io":
            return 200, {"versions": [{"version": "v1"}], "preferredVersion": {"version": "v1"}}
        if path == "/apis/resource.k8s.io/v1":
            return 200, {
                "resources": [{"name": name} for name in ("devicetaintrules", "resourceclaims", "resourceslices")]
            }
        if path.startswith("/api/v1/nodes/"):
            return 200, {"metadata": {"name": last}}
        if last in self.users:
            return 200, self.users[last]
        if last == "resourceslices":
            return 200, {
                "items": [self.slice(name) for name in NODES if f"%3D{name}" in query or "nodeName" not in query]
            }
        if last == "resourceclaims":
            return 200, {"items": [self.claim(name) for name in self.users]}
        if last in ("deviceclasses", "devicetaintrules"):
            return 200, {"items": []}
        return 404, {"kind": "Status", "code": 404, "reason": "NotFound", "message": f"{method} {path}"}

    def slice(self, node: str) -> Json:
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}]}
        return {"metadata": {"name": f"s-{node}"}, "spec": spec}

    def claim(self, user: str) -> Json:
        found = self.users[user]
        result = {"request": "r", "driver": DRIVER, "pool": found["spec"]["nodeName"], "device": "gpu-0"}
        return {
            "metadata": {"namespace": "default", "name": f"of-{user}"},
            "status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": user, "uid": found["metadata"]["uid"]}],
            },
        }


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as server:
        yield server


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Return a copy of the collection with models of the roles that change drivers."""
    root = tmp_path / "ansible_collections/dra/accelerators"
    real = Path(os.environ["ANSIBLE_COLLECTIONS_PATH"]) / "ansible_collections/dra/accelerators"
    root.mkdir(parents=True)
    for name in ("plugins", "playbooks", "meta", "galaxy.yml"):
        (root / name).symlink_to((real / name).resolve())
    for role in ("nvidia_driver", "ascend_driver"):
        tasks = root / "roles" / role / "tasks"
        tasks.mkdir(parents=True)
        (tasks / "main.yml").write_text(ROLE.replace("ROLE", role), encoding="utf-8")
    return tmp_path


def upgrade(
    collection: Path, cluster: Cluster, *words: str, unreachable: tuple[str, ...] = (), **variables: Any
) -> tuple[int, str]:
    """Run the playbook and return its exit status and output."""
    access = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (collection / "kubeconfig").write_text(yaml.safe_dump(access), encoding="utf-8")
    hosts = {name: {"ansible_connection": "local"} for name in NODES}
    for name in unreachable:
        # Nothing listens on port 1.
        hosts[name] = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": "1"}
    (collection / "hosts.yml").write_text(yaml.safe_dump({"accelerator_nodes": {"hosts": hosts}}), encoding="utf-8")
    common = {
        "ansible_python_interpreter": str(PYTHON),
        "accelerator_become": False,
        "accelerator_nvidia_driver_enabled": True,
        "old": list(NODES),
        "broken": [],
    }
    done = run_ansible(
        [
            *(Path(sys.executable).with_name("ansible-playbook"), "-i", collection / "hosts.yml"),
            *("dra.accelerators.upgrade", "-e", json.dumps({**common, **variables}), *words),
        ],
        env={
            **os.environ,
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_COLLECTIONS_PATH": str(collection),
            "ANSIBLE_LOCAL_TEMP": str(collection / "local"),
            "ANSIBLE_REMOTE_TEMP": str(collection / "remote"),
            "KUBECONFIG": str(collection / "kubeconfig"),
            "PYTHONPATH": "",
        },
    )
    return done.returncode, done.stdout + done.stderr


def changed_nodes(output: str) -> list[str]:
    """Return the nodes on which a role has changed the driver, in order."""
    return [line.partition(" on ")[2].partition(",")[0] for line in output.splitlines() if '"msg": "exchanged' in line]


def test_upgrade_runs_node_by_node_and_skips_current_ones(collection: Path, cluster: Cluster) -> None:
    status, output = upgrade(collection, cluster, old=["a", "c"], accelerator_upgrade_timeout=77)
    assert status == 0, output
    assert changed_nodes(output) == ["a", "b", "c"] and "drain False, 77" in output
    assert "b: no change" in output and "a: exchange nvidia_driver" in output
    assert "Starting: a. Not started yet: b, c" in output and "Starting: c. Not started yet: none" in output
    assert cluster.writes == []


@pytest.mark.prove
def test_upgrade_without_consent_names_pods_and_changes_nothing(collection: Path, cluster: Cluster) -> None:
    cluster.users = {"training": pod("training", on="c", owner=("ReplicaSet", "web"))}
    status, output = upgrade(collection, cluster)
    assert status != 0 and changed_nodes(output) == [] and "Nothing was changed" in output, output
    assert "c: pod default/training is evicted" in output
    assert cluster.writes == []
    dry_run = upgrade(collection, cluster, "--check")
    assert dry_run[0] == 0 and "c: pod default/training is evicted" in dry_run[1], dry_run[1]
    status, output = upgrade(collection, cluster, accelerator_upgrade_evict=True)
    assert status == 0 and changed_nodes(output) == ["a", "b", "c"] and "drain True" in output, output


@pytest.mark.prove
def test_upgrade_failed_node_names_nodes_not_started(collection: Path, cluster: Cluster) -> None:
    status, output = upgrade(collection, cluster, broken=["b"])
    assert status != 0 and changed_nodes(output) == ["a"], output
    assert 'b: \\"Exchange it\\" failed: it does not load Not started: c.' in " ".join(output.split()), output
    # With two nodes at a time, the other node of the batch completes, and the next batch does not begin.
    status, output = upgrade(collection, cluster, broken=["a"], accelerator_upgrade_serial=2)
    assert status != 0 and changed_nodes(output) == ["b"], output
    assert "a failed, so c were not started" in output


@pytest.mark.prove
def test_upgrade_npus_need_reboot_consent(collection: Path, cluster: Cluster) -> None:
    options = {"accelerator_nvidia_driver_enabled": False, "accelerator_ascend_driver_enabled": True}
    status, output = upgrade(collection, cluster, **options)
    assert status != 0 and "Set ascend_driver_reboot" in output and changed_nodes(output) == [], output
    status, output = upgrade(collection, cluster, **options, ascend_driver_reboot=True)
    assert status == 0 and changed_nodes(output) == ["a", "b", "c"], output


@pytest.mark.parametrize(
    ("role", "upgrade_evict", "expected"),
    [(True, None, "False"), (False, True, "False"), (True, True, "True"), ("", True, "True")],
)
def test_upgrade_evicts_only_with_both_consents(
    role: bool | str, upgrade_evict: bool | None, expected: str, collection: Path, cluster: Cluster
) -> None:
    """Extra variables override the values that the playbook passes. Eviction needs the consent of the fleet file and of the upgrade."""
    options = {} if upgrade_evict is None else {"accelerator_upgrade_evict": upgrade_evict}
    status, output = upgrade(collection, cluster, nvidia_driver_drain=role, **options)
    assert status == 0 and output.count(f"drain {expected}, 900") == len(NODES), output


@pytest.mark.prove
def test_unreachable_nodes_are_named_with_the_limit_that_leaves_them_out(collection: Path, cluster: Cluster) -> None:
    status, output = upgrade(collection, cluster, unreachable=("a", "c"))
    words = " ".join(output.split())
    assert status != 0 and changed_nodes(output) == [] and "Cannot connect to a, c, so no node was changed." in words, (
        output
    )
    assert "--limit 'accelerator_nodes,!a,!c'" in words, output
    status, output = upgrade(collection, cluster, "--limit", "accelerator_nodes,!a,!c", unreachable=("a", "c"))
    assert status == 0 and changed_nodes(output) == ["b"], output
    status, output = upgrade(collection, cluster, "--limit", "a,b", unreachable=("a",))
    assert status != 0 and "--limit 'a,b,!a'" in " ".join(output.split()), output


def test_fleet_file_that_enables_no_vendor_driver_is_rejected(collection: Path, cluster: Cluster) -> None:
    status, output = upgrade(collection, cluster, accelerator_nvidia_driver_enabled=False)
    assert status != 0 and "enables neither" in output, output
