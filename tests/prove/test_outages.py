# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test outages of a node driver's dependencies while pods start and end: no claim is lost, and no state is left
behind.

``make chaos`` runs the same without a cluster, hundreds of times and at every stage.
"""

from __future__ import annotations

import os
import time

from tests.cluster.cluster import DRIVER_UNIT, EXAMPLES, Cluster
from tests.cluster.manifests import claim, dynamic, pod, static
from tests.cluster.streams import streaming

AWAY_SECONDS = float(os.environ.get("DRA_ACCELERATORS_AWAY_SECONDS", "600"))
STORM = 10


def hold(cluster: Cluster, node: str) -> None:
    """Create three pods that stay: on a static or dynamic partition, on a whole GPU, and on a GPU shared by
    containers.
    """
    wanted = static("3g.40gb") if cluster.instances(node) else dynamic("3g.40gb")
    cluster.apply(
        claim("partition", device_class="mig.nvidia.com", expression=wanted),
        pod("partition", "partition", node=node),
        claim("whole", device_class="gpu.nvidia.com"),
        pod("whole", "whole", node=node),
        EXAMPLES / "mps.yaml",
    )
    cluster.wait_running("partition", "whole", "mps")


def containers(cluster: Cluster) -> dict[str, str]:
    """Return the container IDs of the pods that stay. A new container would have another ID."""
    names = ("partition", "whole", "mps")
    return {name: cluster.pod(name)["status"]["containerStatuses"][0]["containerID"] for name in names}


def test_api_server_outage_under_load(clean: Cluster) -> None:
    """Pods stay, a killed driver becomes ready again, and pending pods get their devices when the API server is back."""
    first, second = clean.nodes()
    hold(clean, first)
    before, recorded = containers(clean), clean.recorded(first)
    clean.apply(
        claim("ends", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("ends", "ends", node=second)
    )
    clean.wait_running("ends")
    ended = clean.uid("ends")
    clean.apply(
        *(claim(f"waits-{each}", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")) for each in range(8))
    )
    clean.apply(*(pod(f"waits-{each}", f"waits-{each}", node=second) for each in range(8)))
    clean.kubectl("delete", "pod,resourceclaim", "ends", "--wait=false")
    clean.world("component", "stop", "apiserver")
    began = time.monotonic()
    try:
        pid = clean.driver_pid(first)
        clean.run(first, "systemctl", "kill", "--signal=KILL", DRIVER_UNIT)
        while time.monotonic() - began < AWAY_SECONDS:
            time.sleep(min(10.0, AWAY_SECONDS))
            for node in (first, second):
                assert clean.run(node, "systemctl", "is-active", DRIVER_UNIT).strip() == "active", node
        assert clean.driver_pid(first) != pid
        restarts = clean.run(first, "systemctl", "show", "--property=NRestarts", "--value", DRIVER_UNIT)
        assert restarts.strip() == "1", "the driver restarted more than once without the API server"
        assert clean.recorded(first) == recorded
    finally:
        clean.world("component", "start", "apiserver")
    clean.wait(
        "the API server answers", lambda: clean.kubectl("get", "--raw", "/readyz", check=False) == "ok", timeout=180
    )
    # Its watches reconnect after a pause, in which a pod that ends keeps its claim reserved: see test_50_restart.py.
    clean.world("component", "restart", "controller-manager")
    clean.wait_running(*(f"waits-{each}" for each in range(8)), timeout=300)
    assert containers(clean) == before
    for node in (first, second):
        clean.wait(f"{node} is ready and has published", lambda node=node: clean.status(node)["published"] or None)
    clean.wait(
        "the claim deleted before the outage is released",
        lambda: ended not in clean.recorded(second) or None,
        timeout=300,
    )
    assert {clean.uid(f"waits-{each}") for each in range(8)} <= set(clean.recorded(second))
    clean.delete(EXAMPLES / "mps.yaml")


def test_kubelet_is_restarted_repeatedly(clean: Cluster) -> None:
    node = clean.nodes()[1]
    hold(clean, node)
    clean.wait("the shared GPU is somewhere", lambda: clean.pod("mps")["spec"]["nodeName"])
    before, pid = containers(clean), clean.driver_pid(node)
    with streaming(clean, node) as stream:
        for _each in range(STORM):
            clean.run(node, "systemctl", "restart", "kubelet.service")
            time.sleep(3.0)  # during its requests after a start
        rounds = stream.rounds
        clean.wait("pods still come and go", lambda: stream.rounds > rounds + 1, timeout=300)
    assert containers(clean) == before and clean.driver_pid(node) == pid
    held = {clean.uid(name) for name in ("partition", "whole", "mps")}
    clean.wait("only the remaining claims are prepared", lambda: set(clean.recorded(node)) <= held or None)
    clean.delete(EXAMPLES / "mps.yaml")


def test_driver_is_killed_repeatedly(clean: Cluster) -> None:
    """At a different moment of a pod's start or end each time."""
    node = clean.nodes()[1]
    hold(clean, node)
    before = containers(clean)
    with streaming(clean, node) as stream:
        for each in range(STORM):
            time.sleep(0.7 * each)
            clean.run(node, "systemctl", "kill", "--signal=KILL", DRIVER_UNIT)
            clean.wait_registered(node)
        rounds = stream.rounds
        clean.wait("pods still come and go", lambda: stream.rounds > rounds + 1, timeout=300)
    assert containers(clean) == before
    held = {clean.uid(name) for name in ("partition", "whole", "mps")}
    clean.wait("only the remaining claims are prepared", lambda: set(clean.recorded(node)) <= held or None)
    clean.delete(EXAMPLES / "mps.yaml")
