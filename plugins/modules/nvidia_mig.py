#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_mig
version_added: 0.1.0
short_description: Partition the NVIDIA GPUs of a node with MIG
description:
  - Changes the GPUs of a node to a requested layout of MIG partitions, and changes as few existing partitions as possible.
  - The layout is a list of rules, or an unmodified configuration of C(nvidia-mig-parted).
  - Scans all GPUs and plans all steps before the first one. If a process or a prepared resource claim uses a partition or a GPU that must be deleted
    or reset, the module changes no GPU. The error names the process IDs and the claims.
  - If a step fails, the previous steps are rolled back on all GPUs.
  - Locks the GPUs that change against the node driver from the scan to the last step. Claims on these GPUs wait, and claims on other GPUs continue.
    If the node driver works on a claim for longer than a minute, the module fails and names the holder of the lock.
  - For a reset, the node driver closes the NVIDIA library and opens it again afterwards.
  - With other values of O(state), the module saves and restores layouts, like the commands C(checkpoint) and C(restore) of C(nvidia-mig-parted).
    M(dra.accelerators.nvidia_mig_info) compares and exports layouts. Use tasks before and after the module, and handlers, instead of the hooks
    of C(nvidia-mig-parted).
notes:
  - Partitions are lost at a reboot. From the Hopper generation, the MIG mode is lost too. The role P(dra.accelerators.nvidia_mig#role) applies the
    layout again at every boot.
  - Requires root on the node.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._layout_rules.nvidia
  - dra.accelerators._layout_states
  - dra.accelerators._nvml
attributes:
  check_mode:
    support: full
    details:
      - RV(steps) and RV(after) show the planned changes. The module rejects the same changes as without check mode.
      - A run without check mode fails if a program such as a monitoring agent has a GPU open that must be reset. Check mode lists these processes in
        a warning.
  diff_mode:
    support: full
    details:
      - The diff has one entry for each GPU that changes.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  layout:
    description:
      - Rules for the layout of the GPUs. For each GPU the first matching rule applies. A GPU without a
        matching rule is not changed.
      - O(state=present) requires exactly one of O(layout), O(config), and O(config_file). Other states accept none of them.
  mode_only:
    description:
      - For O(state=present), whether to change only the MIG mode. The module creates no partitions. It deletes partitions only if it disables MIG.
    type: bool
    default: false
  reset:
    description:
      - Whether the module can reset GPUs. GPUs of the Ampere generation change the MIG mode only by a reset. Later ones do not
        need it.
      - If it is not set and a reset is needed, the module fails with an explanation before any change.
      - With V(when_needed), the module resets GPUs that need it, if they are not in use.
      - With V(never), the mode changes at the next reboot, and RV(reset_required) is true. Run the module again after the
        reboot to create the partitions.
    type: str
    choices:
      - never
      - when_needed
seealso:
  - module: dra.accelerators.accelerator_info
  - module: dra.accelerators.nvidia_mig_info
  - name: NVIDIA Multi-Instance GPU User Guide
    description: The profiles of each board and their possible placements.
    link: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/
"""

EXAMPLES = r"""
- name: Partition the first GPU and let the node driver partition the others
  dra.accelerators.nvidia_mig:
    layout:
      - match:
          index: 0
        mode: static
        partitions:
          3g.40gb: 1
          1g.10gb: 4
      - match: {}
        mode: dynamic

- name: Create a partition at a fixed placement
  dra.accelerators.nvidia_mig:
    layout:
      - match:
          product: "NVIDIA H100*"
          index: [0, 1]
        mode: static
        partitions:
          - profile: 3g.40gb
            placement: 4
          - profile: 2g.20gb

- name: Partition GPUs of the Ampere generation, which requires a reset
  dra.accelerators.nvidia_mig:
    layout:
      - match:
          product: "*A100*"
        mode: static
        partitions:
          1g.5gb: 7
    reset: when_needed

- name: Apply a configuration of nvidia-mig-parted from a file on the node
  dra.accelerators.nvidia_mig:
    config_file: /etc/nvidia-mig-manager/config.yaml
    config_name: all-balanced

- name: Apply a configuration of nvidia-mig-parted as data
  dra.accelerators.nvidia_mig:
    config:
      version: v1
      mig-configs:
        half:
          - devices: [0, 1]
            mig-enabled: true
            mig-devices:
              3g.40gb: 2
          - devices: [2, 3]
            mig-enabled: false
    config_name: half

- name: Enable MIG for a layout without creating partitions
  dra.accelerators.nvidia_mig:
    layout:
      - match: {}
        mode: static
        partitions:
          1g.10gb: 7
    mode_only: true

- name: Save the layout before a driver upgrade
  dra.accelerators.nvidia_mig:
    state: checkpointed
    checkpoint_file: /var/lib/dra-accelerators/before-upgrade.json

- name: Restore the layout after the upgrade
  dra.accelerators.nvidia_mig:
    state: restored
    checkpoint_file: /var/lib/dra-accelerators/before-upgrade.json
    reset: when_needed
"""

RETURN = r"""
steps:
  description: The completed steps in order. In check mode, the planned steps.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    step:
      description:
        - The kind of the step, one of V(set_partitioning), V(reset_device), V(destroy_partition), and V(create_partition).
      type: str
      returned: success
      sample: create_partition
    indices:
      description: The driver's indexes of the GPUs in this step.
      type: list
      elements: int
      returned: success
      sample: [0]
    device_uuid:
      description: The UUID of the GPU.
      type: str
      returned: for all but V(reset_device)
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    profile:
      description: The profile of the partition.
      type: str
      returned: for partitions
      sample: 3g.40gb
    start:
      description: The first memory slice of the partition.
      type: int
      returned: for partitions
      sample: 4
    size:
      description: The number of memory slices of the partition.
      type: int
      returned: for partitions
      sample: 4
    uuid:
      description: The UUID of the deleted partition.
      type: str
      returned: for V(destroy_partition)
      sample: MIG-0c1d0c5e-6b1b-5d6f-9f50-1c5d8f2f7a10
    enabled:
      description: Whether the step enables MIG.
      type: bool
      returned: for V(set_partitioning)
      sample: true
    device_uuids:
      description: The UUIDs of the GPUs that are reset together.
      type: list
      elements: str
      returned: for V(reset_device)
      sample: ["GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071"]
    description:
      description: The step as text.
      type: str
      returned: success
      sample: create 3g.40gb at 4:4 on GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
before:
  description: The mode and the partitions of each GPU in RV(devices) before the run.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    index:
      description: The driver's index of the GPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the GPU.
      type: str
      returned: success
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    product:
      description: The product name.
      type: str
      returned: success
      sample: NVIDIA H100 80GB HBM3
    pci_address:
      description: The PCI address.
      type: str
      returned: success
      sample: "0000:18:00.0"
    enabled:
      description: Whether MIG is enabled.
      type: bool
      returned: success
      sample: true
    pending:
      description: Whether MIG will be enabled after the next reset of the GPU.
      type: bool
      returned: success
      sample: true
    partitions:
      description: The partitions, sorted by placement.
      type: list
      elements: dict
      returned: success
      sample:
        - profile: 3g.40gb
          placement: {"start": 4, "size": 4}
          uuid: MIG-0c1d0c5e-6b1b-5d6f-9f50-1c5d8f2f7a10
after:
  description:
    - The GPUs after the run, in the form of RV(before). In check mode, the expected state, in which new partitions have an empty UUID.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  sample:
    - index: 0
      uuid: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
      product: NVIDIA H100 80GB HBM3
      pci_address: "0000:18:00.0"
      enabled: true
      pending: true
      partitions: []
devices:
  description: The change of each GPU that a rule matches, or that must be reset together with such a GPU.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    index:
      description: The driver's index of the GPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the GPU.
      type: str
      returned: success
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    mode:
      description: The mode of the matching rule. Null if no rule matches the GPU.
      type: str
      returned: success
      sample: static
    changed:
      description: Whether the GPU was changed, or would be in check mode.
      type: bool
      returned: success
      sample: true
    kept:
      description: The number of existing partitions that did not change.
      type: int
      returned: success
      sample: 2
    reset_required:
      description: Whether the GPU needs a reset to reach the requested layout, and the reset was not allowed.
      type: bool
      returned: success
      sample: false
reset_required:
  description: Whether any GPU needs a reset to reach the requested layout, and the reset was not allowed.
  returned: O(state=present) and O(state=restored)
  type: bool
  sample: false
checkpoint:
  description: The content of the checkpoint, in the form of RV(before).
  returned: O(state=checkpointed)
  type: list
  elements: dict
  contains:
    partitions:
      description:
        - The partitions, each with the C(claims) that use it and its C(owner). The owner is V(claim) if the node driver created the partition for a
          claim, and V(administrator) if another program created it. It is V(foreign) if the partition was created manually in a form that no profile
          has.
      type: list
      elements: dict
      returned: success
      sample:
        - profile: 3g.40gb
          placement: {"start": 4, "size": 4}
          uuid: MIG-0c1d0c5e-6b1b-5d6f-9f50-1c5d8f2f7a10
          owner: administrator
          claims: []
left_out:
  description: Parts that a checkpoint could not restore, or that were not restored. Each is also a warning.
  returned: O(state=checkpointed) and O(state=restored)
  type: list
  elements: str
  sample: []
error_code:
  description: A stable code for the type of the error, or V(several).
  returned: failure
  type: str
  sample: in-use
errors:
  description: All errors, each with its code and its details.
  returned: when the layout is refused
  type: list
  elements: dict
  sample:
    - code: in-use
      message: GPU 0 is in use
      hint: ""
      pids: [4711]
      claims: []
pids:
  description: The processes that block the change.
  returned: when processes block the change
  type: list
  elements: int
  sample: [4711]
claims:
  description: The prepared resource claims that block the change, as namespace and name.
  returned: when claims block the change
  type: list
  elements: str
  sample: ["team-a/training"]
undone:
  description: The steps that were rolled back after a step failed.
  returned: when a step failed
  type: list
  elements: str
  sample: ["create 3g.40gb at 4:4"]
not_undone:
  description: The steps that could not be rolled back.
  returned: when a step failed
  type: list
  elements: str
  sample: []
"""

import contextlib
from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import (
    NodeScan,
    Rules,
    apply_reset_option,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.describe import assign_modes
from ansible_collections.dra.accelerators.plugins.module_utils._layout.layout_module import (
    CHECKPOINTED,
    PRESENT,
    RESTORED,
    STATE_OPTIONS,
    STATE_REQUIRED_IF,
    Assigned,
    Layouts,
    checkpoint_devices,
    partition_devices,
    restore_devices,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.nvidia_layout import (
    LAYOUT_CONSTRAINTS,
    LAYOUT_OPTIONS,
    OPTIONS,
    layout_rules,
    require_binding,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import end, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import Rule, parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.backend import NvidiaBackend


def argument_spec() -> dict[str, Any]:
    return {**OPTIONS, "reset": {"type": "str", "choices": ["never", "when_needed"]}, **STATE_OPTIONS}


CONSTRAINTS: dict[str, Any] = {**LAYOUT_CONSTRAINTS, "required_if": STATE_REQUIRED_IF}


def check_parameters(module: AnsibleModule) -> None:
    """End the module for options that do not match its state, and for invalid rules."""
    params = module.params
    given = [name for name in LAYOUT_OPTIONS if params[name] is not None]
    if params["state"] == PRESENT and not given:
        end(module, msg=f"one of the following is required: {', '.join(LAYOUT_OPTIONS)}")
    if params["state"] != PRESENT and given:
        end(module, msg=f"state {params['state']} does not support the option {given[0]}")
    if params["mode_only"] and params["state"] != PRESENT:
        end(module, msg=f"state {params['state']} does not support the option mode_only")
    if params["layout"] is not None:
        parse_rules(params["layout"])


def modes(scan: NodeScan, rules: tuple[Rule, ...]) -> Assigned:
    """Plan only the MIG modes."""
    return assign_modes(scan.devices, rules, scan.prepared)


def apply_state(module: AnsibleModule, backend: NvidiaBackend, rules: Rules) -> dict[str, Any]:
    """Apply the state with an open backend, and return the result."""
    params, state = module.params, module.params["state"]
    layouts = Layouts(
        "nvidia_mig",
        "GPU",
        rules,
        allow=lambda assignments: apply_reset_option(assignments, params["reset"]),
        holders=lambda uuids: backend.reset_holders(uuids, params["state_path"]),
    )
    if state == CHECKPOINTED:
        return checkpoint_devices(module, backend, System())
    if state == RESTORED:
        return restore_devices(module, backend, layouts, System())
    return partition_devices(module, backend, replace(layouts, plan=modes) if params["mode_only"] else layouts)


def work(module: AnsibleModule) -> dict[str, Any]:
    check_parameters(module)
    require_binding(module)
    rules = layout_rules(module) or (lambda _scan: ())
    backend = NvidiaBackend(System())
    backend.open()
    with contextlib.closing(backend):
        return apply_state(module, backend, rules)


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
