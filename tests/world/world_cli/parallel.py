# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run jobs in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from .errors import WorldError


def in_parallel(jobs: Iterable[Callable[[], object]], workers: int = 8) -> None:
    """Run all jobs in parallel; raise one WorldError with all failures at the end.

    An interrupt waits for the running jobs. The others are not started.
    """
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        futures = [pool.submit(job) for job in jobs]
        wait(futures)
    finally:
        pool.shutdown(cancel_futures=True)
    failures = [future.exception() for future in futures]
    known = [str(failure) for failure in failures if isinstance(failure, WorldError)]
    for failure in failures:
        if failure is not None and not isinstance(failure, WorldError):
            raise failure
    if known:
        raise WorldError("\n".join(known))
