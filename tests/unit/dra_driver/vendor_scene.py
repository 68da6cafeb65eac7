# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A whole driver of one vendor with model GPUs, a model API server, and the calls of a kubelet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import grpc
import grpc.aio
from api_model import ApiModel, kubeconfig
from backend_model import DRIVER, ModelBackend, ModelGpus
from dra_driver import stages
from dra_driver.api.client import ApiClient
from dra_driver.api.events import EventRecorder
from dra_driver.api.resources import ResourceApi
from dra_driver.config import parse
from dra_driver.core.host.system import System
from dra_driver.kubelet.sockets import SocketPaths, paths_of
from dra_driver.metrics import Metrics
from dra_driver.protocol import dra_v1_pb2, dra_v1_pb2_grpc, plugin_registration_pb2, plugin_registration_pb2_grpc
from dra_driver.status_command import query_status
from dra_driver.vendor import VendorDriver
from machine_model import Claims


class Scene:
    """One driver and its environment. start() and stop() can be called repeatedly."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory
        self.api = ApiModel()
        self.backend = ModelBackend(ModelGpus(directory / "gpus.json"))
        self.cluster = Claims()
        self.driver: VendorDriver
        self.boot = "boot-1"
        self.settings: dict[str, Any] = {}
        self.metrics: Metrics = Metrics()
        self.observer: Callable[[str, str, str, float], None] | None = None
        self.instance = ""

    @property
    def paths(self) -> SocketPaths:
        """Return the socket paths of this instance."""
        kubelet = f"{self.folder}/kubelet"
        return paths_of(f"{kubelet}/plugins/{DRIVER}", f"{kubelet}/plugins_registry", DRIVER, self.instance)

    def beside(self, instance: str) -> Scene:
        """Return another instance of the same driver on the same node, not started."""
        other = Scene(self.folder)
        other.api, other.cluster, other.boot, other.instance = self.api, self.cluster, self.boot, instance
        other.settings = self.settings
        return other

    async def start(self, *, serves: bool = True) -> None:
        """Start the driver. With ``serves`` wait until it serves its sockets."""
        root = self.folder / "root"
        (root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
        (root / "proc/sys/kernel/random/boot_id").write_text(self.boot)
        file = self.folder / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(self.api.url or "http://127.0.0.1:1")))
        self.client = ApiClient(str(file), observer=self.observer)
        self.events = EventRecorder(self.client, component="test", node_name="node-1")
        self.driver = VendorDriver(
            configuration=replace(
                parse(
                    {
                        "node_name": "node-1",
                        "kubelet_root": str(self.folder / "kubelet"),
                        "layout": [{"match": {}, "mode": "dynamic"}],
                        "inventory_interval": 1,
                        **self.settings,
                    }
                ),
                instance=self.instance,
            ),
            backend=self.backend,
            system=System(str(root)),
            api=ResourceApi(self.client),
            events=self.events,
            metrics=self.metrics,
            report_stage=stages.report_stage,
        )
        self.started = asyncio.Event()
        self.task = asyncio.ensure_future(self.driver.run(self.started))
        if serves:
            await asyncio.wait_for(self.started.wait(), 30)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.events.close()
        await self.client.close()

    async def call(self, method: str, name: str, *devices: str) -> str:
        if devices:
            self.cluster.allocate(name, *devices)
            self.api.claims[name] = self.cluster.claims["default", name]
        claim = dra_v1_pb2.Claim(namespace="default", name=name, uid=f"0uid-{name}")
        async with grpc.aio.insecure_channel(f"unix:{self.paths.service}") as channel:
            stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
            request = getattr(dra_v1_pb2, f"{method}Request")(claims=[claim])
            answer = await getattr(stub, method)(request)
        return str(answer.claims[claim.uid].error)

    async def register(self) -> None:
        """Register the driver, as the kubelet does when it finds the socket."""
        async with grpc.aio.insecure_channel(f"unix:{self.paths.registration}") as channel:
            stub = plugin_registration_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            await stub.NotifyRegistrationStatus(plugin_registration_pb2.RegistrationStatus(plugin_registered=True))

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(query_status, DRIVER, self.paths.status)

    async def prepare(self, name: str, *devices: str) -> str:
        return await self.call("NodePrepareResources", name, *devices)

    async def unprepare(self, name: str) -> str:
        return await self.call("NodeUnprepareResources", name)

    @staticmethod
    async def until(condition: Any, seconds: float = 30.0) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)

    @staticmethod
    async def eventually(answer: Callable[[], Awaitable[str]], seconds: float = 30.0) -> str:
        """Repeat the call until it succeeds, as the kubelet does."""
        deadline = asyncio.get_running_loop().time() + seconds
        while (error := await answer()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        return error

    def devices(self) -> list[str]:
        return [device["name"] for item in self.api.slices.values() for device in item["spec"].get("devices", ())]

    def specs(self) -> dict[str, dict[str, Any]]:
        """Return the published devices by name."""
        return {
            device["name"]: device for item in self.api.slices.values() for device in item["spec"].get("devices", ())
        }

    def partitions(self) -> list[tuple[int, int, int]]:
        return [partition.key for device in self.backend.gpus.devices() for partition in device.partitions]

    def cdi(self) -> list[Path]:
        return sorted((self.folder / "root/var/run/cdi").glob("*.json"))


def run(directory: Path, scenario: Any) -> None:
    async def main() -> None:
        scene = Scene(directory)
        try:
            await scenario(scene)
        finally:
            if hasattr(scene, "task"):
                await scene.stop()
            await scene.api.stop()

    asyncio.run(main())
