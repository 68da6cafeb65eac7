# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Puts a tree where programs look for it: as plain files under a folder, or laid over the real /proc, /sys and /dev.

Laying over works without touching what the kernel shows: a tmpfs that holds everything a directory had before (bound from
the original, so that it stays live) and the machine's own entries is moved over that directory in one step.
"""

from __future__ import annotations

import ctypes
import json
import os
import posixpath
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from .errors import SimulatorError
from .trees import Directory, Entry, File, Link, Node, Tree, directories_above

MS_BIND, MS_REC, MS_MOVE, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 0x2000, 0x40000, 0x2, 0x4
MNT_DETACH = 2
MOUNT_SOURCE = "gpu-simulator"
WORKSHOP = "/run/gpu-simulator"
# Hundreds of children, none of which needs its own real path: links to one bind of the original instead of a mount each
LINKED = ("/sys/module", "/sys/bus/pci/drivers")
RECORD = "placed.json"


@dataclass(frozen=True)
class Layer:
    """One mount over ``path``. ``kept`` are the original children and how each shows through: ``link:target``, ``directory`` or ``file``."""

    path: str
    kept: tuple[tuple[str, str], ...]
    entries: tuple[str, ...]
    single_file: bool = False


@dataclass(frozen=True)
class Original:
    """What the machine shows by itself. The three functions are those of :mod:`os`; tests give their own."""

    lexists: Callable[[str], bool] = os.path.lexists
    isdir: Callable[[str], bool] = os.path.isdir
    isfile: Callable[[str], bool] = os.path.isfile
    listdir: Callable[[str], list[str]] = os.listdir
    islink: Callable[[str], bool] = os.path.islink
    readlink: Callable[[str], str] = os.readlink


def plan_layers(tree: Tree, original: Original) -> list[Layer]:
    """Which directories and files have to be laid over so that the tree's /proc and /sys entries appear; parents first.

    A SimulatorError names what the host already has at a place that the machine needs.
    """
    grouped: dict[str, list[str]] = {}
    files: list[str] = []
    for path in sorted(tree):
        if path.startswith("/dev/"):
            continue
        if original.isfile(path) and not original.islink(path) and path.startswith("/proc/"):
            files.append(path)
            continue
        if original.lexists(path):
            raise SimulatorError(
                f"{path} exists on this host already: the machine profile uses the same address; choose another profile or set a PCI domain "
                "offset (pci_domain_offset)"
            )
        parent = posixpath.dirname(path)
        while not original.isdir(parent):
            parent = posixpath.dirname(parent)
        grouped.setdefault(parent, []).append(path)
    layers = []
    for path in sorted(grouped):
        if path in ("/", "/sys", "/proc"):
            raise SimulatorError(
                f"{path} has none of the folders above {grouped[path][0]}: this kernel does not show what the simulator extends"
            )
        kept = []
        for name in sorted(original.listdir(path)):
            child = posixpath.join(path, name)
            if original.islink(child):
                kept.append((name, "link:" + original.readlink(child)))
            elif path in LINKED:
                kept.append((name, f"link:{WORKSHOP}/original{child}"))
            else:
                kept.append((name, "directory" if original.isdir(child) else "file"))
        layers.append(Layer(path, tuple(kept), tuple(grouped[path])))
    return layers + [Layer(path, (), (path,), single_file=True) for path in files]


def write_entry(path: str, entry: Entry, plain_nodes: bool) -> bool:
    """Makes one entry; its parent exists. Returns whether anything changed."""
    if isinstance(entry, Directory):
        if os.path.isdir(path):
            return False
        os.mkdir(path, entry.mode)
        return True
    if isinstance(entry, Link):
        if os.path.islink(path) and os.readlink(path) == entry.target:
            return False
        if os.path.lexists(path):
            os.unlink(path)
        os.symlink(entry.target, path)
        return True
    if isinstance(entry, Node) and not plain_nodes:
        return _write_node(path, entry)
    content = entry.content if isinstance(entry, File) else b""
    if os.path.isfile(path) and not os.path.islink(path):
        with open(path, "rb") as stream:
            if stream.read() == content and stat.S_IMODE(os.stat(path).st_mode) == entry.mode:
                return False
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "wb") as stream:
        stream.write(content)
    os.chmod(path, entry.mode)
    return True


def _write_node(path: str, entry: Node) -> bool:
    wanted = os.makedev(entry.major, entry.minor)
    if os.path.lexists(path):
        state = os.lstat(path)
        if stat.S_ISCHR(state.st_mode) and state.st_rdev == wanted and stat.S_IMODE(state.st_mode) == entry.mode:
            return False
        os.unlink(path)
    os.mknod(path, stat.S_IFCHR | entry.mode, wanted)
    os.chmod(path, entry.mode)
    return True


def write_tree(root: str, tree: Tree, paths: Sequence[str], plain_nodes: bool) -> list[str]:
    """Makes the named entries under ``root`` (empty for the machine itself) and says which ones changed."""
    for directory in directories_above(paths):
        os.makedirs(root + directory, 0o755, exist_ok=True)
    return [path for path in sorted(paths) if write_entry(root + path, tree[path], plain_nodes)]


class Folder:
    """Places trees as plain files under a folder: for tests, and for programs that take a root. Needs no privilege."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    @property
    def record(self) -> Path:
        """Where the list of made paths is kept."""
        return Path(self.root + WORKSHOP) / RECORD

    def place(self, tree: Tree) -> list[str]:
        """Makes everything that differs; what an earlier machine left is removed. Returns the changed paths."""
        previous = self.placed()
        stale = [path for path in previous if path not in tree]
        self._remove(stale)
        changed = write_tree(self.root, tree, list(tree), plain_nodes=True)
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.write_text(json.dumps(sorted(tree)), encoding="utf-8")
        return changed + stale

    def placed(self) -> list[str]:
        """Paths made before, by the record."""
        return list(json.loads(self.record.read_text(encoding="utf-8"))) if self.record.is_file() else []

    def remove(self) -> bool:
        """Removes what was placed and the folders that it leaves empty. Returns whether there was anything."""
        paths = self.placed()
        self._remove(paths)
        if self.record.is_file():
            self.record.unlink()
        return bool(paths)

    def _remove(self, paths: Sequence[str]) -> None:
        for path in sorted(paths, reverse=True):
            if os.path.islink(self.root + path) or os.path.isfile(self.root + path):
                os.unlink(self.root + path)
        for directory in sorted(set(directories_above(paths)) | set(paths), reverse=True):
            if os.path.isdir(self.root + directory) and not os.listdir(self.root + directory):
                os.rmdir(self.root + directory)


