#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ascend_vnpu
version_added: 0.1.0
short_description: Cut the Ascend NPUs of a node into vNPUs
description:
  - Brings the NPUs of a node to a wanted layout of slices (vNPUs), with the fewest existing slices disturbed. The layout is the same list of
    rules as that of M(dra.accelerators.nvidia_mig); the names of profiles are those of the templates that the NPUs themselves tell of.
  - All NPUs are looked at and all steps are planned before the first one is taken. If a container, a process or a prepared resource claim
    holds anything that would have to go, nothing is touched on any NPU, and the error names what holds it. The vendor's own tools destroy
    a slice under a running job.
  - On chips with vGroups (310P) slices are placed so that none is left without a place. If a step fails, the steps before it are undone, on
    all NPUs.
  - NPUs that change are locked against the node driver from the look to the last step. Claims on them wait, claims on others go on.
  - What slices depend on beside themselves is switched only where an option asks for it. What cannot be switched from the machine is
    explained where it stands in the way, such as the mode AMP of an Atlas 800 9000.
notes:
  - Slices survive a reboot where the driver recovers them, which is its default; see O(recover). The role
    P(dra.accelerators.ascend_vnpu#role) has the layout applied again at every boot.
  - No other program that makes and destroys slices should run on the node. The vendor's device plugin, for example, destroys in its dynamic
    mode what it believes to be unused.
  - Needs root on the node.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._layout_states
requirements:
  - The driver of the NPUs on the node, with C(libdcmi.so) and C(npu-smi).
attributes:
  check_mode:
    support: full
    details:
      - RV(steps) and RV(after) show what would be done. Refusals are the same as without check mode.
  diff_mode:
    support: full
    details:
      - One entry for each NPU that changes.
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
      - Required for O(state=present), O(state=asserted), and O(state=valid). Other states do not accept it.
    type: list
    elements: dict
    suboptions:
      match:
        description:
          - Which NPUs the rule is for. All given keys must match; an empty dictionary matches every NPU.
        type: dict
        required: true
        suboptions:
          vendor:
            description: The vendor. Rules for other vendors than V(ascend) are passed over.
            type: str
          index:
            description: The physical id of the NPU, or a list of such numbers.
            type: raw
          uuid:
            description: The NPU's UUID, or a list of UUIDs.
            type: raw
          pci_address:
            description: The NPU's PCI address, or a list of addresses.
            type: raw
          product:
            description: A shell pattern for the product name, or a list of patterns.
            type: raw
      mode:
        description:
          - V(static) creates exactly the given slices.
          - With V(dynamic), the node driver creates and deletes slices for claims. Slices of the driver stay. All other slices are deleted.
          - V(whole) deletes all slices.
        type: str
        required: true
        choices:
          - static
          - dynamic
          - whole
      partitions:
        description:
          - For O(layout[].mode=static), a dictionary of template names and counts, or a list of dictionaries with C(profile) and C(count),
            or C(profile) and C(placement) for a fixed placement. On a 310P the placements 0 and 1 are the first vGroup, 2 and 3 the second.
        type: raw
      shares:
        description:
          - For O(layout[].mode=whole), the number of claims that can share the NPU, from 2 to 1024. By default, one claim can use the NPU.
          - This module does not use it. The node driver reads the same rules and publishes the NPU accordingly. It rejects claims for an
            NPU that accepts one container at a time; see O(device_share).
        type: int
      prepared_before_binding:
        description:
          - For O(layout[].mode=dynamic), whether pods are bound to the node only when the NPU is prepared for them.
          - This module does not use it. The node driver reads the same rules and publishes the NPU accordingly.
        type: bool
      passthrough:
        description:
          - Whether virtual machines can use the device. NPUs do not support this yet. The option is accepted because a layout can contain rules for
            several vendors.
        type: bool
      composed:
        description:
          - Whether the NPU can be a member of a composed device, such as a card or a ring. The default is V(true).
          - This module does not use it. The node driver reads the same rules and publishes the NPU accordingly.
        type: bool
  recover:
    description:
      - Whether the vendor's driver restores slices after a reboot, for all NPUs of the node. By default, the mode is not changed.
      - Use V(false) for dynamic NPUs. Slices of claims whose pods no longer exist are then not restored after a reboot. The node
        driver deletes restored ones.
    type: bool
  device_share:
    description:
      - Whether several containers can use one NPU at the same time, for NPUs with a rule of O(layout[].mode=whole). By default, the mode
        is not changed.
      - A reboot resets it, unless the driver is configured to keep it (C(npu-smi set -t device-share-cfg-recover -d 1)). The chip does not
        isolate containers that share an NPU.
    type: bool
  state_path:
    description:
      - The node driver's store of prepared claims. The module only reads it. A missing file means that no claims are prepared.
    type: path
    default: /var/lib/kubelet/plugins/npu.huawei.com/state.db
seealso:
  - module: dra.accelerators.accelerator_info
  - module: dra.accelerators.nvidia_mig
"""

EXAMPLES = r"""
- name: Cut the first NPU, leave the others to the node driver
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

- name: Put a slice in a certain vGroup
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

- name: Make every NPU whole, and have no slice made again after a reboot
  dra.accelerators.ascend_vnpu:
    layout:
      - match: {}
        mode: whole
    recover: false

- name: Fail where the NPUs are not as the layout wants
  dra.accelerators.ascend_vnpu:
    state: asserted
    layout:
      - match: {}
        mode: static
        partitions:
          vir02: 4

- name: Describe the NPUs as they are
  dra.accelerators.ascend_vnpu:
    state: exported

- name: Keep what the NPUs are, before the driver is changed
  dra.accelerators.ascend_vnpu:
    state: checkpointed
    checkpoint_file: /var/lib/dra-accelerators/before-upgrade.json

- name: Bring it back afterwards
  dra.accelerators.ascend_vnpu:
    state: restored
    checkpoint_file: /var/lib/dra-accelerators/before-upgrade.json
"""

RETURN = r"""
steps:
  description: What was done, or would be done in check mode, in order.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    step:
      description:
        - The kind of the step, one of V(set_recover), V(set_device_share), V(destroy_partition) and V(create_partition).
      type: str
      returned: success
      sample: create_partition
    indices:
      description: The numbers that the driver gives the NPUs that the step concerns.
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
      description: The profile of the slice.
      type: str
      returned: for slices
      sample: vir02
    start:
      description: The place of the slice. On chips with vGroups two places are a vGroup; on others it is the slice's number.
      type: int
      returned: for slices
      sample: 4
    size:
      description: How many places the slice covers; 0 on chips without vGroups.
      type: int
      returned: for slices
      sample: 2
    uuid:
      description: The UUID of the slice that is destroyed.
      type: str
      returned: for V(destroy_partition)
      sample: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1-104
    enabled:
      description: Whether it is switched on.
      type: bool
      returned: for V(set_recover) and V(set_device_share)
      sample: true
    description:
      description: The step in words.
      type: str
      returned: success
      sample: create vir02 at 4:2 on NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1
before:
  description: The slices of each NPU of RV(devices), before.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    index:
      description: The number that the driver gives the NPU.
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
      description: The slices, in the order of their places.
      type: list
      elements: dict
      returned: success
      sample:
        - profile: vir02
          placement: {"start": 4, "size": 2}
          uuid: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1-104
after:
  description:
    - The same NPUs in the form of RV(before), afterwards. In check mode as it would be; slices yet to be made have
      an empty UUID.
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
  description: What happens to each NPU that a rule matches.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    index:
      description: The number that the driver gives the NPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the NPU.
      type: str
      returned: success
      sample: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1
    mode:
      description: The mode that the rule wants; null for an NPU that no rule matches.
      type: str
      returned: success
      sample: static
    changed:
      description: Whether the NPU was changed, or would be in check mode.
      type: bool
      returned: success
      sample: true
    kept:
      description: How many existing slices were left alone.
      type: int
      returned: success
      sample: 2
matches:
  description: Whether every NPU that a rule matches is as it wants.
  returned: O(state=asserted), success or failure for a difference
  type: bool
  sample: false
differences:
  description: The NPUs that are not as the layout wants, and how they differ.
  returned: O(state=asserted), success or failure for a difference
  type: list
  elements: dict
  contains:
    index:
      description: The number that the driver gives the NPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the NPU.
      type: str
      returned: success
      sample: NPU-4b1d9c6a00c8e5f3720d6a5500000000000000b1
    product:
      description: The product name; empty for a NPU that could not be read.
      type: str
      returned: success
      sample: Atlas 300I Pro
    pci_address:
      description: The PCI address; empty for a NPU that could not be read.
      type: str
      returned: success
      sample: "0000:18:00.0"
    wanted:
      description: What the rule wants, in words.
      type: str
      returned: success
      sample: "static: 1 × vir02"
    mode:
      description: It is null, because NPUs have no mode that is switched.
      type: dict
      returned: success
      sample: {"found": false, "wanted": true}
    missing:
      description: The partitions that would be made, with C(profile) and C(placement).
      type: list
      elements: dict
      returned: success
      sample:
        - profile: vir02
          placement: {"start": 4, "size": 4}
    surplus:
      description:
        - The partitions that would go, with C(profile), C(placement), C(uuid), the C(claims) that hold them, and the C(owner), as in
          RV(checkpoint).
      type: list
      elements: dict
      returned: success
      sample: []
    held_by:
      description: Processes and claims that hold what would have to go.
      type: list
      elements: str
      returned: success
      sample: []
    error:
      description: Why the NPU cannot become what is wanted, or could not be read, with C(code), C(message) and C(hint). Otherwise null.
      type: dict
      returned: success
      sample: {"code": "does-not-fit", "message": "it does not fit", "hint": ""}
    message:
      description: The difference in words.
      type: str
      returned: success
      sample: "Atlas 300I Pro 0 is not as wanted (static: 1 × vir02): missing: vir02 at 4"
exported:
  description: The present layout.
  returned: O(state=exported)
  type: dict
  contains:
    layout:
      description:
        - Rules for O(layout), with every place, that bring about what is there. NPUs that are alike share a rule. A NPU with partitions
          that the node driver has made for claims is C(dynamic).
      type: list
      elements: dict
      returned: success
      sample:
        - match: {"vendor": "ascend", "index": [0]}
          mode: static
          partitions: [{"profile": "vir02", "placement": 4}]
checkpoint:
  description: What the checkpoint says, in the form of RV(before).
  returned: O(state=checkpointed)
  type: list
  elements: dict
  contains:
    partitions:
      description:
        - The partitions, each with the C(claims) that hold it and its C(owner), which is V(claim) where the node driver has made it for one,
          V(administrator) where somebody else has made it, and V(foreign) where it was made by hand in a form that no profile has.
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
  description: What an export cannot say, a checkpoint could not bring back, or was not brought back. Each is a warning as well.
  returned: O(state=exported), O(state=checkpointed) and O(state=restored)
  type: list
  elements: str
  sample: []
error_code:
  description: A stable word for the kind of the error, or V(several).
  returned: failure
  type: str
  sample: in-use
errors:
  description: All errors, each with its code and what it names.
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
  description: The processes that are in the way.
  returned: when processes are in the way
  type: list
  elements: int
  sample: [4711]
claims:
  description: The prepared resource claims that are in the way, as namespace and name.
  returned: when claims are in the way
  type: list
  elements: str
  sample: ["team-a/training"]
undone:
  description: What was undone after a step had failed.
  returned: when a step failed
  type: list
  elements: str
  sample: ["create vir02 at 4:2"]
not_undone:
  description: What could not be undone.
  returned: when a step failed
  type: list
  elements: str
  sample: []
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._layout import Assignment
from ansible_collections.dra.accelerators.plugins.module_utils._layout_module import (
    ASSERTED,
    CHECKPOINTED,
    EXPORTED,
    RESTORED,
    STATE_OPTIONS,
    STATE_REQUIRED_IF,
    VALID,
    WITH_LAYOUT,
    Layouts,
    assert_devices,
    checkpoint_devices,
    export_devices,
    partition_devices,
    restore_devices,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import end, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.ascend.backend import AscendBackend
from ansible_collections.dra.accelerators.plugins.module_utils.core.ascend.families import DIES_AS_ONE, family_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.ascend.switches import (
    RECOVER,
    SHARE,
    Switch,
    Switches,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.ascend.tool import Tool
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend_protocol import Backend
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import (
    AcceleratorError,
    InvalidLayout,
    Unsupported,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.layout import CreatePartition
from ansible_collections.dra.accelerators.plugins.module_utils.core.layout_rules import WHOLE, parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Device
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

STATE_PATH = "/var/lib/kubelet/plugins/npu.huawei.com/state.db"
# What a generation needs that no program on the machine can bring about.
NEEDED = {
    "310": "Chips of the generation 310 cannot be cut.",
    "950": "Chips of the generation 950 cannot be cut; they are shared whole.",
    "910A": "A 910A is cut in the mode AMP alone. Its management controller sets that while the host is off: "
    "ipmcset -d npuworkmode -v 0.",
    "910_93": "A chip of the generation A3 is cut by a driver (Ascend HDK) from 26.0.RC1 on, and with the policy for single dies "
    "(npu-smi set -t multi-die-policy).",
}


def argument_spec() -> dict[str, Any]:
    # What a rule may hold is checked by the core, which names the rule, and which the node driver shares.
    return {
        "layout": {"type": "list", "elements": "dict"},
        "recover": {"type": "bool"},
        "device_share": {"type": "bool"},
        "state_path": {"type": "path", "default": STATE_PATH},
        **STATE_OPTIONS,
    }


CONSTRAINTS: dict[str, Any] = {"required_if": STATE_REQUIRED_IF}


def wanted_switches(params: dict[str, Any], assignments: Sequence[Assignment]) -> tuple[Switch, ...]:
    """Return the switches that the parameters speak of; pure."""
    found = [] if params[RECOVER] is None else [Switch(RECOVER, params[RECOVER])]
    if params[SHARE] is not None:
        found += [Switch(SHARE, params[SHARE], one.device) for one in assignments if one.rule.mode == WHOLE]
    return tuple(found)


def unshareable(params: dict[str, Any], assignments: Sequence[Assignment]) -> list[Device]:
    """Return the NPUs that claims are to share and cannot, and that nobody has asked to be switched; pure."""
    if params[SHARE]:
        return []
    return [one.device for one in assignments if one.rule.shares and one.device.unshareable is not None]


def refuse_mixed_cards(assignments: Sequence[Assignment]) -> None:
    """Refuse chips of one card of which one is cut and another is not; pure. Raises InvalidLayout."""
    cards: dict[Any, list[Assignment]] = {}
    for one in assignments:
        if family_of(one.device.pci_device_id).groups:
            cards.setdefault(one.device.attributes.get("cardID"), []).append(one)
    for chips in cards.values():
        cut = [one for one in chips if one.rule.partitions]
        whole = [one for one in chips if one.rule.mode == WHOLE]
        if cut and whole:
            raise InvalidLayout(
                f"{cut[0].device.describe()} is to be cut and {whole[0].device.describe()} to be whole, and they are chips of one card, "
                "which are used in the same way. Nothing was changed",
                hint="Give the chips of a card rules of one mode.",
                code="card-mixed",
            )


def refuse_unmet(switches: Switches, assignments: Sequence[Assignment]) -> None:
    """Refuse slices where the machine is not set to make them; asks nothing where none is to be made. Raises Unsupported."""
    making = [one.device for one in assignments if any(isinstance(step, CreatePartition) for step in one.plan.steps)]
    if making and switches.slices_are_for_containers() is False:
        raise Unsupported(
            "This machine makes slices for virtual machines (vnpu-mode is VM). Nothing was changed",
            hint="Remove those slices, and switch it to containers: npu-smi set -t vnpu-mode -d 0.",
            code="vm-mode",
        )
    dies = [device for device in making if family_of(device.pci_device_id).word == "910_93"]
    if dies and switches.is_each_die_alone() is False:
        raise Unsupported(
            f"{dies[0].describe()} is one of two dies that work as one. Nothing was changed",
            hint=DIES_AS_ONE,
            code="multi-die-policy",
        )
    for device in making:
        if family_of(device.pci_device_id).word == "910A" and switches.is_asymmetric(device) is False:
            raise Unsupported(
                f"{device.describe()} works in the mode SMP. Nothing was changed", hint=NEEDED["910A"], code="smp-mode"
            )


def explain(error: AcceleratorError, devices: Sequence[Device]) -> AcceleratorError:
    """Say what the generation of a chip that cannot be cut needs; pure."""
    if not isinstance(error, Unsupported):
        return error
    words = {family_of(device.pci_device_id).word for device in devices if device.describe() in error.message}
    hints = [NEEDED[word] for word in sorted(words) if word in NEEDED]
    return type(error)(error.message, hint=" ".join(hints), code=error.code) if hints else error


def layouts_of(module: AnsibleModule) -> Layouts:
    """Return what the module's parameters ask for."""
    return Layouts("ascend_vnpu", "NPU", lambda _look: parse_rules(module.params["layout"]))


def partition_npus(
    module: AnsibleModule, switches: Switches, partition: Callable[[Layouts], dict[str, Any]]
) -> dict[str, Any]:
    """Turn the switches that are asked for, and partition the NPUs; returns the result."""
    turning: list[Switch] = []
    done: list[Switch] = []
    kept_back: list[Device] = []

    def agree(assignments: Sequence[Assignment]) -> tuple[Assignment, ...]:
        refuse_mixed_cards(assignments)
        refuse_unmet(switches, assignments)
        kept_back[:] = unshareable(module.params, assignments)
        turning[:] = [each for each in wanted_switches(module.params, assignments) if switches.needed(each)]
        return tuple(assignments)

    def turn() -> None:
        for each in [switch for switch in turning if switch not in done]:
            switches.turn(each)
            done.append(each)

    answer = partition(replace(layouts_of(module), agree=agree, explain=explain, before=turn))
    if not module.check_mode:
        turn()
    for device in kept_back:
        module.warn(
            f"{device.describe()} is to be shared, and one container at a time can have it: the node driver keeps claims from it. "
            "Set device_share."
        )
    answer.pop("reset_required")
    for device in answer["devices"]:
        device.pop("reset_required")
    turned = [
        {**each.to_dict(), "indices": [] if each.device is None else [each.device.index]} for each in done or turning
    ]
    return {**answer, "changed": answer["changed"] or bool(turned), "steps": [*turned, *answer["steps"]]}


def check_parameters(module: AnsibleModule) -> None:
    """End the module for parameters that do not go together with its state, and for rules that are none."""
    params = module.params
    if params["state"] in WITH_LAYOUT:
        if params["layout"] is None:
            end(module, msg="missing required arguments: layout")
        parse_rules(params["layout"])
        return
    given = [name for name in ("layout", RECOVER, SHARE) if params[name] is not None]
    if given:
        end(module, msg=f"state {params['state']} takes no {given[0]}, but one is given")


def bring_about(module: AnsibleModule, backend: Backend, system: System) -> dict[str, Any]:
    """Do what the state asks for, with a backend that is open; returns the result."""
    state = module.params["state"]
    layouts = layouts_of(module)
    if state == ASSERTED:
        return assert_devices(module, backend, layouts)
    if state == EXPORTED:
        return export_devices(module, backend)
    if state == CHECKPOINTED:
        return checkpoint_devices(module, backend, system)

    def partition(layouts: Layouts) -> dict[str, Any]:
        if state == RESTORED:
            return restore_devices(module, backend, layouts, system)
        return partition_devices(module, backend, layouts)

    return partition_npus(module, Switches(Tool(system)), partition)


def work(module: AnsibleModule) -> dict[str, Any]:
    check_parameters(module)
    if module.params["state"] == VALID:
        return {"changed": False}
    system = System()
    backend = AscendBackend(system)
    backend.open()
    try:
        return bring_about(module, backend, system)
    finally:
        backend.close()


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
