# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A replacement for a DCMI process: the slice ID or the template selects its behavior."""

from __future__ import annotations

import os
import socket
import sys
import time

from dra_driver.core.errors import NotFound
from dra_driver.core.vendors.ascend.dcmi import messages
from dra_driver.core.vendors.ascend.readings import Told

HANGS, DIES, RUNS = 1, 2, 3


def main() -> None:
    """Answer requests, most of them with the number of this process."""
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rb") as lines:
        for line in lines:
            method, arguments = messages.parse_request(line)
            if method == "driver_version" and int(sys.argv[2]) >= 0:
                os.write(int(sys.argv[2]), messages.event(Told(3, 7, True)))
            if method == "destroy" and arguments[1] == HANGS:
                time.sleep(3600)
            if method == "destroy" and arguments[1] == RUNS:
                os.system("sleep 3600")  # like DCMI, which runs programs in a shell
            if method == "destroy" and arguments[1] == DIES:
                os._exit(9)
            if method == "is_started":
                channel.sendall(messages.failure(NotFound("There is no chip")))
            elif method == "slices":
                channel.sendall(messages.result(None))
            else:
                channel.sendall(messages.result(str(os.getpid())))


if __name__ == "__main__":
    main()
