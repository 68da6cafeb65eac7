#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_fabric_manager
version_added: 0.1.0
short_description: Install or remove the NVIDIA fabric manager, NVLSM, and IMEX at the version of the driver
description:
  - Installs the fabric manager on a node with NVSwitches, at exactly the version of its driver, and starts it. The module then waits until NVML
    reports that all GPUs have joined the fabric and are healthy. On a node without NVSwitches, it installs nothing and returns the reason in
    RV(reason).
  - Also installs NVLSM if it must manage the switches, and IMEX if O(imex) is set.
  - Rolls back a fabric manager that does not work.
  - M(dra.accelerators.nvidia_driver) replaces these packages together with the driver, and rolls them back with it. Run this module afterwards to
    verify the fabric. A run before it is not necessary.
notes:
  - Requires root on the node, apt, dnf 4 or zypper with their programs, and systemd.
  - Queries NVML through its Python binding if the binding can be imported, and otherwise through C(nvidia-smi).
  - GPUs of the Ampere generation do not report their fabric state. On these nodes, the module only verifies that the unit runs.
  - While a fabric manager is replaced, no program can start to use GPUs. On boards with NVSwitches of the Ampere generation, running programs are
    ended by default. Therefore the module fails and lists the claims and processes that use GPUs.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._packages
attributes:
  check_mode:
    support: full
    details:
      - Check mode reports blocking claims and processes, and a missing driver, and does not fail because of them. A run without check mode fails in
        these cases.
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
      - V(present) installs the packages and configures the units that the node needs.
      - V(absent) removes the packages that this module installed. If another program had installed a version before, the module restores that version.
    type: str
    choices: [present, absent]
    default: present
  manager:
    description: Whether the fabric manager is installed. V(auto) installs it if the node has NVSwitches.
    type: str
    choices: [auto, always, never]
    default: auto
  subnet_manager:
    description: Whether NVLSM is installed with the fabric manager. V(auto) installs it if the node has NVSwitches that are not on a PCI bus, as with
      Blackwell GPUs.
    type: str
    choices: [auto, always, never]
    default: auto
  imex:
    description:
      - Whether IMEX is installed, for GPUs whose fabric spans several nodes.
      - V(installed) disables and masks its unit, as required by drivers that start IMEX for each claim.
      - V(enabled) runs IMEX with the configuration in C(/etc/nvidia-imex), which this module does not write. The module waits until C(nvidia-imex-ctl
        -q) reports C(READY). This requires the command service of IMEX (C(IMEX_CMD_ENABLED=1)).
    type: str
    choices: [none, installed, enabled]
    default: none
  driver_version:
    description: Version of the driver. If empty, the version of the installed driver.
    type: str
    default: ""
  fabric_timeout:
    description: Timeout in seconds for the GPUs to join the fabric, and then for IMEX to be ready.
    type: int
    default: 180
  services:
    description: Units that have GPUs open and do not block a replacement.
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
    description: The node driver's store of prepared claims. If empty, the module checks no claims.
    type: str
    default: /var/lib/kubelet/plugins/gpu.nvidia.com/state.db
  interpreter:
    description: A Python interpreter on the node that can import the NVML binding. The module uses it if the interpreter of Ansible on the node cannot.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
seealso:
  - module: dra.accelerators.nvidia_driver
"""

EXAMPLES = r"""
- name: Install a fabric manager if the node needs one, from a source that is configured on the node
  dra.accelerators.nvidia_fabric_manager: {}

- name: Install IMEX from files, for claims that start it
  dra.accelerators.nvidia_fabric_manager:
    imex: installed
    files: [/srv/packages/nvidia-imex_580.95.05-1_amd64.deb]

- name: Remove the packages
  dra.accelerators.nvidia_fabric_manager:
    state: absent
"""

RETURN = r"""
needs:
  description: The packages that the node needs, by their names without a branch.
  returned: success
  type: list
  elements: str
  sample: [nvidia-fabricmanager]
reason:
  description: The reason for this selection.
  returned: success
  type: str
  sample: "The node has 4 NVSwitches on the PCI bus (0000:05:00.0, 0000:06:00.0, 0000:07:00.0, 0000:08:00.0)"
