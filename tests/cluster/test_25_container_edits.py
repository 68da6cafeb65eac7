# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that containers get edits for the node's current state: a removed socket, a late device node, and nvidia-ctk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster import other_family
from tests.cluster.cluster import DRIVER_UNIT, ROOT, Cluster, Recap, execute
from tests.cluster.container_edits import check_hook_environment, shared_edits
from tests.cluster.manifests import claim, dynamic, pod

SOCKET = "/run/nvidia-persistenced/socket"
BIND = "import os, socket, sys; os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True); socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
TOOLKIT = "/usr/bin/nvidia-ctk"


def sources(edits: dict[str, Any]) -> set[str]:
    return {mount["hostPath"] for mount in edits["mounts"]}


@contextmanager
def nvidia_ctk(cluster: Cluster, node: str) -> Iterator[None]:
    """Install NVIDIA's program on the node until the context ends, and wait until the driver has its output."""
    execute([ROOT / "tests/world/world", "build", "--only", "oracles"], timeout=1800)
    cache = execute([ROOT / "tests/tools/cache"]).stdout.strip()
    built = execute(["sh", "-c", f"ls -t {cache}/world/binaries/nvidia-ctk-*/nvidia-ctk"]).stdout.split()[0]
    execute(["docker", "cp", built, f"{node}:{TOOLKIT}"])
    try:
        since = cluster.run(node, "date", "+%Y-%m-%d %H:%M:%S").strip()
        run_pod(cluster, node, "meanwhile")
        cluster.wait(
            "the driver logs the source of the edits",
            lambda: (
                f"container edits come from {TOOLKIT}"
                in cluster.run(node, "journalctl", "-u", DRIVER_UNIT, "--since", since, "--no-pager")
            ),
        )
        yield
    finally:
        cluster.run(node, "rm", "-f", TOOLKIT)


def run_pod(cluster: Cluster, node: str, name: str) -> dict[str, Any]:
    """Start a pod with its own partition; return the shared edits of its container."""
    cluster.apply(claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod(name, name, node=node))
    cluster.wait_running(name)
    return shared_edits(cluster, node, name)


def test_removed_socket_does_not_fail_new_containers(clean: Cluster) -> None:
    node = clean.nodes()[1]
    process = clean.driver_pid(node)
    clean.run(node, "python3", "-c", BIND, SOCKET)
    try:
        assert SOCKET in sources(run_pod(clean, node, "with-socket"))
    finally:
        clean.run(node, "rm", "-f", SOCKET)
    assert SOCKET not in sources(run_pod(clean, node, "without-socket"))
    assert clean.driver_pid(node) == process


def test_device_nodes_that_no_boot_creates_are_created_for_a_claim(clean: Cluster) -> None:
    node = clean.nodes()[1]
    process = clean.driver_pid(node)
    clean.run(node, "rm", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
    clean.apply(
        claim("early", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("early", "early", node=node)
    )
    clean.wait_running("early", timeout=240)
    clean.kubectl("exec", "early", "--", "test", "-c", "/dev/nvidia-uvm")
    clean.run(node, "test", "-c", "/dev/nvidia-uvm-tools")
    assert clean.driver_pid(node) == process


@pytest.mark.prove
def test_shared_edits_come_from_an_installed_nvidia_ctk(clean: Cluster) -> None:
    node = clean.nodes()[1]
    own = run_pod(clean, node, "own")
    assert not own.get("hooks")
    with nvidia_ctk(clean, node):
        theirs = run_pod(clean, node, "theirs")
        verbs = {hook["args"][2] for hook in theirs["hooks"] if hook["path"] == TOOLKIT}
        assert {"create-symlinks", "update-ldcache"} <= verbs
        # The hooks have run: the container's loader cache contains the driver's libraries, and the programs work.
        clean.kubectl("exec", "theirs", "--", "grep", "-q", "libcuda.so.1", "/etc/ld.so.cache")
        assert "MIG 1g.10gb" in clean.wait("the pod's list", lambda: clean.log("theirs"))
    assert not run_pod(clean, node, "own-again").get("hooks")


def test_hook_does_not_inherit_the_environment_of_the_container(clean: Cluster) -> None:
    node = clean.nodes()[1]
    check_hook_environment(clean, node, lambda: clean.restart_driver(node))


@pytest.mark.prove
def test_image_of_another_distribution_works_with_the_toolkit_hook(clean: Cluster) -> None:
    """Without the hook the loader of such an image does not search the libraries' directory, as the pre-flight check
    warned.
    """
    node = clean.nodes()[1]
    other_family.load_image(clean, node)
    devices = {"device_class": "mig.nvidia.com", "expression": dynamic("1g.10gb")}

    def answer(name: str) -> str:
        clean.apply(claim(name, **devices), pod(name, name, node=node, image=other_family.IMAGE))
        clean.wait_running(name)
        return clean.wait("the output of its nvidia-smi", lambda: clean.log(name))

    assert "couldn't find libnvidia-ml.so" in answer("lost")
    with nvidia_ctk(clean, node):
        assert "MIG 1g.10gb" in answer("found")


def test_preflight_warns_that_images_of_another_distribution_need_the_toolkit(clean: Cluster, first_run: Recap) -> None:
    assert "Container toolkit: neither nvidia-cdi-hook nor nvidia-ctk" in first_run.output
