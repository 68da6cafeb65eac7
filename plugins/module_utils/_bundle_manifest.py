# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The manifest of a bundle: what is in it, which version, from where, and by whom it was signed; and its check. No side effects."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .core.errors import AcceleratorError

FORMAT = 1
#: The manifest's own name, of the archive's first member.
NAME = "manifest.json"
PACKAGE, INDEX, WHEEL, IMAGE, FILE = "package", "index", "wheel", "image", "file"
KINDS = (PACKAGE, INDEX, WHEEL, IMAGE, FILE)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+~%:=@-]*(/[A-Za-z0-9][A-Za-z0-9._+~%:=@-]*)*")
#: How many names an error gives before it only counts.
_NAMED = 12


class BundleError(AcceleratorError):
    """A bundle cannot be made, or cannot be used."""

    default_code = "bundle"


@dataclass(frozen=True)
class Item:
    """One file of a bundle.

    ``places`` are the platforms that a package is for, or the Pythons of a wheel. ``source`` is the address or the path that it came from.
    ``signed_by`` are fingerprints of the keys that vouch for it, ``verified`` says in words what was checked.
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
        """Return the item as the manifest has it."""
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
        """Say in a line what it is."""
        return f"{self.kind} {self.name} {self.version}".rstrip() + (
            f" ({', '.join(self.places)})" if self.places else ""
        )


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds. ``needs`` is what it was gathered for, ``wheelhouses`` by Python the digest of the requirements."""

    items: tuple[Item, ...]
    needs: tuple[Mapping[str, Any], ...] = ()
    wheelhouses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    collection: str = ""

    def to_text(self) -> str:
        """Return the manifest as it is written: the same content is the same text."""
        content = {
            "format": FORMAT,
            "collection": self.collection,
            "wheelhouses": {key: list(each) for key, each in sorted(self.wheelhouses.items())},
            "items": [item.to_dict() for item in sorted(self.items, key=lambda each: each.path)],
            "needs": list(self.needs),
        }
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def of(self, kind: str, place: str = "") -> tuple[Item, ...]:
        """Return the items of a kind, and for one place where that is given."""
        return tuple(item for item in self.items if item.kind == kind and (not place or place in item.places))

    def versions(self, platform: str) -> dict[str, tuple[str, ...]]:
        """Return the versions of each package for a platform, the first gathered first."""
        found: dict[str, dict[str, None]] = {}
        for item in self.of(PACKAGE, platform):
            found.setdefault(item.name, {})[item.version] = None
        return {name: tuple(versions) for name, versions in found.items()}


def digest_of_text(text: str) -> str:
    """Return the SHA-256 digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read(text: str, where: str) -> Manifest:
    """Read a manifest. Raises BundleError, naming what it cannot be."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or "format" not in content:
            raise ValueError("it has no format")
        if content["format"] != FORMAT:
            raise ValueError(f"it has the format {content['format']!r}, and this collection reads {FORMAT}")
        items = tuple(_item(each) for each in content["items"])
        paths = [item.path for item in items]
        twice = sorted({path for path in paths if paths.count(path) > 1}) if len(set(paths)) != len(paths) else []
        if twice:
            raise ValueError(f"it names {twice[0]} twice")
        wheelhouses = {str(key): tuple(map(str, each)) for key, each in content["wheelhouses"].items()}
        return Manifest(items, tuple(dict(need) for need in content["needs"]), wheelhouses, str(content["collection"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(
            f"The manifest of {where} cannot be read: {reason}",
            hint="Make the bundle once more, with this version of the collection.",
            code="manifest",
        ) from error


def _item(content: Mapping[str, Any]) -> Item:
    path, kind, sha256 = content["path"], content["kind"], content["sha256"]
    if not isinstance(path, str) or not _PATH.fullmatch(path) or path == NAME:
        raise ValueError(f"the path {path!r} is none of a bundle")
    if kind not in KINDS:
        raise ValueError(f"{path} is of the kind {kind!r}, expected one of {', '.join(KINDS)}")
    if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
        raise ValueError(f"{path} has no SHA-256 digest")
    return Item(
        path=path,
        kind=kind,
        name=str(content["name"]),
        version=str(content["version"]),
        size=int(content["size"]),
        sha256=sha256,
        places=tuple(map(str, content["for"])),
        source=str(content["from"]),
        signed_by=tuple(map(str, content["signed_by"])),
        verified=str(content["verified"]),
    )


@dataclass(frozen=True)
class Found:
    """A file as it is: its size in bytes, and its digest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Differences:
    """How files differ from a manifest, by their paths."""

    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.changed or self.unexpected)

    def refuse(self, where: str) -> None:
        """Refuse what differs. Raises BundleError, naming the files."""
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
                f"{where} is not what its manifest says; {'; '.join(words)}",
                hint="Nothing of it was used. Carry the archive over once more, and compare its SHA-256 digest on both sides.",
                code="bundle-differs",
            )


def compare(manifest: Manifest, found: Mapping[str, Found]) -> Differences:
    """Compare files, by their paths, with a manifest; the manifest's own file is none of them."""
    wanted = {item.path: Found(item.size, item.sha256) for item in manifest.items}
    return Differences(
        missing=tuple(sorted(set(wanted) - set(found))),
        changed=tuple(sorted(path for path in set(wanted) & set(found) if wanted[path] != found[path])),
        unexpected=tuple(sorted(set(found) - set(wanted))),
    )


def check_pin(text: str, expected: str, where: str) -> None:
    """See that a manifest has the digest that was pinned; an empty one is not compared. Raises BundleError."""
    wanted = expected.replace("sha256:", "").strip().lower()
    found = digest_of_text(text)
    if wanted and found != wanted:
        raise BundleError(
            f"The manifest of {where} has the SHA-256 digest {found}, expected {wanted}",
            hint="Nothing of it was used. It is another bundle than the one that the digest was written down of.",
            code="bundle-pin",
        )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def listed(items: Iterable[Item]) -> str:
    """Return items as lines, for a diff."""
    return "".join(f"{item.describe()} {item.sha256[:12]}\n" for item in sorted(items, key=lambda each: each.path))
