# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Pods that request devices in their limits are explained and planned like pods with claims."""

from __future__ import annotations

from typing import Any

import pytest
from allocation_model import ANY, NODE, Json, Judge, claim, device, published
from dra_driver.core.allocation.explanation import Cluster, explain
from dra_driver.core.dra.extended_claims import class_of_resource, duplicates, requests_of
from dra_driver.core.planner.claims import waiting_since, wishes_of

SERVING = {**ANY, "spec": {**ANY["spec"], "extendedResourceName": "example.com/gpu"}}


def named(name: str, resource: str, created: str = "2026-01-01T00:00:00Z") -> Json:
    return {"metadata": {"name": name, "creationTimestamp": created}, "spec": {"extendedResourceName": resource}}


def pod(**limits: Any) -> Json:
    resource_limits = {key.replace("__", "/").replace("_", "."): value for key, value in limits.items()}
    return {
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "default", "creationTimestamp": "2026-01-02T00:00:00Z"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": resource_limits}}]},
    }


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("example.com/gpu", "newest"),
        ("example.com/same", "a"),
        ("example.com/none", ""),
        ("deviceclass.resource.kubernetes.io/old", "old"),
        ("deviceclass.resource.kubernetes.io/none", ""),
    ],
)
def test_class_of_a_resource(resource: str, expected: str) -> None:
    classes = [
        named("old", "example.com/gpu"),
        named("newest", "example.com/gpu", "2026-02-01T00:00:00Z"),
        named("b", "example.com/same"),
        named("a", "example.com/same"),
    ]
    assert class_of_resource(resource, classes) == expected
    assert duplicates(classes) == {"example.com/gpu": ["newest", "old"], "example.com/same": ["a", "b"]}


def test_requests_are_those_of_the_scheduler() -> None:
    spec = {
        "initContainers": [{"name": "i", "resources": {"limits": {"example.com/gpu": "1"}}}],
        "containers": [
            {
                "name": "a",
                "resources": {"limits": {"cpu": "2", "memory": "1Gi", "example.com/gpu": "2", "example.com/x": "1"}},
            },
            {
                "name": "b",
                "resources": {"limits": {"example.com/gpu": 0, "deviceclass.resource.kubernetes.io/any": "1"}},
            },
        ],
    }
    assert [
        (each["name"], each["exactly"]["deviceClassName"], each["exactly"]["count"])
        for each in requests_of(spec, [SERVING])
    ] == [
        ("container-0-request-0", "any", 1),
        ("container-1-request-0", "any", 2),
        ("container-2-request-0", "any", 1),
    ]


@pytest.mark.parametrize(("count", "verdict"), [(2, "fits"), (3, "no")])
def test_waiting_pod_is_explained(count: int, verdict: str) -> None:
    cluster = Cluster(
        slices=[published(device("a"), device("b"))],
        classes=[SERVING],
        nodes=[NODE],
        pods=[pod(example_com__gpu=count)],
    )
    (found,) = explain(cluster, Judge())
    assert (found.verdict, found.claims) == (verdict, ("default/p-extended-resources",))


def test_claim_created_by_scheduler_is_explained_with_its_pod() -> None:
    wants = {**pod(example_com__gpu=1), "status": {"extendedResourceClaimStatus": {"resourceClaimName": "made"}}}
    cluster = Cluster(
        slices=[published(device("a"))], classes=[SERVING], nodes=[NODE], pods=[wants], claims=[claim(name="made")]
    )
    (found,) = explain(cluster, Judge())
    assert (found.kind, found.claims) == ("Pod", ("default/made",))


def test_pod_without_device_requests_is_ignored() -> None:
    assert explain(Cluster(classes=[SERVING], nodes=[NODE], pods=[pod(cpu=1, example_com__other=1)]), Judge()) == []


def test_planner_reads_limits() -> None:
    waits = pod(example_com__gpu=2)
    assert waiting_since(waits, [SERVING]) == "2026-01-02T00:00:00Z" and waiting_since(waits) == ""
    (wish,), lacks = wishes_of([waits], classes=[SERVING])
    assert lacks == [] and wish.claims[0]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 2
    deployment = {
        "kind": "Deployment",
        "metadata": {"name": "d", "namespace": "default"},
        "spec": {"replicas": 3, "template": {"spec": waits["spec"]}},
    }
    (wish,), _lacks = wishes_of([deployment, {**SERVING, "kind": "DeviceClass"}])
    assert (wish.name, wish.count) == ("Deployment default/d", 3)
