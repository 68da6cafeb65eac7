# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test pods that request GPUs in their limits without a claim: why they are pending, the way to evict them, and which
container has which GPU.

All pods of the tests run on the second node, whose eight GPUs are dynamic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, execute
from tests.cluster.manifests import claim, pod
from tests.cluster.module_calls import Module
from tests.cluster.test_27_observability import dra_driver, info, scraped
from tests.cluster.test_59_manual_changes import gpu_uuid

RESOURCE, CLASS = "nvidia.com/gpu", "gpu.nvidia.com"
IMPLICIT = f"deviceclass.resource.kubernetes.io/{CLASS}"
RULE, SECOND_CLASS = "worn-out", "second-class"
WAIT_SECONDS = 15


@pytest.fixture()
def node(clean: Cluster) -> Iterator[str]:
    """Yield the second node, without taint rules of a test before and after."""
    name = clean.nodes()[1]
    clean.wait("all devices are published", lambda: len(clean.devices(name)) == 8 * 26)
    yield name
    clean.kubectl("delete", "devicetaintrules", "--all")
    clean.kubectl("delete", "deviceclass", SECOND_CLASS, "--ignore-not-found")
    # An update: see ``test_two_classes_of_one_resource_are_reported``.
    clean.kubectl("annotate", "deviceclass", CLASS, "dra.accelerators/updated=no", "--overwrite")
    clean.kubectl("annotate", "deviceclass", CLASS, "dra.accelerators/updated-")


