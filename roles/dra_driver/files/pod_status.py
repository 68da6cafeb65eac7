# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check that the node's DRA driver pod serves every driver, and print the status of each as JSON, or the problems.

    python pod_status.py KUBELET_ROOT DIGEST INSTANCE SECONDS DRIVER...

The exit status is 0 if a pod serves every driver with the configuration DIGEST as INSTANCE (the pod's UID), else 1. An
empty DIGEST or INSTANCE matches any value. If SECONDS is not 0, a successful check is repeated after that time. The
script queries the drivers' status sockets. It uses the standard library only.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

SECONDS = 5.0


def read_status(path: Path) -> dict[str, object]:
    """Return the status of the driver at a socket; empty if no process answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SECONDS)
            connection.connect(str(path))
            with connection.makefile("rb") as answer:
                return dict(json.loads(answer.read()))
    except (OSError, ValueError):
        return {}


def check_driver(folder: Path, digest: str, instance: str) -> tuple[dict[str, object], str]:
    """Return the status of the serving pod of a driver and the problem.

    ``folder`` is the driver's directory. The status is empty if no pod serves. The problem is "" if the status is as
    requested.
    """
    found = [read_status(path) for path in sorted(folder.glob("status-*.sock"))]
    serving = [each for each in found if each.get("role") == "serving"]
    if not serving:
        return {}, f"{folder.name}: no pod serves ({len(found)} answer)"
    one = serving[0]
    if instance and one.get("instance") != instance:
        return one, f"{folder.name}: another instance serves, and not yet that of the pod {instance}"
    refused = one.get("refused") or {}
    if digest and isinstance(refused, dict) and refused.get("digest") == digest:
        return one, f"{folder.name}: the pod starts again for its configuration: {refused.get('problem')}"
    if digest and one.get("configuration") != digest:
        return one, f"{folder.name}: the pod has another configuration than the file"
    if not one.get("ready") or not one.get("published"):
        return one, f"{folder.name}: not ready: {one.get('problems')}"
    return one, ""


def main(arguments: list[str]) -> int:
    """Run the checks and return the exit status."""
    root, digest, instance, seconds, *drivers = arguments
    folders = [Path(root) / "plugins" / driver for driver in drivers]
    found = [check_driver(folder, digest, instance) for folder in folders]
    if float(seconds) and not any(problem for _status, problem in found):
        time.sleep(float(seconds))
        found = [check_driver(folder, digest, instance) for folder in folders]
    problems = [problem for _status, problem in found if problem]
    sys.stdout.write(
        "".join(f"{each}\n" for each in problems) or json.dumps([status for status, _problem in found]) + "\n"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
