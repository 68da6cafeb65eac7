# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Lists and watches of the controller, the driver, and the publisher with an API server that fails or ends watches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from api_model import ApiModel, kubeconfig
from controller_steps import NODES
from controller_steps import run as run_controller
from dra_driver.api import watching
from dra_driver.api.client import ApiClient
from dra_driver.api.watching import Watched
from dra_driver.publish import publisher as publisher_module
from object_server import ObjectServer
from publisher_test import Scene, content
from publisher_test import run as run_publisher

CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def run_watched(
    tmp_path: Path, api: ApiModel, scenario: Callable[[Watched[str], list[float]], Awaitable[None]]
) -> None:
    """Run a watch of claims with a scenario, which gets the watch and the waits between its attempts, in seconds."""

    async def main() -> None:
        await api.start()
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(api.url)))
        client = ApiClient(str(file))
        waits: list[float] = []

        async def path() -> str:
            return CLAIMS

        async def wait(seconds: float) -> None:
            waits.append(seconds)
            await asyncio.sleep(0.01)

        watched = Watched(client, "ResourceClaims", path, lambda item: str(item["metadata"]["name"]), wait=wait)
        task = asyncio.ensure_future(watched.run())
        try:
            await scenario(watched, waits)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()
            await api.stop()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not hold within 20 s"
        await asyncio.sleep(0.01)


def lower_lasting(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(watching, "LASTING_SECONDS", seconds)


def test_watched_list_that_fails_slowly_doubles_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_lasting(monkeypatch, 0.05)
    monkeypatch.setattr("random.uniform", lambda _low, high: high)
    api = ApiModel()
    api.failure_seconds = 0.1
    api.failures = [("GET", 503, "slow")] * 5

    async def scenario(_watched: Watched[str], waits: list[float]) -> None:
        await until(lambda: len(waits) >= 5)
        assert [round(each / waits[0]) for each in waits[:5]] == [1, 2, 4, 8, 12], "the limit is 60 s"

    run_watched(tmp_path, api, scenario)


def test_watched_accepted_watch_that_lasted_resets_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_lasting(monkeypatch, 0.05)
    monkeypatch.setattr("random.uniform", lambda _low, high: high)
    api = ApiModel()
    api.failures = [("GET", 503, "starting")] * 3

    async def scenario(_watched: Watched[str], waits: list[float]) -> None:
        await until(lambda: ("WATCH", CLAIMS) in api.log)
        assert waits[2] > waits[1] > waits[0]
        await asyncio.sleep(0.1)
        del waits[:]
        api.failures = [("WATCH", 503, "restarting"), ("GET", 503, "restarting")]
        api.end_watches()
        await until(lambda: len(waits) >= 1)
        assert waits[0] <= watching.RETRY_FIRST * 1.2

    run_watched(tmp_path, api, scenario)


def test_publisher_list_that_fails_slowly_doubles_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_lasting(monkeypatch, 0.05)
    monkeypatch.setattr("random.uniform", lambda _low, high: high)
    monkeypatch.setattr(publisher_module, "RETRY_FIRST", 0.05)
    monkeypatch.setattr(watching, "RETRY_FIRST", 0.05)
    api = ApiModel()
    api.failure_seconds = 0.1

    async def scenario(scene: Scene) -> None:
        api.failures = [("GET", 503, "slow")] * 5
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(lambda: len(api.log) >= 5)
        gaps = [later - earlier for earlier, later in zip(api.moments, api.moments[1:])][:4]
        assert gaps[3] > gaps[0] + 0.2, gaps

    run_publisher(tmp_path, scenario, api)


def test_publisher_upgraded_server_rejects_old_layout_publishes_new_layout(tmp_path: Path) -> None:
    """The watch stays open after the upgrade, as behind a load balancer with several API servers: the new layout is published."""
    api = ApiModel(minor="34")

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        assert len(api.slices) == 1
        api.minor = "35"
        scene.publisher.set_content(content("h100-80", "h100-80"))
        await scene.until(scene.publisher.published.is_set, 10.0)
        assert not [each for each in api.slices.values() if len({"devices", "sharedCounters"} & set(each["spec"])) > 1]

    run_publisher(tmp_path, scenario, api)


@pytest.mark.parametrize(("seconds", "interval"), [(0.0, 0.0), (3600.0, 0.0), (0.0, 3600.0)])
def test_publisher_watch_ended_in_order_checks_features_within_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, interval: float
) -> None:
    """A check that is not due yet sends no request, and the pool stays published."""
    monkeypatch.setattr(publisher_module, "CHECK_SECONDS", seconds)
    monkeypatch.setattr(publisher_module, "CHECK_INTERVAL", (interval, interval))
    monkeypatch.setattr("random.uniform", lambda _low, high: high)
    api = ApiModel()
    api.drop_fields = ("consumesCounters", "sharedCounters")

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        assert len(api.slices) == 1
        api.drop_fields = ()
        watches, checks = api.log.count(("WATCH", SLICES)), api.log.count(("GET", "/version"))
        api.end_watches()
        if seconds or interval:
            await scene.until(lambda: api.log.count(("WATCH", SLICES)) > watches)
            assert await scene.at_rest() == 0 and scene.publisher.published.is_set()
            assert api.log.count(("GET", "/version")) == checks
        else:
            await scene.until(lambda: len(api.slices) == 2, 10.0)
            await scene.until(scene.publisher.published.is_set)

    run_publisher(tmp_path, scenario, api)


