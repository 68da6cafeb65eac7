# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Create a tree of files: as plain files in a directory, or mounted over the real /proc, /sys, and /dev.

A mount over a directory does not change the kernel's files. A tmpfs contains all original entries of the directory
(bind mounts, so that they stay live) and the simulated entries. It is moved over the directory in one step.
"""

from __future__ import annotations

import ctypes
import json
import os
import posixpath
import pwd
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .entries import Directory, Entry, File, Link, Node, Tree, directories_above
from .errors import SimulatorError

MS_NOSUID, MS_NODEV, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x2000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_SOURCE = "accelerator-simulator"
WORKSHOP = Path("/run/accelerator-simulator")
RECORD = "placed.json"
# Paths that are mounted over. Other files are written directly.
LAID_OVER = ("/proc/", "/sys/")
# Directories with hundreds of children whose real path does not matter: links to one bind mount instead of one mount each
LINKED = ("/sys/module", "/sys/bus/pci/drivers")
CAPABILITY_NODES = Path("/dev/nvidia-caps")
# Directories in which the library creates and removes files when instances are created and destroyed
KEPT_BY_THE_LIBRARY = ("/proc/driver/nvidia/capabilities", str(CAPABILITY_NODES))
# Nodes that the Ascend library creates and removes when slices are created and destroyed
NODES_OF_THE_LIBRARY = "vdavinci[0-9]*"
# The same for the bus, when devices are bound to vfio-pci
VFIO_NODES = "/dev/vfio"
KEPT_BY_THE_BUS = (VFIO_NODES, f"{WORKSHOP}/detached", f"{WORKSHOP}/unplugged")


@dataclass(frozen=True)
class Layer:
    """One mount over ``path``.

    ``kept`` are the original children and how each shows through: ``link:target``, ``directory`` or ``file``.
    """

    path: str
    kept: tuple[tuple[str, str], ...]
    entries: tuple[str, ...]
    single_file: bool = False


class Original:
    """The real files of the machine, below ``root`` (the machine's root directory, except in tests)."""

    def __init__(self, root: str = "") -> None:
        self._root = root

    def kind(self, path: str) -> str | None:
        """Return ``link:target``, ``directory``, or ``file``; None if the path does not exist."""
        entry = Path(self._root + path)
        if entry.is_symlink():
            return f"link:{entry.readlink()}"
        if entry.is_dir():
            return "directory"
        return "file" if entry.exists() else None

    def children(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(entry.name for entry in Path(self._root + path).iterdir())


def plan_layers(tree: Tree, original: Original) -> list[Layer]:
    """Return the mounts that make the tree's /proc and /sys visible, parents first.

    Raises SimulatorError if the host already has a file at one of the tree's paths.
    """
    grouped: dict[str, list[str]] = {}
    files: list[str] = []
    for path in sorted(tree):
        if not path.startswith(LAID_OVER):
            continue
        kind = original.kind(path)
        if kind == "file" and (path.startswith("/proc/") or path == "/sys/bus/pci/drivers_probe"):
            files.append(path)
            continue
        if kind is not None:
            raise SimulatorError(
                f"{path} exists on this host already: the machine profile uses the same address; "
                "choose another profile or set a PCI domain offset (pci_domain_offset)"
            )
        parent = posixpath.dirname(path)
        while original.kind(parent) != "directory":
            parent = posixpath.dirname(parent)
        if parent in ("/", "/sys", "/proc"):
            raise SimulatorError(
                f"{parent} has no parent directory of {path}, expected the directories of a kernel with PCI"
            )
        grouped.setdefault(parent, []).append(path)
    layers = []
    for path, entries in sorted(grouped.items()):
        kept = []
        for name in original.children(path):
            child = posixpath.join(path, name)
            kind = original.kind(child) or "file"
            if path in LINKED and not kind.startswith("link:"):
                kind = f"link:{WORKSHOP}/original{child}"
            kept.append((name, kind))
        layers.append(Layer(path, tuple(kept), tuple(entries)))
    return layers + [Layer(path, (), (path,), single_file=True) for path in files]


def write_entry(path: Path, entry: Entry, plain_nodes: bool) -> bool:
    """Create one entry in an existing directory. Return whether anything changed."""
    if isinstance(entry, Directory):
        if path.is_dir():
            return False
        path.mkdir(entry.mode)
        return True
    if isinstance(entry, Link):
        if path.is_symlink() and str(path.readlink()) == entry.target:
            return False
        path.unlink(missing_ok=True)
        path.symlink_to(entry.target)
        return True
    if isinstance(entry, Node) and not plain_nodes:
        return _write_node(path, entry)
    content = entry.content if isinstance(entry, File) else b""
    regular = path.is_file() and not path.is_symlink()
    if regular and path.read_bytes() == content and stat.S_IMODE(path.stat().st_mode) == entry.mode:
        return False
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(entry.mode)
    return True


def _write_node(path: Path, entry: Node) -> bool:
    wanted = os.makedev(entry.major, entry.minor)
    if path.exists() or path.is_symlink():
        state = path.lstat()
        same = stat.S_ISCHR(state.st_mode) and state.st_rdev == wanted and stat.S_IMODE(state.st_mode) == entry.mode
        if same and (state.st_uid, state.st_gid) == owner_of(entry):
            return False
        path.unlink()
    os.mknod(path, stat.S_IFCHR | entry.mode, wanted)
    path.chmod(entry.mode)
    os.chown(path, *owner_of(entry))
    return True


def owner_of(node: Node) -> tuple[int, int]:
    """Return the user and group of a node; root if the user does not exist on this system."""
    try:
        known = pwd.getpwnam(node.owner)
    except KeyError:
        return 0, 0
    return known.pw_uid, known.pw_gid


def write_tree(root: str, tree: Tree, paths: Sequence[str], plain_nodes: bool) -> list[str]:
    """Create the named entries below ``root`` (empty: the machine's root directory). Return the changed paths."""
    for directory in directories_above(paths):
        Path(root + directory).mkdir(0o755, parents=True, exist_ok=True)
    return [path for path in sorted(paths) if write_entry(Path(root + path), tree[path], plain_nodes)]


def remove_slice_nodes(root: str) -> None:
    """Remove the nodes that the library created."""
    for path in Path(root + "/dev").glob(NODES_OF_THE_LIBRARY):
        path.unlink()


def _read_record(folder: Path) -> list[str]:
    record = folder / RECORD
    return list(json.loads(record.read_text(encoding="utf-8"))) if record.is_file() else []


class Folder:
    """Place trees as plain files in a directory, without privileges: for tests, and for programs with a root option."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._workshop = Path(f"{root}{WORKSHOP}")

    def placed(self) -> list[str]:
        """Return the recorded paths of earlier calls."""
        return _read_record(self._workshop)

    def place(self, tree: Tree) -> list[str]:
        """Create the entries that differ, and remove those of an earlier machine. Return the changed paths."""
        stale = [path for path in self.placed() if path not in tree]
        self._remove(stale)
        changed = write_tree(self.root, tree, list(tree), plain_nodes=True)
        self._workshop.mkdir(parents=True, exist_ok=True)
        (self._workshop / RECORD).write_text(json.dumps(sorted(tree)), encoding="utf-8")
        return changed + stale

    def remove(self) -> bool:
        """Remove the placed entries and the directories that are then empty. Return whether entries existed."""
        paths = self.placed()
        for folder in (*KEPT_BY_THE_LIBRARY, *KEPT_BY_THE_BUS):
            if paths and Path(self.root + folder).is_dir():
                shutil.rmtree(self.root + folder)
        self._remove(paths)
        remove_slice_nodes(self.root)
        (self._workshop / RECORD).unlink(missing_ok=True)
        return bool(paths)

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            entry = Path(self.root + path)
            if entry.is_symlink() or entry.is_file():
                entry.unlink()
        for directory in sorted(set(directories_above(paths)) | set(paths), reverse=True):
            entry = Path(self.root + directory)
            if entry.is_dir() and not any(entry.iterdir()):
                entry.rmdir()


class System:
    """Mount trees over the running system's /proc and /sys, and create nodes in /dev. Needs CAP_SYS_ADMIN and CAP_MKNOD."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _mount(self, source: str, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
        words = [word.encode() or None for word in (source, str(target), kind, options)]
        if self._libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
            raise SimulatorError(
                f"mounting {source or kind} on {target}: {os.strerror(ctypes.get_errno())}; "
                "the simulator lays files over /proc and /sys and needs CAP_SYS_ADMIN"
            )

    def mounts(self) -> list[str]:
        """Return the simulator's mount points, outermost first, as /proc/self/mountinfo lists them."""
        found = []
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields, _dash, tail = line.partition(" - ")
            if tail.split()[1] == MOUNT_SOURCE:
                found.append(fields.split()[4].replace("\\040", " "))
        return found

    def placed(self) -> list[str]:
        """Return the paths of the placed tree; empty if no tree is placed."""
        return _read_record(WORKSHOP)

    def place(self, tree: Tree) -> list[str]:
        """Mount the tree over the system. No earlier tree may be mounted. Return the paths."""
        layers = plan_layers(tree, Original())
        nodes = [path for path in tree if not path.startswith(LAID_OVER)]
        WORKSHOP.mkdir(0o755, parents=True, exist_ok=True)
        # Private, because a mount below a shared one cannot be moved
        self._mount(MOUNT_SOURCE, WORKSHOP, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
        try:
            self._mount("", WORKSHOP, flags=MS_PRIVATE)
            original = WORKSHOP / "original/sys"
            original.mkdir(parents=True)
            self._mount("/sys", original, flags=MS_BIND)
            # Private, because later mounts over /sys would otherwise appear in this copy too
            self._mount("", original, flags=MS_PRIVATE)
            for number, layer in enumerate(layers):
                if layer.single_file:
                    write_tree(f"{WORKSHOP}/files", tree, layer.entries, plain_nodes=False)
                    self._mount(f"{WORKSHOP}/files{layer.path}", layer.path, flags=MS_BIND)
                else:
                    self._lay(layer, tree, WORKSHOP / f"stage{number}")
            write_tree("", tree, nodes, plain_nodes=False)
            (WORKSHOP / RECORD).write_text(json.dumps(sorted(tree)), encoding="utf-8")
        except (OSError, SimulatorError):
            self._withdraw(nodes)
            raise
        return sorted(tree)

    def _lay(self, layer: Layer, tree: Tree, stage: Path) -> None:
        stage.mkdir(parents=True)
        self._mount(MOUNT_SOURCE, stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
        for name, kind in layer.kept:
            here, there = stage / name, posixpath.join(layer.path, name)
            if kind.startswith("link:"):
                here.symlink_to(kind[len("link:") :])
            elif kind == "directory":
                here.mkdir()
                self._mount(there, here, flags=MS_BIND | MS_REC)
            else:
                here.touch()
                self._mount(there, here, flags=MS_BIND)
        inside = {path[len(layer.path) :]: tree[path] for path in layer.entries}
        write_tree(str(stage), inside, list(inside), plain_nodes=False)
        self._mount("", stage, flags=MS_PRIVATE | MS_REC)
        self._mount(str(stage), layer.path, flags=MS_MOVE)

    def remove(self) -> bool:
        """Remove all mounts and nodes of the simulator. Return whether any existed."""
        return self._withdraw([path for path in self.placed() if not path.startswith(LAID_OVER)])

    def _withdraw(self, nodes: Sequence[str]) -> bool:
        mounts = self.mounts()
        for path in reversed(mounts):
            if self._libc.umount2(path.encode(), MNT_DETACH) != 0:
                raise SimulatorError(f"unmounting {path}: {os.strerror(ctypes.get_errno())}")
        for path in nodes:
            Path(path).unlink(missing_ok=True)
        remove_slice_nodes("")
        if f"{VFIO_NODES}/vfio" in nodes:
            shutil.rmtree(VFIO_NODES, ignore_errors=True)
        if nodes and CAPABILITY_NODES.is_dir():
            # Nodes of instances, which the library creates with the statement "cap-nodes yes"
            for node in CAPABILITY_NODES.iterdir():
                node.unlink()
        for directory in (CAPABILITY_NODES, WORKSHOP):
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()
        return bool(mounts or nodes)
