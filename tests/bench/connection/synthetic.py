# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connection to a node that does not exist: modules are built as for a real one and answered from a file.

The processor time of a run is then that of the Ansible controller alone. ``DRA_ACCELERATORS_SYNTHETIC`` names the file: a JSON object
from the name of a module to its result, in which ``NODE`` stands for the name of the host.
"""

from __future__ import annotations

import functools
import json
import os
import re
from typing import Any

from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: synthetic
short_description: answer modules from a file
description: Answers modules from a file.
author: The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment: [connection_pipelining]
"""

NODE = "@node@"
_MODULE = re.compile(
    rb"mod_name='(?:ansible_collections\.)?([a-z0-9_.]+)'|\"?module_fqn\"?[=:] ?[\"'](?:ansible_collections\.)?([a-z0-9_.]+)[\"']"
)


@functools.cache
def _answers() -> dict[str, Any]:
    with open(os.environ["DRA_ACCELERATORS_SYNTHETIC"], encoding="utf-8") as file:
        answers: dict[str, Any] = json.load(file)
    return answers


class Connection(ConnectionBase):  # type: ignore[misc]
    """A connection whose commands are modules on standard input."""

    transport = "synthetic"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Return the answer of the module in ``in_data``."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        if not in_data:
            # The shell commands with which an action plugin creates and removes its temporary directory.
            return 0, b"/root\n" if "echo ~ " in cmd else b"directory=/tmp/synthetic\n" if "mkdir" in cmd else b"", b""
        found = _MODULE.search(in_data)
        if found is None:
            raise ValueError(f"No module on the standard input of {cmd[:200]!r}: {in_data[:200]!r}")
        name = (found[1] or found[2]).decode().rpartition(".")[2]
        if name not in _answers():
            raise ValueError(f"No answer for the module {name}")
        return 0, json.dumps(_answers()[name]).replace(NODE, self._play_context.remote_addr).encode(), b""

    def put_file(self, in_path: str, out_path: str) -> None:
        """Raise ValueError, because all modules are sent on standard input."""
        raise ValueError(f"A file was sent: {in_path} to {out_path}")

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Raise ValueError, because no task of the measured playbooks fetches files."""
        raise ValueError(f"A file was fetched: {in_path} to {out_path}")

    def close(self) -> None:
        """Close the connection."""
        self._connected = False
