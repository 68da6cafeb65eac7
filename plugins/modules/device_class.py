#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_class
version_added: 0.1.0
short_description: Write the DeviceClasses by which pods ask for devices
description:
  - Creates, updates, and deletes DeviceClasses of the C(resource.k8s.io) API, one or many at once. Before the first write, the API server validates
    all of them in a dry run, including their CEL expressions.
  - Classes that somebody else made are left as they are, unless O(foreign) says otherwise. Those of this collection bear the label
    C(app.kubernetes.io/managed-by=dra-accelerators), as the role P(dra.accelerators.device_classes#role) writes them.
  - The standard classes of the vendors come from that role; this module is for a site's own.
notes:
  - Needs the permissions to list, create, update and delete C(deviceclasses) in the API group C(resource.k8s.io).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._kubernetes
attributes:
  check_mode:
    support: full
    details:
      - The API server validates the writes in a dry run, which requires the same permissions.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  state:
    description:
      - Whether the classes are to exist. Pods that are running keep their devices when a class is removed; new claims that name it wait.
    type: str
    default: present
    choices:
      - present
      - absent
  classes:
    description: The classes.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: The name of the class, a DNS subdomain.
        type: str
        required: true
      selectors:
        description: CEL expressions; a device belongs to the class when all of them are true for it. None for all devices of all drivers.
        type: list
        elements: str
        default: []
      config:
        description: Opaque configurations of drivers that apply to every claim of the class, as in the API.
        type: list
        elements: dict
        default: []
      extended_resource:
        description:
          - Extended resource that also reaches the devices of the class, for pods without a claim.
          - On Kubernetes 1.34 and 1.35 the API server drops it unless the feature gate C(DRAExtendedResource) is on.
        type: str
        default: ""
  foreign:
    description:
      - What becomes of classes of these names that somebody else made. V(leave) leaves them as they are and names them, V(refuse) fails before anything
        is touched, and V(replace) changes or removes them like the collection's own.
    type: str
    default: leave
    choices:
      - leave
      - refuse
      - replace
seealso:
  - name: Device classes
    description: What a class is.
    link: https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
  - module: dra.accelerators.claim_config_info
"""

EXAMPLES = r"""
- name: Have a class for large GPUs and one for those that may use little power
  dra.accelerators.device_class:
    classes:
      - name: large-gpu
        selectors:
          - device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'
          - device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('70Gi')) >= 0
        extended_resource: example.com/large-gpu
      - name: frugal-gpu
        selectors:
          - device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'
        config:
          - opaque:
              driver: gpu.nvidia.com
              parameters:
                apiVersion: dra.accelerators/v1alpha1
                kind: DeviceSettings
                powerLimit: 400
  delegate_to: localhost

- name: Remove a class
  dra.accelerators.device_class:
    state: absent
    classes:
      - name: large-gpu
"""

RETURN = r"""
steps:
  description: The writes that were done, or would be done in check mode, in order.
  returned: success, and on failure after the first write
  type: list
  elements: dict
  contains:
    verb:
      description: V(create), V(update) or V(delete).
      type: str
      returned: success
      sample: create
    name:
      description: The name of the class.
      type: str
      returned: success
      sample: large-gpu
classes:
  description: The classes after the run, or in check mode as they would be, by name, with C(selectors), C(config) and C(extended_resource).
  returned: success
  type: dict
  sample:
    large-gpu:
      selectors: ["device.driver == 'gpu.nvidia.com'"]
      config: []
      extended_resource: example.com/large-gpu
left:
  description: The classes that somebody else made and that were left as they are.
  returned: success
  type: list
  elements: str
  sample: []
dropped_fields:
  description: What the API server took without keeping it, because a feature gate is off. A warning says the same.
  returned: success
  type: list
  elements: str
  sample: []
error_code:
  description: A stable word for the kind of the error, such as C(foreign-class) or C(invalid-classes).
  returned: failure
  type: str
  sample: foreign-class
status:
  description: The HTTP status with which the API server refused a request; 0 if it was not reached.
  returned: failure of a request
  type: int
  sample: 422
reason:
  description: The API server's own word for the refusal.
  returned: failure of a request
  type: str
  sample: Invalid
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._device_classes import Classes
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.extended_claims import describe_duplicate

CONSTRAINTS: dict[str, Any] = {"required_together": API_REQUIRED_TOGETHER}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
        "classes": {
            "type": "list",
            "elements": "dict",
            "required": True,
            "options": {
                "name": {"type": "str", "required": True},
                "selectors": {"type": "list", "elements": "str", "default": []},
                "config": {"type": "list", "elements": "dict", "default": []},
                "extended_resource": {"type": "str", "default": ""},
            },
        },
        "foreign": {"type": "str", "default": "leave", "choices": ["leave", "refuse", "replace"]},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    done = Classes(connect(module)).bring_about(
        params["classes"], absent=params["state"] == "absent", foreign=params["foreign"], dry=module.check_mode
    )
    for field in done.dropped:
        module.warn(f"The API server did not keep {field}.")
    for resource, names in done.duplicates.items():
        module.warn(describe_duplicate(resource, names))
    if done.left:
        module.warn(f"Somebody else made the DeviceClasses {', '.join(done.left)}; they are left as they are.")
    return {
        "changed": bool(done.steps),
        "steps": list(done.steps),
        "classes": dict(done.after),
        "left": list(done.left),
        "dropped_fields": list(done.dropped),
        "diff": {"before": dict(done.before), "after": dict(done.after)},
    }


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
