# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that the publisher follows upgrades and downgrades of the API server behind one address, without a restart.

Two real API servers share one etcd, and a proxy forwards each connection to one of them. In `make test` the older one
is the pinned Kubernetes that emulates the oldest release: it has that release's feature gates but its own validation.
In `make prove` it is the oldest release itself, which accepts counters only in the slices of the devices that use
them. Kubernetes supports API servers one minor version apart. The test uses a larger gap, because these two releases
are built anyway and accept the fewest slices of each other. Both store ResourceSlices in a version that the other
reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from dra_driver.api.client import ApiClient
from dra_driver.api.resources import ResourceApi
from dra_driver.core.model import Taint
from dra_driver.core.vendors.nvidia import offers
from dra_driver.metrics import Metrics
from dra_driver.publish import publisher as module
from dra_driver.publish.publisher import Content, Publisher

from tests.bench.api_server import OLDEST_SERVED, ApiServer, Served

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "core"))

import board_model

DRIVER, NODE = "gpu.nvidia.com", "node-1"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
WAIT_SECONDS = 120.0
GATES = {"DRAPartitionableDevices": True, "DRADeviceTaints": True}
EMULATED = "--emulated-version=1.34"
#: The older server without and with the gates, and whether it requires counters in the slices of their devices.
OLD = [
    pytest.param(Served(gates={}, options=(EMULATED,)), False, id="emulated"),
    pytest.param(OLDEST_SERVED, True, id="oldest", marks=pytest.mark.prove),
]


class Proxy:
    """One address. New connections go to the targets in turn; open connections end when the targets change."""

    def __init__(self) -> None:
        self._turns = itertools.cycle([0])
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept connections until the context ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            self.drop()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def lead_to(self, *urls: str) -> None:
        """Forward new connections to these servers in turn, and end the open ones."""
        self._turns = itertools.cycle([int(url.rpartition(":")[2]) for url in urls])
        self.drop()

    def drop(self) -> None:
        """End all connections."""
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            back, other = await asyncio.open_connection("127.0.0.1", next(self._turns))
            self._open.add(other)
            await asyncio.gather(_copy(reader, other), _copy(back, writer))
        except OSError:
            pass  # one of the two has ended the connection
        finally:
            for each in (writer, other):
                if each is not None:
                    self._open.discard(each)
                    each.transport.abort()
            self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof() if writer.can_write_eof() else writer.close()


@dataclass
class Scene:
    """A publisher behind the proxy, and a client of the newer server that reads the published slices."""

    proxy: Proxy
    publisher: Publisher
    direct: ApiClient
    problems: list[str]
    content: Content

    def change(self, value: str) -> None:
        """Change all devices and the taint, so that the publisher has to write each slice."""
        changed = tuple(
            replace(
                offer,
                attributes={**offer.attributes, "change": value},
                taints=tuple(replace(taint, value=value) for taint in offer.taints),
            )
            for offer in self.content.offers
        )
        self.content = replace(self.content, offers=changed)
        self.publisher.set_content(self.content)

    async def slices(self) -> list[Mapping[str, Any]]:
        """Return the specs of the newest generation, as the newer server shows them."""
        items = (await self.direct.get(SLICES))["items"]
        newest = max((item["spec"]["pool"]["generation"] for item in items), default=0)
        return [item["spec"] for item in items if item["spec"]["pool"]["generation"] == newest]

    async def until(self, what: str, accepted: Callable[[Sequence[Mapping[str, Any]]], bool]) -> None:
        """Wait until the pool is complete and accepted, and the publisher has nothing to do."""
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while True:
            specs = await self.slices()
            if _is_complete(specs) and accepted(specs) and self.publisher.is_current:
                return
            found = {name: sorted(device) for name, device in _devices(specs).items()}
            assert asyncio.get_running_loop().time() < deadline, (
                what,
                self.publisher.problem,
                self.problems[-3:],
                found,
            )
            await asyncio.sleep(0.1)

    def all_are_published(self, beside: bool) -> Callable[[Sequence[Mapping[str, Any]]], bool]:
        """Return a check for slices with all devices, counters, and taints. The flag requires counters in the slices
        of their devices.
        """
        wanted = {
            offer.name: (
                bool(offer.all_counters),
                [each.value for each in offer.taints],
                offer.attributes.get("change"),
            )
            for offer in self.content.offers
        }

        def accepted(specs: Sequence[Mapping[str, Any]]) -> bool:
            found = {
                name: (
                    "consumesCounters" in device,
                    [each["value"] for each in device.get("taints", ())],
                    device["attributes"].get("change", {}).get("string"),
                )
                for name, device in _devices(specs).items()
            }
            with_counters = [spec for spec in specs if spec.get("sharedCounters")]
            return found == wanted and [bool(spec.get("devices")) for spec in with_counters] == [beside]

        return accepted


