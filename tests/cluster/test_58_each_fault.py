# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test each fault of a GPU: every source reports it with its severity, and reports its verified end.

Several faults are injected at a time, each into a GPU that one pod uses whole. The order is asserted; the times are
printed at the end. test_31_passthrough.py tests the fault of a GPU that a virtual machine uses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import TOLERATED, claim, device_named, pod
from tests.cluster.surfaces import ExpectedFault, FaultyDevice, Holder, Surfaces, Times, start_listening
from tests.cluster.test_55_faults import taints

pytestmark = pytest.mark.prove

CALL = "call nvmlDeviceGetMemoryInfo"
AT_ONCE = 4

RESET = ExpectedFault("recovery-action", "reset", "NoExecute")
DRAIN = ExpectedFault("recovery-action", "drain-and-reset")


@dataclass(frozen=True)
class Case:
    """The injected faults, as arguments of ``accelerator-simulator fault GPU``, and their expected reports.

    With ``used`` a process runs on the GPU: an application's error ends with it.
    """

    faults: tuple[str, ...]
    expected_faults: tuple[ExpectedFault, ...]
    used: bool = False

    @property
    def name(self) -> str:
        """Return the name in the table."""
        return "; ".join(self.faults)


def case(*faults: str, expected: tuple[ExpectedFault, ...], used: bool = False) -> Case:
    return Case(faults, expected, used)


CASES = (
    # Xids of each kind of the catalog: application, workflow, reset, machine, power, software.
    case("xid 31", expected=(ExpectedFault("xid", "31", ""),), used=True),
    case("xid 78", expected=(ExpectedFault("xid", "78", ""),), used=True),
    case(
        "recovery-action 3",
        "nvlink 0 down",
        expected=(ExpectedFault("xid", "74"), ExpectedFault("recovery-action", "drain-p2p")),
    ),
    case("ecc dbe", expected=(ExpectedFault("xid", "48"), DRAIN)),
    case("xid 95", expected=(ExpectedFault("xid", "95", "NoExecute"), DRAIN)),
    case("xid 119", expected=(ExpectedFault("xid", "119", "NoExecute"),)),
    case("xid 62", expected=(ExpectedFault("xid", "62", "NoExecute"), RESET)),
    case(
        "recovery-action 2",
        "xid 54",
        expected=(ExpectedFault("xid", "54"), ExpectedFault("recovery-action", "reboot", "NoExecute")),
    ),
    case(
        "xid 79",
        expected=(ExpectedFault("xid", "79", "NoExecute"), ExpectedFault("recovery-action", "reboot", "NoExecute")),
    ),
    # Repairs of the GPU's memory.
    case("row-remap pending", expected=(ExpectedFault("row-remap-pending", "", ""), DRAIN)),
    case(
        "row-remap failure",
        expected=(ExpectedFault("row-remap-failure"), ExpectedFault("xid", "64", "NoExecute"), RESET),
    ),
    # Other errors that NVML reports.
    case("event retirement-failure", expected=(ExpectedFault("memory-failure"), DRAIN)),
    case("event fatal-poison", expected=(ExpectedFault("poison", "", "NoExecute"), RESET)),
    case("event unavailable", expected=(ExpectedFault("unavailable", "", "NoExecute"), RESET)),
    # Recovery actions that the GPU requests.
    case("recovery-action 1", expected=(RESET,)),
    case("recovery-action 4", expected=(DRAIN,)),
    case("recovery-action 5", expected=(ExpectedFault("recovery-action", "recover-imex-domain"),)),
    case("recovery-action 6", expected=(ExpectedFault("recovery-action", "bus-reset", "NoExecute"),)),
    case("recovery-action 7", expected=(ExpectedFault("recovery-action", "system-reboot", "NoExecute"),)),
    # Causes of slow clocks.
    case("thermal", expected=(ExpectedFault("slowdown", "thermal"),)),
    case("slowdown power-brake", expected=(ExpectedFault("slowdown", "power-brake"),)),
    case("slowdown hardware", expected=(ExpectedFault("slowdown", "hardware"),)),
    # States in the NVLink fabric.
    case("fabric not-started", expected=(ExpectedFault("fabric", "not-joined"),)),
    case("fabric joining", expected=(ExpectedFault("fabric", "not-joined"),)),
    case("fabric failed", expected=(ExpectedFault("fabric", "failed"),)),
    case("fabric routes", expected=(ExpectedFault("fabric", "routes"),)),
    case("fabric mending", expected=(ExpectedFault("fabric", "mending"),)),
    case("fabric place", expected=(ExpectedFault("fabric", "place"),)),
    case("fabric bandwidth", expected=(ExpectedFault("fabric", "bandwidth", ""),)),
    # The GPU does not answer, or with an error.
    case(f"{CALL} fail 999", expected=(ExpectedFault("unknown-error"),)),
    case(f"{CALL} fail 16", expected=(ExpectedFault("reset-required", "", "NoExecute"),)),
    case(f"{CALL} fail 8", expected=(ExpectedFault("insufficient-power"),)),
    case(f"{CALL} fail 4", expected=(ExpectedFault("no-permission"),)),
    case(f"{CALL} fail 10", expected=(ExpectedFault("no-answer"),)),
    case(f"{CALL} hang", expected=(ExpectedFault("no-answer"),)),
    case("lost", expected=(ExpectedFault("gpu-lost", "", "NoExecute"),)),
)
TOGETHER = [CASES[place : place + AT_ONCE] for place in range(0, len(CASES), AT_ONCE)]


