# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Start Docker Engine if nothing else does, and use it through its command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cache
from .commands import execute, tail, wait_until
from .errors import WorldError
from .host import find_program
from .pins import LABEL
from .progress import step

START_SECONDS = 120
STOP_SECONDS = 60


def docker(
    *arguments: str, check: bool = True, input_text: str | None = None, timeout: float = 1800
) -> subprocess.CompletedProcess[str]:
    """Run one docker command and capture its output."""
    return execute(["docker", *arguments], check=check, input_text=input_text, timeout=timeout)


def running() -> bool:
    """Return whether an engine answers."""
    try:
        return docker("version", "--format", "{{.Server.Version}}", check=False, timeout=60).returncode == 0
    except WorldError:
        return False


def ensure_running() -> None:
    """Start Docker Engine unless it answers: with the host's service manager, or directly without one."""
    if running():
        return
    with cache.locked(cache.world_cache() / ".engine.lock"):
        if running():
            return
        with step("docker engine"):
            if Path("/run/systemd/system").is_dir():
                execute(["systemctl", "start", "docker"])
                wait_until("Docker Engine's answer", running, START_SECONDS)
            else:
                _start_directly()


def _start_directly() -> None:
    program = find_program("dockerd")
    if program is None:
        raise WorldError("dockerd was not found after the installation of docker.io: check the installed packages.")
    log = cache.world_cache() / "dockerd.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as stream:
        # In a separate session: the engine outlives this command and its terminal.
        process = subprocess.Popen(
            [program], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, cwd="/"
        )
    _started_file().write_text(f"{process.pid}\n")

    def answered() -> bool:
        if process.poll() is not None:
            raise WorldError(
                f"dockerd ended with status {process.returncode}; its log {log} ends with:\n{tail(log.read_text(errors='replace'))}"
            )
        return running()

    wait_until("Docker Engine's answer", answered, START_SECONDS, remedy=lambda: tail(log.read_text(errors="replace")))


def _started_file() -> Path:
    return cache.world_cache() / "dockerd.pid"


def pid_of_started_engine(proc: Path = Path("/proc")) -> int | None:
    """Return the process ID of a running engine that ``ensure_running`` started directly."""
    try:
        pid = int(_started_file().read_text())
        program = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")[0]
    except (OSError, ValueError):
        return None
    return pid if Path(program.decode(errors="replace")).name == "dockerd" else None


def stop() -> str:
    """Stop the engine if it was started directly and runs no container; return a description of the result."""
    with cache.locked(cache.world_cache() / ".engine.lock"):
        pid = pid_of_started_engine()
        if pid is None:
            return "Docker Engine was not started by this command, so it keeps running"
        names = docker("ps", "--format", "{{.Names}}").stdout.split() if running() else []
        if names:
            return f"Docker Engine keeps running, because it runs {', '.join(sorted(names))}"
        os.kill(pid, signal.SIGTERM)
        wait_until("the end of Docker Engine", lambda: pid_of_started_engine() is None, STOP_SECONDS)
        _started_file().unlink(missing_ok=True)
        return "Docker Engine is stopped"


def inspect(kind: str, name: str) -> dict[str, Any] | None:
    """Return Docker's description of a container, image, network, or volume; None if it does not exist."""
    done = docker(kind, "inspect", name, check=False)
    if done.returncode != 0:
        return None
    described: dict[str, Any] = json.loads(done.stdout)[0]
    return described


def labelled(kind: str, world: str | None = None) -> list[str]:
    """Return the names of the containers, networks, or volumes of one world, or of all worlds."""
    label = LABEL if world is None else f"{LABEL}={world}"
    names = {
        "container": ("container", "ls", "--all", "--format", "{{.Names}}"),
        "network": ("network", "ls", "--format", "{{.Name}}"),
        "volume": ("volume", "ls", "--format", "{{.Name}}"),
    }
    return docker(*names[kind], "--filter", f"label={label}").stdout.split()


def worlds() -> list[str]:
    """Return the names of all worlds that own a container, network, or volume."""
    names: set[str] = set()
    for kind in ("container", "network", "volume"):
        options = ("--all",) if kind == "container" else ()
        filters = ("--filter", f"label={LABEL}", "--format", f'{{{{.Label "{LABEL}"}}}}')
        names.update(docker(kind, "ls", *options, *filters).stdout.split())
    return sorted(names)


def remove_all(world: str) -> list[str]:
    """Remove every container, volume, and network with a world's label; return the removed names."""
    removed: list[str] = []
    for kind, arguments in (
        ("container", ("rm", "--force", "--volumes")),
        ("network", ("rm",)),
        ("volume", ("rm", "--force")),
    ):
        names = labelled(kind, world)
        if names:
            docker(kind, *arguments, *names)
            removed += [f"{kind} {name}" for name in names]
    return removed


def used_subnets() -> list[str]:
    """Return the subnets of all Docker networks in CIDR notation."""
    names = docker("network", "ls", "--quiet").stdout.split()
    if not names:
        return []
    networks = json.loads(docker("network", "inspect", *names).stdout)
    return [pool["Subnet"] for network in networks for pool in network["IPAM"].get("Config") or [] if "Subnet" in pool]


def copy_tar(archive: bytes, container: str) -> None:
    """Unpack a tar archive at the root of a container, running or not."""
    done = subprocess.run(["docker", "cp", "-", f"{container}:/"], input=archive, capture_output=True, check=False)
    if done.returncode != 0:
        raise WorldError(f"copying files into {container} failed: {done.stderr.decode(errors='replace').strip()}")


def inside(
    container: str, *command: str, check: bool = True, input_text: str | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a command in a node."""
    options: Sequence[str] = ("exec", "--interactive") if input_text is not None else ("exec",)
    return docker(*options, container, *command, check=check, input_text=input_text, timeout=timeout)
