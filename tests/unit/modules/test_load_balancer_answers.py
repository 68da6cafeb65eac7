# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A load balancer answers one request of a module with its own 404: no module treats that as a missing object or API."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    claim_reader,
    cluster_facts,
    managed_labels,
    taint_rules,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    client as kubernetes_client,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import Api, ApiError
from ansible_collections.dra.accelerators.plugins.module_utils._migration import queries as migration_queries
from ansible_collections.dra.accelerators.plugins.module_utils._scheduling import explain_sources

from tests.unit.json_server import JsonHandler, JsonServer

Json = dict[str, Any]
report = importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.accelerator_report")
SLICE = {
    "metadata": {"name": "s"},
    "spec": {"driver": "d", "nodeName": "n", "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1}},
}
CLAIM = {
    "metadata": {"namespace": "x", "name": "c"},
    "status": {
        "allocation": {"devices": {"results": [{"driver": "d", "pool": "n", "device": "gpu-0"}]}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
    },
}
ITEMS: dict[str, list[Json]] = {
    "resourceslices": [SLICE],
    "resourceclaims": [CLAIM],
    "devicetaintrules": [{"metadata": {"name": "r"}, "spec": {}}],
}
RESOURCES = [
    {"name": each} for each in (*ITEMS, "clusterroles", "flowschemas", "nodefeatures", "validatingadmissionpolicies")
]


class Server(JsonServer):
    """An API server with all groups. ``answers`` replaces its answers by path: a JSON document, or the text of a 404."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.answers: dict[str, Any] = {}
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                server.reads.append(path)
                found = server.answers.get(path)
                if isinstance(found, str):
                    self.send_response(404)
                    self.send_header("Content-Length", str(len(found)))
                    self.end_headers()
                    self.wfile.write(found.encode())
                    return
                self.answer(200, found if found is not None else server.document(path))

            def do_POST(self) -> None:
                self.answer(201, self.body())

        super().__init__(Handler)

    @staticmethod
    def document(path: str) -> Json:
        words = path.strip("/").split("/")
        if path == "/apis":
            return {"kind": "APIGroupList", "groups": [{"name": "resource.k8s.io"}, {"name": managed_labels.GROUP}]}
        if words[0] == "apis" and len(words) == 2:
            return {"versions": [{"version": "v1"}]}
        if words[0] == "apis" and len(words) == 3:
            return {"resources": RESOURCES}
        if words[-1] in ITEMS:
            return {"items": ITEMS[words[-1]], "metadata": {}}
        named = len(words) > 1 and words[-2] in ("nodes", "namespaces", "configmaps", "clusterroles", "flowschemas")
        if named or words[-2] == "validatingadmissionpolicies":
            return {"metadata": {"name": words[-1]}}
        return {"items": [], "metadata": {}}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.reads.clear()
    running.answers.clear()
    return running


def connected(server: Server) -> Api:
    options: Json = dict.fromkeys(kubernetes_client.API_OPTIONS)
    return kubernetes_client.connection({**options, "host": server.url, "api_key": "t"})


def ask_cluster(api: Api) -> Json:
    options: Json = {"counters": False, "own": True, "needs": True, "orphans": True, "controller": True}
    options["driver_pods"] = True
    found = cluster_facts.read_cluster_facts(api, "", nodes=["n"], namespace="d", drivers=("d",), **options)
    if not found["reached"]:
        raise ApiError(found["problem"], status=404)
    return found


def list_objects(api: Api) -> Json:
    kinds = (("v1", "Pod"), ("apps/v1", "DaemonSet"), ("networking.k8s.io/v1", "NetworkPolicy"))
    lists = [{"api_version": version, "kind": kind, "namespace": "d"} for version, kind in kinds]
    lists.append({"api_version": "resource.k8s.io/v1", "kind": "DeviceClass"})
    found = cluster_facts.read_cluster_facts(
        api, "", nodes=[], namespace="d", counters=False, drivers=(), own=False, lists=lists
    )
    if not found["reached"]:
        raise ApiError(found["problem"], status=404)
    return found


READERS: dict[str, Callable[[Api], Any]] = {
    "cluster_info": ask_cluster,
    "lists of cluster_info": list_objects,
    "served_version": lambda api: kubernetes_client.served_version(api, "resource.k8s.io", ("v1",)),
    "served_rules": taint_rules.served_rules,
    "rules of accelerator_report": report.list_taint_rules,
    "classes of accelerator_report": report.duplicate_classes,
    "device_plugin_migration": lambda api: migration_queries.read_node(
        api, "n", direction="forward", kubelet_root="/k"
    ),
    "device_plugin_migration_info": migration_queries.read_cluster,
    "node_labels": lambda api: managed_labels.discovery(api, {"metadata": {"name": "n"}}),
    "claim_explanation_info": lambda api: explain_sources.ask(api, explain_sources.Objects()),
    "claim_info": lambda api: claim_reader.pods_by_name(api, claim_reader.list_claims(api)[0]),
}


@pytest.mark.parametrize("name", READERS)
def test_load_balancer_response_to_any_request_is_an_error(name: str, server: Server) -> None:
    api = connected(server)
    READERS[name](api)
    for path in dict.fromkeys(server.reads):
        server.answers = {path: "default backend - 404"}
        with pytest.raises(ApiError, match=re.escape(f"The answer of {server.url}{path} is not from an API server")):
            READERS[name](api)
        # The same if the list of groups is not from an API server either.
        server.answers |= {"/apis": {"status": "ok"}}
        with pytest.raises(ApiError, match="is not from an API server"):
            READERS[name](api)


def test_lists_read_the_paths_of_their_kinds(server: Server) -> None:
    list_objects(connected(server))
    assert server.reads == [
        "/api/v1/namespaces/d/pods",
        "/apis/apps/v1/namespaces/d/daemonsets",
        "/apis/networking.k8s.io/v1/namespaces/d/networkpolicies",
        "/apis/resource.k8s.io/v1/deviceclasses",
    ]
    lists = [{"api_version": "resource.k8s.io/v1", "kind": "ResourceSlice", "label_selector": "a=b"}]
    options: Json = {"counters": False, "own": False, "lists": lists}
    found = cluster_facts.read_cluster_facts(connected(server), "", nodes=[], namespace="d", drivers=(), **options)
    assert found["objects"] == [{**SLICE, "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}]


@pytest.mark.parametrize("name", READERS)
def test_other_server_response_to_any_request_is_an_error(name: str, server: Server) -> None:
    """A captive portal answers each request with 200 and JSON: it is an error."""
    api = connected(server)
    READERS[name](api)
    for path in dict.fromkeys(server.reads):
        server.answers = {path: {"status": "ok"}}
        with pytest.raises(ApiError, match=f"GET {path}: the answer is not from an API server"):
            READERS[name](api)


@pytest.mark.parametrize("group", ["resource.k8s.io", managed_labels.GROUP])
def test_group_missing_in_group_list_is_not_served(group: str, server: Server) -> None:
    api = connected(server)
    server.answers = {f"/apis/{group}": "404 page not found", "/apis": {"kind": "APIGroupList", "groups": []}}
    assert kubernetes_client.group_versions(api, group) == []
    if group == managed_labels.GROUP:
        assert not managed_labels.discovery(api, {"metadata": {"name": "n"}}).served
        return
    assert (
        ask_cluster(api)["versions"] == []
        and report.list_taint_rules(api) == []
        and migration_queries.dra_objects(api) == {}
    )
    for read in (taint_rules.served_rules, READERS["served_version"]):
        with pytest.raises(ApiError) as failed:
            read(api)
        assert failed.value.code == "api-version"


def test_missing_object_requires_status_of_api_server(server: Server) -> None:
    api = connected(server)
    server.answers = {"/api/v1/nodes/n": '{"reason": "NotFound", "message": "no such page"}'}
    with pytest.raises(ApiError, match="not from an API server"):
        cluster_facts.found_or_none(api, "/api/v1/nodes/n")
    status = {"kind": "Status", "reason": "NotFound", "message": "none"}
    for details in ({}, {"details": {"name": "other"}}):
        server.answers = {"/api/v1/nodes/n": json.dumps({**status, **details})}
        with pytest.raises(ApiError):
            cluster_facts.found_or_none(api, "/api/v1/nodes/n")
    server.answers = {"/api/v1/nodes/n": json.dumps({**status, "details": {"name": "n"}})}
    assert cluster_facts.found_or_none(api, "/api/v1/nodes/n") is None


def test_only_the_client_compares_with_status_404() -> None:
    """All other modules use ``is_not_found``, ``group_versions``, and ``first_serving``."""
    plugins = Path(__file__).parents[3] / "plugins"
    found = {
        "/".join(path.parts[-2:])
        for path in plugins.rglob("*.py")
        if re.search(r"\bstatus\s*(==|!=|in|not in)\s*\(?[^:\n]*\b404\b", path.read_text())
    }
    assert found == {"_kubernetes/client.py", "_kubernetes/cluster_facts.py"}
