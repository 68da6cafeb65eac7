# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The amount of the collection's code that Ansible sends with each module, to each node and for each task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = {path.stem: path for path in (ROOT / "plugins/modules").glob("*.py")}
#: The maximum compressed KiB of the collection's code, by module. Before a new import, look for the name in a smaller
#: file.
BUDGETS = {
    "accelerator_info": 281,
    "accelerator_report": 474,
    "ascend_driver": 126,
    "ascend_runtime": 82,
    "ascend_vnpu": 226,
    "ascend_vnpu_info": 213,
    "bundle_create": 145,
    "bundle_extract": 110,
    "bundle_packages": 55,
    "cdi_spec": 277,
    "claim_config_info": 281,
    "claim_explanation_info": 157,
    "claim_info": 35,
    "cluster_info": 35,
    "containerd_handler": 91,
    "device_class": 30,
    "device_drain": 114,
    "device_plugin_leftovers": 55,
    "device_plugin_migration": 114,
    "device_plugin_migration_info": 103,
    "device_repartition": 348,
    "device_taint": 49,
    "docker_runtime": 44,
    "file_set": 28,
    "fleet_plan": 402,
    "host_answer": 5,
    "node_driver": 115,
    "node_info": 87,
    "node_labels": 297,
    "nvidia_container_toolkit": 132,
    "nvidia_driver": 156,
    "nvidia_fabric_manager": 164,
    "nvidia_gpu": 223,
    "nvidia_mig": 243,
    "nvidia_mig_info": 236,
    "repartition_plan": 326,
    "resource_slices": 47,
    "runtime_cdi": 80,
    "service_account_token": 25,
    "token_audiences_info": 21,
    "webhook_authority": 26,
}
#: A module of one vendor sends no code of another one.
VENDORS = ("ascend", "nvidia")


PACK = """
import datetime, io, json, sys, zipfile
from ansible._internal._ansiballz._builder import ExtensionManager
from ansible.executor.module_common import recursive_finder
from ansible.plugins.loader import init_plugin_loader

init_plugin_loader()
found = {}
for path in sys.argv[1:]:
    name = path.rpartition("/")[2].removesuffix(".py")
    full = f"ansible_collections.dra.accelerators.plugins.modules.{name}"
    packed = io.BytesIO()
    with open(path, "rb") as file, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        data = file.read()
        archive.writestr(f"{full.replace('.', '/')}.py", data)
        recursive_finder(name, full, data, archive, datetime.datetime(2026, 1, 1), ExtensionManager.create({}))
    with zipfile.ZipFile(packed) as archive:
        sizes = {each.filename: each.compress_size for each in archive.infolist()}
        found[name] = {file: size for file, size in sizes.items() if "ansible_collections" in file}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def payloads() -> dict[str, dict[str, int]]:
    """Return the compressed bytes of each file of the collection that Ansible packs with a module, by module.

    A separate process packs them, because this one can have imported the collection without Ansible's loader.
    """
    done = subprocess.run(
        [sys.executable, "-c", PACK, *(str(path) for path in MODULES.values())], check=True, capture_output=True
    )
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def test_each_module_has_a_budget() -> None:
    assert BUDGETS.keys() == MODULES.keys()


@pytest.mark.prove
@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_payload_is_within_its_budget(payloads: dict[str, dict[str, int]], name: str) -> None:
    files = payloads[name]
    largest = sorted(files, key=lambda each: -files[each])[:12]
    size = sum(files.values()) / 1024
    assert size <= BUDGETS[name], f"{name} sends {size:.1f} KiB, the largest files are {largest}"
    others = {vendor for vendor in VENDORS if name.startswith(VENDORS) and not name.startswith(vendor)}
    assert [file for file in files if any(f"/core/vendors/{vendor}/" in file for vendor in others)] == []
