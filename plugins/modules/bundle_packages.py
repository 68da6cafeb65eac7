#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_packages
version_added: 0.1.0
short_description: Install packages by name from the repository of an offline bundle
description:
  - Installs missing packages and their dependencies with the package manager of the host (dnf, zypper, or apt). Installed packages keep their version.
  - If the environment variable E(DRA_ACCELERATORS_BUNDLE) is set, dnf and zypper use only the repository in that directory, and no repository of the
    host.
  - In check mode, the module returns the names and versions of the packages that it would install, so that a role can copy their files to the host
    first.
notes:
  - The role P(dra.accelerators.offline#role) uses this module for hosts with RPM packages.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
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
    description: The names of the packages.
    type: list
    elements: str
    default: []
  refresh:
    description: Whether to refresh the package index before the installation.
    type: bool
    default: false
  timeout:
    description: The timeout in seconds for each call of the package manager.
    type: int
    default: 1800
seealso:
  - module: dra.accelerators.bundle_extract
"""

EXAMPLES = r"""
- name: Install dkms from the bundle on the host
  dra.accelerators.bundle_packages:
    names: [dkms]
  environment:
    DRA_ACCELERATORS_BUNDLE: /var/lib/dra-accelerators/offline
"""

RETURN = r"""
steps:
  description: Descriptions of the steps that the module has run, or would run in check mode.
  returned: success
  type: list
  elements: str
  sample: ["install dkms 3.0.13-1.el9"]
installs:
  description: The packages that the module has installed, or would install in check mode, as C(name=version).
  returned: success
  type: list
  elements: str
  sample: ["dkms=3.0.13-1.el9"]
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: no-way
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import (
    INSTALL,
    PackageProblem,
    PackageTool,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.manager_detection import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "names": {"type": "list", "elements": "str", "default": []},
        "refresh": {"type": "bool", "default": False},
        "timeout": {"type": "int", "default": 1800},
    }


def work(module: AnsibleModule, tool: PackageTool | None = None) -> dict[str, Any]:
    """Install the missing packages, and return the module's result. Raises PackageProblem."""
    params = module.params
    tool = tool or tool_of(System(), timeout=float(params["timeout"]))
    if params["refresh"]:
        tool.update()
    installed = tool.packages().installed
    missing = [name for name in dict.fromkeys(params["names"]) if name not in installed]
    changes = tool.foresee_install(missing) if missing else ()
    removed = [change.name for change in changes if change.verb != INSTALL]
    if removed:
        raise PackageProblem(
            f"{tool.title} would remove {', '.join(removed)} to install {', '.join(missing)}",
            hint="Nothing was changed. Remove these packages before this run if they are not needed.",
            code="no-way",
        )
    if missing and not module.check_mode:
        tool.install(missing)
    steps = [change.describe() for change in changes]
    before = "".join(f"{change.name} {change.before}\n" for change in changes if change.before)
    after = "".join(f"{change.name} {change.after}\n" for change in changes)
    return {
        "changed": bool(missing),
        "steps": steps,
        "installs": [f"{change.name}={change.after}" for change in changes],
        "diff": {"before_header": tool.title, "after_header": tool.title, "before": before, "after": after},
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
