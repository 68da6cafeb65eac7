#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cdi_spec
version_added: 0.1.0
short_description: Generate a CDI specification for the accelerators of a node
description:
  - Writes a specification file of the Container Device Interface (CDI) with all devices of a vendor and their partitions. Use it to add devices to
    containers without Kubernetes, for example with C(podman run --device nvidia.com/gpu=0) or C(docker run --device nvidia.com/gpu=all).
    ResourceClaims do not need this file.
  - The container edits are the same as those of the node driver of this collection for claims. The device names are the same as those of NVIDIA's
    C(nvidia-ctk cdi generate).
  - The file has the lowest CDI version that supports its content, so that older runtimes can read it.
  - In check mode, the module reports whether the file matches the current devices and driver.
notes:
  - The file describes the current state. Run the module again after you create or delete partitions, or change the vendor's driver.
  - After a reboot, a device name by index can refer to another device. UUIDs do not change.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._node_driver
attributes:
  check_mode:
    support: full
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
      - V(present) writes a file with the node's devices, or no file if a vendor has no usable device.
      - V(absent) removes the file of this module.
    type: str
    default: present
    choices:
      - present
      - absent
  vendor:
    description:
      - The vendors whose devices are written, each to a separate file. By default, all vendors that have devices on the node.
    type: list
    elements: str
    choices:
      - ascend
      - nvidia
  kind:
    description:
      - The CDI kind of the devices, which consists of a vendor's domain and a class. The default is V(nvidia.com/gpu) or V(huawei.com/npu).
      - If O(kind) is set, O(vendor) must contain exactly one vendor.
    type: str
  directory:
    description:
      - The directory of the file. The file name is C(dra-accelerators-) with the kind. Runtimes read C(/etc/cdi) and C(/var/run/cdi). If both
        directories define a device, the definition in C(/var/run/cdi) takes precedence.
    type: path
    default: /etc/cdi
  names:
    description:
      - The kinds of device names. V(index) names are C(0) for a device and C(0:1) for a partition, for example. V(uuid) names are UUIDs.
      - Partition indices follow the instance IDs. C(nvidia-ctk) uses the order of the library, which can differ. UUIDs are the same in both.
    type: list
    elements: str
    choices:
      - index
      - uuid
    default:
      - index
      - uuid
  all:
    description: Whether to add a device C(all) that contains all devices.
    type: bool
    default: true
  match:
    description:
      - Selects the devices, with the same keys as in the rules of a layout (see M(dra.accelerators.nvidia_mig)). By default, all devices are selected.
    type: dict
  interpreter:
    description:
      - A Python interpreter on the node that can import NVIDIA's binding C(pynvml), from the package C(nvidia-ml-py). The module uses it only if the
        interpreter that Ansible uses on the node cannot import it.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
requirements:
  - For NVIDIA's devices, the Python package C(nvidia-ml-py) on the node, in the interpreter that Ansible uses there or in O(interpreter).
  - The vendor's driver on the node.
seealso:
  - module: dra.accelerators.accelerator_info
  - name: Container Device Interface
    description: The specification of the file format.
    link: https://github.com/cncf-tags/container-device-interface
"""

EXAMPLES = r"""
- name: Generate the CDI files for all devices of the node
  dra.accelerators.cdi_spec:

- name: Check whether the CDI files are current
  dra.accelerators.cdi_spec:
  check_mode: true
  register: drift

- name: Generate a CDI file for two GPUs, with UUIDs only and a custom kind
  dra.accelerators.cdi_spec:
    vendor: [nvidia]
    kind: example.com/gpu
    names: [uuid]
    all: false
    match:
      index: [0, 1]

- name: Remove the CDI file for NVIDIA GPUs
  dra.accelerators.cdi_spec:
    vendor: [nvidia]
    state: absent
"""

RETURN = r"""
specs:
  description: The files, one for each vendor.
  returned: success
  type: list
  elements: dict
  contains:
    vendor:
      description: The vendor.
      type: str
      returned: success
      sample: nvidia
    path:
      description: The path of the file.
      type: str
      returned: success
      sample: /etc/cdi/dra-accelerators-nvidia.com-gpu.json
    kind:
      description: The CDI kind of the devices.
      type: str
      returned: success
      sample: nvidia.com/gpu
    cdi_version:
      description: The CDI version of the file. It is empty if there is no file.
      type: str
      returned: success
      sample: 0.5.0
    exists:
      description: Whether the file exists after the run, or would exist in check mode.
      type: bool
      returned: success
      sample: true
    changed:
      description: Whether the module has written or removed the file, or would do so in check mode.
      type: bool
      returned: success
      sample: true
    devices:
      description:
        - The change of each device, with its C(name) in the file and C(change), which is V(same), V(added), V(changed), or V(removed). The empty name
          stands for the container edits that all devices share.
      type: list
      elements: dict
      returned: success
      sample: [{name: "0", change: same}, {name: "", change: changed}]
    unanswered:
      description:
        - The devices that exist but could not be read, each with the reason. They are not in the file.
        - The module also warns about them.
      type: list
      elements: str
      returned: success
      sample: []
