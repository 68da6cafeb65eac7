# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: driver_names
version_added: 0.1.0
short_description: The names of the DRA drivers of vendors
description:
  - Turns words for vendors into the names under which their devices are published to Kubernetes.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: Words for vendors, V(nvidia) or V(ascend).
    type: list
    elements: str
    required: true
seealso:
  - plugin: dra.accelerators.npu_claim
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show under which names a fleet with both vendors publishes
  ansible.builtin.debug:
    msg: "{{ ['nvidia', 'ascend'] | dra.accelerators.driver_names }}"
"""

RETURN = r"""
_value:
  description: The names of the drivers, in the order of the vendors, each once.
  type: list
  elements: str
  sample: [gpu.nvidia.com, npu.huawei.com]
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend import create


def names(vendors: Any) -> list[str]:
    """Return the names of the vendors' drivers. Raises AnsibleFilterError."""
    if not isinstance(vendors, (list, tuple)):
        raise AnsibleFilterError(f"driver_names: found {vendors!r}, expected a list of vendors")
    try:
        return [create(each).driver_name for each in dict.fromkeys(vendors)]
    except ValueError as error:
        raise AnsibleFilterError(f"driver_names: {error}") from error


class FilterModule:
    """The filter, as Ansible asks for it."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"driver_names": names}
