# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A site without a way out: a bundle is made where there is one, and a bare node becomes ready from it with no route anywhere.

Ansible runs in the network namespace of the control plane, which has lost its default route, as the node has: both reach each other and the API
server, and nothing else. The node lacks python3-venv, so that packages have to come from the bundle too.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, Recap, copy_of_the_collection, execute
from tests.prove import pods

WORLD = "island"
PLACE = "/var/lib/dra-accelerators"
#: An address that no world has (RFC 5737): the kernel is asked for the way there, and nobody is called.
ELSEWHERE = "192.0.2.1"


class Island:
    """The world, the bundle, and Ansible on either side."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.archive = folder / "fleet.bundle"
        self.tree = folder / "tree"
        copy_of_the_collection(self.tree)
        (self.node,) = cluster.nodes()
        self.pids = {name: self.pid(name) for name in (f"{WORLD}-control", self.node)}
        self.programs = folder / "programs"
        self.programs.mkdir()
        inside = self.programs / "ansible-playbook"
        real = Path(sys.executable).with_name("ansible-playbook")
        inside.write_text(f'#!/bin/sh\nexec {" ".join(self.inside(f"{WORLD}-control"))} {real} "$@"\n')
        inside.chmod(0o755)

    @staticmethod
    def pid(container: str) -> str:
        return execute(["docker", "inspect", "--format", "{{.State.Pid}}", container]).stdout.strip()

    def inside(self, container: str) -> list[str]:
        """The words by which a command runs in a container's network, and in nothing else of it."""
        return ["nsenter", f"--net=/proc/{self.pids[container]}/ns/net"]

    def cut(self) -> None:
        """Take the routes that lead out."""
        for container in self.pids:
            execute([*self.inside(container), "ip", "route", "get", ELSEWHERE])
            execute([*self.inside(container), "ip", "route", "flush", "default"])
            execute([*self.inside(container), "ip", "-6", "route", "flush", "default"], check=False)
            assert execute([*self.inside(container), "ip", "route", "show", "default"]).stdout == ""
            assert execute([*self.inside(container), "ip", "route", "get", ELSEWHERE], check=False).returncode

    def bundle(self, *words: str, **variables: Any) -> Recap:
        """Make the bundle, on this side."""
        platform = {
            "distribution": "debian",
            "release": "12",
            "machine": os.uname().machine,
            "kernel": os.uname().release,
        }
        given = {"accelerator_bundle": str(self.archive), "accelerator_platform": platform, **variables}
        return self.cluster.playbook("bundle.yml", "-e", json.dumps(given), *words, tree=self.tree)

    def site(self, *words: str, check: bool = True, **variables: Any) -> Recap:
        """Install from the bundle, on the other side."""
        given = {"accelerator_offline": str(self.archive), **variables}
        return self.cluster.playbook(
            "site.yml", "-e", json.dumps(given), *words, check=check, tree=self.tree, programs=self.programs
        )


@pytest.fixture(scope="module")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    made = Cluster(WORLD)
    made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "8xH100", timeout=3000)
    found = Island(made, tmp_path_factory.mktemp("island"))
    made.shell(
        found.node, "DEBIAN_FRONTEND=noninteractive apt-get -y purge python3-venv python3.11-venv && apt-get clean"
    )
    yield found
    made.world("down")


def test_what_is_needed_is_gathered_once(island: Island) -> None:
    base = pods.make_base_image(island.cluster)
    told = island.bundle("--check", **pods.variables(base))
    assert told.failed == 0 and "gather packages for debian 12" in told.output, told.output
    assert not island.archive.exists()
    first = island.bundle(**pods.variables(base))
    assert first.failed == 0 and first.changed > 0, first.output
    again = island.bundle(**pods.variables(base))
    assert again.failed == 0 and again.changed == 0 and "nothing to gather" in again.output, again.output
    with tarfile.open(island.archive) as file:
        manifest = json.load(file.extractfile("manifest.json"))  # type: ignore[arg-type]
    kinds = {item["kind"] for item in manifest["items"]}
    assert kinds == {"package", "index", "wheel", "image"}
    packages = [item for item in manifest["items"] if item["kind"] == "package"]
    assert "python3-venv" in {item["name"] for item in packages}
    assert all(item["signed_by"] and item["from"].startswith("http") for item in packages), packages


def test_a_changed_bundle_is_refused_by_name(island: Island) -> None:
    island.cut()
    whole = island.archive.with_suffix(".whole")
    shutil.copyfile(island.archive, whole)
    with tarfile.open(island.archive) as file:
        member = next(each for each in file if each.name.startswith("packages/") and "python3-venv" in each.name)
    with island.archive.open("r+b") as content:
        content.seek(member.offset_data + member.size // 2)
        content.write(b"changed")
    try:
        refused = island.site(check=False)
    finally:
        whole.replace(island.archive)
    assert refused.failed == 1 and refused.changed == 0, refused.output
    assert f"changed: {member.name}" in refused.output, refused.output


def test_what_is_missing_is_said_beforehand(island: Island) -> None:
    refused = island.site(check=False, accelerator_bundle_packages=["no-such-package"])
    assert refused.failed == 1 and refused.changed == 0, refused.output
    assert "the package no-such-package for debian 12" in refused.output, refused.output


def test_a_bare_node_becomes_ready_with_no_route(island: Island) -> None:
    cluster, node = island.cluster, island.node
    told = island.site("--check", "--diff")
    assert told.failed == 0 and told.changed > 0, told.output
    assert cluster.shell(node, f"ls {PLACE}/offline || true") == ""
    first = island.site()
    assert first.failed == 0 and first.changed > 0, first.output
    assert cluster.devices(node)
    cluster.shell(node, "dpkg-query -W python3-venv")
    assert cluster.shell(node, f"find {PLACE} -name '*.deb' || true") == ""
    again = island.site()
    assert again.failed == 0 and again.changed == 0, again.output


def test_a_pod_s_image_comes_from_the_bundle_too(island: Island) -> None:
    base = "localhost/driver-base:1"
    reference = execute(
        ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}", "localhost/dra-accelerators-driver"]
    )
    # Nothing is built here: the builder has no image any more, and no way to one.
    for name in reference.stdout.split():
        execute(["docker", "rmi", "--force", name])
    changed = island.site(**pods.variables(base))
    assert changed.failed == 0, changed.output
    assert pods.the_pod(island.cluster)["status"]["phase"] == "Running"
    again = island.site(**pods.variables(base))
    assert again.failed == 0 and again.changed == 0, again.output


def test_nothing_of_it_stays(island: Island) -> None:
    removed = island.cluster.playbook("remove.yml", tree=island.tree, programs=island.programs)
    assert removed.failed == 0, removed.output
    assert island.cluster.shell(island.node, f"ls {PLACE} || true") == ""