driver_version:
  description: The driver version that the packages must have. Empty if no driver is installed.
  returned: success
  type: str
  sample: 580.95.05
fabric:
  description:
    - The fabric state and the health of each GPU, by UUID. Empty if the module did not query the fabric.
    - The module warns about a GPU with limited capacity. It fails for an unhealthy GPU, and the error contains the fault.
  returned: success
  type: dict
  sample: {GPU-8a9b4ccd-3f65-6c0f-9a5d-6f8ac9b5a7b1: has joined}
steps:
  description: The completed steps as text. In check mode, the planned steps.
  returned: success
  type: list
  elements: str
  sample: ["install the fabric manager 580.95.05: nvidia-fabricmanager", switch nvidia-fabricmanager.service on]
changes:
  description: The package manager's changes, one entry for each package. In check mode, the planned changes.
  returned: success
  type: list
  elements: str
  sample: [install nvidia-fabricmanager 580.95.05-1]
missing_requirements:
  description: In check mode, the messages for missing requirements, by C(driver), C(nvml) and C(hold). A run without check mode fails in this case.
  returned: success
  type: dict
  sample: {}
blocked_by:
  description: The users of the node's GPUs, if a fabric manager would be replaced. A run without check mode fails if any are listed.
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
      description: Processes with an open device node of a GPU.
      returned: success
      type: list
      elements: str
      sample: [4711 (python3)]
    pods:
      description: The pods of these claims and processes, if the node knows them.
      returned: success
      type: list
      elements: str
      sample: [team-a/training-0]
up_to_date:
  description:
    - Whether the module has nothing to change. If V(true) in check mode, a run without check mode is not needed.
    - Also V(false) if GPUs have not joined the fabric or are unhealthy, if IMEX must report that it is ready, or if a reboot is required. A run
      without check mode then waits for them.
  returned: success
  type: bool
  sample: true
unmanaged:
  description: With O(state=absent), the packages that remain because this module did not install them.
  returned: success
  type: list
  elements: str
  sample: []
before:
  description: The state before the run.
  returned: success
  type: dict
  contains: &there
    version:
      description: The version of the packages. Empty if they are not installed.
      returned: success
      type: str
      sample: 580.95.05
    packages:
      description: The installed packages with their versions.
      returned: success
      type: dict
      sample: {nvidia-fabricmanager: 580.95.05-1}
    units:
      description: The units of these packages that start at boot.
      returned: success
      type: list
      elements: str
      sample: [nvidia-fabricmanager.service]
after:
  description: The state after the run. In check mode, the expected state.
  returned: success
  type: dict
  contains: *there
reboot_required:
  description:
    - Whether the loaded driver differs from the installed driver. The fabric manager or IMEX is then enabled but not started, and the module does not
      verify the fabric.
  returned: success
  type: bool
  sample: false
