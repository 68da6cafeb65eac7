#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_container_toolkit
version_added: 0.1.0
short_description: Install, replace, take back or remove the NVIDIA Container Toolkit by apt, dnf or zypper
description:
  - Installs the toolkit's packages, all in one version, from the package source that it is told, and holds them there.
  - Switches the units on or off that write the vendor's CDI file again when the driver changes, where that is asked for.
  - Changes no container runtime. M(dra.accelerators.containerd_handler) and M(dra.accelerators.docker_runtime) have one offer the vendor's
    runtime, M(dra.accelerators.containerd_config) switches CDI on.
  - What the package manager would do is asked before anything is done. A version that does not come to work is taken back.
notes:
  - Needs root on the node, apt, dnf 4 or zypper with their programs, and systemd.
  - An installation that was cut short is gone on with by the next run.
  - Running containers go on while the toolkit is exchanged. It is run when a container starts.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._packages
attributes:
  check_mode:
    support: full
    details:
      - What packages do with units that nobody has asked for is not known before they are installed, and left out of RV(after).
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
      - A version such as V(1.18.1), the beginning of one such as V(1.18), or a package's whole version.
      - Empty keeps what is there, and takes the newest that the source has where there is none.
    type: str
    default: ""
  latest:
    description: Whether a newer version of what O(version) says replaces one that is there.
    type: bool
    default: false
  components:
    description:
      - V(base) are the programs C(nvidia-ctk) and C(nvidia-cdi-hook) and the vendor's runtime, which is enough for CDI.
      - V(full) are these, and the library and the hook that the runtime has for its older way. They stay where they are there already.
    type: str
    choices: [base, full]
    default: full
  cdi_refresh:
    description:
      - Whether C(nvidia-cdi-refresh.path) and C(nvidia-cdi-refresh.service) write C(/var/run/cdi/nvidia.yaml) at each start of the machine and when
        the driver changes. The toolkit has them from version 1.18 on.
      - V(keep) leaves them as they are. The packages switch them on when they are installed.
      - V(disabled) also removes that file, which nobody would make anew, where it switches the units off.
    type: str
    choices: [keep, enabled, disabled]
    default: keep
seealso:
  - module: dra.accelerators.cdi_spec
  - module: dra.accelerators.containerd_handler
  - module: dra.accelerators.docker_runtime
"""

EXAMPLES = r"""
- name: Install the newest toolkit from the vendor's repository, and keep its CDI file up to date
  dra.accelerators.nvidia_container_toolkit:
    cdi_refresh: enabled
    source:
      uris: [https://nvidia.github.io/libnvidia-container/stable/deb/amd64]
      suites: [/]
      key: "{{ lookup('ansible.builtin.file', 'gpgkey') }}"
      fingerprints: [C95B321B61E88C1809C4F759DDCAE044F796ECB0]

- name: Go back to the version before
  dra.accelerators.nvidia_container_toolkit:
    state: previous

- name: Bring back what was there before
  dra.accelerators.nvidia_container_toolkit:
    state: absent
"""

RETURN = r"""
steps:
  description: What was done, or would be in check mode, in words.
  returned: success
  type: list
  elements: str
  sample: ["install the NVIDIA Container Toolkit 1.18.1: nvidia-container-toolkit, nvidia-container-toolkit-base"]
changes:
  description: What the package manager did, or would do, package by package.
  returned: success
  type: list
  elements: str
  sample: [install nvidia-container-toolkit 1.18.1-1]
lacking:
  description: In check mode, what stands against it by C(hold), with a sentence. A real run refuses then.
  returned: success
  type: dict
  sample: {}
in_the_way:
  description: Who would be disturbed. Nobody ever is by this module.
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
      description: Their pods.
      returned: success
      type: list
      elements: str
      sample: []
settled:
  description: Whether there is nothing to do for this module, so that after a look in check mode no real run is needed.
  returned: success
  type: bool
  sample: true
left:
  description: With O(state=absent), packages that stay because somebody else has installed them.
  returned: success
  type: list
  elements: str
  sample: []
before:
  description: What was there before.
  returned: success
  type: dict
  contains: &there
    version:
      description: The toolkit's version; empty for none.
      returned: success
      type: str
      sample: 1.18.1
    packages:
      description: Its packages with their versions.
      returned: success
      type: dict
      sample: {nvidia-container-toolkit-base: 1.18.1-1}
    units:
      description: Which of its units are started at boot.
      returned: success
      type: list
      elements: str
      sample: [nvidia-cdi-refresh.path, nvidia-cdi-refresh.service]
after:
  description: What is there afterwards, or would be in check mode.
  returned: success
  type: dict
  contains: *there
way_back:
  description: Whether O(state=previous) can go back.
  returned: success
  type: bool
  sample: true
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: not-offered
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_container_toolkit import group_of, prove
from ansible_collections.dra.accelerators.plugins.module_utils._package_group_module import bring, options_of
from ansible_collections.dra.accelerators.plugins.module_utils._package_options import hide_passwords, package_spec
from ansible_collections.dra.accelerators.plugins.module_utils._package_tools import tool_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System


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
    """Bring the toolkit to the wanted state; returns the module's result. Raises AcceleratorError."""
    hide_passwords(module)
    params = module.params
    system = System()
    apt = tool_of(system, timeout=float(params["timeout"]))
    group = group_of(params["components"], params["cdi_refresh"])
    return bring(
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
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
