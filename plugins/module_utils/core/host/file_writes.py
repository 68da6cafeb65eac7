# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write, replace, and remove files and directories below the root directory of a host.

Functions that are *durable* also write the change to the disk, so that it survives a power failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import posixpath
import shutil
import stat
from pathlib import Path

from .file_reads import HostReads
from .paths import is_missing, path_exists
from .temporary_files import NEW_FILE, check_orphaned, create_temporary, is_temporary_name

#: Extended attributes that sign the content of one file; the kernel writes them.
_SIGNATURES = frozenset({"security.ima", "security.evm"})
#: Directories of files that installers and package managers write. They can be on several file systems.
INSTALLED = ("/", "/boot", "/etc", "/opt", "/usr", "/usr/local", "/var", "/var/lib")


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


class HostWrites(HostReads):
    """Write access to a host below a root directory."""

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
        runtimes read every such file there. ``scratch`` is another directory for the temporary file, on the same file
        system, if a program reads every file in the directory. Missing directories are created with
        ``directory_mode``. The file gets the owner, the extended attributes, and the mode of the file ``like``, if
        given. ``mode`` (default: the mode of ``like``, or 0644) takes precedence, and so do the numbers of user and group in
        ``owner`` unless they are -1. With ``durable``, temporary files of killed writers of this file are removed.
        """
        target = self._path_text(path)
        folder, name = os.path.split(target)
        temporary_folder = self._path_text(scratch) if scratch else folder
        if durable:
            with contextlib.suppress(OSError):  # they stay until the next write
                self.remove_temporaries(f"{scratch or posixpath.dirname(path)}/{name}")
        try:
            descriptor, temporary = create_temporary(temporary_folder, name)
        except FileNotFoundError:
            self.make_directory(scratch or posixpath.dirname(path), directory_mode, durable=durable)
            descriptor, temporary = create_temporary(temporary_folder, name)
        try:
            try:
                _write_whole(descriptor, data)
                default_mode = 0o644
                if like:
                    default_mode = _copy_attributes(self._path_text(like), descriptor, owner)
                elif owner != (-1, -1):
                    os.fchown(descriptor, *owner)
                os.fchmod(descriptor, default_mode if mode is None else mode)
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
            _sync(folder)

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
        os.replace(self._path_text(source), self._path_text(target))  # noqa: PTH105  paths are texts here
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

    def orphaned_temporaries(self, path: str) -> tuple[str, ...]:
        """Return the temporary files of killed writers of this file, sorted.

        They are in its directory. Raises OSError.
        """
        found = []
        for file in self._temporaries(path):
            with check_orphaned(self._path_text(file)) as is_orphaned:
                if is_orphaned:
                    found.append(file)
        return tuple(found)

    def remove_temporaries(self, path: str) -> int:
        """Remove the temporary files of killed writers of this file; return their number. Raises OSError."""
        removed = 0
        for file in self._temporaries(path):
            with check_orphaned(self._path_text(file)) as is_orphaned:
                removed += is_orphaned and self.remove(file)
        return removed

    def _temporaries(self, path: str) -> list[str]:
        """Return the paths of all temporary files of a file, sorted."""
        folder, name = posixpath.split(path)
        names = (each for each in self.list_directory(folder) if is_temporary_name(each, name))
        return [posixpath.join(folder, each) for each in names]

    def make_directory(self, path: str, mode: int = 0o755, *, durable: bool = True) -> None:
        """Create a directory and missing directories above it.

        If ``durable``, sync their entries. Raises OSError. The entry of the directory is synced also if it exists: a
        killed process can have created it without a sync.
        """
        folder = Path(self._path_text(path))
        missing = [each for each in (folder, *folder.parents) if not path_exists(each)]
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        for each in (missing or [folder]) if durable else ():
            _sync(str(each.parent))

    def make_file(
        self, path: str, data: bytes, mode: int = 0o644, directory_mode: int = 0o755, *, in_new_folder: bool = False
    ) -> bool:
        """Create a file; return False if the path exists. Raises OSError. No process may read the file before this call returns.

        Faster than ``write_atomic``, but the file may be lost in a power failure. Missing directories are created with
        ``directory_mode``. With ``in_new_folder`` the directory is created before the first attempt to open the file.
        """
        target = self._path_text(path)
        try:
            if in_new_folder:
                _make_parent_directory(target, directory_mode)
            try:
                descriptor = os.open(target, NEW_FILE, mode)
            except FileNotFoundError:
                _make_parent_directory(target, directory_mode)
                descriptor = os.open(target, NEW_FILE, mode)
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
        folder = self._path_text(path)
        try:
            for name in os.listdir(folder):  # noqa: PTH208 names alone, no objects
                os.unlink(f"{folder}/{name}")  # noqa: PTH108 at each claim: no objects
            os.rmdir(folder)  # noqa: PTH106  as above
        except FileNotFoundError:
            if is_missing(folder):
                return False
            shutil.rmtree(folder)  # another process removes files in it at the same time
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(folder)  # it contains directories
        if durable:
            _sync(os.path.dirname(folder))  # noqa: PTH120  at each claim: no objects
        return True

    def put(self, path: str, text: str) -> None:
        """Write a line to an existing kernel file, for example in sysfs. Raises OSError."""
        with self.path(path).open("w", encoding="ascii") as file:
            file.write(f"{text}\n")

    def remove(self, path: str) -> bool:
        """Remove a file and sync the removal to disk; return False if it did not exist. Raises OSError."""
        target = self._path_text(path)
        try:
            os.unlink(target)  # noqa: PTH108  at each claim: no objects
        except OSError:
            if is_missing(target):
                return False  # a file system that is read-only refuses a missing file as well
            raise
        _sync(os.path.dirname(target))  # noqa: PTH120  as above
        return True

    def sync(self, path: str) -> None:
        """Write the content and the attributes of a file or directory to the disk. Raises OSError."""
        _sync(self._path_text(path))

    def sync_all(self) -> None:
        """Write all changes of all file systems to the disk, for files that other programs wrote without a sync.

        Raises OSError if a file system of ``INSTALLED`` reports an error of its disk. sync(2) reports no errors. syncfs(2) reports
        them from Linux 5.8 on.
        """
        os.sync()
        for path in map(self._path_text, INSTALLED):
            if path_exists(path):
                _sync_file_system(path)