error_code:
  description: A stable code for the type of the error.
  returned: failure
  type: str
  sample: fabric
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.driver_installation import is_running
from ansible_collections.dra.accelerators.plugins.module_utils._host.single_run import run_alone
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, find_binding
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host import driver_record
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.fabric_packages import (
    ENABLED,
    MANAGER_UNIT,
    Needs,
    driver_version,
    group_of,
    loaded_version,
    needs_of,
    read_join_states,
    users_of,
    wait_for_fabric,
    wait_for_imex,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.argspec import hide_passwords, package_spec
from ansible_collections.dra.accelerators.plugins.module_utils._packages.group_module import apply_group, options_of
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import PackageProblem
from ansible_collections.dra.accelerators.plugins.module_utils._packages.manager_detection import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System, text_or_none
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.fabric.nvswitch import (
    FabricJoinState,
    not_joined,
    switches,
)

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
    "blocked_by": {"claims": [], "processes": [], "pods": []},
    "up_to_date": True,
    "unmanaged": [],
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


def missing_requirements(system: System, needs: Needs, version: str, *, binding: bool, loaded: bool) -> dict[str, str]:
    """Return the missing requirements of the node, with a message for each."""
    found = {}
    if not version:
        found["driver"] = (
            f"The node needs {' and '.join(needs.package_names())} with exactly the version of the driver, and no driver is installed. "
            "Install a driver first, for example with the role nvidia_driver, or set driver_version."
        )
    if needs.manager and loaded and not binding and not system.finds("nvidia-smi"):
        found["nvml"] = (
            "Only NVML reports whether GPUs join the fabric, and the node has neither its Python binding nor nvidia-smi. "
            "The role python_environment installs the binding, and the driver's packages contain nvidia-smi."
        )
    return found


def work(module: AnsibleModule) -> dict[str, Any]:
    """Install or remove the fabric manager, and return the module's result. Raises AcceleratorError."""
    hide_passwords(module)
    params, check = module.params, module.check_mode
    system = System()
    is_wanted = params["state"] == "present"
    needs = needs_of(switches(system), manager=params["manager"], subnet=params["subnet_manager"], imex=params["imex"])
    facts: dict[str, Any] = {
        "needs": needs.package_names(),
        "reason": needs.reason,
        "missing_requirements": {},
        "fabric": {},
    }
    if is_wanted and not needs:
        return {**NOTHING, **facts, "driver_version": "", "reboot_required": False}
    apt = tool_of(system, timeout=float(params["timeout"]))
    loaded = loaded_version(system)
    record = driver_record.read_record(text_or_none(system, driver_record.RECORD))
    recorded = record.now.version if record.now else ""
    version = params["driver_version"] or driver_version(apt.packages().installed, recorded, loaded)
    is_loaded = bool(version) and version == loaded
    # A disabled service needs no reboot.
    starts = is_wanted and (needs.manager or params["imex"] == ENABLED)
    facts.update(driver_version=version, reboot_required=bool(starts and loaded and loaded != version))
    queries_fabric = is_wanted and needs.manager and is_loaded
    # This call can run the module again in another process, which has the binding.
    binding = queries_fabric and find_binding("pynvml", params["interpreter"]) is None
    if is_wanted:
        facts["missing_requirements"] = missing_requirements(system, needs, version, binding=binding, loaded=is_loaded)
    if facts["missing_requirements"] and not check:
        raise PackageProblem(
            " ".join(facts["missing_requirements"].values()),
            hint="Nothing was changed.",
            code=min(facts["missing_requirements"]),
        )
    if "driver" in facts["missing_requirements"]:
        steps = [f"install {' and '.join(needs.package_names())} of the driver's version"]
        return {**NOTHING, **facts, "changed": True, "up_to_date": False, "steps": steps}

    starts_imex = is_wanted and is_loaded and params["imex"] == ENABLED

    def verify() -> None:
        if queries_fabric:
            wait_for_fabric(lambda: read_join_states(system, binding=binding), params["fabric_timeout"])
        if starts_imex:
            wait_for_imex(system, params["fabric_timeout"])

    group = group_of(needs, version=version, loaded=is_loaded, imex=params["imex"])
    result = apply_group(
        params,
        check=check,
        system=system,
        apt=apt,
        group=group,
        options=options_of(params, apt.places(group.name), version=version),
        users=lambda: users_of(system, state_path=params["state_path"], services=params["services"]),
        proof=verify,
        devices="GPUs",
    )
    if not check and not result["changed"]:
        verify()
    states: Mapping[str, FabricJoinState] = {}
    if queries_fabric and "nvml" not in facts["missing_requirements"] and is_running(system, MANAGER_UNIT):
        states = read_join_states(system, binding=binding)
        facts["fabric"] = {uuid: each.describe() for uuid, each in states.items()}
        for uuid, each in states.items():
            if each.is_limited:
                module.warn(f"{uuid} {each.describe()}")
    result.pop("previous_available")
    facts["missing_requirements"] = {**result["missing_requirements"], **facts["missing_requirements"]}
    has_joined = not queries_fabric or (bool(states) and not not_joined(states))
    # IMEX and the driver that a reboot loads are verified only by a run without check mode.
    is_unverified = facts["reboot_required"] or starts_imex
    facts["up_to_date"] = bool(
        result["up_to_date"] and has_joined and not is_unverified and not facts["missing_requirements"]
    )
    return {**result, **facts}


def main() -> None:
    """Entry point."""
    run_alone(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work, System())


if __name__ == "__main__":
    main()
