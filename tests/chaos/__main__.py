# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Chaos tests: one driver on one simulated node, with all faults of both. A table at the end has the results.

``python -m tests.chaos --help`` from the checkout (``make chaos`` runs all of it). Needs root, gcc, and unshare.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.vendor import Vendor

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "DRA_ACCELERATORS_CHAOS_LIBRARY"


def find_parts() -> None:
    """Set the import paths of this process and its children to the product and the shared test code."""
    tree = subprocess.run([ROOT / "tests/tools/tree"], check=True, capture_output=True, text=True).stdout.strip()
    folders = [f"{tree}/python", str(ROOT), *(f"{ROOT}/tests/unit/{name}" for name in ("dra_driver", "core"))]
    folders.append(f"{ROOT}/roles/simulator/files")
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    number = os.environ.get
    made.add_argument(
        "--vendor",
        default="nvidia",
        help="whose accelerators the node has: nvidia, ascend, ascend-910a or ascend-older",
    )
    made.add_argument(
        "--seed", type=int, default=int(number("CHAOS_SEED", "0")) or random.SystemRandom().randrange(10**9)
    )
    made.add_argument("--runs", type=int, default=int(number("CHAOS_RUNS", "300")), help="kills of each kind")
    made.add_argument(
        "--least",
        type=int,
        default=0,
        help="it is a failure where a kind was killed less often than that (0: no floor)",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=float(number("CHAOS_SECONDS", "300")),
        help="at most so long for each kind or fault",
    )
    made.add_argument(
        "--faults",
        default="",
        help="only these, by commas: kill, store, older, newer, disk, …; an unknown one names them",
    )
    made.add_argument("--kinds", default="", help="kill only claims of these kinds, by commas")
    made.add_argument(
        "--cases", type=int, default=int(number("CHAOS_CASES", "0")), help="cases of each other fault (0: as it has)"
    )
    made.add_argument(
        "--away", type=float, default=float(number("CHAOS_AWAY_SECONDS", "30")), help="seconds without an API server"
    )
    made.add_argument(
        "--requests",
        type=int,
        default=int(number("CHAOS_REQUESTS", "100000")),
        help="of both kinds of fuzzing in all: four fifths are requests on the sockets, one fifth calls with opaque configurations",
    )
    made.add_argument(
        "--least-requests",
        type=int,
        default=0,
        help="it is a failure where there were fewer requests than that, or than its part of them in one of both kinds (0: no floor)",
    )
    made.add_argument(
        "--fuzz-seconds",
        type=float,
        default=float(number("CHAOS_FUZZ_SECONDS", "1800")),
        help="maximum time for each fuzzer, in seconds",
    )
    made.add_argument("--case", type=int, help="only the case with this number; floors do not count")
    made.add_argument(
        "--parallel",
        type=int,
        default=1,
        help="number of parallel nodes, each with a separate driver, sockets, directories, and hardware; each kind, fault, and fuzzer uses one node",
    )
    made.add_argument("--log", type=Path, default=Path("/run/chaos-driver.log"), help="where the driver writes")
    made.add_argument(
        "--rows", type=Path, help=argparse.SUPPRESS
    )  # the file for a node's part of the table, with several nodes
    return made


def make_ready(word: str) -> Vendor:
    """Build the library of a vendor's accelerators for this process and its children. Return the vendor."""
    from tests.chaos.vendors import VENDORS
    from tests.simulator.nvml_builds import build

    if word not in VENDORS:
        sys.exit(f"There is no vendor {word}; expected one of {', '.join(VENDORS)}.")
    vendor = VENDORS[word]
    if LIBRARY not in os.environ:
        os.environ[LIBRARY] = str(
            build("", *vendor.built, sources=vendor.sources).folder
        )  # before the namespaces, so that it stays in the cache
    return vendor


def enter(word: str) -> Vendor:
    """Build the library of a vendor's accelerators and enter the namespaces of a node. Return the vendor."""
    from tests.chaos import surroundings

    vendor = make_ready(word)
    surroundings.enter()
    return vendor


def main() -> int:
    """Run the requested tests."""
    find_parts()
    options = parser().parse_args()
    if options.parallel > 1:
        from tests.chaos import lanes

        return lanes.run(options, make_ready(options.vendor))
    vendor = enter(options.vendor)
    from tests.chaos import campaigns

    return campaigns.run(options, vendor, Path(os.environ[LIBRARY]))


if __name__ == "__main__":
    sys.exit(main())
