# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests of the modules to an API server that is overloaded or restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils import _kubernetes
from ansible_collections.dra.accelerators.plugins.module_utils._evictions import evict
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import Api, ApiError, connection

from tests.unit.json_server import JsonHandler, JsonServer

PATH = "/api/v1/nodes"


class Server(JsonHandler):
    """Answers with the next of ``statuses``, then with success; 0 is a connection that ends without an answer."""

    statuses: ClassVar[list[int]] = []
    seen: ClassVar[list[str]] = []
    delay = ""

    def do_GET(self) -> None:
        self.seen.append(self.command)
        status = self.statuses.pop(0) if self.statuses else 200
        if status:
            self.answer(status, {"items": []} if status == 200 else {"message": "busy"})
        else:
            self.close_connection = True

    def do_POST(self) -> None:
        self.do_GET()

    def end_headers(self) -> None:
        if self.delay:
            self.send_header("Retry-After", self.delay)
        super().end_headers()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(Server, "statuses", [])
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(_kubernetes, "FIRST_PAUSE", 0.05)
    options: dict[str, Any] = dict.fromkeys(_kubernetes.API_OPTIONS)
    with JsonServer(Server) as server:
        yield connection({**options, "host": server.url, "api_key": "t"})


@pytest.mark.parametrize("status", [429, 502, 503, 504, 0])
def test_get_is_repeated_until_the_api_server_answers(api: Api, status: int) -> None:
    assert api.list_all(PATH, {}) == []
    Server.statuses += [status, status]
    assert api.list_all(PATH, {}) == []
    assert Server.seen == ["GET"] * 4


def test_get_waits_for_the_time_that_the_api_server_asks_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "delay", "1")
    Server.statuses.append(429)
    begun = time.monotonic()
    assert api.list_all(PATH, {}) == []
    assert time.monotonic() - begun >= 1


def test_get_fails_when_the_time_is_over(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kubernetes, "RETRY_SECONDS", 0.3)
    Server.statuses += [503] * 20
    with pytest.raises(ApiError, match="503"):
        api.list_all(PATH, {})
    assert 2 <= len(Server.seen) < 20


def test_write_is_repeated_only_if_it_was_not_carried_out(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.list_all(PATH, {}) == []
    for status in (503, 0, 500, 504):
        Server.statuses.append(status)
        with pytest.raises(ApiError):
            api.request("POST", PATH, body={})
    assert Server.seen == ["GET", *["POST"] * 4]
    Server.seen.clear()
    Server.statuses += [429, 429]
    api.request("POST", PATH, body={})
    monkeypatch.setattr(Server, "delay", "0")
    Server.statuses.append(503)
    api.request("POST", PATH, body={})
    assert Server.seen == ["POST"] * 5


def test_write_is_repeated_while_no_connection_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "statuses", [])
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(_kubernetes, "FIRST_PAUSE", 0.05)
    options: dict[str, Any] = dict.fromkeys(_kubernetes.API_OPTIONS)
    with JsonServer(Server) as first:
        api = connection({**options, "host": first.url, "api_key": "t"})
        assert api.list_all(PATH, {}) == []
    port = int(first.url.rpartition(":")[2])

    def starts_again(_seconds: float) -> None:
        if not servers:
            servers.append(JsonServer(Server, port))
            servers[0].__enter__()

    servers: list[JsonServer] = []
    monkeypatch.setattr(_kubernetes.time, "sleep", starts_again)
    api.request("POST", PATH, body={})
    servers[0].__exit__()
    assert Server.seen == ["GET", "POST"]


def test_requests_that_are_repeated_share_the_time_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty requests of a module with 600 s do not take twenty times as long."""
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(Server, "statuses", [429] * 10_000)
    now = [1000.0]
    monkeypatch.setattr(_kubernetes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(_kubernetes.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    options: dict[str, Any] = dict.fromkeys(_kubernetes.API_OPTIONS)
    with JsonServer(Server) as server:
        api = connection({**options, "host": server.url, "api_key": "t"}, retry_seconds=600)
        for _each in range(20):
            with pytest.raises(ApiError):
                api.request("POST", PATH, body={})
    assert now[0] - 1000 <= 600 + 19 * _kubernetes.RETRY_SECONDS


class Budgets(Server):
    """Refuses an eviction as the API server does for a budget, and other requests as it does when it is overloaded."""

    causes: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.seen.append(self.path)
        status = self.statuses.pop(0) if self.statuses else 201
        text = "does not support: more than one PodDisruptionBudget" if status == 500 and not self.causes else "no"
        self.answer(status, {"kind": "Status", "message": text, "details": {"causes": self.causes}})


@pytest.mark.parametrize(
    ("statuses", "causes", "text", "requests"),
    [
        ([429], [{"reason": "DisruptionBudget"}], "A PodDisruptionBudget does not allow", 1),
        ([500], [], "A PodDisruptionBudget does not allow", 1),
        ([429], [], "The request for the eviction failed", 1),
        ([500], [{"reason": "other"}], "The request for the eviction failed", 1),
        ([503], ["not a dictionary"], "The request for the eviction failed", 1),
    ],
)
def test_only_a_budget_is_called_a_budget(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], causes: list[Any], text: str | None, requests: int
) -> None:
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(Budgets, "statuses", [*statuses])
    monkeypatch.setattr(Budgets, "causes", causes)
    monkeypatch.setattr(_kubernetes, "FIRST_PAUSE", 0.05)
    options: dict[str, Any] = dict.fromkeys(_kubernetes.API_OPTIONS)
    with JsonServer(Budgets) as server:
        api = connection({**options, "host": server.url, "api_key": "t"})
        said = evict(api, "default", "p", "uid")
    assert (said is None) == (text is None) and (said or "").startswith(text or "")
    assert len(Server.seen) == requests


class Expiring(JsonHandler):
    """A list of three pages whose continue token has expired when the second page is asked for."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.path.partition("?")[2])
        if "continue" in self.path:
            self.answer(410, {"kind": "Status", "reason": "Expired", "message": "too old", "code": 410})
        elif "limit" in self.path:
            self.answer(200, {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "x"}})
        else:
            self.answer(200, {"items": [{"metadata": {"name": name}} for name in "ab"]})


def test_list_whose_token_expired_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiring, "seen", [])
    options: dict[str, Any] = dict.fromkeys(_kubernetes.API_OPTIONS)
    with JsonServer(Expiring) as server:
        api = connection({**options, "host": server.url, "api_key": "t"})
        assert [each["metadata"]["name"] for each in api.list_all(PATH, {})] == ["a", "b"]
    assert Expiring.seen == ["limit=500", "limit=500&continue=x", ""]


def test_other_refusals_and_a_first_connection_are_not_repeated(api: Api) -> None:
    Server.statuses.append(0)
    with pytest.raises(ApiError) as failed:
        api.list_all(PATH, {})
    assert failed.value.code == "api-unreachable"
    for status in (403, 404, 500):
        Server.statuses.append(status)
        with pytest.raises(ApiError):
            api.list_all(PATH, {})
    assert Server.seen == ["GET"] * 4
