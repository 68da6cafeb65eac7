# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The sockets as a kubelet uses them: real unix sockets and gRPC, with both API versions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from dra_driver.claims.call_results import Outcome
from dra_driver.claims.store.records import ClaimRecord, ClaimReference, DeviceRecord
from dra_driver.kubelet import sockets
from dra_driver.kubelet.health import DeviceReport, DeviceState
from dra_driver.kubelet.server import PluginServer
from dra_driver.kubelet.sockets import DirectoryReplaced, SocketError
from dra_driver.protocol import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    generate,
    plugin_registration_pb2,
    plugin_registration_pb2_grpc,
)
from dra_driver.supervisors.driver_state import keep_running

CLAIM = {"namespace": "default", "name": "a", "uid": "u1"}


class Recorded:
    """A claim handler that returns one device, or an error for the uid "bad"."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[ClaimReference]]] = []
        self.gate: asyncio.Event | None = None
        self.error, self.unprepare_error = "no room", "in use"

    async def prepare(self, references: Sequence[ClaimReference]) -> dict[str, Outcome]:
        self.calls.append(("prepare", list(references)))
        if self.gate:
            await self.gate.wait()
        device = DeviceRecord(
            request="gpu/first",
            pool="node-1",
            name="gpu-0",
            device_uuid="GPU-0",
            kind="device",
            share_id="11111111-1111-1111-1111-111111111111",
            cdi_id="k8s.gpu.nvidia.com/claim=u1-gpu-0",
        )
        return {
            reference.uid: Outcome(error=self.error)
            if reference.uid == "bad"
            else Outcome(ClaimRecord(reference.uid, "default", "a", "prepared", "b", 0.0, (device,)))
            for reference in references
        }

    async def unprepare(self, references: Sequence[ClaimReference]) -> dict[str, Outcome]:
        self.calls.append(("unprepare", list(references)))
        return {
            reference.uid: Outcome(error=self.unprepare_error if reference.uid == "bad" else "")
            for reference in references
        }


class Health:
    """Devices whose health a test sets."""

    def __init__(self) -> None:
        self.devices: tuple[DeviceReport, ...] = (DeviceReport("node-1", "gpu-0", DeviceState.HEALTHY, "", 5.0),)
        self.event = asyncio.Event()

    def reports(self) -> tuple[DeviceReport, ...]:
        return self.devices

    async def changed(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.event.wait(), seconds)
        self.event.clear()


def server(directory: Path, claims: Any, health: Health | None = None) -> PluginServer:
    return PluginServer(
        claims,
        health=health or Health(),
        driver="gpu.nvidia.com",
        service_path=str(directory / "plugins/gpu.nvidia.com/dra.sock"),
        registration_path=str(directory / "plugins_registry/gpu.nvidia.com-reg.sock"),
    )


def run(directory: Path, scenario: Any) -> None:
    async def main() -> None:
        claims = Recorded()
        plugin = server(directory, claims)
        await plugin.start()
        try:
            await scenario(plugin, claims)
        finally:
            await plugin.stop()

    asyncio.run(main())


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a path short enough for the names of sockets."""
    directory = tmp_path_factory.mktemp("k")
    assert len(str(directory)) < 50
    return directory


@pytest.mark.parametrize(
    ("messages", "stubs"),
    [(dra_health_v1_pb2, dra_health_v1_pb2_grpc), (dra_health_v1alpha1_pb2, dra_health_v1alpha1_pb2_grpc)],
)
def test_kubelet_gets_device_health_and_its_changes(
    short: Path, monkeypatch: pytest.MonkeyPatch, messages: Any, stubs: Any
) -> None:
    monkeypatch.setattr("dra_driver.kubelet.health.REPEAT_SECONDS", 0.3)
    health = Health()

    async def main() -> None:
        plugin = server(short, Recorded(), health)
        await plugin.start()
        async with grpc.aio.insecure_channel(f"unix:{short}/plugins/gpu.nvidia.com/dra.sock") as channel:
            stream = stubs.DRAResourceHealthStub(channel).NodeWatchResources(messages.NodeWatchResourcesRequest())
            (first,) = (await stream.read()).devices
            assert (first.device.pool_name, first.device.device_name) == ("node-1", "gpu-0")
            assert (first.health, first.last_updated_time, first.health_check_timeout_seconds) == (1, 5, 30)
            assert (await stream.read()).devices == [first], "it is said again before it grows old"
            health.devices = (
                DeviceReport("node-1", "gpu-0", DeviceState.UNHEALTHY, "Replace it. " + "x" * 2000, 6.0),
                DeviceReport("node-1", "gpu-1", DeviceState.UNKNOWN),
            )
            health.event.set()
            while len((changed := await stream.read()).devices) < 2:
                pass
            assert [each.health for each in changed.devices] == [2, 0]
            assert len(changed.devices[0].message) == 1024 and changed.devices[0].message.startswith("Replace it.")
            await asyncio.wait_for(plugin.stop(), 5)  # stop does not wait for an open stream
            while (last := await stream.read()) is not grpc.aio.EOF:
                assert len(last.devices) == 2

    asyncio.run(main())


