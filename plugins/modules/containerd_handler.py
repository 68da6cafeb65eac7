#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: containerd_handler
version_added: 0.1.0
short_description: Add a runtime handler to containerd
description:
  - Adds a runtime handler to containerd that differs from the default handler only in O(vendors) and O(options). Pods use the handler
    through a RuntimeClass.
  - If containerd reads drop-in files, the module writes one. Otherwise, it adds a block of lines to the main file. The module tests the
    change on copies of the files first. The output of C(containerd config dump) for these copies must show the handler and no other
    changed setting. Otherwise, the module does not make the change.
  - The module restarts containerd if the running process has not loaded the handler. If containerd does not start, the module
    restores the files and restarts containerd again. Containers keep running during a restart.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
    details:
      - The module also tests the change on copies in check mode.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: linux
options:
  name:
    description: The name of the handler.
    type: str
    required: true
  state:
    description:
      - V(present) adds the handler to containerd.
      - V(absent) removes the handler.
    type: str
    choices: [present, absent]
    default: present
  vendors:
    description:
      - The vendors whose character devices containers of the handler can open. The containers can also create device nodes for them. They are not
        privileged.
      - The module reads the major numbers from C(/proc/devices). Run it again after you change the vendor's driver.
      - Every pod with a RuntimeClass of this handler has this permission. Restrict the RuntimeClass with a ValidatingAdmissionPolicy.
    type: list
    elements: str
    choices: [ascend, nvidia]
    default: []
  options:
    description:
      - Additional options of the handler's runtime program, with the names of containerd's configuration, for example C(BinaryName). All other
        options are those of the default handler.
    type: dict
    default: {}
  specification:
    description:
      - With O(vendors), the path of the OCI specification of the handler's containers. The module generates it from the output of
        C(ctr oci spec).
      - The default is a file with the name of the handler in the directory of O(config).
    type: path
  command:
    description: The command of containerd.
    type: str
    default: containerd
  config:
    description: The main configuration file of containerd.
    type: path
    default: /etc/containerd/config.toml
  drop_ins:
    description:
      - The directory of drop-in files. The module uses it if containerd imports files from it. If containerd imports files from another
        directory, the module uses that directory.
    type: path
    default: /etc/containerd/conf.d
  service:
    description: The systemd unit that runs containerd.
    type: str
    default: containerd.service
  timeout:
    description: The timeout for a restart of containerd, in seconds.
    type: int
    default: 60
  interpreter:
    description:
      - A Python interpreter on the node with the library C(tomli). The module uses it only if the interpreter that Ansible uses on the node
        has no library that reads TOML.
    type: path
    default: /opt/dra-accelerators/venv/bin/python
requirements:
  - Python 3.11 or newer on the node, or the Python package C(tomli) in the interpreter that Ansible uses there or in
    O(interpreter).
  - containerd 1.7 or newer with its program C(ctr), run by systemd.
seealso:
  - module: dra.accelerators.runtime_cdi
    description: Enables CDI in the container runtime of a node.
"""

EXAMPLES = r"""
- name: Add a handler whose containers can open NVIDIA GPUs
  dra.accelerators.containerd_handler:
    name: dra-accelerators-driver
    vendors: [nvidia]

- name: Add a handler that uses crun
  dra.accelerators.containerd_handler:
    name: crun
    options:
      BinaryName: /usr/bin/crun
"""

RETURN = r"""
files:
  description: The files that the module has written or removed, or would write or remove in check mode.
  returned: success
  type: list
  elements: str
  sample: [/etc/containerd/dra-accelerators-driver.json, /etc/containerd/config.toml]
restarted:
  description: Whether the module has restarted containerd, or would restart it in check mode.
  returned: success
  type: bool
  sample: true
pods:
  description: With RV(restarted=true), the pods that have processes on the node, if the node knows their names. They keep running.
  returned: success
  type: list
  elements: str
  sample: ["team-a/training-0"]
device_rules:
  description:
    - With O(vendors), the device rules of the handler's containers, in the format of the OCI specification. A running container keeps the
      rules with which it was created.
  returned: success
  type: list
  elements: dict
  sample: [{allow: true, type: c, major: 195, access: rwm}]
up_to_date:
  description: Whether no changes are necessary. If V(true) in check mode, a run without check mode is not needed.
  returned: success
  type: bool
  sample: true
