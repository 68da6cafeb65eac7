#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_fabric_manager
version_added: 0.1.0
short_description: Install or remove NVIDIA's fabric manager, and NVLSM and IMEX with it, at the driver's version
description:
  - Installs the fabric manager where the node has NVSwitches, at exactly the version of its driver, has it run, and waits until all GPUs
    have joined the fabric and are healthy in it, as NVML tells it. A node without NVSwitches gets nothing, and RV(reason) says so.
  - Installs NVLSM with it where the switches are such that it manages, and IMEX where that is asked for.
  - A fabric manager that does not come to work is taken back.
  - M(dra.accelerators.nvidia_driver) exchanges these packages together with the driver, and brings them back with it. This module needs no
    run before that, and after it one to see that the fabric works.
notes:
  - Needs root on the node, apt, dnf 4 or zypper with their programs, and systemd.
  - What NVML tells is asked through its Python binding where that can be imported, and else through C(nvidia-smi).
  - GPUs of the generation of Ampere do not tell. There the unit that runs is the proof.
  - While a fabric manager is exchanged no program can begin to use GPUs, and on boards with NVSwitches of the generation of Ampere those that run
    are ended by default. So claims and processes are refused, and named.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._packages
attributes:
  check_mode:
    support: full
    details:
      - Claims and processes in the way, and a driver that is missing, are returned and no failure. A real run refuses then.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  state:
    description:
      - V(present) has the packages and units be what the node needs.
      - V(absent) removes what this module has installed. Where somebody else had installed a version before, that one comes back.
    type: str
    choices: [present, absent]
    default: present
  manager:
    description: Whether the fabric manager is installed. V(auto) does so where the node has NVSwitches.
    type: str
    choices: [auto, always, never]
    default: auto
  subnet_manager:
    description: Whether NVLSM is installed with it. V(auto) does so where the node has NVSwitches that show on no PCI bus, as beside Blackwell GPUs.
    type: str
    choices: [auto, always, never]
    default: auto
  imex:
    description:
      - Whether IMEX is installed, for GPUs whose fabric joins several nodes.
      - V(installed) has its unit switched off and masked, as drivers that start it for each claim want it.
      - V(enabled) has it run, by the configuration in C(/etc/nvidia-imex), which is not this module's, and waits until C(nvidia-imex-ctl -q) says
        C(READY). That needs its command service (C(IMEX_CMD_ENABLED=1)).
    type: str
    choices: [none, installed, enabled]
    default: none
  driver_version:
    description: The driver's version. Empty takes that of the driver that is installed.
    type: str
    default: ""
  fabric_timeout:
    description: How many seconds GPUs may take to join the fabric, and then IMEX to be ready.
    type: int
    default: 180
  services:
    description: Units that have GPUs open and do not stand in the way.
    type: list
    elements: str
    default:
      - dra-accelerators-driver.service
      - nvidia-dcgm.service
      - nvsm.service
      - nvidia-imex.service
      - nvidia-fabricmanager.service
      - nvidia-persistenced.service
  state_path:
    description: Where the node driver keeps its prepared claims. Empty looks at none.
    type: str
    default: /var/lib/kubelet/plugins/gpu.nvidia.com/state.db
  interpreter:
    description: A Python interpreter on the node that has NVML's binding, for nodes where Ansible's has none.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
seealso:
  - module: dra.accelerators.nvidia_driver
"""

EXAMPLES = r"""
- name: Have a fabric manager where the node needs one, from a source that the node knows
  dra.accelerators.nvidia_fabric_manager: {}

- name: Have IMEX ready for claims that start it, from files
  dra.accelerators.nvidia_fabric_manager:
    imex: installed
    files: [/srv/packages/nvidia-imex_580.95.05-1_amd64.deb]

- name: Remove it
  dra.accelerators.nvidia_fabric_manager:
    state: absent
"""

RETURN = r"""
needs:
  description: Which packages the node gets, by their plain names.
  returned: success
  type: list
  elements: str
  sample: [nvidia-fabricmanager]
reason:
  description: Why.
  returned: success
  type: str
  sample: "The node has 4 NVSwitches on the PCI bus (0000:05:00.0, 0000:06:00.0, 0000:07:00.0, 0000:08:00.0)"
driver_version:
  description: The version that counts; empty where there is no driver.
  returned: success
  type: str
  sample: 580.95.05
