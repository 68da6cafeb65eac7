#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: file_set
version_added: 0.1.0
short_description: Write a set of files, directories, and links in one step
description:
  - Writes a set of files, directories, and symbolic links, and returns which of them changed.
  - The module reads all entries before it changes the first entry. It replaces a file or a link with one rename, and syncs it. So a
    reader, and the node after a power failure, see either the previous entry or the new entry.
  - If a change fails, the module restores the previous entry of each path. If the restoration fails too, the error names the paths, and
    RV(previous) has the entries that are still to be restored.
  - The module removes temporary files that killed runs left in the same directories.
  - The other hard links of a file keep its previous content, mode, and owner.
  - The module fails if a path exists as an entry of another kind, except that it replaces a link with a file. It deletes a directory only if
    the directory is empty or if preceding entries delete all of its content.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details:
      - The diff does not show contents of entries with O(files[].secret) or O(files[].secret_content), and contents in which the module finds a
        token, a private key, or a password.
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  files:
    description: The entries, in the order in which the module writes them.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: The path of the entry. The module replaces a symbolic link at this path and does not follow it.
        type: path
        required: true
      state:
        description:
          - The kind of the entry.
          - V(absent) deletes a file, a link, or an empty directory. A directory with content stays.
        type: str
        choices: [file, directory, link, absent]
        default: file
      content:
        description: The file's content. By default, the content is not changed.
        type: str
      encoding:
        description: The encoding of O(files[].content) and O(files[].secret_content). Use V(base64) for content that is not UTF-8.
        type: str
        choices: [utf-8, base64]
        default: utf-8
      secret_content:
        description: The same as O(files[].content) for secret content. Implies O(files[].secret=true).
        type: str
      secret:
        description:
          - Whether the entry's content is secret. The module does not show the current or the new content in diffs, results, and messages. This
            applies to all values of O(files[].state).
          - Set this option for every file with a token, a key, or a password, also with O(files[].state=absent).
        type: bool
        default: false
      target:
        description: The target of the link. Required for O(files[].state=link).
        type: str
      marker:
        description: With O(files[].state=absent), the module deletes a file only if it contains this text.
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
- name: Write a configuration file, a token, and a link
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

- name: Delete a unit that contains a marker, a token, and their directory if it is empty
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
  description: All entries of O(files), in the same order.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: The path of the entry.
      returned: success
      type: str
      sample: /etc/example/example.yaml
    target:
      description: The target of a link, or empty for other entries.
      returned: success
      type: str
      sample: ""
    changed:
      description: Whether the entry changes, in check mode too.
      returned: success
      type: bool
      sample: true
    what:
      description: The changed properties, any of V(kind), V(content), V(target), V(mode), V(owner), and V(group).
      returned: success
      type: list
      elements: str
      sample: [content]
changed_paths:
  description: The paths of the changed entries. In check mode, the entries to change.
  returned: success
  type: list
  elements: str
  sample: [/etc/example/example.yaml]
previous:
  description:
    - The value of O(files) that restores the previous entries, in the required order. It removes directories that were created for an
      entry if they are empty.
    - It does not contain secret entries and entries whose content contains a token, a private key, or a password.
    - If the module fails, it returns only the entries that it could not restore.
  returned: success, and failure of a change
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

