# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Ascend NPUs for the chaos tests: eight 310P or eight 910A with one layout that gives each kind its own NPU. One driver serves all of them.

vNPUs of a 310P have places in vGroups. Those of a 910A have numbers only, which are assigned when a claim is planned.
Four 910A on one ring are also one device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerator_simulator.library import ASCEND, Library
from dra_driver.core.dra.device_json import FAILED_CONDITION, PREPARED_CONDITION

from tests.chaos.claim_kinds import SLICES, STATIC, Kind, opaque
from tests.chaos.errors import Broken
from tests.chaos.vendor import FuzzConfiguration, Vendor
from tests.simulator import older_driver
from tests.simulator.nvml_builds import ROOT

if TYPE_CHECKING:
    from tests.chaos.node import Node

DRIVER = "npu.huawei.com"


def layout(static: str) -> tuple[Mapping[str, Any], ...]:
    """Return one layout for all kinds. Two vNPUs of the first NPU are created before the driver starts."""
    return (
        {"match": {"index": 0}, "mode": "static", "partitions": {static: 2}},
        {"match": {"index": [3, 6]}, "mode": "whole"},
        {"match": {"index": 7}, "mode": "dynamic", "prepared_before_binding": True},
        {"match": {}, "mode": "dynamic"},
    )


def template(name: str) -> dict[str, Any]:
    """Return a configuration with the template of a vNPU."""
    return opaque(DRIVER, apiVersion="dra.accelerators/v1alpha1", kind="VnpuConfig", template=name)


def kinds(three: tuple[str, str, str], beside: str, rest: str, cut: tuple[str, str], awaited: str) -> tuple[Kind, ...]:
    """Return the kinds by devices: two vNPUs of NPU 1 and one of NPU 2, one more next to the first two, one that takes
    the rest of NPU 2, one of NPU 4 with its template, and one of NPU 7.
    """
    bound = {
        "device": awaited,
        "bindingConditions": [PREPARED_CONDITION],
        "bindingFailureConditions": [FAILED_CONDITION],
    }
    return (
        Kind("whole", ("npu-3",)),
        Kind("static", (STATIC,)),
        Kind("dynamic", (beside,), stages_of_kind=SLICES, partitions=1),
        Kind("three", three, stages_of_kind=SLICES, partitions=3),
        Kind("template", (cut[0],), (template(cut[1]),), SLICES, 1),
        Kind("rest", (rest,), stages_of_kind=SLICES, partitions=1, prepared_neighbors=("three",)),
        Kind("uncut", ("npu-5",)),
        Kind("several", ("npu-5", "npu-6")),
        Kind("ahead", (bound,), stages_of_kind=SLICES, partitions=1, before_binding=True),
        Kind("admin", ({"device": "npu-3", "adminAccess": True},)),
    )


#: On a 310P the one next to it has the other place of a vGroup.
PLACED = kinds(
    three=("npu-1-vir01-0", "npu-1-vir02-6", "npu-2-vir04-4"),
    beside="npu-1-vir01-1",
    rest="npu-2-vir04-3c-6",
    cut=("npu-4-vir02-1c-6", "vir02_1c"),
    awaited="npu-7-vir01-0",
)
NUMBERED = (
    *kinds(
        three=("npu-1-vir02-new-0", "npu-1-vir08-new-0", "npu-2-vir16-new-0"),
        beside="npu-1-vir02-new-1",
        rest="npu-2-vir16-new-1",
        cut=("npu-4-vir04-new-0", "vir04"),
        awaited="npu-7-vir02-new-0",
    ),
    Kind("group", ("npu-ring-4",)),
)
HANDOVERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("static", "three", "dynamic", "whole", "several", "ahead"), "template"),
    (("static", "three", "rest", "template", "uncut", "ahead"), "dynamic"),
    (("three", "dynamic", "admin", "template"), "rest"),
)
LIBRARY_CALLS = (
    "dcmi_create_vdevice",
    "dcmi_set_destroy_vdevice",
    "dcmi_get_device_info",
    "dcmi_get_device_resource_info",
    "dcmi_get_device_die_v2",
    "dcmi_get_device_health",
    "dcmi_get_device_errorcode_v2",
    "dcmi_get_card_list",
)
#: Invalid value, internal error, not found, not ready, occupied, impossible with the vNPUs, not supported.
ERROR_CODES = (-8001, -8005, -8006, -8008, -8011, -8012, -8013, -8017, -8020, -8022, -8255)
#: Errors of applications, memory, and the chip's own processors, those that need a reset or another board, and an
#: unknown one.
ERRORS = (0x80E01801, 0x80818C06, 0x80CB8002, 0x80E18005, 0x80DF8008, 0x8C044E00, 0xA2301000, 0x80A38003, 0x8FFF0000)


