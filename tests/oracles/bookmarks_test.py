# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that a real API server sends bookmarks to idle watches more often than the client reopens silent watches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from dra_driver.api.client import ApiClient
from dra_driver.api.liveness import SILENCE_SECONDS

from tests.bench.api_server import ApiServer

#: The watches of a driver and one of the controller: path and field selector.
WATCHES = (
    ("/apis/resource.k8s.io/v1/resourceslices", "spec.driver=gpu.nvidia.com,spec.nodeName=node-1"),
    ("/api/v1/namespaces/default/configmaps", "metadata.name=waiting-claims-node-1"),
    ("/apis/resource.k8s.io/v1/resourceclaims", ""),
)
BOOKMARKS = 2
#: Minimum seconds between the longest pause of the API server and the shortest limit of the client.
MARGIN = 10.0


async def bookmark_pauses(client: ApiClient, path: str, selector: str) -> list[float]:
    """Return the pauses before the first bookmarks of a watch in seconds."""
    params = {"fieldSelector": selector} if selector else {}
    version = (await client.get(path, params))["metadata"]["resourceVersion"]
    clock, pauses = asyncio.get_running_loop().time, []
    last = clock()
    async for event in client.watch(path, resource_version=version, params=params):
        assert event.type == "BOOKMARK"
        pauses.append(clock() - last)
        last = clock()
        if len(pauses) == BOOKMARKS:
            break
    return pauses


@pytest.mark.prove
def test_idle_watches_get_bookmarks_in_time(tmp_path: Path) -> None:
    server = ApiServer(tmp_path)

    async def scenario() -> None:
        client = ApiClient(str(server.kubeconfig))
        try:
            found = await asyncio.gather(*(bookmark_pauses(client, *each) for each in WATCHES))
        finally:
            await client.close()
        print("pauses:", found)
        assert all(len(pauses) == BOOKMARKS and max(pauses) < SILENCE_SECONDS[0] - MARGIN for pauses in found), found

    with server.running():
        asyncio.run(scenario())
