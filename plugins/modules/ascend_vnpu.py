#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ascend_vnpu
version_added: 0.1.0
short_description: Partition the Ascend NPUs of a node into vNPUs
description:
  - Applies a layout of vNPUs to the NPUs of a node, and changes as few existing vNPUs as possible. The layout is a list of rules, as in
    M(dra.accelerators.nvidia_mig). The profile names are the names of the templates that the NPUs report.
  - The module reads all NPUs and plans all steps before it runs the first one. If a container, a process, or a prepared claim holds a vNPU or NPU
    that must change, the module changes no NPU, and the error names the holder. The vendor's own tools destroy vNPUs of running jobs.
  - On chips with vGroups (310P), the module chooses placements at which all vNPUs fit. If a step fails, the module rolls back the previous steps on
    all NPUs.
  - The module locks the NPUs that change against the node driver, from the first read to the last step. Claims on these NPUs wait, and claims on
    other NPUs do not.
  - The module changes other modes that vNPUs depend on only if an option requests it. If a mode cannot be changed on the node, for example the mode
    AMP of an Atlas 800 9000, the error explains how to change it.
notes:
  - vNPUs persist across reboots if the driver restores them, which is its default. See O(recover). The role
    P(dra.accelerators.ascend_vnpu#role) applies the layout again at every boot.
  - In the first 10 minutes after a boot, the module waits up to 60 s while C(/etc/vnpu.cfg) has vNPUs that the vendor's script has not restored yet, also
    in check mode. Otherwise the script would create vNPUs in addition to those of the layout, or fail. RV(waited_for) lists these vNPUs. If some are
    still missing after that time, the module warns and continues without them.
  - Do not run other programs on the node that create and destroy vNPUs. For example, the vendor's device plugin in its dynamic mode destroys vNPUs that
    it considers unused.
  - The module needs root on the node.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._layout_rules.ascend
  - dra.accelerators._layout_states
requirements:
  - The driver of the NPUs on the node, with C(libdcmi.so) and C(npu-smi).
attributes:
  check_mode:
    support: full
    details:
      - RV(steps) and RV(after) show the planned changes. The module reports the same errors as without check mode.
  diff_mode:
    support: full
    details:
      - The diff has one entry for each NPU that changes.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  layout:
    description:
      - Rules for the layout of the NPUs. For each NPU the first matching rule applies. An NPU without a matching rule is not
        changed.
      - Required for O(state=present). Other states do not accept it.
  recover:
    description:
      - Whether the vendor's driver restores vNPUs after a reboot, for all NPUs of the node. By default, the mode is not changed.
      - Use V(false) for dynamic NPUs. The vendor's driver then does not restore vNPUs of claims whose pods no longer exist. Otherwise, the node
        driver deletes such vNPUs.
    type: bool
  device_share:
    description:
      - Whether several containers can use an NPU at the same time, for NPUs with a rule of O(layout[].mode=whole). By default, the mode
        is not changed.
      - A reboot resets it, unless the driver is configured to keep it (C(npu-smi set -t device-share-cfg-recover -d 1)). The chip does not
        isolate containers that share an NPU.
    type: bool
seealso:
  - module: dra.accelerators.accelerator_info
  - module: dra.accelerators.ascend_vnpu_info
  - module: dra.accelerators.nvidia_mig
"""

EXAMPLES = r"""
- name: Partition the first NPU, and let the node driver partition the others
  dra.accelerators.ascend_vnpu:
    layout:
      - match:
          index: 0
        mode: static
        partitions:
          vir02: 3
          vir02_1c: 1
      - match: {}
        mode: dynamic

- name: Create a vNPU in a specific vGroup
  dra.accelerators.ascend_vnpu:
    layout:
      - match:
          product: "Atlas 300I*"
          index: [0, 1]
        mode: static
        partitions:
          - profile: vir04
            placement: 2
          - profile: vir01
            count: 2

- name: Delete all vNPUs, and disable their recovery after a reboot
  dra.accelerators.ascend_vnpu:
    layout:
      - match: {}
        mode: whole
    recover: false

- name: Save the layout of the NPUs before a driver upgrade
  dra.accelerators.ascend_vnpu:
    state: checkpointed
    checkpoint_file: /var/lib/dra-accelerators/before-upgrade.json

- name: Restore the layout after the driver upgrade
  dra.accelerators.ascend_vnpu:
    state: restored
    checkpoint_file: /var/lib/dra-accelerators/before-upgrade.json
"""

RETURN = r"""
steps:
  description: The steps that the module has run, or would run in check mode, in order.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    step:
      description:
        - The kind of step, one of V(set_recover), V(set_device_share), V(destroy_partition), and V(create_partition).
      type: str
      returned: success
      sample: create_partition
    indices:
      description: The driver's indices of the NPUs that the step changes.
      type: list
      elements: int
      returned: success
      sample: [0]
    device_uuid:
      description: The UUID of the NPU.
      type: str
      returned: for all but V(set_recover)
      sample: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1
    profile:
      description: The profile of the vNPU.
      type: str
      returned: for slices
      sample: vir02
    start:
      description: The start of the vNPU's placement. On chips with vGroups, a vGroup has two places. On other chips, it is the number of the vNPU.
      type: int
      returned: for slices
      sample: 4
    size:
      description: The number of places that the vNPU covers. It is 0 on chips without vGroups.
      type: int
      returned: for slices
      sample: 2
    uuid:
      description: The UUID of the destroyed vNPU.
      type: str
      returned: for V(destroy_partition)
      sample: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1-104
    enabled:
      description: Whether the step enables the mode.
      type: bool
      returned: for V(set_recover) and V(set_device_share)
      sample: true
    description:
      description: The description of the step.
      type: str
      returned: success
      sample: create vir02 at 4:2 on NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1
waited_for:
  description:
    - The vNPUs of C(/etc/vnpu.cfg) that the vendor's script had not restored after the boot when the module started, and each change of this list. It is
      empty if the module did not wait.
  returned: success
  type: list
  elements: str
  sample: []
before:
  description: The vNPUs of each NPU in RV(devices) before the change.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    index:
      description: The driver's index of the NPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the NPU.
      type: str
      returned: success
      sample: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1
    product:
      description: The product name.
      type: str
      returned: success
      sample: Atlas 300I Pro
    pci_address:
      description: The PCI address.
      type: str
      returned: success
      sample: "0000:82:00.0"
    partitions:
      description: The vNPUs in the order of their placements.
      type: list
      elements: dict
      returned: success
      sample:
        - profile: vir02
          placement: {"start": 4, "size": 2}
          uuid: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1-104
after:
  description:
    - The vNPUs of the same NPUs after the change, in the format of RV(before).
    - In check mode, the expected vNPUs. vNPUs that the module would create have an empty UUID.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  sample:
    - index: 0
      uuid: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1
      product: Atlas 300I Pro
      pci_address: "0000:82:00.0"
      partitions: []
devices:
  description: The result for each NPU that a rule matches.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    index:
      description: The driver's index of the NPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the NPU.
      type: str
      returned: success
      sample: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1
    mode:
      description: The mode of the rule. It is null for an NPU that no rule matches.
      type: str
      returned: success
      sample: static
    changed:
      description: Whether the module has changed the NPU, or would change it in check mode.
      type: bool
      returned: success
      sample: true
    kept:
      description: The number of existing vNPUs that the module has not changed.
      type: int
      returned: success
      sample: 2
checkpoint:
  description: The content of the checkpoint, in the format of RV(before).
  returned: O(state=checkpointed)
  type: list
  elements: dict
  contains:
    partitions:
      description:
        - The partitions, each with the C(claims) that hold it and its C(owner).
        - The owner is V(claim) if the node driver created the partition for a claim, V(administrator) if another program or user created it, and
          V(foreign) if it was created manually in a form that no profile has.
      type: list
      elements: dict
      returned: success
      sample:
        - profile: vir02
          placement: {"start": 4, "size": 4}
          uuid: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1-104
          owner: administrator
          claims: []
left_out:
  description:
    - The partitions or settings that a checkpoint cannot restore, or that the module has not restored.
    - The module also warns about each of them.
  returned: O(state=checkpointed) and O(state=restored)
  type: list
  elements: str
  sample: []
error_code:
  description: A stable error code, or V(several).
  returned: failure
  type: str
  sample: in-use
errors:
  description: All errors, each with its code and the objects that it names.
  returned: when the layout is refused
  type: list
  elements: dict
  sample:
    - code: in-use
      message: NPU 0 is in use
      hint: ""
      pids: [4711]
      claims: []
pids:
  description: The PIDs of the processes that prevent the change.
  returned: when processes prevent the change
  type: list
  elements: int
  sample: [4711]
claims:
  description: The prepared claims that prevent the change, as namespace and name.
  returned: when claims prevent the change
  type: list
  elements: str
  sample: ["team-a/training"]
undone:
  description: The steps that the module rolled back after a failed step.
  returned: when a step failed
  type: list
  elements: str
  sample: ["create vir02 at 4:2"]
not_undone:
  description: The steps that the module could not roll back.
  returned: when a step failed
  type: list
  elements: str
  sample: []
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import Assignment
from ansible_collections.dra.accelerators.plugins.module_utils._layout.ascend_layout import (
    OPTIONS,
    await_restored,
    layout_rules,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.layout_module import (
    CHECKPOINTED,
    PRESENT,
    RESTORED,
    STATE_OPTIONS,
    STATE_REQUIRED_IF,
    Layouts,
    checkpoint_devices,
    partition_devices,
    restore_devices,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import end, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import (
    AcceleratorError,
    InvalidLayout,
    Unsupported,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Device
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.layout_plan import CreatePartition
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import WHOLE
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.backend import AscendBackend
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.families import (
    DIES_AS_ONE,
    family_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.modes import (
    RECOVER,
    SHARE,
    Switch,
    Switches,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.npu_smi.npu_smi import (
    Tool,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.protocol import Backend

# Requirements of a chip generation that no program on the node can change.
NEEDED = {
    "310": "Chips of the generation 310 do not support vNPUs.",
    "950": "Chips of the generation 950 do not support vNPUs. Several containers can share a whole chip.",
    "910A": "A 910A supports vNPUs only in the mode AMP. While the host is off, set this mode on the management controller: "
    "ipmcset -d npuworkmode -v 0.",
    "910_93": "A chip of the generation A3 supports vNPUs only with a driver (Ascend HDK) of version 26.0.RC1 or later, and with the policy "
    "for single dies (npu-smi set -t multi-die-policy).",
}


def argument_spec() -> dict[str, Any]:
    return {**OPTIONS, "recover": {"type": "bool"}, "device_share": {"type": "bool"}, **STATE_OPTIONS}


CONSTRAINTS: dict[str, Any] = {"required_if": STATE_REQUIRED_IF}


def wanted_switches(params: dict[str, Any], assignments: Sequence[Assignment]) -> tuple[Switch, ...]:
    """Return the requested switches, which are modes of the node or of an NPU. No side effects."""
    found = [] if params[RECOVER] is None else [Switch(RECOVER, params[RECOVER])]
    if params[SHARE] is not None:
        found += [Switch(SHARE, params[SHARE], one.device) for one in assignments if one.rule.mode == WHOLE]
    return tuple(found)


def unshareable(params: dict[str, Any], assignments: Sequence[Assignment]) -> list[Device]:
    """Return the NPUs that claims should share but cannot. It is empty if the option device_share enables sharing. No side effects."""
    if params[SHARE]:
        return []
    return [one.device for one in assignments if one.rule.shares and one.device.sharing_obstacle is not None]


def refuse_mixed_cards(assignments: Sequence[Assignment]) -> None:
    """Raise InvalidLayout if only some chips of a card are partitioned. No side effects."""
    cards: dict[Any, list[Assignment]] = {}
    for one in assignments:
        if family_of(one.device.pci_device_id).groups:
            cards.setdefault(one.device.attributes.get("cardID"), []).append(one)
    for chips in cards.values():
        partitioned = [one for one in chips if one.rule.partitions]
        whole = [one for one in chips if one.rule.mode == WHOLE]
        if partitioned and whole:
            raise InvalidLayout(
                f"The layout partitions {partitioned[0].device.describe()}, and keeps {whole[0].device.describe()} whole. They are chips of "
                "one card, which must have the same mode. Nothing was changed",
                hint="Use rules with the same mode for all chips of a card.",
                code="card-mixed",
            )


def refuse_unmet(switches: Switches, assignments: Sequence[Assignment]) -> None:
    """Raise Unsupported if the node's settings do not allow new vNPUs. Queries nothing if no vNPU is to be created."""
    to_partition = [
        one.device for one in assignments if any(isinstance(step, CreatePartition) for step in one.plan.steps)
    ]
    if to_partition and switches.are_vnpus_for_containers() is False:
        raise Unsupported(
            "This node creates vNPUs for virtual machines (vnpu-mode is VM). Nothing was changed",
            hint="Delete the vNPUs for virtual machines, and change the mode to containers: npu-smi set -t vnpu-mode -d 0.",
            code="vm-mode",
        )
    dies = [device for device in to_partition if family_of(device.pci_device_id).word == "910_93"]
    if dies and switches.are_dies_separate() is False:
        raise Unsupported(
            f"{dies[0].describe()} is one of two dies that work as one NPU. Nothing was changed",
            hint=DIES_AS_ONE,
            code="multi-die-policy",
        )
    for device in to_partition:
        if family_of(device.pci_device_id).word == "910A" and switches.is_asymmetric(device) is False:
            raise Unsupported(
                f"{device.describe()} works in the mode SMP. Nothing was changed", hint=NEEDED["910A"], code="smp-mode"
            )


def explain(error: AcceleratorError, devices: Sequence[Device]) -> AcceleratorError:
    """Add the requirements of a chip generation to an Unsupported error. No side effects."""
    if not isinstance(error, Unsupported):
        return error
    words = {family_of(device.pci_device_id).word for device in devices if device.describe() in error.message}
    hints = [NEEDED[word] for word in sorted(words) if word in NEEDED]
    return type(error)(error.message, hint=" ".join(hints), code=error.code) if hints else error


def partition_npus(
    module: AnsibleModule, switches: Switches, partition: Callable[[Layouts], dict[str, Any]]
) -> dict[str, Any]:
    """Set the requested switches, partition the NPUs with ``partition``, and return the result."""
    needed: list[Switch] = []
    done: list[Switch] = []
    not_shareable: list[Device] = []

    def check_assignments(assignments: Sequence[Assignment]) -> tuple[Assignment, ...]:
        refuse_mixed_cards(assignments)
        refuse_unmet(switches, assignments)
        not_shareable[:] = unshareable(module.params, assignments)
        needed[:] = [each for each in wanted_switches(module.params, assignments) if switches.is_change_needed(each)]
        return tuple(assignments)

    def set_switches() -> None:
        for each in [switch for switch in needed if switch not in done]:
            switches.apply(each)
            done.append(each)

    rules = layout_rules(module) or (lambda _scan: ())
    result = partition(
        Layouts("ascend_vnpu", "NPU", rules, allow=check_assignments, explain=explain, before=set_switches)
    )
    if not module.check_mode:
        set_switches()  # for a layout without steps
    for device in not_shareable:
        module.warn(
            f"The layout shares {device.describe()}, but only one container at a time can use it. Therefore the node driver does not "
            "publish it as shared. Set device_share."
        )
    result.pop("reset_required")
    for device in result["devices"]:
        device.pop("reset_required")
    switch_steps = [
        {**each.to_dict(), "indices": [] if each.device is None else [each.device.index]} for each in done or needed
    ]
    return {**result, "changed": result["changed"] or bool(switch_steps), "steps": [*switch_steps, *result["steps"]]}


def check_parameters(module: AnsibleModule) -> None:
    """End the module for options that do not match its state, and for invalid rules."""
    params = module.params
    if params["state"] == PRESENT:
        if params["layout"] is None:
            end(module, msg="missing required arguments: layout")
        layout_rules(module)
        return
    given = [name for name in ("layout", RECOVER, SHARE) if params[name] is not None]
    if given:
        end(module, msg=f"state {params['state']} does not support the option {given[0]}")


def apply_state(module: AnsibleModule, backend: Backend, system: System) -> dict[str, Any]:
    """Apply the state with an open backend, and return the result."""
    state = module.params["state"]
    if state == CHECKPOINTED:
        return checkpoint_devices(module, backend, system)

    def partition(layouts: Layouts) -> dict[str, Any]:
        if state == RESTORED:
            return restore_devices(module, backend, layouts, system)
        return partition_devices(module, backend, layouts)

    return partition_npus(module, Switches(Tool(system)), partition)


def work(module: AnsibleModule) -> dict[str, Any]:
    check_parameters(module)
    system = System()
    backend = AscendBackend(system)
    backend.open()
    with contextlib.closing(backend):
        waited = await_restored(module, backend)
        return {**apply_state(module, backend, system), "waited_for": waited}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
