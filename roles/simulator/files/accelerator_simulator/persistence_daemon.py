# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The simulated nvidia-persistenced, which holds the device node of each GPU in persistence mode open.

Facts from NVIDIA/nvidia-persistenced (nvidia-persistenced.c, nvpd_defs.h): the daemon opens a device when the mode is
enabled, and closes it when the mode is disabled, at the request of NVML and nvidia-smi. Its socket is
/var/run/nvidia-persistenced/socket. Here it polls the mode in the library, with a short delay. A GPU that it has open
is in use: its MIG mode cannot change, and it cannot be reset.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SOCKET = "/run/nvidia-persistenced/socket"
NAME = b"nvidia-persistenced"
PR_SET_NAME = 15
POLL_SECONDS = 0.05
FIRST_GPU = 1 << 40


def is_running(root: str) -> bool:
    """Return whether a daemon runs."""
    return Path(root + SOCKET).is_socket()


def lock(state: int, byte: int, held: bool) -> None:
    """Acquire or release a read lock on a byte behind the library's state file (clients.c)."""
    kind = fcntl.F_RDLCK if held else fcntl.F_UNLCK
    fcntl.fcntl(state, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))


def hold(state: int, index: int, held: bool) -> None:
    """Register or unregister as a client of a GPU."""
    lock(state, FIRST_GPU + index, held)


def open_state(folder: Path) -> int:
    """Open the state file of the library, to lock bytes of it."""
    return os.open(next(folder.glob("libnvidia-gpusim.so.*")), os.O_RDONLY)


def serve(root: str, devices: Callable[[], Sequence[Mapping[str, Any]]], library: Path) -> None:
    """Hold the nodes open until the process ends. ``library`` is the directory of the simulated library."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, NAME)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = Path(root + SOCKET).parent
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # a socket's path is limited to 107 bytes
    Path("socket").unlink(missing_ok=True)
    held: dict[str, int] = {}
    state = open_state(library)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        try:
            while True:
                gpus = {f"{root}/dev/nvidia{gpu['minor']}": gpu for gpu in devices()}
                wanted = {path for path, gpu in gpus.items() if gpu["persistence_mode"]}
                for path in wanted - held.keys():
                    # O_PATH: the node of a simulated GPU has no driver that could open it.
                    held[path] = os.open(path, os.O_PATH)
                for path in held.keys() - wanted:
                    os.close(held.pop(path))
                for path, gpu in gpus.items():
                    hold(state, gpu["index"], path in held)
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            return
        finally:
            Path("socket").unlink(missing_ok=True)
