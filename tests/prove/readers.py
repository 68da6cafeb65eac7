# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of tests of a controller's report: requests from outside the cluster, and the expected contents."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import urlsplit

import jsonschema

from tests.cluster.cluster import ROOT, Cluster
from tests.drains import CONTROLLER
from tests.prove.repartitioning import pods
from tests.report_page import page

SCHEMA = json.loads((ROOT / "docs/report.schema.json").read_text(encoding="utf-8"))
#: Run on a node: sends a request to the controller from outside the cluster, and trusts only the controllers' own CA.
READ = """
import http.client, json, socket, ssl, sys
asked = json.load(sys.stdin)
context = ssl.create_default_context(cadata=asked["authority"])
class There(http.client.HTTPSConnection):
    def connect(self):
        plain = socket.create_connection((asked["address"], self.port), 20)
        self.sock = context.wrap_socket(plain, server_hostname=self.host)
connection = There(asked["name"], asked["port"])
connection.request("GET", "/dra-accelerators/report", headers=asked["headers"])
answer = connection.getresponse()
print(json.dumps([answer.status, dict(answer.getheaders()), answer.read().decode()]))
"""
Answer = tuple[int, dict[str, str], str]


def waiting(cluster: Cluster) -> dict[str, str]:
    """Return the scheduler's message for each pod without a node, by name without its generated suffix."""
    return {
        name.partition("-")[0]: str(one["message"])
        for name, each in pods(cluster).items()
        for one in each["status"].get("conditions", ())
        if one.get("reason") == "Unschedulable"
    }


def token(cluster: Cluster, name: str, *words: str) -> str:
    return cluster.kubectl("create", "token", name, "-n", "default", *words).strip()


def webhooks(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.get("validatingwebhookconfiguration", CONTROLLER)["webhooks"]
    return found


def question(cluster: Cluster, shown: str, number: int = 0) -> str:
    """Return READ's input for a request to one controller with a token: that of a node, or any pod behind the Service."""
    config = webhooks(cluster)[number]["clientConfig"]
    asked = {
        "authority": base64.b64decode(config["caBundle"]).decode(),
        "headers": {"Authorization": f"Bearer {shown}"} if shown else {},
    }
    if "url" in config:
        there = urlsplit(config["url"])
        asked |= {"name": there.hostname, "address": there.hostname, "port": there.port}
    else:
        service = config["service"]
        address = cluster.get("service", service["name"], "-n", service["namespace"])["spec"]["clusterIP"]
        asked |= {"name": f"{service['name']}.{service['namespace']}.svc", "address": address, "port": service["port"]}
    return json.dumps(asked)


def answered(cluster: Cluster, node: str, asked: str) -> Answer:
    """Return a controller's answer to a request. The API server is not involved."""
    status, headers, body = json.loads(cluster.run(node, "python3", "-c", READ, text=asked))
    return status, headers, body


def read(cluster: Cluster, shown: str, number: int = 0) -> Answer:
    """Request the report from one controller with a token."""
    return answered(cluster, cluster.nodes()[0], question(cluster, shown, number))


def given(cluster: Cluster, shown: str, number: int = 0) -> dict[str, Any]:
    """Return the report as soon as an authorized reader gets it, but not a cached one from an API server outage."""

    def body() -> str | None:
        status, headers, text = read(cluster, shown, number)
        return text if status == 200 and "Warning" not in headers else None

    found: dict[str, Any] = json.loads(cluster.wait("the report is served", body))
    jsonschema.validate(found, SCHEMA)
    return found


def is_the_clusters(cluster: Cluster, found: dict[str, Any]) -> None:
    """Assert that a report contains exactly the nodes, devices, partitions, claims, and pods of the cluster."""
    assert found["asked"] == {"nodes": False, "cluster": True}
    assert sorted(each["name"] for each in found["nodes"]) == cluster.nodes()
    for each in found["nodes"]:
        published: dict[str, set[str]] = {}
        for device in cluster.devices(each["name"]).values():
            told_of = device["attributes"]
            parent = told_of.get("parentUUID", told_of["uuid"])["string"]
            parts = published.setdefault(parent, set())
            parts |= {told_of["uuid"]["string"]} - {parent}
        shown = {one["uuid"]: {part["uuid"] for part in one["partitions"]} for one in each["devices"]}
        assert shown == published, each["name"]
    having = {}
    for each in cluster.get("resourceclaims", "-n", "default")["items"]:
        results = each.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
        if results:
            users = sorted(user["name"] for user in each["status"].get("reservedFor", ()))
            having[f"default/{each['metadata']['name']}"] = (users, [one["device"] for one in results])
    assert {each["name"]: (each["pods"], each["devices"]) for each in found["claims"]} == having
    reasons = {each["pods"][0].partition("-")[0]: each["reason"] for each in found["waiting"]}
    assert {name: (each["source"], each["message"]) for name, each in reasons.items()} == {
        name: ("scheduler", message) for name, message in waiting(cluster).items()
    }
    # The same data renders the page.
    text = page(found)
    assert all(name in text for name in (*cluster.nodes(), *having)) and all(name in text for name in pods(cluster))


def refusals(cluster: Cluster, shown: str) -> None:
    """Assert that unauthorized requests are rejected without any content of the report."""
    audience = "--audience=dra-accelerators-report"
    strangers: dict[str, tuple[str, int, str]] = {
        "without a token": ("", 401, "A bearer token is needed"),
        "with an invalid token": ("nonsense", 401, "does not know this token"),
        "with one for the API server": (token(cluster, "reader"), 401, "does not know this token"),
        "without the right": (token(cluster, "other", audience), 403, "the ClusterRole dra-accelerators-report gives"),
    }
    for who, (word, expected, why) in strangers.items():
        status, headers, body = read(cluster, word)
        assert (status, why in body, "nodes" in body) == (expected, True, False), (who, body)
        assert ("WWW-Authenticate" in headers) == (expected == 401), headers
    status, headers, _body = read(cluster, shown)
    assert status == 200 and headers["Content-Type"] == "application/json"
