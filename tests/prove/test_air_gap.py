# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test an air-gapped site: create an offline bundle where there is network access, and install a bare node from it
without any route, including the GPU driver.

Ansible runs in the network namespace of the control plane. The control plane and the node lose their default routes:
they reach each other and the API server, and nothing else. The node has no GPU driver and lacks python3-venv. The
bundle contains the vendor's packages (simulated by gpu_host) and the distribution's. The vendor's package server is
stopped before the site is installed.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, Recap, copy_of_the_collection, execute
from tests.prove import pods
from tests.prove.gpu_host import (
    DRIVERS,
    HEADERS,
    OLDER,
    TOOLKIT,
    Sources,
    differences,
    doors,
    everything,
    make_sources,
    runs,
    sees_all_doors_open,
    world_without_drivers,
)

WORLD = "island"
PLACE = "/var/lib/dra-accelerators"
#: Removes the one package of the distribution that the node lacks and that a removal of our software keeps.
VENV = "DEBIAN_FRONTEND=noninteractive apt-get -y purge python3-venv python3.11-venv && apt-get clean"
#: Installs the same Python version as the bundle's. Otherwise its packages would be newer afterwards.
PYTHON = (
    "apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends install python3.11-venv"
)
#: An address outside all worlds (RFC 5737). Only the kernel's route to it is queried; nothing is sent.
ELSEWHERE = "192.0.2.1"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serve a directory without logging."""

    def log_message(self, *words: Any) -> None:
        """Log nothing."""


class Vendor:
    """The server of the vendor's packages while network access exists."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        serving = functools.partial(Quiet, directory=str(sources.folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serving)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def end(self) -> None:
        """Stop the server and delete all packages."""
        self.server.shutdown()
        self.server.server_close()
        shutil.rmtree(self.sources.folder, ignore_errors=True)


class Island:
    """The world, the bundle, the vendor, and Ansible with and without network access."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.archive = folder / "fleet.bundle"
        self.tree = folder / "tree"
        copy_of_the_collection(self.tree)
        (self.node,) = cluster.nodes()
        cluster.shell(self.node, f"{HEADERS} && {PYTHON} && {VENV}", timeout=600)
        self.sources = make_sources(folder, (OLDER,), parts=True)
        self.vendor = Vendor(self.sources)
        cluster.variables = doors(self.sources, self.vendor.address)
        self.before = everything(cluster, self.node)
        self.pids = {name: self.pid(name) for name in (f"{WORLD}-control", self.node)}
        self.programs = folder / "programs-inside"
        self.programs.mkdir()
        inside = self.programs / "ansible-playbook"
        real = Path(sys.executable).with_name("ansible-playbook")
        inside.write_text(f'#!/bin/sh\nexec {" ".join(self.inside(f"{WORLD}-control"))} {real} "$@"\n')
        inside.chmod(0o755)

    @staticmethod
    def pid(container: str) -> str:
        return execute(["docker", "inspect", "--format", "{{.State.Pid}}", container]).stdout.strip()

    def inside(self, container: str) -> list[str]:
        """Return the command prefix to run in a container's network namespace only."""
        return ["nsenter", f"--net=/proc/{self.pids[container]}/ns/net"]

    def cut(self) -> None:
        """Remove the default routes and the vendor's packages."""
        self.vendor.end()
        for container in self.pids:
            execute([*self.inside(container), "ip", "route", "get", ELSEWHERE])
            execute([*self.inside(container), "ip", "route", "flush", "default"])
            execute([*self.inside(container), "ip", "-6", "route", "flush", "default"], check=False)
            assert execute([*self.inside(container), "ip", "route", "show", "default"]).stdout == ""
            assert execute([*self.inside(container), "ip", "route", "get", ELSEWHERE], check=False).returncode

    def bundle(self, *words: str, check: bool = True, **variables: Any) -> Recap:
        """Create the bundle with network access. No kernel is named, because the node has its kernel headers."""
        platform = {"distribution": "debian", "release": "12", "machine": os.uname().machine}
        given = {"accelerator_bundle_dest": str(self.archive), "accelerator_platform": platform, **variables}
        return self.cluster.playbook("bundle.yml", "-e", json.dumps(given), *words, check=check, tree=self.tree)

    def site(self, *words: str, check: bool = True, **variables: Any) -> Recap:
        """Install from the bundle without network access."""
        with tarfile.open(self.archive) as file:
            manifest = file.extractfile("manifest.json")
            assert manifest is not None
            checksum = hashlib.sha256(manifest.read()).hexdigest()
        given = {"accelerator_offline_bundle": str(self.archive), "accelerator_offline_checksum": checksum, **variables}
        return self.cluster.playbook(
            "site.yml", "-e", json.dumps(given), *words, check=check, tree=self.tree, programs=self.programs
        )


@pytest.fixture(scope="module")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    with world_without_drivers(WORLD) as made:
        found = Island(made, tmp_path_factory.mktemp("island"))
        yield found
        found.vendor.end()


