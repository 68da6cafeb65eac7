# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read, write, and check the manifest of a bundle: its files, their versions, sources, and signatures. This module has no side effects."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import AcceleratorError

FORMAT = 1
#: Name of the manifest, the first member of the archive.
NAME = "manifest.json"
PACKAGE, INDEX, WHEEL, IMAGE, FILE = "package", "index", "wheel", "image", "file"
KINDS = (PACKAGE, INDEX, WHEEL, IMAGE, FILE)
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: A platform (debian_13_x86_64) or a Python (cp313-x86_64): the name of a directory below the bundle's.
_PLACE = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_FILE_NAME = r"[A-Za-z0-9][A-Za-z0-9._+~%:=@-]{0,254}"
_PATHS = {
    PACKAGE: re.compile(rf"packages/{_PLACE.pattern}/{_FILE_NAME}"),
    INDEX: re.compile(rf"packages/{_PLACE.pattern}/(repodata/)?{_FILE_NAME}"),
    WHEEL: re.compile(rf"wheels/{_FILE_NAME}\.whl"),
    IMAGE: re.compile(rf"images/{_FILE_NAME}"),
    FILE: re.compile(rf"files/{_FILE_NAME}"),
}
#: Names and versions are arguments of package managers: none starts like an option.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+~%:=@/-]{0,254}")
_VERSION = re.compile(r"([A-Za-z0-9][A-Za-z0-9._+~^!:=@/-]{0,254})?")
_SIGNER = re.compile(r"[0-9A-F]{8,64}")
_LINE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{0,4096}")
_MAX_SIZE = 1 << 50
#: Maximum number of characters of an invalid value in an error.
_SHOWN = 400
#: Maximum number of names in an error. Further names are only counted.
_NAMED = 12


class BundleError(AcceleratorError):
    """A bundle cannot be created or used."""

    default_code = "bundle"


@dataclass(frozen=True)
class Item:
    """One file of a bundle.

    ``places`` are the platforms of a package, or the wheelhouse keys of a wheel. ``source`` is the URL or path of its
    origin. ``signed_by`` are the fingerprints of its signing keys. ``verified`` describes the verification as text.
    """

    path: str
    kind: str
    name: str
    version: str
    size: int
    sha256: str
    places: tuple[str, ...] = ()
    source: str = ""
    signed_by: tuple[str, ...] = ()
    verified: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the item in the format of the manifest."""
        return {
            "path": self.path,
            "kind": self.kind,
            "name": self.name,
            "version": self.version,
            "size": self.size,
            "sha256": self.sha256,
            "for": list(self.places),
            "from": self.source,
            "signed_by": list(self.signed_by),
            "verified": self.verified,
        }

    def describe(self) -> str:
        """Return a description in one line."""
        return f"{self.kind} {self.name} {self.version}".rstrip() + (
            f" ({', '.join(self.places)})" if self.places else ""
        )


@dataclass(frozen=True)
class Manifest:
    """The contents of a bundle. ``needs`` are the needs of the hosts, ``wheelhouses`` the digests of the requirement lists by Python."""

    items: tuple[Item, ...]
    needs: tuple[Mapping[str, Any], ...] = ()
    wheelhouses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    collection: str = ""

    def to_text(self) -> str:
        """Return the text of the manifest. Equal contents yield equal texts."""
        content = {
            "format": FORMAT,
            "collection": self.collection,
            "wheelhouses": {key: list(each) for key, each in sorted(self.wheelhouses.items())},
            "items": [item.to_dict() for item in sorted(self.items, key=lambda each: each.path)],
            "needs": list(self.needs),
        }
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def of(self, kind: str, place: str = "") -> tuple[Item, ...]:
        """Return the items of a kind, optionally only those for one place."""
        return tuple(item for item in self.items if item.kind == kind and (not place or place in item.places))

    def versions(self, platform: str) -> dict[str, tuple[str, ...]]:
        """Return the versions of each package for a platform, in the order of the items."""
        found: dict[str, dict[str, None]] = {}
        for item in self.of(PACKAGE, platform):
            found.setdefault(item.name, {})[item.version] = None
        return {name: tuple(versions) for name, versions in found.items()}


def digest_of_text(text: str) -> str:
    """Return the SHA-256 digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read(text: str, where: str) -> Manifest:
    """Return the manifest in a text. Raises BundleError with the invalid value.

    The text is untrusted: every value that becomes a path, a name, or an argument must match a pattern.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or "format" not in content:
            raise ValueError("it has no format")
        if content["format"] != FORMAT:
            raise ValueError(f"it has the format {content['format']!r}, and this collection reads {FORMAT}")
        wheelhouses = {
            _matching(key, _PLACE, "key of wheelhouses"): tuple(
                _matching(digest, _DIGEST, f"SHA-256 digest of the wheelhouse {key}") for digest in _list(each, key)
            )
            for key, each in content["wheelhouses"].items()
        }
        items = tuple(_item(each, wheelhouses) for each in _list(content["items"], "items"))
        _check_paths([item.path for item in items])
        needs = tuple(dict(need) for need in _list(content["needs"], "needs"))
        return Manifest(items, needs, wheelhouses, _matching(content["collection"], _LINE, "collection"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(
            f"The manifest of {where} cannot be read: {reason[:_SHOWN]}",
            hint="Nothing was written. Make the bundle again with this version of the collection.",
            code="manifest",
        ) from error


def _check_paths(paths: Sequence[str]) -> None:
    """Raise ValueError for a path that is listed twice, or that is also the directory of another one."""
    seen = set(paths)
    if len(seen) != len(paths):
        raise ValueError(f"it names {next(path for path in paths if paths.count(path) > 1)} twice")
    for path in paths:
        parts = path.split("/")
        parents = {"/".join(parts[:size]) for size in range(1, len(parts))}
        if parents & seen:
            raise ValueError(f"{min(parents & seen)} is a file and the directory of {path}")


def _item(content: Mapping[str, Any], wheelhouses: Mapping[str, Any]) -> Item:
    path, kind, size = content["path"], content["kind"], content["size"]
    if kind not in KINDS:
        raise ValueError(f"{str(path)[:_SHOWN]} is of the kind {kind!r}, expected one of {', '.join(KINDS)}")
    places = tuple(_matching(each, _PLACE, f"entry of for of {path}") for each in _list(content["for"], "for"))
    if not isinstance(path, str) or not _PATHS[kind].fullmatch(path):
        raise ValueError(f"{path!r} is not a path for the kind {kind}, expected {_PATHS[kind].pattern}")
    if kind in (PACKAGE, INDEX) and places != (path.split("/")[1],):
        raise ValueError(f"{path} is for {places!r}, expected only the platform in its path")
    if kind == WHEEL and not set(places) <= set(wheelhouses):
        raise ValueError(f"{path} is for {places!r}, expected keys of wheelhouses ({', '.join(wheelhouses)})")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < _MAX_SIZE:
        raise ValueError(f"{path} has the size {size!r}, expected a number of bytes below {_MAX_SIZE}")
    return Item(
        path=path,
        kind=kind,
        name=_matching(content["name"], _WORD, f"name of {path}"),
        version=_matching(content["version"], _VERSION, f"version of {path}"),
        size=size,
        sha256=_matching(content["sha256"], _DIGEST, f"SHA-256 digest of {path}"),
        places=places,
        source=_matching(content["from"], _LINE, f"from of {path}"),
        signed_by=tuple(_matching(each, _SIGNER, f"signed_by of {path}") for each in _list(content["signed_by"], path)),
        verified=_matching(content["verified"], _LINE, f"verified of {path}"),
    )


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{what} has a {type(value).__name__}, expected a list")
    return value


def _matching(value: Any, pattern: re.Pattern[str], what: str) -> str:
    """Return a string that matches a pattern. Raises ValueError with the value and the pattern."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r} is not valid as {what}, expected {pattern.pattern}")
    return value


