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
  - Brings the GPUs of a node to a wanted layout of MIG partitions, with the fewest existing partitions disturbed.
  - The layout is a list of rules, or a configuration of C(nvidia-mig-parted), unchanged.
  - All GPUs are looked at and all steps are planned before the first one is taken. If a process or a prepared
    resource claim holds anything that would have to go, nothing is touched on any GPU, and the error names the process
    IDs and the claims.
  - If a step fails, the steps before it are undone, on all GPUs.
  - GPUs that change are locked against the node driver from the look to the last step. Claims on them wait, claims on
    others go on. If a claim is being worked on for longer than a minute, the module fails and says who has the lock.
  - For a reset the node driver lets go of the NVIDIA library and takes it up again afterwards.
  - With other values of O(state) it compares, describes, keeps and brings back layouts, as C(nvidia-mig-parted) does with its commands
    C(assert), C(export), C(checkpoint) and C(restore). Its hooks are tasks before and after, and handlers.
notes:
  - No partition survives a reboot, and from the Hopper generation on neither does the MIG mode. The role
    P(dra.accelerators.nvidia_mig#role) has the layout applied again at every boot.
  - Needs root on the node.
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
      - RV(steps) and RV(after) show what would be done. Refusals are the same as without check mode.
  diff_mode:
    support: full
    details:
      - One entry for each GPU that changes.
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
          - Which GPUs the rule is for. All given keys must match; an empty dictionary matches every GPU.
        type: dict
        required: true
        suboptions:
          vendor:
            description: The vendor. This module supports only V(nvidia).
            type: str
          index:
            description: The number that the driver gives the GPU, or a list of such numbers.
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
          - For O(layout[].mode=static), a dictionary of profile names and counts, or a list of dictionaries with
            C(profile) and C(count), or C(profile) and C(placement), the first memory slice, for a fixed placement.
        type: raw
      shares:
        description:
          - For O(layout[].mode=whole), the number of claims that can share the GPU, from 2 to 1024. By default, one claim can use the GPU.
          - This module does not use it. The node driver reads the same rules and publishes the GPU accordingly.
        type: int
      prepared_before_binding:
        description:
          - For O(layout[].mode=dynamic), or with O(layout[].passthrough), whether pods are bound to the node only when the GPU is
            prepared for them.
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
      - The content of a C(nvidia-mig-parted) configuration file, as data, from which O(config_name) is applied. A ConfigMap with the file in
        its data is accepted as well, as with O(config_file).
    type: dict
  config_file:
    description:
      - Path of a C(nvidia-mig-parted) configuration file on the node, from which O(config_name) is applied.
      - Needs the Python package C(PyYAML) on the node.
    type: path
  config_name:
    description:
      - The name of the configuration in O(config) or O(config_file), or for O(state=exported) of the one in RV(exported.config).
    type: str
  mode_only:
    description:
      - Whether to change, or with O(state=asserted) to compare, only the MIG mode. No partition is created. Partitions are deleted only
        where MIG is turned off.
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
    description: The profiles of each board and how they can be placed.
    link: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/
"""

EXAMPLES = r"""
- name: Cut the first GPU, leave the others to the node driver
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

- name: Put a partition in a certain place
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

- name: Cut boards of the Ampere generation, which takes a reset
  dra.accelerators.nvidia_mig:
    layout:
      - match:
          product: "*A100*"
        mode: static
        partitions:
          1g.5gb: 7
    reset: when_needed

- name: Apply a configuration of nvidia-mig-parted that is on the node
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

- name: Turn MIG on where the layout has partitions, and make none yet
  dra.accelerators.nvidia_mig:
    layout:
      - match: {}
        mode: static
        partitions:
          1g.10gb: 7
    mode_only: true

- name: Fail where the GPUs are not as the layout wants
  dra.accelerators.nvidia_mig:
    state: asserted
    layout:
      - match: {}
        mode: static
        partitions:
          1g.10gb: 7

- name: Look what differs from a configuration of nvidia-mig-parted
  dra.accelerators.nvidia_mig:
    state: asserted
    config_file: /etc/nvidia-mig-manager/config.yaml
    config_name: all-balanced
    on_difference: report
  register: compared

- name: Describe the GPUs as they are
  dra.accelerators.nvidia_mig:
    state: exported
    config_name: of-today
  register: present

- name: Write that down as a file of nvidia-mig-parted
  ansible.builtin.copy:
    content: "{{ present.exported.config | to_nice_yaml }}"
    dest: /etc/nvidia-mig-manager/of-today.yaml
    mode: "0644"

- name: Keep what the GPUs are, before the driver is changed
  dra.accelerators.nvidia_mig:
    state: checkpointed
    checkpoint_file: /var/lib/dra-accelerators/before-upgrade.json

- name: Bring it back afterwards
  dra.accelerators.nvidia_mig:
    state: restored
    checkpoint_file: /var/lib/dra-accelerators/before-upgrade.json
    reset: when_needed
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
        - The kind of the step, one of V(set_partitioning), V(reset_device), V(destroy_partition) and
          V(create_partition).
      type: str
      returned: success
      sample: create_partition
    indices:
      description: The numbers that the driver gives the GPUs that the step concerns.
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
      description: How many memory slices the partition covers.
      type: int
      returned: for partitions
      sample: 4
    uuid:
      description: The UUID of the partition that is destroyed.
      type: str
      returned: for V(destroy_partition)
      sample: MIG-0c1d0c5e-6b1b-5d6f-9f50-1c5d8f2f7a10
    enabled:
      description: Whether MIG is switched on.
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
      description: The step in words.
      type: str
      returned: success
      sample: create 3g.40gb at 4:4 on GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
before:
  description: The mode and the partitions of each GPU of RV(devices), before.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    index:
      description: The number that the driver gives the GPU.
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
      description: Whether MIG is on.
      type: bool
      returned: success
      sample: true
    pending:
      description: Whether MIG will be on after the next reset of the GPU.
      type: bool
      returned: success
      sample: true
    partitions:
      description: The partitions, in the order of their places.
      type: list
      elements: dict
      returned: success
      sample:
        - profile: 3g.40gb
          placement: {"start": 4, "size": 4}
          uuid: MIG-0c1d0c5e-6b1b-5d6f-9f50-1c5d8f2f7a10
after:
  description:
    - The same GPUs in the form of RV(before), afterwards. In check mode as it would be; partitions yet to be made have
      an empty UUID.
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
  description: What happens to each GPU that a rule matches, or that has to be reset along with one of them.
  returned: O(state=present) and O(state=restored)
  type: list
  elements: dict
  contains:
    index:
      description: The number that the driver gives the GPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the GPU.
      type: str
      returned: success
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    mode:
      description: The mode that the rule wants; null for a GPU that no rule matches.
      type: str
      returned: success
      sample: static
    changed:
      description: Whether the GPU was changed, or would be in check mode.
      type: bool
      returned: success
      sample: true
    kept:
      description: How many existing partitions were left alone.
      type: int
      returned: success
      sample: 2
    reset_required:
      description: Whether the GPU reaches the wanted layout only after a reset that was not allowed.
      type: bool
      returned: success
      sample: false
reset_required:
  description: Whether any GPU reaches the wanted layout only after a reset that was not allowed.
  returned: O(state=present) and O(state=restored)
  type: bool
  sample: false
matches:
  description: Whether every GPU that a rule matches is as it wants.
  returned: O(state=asserted), success or failure for a difference
  type: bool
  sample: false
differences:
  description: The GPUs that are not as the layout wants, and how they differ.
  returned: O(state=asserted), success or failure for a difference
  type: list
  elements: dict
  contains:
    index:
      description: The number that the driver gives the GPU.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The UUID of the GPU.
      type: str
      returned: success
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    product:
      description: The product name; empty for a GPU that could not be read.
      type: str
      returned: success
      sample: NVIDIA H100 80GB HBM3
    pci_address:
      description: The PCI address; empty for a GPU that could not be read.
      type: str
      returned: success
      sample: "0000:18:00.0"
    wanted:
      description: What the rule wants, in words.
      type: str
      returned: success
      sample: "static: 1 × 3g.40gb"
    mode:
      description: Whether MIG is on (C(found)), and is to be (C(wanted)); null for a GPU that could not be read.
      type: dict
      returned: success
      sample: {"found": false, "wanted": true}
    missing:
      description: The partitions that would be made, with C(profile) and C(placement).
      type: list
      elements: dict
      returned: success
      sample:
        - profile: 3g.40gb
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
      description: Why the GPU cannot become what is wanted, or could not be read, with C(code), C(message) and C(hint). Otherwise null.
      type: dict
      returned: success
      sample: {"code": "does-not-fit", "message": "it does not fit", "hint": ""}
    message:
      description: The difference in words.
      type: str
      returned: success
      sample: "NVIDIA H100 80GB HBM3 0 is not as wanted (static: 1 × 3g.40gb): missing: 3g.40gb at 4"
exported:
  description: The present layout.
  returned: O(state=exported)
  type: dict
  contains:
    layout:
      description:
        - Rules for O(layout), with every place, that bring about what is there. GPUs that are alike share a rule. A GPU with partitions
          that the node driver has made for claims is C(dynamic).
      type: list
      elements: dict
      returned: success
      sample:
        - match: {"vendor": "nvidia", "index": [0]}
          mode: static
          partitions: [{"profile": "3g.40gb", "placement": 4}]
    config:
      description:
        - The same as the content of a file of C(nvidia-mig-parted), with one configuration that is called as O(config_name) says,
          V(current) without it. Such files have no places.
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
        - What the GPUs could be, as the content of another such file. It has the configurations that C(nvidia-mig-parted generate-config) writes,
          V(all-disabled), V(all-enabled), V(all-balanced) and for each profile V(all-1g.10gb) and the like.
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
        - profile: 3g.40gb
          placement: {"start": 4, "size": 4}
          uuid: MIG-0c1d0c5e-6b1b-5d6f-9f50-1c5d8f2f7a10
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
      message: GPU 0 is in use
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
  sample: ["create 3g.40gb at 4:4"]
not_undone:
  description: What could not be undone.
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
from ansible_collections.dra.accelerators.plugins.module_utils._layout import Look, consent
from ansible_collections.dra.accelerators.plugins.module_utils._layout_module import (
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
from ansible_collections.dra.accelerators.plugins.module_utils._layout_states import assign_modes
from ansible_collections.dra.accelerators.plugins.module_utils._module import (
    INTERPRETER_OPTION,
    end,
    find_binding,
    run,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend_protocol import Backend
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import BackendUnavailable, InvalidLayout
from ansible_collections.dra.accelerators.plugins.module_utils.core.layout_rules import Rule, parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.backend import NvidiaBackend
from ansible_collections.dra.accelerators.plugins.module_utils.core.nvidia.mig_parted import (
    configuration_of,
    file_in_config_map,
    possible_configurations,
    rules_from_mig_parted,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

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
    # What a rule may hold is checked by the core, which names the rule, and which the node driver shares.
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
    """Return the nvidia-mig-parted document that the parameters name."""
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
    """Parse the text of a file; ``source`` names it in errors. Raises InvalidLayout."""
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


def read_rules(module: AnsibleModule, look: Look) -> tuple[Rule, ...]:
    """Return the rules that the parameters stand for on the devices of a look."""
    if module.params["layout"] is not None:
        return parse_rules(module.params["layout"])
    return rules_from_mig_parted(read_config(module), module.params["config_name"], look.devices, look.unread)


def check_parameters(module: AnsibleModule) -> None:
    """End the module for parameters that do not go together with its state, and for rules that are none."""
    params = module.params
    given = [name for name in LAYOUT_OPTIONS if params[name] is not None]
    if params["state"] in WITH_LAYOUT and not given:
        end(module, msg=f"one of the following is required: {', '.join(LAYOUT_OPTIONS)}")
    if params["state"] not in WITH_LAYOUT and given:
        end(module, msg=f"state {params['state']} takes no layout, but {given[0]} is given")
    if params["mode_only"] and params["state"] not in (PRESENT, ASSERTED):
        end(module, msg=f"mode_only goes together with the states {PRESENT} and {ASSERTED}, not with {params['state']}")
    if params["layout"] is not None:
        parse_rules(params["layout"])


def modes(look: Look, rules: tuple[Rule, ...]) -> Assigned:
    """Plan the modes alone."""
    return assign_modes(look.devices, rules, look.prepared)


def exported_config(look: Look, name: str) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the devices as a document of nvidia-mig-parted, another with what they could be, and what the first cannot say."""
    document, left_out = configuration_of(look.devices, name, look.unread)
    return {"config": document, "possible": possible_configurations(look.devices)}, left_out


def bring_about(module: AnsibleModule, backend: Backend) -> dict[str, Any]:
    """Do what the state asks for, with a backend that is open; returns the result."""
    params, state = module.params, module.params["state"]
    layouts = Layouts(
        "nvidia_mig",
        "GPU",
        lambda look: read_rules(module, look),
        agree=lambda assignments: consent(assignments, params["reset"]),
    )
    if state == ASSERTED:
        return assert_devices(module, backend, layouts, mode_only=params["mode_only"])
    if state == EXPORTED:
        name = params["config_name"] or "current"
        return export_devices(module, backend, lambda look: exported_config(look, name))
    if state == CHECKPOINTED:
        return checkpoint_devices(module, backend, System())
    if state == RESTORED:
        return restore_devices(module, backend, layouts, System())
    return partition_devices(module, backend, replace(layouts, plan=modes) if params["mode_only"] else layouts)


def work(module: AnsibleModule) -> dict[str, Any]:
    check_parameters(module)
    if module.params["state"] == VALID:
        read_rules(module, Look((), (), ()))
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
