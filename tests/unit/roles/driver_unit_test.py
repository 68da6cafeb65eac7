# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The unit of the role dra_driver: the exposure of the service on each kind of node, computed by systemd."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_driver"
#: The documented maximum exposure of the driver's unit, out of ten (docs/security.md).
EXPOSURE = 3.0
UNITS = ("dra-accelerators-driver.service", "dra-accelerators-relief.service")
READ = ", ".join(f"'{unit}': lookup('ansible.builtin.template', '{unit}.j2')" for unit in UNITS)
TOLD = f"{{{{ {{{READ}}} | to_json | b64encode }}}}"
MACHINES = [{"match": {}, "mode": "dynamic", "passthrough": True}]


def host(*vendors: str, **more: Any) -> dict[str, Any]:
    """Return the variables of a host with known facts."""
    return {
        "ansible_managed": "written",
        "accelerator_vendors": ["nvidia", "ascend"],
        "dra_driver_node_name": "n",
        "dra_driver_release": "0.1.0-1a2b3c4d",
        "dra_driver_environment": "0123456789ab",
        "dra_driver_cluster_info": {"nodes": {"n": {"labels": {}}}},
        "dra_driver_node_info": {
            "driver": {"configuration": []},
            "ascend": {"group": "HwHiAiUser"},
            "devices": {vendor: ["0000:18:00.0"] for vendor in vendors},
        },
        **more,
    }


#: The nodes, each with a line that only its unit has.
HOSTS = {
    "gpus": (host("nvidia"), "CapabilityBoundingSet=CAP_SYS_ADMIN CAP_MKNOD"),
    "npus": (host("ascend"), "SupplementaryGroups=HwHiAiUser"),
    "machines": (
        host("nvidia", dra_driver_layout=MACHINES),
        "CapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH",
    ),
    "plugin": (
        host("nvidia", dra_driver_kubelet_interface="device-plugin"),
        "ReadWritePaths=/var/lib/kubelet/device-plugins",
    ),
    "both": (host("nvidia", "ascend", dra_driver_layout=MACHINES), "ReadWritePaths=/sys/bus/pci/drivers /sys/devices"),
}


def test_unit_exposure_is_within_the_limit_on_every_kind_of_node(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    hosts = {name: {**defaults, **variables} for name, (variables, _line) in HOSTS.items()}
    played = play(tmp_path, [read, {"ansible.builtin.debug": {"msg": TOLD}}], hosts)
    assert set(played.messages) == set(HOSTS), played.output
    found = {}
    for name, units in played.messages.items():
        assert set(units) == set(UNITS)
        for unit, text in units.items():
            assert HOSTS[name][1] in text.splitlines()
            found[name, unit] = exposure(tmp_path / name / unit, text)
    assert max(found.values()) <= EXPOSURE, found


def exposure(path: Path, text: str) -> float:
    """Return the exposure of a unit file, from 0 to 10, without installing it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    words = ("systemd-analyze", "security", "--offline=true", "--no-pager", str(path))
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (number,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", output)
    return float(number)
