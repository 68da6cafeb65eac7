# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The fleet report of the playbook ``report``, from the API server alone, without the facts that only nodes have.

A separate process creates the report on request. For a large fleet it needs minutes and hundreds of MiB, and in the controller's process
it would delay the webhook, which claims wait for. Only the report is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from .. import run as runner
from ..api.client import ApiClient
from ..api.resources import GROUP, ResourceApi, slice_from_version
from ..core.errors import AcceleratorError
from ..core.times import text_of
from .fleet_fold import FleetFold

Json = dict[str, Any]
#: Seconds for which a report is cached, or the duration of its creation if that is longer: so reports use at most half of one processor.
KEPT_SECONDS = 10.0
SLICE_PAGE, PAGE = 100, 500
#: The memory limit of the process that creates a report, in bytes. The report of 5,000 nodes with 208 devices each needs less.
MOST_MEMORY = 1 << 30
LONGEST_MESSAGE = 2000


class ReportFailed(AcceleratorError):
    """The process that creates the report has failed."""

    default_code = "report-failed"


@dataclass(frozen=True)
class Made:
    """A report as it is sent, its creation time by the monotonic clock, and the seconds for which it is cached."""

    body: bytes
    at: float
    kept: float = KEPT_SECONDS


class FleetReport:
    """Makes the report, once at a time however many want it. ``clock`` is in seconds and never goes back."""

    def __init__(self, kubeconfig: str, drivers: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._arguments = (kubeconfig, *drivers)
        self._clock = clock
        self._one = asyncio.Lock()
        self.last: Made | None = None

    async def current(self) -> Made:
        """Return the cached report, or a new report if the cached one has expired. Raises ReportFailed."""
        async with self._one:
            if self.last is None or self._clock() - self.last.at >= self.last.kept:
                began = self._clock()
                body = await self._make()
                now = self._clock()
                self.last = Made(body, now, max(KEPT_SECONDS, now - began))
            return self.last

    async def _make(self) -> bytes:
        command = (sys.executable, "-IB", str(Path(runner.__file__).absolute()), __name__, *self._arguments)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            body, errors = await process.communicate()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            said = errors.decode(errors="replace").strip()[-LONGEST_MESSAGE:]
            raise ReportFailed(said or f"The process that creates the report ended with status {process.returncode}")
        return body


async def make_report(client: ApiClient, drivers: Sequence[str]) -> Json:
    """Read the cluster and return the report. Raises ApiError, ApiUnreachable, ResourceApiMissing."""
    resources = ResourceApi(client)
    version = await resources.version()
    generated = text_of(time.time())
    base, fold = f"/apis/{GROUP}/{version}", FleetFold()

    async def pages(
        path: str, page: int, begin: Callable[[], None], params: dict[str, str] | None = None
    ) -> AsyncIterator[list[Json]]:
        async for answer, is_first in client.pages(path, params, page=page):
            if is_first:
                begin()
            found: list[Json] = answer.get("items") or []
            for each in found:
                # managedFields are half of an object.
                each.get("metadata", {}).pop("managedFields", None)
            yield found

    async def items(path: str, params: dict[str, str] | None = None) -> list[Json]:
        found: list[Json] = []
        async for page in pages(path, PAGE, found.clear, params):
            found += page
        return found

    for driver in drivers:
        begin, of_driver = functools.partial(fold.begin_slices, driver), {"fieldSelector": f"spec.driver={driver}"}
        async for page in pages(f"{base}/resourceslices", SLICE_PAGE, begin, of_driver):
            fold.add_slices(driver, (slice_from_version(each, version) for each in page))
    async for page in pages(f"{base}/resourceclaims", PAGE, fold.begin_claims):
        fold.add_claims(page)
    pending = await items("/api/v1/pods", {"fieldSelector": "status.phase=Pending"})
    rules = await resources.rules_path()
    taints = await items(rules) if rules else []
    return fold.report(pending, taints, await items(f"{base}/deviceclasses"), generated)


async def _main(kubeconfig: str, *drivers: str) -> int:
    client = ApiClient(kubeconfig, user_agent=f"dra-accelerators-controller/{__version__}")
    try:
        report = await make_report(client, drivers)
    except AcceleratorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except MemoryError:
        sys.stderr.write(f"The report of this fleet needs more than {MOST_MEMORY >> 20} MiB of memory\n")
        return 1
    finally:
        await client.close()
    sys.stdout.write(json.dumps(report, separators=(",", ":")) + "\n")
    return 0


def _leave_room() -> None:
    """Limit the memory and lower the priority of this process. If the host does not allow this, the limits of the service apply."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


if __name__ == "__main__":
    _leave_room()
    sys.exit(asyncio.run(_main(*sys.argv[1:])))
