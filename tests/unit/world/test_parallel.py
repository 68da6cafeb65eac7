# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parallel jobs: all failures are reported, and after an interruption no job starts."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from world_cli import parallel
from world_cli.errors import WorldError

#: Longer than any action here (seconds). Only a failing test waits for it.
LONG = 30


def fail(why: str) -> None:
    raise WorldError(why)


def test_jobs_run_in_parallel() -> None:
    meet = threading.Barrier(2)
    parallel.in_parallel([partial(meet.wait, LONG), partial(meet.wait, LONG)], workers=2)


def test_jobs_all_end_and_every_failure_is_reported() -> None:
    done: list[str] = []
    with pytest.raises(WorldError, match=r"(?s)no disk.*no network"):
        parallel.in_parallel([partial(fail, "no disk"), partial(fail, "no network"), partial(done.append, "third")])
    assert done == ["third"]


def test_programming_error_is_no_world_error() -> None:
    with pytest.raises(ZeroDivisionError):
        parallel.in_parallel([lambda: 1 // 0, partial(fail, "no disk")])


def test_interruption_starts_no_new_job(monkeypatch: pytest.MonkeyPatch) -> None:
    shut = threading.Event()

    class Pool(ThreadPoolExecutor):
        """A pool that notifies the running job of its shutdown."""

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            shut.set()
            super().shutdown(wait=wait)

    monkeypatch.setattr(parallel, "ThreadPoolExecutor", Pool)
    begun: list[str] = []

    def first() -> None:
        begun.append("first")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert shut.wait(LONG)

    # A background start of the tests can have set SIGINT to ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel.in_parallel([first, partial(begun.append, "second")], workers=1)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert begun == ["first"]
