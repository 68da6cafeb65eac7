# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The driver killed between each pair of stages: after its restart every claim ends prepared or cleanly gone."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from dra_driver.stages import PREPARE, UNPREPARE

from tests.cluster import stop_at
from tests.cluster.cluster import DRIVER_UNIT, Cluster
from tests.cluster.manifests import claim, dynamic, pod

DROP_IN = f"/run/systemd/system/{DRIVER_UNIT}.d/stop-at.conf"
# The driver as the unit starts it, but for the launcher before its arguments.
LAUNCHER = "/run/dra-accelerators-stop-at.py"
PYTHON = "/opt/dra-accelerators/venv/bin/python"
CONFIGURATION = "/etc/dra-accelerators/driver.yaml"


class Killer:
    """Lets the driver of a node kill itself, as ``kill -9`` would, when it reaches a stage."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster = cluster
        self.node = node

    def arm(self, stage: str) -> None:
        """Restart the driver so that it dies at ``stage``, and stays down until ``disarm``."""
        launcher = base64.b64encode(Path(stop_at.__file__).read_bytes()).decode()
        start = f"{PYTHON} {LAUNCHER} {stage} node --config {CONFIGURATION}"
        script = (
            f"echo {launcher} | base64 -d > {LAUNCHER} && mkdir -p {DROP_IN.rpartition('/')[0]} && "
            f"printf '[Service]\\nExecStart=\\nExecStart={start}\\nRestart=no\\n' > {DROP_IN} && "
            "systemctl daemon-reload"
        )
        self.cluster.shell(self.node, script)
        self.cluster.restart_driver(self.node)

    def wait_killed(self) -> None:
        """Wait until the driver has died from a signal."""
        self.cluster.wait(
            "the driver died by SIGKILL",
            lambda: (
                self.cluster.run(self.node, "systemctl", "show", "--property=Result", "--value", DRIVER_UNIT).strip()
                == "signal"
            ),
            timeout=120,
        )

    def disarm(self) -> None:
        self.cluster.shell(
            self.node,
            f"rm -f {DROP_IN} {LAUNCHER} && systemctl daemon-reload && systemctl reset-failed {DRIVER_UNIT} 2>/dev/null; systemctl restart {DRIVER_UNIT}",
        )
        self.cluster.wait_registered(self.node)

    def wait_nothing_left(self) -> None:
        """Wait until pod and claim are gone from the API, and every trace of them from the node."""
        self.cluster.wait(
            "the claim and its pod are gone",
            lambda: not self.cluster.get("pods,resourceclaims", "-n", "default")["items"],
            timeout=240,
        )
        self.cluster.wait(
            "nothing is left on the node",
            lambda: not self.cluster.instances(self.node) and not self.cluster.cdi_files(self.node),
            timeout=60,
        )


@pytest.fixture()
def killer(clean: Cluster) -> Iterator[Killer]:
    made = Killer(clean, clean.nodes()[1])
    yield made
    if (
        clean.run(made.node, "test", "-e", DROP_IN, check=False) == ""
        and clean.shell(made.node, f"test -e {DROP_IN} && echo armed || true").strip()
    ):
        made.disarm()


@pytest.mark.parametrize("stage", PREPARE)
def test_killed_while_preparing_then_the_pod_runs(killer: Killer, stage: str) -> None:
    """The pod stays wanted: after the restart its claim is prepared, once."""
    cluster = killer.cluster
    killer.arm(stage)
    cluster.apply(
        claim("killed", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod("killed", "killed", node=killer.node),
    )
    killer.wait_killed()
    killer.disarm()
    cluster.wait_running("killed", timeout=240)
    assert len(cluster.instances(killer.node)) == 1
    assert len(cluster.cdi_files(killer.node)) == 1


@pytest.mark.parametrize("stage", PREPARE)
def test_killed_while_preparing_then_the_pod_is_deleted(killer: Killer, stage: str) -> None:
    """Nobody wants the claim any more when the driver comes back: nothing of it is left."""
    cluster = killer.cluster
    killer.arm(stage)
    documents = (
        claim("unwanted", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod("unwanted", "unwanted", node=killer.node),
    )
    cluster.apply(*documents)
    killer.wait_killed()
    cluster.delete(*reversed(documents), wait=False)
    killer.disarm()
    killer.wait_nothing_left()


@pytest.mark.parametrize("stage", UNPREPARE)
def test_killed_while_unpreparing(killer: Killer, stage: str) -> None:
    """The pod is deleted, the driver dies on the way: after the restart all is given back."""
    cluster = killer.cluster
    documents = (
        claim("leaving", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod("leaving", "leaving", node=killer.node),
    )
    cluster.apply(*documents)
    cluster.wait_running("leaving")
    killer.arm(stage)
    cluster.delete(*reversed(documents), wait=False)
    killer.wait_killed()
    killer.disarm()
    killer.wait_nothing_left()
