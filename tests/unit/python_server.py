# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run Python programs in forks of a process that has imported what they need.

The imports of ``ansible-playbook`` and of a module take longer than most plays and modules: a module's files come from
an archive, without compiled files. Usage: ``python_server.py commands|modules SOCKET``; the client is
``forked_python``. The program of a client that ends is killed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

PRELOADED = {
    "commands": (
        "ansible.cli.adhoc",
        "ansible.cli.inventory",
        "ansible.cli.playbook",
        "ansible.executor.module_common",
        "ansible.plugins.strategy.linear",
    ),
    "modules": (
        "ansible.module_utils.basic",
        "ansible.module_utils.common.dict_transformations",
        "ansible.module_utils.service",
        "ansible.module_utils.urls",
        "kubernetes.dynamic",
        "yaml",
    ),
}


class PackagePath:
    """The directories of the package ``ansible``: the installed one, and that of the archive which a module adds to sys.path.

    The archive has the modules of other directories than the installed ones, such as those of ``--module-path``.
    """

    def __init__(self, installed: list[str]) -> None:
        self.installed = installed

    def __iter__(self) -> Iterator[str]:
        return iter([*self.installed, os.path.join(sys.path[0], "ansible")])


def paths() -> list[str]:
    """Return the directories of ``PYTHONPATH``."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run(descriptors: list[int]) -> None:
    """Run the program of a request, with its files for input, output, errors, and the request."""
    with os.fdopen(descriptors.pop(), "rb") as file:
        file.seek(0)
        request = json.load(file)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    others = [path for path in sys.path if path not in paths()]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv[:] = request["arguments"]
    sys.path[:] = [os.path.dirname(sys.argv[0]), *paths(), *others]
    if "ansible.constants" in sys.modules:
        importlib.reload(sys.modules["ansible.constants"])  # with the settings of this environment
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_and_exit(descriptors: list[int]) -> None:
    """Run the program of a request and end this process as Python ends."""
    status: object = 1
    try:
        run(descriptors)
        status = 0
    except SystemExit as ended:
        status = ended.code
    finally:
        if sys.exc_info()[1] is not None:
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else status is not None)


def answer(connection: socket.socket) -> None:
    """Run one program in a child process and send its exit status to the client."""
    descriptors = socket.recv_fds(connection, 16, 4)[1]
    child = os.fork()
    if child == 0:
        connection.close()
        os.setsid()  # a program that kills its process group kills no other program
        run_and_exit(descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    process = os.pidfd_open(child)
    ended, _, _ = select.select([process, connection], [], [])
    if process not in ended:
        os.killpg(child, signal.SIGKILL)
    connection.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def serve(kind: str, path: str) -> None:
    """Listen on a socket until the standard input ends."""
    sys.path.pop(0)  # the directory of this file
    for name in PRELOADED[kind]:
        importlib.import_module(name)
    if kind == "modules":
        package: Any = sys.modules["ansible"]
        package.__path__ = PackagePath(list(package.__path__))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                answer(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    serve(*sys.argv[1:])
