# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``collect``: write the diagnostic data of this node, without secrets, into one archive for support."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..api.kubeconfig import load_access
from ..api.token import read_claims
from ..core.errors import AcceleratorError
from ..core.host.cdi import list_specs, spec_path
from ..core.times import text_of
from .claims import claims, devices
from .node import Node, query_api
from .redact import redact
from .store_reader import Stored

UNITS = ("dra-accelerators-driver.service", "dra-accelerators-token.service", "dra-accelerators-layout.service")
ALL_UNITS = "dra-accelerators-*"
# The commands whose output is collected, by the name of the file in the archive.
COMMANDS = {
    "units.txt": ("systemctl", "--no-pager", "--full", "status", ALL_UNITS),
    "unit-files.txt": ("systemctl", "--no-pager", "cat", *UNITS[:1]),
    "journal.txt": ("journalctl", "--no-pager", "--output=short-iso", "--lines=20000", f"--unit={ALL_UNITS}"),
    "kubelet-journal.txt": ("journalctl", "--no-pager", "--output=short-iso", "--lines=2000", "--unit=kubelet.service"),
    "kernel.txt": ("journalctl", "--no-pager", "--dmesg", "--output=short-iso", "--lines=5000"),
    "disk.txt": ("df", "--human-readable"),
}
# The timeout of each command, in seconds.
COMMAND_SECONDS = 30.0
# The maximum size of each file in the archive.
MAX_FILE_BYTES = 32 * 1024 * 1024


def collect(node: Node, config_path: str, target: Path) -> list[str]:
    """Write the archive and return the problems of missing parts. The file has mode 0600 and is created atomically."""
    missing: list[str] = []
    secrets = list(secrets_of(node))
    root = f"dra-accelerators-{node.configuration.node_name}"
    stamp = int(time.time())
    # A new file with a random name (O_EXCL, 0600). In a directory that other users can write to, a guessable name could
    # be their symlink.
    descriptor, created = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    partial_file = Path(created)
    try:
        with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:

            def put(name: str, text: str) -> None:
                data = redact(text, secrets).encode("utf-8", "replace")
                if len(data) > MAX_FILE_BYTES:  # the end is the most recent part
                    data = b"[the beginning is left out]\n" + data[-MAX_FILE_BYTES:]
                entry = tarfile.TarInfo(f"{root}/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, stamp
                archive.addfile(entry, io.BytesIO(data))

            for name, read in _archive_files(node, config_path):
                try:
                    put(name, read())
                except (AcceleratorError, OSError, ValueError) as error:
                    missing.append(f"{name}: {error}")
            put("missing.txt", "".join(f"{redact(line, secrets)}\n" for line in missing) or "nothing\n")
        partial_file.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial_file.unlink()
        raise
    return missing


def secrets_of(node: Node) -> Iterator[str]:
    """Yield the known secrets of this node: token, key, and certificate of the driver's identity."""
    with contextlib.suppress(AcceleratorError, OSError):
        access = load_access(node.configuration.kubeconfig)
        yield access.token
        yield access.key.decode("utf-8", "replace")
        yield access.certificate.decode("utf-8", "replace")
        if access.token_file:
            yield node.system.read_text(access.token_file)


def _archive_files(node: Node, config_path: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each file in the archive, with the function that returns its content."""
    configuration, system = node.configuration, node.system
    yield "versions.json", partial(_json, versions)
    yield "config/driver.yaml", partial(_read, config_path)
    yield "config/identity.json", partial(_json, partial(identity, node))
    yield "claims.json", partial(_json, partial(claims, node))
    yield "devices.json", partial(_json, partial(devices, node))
    for driver in node.drivers:
        folder = driver.name
        yield f"{folder}/status.json", partial(_json, partial(dict, driver.status))
        yield f"{folder}/store.json", partial(_json, partial(_stored, driver.stored))
        yield f"{folder}/files.txt", partial(_files, driver.directory)
        yield f"{folder}/slices.json", partial(_json, partial(_slices, node, driver.name))
        for uid in list_specs(system, configuration.cdi_directory, driver.backend.cdi_kind):
            path = spec_path(configuration.cdi_directory, driver.backend.cdi_kind, uid)
            yield f"{folder}/cdi/{Path(path).name}", partial(system.read_text, path)
    yield "events.json", partial(_json, partial(_events, node))
    for name, command in COMMANDS.items():
        yield name, partial(_command_output, node, command)


def versions() -> dict[str, Any]:
    """Return the versions of the driver, Python, its packages, the kernel, and the operating system."""
    system = {}
    with contextlib.suppress(OSError):
        system = platform.freedesktop_os_release()
    return {
        "driver": __version__,
        "python": sys.version,
        "kernel": platform.uname()._asdict(),
        "system": {key: system[key] for key in ("ID", "VERSION_ID", "PRETTY_NAME") if key in system},
        "packages": {each.metadata["Name"]: each.version for each in metadata.distributions()},
    }


def identity(node: Node) -> dict[str, Any]:
    """Return the identity that the driver uses at the API server and its expiry time, without secrets."""
    access = load_access(node.configuration.kubeconfig)
    token = read_claims(access.token) if access.token else None
    return {
        "server": access.server,
        "verifies the server": access.verify,
        "has a certificate": bool(access.certificate),
        "subject": token.subject if token else "",
        "of node": token.node if token else "",
        "until": text_of(token.expires) if token else "",
    }


def _slices(node: Node, driver: str) -> Any:
    answer, problem = query_api(
        node.configuration.kubeconfig, lambda api: api.list_slices(driver, node.configuration.node_name)
    )
    if answer is None:
        raise AcceleratorError(problem)
    return answer[0]


def _events(node: Node) -> Any:
    """Return the Events of the node and of its claims. Raises AcceleratorError if the identity may not read them."""
    answer, problem = query_api(
        node.configuration.kubeconfig, lambda api: api.client.list_all("/api/v1/events", page=500)
    )
    if answer is None:
        raise AcceleratorError(problem, hint="kubectl get events --all-namespaces shows them to an administrator.")
    names = {record.name for driver in node.drivers for record in driver.stored.records}
    names.add(node.configuration.node_name)
    return [each for each in answer if (each.get("involvedObject") or {}).get("name") in names]


def _command_output(node: Node, command: Iterable[str]) -> str:
    # The journal of the node's services exceeds the default output limit of a command.
    done = node.system.run(list(command), timeout=COMMAND_SECONDS, longest=MAX_FILE_BYTES)
    return done.stdout + done.stderr


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _stored(stored: Stored) -> dict[str, Any]:
    claims_stored = [asdict(record) for record in stored.records]
    return {"problem": stored.problem, "meta": dict(stored.meta), "claims": claims_stored}


def _files(folder: str) -> str:
    lines = []
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        stamp = text_of(status.st_mtime)
        lines.append(f"{stat.filemode(status.st_mode)} {status.st_size:>12} {stamp} {path}\n")
    return "".join(lines)


def _json(read: Callable[[], Any]) -> str:
    return json.dumps(read(), indent=2, default=str) + "\n"
