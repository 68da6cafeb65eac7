# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A node with a driver: the driver's process, and a client in the role of the kubelet.

The driver is the released program with its configuration, on the node of node_namespaces.py: SQLite, gRPC over its
sockets, CDI files, and the vendor's own library (simulated). The API server is the small one of the unit tests, in a
thread of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml
from accelerator_simulator.library import Library, find_library
from api_model import ApiModel, kubeconfig
from dra_driver.core.health import repair_marks
from dra_driver.core.host.system import System
from dra_driver.core.store.prepared_claims import wake_driver
from dra_driver.kubelet.sockets import SocketPaths, paths_of
from dra_driver.protocol import dra_v1_pb2, dra_v1_pb2_grpc, plugin_registration_pb2, plugin_registration_pb2_grpc
from dra_driver.status_command import query_status
from dra_driver.supervisors.health import known_faults
from machine_model import Claims

from tests.chaos import node_namespaces
from tests.chaos.claim_kinds import STATIC, Kind
from tests.chaos.errors import Broken, CrashLoop
from tests.chaos.vendor import Vendor

PLUGINS = Path("/var/lib/kubelet/plugins")
REGISTRY = Path("/var/lib/kubelet/plugins_registry")
CDI = Path("/var/run/cdi")
COMPANIONS = Path("/run/dra-accelerators/companions")
CONFIGURATION = "/etc/dra-accelerators/driver.yaml"
KUBECONFIG = "/etc/dra-accelerators/kubeconfig"
LAUNCHER = Path(__file__).with_name("launcher.py")
#: The kubelet's timeout for a call, in seconds.
CALL_SECONDS = 45.0
START_SECONDS = 60.0


