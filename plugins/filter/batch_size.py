# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: batch_size
version_added: 0.1.0
short_description: Return the batch size that the hosts of a run allow
description:
  - The keyword C(serial) of a play does not see the variables of hosts. This filter reads a variable of each host that takes part in the run, and
    returns the value with the smallest first batch.
  - Hosts that C(--limit) excludes do not count.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars, name, mark
options:
  _input:
    description: Names of hosts.
    type: list
    elements: str
    required: true
  hostvars:
    description: The variables of all hosts.
    type: dict
    required: true
  name:
    description:
      - The variable with the batch size, which is a number, a percentage of the hosts, or a list of both, as the keyword C(serial) takes them.
      - Hosts where it is not set, or empty, do not count.
    type: str
    required: true
  mark:
    description: A variable that an earlier play of the run has set on each of its hosts. Hosts without it do not count.
    type: str
    required: true
seealso:
  - plugin: dra.accelerators.cluster_leaders
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Mark the hosts of the run
  hosts: accelerator_nodes
  tasks:
    - name: Set a variable
      ansible.builtin.set_fact:
        is_in_run: true

- name: Change the hosts in batches
  hosts: accelerator_nodes
  serial: "{{ groups['accelerator_nodes'] | dra.accelerators.batch_size(hostvars, 'accelerator_serial', 'is_in_run') | default('100%', true) }}"
  tasks: []
"""

RETURN = r"""
_value:
  description: The value of one host, or an empty string if no host of the run has one.
  type: raw
  sample: 10%
"""

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError


def batch_size(hosts: Any, hostvars: Any, name: str, mark: str) -> Any:
    """Return the value with the smallest first batch. Raises AnsibleFilterError."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"batch_size: found {type(hosts).__name__}, expected a list of hosts")
    marked = [host for host in hosts if host in hostvars and mark in hostvars[host]]
    values = [(host, hostvars[host].get(name)) for host in marked]
    sized = [(_first_batch(host, name, value, len(marked)), value) for host, value in values if value not in (None, "")]
    return min(sized, key=lambda each: each[0])[1] if sized else ""


def _first_batch(host: str, name: str, value: Any, hosts: int) -> float:
    """Return how many hosts the first batch has."""
    first = value[0] if isinstance(value, list) and value else value
    text = str(first).strip()
    number = text.removesuffix("%")
    if isinstance(first, (list, dict, bool)) or not number.isdecimal() or int(number) == 0:
        raise AnsibleFilterError(
            f"{name} of host {host} is {value!r}, expected a number from 1, a percentage such as 10%, or a list of them"
        )
    return max(int(number) * hosts / 100, 1) if text.endswith("%") else int(number)


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"batch_size": batch_size}