def documents(node: str, index: int, uuid: str) -> list[dict[str, Any]]:
    """Return a claim for one whole GPU that tolerates all taints, and its pod."""
    wanted = claim(f"whole-{index}", device_class="gpu.nvidia.com", expression=device_named(uuid))
    wanted["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] = TOLERATED
    return [wanted, pod(f"whole-{index}", f"whole-{index}", node=node)]


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> str:
    """Return the second node, all of whose GPUs are dynamic."""
    name = cluster.nodes()[1]
    cluster.wait("all devices are published", lambda: len(cluster.devices(name)) == 8 * 26)
    return name


@pytest.fixture(scope="module")
def holders(cluster: Cluster, node: str) -> Iterator[list[Holder]]:
    """Yield some GPUs, each with a pod that tolerates all faults; release and clear them afterwards."""
    found, made = [], []
    for index in range(AT_ONCE):
        uuid = str(cluster.devices(node)[f"gpu-{index}"]["attributes"]["uuid"]["string"])
        found.append(Holder(uuid, f"gpu-{index}", f"whole-{index}", f"whole-{index}"))
        made += documents(node, index, uuid)
    cluster.apply(*made)
    cluster.wait_running(*(each.pod for each in found))
    yield found
    cluster.heal(node)
    cluster.delete(*reversed(made))
    cluster.wait("no device is tainted", lambda: not taints(cluster, node))


@pytest.fixture()
def surfaces(cluster: Cluster, node: str, holders: list[Holder]) -> Iterator[Surfaces]:
    """Record all sources; clear all faults afterwards."""
    start_listening(cluster, node)
    listening = Surfaces(cluster, node)
    yield listening
    listening.close()
    cluster.heal(node)


def name_of(cases: tuple[Case, ...]) -> str:
    return f"{cases[0].name} to {cases[-1].name}".replace(f"{CALL} ", "call ")


@pytest.mark.parametrize("cases", TOGETHER, ids=name_of)
def test_fault_is_reported_everywhere_and_cleared(
    cluster: Cluster, node: str, holders: list[Holder], surfaces: Surfaces, times: Times, cases: tuple[Case, ...]
) -> None:
    chosen = list(zip(cases, holders))
    cluster.wait("all is well", lambda: surfaces.all_well([holder for _case, holder in chosen]))
    used = [holder for each, holder in chosen if each.used]
    for holder in used:
        cluster.run(node, "accelerator-simulator", "fault", holder.uuid, "process", "1")
    if used:
        before = time.time()
        cluster.wait("the driver has found the processes", lambda: cluster.status(node)["looked_at"] > before)
    faulty = []
    for each, holder in chosen:
        faulty.append(FaultyDevice(each.name, holder, each.expected_faults, time.time()))
        cluster.shell(node, " && ".join(f"accelerator-simulator fault {holder.uuid} {words}" for words in each.faults))
    seen = surfaces.wait_seen(faulty)
    ended = time.time()
    cluster.heal(node)
    gone = surfaces.wait_gone(faulty, ended)
    for one in faulty:
        times.add(one, seen[one.name], ended, gone[one.name])
        for place in surfaces.expected(one.expected_faults):
            assert one.began <= (seen[one.name][place] or 0.0) <= ended <= (gone[one.name][place] or 0.0), (one, place)
    assert all(cluster.pod(holder.pod)["status"]["phase"] == "Running" for holder in holders), "all is tolerated"
