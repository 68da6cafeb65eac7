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
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: no-safe-change
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._containerd import Change, Settings
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_daemon import (
    ContainerdError,
    Daemon,
    find_runtime,
)
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_plan import (
    BACKUP,
    Record,
    plan_absent,
    plan_present,
    read_record,
    recorded,
    see_nothing_else,
    shown,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, end, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils._toml import reader
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System

RECORD = "/var/lib/dra-accelerators/containerd.json"
CHANGED = "its settings were changed"


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


class Files:
    """Writes and removes containerd's files, the copies beside them, the record and the CDI folders."""

    def __init__(self, module: AnsibleModule, system: System, record_path: str) -> None:
        self.module = module
        self.system = system
        self.record_path = record_path

    def record(self) -> Record:
        """Return what is ours. Raises AcceleratorError for a record that cannot be read."""
        try:
            text = self.system.read_text(self.record_path)
        except FileNotFoundError:
            return Record()
        return read_record(text, self.record_path)

    def keep(self, record: Record) -> None:
        """Write the record; one that says nothing goes, and so does its folder if nothing else is in it."""
        if record:
            self.system.write_atomic(self.record_path, record.to_text().encode(), mode=0o600)
        elif self.system.remove(self.record_path):
            self.remove_folder(str(Path(self.record_path).parent))

    def make(self, changes: list[Change], record: Record) -> None:
        """Make the changes. A file that was there before us is copied once, before it is first changed."""
        for each in changes:
            entry = record.files.get(each.path)
            if each.before is not None and each.after is not None and not (entry and entry.created):
                backup = each.path + BACKUP
                if not self.system.exists(backup):
                    self.module.preserved_copy(each.path, backup)
            self._put(each.path, each.after)

    def undo(self, changes: list[Change], record: Record) -> None:
        """Put every file back as it was before the changes, with its time if it was not ours before (``record``)."""
        for each in reversed(changes):
            backup = each.path + BACKUP
            if each.path not in record.files and self.system.exists(backup):
                self.module.atomic_move(backup, each.path)
            else:
                self._put(each.path, each.before)

    def _put(self, path: str, text: str | None) -> None:
        if text is None:
            self.system.remove(path)
            return
        new = Path(self.module.tmpdir, Path(path).name)
        new.write_text(text, encoding="utf-8")
        if not self.system.exists(path):
            new.chmod(0o644)
        self.module.atomic_move(str(new), path)

    def missing(self, folders: list[str]) -> list[str]:
        """Return which folders are not there, those above them included, the outermost first."""
        found: list[str] = []
        for folder in folders:
            for path in [*reversed(Path(folder).parents), Path(folder)]:
                if not path.exists() and str(path) not in found:
                    found.append(str(path))
        return found

    def make_folders(self, paths: list[str]) -> None:
        """Make folders that everybody may read, after writing down that they are ours."""
        if paths:
            record = self.record()
            self.keep(Record(record.files, tuple(dict.fromkeys([*record.folders, *paths])), record.restart))
        for path in paths:
            Path(path).mkdir(mode=0o755, exist_ok=True)
            Path(path).chmod(0o755)

    def remove_folders(self, paths: list[str]) -> None:
        """Remove folders that are ours, as far as they are empty."""
        for path in sorted(paths, key=len, reverse=True):
            self.remove_folder(path)
        record = self.record()
        left = tuple(path for path in record.folders if path not in paths)
        self.keep(Record(record.files, left, record.restart))

    def emptied(self, folders: list[str], changes: list[Change]) -> list[str]:
        """Return which folders are empty once the changes are made, the innermost first."""
        gone = {path for each in changes if each.after is None for path in (each.path, each.path + BACKUP)}
        found: list[str] = []
        for folder in sorted(folders, key=len, reverse=True):
            if Path(folder).is_dir() and all(str(path) in gone for path in Path(folder).iterdir()):
                found.append(folder)
                gone.add(folder)
        return found

    def remove_folder(self, path: str) -> bool:
        """Remove a folder if it is empty; whether it was."""
        try:
            Path(path).rmdir()
        except OSError:
            return False
        return True


def carry_out(
    module: AnsibleModule, files: Files, daemon: Daemon, settings: Settings, changes: list[Change], on: bool
) -> Settings:
    """Make the changes, prove them by the daemon's dump, restart it; all is undone if one of these fails."""
    before = files.record()
    record = recorded(before, changes)
    # The record comes first: a run that is killed from here on is made up for by the next one.
    files.keep(Record({**before.files, **record.files}, record.folders, restart=True))
    files.make(changes, record)
    problem = ""
    try:
        after = daemon.settings()
        if on and not after.reads(module.params["cdi_folders"]):
            problem = "its own dump does not show CDI on after the change"
    except ContainerdError as error:
        after, problem = settings, str(error)
    if not problem:
        problem = daemon.restart(after)
        if problem:
            files.undo(changes, before)
            again = daemon.restart(settings)
            problem = f"containerd did not come back with them. {problem} " + (
                f"It does not run with its files as they were either: {again}"
                if again
                else "It runs with its files as they were"
            )
            files.keep(Record(before.files, before.folders, restart=bool(again)))
            raise ContainerdError(
                f"The changes of {', '.join(each.path for each in changes)} were taken back: {problem}",
                hint="Mend what containerd complains of, then run this again.",
                code="restart-failed",
            )
    else:
        files.undo(changes, before)
        files.keep(before)
        raise ContainerdError(
            f"The changes of {', '.join(each.path for each in changes)} were taken back: {problem}",
            hint="containerd was not restarted.",
            code="no-proof",
        )
    files.keep(Record(record.files, record.folders, restart=False))
    return after


def present(module: AnsibleModule, files: Files, daemon: Daemon) -> dict[str, Any]:
    """Switch CDI on. Raises AcceleratorError."""
    params = module.params
    wanted: list[str] = params["cdi_folders"]
    ours = params["runtime"] == "containerd" or find_runtime(daemon.system, wanted)
    changes: list[Change] = []
    reason = ""
    enabled = True
    settings = None
    if ours:
        settings = daemon.settings()
        imported = daemon.imported()
        changes = plan_present(daemon, settings, imported, wanted, params["drop_ins"])
        record = files.record()
        reason = CHANGED if changes else daemon.behind(settings, [daemon.config, *(each.path for each in imported)])
        if not reason and record.restart and not module.check_mode:
            # The process knows its settings, so the restart that was owed has happened by other hands.
            files.keep(Record(record.files, record.folders, restart=False))
    folders = files.missing([*(str(Path(each.path).parent) for each in changes), *wanted])
    if not module.check_mode:
        files.make_folders(folders)
        if changes and settings:
            try:
                enabled = carry_out(module, files, daemon, settings, changes, on=True).enabled
            except ContainerdError:
                files.remove_folders(folders)
                raise
        elif reason and settings:
            problem = daemon.restart(settings)
            if problem:
                raise ContainerdError(
                    f"containerd was to be restarted, because {reason}, and did not come back: {problem}",
                    hint="Its files were not changed by this run. Mend what it complains of, then run this again.",
                    code="restart-failed",
                )
            record = files.record()
            files.keep(Record(record.files, record.folders, restart=False))
    return {
        "changed": bool(changes or reason or folders),
        "files": [each.path for each in changes],
        "folders": folders,
        "restarted": bool(reason),
        "reason": reason,
        "enabled": enabled,
        "diff": shown(changes),
    }


def absent(module: AnsibleModule, files: Files, daemon: Daemon) -> dict[str, Any]:
    """Take back what is ours. Raises AcceleratorError."""
    params = module.params
    record = files.record()
    settings = None
    try:
        settings = daemon.settings()
    except AcceleratorError as error:
        # A containerd that is gone needs no proof and no restart.
        if error.code != "command-missing":
            raise
    imported = daemon.imported() if settings else []
    places = {params["drop_ins"], *([daemon.drop_in_folder(params["drop_ins"])] if settings else [])}
    changes = plan_absent(daemon, record, sorted(each for each in places if each))
    if settings and changes:
        see_nothing_else(daemon, settings, imported, changes)
    folders = files.emptied(list(record.folders), changes)
    active = settings is not None and daemon.process()[0]
    reason = CHANGED if active and (changes or record.restart) else ""
    if not module.check_mode and (changes or record):
        if changes and settings and active:
            carry_out(module, files, daemon, settings, changes, on=False)
        else:
            files.make(changes, recorded(record, changes))
            if reason and settings:
                problem = daemon.restart(settings)
                if problem:
                    raise ContainerdError(f"containerd did not come back: {problem}", code="restart-failed")
        for path in record.files:
            daemon.system.remove(path + BACKUP)
        files.remove_folders(folders)
        files.keep(Record())
    result: dict[str, Any] = {
        "changed": bool(changes or record),
        "files": [each.path for each in changes],
        "folders": folders,
        "restarted": bool(reason),
        "reason": reason,
        "diff": shown(changes),
    }
    if settings and not changes:
        result["enabled"] = settings.enabled
    return result


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
    files = Files(module, system, params["record"])
    return present(module, files, daemon) if params["state"] == "present" else absent(module, files, daemon)


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
