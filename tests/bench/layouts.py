# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Compare the disturbances of layout changes by this collection and by the steps of nvidia-mig-parted. Needs no
cluster and no GPU.

    make layouts LAYOUTS='[--changes 200] [--seed 1]'

Initially a pod uses each partition and each GPU with MIG off. The last rows are random changes of 1, 2, or 8 GPUs of a
node with eight H100. All GPUs keep their mode.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from dra_driver.core.model import Device

from tests.bench.layout_model import Layout, Outcome, disturbances_of_collection, disturbances_of_mig_parted, node
from tests.unit.core.board_model import all_states, profiles

BOARD, SMALL = "h100-80", "a30"
#: 3g.40gb and four 1g.10gb, by profile ID and start.
MIXED_PLACEMENTS = ((9, 4), (19, 0), (19, 1), (19, 2), (19, 3))
MIXED_COUNTS = {"3g.40gb": 1, "1g.10gb": 4}
SEVEN_PLACEMENTS = tuple((19, start) for start in range(7))
#: A node's GPUs, and the desired layout of each.
Change = tuple[tuple[Device, ...], Sequence[Layout]]
Comparison = tuple[str, Outcome, Outcome]


def typical_changes() -> dict[str, Change]:
    """Return typical changes by name."""
    eight = node(BOARD, [MIXED_PLACEMENTS] * 8)
    same: list[Layout] = [MIXED_COUNTS] * 7
    return {
        "8 x H100: nothing changes": (eight, [MIXED_COUNTS, *same]),
        "8 x H100: on one, two 1g.10gb become a 2g.20gb": (
            eight,
            [{"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}, *same],
        ),
        "8 x H100: one is whole from now on": (eight, [None, *same]),
        "8 x H100: one whole GPU is partitioned": (
            node(BOARD, [None, *[MIXED_PLACEMENTS] * 7]),
            [{"7g.80gb": 1}, *same],
        ),
        "8 x H100: of seven 1g.10gb each, four become a 4g.40gb": (
            node(BOARD, [SEVEN_PLACEMENTS] * 8),
            [{"4g.40gb": 1, "1g.10gb": 3}] * 8,
        ),
        "4 x A30: one whole GPU is partitioned": (
            node(SMALL, [None, ((14, 0), (14, 1)), None, ((14, 0), (14, 1))]),
            [{"1g.6gb": 4}, {"1g.6gb": 2}, None, {"1g.6gb": 2}],
        ),
    }


def compare_typical_changes() -> list[Comparison]:
    """Return the disturbances of each of these changes."""
    return [
        (name, disturbances_of_collection(*change), disturbances_of_mig_parted(*change))
        for name, change in typical_changes().items()
    ]


def random_changes(changing: int, changes: int, seed: int) -> Iterator[Change]:
    """Yield random changes of ``changing`` GPUs of a node each."""
    draw = random.Random(seed)
    states, names = all_states(BOARD), {each.profile_id: each.name for each in profiles(BOARD)}
    for _change in range(changes):
        now = [draw.choice(states) for _gpu in range(8)]
        then = [draw.choice(states) if number < changing else each for number, each in enumerate(now)]
        yield node(BOARD, now), [Counter(names[profile] for profile, _start in each) for each in then]


def compare_random_changes(changing: int, changes: int, seed: int) -> Comparison:
    """Return the sum of the disturbances of random changes."""
    mine = theirs = Outcome()
    for gpus, wanted in random_changes(changing, changes, seed):
        mine, theirs = (
            mine + disturbances_of_collection(gpus, wanted),
            theirs + disturbances_of_mig_parted(gpus, wanted),
        )
    return f"8 x H100: {changes} random changes of {changing} GPU{'s' if changing > 1 else ''}", mine, theirs


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=200, help="random changes for each number of GPUs")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = compare_typical_changes() + [
        compare_random_changes(changing, options.changes, options.seed) for changing in (1, 2, 8)
    ]
    width = max(len(name) for name, _ours, _theirs in rows)
    print(f"{'':{width}}  destroyed     GPUs touched  pods disturbed   (dra.accelerators, nvidia-mig-parted)")
    for name, mine, theirs in rows:
        pairs = zip((mine.destroyed, mine.touched, mine.pods), (theirs.destroyed, theirs.touched, theirs.pods))
        print(f"{name:{width}}  " + "  ".join(f"{one:5} {other:6}" for one, other in pairs))


if __name__ == "__main__":
    main()
