# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Write an offline bundle as one archive, and unpack it after verifying every file against the manifest."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from . import bundle_manifest
from .bundle_manifest import NAME, WHEEL, BundleError, Differences, Found, Manifest

_BLOCK = 1 << 20
#: Subdirectory of an unpacked bundle: one directory per Python, which contains only the wheels that this Python needs.
WHEELHOUSES = "wheelhouses"
#: In bytes. A manifest has about 500 bytes per file.
_MAX_MANIFEST = 1 << 26


def write(folder: Path, manifest: Manifest, archive: Path) -> None:
    """Write the archive, with the manifest first. Equal contents yield equal bytes. An interrupted run leaves the previous archive."""
    partial_path = archive.with_name(f"{archive.name}.partial")
    text = manifest.to_text().encode()
    with tarfile.open(partial_path, "w", format=tarfile.PAX_FORMAT) as file:
        for path, size in [(NAME, len(text)), *((item.path, item.size) for item in _sorted(manifest))]:
            member = tarfile.TarInfo(path)
            member.size, member.mode = size, 0o644
            if path == NAME:
                file.addfile(member, io.BytesIO(text))
            else:
                with (folder / path).open("rb") as content:
                    file.addfile(member, content)
    with partial_path.open("rb") as written:
        os.fsync(written.fileno())
    partial_path.replace(archive)


def _sorted(manifest: Manifest) -> list[bundle_manifest.Item]:
    return sorted(manifest.items, key=lambda item: item.path)


def read_manifest(archive: Path) -> tuple[str, Manifest]:
    """Return the manifest of an archive as text and as data. Raises BundleError."""
    with _readable(archive):
        for member, content in _members(archive):
            if member.name == NAME and content is not None and member.size <= _MAX_MANIFEST:
                text = content.read().decode("utf-8", "replace")
                return text, bundle_manifest.read(text, str(archive))
            break
    raise BundleError(
        f"{archive} does not begin with {NAME}",
        hint="It is not a bundle, or it is incomplete. Create a bundle with the playbook bundle.yml.",
        code="manifest",
    )


def _members(archive: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yield the members of an archive in order. Raises BundleError for an invalid or truncated archive."""
    if not archive.is_file():
        raise BundleError(
            f"There is no bundle {archive} on the machine that runs Ansible",
            hint="Create it with the playbook bundle.yml on a host with network access, and copy it to this host.",
            code="no-bundle",
        )
    with _readable(archive), tarfile.open(archive, "r:") as file:
        for member in file:
            yield member, file.extractfile(member) if member.isreg() else None


@contextlib.contextmanager
def _readable(archive: Path) -> Iterator[None]:
    """Raise BundleError for errors of a damaged or truncated archive."""
    try:
        yield
    except (tarfile.TarError, EOFError) as error:
        raise BundleError(
            f"{archive} cannot be read as a bundle: {error}",
            hint="Copy it again, and compare its SHA-256 digest on both sides.",
            code="bundle-differs",
        ) from error


def verify(archive: Path, manifest: Manifest, target: Path | None = None) -> None:
    """Compare all files of an archive with its manifest, and write them to the directory ``target``, if it is set.

    Only files in the manifest are written, and only with the size in it. Raises BundleError with the names of the
    differing files.
    """
    sizes = {item.path: item.size for item in manifest.items}
    found: dict[str, Found] = {}
    strange: list[str] = []
    with _readable(archive):
        for number, (member, content) in enumerate(_members(archive)):
            if number == 0 and member.name == NAME:
                continue
            if member.name not in sizes or content is None or member.name in found:
                strange.append(member.name)
            elif member.size != sizes[member.name]:
                found[member.name] = Found(member.size, "")
            else:
                found[member.name] = _copy_member(content, below(target, member.name) if target else None)
    differences = bundle_manifest.compare(manifest, found)
    Differences(differences.missing, differences.changed, tuple(sorted(set(strange)))).refuse(str(archive))


def _copy_member(content: IO[bytes], target: Path | None) -> Found:
    if target is None:
        return _digest_of_stream(content)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        return _digest_of_stream(content, file)


def is_below(folder: Path, path: Path) -> bool:
    """Return whether a path is below a directory, with symbolic links and ``..`` resolved."""
    return path.resolve().is_relative_to(folder.resolve())


def below(folder: Path, path: str | Path) -> Path:
    """Return a path below a directory. Raises BundleError if the path is outside of it."""
    target = folder / path
    if not is_below(folder, target):
        raise BundleError(
            f"{str(path)!r} of the bundle is outside of {folder}",
            hint="Nothing was written there. Do not use this bundle.",
            code="manifest",
        )
    return target


def compare_directory(folder: Path, manifest: Manifest) -> Differences:
    """Compare the directory of an unpacked bundle with its manifest, including the directories of wheels."""
    found: dict[str, Found] = {}
    for item in manifest.items:
        path = folder / item.path
        if path.is_file() and is_below(folder, path):
            with path.open("rb") as content:
                found[item.path] = _digest_of_stream(content)
    differences = bundle_manifest.compare(manifest, found)
    odd = [
        str(link.relative_to(folder))
        for link, item in wheel_links(folder, manifest)
        if not link.is_file() or not link.samefile(folder / item)
    ]
    wanted = {str(link) for link, _item in wheel_links(folder, manifest)}
    strange = [str(path.relative_to(folder)) for path in (folder / WHEELHOUSES).glob("*/*") if str(path) not in wanted]
    return Differences(differences.missing, (*differences.changed, *sorted(odd)), tuple(sorted(strange)))


def _digest_of_stream(content: IO[bytes], copy: IO[bytes] | None = None) -> Found:
    digest = hashlib.sha256()
    size = 0
    while block := content.read(_BLOCK):
        digest.update(block)
        size += len(block)
        if copy is not None:
            copy.write(block)
    return Found(size, digest.hexdigest())


def wheel_links(folder: Path, manifest: Manifest) -> list[tuple[Path, str]]:
    """Return the files in the directories of wheels, each with the path of its item."""
    return [
        (folder / WHEELHOUSES / place / item.path.rpartition("/")[2], item.path)
        for item in manifest.of(WHEEL)
        for place in item.places
    ]


def is_extracted(folder: Path, text: str, manifest: Manifest) -> bool:
    """Return whether a directory contains the complete and unchanged bundle of this manifest."""
    own = folder / NAME
    return own.is_file() and own.read_text(encoding="utf-8") == text and not compare_directory(folder, manifest)


def extract(archive: Path, text: str, manifest: Manifest, folder: Path) -> None:
    """Unpack an archive to a directory. If it fails, the directory is unchanged. Raises BundleError with the differing files."""
    partial_path = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial_path, ignore_errors=True)
    partial_path.mkdir(parents=True)
    try:
        verify(archive, manifest, partial_path)
        for link, item in wheel_links(partial_path, manifest):
            below(partial_path, link).parent.mkdir(parents=True, exist_ok=True)
            os.link(partial_path / item, link)
        (partial_path / NAME).write_text(text, encoding="utf-8")
        if folder.exists():
            if not (folder / NAME).is_file() and any(folder.iterdir()):
                raise BundleError(
                    f"{folder} exists, and is not an extracted bundle",
                    hint="Set accelerator_offline_directory to another directory.",
                    code="directory",
                )
            shutil.rmtree(folder)
        partial_path.replace(folder)
    finally:
        shutil.rmtree(partial_path, ignore_errors=True)
