#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: file_set
version_added: 0.1.0
short_description: Files, folders and links of one purpose, written in one step
description:
  - Brings a whole set of files, folders and symbolic links to what is wanted, and says which of them changed.
  - Everything is looked at before anything is changed. A file is replaced whole, by another that was written aside, so that
    a reader sees the old content or the new.
  - What is in the way is never removed unasked. A file where a folder is wanted is an error, and a folder is removed only
    when it is empty or when all that is in it is removed by entries before it.
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
    details:
      - Contents of entries with O(files[].secret) or O(files[].secret_content) are not shown.
      - Neither are contents of other entries in which the module finds a token, a private key, or a password.
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  files:
    description: The set, in the order in which it is written.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Where it is. A symbolic link at this place is replaced, not followed.
        type: path
        required: true
      state:
        description:
          - What is to be there.
          - V(absent) removes a file, a link, or an empty folder; a folder with something in it stays.
        type: str
        choices: [file, directory, link, absent]
        default: file
      content:
        description: The file's content. By default, the content is not changed.
        type: str
      secret_content:
        description: The same as O(files[].content) for secret content. Implies O(files[].secret=true).
        type: str
      secret:
        description:
          - Whether the entry's content is secret. Neither the current nor the new content is shown in a diff, returned, or put
            into a message, whatever O(files[].state) is.
          - Set it for every file that holds a token, a key, or a password, also where the file is removed.
        type: bool
        default: false
      target:
        description: Where a link leads; required for V(link).
        type: str
      marker:
        description: With O(files[].state=absent), a file that does not hold these words is somebody else's and stays.
        type: str
        default: ""
      mode:
        description: The mode, as octal digits in quotes. The default is C(0644) for a new file and C(0755) for a new directory.
        type: str
      owner:
        description: The name of the owner. By default, the owner is not changed.
        type: str
      group:
        description: The name of the group. By default, the group is not changed.
        type: str
seealso:
  - module: ansible.builtin.copy
  - module: ansible.builtin.file
"""

EXAMPLES = r"""
- name: Write a unit and its configuration
  dra.accelerators.file_set:
    files:
      - path: /etc/example
        state: directory
        mode: "0755"
      - path: /etc/example/example.yaml
        content: "level: info\n"
        mode: "0644"
      - path: /etc/example/token
        secret: true
        secret_content: "{{ example_token }}"
        mode: "0600"
        owner: root
        group: root
      - path: /opt/example/current
        state: link
        target: releases/2
  register: written

- name: Remove a unit that bears a mark, and a folder if nothing is left in it
  dra.accelerators.file_set:
    files:
      - path: /etc/systemd/system/example.service
        state: absent
        marker: https://example.com/example
      - path: /etc/example/token
        state: absent
        secret: true
      - path: /etc/example
        state: absent
"""

RETURN = r"""
files:
  description: Every entry of the set, in the order given.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: Where it is.
      returned: success
      type: str
      sample: /etc/example/example.yaml
    target:
      description: Where it leads; empty for anything but a link.
      returned: success
      type: str
      sample: ""
    changed:
      description: Whether it was changed, or would be.
      returned: success
      type: bool
      sample: true
    what:
      description: What of it, any of V(kind), V(content), V(target), V(mode), V(owner), V(group).
      returned: success
      type: list
      elements: str
      sample: [content]
changed_paths:
  description: The paths that were changed, or would be.
  returned: success
  type: list
  elements: str
  sample: [/etc/example/example.yaml]
former:
  description:
    - What O(files) has to be to bring back what was there before, in the order that this needs.
    - Secret entries are left out, and entries whose content holds a token, a private key, or a password.
  returned: success
  type: list
  elements: dict
  sample:
    - path: /etc/example/example.yaml
      state: file
      content: "level: debug\n"
      mode: "0644"
      owner: root
      group: root
