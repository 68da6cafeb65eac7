# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the labels of a Node with GPUs, and those of devices on the bus, with the rows of docs/labels.md.

The page has one table for each machine below: the labels of gpu-feature-discovery and of this collection. The first
column is a label. The last column is its value on that machine, or, in the table of unwritten labels, the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import board_model
import pytest
from chip_model import device as chip_device
from dra_driver.core.dra.node_labels import (
    AUTO,
    MIXED,
    NO_PARTITIONS,
    SINGLE,
    STRATEGIES,
    UNKNOWN_MACHINE,
    BusProperties,
    MachineFacts,
    bus_labels,
    read_machine,
)
from dra_driver.core.host.system import System
from dra_driver.core.model import Clique, Device, Partitioning, Version
from dra_driver.core.vendors.nvidia.fabric.fabric import clique_of, has_joined
from dra_driver.core.vendors.nvidia.node_labels import GPU, NAMES, OF_PARTITIONS, labels, partition_resource, spelled
from dra_driver.core.vendors.registry import create

PAGE = Path(__file__).resolve().parents[3] / "docs" / "labels.md"
CLIQUE = Clique("7b968a6d-c8aa-45e1-9e07-e1e51be99c31", 1)
THIRD, EIGHTH = (9, 0), (19, 4)  # 3g.40gb in the first half, 1g.10gb in the second


def gpu(index: int = 0, **changes: Any) -> Device:
    facts = {"product": "NVIDIA H100 80GB HBM3", "driver_version": "580.95.05", "clique": CLIQUE, **changes}
    return board_model.device("h100-80", index, **facts)


def machine(devices: Sequence[Device], bus_class: str = "0x030200") -> MachineFacts:
    return MachineFacts("NVIDIA DGX H100", {each.pci_address: BusProperties(bus_class) for each in devices})


WHOLE = [gpu(0), gpu(1)]
ALIKE = [gpu(each, places=((19, 0), (19, 1))) for each in range(2)]
MANY = [gpu(0), gpu(1, places=(THIRD, EIGHTH))]
MACHINES = {
    "Whole GPUs": (WHOLE, NO_PARTITIONS),
    "Partitions as GPUs": (ALIKE, SINGLE),
    "Partitions by profile": (MANY, MIXED),
}


def table(title: str) -> list[list[str]]:
    """Return the rows of the table below a title of the page, without code marks."""
    below = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line for line in below.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def labels_for(title: str) -> dict[str, str]:
    devices, strategy = MACHINES[title]
    return labels(devices, machine(devices), strategy)


@pytest.mark.parametrize("title", MACHINES)
def test_labels_match_each_row_of_the_page(title: str) -> None:
    rows = table(title)
    documented = {row[0]: row[-1] for row in rows}
    assert len(documented) == len(rows)
    found = labels_for(title)
    whole = labels_for("Whole GPUs")
    # Tables of partitions list only differences from whole GPUs.
    expected = found if title == "Whole GPUs" else {key: text for key, text in found.items() if whole.get(key) != text}
    assert {key: "" if text == "(empty)" else text for key, text in documented.items()} == expected


def test_labels_are_all_documented() -> None:
    everywhere = {row[0] for title in MACHINES for row in table(title)}
    assert set(NAMES) <= everywhere
    by_profile = {f"{partition_resource('3g.40gb')}.{name}" for name in OF_PARTITIONS}
    assert by_profile <= {row[0] for row in table("Partitions by profile")}


def test_labels_documented_as_absent_are_absent() -> None:
    rows = table("Labels that are not written")
    assert len(rows) > 4 and all(row[-1].endswith(".") for row in rows)
    written = {key for title in MACHINES for key in labels_for(title)}
    assert not written & {row[0] for row in rows}


