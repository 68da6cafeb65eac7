# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests of the modules to an API server that is overloaded or restarts."""

from __future__ import annotations

import ast
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import client as kubernetes_client
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import Api, ApiError, connection
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.cluster_facts import read_cluster_facts
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.eviction import evict

from tests.unit.json_server import JsonHandler, JsonServer

PATH = "/api/v1/nodes"
POD = {"api_version": "v1", "kind": "Pod"}


class Server(JsonHandler):
    """A server that answers with the next of ``statuses``, then with success. 0 is a connection that ends without an answer."""

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
    monkeypatch.setattr(kubernetes_client, "FIRST_PAUSE", 0.05)
    options: dict[str, Any] = dict.fromkeys(kubernetes_client.API_OPTIONS)
    with JsonServer(Server) as server:
        yield connection({**options, "host": server.url, "api_key": "t"})


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 0])
def test_get_is_retried_until_the_server_responds(api: Api, status: int) -> None:
    assert api.list_all(PATH, {}) == []
    Server.statuses += [status, status]
    assert api.list_all(PATH, {}) == []
    assert Server.seen == ["GET"] * 4


def test_get_waits_for_retry_after(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "delay", "1")
    Server.statuses.append(429)
    begun = time.monotonic()
    assert api.list_all(PATH, {}) == []
    assert time.monotonic() - begun >= 1


def test_get_fails_after_timeout(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_client, "RETRY_SECONDS", 0.3)
    Server.statuses += [503] * 20
    with pytest.raises(ApiError, match="503"):
        api.list_all(PATH, {})
    assert 2 <= len(Server.seen) < 20


def test_write_is_retried_only_if_not_executed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_write_is_retried_without_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "statuses", [])
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(kubernetes_client, "FIRST_PAUSE", 0.05)
    options: dict[str, Any] = dict.fromkeys(kubernetes_client.API_OPTIONS)
    with JsonServer(Server) as first:
        api = connection({**options, "host": first.url, "api_key": "t"})
        assert api.list_all(PATH, {}) == []
    port = int(first.url.rpartition(":")[2])

    def starts_again(_seconds: float) -> None:
        if not servers:
            servers.append(JsonServer(Server, port))
            servers[0].__enter__()

    servers: list[JsonServer] = []
    monkeypatch.setattr(kubernetes_client, "time", SimpleNamespace(monotonic=time.monotonic, sleep=starts_again))
    api.request("POST", PATH, body={})
    servers[0].__exit__()
    assert Server.seen == ["GET", "POST"]


def test_first_request_is_retried_if_server_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(Server, "statuses", [])
    options: dict[str, Any] = dict.fromkeys(kubernetes_client.API_OPTIONS)
    with JsonServer(Server) as stopped:
        url = stopped.url
    api = connection({**options, "host": url, "api_key": "t"})
    with pytest.raises(ApiError, match="cannot be reached"):
        api.list_all(PATH, {})
    servers: list[JsonServer] = []

    def starts(_seconds: float) -> None:
        if not servers:
            servers.append(JsonServer(Server, int(url.rpartition(":")[2])))
            servers[0].__enter__()

    monkeypatch.setattr(kubernetes_client, "time", SimpleNamespace(monotonic=time.monotonic, sleep=starts))
    found = read_cluster_facts(api, "", nodes=[], namespace="n", counters=False, drivers=(), own=False, lists=[POD])
    servers[0].__exit__()
    assert found["reached"] and Server.seen == ["GET"]


