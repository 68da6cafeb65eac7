# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The reader of pods for metrics: its requests to an API server that is slow, or rejects the reads."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from api_model import ApiModel
from api_test import run
from dra_driver.api.client import ApiClient
from dra_driver.api.resources import ResourceApi
from dra_driver.core.errors import AcceleratorError
from dra_driver.monitoring.pods import RETRY_SECONDS, PodReader

POD = {"spec": {"containers": [{"name": "a", "resources": {"claims": [{"name": "gpu"}]}}]}}


def pods_read(api: ApiModel) -> int:
    return len([path for _method, path in api.log if "/pods/" in path])


def test_slow_pod_reads_continue_at_the_next_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has many pods, and the API server answers slowly: pods that were read are not read again."""
    monkeypatch.setattr("dra_driver.monitoring.pods.READ_SECONDS", 0.5)

    async def scenario(api: ApiModel, client: ApiClient) -> None:
        api.pods = {f"pod-{number}": POD for number in range(9)}
        api.pod_seconds = 0.1
        wanted = {("default", name): {"uid"} for name in api.pods}
        reader = PodReader(asyncio.get_running_loop(), ResourceApi(client))
        for _scrape in range(9):
            with contextlib.suppress(AcceleratorError):
                await asyncio.to_thread(reader.refresh, wanted)
        assert set(reader.known(wanted)) == set(wanted)
        assert pods_read(api) < 2 * len(wanted)

    run(tmp_path, scenario)


def test_server_that_rejects_pod_reads_gets_no_more_requests(tmp_path: Path) -> None:
    async def scenario(api: ApiModel, client: ApiClient) -> None:
        api.pods_forbidden = True
        now = [1000.0]
        reader = PodReader(asyncio.get_running_loop(), ResourceApi(client), clock=lambda: now[0])
        for _scrape in range(5):
            with pytest.raises(AcceleratorError, match="pods is forbidden"):
                await asyncio.to_thread(reader.refresh, {("default", "pod"): {"uid"}})
            now[0] += 10
        assert pods_read(api) == 1
        api.pods, api.pods_forbidden = {"pod": POD}, False
        now[0] += RETRY_SECONDS
        await asyncio.to_thread(reader.refresh, {("default", "pod"): {"uid"}})
        assert reader.known([("default", "pod")])

    run(tmp_path, scenario)
