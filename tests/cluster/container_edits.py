# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The container edits of claims, and a hook that records its environment. Tests of both deployment kinds use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, dynamic, pod

#: A program that replaces NVIDIA's hook, and the file in which it records its environment.
PROGRAM, RECORD = "/usr/bin/nvidia-cdi-hook", "/run/hook-environment"
REMOVE_ENVIRONMENT = (
    "import json, sys; p = sys.argv[1]; d = json.load(open(p)); "
    "[h.pop('env') for h in d['containerEdits']['hooks']]; json.dump(d, open(p, 'w'))"
)


def cdi_file(cluster: Cluster, name: str) -> str:
    """Return the path of a claim's CDI file on its node."""
    return f"/var/run/cdi/k8s.gpu.nvidia.com-claim_{cluster.uid(name)}.json"


def shared_edits(cluster: Cluster, node: str, name: str) -> dict[str, Any]:
    """Return the container edits of a claim's CDI file that apply to all its devices."""
    edits: dict[str, Any] = json.loads(cluster.run(node, "cat", cdi_file(cluster, name)))["containerEdits"]
    return edits


def check_hook_environment(cluster: Cluster, node: str, restart: Callable[[], None]) -> None:
    """Assert that a hook does not inherit the container's environment (CVE-2025-23266). ``restart`` restarts the
    driver.

    The container sets LD_PRELOAD, as a hostile image can. The hook runs as root on the node. A CDI file of an earlier
    release, without the environment, is rewritten when the driver starts.
    """
    script = f"#!/bin/sh\ntr '\\\\0' '\\\\n' </proc/self/environ >>{RECORD}\n"
    hostile = pod("hostile", "hooked", node=node)
    hostile["spec"]["containers"][0]["env"] = [
        {"name": "LD_PRELOAD", "value": "/proc/self/cwd/planted.so"},
        {"name": "MARKER_OF_THE_IMAGE", "value": "inherited"},
    ]
    documents = [claim("hooked", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), hostile]
    try:
        cluster.run(node, "sh", "-c", f"printf '%b' \"$0\" >{PROGRAM} && chmod 0755 {PROGRAM}", script)
        cluster.apply(*documents)
        cluster.wait_running("hostile")
        hooks = shared_edits(cluster, node, "hooked")["hooks"]
        assert [hook["path"] for hook in hooks] == [PROGRAM] and all(hook["env"] for hook in hooks)
        recorded = cluster.run(node, "cat", RECORD)
        assert "PATH=" in recorded
        assert "MARKER_OF_THE_IMAGE" not in recorded and "LD_PRELOAD" not in recorded
        cluster.run(node, "python3", "-c", REMOVE_ENVIRONMENT, cdi_file(cluster, "hooked"))
        assert "env" not in shared_edits(cluster, node, "hooked")["hooks"][0]
        restart()
        cluster.wait(
            "the CDI file of the prepared claim has its environment again",
            lambda: all(hook.get("env") for hook in shared_edits(cluster, node, "hooked")["hooks"]),
        )
    finally:
        cluster.delete(*reversed(documents))
        cluster.run(node, "rm", "-f", PROGRAM, RECORD)
