# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Options of the modules for layouts of Ascend NPUs, and the wait for vNPUs that the vendor's script restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..core.partitioning.layout_execute import wait_for_restored
from ..core.partitioning.rules import parse_rules
from ..core.vendors.protocol import Backend
from .apply_layout import Rules

STATE_PATH = "/var/lib/kubelet/plugins/npu.huawei.com/state.db"
#: The maximum wait, in seconds, for the vendor's script. It tries each chip five times, 10 s apart.
RESTORE_SECONDS = 60.0
# The core validates the keys of a rule, and names the rule in errors. The node driver uses the same code.
OPTIONS: dict[str, Any] = {
    "layout": {"type": "list", "elements": "dict"},
    "state_path": {"type": "path", "default": STATE_PATH},
}


def layout_rules(module: AnsibleModule) -> Rules | None:
    """Validate the layout of the options, and return a function that returns its rules. Returns None without a layout."""
    if module.params["layout"] is None:
        return None
    rules = parse_rules(module.params["layout"])
    return lambda _scan: rules


def await_restored(module: AnsibleModule, backend: Backend) -> list[str]:
    """Wait for vNPUs that the vendor's script restores after a boot, and return reports about them.

    A vNPU that is created before the script has ended can take the number or the resources of a restored one.
    """
    backend.use_number_file(str(Path(module.params["state_path"]).parent))
    reports: list[str] = []
    missing = wait_for_restored(backend, RESTORE_SECONDS, reports.append)
    if missing:
        module.warn(f"Waited {RESTORE_SECONDS:g} s, and the layout is compared and applied without them: {missing}")
    return reports
