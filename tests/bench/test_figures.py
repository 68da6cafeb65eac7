# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Measure the node driver: the duration of one prepare and its parts, alone and in parallel, and the cost at rest.

The test allocates the claims as the scheduler would, and calls the driver's socket directly, so that only the driver
is measured. Durations are printed without assertions. The test asserts that every call succeeded.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.allocations import KINDS, LAYOUTS, ROWS, Kind, Layout, places
from tests.bench.figures import Figures
from tests.cluster.cluster import DRIVER_UNIT, Cluster
from tests.cluster.manifests import claim

NODE_SIDE = Path(__file__).with_name("node_side.py")
PYTHON = ("env", "PYTHONPATH=/opt/dra-accelerators/current", "/opt/dra-accelerators/venv/bin/python")
METRICS = "127.0.0.1:9476"
STAGE = re.compile(
    r'dra_accelerators_stage_duration_seconds_(?P<what>sum|count)\{.*stage="(?P<stage>[^"]+)".*\} (?P<value>\S+)'
)
REST_SECONDS = int(os.environ.get("DRA_ACCELERATORS_REST_SECONDS", "600"))


def allocated_claims(
    cluster: Cluster,
    node: str,
    kind: Kind,
    number: int,
    first: int = 0,
    driver: str = "",
    published: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, str]]:
    """Create ``number`` claims and write their allocations like the scheduler: devices of their kind, from the index
    ``first`` on.

    ``driver`` is the devices' driver if it is not the cluster's. ``published`` are the node's devices if they are
    known.
    """
    given = places(kind, published or cluster.devices(node), first + number)[first:]
    claims = [claim(f"bench-{kind.name}-{position:03}", device_class=kind.device_class) for position in range(number)]
    if kind.admin:
        for document in claims:
            document["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"] = True
    cluster.apply(as_list(claims))
    stored = sorted(cluster.get("resourceclaims", "-n", "default")["items"], key=lambda item: item["metadata"]["name"])
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    for document, place in zip(stored, given):
        devices: dict[str, Any] = {
            "results": [{"request": "device", "driver": driver or cluster.driver, "pool": node, **place}]
        }
        if kind.config:
            devices["config"] = [{"source": "FromClaim", "requests": [], **kind.config}]
        document["status"] = {"allocation": {"devices": devices, "nodeSelector": {"nodeSelectorTerms": [term]}}}
    cluster.kubectl("replace", "--subresource=status", "-f", "-", text=yaml.safe_dump(as_list(stored)))
    return [{key: item["metadata"][key] for key in ("namespace", "name", "uid")} for item in stored]


