# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test day-2 operations: the controller removes taint rules of a killed run, serves its report to authorized readers,
and a plan that moves a claim is applied.

Two GPU nodes also run the controller, first as a systemd service and at last as a Deployment. Each test starts from
the state that the previous one left.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import PLUGIN_DIRECTORY, Cluster, Recap
from tests.cluster.manifests import claim, deployment, pod, selected, static
from tests.cluster.test_45_controller import ASK, NAMESPACE, holder
from tests.drains import (
    CONTROLLER,
    MANUAL_RULES,
    REMOVED_RULES_METRIC,
    drain,
    manual_rules,
    rule_creation_times,
    verify_abandoned_rules_are_removed,
    verify_rule_without_renewal_is_removed,
)
from tests.prove.pods import make_base_image
from tests.prove.readers import (
    answered,
    given,
    is_the_clusters,
    question,
    read,
    refusals,
    token,
    waiting,
    webhooks,
)
from tests.prove.repartitioning import (
    containers,
    holders,
    killed_at,
    node_events,
    numbered,
    pods,
    profiles,
    records,
    repartition,
    rules,
    wait_ready,
)

WORLD = os.environ.get("DRA_ACCELERATORS_DAY_TWO_WORLD", "day-two")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
#: Seconds after which the controller removes a drain's taint rules that are not renewed.
LASTING = 60
#: Variables of all playbook runs for the controller.
CHOSEN = {"dra_controller_interval": 1, "dra_controller_drift_after": 2}
#: Layout of the first node. Only its second GPU has partitions of the middle size.
LAYOUT: list[dict[str, Any]] = [
    {"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}},
    {"match": {"index": 1}, "mode": "static", "partitions": {"2g.20gb": 3}},
    {"match": {}, "mode": "whole"},
]
#: A layout without any of the second GPU's partitions.
HALVES = {"match": {"index": 1}, "mode": "static", "partitions": {"3g.40gb": 2}}
PARTS = {"large": 1, "small": 1, "middle": 1}
#: Number of whole GPUs on both nodes.
WHOLE = 8
ASKS = {
    "large": selected("mig.nvidia.com", static("3g.40gb")),
    "small": selected("mig.nvidia.com", static("1g.10gb")),
    "middle": selected("mig.nvidia.com", static("2g.20gb")),
    "whole": {"deviceClassName": "gpu.nvidia.com"},
    "late": {"deviceClassName": "gpu.nvidia.com"},
}
HUGE = "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('400Gi')) >= 0"


def layouts(cluster: Cluster, *more: dict[str, Any]) -> dict[str, Any]:
    """Return the fleet file, with these rules before those of the first node."""
    one, other = cluster.nodes()
    whole = [{"match": {}, "mode": "whole"}]
    return {"accelerator_layouts": [{"hosts": one, "layout": [*more, *LAYOUT]}, {"hosts": other, "layout": whole}]}


def controller(cluster: Cluster, **more: Any) -> Recap:
    """Run the controller playbook with these variables."""
    words = ("-e", json.dumps({**CHOSEN, **more}))
    done = cluster.playbook("controller.yml", *words, inventory=cluster.inventory(controllers=True), check=False)
    assert not done.failed, done.output
    return done


@pytest.fixture(scope="module")
def living() -> Iterator[Cluster]:
    """Start two nodes with the controller on both, an early removal of drain taints, and three pods on partitions;
    yield the cluster.
    """
    cluster = Cluster(WORLD, {"dra_driver_inventory_interval": 10})
    if not KEPT:
        cluster.world("down")
    cluster.world("up", "--nodes", "2", "--silicon", "8xH100,2xRTX-PRO-6000", timeout=3000)
    cluster.variables |= layouts(cluster)
    first = cluster.playbook("site.yml", check=False)
    assert not first.failed, first.output
    controller(cluster, dra_controller_lift_drains_after=LASTING)
    for name, number in PARTS.items():
        cluster.apply(*deployment(name, number, ASKS[name]))
    wait_ready(cluster, **PARTS)
    cluster.wait("a controller acts", lambda: holder(cluster))
    yield cluster
    if not KEPT:
        cluster.world("down")


@pytest.fixture(scope="module")
def node(living: Cluster) -> str:
    """Return the node whose layout changes."""
    return living.nodes()[0]


def of(cluster: Cluster, name: str) -> list[str]:
    """Return the indexes of the first node's GPUs that the pods of a Deployment use."""
    return [f"{numbered(place)[1]}" for place, user in holders(cluster).items() if user.startswith(f"{name}-")]


# ---- remains of a killed run


KILLED_AT = "Wait until the driver has unprepared the devices to remove"
#: Simulate that the timeout of the drain and the 15 min after it have passed.
AGE = """
import json, sys, time
record = json.load(open(sys.argv[1]))
record["until"] = time.time()
open(sys.argv[1], "w").write(json.dumps(record))
"""


def counted(cluster: Cluster, name: str) -> float:
    """Return a metric of the active controller, 0.0 if it is missing."""
    said = cluster.run(holder(cluster), "python3", "-c", ASK)
    found = re.findall(rf"^dra_accelerators_controller_{re.escape(name)} (\S+)$", said, re.MULTILINE)
    return float(found[0]) if found else 0.0


def test_controller_removes_only_the_taints_of_a_killed_run(living: Cluster, node: str) -> None:
    (former,) = (name for name in containers(living) if name.startswith("middle"))
    living.apply(*manual_rules(node))
    changed = json.dumps({**layouts(living, HALVES), "accelerator_repartition_evict": True})
    killed_at(living, KILLED_AT, "-e", changed)
    abandoned = rule_creation_times(living, "repartition")
    (renewed,) = drain(living, node, "elsewhere", "gpu-6")
    assert len(abandoned) == 3 and records(living) == [node] and profiles(living, node, 1) == {"2g.20gb": 3}
    living.wait(
        "the Event of the remaining drain",
        lambda: "DrainLeft" in [reason for reason, _text in node_events(living, node, CONTROLLER)],
    )
    living.wait("the metric of the remaining drain", lambda: counted(living, 'drift{kind="drain-left"}') > 0)
    living.wait("the evicted pod is pending", lambda: "middle" in waiting(living) and not of(living, "middle"))
    assert counted(living, REMOVED_RULES_METRIC) == 0
    verify_abandoned_rules_are_removed(living, node, abandoned, renewed, LASTING)
    living.wait("the metric of the removed rules", lambda: counted(living, REMOVED_RULES_METRIC) == len(abandoned))
    verify_pod_is_pending_and_runs_again(living, node, former)
    verify_rule_without_renewal_is_removed(living, node, renewed, LASTING)
    living.wait("nothing is drained", lambda: counted(living, 'drift{kind="drain-left"}') == 0)
    living.kubectl("delete", "devicetaintrule", *MANUAL_RULES)


def verify_pod_is_pending_and_runs_again(living: Cluster, node: str, former: str) -> None:
    """Assert that the evicted pod's replacement gets the device, and runs there as soon as the driver no longer blocks
    it.
    """
    living.wait("the pod has a device", lambda: of(living, "middle") == ["1"])
    (name,) = (each for each in pods(living) if each.startswith("middle"))

    def refused() -> bool:
        mine = f"involvedObject.name={name},reason=FailedPrepareDynamicResources"
        events = living.get("events", "-n", "default", "--field-selector", mine)["items"]
        return any("is being repartitioned by the operation" in each["message"] for each in events)

    living.wait("the driver does not prepare it yet", refused)
    living.run(node, "python3", "-c", AGE, f"{PLUGIN_DIRECTORY}/repartition.json")
    wait_ready(living, **PARTS)
    assert name != former and of(living, "middle") == ["1"]
    living.wait(
        "the Event of the abandoned run",
        lambda: "RepartitionAbandoned" in [reason for reason, _text in node_events(living, node)],
    )


def test_next_run_completes_a_killed_run(living: Cluster, node: str) -> None:
    # The runs below can take longer.
    controller(living, dra_controller_report=True)
    before = {name: each for name, each in containers(living).items() if not name.startswith("middle")}
    turns: list[tuple[list[dict[str, Any]], dict[str, int], int]] = [
        ([HALVES], {"3g.40gb": 2}, 0),
        ([], {"2g.20gb": 3}, 1),
    ]
    for more, partitions, there in turns:
        done = repartition(living, json.dumps(layouts(living, *more)))
        assert not done.failed, done.output
        assert profiles(living, node, 1) == partitions and not rules(living) and not records(living)
        wait_ready(living, large=1, small=1, middle=there)
    assert before.items() <= containers(living).items()


# ---- the report


@pytest.fixture(scope="module")
def reader(living: Cluster) -> Iterator[str]:
    """Yield the token of an authorized service account. A second account is not authorized."""
    binding = ("clusterrolebinding", "report-reader")
    for name in ("reader", "other"):
        living.kubectl("create", "serviceaccount", name, "-n", "default")
    living.kubectl("create", *binding, "--clusterrole=dra-accelerators-report", "--serviceaccount=default:reader")
    yield token(living, "reader", "--audience=dra-accelerators-report")
    living.kubectl("delete", *binding, "--ignore-not-found")
    living.kubectl("delete", "serviceaccount", "reader", "other", "-n", "default")


def waits(cluster: Cluster, shown: str, number: int, *names: str) -> dict[str, Any]:
    """Return the report of one controller as soon as exactly these pods wait in it."""

    def new() -> dict[str, Any] | None:
        found = given(cluster, shown, number)
        return found if [each["pods"] for each in found["waiting"]] == [[name] for name in names] else None

    return cluster.wait(f"{names} wait in the report", new)


def test_authorized_reader_gets_the_report_from_both_services(living: Cluster, reader: str) -> None:
    huge = [claim("huge", device_class="gpu.nvidia.com", expression=HUGE), pod("huge", "huge")]
    living.apply(*huge)
    living.wait("it waits", lambda: set(waiting(living)) == {"huge"})
    living.wait(
        "both pods can verify the token of the reader",
        lambda: read(living, reader)[0] == read(living, reader, 1)[0] == 200,
    )
    # A report is served from the cache for 10 s.
    for number in (0, 1):
        is_the_clusters(living, waits(living, reader, number, "huge"))
    refusals(living, reader)
    living.delete(*reversed(huge))
    is_the_clusters(living, waits(living, reader, 0))


# ---- a plan that moves a claim


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the plan file."""
    return tmp_path_factory.mktemp("plan") / "layouts.yml"


def planned(cluster: Cluster, file: Path, **more: Any) -> Recap:
    words = {"accelerator_plan_pending_for": "0s", "accelerator_plan_file": str(file), **more}
    done = cluster.playbook("plan.yml", "-e", json.dumps(words), check=False)
    assert not done.failed, done.output
    return done


def test_plan_names_the_pod_that_moves_to_make_room_for_a_pending_pod(living: Cluster, node: str, file: Path) -> None:
    living.apply(*deployment("whole", WHOLE, ASKS["whole"]))
    wait_ready(living, whole=WHOLE, **PARTS)
    living.apply(*deployment("late", 1, ASKS["late"]))
    living.wait("it waits", lambda: set(waiting(living)) == {"late"})
    before, slices = containers(living), living.slices()
    without = planned(living, file, accelerator_plan_write=True, accelerator_plan_file=f"{file}.without")
    assert "1 without a place" in without.output and "without those claims" in without.output, without.output
    (mover,) = (name for name in before if name.startswith("middle"))
    done = planned(living, file, accelerator_plan_max_moves=1, accelerator_plan_write=True)
    assert done.changed == 1 and "without a place" not in done.output, done.output
    assert f"({mover}) moves from {node} 1 to {node} 0." in done.output.replace("default/", ""), done.output
    again = planned(living, file, accelerator_plan_max_moves=1, accelerator_plan_write=True)
    assert not again.changed, again.output
    entries = yaml.safe_load(file.read_text())["accelerator_layouts"]
    (cut,) = (
        Counter(each["profile"] for rule in entry["layout"] for each in rule.get("partitions", ()))
        for entry in entries
        if entry["hosts"] == node
    )
    assert cut == {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}, entries
    assert containers(living) == before and living.slices() == slices


def by_plan(cluster: Cluster, file: Path, *arguments: str, **more: Any) -> Recap:
    """Run the repartition playbook with the file that the plan wrote."""
    return repartition(cluster, "{}", "-e", f"@{file}", *arguments, **more)


def test_applied_plan_moves_one_pod_starts_the_pending_pod_and_keeps_others(
    living: Cluster, node: str, file: Path
) -> None:
    before, had, steps = containers(living), holders(living), file.with_name("steps.json")
    (mover,) = (name for name in before if name.startswith("middle"))
    shown = by_plan(living, file, "--check", "--diff", accelerator_repartition_file=str(steps))
    # The other node's layout does not change: the plan states the same rules for each of its devices.
    assert not shown.failed and not shown.hosts[node]["changed"], shown.output
    plan = json.loads(steps.read_text())
    # The evicted pod needs the partition that the previous operation creates.
    assert [[one["index"] for one in each["devices"]] for each in plan["nodes"][node]["operations"]] == [[0], [1]]
    assert [each["name"] for each in plan["evicted"]] == [mover] and len(plan["staying"]) == len(before) - 1
    assert containers(living) == before and not rules(living)
    done = by_plan(living, file)
    assert not done.failed, done.output
    wait_ready(living, late=1, whole=WHOLE, **PARTS)
    assert set(before) - set(pods(living)) == {mover}
    assert {name: each for name, each in before.items() if name != mover}.items() <= containers(living).items()
    assert {place: user for place, user in had.items() if user != mover}.items() <= holders(living).items()
    assert of(living, "middle") == ["0"] and of(living, "late") == ["1"] and not waiting(living)
    assert profiles(living, node, 0) == {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2} and not profiles(living, node, 1)
    assert not rules(living) and not records(living)
    after, slices = containers(living), living.slices()
    site = living.playbook("site.yml", "-e", f"@{file}", check=False)
    for again in (by_plan(living, file), site):
        assert (again.failed, again.changed) == (0, 0), again.output
    assert containers(living) == after and living.slices() == slices


# ---- the report, with pods


def test_pods_serve_the_report_without_the_api_server(living: Cluster, node: str, reader: str) -> None:
    controller(
        living,
        dra_controller_report=True,
        dra_controller_deploy_as="deployment",
        dra_controller_image_pull_policy="Never",
        driver_image_delivery="import",
        driver_image_base=make_base_image(living),
        driver_image_require_digest=False,
        driver_image_python="3.11",
    )
    living.wait("a pod acts", lambda: holder(living) not in ("", *living.nodes()))
    assert all("service" in each["clientConfig"] for each in webhooks(living))
    living.wait("it may be read", lambda: read(living, reader)[0] == 200)
    is_the_clusters(living, given(living, reader))
    refusals(living, reader)
    # A single pod: requests reach it until it has a report, and it caches the authorized readers.
    living.kubectl("scale", "deployment", CONTROLLER, "-n", NAMESPACE, "--replicas=1")
    living.wait("there is one", lambda: len(living.get("pods", "-n", NAMESPACE)["items"]) == 1)
    last = living.wait("it has one", lambda: given(living, reader))
    asked = question(living, reader)
    living.world("component", "stop", "apiserver")
    try:
        # A report of a moment ago is served without a warning.
        deadline = time.monotonic() + 60
        while "Warning" not in (answer := answered(living, node, asked))[1]:
            assert time.monotonic() < deadline, answer
            time.sleep(1.0)
    finally:
        living.world("component", "start", "apiserver")
    living.wait("the API server answers", lambda: living.kubectl("get", "--raw", "/readyz", check=False) == "ok", 180)
    status, headers, body = answer
    assert (
        status == 200 and headers["Warning"].startswith("110 ") and json.loads(body)["generated"] == last["generated"]
    )
    living.wait("a new report", lambda: given(living, reader)["generated"] > last["generated"])
    living.kubectl("delete", "clusterrolebinding", "report-reader")
    # The authorization is checked again after a minute.
    living.wait("the reader has no right", lambda: read(living, reader)[0] == 403)