def test_publisher_watches_broken_by_an_idle_limit_cost_only_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load balancer repeatedly ends the idle connection of the watch: no list, no check of the server, no problem."""
    lower_lasting(monkeypatch, 0.01)
    monkeypatch.setattr(publisher_module, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(publisher_module, "CHECK_INTERVAL", (300.0, 600.0))
    monkeypatch.setattr(watching, "RETRY_FIRST", 0.05)
    api = ApiModel()

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        await scene.at_rest()
        before = len(api.log)
        for number in range(10):
            await scene.until(lambda number=number: len(api.log) == before + number)
            await asyncio.sleep(0.05)
            api.abort_connections()
            await asyncio.sleep(0.01)
            assert scene.publisher.published.is_set() and not scene.publisher.problem
        assert set(api.log[before:]) == {("WATCH", SLICES)}

    run_publisher(tmp_path, scenario, api)


def test_watched_connection_that_breaks_after_a_while_ends_the_watch_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lower_lasting(monkeypatch, 0.01)
    api = ApiModel()

    async def scenario(watched: Watched[str], waits: list[float]) -> None:
        for number in range(10):
            await until(lambda number=number: api.log.count(("WATCH", CLAIMS)) > number)
            await asyncio.sleep(0.05)
            api.abort_connections()
            await until(lambda number=number: len(waits) > number)
            assert watched.current and "cannot be watched" not in caplog.text
        assert max(waits) <= watching.RETRY_FIRST and api.log.count(("GET", CLAIMS)) == 1

    run_watched(tmp_path, api, scenario)


@pytest.mark.parametrize(
    ("answers", "lists"), [(3, 1), (watching.REFUSED_LIMIT, 2), (2 * watching.REFUSED_LIMIT - 1, 2)]
)
def test_watched_status_404_of_a_load_balancer_lists_after_many_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int, lists: int
) -> None:
    lower_lasting(monkeypatch, -1.0)
    api = ApiModel()

    async def scenario(watched: Watched[str], _waits: list[float]) -> None:
        await until(lambda: api._claim_watchers)
        api.failures = [("WATCH", 404, "")] * answers
        watches = api.log.count(("WATCH", CLAIMS))
        api.end_watches()
        await until(lambda: api.log.count(("WATCH", CLAIMS)) == watches + answers + 1 and watched.current)
        assert api.log.count(("GET", CLAIMS)) == lists

    run_watched(tmp_path, api, scenario)


def test_publisher_watch_follows_a_server_that_serves_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch gets status 404 for the version, and continues in the served version without a list."""
    monkeypatch.setattr(watching, "RETRY_FIRST", 0.05)
    api = ApiModel()

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        await scene.until(lambda: api._watchers)
        api.versions = ("v1beta1",)
        before = len(api.log)
        api.end_watches()
        await scene.until(lambda: ("WATCH", SLICES.replace("/v1/", "/v1beta1/")) in api.log)
        assert [path for method, path in api.log[before:] if method == "GET" and "resourceslices" in path] == []

    run_publisher(tmp_path, scenario, api)


