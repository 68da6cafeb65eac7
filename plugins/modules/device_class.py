#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_class
version_added: 0.1.0
short_description: Create, update, and delete DeviceClasses
description:
  - Creates, updates, and deletes one or more DeviceClasses of the C(resource.k8s.io) API. Before the first write, the API server validates
    all of them in a dry run, including their CEL expressions.
  - This collection manages classes with the label C(app.kubernetes.io/managed-by=dra-accelerators). By default, the module does not change
    other classes. The option O(on_unmanaged) can change this.
  - The role P(dra.accelerators.device_classes#role) creates the standard classes of the vendors. Use this module for custom classes.
notes:
  - Requires the permissions to list, create, update, and delete C(deviceclasses) in the API group C(resource.k8s.io).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
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
      - V(present) creates or updates the classes, and V(absent) deletes them.
      - Running pods keep their devices when a class is deleted. New claims that request the class stay pending.
    type: str
    default: present
    choices:
      - present
      - absent
  classes:
    description: The DeviceClasses.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: The name of the class, a DNS subdomain.
        type: str
        required: true
      selectors:
        description: CEL expressions. A device belongs to the class if all of them are true for it. An empty list selects all devices of all drivers.
        type: list
        elements: str
        default: []
      config:
        description: Opaque driver configurations for every claim of the class, in the format of the API.
        type: list
        elements: dict
        default: []
      extended_resource:
        description:
          - The extended resource through which pods without a claim can request devices of the class.
          - On Kubernetes 1.34 and 1.35, the API server drops this field unless the feature gate C(DRAExtendedResource) is on.
        type: str
        default: ""
  on_unmanaged:
    description:
      - How to handle existing classes with these names that this collection does not manage. V(leave) does not change them and returns their
        names. V(refuse) fails before any change. V(replace) updates or deletes them like managed classes.
    type: str
    default: leave
    choices:
      - leave
      - refuse
      - replace
seealso:
  - name: Device classes
    description: The Kubernetes documentation of device classes.
    link: https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
  - module: dra.accelerators.claim_config_info
"""

EXAMPLES = r"""
- name: Create a class for large GPUs and a class with a power limit
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

- name: Delete a class
  dra.accelerators.device_class:
    state: absent
    classes:
      - name: large-gpu
"""

RETURN = r"""
steps:
  description: The performed writes in order. In check mode, the expected writes.
  returned: success, and on failure after the first write
  type: list
  elements: dict
  contains:
    verb:
      description: The operation, V(create), V(update), or V(delete).
      type: str
      returned: success
      sample: create
    name:
      description: The name of the class.
      type: str
      returned: success
      sample: large-gpu
classes:
  description: The classes after the run by name, with C(selectors), C(config), and C(extended_resource). In check mode, the expected classes.
  returned: success
  type: dict
  sample:
    large-gpu:
      selectors: ["device.driver == 'gpu.nvidia.com'"]
      config: []
      extended_resource: example.com/large-gpu
unmanaged:
  description: The unchanged classes that this collection does not manage.
  returned: success
  type: list
  elements: str
  sample: []
dropped_fields:
  description: The fields that the API server dropped because a feature gate is off. The module also warns about them.
  returned: success
  type: list
  elements: str
  sample: []
error_code:
  description: A stable error code, such as V(foreign-class) or V(invalid-classes).
  returned: failure
  type: str
  sample: foreign-class
status:
  description: The HTTP status of the rejected request, or 0 if the API server was not reached.
  returned: failure of a request
  type: int
  sample: 422
reason:
  description: The reason for the rejection, as the API server reports it.
  returned: failure of a request
  type: str
  sample: Invalid
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.managed_classes import Classes
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.dra.extended_claims import describe_duplicate

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
        "on_unmanaged": {"type": "str", "default": "leave", "choices": ["leave", "refuse", "replace"]},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    done = Classes(connect(module)).apply(
        params["classes"],
        absent=params["state"] == "absent",
        unmanaged=params["on_unmanaged"],
        dry=module.check_mode,
    )
    for field in done.dropped:
        module.warn(f"The API server did not keep {field}.")
    for resource, names in done.duplicates.items():
        module.warn(describe_duplicate(resource, names))
    if done.left:
        module.warn(
            f"Another program or person created the DeviceClasses {', '.join(done.left)}. They were not changed."
        )
    return {
        "changed": bool(done.steps),
        "steps": list(done.steps),
        "classes": dict(done.after),
        "unmanaged": list(done.left),
        "dropped_fields": list(done.dropped),
        "diff": {"before": dict(done.before), "after": dict(done.after)},
    }


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
