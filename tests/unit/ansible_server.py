# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run Ansible's commands in forks of one process that has imported Ansible.

The import takes a second of processor time, as long as a short play. Each line of the standard input is a request:
a JSON object with the command's ``words``, its ``environment``, its ``directory``, and the files of its ``output`` and
its ``errors``. The answer is a line with the exit status, or the negative number of the signal.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
from typing import Any

COMMANDS = {"ansible": "adhoc", "ansible-inventory": "inventory", "ansible-playbook": "playbook"}
CLASSES = {"ansible": "AdHocCLI", "ansible-inventory": "InventoryCLI", "ansible-playbook": "PlaybookCLI"}
#: What a play imports after its start.
PRELOADED = (
    "ansible.executor.playbook_executor",
    "ansible.executor.task_queue_manager",
    "ansible.executor.module_common",
    "ansible.module_utils.basic",
    "ansible.plugins.strategy.linear",
    "multiprocessing.queues",
)


def paths_of(environment: dict[str, str]) -> list[str]:
    """Return the directories of ``PYTHONPATH``."""
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def run(request: dict[str, Any]) -> int:
    """Run one command in this process and return its exit status."""
    os.setsid()  # signals to its process group do not reach the server
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(request["output"], os.O_WRONLY), 1)
    os.dup2(os.open(request["errors"], os.O_WRONLY), 2)
    before = paths_of(dict(os.environ))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = [*paths_of(request["environment"]), *(path for path in sys.path if path not in before)]
    os.chdir(request["directory"])
    from ansible import constants

    importlib.reload(constants)  # with the settings of this environment
    name = os.path.basename(request["words"][0])
    command = getattr(importlib.import_module(f"ansible.cli.{COMMANDS[name]}"), CLASSES[name])
    sys.argv = request["words"]
    try:
        command.cli_executor(request["words"])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def serve() -> None:
    """Answer requests until the end of the standard input."""
    sys.path.pop(0)  # the directory of this file
    for name in (*(f"ansible.cli.{name}" for name in COMMANDS.values()), *PRELOADED):
        importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            status = run(json.loads(line))
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)


if __name__ == "__main__":
    serve()