def test_labels_driver_with_two_numbers_has_empty_revision() -> None:
    found = labels([gpu(driver_version="615.43")])
    assert found["nvidia.com/cuda.driver-version.revision"] == found["nvidia.com/cuda.driver.rev"] == ""
    assert found["nvidia.com/cuda.driver-version.full"] == "615.43"
    unknown = labels([gpu(driver_version="")])
    assert not [name for name in unknown if "driver" in name]


def test_labels_machine_without_facts() -> None:
    found = labels(WHOLE, UNKNOWN_MACHINE)
    assert (found[f"{GPU}.machine"], found[f"{GPU}.mode"]) == ("unknown", "unknown")
    assert labels(WHOLE, machine(WHOLE, "0x030000"))[f"{GPU}.mode"] == "graphics"
    torn = machine(WHOLE)
    torn = replace(torn, bus_properties={**torn.bus_properties, WHOLE[0].pci_address: BusProperties("0x030000")})
    assert labels(WHOLE, torn)[f"{GPU}.mode"] == "unknown"


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB"),
        ("Ubuntu 24.04 PC (Q35 + ICH9, 2009)", "Ubuntu-24.04-PC-Q35-ICH9-2009"),
        ("  DGX   H100 ", "DGX-H100"),
        ("(none)", "none"),
        ("", ""),
    ],
)
def test_spelled_replaces_invalid_characters(text: str, spelling: str) -> None:
    assert spelled(text) == spelling


def test_labels_two_fabrics_have_no_clique() -> None:
    assert labels([gpu(0), gpu(1, clique=None)])[f"{GPU}.clique"] == str(CLIQUE)
    for other in (replace(CLIQUE, number=2), replace(CLIQUE, fabric="another")):
        assert f"{GPU}.clique" not in labels([gpu(0), gpu(1, clique=other)])
    assert f"{GPU}.clique" not in labels([gpu(clique=None)])


def test_labels_clique_of_gpu() -> None:
    name = bytes(range(16))
    assert str(clique_of(3, 0, name, 7)) == "00010203-0405-0607-0809-0a0b0c0d0e0f.7"
    assert clique_of(2, 0, name, 7) is clique_of(3, 1, name, 7) is clique_of(3, 0, bytes(16), 7) is None
    assert has_joined(3, 0) and not has_joined(2, 0) and not has_joined(3, 1)


def test_labels_different_gpus_have_common_values_only() -> None:
    other = gpu(1, product="NVIDIA A30", memory_bytes=24 << 30, driver_version="580.95.05")
    found = labels([gpu(0), other])
    assert not {f"{GPU}.product", f"{GPU}.memory"} & set(found) and found[f"{GPU}.count"] == "2"
    old = gpu(partitioning=Partitioning(supported=False))
    assert labels([old])["nvidia.com/mig.capable"] == "false"
    assert labels([old, gpu(1)])["nvidia.com/mig.capable"] == "true"


@pytest.mark.parametrize(("architecture", "family"), [("Ada Lovelace", "ada-lovelace"), ("Unknown", "undefined")])
def test_labels_family_of_architecture(architecture: str, family: str) -> None:
    one = gpu()
    one = replace(one, attributes={**one.attributes, "architecture": architecture})
    assert labels([one])[f"{GPU}.family"] == family


def test_labels_fully_partitioned_gpus_have_no_replicas() -> None:
    assert labels(ALIKE)[f"{GPU}.replicas"] == "0"
    assert labels(MANY)[f"{GPU}.replicas"] == "1"


@pytest.mark.parametrize(
    "devices",
    [
        MANY,
        [gpu(0, places=((19, 0),)), gpu(1, enabled=True)],
        [gpu(0, places=(THIRD, EIGHTH))],
        [gpu(0, enabled=True)],
    ],
    ids=["one whole", "one empty", "two profiles", "empty"],
)
def test_labels_single_strategy_mixed_partitions_are_invalid(devices: list[Device]) -> None:
    found = labels(devices, strategy=SINGLE)
    values = [found[f"{GPU}.{name}"] for name in ("product", "count", "replicas", "memory")]
    assert values == ["NVIDIA-H100-80GB-HBM3-MIG-INVALID", "0", "0", "0"]
    assert f"{GPU}.slices.gi" not in found and found["nvidia.com/mig.strategy"] == "single"


