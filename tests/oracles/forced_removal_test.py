# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that the forced removal deletes the pods of claims on a real API server, and no pod that has replaced one of
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.oracles.controller_process import NoNodes

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "forced-removal"


def pod(name: str) -> dict[str, Any]:
    """Return a pod that no scheduler places."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"automountServiceAccountToken": False, "containers": [{"name": "c", "image": "localhost/none"}]},
    }


def test_forced_removal_deletes_each_pod_once_and_no_replacement(
    kubectl: Path, administrator: Path, tmp_path: Path
) -> None:
    cluster = NoNodes(kubectl, administrator)
    meta = {"namespace": NAMESPACE}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", **meta}},
    )
    cluster.apply(pod("worker"), pod("replaced"))
    uid = cluster.get("pod", "worker", "-n", NAMESPACE)["metadata"]["uid"]
    worker = {**meta, "name": "worker", "uid": uid}
    held = [
        {**meta, "name": "first", "consumers": [worker]},
        {**meta, "name": "second", "consumers": [worker, {**meta, "name": "replaced", "uid": "of-the-previous-pod"}]},
        {**meta, "name": "third", "consumers": [{**meta, "name": "gone", "uid": "of-the-gone-pod"}]},
    ]
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text("utf-8"))
    (take,) = (each for each in plays if each["name"] == "Remove the driver")
    tasks = [each for task in take["tasks"] for each in task.get("block", ())]
    (delete,) = (each for each in tasks if each["name"] == "Delete the pods")
    variables = {
        "accelerator_has_driver": True,
        "accelerator_held": held,
        "accelerator_api": {"kubeconfig": str(administrator), "context": ""},
    }
    defaults = {key: value for key, value in take["module_defaults"].items() if key.startswith("group/")}
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "module_defaults": defaults,
        "vars": variables,
        "tasks": [delete],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False), encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", "-c", "local", tmp_path / "play.yml"],
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_PYTHON_INTERPRETER": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"(item={NAMESPACE}/") == 3, done.stdout
    assert cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "name").split() == ["pod/replaced"]
