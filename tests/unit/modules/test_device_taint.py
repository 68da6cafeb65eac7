# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module device_taint without a server: the rule, its owner, and the duration of waits. For a real server see tests/oracles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import taint_rules as rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.times import text_of
from ansible_collections.dra.accelerators.plugins.modules import device_taint
from dra_driver.controller import facts

from tests.unit.json_server import JsonHandler, JsonServer

Json = dict[str, Any]
GROUP = "/apis/resource.k8s.io"
TAINT = {"key": "k", "value": "", "effect": "NoSchedule"}
WANTED = rules.DesiredRule("r", {"pool": "a"}, TAINT, "why", "a")


def stored(wanted: rules.DesiredRule, **metadata: Any) -> Json:
    """Return a rule of this collection as the server stores it."""
    body: Json = dict(rules.plan(wanted, None, "v1").body or {})
    fields = [{"manager": rules.MANAGER}, {"manager": "kube-controller-manager"}]
    body["metadata"] = {**body["metadata"], "uid": "u", "resourceVersion": "7", "managedFields": fields, **metadata}
    body["spec"] = {**body["spec"], "taint": {**body["spec"]["taint"], "timeAdded": "then"}}
    return body


def test_rule_node_label_is_known_to_controller() -> None:
    assert rules.NODE_LABEL == facts.NODE_LABEL
    found = facts.rule_facts(stored(WANTED))
    assert found is not None and found.node == "a"
    # A label value has a smaller maximum length than a node name.
    assert facts.rule_facts(stored(rules.DesiredRule("r", {}, TAINT, node="n" * 64))) is None


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
def test_selector_of_match(match: Json, selector: Json) -> None:
    assert rules.selector_of(match) == selector


@pytest.mark.parametrize("match", [{}, {"all": False}, {"pool": ""}, {"all": True, "pool": "a"}])
def test_selector_of_empty_or_full_match_is_rejected(match: Json) -> None:
    with pytest.raises(AcceleratorError) as caught:
        rules.selector_of(match)
    assert caught.value.code == "invalid-match"


def test_plan_creates_updates_or_keeps_rule() -> None:
    made = rules.plan(WANTED, None, "v1beta2")
    assert made.verb == "create" and made.body is not None and made.body["apiVersion"] == "resource.k8s.io/v1beta2"
    there = stored(
        WANTED, labels={rules.MANAGED_BY: rules.OURS, rules.NODE_LABEL: "a", "theirs": "x"}, finalizers=["f"]
    )
    assert rules.plan(WANTED, there, "v1") == rules.Write("")
    other = rules.plan(rules.DesiredRule("r", {"pool": "b"}, TAINT), there, "v1")
    assert other.verb == "update" and other.body is not None
    assert other.body["metadata"] == {
        "name": "r",
        "uid": "u",
        "resourceVersion": "7",
        "finalizers": ["f"],
        "labels": {rules.MANAGED_BY: rules.OURS, "theirs": "x"},
    }
    # The same taint keeps its start time. A different one gets a new one.
    assert other.body["spec"]["taint"] == {"key": "k", "effect": "NoSchedule", "timeAdded": "then"}
    hard = rules.plan(rules.DesiredRule("r", {"pool": "a"}, {**TAINT, "effect": "NoExecute"}), there, "v1")
    assert hard.body is not None and "timeAdded" not in hard.body["spec"]["taint"]
    gone = rules.plan_removal(there)
    assert gone.verb == "delete" and gone.body is not None
    assert gone.body["preconditions"] == {"uid": "u", "resourceVersion": "7"}
    assert rules.plan_removal(None).verb == ""


def test_empty_selector_differs_from_missing_selector() -> None:
    there = stored(rules.DesiredRule("r", {}, TAINT))
    assert rules.summary(there)["match"] == {}
    del there["spec"]["deviceSelector"]
    assert rules.summary(there)["match"] is None
    assert rules.plan(rules.DesiredRule("r", {}, TAINT), there, "v1").verb == "update"


def test_foreign_rule_is_rejected() -> None:
    rules.refuse_foreign(None)
    rules.refuse_foreign(stored(WANTED))
    for metadata in ({"labels": {}}, {"managedFields": [{"manager": "kubectl-create"}]}, {"managedFields": []}):
        with pytest.raises(AcceleratorError, match="written by") as caught:
            rules.refuse_foreign(stored(WANTED, **metadata))
        assert caught.value.code == "foreign-rule"


