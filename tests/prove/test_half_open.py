# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Drop packets between a node and the API server for minutes: connections stay open on both sides without any data.

The short form, with a server that becomes silent, is tests/unit/dra_driver/half_open_test.py.
"""

from __future__ import annotations

import os
import re
import time

from tests.cluster.cluster import DRIVER_UNIT, Cluster

DROP_SECONDS = float(os.environ.get("DRA_ACCELERATORS_DROP_SECONDS", "300"))
#: Maximum time in which the driver detects dropped packets, and publishes again after they pass.
NOTICED_SECONDS = BACK_SECONDS = 60.0
RULES = ("OUTPUT -d", "INPUT -s")


def api_address(cluster: Cluster, node: str) -> str:
    """Return the address that the node's driver uses for the API server."""
    found = re.search(r'"?server"?: "?https://([0-9.]+):', cluster.run(node, "cat", "/etc/dra-accelerators/kubeconfig"))
    assert found is not None
    return found[1]


def test_slices_are_published_again_after_a_network_outage(clean: Cluster) -> None:
    node = clean.nodes()[0]
    address = api_address(clean, node)
    published = len(clean.slices(node))
    assert published
    pid = clean.driver_pid(node)
    log = ("journalctl", "-u", DRIVER_UNIT, "--no-pager", "-q", f"_PID={pid}")
    messages = "cannot be watched|did not answer"
    # Messages of earlier outages do not count.
    earlier = len(re.findall(messages, clean.run(node, *log)))
    for rule in RULES:
        clean.shell(node, f"iptables -I {rule} {address} -p tcp -j DROP")
    dropped = time.monotonic()
    try:
        clean.wait(
            "the driver reports that the API server does not answer",
            lambda: len(re.findall(messages, clean.run(node, *log))) > earlier or None,
            timeout=NOTICED_SECONDS,
        )
        print(f"noticed after {time.monotonic() - dropped:.0f} s")
        time.sleep(max(DROP_SECONDS - (time.monotonic() - dropped), 0.0))
    finally:
        for rule in RULES:
            clean.shell(node, f"iptables -D {rule} {address} -p tcp -j DROP")
    restored = time.monotonic()
    # The published slices are deleted, as by a kubelet that restarts and finds no driver in time.
    clean.kubectl("delete", "resourceslices", *(each["metadata"]["name"] for each in clean.slices(node)))
    clean.run(node, "systemctl", "restart", "kubelet")
    clean.wait("all slices are back", lambda: len(clean.slices(node)) == published or None, timeout=BACK_SECONDS)
    print(f"back after {time.monotonic() - restored:.0f} s")
    assert clean.driver_pid(node) == pid