@pytest.mark.parametrize("status", [429, 503, 0])
def test_watched_broken_watch_is_resumed_without_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Status 0: the server aborts the watch's connection, like a killed server. The watch is resumed without a list."""
    api = ApiModel()

    async def scenario(watched: Watched[str], waits: list[float]) -> None:
        await until(lambda: ("WATCH", CLAIMS) in api.log)
        if status:
            api.failures = [("WATCH", status, "overloaded")] * 2
            api.end_watches()
        else:
            api.abort_connections()
        await until(lambda: len(waits) >= 1)
        api.put_claim({"metadata": {"name": "new", "namespace": "default"}})
        await until(lambda: "default/new" in watched.items and watched.current)
        assert api.log.count(("GET", CLAIMS)) == 1

    run_watched(tmp_path, api, scenario)


def test_watched_expired_version_is_listed_again(tmp_path: Path) -> None:
    api = ApiModel()

    async def scenario(_watched: Watched[str], _waits: list[float]) -> None:
        await until(lambda: ("WATCH", CLAIMS) in api.log)
        api.failures = [("WATCH", 410, "too old")]
        api.end_watches()
        await until(lambda: api.log.count(("GET", CLAIMS)) == 2)

    run_watched(tmp_path, api, scenario)


def test_watched_waits_are_spread_over_seconds_and_heed_retry_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower_lasting(monkeypatch, -1.0)
    api = ApiModel()
    api.retry_after = "7"

    async def scenario(_watched: Watched[str], waits: list[float]) -> None:
        await until(lambda: ("WATCH", CLAIMS) in api.log)
        for number in range(12):
            await until(lambda: api._claim_watchers)
            api.failures = [("WATCH", 429, "overloaded")]
            api.end_watches()
            await until(lambda number=number: len([each for each in waits if each >= 7.0]) > number)
        requested = [each for each in waits if each >= 7.0]
        assert len(requested) == 12 and max(requested) - min(requested) > 2.0, waits

    run_watched(tmp_path, api, scenario)


def test_publisher_broken_watch_is_resumed_without_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "RETRY_FIRST", 0.05)
    api = ApiModel()

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        lists, watches = api.log.count(("GET", SLICES)), api.log.count(("WATCH", SLICES))
        api.failures = [("WATCH", 503, "restarting")] * 2
        api.end_watches()
        await scene.until(lambda: api.log.count(("WATCH", SLICES)) >= watches + 3)
        await scene.until(lambda: not scene.publisher.problem)
        assert api.log.count(("GET", SLICES)) == lists

    run_publisher(tmp_path, scenario, api)


def test_list_refused_page_is_requested_again_after_retry_after(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for number in range(5):
            server.put(f"{NODES}/n{number}", {})
        clock = asyncio.get_running_loop().time
        server.retry_after = "1"
        server_list = server._list

        def refuse_second_page(request: web.Request, path: str) -> web.Response:
            if request.query.get("continue") == "2" and server.count("GET", NODES) == 2:
                return server._error(429)
            return server_list(request, path)

        server._list = refuse_second_page  # type: ignore[method-assign]
        began = clock()
        assert len(await client.list_all(NODES, page=2)) == 5
        assert clock() - began > 0.99
        assert server.count("GET", NODES) == 4, "three pages, and the refused one"

    run_controller(tmp_path, scenario)