def test_labels_by_partition_strategy() -> None:
    assert "nvidia.com/mig.strategy" not in labels(MANY)
    assert labels(MANY, strategy=AUTO) == labels(MANY, strategy=MIXED)
    assert labels(WHOLE, strategy=AUTO) == labels(WHOLE, strategy=NO_PARTITIONS)
    assert labels(WHOLE, strategy=SINGLE) == {**labels(WHOLE), "nvidia.com/mig.strategy": "single"}
    assert all(labels([], UNKNOWN_MACHINE, strategy) == {} for strategy in STRATEGIES)


def test_labels_profile_names_with_suffixes() -> None:
    (device,) = [gpu(places=((20, 0),))]
    (part,) = device.partitions
    assert part.profile == "1g.10gb+me"
    found = labels([device], strategy=MIXED)
    assert found["nvidia.com/mig-1g.10gb.me.product"] == "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me"
    # A partition without a handle, because it has no compute instance or several, cannot be in a container.
    bare = replace(device, partitions=(replace(part, uuid=""),))
    assert not [name for name in labels([bare], strategy=MIXED) if "/mig-" in name]


def test_backend_labels_equal_functions() -> None:
    backend = create("nvidia")
    assert backend.labels(MANY, machine(MANY), MIXED) == labels_for("Partitions by profile")
    npu = chip_device("A3")
    assert create("ascend").labels([npu], UNKNOWN_MACHINE, MIXED) == create("ascend").labels([npu])


def test_bus_labels_have_class_vendor_and_sriov() -> None:
    facts = replace(
        machine(WHOLE), bus_properties={each.pci_address: BusProperties("0x030200", True) for each in WHOLE}
    )
    name = "feature.node.kubernetes.io/pci-"
    assert bus_labels(WHOLE, facts, ["vendor", "class"]) == {
        f"{name}0302_10de.present": "true",
        f"{name}0302_10de.sriov.capable": "true",
    }
    assert bus_labels(WHOLE, machine(WHOLE), ["vendor"]) == {f"{name}10de.present": "true"}
    assert bus_labels(WHOLE, machine(WHOLE), []) == bus_labels(WHOLE, UNKNOWN_MACHINE, ["vendor"]) == {}
    npu = replace(chip_device("A3"), pci_device_id=0xD80319E5)
    seats = MachineFacts("", {npu.pci_address: BusProperties("0x120000")})
    assert bus_labels([npu], seats, ["class", "vendor", "device"]) == {f"{name}1200_19e5_d803.present": "true"}


def test_read_machine_returns_product_and_bus_facts(tmp_path: Path) -> None:
    files = {"sys/class/dmi/id/product_name": "PowerEdge XE9680\n"}
    for each in WHOLE[:1]:
        files[f"sys/bus/pci/devices/{each.pci_address}/class"] = "0x030200\n"
        files[f"sys/bus/pci/devices/{each.pci_address}/sriov_totalvfs"] = "16\n"
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = read_machine(System(root=str(tmp_path)), WHOLE)
    assert found.product == "PowerEdge XE9680"
    assert [found.bus_properties[each.pci_address] for each in WHOLE] == [
        BusProperties("0x030200", True),
        BusProperties(),
    ]
    assert read_machine(System(root=str(tmp_path / "nowhere")), ()) == UNKNOWN_MACHINE


def test_labels_different_versions_have_no_label() -> None:
    other = gpu(1)
    other = replace(other, attributes={**other.attributes, "cudaDriverVersion": Version("12.4.0")})
    assert "nvidia.com/cuda.runtime-version.full" not in labels([gpu(0), other])
