# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Profile the processor time of claims: run the driver on a simulated node, prepare many claims, and list functions by
their own time.

``python -m tests.bench.profile --kind dynamic --claims 300`` from the checkout (``make profile``). It needs root, gcc,
and unshare, like the chaos test, whose node and kinds of claims it uses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.__main__ import LIBRARY, enter, set_import_paths

if TYPE_CHECKING:
    from tests.chaos.callers import Kubelet
    from tests.chaos.node import Node


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profile", description=__doc__)
    parser.add_argument(
        "--vendor", default="nvidia", help="boards of the chaos tests: nvidia, ascend, ascend-910a, or ascend-older"
    )
    parser.add_argument("--kind", default="whole", help="kind of the claims in the chaos tests")
    parser.add_argument("--claims", type=int, default=300, help="number of claims, each prepared and unprepared")
    parser.add_argument("--top", type=int, default=40, help="number of functions in the output")
    parser.add_argument(
        "--only-sums",
        action="store_true",
        help="only the cost of a claim, measured without the profiler, and no functions",
    )
    parser.add_argument(
        "--log", type=Path, default=Path("/run/profile-driver.log"), help="file for the output of the driver"
    )
    return parser


def table(claims: int, seconds: float, threads: dict[str, float], samples: dict[str, int], top: int) -> str:
    """Return the threads by processor time, and the functions by their share of the samples that found one running."""
    total = max(sum(samples.values()), 1)
    found = sorted(samples.items(), key=lambda entry: -entry[1])
    shown = [f"{number / total:6.1%}  {name}" for name, number in found[:top] if number]
    used = [
        f"{taken / claims * 1e3:6.3f}  {name}" for name, taken in sorted(threads.items(), key=lambda each: -each[1])
    ]
    head = (
        f"{seconds / claims * 1e3:.2f} ms of processor time for each claim; own time of functions, of {total} samples:"
    )
    return "\n".join(["ms of processor time for each claim, by threads:", *used[:top], head, *shown])


def main() -> int:
    """Run a driver that samples itself, and print the table."""
    set_import_paths()
    options = argument_parser().parse_args()
    vendor = enter(options.vendor)
    from tests.chaos.callers import caller_of
    from tests.chaos.node import Node

    if options.kind not in vendor.by_name:
        print(f"profile: unknown kind {options.kind}; expected one of {', '.join(vendor.by_name)}")
        return 2
    samples_file = Path("/run/profile.json")
    node = Node(vendor, Path(os.environ[LIBRARY]), options.log)
    node.configure(log={"level": "warning"})
    node.start()
    node.wait_ready()
    caller = caller_of(node, node.kinds[options.kind])
    _warm_up(caller, options.claims)
    before_run = resource_use(node.pid)
    taken = _measure_prepares(node, caller, options.claims)
    print(cost_without_profiler(options.kind, taken, before_run, resource_use(node.pid)))
    if options.only_sums:
        node.close()
        return 0
    node.stop()
    node.start(samples=samples_file)
    node.wait_ready()
    _warm_up(caller, options.claims)
    before = _next_samples(samples_file)
    _measure_prepares(node, caller, options.claims)
    after = _next_samples(samples_file)
    node.close()
    samples = {name: number - before["samples"].get(name, 0) for name, number in after["samples"].items()}
    threads = {name: taken - before["threads"].get(name, 0.0) for name, taken in after["threads"].items()}
    print(table(options.claims, after["seconds"] - before["seconds"], threads, samples, options.top))
    return 0


@dataclass(frozen=True)
class ResourceUse:
    """Resources that a process has used so far: processor seconds in user and kernel mode, and voluntary context
    switches.
    """

    user: float
    kernel: float
    waits: int


def resource_use(pid: int) -> ResourceUse:
    """Return the resources that a process has used, from the kernel."""
    tick = os.sysconf("SC_CLK_TCK")
    numbers = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    waits = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(encoding="ascii"), re.MULTILINE)
        waits += int(found[1]) if found else 0
    return ResourceUse(int(numbers[11]) / tick, int(numbers[12]) / tick, waits)


def cost_without_profiler(kind: str, taken: list[float], before: ResourceUse, after: ResourceUse) -> str:
    """Return the cost of a claim for a driver without sampling. ``taken`` is the duration of each prepare in seconds."""
    claims = len(taken)
    user, kernel = (
        (end - begin) / claims * 1e3 for begin, end in ((before.user, after.user), (before.kernel, after.kernel))
    )
    return (
        f"{claims} claims of the kind {kind}, in sequence: {user + kernel:.2f} ms of processor time for each claim and its return "
        f"({user:.2f} in user space, {kernel:.2f} in the kernel), its threads waited {(after.waits - before.waits) / claims:.1f} times; "
        f"prepare p50 {sorted(taken)[claims // 2] * 1e3:.2f} ms, at most {max(taken) * 1e3:.0f}, as the caller sees it"
    )


def _warm_up(caller: Kubelet, claims: int) -> None:
    for _claim in range(max(claims // 10, 3)):
        caller.prepare()
        caller.abandon()


def _measure_prepares(node: Node, caller: Kubelet, claims: int) -> list[float]:
    """Prepare and unprepare the claims; return the duration of each prepare."""
    taken = []
    for _claim in range(claims):
        start = time.perf_counter()
        caller.prepare()
        taken.append(time.perf_counter() - start)
        caller.abandon()
        node.api.clear_records()
    return taken


def _next_samples(path: Path) -> dict[str, Any]:
    """Return the next sample file that the driver writes, which covers all its work so far."""
    previous = path.stat().st_mtime_ns if path.exists() else 0
    while not path.exists() or path.stat().st_mtime_ns == previous:
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
