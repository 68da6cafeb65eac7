# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the module node_driver repeatedly, and display between the calls what the node waits for.

A module alone shows no output before its end.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

MODULE = "dra.accelerators.node_driver"
#: Seconds within which a healthy driver starts. After that, progress is displayed at this interval.
PATIENCE_SECONDS = 10.0
#: The module's default, for tasks without the option ``timeout``.
TIMEOUT_SECONDS = 90.0


class ActionModule(ActionBase):  # type: ignore[misc]
    """The action plugin of the module ``node_driver``, with the same options and the same result."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call the module until the driver has started, the module has failed, or the timeout is over."""
        super().run(tmp, task_vars)
        given = dict(self._task.args)
        if given.get("state", "started") != "started" or self._task.check_mode or "patience" in given:
            return dict(self._execute_module(module_name=MODULE, module_args=given, task_vars=task_vars))
        try:
            timeout = float(given.get("timeout", TIMEOUT_SECONDS))
        except (TypeError, ValueError):
            # The module reports the invalid value.
            return dict(self._execute_module(module_name=MODULE, module_args=given, task_vars=task_vars))
        began, waited, first = time.monotonic(), 0.0, None
        while True:
            arguments = {**given, "timeout": timeout, "patience": PATIENCE_SECONDS, "waited": waited}
            result = dict(self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars))
            # Only the first call makes changes. The later calls only read the state.
            if first is None:
                first = result
            elif not result.get("failed"):
                result = {**result, **{key: first.get(key) for key in ("changed", "steps", "diff")}}
            waiting = result.get("waiting") or []
            if result.get("failed") or not waiting:
                return result
            waited = time.monotonic() - began
            # The node reports these texts. Control characters are replaced, because the operator's terminal would interpret them.
            conditions = "".join(each if each.isprintable() else "?" for each in "; ".join(map(str, waiting)))[:2000]
            host = (task_vars or {}).get("inventory_hostname", "")
            Display().display(f"[{host}] waits for its driver ({waited:.0f} s of {timeout:.0f} s): {conditions}")