class Time:
    """A clock that only sleeps and reads advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


HELD = {"namespace": "n", "name": "c", "pods": ["p"], "tolerates": False, "extended_resource": False}


def test_wait_reads_claims_by_name_until_released() -> None:
    time, named = Time(), list[list[str]]()
    other = {**HELD, "name": "a", "tolerates": True}
    looks = [[HELD], [{**HELD, "pods": []}], [{**HELD, "pods": []}, other]]

    def read(claims: list[Json]) -> list[Json]:
        named.append([one["name"] for one in claims])
        return looks.pop(0)

    found, waited = device_taint.wait_until_free(read, [other, HELD], 60, clock=time.clock, sleep=time.sleep)
    assert named == [["c"], ["c"], []]
    assert waited == 2.0 and [one["pods"] for one in found] == [[], ["p"]]


def test_wait_timeout_returns_current_holders() -> None:
    time = Time()
    other = {**HELD, "name": "a", "tolerates": True}
    found, waited = device_taint.wait_until_free(
        lambda _claims: [HELD], [HELD, other], 3, clock=time.clock, sleep=time.sleep
    )
    assert (found, waited, time.now) == ([other, HELD], 3.0, 3.0)
    assert device_taint.still_held(device_taint.in_use(found), 3).claims == ("n/c",)


@pytest.mark.parametrize("before", [[], [HELD], [{**HELD, "name": f"c{each}"} for each in range(1000)]])
def test_wait_slow_list_finds_claim_allocated_after_rule(before: list[Json]) -> None:
    """The scheduler allocates 3 s after the rule. A list takes 10 s and returns the state at its start: the claim is found."""
    time, given_back = Time(), 30.0

    def read(claims: list[Json]) -> list[Json]:
        begin = time.now
        time.now += 0 if claims else 10
        return [HELD] if not claims and 3 <= begin < given_back else []

    found, waited = device_taint.wait_until_free(read, before, 600, settle=4.0, clock=time.clock, sleep=time.sleep)
    assert not found and waited >= given_back


class Cluster(JsonServer):
    """Claims, which change after each read, and one DeviceTaintRule."""

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
                elif path.endswith("/resourceclaims"):
                    self.answer(200, {"items": cluster.next(), "metadata": {}})
                elif "/resourceclaims/" in path:
                    name = path.rpartition("/")[2]
                    found = [each for each in cluster.next() if each["metadata"]["name"] == name]
                    missing = {"kind": "Status", "reason": "NotFound", "code": 404, "message": "none"}
                    self.answer(*((200, found[0]) if found else (404, missing)))
                elif cluster.rule is not None and path.endswith("/r"):
                    self.answer(200, cluster.rule)
                else:
                    self.answer(404, {"kind": "Status", "reason": "NotFound", "code": 404, "message": "none"})

            def do_POST(self) -> None:
                rule = self.body()
                if "dryRun" not in self.path:
                    cluster.rule = rule
                self.answer(201, rule)

        super().__init__(Handler)

    def next(self) -> list[Json]:
        return self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]


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


def test_module_timeout_returns_duration_and_holders(cluster: Cluster, run_here: Callable[..., Json]) -> None:
    cluster.lists = [[claim("first", "a"), claim("second", "b")], [claim("second", "b", extended=True)]]
    found = run_here("device_taint", options(cluster))
    assert found["failed"] and found["error_code"] == "still-held" and found["claims"] == ["n/second"]
    assert found["waited"] >= 1.0
    assert [(one["name"], one["extended_resource"]) for one in found["held_by"]] == [("second", True)]
    assert "device_drain" in found["msg"]


def test_module_success_returns_remaining_holders(cluster: Cluster, run_here: Callable[..., Json]) -> None:
    cluster.lists = [[claim("first", "a")], [claim("first", "a")], [claim("first")]]
    found = run_here("device_taint", options(cluster, wait_timeout=20))
    assert not found.get("failed") and found["waited"] >= 2.0
    assert [(one["name"], one["pods"]) for one in found["held_by"]] == [("first", [])]
    assert not found.get("warnings")


@pytest.mark.parametrize(("age", "waits"), [(2.0, True), (60.0, False)])
def test_module_waits_for_scheduler_after_killed_run(
    cluster: Cluster, run_here: Callable[..., Json], age: float, waits: bool
) -> None:
    cluster.lists = [[]]
    run_here("device_taint", options(cluster, wait=False))
    assert cluster.rule is not None
    written = {"manager": rules.MANAGER, "time": text_of(time.time() - age)}
    cluster.rule["metadata"]["managedFields"] = [written]
    found = run_here("device_taint", options(cluster, wait_timeout=20))
    assert not found["changed"] and (found["waited"] >= 4.0) == waits


@pytest.mark.parametrize(("effect", "warned"), [("NoExecute", True), ("NoSchedule", False)])
def test_module_warns_of_pods_that_are_not_evicted(
    cluster: Cluster, run_here: Callable[..., Json], effect: str, warned: bool
) -> None:
    name = effect.lower()  # Ansible collects the warnings of all modules in one process
    cluster.lists = [[claim(name, "a", extended=True), claim("second", extended=True), claim("third", "c")]]
    found = run_here("device_taint", options(cluster, effect=effect, wait=False))
    assert any(f"claims n/{name}. " in str(each) for each in found.get("warnings", [])) == warned
