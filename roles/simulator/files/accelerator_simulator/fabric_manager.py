# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The simulated fabric manager: partitions of the NVSwitch fabric, for the client library libnvfm.so.1
(``nvml/nvfm.c``).

Facts from NVIDIA's Fabric Manager User Guide: the config keys FABRIC_MODE (1 is shared NVSwitch),
FM_CMD_BIND_INTERFACE, FM_CMD_PORT_NUMBER, and FM_CMD_UNIX_SOCKET_PATH; the return values; on H100 and later a GPU's
physical ID equals its module ID, and UUID and PCI address are omitted.

The partition IDs are those of the guide "Fabric Manager partitioning" of NVIDIA's DRA driver: of eight GPUs, partition
1 has all, 2 and 3 have four each, 4 to 7 two each, 8 to 15 one each. A restart loses the list of active partitions.

"Resiliency": with FABRIC_MODE_RESTART=1, a fabric manager that finds the state file of the previous one
(STATE_FILE_NAME) rejects all calls until it gets the list of active partitions, and exits if it gets none within 60 s.
The guide does not name the return value: it is NOT_CONFIGURED here.

The program is nv-fabricmanager. While it runs, GPUs of the Ampere generation on NVSwitch boards can be reset one by
one (the manual of nvidia-smi).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socketserver
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import SimulatorError
from .persistence_daemon import PR_SET_NAME, lock, open_state

NAME = b"nv-fabricmanager"
STATE_BYTE = 7 << 40  # clients.c
CONFIGURATION = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
SHARED_NVSWITCH = "1"
# Return values of the library.
SUCCESS, BADPARAM, NOT_SUPPORTED, UNINITIALIZED, IN_USE, NOT_CONFIGURED = 0, -1, -3, -4, -7, -8
STATE_FILE = "/tmp/fabricmanager.state"  # noqa: S108  NVIDIA's default
RESUME_SECONDS = 60.0
NO_ADDRESS = "00000000:00:00.0"
LINKS, LINK_RATE = 18, 26562


@dataclass(frozen=True)
class Member:
    """A GPU as the fabric manager reports it. ``uuid`` and ``address`` are empty if it does not report them."""

    module: int
    uuid: str = ""
    address: str = ""

    def line(self) -> str:
        """Return the GPU's line in the answer to ``list``."""
        return f"gpu {self.module} {self.uuid or '-'} {self.address or NO_ADDRESS} {LINKS} {LINKS} {LINK_RATE}"


