#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_packages
version_added: 0.1.0
short_description: Install packages by their names out of a bundle's repository
description:
  - Installs packages that a host lacks, with what they need, by its own dnf, zypper or apt. What is there stays at its version.
  - With E(DRA_ACCELERATORS_BUNDLE) in the environment, dnf and zypper know the repository in that folder and none of the host's own.
  - In check mode it says which packages at which versions would be installed, so that their files can be brought beforehand.
notes:
  - The role P(dra.accelerators.offline#role) uses this module for hosts with RPM packages.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  names:
    description: The packages.
    type: list
    elements: str
    default: []
  refresh:
    description: Whether the package manager reads the index of its sources first.
    type: bool
    default: false
  timeout:
    description: How many seconds one call of the package manager may take.
    type: int
    default: 1800
seealso:
  - module: dra.accelerators.bundle_folder
"""

EXAMPLES = r"""
- name: Install what builds kernel modules from the bundle that is on the host
  dra.accelerators.bundle_packages:
    names: [dkms]
  environment:
    DRA_ACCELERATORS_BUNDLE: /var/lib/dra-accelerators/offline
"""

RETURN = r"""
steps:
  description: What was done, or would be in check mode, in words.
  returned: success
  type: list
  elements: str
  sample: ["install dkms 3.0.13-1.el9"]
installs:
  description: The packages that were installed, or would be in check mode, as C(name=version).
  returned: success
  type: list
  elements: str
  sample: ["dkms=3.0.13-1.el9"]
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: no-way
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._package_port import INSTALL, PackageProblem, PackageTool
from ansible_collections.dra.accelerators.plugins.module_utils._package_tools import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "names": {"type": "list", "elements": "str", "default": []},
        "refresh": {"type": "bool", "default": False},
        "timeout": {"type": "int", "default": 1800},
    }


def work(module: AnsibleModule, tool: PackageTool | None = None) -> dict[str, Any]:
    """Install what is lacking; returns the module's result. Raises PackageProblem."""
    params = module.params
    tool = tool or tool_of(System(), timeout=float(params["timeout"]))
    if params["refresh"]:
        tool.update()
    there = tool.packages().installed
    lacking = [name for name in dict.fromkeys(params["names"]) if name not in there]
    changes = tool.foresee_install(lacking) if lacking else ()
    removed = [change.name for change in changes if change.verb != INSTALL]
    if removed:
        raise PackageProblem(
            f"{tool.title} would remove {', '.join(removed)} to install {', '.join(lacking)}",
            hint="Nothing was changed. Remove them beforehand, if nobody needs them.",
            code="no-way",
        )
    if lacking and not module.check_mode:
        tool.install(lacking)
    steps = [change.describe() for change in changes]
    before = "".join(f"{change.name} {change.before}\n" for change in changes if change.before)
    after = "".join(f"{change.name} {change.after}\n" for change in changes)
    return {
        "changed": bool(lacking),
        "steps": steps,
        "installs": [f"{change.name}={change.after}" for change in changes],
        "diff": {"before_header": tool.title, "after_header": tool.title, "before": before, "after": after},
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