def _devices(specs: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {device["name"]: device for spec in specs for device in spec.get("devices") or ()}


def _is_complete(specs: Sequence[Mapping[str, Any]]) -> bool:
    return bool(specs) and all(spec["pool"]["resourceSliceCount"] == len(specs) for spec in specs)


def _only_devices_without_gates(specs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether only the devices that need no feature gate are published: the whole dynamic GPU and the GPU
    without MIG.
    """
    return set(_devices(specs)) == {"gpu-0", "gpu-2"} and not any(spec.get("sharedCounters") for spec in specs)


def content() -> Content:
    """Return a GPU with all its partitions, one with a taint, and one that needs no feature gate."""
    gpus = [board_model.device(name, index) for index, name in enumerate(("h100-80", "l4", "t4"))]
    found = [offer for gpu in gpus for offer in offers.offers(gpu, dynamic=True)]
    taints = (Taint("gpu.nvidia.com/xid", "NoSchedule", "first"),)
    tainted = tuple(replace(offer, taints=taints) if offer.device_uuid == gpus[1].uuid else offer for offer in found)
    return Content(tainted, tuple(offers.counter_set(gpu) for gpu in gpus[:1]))


@contextlib.asynccontextmanager
async def publishing(server: ApiServer, folder: Path) -> AsyncIterator[Scene]:
    """Run a publisher behind a proxy until the context ends. It must not stop earlier."""
    proxy = Proxy()
    async with proxy.running():
        server.write_kubeconfig(folder / "proxy.json", proxy.url)
        direct, client = ApiClient(str(server.kubeconfig)), ApiClient(str(folder / "proxy.json"))
        problems: list[str] = []
        publisher = Publisher(
            api=ResourceApi(client),
            driver=DRIVER,
            pool=NODE,
            node_name=NODE,
            metrics=Metrics(),
            report_problem=lambda _reason, message: problems.append(message),
        )
        await direct.request("POST", "/api/v1/nodes", body={"metadata": {"name": NODE}})
        task = asyncio.ensure_future(publisher.run())
        try:
            yield Scene(proxy, publisher, direct, problems, content())
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.gather(client.close(), direct.close())


@pytest.mark.parametrize(("old", "beside"), OLD)
def test_publisher_follows_upgrades_and_downgrades_of_the_api_server(
    old: Served, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ApiServer(tmp_path)
    monkeypatch.setattr(module, "CHECK_SECONDS", 1.0)
    monkeypatch.setattr(module, "CHECK_INTERVAL", (1.0, 2.0))
    monkeypatch.setattr("dra_driver.api.watching.RETRY_FIRST", 0.5)

    async def scenario(without: str, gated: str) -> None:
        new = server.url
        async with publishing(server, tmp_path) as scene:
            scene.proxy.lead_to(without)
            scene.publisher.set_content(scene.content)
            await scene.until("published without gates", _only_devices_without_gates)
            assert any("DRADeviceTaints" in text for text in scene.problems)
            assert any("DRAPartitionableDevices" in text for text in scene.problems)
            everything = scene.all_are_published
            for url, counters_beside in ((new, False), (without, None), (gated, beside), (new, False), (gated, beside)):
                scene.proxy.lead_to(url)
                accepted = _only_devices_without_gates if counters_beside is None else everything(counters_beside)
                await scene.until(f"published by {url} after the switch", accepted)
            # From here on the end of a watch does not make the publisher read the version again: only the response to
            # a write does.
            monkeypatch.setattr(module, "CHECK_SECONDS", 1e6)
            for number, (url, counters_beside) in enumerate(((new, False), (gated, beside), (new, False))):
                scene.proxy.lead_to(url)
                scene.change(f"switch-{number}")
                await scene.until(f"published by {url} after a write", everything(counters_beside))
            monkeypatch.setattr(module, "CHECK_SECONDS", 1.0)
            for last, counters_beside in ((gated, beside), (new, False)):
                for number in range(10):
                    scene.proxy.lead_to(new, gated if number % 2 else without)
                    scene.change(f"mixed-{number}")
                    await asyncio.sleep(0.3)
                scene.proxy.lead_to(last)
                await scene.until(f"published by {last} after both", everything(counters_beside))

    with server.running(), server.beside(old) as without, server.beside(replace(old, gates=GATES)) as gated:
        asyncio.run(scenario(without, gated))
