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
  - With other values of O(state), the module compares, exports, saves, and restores layouts, like the commands C(assert), C(export), C(checkpoint),
    and C(restore) of C(nvidia-mig-parted). Use tasks before and after the module, and handlers, instead of the hooks of C(nvidia-mig-parted).
notes:
  - Partitions are lost at a reboot. From the Hopper generation, the MIG mode is lost too. The role P(dra.accelerators.nvidia_mig#role) applies the
    layout again at every boot.
  - Requires root on the node.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
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
      - O(state=present), O(state=asserted), and O(state=valid) require exactly one of O(layout), O(config), and
        O(config_file). Other states accept none of them.
    type: list
    elements: dict
    suboptions:
      match:
        description:
          - The GPUs to which the rule applies. All given keys must match. An empty dictionary matches every GPU.
        type: dict
        required: true
        suboptions:
          vendor:
            description: The vendor. This module supports only V(nvidia).
            type: str
          index:
            description: The driver's index of the GPU, or a list of indexes.
            type: raw
          uuid:
            description: The GPU's UUID, or a list of UUIDs.
            type: raw
          pci_address:
            description: The GPU's PCI address, or a list of addresses.
            type: raw
          product:
            description: A shell pattern for the product name, or a list of patterns.
            type: raw
      mode:
        description:
          - V(static) turns MIG on and creates exactly the given partitions.
          - With V(dynamic), the node driver creates and deletes partitions for claims. Partitions of the driver stay. All
            other partitions are deleted. If a GPU can change the MIG mode only by a reset, the module turns MIG on.
          - V(whole) deletes all partitions and turns MIG off.
        type: str
        required: true
        choices:
          - static
          - dynamic
          - whole
      partitions:
        description:
          - For O(layout[].mode=static), a dictionary of profile names and counts, or a list of dictionaries. The keys in the list are C(profile) and
            C(count), or for a fixed placement C(profile) and C(placement), the first memory slice.
        type: raw
      shares:
        description:
          - For O(layout[].mode=whole), the number of claims that can share the GPU, from 2 to 1024. By default, one claim can use the GPU.
          - This module does not use it. The node driver reads the same rules and publishes the GPU accordingly.
        type: int
      prepared_before_binding:
        description:
          - For O(layout[].mode=dynamic), or with O(layout[].passthrough), whether pods are bound to the node only when the GPU is prepared for them.
          - This module does not use it. The node driver reads the same rules and publishes the GPU accordingly.
        type: bool
      passthrough:
        description:
          - For O(layout[].mode=whole) and O(layout[].mode=dynamic), whether virtual machines can use the GPU.
          - This module does not use it. The node driver reads the same rules and publishes the GPU accordingly.
        type: bool
      composed:
        description:
          - Whether the device can be a member of a composed device. Only NPUs support this. The option is accepted because a layout can
            contain rules for several vendors.
        type: bool
  config:
    description:
      - The content of a C(nvidia-mig-parted) configuration file, as data. The module applies the configuration O(config_name) in it. A ConfigMap that
        contains the file is also accepted, as with O(config_file).
    type: dict
  config_file:
    description:
      - Path of a C(nvidia-mig-parted) configuration file on the node. The module applies the configuration O(config_name) in it.
      - Requires the Python package C(PyYAML) on the node.
    type: path
  config_name:
    description:
      - The name of the configuration in O(config) or O(config_file). For O(state=exported), the name of the configuration in RV(exported.config).
    type: str
  mode_only:
    description:
      - Whether to change only the MIG mode, or with O(state=asserted) to compare only the MIG mode. The module creates no partitions. It deletes
        partitions only if it disables MIG.
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
  state_path:
    description:
      - The node driver's store of prepared claims. The module only reads it. A missing file means that no claims are
        prepared.
    type: path
    default: /var/lib/kubelet/plugins/gpu.nvidia.com/state.db
seealso:
  - module: dra.accelerators.accelerator_info
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

- name: Fail if the GPUs differ from the layout
  dra.accelerators.nvidia_mig:
    state: asserted
    layout:
      - match: {}
        mode: static
        partitions:
          1g.10gb: 7

- name: Compare the GPUs with a configuration of nvidia-mig-parted
  dra.accelerators.nvidia_mig:
    state: asserted
    config_file: /etc/nvidia-mig-manager/config.yaml
    config_name: all-balanced
    on_difference: report
  register: compared

- name: Export the current layout
  dra.accelerators.nvidia_mig:
    state: exported
    config_name: of-today
  register: present

- name: Write the exported layout to a file of nvidia-mig-parted
  ansible.builtin.copy:
    content: "{{ present.exported.config | to_nice_yaml }}"
    dest: /etc/nvidia-mig-manager/of-today.yaml
    mode: "0644"

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
matches:
  description: Whether every GPU with a matching rule has the layout of the rule.
  returned: O(state=asserted), success or failure for a difference
  type: bool
  sample: false
differences:
  description: The GPUs that differ from the layout, with the differences.
  returned: O(state=asserted), success or failure for a difference
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
      description: The product name. Empty if the GPU cannot be read.
      type: str
      returned: success
      sample: NVIDIA H100 80GB HBM3
    pci_address:
      description: The PCI address. Empty if the GPU cannot be read.
      type: str
      returned: success
      sample: "0000:18:00.0"
    wanted:
      description: The layout of the rule, as text.
      type: str
      returned: success
      sample: "static: 1 × 3g.40gb"
    mode:
      description: Whether MIG is enabled (C(found)), and whether the rule enables it (C(wanted)). Null if the GPU cannot be read.
      type: dict
      returned: success
      sample: {"found": false, "wanted": true}
    missing:
      description: The partitions to create, with C(profile) and C(placement).
      type: list
      elements: dict
      returned: success
      sample:
        - profile: 3g.40gb
          placement: {"start": 4, "size": 4}
    surplus:
      description:
        - The partitions to delete, with C(profile), C(placement), C(uuid), the C(claims) that use them, and the C(owner), as in RV(checkpoint).
      type: list
      elements: dict
      returned: success
      sample: []
    held_by:
      description: Processes and claims that use partitions to be deleted.
      type: list
      elements: str
      returned: success
      sample: []
    error:
      description: Why the GPU cannot reach the requested layout, or why it cannot be read, with C(code), C(message), and C(hint). Otherwise null.
      type: dict
      returned: success
      sample: {"code": "does-not-fit", "message": "it does not fit", "hint": ""}
    message:
      description: The difference as text.
      type: str
      returned: success
      sample: "NVIDIA H100 80GB HBM3 0 is not as wanted (static: 1 × 3g.40gb): missing: 3g.40gb at 4"
exported:
  description: The current layout.
  returned: O(state=exported)
  type: dict
  contains:
    layout:
      description:
        - Rules for O(layout) that create the current state, with all placements. Identical GPUs share a rule. A GPU with partitions that the node
          driver created for claims is C(dynamic).
      type: list
      elements: dict
      returned: success
      sample:
        - match: {"vendor": "nvidia", "index": [0]}
          mode: static
          partitions: [{"profile": "3g.40gb", "placement": 4}]
    config:
      description:
        - The same layout as the content of a C(nvidia-mig-parted) file with one configuration. Its name is O(config_name), or V(current) if the
          option is not set. Such files contain no placements.
      type: dict
      returned: success
      sample:
        version: v1
        mig-configs:
          current:
            - devices: all
              mig-enabled: false
    possible:
      description:
        - The possible layouts of the GPUs, as the content of a second such file. It contains the configurations that C(nvidia-mig-parted
          generate-config) writes, V(all-disabled), V(all-enabled), V(all-balanced), and one for each profile, such as V(all-1g.10gb).
      type: dict
      returned: success
      sample:
        version: v1
        mig-configs:
          all-1g.10gb:
            - devices: all
              mig-enabled: true
              mig-devices: {"1g.10gb": 7}
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
  description: Parts that an export cannot contain, that a checkpoint could not restore, or that were not restored. Each is also a warning.
  returned: O(state=exported), O(state=checkpointed) and O(state=restored)
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

import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import NodeScan, consent
from ansible_collections.dra.accelerators.plugins.module_utils._layout.describe import assign_modes
from ansible_collections.dra.accelerators.plugins.module_utils._layout.layout_module import (
    ASSERTED,
    CHECKPOINTED,
    EXPORTED,
    PRESENT,
    RESTORED,
    STATE_OPTIONS,
    STATE_REQUIRED_IF,
    VALID,
    WITH_LAYOUT,
    Assigned,
    Layouts,
    assert_devices,
    checkpoint_devices,
    export_devices,
    partition_devices,
    restore_devices,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import (
    INTERPRETER_OPTION,
    end,
    find_binding,
    run,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import BackendUnavailable, InvalidLayout
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import Rule, parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.backend import NvidiaBackend
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.mig_parted import (
    configuration_of,
    file_in_config_map,
    possible_configurations,
    rules_from_mig_parted,
)

try:
    import yaml
except ImportError:
    HAS_YAML = False
    YAML_IMPORT_ERROR = traceback.format_exc()
else:
    HAS_YAML = True
    YAML_IMPORT_ERROR = ""

STATE_PATH = "/var/lib/kubelet/plugins/gpu.nvidia.com/state.db"


def argument_spec() -> dict[str, Any]:
    # The core validates the keys of a rule, and names the rule in errors. The node driver uses the same code.
    return {
        **INTERPRETER_OPTION,
        "layout": {"type": "list", "elements": "dict"},
        "config": {"type": "dict"},
        "config_file": {"type": "path"},
        "config_name": {"type": "str"},
        "reset": {"type": "str", "choices": ["never", "when_needed"]},
        "state_path": {"type": "path", "default": STATE_PATH},
        "mode_only": {"type": "bool", "default": False},
        **STATE_OPTIONS,
    }


LAYOUT_OPTIONS = ("layout", "config", "config_file")
CONSTRAINTS: dict[str, Any] = {
    "mutually_exclusive": [LAYOUT_OPTIONS],
    "required_if": STATE_REQUIRED_IF,
    "required_by": {"config": ("config_name",), "config_file": ("config_name",)},
}


def read_config(module: AnsibleModule) -> dict[str, Any]:
    """Return the nvidia-mig-parted document of the options."""
    path = module.params["config_file"]
    if path is None:
        document: dict[str, Any] = module.params["config"]
        wrapped = file_in_config_map(document)
        return document if wrapped is None else parse_config(module, "config", wrapped)
    try:
        text = System().read_text(path)
    except OSError as error:
        raise InvalidLayout(f"config_file {path} cannot be read: {error.strerror}", code="config-unreadable") from error
    content = parse_config(module, f"config_file {path}", text)
    wrapped = file_in_config_map(content)
    return content if wrapped is None else parse_config(module, f"config_file {path}", wrapped)


def parse_config(module: AnsibleModule, source: str, text: str) -> dict[str, Any]:
    """Parse a YAML text. ``source`` names it in errors. Raises InvalidLayout."""
    if not HAS_YAML:
        module.fail_json(msg=missing_required_lib("PyYAML", reason=f"to read {source}"), exception=YAML_IMPORT_ERROR)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidLayout(f"{source} is not YAML: {error}", code="config-unreadable") from error
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds {type(content).__name__}"
        raise InvalidLayout(
            f"{source} {found}, expected a dictionary with version and mig-configs", code="config-unreadable"
        )
    return content


def read_rules(module: AnsibleModule, scan: NodeScan) -> tuple[Rule, ...]:
    """Return the rules of the options for the scanned devices."""
    if module.params["layout"] is not None:
        return parse_rules(module.params["layout"])
    return rules_from_mig_parted(read_config(module), module.params["config_name"], scan.devices, scan.unread)


def check_parameters(module: AnsibleModule) -> None:
    """End the module for options that do not match its state, and for invalid rules."""
    params = module.params
    given = [name for name in LAYOUT_OPTIONS if params[name] is not None]
    if params["state"] in WITH_LAYOUT and not given:
        end(module, msg=f"one of the following is required: {', '.join(LAYOUT_OPTIONS)}")
    if params["state"] not in WITH_LAYOUT and given:
        end(module, msg=f"state {params['state']} does not support the option {given[0]}")
    if params["mode_only"] and params["state"] not in (PRESENT, ASSERTED):
        end(module, msg=f"mode_only goes together with the states {PRESENT} and {ASSERTED}, not with {params['state']}")
    if params["layout"] is not None:
        parse_rules(params["layout"])


def modes(scan: NodeScan, rules: tuple[Rule, ...]) -> Assigned:
    """Plan only the MIG modes."""
    return assign_modes(scan.devices, rules, scan.prepared)


def exported_config(scan: NodeScan, name: str) -> tuple[dict[str, Any], Sequence[str]]:
    """Return a document of nvidia-mig-parted with the current devices, one with possible layouts, and the parts that cannot be exported."""
    document, left_out = configuration_of(scan.devices, name, scan.unread)
    return {"config": document, "possible": possible_configurations(scan.devices)}, left_out


def bring_about(module: AnsibleModule, backend: NvidiaBackend) -> dict[str, Any]:
    """Apply the state with an open backend, and return the result."""
    params, state = module.params, module.params["state"]
    layouts = Layouts(
        "nvidia_mig",
        "GPU",
        lambda scan: read_rules(module, scan),
        agree=lambda assignments: consent(assignments, params["reset"]),
        holders=lambda uuids: backend.reset_holders(uuids, params["state_path"]),
    )
    if state == ASSERTED:
        return assert_devices(module, backend, layouts, mode_only=params["mode_only"])
    if state == EXPORTED:
        name = params["config_name"] or "current"
        return export_devices(module, backend, lambda scan: exported_config(scan, name))
    if state == CHECKPOINTED:
        return checkpoint_devices(module, backend, System())
    if state == RESTORED:
        return restore_devices(module, backend, layouts, System())
    return partition_devices(module, backend, replace(layouts, plan=modes) if params["mode_only"] else layouts)


def work(module: AnsibleModule) -> dict[str, Any]:
    check_parameters(module)
    if module.params["state"] == VALID:
        read_rules(module, NodeScan((), (), ()))
        return {"changed": False}
    missing = find_binding("pynvml", module.params["interpreter"])
    if missing is not None:
        raise BackendUnavailable(
            missing,
            hint="Install the package nvidia-ml-py into one of them, for example with the role "
            "dra.accelerators.python_environment, or name another with the option interpreter.",
            code="binding-missing",
        )
    backend = NvidiaBackend(System())
    backend.open()
    try:
        return bring_about(module, backend)
    finally:
        backend.close()


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