def test_registration_follows_the_kubelet_protocol(short: Path) -> None:
    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        async with grpc.aio.insecure_channel(f"unix:{short}/plugins_registry/gpu.nvidia.com-reg.sock") as channel:
            stub = plugin_registration_pb2_grpc.RegistrationStub(channel)
            info = await stub.GetInfo(plugin_registration_pb2.InfoRequest())
            assert (info.type, info.name) == ("DRAPlugin", "gpu.nvidia.com")
            assert list(info.supported_versions) == [
                "v1.DRAPlugin",
                "v1beta1.DRAPlugin",
                "v1.DRAResourceHealth",
                "v1alpha1.DRAResourceHealth",
            ]
            assert Path(info.endpoint).is_socket()
            assert not plugin.registered
            await stub.NotifyRegistrationStatus(plugin_registration_pb2.RegistrationStatus(plugin_registered=True))
            assert plugin.registered
            with pytest.raises(grpc.aio.AioRpcError, match="no such version"):
                await stub.NotifyRegistrationStatus(
                    plugin_registration_pb2.RegistrationStatus(plugin_registered=False, error="no such version")
                )
            assert not plugin.registered

    run(short, scenario)


def test_prepare_and_unprepare_in_v1(short: Path) -> None:
    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        async with grpc.aio.insecure_channel(f"unix:{short}/plugins/gpu.nvidia.com/dra.sock") as channel:
            stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
            bad = {"namespace": "default", "name": "b", "uid": "bad"}
            answer = await stub.NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest(claims=[CLAIM, bad]))
            assert sorted(answer.claims) == ["bad", "u1"]
            assert answer.claims["bad"].error == "no room"
            (device,) = answer.claims["u1"].devices
            assert list(device.request_names) == ["gpu"]
            assert (device.pool_name, device.device_name) == ("node-1", "gpu-0")
            assert list(device.cdi_device_ids) == ["k8s.gpu.nvidia.com/claim=u1-gpu-0"]
            assert device.share_id == "11111111-1111-1111-1111-111111111111"
            removed = await stub.NodeUnprepareResources(dra_v1_pb2.NodeUnprepareResourcesRequest(claims=[CLAIM, bad]))
            assert {uid: entry.error for uid, entry in removed.claims.items()} == {"u1": "", "bad": "in use"}
            assert claims.calls[0] == (
                "prepare",
                [ClaimReference("default", "a", "u1"), ClaimReference("default", "b", "bad")],
            )

    run(short, scenario)


def test_errors_to_the_kubelet_have_4_kib_at_most(short: Path) -> None:
    """Errors are limited to 4 KiB. Unpaired surrogates are replaced, because they would make the whole response invalid."""

    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        claims.error = claims.unprepare_error = "\ud800" + "ä" * 1_000_000
        bad = {"namespace": "default", "name": "b", "uid": "bad"}
        async with grpc.aio.insecure_channel(f"unix:{short}/plugins/gpu.nvidia.com/dra.sock") as channel:
            stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
            answer = await stub.NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest(claims=[CLAIM, bad]))
            removed = await stub.NodeUnprepareResources(dra_v1_pb2.NodeUnprepareResourcesRequest(claims=[bad]))
            assert answer.claims["u1"].devices
            for each in (answer, removed):
                error = each.claims["bad"].error
                assert error.startswith("?ä") and 4000 < len(error.encode()) <= 4096

    run(short, scenario)


def test_v1beta1_and_the_full_service_names(short: Path) -> None:
    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        async with grpc.aio.insecure_channel(f"unix:{short}/plugins/gpu.nvidia.com/dra.sock") as channel:
            stub = dra_v1beta1_pb2_grpc.DRAPluginStub(channel)
            answer = await stub.NodePrepareResources(dra_v1beta1_pb2.NodePrepareResourcesRequest(claims=[CLAIM]))
            assert answer.claims["u1"].devices[0].device_name == "gpu-0"
            for version in ("v1", "v1beta1"):
                call = channel.unary_unary(f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources")
                assert await call(b"") == b""

    run(short, scenario)


def test_start_replaces_sockets_of_a_killed_driver(short: Path) -> None:
    for name in ("plugins/gpu.nvidia.com/dra.sock", "plugins_registry/gpu.nvidia.com-reg.sock"):
        path = short / name
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))

    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        for name in ("plugins/gpu.nvidia.com/dra.sock", "plugins_registry/gpu.nvidia.com-reg.sock"):
            assert (short / name).is_socket()
            assert (short / name).stat().st_mode & 0o777 == 0o600

    run(short, scenario)
    assert not list((short / "plugins_registry").iterdir())
    assert not list((short / "plugins/gpu.nvidia.com").iterdir())


