# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the node programs on the oldest supported Python, with the wheels that the package index has for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster, execute
from tests.cluster.manifests import claim, dynamic, pod

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "3.10"
#: File with the path of that Python's shared library for a node's dynamic loader.
LOADER_FOLDERS = f"/etc/ld.so.conf.d/python{OLDEST}.conf"
#: Packages that the tests need in addition to the nodes' list, pinned as in tests/tools/requirements.txt.
TEST_PACKAGES = ("pytest", "hypothesis", "jsonschema", "grpcio-tools==1.85.1", "ruff==0.17.5", "highspy==1.16.0")


def interpreter(version: str) -> str:
    """Return an interpreter of that version: DRA_ACCELERATORS_OLDEST_PYTHON, one of pyenv's, or one in PATH."""
    pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*"))
    named = os.environ.get("DRA_ACCELERATORS_OLDEST_PYTHON")
    for candidate in [*([named] if named else []), *(str(path / "bin/python3") for path in pyenv), f"python{version}"]:
        found = shutil.which(candidate)
        if found is None:
            continue
        words = "import sys, sqlite3, ssl, venv; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([found, "-c", words], capture_output=True, text=True, check=False).stdout.strip()
        if said == version:
            return found
    pytest.fail(
        f"No Python {version} with sqlite3 and venv was found: install one (`pyenv install {version}` makes one) or name it in "
        "DRA_ACCELERATORS_OLDEST_PYTHON."
    )


@pytest.fixture(scope="module")
def oldest() -> str:
    """Return the interpreter of the oldest version."""
    return interpreter(OLDEST)


def test_node_programs_run_on_the_oldest_python(oldest: str, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    tree = subprocess.run([ROOT / "tests/tools/tree"], check=True, capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree}/python", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([oldest, "-m", "venv", tmp_path / "venv"], check=True, env=environment)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    requirements = ROOT / "roles/python_environment/files/requirements.txt"
    subprocess.run([*install, "-r", requirements, *TEST_PACKAGES], check=True, env=environment)
    tests = ["tests/unit/core", "tests/unit/dra_driver"]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    reader = "from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.toml_edit import reader; print(reader().__name__)"
    said = subprocess.run([python, "-c", reader], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "tomli"


@pytest.fixture
def old_node(clean: Cluster, oldest: str, tmp_path: Path) -> Iterator[tuple[Cluster, str, Path]]:
    """Yield a node with the oldest Python in addition to its own, and an inventory with which Ansible and the roles
    use it.
    """
    node = clean.nodes()[1]
    said = execute([oldest, "-c", "import sys; print(sys.base_prefix)"]).stdout
    prefix = Path(said.strip())
    # Outside home directories, which services cannot see.
    place = f"/opt/python{OLDEST}"
    execute(["docker", "cp", prefix, f"{node}:{place}"])
    clean.shell(node, f"echo {place}/lib >{LOADER_FOLDERS} && ldconfig")
    inventory = yaml.safe_load(clean.inventory().read_text("utf-8"))
    python = f"{place}/bin/python{OLDEST}"
    inventory["all"]["children"]["accelerator_nodes"]["hosts"][node] |= {
        "ansible_python_interpreter": python,
        "python_environment_interpreter": python,
    }
    path = tmp_path / "hosts.yml"
    path.write_text(yaml.safe_dump(inventory), encoding="utf-8")
    yield clean, node, path
    back = clean.playbook("site.yml", "--limit", node)
    clean.shell(node, f"rm -rf {place} {LOADER_FOLDERS} && ldconfig")
    assert back.failed == 0, back.output


def test_node_with_the_oldest_python_is_installed_and_serves_pods(old_node: tuple[Cluster, str, Path]) -> None:
    cluster, node, inventory = old_node
    installed = cluster.playbook("site.yml", "--limit", node, inventory=inventory)
    assert installed.failed == 0 and installed.changed > 0, installed.output
    runs = cluster.run(node, "readlink", "-f", f"/proc/{cluster.driver_pid(node)}/exe").strip()
    assert runs.endswith(f"/python{OLDEST}"), runs
    cluster.apply(
        claim("old", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("old", "old", node=node)
    )
    cluster.wait_running("old")
    assert "MIG 1g.10gb" in cluster.wait("the pod's list", lambda: cluster.log("old"))
    again = cluster.playbook("site.yml", "--limit", node, inventory=inventory)
    assert (again.failed, again.changed) == (0, 0), again.output
