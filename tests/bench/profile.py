# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Where the processor time of a claim goes: the driver on a simulated node of its own, many claims, its functions by their own time.

``python -m tests.bench.profile --kind dynamic --claims 300`` from the checkout (``make profile``). Needs root, gcc and unshare, as the chaos does,
whose node it is; the kinds of claims are the chaos' as well.
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

from tests.chaos.__main__ import LIBRARY, enter, find_parts

if TYPE_CHECKING:
    from tests.chaos.callers import Kubelet
    from tests.chaos.node import Node


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.bench.profile", description=__doc__)
    made.add_argument(
        "--vendor", default="nvidia", help="as for the chaos: nvidia, ascend, ascend-910a or ascend-older"
    )
    made.add_argument("--kind", default="whole", help="the kind of claims, one of the chaos'")
    made.add_argument("--claims", type=int, default=300, help="so many, one after the other: prepared and given back")
    made.add_argument("--top", type=int, default=40, help="so many functions are shown")
    made.add_argument(
        "--only-sums",
        action="store_true",
        help="only what a claim costs a driver that nobody watches, and no functions",
    )
    made.add_argument("--log", type=Path, default=Path("/run/profile-driver.log"), help="where the driver writes")
    return made


def table(claims: int, seconds: float, threads: dict[str, float], looks: dict[str, int], top: int) -> str:
    """The threads by their processor time, and the functions by their share of the looks that found one at work."""
    total = max(sum(looks.values()), 1)
    found = sorted(looks.items(), key=lambda entry: -entry[1])
    shown = [f"{number / total:6.1%}  {name}" for name, number in found[:top] if number]
    used = [
        f"{taken / claims * 1e3:6.3f}  {name}" for name, taken in sorted(threads.items(), key=lambda each: -each[1])
    ]
    head = f"{seconds / claims * 1e3:.2f} ms of processor time for each claim; own time of functions, of {total} looks:"
    return "\n".join(["ms of processor time for each claim, by threads:", *used[:top], head, *shown])


def main() -> int:
    """Drive a driver that watches itself, and print the table."""
    find_parts()
    options = parser().parse_args()
    vendor = enter(options.vendor)
    from tests.chaos.callers import caller_of
    from tests.chaos.node import Node

    if options.kind not in vendor.by_name:
        print(f"profile: there is no kind {options.kind}; expected one of {', '.join(vendor.by_name)}")
        return 2
    seen = Path("/run/profile.json")
    node = Node(vendor, Path(os.environ[LIBRARY]), options.log)
    node.configure(log={"level": "warning"})
    node.start()
    node.wait_ready()
    caller = caller_of(node, node.kinds[options.kind])
    _warm(caller, options.claims)
    former = used(node.pid)
    taken = _drive(node, caller, options.claims)
    print(unwatched(options.kind, taken, former, used(node.pid)))
    if options.only_sums:
        node.close()
        return 0
    node.stop()
    node.start(samples=seen)
    node.wait_ready()
    _warm(caller, options.claims)
    before = _seen(seen)
    _drive(node, caller, options.claims)
    after = _seen(seen)
    node.close()
    looks = {name: number - before["looks"].get(name, 0) for name, number in after["looks"].items()}
    threads = {name: taken - before["threads"].get(name, 0.0) for name, taken in after["threads"].items()}
    print(table(options.claims, after["seconds"] - before["seconds"], threads, looks, options.top))
    return 0


@dataclass(frozen=True)
class Used:
    """What a process has used since it began: seconds of a processor in its own code and in the kernel, and how often its threads waited."""

    user: float
    kernel: float
    waits: int


def used(pid: int) -> Used:
    """Ask the kernel what a process has used."""
    tick = os.sysconf("SC_CLK_TCK")
    numbers = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    waits = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(encoding="ascii"), re.MULTILINE)
        waits += int(found[1]) if found else 0
    return Used(int(numbers[11]) / tick, int(numbers[12]) / tick, waits)


def unwatched(kind: str, taken: list[float], before: Used, after: Used) -> str:
    """What a claim costs a driver that is not watched; ``taken`` is how long each was prepared, in seconds."""
    claims = len(taken)
    user, kernel = (
        (end - begin) / claims * 1e3 for begin, end in ((before.user, after.user), (before.kernel, after.kernel))
    )
    return (
        f"{claims} claims of the kind {kind}, one after the other: {user + kernel:.2f} ms of processor time for each claim and its return "
        f"({user:.2f} of its own, {kernel:.2f} in the kernel), its threads waited {(after.waits - before.waits) / claims:.1f} times; "
        f"prepare p50 {sorted(taken)[claims // 2] * 1e3:.2f} ms, at most {max(taken) * 1e3:.0f}, as the caller sees it"
    )


def _warm(caller: Kubelet, claims: int) -> None:
    for _claim in range(max(claims // 10, 3)):
        caller.prepare()
        caller.give_up()


def _drive(node: Node, caller: Kubelet, claims: int) -> list[float]:
    """Have so many claims prepared and given back, and return how long each preparation took."""
    taken = []
    for _claim in range(claims):
        start = time.perf_counter()
        caller.prepare()
        taken.append(time.perf_counter() - start)
        caller.give_up()
        node.api.forget()
    return taken


def _seen(path: Path) -> dict[str, Any]:
    """What was seen until now: the next that is written, for what was asked of the driver is in it then."""
    former = path.stat().st_mtime_ns if path.exists() else 0
    while not path.exists() or path.stat().st_mtime_ns == former:
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
