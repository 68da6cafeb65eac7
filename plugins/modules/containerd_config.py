#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: containerd_config
version_added: 0.1.0
short_description: Enable CDI in containerd
description:
  - Enables CDI in the configuration of the containerd that serves the kubelet, and restarts containerd if necessary. If CDI is
    enabled and containerd reads the required directories, which is the default from containerd 2.0 on, the module changes nothing.
  - The module makes the smallest possible change. If containerd reads drop-in files, the module writes one. Otherwise, it sets
    the keys in the file that contains the table, keeps all other lines, and saves a copy of the file in the same directory.
  - The module tests each change on copies of the files first. The output of C(containerd config dump) for these copies must show that
    CDI is enabled in the table of the plugin that serves the kubelet, and that no other setting changes. Otherwise, the
    module does not make the change.
  - If containerd does not start after the change or does not serve the kubelet, the module restores the files and restarts
    containerd again.
  - If an earlier run ended before its restart, the module restarts containerd. To detect this, it queries the settings of the running
    containerd. If it cannot query them, it compares the start time of the process with the times of the files.
notes:
  - The module needs root on the node. Containers keep running while containerd restarts.
  - The module keeps a record of its changes in O(record), for O(state=absent).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - The module also tests the changes on copies in check mode, so that it reports the same errors. If the node has no library
        that reads TOML yet, the module warns and reports no changes.
  diff_mode:
    support: full
    details:
      - The diff contains the changed lines and their context.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  state:
    description:
      - V(present) enables CDI.
      - V(absent) reverts only the changes of V(present). If a file was changed later, the module reverts only its own keys in the
        file.
    type: str
    choices:
      - present
      - absent
    default: present
  runtime:
    description:
      - The runtime that the kubelet uses. V(auto) detects the running service. If no service runs, it selects a containerd
        service that has failed.
      - With V(auto), the module fails for CRI-O, for Docker Engine with cri-dockerd, and for k3s or RKE2 if CDI is disabled in their
        containerd. The error contains a remedy.
    type: str
    choices:
      - auto
      - containerd
    default: auto
  command:
    description:
      - The command of containerd.
    type: str
    default: containerd
  config:
    description:
      - The main configuration file of containerd.
    type: path
    default: /etc/containerd/config.toml
  drop_ins:
    description:
      - The directory of drop-in files. The module uses it if containerd imports files from it. If containerd imports files from another
        directory, the module uses that directory.
    type: path
    default: /etc/containerd/conf.d
  service:
    description:
      - The systemd unit that runs containerd.
    type: str
    default: containerd.service
  cdi_folders:
    description:
      - The directories from which containerd must read CDI files. The module creates missing directories. Other directories that
        containerd already reads stay configured.
    type: list
    elements: path
    default:
      - /etc/cdi
      - /var/run/cdi
  timeout:
    description:
      - The timeout for a restart of containerd, in seconds.
    type: int
    default: 60
  record:
    description:
      - The file on the node in which the module records its changes.
    type: path
    default: /var/lib/dra-accelerators/containerd.json
  interpreter:
    description:
      - A Python interpreter on the node with the library C(tomli). The module uses it only if the interpreter that Ansible
        uses on the node has no library that reads TOML. Python 3.11 and newer include such a library.
      - The default is the virtual environment that the role P(dra.accelerators.python_environment#role) creates.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
seealso:
  - module: dra.accelerators.runtime_cdi
    description: Enables CDI in any supported container runtime.
requirements:
  - Python 3.11 or newer on the node, or the Python package C(tomli) in the interpreter that Ansible uses there or in
    O(interpreter).
  - containerd 1.7.2 or newer, run by systemd.
"""

EXAMPLES = r"""
- name: Enable CDI in containerd
  dra.accelerators.containerd_config:

- name: Enable CDI in a containerd at a custom path
  dra.accelerators.containerd_config:
    runtime: containerd
    command: /opt/containerd/bin/containerd
    config: /opt/containerd/etc/config.toml
    service: site-containerd.service

- name: Revert the changes
  dra.accelerators.containerd_config:
    state: absent
"""

RETURN = r"""
files:
  description: The paths of containerd's files that the module has written or removed, or would write or remove in check mode.
  returned: success
  type: list
  elements: str
  sample: ["/etc/containerd/conf.d/60-dra-accelerators.toml"]
folders:
  description: The directories that the module has created or removed, or would create or remove in check mode.
  returned: success
  type: list
  elements: str
  sample: ["/etc/cdi"]
restarted:
  description: Whether the module has restarted containerd, or would restart it in check mode.
  returned: success
  type: bool
  sample: true
reason:
  description: The reason for the restart of containerd. It is empty without a restart.
  returned: success
  type: str
  sample: its settings were changed
enabled:
  description: Whether CDI is enabled after the run, according to C(containerd config dump). In check mode, whether it would be enabled.
  returned: if containerd returned its settings
  type: bool
  sample: true
verified:
  description:
    - Whether the running containerd reported its CDI settings through C(crictl). If V(false), the module also warns.
  returned: with O(state=present), and in check mode if no restart is needed
  type: bool
  sample: true
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: no-safe-change
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.apply import (
    CopiedFiles,
    Wish,
    absent,
    present,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.daemon import Daemon
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.plan import read_record
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.kubelet_runtime import (
    uses_containerd,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.toml_edit import reader
from ansible_collections.dra.accelerators.plugins.module_utils._host.single_run import run_alone
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, end, find_binding
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

RECORD = "/var/lib/dra-accelerators/containerd.json"


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        **INTERPRETER_OPTION,
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "runtime": {"type": "str", "choices": ["auto", "containerd"], "default": "auto"},
        "command": {"type": "str", "default": "containerd"},
        "config": {"type": "path", "default": "/etc/containerd/config.toml"},
        "drop_ins": {"type": "path", "default": "/etc/containerd/conf.d"},
        "service": {"type": "str", "default": "containerd.service"},
        "cdi_folders": {"type": "list", "elements": "path", "default": ["/etc/cdi", "/var/run/cdi"]},
        "timeout": {"type": "int", "default": 60},
        "record": {"type": "path", "default": RECORD},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    """Configure containerd or undo the changes, and return the module's result. Raises AcceleratorError."""
    params = module.params
    system = System()
    daemon = Daemon(
        system,
        command=params["command"],
        config=params["config"],
        service=params["service"],
        timeout=float(params["timeout"]),
    )
    files = CopiedFiles(module, system, params["record"], read_record)
    wish = Wish(params["cdi_folders"], params["drop_ins"])
    if params["state"] == "absent":
        return absent(files, daemon, wish, check=module.check_mode)
    ours = params["runtime"] == "containerd" or uses_containerd(system, params["cdi_folders"])
    return present(files, daemon if ours else None, wish, check=module.check_mode)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    if reader() is None:
        missing = find_binding("tomli", module.params["interpreter"])
        if module.check_mode:
            module.warn(f"{missing}, so that it is not known yet whether containerd's settings would change.")
            module.exit_json(changed=False, files=[], folders=[], restarted=False, reason="", diff={"prepared": ""})
        end(
            module,
            msg=f"{missing}. Expected Python 3.11 or newer, or the package tomli, which the role python_environment installs.",
            error_code="binding-missing",
        )
    run_alone(module, work, System())


if __name__ == "__main__":
    main()
