# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts about a node's NVSwitches and about GPUs that join their fabric, the required services, and the duration of waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.fabric_packages import (
    IMEX,
    MANAGER,
    SUBNET,
    driver_version,
    needs_of,
    wait_for_fabric,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import PackageProblem
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.fabric.nvswitch import (
    COMPLETED,
    HEALTHY,
    IN_PROGRESS,
    LIMITED,
    NO_SUMMARY,
    NOT_STARTED,
    NOT_SUPPORTED,
    UNHEALTHY,
    FabricJoinState,
    Switches,
    faults_of,
    not_joined,
    read_query,
    switches,
)
from fabric_query import NEWER, OLDER, query
from package_machine import UnitMachine


@pytest.mark.parametrize(("kind", "is_one"), [("0x068000", True), ("0x030200", False), ("0x020700", False)], ids=str)
def test_switches_are_vendor_bridges(tmp_path: Path, kind: str, is_one: bool) -> None:
    machine = UnitMachine(tmp_path)
    for address, vendor in (("0000:05:00.0", "0x10de"), ("0000:06:00.0", "0x8086")):
        machine.put_file(f"/sys/bus/pci/devices/{address}/vendor", f"{vendor}\n")
        machine.put_file(f"/sys/bus/pci/devices/{address}/class", f"{kind}\n")
    assert switches(machine) == Switches(("0000:05:00.0",) if is_one else ())


@pytest.mark.parametrize(
    ("found", "requested", "expected"),
    [
        (Switches(), {}, []),
        (Switches(("a",)), {}, [MANAGER]),
        (Switches((), ("b",)), {}, [MANAGER, SUBNET]),
        (Switches(("a",)), {"manager": "never", "subnet": "always"}, []),
        (Switches(), {"manager": "always", "imex": "enabled"}, [MANAGER, IMEX]),
        (Switches((), ("b",)), {"subnet": "never", "imex": "installed"}, [MANAGER, IMEX]),
    ],
)
def test_needs_of_node_depend_on_switches_and_options(
    found: Switches, requested: dict[str, str], expected: list[str]
) -> None:
    needs = needs_of(found, **{"manager": "auto", "subnet": "auto", "imex": "none", **requested})
    assert needs.package_names() == expected and bool(needs) == bool(expected)


@pytest.mark.parametrize(
    ("installed", "recorded", "loaded", "expected"),
    [
        ({}, "", "", ""),
        ({}, "", NEWER, NEWER),
        ({"libnvidia-ml1": f"{NEWER}-1"}, "", OLDER, NEWER),
        ({"libnvidia-compute-580-server": f"{NEWER}-0ubuntu0.24.04.1"}, NEWER, OLDER, NEWER),
        ({"libnvidia-ml1": f"{OLDER}-1"}, NEWER, OLDER, OLDER),
        ({"libnvidia-ml1": f"{OLDER}-1"}, NEWER, "", OLDER),
        ({"libnvidia-container1": "1.18.1-1"}, "", NEWER, NEWER),
    ],
)
def test_driver_version_prefers_installed_one(
    installed: dict[str, str], recorded: str, loaded: str, expected: str
) -> None:
    assert driver_version(installed, recorded, loaded) == expected


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        ("Completed", "Success", FabricJoinState(COMPLETED, summary=HEALTHY)),
        ("Completed", "Success", FabricJoinState(COMPLETED)),
        ("Completed", "Unknown Error", FabricJoinState(COMPLETED, -1)),
        ("In Progress", "N/A", FabricJoinState(IN_PROGRESS)),
        ("Not Started", "N/A", FabricJoinState(NOT_STARTED)),
        ("N/A", "N/A", FabricJoinState(NOT_SUPPORTED)),
    ],
)
def test_read_query_parses_vendor_output(state: str, status: str, expected: FabricJoinState) -> None:
    second = query("Completed", "Success").replace("GPU-1", "GPU-2").replace("1B:00", "2B:00")
    first = query(state, status, **({"Summary": "N/A"} if expected.summary == NO_SUMMARY else {}))
    found = read_query(first + second)
    assert found == {"GPU-1": expected, "GPU-2": FabricJoinState(COMPLETED, summary=HEALTHY)}
    assert [each.split()[0] for each in not_joined(found)] == ([] if expected.is_well else ["GPU-1"])
    assert read_query("") == {}


