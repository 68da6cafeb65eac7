# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Answers of a server that is overloaded or stopping, or of a load balancer without an API server: repeated requests and valid answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import publisher_test
import pytest
from aiohttp import web
from api_model import ApiModel
from controller_steps import NODES, run, until
from dra_driver.api import throttling
from dra_driver.api.client import ApiClient, ApiError, ApiUnreachable, _error
from dra_driver.api.errors import ResourceApiMissing
from dra_driver.api.events import REPEAT_SECONDS, EventRecorder, Subject
from dra_driver.api.resources import ResourceApi
from dra_driver.api.throttling import retry
from object_server import RESOURCES, ObjectServer
from publisher_test import content

RESET = 0


@pytest.mark.parametrize("status", [429, 500, 503, 504, RESET])
def test_list_later_page_without_an_answer_is_requested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """A list of a large fleet has hundreds of pages: a refused page is requested again, and the others are kept."""
    monkeypatch.setattr(throttling, "PAUSE_FIRST", 0.01)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for number in range(5):
            server.put(f"{NODES}/n{number}", {})
        server_list, failures = server._list, [0]

        def refuse_second_page(request: web.Request, path: str) -> web.Response:
            if request.query.get("continue") == "2" and failures[0] < 3:
                failures[0] += 1
                if status == RESET and request.transport is not None:
                    request.transport.abort()
                return server._error(status or 500)
            return server_list(request, path)

        server._list = refuse_second_page  # type: ignore[method-assign]
        assert len(await client.list_all(NODES, page=2)) == 5
        assert failures == [3]
        failures[0] = -100
        with pytest.raises((ApiError, ApiUnreachable)):
            await client.list_all(NODES, page=2)

    run(tmp_path, scenario)


def test_load_balancer_without_a_server_does_not_make_all_taint_rules_disappear(tmp_path: Path) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        resources = ResourceApi(client)
        assert await resources.rules_path() == "/apis/resource.k8s.io/v1/devicetaintrules"
        for unserved in ("/apis/resource.k8s.io", "/apis/resource.k8s.io/v1"):
            server.unserved = (unserved,)
            with pytest.raises(ApiError, match="404"):
                await resources.rules_path()

    run(tmp_path, scenario)


def test_load_balancer_without_a_server_does_not_make_the_resource_api_disappear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods must not get the message that Kubernetes is too old, and the failure counts as one of the server."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        for unserved in ("/apis/resource.k8s.io", "/apis"):
            server.unserved = (unserved,)
            with pytest.raises(ApiError, match="404") as caught:
                await ResourceApi(client).version()
            assert throttling.is_of_server(caught.value) and throttling.is_of_network(caught.value)
        server.unserved = ("/apis/resource.k8s.io",)
        monkeypatch.setitem(RESOURCES, "/apis", {"kind": "APIGroupList", "groups": [{"name": "apps"}]})
        with pytest.raises(ResourceApiMissing) as missing:
            await ResourceApi(client).version()
        assert throttling.is_of_server(missing.value)

    run(tmp_path, scenario)


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), ("\u00b2", None), ("-1", None), ("soon", None), ("", None)])
def test_retry_after_that_is_no_number_is_ignored(value: str, seconds: float | None) -> None:
    """A header that a proxy has damaged must not raise another error than ApiError."""
    assert _error("GET", "/api", 429, b"", value, {}).retry_after == seconds


STATUS = {"kind": "Status", "reason": "NotFound"}


@pytest.mark.parametrize(
    ("answer", "is_not_found"),
    [
        ({**STATUS, "details": {"name": "n"}}, True),
        ({**STATUS, "details": {"name": "other"}}, False),
        ({**STATUS, "details": None}, False),
        (STATUS, False),
        ({"reason": "NotFound", "details": {"name": "n"}}, False),
        ([], False),
    ],
)
def test_only_a_status_that_names_the_object_says_that_it_is_missing(answer: Any, is_not_found: bool) -> None:
    for path in ("/api/v1/nodes/n", "/api/v1/nodes/n/status", "/api/v1/nodes/%6e"):
        error = _error("GET", path, 404, json.dumps(answer).encode(), "", {})
        assert error.is_not_found is is_not_found and error.is_of_server is not is_not_found


