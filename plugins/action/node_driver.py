# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module node_driver in parts, and says between them what a node still waits for: a module alone is silent until its end."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

MODULE = "dra.accelerators.node_driver"
#: A driver that starts as it should has started by then; what takes longer is told as often.
PATIENCE_SECONDS = 10.0
#: The module's own default, where the task says nothing.
TIMEOUT_SECONDS = 90.0


class ActionModule(ActionBase):  # type: ignore[misc]
    """The action of the module's name: same options, same result."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call the module until nothing is waited for any more, it has failed, or the time is over."""
        super().run(tmp, task_vars)
        given = dict(self._task.args)
        if given.get("state", "started") != "started" or self._task.check_mode or "patience" in given:
            return dict(self._execute_module(module_name=MODULE, module_args=given, task_vars=task_vars))
        try:
            timeout = float(given.get("timeout", TIMEOUT_SECONDS))
        except (TypeError, ValueError):
            # The module says what is wrong with it.
            return dict(self._execute_module(module_name=MODULE, module_args=given, task_vars=task_vars))
        began, waited, first = time.monotonic(), 0.0, None
        while True:
            asked = {**given, "timeout": timeout, "patience": PATIENCE_SECONDS, "waited": waited}
            result = dict(self._execute_module(module_name=MODULE, module_args=asked, task_vars=task_vars))
            # What was done was done by the first call; the later ones only look.
            if first is None:
                first = result
            elif not result.get("failed"):
                result = {**result, **{key: first.get(key) for key in ("changed", "steps", "diff")}}
            waiting = result.get("waiting") or []
            if result.get("failed") or not waiting:
                return result
            waited = time.monotonic() - began
            # The node reports these: no control characters for the operator's terminal.
            words = "".join(each if each.isprintable() else "?" for each in "; ".join(map(str, waiting)))[:2000]
            host = (task_vars or {}).get("inventory_hostname", "")
            Display().display(f"[{host}] waits for its driver ({waited:.0f} s of {timeout:.0f} s): {words}")
