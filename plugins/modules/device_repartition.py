#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_repartition
version_added: 0.1.0
short_description: Plan the repartitioning of a node's devices and record its progress
description:
  - With O(state=planned), the module returns the operations that change the devices of a node to a layout. An operation is one change of a
    single device, or of devices that are reset together. It contains the partitions to delete, the claims that hold them, and the published
    devices that must not be allocated during the change. The module changes nothing.
  - With O(state=present), the module records in the state directory of the node driver that an operation or its next step has begun. From then
    on, the driver does not prepare claims on these devices. It publishes them as before, and serves all other devices.
  - With O(state=absent), the module removes the record. The driver then immediately scans the devices and publishes their current state.
  - The playbook C(dra.accelerators.repartition) runs all steps in order. M(dra.accelerators.nvidia_mig) and M(dra.accelerators.ascend_vnpu) change
    the devices. M(dra.accelerators.device_drain) evicts pods.
notes:
  - Requires root on the node.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._node_driver
  - dra.accelerators._nvml
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details:
      - With O(state=planned), the diff has one entry for each device that changes. With other states, it shows the record before and after.
  idempotent:
    support: full
    details:
      - The module rewrites an identical record only if more than a tenth of O(seconds) has passed.
  platform:
    support: full
    platforms: linux
options:
  state:
    description:
      - V(planned) returns the plan. V(present) writes the record of an operation, and V(absent) removes it.
    type: str
    choices: [planned, present, absent]
    default: planned
  layout:
    description:
      - The rules of the desired layout, as in M(dra.accelerators.nvidia_mig). Required for O(state=planned).
    type: list
    elements: dict
  former_layout:
    description:
      - The current rules of the node driver. By default, the module reads them from the files of the roles M(dra.accelerators.nvidia_mig) and
        M(dra.accelerators.ascend_vnpu).
    type: list
    elements: dict
  pods:
    description:
      - The number of pods of each claim, by the claim's C(namespace/name). Other claims count as one pod.
    type: dict
    default: {}
  prefer:
    description:
      - The first criterion if there are several ways to reach a layout. V(pods) minimizes the affected pods, and then the deleted partitions.
        V(partitions) minimizes the deleted partitions, and then the affected pods.
    type: str
    choices: [pods, partitions]
    default: pods
  reset:
    description:
      - Whether to reset devices whose mode changes only by a reset. If it is not set, the module rejects an operation that needs a reset.
    type: str
    choices: [never, when_needed]
  settings:
    description:
      - Rules of settings, as in M(dra.accelerators.nvidia_gpu). The plan contains only settings that require an unused GPU. These are C(ecc), which
        needs a reset, and a C(compute_mode) other than V(Default). The module ignores all other settings.
    type: list
    elements: dict
    default: []
  boot_settings:
    description:
      - The current rules of settings for the next boot. By default, the module reads them from the file of the role
        P(dra.accelerators.nvidia_settings#role).
    type: list
    elements: dict
  settings_reset:
    description:
      - Whether to reset GPUs for a change of C(ecc). If it is not set, the module rejects such an operation. With V(never) the
        plan does not contain ECC, and the change takes effect at the next reboot.
    type: str
    choices: [never, when_needed]
  vendor:
    description: The vendors of the devices, C(nvidia) and C(ascend). By default, all vendors that have devices on the node.
    type: list
    elements: str
    choices: [ascend, nvidia]
  driver:
    description: The name of the driver that publishes the devices. Required for O(state=present) and O(state=absent).
    type: str
  operation:
    description:
      - The name of the operation. Required for O(state=present).
      - With O(state=absent), the module removes only the record of this operation. If it is not set, the module removes any record.
    type: str
  devices:
    description: The UUIDs of the devices. Required for O(state=present).
    type: list
    elements: str
  names:
    description: For the record, the names of published devices that must not be allocated during the operation.
    type: list
    elements: str
    default: []
  wanted:
    description: For the record, the rules of the desired layout of these devices.
    type: list
    elements: dict
    default: []
  former:
    description:
      - For the record, the rules of the previous layout of these devices. An existing record of the same operation keeps its rules.
    type: list
    elements: dict
    default: []
  former_settings:
    description:
      - The rules of the settings that the operation changes, with their previous values, as in RV(operations[].former_settings). By default, the
        record of the same operation keeps its rules.
    type: list
    elements: dict
  former_boot_settings:
    description:
      - The previous rules of settings for the next boot of these devices, as in RV(operations[].former_boot_settings). By default, the record of
        the same operation keeps its rules.
    type: list
    elements: dict
  step:
    description: The next step of the operation.
    type: str
    choices: [draining, applying, publishing, reverting]
    default: draining
  reason:
    description:
      - The failed step and the reason, as text, for an operation that is rolled back (O(step=reverting)) or ends without its new layout
        (O(state=absent)).
      - The node driver creates an Event on the Node for each step. The Event contains this text.
    type: str
    default: ""
  going:
    description:
      - The partitions to delete, as in RV(operations[].going). With O(step=applying), the module waits until the node driver has unprepared every
        claim on them, according to the driver's store.
      - The module does not use the claims in the API server for this. The claims of pods that are deleted by force are released there before
        their containers have ended.
    type: list
    elements: dict
    default: []
  restarts:
    description: Whether all use of the devices ends, as in RV(operations[].restarts). If it is true, O(going) applies to every claim on the devices.
    type: bool
    default: false
  unprepare_timeout:
    description: The maximum wait for unprepared claims, in seconds. After that, the module fails and returns the claims. It does not begin the step.
    type: int
    default: 300
  seconds:
    description:
      - The validity of the record from now on, in seconds, at most six hours. After this time, the driver prepares claims on the devices again, for
        example after a killed run.
    type: int
    default: 1800
seealso:
  - module: dra.accelerators.device_drain
  - module: dra.accelerators.nvidia_mig
  - module: dra.accelerators.ascend_vnpu
"""

EXAMPLES = r"""
- name: Plan the change to a new layout
  dra.accelerators.device_repartition:
    layout:
      - match: {index: 0}
        mode: static
        partitions: {3g.40gb: 1, 2g.20gb: 1, 1g.10gb: 2}
  register: planned

- name: Record the start of an operation for 15 minutes
  dra.accelerators.device_repartition:
    state: present
    driver: gpu.nvidia.com
    operation: "{{ planned.operations[0].operation }}"
    devices:
      - GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
    wanted:
      - match: {uuid: GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55}
        mode: static
        partitions: [{profile: 3g.40gb, placement: 4}]
    former:
      - match: {uuid: GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55}
        mode: whole
    step: draining
    seconds: 900

- name: Remove the record of an interrupted run
  dra.accelerators.device_repartition:
    state: absent
    driver: gpu.nvidia.com
"""

RETURN = r"""
operations:
  description: The operations in order. The list is empty if the devices have the layout.
  returned: O(state=planned)
  type: list
  elements: dict
  contains:
    operation:
      description: The name of the operation. It is the same in each run for the same devices.
      type: str
      returned: success
      sample: repartition-4c1f0a6e2b7d
    vendor:
      description: The vendor of the devices.
      type: str
      returned: success
      sample: nvidia
    driver:
      description: The name of the driver that publishes the devices.
      type: str
      returned: success
      sample: gpu.nvidia.com
    devices:
      description: The devices, each with C(index), C(uuid), C(product), C(pci_address), and C(vendor).
      type: list
      elements: dict
      returned: success
      sample:
        - index: 0
          uuid: GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
          product: NVIDIA H100 80GB HBM3
          pci_address: 0000:1b:00.0
          vendor: nvidia
    steps:
      description: The steps on the devices, each with C(step), the parameters of the step, and a C(description).
      type: list
      elements: dict
      returned: success
      sample:
        - step: create_partition
          device_uuid: GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
          profile: 2g.20gb
          start: 0
          size: 2
          description: create 2g.20gb at 0:2 on GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
    going:
      description:
        - The partitions to delete, each with C(device_uuid), C(profile), C(start), C(size), C(uuid), and the C(claims) that hold it. The node driver
          itself deletes partitions that it created for a claim when the claim ends.
      type: list
      elements: dict
      returned: success
      sample: []
    kept:
      description: The partitions that stay, in the same format without claims.
      type: list
      elements: dict
      returned: success
      sample: []
    claims:
      description: The claims that must end first, as C(namespace/name).
      type: list
      elements: str
      returned: success
      sample: ["team-a/training"]
    names:
      description: All names under which the changed devices and partitions can be published.
      type: list
      elements: str
      returned: success
      sample: [gpu-0]
    wanted:
      description: The rules of the desired layout for only these devices, with explicit placements.
      type: list
      elements: dict
      returned: success
      sample: []
    former:
      description: The rules that restore the layout from before the operation. If an earlier run began the operation, they restore the layout before that run.
      type: list
      elements: dict
      returned: success
      sample: []
    resets:
      description: Whether devices are reset.
      type: bool
      returned: success
      sample: false
    restarts:
      description: Whether all use of the devices ends, including partitions that are created again.
      type: bool
      returned: success
      sample: false
    settings:
      description: The rules of the settings that the operation changes, for M(dra.accelerators.nvidia_gpu).
      type: list
      elements: dict
      returned: success
      sample: [{match: {uuid: [GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55]}, ecc: false}]
    former_settings:
      description: The rules that restore the previous settings, including settings that an interrupted run of the operation has changed.
      type: list
      elements: dict
      returned: success
      sample: [{match: {uuid: [GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55]}, ecc: true}]
    emptied:
      description: If settings change, rules that delete all partitions of the devices and keep the mode.
      type: list
      elements: dict
      returned: success
      sample: []
    resumes:
      description: Whether an earlier run has begun the operation.
      type: bool
      returned: success
      sample: false
    tells_driver:
      description: Whether the node driver needs the new rules, because they change the devices that it publishes.
      type: bool
      returned: success
      sample: false
    driver_layout_before:
      description: The layout of the node before the operation, for the node driver and for the next boot.
      type: list
      elements: dict
      returned: success
      sample: []
    driver_layout:
      description: The layout of the node after the operation.
      type: list
      elements: dict
      returned: success
      sample: []
    former_boot_settings:
      description: If settings change, the previous rules of settings for the next boot of the devices, each for one device.
      type: list
      elements: dict
      returned: success
      sample: [{match: {uuid: [GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55]}, ecc: true, power_limit: 500}]
    boot_settings_before:
      description: If settings change, the rules of settings for the next boot before the operation.
      type: list
      elements: dict
      returned: success
      sample: []
    boot_settings:
      description: If settings change, these rules after the operation. Devices of later operations keep their previous rules.
      type: list
      elements: dict
      returned: success
      sample: [{match: {uuid: [GPU-0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55]}, ecc: false}]
unfinished:
  description: The records of operations that an earlier run has begun and not ended, with C(driver), C(operation), C(devices), C(step), and other keys.
  returned: O(state=planned)
  type: list
  elements: dict
  sample: []
untouched:
  description: The devices that no operation changes.
  returned: O(state=planned)
  type: list
  elements: dict
  sample: []
vendors:
  description: The vendors of the scanned devices.
  returned: O(state=planned)
  type: list
  elements: str
  sample: [nvidia]
rules_differ:
  description: Whether the current rules of the driver differ from O(layout), also if there is no operation.
  returned: O(state=planned)
  type: bool
  sample: true
unmatched:
  description: The devices without a matching rule.
  returned: O(state=planned)
  type: list
  elements: str
  sample: []
unread:
  description: The devices that cannot be read. They do not change.
  returned: O(state=planned)
  type: list
  elements: str
  sample: []
before:
  description: The current state of the devices, each with C(device), C(uuid), C(mode), and C(partitions).
  returned: O(state=planned)
  type: list
  elements: dict
  sample: []
after:
  description: The state of the devices after all operations, in the same format.
  returned: O(state=planned)
  type: list
  elements: dict
  sample: []
record:
  description: The record of the operation. With O(state=absent), the record before the run.
  returned: O(state=present) and O(state=absent)
  type: dict
  sample: {}
claims:
  description: The claims that the node driver still has prepared on the partitions to delete.
  returned: failure with RV(error_code=still-prepared)
  type: list
  elements: str
  sample: ["team-a/training"]
error_code:
  description:
    - A stable error code, such as V(reset-needs-consent), V(does-not-fit), V(in-use), V(still-prepared), V(other-operation),
      or V(several).
  returned: failure
  type: str
  sample: does-not-fit
errors:
  description: All errors, each with C(code), C(message), C(hint), and the affected objects.
  returned: when the layout is refused
  type: list
  elements: dict
  sample:
    - {code: does-not-fit, message: it does not fit, hint: "", blockers: []}
"""

import json
from collections.abc import Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.state_directory import (
    STATE_DIRECTORY_OPTIONS,
    check_one_vendor,
    state_directory_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import scan_node
from ansible_collections.dra.accelerators.plugins.module_utils._layout.operation_record import (
    delete_record,
    write_record,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.repartition_node import (
    Vendor,
    difference,
    node_plan,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import (
    INTERPRETER_OPTION,
    fail_all,
    find_binding,
    run,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Device
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.placement import PODS, PREFERENCES
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition import record as records
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition.settings_changes import (
    IdleSettings,
    idle_settings,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings.knobs import COMPUTE_MODE, ECC
from ansible_collections.dra.accelerators.plugins.module_utils.core.settings.settings_plan import parse_settings
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.protocol import Backend
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.registry import BACKENDS, vendors_there

PLANNED = "planned"
PRESENT = "present"
ABSENT = "absent"
#: The file with the settings for the next boot.
SETTINGS_FILES = ("/etc/dra-accelerators/settings.json",)
#: Files in which the roles write the layout for the next boot. Each file has the complete layout.
LAYOUT_FILES = ("/etc/dra-accelerators/layout.json", "/etc/dra-accelerators/layout-ascend.json")
CONSTRAINTS: dict[str, Any] = {
    "required_if": [
        ("state", PLANNED, ["layout"]),
        ("state", PRESENT, ["driver", "operation", "devices"]),
        ("state", ABSENT, ["driver"]),
    ]
}


def argument_spec() -> dict[str, Any]:
    # The core validates the keys of a rule, and names the rule in errors. The node driver uses the same code.
    rules: dict[str, Any] = {"type": "list", "elements": "dict"}
    return {
        **INTERPRETER_OPTION,
        "state": {"type": "str", "choices": [PLANNED, PRESENT, ABSENT], "default": PLANNED},
        "layout": rules,
        "former_layout": rules,
        "pods": {"type": "dict", "default": {}},
        "prefer": {"type": "str", "choices": list(PREFERENCES), "default": PODS},
        "reset": {"type": "str", "choices": ["never", "when_needed"]},
        "settings": {**rules, "default": []},
        "boot_settings": rules,
        "settings_reset": {"type": "str", "choices": ["never", "when_needed"]},
        "vendor": {"type": "list", "elements": "str", "choices": sorted(BACKENDS)},
        **STATE_DIRECTORY_OPTIONS,
        "driver": {"type": "str"},
        "operation": {"type": "str"},
        "devices": {"type": "list", "elements": "str"},
        "names": {"type": "list", "elements": "str", "default": []},
        "wanted": {**rules, "default": []},
        "former": {**rules, "default": []},
        "former_settings": rules,
        "former_boot_settings": rules,
        "step": {"type": "str", "choices": list(records.STEPS), "default": records.DRAINING},
        "reason": {"type": "str", "default": ""},
        "going": {**rules, "default": []},
        "restarts": {"type": "bool", "default": False},
        "unprepare_timeout": {"type": "int", "default": 300},
        "seconds": {"type": "int", "default": 1800},
    }


def current_rules(
    system: System, given: list[dict[str, Any]] | None, paths: tuple[str, ...], roles: str, option: str
) -> list[dict[str, Any]]:
    """Return the given rules, or those in the first existing file, or an empty list. Raises AcceleratorError."""
    if given is not None:
        return given
    for path in paths:
        if system.exists(path):
            try:
                found = json.loads(system.read_text(path))
            except ValueError as error:
                raise AcceleratorError(
                    f"{path} cannot be read: {error}",
                    hint=f"Run the playbook dra.accelerators.site, which writes it ({roles}), or set {option}.",
                    code="layout-unreadable",
                ) from error
            return list(found)
    return []


def plan_operations(module: AnsibleModule, system: System) -> dict[str, Any]:
    """Scan the devices and plan the operations, without any change."""
    params = module.params
    rules = parse_rules(params["layout"])
    roles = "roles nvidia_mig and ascend_vnpu"
    documents = current_rules(system, params["former_layout"], LAYOUT_FILES, roles, "former_layout")
    vendors = tuple(dict.fromkeys(params["vendor"] or vendors_there(system)))
    check_one_vendor(params, vendors)
    if "nvidia" in vendors:
        # A missing binding is reported as an unavailable driver when the backend opens.
        find_binding("pynvml", params["interpreter"])
    found = []
    settings = parse_settings(params["settings"])
    boot_settings: list[dict[str, Any]] = []
    if settings:
        boot_settings = current_rules(
            system, params["boot_settings"], SETTINGS_FILES, "role nvidia_settings", "boot_settings"
        )
    for vendor in vendors:
        backend = BACKENDS[vendor](system)
        directory = state_directory_of(params, backend.driver_name)
        record = records.read(system, directory)
        backend.open()
        try:
            scan = scan_node(backend, f"{directory}/state.db")
            found.append(
                Vendor(
                    backend, scan, record, changes_for_unused_devices(backend, scan.devices, params) if settings else {}
                )
            )
        finally:
            backend.close()
    pods = {str(claim): int(number) for claim, number in params["pods"].items()}
    plan, errors = node_plan(
        found,
        rules,
        parse_rules(documents),
        documents,
        pods=pods,
        reset=params["reset"],
        prefer=params["prefer"],
        settings_reset=params["settings_reset"],
        settings=params["settings"],
        boot_settings=boot_settings,
    )
    if errors:
        fail_all(module, errors)
    return {
        "changed": False,
        **plan,
        "vendors": list(vendors),
        "rules_differ": documents != params["layout"],
        "diff": difference(plan["before"], plan["after"]),
    }


def changes_for_unused_devices(
    backend: Backend, devices: Sequence[Device], params: dict[str, Any]
) -> dict[str, IdleSettings]:
    """Return the setting changes that need an unused device, by device UUID. Raises AcceleratorError."""
    rules = parse_settings(params["settings"])
    found = {}
    for device in devices:
        names = (ECC, COMPUTE_MODE) if params["settings_reset"] != "never" else (COMPUTE_MODE,)
        knobs = backend.knobs(device.uuid, names)
        change = idle_settings(device, knobs, rules)
        if change is not None:
            found[device.uuid] = change
    return found


def work(module: AnsibleModule) -> dict[str, Any]:
    params, system = module.params, System()
    if params["state"] == PLANNED:
        return plan_operations(module, system)
    directory = state_directory_of(params, params["driver"])
    if params["state"] == PRESENT:
        return write_record(module, system, directory)
    return delete_record(module, system, directory)


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
