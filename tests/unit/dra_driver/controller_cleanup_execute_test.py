# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Failed requests of the controller's cleanup: pauses that the server requests, and actions that fail repeatedly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from controller_steps import CLAIMS, DRIVER, OWN_CLAIMS, SLICES, cluster_of, new_cleanup_loop, run, running, until
from dra_driver.api import throttling
from dra_driver.api.client import ApiClient
from dra_driver.controller.cleanup import cleanup_execute
from dra_driver.controller.controller_metrics import ControllerMetrics
from object_server import ObjectServer

ALWAYS = 1000


@pytest.mark.parametrize("refused", [("DELETE", f"{SLICES}/gone"), ("GET", "/pods/alive"), ("GET", "/nodes/gone")])
def test_clean_up_refused_with_retry_after_sends_nothing_until_then(tmp_path: Path, refused: tuple[str, str]) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        measurements, later = ControllerMetrics(), [0.0]
        server.retry_after = "200"
        server.refusals = [(*refused, 429)]

        def passes() -> float:
            lines = measurements.text().decode().splitlines()
            return sum(float(line.split()[1]) for line in lines if "pass_duration_seconds_count" in line)

        async with running(new_cleanup_loop(client, measurements, clock=lambda: time.monotonic() + later[0]).run()):
            await until(lambda: not server.refusals)
            seen = passes()
            await until(lambda: passes() > seen + 1)
            sent = len(server.log)
            await until(lambda: passes() > seen + 4)
            assert server.log[sent:] == []
            later[0] = 300.0
            await until(lambda: b'action="deallocate-claim",outcome="done"} 2.0' in measurements.text())
            await until(lambda: f"{SLICES}/gone" not in server.objects)

    run(tmp_path, scenario)


def test_clean_up_failing_actions_come_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup_execute, "MAX_ACTIONS", 2)

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
        measurements = ControllerMetrics()
        async with running(new_cleanup_loop(client, measurements).run()):
            await until(lambda: b'action="deallocate-claim",outcome="done"} 2.0' in measurements.text())
        assert {path for path in server.objects if path.startswith(SLICES)} == {
            f"{SLICES}/{name}" for name in ("here", "a-stuck-1", "a-stuck-2", "a-stuck-3")
        }

    run(tmp_path, scenario)