error_code:
  description: A stable error code, such as V(cdi-conflict), V(invalid-kind), or V(driver-incomplete).
  returned: failure
  type: str
  sample: cdi-conflict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime import cdi_spec as cdi_specs
from ansible_collections.dra.accelerators.plugins.module_utils._host.state_directory import (
    STATE_DIRECTORY_OPTIONS,
    check_one_vendor,
    state_directory_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules, wanted_for
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.protocol import Backend
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.registry import BACKENDS, vendors_there

#: The time that the vendor's program has to list its files. It is longer than the node driver's timeout for this program.
SETTLE_SECONDS = 30.0


def argument_spec() -> dict[str, Any]:
    return {
        **INTERPRETER_OPTION,
        **STATE_DIRECTORY_OPTIONS,
        "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
        "vendor": {"type": "list", "elements": "str", "choices": ["ascend", "nvidia"]},
        "kind": {"type": "str"},
        "directory": {"type": "path", "default": "/etc/cdi"},
        "names": {
            "type": "list",
            "elements": "str",
            "choices": ["index", "uuid"],
            "default": ["index", "uuid"],
        },
        "all": {"type": "bool", "default": True},
        "match": {"type": "dict"},
    }


def content_of(backend: Backend, kind: str, params: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the content of a vendor's file (None for no file), and the unreadable devices. Raises AcceleratorError."""
    rules = parse_rules([{"match": params["match"] or {}, "mode": "dynamic"}])
    backend.open()
    try:
        findings = backend.discover()
        devices = [one.device for one in findings if one.device and wanted_for(one.device, rules) is not None]
        found = cdi_specs.entries(backend, devices, params["names"], params["all"])
        unanswered = [one.describe() for one in findings if one.device is None]
        if not found:
            return None, unanswered
        # The first call can return the driver's own list while the vendor's program still runs.
        backend.driver_edits()
        backend.settle(SETTLE_SECONDS)
        return cdi_specs.specification(kind, found, backend.driver_edits()), unanswered
    finally:
        backend.close()


def apply_state(module: AnsibleModule, system: System, vendor: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Write or remove a vendor's file, and return its facts, its diff, and warnings. Raises AcceleratorError, OSError."""
    params = module.params
    backend = BACKENDS[vendor](system)
    backend.use_number_file(state_directory_of(params, backend.driver_name))
    kind = params["kind"] or cdi_specs.kind_of(backend.driver_name)
    path = cdi_specs.file_of(params["directory"], kind)
    unanswered: list[str] = []
    wanted = None
    if params["state"] == "present":
        wanted, unanswered = content_of(backend, kind, params)
    text = system.read_text(path) if system.exists(path) else None
    before = cdi_specs.parse_file(text)
    warnings = [f"One device of {vendor} is not in the file: {each}" for each in unanswered]
    if wanted is not None:
        names = [each["name"] for each in wanted["devices"]]
        found = cdi_specs.other_files(system, (*cdi_specs.DIRECTORIES, params["directory"]), path, kind, names)
        warnings += cdi_specs.refuse_conflicts(found, path, system)
    changed = before != wanted
    if changed and not module.check_mode:
        if wanted is None:
            system.remove(path)
        else:
            system.write_atomic(path, cdi_specs.file_text(wanted).encode(), mode=0o644)
    facts = {
        "vendor": vendor,
        "path": path,
        "kind": kind,
        "cdi_version": wanted["cdiVersion"] if wanted else "",
        "exists": wanted is not None,
        "changed": changed,
        "devices": cdi_specs.differences(before, wanted),
        "unanswered": unanswered,
    }
    # The current file is shown in the format in which it would be written.
    shown = cdi_specs.file_text(before) if before else text or ""
    diff = {
        "before_header": path,
        "after_header": path,
        "before": shown,
        "after": cdi_specs.file_text(wanted),
    }
    return facts, diff, warnings


def work(module: AnsibleModule) -> dict[str, Any]:
    system = System()
    vendors = list(dict.fromkeys(module.params["vendor"] or vendors_there(system)))
    if module.params["kind"] and len(vendors) != 1:
        raise AcceleratorError(
            f"The option kind is set for the devices of {', '.join(vendors) or 'no vendor'}; expected one vendor",
            hint="Set vendor to one vendor.",
            code="invalid-kind",
        )
    check_one_vendor(module.params, vendors)
    if "nvidia" in vendors and module.params["state"] == "present":
        find_binding("pynvml", module.params["interpreter"])
    specs, diffs = [], []
    for vendor in vendors:
        facts, diff, warnings = apply_state(module, system, vendor)
        specs.append(facts)
        diffs.append(diff)
        for text in warnings:
            module.warn(text)
    if not vendors:
        module.warn("The node has no device of a supported vendor.")
    return {"changed": any(each["changed"] for each in specs), "specs": specs, "diff": diffs}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
