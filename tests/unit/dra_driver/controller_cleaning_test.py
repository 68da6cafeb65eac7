# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Failed requests of the controller's clean-up: pauses that the server asks for, and actions that keep failing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from controller_steps import DRIVER, OWN_CLAIMS, SLICES, cluster_of, going, keeper, run, until
from dra_driver.api.client import ApiClient
from dra_driver.controller import cleaning
from dra_driver.controller.measurements import Measurements
from object_server import ObjectServer

ALWAYS = 1000


@pytest.mark.parametrize("refused", [("DELETE", f"{SLICES}/gone"), ("GET", "/pods/alive"), ("GET", "/nodes/gone")])
def test_clean_up_refused_with_retry_after_sends_nothing_until_then(tmp_path: Path, refused: tuple[str, str]) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        measurements, later = Measurements(), [0.0]
        server.retry_after = "200"
        server.refusals = [(*refused, 429)]

        def passes() -> float:
            lines = measurements.text().decode().splitlines()
            return sum(float(line.split()[1]) for line in lines if "pass_duration_seconds_count" in line)

        async with going(keeper(client, measurements, clock=lambda: time.monotonic() + later[0]).run()):
            await until(lambda: not server.refusals)
            seen = passes()
            await until(lambda: passes() > seen + 1)
            sent = len(server.log)
            await until(lambda: passes() > seen + 4)
            assert server.log[sent:] == []
            later[0] = 200.0
            await until(lambda: b'action="deallocate-claim",outcome="done"} 2.0' in measurements.text())
            await until(lambda: f"{SLICES}/gone" not in server.objects)

    run(tmp_path, scenario)


def test_clean_up_failing_actions_come_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "MOST_ACTIONS", 2)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        for name in ("a-stuck-1", "a-stuck-2", "a-stuck-3"):
            server.put(
                f"{SLICES}/{name}",
                {
                    "metadata": {"managedFields": [{"manager": "dra-accelerators-driver"}]},
                    "spec": {"driver": DRIVER, "nodeName": "gone", "pool": {"name": "gone"}},
                },
            )
        server.refusals = [("DELETE", "/a-stuck", 500)] * ALWAYS
        measurements = Measurements()
        async with going(keeper(client, measurements).run()):
            await until(lambda: b'action="deallocate-claim",outcome="done"} 2.0' in measurements.text())
        assert {path for path in server.objects if path.startswith(SLICES)} == {
            f"{SLICES}/{name}" for name in ("here", "a-stuck-1", "a-stuck-2", "a-stuck-3")
        }

    run(tmp_path, scenario)


def test_clean_up_failed_release_keeps_the_allocation_until_the_finalizer_is_gone(tmp_path: Path) -> None:
    """A claim without an allocation no longer names the node, so its finalizer would stay."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        server.refusals = [("PATCH", "/gone-free", 500)]
        measurements = Measurements()
        async with going(keeper(client, measurements).run()):
            await until(lambda: b'action="deallocate-claim",outcome="done"} 2.0' in measurements.text())
        assert server.objects[f"{OWN_CLAIMS}/gone-free"]["metadata"]["finalizers"] == ["else/held"]

    run(tmp_path, scenario)


def test_clean_up_unreadable_pod_keeps_only_its_claim(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        server.refusals = [("GET", "/pods/away", 500)] * ALWAYS
        measurements = Measurements()
        async with going(keeper(client, measurements).run()):
            await until(lambda: b'action="deallocate-claim",outcome="done"} 1.0' in measurements.text())
        assert f"{SLICES}/gone" not in server.objects
        assert not server.objects[f"{OWN_CLAIMS}/gone-free"]["status"].get("allocation")
        assert server.objects[f"{OWN_CLAIMS}/gone-left"]["status"]["allocation"]

    run(tmp_path, scenario)
