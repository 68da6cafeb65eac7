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
import sys
import time
from pathlib import Path
from typing import Any

from tests.chaos.__main__ import LIBRARY, enter, find_parts


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.bench.profile", description=__doc__)
    made.add_argument(
        "--vendor", default="nvidia", help="as for the chaos: nvidia, ascend, ascend-910a or ascend-older"
    )
    made.add_argument("--kind", default="whole", help="the kind of claims, one of the chaos'")
    made.add_argument("--claims", type=int, default=300, help="so many, one after the other: prepared and given back")
    made.add_argument("--top", type=int, default=40, help="so many functions are shown")
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
    node.start(samples=seen)
    node.wait_ready()
    caller = caller_of(node, node.kinds[options.kind])
    for _warm in range(max(options.claims // 10, 3)):
        caller.prepare()
        caller.give_up()
    before, began, taken = _seen(seen), time.monotonic(), []
    for _claim in range(options.claims):
        start = time.perf_counter()
        caller.prepare()
        taken.append(time.perf_counter() - start)
        caller.give_up()
        node.api.forget()
    elapsed = time.monotonic() - began
    after = _seen(seen)
    node.close()
    looks = {name: number - before["looks"].get(name, 0) for name, number in after["looks"].items()}
    print(
        f"{options.claims} claims of the kind {options.kind} in {elapsed:.1f} s, one after the other; "
        f"prepare p50 {sorted(taken)[len(taken) // 2] * 1e3:.2f} ms, at most {max(taken) * 1e3:.0f}, as the caller sees it"
    )
    threads = {name: taken - before["threads"].get(name, 0.0) for name, taken in after["threads"].items()}
    print(table(options.claims, after["seconds"] - before["seconds"], threads, looks, options.top))
    return 0


def _seen(path: Path) -> dict[str, Any]:
    """What was seen until now: the next that is written, for what was asked of the driver is in it then."""
    former = path.stat().st_mtime_ns if path.exists() else 0
    while not path.exists() or path.stat().st_mtime_ns == former:
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
