# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Call a function in a separate process with a time limit and a memory limit that native libraries cannot ignore."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import traceback
from collections.abc import Callable
from typing import Any

from ..core.errors import AcceleratorError

#: Seconds that the process has to start.
START_SECONDS = 30.0


#: The wall-clock limit of a call on a busy machine: a multiple of its CPU seconds, plus a constant.
CLOCK_FACTOR, CLOCK_SECONDS = 10, 5.0


def _limit_time(seconds: float) -> None:
    """Limit the CPU time of this process, in seconds; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, CLOCK_FACTOR * seconds + CLOCK_SECONDS if seconds else 0)


class CallEnded(AcceleratorError):
    """A call was ended before it returned."""

    default_code = "call-ended"


class BoundedProcess:
    """Call a function in a separate process, which is started at the first call and after each ended call.

    ``make_function`` runs in the process and returns the function. ``seconds`` limits the CPU time of each call.
    ``memory_bytes`` limits the memory that the process uses in addition to the memory of this one. Arguments and results
    must be picklable.
    """

    def __init__(self, make_function: Callable[[], Callable[[Any], Any]], *, seconds: float, memory_bytes: int) -> None:
        self._make_function = make_function
        self.seconds = seconds
        self._memory_bytes = memory_bytes
        self._process: Any = None
        self._connection: Any = None

    def call(self, argument: Any) -> Any:
        """Return the function's result. Raises CallEnded, and RuntimeError for an exception of the function."""
        if self._process is None:
            self._start()
            if not self._connection.poll(START_SECONDS):
                self.close()
                raise CallEnded(f"its process did not start within {START_SECONDS:g} s")
            self._receive(START_SECONDS)
        with contextlib.suppress(OSError):  # the process has ended, which the receive below detects
            self._connection.send((self.seconds, argument))
        return self._receive(self.seconds)

    def _receive(self, seconds: float) -> Any:
        try:
            problem, answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            timed_out = self._process.exitcode in (-signal.SIGPROF, -signal.SIGALRM)
            self.close()
            limit = f"{self._memory_bytes >> 20} MiB of memory at most"
            raise CallEnded(
                f"it took more than {seconds:g} s" if timed_out else f"its process ended, with {limit}"
            ) from None
        if problem:
            self.close()
            raise RuntimeError(problem)
        return answer

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
            self._connection.close()

    def _start(self) -> None:
        # A module's code is in an archive that a new interpreter would not find, and a module has no other threads here.
        context = multiprocessing.get_context("fork")
        self._connection, process_end = context.Pipe()
        self._process = context.Process(target=self._serve, args=(process_end,), daemon=True)
        self._process.start()
        process_end.close()

    def _serve(self, connection: multiprocessing.connection.Connection) -> None:
        self._connection.close()
        null_device = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null_device, stream)
        # The kernel ends an overlong call in any library, also after the death of this process' parent.
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
        self._limit_memory()
        _limit_time(START_SECONDS)
        try:
            function = self._make_function()
            _limit_time(0)
            connection.send(("", None))
            while True:
                try:
                    seconds, argument = connection.recv()
                except EOFError:
                    os._exit(0)
                _limit_time(seconds)
                answer = function(argument)
                _limit_time(0)
                connection.send(("", answer))
        except MemoryError:
            os._exit(1)
        except Exception:  # noqa: BLE001  the caller raises it
            connection.send((traceback.format_exc(), None))
            os._exit(1)

    def _limit_memory(self) -> None:
        """Limit the address space, on systems that have /proc/self/statm."""
        with contextlib.suppress(OSError, ValueError):
            with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  of this process
                used_bytes = int(file.read().split()[0]) * resource.getpagesize()
            _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            limit = used_bytes + self._memory_bytes
            if hard == resource.RLIM_INFINITY or limit < hard:
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
