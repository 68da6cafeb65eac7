# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Measure the report of a fleet of 5,000 nodes with 208 devices each: memory of the processes, and response times of
the webhook.

The controller runs as a process and reads the unit tests' API server with a generated fleet, which is another process.
``DRA_ACCELERATORS_FLEET_NODES`` sets the number of nodes. Durations are not asserted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from dra_driver.controller.reader_authorization import PATH as REPORT
from dra_driver.controller.serving_certificate import utc_now
from dra_driver.controller.webhook import PATH as WEBHOOK
from dra_driver.core.certificates import Authorities, create_ca

from tests.bench import fleet, report_server
from tests.bench.api_server import free_port
from tests.bench.figures import Figures, percentile
from tests.bench.test_fleet import FLEET, Controller, background_task

DEVICES = 208
#: Maximum memory of the report process and of the controller, in KiB.
MOST_KIB = 1_000_000
REST_SECONDS, REVIEWS_A_SECOND, LONGEST_SECONDS = 20, 20, 7200
SECRET = "/api/v1/namespaces/default/secrets/dra-accelerators-controller-authority"


def review() -> bytes:
    """Return the request of the API server about a new claim with a configuration."""
    config = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}},
    }
    request = {"name": "one", "exactly": {"deviceClassName": fleet.DRIVER}}
    opaque = {"opaque": {"driver": fleet.DRIVER, "parameters": config}}
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "new"},
        "spec": {"devices": {"requests": [request], "config": [opaque]}},
    }
    asked = {"uid": "42", "operation": "CREATE", "object": claim}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}).encode()


def peak(process: int) -> int:
    """Return the maximum memory of a process so far, in KiB; 0 for an ended process."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def children(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        texts = [each.read_text() for each in Path(f"/proc/{process}/task").glob("*/children")]
        return [int(each) for text in texts for each in text.split()]
    return []


@contextlib.asynccontextmanager
async def reviewing(session: aiohttp.ClientSession, url: str) -> AsyncIterator[list[float]]:
    """Send reviews to the webhook during the context; yield the list of response times in seconds."""
    taken: list[float] = []
    body = review()

    async def one() -> None:
        began = time.perf_counter()
        async with session.post(url, data=body) as answer:
            assert (await answer.json())["response"]["allowed"]
        taken.append(time.perf_counter() - began)

    async def send() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(one())
                await asyncio.sleep(1 / REVIEWS_A_SECOND)

    async with background_task(send()):
        yield taken


def test_report_of_a_large_fleet(tmp_path: Path, figures: Figures) -> None:
    authority = create_ca(utc_now(), 86400)
    secret = f"{SECRET}={json.dumps(Authorities(authority).to_data())}"
    command = [sys.executable, "-m", report_server.__name__, str(tmp_path), str(FLEET), secret]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            kubeconfig = Path(server.stdout.readline().strip())
            asyncio.run(scenario(tmp_path, kubeconfig, authority.certificate.decode(), figures))
        finally:
            server.terminate()


async def scenario(folder: Path, kubeconfig: Path, authority: str, figures: Figures) -> None:
    address = f"127.0.0.1:{free_port()}"
    webhook = {"address": address, "names": ["127.0.0.1"], "report": True}
    controller = Controller(folder, kubeconfig, webhook=webhook)
    trusting = ssl.create_default_context(cadata=authority)
    no_limit = aiohttp.ClientTimeout(total=LONGEST_SECONDS)
    try:
        connector = aiohttp.TCPConnector(ssl=trusting, limit=0)
        async with aiohttp.ClientSession(f"https://{address}", connector=connector, timeout=no_limit) as session:
            ready = 'nodes{release="0.1.0-00000001",state="ready"}'
            await controller.until("all seen", lambda: controller.value(ready) == FLEET, LONGEST_SECONDS)
            now, most = controller.memory()
            async with reviewing(session, WEBHOOK) as resting:
                await asyncio.sleep(REST_SECONDS)
            began = time.monotonic()
            async with reviewing(session, WEBHOOK) as answers:
                peaks, text = await report(session, controller, folder)
            took = time.monotonic() - began
        assert sum(map(int, re.findall(r'"published":(\d+)', text))) == FLEET * DEVICES, text[:2000]
        assert max(*peaks, controller.memory()[1]) < MOST_KIB, (peaks, controller.memory())
        rest, during = (percentile(taken, 0.99) for taken in (resting, answers))
        figures.add_line(
            f"report of {FLEET} nodes with {DEVICES} devices each and {FLEET * report_server.CLAIMS_OF_NODE} claims: {len(text) / 1e6:.0f} MB in "
            f"{took:.0f} s; memory at most {max(peaks) / 1024:.0f} MiB, and {controller.memory()[1] / 1024:.0f} MiB of the controller "
            f"({now / 1024:.0f} MiB before, {most / 1024:.0f} MiB at most); webhook during the report p99 {during * 1e3:.0f} ms, "
            f"{during / rest:.1f} of that at rest ({rest * 1e3:.0f} ms), {max(answers) * 1e3:.0f} ms at most of {len(answers)} answers"
        )
    finally:
        controller.stop()


async def report(session: aiohttp.ClientSession, controller: Controller, folder: Path) -> tuple[list[int], str]:
    """Read the report; return the maximum memory in KiB of each process that created it, and the text."""
    peaks: dict[int, int] = {}

    async def watch_memory() -> None:
        while True:
            for each in children(controller.process.pid):
                peaks[each] = max(peaks.get(each, 0), peak(each))
            await asyncio.sleep(0.1)

    file = folder / "report.json"
    async with background_task(watch_memory()):
        async with session.get(REPORT, headers={"Authorization": "Bearer reader"}) as answer:
            with file.open("wb") as writing:
                async for part in answer.content.iter_chunked(1 << 20):
                    writing.write(part)
        text = file.read_text(encoding="utf-8")
        assert answer.status == 200, text[:2000]
    return list(peaks.values()), text
