# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Access the host: run commands, and read and write files under a root directory that a test can replace."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import itertools
import os
import posixpath
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ..errors import AcceleratorError
from .processes import OutputTooLarge, run_bounded

#: Errors after which it is certain that a path leads to no file. After any other, such as EACCES or EIO, this is not known.
MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
#: The same for symbolic links: EINVAL is for any other kind of file, ENODEV for a device that is being removed.
NO_LINK = MISSING | {errno.EINVAL, errno.ENODEV}
# The value that ``fingerprint`` returns for one path.
Stamp = Optional[tuple[int, int]]


@dataclass(frozen=True)
class Completed:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class DeviceNumber:
    """The identity of a device node: type c or b, major and minor."""

    type: str
    major: int
    minor: int


#: Flags that create a file and fail if it exists.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_TEMPORARY = itertools.count()
#: The part of a temporary file's name that differs between writers: process and number, in earlier releases the process or random characters.
_WRITER = re.compile(r"\d+(-\d+)?|[a-z0-9_]{8}")
#: Extended attributes that sign the content of one file; the kernel writes them.
_SIGNATURES = frozenset({"security.ima", "security.evm"})
_READ_BYTES = 65536
#: Directories of files that installers and package managers write. They can be on several file systems.
INSTALLED = ("/", "/boot", "/etc", "/opt", "/usr", "/usr/local", "/var", "/var/lib")
#: The most that a command may write to both outputs together, in bytes; one that writes more is ended.
LONGEST_OUTPUT = 1024 * 1024
#: The same for installers and package managers: one that is killed leaves a half-installed system.
LONGEST_INSTALLATION = 64 * LONGEST_OUTPUT


def _sync_file_system(path: str) -> None:
    """Write all changes of the file system of a directory to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(
                number, f"The file system cannot be synced: {os.strerror(number)}. Check its disk and free space", path
            )
    finally:
        os.close(descriptor)


def _make_temporary(folder: str, name: str) -> tuple[int, str]:
    """Create a file in the directory of the file ``name``, readable by its owner only; return its descriptor and path.

    Raises OSError. The file is locked while its writer lives (``_left``).
    """
    while True:
        path = f"{folder}/.{name}.{os.getpid()}-{next(_TEMPORARY)}.tmp"
        with contextlib.suppress(FileExistsError):  # a file that a killed process with the same PID left
            descriptor = os.open(path, _NEW, 0o600)
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor, path
            os.close(descriptor)  # removed by another writer before it was locked


@contextlib.contextmanager
def _left(path: str) -> Iterator[bool]:
    """Yield whether the writer of a temporary file was killed: no process holds its lock, in any PID namespace.

    The block holds the lock: a writer that has just created the file waits for it, and creates the file again if the block has removed it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        yield error.errno == errno.ELOOP  # a link has no lock; its writer creates it again
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_left = os.fstat(descriptor).st_nlink > 0  # a removed file can have been created again with the same name
        except OSError:
            is_left = False
        yield is_left
    finally:
        os.close(descriptor)


def _copy_attributes(path: str, descriptor: int, owner: tuple[int, int]) -> int:
    """Copy a file's extended attributes (SELinux label, ACL), and its user and group where ``owner`` has -1, to an open file.

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
    """Write all data, also if the kernel accepts only a part at once. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _text(output: bytes) -> str:
    """Return the output of a command as text with line feeds only, as the standard library's text mode reads it."""
    return output.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def _make_parent_directory(path: str, mode: int) -> None:
    """Create the directory of a file and missing directories above it.

    Existing directories are not an error. Raises OSError.
    """
    folder = os.path.dirname(path)  # noqa: PTH120  at each claim: no objects
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode)  # noqa: PTH102  at each claim: no objects
    except FileNotFoundError:
        Path(folder).mkdir(mode=mode, parents=True, exist_ok=True)


def _is_missing(path: str) -> bool:
    """Return whether it is certain that nothing exists at this path, not even a link."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno in MISSING
    return False


def path_exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a path leads to a file.

    Raises OSError if this is not known, which ``os.path.exists`` returns as False.
    """
    try:
        os.stat(path)  # noqa: PTH116  at each claim: no objects
    except ValueError:  # a null byte
        return False
    except OSError as error:
        if error.errno not in MISSING:
            raise
        return False
    return True