fabric:
  description:
    - How far each GPU is on its way into the fabric, and how well it is there, by its UUID. Empty where nothing was asked.
    - One with limited capacity is warned of. An unhealthy one is a failure, and the error says what is wrong.
  returned: success
  type: dict
  sample: {GPU-8a9b4ccd-3f65-6c0f-9a5d-6f8ac9b5a7b1: has joined}
steps:
  description: What was done, or would be in check mode, in words.
  returned: success
  type: list
  elements: str
  sample: ["install the fabric manager 580.95.05: nvidia-fabricmanager", switch nvidia-fabricmanager.service on]
changes:
  description: What the package manager did, or would do, package by package.
  returned: success
  type: list
  elements: str
  sample: [install nvidia-fabricmanager 580.95.05-1]
lacking:
  description: In check mode, what stands against it by C(driver), C(nvml) and C(hold), with a sentence for each. A real run refuses then.
  returned: success
  type: dict
  sample: {}
in_the_way:
  description: Who has GPUs of the node while a fabric manager would be exchanged. A real run refuses.
  returned: success
  type: dict
  contains:
    claims:
      description: Prepared claims.
      returned: success
      type: list
      elements: str
      sample: [team-a/training]
    processes:
      description: Processes that have a GPU's node open.
      returned: success
      type: list
      elements: str
      sample: [4711 (python3)]
    pods:
      description: The pods of these claims and processes, as far as the node knows them.
      returned: success
      type: list
      elements: str
      sample: [team-a/training-0]
settled:
  description:
    - Whether there is nothing to do for this module, so that after a look in check mode no real run is needed.
    - False also where GPUs have not joined the fabric yet, or not well, where IMEX has to say that it is ready, and where the machine
      has to be started again, so that a real run waits for them.
  returned: success
  type: bool
  sample: true
left:
  description: With O(state=absent), packages that stay because somebody else has installed them.
  returned: success
  type: list
  elements: str
  sample: []
before:
  description: What was there before.
  returned: success
  type: dict
  contains: &there
    version:
      description: The version; empty for none.
      returned: success
      type: str
      sample: 580.95.05
    packages:
      description: The packages with their versions.
      returned: success
      type: dict
      sample: {nvidia-fabricmanager: 580.95.05-1}
    units:
      description: Which of their units are started at boot.
      returned: success
      type: list
      elements: str
      sample: [nvidia-fabricmanager.service]
after:
  description: What is there afterwards, or would be in check mode.
  returned: success
  type: dict
  contains: *there
