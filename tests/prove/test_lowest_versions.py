# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The lowest versions that the collection promises: ansible-core 2.18 and kubernetes.core 5.0.0 take all of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))
MODULES = sorted(path.stem for path in (ROOT / "plugins/modules").glob("*.py"))
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if (path / "meta/argument_specs.yml").exists())


@pytest.fixture(scope="module")
def lowest() -> Path:
    """The programs of an environment with the lowest versions."""
    done = subprocess.run([ROOT / "tests/tools/venv", "lowest"], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "bin"


def run(lowest: Path, *words: str | Path) -> str:
    """Run one of its programs with this collection, and the kubernetes.core that lies beside it."""
    tree = subprocess.run([ROOT / "tests/tools/tree"], check=True, capture_output=True, text=True).stdout.strip()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ANSIBLE_CONFIG")}
    environment |= {"ANSIBLE_COLLECTIONS_PATH": tree, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "false"}
    environment["PATH"] = f"{lowest}:{environment['PATH']}"
    command = [lowest / words[0], *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_they_are_the_versions_that_are_promised(lowest: Path) -> None:
    core = run(lowest, "ansible", "--version")
    collections = json.loads(run(lowest, "ansible-galaxy", "collection", "list", "kubernetes.core", "--format", "json"))
    (found,) = {each["kubernetes.core"]["version"] for each in collections.values() if "kubernetes.core" in each}
    requires = yaml.safe_load((ROOT / "meta/runtime.yml").read_text("utf-8"))["requires_ansible"]
    depends = yaml.safe_load((ROOT / "galaxy.yml").read_text("utf-8"))["dependencies"]["kubernetes.core"]
    assert f"[core {requires.removeprefix('>=')}]" in core
    assert depends == f">={found}"


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_they_take_the_playbooks(lowest: Path, playbook: str) -> None:
    run(
        lowest,
        "ansible-playbook",
        "--syntax-check",
        "--inventory",
        "accelerator_nodes,",
        f"dra.accelerators.{playbook}",
    )


def test_they_read_the_documentation_of_modules_and_roles(lowest: Path) -> None:
    names = [f"dra.accelerators.{name}" for name in MODULES]
    assert set(json.loads(run(lowest, "ansible-doc", "--json", *names))) == set(names)
    names = [f"dra.accelerators.{name}" for name in ROLES]
    assert set(json.loads(run(lowest, "ansible-doc", "--type", "role", "--json", *names))) == set(names)
