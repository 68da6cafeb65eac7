# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node that is this machine, unless a file marks it as unreachable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local

DOCUMENTATION = """
name: local_or_away
short_description: this machine, or an unreachable one
description:
  - Runs commands on this machine. Fails as unreachable while the file in C(NODE_AWAY) exists.
extends_documentation_fragment:
  - connection_pipelining
"""


class Connection(Local):
    transport = "local_or_away"

    def exec_command(self, *arguments: Any, **named: Any) -> Any:
        if Path(os.environ["NODE_AWAY"]).exists():
            raise AnsibleConnectionFailure("the node does not answer")
        return super().exec_command(*arguments, **named)
