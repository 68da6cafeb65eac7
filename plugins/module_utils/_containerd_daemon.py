# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""containerd as it is on a node: its files, what it says of them, what its running process knows, and how it restarts."""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ._containerd import (
    DISTRIBUTIONS,
    UNITS,
    Change,
    File,
    Settings,
    distribution_advice,
    distribution_settings,
    drop_in_folder,
    patterns,
    read_dump,
)
from ._toml import change
from .core.errors import AcceleratorError
from .core.system import Completed, System

COMMAND_SECONDS = 30.0
_PAUSE_SECONDS = 0.5
_LOG_LINES = 12


class ContainerdError(AcceleratorError):
    """containerd does not take its settings, or does not run with them."""

    default_code = "containerd"


class Daemon:
    """One containerd: its command, its main file and its unit."""

    def __init__(self, system: System, *, command: str, config: str, service: str, timeout: float) -> None:
        self.system = system
        self.command = command
        self.config = config
        self.service = service
        self.timeout = timeout

    # What is on the disk, and what containerd makes of it

    def read(self, path: str) -> File | None:
        """Return a file, or None where there is none."""
        try:
            return File(path, self.system.read_text(path))
        except FileNotFoundError:
            return None

    def settings(self) -> Settings:
        """Ask containerd what its files say. Raises ContainerdError when it refuses them."""
        # It runs on its defaults without a main file, and refuses to be asked about one that is not there.
        done = self._dump(self.config if self.system.exists(self.config) else "/dev/null")
        if done.returncode:
            raise ContainerdError(
                f"containerd refuses its own configuration {self.config}: {_last_words(done)}",
                hint=f"Mend the file that it names; `{self.command} --config {self.config} config dump` tries it. "
                "Nothing was changed.",
                code="configuration-refused",
            )
        return read_dump(done.stdout)

    def imported(self) -> list[File]:
        """Return the files that the main file imports, in the order in which they are read."""
        found: dict[str, File] = {}
        for pattern in patterns(self.read(self.config), self.config):
            folder, name = posixpath.split(pattern)
            folders = sorted(map(str, Path("/").glob(folder.lstrip("/")))) if "*" in folder else [folder]
            for each in folders:
                for entry in self.system.list_directory(each):
                    path = posixpath.join(each, entry)
                    file = self.read(path) if fnmatch.fnmatchcase(entry, name) and path != self.config else None
                    if file is not None:
                        found.setdefault(path, file)
        return list(found.values())

    def drop_in_folder(self, preferred: str) -> str | None:
        """Return the folder that a drop-in file belongs into, or None where containerd reads none."""
        return drop_in_folder(patterns(self.read(self.config), self.config), preferred)

    def aside(self, settings: Settings, imported: Sequence[File], changes: Sequence[Change]) -> Settings | None:
        """Return what containerd would be set to after the changes, tried on copies; None where it refuses them."""
        texts = {each.path: each.text for each in imported}
        main = self.read(self.config)
        text = main.text if main else None
        for each in changes:
            if each.path == self.config:
                text = each.after
            elif each.after is None:
                texts.pop(each.path, None)
            else:
                texts = _with_file(texts, each.path, each.after)
        if text is None:
            text = f"version = {min(max(settings.version, 2), 3)}\n"
        with tempfile.TemporaryDirectory(prefix="dra-accelerators-") as folder:
            copies = []
            for number, content in enumerate(texts.values()):
                copy = Path(folder, f"{number:03}.toml")
                copy.write_text(content, encoding="utf-8")
                copies.append(str(copy))
            trial = Path(folder, "config.toml")
            trial.write_text(change(text, (), {"imports": copies}, self.config), encoding="utf-8")
            done = self._dump(str(trial))
        return None if done.returncode else read_dump(done.stdout)

    def _dump(self, config: str) -> Completed:
        return self.system.run([self.command, "--config", config, "config", "dump"], COMMAND_SECONDS)

    # What its process knows

    def process(self) -> tuple[bool, float]:
        """Return whether the unit is active, and when its process began, in seconds since 1970 (0: not known)."""
        shown = self.system.run(
            ["systemctl", "show", "--property=ActiveState,MainPID", self.service], COMMAND_SECONDS
        ).stdout
        values = dict(line.partition("=")[::2] for line in shown.splitlines())
        return values.get("ActiveState") == "active", self._begin(values.get("MainPID", "0"))

    def _begin(self, pid: str) -> float:
        try:
            ticks = int(self.system.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])
            up = float(self.system.read_text("/proc/uptime").split()[0])
        except (OSError, IndexError, ValueError):
            return 0.0
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")

    def answer(self, settings: Settings) -> tuple[bool, frozenset[str]] | None:
        """Ask the running containerd whether CDI is on, and for its folders; None where it cannot be asked."""
        program = shutil.which("crictl")
        if program is None or not settings.address:
            return None
        try:
            done = self.system.run(
                [program, "--runtime-endpoint", f"unix://{settings.address}", "--timeout", "10s", "info"],
                COMMAND_SECONDS,
            )
            known = json.loads(done.stdout).get("config") or {} if not done.returncode else {}
        except (AcceleratorError, ValueError):
            return None
        if "cdiSpecDirs" not in known:
            return None
        return bool(known.get("enableCDI", True)), frozenset(known["cdiSpecDirs"] or ())

    def behind(self, settings: Settings, files: Sequence[str]) -> str:
        """Return why the running process does not know what its files say, or "" where it does.

        Its own answer counts; where it cannot be asked, one of ``files`` that is younger than the process.
        """
        active, began = self.process()
        if not active:
            return f"{self.service} is not running"
        said = self.answer(settings)
        if said is not None:
            enabled, folders = said
            if enabled == settings.enabled and folders == set(settings.folders):
                return ""
            return "the running containerd does not know its files' CDI settings yet"
        for path in files:
            try:
                written = self.system.path(path).stat().st_mtime
            except FileNotFoundError:
                continue
            if began and written > began:
                return f"{path} was written after {self.service} was started"
        return ""

    def restart(self, settings: Settings) -> str:
        """Restart the unit and wait until it serves the kubelet; returns what is wrong, or ""."""
        self.system.run(["systemctl", "reset-failed", self.service], COMMAND_SECONDS)
        deadline = time.monotonic() + self.timeout
        try:
            done = self.system.run(["systemctl", "restart", self.service], self.timeout)
        except AcceleratorError as error:
            return str(error)
        if done.returncode:
            return f"{_last_words(done)} {self._journal()}".strip()
        while True:
            problem = self._problem(settings)
            if not problem or time.monotonic() >= deadline:
                return f"{problem} {self._journal()}".strip() if problem else ""
            time.sleep(_PAUSE_SECONDS)

    def _problem(self, settings: Settings) -> str:
        if not self.process()[0]:
            return f"{self.service} is not active."
        said = self.answer(settings)
        if said is not None:
            known = said == (settings.enabled, frozenset(settings.folders))
            return "" if known else "it answers the kubelet, but not with the CDI settings of its files."
        program = shutil.which("ctr", path=self._search_path())
        if program is None or not settings.address:
            return ""
        try:
            done = self.system.run([program, "--address", settings.address, "plugins", "ls"], COMMAND_SECONDS)
        except AcceleratorError as error:
            return str(error)
        rows = [line.split() for line in done.stdout.splitlines()]
        states = [row[-1] for row in rows if len(row) >= 4 and row[:2] == ["io.containerd.grpc.v1", "cri"]]
        return (
            "" if states == ["ok"] else f"its plugin for the kubelet is not loaded ({', '.join(states) or 'unknown'})."
        )

    def _search_path(self) -> str:
        found = shutil.which(self.command)
        return os.pathsep.join([*([posixpath.dirname(found)] if found else []), os.environ.get("PATH", os.defpath)])

    def _journal(self) -> str:
        words = ["journalctl", "--unit", self.service, "--lines", str(_LOG_LINES), "--output", "cat", "--no-pager"]
        try:
            lines = self.system.run(words, COMMAND_SECONDS).stdout.splitlines()
        except AcceleratorError:
            return ""
        return "It said: " + " | ".join(line.strip()[:300] for line in lines if line.strip())