def test_start_removes_unnamed_sockets_of_a_killed_driver(short: Path) -> None:
    """A driver was killed between creating a socket and renaming it: the next start removes it. Those of other instances stay."""
    paths = [short / name for name in ("plugins/gpu.nvidia.com/dra.sock", "plugins_registry/gpu.nvidia.com-reg.sock")]
    others = [sockets.private_path(str(path.with_name(f"other-{path.name}"))) for path in paths]
    for path, private in [(Path(sockets.private_path(str(path))), other) for path, other in zip(paths, others)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name in (str(path), private):
            with socket.socket(socket.AF_UNIX) as stale:
                stale.bind(name)

    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        for path, other in zip(paths, others):
            hidden = [str(each) for each in path.parent.iterdir() if each.name.startswith(".")]
            assert path.is_socket() and hidden == [other]

    run(short, scenario)


def test_start_with_a_file_at_the_socket_path_keeps_the_file(short: Path) -> None:
    path = short / "plugins_registry/gpu.nvidia.com-reg.sock"
    path.parent.mkdir(parents=True)
    path.write_text("precious")

    async def main() -> None:
        plugin = server(short, Recorded())
        with pytest.raises(SocketError, match="is no socket"):
            await plugin.start()
        await plugin.stop()

    asyncio.run(main())
    assert path.read_text() == "precious"


def test_stopping_withdraws_the_registration_first_and_finishes_calls(short: Path) -> None:
    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        claims.gate = asyncio.Event()
        async with grpc.aio.insecure_channel(f"unix:{short}/plugins/gpu.nvidia.com/dra.sock") as channel:
            stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
            call = asyncio.ensure_future(
                stub.NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest(claims=[CLAIM]))
            )
            while not claims.calls:
                await asyncio.sleep(0.01)
            stopping = asyncio.ensure_future(plugin.stop())
            while (short / "plugins_registry/gpu.nvidia.com-reg.sock").exists():
                await asyncio.sleep(0.01)
            assert not stopping.done()
            claims.gate.set()
            assert (await call).claims["u1"].error == ""
            await stopping

    run(short, scenario)


def test_removed_sockets_are_created_again(short: Path) -> None:
    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        watcher = asyncio.ensure_future(plugin.watch_sockets(interval=0.02))
        for name in ("plugins_registry/gpu.nvidia.com-reg.sock", "plugins/gpu.nvidia.com/dra.sock"):
            (short / name).unlink()
            for _round in range(200):
                await asyncio.sleep(0.02)
                if (short / name).exists():
                    break
            assert (short / name).is_socket()
        async with grpc.aio.insecure_channel(f"unix:{short}/plugins/gpu.nvidia.com/dra.sock") as channel:
            stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
            request = dra_v1_pb2.NodePrepareResourcesRequest(claims=[CLAIM])
            answer = await stub.NodePrepareResources(request, wait_for_ready=True)
            assert answer.claims["u1"].error == ""
        watcher.cancel()

    run(short, scenario)


def test_replaced_directory_gets_the_socket_again(short: Path) -> None:
    """The kubelet's directory is replaced, as by kubeadm reset: the name is the same, the inode is not."""

    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        watcher = asyncio.ensure_future(plugin.watch_sockets(interval=0.02))
        directory = short / "plugins_registry"
        directory.rename(short / "former")
        directory.mkdir()
        while not (directory / "gpu.nvidia.com-reg.sock").exists():
            assert not watcher.done()
            await asyncio.sleep(0.02)
        async with grpc.aio.insecure_channel(f"unix:{directory}/gpu.nvidia.com-reg.sock") as channel:
            stub = plugin_registration_pb2_grpc.RegistrationStub(channel)
            info = await stub.GetInfo(plugin_registration_pb2.InfoRequest(), wait_for_ready=True)
            assert info.name == "gpu.nvidia.com"
        watcher.cancel()

    run(short, scenario)


