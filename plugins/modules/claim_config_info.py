#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: claim_config_info
version_added: 0.1.0
short_description: Check the opaque configurations in manifests before they are applied
description:
  - Finds the configurations for the collection's drivers in ResourceClaims, ResourceClaimTemplates and DeviceClasses of
    all versions of C(resource.k8s.io), and says what the drivers would refuse in them, with the field, what was found and what
    is expected. It uses the drivers' own decoder.
  - Neither a cluster nor a device is asked. What a single device takes, for example the range of its power limit, is known
    to the driver alone, which refuses it when the claim is prepared.
  - Other objects, and configurations for other drivers, are passed over.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._attributes.info_module
attributes:
  platform:
    support: full
    platforms: posix
options:
  definition:
    description:
      - The manifests, as YAML text with one or more documents, as a dictionary, or as a list of dictionaries.
      - One of O(definition) and O(src) is required.
    type: raw
  src:
    description:
      - A file of manifests in YAML or JSON, on the host that the module runs on.
    type: path
  device_classes:
    description:
      - What the devices of the site's own DeviceClasses are, V(device), V(partition), V(passthrough) or V(group), by the class's name, so that a
        configuration for another kind is found.
      - The standard classes of the vendors are known, for example V(gpu.nvidia.com) and V(mig.nvidia.com), and classes among the manifests
        whose selectors demand one value of the attribute by which the vendor tells its kinds apart, as
        C(device.attributes['gpu.nvidia.com'].type == 'mig') joined to others by C(&&). Of other classes nothing is expected.
    type: dict
    default: {}
  fail_if_invalid:
    description:
      - Fail if there is any problem, with all of them in the message.
    type: bool
    default: false
seealso:
  - module: dra.accelerators.resource_slices
"""

EXAMPLES = r"""
- name: Check all claims of a repository before anything is rolled out
  dra.accelerators.claim_config_info:
    src: manifests/claims.yaml
    fail_if_invalid: true
  delegate_to: localhost

- name: Check a class of the site
  dra.accelerators.claim_config_info:
    device_classes:
      gpu-400w: device
    definition:
      apiVersion: resource.k8s.io/v1
      kind: DeviceClass
      metadata:
        name: gpu-400w
      spec:
        config:
          - opaque:
              driver: gpu.nvidia.com
              parameters:
                apiVersion: dra.accelerators/v1alpha1
                kind: DeviceSettings
                powerLimit: 400
  register: checked

- name: Show what is wrong
  ansible.builtin.debug:
    msg: "{{ checked.problems }}"
"""

RETURN = r"""
valid:
  description: Whether there is no problem.
  returned: success
  type: bool
  sample: false
configurations:
  description: How many configurations were looked at; those for other drivers do not count.
  returned: success
  type: int
  sample: 1
problems:
  description: All that is wrong, in the order of the manifests.
  returned: always
  type: list
  elements: dict
  contains:
    object:
      description: The object's kind, and its namespace and name as far as it says them.
      returned: always
      type: str
      sample: ResourceClaim team/training
    path:
      description: The field.
      returned: always
      type: str
      sample: spec.devices.config[0].opaque.parameters.sharing.strategy
    message:
      description: What was found there, and what is expected.
      returned: always
      type: str
      sample: it is 'Quick'; expected TimeSlicing or MPS
doubts:
  description: What is allowed and hardly meant, with the same fields as RV(problems).
  returned: success
  type: list
  elements: dict
  sample: []
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible.module_utils.common.yaml import HAS_YAML, yaml_load_all
from ansible_collections.dra.accelerators.plugins.module_utils._manifests import check_nesting
from ansible_collections.dra.accelerators.plugins.module_utils._module import end, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend import BACKENDS, create
from ansible_collections.dra.accelerators.plugins.module_utils.core.device_classes import kinds_of_classes
from ansible_collections.dra.accelerators.plugins.module_utils.core.documents import any_of, shown
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.manifests import check_manifest
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import OFFER_KINDS

CONSTRAINTS: dict[str, Any] = {
    "mutually_exclusive": [("definition", "src")],
    "required_one_of": [("definition", "src")],
}


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "definition": {"type": "raw"},
        "src": {"type": "path"},
        "device_classes": {"type": "dict", "default": {}},
        "fail_if_invalid": {"type": "bool", "default": False},
    }


def documents_in(module: AnsibleModule) -> list[Any]:
    """Return the manifests that the parameters name. Raises AcceleratorError for what is no YAML."""
    definition, source = module.params["definition"], module.params["src"]
    if isinstance(definition, dict):
        return [definition]
    if isinstance(definition, list):
        return definition
    if not HAS_YAML:
        end(module, msg=missing_required_lib("PyYAML"), error_code="library-missing", problems=[])
    text = Path(source).read_text(encoding="utf-8") if source else str(definition)
    try:
        check_nesting(text)
        return list(yaml_load_all(text))
    except ValueError as error:
        raise unreadable(source, error) from error
    except Exception as error:
        # PyYAML's own errors have a base class that cannot be named where PyYAML is not installed.
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise unreadable(source, error) from error


def unreadable(source: str | None, error: Exception) -> AcceleratorError:
    """Return the error for a text that is no YAML."""
    return AcceleratorError(
        f"{source or 'The definition'} is no YAML: {error}", hint="Correct it.", code="manifest-unreadable"
    )


def work(module: AnsibleModule) -> dict[str, Any]:
    wrong = {name: kind for name, kind in module.params["device_classes"].items() if kind not in OFFER_KINDS}
    if wrong:
        name, kind = next(iter(wrong.items()))
        raise AcceleratorError(
            f"device_classes: {name} is {shown(kind)}; expected {any_of(OFFER_KINDS)}", code="invalid-argument"
        )
    backends = [create(vendor) for vendor in BACKENDS]
    config_kinds = {backend.driver_name: backend.config_kinds for backend in backends}
    device_kinds = {name: kind for backend in backends for name, kind in backend.device_classes.items()}
    documents = documents_in(module)
    device_kinds.update(kinds_of_classes(documents, {each.driver_name: each.device_types for each in backends}))
    device_kinds.update(module.params["device_classes"])
    checked = [check_manifest(document, config_kinds, device_kinds) for document in documents]
    problems = [problem for each in checked for problem in each.problems]
    if problems and module.params["fail_if_invalid"]:
        end(
            module,
            msg=f"{len(problems)} problems: " + "; ".join(map(str, problems)),
            error_code="config-refused",
            problems=[asdict(problem) for problem in problems],
        )
    return {
        "changed": False,
        "valid": not problems,
        "configurations": sum(each.configurations for each in checked),
        "problems": [asdict(problem) for problem in problems],
        "doubts": [asdict(doubt) for each in checked for doubt in each.doubts],
    }


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
