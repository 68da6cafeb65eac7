# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The DeviceClasses of a fleet: by default those of NVIDIA as before, and for Ascend one per model and template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from dra_driver.core.dra.class_kinds import kinds_of_classes
from dra_driver.core.model import DEVICE, GROUP, PARTITION
from dra_driver.core.vendors.ascend.configs import DEVICE_CLASSES, DEVICE_TYPES
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/device_classes"
EXAMPLES = ROLE.parents[1] / "examples/ascend"
FLEETS = {
    "plain": {},
    "ascend": {"accelerator_vendors": ["ascend"]},
    "both": {"accelerator_vendors": ["nvidia", "ascend"]},
    "few": {
        "accelerator_vendors": ["ascend"],
        "device_classes_ascend": [],
        "device_classes_ascend_models": ["310p"],
        "device_classes_ascend_extended_resources": False,
    },
    "none": {"accelerator_vendors": ["ascend"], "device_classes_ascend": [], "device_classes_ascend_models": []},
}
NVIDIA = ["gpu.nvidia.com", "mig.nvidia.com", "vfio.gpu.nvidia.com"]
OF_310P = [
    "ascend-310p",
    *(f"ascend-310p-{part}" for part in ("1-8", "1-4", "1-4-1c", "1-2", "1-2-3c", "1-2-3c-ndvpp", "1-2-4c-dvpp")),
]
TOLD = "{{ __device_classes_definitions | to_json | b64encode }}"


def test_hosts_without_devices_of_a_vendor_ask_for_none_of_its_kinds(tmp_path: Path) -> None:
    """Hosts without a vendor's devices request no kinds of it, neither hosts of the run nor those outside of the limit."""
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    requested = {"device_classes_cluster_info": {"classes": {}}}
    npus = {"accelerator_vendors": ["ascend"], "device_classes_ascend": [], "device_classes_ascend_models": ["310p"]}
    hosts = {"gpus": {}, "npus": npus, "gpus-outside": {}}
    tasks: list[dict[str, Any]] = yaml.safe_load((ROLE / "tasks/main.yml").read_text("utf-8"))
    tasks = tasks[: [each["name"] for each in tasks].index("Query the existing classes")]
    tasks.insert(0, {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")})
    tasks.append({"ansible.builtin.debug": {"msg": TOLD}, "when": "__device_classes_leads"})
    variables = {name: {**defaults, **requested, **each} for name, each in hosts.items()}
    # A host outside of the limit has only its inventory variables.
    variables["gpus-outside"] = {}
    reported = play(tmp_path, tasks, variables, "--limit", "gpus,npus").messages
    assert [each["metadata"]["name"] for each in reported["gpus"]] == NVIDIA + OF_310P


def classes(tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the objects of each fleet."""
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    requested = {"device_classes_cluster_info": {"classes": {}}}
    hosts = {
        name: {**defaults, **requested, **fleet, "accelerator_kubeconfig": f"/{name}"} for name, fleet in FLEETS.items()
    }
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    tasks = yaml.safe_load((ROLE / "tasks/main.yml").read_text("utf-8"))
    (merge,) = (
        {key: task[key] for key in task if key != "when"}
        for task in tasks
        if task["name"].startswith("Merge the needs")
    )
    return play(tmp_path, [read, merge, {"ansible.builtin.debug": {"msg": TOLD}}], hosts).messages


def test_needs_of_all_hosts_are_read_once() -> None:
    """Each merge reads the variables of all hosts: in each template it took 40 s of processor time for 60 hosts."""
    text = "".join((ROLE / path).read_text("utf-8") for path in ("vars/main.yml", "tasks/main.yml"))
    for template in (ROLE / "templates").iterdir():
        assert "__device_classes_merged" not in template.read_text("utf-8")
    names = re.findall(r"^(__device_classes_merged_\w+):", text, re.MULTILINE)
    assert len(names) == 5
    assert all(len(re.findall(rf"\b{name}\b", text)) == 2 for name in names)


def test_classes_of_each_fleet(tmp_path: Path) -> None:
    reported = classes(tmp_path)
    names = {fleet: [each["metadata"]["name"] for each in objects] for fleet, objects in reported.items()}
    assert names["plain"] == NVIDIA
    assert names["both"] == NVIDIA + names["ascend"]
    assert names["few"] == OF_310P and names["none"] == []
    assert set(OF_310P) | set(DEVICE_CLASSES) | {"any.npu.huawei.com", "ascend-910b4-1-1-4"} <= set(names["ascend"])
    assert len(set(names["ascend"])) == len(names["ascend"])
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", each) for each in names["ascend"])
    # The written class states whether its devices are chips or vNPUs, which admission and the driver use.
    kinds = kinds_of_classes(reported["ascend"], {"npu.huawei.com": DEVICE_TYPES})
    slices = {name for name in names["ascend"] if re.search(r"-1-\d", name)} | {"vnpu.huawei.com"}
    several = {"card.npu.huawei.com", "ring.npu.huawei.com", "node.npu.huawei.com"}
    assert kinds == {
        name: PARTITION if name in slices else GROUP if name in several else DEVICE
        for name in names["ascend"]
        if name != "any.npu.huawei.com"
    }
    resources = {each["metadata"]["name"]: each["spec"]["extendedResourceName"] for each in reported["ascend"]}
    assert {name: each for name, each in resources.items() if each} == {
        "ascend-310p": "huawei.com/Ascend310P",
        "ascend-910": "huawei.com/Ascend910",
    }
    assert not any(each["spec"]["extendedResourceName"] for each in reported["few"])
    # The examples request existing classes, or contain their own.
    copied = "".join(path.read_text("utf-8") for path in EXAMPLES.glob("*.yaml"))
    requested = re.findall(r"deviceClassName: (\S+)", copied)
    brought = re.findall(r"kind: DeviceClass\n +metadata:\n +name: (\S+)", copied)
    assert requested and set(requested) <= {*names["ascend"], *brought}
    quarter = next(each for each in reported["few"] if each["metadata"]["name"] == "ascend-310p-1-4")
    (selector,) = quarter["spec"]["selectors"]
    assert selector["cel"]["expression"] == (
        "device.driver == 'npu.huawei.com' && device.attributes['npu.huawei.com'].type == 'vnpu' && "
        "device.attributes['npu.huawei.com'].deviceType == 'Ascend310P' && "
        "device.attributes['npu.huawei.com'].template == 'vir02'"
    )
