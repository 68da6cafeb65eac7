# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Prometheus and promtool from the distribution's package, and a server that runs for a test."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.debian import programs

T = TypeVar("T")


def promtool(*arguments: object, text: str | None = None) -> str:
    """Run promtool, assert that it succeeds, and return its output."""
    done = subprocess.run(
        [programs("prometheus") / "promtool", *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class Server:
    """A Prometheus in a directory that reads rules and targets from files every second."""

    def __init__(self, folder: Path, *, rules: Path, targets: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "accelerators", "file_sd_configs": [{"files": [str(targets)]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        promtool("check", "config", folder / "prometheus.yml")

    def start(self) -> None:
        """Start it and wait until it is ready."""
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    programs("prometheus") / "prometheus",
                    f"--config.file={self.folder}/prometheus.yml",
                    f"--storage.tsdb.path={self.folder}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )
        self.until("Prometheus is ready", lambda: self._get("/-/ready"))

    def stop(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate an expression now; an invalid one is an error."""
        answer = json.loads(self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def firing(self) -> set[str]:
        """Return the names of the firing alerts."""
        found = json.loads(self._get("/api/v1/alerts"))["data"]["alerts"]
        return {str(each["labels"]["alertname"]) for each in found if each["state"] == "firing"}

    def until(self, what: str, probe: Callable[[], T], seconds: float = 180) -> T:
        """Poll until the answer is a true value."""
        deadline, last = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                last = probe()
            except OSError as error:
                last = error
            else:
                if last:
                    return last
            time.sleep(0.2)
        raise AssertionError(
            f"waited {seconds} s for: {what}; last: {last!r}\n{(self.folder / 'log').read_text()[-3000:]}"
        )

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return bytes(answer.read())
