#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ascend_vnpu_info
version_added: 0.1.0
short_description: Read, export, and compare the vNPU layout of a node's Ascend NPUs
description:
  - Returns the vNPUs of each NPU, and exports them as a layout for M(dra.accelerators.ascend_vnpu).
  - With a layout, the module compares the NPUs with it. It does not fail for a difference. Use C(failed_when) to fail.
  - The module can also validate a layout without an NPU, see O(read_devices).
notes:
  - In the first 10 minutes after a boot, the module waits up to 60 s while C(/etc/vnpu.cfg) has vNPUs that the vendor's script has not restored yet.
    RV(waited_for) lists these vNPUs. If some are still missing after that time, the module warns and continues without them.
  - Requires root on the node, unless O(read_devices) is V(false).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.info_module
  - dra.accelerators._layout_rules.ascend
requirements:
  - The driver of the NPUs on the node, with C(libdcmi.so) and C(npu-smi), unless O(read_devices) is V(false).
attributes:
  platform:
    support: full
    platforms: linux
options:
  layout:
    description:
      - Rules for the layout of the NPUs. For each NPU the first matching rule applies. The module does not compare an NPU without a matching rule.
      - Without it, the module compares nothing, and RV(matches) and RV(differences) are not returned.
  read_devices:
    description:
      - Whether to read the NPUs. With V(false), the module only validates O(layout), and fails if it is invalid. It needs no NPU and no driver, and
        it returns no NPUs and no differences. O(layout) is then required.
    type: bool
    default: true
seealso:
  - module: dra.accelerators.accelerator_info
  - module: dra.accelerators.ascend_vnpu
"""

EXAMPLES = r"""
- name: Fail if the NPUs differ from the layout
  dra.accelerators.ascend_vnpu_info:
    layout:
      - match: {}
        mode: static
        partitions:
          vir02: 4
  register: result
  failed_when: result is failed or not result.matches

- name: Validate a layout on a host without NPUs
  dra.accelerators.ascend_vnpu_info:
    layout:
      - match: {}
        mode: static
        partitions:
          vir02: 4
    read_devices: false
  delegate_to: localhost

- name: Export the current layout of the NPUs
  dra.accelerators.ascend_vnpu_info:
  register: present
"""

RETURN = r"""
devices:
  description: The vNPUs of each NPU that can be read.
  returned: if O(read_devices) is V(true)
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
exported:
  description: The current layout.
  returned: if O(read_devices) is V(true)
  type: dict
  contains:
    layout:
      description:
        - Rules for O(layout) that describe the current vNPUs with all placements. Identical NPUs share a rule. An NPU with vNPUs that the node
          driver created for claims has the mode V(dynamic).
      type: list
      elements: dict
      returned: success
      sample:
        - match: {"vendor": "ascend", "index": [0]}
          mode: static
          partitions: [{"profile": "vir02", "placement": 4}]
left_out:
  description:
    - Parts of the current layout that RV(exported) cannot contain, and NPUs that cannot be read. If O(layout) is not set, each is also a warning.
  returned: if O(read_devices) is V(true)
  type: list
  elements: str
  sample: []
matches:
  description: Whether every NPU that a rule matches has the layout of the rule, and every NPU can be read.
  returned: if O(layout) is set and O(read_devices) is V(true)
  type: bool
  sample: false
differences:
  description: The NPUs that differ from the layout, with their differences. An NPU that cannot be read differs from every layout.
  returned: if O(layout) is set and O(read_devices) is V(true)
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
      description: The product name. It is empty for an NPU that cannot be read.
      type: str
      returned: success
      sample: Atlas 300I Pro
    pci_address:
      description: The PCI address. It is empty for an NPU that cannot be read.
      type: str
      returned: success
      sample: "0000:82:00.0"
    requested:
      description: The layout of the rule, as text. It is empty for an NPU that cannot be read.
      type: str
      returned: success
      sample: "static: 1 × vir02"
    mode:
      description: The value is null, because NPUs have no partitioning mode to enable.
      type: dict
      returned: success
      sample: {}
    missing:
      description: The vNPUs to create, with C(profile) and C(placement).
      type: list
      elements: dict
      returned: success
      sample:
        - profile: vir02
          placement: {"start": 4, "size": 2}
    surplus:
      description:
        - The vNPUs to delete, with C(profile), C(placement), C(uuid), the C(claims) that use them, and the C(owner). The owner is V(claim) if the
          node driver created the vNPU for a claim, V(administrator) if another program or user created it, and V(foreign) if it was created manually
          in a form that no profile has.
      type: list
      elements: dict
      returned: success
      sample: []
    held_by:
      description: The processes and claims that use the NPU or the vNPUs to be deleted.
      type: list
      elements: str
      returned: success
      sample: []
    error:
      description: Why the NPU cannot reach the requested layout, or why it cannot be read, with C(code), C(message), and C(hint). Otherwise null.
      type: dict
      returned: success
      sample: {"code": "does-not-fit", "message": "it does not fit", "hint": ""}
    message:
      description: The difference as text.
      type: str
      returned: success
      sample: "Atlas 300I Pro 0 differs from the requested layout (static: 1 × vir02): missing: vir02 at 4"
waited_for:
  description:
    - The vNPUs of C(/etc/vnpu.cfg) that the vendor's script had not restored after the boot when the module started, and each change of this list. It is
      empty if the module did not wait.
  returned: if O(read_devices) is V(true)
  type: list
  elements: str
  sample: []
error_code:
  description: A stable code for the type of the error.
  returned: failure
  type: str
  sample: backend-unavailable
"""

import contextlib
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._layout.ascend_layout import (
    OPTIONS,
    await_restored,
    layout_rules,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.layout_info import READ_OPTION, read_layout
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.ascend.backend import AscendBackend


def argument_spec() -> dict[str, Any]:
    return {**OPTIONS, **READ_OPTION}


CONSTRAINTS: dict[str, Any] = {"required_if": [("read_devices", False, ("layout",))]}


def work(module: AnsibleModule) -> dict[str, Any]:
    rules = layout_rules(module)
    if not module.params["read_devices"]:
        return {"changed": False}
    backend = AscendBackend(System())
    backend.open()
    with contextlib.closing(backend):
        waited = await_restored(module, backend)
        return {**read_layout(module, backend, rules), "waited_for": waited}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
