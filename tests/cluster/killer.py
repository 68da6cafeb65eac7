# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Kill the driver of a node at a stage of its work, with the claims for it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.cluster import stop_at
from tests.cluster.cluster import DRIVER_UNIT, Cluster
from tests.cluster.manifests import claim, pod

DROP_IN = f"/run/systemd/system/{DRIVER_UNIT}.d/stop-at.conf"
# The unit's start command with a launcher before its arguments.
LAUNCHER = "/run/dra-accelerators-stop-at.py"
PYTHON, RELEASE = "/opt/dra-accelerators/venv/bin/python", "/opt/dra-accelerators/current"
CONFIGURATION = "/etc/dra-accelerators/driver.yaml"


def together(*jobs: Callable[[], object]) -> None:
    """Run jobs for several nodes in parallel."""
    with ThreadPoolExecutor(max_workers=len(jobs)) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


class Killer:
    """Makes the driver of a node kill itself, like ``kill -9``, at a stage."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster = cluster
        self.node = node
        self.before = sorted(cluster.instances(node))
        self.armed = False

    def arm(self, stage: str, serves: bool = True) -> None:
        """Restart the driver so that it dies at ``stage`` and stays down until ``disarm``. ``serves``: it becomes
        ready before.
        """
        launcher = base64.b64encode(Path(stop_at.__file__).read_bytes()).decode()
        start = f"{PYTHON} {LAUNCHER} {stage} node --config {CONFIGURATION}"
        script = (
            f"echo {launcher} | base64 -d > {LAUNCHER} && mkdir -p {DROP_IN.rpartition('/')[0]} && "
            f"printf '[Service]\\nExecStart=\\nExecStart={start}\\nEnvironment=PYTHONPATH={RELEASE}\\nRestart=no\\n' > {DROP_IN} && "
            f"systemctl daemon-reload && {{ systemctl reset-failed {DRIVER_UNIT} 2>/dev/null; "
            f"systemctl restart {'' if serves else '--no-block '}{DRIVER_UNIT}; }}"
        )
        self.armed = True
        self.cluster.shell(self.node, script)
        if serves:
            self.cluster.wait_registered(self.node)

    def wait_killed(self) -> None:
        """Wait until the driver has died from a signal."""
        asked = ("systemctl", "show", "--property=Result,ActiveState", "--value", DRIVER_UNIT)
        self.cluster.wait(
            f"the driver of {self.node} died by SIGKILL",
            lambda: {"signal", "failed"} == set(self.cluster.run(self.node, *asked).split()),
            timeout=120,
        )

    def disarm(self) -> None:
        """Start the installed driver."""
        self.cluster.shell(
            self.node,
            f"rm -f {DROP_IN} {LAUNCHER} && systemctl daemon-reload && systemctl reset-failed {DRIVER_UNIT} 2>/dev/null; systemctl restart {DRIVER_UNIT}",
        )
        self.cluster.wait_registered(self.node)
        self.armed = False

    def documents(
        self,
        name: str,
        device_class: str,
        expression: str | None = None,
        count: int = 1,
        config: Sequence[Mapping[str, Any]] = (),
    ) -> list[dict[str, Any]]:
        """Return a claim, and a pod on this node that uses it."""
        wanted = claim(name, device_class=device_class, expression=expression, count=count)
        if config:
            wanted["spec"]["devices"]["config"] = list(config)
        return [wanted, pod(name, name, node=self.node)]

    def delete(self, documents: Iterable[dict[str, Any]]) -> None:
        """Delete pod and claim in this order without waiting."""
        self.cluster.delete(*reversed(list(documents)), wait=False)

    def made(self) -> int:
        """Return how many partitions the node has in addition to the initial ones."""
        return len(self.cluster.instances(self.node)) - len(self.before)

    def wait_nothing_left(self, name: str) -> None:
        """Wait until the pod and the claim of this name are deleted, and all their state on the node."""

        def gone() -> bool:
            items = self.cluster.get("pods,resourceclaims", "-n", "default")["items"]
            return name not in {item["metadata"]["name"] for item in items}

        self.cluster.wait(f"claim {name} and its pod are deleted", gone, timeout=240)
        self.cluster.wait(
            f"nothing is left on {self.node}",
            lambda: (
                sorted(self.cluster.instances(self.node)) == self.before
                and not self.cluster.cdi_files(self.node)
                and not self.cluster.companions(self.node)
            ),
            timeout=60,
        )
