# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The vendors of a node's devices, the content of Ascend's files, and the filters with vendors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.npu_claim import FilterModule as NpuClaim
from ansible_collections.dra.accelerators.plugins.filter.vendor_facts import FilterModule as VendorFacts
from ansible_collections.dra.accelerators.plugins.module_utils._host import vendor_detection
from ansible_collections.dra.accelerators.plugins.module_utils._host.vendor_names import VENDOR_FACTS
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend import driver_files
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.registry import BACKENDS, create

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples/ascend"
EXAMPLE = EXAMPLES / "near-npus.yaml"
NIC_OF_HUAWEI = ("0x19e5", "0x020000")
GPU, NPU, AUDIO_OF_A_GPU = ("0x10de", "0x030200"), ("0x19e5", "0x120000"), ("0x10de", "0x040300")


def machine(root: Path, devices: dict[str, tuple[str, str]]) -> System:
    for address, (vendor, kind) in devices.items():
        directory = root / "sys/bus/pci/devices" / address
        directory.mkdir(parents=True)
        (directory / "vendor").write_text(f"{vendor}\n")
        (directory / "class").write_text(f"{kind}\n")
        (directory / "device").write_text("0xd500\n")
    return System(str(root))


def put(root: Path, path: str, text: str = "") -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def test_devices_are_detected_by_vendor_and_class(tmp_path: Path) -> None:
    system = machine(
        tmp_path,
        {"0000:18:00.0": GPU, "0000:18:00.1": AUDIO_OF_A_GPU, "0000:82:00.0": NPU, "0000:03:00.0": NIC_OF_HUAWEI},
    )
    assert vendor_detection.devices_by_vendor(system) == {"nvidia": ["0000:18:00.0"], "ascend": ["0000:82:00.0"]}


def test_devices_absent_or_known_to_driver_only(tmp_path: Path) -> None:
    assert vendor_detection.devices_by_vendor(System(str(tmp_path))) == {}
    (tmp_path / "proc/driver/nvidia/gpus/0000:18:00.0").mkdir(parents=True)
    assert vendor_detection.devices_by_vendor(System(str(tmp_path))) == {"nvidia": ["0000:18:00.0"]}


@pytest.mark.parametrize(("build", "found"), [("y", ["/dev/davinci0", "/dev/davinci10"]), ("n", [])])
def test_npus_on_unified_bus_are_detected_by_nodes(tmp_path: Path, build: str, found: list[str]) -> None:
    put(tmp_path, "/usr/local/Ascend/driver/script/feature.conf", f"FEATURE_DKMS=n\nFEATURE_HD_CONNECT_IS_UB={build}\n")
    for name in ("davinci10", "davinci0", "davinci_manager", "davinci0x", "vdavinci100"):
        put(tmp_path, f"/dev/{name}")
    expected = {"ascend": found} if found else {}
    assert vendor_detection.devices_by_vendor(System(str(tmp_path))) == expected
    # The result is the same while the driver is not loaded and the node has no device nodes.
    for path in (tmp_path / "dev").iterdir():
        path.unlink()
    assert vendor_detection.ascend_facts(System(str(tmp_path)))["unified_bus"] is (build == "y")


