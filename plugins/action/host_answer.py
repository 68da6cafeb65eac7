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
        """Return another host's registered result without templating it. Raises AnsibleActionFail."""
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
        part = part_about(result, options["nodes"], options["drivers"])
        if options["fields"] is not None:
            part = {key: part[key] for key in options["fields"] if key in part}
        return {**part, "changed": False}


def _is_about(claim: Mapping[str, Any], nodes: Collection[str]) -> bool:
    """Return whether a claim has a device of the Nodes. The pool of an unpublished device has the name of its Node."""
    if not set(nodes).isdisjoint(claim["nodes"]):
        return True
    devices = claim.get("devices") or ()
    return any(not device.get("published", True) and device.get("pool") in nodes for device in devices)


def _plan_about(plan: Mapping[str, Any], nodes: Collection[str]) -> dict[str, Any]:
    """Return the entries of Nodes in a plan, without its other keys.

    The other keys are as large as the fleet, and only the host that printed them needs them.
    """
    return {
        "nodes": {name: facts for name, facts in plan["nodes"].items() if name in nodes},
        "evicted": [pod for pod in plan["evicted"] if pod["node"] in nodes],
        "idle": [name for name in plan["idle"] if name in nodes],
    }


def part_about(
    answer: Mapping[str, Any], nodes: Collection[str] | None, drivers: Collection[str] | None = None
) -> dict[str, Any]:
    """Return an answer without the entries of other Nodes, or all of it if ``nodes`` is None.

    With ``drivers``, claims without a device of these drivers on the Nodes are left out.
    """
    part = dict(answer)
    if nodes is None:
        return part
    if isinstance(part.get("nodes"), Mapping):
        part["nodes"] = {name: facts for name, facts in part["nodes"].items() if name in nodes}
    if isinstance(part.get("plan"), Mapping):
        part["plan"] = _plan_about(part["plan"], nodes)
    if isinstance(part.get("claims"), list):
        part["claims"] = [
            claim
            for claim in part["claims"]
            if _is_about(claim, nodes)
            and (drivers is None or any(not set(drivers).isdisjoint(claim["drivers"].get(node, ())) for node in nodes))
        ]
    return part
