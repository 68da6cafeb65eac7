# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask a test before each task for an action, and wait for it: the task begins only after the fault was injected."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: at_step
type: notification
short_description: asks a test before each task
description:
  - Posts the name of each task to the address in C(AT_STEP), and kills all of Ansible where the answer says so.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "at_step"

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        request = urllib.request.Request(
            os.environ["AT_STEP"],
            data=json.dumps({"task": task.name or ""}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.load(reply)
        if answer["kill"]:
            os.killpg(0, signal.SIGKILL)
