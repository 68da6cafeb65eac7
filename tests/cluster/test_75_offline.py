# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that an air-gapped node gets its Python environment from a directory of wheels on the controller."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import ROOT, Cluster, execute

pytestmark = pytest.mark.prove

FOLDER = "/opt/dra-accelerators-offline"
NOWHERE = "http://127.0.0.1:9"
REQUIREMENTS = ROOT / "roles/python_environment/files/requirements.txt"
IMPORTS = "import aiohttp, httptools, google.protobuf, grpc, kubernetes, prometheus_client, pynvml, yaml, dra_driver.cli, dra_driver.node"

Run = Callable[[str, dict[str, Any]], str]


@pytest.fixture(scope="module")
def ansible(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs one module or action on one node and returns Ansible's output."""
    inventory = tmp_path_factory.mktemp("offline-inventory") / "hosts.yml"
    inventory.write_text(cluster.world("inventory"), encoding="utf-8")

    def run(node: str, options: dict[str, Any], module: str = "ansible.builtin.include_role", **more: Any) -> str:
        words = ["ansible", node, "--inventory", inventory, "--module-name", module, "--args", json.dumps(options)]
        return execute([*words, "--extra-vars", json.dumps(more)]).stdout

    return run


@pytest.fixture(scope="module")
def wheelhouse(cluster: Cluster, ansible: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Download wheels on a connected host of the same platform, as the role's README describes."""
    node = cluster.nodes()[0]
    cluster.run(node, "sh", "-c", "cat > /tmp/requirements.txt", text=REQUIREMENTS.read_text("utf-8"))
    cluster.shell(
        node,
        "rm -rf /tmp/wheels && /opt/dra-accelerators/venv/bin/python -m pip download --quiet --disable-pip-version-check "
        "-d /tmp/wheels -r /tmp/requirements.txt && tar -C /tmp/wheels -cf /tmp/wheels.tar . && rm -r /tmp/wheels",
        timeout=600,
    )
    folder = tmp_path_factory.mktemp("wheels")
    archive = folder.parent / "wheels.tar"
    ansible(node, {"src": "/tmp/wheels.tar", "dest": str(archive), "flat": True}, module="ansible.builtin.fetch")
    execute(["tar", "-C", folder, "-xf", archive])
    assert list(folder.glob("grpcio-*.whl"))
    return folder


def test_driver_is_installed_from_wheels_without_an_index(cluster: Cluster, ansible: Run, wheelhouse: Path) -> None:
    node = cluster.nodes()[1]
    role = {"name": "dra.accelerators.python_environment"}
    offline = {
        "python_environment_root": FOLDER,
        "python_environment_wheelhouse": str(wheelhouse),
        "python_environment_pip_environment": {
            "PIP_INDEX_URL": NOWHERE,
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
        },
    }
    try:
        assert "| CHANGED" in ansible(node, role, **offline)
        cluster.run(node, "env", f"PYTHONPATH={FOLDER}/current", f"{FOLDER}/venv/bin/python", "-c", IMPORTS)
        again = ansible(node, role, **offline)
        assert "| SUCCESS" in again and "| CHANGED" not in again, again
        assert "wheelhouse" not in cluster.run(node, "ls", f"{FOLDER}/venv/")
    finally:
        ansible(node, role, python_environment_root=FOLDER, python_environment_state="absent")
    assert cluster.shell(node, f"test -e {FOLDER} && echo left || true") == ""
