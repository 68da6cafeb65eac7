# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The hook of the stand-in for ascend-docker-runtime: runc calls it before a container's first process, and has it wait.

It reads which lists of files the container is to have (ASCEND_RUNTIME_MOUNTS, else ``base``) and has ``ascend-docker-cli`` mount what there
is of them. A path with a link in it is refused unless ASCEND_ALLOW_LINK is True.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

LISTS = Path("/etc/ascend-docker-runtime.d")
OPTIONS = {"NODRV", "VIRTUAL"}


def main() -> int:
    """Read the container's state from standard input and mount into it."""
    state = json.load(sys.stdin)
    bundle = Path(state["bundle"])
    spec = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    environment: dict[str, str] = {}
    for each in spec["process"]["env"]:
        key, _equals, value = each.partition("=")
        environment.setdefault(key, value)
    if not environment.get("ASCEND_VISIBLE_DEVICES"):
        return 0
    options = {each.strip() for each in environment.get("ASCEND_RUNTIME_OPTIONS", "").split(",") if each.strip()}
    if options - OPTIONS:
        print(f"ascend-docker-hook: unknown options {', '.join(sorted(options - OPTIONS))}", file=sys.stderr)
        return 1
    if "NODRV" in options:
        return 0
    lists = [each.strip().lower() for each in (environment.get("ASCEND_RUNTIME_MOUNTS") or "base").split(",")]
    words = []
    for name in lists:
        for path in (LISTS / f"{name}.list").read_text(encoding="utf-8").split():
            if not Path(path).exists():
                continue
            if os.path.realpath(path) != path and environment.get("ASCEND_ALLOW_LINK") != "True":
                print(f"ascend-docker-hook: {path} has a link in it", file=sys.stderr)
                return 1
            words += ["--mount-dir" if Path(path).is_dir() else "--mount-file", path]
    # Relative to the bundle with containerd, a path of its own with Docker.
    root = bundle / spec["root"]["path"]
    program = str(Path(__file__).resolve().parent / "ascend-docker-cli")
    return os.execv(program, [program, "--pid", str(state["pid"]), "--rootfs", str(root), *words])


if __name__ == "__main__":
    sys.exit(main())