class System:
    """Lays trees over the running system's /proc and /sys and makes nodes in /dev. Needs CAP_SYS_ADMIN and CAP_MKNOD."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _mount(self, source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
        if (
            self._libc.mount(
                source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
            )
            != 0
        ):
            code = ctypes.get_errno()
            raise SimulatorError(
                f"mounting {source or kind} on {target}: {os.strerror(code)}; the simulator lays files over /proc and /sys and needs CAP_SYS_ADMIN"
            )

    def mounts(self) -> list[str]:
        """Mount points of ours, outermost first, as /proc/self/mountinfo lists them."""
        found = []
        with open("/proc/self/mountinfo", encoding="utf-8") as stream:
            for line in stream:
                fields, _dash, tail = line.partition(" - ")
                if tail.split()[1] == MOUNT_SOURCE:
                    found.append(fields.split()[4].replace("\\040", " "))
        return found

    def placed(self) -> list[str]:
        """Paths of the tree that is laid over now; empty when none is."""
        record = Path(WORKSHOP) / RECORD
        return list(json.loads(record.read_text(encoding="utf-8"))) if record.is_file() else []

    def place(self, tree: Tree) -> list[str]:
        """Lays the tree over the system. Nothing of an earlier one may be in place. Returns the paths."""
        layers = plan_layers(tree, Original())
        nodes = [path for path in tree if path.startswith("/dev/")]
        os.makedirs(WORKSHOP, 0o755, exist_ok=True)
        # Private, because a mount below a shared one cannot be moved
        self._mount(MOUNT_SOURCE, WORKSHOP, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
        self._mount("", WORKSHOP, flags=MS_PRIVATE)
        os.makedirs(WORKSHOP + "/original/sys")
        self._mount("/sys", WORKSHOP + "/original/sys", flags=MS_BIND)
        # Private, because what is laid over /sys would otherwise appear in this copy as well
        self._mount("", WORKSHOP + "/original/sys", flags=MS_PRIVATE)
        try:
            for number, layer in enumerate(layers):
                if layer.single_file:
                    source = f"{WORKSHOP}/files{layer.path}"
                    write_tree(WORKSHOP + "/files", tree, layer.entries, plain_nodes=False)
                    self._mount(source, layer.path, flags=MS_BIND)
                else:
                    self._lay(layer, tree, f"{WORKSHOP}/stage{int(number)}")
            write_tree("", tree, nodes, plain_nodes=False)
            (Path(WORKSHOP) / RECORD).write_text(json.dumps(sorted(tree)), encoding="utf-8")
        except (OSError, SimulatorError):
            self._withdraw(nodes)
            raise
        return sorted(tree)

    def _lay(self, layer: Layer, tree: Tree, stage: str) -> None:
        os.makedirs(stage)
        self._mount(MOUNT_SOURCE, stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
        for name, kind in layer.kept:
            here, there = f"{stage}/{name}", f"{layer.path}/{name}"
            if kind.startswith("link:"):
                os.symlink(kind[len("link:") :], here)
            elif kind == "directory":
                os.mkdir(here)
                self._mount(there, here, flags=MS_BIND | MS_REC)
            else:
                with open(here, "wb"):
                    pass
                self._mount(there, here, flags=MS_BIND)
        inside = {path[len(layer.path) :]: tree[path] for path in layer.entries}
        write_tree(stage, inside, list(inside), plain_nodes=False)
        self._mount("", stage, flags=MS_PRIVATE | MS_REC)
        self._mount(stage, layer.path, flags=MS_MOVE)

    def remove(self) -> bool:
        """Takes away every mount and node of ours. Returns whether there was anything."""
        return self._withdraw([path for path in self.placed() if path.startswith("/dev/")])

    def _withdraw(self, nodes: Sequence[str]) -> bool:
        mounts = self.mounts()
        for path in reversed(mounts):
            if self._libc.umount2(path.encode(), MNT_DETACH) != 0:
                raise SimulatorError(f"unmounting {path}: {os.strerror(ctypes.get_errno())}")
        capabilities = "/dev/nvidia-caps"
        instances = os.listdir(capabilities) if nodes and os.path.isdir(capabilities) else []
        for path in list(nodes) + [f"{capabilities}/{name}" for name in instances]:
            if os.path.lexists(path):
                os.unlink(path)
        for directory in (capabilities, WORKSHOP):
            if os.path.isdir(directory) and not os.listdir(directory):
                os.rmdir(directory)
        return bool(mounts or nodes)
