# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Compare NPUs with GPUs: the duration of a prepare of each, in alternating turns, in one driver process on a node
with both.

For whole devices the ratio within the same run is asserted, which does not depend on other load on the host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.allocations import KINDS, NPU_COMPARISONS, NPU_KINDS
from tests.bench.figures import Figures
from tests.bench.test_figures import allocated_claims, await_devices, lay_out, measure
from tests.cluster.cluster import Cluster
from tests.cluster.npus import NpuCluster

BOTH = "2xH100-2x310P"
#: Number of turns of each, and prepares per turn. Creating a partition waits for slow boards.
TURNS, ROUNDS, ROUNDS_OF_MADE = 3, 40, 8
#: Maximum ratio of the median prepare of a whole NPU to that of a whole GPU.
MOST = 1.5


@pytest.fixture(scope="module")
def both(cluster: Cluster) -> Iterator[tuple[Cluster, NpuCluster]]:
    """Yield the node with devices of two vendors, once for each vendor; restore sixteen H100 afterwards."""
    cluster.world("up", "--nodes", "1", "--silicon", BOTH, timeout=3000)
    yield cluster, NpuCluster(cluster.name)
    cluster.world("up", "--nodes", "1", "--silicon", "16xH100", timeout=3000)


def callers(npus: NpuCluster, node: str, *arguments: str) -> set[int]:
    """Return the process IDs that have called the NPU library, as the library counts them. npu-smi calls nothing else."""
    counted = json.loads(npus.run(node, "accelerator-simulator", "--vendor", "ascend", "calls", *arguments))
    return {int(process["pid"]) for process in counted["processes"]}


@pytest.mark.parametrize("name", NPU_COMPARISONS)
def test_comparison_of_npus_and_gpus(
    both: tuple[Cluster, NpuCluster], figures: Figures, name: str, tmp_path: Path
) -> None:
    gpus, npus = both
    layout, numbers = NPU_COMPARISONS[name]
    lay_out(gpus, tmp_path / "layout.yml", layout, accelerator_vendors=["nvidia", "ascend"])
    sides = ((gpus, KINDS[name]), (npus, NPU_KINDS[name]))
    for cluster, kind in sides:
        await_devices(cluster, kind.name, lambda devices, kind=kind: any(map(kind.fits, devices)))
        figures.add_explanation(kind.name, kind.description)
    (node,) = gpus.nodes()
    driver = gpus.driver_pid(node)
    callers(npus, node, "--reset")
    for parallel in numbers:
        rounds = max((ROUNDS_OF_MADE if name == "dynamic" else ROUNDS) // parallel, 3)
        taken: dict[str, list[float]] = {kind.name: [] for _cluster, kind in sides}
        for _turn in range(TURNS):
            for cluster, kind in sides:
                claims = allocated_claims(cluster, node, kind, parallel)
                answer = measure(cluster, figures, kind.name, claims, rounds=rounds)
                taken[kind.name] += answer["prepare"]
        (ours, theirs) = (taken[kind.name] for kind in (NPU_KINDS[name], KINDS[name]))
        ratio = figures.add_ratio(f"{NPU_KINDS[name].name} : {name}, the time of a prepare", parallel, ours, theirs)
        assert name != "whole" or ratio <= MOST, (
            f"{parallel} in parallel: a whole NPU takes {ratio:.2f} times what a whole GPU takes; expected {MOST} at most"
        )
    assert callers(npus, node) == {driver}, (
        "another process than the driver has asked the NPUs' library, such as npu-smi"
    )
    npus.run(node, "npu-smi", "info")
    assert len(callers(npus, node)) == 2, "a started program is not counted, so the result above is not valid"