class Api:
    """The API server in a thread. ``claims`` are those of the cluster."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        # A connection that a killed driver closes is no error of the server.
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
        self.model = ApiModel(driver)
        self.model.act_as_controller()
        self.model.renews_sign = True
        self.allocated = Claims()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(self.model.start())
        self.port = int(self.model.url.rpartition(":")[2])
        self.is_serving = True

    def call(self, work: Any, seconds: float = 30) -> Any:
        """Run a coroutine in its thread and return the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def document(
        self, name: str, *results: str | Mapping[str, Any], config: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return a claim with its allocation, without storing it in the API server."""
        self.allocated.allocate(
            name, *results, uid=str(uuid.uuid5(uuid.NAMESPACE_DNS, name)), config=config, driver=self.driver
        )
        return self.allocated.claims["default", name]

    def allocate(self, name: str, *results: str | Mapping[str, Any], config: Sequence[Mapping[str, Any]] = ()) -> str:
        """Store a claim and its allocation, and return its UID."""
        claim = self.model.claims[name] = self.document(name, *results, config=config)
        return str(claim["metadata"]["uid"])

    def put(self, claim: dict[str, Any]) -> None:
        """Store a claim, and notify the watches."""

        async def write() -> None:
            self.model.put_claim(claim)

        self.call(write())

    def release_awaited(self) -> None:
        """Remove the allocations that pods wait for."""
        for name, claim in list(self.model.claims.items()):
            results = (claim["status"].get("allocation") or {"devices": {}})["devices"].get("results", ())
            if any(each.get("bindingConditions") for each in results):
                self.put({"metadata": dict(self.model.claims[name]["metadata"]), "status": {}})

    def clear_records(self) -> None:
        """Clear the recorded requests."""
        self.model.log.clear()
        self.model.headers.clear()
        self.model.events.clear()

    def stop_serving(self) -> None:
        """Stop answering."""
        self.is_serving = False
        self.call(self.model.stop())

    def resume_serving(self) -> None:
        """Answer again at the same address."""

        async def listen() -> None:
            from aiohttp import web

            runner = self.model._runner
            assert runner is not None
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()

        self.call(listen())
        self.is_serving = True


class Node:
    """The node of a vendor's hardware, with at most one running driver. A process creates it once.

    ``state`` is the driver's state directory, ``store`` its store.
    """

    def __init__(self, vendor: Vendor, library: Path, log: Path) -> None:
        node_namespaces.create_node(library, vendor)
        self.vendor, self.driver, self.kinds = vendor, vendor.driver, vendor.by_name
        self.state = PLUGINS / vendor.driver
        self.metadata = CDI / f"k8s.{vendor.driver}-metadata"
        self.store = self.state / "state.db"
        self.log = log
        self.api = Api(vendor.driver)
        self.silicon = Library(
            find_library(Path(vendor.simulated_vendor.folder), vendor.simulated_vendor), vendor.simulated_vendor
        )
        self.pid, self.instance = 0, ""
        self._bus = node_namespaces.start_bus()
        CDI.mkdir(parents=True, exist_ok=True)
        Path(KUBECONFIG).write_text(json.dumps(kubeconfig(self.api.model.url)), encoding="utf-8")
        self.configure()
        self.apply_layout()
        self._launcher = subprocess.Popen(
            [sys.executable, "-u", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._channel: grpc.Channel | None = None
        self._ended: dict[int, int] = {}

    def configure(self, **settings: Any) -> None:
        """Write the driver's configuration."""
        document = {
            "node_name": "node-1",
            "backends": [self.vendor.backend],
            "kubeconfig": KUBECONFIG,
            "layout": [dict(rule) for rule in self.vendor.layout],
            "inventory_interval": 2,
            **settings,
        }
        Path(CONFIGURATION).write_text(yaml.safe_dump(document), encoding="utf-8")

    def apply_layout(self) -> None:
        """Create the partitions of the layout, as at the node's boot."""
        rules = PLUGINS.parent / "layout.json"
        rules.write_text(json.dumps(list(self.vendor.layout)), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "dra_driver.cli", "layout", "apply", "--file", rules, "--config", CONFIGURATION],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Broken(f"the layout: {done.stdout}{done.stderr}")

    def reset_after_failure(self) -> None:
        """Remove the state of a failed case by force: power-cycle the boards, empty the directories, and end the programs.

        The boot id does not change, because the expected state of the next cases contains it.
        """
        if self.pid:
            self.kill()
        self.instance = ""
        if not self.api.is_serving:
            self.api.resume_serving()
        self.api.release_awaited()
        self.silicon.command("clear all")
        self._stop_programs()
        for path in self.state.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.vendor.forget_partitions(self)
        self.boot(node_namespaces.boot_id())
        self.start_ready()

    def boot(self, boot_id: str = "") -> None:
        """Reboot the node: end programs, reset devices and /run as a boot does, and apply the layout.

        The default of ``boot_id`` is a new ID.
        """
        self._stop_programs()
        for folder in (CDI, COMPANIONS):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.silicon.command("power-cycle")
        node_namespaces.begin_boot(boot_id)
        for device in Path("/sys/bus/pci/drivers/vfio-pci").glob("0000:*"):
            (device / "driver_override").write_text("")
            (device / "driver/unbind").write_text(device.name)
            self.wait_until("the bus has unbound it", lambda device=device: not (device / "driver").is_symlink())
            Path(f"/sys/bus/pci/drivers/{self.vendor.pci_driver}/bind").write_text(device.name)
        self.apply_layout()

    @staticmethod
    def _stop_programs() -> None:
        subprocess.run(["systemctl", "stop", "*"], check=False, capture_output=True)

    # The driver's process

    def launch(
        self,
        stage: str = "",
        *,
        clock: Path | None = None,
        library: Path | None = None,
        timer: float | None = None,
        instance: str = "",
        samples: Path | None = None,
        library_raises: bool = False,
        supervisor_exceptions: bool = False,
        short_waits: bool = False,
    ) -> int:
        """Start a driver that dies when ``stage`` is complete. Return its process ID at once.

        ``library`` is loaded before the C library and reads ``clock``. ``timer`` is the interval of its checks of
        claims, in seconds. ``samples`` is the file for the costs of its functions. With ``library_raises``, calls of the
        vendor's library raise on order (library_exceptions.py). With ``supervisor_exceptions``, each supervisor gets unexpected exceptions.
        With ``short_waits``, timeouts and retries take seconds.
        """
        assert self._launcher.stdin and self._launcher.stdout
        order = {
            "stage": stage,
            "log": str(self.log),
            "arguments": ["node", "--config", CONFIGURATION],
            "clock": str(clock or ""),
            "library": str(library or ""),
            "timer": timer,
            "instance": instance,
            "samples": str(samples or ""),
            "library_raises": library_raises,
            "supervisor_exceptions": supervisor_exceptions,
            "short_waits": short_waits,
        }
        self._launcher.stdin.write(json.dumps(order) + "\n")
        self._launcher.stdin.flush()
        return int(self._launcher.stdout.readline())

    def start(self, stage: str = "", *, serves: bool = True, **options: Any) -> None:
        """Start the driver. With ``serves`` wait until the kubelet can register it. ``options`` are those of ``launch``."""
        assert not self.pid, "a driver runs"
        self.pid = self.launch(stage, **options)
        if serves:
            self.wait_serving()

    def start_ready(self, *, ready_seconds: float = 60, **options: Any) -> None:
        """Start the driver and wait until it is ready. ``options`` are those of ``launch``."""
        self.start(**options)
        self.wait_ready(ready_seconds)

    def wait_serving(self) -> None:
        """Wait until the driver answers, and register it, as the kubelet does."""
        self.register(self.pid, self.instance)
        self.connect()

    def register(self, pid: int, instance: str) -> None:
        """Wait until a process answers as an instance of the driver, and register it."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with grpc.insecure_channel(f"unix:{self.paths(instance).registration}") as channel:
                    stub = plugin_registration_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
                    stub.GetInfo(plugin_registration_pb2.InfoRequest(), timeout=5)
                    stub.NotifyRegistrationStatus(
                        plugin_registration_pb2.RegistrationStatus(plugin_registered=True), timeout=5
                    )
                break
            except grpc.RpcError as error:
                if self.has_ended(pid):
                    raise CrashLoop(
                        f"the driver ended with {self._ended[pid]} before it served\n{self.log_tail()}"
                    ) from None
                if time.monotonic() > deadline:
                    raise Broken(f"the driver does not serve: {error}\n{self.log_tail()}") from None
                time.sleep(0.005)

    def paths(self, instance: str) -> SocketPaths:
        """Return the socket paths of an instance of the driver."""
        return paths_of(str(self.state), str(REGISTRY), self.driver, instance)

    def connect(self) -> None:
        """Connect to the current process."""
        self.disconnect()
        self.switch_to(self.pid, self.instance)

    def switch_to(self, pid: int, instance: str) -> grpc.Channel | None:
        """Direct the next calls to another process. Return the previous channel, which can have running calls."""
        former, self._channel = self._channel, grpc.insecure_channel(f"unix:{self.paths(instance).service}")
        self.pid, self.instance = pid, instance
        return former

    def disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def has_ended(self, pid: int = 0) -> bool:
        """Return whether the driver's process has ended."""
        pid = pid or self.pid
        if pid not in self._ended:
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                return False
            self._ended[pid] = os.waitstatus_to_exitcode(status)
        return True

    def wait_ended(self, seconds: float = 30, pid: int = 0) -> int:
        """Wait until the process has ended. Return its exit status, or a signal as a negative number."""
        pid = pid or self.pid
        descriptor = os.pidfd_open(pid) if pid not in self._ended else -1
        try:
            if descriptor >= 0 and not select.select([descriptor], [], [], seconds)[0]:
                raise Broken(f"the driver did not end within {seconds:g} s\n{self.log_tail()}")
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        assert self.has_ended(pid)
        status = self._ended[pid]
        if pid == self.pid:
            self.pid = 0
            self.disconnect()
        return status

    def kill(self) -> None:
        """Kill the driver with SIGKILL. An ended process is no error."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
        self.wait_ended()

    def stop(self) -> None:
        """Stop the driver with SIGTERM, as its service manager does."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGTERM)
        status = self.wait_ended()
        if status:
            raise Broken(f"the driver ended with {status} after SIGTERM\n{self.log_tail()}")

    def close(self) -> None:
        """End all processes."""
        if self.pid:
            self.kill()
        self._launcher.kill()
        self._bus.kill()

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the driver's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def status(self) -> dict[str, Any]:
        """Return the driver's status as it reports it."""
        return query_status(self.driver, self.paths(self.instance).status)

    # The kubelet's part

    def claim_message(self, name: str, uid: str) -> dra_v1_pb2.Claim:
        return dra_v1_pb2.Claim(namespace="default", name=name, uid=uid)

    def start_call(self, method: str, name: str, uid: str) -> Any:
        """Call the driver and return a future of its answer."""
        assert self._channel is not None
        stub = dra_v1_pb2_grpc.DRAPluginStub(self._channel)
        request = getattr(dra_v1_pb2, f"{method}Request")(claims=[self.claim_message(name, uid)])
        return getattr(stub, method).future(request, timeout=CALL_SECONDS)

    def call_once(self, method: str, name: str, uid: str) -> Any:
        """Call the driver once and return its answer about the claim. Raises grpc.RpcError."""
        answer = self.start_call(method, name, uid).result()
        if set(answer.claims) != {uid}:
            raise Broken(f"{method} of {uid} was answered for {sorted(answer.claims)}")
        return answer.claims[uid]

    def call_until_success(self, method: str, name: str, uid: str, seconds: float = 30) -> Any:
        """Repeat the call until it succeeds, as the kubelet does."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self.call_once(method, name, uid)
            if not answer.error:
                return answer
            if time.monotonic() > deadline:
                raise Broken(f"{method} of {name} is refused for {seconds:g} s: {answer.error}\n{self.log_tail()}")
            time.sleep(0.05)

    def prepare(self, name: str, uid: str) -> Any:
        return self.call_until_success("NodePrepareResources", name, uid)

    def unprepare(self, name: str, uid: str) -> Any:
        return self.call_until_success("NodeUnprepareResources", name, uid)

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return the published devices by name."""
        return {
            str(device["name"]): device
            for item in list(self.api.model.slices.values())
            for device in item["spec"].get("devices", ())
        }

    def document_of(self, kind: Kind, name: str = "") -> dict[str, Any]:
        """Return an allocated claim of a kind, without storing it in the API server."""
        statics = sorted(filter(self.vendor.is_static, self.devices()))
        results = [statics[0] if each == STATIC else each for each in kind.results]
        return self.api.document(name or kind.name, *results, config=kind.config)

    def claim_of(self, kind: Kind, name: str = "") -> tuple[str, str]:
        """Store an allocated claim of a kind. Return its name and UID."""
        claim = self.document_of(kind, name)
        found = str(claim["metadata"]["name"])
        self.api.model.claims[found] = claim
        return found, str(claim["metadata"]["uid"])

    def wait_until(self, what: str, condition: Callable[[], Any], seconds: float = 30) -> Any:
        """Wait until a condition is true, and return its value."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise Broken(f"waited {seconds:g} s for: {what}\n{self.log_tail()}")
            time.sleep(0.01)
        return found

    def wait_ready(self, seconds: float = 60) -> None:
        """Wait until the driver is ready: claims recovered, and devices published."""
        self.wait_until(
            "the driver is ready", lambda: (reported := self.status())["ready"] and reported["published"], seconds
        )

    def report_repairs(self) -> None:
        """Report a repair of the devices to the driver, as ``dra-driver recovered all`` does."""
        with contextlib.suppress(OSError, ValueError):
            repair_marks.mark(str(self.state), known_faults(System(), str(self.state)), repair_marks.REPAIRED)
        wake_driver(str(self.state))
        time.sleep(0.5)

    @contextmanager
    def faults(self, *commands: str) -> Iterator[None]:
        """Inject hardware faults while the context is active."""
        try:
            for command in commands:
                self.silicon.command(f"fault {command}")
            yield
        finally:
            self.silicon.command("clear all")
