# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The DCMI helper's socket and processes, with a client of the core and processes that only report their own PID."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dcmi_worker_model import DIES, HANGS, RUNS
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, DeviceFaulty, NotFound
from dra_driver.core.host.system import System
from dra_driver.core.vendors.ascend.dcmi import helper as client_module
from dra_driver.core.vendors.ascend.dcmi import helper_server as server_module
from dra_driver.core.vendors.ascend.dcmi import helper_worker, messages
from dra_driver.core.vendors.ascend.dcmi.dcmi import Spot
from dra_driver.core.vendors.ascend.dcmi.helper import Helper
from dra_driver.core.vendors.ascend.dcmi.helper_server import Server
from dra_driver.core.vendors.ascend.dcmi.helper_workers import Workers, worker_command
from dra_driver.core.vendors.ascend.readings import Told

MODEL = Path(__file__).with_name("dcmi_worker_model.py")
PATH = os.pathsep.join(filter(None, sys.path))
COMMAND = ("env", f"PYTHONPATH={PATH}", sys.executable, str(MODEL), "{requests}", "{events}")

ONE, OTHER = Spot(0, 0), Spot(0, 1)
DEADLINES = {messages.READ: 60.0, messages.CHANGE: 1.0, messages.RESET: 60.0}


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.01)


class World:
    """A helper in a thread of the test."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.system = System(root)
        self.path = str(self.system.path(messages.SOCKET))
        self.allowed = frozenset({os.geteuid()})
        self.server: Server | None = None
        self.thread: threading.Thread | None = None
        self.concurrency = 8
        self.workers: Workers | None = None

    def _make(self, hear: Callable[[bytes], None]) -> Workers:
        self.workers = Workers(COMMAND, hear, self.concurrency, DEADLINES)
        return self.workers

    def start(self) -> None:
        self.server = Server(self.path, self._make, self.allowed)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()
        until(lambda: os.path.exists(self.path))

    def stop(self) -> None:
        if self.server is not None and self.thread is not None:
            self.server.stop()
            self.thread.join()
            self.server = None

    def client(self) -> Helper:
        made = Helper(self.system)
        made.open()
        return made

    def pids(self) -> dict[str, int]:
        assert self.workers is not None
        return dict(self.workers.pids())

    def send(self, line: bytes) -> bytes:
        """Return the reply to a line of any kind."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(60)
            connection.connect(self.path)
            connection.sendall(line)
            with connection.makefile("rb") as lines:
                return lines.readline()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_TICK_SECONDS", 0.05)


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="dcmi-") as root:
        made = World(root)
        made.start()
        yield made
        made.stop()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_chip_has_a_process_of_its_own_and_keeps_it(world: World) -> None:
    client = world.client()
    found = [client.uuid(ONE), client.uuid(OTHER), client.uuid(ONE), client.driver_version()]
    assert found[0] == found[2] and len(set(found)) == 3
    assert sorted(found) == sorted([*map(str, world.pids().values()), found[0]])


def test_chip_that_hangs_is_ended_at_its_deadline_and_blocks_no_other(world: World) -> None:
    client = world.client()
    previous = int(client.uuid(ONE))
    failed: queue.Queue[Exception] = queue.Queue()

    def hang() -> None:
        try:
            client.destroy(ONE, HANGS)
        except DeviceFaulty as error:
            failed.put(error)

    thread = threading.Thread(target=hang)
    thread.start()
    other = client.uuid(OTHER)
    thread.join()
    error = failed.get_nowait()
    assert isinstance(error, DeviceFaulty) and error.code == "no-answer" and "chip 0 of card 0" in error.message
    assert not alive(previous)
    assert client.uuid(OTHER) == other and client.uuid(ONE) != str(previous)


def members(group: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def test_programs_that_dcmi_has_started_end_with_their_process(world: World) -> None:
    client = world.client()
    previous = int(client.uuid(ONE))
    with pytest.raises(DeviceFaulty) as caught:
        client.destroy(ONE, RUNS)
    assert caught.value.code == "no-answer"
    until(lambda: not members(previous))
    assert client.uuid(ONE) != str(previous)


def test_programs_end_with_the_helper(world: World) -> None:
    client = world.client()
    previous = int(client.uuid(ONE))

    def run() -> None:
        with contextlib.suppress(AcceleratorError):
            client.destroy(ONE, RUNS)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: len(members(previous)) > 1)
    world.stop()
    until(lambda: not members(previous))
    thread.join()


def test_sockets_of_a_process_are_closed_in_its_programs() -> None:
    requests, client = socket.socketpair()
    events, _heard = socket.socketpair()
    for each in (requests, events):
        each.set_inheritable(True)
    client.close()
    number = os.dup(requests.fileno())
    os.set_inheritable(number, True)
    assert helper_worker.main([str(number), str(events.fileno()), "/"]) == 0
    assert not os.get_inheritable(events.fileno())


def test_process_that_ends_in_a_request_is_started_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    client = world.client()
    previous = client.uuid(ONE)
    with pytest.raises(DeviceFaulty) as caught:
        client.destroy(ONE, DIES)
    assert caught.value.code == "unknown-error" and "has ended" in caught.value.message
    assert "status=9" in caplog.text
    assert client.uuid(ONE) != previous