@pytest.mark.parametrize("role", ["nvidia_driver", "nvidia_container_toolkit"])
def test_source_signed_by_another_key_is_rejected(island: Island, role: str) -> None:
    other = "C" * 40
    refused = island.bundle(check=False, **{f"{role}_repository_fingerprints": [other]})
    assert refused.failed == 1 and not island.archive.exists(), refused.output
    assert other in refused.output and island.sources.fingerprint in refused.output, refused.output


@pytest.mark.parametrize("source", [DRIVERS, TOOLKIT])
def test_index_changed_after_signing_is_rejected(island: Island, source: str) -> None:
    release = island.sources.folder / source / "Release"
    signed = release.read_text(encoding="utf-8")
    release.write_text(signed.replace("Origin: NVIDIA", "Origin: another"), encoding="utf-8")
    try:
        refused = island.bundle(check=False)
    finally:
        release.write_text(signed, encoding="utf-8")
    assert refused.failed == 1 and not island.archive.exists(), refused.output
    assert f"{island.vendor.address}/{source}" in refused.output and "BADSIG" in refused.output, refused.output


def test_bundle_is_built_once(island: Island) -> None:
    base = pods.make_base_image(island.cluster)
    answer = island.bundle("--check", **pods.variables(base))
    assert answer.failed == 0 and "gather packages for debian 12" in answer.output, answer.output
    assert OLDER in answer.output, answer.output
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
    assert all(item["signed_by"] and item["from"].startswith("http") for item in packages), packages
    vendors = {item["name"]: item for item in packages if item["from"].startswith(island.vendor.address)}
    assert all(item["signed_by"] == [island.sources.fingerprint] for item in vendors.values()), vendors
    # Both kinds of kernel modules, because the GPUs are not known here.
    modules = {"nvidia-kernel-open-dkms", "nvidia-kernel-dkms"}
    named = {"nvidia-driver-cuda", "nvidia-fabricmanager", "nvidia-container-toolkit", *modules}
    assert named <= vendors.keys() and "python3-venv" in {item["name"] for item in packages} - vendors.keys()


def test_changed_bundle_file_is_rejected_by_name(island: Island) -> None:
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


def test_missing_packages_are_reported_before_any_change(island: Island) -> None:
    refused = island.site(check=False, accelerator_bundle_packages=["no-such-package"])
    assert refused.failed == 1 and refused.changed == 0, refused.output
    assert "the package no-such-package for debian 12" in refused.output, refused.output


def test_bare_node_without_a_route_becomes_ready(island: Island) -> None:
    cluster, node = island.cluster, island.node
    answer = island.site("--check", "--diff")
    assert answer.failed == 0 and answer.changed > 0 and OLDER in answer.output, answer.output
    assert differences(island.before, everything(cluster, node)) == {}
    first = island.site()
    assert first.failed == 0 and first.changed > 0, first.output
    sees_all_doors_open(cluster, node, island.sources)
    cluster.shell(node, "dpkg-query -W python3-venv")
    # The packages that are kept for a rollback are stored with each role's record.
    assert (
        cluster.shell(node, f"find {PLACE}/offline /etc/apt -name '*.deb' -o -name 'dra-accelerators*.sources' || true")
        == ""
    )
    assert "offline" not in cluster.shell(node, f"ls {PLACE}").split()
    runs(cluster, "without-a-route")
    again = island.site()
    assert again.failed == 0 and again.changed == 0, again.output


def test_pod_image_comes_from_the_bundle(island: Island) -> None:
    base = "localhost/driver-base:1"
    reference = execute(
        ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}", "localhost/dra-accelerators-driver"]
    )
    # Nothing is built here: the builder has no image left and no network access.
    for name in reference.stdout.split():
        execute(["docker", "rmi", "--force", name])
    changed = island.site(**pods.variables(base))
    assert changed.failed == 0, changed.output
    assert pods.the_pod(island.cluster)["status"]["phase"] == "Running"
    runs(island.cluster, "without-a-registry")
    again = island.site(**pods.variables(base))
    assert again.failed == 0 and again.changed == 0, again.output


def test_removal_leaves_nothing_of_the_bundle(island: Island) -> None:
    cluster, node = island.cluster, island.node
    wanted = {
        **pods.variables("localhost/driver-base:1"),
        "accelerator_remove_reset_layout": True,
        "accelerator_remove_drivers": True,
    }
    words = ("remove.yml", "-e", json.dumps(wanted))
    removed = cluster.playbook(*words, tree=island.tree, programs=island.programs)
    assert removed.failed == 0, removed.output
    cluster.shell(node, VENV, timeout=600)
    assert differences(island.before, everything(cluster, node)) == {}
    again = cluster.playbook(*words, tree=island.tree, programs=island.programs)
    assert (again.failed, again.changed) == (0, 0), again.output
