#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_mig_info
version_added: 0.1.0
short_description: Read, export, and compare the MIG layout of a node's NVIDIA GPUs
description:
  - Returns the MIG mode and the partitions of each GPU, and exports them as a layout for M(dra.accelerators.nvidia_mig) and for C(nvidia-mig-parted).
  - With a layout, the module compares the GPUs with it. It does not fail for a difference. Use C(failed_when) to fail.
  - The module can also validate a layout without a GPU, see O(read_devices).
  - It replaces the commands C(assert), C(export), and C(generate-config) of C(nvidia-mig-parted).
notes:
  - Requires root on the node, unless O(read_devices) is V(false).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.info_module
  - dra.accelerators._layout_rules.nvidia
  - dra.accelerators._nvml
attributes:
  platform:
    support: full
    platforms: linux
options:
  layout:
    description:
      - Rules for the layout of the GPUs. For each GPU the first matching rule applies. The module does not compare a GPU without a
        matching rule.
      - Without O(layout), O(config), and O(config_file), the module compares nothing, and RV(matches) and RV(differences) are not returned.
  mode_only:
    description:
      - Whether to compare only the MIG mode, and not the partitions. Requires a layout.
    type: bool
    default: false
  read_devices:
    description:
      - Whether to read the GPUs. With V(false), the module only validates the layout, and fails if it is invalid. It needs no GPU, no driver, and
        no C(nvidia-ml-py), and it returns no GPUs and no differences. One of O(layout), O(config), and O(config_file) is then required.
    type: bool
    default: true
  export_name:
    description:
      - The name of the configuration in RV(exported.config).
    type: str
    default: current
seealso:
  - module: dra.accelerators.accelerator_info
  - module: dra.accelerators.nvidia_mig
"""

EXAMPLES = r"""
- name: Fail if the GPUs differ from the layout
  dra.accelerators.nvidia_mig_info:
    layout:
      - match: {}
        mode: static
        partitions:
          1g.10gb: 7
  register: result
  failed_when: result is failed or not result.matches

- name: Compare the GPUs with a configuration of nvidia-mig-parted
  dra.accelerators.nvidia_mig_info:
    config_file: /etc/nvidia-mig-manager/config.yaml
    config_name: all-balanced
  register: compared

- name: Show the differences
  ansible.builtin.debug:
    msg: "{{ compared.differences | map(attribute='message') }}"
  when: not compared.matches

- name: Validate a configuration of nvidia-mig-parted on a host without GPUs
  dra.accelerators.nvidia_mig_info:
    config_file: config.yaml
    config_name: all-balanced
    read_devices: false
  delegate_to: localhost

- name: Export the current layout
  dra.accelerators.nvidia_mig_info:
    export_name: saved
  register: present

- name: Write the exported layout to a file of nvidia-mig-parted
  ansible.builtin.copy:
    content: "{{ present.exported.config | to_nice_yaml }}"
    dest: /etc/nvidia-mig-manager/saved.yaml
    mode: "0644"
"""

RETURN = r"""
devices:
  description: The MIG mode and the partitions of each GPU that can be read.
  returned: if O(read_devices) is V(true)
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
exported:
  description: The current layout.
  returned: if O(read_devices) is V(true)
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
        - The same layout as the content of a C(nvidia-mig-parted) file with one configuration, O(export_name). Such files contain no placements.
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
left_out:
  description:
    - Parts of the current layout that RV(exported) cannot contain, and GPUs that cannot be read. Without a layout, each is also a warning.
  returned: if O(read_devices) is V(true)
  type: list
  elements: str
  sample: []
matches:
  description: Whether every GPU with a matching rule has the layout of the rule, and every GPU can be read.
  returned: with a layout, if O(read_devices) is V(true)
  type: bool
  sample: false
differences:
  description: The GPUs that differ from the layout, with the differences. A GPU that cannot be read differs from every layout.
  returned: with a layout, if O(read_devices) is V(true)
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
    requested:
      description: The layout of the rule, as text. Empty if the GPU cannot be read.
      type: str
      returned: success
      sample: "static: 1 × 3g.40gb"
    mode:
      description: Whether MIG is enabled (C(found)), and whether the rule enables it (C(requested)). Null if the GPU cannot be read.
      type: dict
      returned: success
      sample: {"found": false, "requested": true}
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
        - The partitions to delete, with C(profile), C(placement), C(uuid), the C(claims) that use them, and the C(owner). The owner is V(claim) if the
          node driver created the partition for a claim, and V(administrator) if another program created it. It is V(foreign) if the partition was
          created manually in a form that no profile has.
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
      sample: "NVIDIA H100 80GB HBM3 0 differs from the requested layout (static: 1 × 3g.40gb): missing: 3g.40gb at 4"
error_code:
  description: A stable code for the type of the error.
  returned: failure
  type: str
  sample: backend-unavailable
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import NodeScan
from ansible_collections.dra.accelerators.plugins.module_utils._layout.layout_info import READ_OPTION, read_layout
from ansible_collections.dra.accelerators.plugins.module_utils._layout.nvidia_layout import (
    LAYOUT_CONSTRAINTS,
    LAYOUT_OPTIONS,
    OPTIONS,
    layout_rules,
    require_binding,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import end, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.backend import NvidiaBackend
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia.mig_parted import (
    configuration_of,
    possible_configurations,
)


def argument_spec() -> dict[str, Any]:
    return {**OPTIONS, **READ_OPTION, "export_name": {"type": "str", "default": "current"}}


CONSTRAINTS: dict[str, Any] = {
    **LAYOUT_CONSTRAINTS,
    "required_if": [("read_devices", False, LAYOUT_OPTIONS, True)],
}


def check_parameters(module: AnsibleModule) -> None:
    """End the module for options that need a layout, and for invalid rules."""
    params = module.params
    if params["mode_only"] and all(params[name] is None for name in LAYOUT_OPTIONS):
        end(module, msg=f"mode_only requires one of the following: {', '.join(LAYOUT_OPTIONS)}")
    if params["layout"] is not None:
        parse_rules(params["layout"])


def work(module: AnsibleModule) -> dict[str, Any]:
    check_parameters(module)
    params = module.params
    if not params["read_devices"]:
        layout_rules(module)
        return {"changed": False}
    require_binding(module)
    rules = layout_rules(module)

    def exported_configs(scan: NodeScan) -> tuple[dict[str, Any], Sequence[str]]:
        document, left_out = configuration_of(scan.devices, params["export_name"], scan.unread)
        return {"config": document, "possible": possible_configurations(scan.devices)}, left_out

    backend = NvidiaBackend(System())
    backend.open()
    with contextlib.closing(backend):
        return read_layout(module, backend, rules, mode_only=params["mode_only"], more=exported_configs)


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
