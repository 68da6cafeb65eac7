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
from ..deadlines import within
from .fleet_fold import FleetReportBuilder

Json = dict[str, Any]
#: Seconds for which a report is cached, or the duration of its creation if that is longer: so reports use at most half of one processor.
KEPT_SECONDS = 10.0
#: Seconds for which an error is cached.
FAILED_SECONDS = 5.0
SLICE_PAGE, PAGE = 100, 500
#: The memory limit of the process that creates a report, in bytes. The report of 5,000 nodes with 208 devices each needs less. The process
#: gets at most half of the memory of its control group: the kubelet ends the controller together with a process that exceeds it.
MOST_MEMORY = 1 << 30
#: The time limit of this process, in seconds. With its low priority it needs a multiple of its 5 minutes of processor time on a busy host.
MOST_SECONDS = 3600.0
LONGEST_MESSAGE = 2000


class ReportFailed(AcceleratorError):
    """The process that creates the report has failed."""

    default_code = "report-failed"


@dataclass(frozen=True)
class CachedReport:
    """A finished report, its creation time by the monotonic clock, and the seconds for which it is cached."""

    body: bytes
    at: float
    kept: float = KEPT_SECONDS


class FleetReport:
    """Create the report, at most once at a time. ``clock`` returns seconds of a monotonic clock."""

    def __init__(self, kubeconfig: str, drivers: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._arguments = (kubeconfig, *drivers)
        self._clock = clock
        self._one = asyncio.Lock()
        #: The last error and its time, so that waiting callers do not all repeat the failed creation.
        self._failed: tuple[ReportFailed, float] | None = None
        self.last: CachedReport | None = None

    async def current(self) -> CachedReport:
        """Return the cached report, or a new report if the cached one has expired. Raises ReportFailed."""
        async with self._one:
            if self.last is None or self._clock() - self.last.at >= self.last.kept:
                if self._failed is not None and self._clock() - self._failed[1] < FAILED_SECONDS:
                    raise self._failed[0]
                began = self._clock()
                try:
                    body = await self._make()
                except ReportFailed as error:
                    self._failed = error, self._clock()
                    raise
                now, self._failed = self._clock(), None
                self.last = CachedReport(body, now, max(KEPT_SECONDS, now - began))
            return self.last

    async def _make(self) -> bytes:
        command = (sys.executable, "-IB", str(Path(runner.__file__).absolute()), __name__, *self._arguments)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            body, errors = await within(process.communicate(), MOST_SECONDS)
        except asyncio.TimeoutError:
            raise ReportFailed(
                f"The report was not complete after {MOST_SECONDS:g} s, so its process was ended",
                hint="Check how long the API server needs for lists, and how much processor time the controller has.",
            ) from None
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
    base, fold = f"/apis/{GROUP}/{version}", FleetReportBuilder()

    async def pages(
        path: str, page: int, begin: Callable[[], None], params: dict[str, str] | None = None
    ) -> AsyncIterator[list[Json]]:
        async for answer, is_first in client.pages(path, params, page=page):
            if is_first:
                begin()
            found: list[Json] = answer["items"] or []
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
        sys.stderr.write(
            f"The report of this fleet needs more than {memory_limit() >> 20} MiB of memory, which is {MOST_MEMORY >> 20} MiB or half of the "
            "memory limit of the controller\n"
        )
        return 1
    finally:
        await client.close()
    sys.stdout.write(json.dumps(report, separators=(",", ":")) + "\n")
    return 0


def memory_limit(root: Path = Path("/")) -> int:
    """Return the memory limit in bytes for the process that creates the report."""
    limit = MOST_MEMORY
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1].rpartition(":")[2].strip("/")
        limit = min(limit, int((root / "sys/fs/cgroup" / group / "memory.max").read_text(encoding="ascii")) // 2)
    return limit


def _leave_room() -> None:
    """Limit the memory and lower the priority of this process. If the host does not allow this, the limits of the service apply."""
    limit = memory_limit()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


if __name__ == "__main__":
    _leave_room()
    sys.exit(asyncio.run(_main(*sys.argv[1:])))