def _with_file(texts: dict[str, str], path: str, text: str) -> dict[str, str]:
    """Return the files with one changed, or added where it is read among those of its folder."""
    if path in texts:
        return {**texts, path: text}
    folder = posixpath.dirname(path)
    later = [each for each in texts if posixpath.dirname(each) == folder and each > path]
    if not later:
        last = max(
            (number for number, each in enumerate(texts) if posixpath.dirname(each) == folder), default=len(texts) - 1
        )
        items = list(texts.items())
        return dict([*items[: last + 1], (path, text), *items[last + 1 :]])
    found: dict[str, str] = {}
    for each, content in texts.items():
        if each == later[0]:
            found[path] = text
        found[each] = content
    return found


def _last_words(done: Completed) -> str:
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1][:500] if lines else f"it ended with {done.returncode} and said nothing"


def find_runtime(system: System, wanted: list[str]) -> bool:
    """Look at which runtime is running. True for a containerd of its own, False where k3s or RKE2 has CDI on already.

    Raises ContainerdError for what cannot be set up here.
    """
    states = system.run(["systemctl", "is-active", *UNITS], timeout=30).stdout.split()
    unit = next((unit for unit, state in zip(UNITS, states) if state == "active"), "")
    folders = " and ".join(wanted)
    # A containerd that did not come back from a restart is the node's runtime still, and is to be restarted.
    fallen = states[UNITS.index("containerd.service") :][:1] in (["failed"], ["activating"])
    if unit == "containerd.service" or (not unit and fallen):
        return True
    if unit in DISTRIBUTIONS:
        name, folder = DISTRIBUTIONS[unit]
        generated = Daemon(system, command="", config=f"{folder}/config.toml", service=unit, timeout=0).read(
            f"{folder}/config.toml"
        )
        enabled, read = distribution_settings(generated) if generated else (False, ())
        if enabled and set(wanted) <= set(read):
            return False
        raise ContainerdError(
            f"{unit} runs a containerd of its own, whose settings {name} writes anew at each start; "
            + (
                f"in {folder}/config.toml CDI is {'on, but not for ' + folders if enabled else 'off'}"
                if generated
                else f"{folder}/config.toml was not found, so that it is not known whether CDI is on"
            ),
            hint=f"{distribution_advice(unit, generated, wanted)}. Then leave the role container_runtime out for this host "
            "(accelerator_container_runtime: false in playbooks/site.yml) or run it again; from containerd 2.0 on CDI is on "
            "by default.",
            code="distribution",
        )
    if unit == "crio.service":
        raise ContainerdError(
            "The kubelet of this node uses CRI-O, which is not set up here",
            hint="CRI-O 1.28 and newer has CDI on by default: leave this role out for the host "
            "(accelerator_container_runtime: false in playbooks/site.yml), and make sure that cdi_spec_dirs in its section "
            f"[crio.runtime] names {folders} if it is set.",
            code="cri-o",
        )
    if unit == "cri-docker.service":
        raise ContainerdError(
            "The kubelet of this node uses Docker Engine behind cri-dockerd, which hands no CDI devices to pods",
            hint="Move the kubelet to containerd 1.7.2 or newer, or to CRI-O.",
            code="cri-dockerd",
        )
    raise ContainerdError(
        f"None of {', '.join(UNITS)} is running on this node",
        hint="If containerd runs under another name, set container_runtime_name to containerd and "
        "container_runtime_containerd_service, container_runtime_containerd_config and "
        "container_runtime_containerd_command to what it uses.",
        code="no-runtime",
    )
