# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Measure the effect of the number of published devices (8, 64, 128, and 1,000), and more parallel claims than sixteen
GPUs have room for.

The boards are exchanged: eight and sixteen H100, and 32 RTX PRO 6000, the maximum number of GPUs of NVIDIA's driver.
Such a board publishes 30 partitions, the GPU, and the GPU for a virtual machine: 32 of them publish up to 1,024
devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.allocations import KINDS, PUBLISHED, Layout
from tests.bench.figures import Figures
from tests.bench.test_figures import allocated_claims, await_devices, lay_out, measure, rounds_of
from tests.cluster.cluster import Cluster

MOST = "32xRTX-PRO-6000"


@pytest.fixture(scope="module")
def exchanged(request: pytest.FixtureRequest, cluster: Cluster) -> Cluster:
    """Return the node with other boards."""
    cluster.world("up", "--nodes", "1", "--silicon", request.param, timeout=3000)
    return cluster


@pytest.fixture(scope="module", autouse=True)
def boards_back(cluster: Cluster) -> Iterator[None]:
    """Restore sixteen H100 for the tests that follow."""
    yield
    cluster.world("up", "--nodes", "1", "--silicon", "16xH100", timeout=3000)


@pytest.mark.parametrize(("exchanged", "number", "layout"), PUBLISHED, indirect=["exchanged"], scope="module")
def test_prepare_with_many_published_devices(
    exchanged: Cluster, figures: Figures, number: int, layout: Layout, tmp_path: Path
) -> None:
    """One whole GPU at a time, without and with possible partitions: the number of other published devices should not
    matter.
    """
    cluster = exchanged
    lay_out(cluster, tmp_path / "layout.yml", layout)
    await_devices(cluster, f"{number}", lambda devices: len(devices) == number)
    node, kind = cluster.nodes()[0], KINDS["whole"]
    figures.add_explanation(
        "of N", "one whole GPU of a node that publishes N devices; with d, it has dynamic partitions"
    )
    names = sorted(cluster.devices(node))
    gpus = sorted(name for name, device in cluster.devices(node).items() if kind.fits(device))
    dynamic = [name for name in gpus if any(other.startswith(f"{name}-mig-") for other in names)]
    for letter, found in (("", [name for name in gpus if name not in dynamic]), ("d", dynamic)):
        if found:
            claims = allocated_claims(cluster, node, kind, 1, first=gpus.index(found[0]))
            measure(cluster, figures, f"of {number}{letter}", claims, rounds=60)


@pytest.mark.parametrize(("name", "parallel"), [("whole", 32), ("static", 128), ("dynamic", 128)])
@pytest.mark.parametrize("exchanged", [MOST], indirect=True, scope="module")
def test_prepare_as_many_as_a_node_can_have(
    exchanged: Cluster, figures: Figures, name: str, parallel: int, tmp_path: Path
) -> None:
    cluster, kind = exchanged, KINDS[name]
    layout = {"static": {"mode": "static", "partitions": {"1g.24gb": 4}}}.get(name, {"mode": kind.layout})
    lay_out(cluster, tmp_path / "layout.yml", ({"match": {}, **layout},))
    await_devices(cluster, name, lambda devices: sum(map(kind.fits, devices)) >= parallel)
    claims = allocated_claims(cluster, cluster.nodes()[0], kind, parallel)
    figures.add_explanation(f"{name}32", f"{kind.description}, on 32 RTX PRO 6000")
    measure(cluster, figures, f"{name}32", claims, rounds=rounds_of(kind, parallel))
