# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run a Python program in a fork of a process that has imported what it needs (python_server.py).

Ansible's commands run in one such process, and its modules, whose interpreter is ``forked_python``, in another. The
sockets of both are in the directory FORKED_PYTHON.
"""

import json
import os
import socket
import sys

name = (
    "commands" if os.path.basename(sys.argv[1]) in ("ansible", "ansible-inventory", "ansible-playbook") else "modules"
)
request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(os.path.join(os.environ["FORKED_PYTHON"], name))
    with os.fdopen(os.memfd_create("request"), "wb") as file:  # an environment can be longer than a packet
        file.write(json.dumps(request).encode())
        file.flush()
        socket.send_fds(connection, [b"run"], [0, 1, 2, file.fileno()])
    answer = connection.recv(64)
if not answer:
    sys.exit(f"{name}: the process that runs {sys.argv[1]} has ended without an exit status; run the test alone")
status = int(answer)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