def test_list_without_items_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_server: ObjectServer, client: ApiClient) -> None:
        monkeypatch.setitem(RESOURCES, NODES, {"kind": "Status", "message": "maintenance"})
        with pytest.raises(ApiError, match="has no items") as found:
            await client.list_all(NODES, page=2)
        assert found.value.is_of_server
        monkeypatch.setitem(RESOURCES, NODES, {"kind": "NodeList", "items": None})
        assert await client.list_all(NODES, page=2) == []
        path = "/apis/resource.k8s.io/v1/resourceslices"
        monkeypatch.setitem(RESOURCES, path, {"message": "maintenance"})
        with pytest.raises(ApiError, match="has no items"):
            await ResourceApi(client).list_slices("gpu.nvidia.com", "n")

    run(tmp_path, scenario)


def test_watch_that_is_redirected_is_an_error(tmp_path: Path) -> None:
    """An API server does not redirect: otherwise another server would get the requests, and its answers would count."""

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        async def redirect(request: web.Request, _path: str) -> web.StreamResponse:
            raise web.HTTPFound("/api/v1/elsewhere")

        server._watch = redirect  # type: ignore[method-assign]
        with pytest.raises(ApiError) as failed:
            async for _event in client.watch(NODES, resource_version="1"):
                pass
        assert failed.value.status == 302
        assert not server.count("GET", "/elsewhere") and not server.count("WATCH", "/elsewhere")

    run(tmp_path, scenario)


@pytest.mark.parametrize(("status", "probes"), [(401, 2), (403, 1), (422, 1), (503, 2)])
def test_publisher_probe_that_fails_for_all_requests_is_sent_again(tmp_path: Path, status: int, probes: int) -> None:
    api = ApiModel()
    api.failures = [("DRYRUN", status, "as the test says")]

    async def scenario(scene: publisher_test.Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        assert [method for method, _path in api.log].count("DRYRUN") == probes

    publisher_test.run(tmp_path, scenario, api)


def test_throttled_request_without_retry_after_is_repeated_within_the_time() -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    async def scenario() -> None:
        answers = [
            ApiError("stops", status=503),
            ApiError("busy", status=429),
            ApiError("busy", status=429, retry_after=5),
        ]

        async def send() -> str:
            if answers:
                raise answers.pop(0)
            return "done"

        assert await retry(send, 60, wait=wait) == "done"
        assert 0.5 <= waits[0] <= 1.0 <= waits[1] <= 2.0 and 5.0 <= waits[2] <= 7.5
        answers.append(ApiError("stops", status=503))
        with pytest.raises(ApiError, match="stops"):
            await retry(send, 0.1, wait=wait)
        answers.append(ApiError("broken", status=500))
        with pytest.raises(ApiError, match="broken"):
            await retry(send, 60, wait=wait)
        assert len(waits) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("retry_after", ["", "1"])
def test_event_that_is_throttled_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry_after: str
) -> None:
    """Drift and the end of a drain are reported once: an Event that an overloaded server throttles is sent again."""
    monkeypatch.setattr(throttling, "PAUSE_FIRST", 0.01)

    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        server.retry_after = retry_after
        server.refusals = [("POST", "/events", 429), ("POST", "/events", 503), ("PATCH", "/events", 429)]
        now = [0.0]
        events = EventRecorder(client, component="test", node_name="test", clock=lambda: now[0])
        for count in (1, 2):
            assert events.normal(Subject("Node", "v1", "a", "a"), "Tested", "It was tested.", action="Test")
            await until(
                lambda count=count: [e["count"] for p, e in server.objects.items() if "/events/" in p] == [count]
            )
            now[0] += REPEAT_SECONDS
        assert not server.refusals
        await events.close()

    run(tmp_path, scenario)
