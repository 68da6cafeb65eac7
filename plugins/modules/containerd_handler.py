#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: containerd_handler
version_added: 0.1.0
short_description: Have containerd offer a further runtime handler
description:
  - Adds a runtime handler to containerd that differs from its default one only by O(vendors) and O(options). Pods use it through a
    RuntimeClass.
  - A drop-in file is written where containerd reads one; else a block of lines is added to its main file. The change is tried on
    copies first. containerd's own C(config dump) of them must show the handler and no other setting changed; else it is not made.
  - containerd is restarted where it does not know the handler yet. If it does not come back, the files are put back and it is
    restarted once more. Running containers go on meanwhile.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - The trial on copies is made in check mode as well.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  name:
    description: The handler's name.
    type: str
    required: true
  state:
    description: Whether containerd is to offer the handler.
    type: str
    choices: [present, absent]
    default: present
  vendors:
    description:
      - Vendors whose character devices the handler's containers may open and create nodes of. The containers are not privileged.
      - The major numbers are read from C(/proc/devices) when the module runs. Run it again after a change of the vendor's driver.
      - Every pod with a RuntimeClass of this handler has this right. Restrict the RuntimeClass with a ValidatingAdmissionPolicy.
    type: list
    elements: str
    choices: [ascend, nvidia]
    default: []
  options:
    description:
      - What the handler's program is told besides what the default one is told, by the names of containerd's configuration, such as
        C(BinaryName).
    type: dict
    default: {}
  specification:
    description:
      - With O(vendors), the file of the OCI specification of the handler's containers. The module writes it from the output of
        C(ctr oci spec).
      - The default is named after the handler, in the directory of O(config).
    type: path
  command:
    description: containerd's command.
    type: str
    default: containerd
  config:
    description: containerd's main configuration file.
    type: path
    default: /etc/containerd/config.toml
  drop_ins:
    description: Folder of drop-in files; it is used where containerd imports its files.
    type: path
    default: /etc/containerd/conf.d
  service:
    description: The systemd unit that runs containerd.
    type: str
    default: containerd.service
  timeout:
    description: How many seconds containerd may take to restart.
    type: int
    default: 60
  interpreter:
    description:
      - A Python interpreter on the node that has the library C(tomli), for nodes whose own Python reads no TOML.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
requirements:
  - Python 3.11 or newer on the node, or the Python package C(tomli) in the interpreter that Ansible uses there or in
    O(interpreter).
  - containerd 1.7 or newer with its program C(ctr), run by systemd.
seealso:
  - module: dra.accelerators.containerd_config
"""

EXAMPLES = r"""
- name: Let the node driver's pods open the accelerators
  dra.accelerators.containerd_handler:
    name: dra-accelerators-driver
    vendors: [nvidia]

- name: Offer another program that starts containers
  dra.accelerators.containerd_handler:
    name: crun
    options:
      BinaryName: /usr/bin/crun
"""

RETURN = r"""
files:
  description: Files that were written or removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [/etc/containerd/dra-accelerators-driver.json, /etc/containerd/config.toml]
restarted:
  description: Whether containerd was restarted, or would be in check mode.
  returned: success
  type: bool
  sample: true
pods:
  description: With RV(restarted=true), the pods that have processes on the node, as far as the node knows their names. They go on.
  returned: success
  type: list
  elements: str
  sample: ["team-a/training-0"]
device_rules:
  description:
    - With O(vendors), the device rules of the handler's containers, in the form of an OCI specification. A container that runs keeps the
      rules that it was created with.
  returned: success
  type: list
  elements: dict
  sample: [{allow: true, type: c, major: 195, access: rwm}]
settled:
  description: Whether there is nothing to do for this module, so that after a look in check mode no real run is needed.
  returned: success
  type: bool
  sample: true
