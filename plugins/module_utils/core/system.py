# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The one port to the machine: run a command, read and write files, under a root that a test can replace."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import os
import posixpath
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from .errors import AcceleratorError
from .processes import OutputTooLarge, run_bounded

# What ``fingerprint`` says of one path.
Stamp = Optional[tuple[int, int]]


@dataclass(frozen=True)
class Completed:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class DeviceNumber:
    """The identity of a device node: type c or b, major and minor."""

    type: str
    major: int
    minor: int


#: How a file is made that must not be there.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_TEMPORARY = itertools.count()
#: Extended attributes that sign the content of one file; the kernel writes them.
_SIGNATURES = frozenset({"security.ima", "security.evm"})
_READ_BYTES = 65536
#: The most that a command may write to both outputs together, in bytes; one that writes more is ended.
LONGEST_OUTPUT = 1024 * 1024
#: The same for installers and package managers: one that is killed leaves a half-installed system.
LONGEST_INSTALLATION = 64 * LONGEST_OUTPUT


def _make_temporary(folder: str, name: str) -> tuple[int, str]:
    """Make a file beside the one of that name, for its owner alone; return its descriptor and path. Raises OSError."""
    while True:
        path = f"{folder}/.{name}.{os.getpid()}-{next(_TEMPORARY)}.tmp"
        with contextlib.suppress(FileExistsError):  # what a killed process of the same number has left
            return os.open(path, _NEW, 0o600), path


def _copy_attributes(path: str, descriptor: int, owner: tuple[int, int]) -> int:
    """Copy the extended attributes (SELinux label, ACL) of a file to an open file, and its user and group where ``owner`` has -1.

    Returns the mode of the file. Raises OSError.
    """
    status = os.stat(path)  # noqa: PTH116
    # Before the attributes: a change of the owner deletes security.capability.
    os.fchown(descriptor, status.st_uid if owner[0] == -1 else owner[0], status.st_gid if owner[1] == -1 else owner[1])
    try:
        names = os.listxattr(path)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        names = []
    for name in names:
        if name not in _SIGNATURES:
            os.setxattr(descriptor, name, os.getxattr(path, name))
    return stat.S_IMODE(status.st_mode)


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write all of it, however little the kernel takes at once. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _text(output: bytes) -> str:
    """Return the output of a command as text with line feeds only, as the standard library's text mode reads it."""
    return output.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def _make_folder_of(path: str, mode: int) -> None:
    """Make the folder of a file, and those above; they may be there. Raises OSError."""
    folder = os.path.dirname(path)  # noqa: PTH120  at each claim: no objects
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode)  # noqa: PTH102  at each claim: no objects
    except FileNotFoundError:
        Path(folder).mkdir(mode=mode, parents=True, exist_ok=True)


