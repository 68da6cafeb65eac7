# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the lowest supported versions: ansible-core 2.18 and kubernetes.core 5.0.0 accept the whole collection."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))
MODULES = sorted(path.stem for path in (ROOT / "plugins/modules").glob("*.py"))
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if (path / "meta/argument_specs.yml").exists())


#: Creates a CA, stores it, reads it back, and rotates it, with the cryptography of that environment.
CA_STEPS = """
import datetime
from ansible_collections.dra.accelerators.plugins.module_utils.core import certificates as c
now = datetime.datetime.now(datetime.timezone.utc)
made = c.apply_step(c.Authorities(), c.MAKE, now=now, seconds=3600)
read = c.read_authorities(made.to_data())
assert read == made, "the stored CA was not recognized"
assert c.next_step(read, trusted_for=0, now=now) == c.NOTHING
rotating = c.read_authorities(c.apply_step(read, c.MAKE_NEXT, now=now, seconds=3600).to_data())
assert c.next_step(rotating, trusted_for=c.TRUST_SECONDS, now=now) == c.PROMOTE
print(read.active.expires.isoformat())
"""


@pytest.fixture(scope="module")
def lowest() -> Path:
    """Return the programs of an environment with the lowest versions."""
    done = subprocess.run([ROOT / "tests/tools/venv", "lowest"], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "bin"


def run(lowest: Path, *words: str | Path, modules: bool = False) -> str:
    """Run one of its programs with this collection and its kubernetes.core. With ``modules``, Python finds the
    collection's modules.
    """
    tree = subprocess.run([ROOT / "tests/tools/tree"], check=True, capture_output=True, text=True).stdout.strip()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ANSIBLE_CONFIG")}
    environment |= {"ANSIBLE_COLLECTIONS_PATH": tree, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "false"}
    environment["PATH"] = f"{lowest}:{environment['PATH']}"
    environment |= {"PYTHONPATH": tree} if modules else {}
    command = [lowest / words[0], *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_lowest_versions_equal_the_documented_ones(lowest: Path) -> None:
    core = run(lowest, "ansible", "--version")
    collections = json.loads(run(lowest, "ansible-galaxy", "collection", "list", "kubernetes.core", "--format", "json"))
    (found,) = {each["kubernetes.core"]["version"] for each in collections.values() if "kubernetes.core" in each}
    requires = yaml.safe_load((ROOT / "meta/runtime.yml").read_text("utf-8"))["requires_ansible"]
    depends = yaml.safe_load((ROOT / "galaxy.yml").read_text("utf-8"))["dependencies"]["kubernetes.core"]
    assert f"[core {requires.removeprefix('>=')}]" in core
    assert depends == f">={found}"


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_lowest_versions_accept_the_playbooks(lowest: Path, playbook: str) -> None:
    run(
        lowest,
        "ansible-playbook",
        "--syntax-check",
        "--inventory",
        "accelerator_nodes,",
        f"dra.accelerators.{playbook}",
    )


def test_lowest_versions_read_module_and_role_documentation(lowest: Path) -> None:
    names = [f"dra.accelerators.{name}" for name in MODULES]
    assert set(json.loads(run(lowest, "ansible-doc", "--json", *names))) == set(names)
    names = [f"dra.accelerators.{name}" for name in ROLES]
    assert set(json.loads(run(lowest, "ansible-doc", "--type", "role", "--json", *names))) == set(names)


def test_lowest_versions_remove_and_install_a_node(cluster: Cluster, lowest: Path) -> None:
    """The lowest versions remove what today's versions installed, and install it again."""
    node = cluster.nodes()[0]
    offered = set(cluster.devices(node))
    run_on_node = partial(cluster.playbook, programs=lowest)
    limit = ("--limit", node)
    answer = run_on_node("site.yml", "--check", "--diff", *limit)
    assert (answer.failed, answer.changed) == (0, 0), answer.output
    removed = run_on_node("remove.yml", *limit)
    assert removed.failed == 0 and removed.changed > 0, removed.output
    cluster.wait("no device is published", lambda: not cluster.slices(node))
    answer = run_on_node("site.yml", "--check", "--diff", *limit)
    assert answer.failed == 0 and answer.changed > 0, answer.output
    installed = run_on_node("site.yml", *limit)
    assert installed.failed == 0 and installed.changed > 0, installed.output
    cluster.wait("the same devices are published again", lambda: set(cluster.devices(node)) == offered)
    for arguments in (limit, ("--check", "--diff", *limit)):
        again = run_on_node("site.yml", *arguments)
        assert (again.failed, again.changed) == (0, 0), again.output
    # Newer versions find nothing to change either.
    newer = cluster.playbook("site.yml", *limit)
    assert (newer.failed, newer.changed) == (0, 0), newer.output


def test_webhook_authority_works_with_the_lowest_cryptography(lowest: Path) -> None:
    """The module runs on the operator's host, where a package of the distribution can be the only version."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "tests/tools/requirements-lowest.txt").read_text("utf-8").split()
        if "==" in line
    )
    found = run(lowest, "python", "-c", "import cryptography; print(cryptography.__version__)")
    assert found.strip() == pins["cryptography"]
    assert run(lowest, "python", "-c", CA_STEPS, modules=True).strip().endswith("+00:00")
