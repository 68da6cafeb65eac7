#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: claim_config_info
version_added: 0.1.0
short_description: Validate the opaque configurations in manifests before they are applied
description:
  - Validates the configurations for the collection's drivers in ResourceClaims, ResourceClaimTemplates, and DeviceClasses of
    all versions of C(resource.k8s.io). The module reports each problem that the drivers would reject, with the field, the found
    value, and the expected value. It uses the decoder of the drivers.
  - The module does not access a cluster or a device. Only the driver knows the limits of a single device, for example the
    range of its power limit. It rejects values outside these limits when it prepares the claim.
  - The module ignores other objects and configurations for other drivers.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.info_module
attributes:
  platform:
    support: full
    platforms: posix
options:
  definition:
    description:
      - The manifests, as a YAML string with one or more documents, as a dictionary, or as a list of dictionaries.
      - One of O(definition) and O(src) is required.
    type: raw
  src:
    description:
      - A file with manifests in YAML or JSON on the host where the module runs.
    type: path
  device_classes:
    description:
      - The kinds of devices in custom DeviceClasses, by class name. A kind is V(device), V(partition), V(passthrough), or V(group). The module then
        reports configurations for another kind of device.
      - The module knows the standard classes of the vendors, for example V(gpu.nvidia.com) and V(mig.nvidia.com). It determines the kind of a class in
        the manifests if the selectors require one value of the attribute that distinguishes the vendor's kinds, for example
        C(device.attributes['gpu.nvidia.com'].type == 'mig'), also joined with other conditions by C(&&).
      - For other classes, the module accepts configurations for all kinds of devices.
    type: dict
    default: {}
  fail_if_invalid:
    description:
      - Whether to fail if there are problems. The error message contains all problems.
    type: bool
    default: false
seealso:
  - module: dra.accelerators.resource_slices
"""

EXAMPLES = r"""
- name: Validate all claims of a repository before a rollout
  dra.accelerators.claim_config_info:
    src: manifests/claims.yaml
    fail_if_invalid: true
  delegate_to: localhost

- name: Validate a custom DeviceClass
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

- name: Show the problems
  ansible.builtin.debug:
    msg: "{{ checked.problems }}"
"""

RETURN = r"""
valid:
  description: Whether the manifests have no problems.
  returned: success
  type: bool
  sample: false
configurations:
  description: The number of validated configurations, without those for other drivers.
  returned: success
  type: int
  sample: 1
problems:
  description: The problems, in the order of the manifests.
  returned: always
  type: list
  elements: dict
  contains:
    object:
      description: The kind of the object, and its namespace and name, if it has them.
      returned: always
      type: str
      sample: ResourceClaim team/training
    path:
      description: The path of the field.
      returned: always
      type: str
      sample: spec.devices.config[0].opaque.parameters.sharing.strategy
    message:
      description: The found value and the expected value.
      returned: always
      type: str
      sample: it is 'Quick'; expected TimeSlicing or MPS
doubts:
  description: Valid, but probably unintended settings, with the same fields as RV(problems).
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
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.manifest_files import check_nesting
from ansible_collections.dra.accelerators.plugins.module_utils._module import end, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.dra.class_kinds import kinds_of_classes
from ansible_collections.dra.accelerators.plugins.module_utils.core.dra.configuration_check import check_manifest
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import OFFER_KINDS
from ansible_collections.dra.accelerators.plugins.module_utils.core.schema import any_of, value_text
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.registry import BACKENDS, create

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
    """Return the manifests of the options. Raises AcceleratorError for invalid YAML."""
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
        # The base class of PyYAML's errors cannot be named if PyYAML is missing.
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise unreadable(source, error) from error


def unreadable(source: str | None, error: Exception) -> AcceleratorError:
    """Return the error for invalid YAML."""
    return AcceleratorError(
        f"{source or 'The definition'} is not valid YAML: {error}", hint="Correct the YAML.", code="manifest-unreadable"
    )


def work(module: AnsibleModule) -> dict[str, Any]:
    for name, kind in module.params["device_classes"].items():
        if kind not in OFFER_KINDS:
            raise AcceleratorError(
                f"device_classes: {name} is {value_text(kind)}; expected {any_of(OFFER_KINDS)}", code="invalid-argument"
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
