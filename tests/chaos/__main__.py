# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Chaos tests: inject faults into one driver and its simulated node. A table at the end has the results.

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


def set_import_paths() -> None:
    """Set the import paths of this process and its children to the product and the shared test code."""
    tree = subprocess.run([ROOT / "tests/tools/tree"], check=True, capture_output=True, text=True).stdout.strip()
    directories = [f"{tree}/python", str(ROOT), *(f"{ROOT}/tests/unit/{name}" for name in ("dra_driver", "core"))]
    directories.append(f"{ROOT}/roles/simulator/files")
    sys.path[:0] = directories
    os.environ["PYTHONPATH"] = os.pathsep.join(directories)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    environment_variable = os.environ.get
    arguments.add_argument(
        "--vendor",
        default="nvidia",
        help="the vendor of the accelerators: nvidia, ascend, ascend-910a, or ascend-older",
    )
    arguments.add_argument(
        "--seed",
        type=int,
        default=int(environment_variable("CHAOS_SEED", "0")) or random.SystemRandom().randrange(10**9),
    )
    arguments.add_argument(
        "--runs", type=int, default=int(environment_variable("CHAOS_RUNS", "300")), help="kills of each kind"
    )
    arguments.add_argument(
        "--least",
        type=int,
        default=0,
        help="the minimum number of kills of each kind; fewer are a failure (0: no minimum)",
    )
    arguments.add_argument(
        "--seconds",
        type=float,
        default=float(environment_variable("CHAOS_SECONDS", "300")),
        help="time limit for each kind and fault, in seconds",
    )
    arguments.add_argument(
        "--faults",
        default="",
        help="only these, separated by commas: kill, store, older, newer, disk, …; an unknown name prints all",
    )
    arguments.add_argument("--kinds", default="", help="kill only claims of these kinds, separated by commas")
    arguments.add_argument(
        "--cases",
        type=int,
        default=int(environment_variable("CHAOS_CASES", "0")),
        help="number of cases of each fault except for kills (0: the default of the fault)",
    )
    arguments.add_argument(
        "--away",
        type=float,
        default=float(environment_variable("CHAOS_AWAY_SECONDS", "30")),
        help="seconds without an API server",
    )
    arguments.add_argument(
        "--requests",
        type=int,
        default=int(environment_variable("CHAOS_REQUESTS", "100000")),
        help="number of requests of both fuzzers: four fifths are on the sockets, one fifth have opaque configurations",
    )
    arguments.add_argument(
        "--least-requests",
        type=int,
        default=0,
        help="the minimum number of requests of both fuzzers; fewer are a failure (0: no minimum)",
    )
    arguments.add_argument(
        "--fuzz-seconds",
        type=float,
        default=float(environment_variable("CHAOS_FUZZ_SECONDS", "1800")),
        help="maximum time for each fuzzer, in seconds",
    )
    arguments.add_argument("--case", type=int, help="only the case with this number, without minimums")
    arguments.add_argument(
        "--parallel",
        type=int,
        default=1,
        help="number of parallel nodes, each with a separate driver, sockets, directories, and hardware; each kind, fault, and fuzzer uses one node",
    )
    arguments.add_argument(
        "--log", type=Path, default=Path("/run/chaos-driver.log"), help="the file for the log of the driver"
    )
    arguments.add_argument(
        "--rows", type=Path, help=argparse.SUPPRESS
    )  # parallel_nodes.py sets it: the file for the rows of one node
    return arguments


def build_library(vendor_name: str) -> Vendor:
    """Build the library of a vendor's accelerators for this process and its children. Return the vendor."""
    from tests.chaos.vendors import VENDORS
    from tests.simulator.nvml_builds import build

    if vendor_name not in VENDORS:
        sys.exit(f"There is no vendor {vendor_name}; expected one of {', '.join(VENDORS)}.")
    vendor = VENDORS[vendor_name]
    if LIBRARY not in os.environ:
        os.environ[LIBRARY] = str(
            build("", *vendor.build_options, sources=vendor.sources).folder
        )  # before the namespaces, so that it stays in the cache
    return vendor


def enter(vendor_name: str) -> Vendor:
    """Build the library of a vendor's accelerators and enter the namespaces of a node. Return the vendor."""
    from tests.chaos import node_namespaces

    vendor = build_library(vendor_name)
    node_namespaces.enter()
    return vendor


def main() -> int:
    """Run the requested tests."""
    set_import_paths()
    options = argument_parser().parse_args()
    if options.parallel > 1:
        from tests.chaos import parallel_nodes

        return parallel_nodes.run(options, build_library(options.vendor))
    vendor = enter(options.vendor)
    from tests.chaos import runner

    return runner.run(options, vendor, Path(os.environ[LIBRARY]))


if __name__ == "__main__":
    sys.exit(main())
