# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet report of the module accelerator_report from an API server, and its reasons for pending claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._scheduling import explain_sources
from fleet_page import SCHEMA, TAINT, Json, Page, published

from tests.fleets import Fleet, boards
from tests.report_page import page
from tests.unit.json_server import JsonHandler, JsonServer

MIG_CLASS = {
    "metadata": {"name": "mig.nvidia.com"},
    "spec": {"selectors": [{"cel": {"expression": "device.attributes['gpu.nvidia.com'].type == 'mig'"}}]},
}


class Cluster(JsonServer):
    """A server with the lists of a fleet. ``forbidden`` are parts of paths that are denied."""

    def __init__(self, fleet: Fleet) -> None:
        base = "/apis/resource.k8s.io"
        resources = {"resources": [{"name": "devicetaintrules"}]}
        self.found: dict[str, Json] = {
            base: {"versions": [{"version": "v1"}]},
            f"{base}/v1": resources,
            f"{base}/v1/resourceclaims": {"items": fleet.claims},
            f"{base}/v1/resourceslices": {"items": fleet.slices},
            f"{base}/v1/devicetaintrules": {"items": fleet.rules},
            f"{base}/v1/resourceclaimtemplates": {"items": []},
            f"{base}/v1/deviceclasses": {"items": [MIG_CLASS]},
            "/api/v1/nodes": {"items": [{"metadata": {"name": name}} for name in fleet.answers]},
            "/api/v1/pods": {"items": fleet.pending},
            "/api/v1/namespaces/research/pods": {"items": []},
        }
        self.forbidden = "nothing"
        self.paths: list[str] = []
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                server.paths.append(self.path)
                if server.forbidden in path:
                    self.answer(403, {"kind": "Status", "message": "forbidden", "reason": "Forbidden"})
                elif path in server.found:
                    self.answer(200, server.found[path])
                else:
                    self.answer(404, {"kind": "Status", "message": f"{path} is not there", "reason": "NotFound"})

        super().__init__(Handler)


def test_module_reads_cluster(run_here: Callable[..., Json]) -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(2))
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-1-mig-1g10gb-19-2"), pods=("writer",))
    fleet.pending_pod("p", "c", "0/1 nodes are available")
    fleet.rules = [{"metadata": {"name": "r"}, "spec": {"deviceSelector": {"pool": "node-1"}, "taint": TAINT}}]
    with Cluster(fleet) as cluster:
        options = {"nodes": fleet.answers, "host": cluster.url, "api_key": "let-me-in", "explain": False}

        def ask(**more: Any) -> Json:
            return dict(run_here("accelerator_report", {**options, **more}))

        found = ask()["ansible_facts"]["accelerator_report"]["picture"]
        jsonschema.validate(found, SCHEMA)
        assert {**found, "generated": ""} == {**fleet.picture(), "generated": ""}
        assert found["totals"]["withheld"] == 2 and found["totals"]["waiting"] == 1
        assert any("/api/v1/pods" in each and "phase" in each for each in cluster.paths), "of all pods those that wait"
        cluster.forbidden = "devicetaintrules"
        found = ask()["ansible_facts"]["accelerator_report"]["picture"]
        assert found["totals"]["withheld"] == 0, "rules that may not be seen are not there"
        cluster.paths.clear()
        ask(health=False)
        assert not any("pods" in each for each in cluster.paths)
        cluster.forbidden = "/pods"
        assert ask()["status"] == 403


def test_module_names_extended_resource_of_several_classes(run_here: Callable[..., Json]) -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(1))
    with Cluster(fleet) as cluster:
        options = {"nodes": fleet.answers, "host": cluster.url, "api_key": "let-me-in", "explain": False}

        def duplicates() -> list[str]:
            report = run_here("accelerator_report", options)["ansible_facts"]["accelerator_report"]
            found = [
                [each["message"] for each in part["attention"] if each["code"] == "duplicate-extended-resource"]
                for part in (report, report["picture"])
            ]
            assert found[0] == found[1]
            return found[0]

        assert duplicates() == []
        cluster.found["/apis/resource.k8s.io/v1/deviceclasses"]["items"] = [
            {"metadata": {"name": name}, "spec": {"extendedResourceName": "nvidia.com/gpu"}} for name in ("b", "a")
        ]
        (text,) = duplicates()
        assert "nvidia.com/gpu is served by several DeviceClasses: a, b." in text
        cluster.forbidden = "deviceclasses"
        assert duplicates() == []


