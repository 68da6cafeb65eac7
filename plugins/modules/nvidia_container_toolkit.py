#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_container_toolkit
version_added: 0.1.0
short_description: Install, upgrade, roll back, or remove the NVIDIA Container Toolkit with apt, dnf, or zypper
description:
  - Installs all packages of the toolkit at one version from the configured package source, and holds them at this version.
  - Enables or disables the units that write the vendor's CDI file again when the driver changes, if O(cdi_refresh) is set.
  - Does not change any container runtime. M(dra.accelerators.containerd_handler) and M(dra.accelerators.docker_runtime) add the vendor's runtime to
    an engine, and M(dra.accelerators.runtime_cdi) enables CDI.
  - Queries the package manager for its planned changes before the first change. A version that does not work is rolled back.
notes:
  - Requires root on the node, apt, dnf 4 or zypper with their programs, and systemd.
  - The next run resumes an interrupted installation.
  - Running containers continue while the toolkit is replaced. The toolkit runs only when a container starts.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._packages
attributes:
  check_mode:
    support: full
    details:
      - How packages change units without a configured state is unknown before the installation. RV(after) omits these changes.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  version:
    description:
      - A version such as V(1.18.1), the beginning of a version such as V(1.18), or a package's full version.
      - If empty, an installed toolkit does not change. A node without a toolkit gets the newest version of the source.
    type: str
    default: ""
  latest:
    description: Whether to upgrade an installed toolkit to the newest version that matches O(version).
    type: bool
    default: false
  components:
    description:
      - V(base) includes the programs C(nvidia-ctk) and C(nvidia-cdi-hook) and the vendor's runtime, which is sufficient for CDI.
      - V(full) also includes the library and the hook for the runtime's legacy mode. The module does not remove them with V(base) if they are already
        installed.
    type: str
    choices: [base, full]
    default: full
  cdi_refresh:
    description:
      - Whether C(nvidia-cdi-refresh.path) and C(nvidia-cdi-refresh.service) write C(/var/run/cdi/nvidia.yaml) at each boot and when the driver
        changes. The toolkit includes them from version 1.18.
      - V(keep) does not change these units. The packages enable them during the installation.
      - V(disabled) also removes this file when it disables the units, because no other program updates it.
    type: str
    choices: [keep, enabled, disabled]
    default: keep
seealso:
  - module: dra.accelerators.cdi_spec
  - module: dra.accelerators.containerd_handler
  - module: dra.accelerators.docker_runtime
"""

EXAMPLES = r"""
- name: Install the newest toolkit from the vendor's repository and keep its CDI file up to date
  dra.accelerators.nvidia_container_toolkit:
    cdi_refresh: enabled
    source:
      uris: [https://nvidia.github.io/libnvidia-container/stable/deb/amd64]
      suites: [/]
      key: "{{ lookup('ansible.builtin.file', 'gpgkey') }}"
      fingerprints: [C95B321B61E88C1809C4F759DDCAE044F796ECB0]

- name: Roll back to the previous version
  dra.accelerators.nvidia_container_toolkit:
    state: previous

- name: Remove the toolkit or restore the version that was installed before
  dra.accelerators.nvidia_container_toolkit:
    state: absent
"""

RETURN = r"""
steps:
  description: The completed steps as text. In check mode, the planned steps.
  returned: success
  type: list
  elements: str
  sample: ["install the NVIDIA Container Toolkit 1.18.1: nvidia-container-toolkit, nvidia-container-toolkit-base"]
changes:
  description: The package manager's changes, one entry for each package. In check mode, the planned changes.
  returned: success
  type: list
  elements: str
  sample: [install nvidia-container-toolkit 1.18.1-1]
missing_requirements:
  description: In check mode, the message for a missing requirement, by C(hold). A run without check mode fails in this case.
  returned: success
  type: dict
  sample: {}
blocked_by:
  description: The claims, processes, and pods that block the change. Always empty, because this module interrupts none of them.
  returned: success
  type: dict
  contains:
    claims:
      description: Prepared claims.
      returned: success
      type: list
      elements: str
      sample: []
    processes:
      description: Processes.
      returned: success
      type: list
      elements: str
      sample: []
    pods:
      description: Pods of these claims and processes.
      returned: success
      type: list
      elements: str
      sample: []
up_to_date:
  description: Whether the module has nothing to change. If V(true) in check mode, a run without check mode is not needed.
  returned: success
  type: bool
  sample: true
unmanaged:
  description: With O(state=absent), the packages that remain because this module did not install them.
  returned: success
  type: list
  elements: str
  sample: []
before:
  description: The state before the run.
  returned: success
  type: dict
  contains: &there
    version:
      description: The version of the toolkit. Empty if it is not installed.
      returned: success
      type: str
      sample: 1.18.1
    packages:
      description: The installed packages with their versions.
      returned: success
      type: dict
      sample: {nvidia-container-toolkit-base: 1.18.1-1}
    units:
      description: The units of the toolkit that start at boot.
      returned: success
      type: list
      elements: str
      sample: [nvidia-cdi-refresh.path, nvidia-cdi-refresh.service]
after:
  description: The state after the run. In check mode, the expected state.
  returned: success
  type: dict
  contains: *there
previous_available:
  description: Whether O(state=previous) can restore the previous version.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable code for the type of the error.
  returned: failure
  type: str
  sample: not-offered
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.single_run import run_alone
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.container_toolkit import group_of, prove
from ansible_collections.dra.accelerators.plugins.module_utils._packages.argspec import hide_passwords, package_spec
from ansible_collections.dra.accelerators.plugins.module_utils._packages.group_module import apply_group, options_of
from ansible_collections.dra.accelerators.plugins.module_utils._packages.manager_detection import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        **package_spec(),
        "version": {"type": "str", "default": ""},
        "latest": {"type": "bool", "default": False},
        "components": {"type": "str", "choices": ["base", "full"], "default": "full"},
        "cdi_refresh": {"type": "str", "choices": ["keep", "enabled", "disabled"], "default": "keep"},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    """Install or remove the toolkit, and return the module's result. Raises AcceleratorError."""
    hide_passwords(module)
    params = module.params
    system = System()
    apt = tool_of(system, timeout=float(params["timeout"]))
    group = group_of(params["components"], params["cdi_refresh"])
    return apply_group(
        params,
        check=module.check_mode,
        system=system,
        apt=apt,
        group=group,
        options=options_of(params, apt.places(group.name), version=params["version"], latest=params["latest"]),
        proof=lambda: prove(system, apt, refreshes=params["cdi_refresh"] == "enabled"),
    )


def main() -> None:
    """Entry point."""
    run_alone(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work, System())


if __name__ == "__main__":
    main()
