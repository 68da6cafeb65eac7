# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: locked_requirements
version_added: 0.1.0
short_description: Select the locked requirements of one Python version
description:
  - Returns the requirements of a lock that apply to a Python version and a machine, with the digests and without markers. pip evaluates
    markers for the Python version that it runs with, not for the value of its option C(--python-version).
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, python, machine
options:
  _input:
    description: The text of the lock, as pip reads it.
    type: str
    required: true
  python:
    description: The Python version, such as V(3.12).
    type: str
    required: true
  machine:
    description: The machine, such as V(x86_64).
    type: str
    default: x86_64
"""

EXAMPLES = r"""
- name: Write the lock of Python 3.12
  ansible.builtin.copy:
    content: "{{ lookup('ansible.builtin.file', 'requirements.lock') | dra.accelerators.locked_requirements('3.12', 'x86_64') }}"
    dest: /tmp/requirements.lock
    mode: "0644"
"""

RETURN = r"""
_value:
  description: The requirements, one on each line.
  type: str
"""

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils._bundle.wheels import environment, lock_for
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError


def locked_requirements(text: str, python: str, machine: str = "x86_64") -> str:
    """Return the requirements of a lock that apply to a Python version and a machine."""
    try:
        return lock_for(str(text), environment(str(python), str(machine)))
    except AcceleratorError as error:
        raise AnsibleFilterError(f"locked_requirements: {error}") from error


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Any]:
        """Return the filter by its name."""
        return {"locked_requirements": locked_requirements}