def test_ascend_facts_are_read_from_driver_files(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    nothing = vendor_detection.ascend_facts(system)
    assert not nothing["answers"] and "libdcmi.so" in nothing["problem"] and driver_files.MANAGER in nothing["problem"]
    put(tmp_path, "/etc/ascend_install.info", "Driver_Install_Path_Param=/opt/ascend\nDriver_Install_Status=complete\n")
    put(tmp_path, "/opt/ascend/driver/version.info", "Version=24.1.rc1\nascendhal_version=7.35.19\n")
    put(tmp_path, "/opt/ascend/driver/lib64/driver/libdcmi.so")
    assert vendor_detection.ascend_facts(system)["problem"] == (
        "there is no /dev/davinci_manager, so that its kernel module is not loaded"
    )
    put(tmp_path, "/dev/davinci_manager")
    assert vendor_detection.ascend_facts(system) == {
        "answers": True,
        "version": "24.1.rc1",
        "unified_bus": False,
        "library": "/opt/ascend/driver/lib64/driver/libdcmi.so",
        "group": "",
        "uid": -1,
        "gid": -1,
        "container": "",
        "problem": "",
    }
    put(
        tmp_path,
        "/etc/ascend_install.info",
        "Driver_Install_Path_Param=/opt/ascend\nDriver_Install_Status=uncomplete\n",
    )
    assert "'uncomplete'" in vendor_detection.ascend_facts(system)["problem"]


def test_ascend_facts_group_must_exist(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    put(tmp_path, "/etc/ascend_install.info", "UserName=HwHiAiUser\nUserGroup=HwHiAiUser\n")
    assert vendor_detection.ascend_facts(system)["group"] == ""
    put(tmp_path, "/etc/group", "root:x:0:\nHwHiAiUsers:x:998:\n")
    assert vendor_detection.ascend_facts(system)["group"] == ""
    put(tmp_path, "/etc/group", "root:x:0:\nHwHiAiUser:x:999:\n")
    assert vendor_detection.ascend_facts(system)["group"] == "HwHiAiUser"


def test_ascend_facts_numbers_of_the_drivers_user(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    put(tmp_path, "/etc/ascend_install.info", "UserName=HwHiAiUser\nUserGroup=HwHiAiUser\n")
    put(tmp_path, "/etc/passwd", "root:x:0:0::/root:/bin/sh\n")
    found = vendor_detection.ascend_facts(system)
    assert (found["uid"], found["gid"]) == (-1, -1)
    put(tmp_path, "/etc/passwd", "HwHiAiUser:x:990:991::/:/bin/false\n")
    found = vendor_detection.ascend_facts(system)
    assert (found["uid"], found["gid"]) == (990, 991)


def test_ascend_facts_alternative_library_path(tmp_path: Path) -> None:
    put(tmp_path, "/usr/local/dcmi/libdcmi.so")
    put(tmp_path, "/dev/davinci_manager")
    found = vendor_detection.ascend_facts(System(str(tmp_path)))
    assert found["answers"] and found["library"] == "/usr/local/dcmi/libdcmi.so" and found["version"] == ""


def test_vendor_facts_match_all_backends() -> None:
    assert {vendor: create(vendor).facts for vendor in BACKENDS} == VENDOR_FACTS


@pytest.mark.parametrize("plugin", sorted((ROOT / "plugins/filter").glob("*.py")), ids=lambda path: path.stem)
def test_filters_do_not_import_backends(plugin: Path) -> None:
    """Ansible loads all filters of the collection in each task that uses one of them: filters import no backend."""
    name = f"ansible_collections.dra.accelerators.plugins.filter.{plugin.stem}"
    program = f"import sys, {name}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert [module for module in done.stdout.split() if re.fullmatch(r"ansible_collections\..*\.backend", module)] == []


def test_vendor_facts_filter() -> None:
    facts = VendorFacts().filters()["vendor_facts"]
    assert [each["driver_name"] for each in facts(["ascend", "nvidia", "ascend"])] == [
        "npu.huawei.com",
        "gpu.nvidia.com",
    ]
    assert facts(["nvidia"])[0]["manager_labels"] == ["nvidia.com/mig.config"] and facts([]) == []
    for wrong in (["amd"], "nvidia"):
        with pytest.raises(AnsibleFilterError, match="vendor_facts: "):
            facts(wrong)
    claim = NpuClaim().filters()["npu_claim"]
    spec = claim("4", prefer=["same-ring", "any"], selectors=["true"], whole="no")
    (request,) = spec["devices"]["requests"]
    assert [each["name"] for each in request["firstAvailable"]] == ["same-ring", "any"]
    assert all(each["selectors"] == [{"cel": {"expression": "true"}}] for each in request["firstAvailable"])
    assert spec["devices"]["constraints"] == [
        {"requests": ["npus/same-ring"], "matchAttribute": "npu.huawei.com/hccsRing"}
    ]
    # The example equals the output of the filter.
    (template, *_pods) = yaml.safe_load(EXAMPLE.read_text("utf-8"))["items"]
    assert template["spec"]["spec"] == claim(2)
    for name, chips, near in (("same-card-pair", 2, "same-card"), ("same-ring-four", 4, "same-ring")):
        (strict, *_pods) = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text("utf-8"))["items"]
        assert strict["spec"] == claim(chips, prefer=[near]), name
    for arguments in ((0,), ("many",), (True,), (2, "npu.huawei.com", "any"), (2, "npu.huawei.com", ["near"])):
        with pytest.raises(AnsibleFilterError, match="npu_claim: "):
            claim(*arguments)
