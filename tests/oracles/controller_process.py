# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the controller as a process with an API server without nodes, with exactly the permissions that the role
dra_controller grants.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.bench.api_server import free_port
from tests.cluster.cluster import Cluster, execute
from tests.fleets import DRIVER
from tests.oracles.controller_rights import ACCOUNT, NAMESPACE, objects


class NoNodes(Cluster):
    """A cluster that is only an API server. Commands for a node run on the test host."""

    def __init__(self, kubectl: Path, kubeconfig: Path) -> None:
        super().__init__("no-nodes")
        self.kubeconfig = kubeconfig
        self._commands = {"kubectl": [str(kubectl), f"--kubeconfig={kubeconfig}"]}

    def world(self, *arguments: object, timeout: float = 1800, check: bool = True, text: str | None = None) -> str:
        assert arguments == ("kubeconfig",)
        return str(self.kubeconfig)

    def run(self, node: str, *argv: object, check: bool = True, timeout: float = 300, text: str | None = None) -> str:
        return execute(argv, check=check, timeout=timeout, text=text).stdout

    def picture(self) -> str:
        return self.kubectl("get", "devicetaintrules,resourceclaims,events", "-A", check=False)


class Acting:
    """A running controller with its metrics."""

    def __init__(self, address: str) -> None:
        self._address = address

    def counted(self, name: str) -> float:
        """Return a metric of the controller, 0.0 if it does not answer or has no value yet."""
        try:
            with urllib.request.urlopen(f"http://{self._address}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0.0
        found = [line for line in lines if line.startswith(f"dra_accelerators_controller_{name} ")]
        return float(found[0].split()[-1]) if found else 0.0


@contextlib.contextmanager
def acting(cluster: NoNodes, folder: Path, **settings: Any) -> Iterator[Acting]:
    """Run the controller with the role's objects until the context ends, and assert a clean exit."""
    cluster.apply(*objects())
    own = json.loads(cluster.kubeconfig.read_text(encoding="utf-8"))
    own["users"][0]["user"] = {"token": cluster.kubectl("create", "token", ACCOUNT, "-n", NAMESPACE).strip()}
    (folder / "kubeconfig").write_text(json.dumps(own), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    written = {
        "name": "here",
        "kubeconfig": str(folder / "kubeconfig"),
        "namespace": NAMESPACE,
        "drivers": [DRIVER],
        "interval": 1,
        "lease_seconds": 3,
        "address": address,
        **settings,
    }
    (folder / "controller.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    command = [sys.executable, "-m", "dra_driver.controller", "run", "--config", str(folder / "controller.yaml")]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as running:
        try:
            found = Acting(address)
            cluster.wait("it acts", lambda: found.counted("leading") == 1, timeout=60)
            yield found
        finally:
            running.terminate()
            assert running.wait(timeout=30) == 0, (folder / "log").read_text()
