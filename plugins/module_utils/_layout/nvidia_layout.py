# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Options of the modules for layouts of NVIDIA GPUs, and the rules that these options contain."""

from __future__ import annotations

import traceback
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

from .._module import INTERPRETER_OPTION, find_binding
from ..core.errors import BackendUnavailable, InvalidLayout
from ..core.host.system import System
from ..core.partitioning.rules import parse_rules
from ..core.vendors.nvidia.mig_parted import file_in_config_map, rules_from_mig_parted
from .apply_layout import Rules

try:
    import yaml
except ImportError:
    HAS_YAML = False
    YAML_IMPORT_ERROR = traceback.format_exc()
else:
    HAS_YAML = True
    YAML_IMPORT_ERROR = ""

STATE_PATH = "/var/lib/kubelet/plugins/gpu.nvidia.com/state.db"
# The core validates the keys of a rule, and names the rule in errors. The node driver uses the same code.
OPTIONS: dict[str, Any] = {
    **INTERPRETER_OPTION,
    "layout": {"type": "list", "elements": "dict"},
    "config": {"type": "dict"},
    "config_file": {"type": "path"},
    "config_name": {"type": "str"},
    "mode_only": {"type": "bool", "default": False},
    "state_path": {"type": "path", "default": STATE_PATH},
}
#: The options that contain a layout.
LAYOUT_OPTIONS = ("layout", "config", "config_file")
LAYOUT_CONSTRAINTS: dict[str, Any] = {
    "mutually_exclusive": [LAYOUT_OPTIONS],
    "required_by": {"config": ("config_name",), "config_file": ("config_name",)},
}


def layout_rules(module: AnsibleModule) -> Rules | None:
    """Read and validate the layout of the options. Return a function that returns its rules for scanned devices.

    Returns None if no option contains a layout. Raises InvalidLayout.
    """
    params = module.params
    if params["layout"] is not None:
        rules = parse_rules(params["layout"])
        return lambda _scan: rules
    if params["config"] is None and params["config_file"] is None:
        return None
    document = _read_config(module)
    rules_from_mig_parted(document, params["config_name"], ())
    return lambda scan: rules_from_mig_parted(document, params["config_name"], scan.devices, scan.unread)


def _read_config(module: AnsibleModule) -> dict[str, Any]:
    """Return the nvidia-mig-parted document of the options."""
    path = module.params["config_file"]
    if path is None:
        document: dict[str, Any] = module.params["config"]
        wrapped = file_in_config_map(document)
        return document if wrapped is None else _parse_config(module, "config", wrapped)
    try:
        text = System().read_text(path)
    except OSError as error:
        raise InvalidLayout(f"config_file {path} cannot be read: {error.strerror}", code="config-unreadable") from error
    content = _parse_config(module, f"config_file {path}", text)
    wrapped = file_in_config_map(content)
    return content if wrapped is None else _parse_config(module, f"config_file {path}", wrapped)


def _parse_config(module: AnsibleModule, source: str, text: str) -> dict[str, Any]:
    """Parse a YAML text. ``source`` names it in errors. Raises InvalidLayout."""
    if not HAS_YAML:
        module.fail_json(msg=missing_required_lib("PyYAML", reason=f"to read {source}"), exception=YAML_IMPORT_ERROR)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidLayout(f"{source} is not YAML: {error}", code="config-unreadable") from error
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"contains {type(content).__name__}"
        raise InvalidLayout(
            f"{source} {found}, expected a dictionary with version and mig-configs", code="config-unreadable"
        )
    return content


def require_binding(module: AnsibleModule) -> None:
    """Run the module with an interpreter that has NVIDIA's binding. Raises BackendUnavailable if no interpreter has it.

    Call this before ``layout_rules``: PyYAML can be missing from the interpreter that Ansible uses.
    """
    missing = find_binding("pynvml", module.params["interpreter"])
    if missing is not None:
        raise BackendUnavailable(
            missing,
            hint="Install the package nvidia-ml-py for one of these interpreters, for example with the role "
            "dra.accelerators.python_environment, or set another one with the option interpreter.",
            code="binding-missing",
        )