@pytest.mark.parametrize("status", [409, 500])
def test_clean_up_failed_release_keeps_the_allocation_until_the_finalizer_is_removed(
    tmp_path: Path, status: int
) -> None:
    """Without an allocation a claim no longer names the node, and its finalizer would stay. Status 409: the claim has changed since."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        server.refusals = [("PATCH", "/gone-free", status)]
        measurements = ControllerMetrics()
        async with running(new_cleanup_loop(client, measurements).run()):
            await until(lambda: b'action="deallocate-claim",outcome="done"} 2.0' in measurements.text())
        assert server.objects[f"{OWN_CLAIMS}/gone-free"]["metadata"]["finalizers"] == ["else/held"]

    run(tmp_path, scenario)


@pytest.mark.parametrize("status", [400, 410, 422, 500])
def test_clean_up_unreadable_pod_keeps_only_its_claim(tmp_path: Path, status: int) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        server.refusals = [("GET", "/pods/away", status)] * ALWAYS
        measurements = ControllerMetrics()
        async with running(new_cleanup_loop(client, measurements).run()):
            await until(lambda: b'action="deallocate-claim",outcome="done"} 1.0' in measurements.text())
        assert f"{SLICES}/gone" not in server.objects
        assert not server.objects[f"{OWN_CLAIMS}/gone-free"]["status"].get("allocation")
        assert server.objects[f"{OWN_CLAIMS}/gone-left"]["status"]["allocation"]

    run(tmp_path, scenario)


def reserve(server: ObjectServer, name: str, pod: str) -> None:
    """Store a claim with a device of the deleted node, which is reserved for a pod."""
    field = {"key": "metadata.name", "operator": "In", "values": ["gone"]}
    allocation = {
        "devices": {"results": [{"driver": DRIVER}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }
    reserved = [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"}]
    claim = {"metadata": {"namespace": "team"}, "status": {"allocation": allocation, "reservedFor": reserved}}
    server.objects[f"{CLAIMS}/{name}"] = server.put(f"{OWN_CLAIMS}/{name}", claim)


def allocated(server: ObjectServer) -> set[str]:
    """Return the names of the claims that have an allocation."""
    those = ((path, one) for path, one in server.objects.items() if path.startswith(OWN_CLAIMS))
    return {path.rpartition("/")[2] for path, one in those if one["status"].get("allocation")}


@pytest.mark.parametrize("name", ["../nodes/here", "a b", "%2e%2e", "a?b"])
def test_clean_up_pod_with_an_invalid_name_keeps_only_its_claim(tmp_path: Path, name: str) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        reserve(server, "a-invalid", name)
        reserve(server, "b-left", "away")
        async with running(new_cleanup_loop(client, ControllerMetrics()).run()):
            await until(lambda: allocated(server) == {"a-invalid"})
        assert {path for method, path in server.log if "/pods/" in path} == {"/api/v1/namespaces/team/pods/away"}

    run(tmp_path, scenario)


@pytest.mark.parametrize("retry_after", ["", "1"])
@pytest.mark.parametrize("status", [429, 503])
def test_clean_up_throttled_reads_no_pod_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, retry_after: str
) -> None:
    monkeypatch.setattr(throttling, "PAUSE_FIRST", 0.1)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        names = [f"claim-{number}" for number in range(6)]
        for name in names:
            reserve(server, name, f"of-{name}")
        server.retry_after = retry_after
        server.refusals = [("GET", f"/pods/of-{names[position]}", status) for position in (2, 4)]
        async with running(new_cleanup_loop(client, ControllerMetrics()).run()):
            await until(lambda: not allocated(server))
        reads = {name: server.count("GET", f"/pods/of-{name}") for name in names}
        assert reads == {name: 1 + (position in (2, 4)) for position, name in enumerate(names)}

    run(tmp_path, scenario)


def test_clean_up_reads_the_pods_of_the_next_actions_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup_execute, "MAX_ACTIONS", 2)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for number in range(8):
            reserve(server, f"claim-{number}", f"pod-{number}")
        server.retry_after = "200"
        server.refusals = [("PATCH", "/claim-1", 429)]
        async with running(new_cleanup_loop(client, ControllerMetrics()).run()):
            await until(lambda: not server.refusals)
            await until(lambda: len(allocated(server)) == 7)
            assert server.count("GET", "/pods/") == 2

    run(tmp_path, scenario)


@pytest.mark.parametrize("status", [429, 503])
def test_clean_up_refused_without_retry_after_sends_nothing_for_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(throttling, "PAUSE_FIRST", 200.0)
    monkeypatch.setattr(throttling, "PAUSE_LIMIT", 200.0)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        measurements, later = ControllerMetrics(), [0.0]
        server.refusals = [("DELETE", f"{SLICES}/gone", status)]
        async with running(new_cleanup_loop(client, measurements, clock=lambda: time.monotonic() + later[0]).run()):
            await until(lambda: not server.refusals)
            await pass_twice(measurements)
            sent = len(server.log)
            await pass_twice(measurements)
            assert server.log[sent:] == []
            later[0] = 300.0
            await until(lambda: f"{SLICES}/gone" not in server.objects)

    run(tmp_path, scenario)


async def pass_twice(measurements: ControllerMetrics) -> None:
    """Wait until two more passes have ended."""

    def passes() -> float:
        lines = measurements.text().decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if "pass_duration_seconds_count" in line)

    seen = passes()
    await until(lambda: passes() > seen + 1)


def test_clean_up_claims_in_use_and_failing_claims_delay_no_other_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More claims are in use than a pass has actions, and the server throttles each third read of a pod: other claims are not delayed."""
    monkeypatch.setattr(cleanup_execute, "MAX_ACTIONS", 3)
    monkeypatch.setattr(throttling, "PAUSE_FIRST", 0.01)
    monkeypatch.setattr(throttling, "PAUSE_LIMIT", 0.01)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        used, free = [f"a-used-{number}" for number in range(5)], [f"b-free-{number}" for number in range(5)]
        for name in used:
            reserve(server, name, "alive")
        for name in free:
            reserve(server, name, f"of-{name}")
        server.put(
            "/api/v1/namespaces/team/pods/alive", {"metadata": {"uid": "uid-alive"}, "status": {"phase": "Running"}}
        )
        server.refusals = [("GET", f"/pods/of-{name}", 429) for name in free]
        server.refusals += [("PATCH", "/a-used", 500)] * ALWAYS
        async with running(new_cleanup_loop(client, ControllerMetrics()).run()):
            await until(lambda: allocated(server) == set(used))

    run(tmp_path, scenario)


def test_clean_up_all_actions_refused_pauses_between_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost permission, or a load balancer without an API server, fails each request: the controller pauses between passes."""
    monkeypatch.setattr(throttling, "PAUSE_FIRST", 200.0)
    monkeypatch.setattr(throttling, "PAUSE_LIMIT", 200.0)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        cluster_of(server)
        server.unserved = ("/nodes/gone",)
        measurements = ControllerMetrics()
        async with running(new_cleanup_loop(client, measurements).run()):
            await until(lambda: server.count("GET", "/nodes/gone"))
            await pass_twice(measurements)
            await pass_twice(measurements)
        assert server.count("GET", "/nodes/gone") == 1

    run(tmp_path, scenario)
