# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The changes of claims that start a pass of the controller, and the index of claims by node."""

from __future__ import annotations

import random
from pathlib import Path

from controller_steps import CLAIMS, NODES, cluster_of, new_cleanup_loop, run, running, until
from dra_driver.api.client import ApiClient
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.facts import ClaimFacts, ClaimIndex
from object_server import ObjectServer


def test_claims_of_present_nodes_start_no_pass(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        mine = new_cleanup_loop(client, ControllerMetrics(), grace=3600.0, interval=3600.0)
        mine._pass = _nothing  # type: ignore[method-assign]
        async with running(mine.run()):
            await until(lambda: server.count("WATCH", CLAIMS) and server.count("WATCH", NODES))
            await until(lambda: not mine._changed.is_set())
            for name in ("first", "second"):
                here = server.objects[f"{CLAIMS}/here-used"]
                server.put(f"{CLAIMS}/{name}", {**here, "metadata": {"namespace": "team"}})
            server.put(f"{CLAIMS}/unallocated", {"metadata": {"namespace": "team"}})
            await until(lambda: "team/unallocated" in mine.claims.items)
            assert not mine._changed.is_set()
            removed = server.objects[f"{CLAIMS}/gone-used"]
            server.put(f"{CLAIMS}/of-absent", {**removed, "metadata": {"namespace": "team"}})
            await until(lambda: "team/of-absent" in mine.claims.items)
            assert mine._changed.is_set()
            assert {claim.node for claim in mine.view().claims} == {"gone"}

    run(tmp_path, scenario)


async def _nothing() -> None:
    """Do nothing instead of a pass, so that only changes set the flag."""


def test_claim_index_follows_changes() -> None:
    chance, index, expected = random.Random(7), ClaimIndex(), dict[str, ClaimFacts]()
    for number in range(2000):
        key = f"team/{chance.randrange(50)}"
        if key in expected and chance.random() < 0.4:
            del index[key], expected[key]
        else:
            node = chance.choice(["", "a", "b", "c"])
            claim = ClaimFacts("team", key, str(number), node, (), (), (), False, False)
            index[key] = expected[key] = claim
        assert dict(index) == expected
        found = {name: claim for claims in index.by_node.values() for name, claim in claims.items()}
        assert found == expected and all(index.by_node.values())
    index.clear()
    assert not index and not index.by_node