@dataclass(frozen=True)
class Found:
    """The actual size (bytes) and digest of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Differences:
    """The differences between files and a manifest, by path."""

    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.changed or self.unexpected)

    def refuse(self, where: str) -> None:
        """Raise BundleError with the names of the files if there are differences."""
        words = [
            f"{what}: {_some(names)}"
            for what, names in (
                ("missing", self.missing),
                ("changed", self.changed),
                ("not in the manifest", self.unexpected),
            )
            if names
        ]
        if words:
            raise BundleError(
                f"The files of {where} differ from its manifest: {'; '.join(words)}",
                hint="None of its files was used. Copy the archive again, and compare its SHA-256 digest on both sides.",
                code="bundle-differs",
            )


def compare(manifest: Manifest, found: Mapping[str, Found]) -> Differences:
    """Compare files, by path, with a manifest. The file of the manifest itself is not included."""
    wanted = {item.path: Found(item.size, item.sha256) for item in manifest.items}
    return Differences(
        missing=tuple(sorted(set(wanted) - set(found))),
        changed=tuple(sorted(path for path in set(wanted) & set(found) if wanted[path] != found[path])),
        unexpected=tuple(sorted(set(found) - set(wanted))),
    )


def check_pin(text: str, expected: str, where: str, *, is_required: bool = True) -> None:
    """Compare a manifest with its pinned SHA-256 digest. Raises BundleError if they differ, or if a required digest is missing."""
    wanted = expected.strip().lower()
    wanted = wanted.removeprefix("sha256:")
    found = digest_of_text(text)
    if not wanted and is_required:
        raise BundleError(
            f"No checksum for {where}: a bundle is not signed, so only its checksum shows that it is the original one",
            hint="Set accelerator_offline_checksum to the digest that the playbook bundle printed. To use this bundle without a checksum, set "
            "accelerator_offline_allow_unpinned: true (of the module: checksum, allow_unpinned).",
            code="bundle-pin",
        )
    if wanted and found != wanted:
        raise BundleError(
            f"The manifest of {where} has the SHA-256 digest {found}, expected {wanted[:_SHOWN]}",
            hint="Nothing was written. This is not the bundle that the digest was recorded for.",
            code="bundle-pin",
        )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def listed(items: Iterable[Item]) -> str:
    """Return items as lines, for a diff."""
    return "".join(f"{item.describe()} {item.sha256[:12]}\n" for item in sorted(items, key=lambda each: each.path))
