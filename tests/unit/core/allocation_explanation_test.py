# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The explanation why the claims of a pod, or a single claim, can or cannot be allocated on each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from allocation_model import ANY, NODE, Json, Judge, claim, device, holds, published, request
from dra_driver.core.allocation.explanation import Cluster, Explainer, explain
from dra_driver.core.allocation.objects import Malformed
from dra_driver.core.allocation.text import lines, text


def cluster(*, claims: Sequence[Json] = (), pods: Sequence[Json] = (), **more: Any) -> Cluster:
    kept: Json = {"slices": [published(device("a"), device("b"))], "classes": [ANY], "nodes": [NODE], **more}
    return Cluster(claims=claims, pods=pods, **kept)


def pod(*claims: str, name: str = "p", **spec: Any) -> Json:
    references = [{"name": each, "resourceClaimName": each} for each in claims]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"resourceClaims": references, **spec},
    }


def test_explain_pod_with_claims_requires_one_node() -> None:
    both = [claim(name="c"), claim(name="d")]
    (found,) = explain(cluster(claims=both, pods=[pod("c", "d")]), Judge())
    assert found.verdict == "fits" and [one["device"] for one in found.to_dict()["nodes"][0]["devices"]] == ["a", "b"]
    (short,) = explain(cluster(claims=[*both, holds("h", "a")], pods=[pod("c", "d")]), Judge())
    assert short.verdict == "no" and "they want the same devices" in short.nodes[0].together
    # One of them has its devices on another node.
    where = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}]}
    there = holds("c", "a")
    there["status"]["allocation"]["nodeSelector"] = where
    (bound,) = explain(cluster(claims=[there, both[1]], pods=[pod("c", "d")]), Judge())
    assert bound.verdict == "no" and bound.nodes[0].verdict == "not-asked"
    assert "claim default/c has n/a" in bound.nodes[0].message and "no node is checked" in bound.remarks[0]
    (ready,) = explain(cluster(claims=[holds("c", "a")], pods=[pod("c")]), Judge())
    assert ready.verdict == "fits"


def test_explain_missing_objects_are_reported_before_nodes() -> None:
    gone = claim(name="c")
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    full = holds("f", "a")
    full["status"]["reservedFor"] = [{"uid": str(number)} for number in range(256)]
    gated = pod("nobody", "c", "f", schedulingGates=[{"name": "g"}])
    gated["spec"]["resourceClaims"].append({"name": "t", "resourceClaimTemplateName": "missing"})
    strange = claim(name="s")
    strange["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "other"
    found, other = explain(cluster(claims=[gone, full, strange], pods=[gated]), Judge())
    assert (found.verdict, other.verdict) == ("blocked", "blocked")
    words = " ".join(found.blockers)
    for word in (
        "default/nobody does not exist",
        "missing does not exist",
        "gates g",
        "being deleted",
        "used by 256 pods",
    ):
        assert word in words
    assert "DeviceClass other, which does not exist; there are any" in other.blockers[0]
    with pytest.raises(Malformed, match="ResourceClaim c: its requests cannot be read"):
        explain(cluster(claims=[claim({"name": "r", "exactly": {}})]), Judge())


def test_explain_template_claim_uses_its_template() -> None:
    template = {"metadata": {"name": "t", "namespace": "default"}, "spec": {"spec": claim(request(count=3))["spec"]}}
    wants = pod()
    wants["spec"]["resourceClaims"] = [{"name": "it", "resourceClaimTemplateName": "t"}]
    (found,) = explain(cluster(pods=[wants], templates=[template]), Judge())
    assert found.verdict == "no" and found.claims == ("default/p-it",)
    wants["status"] = {"resourceClaimStatuses": [{"name": "it", "resourceClaimName": "made"}]}
    (made,) = explain(cluster(pods=[wants], claims=[claim(name="made")], templates=[template]), Judge())
    assert made.verdict == "fits" and made.claims == ("default/made",)
    wants["status"] = {"resourceClaimStatuses": [{"name": "it"}]}
    (none,) = explain(cluster(pods=[wants], templates=[template]), Judge())
    assert none.claims == ()


def test_explain_claim_alone_and_empty_cluster() -> None:
    explainer = Explainer(cluster(claims=[holds("h", "a")]), Judge())
    allocated = explainer.claim(holds("h", "a"))
    assert (allocated.verdict, allocated.remarks) == ("allocated", ("claim default/h has n/a",))
    fits = explainer.claim(claim())
    assert fits.verdict == "fits" and "no pod waits for it" in fits.remarks[0]
    empty = Explainer(Cluster(classes=[ANY]), Judge()).claim(claim())
    assert (
        empty.verdict == "no"
        and empty.remarks[:2][0] == "there are no nodes"
        and "no driver publishes" in empty.remarks[1]
    )
    unknown = Explainer(cluster(), Judge()).claim(claim(request(selectors=["?"])))
    assert unknown.verdict == "unknown" and "it is unknown whether" in lines(unknown)[0]


def test_explain_selector_error_on_one_node_fails_all_candidate_nodes() -> None:
    nodes = [NODE, {"metadata": {"name": "m", "labels": {}}}]
    slices = [published(device("a")), published(device("b", kind="x"), name="m", pool="m", nodeName="m")]
    asks = claim(request(selectors=["kind=x"]))
    (found,) = explain(cluster(claims=[asks], pods=[pod("c")], nodes=nodes, slices=slices), Judge())
    assert found.verdict == "error" and found.changes[0].kind == "guard-attribute"
    assert "node m would have devices for it: r: m/b." in text([found])
    (elsewhere,) = explain(
        cluster(claims=[asks], pods=[pod("c", nodeName="m")], nodes=nodes, slices=slices),
        Judge(),
        pods=[pod("c", nodeName="m")],
    )
    assert elsewhere.verdict == "fits"


def test_explain_many_nodes_shows_nearest_and_summary() -> None:
    nodes = [{"metadata": {"name": f"n{number}", "labels": {}}} for number in range(20)]
    slices = [
        published(device("a", kind="x"), name=f"s{number}", pool=f"n{number}", nodeName=f"n{number}")
        for number in range(20)
    ]
    held = [holds(f"h{number}", "a") for number in range(20)]
    for number, each in enumerate(held):
        each["status"]["allocation"]["devices"]["results"][0]["pool"] = f"n{number}"
    (found,) = explain(cluster(claims=[claim(), *held], nodes=nodes, slices=slices), Judge(), claims=[claim()])
    text_lines = lines(found, most_nodes=2)
    assert (
        "  over 20 nodes:" in text_lines
        and "      20 held by claims" in text_lines
        and "  18 more nodes have some of these devices." in text_lines
    )
    assert sum(line.startswith("  node ") for line in text_lines) == 2 and found.changes[0].claims == ("default/h0",)