def fuzz_configurations(cut: tuple[str, str], other: tuple[str, str]) -> tuple[FuzzConfiguration, ...]:
    """Return vNPUs and a whole NPU with configurations, both valid and invalid ones."""
    return (
        ((cut[0],), template(cut[1])),
        ((other[0],), template(cut[1])),
        ((other[0], "npu-5"), template(other[1])),
        (("npu-3",), template(other[1])),
    )


def hardware(silicon: Library) -> dict[str, Any]:
    """Return each chip that the library lists, by PCI address: its share mode, and its vNPUs."""
    shown = silicon.command("show")
    return {
        npu["pci_address"]: {
            "set": [shown["recover"], npu["device_share"]],
            "partitions": sorted([each["template"], each["vid"], each["group"]] for each in npu["slices"]),
        }
        for npu in shown["npus"]
    }


def recreated_partitions() -> dict[str, list[str]]:
    """Return the library's records of vNPUs that a reboot creates again, by physical id of the chip."""
    kept = Path("/etc/vnpu.cfg")
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    noted: dict[str, list[str]] = {}
    for line in lines:
        if found := re.match(r"(\d+):\d+:", line):
            noted.setdefault(found[1], []).append(line)
    return {chip: sorted(found) for chip, found in noted.items()}


def check_cdi_files(silicon: Library, files: list[Path]) -> None:
    """Assert that each CDI file names existing nodes, and vNPUs with the names of chips. Raises Broken."""
    slices = {f"/dev/vdavinci{each['vid']}" for npu in silicon.command("show")["npus"] for each in npu["slices"]}
    for file in files:
        for device in json.loads(file.read_text(encoding="utf-8"))["devices"]:
            for node in device["containerEdits"].get("deviceNodes", ()):
                host = node.get("hostPath", node["path"])
                if not Path(host).is_char_device():
                    raise Broken(f"{file} names {host}, which is no device node")
                if "vdavinci" in host and (host not in slices or node["path"] != host.replace("vdavinci", "davinci")):
                    raise Broken(f"{file} names {host} as {node['path']}; expected a slice that exists, of {slices}")


def forget_partitions(node: Node) -> None:
    """Delete the library's records, so that the next power-on creates no vNPU again."""
    del node
    Path("/etc/vnpu.cfg").unlink(missing_ok=True)


VENDOR = Vendor(
    name="ascend",
    backend="ascend",
    driver=DRIVER,
    simulated_vendor=ASCEND,
    sources=ROOT / "roles/simulator/files/dcmi",
    machine="8x310P-Pro",
    layout=layout("vir02"),
    kinds=PLACED,
    parallel_kinds=("whole", "static", "three", "template"),
    other_kind="template",
    handovers=HANDOVERS,
    library_calls=LIBRARY_CALLS,
    error_codes=ERROR_CODES,
    kinds_with_calls=("three", "template"),
    hanging_calls=("dcmi_create_vdevice", "dcmi_get_device_info"),
    scan_calls=(),
    device_errors=tuple(f"error {code:#x}" for code in ERRORS),
    failed_state="health critical",
    fuzz_configurations=fuzz_configurations(("npu-4-vir02-1c-6", "vir02_1c"), ("npu-1-vir01-1", "vir01")),
    fuzz_words=("vir01", "vir02", "vir04_3c_ndvpp", "VnpuConfig", "VIR02"),
    is_static=lambda name: re.match(r"npu-0-vir", name) is not None,
    hardware=hardware,
    recreated_partitions=recreated_partitions,
    device_nodes=lambda: sorted(path.name for path in Path("/dev").glob("vdavinci*")),
    check_cdi_files=check_cdi_files,
    pci_class="0x1200",
    pci_driver="devdrv_device_driver",
    install_directory=lambda name: Path(ASCEND.folder if name.startswith("lib") else "/usr/local/bin"),
    forget_partitions=forget_partitions,
    claim_attributes=frozenset({"cardFree", "cardChips", "ringFree", "ringChips"}),
)
#: The other generation of drivers.
OLDER = replace(
    VENDOR, name="ascend-older", build_options=(older_driver.BUILT,), library_settings=older_driver.STATEMENTS
)
NUMBERED_VNPUS = replace(
    VENDOR,
    name="ascend-910a",
    machine="8x910A",
    layout=layout("vir04"),
    kinds=NUMBERED,
    handovers=(*HANDOVERS, (("static", "three", "dynamic", "group"), "rest")),
    fuzz_configurations=fuzz_configurations(("npu-4-vir04-new-0", "vir04"), ("npu-1-vir08-new-0", "vir08")),
    fuzz_words=("vir02", "vir16", "VnpuConfig", "VIR02"),
)
