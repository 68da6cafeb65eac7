#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_plugin_leftovers
version_added: 0.1.0
short_description: Remove unused sockets of vendor device plugins
description:
  - Removes sockets of vendor device plugins from the kubelet's directory C(device-plugins) if no process serves them. A killed device plugin
    leaves such a socket. For the node driver and the preflight check, a socket in this directory means that a plugin is running.
  - The module connects to each socket to determine whether a process serves it. It does not remove served sockets, the sockets of this
    collection's driver and of the kubelet, or files without the name of a vendor's plugin.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details:
      - RV(removed) contains the changes.
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  kubelet_root:
    description: The kubelet's root directory.
    type: path
    default: /var/lib/kubelet
seealso:
  - module: dra.accelerators.device_plugin_migration
"""

EXAMPLES = r"""
- name: Remove the sockets of killed device plugins
  dra.accelerators.device_plugin_leftovers:
"""

RETURN = r"""
removed:
  description: The removed sockets. In check mode, the sockets to remove.
  returned: success
  type: list
  elements: str
  sample: [/var/lib/kubelet/device-plugins/nvidia-gpu.sock]
served:
  description: The sockets of vendor device plugins that a process serves.
  returned: success
  type: list
  elements: str
  sample: []
"""

import socket
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._migration.resource_names import FACTS
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

PREFIXES = tuple(prefix for each in FACTS for prefix in each.device_plugins)
CONNECT_SECONDS = 2.0


def argument_spec() -> dict[str, Any]:
    return {"kubelet_root": {"type": "path", "default": "/var/lib/kubelet"}}


def is_served(path: Path) -> bool:
    """Return whether a process accepts connections on a socket. After a timeout, a slow process is assumed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(CONNECT_SECONDS)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def work(module: AnsibleModule) -> dict[str, Any]:
    folder = Path(module.params["kubelet_root"]) / "device-plugins"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    sockets = [each for each in found if each.name.startswith(PREFIXES) and each.is_socket()]
    unused = [each for each in sockets if not is_served(each)]
    if not module.check_mode:
        for each in unused:
            each.unlink(missing_ok=True)
    return {
        "changed": bool(unused),
        "removed": [str(each) for each in unused],
        "served": [str(each) for each in sockets if each not in unused],
    }


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
