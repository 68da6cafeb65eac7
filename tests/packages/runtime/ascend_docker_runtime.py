# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A replacement for ascend-docker-runtime, written from the public documentation of the vendor's program.

An engine runs it instead of runc. When a container is created, it reads the names of NPUs from the container's environment and adds their
device nodes to the container's configuration. A hook mounts files. Then it runs runc. It does not check whether the NPUs are in use. It does
not create vNPUs: a container with a template in ASCEND_VNPU_SPECS is rejected.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOG = Path("/var/log/ascend-docker-runtime/runtime-run.log")
LISTS = Path("/etc/ascend-docker-runtime.d")
#: Device nodes that are not of NPUs, and whether a container needs them.
CONTROL_NODES = {"davinci_manager": True, "hisi_hdc": True, "devmm_svm": False, "dvpp_cmdlist": False}
NAME = re.compile(r"(?:Ascend(?:910|310B|310P|310)|npu)-(\d+)")
RANGE = re.compile(r"(\d+)\s*-\s*(\d+)")


class Refused(Exception):
    """The container is not created. The message contains the reason."""


def log(message: str) -> None:
    """Write a line to the log file of the vendor's runtime."""
    LOG.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    with LOG.open("a", encoding="utf-8") as file:
        file.write(f"[{time.strftime('%Y/%m/%d %H:%M:%S')}] {message}\n")


def values_of(environment: Sequence[str], name: str) -> list[str]:
    """Return all values of a variable in their order."""
    return [value for key, _equals, value in (each.partition("=") for each in environment) if key == name]


def numbers_of(visible: str) -> list[int]:
    """Return the NPUs of a value of ASCEND_VISIBLE_DEVICES: numbers, ranges, or names with a number. ``void`` means no NPU."""
    found: set[int] = set()
    if visible in ("", "void"):
        return []
    for word in (each.strip() for each in visible.split(",")):
        named, ranged = NAME.fullmatch(word), RANGE.fullmatch(word)
        if named:
            found.add(int(named[1]))
        elif ranged and int(ranged[1]) <= int(ranged[2]) <= 128:
            found.update(range(int(ranged[1]), int(ranged[2]) + 1))
        elif word.isdigit():
            found.add(int(word))
        else:
            raise Refused(f"ASCEND_VISIBLE_DEVICES: {word!r} is neither a number, nor a range, nor a name")
    return sorted(found)


def add_node(spec: dict[str, Any], path: str, inside: str) -> None:
    """Add a device node of the host to the container, with the permission to open it."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error
    if not stat.S_ISCHR(found.st_mode):
        raise Refused(f"{path} is not a device node")
    number = {"type": "c", "major": os.major(found.st_rdev), "minor": os.minor(found.st_rdev)}
    owner = {"fileMode": stat.S_IMODE(found.st_mode), "uid": found.st_uid, "gid": found.st_gid}
    linux = spec.setdefault("linux", {})
    linux.setdefault("devices", []).append({"path": inside, **number, **owner})
    rules = linux.setdefault("resources", {}).setdefault("devices", [])
    rules.append({"allow": True, **number, "access": "rwm"})


def add_files(spec: dict[str, Any]) -> None:
    """Add the hook that mounts files, or the mounts themselves if the runtime was installed with the injection mode `cdi`."""
    if "injection-mode=cdi" not in (HERE / "ascend_docker_runtime_install.info").read_text(encoding="utf-8"):
        hook = str(HERE / "ascend-docker-hook")
        known = spec.setdefault("hooks", {}).setdefault("prestart", [])
        if all(each["path"] != hook for each in known):
            known.append({"path": hook, "args": [hook]})
        return
    for path in (LISTS / "base.list").read_text(encoding="utf-8").split():
        if Path(path).exists():
            options = ["rbind", "ro", "nosuid"]
            spec.setdefault("mounts", []).append(
                {"destination": path, "source": path, "type": "bind", "options": options}
            )


def change(spec: dict[str, Any]) -> str:
    """Add the NPUs that the container's environment requests to its configuration. Return a description for the log."""
    environment = spec["process"].setdefault("env", [])
    # The last value of the device variable applies, and the first value of each other variable.
    numbers = numbers_of((values_of(environment, "ASCEND_VISIBLE_DEVICES") or [""])[-1])
    options = (values_of(environment, "ASCEND_RUNTIME_OPTIONS") or [""])[0]
    virtual = "VIRTUAL" in options
    if numbers:
        if not virtual and values_of(environment, "ASCEND_VNPU_SPECS"):
            raise Refused("ASCEND_VNPU_SPECS: this replacement does not create vNPUs")
        add_files(spec)
        for number in numbers:
            add_node(spec, f"/dev/{'v' if virtual else ''}davinci{number}", f"/dev/davinci{number}")
        for name, needed in CONTROL_NODES.items():
            if needed or Path(f"/dev/{name}").exists():
                add_node(spec, f"/dev/{name}", f"/dev/{name}")
    environment.append("ASCEND_DOCKER_RUNTIME=True")
    return f"{'slices' if virtual else 'NPUs'} {numbers}, options {options!r}"


def bundle_of(words: Sequence[str]) -> Path:
    """Return the bundle directory of the container from the arguments of runc."""
    for number, word in enumerate(words):
        if word in ("--bundle", "-b") and number + 1 < len(words):
            return Path(words[number + 1])
        if word.startswith("--bundle="):
            return Path(word.partition("=")[2])
    return Path.cwd()


def main() -> int:
    """Change the configuration of a new container, and then run runc."""
    words = sys.argv[1:]
    if "create" in words:
        path = bundle_of(words) / "config.json"
        spec = json.loads(path.read_text(encoding="utf-8"))
        try:
            done = change(spec)
        except Refused as error:
            log(f"{path}: refused: {error}")
            print(f"ascend-docker-runtime: {error}", file=sys.stderr)
            return 1
        path.write_text(json.dumps(spec), encoding="utf-8")
        log(f"{path}: {done}")
    program = shutil.which("docker-runc") or shutil.which("runc")
    if program is None:
        print("ascend-docker-runtime: runc was not found", file=sys.stderr)
        return 1
    return os.execv(program, [program, *words])


if __name__ == "__main__":
    sys.exit(main())