def as_list(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several objects as one List for kubectl."""
    return {"apiVersion": "v1", "kind": "List", "items": items}


@pytest.fixture(scope="module")
def laid_out(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Cluster]:
    """Return the node with one of the layouts on all its GPUs."""
    layout: str = request.param
    lay_out(cluster, tmp_path_factory.mktemp("bench") / "layout.yml", LAYOUTS[layout])
    kinds = [kind for kind in KINDS.values() if kind.layout == layout]
    await_devices(cluster, layout, lambda devices: any(map(kinds[0].fits, devices)))
    return layout, cluster


def await_devices(cluster: Cluster, what: str, enough: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Wait until such devices are published, and copy the measuring program to the node."""
    node = cluster.nodes()[0]
    cluster.wait(f"{what} devices published", lambda: enough(list(cluster.devices(node).values())))
    cluster.run(node, "sh", "-c", "cat > /tmp/node_side.py", text=NODE_SIDE.read_text(encoding="utf-8"))


def lay_out(cluster: Cluster, variables: Path, layout: Layout, **more: Any) -> None:
    """Apply a layout to the node and serve its driver's metrics locally. ``more`` are more variables of the playbook."""
    layouts = [{"hosts": "accelerator_nodes", "layout": [dict(rule) for rule in layout]}]
    document = {"accelerator_layouts": layouts, "dra_driver_metrics_address": METRICS, **more}
    variables.write_text(yaml.safe_dump(document), encoding="utf-8")
    recap = cluster.playbook("site.yml", "-e", f"@{variables}")
    if recap.failed:
        raise AssertionError(recap.output)


def stages(cluster: Cluster, node: str) -> dict[str, tuple[float, float]]:
    """Return the total seconds and the count of each stage of prepare so far, from the driver's metrics."""
    script = (
        f"import urllib.request; print(urllib.request.urlopen('http://{METRICS}/metrics', timeout=10).read().decode())"
    )
    found: dict[str, dict[str, float]] = {}
    for line in cluster.run(node, *PYTHON, "-c", script).splitlines():
        answer = STAGE.match(line)
        if answer and 'operation="prepare"' in line and f'driver="{cluster.driver}"' in line:
            stage = found.setdefault(answer["stage"], {"sum": 0.0, "count": 0.0})
            stage[answer["what"]] += float(answer["value"])
    return {name: (each["sum"], each["count"]) for name, each in found.items()}


def measure(
    cluster: Cluster, figures: Figures, what: str, claims: list[dict[str, str]], *, rounds: int
) -> dict[str, list[float]]:
    """Prepare and unprepare claims in parallel for a number of rounds, then delete them; return the times of
    ``node_side.py``.
    """
    node, parallel = cluster.nodes()[0], len(claims)
    before = stages(cluster, node)
    order = {"driver": cluster.driver, "rounds": rounds, "parallel": parallel, "claims": claims}
    seconds: dict[str, list[float]] = json.loads(
        cluster.run(node, *PYTHON, "/tmp/node_side.py", text=json.dumps(order), timeout=900)
    )
    assert len(seconds["prepare"]) == rounds * parallel
    figures.add_prepare_row(what, parallel, seconds)
    figures.add_stages(before, stages(cluster, node))
    cluster.kubectl("delete", "resourceclaims", "--all", "-n", "default")
    assert cluster.cdi_files(node) == []
    return seconds


@pytest.mark.parametrize(("laid_out", "name", "parallel"), ROWS, indirect=["laid_out"], scope="module")
def test_prepare(laid_out: tuple[str, Cluster], figures: Figures, name: str, parallel: int) -> None:
    _layout, cluster = laid_out
    node, kind = cluster.nodes()[0], KINDS[name]
    claims = allocated_claims(cluster, node, kind, parallel)
    figures.add_explanation(kind.name, kind.description)
    measure(cluster, figures, kind.name, claims, rounds=rounds_of(kind, parallel))
    if kind.is_partition and not kind.made:
        assert cluster.instances(node) == []


def rounds_of(kind: Kind, parallel: int) -> int:
    """Return the number of rounds for a kind. Kinds that start programs or rebind PCI devices are slow."""
    slow = bool(kind.config) or kind.type == "vfio"
    return max(2 if slow else 5, (16 if slow else 60) // parallel)


@pytest.fixture(scope="module")
def full(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Return the node with every possible device of its GPUs published."""
    lay_out(cluster, tmp_path_factory.mktemp("bench") / "layout.yml", LAYOUTS["dynamic"])
    await_devices(cluster, "dynamic", lambda devices: len(devices) == 16 * 26)
    return cluster


def test_memory(full: Cluster, figures: Figures) -> None:
    node = full.nodes()[0]
    now, most = memory(full, node, full.driver_pid(node))
    figures.add_line(f"memory of the node driver: {now} kB resident, {most} kB at most")


def memory(cluster: Cluster, node: str, pid: int) -> tuple[int, int]:
    """Return the resident memory of a node's process in kB as the kernel counts them, now and at its maximum."""
    lines = cluster.run(node, "cat", f"/proc/{pid}/status").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return found["VmRSS"], found["VmHWM"]


def published_at(cluster: Cluster, node: str, since: float) -> float | None:
    """Return when the driver logged that it published its pool, in seconds since the node's boot."""
    lines = cluster.run(node, "journalctl", f"--unit={DRIVER_UNIT}", "--output=json", "--lines=50").splitlines()
    found = [entry for entry in map(json.loads, lines) if "published the pool" in str(entry["MESSAGE"])]
    times = [int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6 for entry in found]
    return next((time for time in times if time > since), None)


def test_start_until_the_pool_is_in_the_api(full: Cluster, figures: Figures) -> None:
    cluster = full
    node = cluster.nodes()[0]
    cluster.run(node, "systemctl", "stop", DRIVER_UNIT)
    cluster.kubectl("delete", "resourceslices", "--field-selector", f"spec.nodeName={node}")
    timed = "import time; began = time.perf_counter(); import dra_driver.cli, dra_driver.node; print(time.perf_counter() - began)"
    imports = float(cluster.run(node, *PYTHON, "-c", timed))
    cluster.run(node, "systemctl", "start", DRIVER_UNIT)
    shown = cluster.run(node, "systemctl", "show", DRIVER_UNIT, "--property=InactiveExitTimestampMonotonic", "--value")
    began = int(shown) / 1e6
    seconds = cluster.wait("the pool", lambda: published_at(cluster, node, began)) - began
    devices, slices = len(cluster.devices(node)), len(cluster.slices(node))
    figures.add_line(
        f"start of the unit until {devices} devices are in the API, in {slices} slices: {seconds:.2f} s = "
        f"{seconds / imports:.1f} x the import of the driver's modules ({imports:.2f} s)"
    )


WRITES = ("POST", "PUT", "PATCH", "DELETE", "DELETECOLLECTION", "APPLY")


def api_requests(cluster: Cluster) -> dict[str, float]:
    """Return the API server's counts of requests for slices, claims, and classes, by verb and resource.

    A watch is counted when it ends.
    """
    counted: dict[str, float] = {}
    for line in cluster.kubectl("get", "--raw", "/metrics").splitlines():
        if line.startswith("apiserver_request_total{") and 'group="resource.k8s.io"' in line:
            labels, _space, value = line.rpartition(" ")
            counted[labels] = float(value)
    return counted


def is_write(labels: str) -> bool:
    return any(f'verb="{verb}"' in labels for verb in WRITES)


def nvml_calls(cluster: Cluster, node: str, *arguments: str) -> dict[str, Any]:
    """Return the counts of NVML calls of a node's processes, from the library itself."""
    counted: dict[str, Any] = json.loads(cluster.run(node, "accelerator-simulator", "calls", *arguments))
    return counted


def test_idle_driver_writes_nothing_and_makes_few_requests(full: Cluster, figures: Figures) -> None:
    cluster = full
    node = cluster.nodes()[0]
    pid = cluster.driver_pid(node)
    time.sleep(65)  # the recheck after the creation is over
    nvml_calls(cluster, node, "--reset")
    before = api_requests(cluster)
    assert before, "the counters of the API server were read"
    versions = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in cluster.slices()}
    time.sleep(REST_SECONDS)
    after = api_requests(cluster)
    calls = nvml_calls(cluster, node)
    asked = {labels: value - before.get(labels, 0) for labels, value in after.items() if value != before.get(labels)}
    written = {labels: number for labels, number in asked.items() if is_write(labels)}
    minutes = REST_SECONDS / 60
    figures.add_line(f"writes to resource.k8s.io objects in {REST_SECONDS} s at rest: {sum(written.values()):.0f}")
    figures.add_line(f"API calls per minute at rest, resource.k8s.io, all clients: {sum(asked.values()) / minutes:.1f}")
    (driver,) = [process for process in calls["processes"] if process["pid"] == pid and process["pid_namespace_is_own"]]
    figures.add_line(f"NVML calls per minute at rest, of the driver: {driver['calls'] / minutes:.1f}")
    assert not written, written
    assert versions == {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in cluster.slices()}
