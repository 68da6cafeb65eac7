# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test claims that Python cannot decode, created by a user of one namespace. Driver, controller, and playbooks
continue to work for all others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.ghosts import Ghost
from tests.cluster.manifests import claim, pod

NAMESPACE, USER = "tenant", "system:serviceaccount:tenant:user"
LEVELS = 4900
MARK = '"@value@"'
#: The raw parameters by the claim's name.
PARAMETERS = {
    "arrays": "[" * LEVELS + "]" * LEVELS,
    "objects": '{"a":' * (LEVELS // 3) + "0" + "}" * (LEVELS // 3),
    "surrogate": '"\\ud800"',
}
RIGHTS = f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {NAMESPACE}}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: user, namespace: {NAMESPACE}}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: claims, namespace: {NAMESPACE}}}
rules:
- {{apiGroups: [resource.k8s.io], resources: [resourceclaims], verbs: [create, get, list]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: claims, namespace: {NAMESPACE}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: claims}}
subjects: [{{kind: ServiceAccount, name: user, namespace: {NAMESPACE}}}]
"""


def store(cluster: Cluster, name: str, driver: str, value: str) -> str:
    """Create a claim as the user; return kubectl's output."""
    body: dict[str, Any] = claim(name, device_class="gpu.nvidia.com")
    body["metadata"]["namespace"] = NAMESPACE
    config = {"requests": ["device"], "opaque": {"driver": driver, "parameters": {"a": json.loads(MARK)}}}
    body["spec"]["devices"]["config"] = [config]
    text = json.dumps(body).replace(MARK, value)
    path = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
    return cluster.kubectl("create", "--raw", path, "-f", "-", "--as", USER, text=text)


@pytest.fixture
def stored(clean: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with such claims, with another driver's and with our driver's parameters."""
    clean.kubectl("apply", "-f", "-", text=RIGHTS)
    for name, value in PARAMETERS.items():
        for driver, kind in (("other.example.com", "other"), ("gpu.nvidia.com", "own")):
            store(clean, f"{kind}-{name}", driver, value)
    yield clean
    clean.kubectl("delete", "namespace", NAMESPACE, "--wait=true")


@pytest.mark.prove
def test_undecodable_claims_affect_no_other_claim(stored: Cluster, tmp_path: Path) -> None:
    cluster = stored
    # The driver prepares a claim of another namespace.
    cluster.apply(claim("usual", device_class="gpu.nvidia.com"), pod("usual", "usual"))
    cluster.wait_running("usual")
    # The playbooks show it.
    report = tmp_path / "report.md"
    done = cluster.playbook("report.yml", "-e", json.dumps({"accelerator_report_file": str(report)}), check=False)
    assert not done.failed, done.output
    assert "default/usual" in report.with_suffix(".json").read_text(encoding="utf-8")
    done = cluster.playbook("why.yml", check=False)
    assert not done.failed, done.output
    assert "own-arrays" in done.output, "claims that wait are explained, whatever their parameters are"
    wanted = tmp_path / "wanted.yaml"
    wanted.write_text(yaml.safe_dump(claim("wanted", device_class="gpu.nvidia.com")), encoding="utf-8")
    words = {"accelerator_plan_src": str(wanted), "accelerator_plan_file": str(tmp_path / "layouts.yml")}
    done = cluster.playbook("plan.yml", "-e", json.dumps(words), check=False)
    assert not done.failed, done.output


def test_controller_undecodable_claims_cleanup_continues(stored: Cluster, tmp_path: Path) -> None:
    """The controller runs with the operator's identity. The claims exist before it lists, and more are created while
    it watches.
    """
    cluster, ghost = stored, Ghost(stored, "ghost")
    ghost.appear()
    settings = {
        "name": "here",
        "kubeconfig": cluster.world("kubeconfig").strip(),
        "namespace": "default",
        "grace": 1,
        "interval": 1,
        "lease_seconds": 3,
        "address": "127.0.0.1:9780",
    }
    (tmp_path / "controller.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "dra_driver.controller", "run", "--config", str(tmp_path / "controller.yaml")]
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(command, stderr=log)
        try:
            cluster.wait("the controller acts", lambda: "the API server shows" in (tmp_path / "log").read_text())
            for number in range(3):
                store(cluster, f"later-{number}", "other.example.com", PARAMETERS["arrays"])
            ghost.vanish()
            cluster.wait("its devices are released", lambda: ghost.left() == ghost.what_stays, timeout=60)
        finally:
            running.terminate()
            said = running.wait(timeout=30)
            ghost.exorcise()
            cluster.kubectl("delete", "lease", "dra-accelerators-controller", "-n", "default", "--ignore-not-found")
    text = (tmp_path / "log").read_text()
    assert said == 0 and "unexpected exception" not in text and "Traceback" not in text, text
