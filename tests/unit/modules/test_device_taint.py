# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module device_taint without a server: what a rule is to be, whose it is, and how long is waited. Against a real one: tests/oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils import _taint_rules as rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.modules import device_taint
from dra_driver.controller import facts

from tests.unit.json_server import JsonHandler, JsonServer

Json = dict[str, Any]
GROUP = "/apis/resource.k8s.io"
TAINT = {"key": "k", "value": "", "effect": "NoSchedule"}
WANTED = rules.Wanted("r", {"pool": "a"}, TAINT, "why", "a")


def stored(wanted: rules.Wanted, **metadata: Any) -> Json:
    """A rule of ours as the server keeps it."""
    body: Json = dict(rules.plan(wanted, None, "v1").body or {})
    fields = [{"manager": rules.MANAGER}, {"manager": "kube-controller-manager"}]
    body["metadata"] = {**body["metadata"], "uid": "u", "resourceVersion": "7", "managedFields": fields, **metadata}
    body["spec"] = {**body["spec"], "taint": {**body["spec"]["taint"], "timeAdded": "then"}}
    return body


def test_the_controller_knows_the_label_of_the_node() -> None:
    assert rules.NODE_LABEL == facts.NODE_LABEL
    found = facts.rule_facts(stored(WANTED))
    assert found is not None and found.node == "a"
    # A label's value is shorter than a node's name may be.
    assert facts.rule_facts(stored(rules.Wanted("r", {}, TAINT, node="n" * 64))) is None


@pytest.mark.parametrize(
    ("match", "selector"),
    [
        ({"node": "a"}, {"pool": "a"}),
        (
            {"pool": "a", "device": "gpu-0", "driver": "d", "node": None, "all": False},
            {"driver": "d", "pool": "a", "device": "gpu-0"},
        ),
        ({"all": True}, {}),
    ],
)
def test_what_is_matched(match: Json, selector: Json) -> None:
    assert rules.selector_of(match) == selector


@pytest.mark.parametrize("match", [{}, {"all": False}, {"pool": ""}, {"all": True, "pool": "a"}])
def test_nothing_and_everything_are_said(match: Json) -> None:
    with pytest.raises(AcceleratorError) as caught:
        rules.selector_of(match)
    assert caught.value.code == "invalid-match"


def test_plans() -> None:
    made = rules.plan(WANTED, None, "v1beta2")
    assert made.verb == "create" and made.body is not None and made.body["apiVersion"] == "resource.k8s.io/v1beta2"
    there = stored(
        WANTED, labels={rules.MANAGED_BY: rules.OURS, rules.NODE_LABEL: "a", "theirs": "x"}, finalizers=["f"]
    )
    assert rules.plan(WANTED, there, "v1") == rules.Write("")
    other = rules.plan(rules.Wanted("r", {"pool": "b"}, TAINT), there, "v1")
    assert other.verb == "update" and other.body is not None
    assert other.body["metadata"] == {
        "name": "r",
        "uid": "u",
        "resourceVersion": "7",
        "finalizers": ["f"],
        "labels": {rules.MANAGED_BY: rules.OURS, "theirs": "x"},
    }
    # The same taint goes on since when it was; another one begins.
    assert other.body["spec"]["taint"] == {"key": "k", "effect": "NoSchedule", "timeAdded": "then"}
    hard = rules.plan(rules.Wanted("r", {"pool": "a"}, {**TAINT, "effect": "NoExecute"}), there, "v1")
    assert hard.body is not None and "timeAdded" not in hard.body["spec"]["taint"]
    gone = rules.plan_removal(there)
    assert gone.verb == "delete" and gone.body is not None
    assert gone.body["preconditions"] == {"uid": "u", "resourceVersion": "7"}
    assert rules.plan_removal(None).verb == ""


def test_a_rule_that_selects_nothing_is_not_one_that_selects_everything() -> None:
    there = stored(rules.Wanted("r", {}, TAINT))
    assert rules.summary(there)["match"] == {}
    del there["spec"]["deviceSelector"]
    assert rules.summary(there)["match"] is None
    assert rules.plan(rules.Wanted("r", {}, TAINT), there, "v1").verb == "update"


