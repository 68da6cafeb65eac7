# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The processes of the DCMI helper: one for each chip, and one for calls that concern no chip.

The vendor's usage precautions exclude several threads of a process in DCMI, and a call that hangs cannot be
interrupted. So each chip has a process with one thread. The helper kills it at the deadline of the request, and starts
another one for the next request.

DCMI starts programs while it is opened: dmidecode, systemd-detect-virt, and mount, through a shell
(`dcmi_environment_judge.c` of hicann/driver). So each process leads a process group, and the helper kills the group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ....errors import AcceleratorError, BackendUnavailable, DeviceFaulty
from ....model import NO_ANSWER, UNKNOWN_ERROR
from . import messages
from .dcmi import CARDS, CHIPS_OF_CARD, Spot

LOG = logging.getLogger(__name__)

#: The deadlines of requests in seconds, by their kind. They are longer than those of the node driver for the same
#: calls.
DEADLINES: Mapping[str, float] = {messages.READ: 30.0, messages.CHANGE: 75.0, messages.RESET: 330.0}
#: The maximum number of processes. A host cannot have more chips.
MOST = CARDS * CHIPS_OF_CARD + 1
_END_SECONDS = 2.0
_POLL_SECONDS = 0.02


def worker_command(root: str) -> tuple[str, ...]:
    """Return the command of a process, without its descriptors. ``root`` is the root directory of the host."""
    run = Path(__file__).absolute().parents[4] / "run.py"
    cache = ("-X", f"pycache_prefix={sys.pycache_prefix}") if sys.pycache_prefix else ()
    return (
        sys.executable,
        "-IBu",
        *cache,
        str(run),
        "dra_driver.core.vendors.ascend.dcmi.helper_worker",
        "{requests}",
        "{events}",
        root,
    )


class Worker:
    """One process that calls DCMI. It is started for its first request. ``hear`` is called with the line of each event."""

    def __init__(self, command: Sequence[str], title: str, hear: Callable[[bytes], None] | None = None) -> None:
        self._command = command
        self._title = title
        self._hear = hear
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._generation = -1

    @property
    def pid(self) -> int:
        """The PID of the process, or 0."""
        process = self._process
        return process.pid if process is not None else 0

    def ask(self, request: bytes, seconds: float, generation: int) -> bytes:
        """Return the reply to a request. A process of an earlier generation is replaced first.

        Raises DeviceFaulty with the cause no-answer after the deadline, and with the cause unknown-error if the process
        ends.
        """
        until = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise self._late(seconds)
        try:
            if self._generation != generation or (self._process is not None and _has_ended(self._process, 0)):
                self._end()
            if self._process is not None and self._channel is None:
                raise DeviceFaulty(
                    f"DCMI hangs for {self._title}: process {self._process.pid} was killed and has not ended",
                    hint="Read the kernel log. A reset of the device or a reboot may be necessary.",
                    code=NO_ANSWER,
                )
            if self._channel is None:
                self._channel = self._start()
                self._generation = generation
            return self._exchange(self._channel, request, seconds, until)
        finally:
            self._lock.release()

    def end_if_idle(self) -> None:
        """End the process if it serves no request."""
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def kill(self) -> None:
        """End the process at once, also during a request."""
        process = self._process
        if process is not None:
            _kill_group(process)

    def _start(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        heard, event_socket = socket.socketpair()
        events = event_socket.fileno() if self._hear is not None else -1
        words = [each.format(requests=theirs.fileno(), events=events) for each in self._command]
        passed = (theirs.fileno(), event_socket.fileno()) if self._hear is not None else (theirs.fileno(),)
        try:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=passed, start_new_session=True)
        except OSError as error:
            for each in (mine, heard):
                each.close()
            raise BackendUnavailable(f"The DCMI helper cannot start a process for {self._title}: {error}") from error
        finally:
            theirs.close()
            event_socket.close()
        if self._hear is not None:
            threading.Thread(target=_forward, args=(heard, self._hear), name="events", daemon=True).start()
        else:
            heard.close()
        return mine

    def _exchange(self, channel: socket.socket, request: bytes, seconds: float, until: float) -> bytes:
        reply = b""
        try:
            channel.settimeout(max(until - time.monotonic(), 0.001))
            channel.sendall(request)
            while not reply.endswith(b"\n"):
                channel.settimeout(max(until - time.monotonic(), 0.001))
                part = channel.recv(65536)
                if not part or len(reply) > messages.LONGEST_REPLY:
                    raise ConnectionError("the process has ended")
                reply += part
        except socket.timeout:
            LOG.warning("DCMI hangs; its process is killed device=%r pid=%d seconds=%g", self._title, self.pid, seconds)
            self._end(at_once=True)
            raise self._late(seconds) from None
        except OSError as error:
            process = self._process
            self._end(at_once=True)
            status = process.returncode if process is not None else None
            LOG.warning("a DCMI process has ended device=%r status=%s", self._title, status)
            raise DeviceFaulty(
                f"The DCMI process for {self._title} has ended during a request",
                hint="Read the journal of the DCMI helper and the kernel log. The next request starts another process.",
                code=UNKNOWN_ERROR,
            ) from error
        return reply

    def _end(self, at_once: bool = False) -> None:
        """End the process and the programs that it has started.

        A process that does not end, because the kernel does not return from a call, is kept in ``_process`` until it
        has ended.
        """
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        process = self._process
        if process is None:
            return
        if not at_once:
            _has_ended(process, _END_SECONDS)
        _kill_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
            self._process = None

    def _late(self, seconds: float) -> DeviceFaulty:
        return DeviceFaulty(
            f"DCMI did not answer for {self._title} within {seconds:g} s",
            hint="Read the kernel log. The next request starts another process.",
            code=NO_ANSWER,
        )


