# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Stands in for systemd where none runs: starts and stops one real daemon, by the few words that a module says to it.

Used as `systemctl` and as `journalctl`. SERVICE_MANAGER_FOLDER holds `command` (how the daemon is started), its pid and log;
SERVICE_MANAGER_UNIT is the daemon's unit. The molecule scenario container_runtime has the real systemd.
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
    """The daemon's process, or 0."""
    try:
        pid = int(PID.read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return 0
    return 0 if state == "Z" else pid


def stop() -> None:
    """End the daemon, and wait for that."""
    pid = running()
    if pid:
        os.kill(pid, signal.SIGKILL)
    while running():
        time.sleep(0.02)


def start() -> int:
    """Start the daemon and wait until it answers on its socket, as Type=notify does."""
    command, address = (FOLDER / "command").read_text().splitlines()
    # The kernel can still be ending the former process: nobody is to meet its socket.
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
    """Do what systemctl or journalctl is asked for."""
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