"""

import contextlib
import hashlib
import json
import posixpath
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.config import (
    Change,
    Settings,
    differences,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.daemon import (
    ContainerdError,
    Daemon,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.handler import (
    base_specification,
    candidates,
    drop_in_name,
    handlers,
    text_before,
    wanted_handler,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.toml_edit import reader
from ansible_collections.dra.accelerators.plugins.module_utils._host.file_restore import (
    call_for_problem,
    describe_not_restored,
    describe_restored_state,
    reason,
    restore_all,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.secret_masking import changed_lines
from ansible_collections.dra.accelerators.plugins.module_utils._host.vendor_detection import device_rules
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, end, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.kubelet_pods import running_pods
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

COMMAND_SECONDS = 30.0
#: The files that the running containerd has loaded, for each service. A reboot ends the process, and removes the file.
LOADED = "/run/dra-accelerators/loaded-by-{service}.json"


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
    """Return the changes that add the handler and have no other effect. Raises AcceleratorError."""
    name = params["name"]
    handler = wanted_handler(settings, specification, params["options"])
    if handlers(settings).get(name) == handler:
        return []
    rejected = []
    folder = daemon.drop_in_folder(params["drop_ins"])
    place = (daemon.read(daemon.config), daemon.config, folder)
    only_new = candidates(settings, name, handler, *place)
    # A drop-in file can replace the table of all handlers. Such files must repeat the other handlers.
    with_others = candidates(settings, name, handler, *place, others=handlers(settings))
    for each in [*only_new, *with_others]:
        after = daemon.settings_after(settings, daemon.imported(), [each])
        if after is None:
            rejected.append(f"{each.path}: containerd rejects the file")
            continue
        others = [path for path in differences(settings.rest, after.rest) if f"runtimes.{name}" not in path]
        if handlers(after).get(name) == handler and not others:
            found = daemon.read(each.path)
            return [Change(each.path, found.text if found else None, each.after)]
        rejected.append(f"{each.path}: it would change {', '.join(others[:3]) or 'nothing'}")
    raise ContainerdError(
        f"The runtime handler {name} cannot be added to containerd: {'; '.join(rejected)}",
        hint=f"Add it manually, as {handler}. Nothing was changed.",
        code="no-safe-change",
    )


def plan_absent(daemon: Daemon, params: dict[str, Any], specification: str) -> list[Change]:
    """Return the changes that remove the handler."""
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


def apply_changes(system: System, daemon: Daemon, settings: Settings, changes: list[Change]) -> None:
    """Write the changes and restart containerd. If the restart fails, restore the files. Raises ContainerdError."""

    def restore(change: Change) -> None:
        found = daemon.read(change.path) if system.exists(change.path) else None
        if (found and found.text) != change.before:
            system.replace_text(change.path, change.before)

    def restore_files() -> dict[str, str]:
        return restore_all((each.path, partial(restore, each)) for each in reversed(changes))

    for each in changes:
        try:
            system.replace_text(each.path, each.after)
        except OSError as error:
            raise ContainerdError(
                f"{each.path} cannot be written: {reason(error)}. {describe_not_restored(restore_files()) or 'The previous files were restored'}",
                hint="containerd was not restarted. Correct the problem, then run this again.",
                code="os-error",
            ) from error
    problem = call_for_problem(partial(daemon.restart, settings))
    if not problem:
        return
    problems = restore_files()
    restart_problem = call_for_problem(partial(daemon.restart, settings)) if changes else problem
    raise ContainerdError(
        f"containerd failed to restart with the changes of {', '.join(each.path for each in changes) or 'an earlier run'}: {problem} "
        + describe_restored_state(problems, restart_problem),
        hint="Fix the error that containerd reports, and run the playbook again.",
        code="restart-failed",
    )


def work(module: AnsibleModule) -> dict[str, Any]:
    """Add or remove the handler, and return the module's result. Raises AcceleratorError."""
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
        default_path = posixpath.join(posixpath.dirname(daemon.config), f"{params['name']}.json")
        specification = params["specification"] or default_path
    settings = daemon.settings()
    rules = device_rules(system, params["vendors"]) if params["state"] == "present" else []
    if params["state"] == "absent":
        changes = plan_absent(daemon, params, specification)
    else:
        changes = plan_specification(system, daemon, specification, rules) if specification else []
        changes += plan(daemon, settings, params, specification)
    loaded = loaded_files(system, daemon)
    outdated = is_outdated(daemon, system, specification, loaded, by_times=params["state"] == "present")
    restarted = bool(changes or outdated)
    if restarted and not module.check_mode:
        if not outdated:
            # If this run is killed before the restart, the next run finds files that are not loaded, also after a clock change.
            record_loaded(system, daemon, {**{each.path: digest(each.before) for each in changes}, **loaded})
        apply_changes(system, daemon, settings, changes)
    if not module.check_mode and params["state"] == "absent":
        remove_loaded_record(system, daemon)
    elif not module.check_mode:
        current = {path: digest(text_of(daemon, path)) for path in files_of(daemon, specification)}
        if restarted or not current.keys() <= loaded.keys():
            record_loaded(system, daemon, current if restarted else {**loaded, **current})
    return {
        "changed": restarted,
        "up_to_date": not restarted,
        "files": [each.path for each in changes],
        "restarted": restarted,
        "pods": list(running_pods(system)) if restarted else [],
        "device_rules": rules,
        "diff": diff_of(changes),
    }