class Workers:
    """All processes of the helper. ``concurrency`` is the maximum number of processes that call DCMI at a time."""

    def __init__(
        self,
        command: Sequence[str],
        hear: Callable[[bytes], None],
        concurrency: int = MOST,
        deadlines: Mapping[str, float] | None = None,
    ) -> None:
        self._command = command
        self._deadlines = deadlines or DEADLINES
        self._turns = threading.BoundedSemaphore(concurrency)
        self._lock = threading.Lock()
        self._workers: dict[Spot | None, Worker] = {None: Worker(command, "the machine", hear)}
        self._generation = 0

    def ask(self, line: bytes) -> bytes:
        """Return the reply to the request of a client. Raises AcceleratorError."""
        method, arguments = messages.parse_request(line)
        seconds = self._deadlines[messages.METHODS[method].deadline]
        spot = next((each for each in arguments if isinstance(each, Spot)), None)
        with self._lock:
            # The library finds new chips, or another release of the driver, only when a new process opens it.
            self._generation += method == messages.OPEN
            generation = self._generation
            if spot is not None and spot not in self._workers and len(self._workers) >= MOST:
                raise AcceleratorError(f"The DCMI helper has {MOST} processes, which is the limit")
            worker = self._workers.setdefault(spot, Worker(self._command, str(spot)))
        if not self._turns.acquire(timeout=seconds):
            raise AcceleratorError(f"The DCMI helper has served other requests for {seconds:g} s", code="busy")
        try:
            return worker.ask(line, seconds, generation)
        finally:
            self._turns.release()

    def pids(self) -> Mapping[str, int]:
        """Return the PIDs by the chip that they serve."""
        with self._lock:
            return {str(spot) if spot else "machine": each.pid for spot, each in self._workers.items() if each.pid}

    def end_idle(self) -> None:
        """End the processes that serve no request, so that the library, and with it the driver of NPUs, is not in use."""
        for each in self._all():
            each.end_if_idle()

    def kill(self) -> None:
        """End all processes."""
        for each in self._all():
            each.kill()

    def _all(self) -> tuple[Worker, ...]:
        with self._lock:
            return tuple(self._workers.values())


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a process ends within ``seconds``. Its PID stays reserved, so that its group can still be killed."""
    until = time.monotonic() + seconds
    while process.returncode is None:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the programs that it has started. After its exit status was read, do nothing: its PID can be reused."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _forward(events: socket.socket, hear: Callable[[bytes], None]) -> None:
    with events, events.makefile("rb") as lines:
        for line in lines:
            hear(line)
