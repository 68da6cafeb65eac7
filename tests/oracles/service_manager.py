# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Simulates systemd on a host without it: starts and stops one real daemon for the commands that a module uses.

The program acts as `systemctl` and as `journalctl`. SERVICE_MANAGER_FOLDER contains `command` (how the daemon is
started), its PID, and its log. SERVICE_MANAGER_UNIT is the daemon's unit. The molecule scenario container_runtime uses
the real systemd.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["SERVICE_MANAGER_FOLDER"])
UNIT = os.environ.get("SERVICE_MANAGER_UNIT", "containerd.service")
PID, LOG = FOLDER / "pid", FOLDER / "log"
START_SECONDS = 20.0


def running() -> int:
    """Return the daemon's process ID, or 0."""
    try:
        pid = int(PID.read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return 0
    return 0 if state == "Z" else pid


def stop() -> None:
    """Kill the daemon and wait for its end."""
    pid = running()
    if pid:
        os.kill(pid, signal.SIGKILL)
    while running():
        time.sleep(0.02)


def start() -> int:
    """Start the daemon and wait until it answers on its socket, like Type=notify."""
    command, address = (FOLDER / "command").read_text().splitlines()
    # The kernel can still be ending the previous process, whose socket must not be used.
    Path(address).unlink(missing_ok=True)
    with LOG.open("ab") as log:
        process = subprocess.Popen(command, shell=True, stdout=log, stderr=log, start_new_session=True)
    PID.write_text(str(process.pid))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(address)
            except OSError:
                time.sleep(0.05)
                continue
        return 0
    sys.stderr.write(f"Job for {UNIT} failed.\n")
    return 1


def main(words: list[str]) -> int:
    """Perform a systemctl or journalctl command."""
    if Path(sys.argv[0]).name == "journalctl":
        print("\n".join(LOG.read_text(errors="replace").splitlines()[-3:]))
        return 0
    if words[0] == "restart":
        stop()
        return start()
    if words[0] == "show":
        print(f"ActiveState={'active' if running() else 'failed'}\nMainPID={running()}")
    if words[0] == "is-active":
        own = "active" if running() else "failed"
        states = [own if unit == UNIT else "inactive" for unit in words[1:]]
        print("\n".join(states))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
