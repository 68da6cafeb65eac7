# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: holding_accelerators
version_added: 0.1.0
short_description: Check whether enough matching devices exist
description:
  - Is true if at least O(count) of the devices match all criteria.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
extends_documentation_fragment:
  - dra.accelerators._criteria
  - dra.accelerators._criteria.count
seealso:
  - plugin: dra.accelerators.accelerators
    plugin_type: filter
  - plugin: dra.accelerators.accelerators_with
    plugin_type: filter
  - plugin: dra.accelerators.nodes_with_accelerators
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Run the benchmark on hosts with two free GPUs
  ansible.builtin.command:
    cmd: /opt/benchmark/run
  when: accelerators is dra.accelerators.holding_accelerators(2, type='gpu', free='40Gi')

- name: Fail if a device has a taint
  ansible.builtin.fail:
    msg: "{{ inventory_hostname }} has devices that are not well."
  when: accelerators is dra.accelerators.holding_accelerators(tainted=true)
"""

RETURN = r"""
_value:
  description: Whether enough matching devices exist.
  type: bool
  sample: true
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import has_devices


def holding_accelerators(devices: Any, count: Any = 1, **criteria: Any) -> bool:
    """Return whether there are at least this many matching devices. Raises AnsibleFilterError."""
    if not isinstance(devices, (list, tuple)):
        raise AnsibleFilterError(f"holding_accelerators: found {devices!r}, expected a list of devices")
    try:
        # A template can have converted the integer to a string.
        return has_devices(devices, int(count), **criteria)
    except (AttributeError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"holding_accelerators: {error}") from error


class TestModule:
    """The test plugin."""

    def tests(self) -> dict[str, Callable[..., Any]]:
        """Return the test by its name."""
        return {"holding_accelerators": holding_accelerators}
