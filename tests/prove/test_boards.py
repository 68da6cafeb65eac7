# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test boards of other generations, one kind per node, on a Kubernetes with its default feature gates.

The published slices are those that the core builds from the board's description. A partition and a whole GPU are
allocated to a pod and released.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER, ROOT, Cluster
from tests.cluster.manifests import claim, dynamic, pod
from tests.unit.core import board_model

MACHINES = ("8xB200", "4xA30", "2xRTX-PRO-6000")
SETTINGS = {
    "accelerator_layouts": [{"hosts": "accelerator_nodes", "layout": [{"match": {}, "mode": "dynamic"}]}],
    # Some of these boards change their mode only with a reset.
    "nvidia_mig_reset": "when_needed",
}


@pytest.fixture(scope="module")
def boards() -> Iterator[Cluster]:
    """Yield three bare nodes, each with another kind of boards, without feature gates set."""
    made = Cluster("boards")
    made.world("down")
    made.world("up", "--own-gates", "--nodes", len(MACHINES), "--silicon", ",".join(MACHINES), timeout=3000)
    yield made
    made.world("down")


def node_with(cluster: Cluster, machine: str) -> str:
    """Return the node with this machine."""
    return cluster.nodes()[MACHINES.index(machine)]


def boards_of(machine: str) -> list[tuple[str, int]]:
    """Return the board and minor number of each GPU from the machine's description."""

    def gpus(entry: dict[str, Any]) -> list[tuple[str, int]]:
        own = [(str(entry["board"]), int(entry["minor"]))] if entry.get("kind") == "gpu" else []
        return own + [each for child in entry.get("children", ()) for each in gpus(child)]

    described = json.loads((ROOT / f"roles/simulator/files/machines/{machine}.json").read_text("utf-8"))
    return sorted((each for root in described["roots"] for entry in root["devices"] for each in gpus(entry)), key=str)


def by_reset(board: str) -> bool:
    """Return whether a board changes its MIG mode only with a reset. Then it is always in MIG mode and is not
    published whole.
    """
    return bool(board_model.board(board)["mig"].get("mode_change") == "reset")


def expected(machine: str) -> list[dict[str, Any]]:
    """Return the specs of the slices that the core builds for these boards with dynamic partitions."""
    devices = [board_model.device(board, minor, enabled=by_reset(board)) for board, minor in boards_of(machine)]
    return [body["spec"] for body in board_model.slices_of(devices, DRIVER, "any")]


def comparable(specifications: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return devices (attributes of their kind, capacity, consumed counters) and counter sets, by name."""
    devices = {}
    for each in (device for specification in specifications for device in specification.get("devices", ())):
        kind = {"type", "profile", "productName", "architecture", "cudaComputeCapability"}
        attributes = {name: value for name, value in each["attributes"].items() if name in kind}
        devices[each["name"]] = (attributes, each.get("capacity"), each.get("consumesCounters"))
    counters = {
        each["name"]: each["counters"]
        for specification in specifications
        for each in specification.get("sharedCounters", ())
    }
    return devices, counters


def numbers(version: str) -> list[int]:
    """Return a version as comparable numbers."""
    return [int(part) for part in version.split(".")]


def smallest(machine: str) -> str:
    """Return the name of the smallest plain profile of a machine's boards."""
    (board,) = {board for board, _minor in boards_of(machine)}
    return min(
        (each.memory_bytes, each.name)
        for each in board_model.profiles(board)
        if re.fullmatch(r"\d+g\.\d+gb", each.name)
    )[1]


def test_no_feature_gate_is_set(boards: Cluster) -> None:
    gates = json.loads((ROOT / "tests/world/gates.json").read_text("utf-8"))
    here = numbers(gates["kubernetes"])
    metrics = boards.kubectl("get", "--raw=/metrics")
    for gate in gates["gates"]:
        known = [(version, stage) for version, stage in gate["matures"].items() if numbers(version) <= here]
        stage = known[-1][1] if known else ""
        found = re.search(
            rf'^kubernetes_feature_enabled{{name="{gate["name"]}",stage="[A-Z]*"}} ([01])', metrics, re.MULTILINE
        )
        assert found and (found[1] == "1") == (stage in ("beta", "stable", "locked")), (gate["name"], stage, found)


def test_site_installs_all_boards_and_second_run_changes_nothing(boards: Cluster) -> None:
    first = boards.playbook("site.yml", "-e", json.dumps(SETTINGS))
    assert not first.failed, first.output
    again = boards.playbook("site.yml", "-e", json.dumps(SETTINGS))
    assert (again.failed, again.changed) == (0, 0), again.output


@pytest.mark.parametrize("machine", MACHINES)
def test_slices_equal_the_output_of_the_core(boards: Cluster, machine: str) -> None:
    node = node_with(boards, machine)
    wanted = comparable(expected(machine))
    boards.wait("all devices", lambda: boards.devices(node).keys() == wanted[0].keys())
    assert comparable([item["spec"] for item in boards.slices(node)]) == wanted


@pytest.mark.parametrize("machine", MACHINES)
def test_partition_is_used_by_a_pod_and_released(boards: Cluster, machine: str) -> None:
    node, profile = node_with(boards, machine), smallest(machine)
    assert boards.instances(node) == []
    boards.apply(
        claim("part", device_class="mig.nvidia.com", expression=dynamic(profile)), pod("part", "part", node=node)
    )
    boards.wait_running("part")
    (held,) = boards.instances(node)
    seen = boards.wait("the pod's list", lambda: boards.log("part")).splitlines()
    assert len(seen) == 2 and seen[0].startswith("GPU 0: ") and seen[1].split()[:2] == ["MIG", profile], seen
    assert re.findall(r"MIG-[-0-9a-f]+", seen[1]) == re.findall(r"MIG-[-0-9a-f]+", held) != []
    boards.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    boards.wait("the partition is released", lambda: boards.instances(node) == [] and not boards.cdi_files(node))


@pytest.mark.parametrize("machine", [each for each in MACHINES if not by_reset(boards_of(each)[0][0])])
def test_whole_gpu_is_used_by_a_pod_and_released(boards: Cluster, machine: str) -> None:
    node = node_with(boards, machine)
    boards.apply(claim("whole", device_class="gpu.nvidia.com"), pod("whole", "whole", node=node))
    boards.wait_running("whole")
    (result,) = boards.get("resourceclaim", "whole")["status"]["allocation"]["devices"]["results"]
    uuid = boards.devices(node)[result["device"]]["attributes"]["uuid"]["string"]
    seen = boards.wait("the pod's list", lambda: boards.log("whole")).splitlines()
    assert len(seen) == 1 and seen[0].startswith("GPU 0: ") and uuid in seen[0], seen
    boards.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    boards.wait("the GPU is released", lambda: not boards.recorded(node) and not boards.cdi_files(node))


def test_removal_deletes_everything(boards: Cluster) -> None:
    recap = boards.playbook("remove.yml")
    assert not recap.failed, recap.output
    boards.wait("no slice left", lambda: not boards.slices(), timeout=90)
