# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tasks of ``kubernetes.core`` are repeated while the API server is overloaded or restarts, and fail at once if it rejects the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.test.final_result import final_result
from playing import Played, play

from tests.unit.json_server import JsonHandler, JsonServer

ROOT = Path(__file__).resolve().parents[3]
Json = dict[str, Any]
NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "resourceVersion": "1"}}
KINDS = [
    {"name": "nodes", "singularName": "node", "kind": "Node", "namespaced": False, "verbs": ["get", "list", "patch"]},
    {"name": "pods", "singularName": "pod", "kind": "Pod", "namespaced": True, "verbs": ["get", "list"]},
]
DISCOVERY: dict[str, Json] = {
    "/version": {"major": "1", "minor": "36"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": KINDS},
    "/api/v1/nodes/n1": NODE,
    "/api/v1/pods": {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []},
}
REASONS = {403: "Forbidden", 404: "NotFound", 422: "Invalid", 429: "TooManyRequests", 503: "ServiceUnavailable"}


class Server(JsonServer):
    """A server with a Node and no pods. Requests whose line begins with a key of ``refusals`` get its status codes, one after another.

    0 is status 404 of a load balancer.
    """

    def __init__(self) -> None:
        self.refusals: dict[str, list[int]] = {}
        self.requests: list[str] = []
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.body()
                path = self.path.partition("?")[0]
                request = f"{self.command} {path}"
                server.requests.append(request)
                statuses = server.refusals.get(request, [])
                if statuses:
                    status = statuses.pop(0)
                    if status == 0:
                        self.answer(404, {"message": "default backend - 404"})
                        return
                    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
                    self.answer(status, {**body, "message": "no", "reason": REASONS[status], "code": status})
                elif self.command == "PATCH":
                    self.answer(200, {**NODE, "metadata": {"name": "n1", "resourceVersion": "2", "labels": {"a": "b"}}})
                else:
                    self.answer(200, DISCOVERY[path])

            def do_PATCH(self) -> None:
                self.do_GET()

        super().__init__(Handler)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    # kubernetes.core caches the kinds of an API server in the directory for temporary files.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Server() as found:
        yield found


@pytest.fixture
def run(tmp_path: Path, server: Server) -> Callable[..., Played]:
    """Run a file of tasks of the role nvidia_driver without its pauses."""

    def run(name: str, *arguments: str, first: int = 0) -> Played:
        tasks = yaml.safe_load((ROOT / "roles/nvidia_driver/tasks" / name).read_text(encoding="utf-8"))[first:]
        for task in tasks:
            task.update({"delay": 0} if "delay" in task else {})
        access = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(access), encoding="utf-8")
        api = {"kubeconfig": str(tmp_path / "kubeconfig"), "context": "", "node": "n1"}
        return play(tmp_path, tasks, {"h1": {"__nvidia_driver_api": api}}, *arguments)

    return run


@pytest.mark.prove
def test_tasks_are_repeated_after_overloads(server: Server, run: Callable[..., Played]) -> None:
    # The module sends two kinds of patches in each attempt.
    server.refusals = {
        "GET /version": [429],
        "GET /api/v1/nodes/n1": [503],
        "PATCH /api/v1/nodes/n1": [429] * 2,
        "GET /api/v1/pods": [429, 503],
    }
    done = run("stop_pod.yml")
    assert done.status == 0, done.output
    assert not any(server.refusals.values()), server.refusals
    assert server.requests[-1] == "GET /api/v1/pods"


def test_wait_for_pods_fails_if_a_load_balancer_answers(server: Server, run: Callable[..., Played]) -> None:
    """kubernetes.core reports no pods if the list of pods has status 404: the wait fails."""
    server.refusals["GET /api/v1/pods"] = [0] * 20
    failed = run("stop_pod.yml", first=1).failed["h1"]
    assert "not from an API server" in failed["problem"] and failed["attempts"] == 1


def test_patch_of_a_node_that_a_load_balancer_does_not_find_is_repeated(
    server: Server, run: Callable[..., Played]
) -> None:
    """kubernetes.core succeeds without a patch if a read has status 404: the patch is repeated."""
    server.refusals["GET /api/v1/nodes/n1"] = [404]
    done = run("start_pod.yml")
    assert done.status == 0, done.output
    assert "PATCH /api/v1/nodes/n1" in server.requests


@pytest.mark.parametrize("arguments", [(), ("--check",)])
def test_rejected_write_fails_at_once(arguments: tuple[str, ...], server: Server, run: Callable[..., Played]) -> None:
    server.refusals["PATCH /api/v1/nodes/n1"] = [403] * 100
    done = run("start_pod.yml", *arguments)
    assert done.failed["h1"]["attempts"] == 1, done.output
    assert server.requests.count("PATCH /api/v1/nodes/n1") == 2


def test_rejected_wait_fails_at_once(server: Server, run: Callable[..., Played]) -> None:
    server.refusals["GET /api/v1/pods"] = [403] * 100
    assert run("stop_pod.yml", first=1).failed["h1"]["attempts"] == 1


STATUS = 'Failed to patch object: b\'{"kind":"Status","status":"Failure","code":%s}\\n\''
READ = "Exception '%s\nReason: %s\nHTTP response headers: {}\n' raised while trying to get resource using (name=n)"


@pytest.mark.parametrize(
    ("result", "is_final"),
    [
        ({"failed": False, "result": {}}, True),
        ({"failed": False, "warnings": ["resource 'kind=Node,name=n' was not found but will not be created"]}, False),
        ({"failed": False, "resources": [], "api_found": True}, True),
        ({"failed": False, "resources": [], "api_found": False}, False),
        ({"failed": True, "reason": "Forbidden", "msg": "Failed to patch object: b'no'"}, True),
        *(({"failed": True, "msg": STATUS % status}, True) for status in (400, 401, 403, 404, 405, 413, 415, 422)),
        *(({"failed": True, "msg": STATUS % status}, False) for status in (409, 429, 500, 503, 504)),
        ({"failed": True, "msg": READ % (403, "Forbidden")}, True),
        ({"failed": True, "msg": READ % (429, "Too Many Requests")}, False),
        ({"failed": True, "msg": "MODULE FAILURE", "module_stderr": "ApiException: (401)\nReason: Unauthorized"}, True),
        ({"failed": True, "msg": "MODULE FAILURE", "module_stderr": "(503)\nReason: Service Unavailable"}, False),
        # Another run has deleted the object.
        ({"failed": True, "reason": "Not Found", "msg": 'Failed to delete object: {"code":404}'}, False),
        ({"failed": True, "reason": "Forbidden", "msg": 'Failed to delete object: {"code":403}'}, True),
        ({"failed": True, "msg": '"ClusterRole" "a": Timed out waiting on resource'}, True),
        ({"failed": True, "msg": "Failed to import the required Python library (kubernetes) on host"}, True),
        ({"failed": True, "msg": "Could not create API client: Invalid kube-config file."}, True),
        ({"failed": True, "msg": "HTTPConnectionPool(host='h', port=1): Max retries exceeded"}, False),
        ({"failed": True}, False),
    ],
)
def test_final_result(result: Json, is_final: bool) -> None:
    assert final_result(result) is is_final


def test_final_result_needs_a_result() -> None:
    with pytest.raises(AnsibleFilterError, match="found list"):
        final_result([])
