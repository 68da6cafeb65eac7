# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The demo verifies the output of each pod: the number of devices, their kind, and their proximity."""

from __future__ import annotations

import pytest
from demo import DEMOS, DemoFailed, Example

from tests.cluster.cluster import EXAMPLES

EXAMPLE_BY_FILE = {example.file: example for demo in DEMOS.values() for example in demo.examples}
PAIR, RING = EXAMPLE_BY_FILE["ascend/same-card-pair.yaml"], EXAMPLE_BY_FILE["ascend/same-ring-four.yaml"]


def shown(*chips: tuple[int, str]) -> str:
    """Return the output of npu-smi for chips, by card number and name."""
    return "\n".join(f"| {card:<5} {name:<21} | OK              |\n| 0     0  | 0000:11:00.0 |" for card, name in chips)


@pytest.mark.parametrize(
    ("example", "chips"),
    [
        (PAIR, [(1, "310P3")]),
        (PAIR, [(1, "310P3"), (2, "310P3")]),
        (PAIR, [(1, "310P3"), (1, "310P3"), (1, "310P3")]),
        (PAIR, [(1, "310P3"), (1, "310Pvir02")]),
        (RING, [(number, "910") for number in (2, 3, 4, 5)]),
        (RING, [(number, "910") for number in range(8)]),
    ],
)
def test_check_other_devices_end_the_demo(example: Example, chips: list[tuple[int, str]]) -> None:
    with pytest.raises(DemoFailed):
        example.check("pod", shown(*chips))


def test_check_expected_devices_are_reported() -> None:
    assert len(PAIR.check("pod", shown((1, "310P3"), (1, "310P3")))) == 2
    assert len(RING.check("pod", shown(*((number, "910") for number in range(4, 8))))) == 4


@pytest.mark.parametrize("name", DEMOS)
def test_demo_uses_existing_files(name: str) -> None:
    demo = DEMOS[name]
    assert len(demo.commands) == len(demo.nodes)
    for file in (demo.fleet, demo.unsatisfiable, demo.suggested_example, *(example.file for example in demo.examples)):
        assert (EXAMPLES / file).is_file(), file