def test_whose_a_rule_is() -> None:
    rules.refuse_foreign(None)
    rules.refuse_foreign(stored(WANTED))
    for metadata in ({"labels": {}}, {"managedFields": [{"manager": "kubectl-create"}]}, {"managedFields": []}):
        with pytest.raises(AcceleratorError, match="written by") as caught:
            rules.refuse_foreign(stored(WANTED, **metadata))
        assert caught.value.code == "foreign-rule"


def test_waiting() -> None:
    held = {"namespace": "n", "name": "c", "pods": ["p"], "tolerates": False, "extended_resource": False}
    looks = [[held], [{**held, "tolerates": True}, {**held, "pods": []}]]
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    found, waited = device_taint.wait_until_free(lambda: looks.pop(0), 60, clock=lambda: now[0], sleep=sleep)
    assert waited == 2.0 and [one["pods"] for one in found] == [["p"], []]
    found, waited = device_taint.wait_until_free(lambda: [held], 3, clock=lambda: now[0], sleep=sleep)
    assert (found, waited, now[0]) == ([held], 3.0, 5.0)
    assert device_taint.still_held(found, 3).claims == ("n/c",)


class Cluster(JsonServer):
    """Claims, which change after the first list, and one DeviceTaintRule."""

    def __init__(self) -> None:
        self.lists: list[list[Json]] = []
        self.rule: Json | None = None
        cluster = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.body()
                path = urlsplit(self.path).path
                if path == GROUP:
                    self.answer(200, {"versions": [{"version": "v1"}]})
                elif path == f"{GROUP}/v1":
                    self.answer(200, {"resources": [{"name": "devicetaintrules"}]})
                elif path == f"{GROUP}/v1/resourceclaims":
                    items = cluster.lists.pop(0) if len(cluster.lists) > 1 else cluster.lists[0]
                    self.answer(200, {"items": items, "metadata": {}})
                elif cluster.rule is not None:
                    self.answer(200, cluster.rule)
                else:
                    self.answer(404, {"kind": "Status", "reason": "NotFound", "code": 404, "message": "none"})

            def do_POST(self) -> None:
                rule = self.body()
                if "dryRun" not in self.path:
                    cluster.rule = rule
                self.answer(201, rule)

        super().__init__(Handler)


def claim(name: str, *pods: str, extended: bool = False) -> Json:
    result = {"driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-0", "request": "r"}
    annotations = {"resource.kubernetes.io/extended-resource-claim": "true"} if extended else {}
    return {
        "metadata": {"namespace": "n", "name": name, "annotations": annotations},
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": "u"} for pod in pods],
        },
    }


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as served:
        yield served


def options(cluster: Cluster, **more: Any) -> Json:
    fixed = {"host": cluster.url, "api_key": "k", "name": "r", "match": {"node": "node-1"}, "wait": True}
    return {**fixed, "effect": "NoExecute", "wait_timeout": 1, **more}


def test_device_taint_timeout_returns_waited_and_present_holders(
    cluster: Cluster, run_here: Callable[..., Json]
) -> None:
    cluster.lists = [[claim("first", "a"), claim("second", "b")], [claim("second", "b", extended=True)]]
    found = run_here("device_taint", options(cluster))
    assert found["failed"] and found["error_code"] == "still-held" and found["claims"] == ["n/second"]
    assert found["waited"] >= 1.0
    assert [(one["name"], one["extended_resource"]) for one in found["held_by"]] == [("second", True)]
    assert "device_drain" in found["msg"]


def test_device_taint_success_returns_holders_after_wait(cluster: Cluster, run_here: Callable[..., Json]) -> None:
    cluster.lists = [[claim("first", "a")], [claim("first", "a")], [claim("first")]]
    found = run_here("device_taint", options(cluster, wait_timeout=20))
    assert not found.get("failed") and found["waited"] >= 2.0
    assert [(one["name"], one["pods"]) for one in found["held_by"]] == [("first", [])]
    assert not found.get("warnings")


@pytest.mark.parametrize(("effect", "warned"), [("NoExecute", True), ("NoSchedule", False)])
def test_device_taint_warns_of_pods_that_are_not_evicted(
    cluster: Cluster, run_here: Callable[..., Json], effect: str, warned: bool
) -> None:
    name = effect.lower()  # Ansible keeps the warnings of all modules of one process
    cluster.lists = [[claim(name, "a", extended=True), claim("second", extended=True), claim("third", "c")]]
    found = run_here("device_taint", options(cluster, effect=effect, wait=False))
    assert any(f"claims n/{name}. " in str(each) for each in found.get("warnings", [])) == warned