def wants(fleet: Fleet, pod: str, claim: str, profile: str, since: str) -> None:
    """Return a pod that waits for partitions of a profile."""
    fleet.pending_pod(pod, claim, "0/1 nodes are available", since)
    selector = {"cel": {"expression": f"device.attributes['gpu.nvidia.com'].profile == '{profile}'"}}
    fleet.claims[-1]["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = [selector]


def test_module_explains_pending_claims(run_here: Callable[..., Json], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(1))
    fleet.claim("training", "node-1", published(fleet, "node-1", "gpu-0-mig-3g40gb-9-0"), pods=("trainer",))
    wants(fleet, "large-0", "large", "7g.80gb", "2026-11-24T08:30:00Z")
    wants(fleet, "late-0", "late", "7g.80gb", "2026-11-24T09:30:00Z")
    wants(fleet, "small-0", "small", "1g.10gb", "2026-11-24T09:00:00Z")
    wants(fleet, "odd-0", "odd", "5g.50gb", "2026-11-24T09:10:00Z")
    reasons = {"research/odd": {"message": "No node has such boards."}}
    with Cluster(fleet) as cluster:
        options = {"nodes": fleet.answers, "host": cluster.url, "api_key": "let-me-in", "reasons": reasons}

        def ask(**more: Any) -> tuple[Json, list[str], list[str]]:
            found = run_here("accelerator_report", {**options, **more})["ansible_facts"]["accelerator_report"][
                "picture"
            ]
            jsonschema.validate(found, SCHEMA)
            notes = [each["message"] for each in found["attention"] if each["code"] == "not-explained"]
            assert not notes or notes[0] in Page(page(found)).text
            return {each["claim"]: each["reason"] for each in found["waiting"]}, notes, list(cluster.paths)

        reasons_by_claim, notes, paths = ask()
        large, late = reasons_by_claim["research/large"], reasons_by_claim["research/late"]
        assert (large["source"], large["code"]) == ("explained", "free-claims")
        assert large["message"].startswith("No node has devices for it now. Request r: 0 of ")
        assert "1 for which claims leave too little of counters" in large["message"]
        assert large["remedy"] == "It fits when research/training ends (node node-1)."
        assert late == large, "equal claims have equal reasons"
        assert reasons_by_claim["research/small"]["source"] == "scheduler", (
            "there are devices for it: it waits for something else"
        )
        assert reasons_by_claim["research/odd"]["source"] == "given" and notes == []
        assert any("resourceslices?" in each and "driver%21%3Dgpu.nvidia.com" in each for each in paths), (
            "no slices are read twice"
        )

        monkeypatch.setattr(explain_sources, "MOST_EXPLAINED", 1)
        reasons_by_claim, notes, _paths = ask(reasons={})
        assert [reasons_by_claim[f"research/{name}"]["source"] for name in ("large", "late", "small", "odd")] == [
            *("explained", "explained", "scheduler", "scheduler")
        ]
        assert "of 2 pods more" in notes[0]

        cluster.paths.clear()
        cluster.forbidden = "/nodes"
        reasons_by_claim, notes, _paths = ask()
        assert (
            reasons_by_claim["research/large"]["source"] == "scheduler" and "forbidden" in notes[0] and len(notes) == 1
        )
        cluster.paths.clear()
        reasons_by_claim, notes, paths = ask(explain=False)
        assert reasons_by_claim["research/large"]["source"] == "scheduler" and notes == []
        assert not any("nodes" in each for each in paths)
        monkeypatch.setattr(explain_sources, "HAS_CEL", False)
        cluster.paths.clear()
        reasons_by_claim, notes, paths = ask()
        assert (
            reasons_by_claim["research/large"]["source"] == "scheduler"
            and "cel-expr-python" in notes[0]
            and len(notes) == 1
        )
        assert not any("nodes" in each for each in paths)


def test_explanations_are_limited() -> None:
    fleet = Fleet()
    for number in range(30):
        fleet.node(f"node-{number:02d}", boards(1, number=number))
    wants(fleet, "odd-0", "odd", "5g.50gb", "2026-11-24T09:10:00Z")
    wants(fleet, "more-0", "more", "6g.60gb", "2026-11-24T09:20:00Z")
    objects = explain_sources.Objects()
    nodes = [{"metadata": {"name": name}} for name in (*fleet.answers, "without-devices")]
    for kind, documents in {
        "ResourceClaim": fleet.claims,
        "ResourceSlice": fleet.slices,
        "DeviceClass": [MIG_CLASS],
        "Node": nodes,
    }.items():
        for each in documents:
            objects.add(kind, each, "")
    found, left = explain_sources.reasons(objects, fleet.pending)
    assert left == 0 and set(found) == {"research/odd-0", "research/more-0"}
    assert "Checked 13 of 31 possible nodes." in found["research/odd-0"]["message"]
    assert found["research/odd-0"]["code"] == "nothing" and found["research/odd-0"]["remedy"] == ""
    clock = iter((0.0, 1.0, explain_sources.MOST_SECONDS + 2))
    found, left = explain_sources.reasons(objects, fleet.pending, lambda: next(clock))
    assert set(found) == {"research/odd-0"} and left == 1
