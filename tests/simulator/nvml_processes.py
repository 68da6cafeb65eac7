# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Processes that use NVML or DCMI, forked from a parent that has loaded Python and the binding but no library.

Each loads the library of the test that starts it. A Python start for each process would take most of the tests' time.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

WORKER = Path(__file__).with_name("nvml_worker.py")


class ForkedProcess:
    """The part of ``subprocess.Popen`` that the tests use."""

    def __init__(self, server: ForkServer, library: str) -> None:
        reading, for_child_output = os.pipe()
        for_child_input, writing = os.pipe()
        self.server = server
        self.returncode: int | None = None
        self.pid = int(server.ask({"fork": library}, for_child_input, for_child_output))
        os.close(for_child_input)
        os.close(for_child_output)
        self.stdin: IO[str] | None = os.fdopen(writing, "w")
        self.stdout: IO[str] | None = os.fdopen(reading)
        self._end = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit status if the process has ended."""
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self.returncode = int(self.server.ask({"status": self.pid}))
            os.close(self._end)
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        """Wait for the exit status and return it."""
        if self.returncode is None:
            assert select.select([self._end], [], [], timeout)[0], f"process {self.pid} has not ended"
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """Kill the process."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The parent of the processes of one environment."""

    def __init__(self, environment: dict[str, str], worker: Path) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, str(worker), str(theirs.fileno())], env=environment, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        atexit.register(self.close)

    def ask(self, question: dict[str, Any], *descriptors: int) -> str:
        """Send one request to the server, with descriptors for the child."""
        passed = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if descriptors else []
        self.socket.sendmsg([json.dumps(question).encode()], ancillary)
        answer = self.socket.recv(4096)
        assert answer, f"the server of processes ended with {self.process.wait()}"
        return answer.decode()

    def close(self) -> None:
        """Close the socket, which ends the server."""
        self.socket.close()
        self.process.wait()


_servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}


def start(environment: dict[str, str], worker: Path = WORKER, library: str = "libnvidia-ml.so.1") -> ForkedProcess:
    """Start a process with the library of ``LD_LIBRARY_PATH`` and the other variables of the environment."""
    shared = {
        name: value for name, value in environment.items() if name not in ("LD_LIBRARY_PATH", "PYTEST_CURRENT_TEST")
    }
    key = (("worker", str(worker)), *sorted(shared.items()))
    if key not in _servers:
        _servers[key] = ForkServer(shared, worker)
    return ForkedProcess(_servers[key], f"{environment['LD_LIBRARY_PATH']}/{library}")