reboot_required:
  description:
    - Whether the driver that the kernel has loaded is another one than the one installed, so that the fabric manager, or IMEX, is switched on and
      not started yet. Nothing of it is proved then.
  returned: success
  type: bool
  sample: false
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: fabric
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils import _nvidia_record
from ansible_collections.dra.accelerators.plugins.module_utils._driver_install import is_running, text_or_none
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_fabric import (
    ENABLED,
    MANAGER_UNIT,
    Needs,
    ask,
    driver_version,
    group_of,
    loaded_version,
    needs_of,
    users_of,
    wait,
    wait_ready,
)
from ansible_collections.dra.accelerators.plugins.module_utils._package_group_module import bring, options_of
from ansible_collections.dra.accelerators.plugins.module_utils._package_options import hide_passwords, package_spec
from ansible_collections.dra.accelerators.plugins.module_utils._package_port import PackageProblem
from ansible_collections.dra.accelerators.plugins.module_utils._package_tools import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.switches import (
    Joining,
    not_joined,
    switches,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

SERVICES = [
    "dra-accelerators-driver.service",
    "nvidia-dcgm.service",
    "nvsm.service",
    "nvidia-imex.service",
    "nvidia-fabricmanager.service",
    "nvidia-persistenced.service",
]
NOTHING: dict[str, Any] = {
    "changed": False,
    "steps": [],
    "changes": [],
    "in_the_way": {"claims": [], "processes": [], "pods": []},
    "settled": True,
    "left": [],
    "before": {"version": "", "packages": {}, "units": []},
    "after": {"version": "", "packages": {}, "units": []},
    "diff": [],
}


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    choice: dict[str, Any] = {"type": "str", "choices": ["auto", "always", "never"], "default": "auto"}
    return {
        **package_spec(),
        **INTERPRETER_OPTION,
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "manager": choice,
        "subnet_manager": choice,
        "imex": {"type": "str", "choices": ["none", "installed", "enabled"], "default": "none"},
        "driver_version": {"type": "str", "default": ""},
        "fabric_timeout": {"type": "int", "default": 180},
        "services": {"type": "list", "elements": "str", "default": SERVICES},
        "state_path": {"type": "str", "default": "/var/lib/kubelet/plugins/gpu.nvidia.com/state.db"},
    }


def lacking(system: System, needs: Needs, version: str, *, binding: bool, loaded: bool) -> dict[str, str]:
    """Return what the node has not that this cannot be done without, with a sentence for each."""
    found = {}
    if not version:
        found["driver"] = (
            f"The node gets {' and '.join(needs.words())}, which have to have the driver's exact version, and no driver is installed. "
            "Install one first, as the role nvidia_driver does, or set driver_version."
        )
    if needs.manager and loaded and not binding and not system.finds("nvidia-smi"):
        found["nvml"] = (
            "Whether GPUs join the fabric NVML alone tells, and there is neither its Python binding nor nvidia-smi on the node. "
            "The role python_environment installs the one, the driver's packages bring the other."
        )
    return found


def work(module: AnsibleModule) -> dict[str, Any]:
    """Bring the fabric manager to the wanted state; returns the module's result. Raises AcceleratorError."""
    hide_passwords(module)
    params, check = module.params, module.check_mode
    system = System()
    is_wanted = params["state"] == "present"
    needs = needs_of(switches(system), manager=params["manager"], subnet=params["subnet_manager"], imex=params["imex"])
    told: dict[str, Any] = {"needs": needs.words(), "reason": needs.reason, "lacking": {}, "fabric": {}}
    if is_wanted and not needs:
        return {**NOTHING, **told, "driver_version": "", "reboot_required": False}
    apt = tool_of(system, timeout=float(params["timeout"]))
    loaded = loaded_version(system)
    record = _nvidia_record.read_record(text_or_none(system, _nvidia_record.RECORD))
    recorded = record.now.version if record.now else ""
    version = params["driver_version"] or driver_version(apt.packages().installed, recorded, loaded)
    runs = bool(version) and version == loaded
    # What is switched off waits for nothing.
    starts = is_wanted and (needs.manager or params["imex"] == ENABLED)
    told.update(driver_version=version, reboot_required=bool(starts and loaded and loaded != version))
    # From here on it may run in another process, which has the binding.
    asks = is_wanted and needs.manager and runs
    binding = asks and find_binding("pynvml", params["interpreter"]) is None
    told["lacking"] = lacking(system, needs, version, binding=binding, loaded=runs) if is_wanted else {}
    if told["lacking"] and not check:
        raise PackageProblem(" ".join(told["lacking"].values()), hint="Nothing was changed.", code=min(told["lacking"]))
    if "driver" in told["lacking"]:
        steps = [f"install {' and '.join(needs.words())} of the driver's version"]
        return {**NOTHING, **told, "changed": True, "settled": False, "steps": steps}

    def prove() -> None:
        if asks:
            wait(lambda: ask(system, binding=binding), params["fabric_timeout"])
        if is_wanted and runs and params["imex"] == ENABLED:
            wait_ready(system, params["fabric_timeout"])

    group = group_of(needs, version=version, loaded=runs, imex=params["imex"])
    result = bring(
        params,
        check=check,
        system=system,
        apt=apt,
        group=group,
        options=options_of(params, apt.places(group.name), version=version),
        users=lambda: users_of(system, state_path=params["state_path"], services=params["services"]),
        proof=prove,
        devices="GPUs",
    )
    if not check and not result["changed"]:
        prove()
    joining: Mapping[str, Joining] = {}
    if asks and "nvml" not in told["lacking"] and is_running(system, MANAGER_UNIT):
        joining = ask(system, binding=binding)
        told["fabric"] = {uuid: each.describe() for uuid, each in joining.items()}
        for uuid, each in joining.items():
            if each.is_limited:
                module.warn(f"{uuid} {each.describe()}")
    result.pop("way_back")
    told["lacking"] = {**result["lacking"], **told["lacking"]}
    joined = not asks or (bool(joining) and not not_joined(joining))
    # A look does not wait for IMEX to say that it is ready, nor for the driver that a start of the machine brings.
    awaited = told["reboot_required"] or (is_wanted and runs and params["imex"] == ENABLED)
    told["settled"] = bool(result["settled"] and joined and not awaited and not told["lacking"])
    return {**result, **told}


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
