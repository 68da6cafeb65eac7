# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Compare how many cards and rings stay whole with our claims, with Volcano's plugin, and by index. Random traces, no
cluster.

    make rings RINGS='[--claims 2000] [--seeds 8] [--nodes 1 4] [--ties any]'

Each line is one way to choose: free whole groups (average over time), claims served, and claims whose chips are
farther apart than necessary. The first two are also shown relative to Volcano's plugin. ``--ties`` is the scheduler's
choice among equally good nodes: any, or by other resources of pods the fullest or the emptiest.
"""

from __future__ import annotations

import argparse

from tests.bench.ring_model import MACHINES, TIES, Machine, compared_choices, run_traces


def lines(machine: Machine, *, nodes: int, seeds: int, claims: int, ties: str) -> list[str]:
    """Return the table of one machine."""
    # Volcano scores nodes itself, and its ties are any.
    found = {
        name: run_traces(
            machine,
            choose,
            range(seeds),
            nodes=nodes,
            claims=claims,
            ties="any" if name == "volcano" else ties,
        )
        for name, choose in compared_choices(machine).items()
    }
    volcano, runs = found["volcano"], 3 * seeds
    return [
        f"  {name:14} {each.whole / runs:7.2f} whole ({each.whole / volcano.whole:5.2f})  "
        f"{each.served:7} served ({each.served / volcano.served:5.2f})  {each.apart:6} apart"
        for name, each in found.items()
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=2000, help="claims of each trace")
    parser.add_argument("--seeds", type=int, default=8, help="traces of each load")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4], help="nodes that claims are placed on")
    parser.add_argument("--ties", choices=TIES, default="any", help="which of equally good nodes the scheduler takes")
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES), metavar="NAME")
    options = parser.parse_args()
    for name in options.machines:
        for nodes in options.nodes:
            print(f"{name}, {nodes} node{'s' if nodes > 1 else ''}; whole are {MACHINES[name].whole} chips", flush=True)
            rows = lines(MACHINES[name], nodes=nodes, seeds=options.seeds, claims=options.claims, ties=options.ties)
            print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