def test_retries_share_the_timeout_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated requests share the time limit of the module: 20 requests with 600 s do not take 20 times as long."""
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(Server, "statuses", [429] * 10_000)
    now = [1000.0]
    # Only for this module: threads of other tests sleep too.
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(kubernetes_client, "time", clock)
    options: dict[str, Any] = dict.fromkeys(kubernetes_client.API_OPTIONS)
    with JsonServer(Server) as server:
        api = connection({**options, "host": server.url, "api_key": "t"}, retry_seconds=600)
        for _each in range(20):
            with pytest.raises(ApiError):
                api.request("POST", PATH, body={})
    assert now[0] - 1000 <= 600 + 19 * kubernetes_client.RETRY_SECONDS


class Budgets(Server):
    """A server that refuses an eviction because of a budget, and other requests because of overload."""

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
def test_eviction_only_budget_is_reported_as_budget(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], causes: list[Any], text: str | None, requests: int
) -> None:
    monkeypatch.setattr(Server, "seen", [])
    monkeypatch.setattr(Budgets, "statuses", [*statuses])
    monkeypatch.setattr(Budgets, "causes", causes)
    monkeypatch.setattr(kubernetes_client, "FIRST_PAUSE", 0.05)
    options: dict[str, Any] = dict.fromkeys(kubernetes_client.API_OPTIONS)
    with JsonServer(Budgets) as server:
        api = connection({**options, "host": server.url, "api_key": "t"})
        problem_text = evict(api, "default", "p", "uid")
    assert (problem_text is None) == (text is None) and (problem_text or "").startswith(text or "")
    assert len(Server.seen) == requests


class Expiring(JsonHandler):
    """A server with a list of two pages whose continue token expires ``times`` times."""

    seen: ClassVar[list[str]] = []
    times: ClassVar[int] = 0

    def do_GET(self) -> None:
        self.seen.append(self.path.partition("?")[2])
        if "continue" in self.path and type(self).times:
            type(self).times -= 1
            self.answer(410, {"kind": "Status", "reason": "Expired", "message": "too old", "code": 410})
            return
        name, rest = ("b", {}) if "continue" in self.path else ("a", {"continue": "x"})
        self.answer(200, {"items": [{"metadata": {"name": name, "managedFields": []}}], "metadata": rest})


@pytest.fixture
def expiring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(Expiring, "seen", [])
    options: dict[str, Any] = dict.fromkeys(kubernetes_client.API_OPTIONS)
    with JsonServer(Expiring) as server:
        yield connection({**options, "host": server.url, "api_key": "t"})


def test_list_with_expired_token_is_read_again_in_pages(expiring: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiring, "times", 1)
    assert expiring.list_all(PATH, {}, kubernetes_client.without_managed_fields) == [
        {"metadata": {"name": "a"}},
        {"metadata": {"name": "b"}},
    ]
    assert Expiring.seen == ["limit=500", "limit=500&continue=x"] * 2


def test_list_with_repeatedly_expired_token_fails(expiring: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiring, "times", 100)
    with pytest.raises(ApiError, match="410"):
        expiring.list_all(PATH, {})
    assert len(Expiring.seen) == 2 * (kubernetes_client.LIST_RESTARTS + 1)


def test_list_returns_only_kept_parts(expiring: Api) -> None:
    """The result has only the kept parts. Slices are read in smaller pages."""

    def keep(item: dict[str, Any]) -> str | None:
        name: str = item["metadata"]["name"]
        return name if name == "b" else None

    assert expiring.list_all("/apis/resource.k8s.io/v1/resourceslices", {}, keep) == ["b"]
    assert Expiring.seen == ["limit=100", "limit=100&continue=x"]


class Compressing(JsonHandler):
    """A server that compresses its answers for clients that accept it, as an API server does with large ones."""

    def do_GET(self) -> None:
        assert "gzip" in self.headers["Accept-Encoding"]
        data = gzip.compress(json.dumps({"items": [{"metadata": {"name": "a" * 100_000}}]}).encode())
        assert len(data) < 1000
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_compressed_response_is_decoded() -> None:
    options: dict[str, Any] = dict.fromkeys(kubernetes_client.API_OPTIONS)
    with JsonServer(Compressing) as server:
        api = connection({**options, "host": server.url, "api_key": "t"})
        assert len(api.list_all(PATH, {})[0]["metadata"]["name"]) == 100_000


#: Lists of slices of one node, or of objects with one name, are small.
SMALL_LISTS = {("drain_run.py", "_slices")}


def test_lists_of_claims_and_slices_return_parts_of_objects() -> None:
    """A cluster has many thousands of claims and slices: their lists keep parts of the objects only."""
    plugins = Path(__file__).parents[3] / "plugins"
    found = set()
    for path in plugins.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for function in (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)):
            for call in (each for each in ast.walk(function) if isinstance(each, ast.Call)):
                if isinstance(call.func, ast.Attribute) and call.func.attr == "list_all" and len(call.args) < 3:
                    place = ast.unparse(call.args[0])
                    if "resourceclaims" in place or "resourceslices" in place:
                        found.add((path.name, function.name))
    assert found == SMALL_LISTS


def test_other_rejections_and_first_connection_are_not_retried(api: Api) -> None:
    Server.statuses.append(0)
    with pytest.raises(ApiError) as failed:
        api.list_all(PATH, {})
    assert failed.value.code == "api-unreachable"
    for status in (403, 404):
        Server.statuses.append(status)
        with pytest.raises(ApiError):
            api.list_all(PATH, {})
    assert Server.seen == ["GET"] * 3
