#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: containerd_config
version_added: 0.1.0
short_description: Have containerd hand CDI devices to containers
description:
  - Switches CDI on in the settings of the containerd that serves the kubelet, and restarts it if that is needed. Where
    CDI is on and reads the right folders, which is containerd's default from 2.0 on, nothing is touched.
  - The change is the least one that does it. A drop-in file is written where containerd reads one; else the keys are set
    in the table of the file that has it, all other lines of which stay as they are, with a copy of the file beside it.
  - Each change is tried on copies first. containerd's own C(config dump) of them must show CDI on, in the table of the
    plugin that serves the kubelet, and no other setting changed; else the change is not made.
  - If containerd does not come back after the restart, or does not serve the kubelet, the files are put back and it is
    restarted once more.
  - A restart that an earlier run owes is made up for. The running containerd is asked what it knows; where it cannot be
    asked, the start of its process is compared with the times of its files.
notes:
  - Needs root on the node. Running containers go on while containerd restarts.
  - A record of what was changed is kept in O(record), for O(state=absent).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - The trial on copies is made in check mode as well, so that refusals are the same. On a node that has no library
        that reads TOML yet, check mode says so in a warning and predicts nothing.
  diff_mode:
    support: full
    details:
      - The lines that change and those around them.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  state:
    description:
      - V(present) switches CDI on.
      - V(absent) takes back what V(present) has changed, and nothing else. A file that was changed since keeps all but
        the keys of this module.
    type: str
    choices:
      - present
      - absent
    default: present
  runtime:
    description:
      - The runtime that the kubelet uses. V(auto) looks at which service is running, and refuses CRI-O, Docker Engine
        behind cri-dockerd, and a k3s or RKE2 whose containerd has CDI off, each with what to do. Where none is running, a
        containerd that has failed is the one.
    type: str
    choices:
      - auto
      - containerd
    default: auto
  command:
    description:
      - containerd's command.
    type: str
    default: containerd
  config:
    description:
      - containerd's main configuration file.
    type: path
    default: /etc/containerd/config.toml
  drop_ins:
    description:
      - Folder of drop-in files. It is used if containerd imports its files; if it imports those of another folder, that
        one is used.
    type: path
    default: /etc/containerd/conf.d
  service:
    description:
      - The systemd unit that runs containerd.
    type: str
    default: containerd.service
  cdi_folders:
    description:
      - Folders that containerd has to read CDI files from. Folders that it reads already stay. They are made if missing.
    type: list
    elements: path
    default:
      - /etc/cdi
      - /var/run/cdi
  timeout:
    description:
      - How many seconds containerd may take to restart.
    type: int
    default: 60
  record:
    description:
      - File on the node in which is written what was changed.
    type: path
    default: /var/lib/dra-accelerators/containerd.json
  interpreter:
    description:
      - A Python interpreter on the node that has the library C(tomli). It is used only if the interpreter that Ansible
        uses on the node has no library that reads TOML, which is part of Python from 3.11 on.
      - The default is the virtual environment that the role P(dra.accelerators.python_environment#role) makes.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
seealso:
  - module: dra.accelerators.runtime_cdi
    description: Sets up whichever runtime a node has.
requirements:
  - Python 3.11 or newer on the node, or the Python package C(tomli) in the interpreter that Ansible uses there or in
    O(interpreter).
  - containerd 1.7.2 or newer, run by systemd.
"""

EXAMPLES = r"""
- name: Have containerd hand CDI devices to containers
  dra.accelerators.containerd_config:

- name: Set up a containerd that lies somewhere else
  dra.accelerators.containerd_config:
    runtime: containerd
    command: /opt/containerd/bin/containerd
    config: /opt/containerd/etc/config.toml
    service: site-containerd.service

- name: Take back what was changed
  dra.accelerators.containerd_config:
    state: absent
"""

RETURN = r"""
files:
  description: Paths of containerd's files that were written or removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["/etc/containerd/conf.d/60-dra-accelerators.toml"]
folders:
  description: Folders of CDI files that were made or removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["/etc/cdi"]
restarted:
  description: Whether containerd was restarted, or would be in check mode.
  returned: success
  type: bool
  sample: true
reason:
  description: Why containerd was restarted; empty if it was not.
  returned: success
  type: str
  sample: its settings were changed
enabled:
  description: Whether CDI is on afterwards, by containerd's own dump; in check mode, whether it would be.
  returned: if containerd could be asked
  type: bool
  sample: true
verified:
  description: Whether the running containerd reported its CDI settings by C(crictl). A warning reports V(false).
  returned: with O(state=present), and in check mode if no restart is needed
  type: bool
  sample: true
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: no-safe-change
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_daemon import Daemon
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_plan import read_record
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_switch import (
    CopiedFiles,
    Wish,
    absent,
    present,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, end, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils._runtime_find import uses_containerd
from ansible_collections.dra.accelerators.plugins.module_utils._toml import reader
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

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
    """Bring containerd to the wanted state; returns the module's result. Raises AcceleratorError."""
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
    run(module, work)


if __name__ == "__main__":
    main()