def test_process_that_was_killed_between_requests_is_started_again(world: World) -> None:
    client = world.client()
    previous = int(client.uuid(ONE))
    os.kill(previous, 9)
    until(lambda: not alive(previous))
    assert client.uuid(ONE) != str(previous)


def test_error_of_a_process_keeps_its_class(world: World) -> None:
    with pytest.raises(NotFound):
        world.client().is_started(ONE)


def test_requests_of_more_chips_than_allowed_wait_for_their_turn() -> None:
    with tempfile.TemporaryDirectory(prefix="dcmi-") as root:
        world = World(root)
        world.concurrency = 1
        world.start()
        try:
            client = world.client()
            with pytest.raises(DeviceFaulty):
                client.destroy(ONE, HANGS)
            assert client.uuid(OTHER)
        finally:
            world.stop()


def test_open_replaces_the_processes(world: World) -> None:
    client = world.client()
    previous = client.uuid(ONE)
    client.open()
    assert client.is_open and client.uuid(ONE) != previous


def test_processes_end_when_no_client_has_the_library_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LINGER_SECONDS", 0.0)
    client = world.client()
    previous = int(client.uuid(ONE))
    time.sleep(2.5)  # the processes stay while a client has the library open
    assert alive(previous) and client.uuid(ONE) == str(previous)
    client.close()
    assert not client.is_open
    until(lambda: not alive(previous) and world.pids() == {})


def test_event_reaches_a_client_that_has_the_library_open(world: World) -> None:
    heard: queue.Queue[Any] = queue.Queue()
    client = world.client()
    assert client.subscribe(heard.put)
    until(lambda: client.driver_version() and not heard.empty())
    assert heard.get_nowait() == Told(3, 7, True)


def test_client_opens_again_after_a_restart_of_the_helper(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_RETRY_SECONDS", 0.01)
    heard: queue.Queue[Any] = queue.Queue()
    client = world.client()
    client.subscribe(heard.put)
    previous = client.uuid(ONE)
    world.stop()
    with pytest.raises(BackendUnavailable) as caught:
        client.uuid(ONE)
    assert "dra-accelerators-dcmi.service" in caught.value.hint
    world.start()
    assert client.is_open and client.uuid(ONE) != previous
    until(lambda: client.driver_version() and not heard.empty())


def test_closed_client_is_not_opened_again(world: World) -> None:
    client = world.client()
    client.close()
    world.stop()
    with pytest.raises(BackendUnavailable):
        client.open()
    assert not client.is_open


def test_socket_is_of_its_user_alone(world: World) -> None:
    assert stat.S_IMODE(os.stat(world.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(world.path)).st_mode) == 0o700


def test_other_users_are_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="dcmi-") as root:
        world = World(root)
        world.allowed = frozenset({65533})
        world.start()
        try:
            with pytest.raises(BackendUnavailable) as caught:
                world.client()
            assert f"User {os.geteuid()} is not allowed" in caught.value.message
            with pytest.raises(AcceleratorError) as refused:
                messages.parse_reply(world.send(messages.request("uuid", (ONE,))))
            assert refused.value.code == "not-permitted" and world.pids() == {}
        finally:
            world.stop()


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"GET / HTTP/1.1\n", b"x" * (messages.LONGEST_REQUEST + 1)])
def test_request_of_another_protocol_is_answered_and_starts_nothing(world: World, line: bytes) -> None:
    with pytest.raises(AcceleratorError) as caught:
        messages.parse_reply(world.send(line))
    assert caught.value.code == "invalid-request" and world.pids() == {}


def test_helper_of_another_version_is_unavailable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    request = messages.request

    def newer(method: str, arguments: Any) -> bytes:
        return request(method, arguments).replace(b'"version":1', b'"version":2')

    monkeypatch.setattr(messages, "request", newer)
    with pytest.raises(BackendUnavailable) as caught:
        world.client()
    assert "version 2" in caught.value.message and "dra.accelerators.dra_driver" in caught.value.hint


def test_second_helper_does_not_start_and_a_left_socket_is_replaced(world: World) -> None:
    with pytest.raises(AcceleratorError) as caught:
        Server(world.path, world._make, frozenset()).serve()
    assert caught.value.code == "helper-running"
    world.stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(world.path)
    world.start()
    until(lambda: _answers(world))


def _answers(world: World) -> bool:
    try:
        return bool(world.client().uuid(ONE))
    except BackendUnavailable:
        return False


def test_path_that_is_too_long_for_a_socket_is_reached(world: World, tmp_path: Path) -> None:
    root = tmp_path / ("long" * 30)
    place = root / messages.SOCKET.lstrip("/")
    place.parent.mkdir(parents=True)
    place.symlink_to(world.path)
    client = Helper(System(str(root)))
    client.open()
    assert client.uuid(ONE)
    client.close()


def test_command_of_a_process_is_isolated_and_of_this_release() -> None:
    command = worker_command("/")
    program = Path(command[command.index("dra_driver.core.vendors.ascend.dcmi.helper_worker") - 1])
    assert command[:2] == (sys.executable, "-IBu") and program.name == "run.py" and program.exists()
