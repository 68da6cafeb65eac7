# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Which OpenPGP keys a file holds, told by their fingerprints (RFC 9580). No program is run, because none may be there yet."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Sequence

from .core.errors import AcceleratorError

_ARMOUR = re.compile(
    r"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?:[^\r\n:]+: ?[^\r\n]*\r?\n)*\r?\n(?P<body>.*?)-----END PGP PUBLIC KEY BLOCK-----",
    re.DOTALL,
)
_PUBLIC_KEY = 6


class KeyProblem(AcceleratorError):
    """A file holds no key, or others than it should."""

    default_code = "repository-key"


def fingerprints(text: str) -> tuple[str, ...]:
    """Return the fingerprints of the primary keys in ASCII armour, in capital letters. Raises KeyProblem for what holds none."""
    found = []
    for block in _ARMOUR.finditer(text):
        # The checksum stands on a line of its own, after an equals sign.
        lines = [line for line in block["body"].split() if not line.startswith("=")]
        try:
            data = base64.b64decode("".join(lines), validate=True)
            found += [_fingerprint(body) for tag, body in _packets(data) if tag == _PUBLIC_KEY]
        except (binascii.Error, IndexError, ValueError) as error:
            raise KeyProblem(f"The repository's key cannot be read: {error}", hint="Fetch it once more.") from error
    if not found:
        raise KeyProblem(
            "What was given as the repository's key holds no OpenPGP key in ASCII armour",
            hint="It begins with BEGIN PGP PUBLIC KEY BLOCK. A binary one becomes that by `gpg --enarmor`.",
        )
    return tuple(found)


def check(text: str, expected: Sequence[str], what: str) -> None:
    """See that a file holds keys with the expected fingerprints and no others. Raises KeyProblem, naming those that it holds."""
    wanted = {each.replace(" ", "").upper() for each in expected}
    found = fingerprints(text)
    others = [each for each in found if each not in wanted]
    if others:
        raise KeyProblem(
            f"The key of {what} has the fingerprint {', '.join(others)}, expected {' or '.join(sorted(wanted)) or 'one that is pinned'}",
            hint="Nothing was changed. Ask the vendor before you pin another one.",
        )


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        head = data[at]
        if not head & 0x80:
            raise ValueError(f"no packet begins at byte {at}")
        if head & 0x40:
            tag, at, size = head & 0x3F, *_size(data, at + 1)
        else:
            tag, width = (head >> 2) & 0x0F, (1, 2, 4, 0)[head & 3]
            at += 1
            size = int.from_bytes(data[at : at + width], "big") if width else len(data) - at
            at += width
        if at + size > len(data):
            raise ValueError("it ends in the middle of a packet")
        yield tag, data[at : at + size]
        at += size


def _size(data: bytes, at: int) -> tuple[int, int]:
    first = data[at]
    if first < 192:
        return at + 1, first
    if first < 224:
        return at + 2, ((first - 192) << 8) + data[at + 1] + 192
    if first == 255:
        return at + 5, int.from_bytes(data[at + 1 : at + 5], "big")
    raise ValueError("a packet comes in parts, which no key does")


def _fingerprint(body: bytes) -> str:
    version = body[0]
    if version == 4:
        # What a fingerprint of this version is; apt's own check of the signatures does not lean on it.
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    if version == 6:
        return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    raise ValueError(f"a key of version {version}, expected 4 or 6")
