# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Return a result that another host of the play has registered, or the part of this result about given Nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.dra.accelerators.plugins.modules.host_answer import argument_spec


class ActionModule(ActionBase):  # type: ignore[misc]
    """The action plugin of the module ``host_answer``."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Read the registered result without templating it. Raises AnsibleActionFail."""
        super().run(tmp, task_vars)
        _validated, options = self.validate_argument_spec(argument_spec())
        host, name = options["host"], options["name"]
        hostvars = (task_vars or {})["hostvars"]
        result = hostvars.raw_get(host).get(name) if host in hostvars else None
        if not isinstance(result, Mapping):
            raise AnsibleActionFail(f"Host {host} has no result {name}: its task was not run.")
        if result.get("failed") or result.get("skipped"):
            reason = result.get("msg") or "its task failed" if result.get("failed") else "its task was skipped"
            raise AnsibleActionFail(f"Host {host} has no usable result {name}: {reason}")
        return {**part_about(result, options["nodes"]), "changed": False}


def part_about(answer: Mapping[str, Any], nodes: Collection[str] | None) -> dict[str, Any]:
    """Return an answer without the entries of other Nodes; all of it if ``nodes`` is None."""
    part = dict(answer)
    if nodes is None:
        return part
    if isinstance(part.get("nodes"), Mapping):
        part["nodes"] = {name: facts for name, facts in part["nodes"].items() if name in nodes}
    if isinstance(part.get("plan"), Mapping):
        part["plan"] = part_about(part["plan"], nodes)
    if isinstance(part.get("claims"), list):
        part["claims"] = [claim for claim in part["claims"] if not set(nodes).isdisjoint(claim["nodes"])]
    return part
