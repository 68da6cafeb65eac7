# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Ends with 0 where a pod serves every driver of the node with a certain configuration, and says as JSON how each is; else what is missing.

    python pod_status.py KUBELET_ROOT DIGEST INSTANCE SECONDS DRIVER...

DIGEST and INSTANCE (the pod's UID) may be empty: then any will do. With SECONDS it looks again after them. Asks the drivers' own
sockets. Standard library only.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

SECONDS = 5.0


def told(path: Path) -> dict[str, object]:
    """What the driver behind a socket says of itself; nothing where nobody answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SECONDS)
            connection.connect(str(path))
            with connection.makefile("rb") as answer:
                return dict(json.loads(answer.read()))
    except (OSError, ValueError):
        return {}


def look(folder: Path, digest: str, instance: str) -> tuple[dict[str, object], str]:
    """What the pod that serves the driver of this folder says of itself, and what is missing until one does as is wanted."""
    found = [told(path) for path in sorted(folder.glob("status-*.sock"))]
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
    """Entry point; returns the exit status."""
    root, digest, instance, seconds, *drivers = arguments
    folders = [Path(root) / "plugins" / driver for driver in drivers]
    found = [look(folder, digest, instance) for folder in folders]
    if float(seconds) and not any(problem for _told, problem in found):
        time.sleep(float(seconds))
        found = [look(folder, digest, instance) for folder in folders]
    problems = [problem for _told, problem in found if problem]
    sys.stdout.write("".join(f"{each}\n" for each in problems) or json.dumps([told for told, _problem in found]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