class System:
    """The machine below a root folder. All paths given are absolute and are looked up under that root."""

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def path(self, path: str) -> Path:
        """Return where an absolute path of the machine lies in this process's own view."""
        return Path(self.root, path.lstrip("/")) if self.root != "/" else Path(path)

    def _where(self, path: str) -> str:
        """The same as text, for what each claim asks."""
        return f"{self.root.rstrip('/')}/{path.lstrip('/')}" if self.root != "/" else path

    def run(
        self,
        argv: Sequence[str],
        timeout: float,
        input: str | None = None,  # noqa: A002
        environment: Mapping[str, str] | None = None,
        longest: int = LONGEST_OUTPUT,
    ) -> Completed:
        """Run a command without a shell and return its exit code and output.

        ``environment`` is added to the environment of this process. Output that is not UTF-8 is replaced. A command that writes
        more than ``longest`` bytes, or runs longer than ``timeout`` seconds, is killed with the processes that it started.

        Raises AcceleratorError with code command-missing, command-unusable, command-timeout or command-output-too-large. A
        non-zero exit code is not an error.
        """
        variables = {**os.environ, "LC_ALL": "C", **(environment or {})}
        try:
            code, output, errors = run_bounded(
                argv, timeout=timeout, most_bytes=longest, data=(input or "").encode(), environment=variables
            )
        except FileNotFoundError as error:
            raise AcceleratorError(
                f"The command {argv[0]} was not found",
                hint="Install the package that brings it, or add its folder to PATH.",
                code="command-missing",
            ) from error
        except OSError as error:
            raise AcceleratorError(
                f"The command {argv[0]} cannot be started: {error.strerror}",
                hint="It may be about to be installed, or be for another machine.",
                code="command-unusable",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise AcceleratorError(
                f"{' '.join(argv)} did not end within {timeout:g} s", code="command-timeout"
            ) from error
        except OutputTooLarge as error:
            raise AcceleratorError(
                f"{' '.join(argv)} wrote more than {longest} bytes and was ended",
                hint="Run the command by hand and check its output.",
                code="command-output-too-large",
            ) from error
        return Completed(code, _text(output), _text(errors))

    def finds(self, program: str) -> bool:
        """Whether ``run`` would find a program."""
        return shutil.which(program) is not None

    def read_bytes(self, path: str) -> bytes:
        """Return a file's content. Raises OSError as open does."""
        # At each claim, most of them files of a few bytes: no objects, and no questions to the kernel but these.
        descriptor = os.open(self._where(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = [os.read(descriptor, _READ_BYTES)]
            while parts[-1]:
                parts.append(os.read(descriptor, _READ_BYTES))
        finally:
            os.close(descriptor)
        return b"".join(parts)

    def read_text(self, path: str) -> str:
        """Return a file's content as text; bytes that are not UTF-8 are replaced. Raises OSError."""
        return self.read_bytes(path).decode("utf-8", "replace")

    def exists(self, path: str) -> bool:
        """Whether something is there, links followed."""
        return os.path.exists(self._where(path))  # noqa: PTH110  at each claim: no objects

    def list_directory(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; nothing for a folder that is not there."""
        try:
            return tuple(sorted(os.listdir(self.path(path))))  # noqa: PTH208 names alone, no objects
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def real_path(self, path: str) -> str:
        """Return the path with all links resolved, as seen below the root."""
        resolved = os.path.realpath(self.path(path))
        if self.root == "/":
            return resolved
        root = os.path.realpath(self.root)
        return "/" + os.path.relpath(resolved, root) if resolved.startswith(root + os.sep) else resolved

    def link_target(self, path: str) -> str:
        """Return what a symbolic link says, in one step; empty where there is none, or none any more."""
        try:
            return os.readlink(self.path(path))  # noqa: PTH115  a text, as the kernel gives it
        except OSError:
            return ""

    def is_link(self, path: str) -> bool:
        """Whether the path itself is a symbolic link."""
        return self.path(path).is_symlink()

    def is_socket(self, path: str) -> bool:
        """Whether the path is a socket."""
        return self.path(path).is_socket()

    def device_number(self, path: str) -> DeviceNumber | None:
        """Return type, major and minor of a device node, or None when there is no device node at the path."""
        try:
            found = os.stat(self._where(path))  # noqa: PTH116  at each claim: no objects
        except OSError:
            return None
        if stat.S_ISCHR(found.st_mode):
            kind = "c"
        elif stat.S_ISBLK(found.st_mode):
            kind = "b"
        else:
            return None
        return DeviceNumber(kind, os.major(found.st_rdev), os.minor(found.st_rdev))

    def find_nodes(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the paths of the device nodes that match shell patterns, of which only the last part has special characters."""
        return tuple(
            path
            for folder, last in map(posixpath.split, patterns)
            for path in (f"{folder}/{name}" for name in self.list_directory(folder) if fnmatch.fnmatchcase(name, last))
            if self.device_number(path) is not None
        )

    def can_read(self, path: str) -> bool:
        """Return whether this process may open a file to read it. Opens nothing; device cgroups count (access(2))."""
        return os.access(self._where(path), os.R_OK)

    def make_character_device(self, path: str, major: int, minor: int, mode: int) -> bool:
        """Make a character device's node with its folder; False when something is there already. Raises OSError."""
        target = self.path(path)
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            os.mknod(target, stat.S_IFCHR | mode, os.makedev(major, minor))
        except FileExistsError:
            return False
        target.chmod(mode)
        return True

    def fingerprint(self, paths: Iterable[str]) -> tuple[Stamp, ...]:
        """Return what tells whether anything has changed at these paths, by one look at each and no read.

        Of a folder, when a name was last made or removed in it; of anything else, its kind and a node's numbers; None
        where nothing is. A file's content is not in it.
        """
        prefix = "" if self.root == "/" else self.root.rstrip("/")
        found: list[Stamp] = []
        for path in paths:
            try:
                seen = os.stat(prefix + path)  # noqa: PTH116 a look at each claim: no objects
            except OSError:
                found.append(None)
                continue
            folder = stat.S_ISDIR(seen.st_mode)
            found.append((seen.st_ino, seen.st_mtime_ns) if folder else (seen.st_mode, seen.st_rdev))
        return tuple(found)

    def write_atomic(
        self,
        path: str,
        data: bytes,
        mode: int | None = None,
        directory_mode: int = 0o755,
        durable: bool = True,
        *,
        like: str = "",
        owner: tuple[int, int] = (-1, -1),
        scratch: str = "",
    ) -> None:
        """Write a file so that a reader sees the old content or the new, never a part, if ``durable`` also after a power cut.

        The temporary file lies in the same folder and ends in neither .json nor .yaml, because container runtimes
        read every such file there. It is in ``scratch`` instead, if given: a directory on the same file system, for directories of which a program
        reads every file. Missing folders are made with ``directory_mode``. The file gets the owner, the extended attributes, and the mode of
        the file ``like``, if given. ``mode`` (default: that of ``like``, or 0644) and the numbers of user and group in ``owner`` other than -1
        take precedence.
        """
        target = self._where(path)
        folder, name = os.path.split(target)
        place = self._where(scratch) if scratch else folder
        try:
            descriptor, temporary = _make_temporary(place, name)
        except FileNotFoundError:
            missing = [parent for parent in (Path(place), *Path(place).parents) if not parent.exists()]
            Path(place).mkdir(mode=directory_mode, parents=True, exist_ok=True)
            for parent in missing if durable else ():
                self._sync_directory(str(parent.parent))
            descriptor, temporary = _make_temporary(place, name)
        try:
            try:
                _write_whole(descriptor, data)
                given = 0o644
                if like:
                    given = _copy_attributes(self._where(like), descriptor, owner)
                elif owner != (-1, -1):
                    os.fchown(descriptor, *owner)
                os.fchmod(descriptor, given if mode is None else mode)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, target)  # noqa: PTH105  at each claim: no objects
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108  as above
            raise
        if durable:
            self._sync_directory(folder)

    def copy(self, source: str, target: str) -> None:
        """Copy a file under another name, sync it and rename it: a killed copy leaves no part under the name of the target. Raises OSError."""
        temporary = f"{posixpath.dirname(target)}/.{posixpath.basename(target)}.tmp"
        shutil.copyfile(self.path(source), self.path(temporary))
        self.move(temporary, target)

    def move(self, source: str, target: str) -> None:
        """Rename a file. After a power failure the complete file is at one of the two paths. Raises OSError."""
        self.sync(source)
        os.replace(self._where(source), self._where(target))  # noqa: PTH105  paths are texts here
        for folder in dict.fromkeys((posixpath.dirname(target), posixpath.dirname(source))):
            self.sync(folder)

    def remove_temporaries(self, path: str) -> int:
        """Remove what a writer of this file that was killed has left beside it; return how many there were. Raises OSError.

        For when nobody writes it: they are those that ``write_atomic`` has made and not yet renamed.
        """
        target = self.path(path)
        left = [name for name in self.list_directory(str(Path(path).parent)) if name.startswith(f".{target.name}.")]
        return sum(self.remove(f"{Path(path).parent}/{name}") for name in left if name.endswith(".tmp"))

    def make_file(
        self, path: str, data: bytes, mode: int = 0o644, directory_mode: int = 0o755, *, in_new_folder: bool = False
    ) -> bool:
        """Make a file that nobody reads before this call is over; False when something is there already. Raises OSError.

        Cheaper than ``write_atomic``. It need not outlive a power cut; missing folders are made with ``directory_mode``, with
        ``in_new_folder`` before it is seen that they are missing.
        """
        target = self._where(path)
        try:
            if in_new_folder:
                _make_folder_of(target, directory_mode)
            try:
                descriptor = os.open(target, _NEW, mode)
            except FileNotFoundError:
                _make_folder_of(target, directory_mode)
                descriptor = os.open(target, _NEW, mode)
        except FileExistsError:
            return False
        try:
            try:
                os.fchmod(descriptor, mode)
                _write_whole(descriptor, data)
            finally:
                os.close(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(target)  # noqa: PTH108  as above
            raise
        return True

    def remove_tree(self, path: str) -> bool:
        """Remove a folder with all that is in it; False when it was not there. Raises OSError."""
        folder = self._where(path)
        try:
            for name in os.listdir(folder):  # noqa: PTH208 names alone, no objects
                os.unlink(f"{folder}/{name}")  # noqa: PTH108 at each claim: no objects
            os.rmdir(folder)  # noqa: PTH106  as above
        except FileNotFoundError:
            if not os.path.lexists(folder):
                return False
            shutil.rmtree(folder)  # somebody else removes in it as well
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(folder)  # it has folders in it
        return True

    def put(self, path: str, text: str) -> None:
        """Write a line to a file that the kernel shows, and that is there. Raises OSError."""
        with self.path(path).open("w", encoding="ascii") as file:
            file.write(f"{text}\n")

    def remove(self, path: str) -> bool:
        """Remove a file for good; False when it was not there. Raises OSError."""
        target = self._where(path)
        try:
            os.unlink(target)  # noqa: PTH108  at each claim: no objects
        except OSError:
            if os.path.lexists(target):
                raise
            return False  # a file system that is read-only refuses what is not there as well
        self._sync_directory(os.path.dirname(target))  # noqa: PTH120  as above
        return True

    def boot_id(self) -> str:
        """Return the kernel's identity of this boot."""
        return self.read_text("/proc/sys/kernel/random/boot_id").strip()

    def sync(self, path: str) -> None:
        """Write the content and the attributes of a file or directory to the disk. Raises OSError."""
        descriptor = os.open(self._where(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _sync_directory(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
