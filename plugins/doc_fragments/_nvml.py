# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """Options and requirements of the modules that use NVIDIA's management library on a node."""

    DOCUMENTATION = r"""
options:
  interpreter:
    description:
      - A Python interpreter on the node that can import NVIDIA's binding C(pynvml), from the package C(nvidia-ml-py).
      - The module uses it only if the interpreter that Ansible uses on the node cannot import the binding. The module then runs
        again with this interpreter.
      - The default is the virtual environment that the role P(dra.accelerators.python_environment#role) creates.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
requirements:
  - The Python package C(nvidia-ml-py) on the node, in the interpreter that Ansible uses there or in O(interpreter).
  - The NVIDIA driver with C(libnvidia-ml.so.1) on the node.
"""