"""

import posixpath
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._containerd import Change, Settings, differences
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_daemon import ContainerdError, Daemon
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_handler import (
    base_specification,
    candidates,
    drop_in_name,
    handlers,
    text_before,
    wanted_handler,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, end, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils._secret_texts import changed_lines
from ansible_collections.dra.accelerators.plugins.module_utils._toml import reader
from ansible_collections.dra.accelerators.plugins.module_utils._vendors import device_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.pods import running_pods
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

COMMAND_SECONDS = 30.0


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        **INTERPRETER_OPTION,
        "name": {"type": "str", "required": True},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "vendors": {"type": "list", "elements": "str", "choices": ["ascend", "nvidia"], "default": []},
        "options": {"type": "dict", "default": {}},
        "specification": {"type": "path"},
        "command": {"type": "str", "default": "containerd"},
        "config": {"type": "path", "default": "/etc/containerd/config.toml"},
        "drop_ins": {"type": "path", "default": "/etc/containerd/conf.d"},
        "service": {"type": "str", "default": "containerd.service"},
        "timeout": {"type": "int", "default": 60},
    }


def plan(daemon: Daemon, settings: Settings, params: dict[str, Any], specification: str) -> list[Change]:
    """Return the changes that make the handler known and do nothing else. Raises AcceleratorError."""
    name = params["name"]
    handler = wanted_handler(settings, specification, params["options"])
    if handlers(settings).get(name) == handler:
        return []
    refused = []
    folder = daemon.drop_in_folder(params["drop_ins"])
    place = (daemon.read(daemon.config), daemon.config, folder)
    alone = candidates(settings, name, handler, *place)
    for each in [*alone, *candidates(settings, name, handler, *place, others=handlers(settings))]:
        after = daemon.aside(settings, daemon.imported(), [each])
        if after is None:
            refused.append(f"{each.path}: containerd refuses the file")
            continue
        others = [path for path in differences(settings.rest, after.rest) if f"runtimes.{name}" not in path]
        if handlers(after).get(name) == handler and not others:
            found = daemon.read(each.path)
            return [Change(each.path, found.text if found else None, each.after)]
        refused.append(f"{each.path}: it would change {', '.join(others[:3]) or 'nothing'}")
    raise ContainerdError(
        f"containerd cannot be given the runtime handler {name}: {'; '.join(refused)}",
        hint=f"Add it by hand, as {handler}. Nothing was changed.",
        code="no-safe-change",
    )


def plan_absent(daemon: Daemon, params: dict[str, Any], specification: str) -> list[Change]:
    """Return the changes that take the handler away."""
    changes = []
    folders = {params["drop_ins"], daemon.drop_in_folder(params["drop_ins"]) or params["drop_ins"]}
    files = [posixpath.join(folder, drop_in_name(params["name"])) for folder in sorted(folders)]
    for path in [*files, *([specification] if specification else [])]:
        found = daemon.read(path)
        if found is not None:
            changes.append(Change(path, found.text, None))
    main = daemon.read(daemon.config)
    if main is not None and (after := text_before(main.text, params["name"])) != main.text:
        changes.append(Change(main.path, main.text, after))
    return changes


def write(system: System, path: str, text: str | None) -> None:
    """Write a file as a whole, with the mode that it has, or remove it. A symbolic link stays, and its target is written or removed."""
    path = system.real_path(path)
    if text is None:
        system.remove(path)
        return
    there = Path(path).exists()
    system.write_atomic(path, text.encode(), mode=Path(path).stat().st_mode & 0o777 if there else 0o644)


def carry_out(system: System, daemon: Daemon, settings: Settings, changes: list[Change]) -> None:
    """Make the changes and restart containerd; they are taken back where it does not come back. Raises ContainerdError."""
    for each in changes:
        write(system, each.path, each.after)
    problem = daemon.restart(settings)
    if not problem:
        return
    for each in reversed(changes):
        write(system, each.path, each.before)
    again = daemon.restart(settings) if changes else problem
    raise ContainerdError(
        f"containerd did not come back with the changes of {', '.join(each.path for each in changes) or 'an earlier run'}: {problem} "
        + (f"It does not run as before either: {again}" if again else "They were taken back, and it runs as before."),
        hint="Mend what containerd complains of, then run this again.",
        code="restart-failed",
    )


def work(module: AnsibleModule) -> dict[str, Any]:
    """Bring the handler or take it away; returns the module's result. Raises AcceleratorError."""
    params, system = module.params, System()
    daemon = Daemon(
        system,
        command=params["command"],
        config=params["config"],
        service=params["service"],
        timeout=params["timeout"],
    )
    specification = ""
    if params["vendors"]:
        beside = posixpath.join(posixpath.dirname(daemon.config), f"{params['name']}.json")
        specification = params["specification"] or beside
    settings = daemon.settings()
    behind = False
    rules = device_rules(system, params["vendors"]) if params["state"] == "present" else []
    if params["state"] == "absent":
        changes = plan_absent(daemon, params, specification)
    else:
        changes = specified(system, daemon, specification, rules) if specification else []
        changes += plan(daemon, settings, params, specification)
        behind = is_behind(daemon, system, specification)
    restarted = bool(changes or behind)
    if restarted and not module.check_mode:
        carry_out(system, daemon, settings, changes)
    return {
        "changed": restarted,
        "settled": not restarted,
        "files": [each.path for each in changes],
        "restarted": restarted,
        "pods": list(running_pods(system)) if restarted else [],
        "device_rules": rules,
        "diff": diff_of(changes),
    }


def diff_of(changes: Sequence[Change]) -> list[dict[str, str]]:
    """Return the diff of each file in Ansible's form: only the lines that change, because others can hold registry passwords."""
    return [
        {
            "before_header": each.path,
            "after_header": each.path,
            "prepared": changed_lines(each.path, each.before, each.after),
        }
        for each in changes
    ]


def specified(system: System, daemon: Daemon, specification: str, rules: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Return the change that writes the OCI specification of the handler's containers, or nothing. Raises AcceleratorError."""
    program = shutil.which("ctr") or "ctr"
    done = system.run([program, "oci", "spec"], COMMAND_SECONDS)
    if done.returncode:
        raise AcceleratorError(f"{program} oci spec ended with {done.returncode}: {done.stderr.strip()}")
    text, found = base_specification(done.stdout, rules), daemon.read(specification)
    return [] if found and found.text == text else [Change(specification, found.text if found else None, text)]


def is_behind(daemon: Daemon, system: System, specification: str) -> bool:
    """Whether the running containerd was started before its handler's files were written."""
    _active, began = daemon.process()
    paths = [specification, daemon.config, *(each.path for each in daemon.imported())]
    times = [system.path(path).stat().st_mtime for path in paths if path and system.exists(path)]
    return bool(began) and any(time > began + 1.0 for time in times)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    if reader() is None:
        missing = find_binding("tomli", module.params["interpreter"])
        end(
            module,
            msg=f"{missing}. Expected Python 3.11 or newer, or the package tomli, which the role python_environment installs.",
            error_code="binding-missing",
        )
    run(module, work)


if __name__ == "__main__":
    main()
