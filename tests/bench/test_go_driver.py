# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Compare our driver with one in Go on the same boards, in alternating turns with the node to itself.

The Go driver (``tests/world/go/go-driver``) implements the claim path of a driver that uses Kubernetes' and NVIDIA's
Go libraries. It has two modes: NVIDIA's published steps, and the minimal steps of such a driver. The results are our
times as multiples of the Go driver's in the same run.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bench.allocations import KINDS, LAYOUTS, Kind
from tests.bench.figures import Figures, percentile
from tests.bench.test_figures import NODE_SIDE, PYTHON, allocated_claims, await_devices, lay_out, memory
from tests.cluster.cluster import DRIVER_UNIT, ROOT, Cluster, execute

GO_DRIVER = "go-driver.example.com"
UNIT = "bench-go-driver"
PROGRAM, DEVICES = "/usr/local/bin/bench-go-driver", "/run/bench-go-driver.json"
#: The Go driver's modes for the steps of a claim (main.go).
WAYS = ("nvidia", "lean")
#: Turns per driver, and rounds per turn. Host performance varies by the minute, so short operations have more turns,
#: and the order alternates.
TURNS, ROUNDS = {True: 30, False: 3}, {True: 25, False: 6}
EMPTY_TURNS, EMPTY_ROUNDS = 4, 200
#: Compared rows: kind of claims and number of parallel claims.
ROWS = (("whole", 1), ("whole", 8), ("dynamic", 1), ("dynamic", 42))
#: The number of NVML's smallest GPU instance profile in its enumeration (nvml.h, NVML_GPU_INSTANCE_PROFILE_1_SLICE).
ONE_SLICE = 0