#: Bits as in NVML's header: the mask of a healthy GPU, and the message for each fault bit.
HEALTHY_MASK = 0x1AA
FAULTY = {
    0x1A9: "its bandwidth is degraded",
    0x1A6: "its routes are being recovered",
    0x19A: "its routes are unhealthy",
    0x16A: "accesses that timed out are being recovered",
    0x2AA: "it is not configured as its place wants it (wrong system GUID)",
    0x8AA: "it is not configured as its place wants it (invalid state)",
    0xFAA: "it is not configured as its place wants it (15)",
}


@pytest.mark.parametrize(
    ("mask", "words"), FAULTY.items(), ids=lambda value: value if isinstance(value, str) else hex(value)
)
def test_faults_of_mask_reads_each_bit(mask: int, words: str) -> None:
    assert faults_of(mask) == (words,)
    # A library without the summary reports the mask only: degraded bandwidth corresponds to the summary "limited".
    judged = FabricJoinState(COMPLETED, faults=faults_of(mask))
    assert judged.is_well == (mask == 0x1A9) == judged.is_limited and judged.describe().endswith(f": {words}")
    # Before the GPU has joined, its health is not valid.
    assert FabricJoinState(IN_PROGRESS, faults=faults_of(mask)).describe() == "is still joining"


def test_faults_of_mask_with_several_or_no_bits() -> None:
    assert faults_of(HEALTHY_MASK) == faults_of(0) == ()
    assert faults_of(0x3 << 14 | 0x255) == tuple(words for mask, words in FAULTY.items() if mask not in (0x8AA, 0xFAA))


@pytest.mark.parametrize(
    ("summary", "faults", "is_well", "words"),
    [
        (HEALTHY, (), True, "has joined"),
        (UNHEALTHY, (), False, "has joined and is unhealthy"),
        (UNHEALTHY, ("x", "y"), False, "has joined and is unhealthy: x, y"),
        (LIMITED, (), True, "has joined with limited capacity"),
        (LIMITED, ("x",), True, "has joined with limited capacity: x"),
        (NO_SUMMARY, ("x",), False, "has joined and is unhealthy: x"),
        (NO_SUMMARY, (), True, "has joined"),
    ],
)
def test_summary_decides_health(summary: int, faults: tuple[str, ...], is_well: bool, words: str) -> None:
    judged = FabricJoinState(COMPLETED, 0, summary, faults)
    assert (judged.is_well, judged.describe()) == (is_well, words)
    assert not FabricJoinState(COMPLETED, 999, HEALTHY).is_well, (
        "one that could not join is not well whatever the summary says"
    )


def test_wait_polls_gpus_until_timeout() -> None:
    states = iter(
        [{"a": FabricJoinState(NOT_STARTED)}, {"a": FabricJoinState(IN_PROGRESS)}, {"a": FabricJoinState(COMPLETED)}]
    )
    now = iter(range(100))
    wait_for_fabric(lambda: next(states), 10, clock=lambda: float(next(now)), sleep=lambda seconds: None)
    with pytest.raises(PackageProblem) as caught:
        wait_for_fabric(
            lambda: {"a": FabricJoinState(IN_PROGRESS), "b": FabricJoinState(COMPLETED)},
            3,
            clock=lambda: float(next(now)),
            sleep=lambda seconds: None,
        )
    assert (
        caught.value.code == "fabric"
        and "1 of 2 GPUs" in str(caught.value)
        and "a is still joining" in str(caught.value)
    )
