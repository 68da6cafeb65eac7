# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The hook of the replacement for ascend-docker-runtime. runc runs it before the first process of a container, and waits for it.

It reads the names of file lists from the container's environment (ASCEND_RUNTIME_MOUNTS, else ``base``). ``ascend-docker-cli`` mounts the
existing files of these lists. A path that contains a link is rejected unless ASCEND_ALLOW_LINK is True.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

LISTS = Path("/etc/ascend-docker-runtime.d")
OPTIONS = {"NODRV", "VIRTUAL"}


def main() -> int:
    """Read the container's state from standard input, and mount the files into the container."""
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
    arguments = []
    for name in lists:
        for path in (LISTS / f"{name}.list").read_text(encoding="utf-8").split():
            if not Path(path).exists():
                continue
            if os.path.realpath(path) != path and environment.get("ASCEND_ALLOW_LINK") != "True":
                print(f"ascend-docker-hook: {path} contains a link", file=sys.stderr)
                return 1
            arguments += ["--mount-dir" if Path(path).is_dir() else "--mount-file", path]
    # containerd writes a path relative to the bundle, Docker an absolute path.
    root = bundle / spec["root"]["path"]
    program = str(Path(__file__).resolve().parent / "ascend-docker-cli")
    return os.execv(program, [program, "--pid", str(state["pid"]), "--rootfs", str(root), *arguments])


if __name__ == "__main__":
    sys.exit(main())