@pytest.fixture(scope="module")
def with_go(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start the node with sixteen H100 and the Go driver's program; yield the cluster."""
    subprocess.run([ROOT / "tests/world/world", "build", "--only", "peers"], check=True)
    cache = Path(execute([ROOT / "tests/tools/cache"]).stdout.strip())
    built = sorted(cache.glob("world/binaries/go-driver-*/go-driver"), key=lambda path: path.stat().st_mtime)
    cluster.world("up", "--nodes", "1", "--silicon", "16xH100", timeout=3000)
    (node,) = cluster.nodes()
    lay_out(cluster, tmp_path_factory.mktemp("bench") / "layout.yml", LAYOUTS["whole"])
    execute(["docker", "cp", built[-1], f"{node}:{PROGRAM}"])
    yield cluster
    cluster.shell(node, f"systemctl stop {UNIT}; rm -rf {PROGRAM} {DEVICES} /var/lib/kubelet/plugins/{GO_DRIVER}")
    cluster.run(node, "systemctl", "start", DRIVER_UNIT)


def known_devices(devices: Mapping[str, Mapping[str, Any]], kind: Kind) -> dict[str, dict[str, Any]]:
    """Return the device list for the Go driver, from the devices that our driver publishes, by name."""
    known = {}
    for name, device in devices.items():
        if not kind.fits(device):
            continue
        attributes = device["attributes"]
        if kind.is_partition:
            place = {"partition": True, "profile": ONE_SLICE, "start": int(name.rpartition("-")[2]), "size": 1}
            known[name] = {"uuid": attributes["parentUUID"]["string"], **place}
        else:
            known[name] = {"uuid": attributes["uuid"]["string"]}
    return known


def served_by(cluster: Cluster, way: str = "") -> str:
    """Run one driver alone on the node, ours or the Go driver in a mode; return its name when it answers."""
    (node,) = cluster.nodes()
    cluster.run(node, "systemctl", "stop", DRIVER_UNIT, UNIT, check=False)
    if not way:
        cluster.run(node, "systemctl", "start", DRIVER_UNIT)
        return cluster.driver
    words = (
        "--driver",
        GO_DRIVER,
        "--node",
        node,
        "--kubeconfig",
        "/etc/dra-accelerators/kubeconfig",
        "--devices",
        DEVICES,
    )
    cluster.run(node, "systemd-run", f"--unit={UNIT}", "--collect", PROGRAM, *words, "--way", way)
    run = cluster.run(node, "systemctl", "show", UNIT, "--property=InvocationID", "--value").strip()
    journal = ("journalctl", f"_SYSTEMD_INVOCATION_ID={run}", "--output=cat")
    cluster.wait("the other driver", lambda: "ready" in cluster.run(node, *journal).splitlines())
    return GO_DRIVER


def called(cluster: Cluster, driver: str, claims: list[dict[str, str]], rounds: int) -> dict[str, list[float]]:
    """Return the times that ``node_side.py`` measures in ``rounds`` rounds, without a first warm-up round."""
    (node,) = cluster.nodes()
    order = {"driver": driver, "rounds": rounds + 1, "parallel": len(claims), "claims": claims}
    answer: dict[str, list[float]] = json.loads(
        cluster.run(node, *PYTHON, "/tmp/node_side.py", text=json.dumps(order), timeout=900)
    )
    counted = {"prepare": len(claims), "unprepare": len(claims), "prepare_all": 1, "unprepare_all": 1}
    return {name: answer[name][first:] for name, first in counted.items()}


@pytest.mark.parametrize(("name", "parallel"), ROWS)
def test_comparison_with_a_driver_in_go(
    with_go: Cluster, figures: Figures, name: str, parallel: int, tmp_path: Path
) -> None:
    cluster, kind = with_go, KINDS[name]
    (node,) = cluster.nodes()
    served_by(cluster)
    cluster.kubectl("delete", "resourceclaims", "--all", "-n", "default")  # claims of a failed row
    lay_out(cluster, tmp_path / "layout.yml", LAYOUTS[kind.layout])
    await_devices(cluster, kind.name, lambda devices: sum(map(kind.fits, devices)) >= parallel)
    # The kubelet deletes the slices of a driver 30 s after it disappeared.
    devices = cluster.devices(node)
    cluster.run(node, "sh", "-c", f"cat > {DEVICES}", text=json.dumps(known_devices(devices, kind)))
    cluster.run(node, "sh", "-c", "cat > /tmp/node_side.py", text=NODE_SIDE.read_text(encoding="utf-8"))
    ways = ("", *WAYS)
    turns, rounds = TURNS[parallel == 1], ROUNDS[parallel == 1]
    taken: dict[str, list[dict[str, list[float]]]] = {way: [] for way in ways}
    for turn in range(turns):
        first = turn % len(ways)
        for way in (*ways[first:], *ways[:first]):
            driver = served_by(cluster, way)
            claims = allocated_claims(cluster, node, kind, parallel, driver=driver, published=devices)
            taken[way].append(called(cluster, driver, claims, rounds))
            cluster.kubectl("delete", "resourceclaims", "--all", "-n", "default")
    assert sum(len(turn["prepare"]) for turn in taken[""]) == turns * rounds * parallel
    figures.add_explanation(kind.name, kind.description)
    for way in ways[1:]:
        figures.add_driver_comparison(
            f"{name}, {parallel} at once, our driver to one in Go, way {way}", taken[""], taken[way]
        )
    if kind.is_partition:
        assert cluster.instances(node) == []


def test_empty_call_comparison_with_a_driver_in_go(with_go: Cluster, figures: Figures) -> None:
    """Measure the gRPC library's part of a claim's time, including the client's."""
    cluster = with_go
    (node,) = cluster.nodes()
    cluster.run(node, "sh", "-c", f"test -e {DEVICES} || echo '{{}}' > {DEVICES}")
    cluster.run(node, "sh", "-c", "cat > /tmp/node_side.py", text=NODE_SIDE.read_text(encoding="utf-8"))
    taken: dict[str, list[float]] = {"": [], WAYS[0]: []}
    for _turn in range(EMPTY_TURNS):
        for way, seconds in taken.items():
            order = {"driver": served_by(cluster, way), "rounds": EMPTY_ROUNDS + 1, "claims": []}
            answer = json.loads(cluster.run(node, *PYTHON, "/tmp/node_side.py", text=json.dumps(order), timeout=300))
            seconds += answer["empty"][1:]
    ours, theirs = (percentile(seconds, 0.5) for seconds in taken.values())
    figures.add_line(f"an empty call, ours to theirs: {ours / theirs:.2f} ({ours * 1e3:.2f} and {theirs * 1e3:.2f} ms)")


def test_memory_comparison_with_a_driver_in_go(with_go: Cluster, figures: Figures) -> None:
    cluster = with_go
    (node,) = cluster.nodes()
    served_by(cluster, WAYS[0])
    shown = cluster.run(node, "systemctl", "show", UNIT, "--property=MainPID", "--value")
    theirs, _most = memory(cluster, node, int(shown))
    served_by(cluster)
    ours, _most = memory(cluster, node, cluster.driver_pid(node))
    figures.add_line(
        f"resident memory as soon as they serve, our driver to one in Go: {ours / theirs:.2f} ({theirs / 1024:.0f} MiB)"
    )