@pytest.fixture()
def why(clean: Cluster, tmp_path: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return a function that runs the playbook why.yml and returns the explanations by name."""

    def run(**words: str) -> dict[str, dict[str, Any]]:
        data = tmp_path / "why.json"
        variables = {
            "accelerator_why_file": str(data),
            **{f"accelerator_why_{key}": each for key, each in words.items()},
        }
        done = clean.playbook("why.yml", "-e", json.dumps(variables), check=False)
        assert not done.failed, done.output
        return {each["name"]: {**each, "output": done.output} for each in json.loads(data.read_text(encoding="utf-8"))}

    return run


def with_limits(name: str, node: str, *limits: tuple[str, int]) -> dict[str, Any]:
    """Return a pod on this node, with one container for each limit."""
    made = pod(name, node=node)
    (template,) = made["spec"]["containers"]
    made["spec"]["containers"] = [
        {**template, "name": f"probe-{number}", "resources": {"limits": {resource: str(count)}}}
        for number, (resource, count) in enumerate(limits)
    ]
    return made


def wait_unschedulable(cluster: Cluster, *names: str) -> None:
    """Wait until the scheduler has found no node for these pods."""
    for name in names:
        cluster.wait(
            f"{name} is unschedulable", lambda name=name: "Unschedulable" in json.dumps(cluster.pod(name)["status"])
        )


@pytest.mark.parametrize("resource", [RESOURCE, IMPLICIT])
def test_why_for_a_pod_with_a_too_high_limit_names_the_missing_devices(
    clean: Cluster, node: str, why: Callable[..., dict[str, dict[str, Any]]], resource: str
) -> None:
    clean.apply(with_limits("fits", node, (resource, 1)), with_limits("too-many", node, (resource, 9)))
    clean.wait_running("fits")
    wait_unschedulable(clean, "too-many")
    explained = why()
    assert set(explained) == {"too-many"}
    assert (explained["too-many"]["kind"], explained["too-many"]["verdict"]) == ("Pod", "no")
    assert "No pod or claim waits for devices" not in explained["too-many"]["output"]
    assert "there are devices for it now" not in explained["too-many"]["output"]


def test_why_for_a_pod_that_waits_for_a_used_gpu_names_the_holder(
    clean: Cluster, node: str, why: Callable[..., dict[str, dict[str, Any]]]
) -> None:
    clean.apply(with_limits("holder", node, (RESOURCE, 8)))
    clean.wait_running("holder")
    clean.apply(with_limits("waits", node, (RESOURCE, 1)))
    wait_unschedulable(clean, "waits")
    explained = why()
    assert set(explained) == {"waits"} and explained["waits"]["verdict"] == "no"
    assert "holder" in json.dumps(explained["waits"]["changes"]), explained["waits"]
    assert why(pods="default/waits")["waits"]["verdict"] == "no"
    clean.kubectl("delete", "pod", "holder")
    clean.wait_running("waits")


def test_why_evaluates_selectors_with_or_before_and(
    clean: Cluster, why: Callable[..., dict[str, dict[str, Any]]]
) -> None:
    """`A || B && C` with a true A and a false C selects devices, `(A || B) && C` does not."""
    a, b, c = (
        "device.driver == 'gpu.nvidia.com'",
        "device.driver == 'gpu.nvidia.com'",
        "device.driver == 'x.example.com'",
    )
    clean.apply(
        claim("either", device_class=CLASS, expression=f"{a} || {b} && {c}"),
        claim("neither", device_class=CLASS, expression=f"({a} || {b}) && {c}"),
    )
    explained = why()
    assert {name: each["verdict"] for name, each in explained.items()} == {"either": "fits", "neither": "no"}
    assert why(claims="default/either")["either"]["verdict"] == "fits"


Attributed = list[tuple[str, str, str]]


@pytest.fixture()
def three(clean: Cluster, node: str) -> tuple[Attributed, Attributed]:
    """Run three containers with one request each of a claim, and two with limits; return their GPUs by pod, and by pod
    and container.
    """
    wanted = claim("three", device_class=CLASS)
    (request,) = wanted["spec"]["devices"]["requests"]
    wanted["spec"]["devices"]["requests"] = [{**request, "name": name} for name in "abc"]
    user = pod("three", "three", node=node)
    (template,) = user["spec"]["containers"]
    user["spec"]["containers"] = [
        {**template, "name": name, "resources": {"claims": [{"name": "claim-0", "request": name}]}} for name in "abc"
    ]
    clean.apply(wanted, user, with_limits("limits", node, (RESOURCE, 1), (RESOURCE, 2)))
    clean.wait_running("three", "limits")
    found: Attributed = []
    for name, containers in (("three", ("a", "b", "c")), ("limits", ("probe-0", "probe-1"))):
        for container in containers:
            log = clean.wait(
                "its list", lambda name=name, container=container: clean.log(name, container=container), timeout=60
            )
            found += [(name, container, uuid) for uuid in re.findall(r"UUID: (GPU-[0-9a-f-]+)", log)]
    assert [container for _pod, container, _uuid in found] == ["a", "b", "c", "probe-0", "probe-1", "probe-1"]
    assert len({uuid for _pod, _container, uuid in found}) == 6
    return sorted((name, "", uuid) for name, _container, uuid in found), sorted(found)


def series(cluster: Cluster, node: str) -> Attributed:
    """Return pod, container, and UUID of each series of the metric."""
    found = info(scraped(cluster, node), "container_device_info")
    return sorted((each["pod"], each["container"], each["uuid"]) for each in found)


def listed(cluster: Cluster, node: str) -> Attributed:
    """Return the same from ``dra-driver claims``."""
    claims = dra_driver(cluster, node, "claims")
    for each in claims:
        assert len(each["containers"]) == len(set(each["containers"])), each
    rows = cluster.run(node, "dra-driver", "claims").splitlines()
    assert len(rows) == len(set(rows)) == 1 + sum(len(each["devices"]) for each in claims), rows
    return sorted(
        (*(*container.split("/")[1:], "")[:2], device["uuid"])
        for each in claims
        for device in each["devices"]
        for container in device["containers"]
    )


def test_each_gpu_has_one_series_with_its_pod(clean: Cluster, node: str, three: tuple[Attributed, Attributed]) -> None:
    """By default the drivers cannot read pods."""
    by_pod, _by_container = three
    clean.wait("a series for each GPU", lambda: series(clean, node) == by_pod)
    assert listed(clean, node) == by_pod


@pytest.fixture()
def reading_pods(clean: Cluster, node: str) -> Iterator[None]:
    """Run drivers that can read pods."""
    done = clean.playbook("site.yml", "--tags", "driver", "-e", '{"dra_driver_read_pods": true}', check=False)
    assert not done.failed, done.output
    yield
    done = clean.playbook("site.yml", "--tags", "driver", check=False)
    assert not done.failed, done.output


def test_each_gpu_has_one_series_with_its_container_where_drivers_read_pods(
    clean: Cluster, node: str, reading_pods: None, three: tuple[Attributed, Attributed]
) -> None:
    _by_pod, by_container = three
    clean.wait("a series for each container and GPU", lambda: series(clean, node) == by_container)
    assert listed(clean, node) == by_container


@pytest.fixture()
def kubeconfig(clean: Cluster) -> dict[str, str]:
    """Return the option of the modules that use the API server."""
    return {"kubeconfig": clean.world("kubeconfig").strip()}


def test_no_execute_leaves_a_pod_with_limits_and_a_drain_evicts_it(
    clean: Cluster, node: str, ansible: Module, kubeconfig: dict[str, str]
) -> None:
    """Kubernetes evicts the pod with a claim, and not the one with a limit (kubernetes/kubernetes#141290)."""
    uuid = gpu_uuid(clean, node, 0)
    selected = claim("usual", device_class=CLASS, expression=f"device.attributes['{CLASS}'].uuid == '{uuid}'")
    clean.apply(selected, pod("usual", "usual", node=node), with_limits("limits", node, (RESOURCE, 1)))
    clean.wait_running("usual", "limits")
    (made,) = (name for each in clean.get("resourceclaims")["items"] if (name := each["metadata"]["name"]) != "usual")
    taint = {**kubeconfig, "name": RULE, "match": {"node": node}, "effect": "NoExecute"}
    done = ansible("localhost", "device_taint", {**taint, "wait": True, "wait_timeout": WAIT_SECONDS})
    assert done["failed"] and f"claim default/{made} for pod limits" in done["msg"], done
    assert done["waited"] >= WAIT_SECONDS - 0.1
    assert [(each["name"], each["pods"], each["extended_resource"]) for each in done["held_by"] if each["pods"]] == [
        (made, ["limits"], True)
    ]
    assert "device_drain" in json.dumps(done), "the answer names what evicts the pod"
    clean.wait(
        "the pod with a claim is evicted",
        lambda: not clean.get("pods", "--field-selector=metadata.name=usual")["items"],
    )
    assert clean.pod("limits")["status"]["phase"] == "Running" and not clean.pod("limits")["metadata"].get(
        "deletionTimestamp"
    )

    drained = {**kubeconfig, "state": "drained", "node": node, "operation": "test", "evict": True}
    drained |= {"evict_unmanaged": True, "timeout": 120}
    done = ansible("localhost", "device_drain", drained)
    assert not done["failed"] and "evicted default/limits" in done["steps"], done
    assert not clean.get("pods")["items"]
    # No claim uses the devices now: the rule does not change, and there is nothing to wait for.
    done = ansible("localhost", "device_taint", {**taint, "wait": True, "wait_timeout": WAIT_SECONDS})
    assert (done["failed"], done["changed"]) == (False, False), done
    assert done["waited"] < WAIT_SECONDS and not [each for each in done["held_by"] if each["pods"]]


def test_two_classes_of_one_resource_are_reported(
    clean: Cluster, ansible: Module, inventory: Path, kubeconfig: dict[str, str], node: str, tmp_path: Path
) -> None:
    wanted = {"name": SECOND_CLASS, "selectors": ["device.driver == 'gpu.nvidia.com'"], "extended_resource": RESOURCE}
    options = json.dumps({**kubeconfig, "classes": [wanted]})
    done = execute(["ansible", "localhost", "-i", inventory, "-m", "dra.accelerators.device_class", "-a", options])
    expected = f"The extended resource {RESOURCE} is served by several DeviceClasses: {SECOND_CLASS}, {CLASS}"
    assert expected in one_line(done.stdout + done.stderr), done
    # The scheduler uses the newer class.
    clean.apply(with_limits("limits", node, (RESOURCE, 1)))
    clean.wait_running("limits")
    (made,) = clean.get("resourceclaims")["items"]
    assert [each["exactly"]["deviceClassName"] for each in made["spec"]["devices"]["requests"]] == [SECOND_CLASS]

    preflight = clean.playbook("site.yml", "--tags", "preflight", check=False)
    assert not preflight.failed and expected in one_line(preflight.output), preflight.output
    words = {"accelerator_report_file": str(tmp_path / "report.md")}
    report = clean.playbook("report.yml", "-e", json.dumps(words), check=False)
    assert not report.failed, report.output
    for suffix in (".md", ".json", ".html"):
        assert SECOND_CLASS in (tmp_path / f"report{suffix}").read_text(encoding="utf-8"), suffix
    gone = ansible("localhost", "device_class", {**kubeconfig, "classes": [{"name": SECOND_CLASS}], "state": "absent"})
    assert not gone["failed"], gone
    # The scheduler ignores the resource until the remaining class is updated, as the warning says.
    clean.kubectl("delete", "pod", "limits")
    clean.apply(with_limits("forgotten", node, (RESOURCE, 1)))
    wait_unschedulable(clean, "forgotten")
    clean.kubectl("annotate", "deviceclass", CLASS, "dra.accelerators/updated=yes")
    clean.apply(with_limits("remembered", node, (RESOURCE, 1)))
    clean.wait_running("remembered")


def one_line(text: str) -> str:
    """Return a playbook's output without line breaks, escapes, and indents of its messages."""
    return " ".join(text.replace("\\n", " ").replace('"', "").split())
