# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Call one module of the collection with Ansible, like a user."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.cluster import execute

Result = dict[str, Any]
Module = Callable[..., Result]


def caller(inventory: Path) -> Module:
    """Return a function that runs one module on one host of an inventory and returns its result with the output before
    it.
    """

    def run(host: str, module: str, options: Result, *, check: bool = False) -> Result:
        words = ["ansible", host, "--inventory", inventory, "--module-name", f"dra.accelerators.{module}"]
        words += ["--args", json.dumps(options), "--diff", *(["--check"] if check else [])]
        completed = execute(words, check=False, env={**os.environ, "ANSIBLE_PIPELINING": "true"})
        # With --diff the differences are printed before the result.
        start = completed.stdout.find(f"{host} | ")
        answer = completed.stdout[completed.stdout.find("{", start) :]
        assert start >= 0, completed.stdout + completed.stderr
        result: Result = json.loads(answer)
        return {**result, "failed": completed.returncode != 0, "printed": completed.stdout[:start]}

    return run
