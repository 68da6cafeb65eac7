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
_SIGNATURES = re.compile(
    r"-----BEGIN PGP SIGNATURE-----\r?\n(?:[^\r\n:]+: ?[^\r\n]*\r?\n)*\r?\n(?P<body>.*?)-----END PGP SIGNATURE-----",
    re.DOTALL,
)
_SIGNATURE, _PUBLIC_KEY = 2, 6
_ISSUER, _ISSUER_FINGERPRINT = 16, 33


class KeyProblem(AcceleratorError):
    """A file holds no key, or others than it should."""

    default_code = "repository-key"


def fingerprints(text: str) -> tuple[str, ...]:
    """Return the fingerprints of the primary keys in ASCII armour, in capital letters. Raises KeyProblem for what holds none."""
    found = []
    for block in _ARMOUR.finditer(text):
        try:
            found += [_fingerprint(body) for tag, body in _packets(_decoded(block["body"])) if tag == _PUBLIC_KEY]
        except (binascii.Error, IndexError, ValueError) as error:
            raise KeyProblem(f"The repository's key cannot be read: {error}", hint="Fetch it once more.") from error
    if not found:
        raise KeyProblem(
            "What was given as the repository's key holds no OpenPGP key in ASCII armour",
            hint="It begins with BEGIN PGP PUBLIC KEY BLOCK. A binary one becomes that by `gpg --enarmor`.",
        )
    return tuple(found)


def signers(text: str) -> tuple[str, ...]:
    """Return whose keys the signatures of a signed text say they are by: fingerprints, or the ids of keys in older ones.

    Nothing is verified here: that is apt's work. Raises KeyProblem for signatures that cannot be read.
    """
    found: dict[str, None] = {}
    for block in _SIGNATURES.finditer(text):
        try:
            for tag, body in _packets(_decoded(block["body"])):
                if tag == _SIGNATURE:
                    found[_issuer(body)] = None
        except (binascii.Error, IndexError, ValueError) as error:
            raise KeyProblem(f"A signature cannot be read: {error}", hint="Fetch what it signs once more.") from error
    return tuple(found)


def _decoded(body: str) -> bytes:
    # The checksum stands on a line of its own, after an equals sign.
    return base64.b64decode("".join(line for line in body.split() if not line.startswith("=")), validate=True)


def _issuer(body: bytes) -> str:
    version = body[0]
    if version not in (4, 6):
        raise ValueError(f"a signature of version {version}, expected 4 or 6")
    width, at, found = (2, 4)[version == 6], 4, ""
    for _part in ("hashed", "not hashed"):
        size = int.from_bytes(body[at : at + width], "big")
        at += width
        for kind, content in _subpackets(body[at : at + size]):
            if kind == _ISSUER_FINGERPRINT:
                return content[1:].hex().upper()
            found = content.hex().upper() if kind == _ISSUER else found
        at += size
    if not found:
        raise ValueError("it does not say by which key")
    return found


def _subpackets(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        at, size = _size(data, at)
        yield data[at] & 0x7F, data[at + 1 : at + size]
        at += size


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
