# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Modules use the indices of the node driver, independent of the path of its state directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Node

Json = dict[str, Any]
#: The program of a module's process on a node that has its PCI devices and the driver's libraries in other directories.
#: The kernel module's device nodes are those of a node with GPUs, also on a host without them.
PROGRAM = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
root = "ansible_collections.dra.accelerators.plugins."
importlib.import_module(root + "module_utils.core.host.pci").DEVICES = sys.argv[2]
importlib.import_module(root + "module_utils.core.vendors.nvidia.container.driver_files").LIBRARY_FOLDERS = (sys.argv[3],)
system = importlib.import_module(root + "module_utils.core.host.system")
found = system.System.device_number
nvidia = system.DeviceNumber("c", 195, 0)
system.System.device_number = lambda self, path: nvidia if path.startswith("/dev/nvidia") else found(self, path)
with patch_module_args(json.load(sys.stdin)):
    importlib.import_module(root + "modules." + sys.argv[1]).main()
"""
STATIC = [{"match": {"index": 0}, "mode": "static", "partitions": {"1g.10gb": 1}}]
#: The options with which a module uses the GPU with index 0, and how its answer names this GPU.
MODULES: dict[str, tuple[Json, Callable[[Json], str]]] = {
    "accelerator_info": ({"match": {"index": 0}}, lambda answer: answer["devices"][0]["uuid"]),
    "nvidia_gpu": (
        {"settings": [{"match": {"index": 0}, "power_limit": 500}]},
        lambda answer: answer["devices"][0]["uuid"],
    ),
    "device_repartition": (
        {"layout": STATIC, "former_layout": [], "vendor": ["nvidia"]},
        lambda answer: answer["operations"][0]["devices"][0]["uuid"],
    ),
    "cdi_spec": (
        {"match": {"index": 0}, "names": ["uuid"], "all": False, "vendor": ["nvidia"]},
        lambda answer: next(each["name"] for each in answer["specs"][0]["devices"] if each["name"]),
    ),
}
DRIVER = "plugins/gpu.nvidia.com"


def run(node: Node, devices: Path, name: str, **options: Any) -> Json:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(devices), str(node.folder)],
        input=json.dumps({**options, "_ansible_check_mode": True, "_ansible_diff": False}),
        env=node.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer: Json = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(f"{name} did not answer: {done.stdout}{done.stderr}") from None
    return answer


@pytest.mark.parametrize("name", MODULES)
def test_indices_of_driver_in_other_state_directory_are_used(node: Node, tmp_path: Path, name: str) -> None:
    """The driver has the GPUs in the opposite order: the modules use its indices."""
    gpus = node.module("accelerator_info", {})["devices"]
    devices, kubelet = tmp_path / "devices", tmp_path / "kubelet"
    (kubelet / DRIVER).mkdir(parents=True)
    indices = {gpu["pci_address"]: len(gpus) - 1 - gpu["index"] for gpu in gpus}
    for address in indices:
        (devices / address).mkdir(parents=True)
    numbers = {"version": 1, "indices": indices, "virtual_machines": {}}
    (kubelet / DRIVER / "numbers.json").write_text(json.dumps(numbers))
    options, uuid_of = MODULES[name]
    assert uuid_of(run(node, devices, name, **options)) == gpus[0]["uuid"]
    for where in ({"state_directory": str(kubelet / DRIVER)}, {"kubelet_root": str(kubelet)}):
        answer = run(node, devices, name, **options, **where)
        assert not answer.get("failed"), answer
        assert uuid_of(answer) == gpus[-1]["uuid"], where


def test_state_directory_of_the_store_has_the_indices(node: Node, tmp_path: Path) -> None:
    """Tasks with the path of the store, as in the role nvidia_settings, need no other option."""
    gpus = node.module("accelerator_info", {})["devices"]
    devices = tmp_path / "devices"
    indices = {gpu["pci_address"]: len(gpus) - 1 - gpu["index"] for gpu in gpus}
    (devices / gpus[0]["pci_address"]).mkdir(parents=True)
    numbers = {"version": 1, "indices": indices, "virtual_machines": {}}
    (tmp_path / "numbers.json").write_text(json.dumps(numbers))
    options, uuid_of = MODULES["nvidia_gpu"]
    answer = run(node, devices, "nvidia_gpu", **options, state_path=str(tmp_path / "state.db"))
    assert uuid_of(answer) == gpus[-1]["uuid"]


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"nvidia_gpu"}))
def test_state_directory_for_several_vendors_is_rejected(node: Node, tmp_path: Path, name: str) -> None:
    options = {**MODULES[name][0], "vendor": ["nvidia", "ascend"], "state_directory": str(tmp_path)}
    answer = node.module(name, options)
    assert answer["failed"] and answer["error_code"] == "state-directory"
    assert "nvidia and ascend" in answer["msg"] and "kubelet_root" in answer["msg"]