import base64
import binascii
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.file_set import (
    ABSENT,
    DIRECTORY,
    FILE,
    LINK,
    DesiredEntry,
    FileSetError,
    differences,
    entries_after_removals,
    known_secrets,
    mark_secret,
    plan,
    read_entry,
    restoring_options,
    with_known_owner,
    with_parents,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.file_writer import FileWriter
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

UTF_8 = "utf-8"
BASE64 = "base64"

ENTRY: dict[str, dict[str, Any]] = {
    "path": {"type": "path", "required": True},
    "state": {"type": "str", "choices": [FILE, DIRECTORY, LINK, ABSENT], "default": FILE},
    "content": {"type": "str"},
    "secret_content": {"type": "str", "no_log": True},
    "encoding": {"type": "str", "choices": [UTF_8, BASE64], "default": UTF_8},
    "secret": {"type": "bool", "default": False},
    "target": {"type": "str"},
    "marker": {"type": "str", "default": ""},
    "mode": {"type": "str"},
    "owner": {"type": "str"},
    "group": {"type": "str"},
}


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


def wanted_of(entry: dict[str, Any]) -> DesiredEntry:
    """Return the desired state of an entry. Raises FileSetError."""
    content = entry["secret_content"] if entry["secret_content"] is not None else entry["content"]
    mode = None
    if entry["mode"] is not None:
        try:
            mode = int(entry["mode"], 8)
        except ValueError as error:
            raise FileSetError(
                f"{entry['path']} has the mode {entry['mode']!r}, expected octal digits",
                hint='Write the mode in quotes, such as "0644".',
            ) from error
    return DesiredEntry(
        path=os.path.normpath(entry["path"]),
        kind=entry["state"],
        content=content_of(entry["path"], content, entry["encoding"]) if entry["state"] == FILE else None,
        secret=entry["secret"] or entry["secret_content"] is not None,
        target=entry["target"] or "",
        mode=mode,
        owner=entry["owner"],
        group=entry["group"],
        marker=entry["marker"],
    )


def content_of(path: str, content: str | None, encoding: str) -> bytes | None:
    """Return the decoded content. Raises FileSetError for invalid Base64."""
    if content is None or encoding == UTF_8:
        return None if content is None else content.encode()
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise FileSetError(
            f"The content of {path} is not Base64: {error}",
            hint="Encode it, as the filter b64encode does, or set encoding to utf-8. Nothing was changed.",
        ) from error


def known_owner(entry: DesiredEntry, *, is_check: bool) -> DesiredEntry:
    """Return the entry with the names of user and group.

    Raises FileSetError for an unknown name, but not in check mode: an earlier task would have created the user or group.
    """
    try:
        return with_known_owner(entry)
    except FileSetError:
        if not is_check:
            raise
        return entry


def work(module: AnsibleModule) -> dict[str, Any]:
    """Write the files and return the module's result. Raises FileSetError, OSError.

    Secret values of the files are masked in the result and in every message of the module.
    """
    entries = [known_owner(wanted_of(entry), is_check=module.check_mode) for entry in module.params["files"]]
    # Temporary files of killed runs can contain secrets. They are removed first, because otherwise their directory is not empty.
    system = System()
    temporaries = [path for one in entries if one.kind != DIRECTORY for path in system.orphaned_temporaries(one.path)]
    # The same entry can occur more than once, for example the directory of several files.
    wanted = [
        *(DesiredEntry(path, ABSENT, secret=True) for path in dict.fromkeys(temporaries)),
        *dict.fromkeys(entries),
    ]
    present = entries_after_removals(wanted, {one.path: read_entry(one.path) for one in wanted})
    module.no_log_values.update(known_secrets(wanted, present))
    wanted = list(mark_secret(wanted, present, module.no_log_values))
    changes = with_parents(plan(wanted, present))
    if not module.check_mode:
        for path in dict.fromkeys(one.path for one in entries if one.kind != DIRECTORY):
            system.remove_temporaries(path)
        writer = FileWriter(system, lambda path: module.set_default_selinux_context(path, changed=False))
        writer.write([change for change in changes if change.wanted.path not in temporaries])
    changed = {change.wanted.path: list(change.what) for change in changes}
    return {
        "changed": bool(changes),
        "files": [
            {"path": one.path, "target": one.target, "changed": one.path in changed, "what": changed.get(one.path, [])}
            for one in entries
        ],
        "changed_paths": list(changed),
        "previous": restoring_options(changes),
        "diff": differences(changes),
    }


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
