# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Claims that prefer near chips, on random traces: rings stay whole as with Volcano's plugin, which chooses its ring by a table."""

from __future__ import annotations

from dra_driver.core.ascend import preference, topology
from dra_driver.core.ascend.families import FAMILIES

from tests.bench import ring_model
from tests.bench.ring_model import CHIPS, SIZES, Choice, Outcome

NODES, LOADS, SEEDS, CLAIMS = (1, 3), (0.5, 0.7, 0.9), range(4), 400


def claims(*prefer: str) -> Choice:
    there = [topology.Chip(number, number) for number in range(CHIPS)]
    placed = topology.places(FAMILIES[0xD801], there)
    assert topology.rings_of(placed) == tuple(tuple(sorted(ring)) for ring in ring_model.RINGS)
    chips = {each.physical_id: topology.attributes("node", each, placed[each.physical_id]) for each in there}
    specs = {count: preference.claim_spec(count, "npu.huawei.com", prefer=prefer) for count in set(SIZES)}
    return ring_model.by_claim(specs, chips)


def outcome(choose: Choice) -> Outcome:
    return ring_model.total(
        [
            ring_model.play(choose, nodes=nodes, load=load, seed=seed, claims=CLAIMS)
            for nodes in NODES
            for load in LOADS
            for seed in SEEDS
        ]
    )


def test_rings_stay_as_whole_as_with_volcano() -> None:
    ours, waiting = outcome(claims(*preference.NEAREST_FIRST)), outcome(claims("same-card", "same-ring"))
    volcano, index = outcome(ring_model.by_ring), outcome(ring_model.by_index)
    said = f"ours {ours}, waiting {waiting}, volcano {volcano}, index {index}"
    # Who waits for a ring, as Volcano does, finds as many whole ones, and as many claims are served.
    assert waiting.whole >= 0.98 * volcano.whole and waiting.served >= 0.98 * volcano.served and not waiting.split, said
    # Who rather takes chips that lie apart is served more often than with Volcano, and leaves more than who takes any.
    assert ours.whole > index.whole and ours.split < index.split / 2, said
    assert ours.served >= volcano.served, said
