# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: text_variables
version_added: 0.1.0
short_description: List variables that are strings where a list or a mapping is expected
description:
  - Answers of AWX surveys, C(-e key=value), and values of INI inventories that are not Python literals are strings. Ansible would read a string
    instead of a list character by character.
  - Returns one sentence for each variable of this collection that is a string for some hosts and must be a list or a mapping. Empty strings are not
    reported. The playbooks of this collection fail if the filter returns a sentence.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars
options:
  _input:
    description: Names of hosts, for example C(groups['accelerator_nodes']).
    type: list
    elements: str
    required: true
  hostvars:
    description: The variables of all hosts.
    type: dict
    required: true
seealso:
  - plugin: dra.accelerators.reserved_variables
    plugin_type: lookup
"""

EXAMPLES = r"""
- name: Reject strings where a list or a mapping is expected
  ansible.builtin.assert:
    that: groups['accelerator_nodes'] | dra.accelerators.text_variables(hostvars) | length == 0
    fail_msg: "{{ groups['accelerator_nodes'] | dra.accelerators.text_variables(hostvars) }}"
  run_once: true
"""

RETURN = r"""
_value:
  description: The sentences, sorted by variable.
  type: list
  elements: str
  sample: ["accelerator_vendors is text for a, b, expected a list."]
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from ansible.errors import AnsibleError, AnsibleFilterError
from jinja2 import Undefined, UndefinedError

# A test compares these with the argument specs of the roles that work on a node's real devices.
_LISTS = """
accelerator_bundle_packages accelerator_layouts accelerator_remove_gone
accelerator_vendors ascend_driver_build_packages ascend_driver_drain_drivers ascend_driver_services
ascend_runtime_engines ascend_vnpu_layout container_runtime_cdi_directories device_classes_ascend device_classes_ascend_models device_classes_extra
device_classes_nvidia device_classes_vendors device_plugin_migration_accept device_plugin_migration_nodes device_plugin_migration_plugins
dra_controller_drivers dra_controller_image_pull_secrets dra_controller_kubelet_kubeconfigs dra_controller_pod_api_ports
dra_controller_pod_metrics_peers dra_controller_pod_nodes dra_controller_pod_tolerations dra_controller_token_audiences dra_driver_backends
dra_driver_image_pull_secrets dra_driver_kubelet_kubeconfigs dra_driver_layout dra_driver_names dra_driver_network_tools dra_driver_pod_api_ports
dra_driver_pod_metrics_peers dra_driver_pod_writable_paths dra_driver_token_audiences dra_driver_vendor_runtimes driver_image_build_arguments
driver_image_import_command driver_image_manifest_arguments driver_image_pip_arguments driver_image_push_arguments monitoring_controller_targets
monitoring_reload monitoring_targets node_features_pci_label_fields node_features_vendors nvidia_container_toolkit_engines
nvidia_container_toolkit_files nvidia_container_toolkit_repository_fingerprints nvidia_driver_catalog nvidia_driver_drain_drivers nvidia_driver_files
nvidia_driver_repository_fingerprints nvidia_driver_services nvidia_fabric_manager_files nvidia_fabric_manager_repository_fingerprints
nvidia_fabric_manager_services nvidia_mig_layout nvidia_settings_rules offline_has offline_names offline_packages offline_roles offline_versions
preflight_drivers_to_come preflight_layout preflight_vendors python_environment_pip_arguments
"""
_MAPPINGS = """
accelerator_bundle_control accelerator_bundle_mirrors accelerator_bundle_pip_environment accelerator_platform accelerator_proxy
accelerator_report_reasons ascend_driver_checksums ascend_driver_proxy ascend_vnpu_node_info device_classes_cluster_info
dra_controller_certificate_issuer dra_controller_device_classes dra_controller_pod_node_selector dra_controller_pod_resources dra_driver_cluster_info
dra_driver_health_effects dra_driver_node_info dra_driver_pod_resources driver_image_pip_environment monitoring_dashboard_labels
monitoring_pod_monitor_labels monitoring_rule_labels nvidia_container_toolkit_checksums nvidia_container_toolkit_node_info
nvidia_container_toolkit_proxy nvidia_driver_checksums nvidia_driver_node_info nvidia_driver_parameters nvidia_driver_proxy
nvidia_fabric_manager_checksums nvidia_fabric_manager_node_info nvidia_fabric_manager_proxy nvidia_mig_node_info nvidia_settings_node_info
offline_platform preflight_accelerator_info preflight_cluster_info preflight_node_info python_environment_node_info python_environment_pip_environment
python_environment_proxy
"""
#: The expected type of each variable.
KINDS = {**dict.fromkeys(_LISTS.split(), "a list"), **dict.fromkeys(_MAPPINGS.split(), "a mapping")}
_REMEDY = (
    "Set it in a YAML file (group_vars, or -e @fleet.yml), or as JSON (-e '{...}'). Survey answers of AWX, -e key=value, and values of INI"
    " inventories that are not Python literals are text."
)


#: A value that Ansible cannot evaluate, such as a template with missing facts of a host outside of the limit.
UNKNOWN = object()


def evaluated(variables: Any, name: str) -> Any:
    """Return the value of a host's variable in hostvars: None if it is not set, UNKNOWN if Ansible cannot evaluate it."""
    try:
        value = variables.get(name)
        return UNKNOWN if _is_unknown(value) else value
    except (AnsibleError, UndefinedError):
        return UNKNOWN


def _is_unknown(value: Any) -> bool:
    """Return whether a value contains an undefined one, or a template, which ansible-core 2.18 returns if it cannot evaluate it."""
    if isinstance(value, Undefined):
        return True
    if isinstance(value, str):
        return "{{" in value
    if isinstance(value, Mapping):
        return any(map(_is_unknown, value.values()))
    return isinstance(value, Sequence) and any(map(_is_unknown, value))


def raw_variables(hostvars: Any, host: Any) -> Any:
    """Return the variables of a host without evaluation. Ansible evaluates a value in hostvars with all its items at each access."""
    return hostvars.raw_get(host) if hasattr(hostvars, "raw_get") else hostvars[host]


def has_templates(value: Any) -> bool:
    """Return whether Ansible has to evaluate a raw value: it contains a template, or an object such as a secret of ansible-vault."""
    if isinstance(value, str):
        return any(mark in value for mark in ("{{", "{%", "{#"))
    if isinstance(value, Mapping):
        return any(map(has_templates, value)) or any(map(has_templates, value.values()))
    if isinstance(value, Sequence):
        return any(map(has_templates, value))
    return not (value is None or isinstance(value, (bool, int, float, date)))


def _is_text(hostvars: Any, host: Any, name: str, raw: Any) -> bool:
    """Return whether a variable of a host is text. An undefined value is not. Only text can be a template."""
    if isinstance(raw, (Mapping, list)):
        return False
    value = evaluated(hostvars[host], name)
    return isinstance(value, str) and len(value) > 0


def text_variables(hosts: Any, hostvars: Any) -> list[str]:
    """Return a sentence for each variable that is a string. Raises AnsibleFilterError."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"text_variables: found {type(hosts).__name__}, expected a list of hosts")
    found: dict[str, list[str]] = {}
    for host in hosts:
        variables = raw_variables(hostvars, host)
        for name in KINDS.keys() & {str(key) for key in variables}:
            if _is_text(hostvars, host, name, variables[name]):
                found.setdefault(name, []).append(str(host))
    return [
        f"{name} is text for {', '.join(sorted(found[name]))}, expected {KINDS[name]}. {_REMEDY}"
        for name in sorted(found)
    ]


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"text_variables": text_variables}
