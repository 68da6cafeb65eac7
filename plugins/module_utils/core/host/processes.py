# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run a program and collect its output, with a limit on its time and on the size of its output."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

_READ_BYTES = 65536


class OutputTooLarge(Exception):
    """A program wrote more than its limit and was ended."""


def run_bounded(
    argv: Sequence[str], *, timeout: float, most_bytes: int, data: bytes = b"", environment: Mapping[str, str]
) -> tuple[int, bytes, bytes]:
    """Run a program without a shell and return its exit code, standard output and standard error.

    The program gets ``data`` on its standard input and its own process group. The group is killed after ``timeout`` seconds,
    when both outputs together exceed ``most_bytes``, and when this call is interrupted. Raises OSError if the program cannot
    be started, subprocess.TimeoutExpired, and OutputTooLarge.
    """
    deadline = time.monotonic() + timeout
    with subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    ) as process:
        try:
            outputs = _exchange(process, data, deadline, most_bytes)
            return process.wait(max(0.0, deadline - time.monotonic())), *outputs
        except BaseException as error:
            _kill_group(process)
            if isinstance(error, (TimeoutError, subprocess.TimeoutExpired)):
                raise subprocess.TimeoutExpired(list(argv), timeout) from None
            raise


def _exchange(process: subprocess.Popen[bytes], data: bytes, deadline: float, most_bytes: int) -> tuple[bytes, bytes]:
    """Write the input and read both outputs to their ends. Raises TimeoutError and OutputTooLarge."""
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise ValueError("the program's standard streams are not pipes")
    found: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
    left, size = memoryview(data), 0
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ)
        if data:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise TimeoutError
            for key, _events in ready:
                if key.fileobj is process.stdin:
                    left = _write_some(process.stdin, left)
                    if not left:
                        selector.unregister(process.stdin)
                        _close(process.stdin)
                    continue
                part = os.read(key.fd, _READ_BYTES)
                if not part:
                    selector.unregister(key.fileobj)
                found[key.fd].append(part)
                size += len(part)
                if size > most_bytes:
                    raise OutputTooLarge
    output, errors = (b"".join(parts) for parts in found.values())
    return output, errors


def _write_some(stream: IO[bytes], left: memoryview) -> memoryview:
    """Write a part of the input and return the rest; the rest is empty if the program has closed its standard input."""
    try:
        return left[os.write(stream.fileno(), left) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[:0]


def _close(stream: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and the programs it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