"""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._files import (
    ABSENT,
    DIRECTORY,
    FILE,
    LINK,
    Change,
    FileSetError,
    Wanted,
    differences,
    empties,
    former,
    known_secrets,
    look,
    mark_secret,
    plan,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

ENTRY: dict[str, dict[str, Any]] = {
    "path": {"type": "path", "required": True},
    "state": {"type": "str", "choices": [FILE, DIRECTORY, LINK, ABSENT], "default": FILE},
    "content": {"type": "str"},
    "secret_content": {"type": "str", "no_log": True},
    "secret": {"type": "bool", "default": False},
    "target": {"type": "str"},
    "marker": {"type": "str", "default": ""},
    "mode": {"type": "str"},
    "owner": {"type": "str"},
    "group": {"type": "str"},
}
NEW_MODE = {FILE: 0o644, DIRECTORY: 0o755}


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "files": {
            "type": "list",
            "elements": "dict",
            "required": True,
            "options": ENTRY,
            "mutually_exclusive": [("content", "secret_content")],
            "required_if": [("state", LINK, ("target",))],
        }
    }


def wanted_of(entry: dict[str, Any]) -> Wanted:
    """Return what an entry of the option asks for. Raises FileSetError."""
    content = entry["secret_content"] if entry["secret_content"] is not None else entry["content"]
    mode = None
    if entry["mode"] is not None:
        try:
            mode = int(entry["mode"], 8)
        except ValueError as error:
            raise FileSetError(
                f"{entry['path']} has the mode {entry['mode']!r}, expected octal digits",
                hint='Write it in quotes, such as "0644".',
            ) from error
    return Wanted(
        path=os.path.normpath(entry["path"]),
        kind=entry["state"],
        content=content.encode() if content is not None and entry["state"] == FILE else None,
        secret=entry["secret"] or entry["secret_content"] is not None,
        target=entry["target"] or "",
        mode=mode,
        owner=entry["owner"],
        group=entry["group"],
        marker=entry["marker"],
    )


def execute(module: AnsibleModule, change: Change) -> None:
    """Take one change. Raises OSError."""
    wanted, path = change.wanted, Path(change.wanted.path)
    if wanted.kind == ABSENT:
        path.rmdir() if change.before.kind == DIRECTORY else path.unlink()
        return
    if change.rewrites:
        path.parent.mkdir(mode=NEW_MODE[DIRECTORY], parents=True, exist_ok=True)
        if wanted.kind == DIRECTORY:
            path.mkdir(mode=NEW_MODE[DIRECTORY])
        elif wanted.kind == LINK:
            replace_link(path, wanted.target)
        else:
            replace_file(module, path, change)
    mode = wanted.mode
    if mode is None and change.before.kind == ABSENT:
        mode = NEW_MODE.get(wanted.kind)
    attributes = {
        "path": wanted.path,
        "mode": None if wanted.kind == LINK else mode,
        "owner": wanted.owner,
        "group": wanted.group,
        "secontext": [None, None, None],
        "attributes": None,
    }
    module.set_fs_attributes_if_different(attributes, False)


def replace_link(path: Path, target: str) -> None:
    """Make the link beside its place and rename it, so that there always is one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    aside.symlink_to(target)
    aside.replace(path)


def replace_file(module: AnsibleModule, path: Path, change: Change) -> None:
    """Write the content aside, closed to others, and have Ansible move it to its place."""
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(change.wanted.content or b"")
        if change.before.kind != FILE:
            os.fchmod(file.fileno(), NEW_MODE[FILE] if change.wanted.mode is None else change.wanted.mode)
        file.flush()
        os.fsync(file.fileno())
    if change.before.kind == LINK:
        path.unlink()  # otherwise the move would follow it
    module.atomic_move(aside, str(path), unsafe_writes=False)


def work(module: AnsibleModule) -> dict[str, Any]:
    """Write the set and return the module's result. Raises FileSetError, OSError.

    The result and every message of the module are masked with the secret values of the set.
    """
    wanted: Sequence[Wanted] = [wanted_of(entry) for entry in module.params["files"]]
    present = empties(wanted, {one.path: look(one.path) for one in wanted})
    module.no_log_values.update(known_secrets(wanted, present))
    wanted = mark_secret(wanted, present, module.no_log_values)
    changes = plan(wanted, present)
    if not module.check_mode:
        for change in changes:
            execute(module, change)
    changed = {change.wanted.path: list(change.what) for change in changes}
    return {
        "changed": bool(changes),
        "files": [
            {"path": one.path, "target": one.target, "changed": one.path in changed, "what": changed.get(one.path, [])}
            for one in wanted
        ],
        "changed_paths": list(changed),
        "former": former(changes),
        "diff": differences(changes),
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