class System:
    """The host below a root directory. All given paths are absolute and relative to that root."""

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def path(self, path: str) -> Path:
        """Return the path, from this process's view, of an absolute path on the host."""
        return Path(self.root, path.lstrip("/")) if self.root != "/" else Path(path)

    def _where(self, path: str) -> str:
        """Return the same path as a string, which is faster, for reads at each claim."""
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
                hint="Install the package that contains it, or add its directory to PATH.",
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
                hint="Run the command manually and check its output.",
                code="command-output-too-large",
            ) from error
        return Completed(code, _text(output), _text(errors))

    def finds(self, program: str) -> bool:
        """Return whether ``run`` would find a program."""
        return shutil.which(program) is not None

    def read_bytes(self, path: str) -> bytes:
        """Return a file's content. Raises OSError as open does."""
        # Runs at each claim, mostly for files of a few bytes: avoid objects and further system calls.
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
        """Return whether a path leads to a file.

        Raises OSError if this is not known: a record must not count as missing.
        """
        return path_exists(self._where(path))

    def list_directory(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory, sorted; empty if the directory does not exist."""
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
        """Return the target of a symbolic link, in one step; "" without a link. Raises OSError if this is not known."""
        try:
            return os.readlink(self.path(path))  # noqa: PTH115  a text, as the kernel gives it
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            return ""

    def is_link(self, path: str) -> bool:
        """Return whether the path itself is a symbolic link."""
        return self.path(path).is_symlink()

    def is_socket(self, path: str) -> bool:
        """Return whether the path is a socket."""
        return self.path(path).is_socket()

    def device_number(self, path: str) -> DeviceNumber | None:
        """Return type, major, and minor of a device node; None if the path is not a device node."""
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

    def inode(self, path: str) -> int | None:
        """Return the inode number of a path; None if it does not exist."""
        try:
            return self.path(path).stat().st_ino
        except OSError:
            return None

    def find_nodes(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the paths of the device nodes that match shell patterns with wildcards only in the last part."""
        return tuple(
            path
            for folder, last in map(posixpath.split, patterns)
            for path in (f"{folder}/{name}" for name in self.list_directory(folder) if fnmatch.fnmatchcase(name, last))
            if self.device_number(path) is not None
        )

    def can_read(self, path: str) -> bool:
        """Return whether this process can open a file for reading.

        Opens nothing. Device cgroups apply (access(2)).
        """
        return os.access(self._where(path), os.R_OK)

    def make_character_device(self, path: str, major: int, minor: int, mode: int) -> bool:
        """Create a character device node and its directory; return False if the path exists. Raises OSError."""
        target = self.path(path)
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            os.mknod(target, stat.S_IFCHR | mode, os.makedev(major, minor))
        except FileExistsError:
            return False
        target.chmod(mode)
        return True

    def fingerprint(self, paths: Iterable[str]) -> tuple[Stamp, ...]:
        """Return values that change if something changes at these paths, with one stat each and no read.

        For a directory the value changes when a name is created or removed in it. For any other file it contains the
        kind and a device node's numbers. For a missing file the value is None. File contents do not affect it.
        """
        prefix = "" if self.root == "/" else self.root.rstrip("/")
        found: list[Stamp] = []
        for path in paths:
            try:
                seen = os.stat(prefix + path)  # noqa: PTH116 called for each claim: no objects
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
        """Write a file atomically: a reader sees the old or the new content, with ``durable`` also after a power failure.

        The temporary file is in the same directory. Its name ends in neither .json nor .yaml, because container
        runtimes read every such file there. With ``scratch`` the temporary file is in that directory of the
        same file system, for directories of which a program reads every file. Missing directories are created with
        ``directory_mode``. The file gets the owner, the extended attributes, and the mode of the file ``like``, if
        given. ``mode`` (default: that of ``like``, or 0644) and the numbers of user and group in ``owner`` other than
        -1 take precedence. With ``durable``, temporary files of killed writers of this file are removed.
        """
        target = self._where(path)
        folder, name = os.path.split(target)
        place = self._where(scratch) if scratch else folder
        if durable:
            with contextlib.suppress(OSError):  # they stay until the next write
                self.remove_temporaries(f"{scratch or posixpath.dirname(path)}/{name}")
        try:
            descriptor, temporary = _make_temporary(place, name)
        except FileNotFoundError:
            self.make_directory(scratch or posixpath.dirname(path), directory_mode, durable=durable)
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
                os.replace(temporary, target)  # noqa: PTH105  at each claim: no objects
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)  # noqa: PTH108  as above
                raise
        finally:
            os.close(descriptor)
        if durable:
            self._sync_directory(folder)

    def copy(self, source: str, target: str) -> None:
        """Copy a file to a temporary file, sync it, and rename it: the target is never a part of the file.

        Raises OSError.
        """
        temporary = f"{posixpath.dirname(target)}/.{posixpath.basename(target)}.tmp"
        try:
            shutil.copyfile(self.path(source), self.path(temporary))
            self.move(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                self.path(temporary).unlink()
            raise

    def move(self, source: str, target: str) -> None:
        """Rename a file. After a power failure the complete file is at one of the two paths. Raises OSError."""
        self.sync(source)
        os.replace(self._where(source), self._where(target))  # noqa: PTH105  paths are texts here
        for folder in dict.fromkeys((posixpath.dirname(target), posixpath.dirname(source))):
            self.sync(folder)

    def replace_text(self, path: str, text: str | None, *, mode: int = 0o644, scratch: str = "") -> None:
        """Write a file of the administrator, or remove it if ``text`` is None. Raises OSError.

        Owner, mode, and extended attributes stay; a new file gets ``mode``. A symbolic link stays, and its target is written or removed.
        Temporary files of killed runs are removed.
        """
        path = self.real_path(path)
        if text is None:
            self.remove_temporaries(posixpath.join(scratch or posixpath.dirname(path), posixpath.basename(path)))
            self.remove(path)
        else:
            like = path if self.exists(path) else ""
            self.write_atomic(path, text.encode(), None if like else mode, like=like, scratch=scratch)

    def left_temporaries(self, path: str) -> tuple[str, ...]:
        """Return the temporary files of killed writers of this file, sorted.

        They are in its directory. Raises OSError.
        """
        found = []
        for file in self._temporaries(path):
            with _left(self._where(file)) as is_left:
                found += [file] if is_left else []
        return tuple(found)

    def remove_temporaries(self, path: str) -> int:
        """Remove the temporary files of killed writers of this file; return their number. Raises OSError."""
        removed = 0
        for file in self._temporaries(path):
            with _left(self._where(file)) as is_left:
                removed += is_left and self.remove(file)
        return removed

    def _temporaries(self, path: str) -> list[str]:
        """Return the paths of all temporary files of a file, sorted."""
        folder, name = posixpath.split(path)
        start, end = f".{name}.", ".tmp"
        found = [each for each in self.list_directory(folder) if each.startswith(start) and each.endswith(end)]
        return [posixpath.join(folder, each) for each in found if _WRITER.fullmatch(each[len(start) : -len(end)])]

    def make_directory(self, path: str, mode: int = 0o755, *, durable: bool = True) -> None:
        """Create a directory and missing directories above it.

        If ``durable``, sync their entries. Raises OSError. The entry of the directory is synced also if it exists: a
        killed process can have created it without a sync.
        """
        folder = Path(self._where(path))
        missing = [each for each in (folder, *folder.parents) if not path_exists(each)]
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        for each in (missing or [folder]) if durable else ():
            self._sync_directory(str(each.parent))

    def make_file(
        self, path: str, data: bytes, mode: int = 0o644, directory_mode: int = 0o755, *, in_new_folder: bool = False
    ) -> bool:
        """Create a file that no process reads before this call returns; return False if the path exists. Raises OSError.

        Faster than ``write_atomic``, but the file may be lost in a power failure. Missing directories are created with
        ``directory_mode``. With ``in_new_folder`` the directory is created before the first attempt to open the file.
        """
        target = self._where(path)
        try:
            if in_new_folder:
                _make_parent_directory(target, directory_mode)
            try:
                descriptor = os.open(target, _NEW, mode)
            except FileNotFoundError:
                _make_parent_directory(target, directory_mode)
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

    def remove_tree(self, path: str, *, durable: bool = True) -> bool:
        """Remove a directory and its content, with ``durable`` synced to disk; return False if it did not exist.

        Raises OSError.
        """
        folder = self._where(path)
        try:
            for name in os.listdir(folder):  # noqa: PTH208 names alone, no objects
                os.unlink(f"{folder}/{name}")  # noqa: PTH108 at each claim: no objects
            os.rmdir(folder)  # noqa: PTH106  as above
        except FileNotFoundError:
            if _is_missing(folder):
                return False
            shutil.rmtree(folder)  # another process removes files in it at the same time
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(folder)  # it contains directories
        if durable:
            self._sync_directory(os.path.dirname(folder))  # noqa: PTH120  at each claim: no objects
        return True

    def put(self, path: str, text: str) -> None:
        """Write a line to an existing kernel file, for example in sysfs. Raises OSError."""
        with self.path(path).open("w", encoding="ascii") as file:
            file.write(f"{text}\n")

    def remove(self, path: str) -> bool:
        """Remove a file and sync the removal to disk; return False if it did not exist. Raises OSError."""
        target = self._where(path)
        try:
            os.unlink(target)  # noqa: PTH108  at each claim: no objects
        except OSError:
            if _is_missing(target):
                return False  # a file system that is read-only refuses a missing file as well
            raise
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

    def sync_all(self) -> None:
        """Write all changes of all file systems to the disk. For files that other programs wrote without a sync.

        Raises OSError if a file system of ``INSTALLED`` reports an error of its disk. sync(2) reports none; syncfs(2) does from Linux 5.8 on.
        """
        os.sync()
        for path in map(self._where, INSTALLED):
            if path_exists(path):
                _sync_file_system(path)

    @staticmethod
    def _sync_directory(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def text_or_none(system: System, path: str) -> str | None:
    """Return a file's text, or None if the file does not exist."""
    try:
        return system.read_text(path)
    except FileNotFoundError:
        return None