def diff_of(changes: Sequence[Change]) -> list[dict[str, str]]:
    """Return Ansible's diff of each file, only with changed lines, because other lines can have registry passwords."""
    return [
        {
            "before_header": each.path,
            "after_header": each.path,
            "prepared": changed_lines(each.path, each.before, each.after),
        }
        for each in changes
    ]


def plan_specification(
    system: System, daemon: Daemon, specification: str, rules: Sequence[Mapping[str, Any]]
) -> list[Change]:
    """Return the change that writes the OCI specification of the handler's containers, or an empty list. Raises AcceleratorError."""
    program = shutil.which("ctr") or "ctr"
    done = system.run([program, "oci", "spec"], COMMAND_SECONDS)
    if done.returncode:
        raise AcceleratorError(f"{program} oci spec ended with {done.returncode}: {done.stderr.strip()}")
    text, found = base_specification(done.stdout, rules), daemon.read(specification)
    return [] if found and found.text == text else [Change(specification, found.text if found else None, text)]


def files_of(daemon: Daemon, specification: str) -> list[str]:
    """Return the files of containerd's settings and of the handler."""
    return [path for path in (specification, daemon.config, *(each.path for each in daemon.imported())) if path]


def text_of(daemon: Daemon, path: str) -> str | None:
    """Return the text of a file, or None if it does not exist."""
    found = daemon.read(path)
    return found.text if found else None


def digest(text: str | None) -> str:
    """Return the digest of a file's text, or "" if the file does not exist."""
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def loaded_files(system: System, daemon: Daemon) -> dict[str, str]:
    """Return the digests of the files that the running containerd has loaded, if a run of this module has recorded them."""
    try:
        content = json.loads(system.read_text(LOADED.format(service=daemon.service)))
        known = {str(path): str(found) for path, found in content["files"].items()}
        return known if content["process"] == daemon.identity() else {}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}  # then is_outdated compares the times of the files


def record_loaded(system: System, daemon: Daemon, files: Mapping[str, str]) -> None:
    """Record the files that the running containerd has loaded. Raises OSError."""
    text = json.dumps({"process": daemon.identity(), "files": files}, indent=1, sort_keys=True) + "\n"
    system.write_atomic(LOADED.format(service=daemon.service), text.encode(), mode=0o600)


def remove_loaded_record(system: System, daemon: Daemon) -> None:
    """Remove the record of loaded files, and its directory if nothing else is in it. Raises OSError."""
    path = LOADED.format(service=daemon.service)
    if not system.remove(path):
        return
    with contextlib.suppress(OSError):
        system.path(posixpath.dirname(path)).rmdir()


def is_outdated(
    daemon: Daemon, system: System, specification: str, loaded: Mapping[str, str], *, by_times: bool = True
) -> bool:
    """Return whether the running containerd has not loaded the current content of its files.

    ``loaded`` are the digests of the loaded files. With ``by_times``, other files count as not loaded if they were
    written, restored, or renamed after the start of containerd.
    """
    if any(digest(text_of(daemon, path)) != known for path, known in loaded.items()):
        return True
    _active, started = daemon.process()
    if not by_times or not started:
        return False
    unknown = [
        system.path(path) for path in files_of(daemon, specification) if path not in loaded and system.exists(path)
    ]
    # A restored file keeps its modification time (mtime), but not its change time (ctime).
    return any(max(path.stat().st_mtime, path.stat().st_ctime) > started + 1.0 for path in unknown)


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