def test_unwritable_directory_ends_the_process(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mount namespace of a service the new directory is read-only: the process ends, because only a new process can write there."""

    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        def refuse(path: str) -> None:
            raise SocketError("read-only")

        monkeypatch.setattr(sockets, "prepare_path", refuse)
        (short / "plugins_registry").rename(short / "former")
        with pytest.raises(DirectoryReplaced, match="plugins_registry was removed or created again"):
            await asyncio.wait_for(plugin.watch_sockets(interval=0.02), 10)

    run(short, scenario)


def test_removed_state_directory_ends_the_process(short: Path) -> None:
    async def scenario(plugin: PluginServer, claims: Recorded) -> None:
        (short / "plugins/gpu.nvidia.com").rename(short / "former")
        (short / "plugins/gpu.nvidia.com").mkdir()
        with pytest.raises(DirectoryReplaced, match="state was removed"):
            await asyncio.wait_for(plugin.watch_sockets(interval=0.02), 10)

    run(short, scenario)


def test_part_that_needs_a_new_process_is_not_restarted() -> None:
    async def main() -> None:
        async def part() -> None:
            raise DirectoryReplaced("gone")

        with pytest.raises(DirectoryReplaced):
            await asyncio.wait_for(keep_running("sockets", part), 10)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["plugins/gpu.nvidia.com/dra.sock", "plugins_registry/gpu.nvidia.com-reg.sock"])
def test_start_with_a_served_socket_keeps_it_and_names_the_process(short: Path, name: str) -> None:
    path = short / name
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()

        async def main() -> None:
            plugin = server(short, Recorded())
            try:
                with pytest.raises(SocketError, match=rf"{path} is served by process {os.getpid()} \(") as found:
                    await plugin.start()
                assert found.value.code == "socket-taken"
            finally:  # a started server keeps the process from ending
                await plugin.stop()

        asyncio.run(main())
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_stop_keeps_the_sockets_of_the_next_server(short: Path) -> None:
    paths = [short / "plugins/gpu.nvidia.com/dra.sock", short / "plugins_registry/gpu.nvidia.com-reg.sock"]
    others = []

    async def main() -> None:
        plugin = server(short, Recorded())
        await plugin.start()
        for path in paths:
            other = socket.socket(socket.AF_UNIX)
            others.append(other)
            other.bind(f"{path}.new")
            other.listen()
            Path(f"{path}.new").rename(path)
        await plugin.stop()

    asyncio.run(main())
    for path, other in zip(paths, others):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        other.close()
        assert os.listdir(path.parent) == [path.name]


def test_start_with_a_too_long_path_is_rejected() -> None:
    sockets.check_length("/" + "x" * 106, "kubelet_root")
    with pytest.raises(SocketError, match=r"108 bytes.*107.*kubelet_root"):
        sockets.check_length("/" + "x" * 107, "kubelet_root")
    with pytest.raises(SocketError, match="Shorten"):
        PluginServer(Recorded(), health=Health(), driver="d", service_path="/" + "é" * 60, registration_path="/r")


def test_one_process_at_a_time(short: Path) -> None:
    first = sockets.lock_instance(str(short / "state"))
    with pytest.raises(SocketError, match=f"pid {os.getpid()}") as found:
        sockets.lock_instance(str(short / "state"))
    assert found.value.code == "already-running"
    first.close()
    sockets.lock_instance(str(short / "state")).close()


def test_generated_code_is_current(tmp_path: Path) -> None:
    written = generate.generate(tmp_path)
    assert len(written) == 21
    for name in written:
        assert (tmp_path / name).read_text() == (generate.SOURCES / name).read_text(), f"generate {name} again"


def test_field_numbers_are_the_kubelets() -> None:
    """The encoded fields are compared with the bytes that the public protocol description gives for the kubelet."""
    claim = b"\x0a\x02ns" + b"\x12\x03uid" + b"\x1a\x04name"
    request = b"\x0a" + bytes([len(claim)]) + claim
    for messages in (dra_v1_pb2, dra_v1beta1_pb2):
        (parsed,) = messages.NodePrepareResourcesRequest.FromString(request).claims
        assert (parsed.namespace, parsed.uid, parsed.name) == ("ns", "uid", "name")
        device = messages.Device(request_names=["r"], pool_name="p", device_name="d", cdi_device_ids=["c"])
        assert device.SerializeToString() == b"\x0a\x01r\x12\x01p\x1a\x01d\x22\x01c"
    shared = dra_v1_pb2.Device(share_id="s")
    assert shared.SerializeToString() == b"\x2a\x01s"
    info = plugin_registration_pb2.PluginInfo(type="t", name="n", endpoint="e", supported_versions=["v"])
    assert info.SerializeToString() == b"\x0a\x01t\x12\x01n\x1a\x01e\x22\x01v"
    assert plugin_registration_pb2.RegistrationStatus.FromString(b"\x08\x01\x12\x01e").error == "e"