def read_options(text: str) -> dict[str, str]:
    """Return the keys and values of fabricmanager.cfg. Text after # is a comment."""
    pairs = (line.partition("#")[0].partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def partitions_of(members: Sequence[Member]) -> dict[int, tuple[Member, ...]]:
    """Return the partitions that a board offers: all its GPUs, halves, and so on down to single GPUs."""
    found: dict[int, tuple[Member, ...]] = {}
    size, number = len(members), 1
    while size >= 1:
        for start in range(0, len(members), size):
            found[number] = tuple(members[start : start + size])
            number += 1
        size //= 2
    return found


class FabricManager:
    """The active partitions. Safe for threads."""

    def __init__(self, members: Sequence[Member], *, is_shared: bool, waits: bool = False) -> None:
        self._partitions = partitions_of(members)
        self._is_shared = is_shared
        self._active: set[int] = set()
        self._failures: dict[str, int] = {}
        self.waits = waits  # for the list of active partitions
        self._lock = threading.Lock()

    def answer(self, request: str) -> Iterator[str]:
        """Yield the lines that answer a request of the client library.

        Only tests send ``fail WORD VALUE``, which makes all requests of that word return a value; 0 ends that.
        """
        word, _blank, argument = request.strip().partition(" ")
        with self._lock:
            if word == "fail":
                failing, _blank, value = argument.partition(" ")
                self._failures[failing] = int(value)
                yield str(SUCCESS)
            elif not self._is_shared:
                yield str(NOT_SUPPORTED)
            elif self._failures.get(word):
                yield str(self._failures[word])
            elif word == "set":
                yield str(self._set(argument.split()))
            elif self.waits:
                yield str(NOT_CONFIGURED)
            elif word == "list":
                yield str(SUCCESS)
                for number, members in sorted(self._partitions.items()):
                    yield f"partition {number} {int(number in self._active)} {len(members)}"
                    yield from (member.line() for member in members)
                yield "end"
            elif word in ("activate", "deactivate") and argument.isdigit():
                yield str(self._change(int(argument), activate=word == "activate"))
            else:
                yield str(BADPARAM)

    def _set(self, numbers: Sequence[str]) -> int:
        if not self.waits:
            return NOT_SUPPORTED
        wanted = {int(number) for number in numbers if number.isdigit()}
        if not wanted <= self._partitions.keys() or len(wanted) != len(numbers):
            return BADPARAM
        self._active, self.waits = wanted, False
        return SUCCESS

    def _change(self, number: int, *, activate: bool) -> int:
        if number not in self._partitions:
            return BADPARAM
        if not activate:
            if number not in self._active:
                return UNINITIALIZED
            self._active.discard(number)
            return SUCCESS
        taken = {member.module for active in self._active for member in self._partitions[active]}
        if taken & {member.module for member in self._partitions[number]}:
            return IN_USE
        self._active.add(number)
        return SUCCESS


def resumes(options: Mapping[str, str]) -> bool:
    """Return whether the fabric manager resumes the previous one's state, and create the state file."""
    if options.get("FABRIC_MODE_RESTART") != "1":
        return False
    state = Path(options.get("STATE_FILE_NAME", STATE_FILE))
    found = state.exists()
    state.touch()
    return found


@contextlib.contextmanager
def running(root: str, library: Path) -> Iterator[None]:
    """Act as the fabric manager of a machine for the library in this directory and for programs that read the process
    list.
    """
    ctypes.CDLL(None).prctl(PR_SET_NAME, NAME)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    number = str(os.getpid())
    shown = Path(root, "proc", number) if root not in ("", "/") else None
    if shown is not None:
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.symlink_to(Path("/proc", number))
    state = open_state(library)
    try:
        lock(state, STATE_BYTE, held=True)
        yield
    finally:
        os.close(state)
        if shown is not None:
            shown.unlink(missing_ok=True)


def serve(options: Mapping[str, str], members: Sequence[Member]) -> None:
    """Answer requests at the configured address until the process ends."""
    manager = FabricManager(
        members, is_shared=options.get("FABRIC_MODE", "0") == SHARED_NVSWITCH, waits=resumes(options)
    )

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write("".join(f"{each}\n" for each in manager.answer(line.decode("ascii"))).encode("ascii"))

    path = options.get("FM_CMD_UNIX_SOCKET_PATH", "")
    try:
        server: socketserver.BaseServer
        # A client can stay connected until the process ends.
        socketserver.ThreadingUnixStreamServer.daemon_threads = socketserver.ThreadingTCPServer.daemon_threads = True
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).unlink(missing_ok=True)
            server = socketserver.ThreadingUnixStreamServer(path, Handler)
            Path(path).chmod(0o600)
        else:
            socketserver.ThreadingTCPServer.allow_reuse_address = True
            port = int(options.get("FM_CMD_PORT_NUMBER", "6666"))
            server = socketserver.ThreadingTCPServer((options.get("FM_CMD_BIND_INTERFACE", "127.0.0.1"), port), Handler)
    except (OSError, ValueError) as error:
        raise SimulatorError(f"the fabric manager cannot listen at {path or 'its port'}: {error}") from error
    timer = threading.Timer(RESUME_SECONDS, lambda: manager.waits and server.shutdown())
    timer.daemon = True
    timer.start()
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
    raise SimulatorError(f"the fabric manager got no list of active partitions within {RESUME_SECONDS:.0f} s")
