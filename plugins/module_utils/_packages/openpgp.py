# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Check OpenPGP keys of package repositories (RFC 9580) against pinned fingerprints, and write them again from the checked packets.

This module runs no program, so neither gpg nor sqv must be installed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

from ..core.errors import AcceleratorError

_KEY_BEGIN, _KEY_END = "-----BEGIN PGP PUBLIC KEY BLOCK-----", "-----END PGP PUBLIC KEY BLOCK-----"
_SIGNATURE_BEGIN, _SIGNATURE_END = "-----BEGIN PGP SIGNATURE-----", "-----END PGP SIGNATURE-----"
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}:( [ -~]*)?")
_BODY = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_CHECKSUM = re.compile(r"=[A-Za-z0-9+/]{4}")
_FINGERPRINT = re.compile(r"[0-9A-F]{40}|[0-9A-F]{64}")
_SIGNATURE, _PUBLIC_KEY, _USER_ID, _SUBKEY, _USER_ATTRIBUTE = 2, 6, 13, 14, 17
_KEY_PACKETS = {_SIGNATURE, _PUBLIC_KEY, _USER_ID, _SUBKEY, _USER_ATTRIBUTE}
_ISSUER, _ISSUER_FINGERPRINT = 16, 33
#: Real keys have less than 100 KiB. The largest body of a version 4 key packet is 65,535 bytes.
_MAX_TEXT, _MAX_KEY_PACKET = 1 << 20, 0xFFFF
_READ_ERRORS = (binascii.Error, IndexError, ValueError)


class KeyProblem(AcceleratorError):
    """A file contains no OpenPGP key, an invalid key, or a key that is not pinned."""

    default_code = "repository-key"


def checked_key(text: str, expected: Sequence[str], source: str) -> str:
    """Return a repository's key in ASCII armor, with pinned key packets only.

    The result is encoded again from the packets that were checked, so it contains no key that this function has not checked.
    It has the primary keys, their user IDs and signatures, and the subkeys whose fingerprints are in ``expected`` too. Package managers
    differ in how they verify a subkey's binding signature, so other subkeys are left out.

    :param text: one block in ASCII armor, with nothing but blank lines around it.
    :param expected: the pinned fingerprints, with or without spaces, in either case.
    :param source: the repository's address, for error messages.
    :raises KeyProblem: for a malformed text, a primary key that is not pinned, or a packet that is not part of a key.
    """
    pinned = {each.replace(" ", "").upper() for each in expected}
    packets = _key_packets(text)
    others = [each for each in _primary_fingerprints(packets) if each not in pinned]
    if others:
        valid = sorted(each for each in pinned if _FINGERPRINT.fullmatch(each))
        raise KeyProblem(
            f"The key of {source} has the fingerprint {', '.join(others)}, expected {' or '.join(valid) or 'a pinned fingerprint'}",
            hint="Nothing was changed. Ask the vendor before you pin another fingerprint.",
        )
    return _armor(_pinned_packets(packets, pinned))


def fingerprints(text: str) -> tuple[str, ...]:
    """Return the fingerprints of the primary keys in ASCII armor, in capital letters. Raises KeyProblem for a malformed text."""
    return tuple(_primary_fingerprints(_key_packets(text)))


def signers(text: str) -> tuple[str, ...]:
    """Return the issuers in the last signature block of a signed text: fingerprints, or key IDs in older signatures.

    This function does not verify the signature. apt verifies it. Raises KeyProblem for a block that cannot be read.
    """
    lines = _lines(text)
    if _SIGNATURE_BEGIN not in lines:
        return ()
    start = len(lines) - 1 - lines[::-1].index(_SIGNATURE_BEGIN)
    try:
        data = _unarmor(lines[start:], _SIGNATURE_BEGIN, _SIGNATURE_END)
        return tuple(dict.fromkeys(_issuer(body) for tag, body in _packets(data) if tag == _SIGNATURE))
    except _READ_ERRORS as error:
        raise KeyProblem(f"Cannot read a signature: {error}", hint="Fetch the signed file again.") from error


# Keys


def _key_packets(text: str) -> list[tuple[int, bytes]]:
    """Return the packets of one armored block. Raises KeyProblem."""
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError(f"it has {len(text)} characters, expected at most {_MAX_TEXT}")
        packets = list(_packets(_unarmor(_lines(text), _KEY_BEGIN, _KEY_END)))
        strange = sorted({tag for tag, _body in packets} - _KEY_PACKETS)
        if strange:
            raise ValueError(
                f"it has packets of type {', '.join(map(str, strange))}, which are not part of a public key"
            )
        if not packets or packets[0][0] != _PUBLIC_KEY:
            raise ValueError("its first packet is not a public key")
        for tag, body in packets:
            if tag in (_PUBLIC_KEY, _SUBKEY):
                _fingerprint(body)
    except _READ_ERRORS as error:
        raise KeyProblem(
            f"Cannot read the repository's key: {error}",
            hint=f"Expected a file with one block, from {_KEY_BEGIN} to {_KEY_END}, and nothing else. "
            "`gpg --export --armor FINGERPRINT` writes such a file.",
        ) from error
    return packets


def _primary_fingerprints(packets: Iterable[tuple[int, bytes]]) -> list[str]:
    return [_fingerprint(body) for tag, body in packets if tag == _PUBLIC_KEY]


def _pinned_packets(packets: Iterable[tuple[int, bytes]], pinned: set[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the packets to write: a subkey that is not pinned is left out together with its signatures."""
    is_kept = True
    for tag, body in packets:
        if tag != _SIGNATURE:
            is_kept = tag != _SUBKEY or _fingerprint(body) in pinned
        if is_kept:
            yield tag, body


def _fingerprint(body: bytes) -> str:
    version = body[0]
    if len(body) > _MAX_KEY_PACKET:
        raise ValueError(f"a key packet has {len(body)} bytes, expected at most {_MAX_KEY_PACKET}")
    if version == 4:
        # RFC 9580 defines this fingerprint with SHA-1. Verification of signatures does not depend on it.
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    if version == 6:
        return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    raise ValueError(f"a key has version {version}, expected 4 or 6")


# ASCII armor


def _lines(text: str) -> list[str]:
    # Not splitlines(): it also splits at characters that other readers take for part of a line.
    return [line.removesuffix("\r") for line in text.split("\n")]


def _unarmor(lines: Sequence[str], begin: str, end: str) -> bytes:
    """Return the data of one armored block. Only empty lines may surround it. Raises ValueError, binascii.Error."""
    filled = [at for at, line in enumerate(lines) if line]
    if not filled or lines[filled[0]] != begin:
        raise ValueError(f"its first line is not {begin}")
    if lines[filled[-1]] != end:
        raise ValueError(f"its last line is not {end}")
    inner = lines[filled[0] + 1 : filled[-1]]
    headers = next((at for at, line in enumerate(inner) if not _HEADER.fullmatch(line)), len(inner))
    if headers == len(inner) or inner[headers]:
        raise ValueError(f"expected headers such as `Comment: text` and then an empty line below {begin}")
    block = list(inner[headers + 1 :])
    checksum = block.pop()[1:] if block and _CHECKSUM.fullmatch(block[-1]) else ""
    odd = next((line for line in block if not _BODY.fullmatch(line)), None)
    if odd is not None:
        raise ValueError(f"{odd[:80]!r} is not a line of base64")
    data = base64.b64decode("".join(block), validate=True)
    if checksum and checksum != _crc24(data):
        raise ValueError(f"the checksum is ={_crc24(data)}, expected ={checksum}")
    return data


def _armor(packets: Iterable[tuple[int, bytes]]) -> str:
    data = b"".join(_header(tag, len(body)) + body for tag, body in packets)
    body = base64.b64encode(data).decode("ascii")
    lines = [_KEY_BEGIN, "", *(body[at : at + 64] for at in range(0, len(body), 64)), f"={_crc24(data)}", _KEY_END]
    return "".join(f"{line}\n" for line in lines)


def _crc24(data: bytes) -> str:
    """Return the checksum of ASCII armor in base64. rpm before 4.18 rejects armor without one."""
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _bit in range(8):
            crc = (crc << 1) ^ (0x1864CFB if crc & 0x800000 else 0)
    return base64.b64encode(crc.to_bytes(3, "big")).decode("ascii")


# Packets


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        head = data[at]
        if not head & 0x80:
            raise ValueError(f"no packet starts at byte {at}")
        if head & 0x40:
            tag, at, size = head & 0x3F, *_size(data, at + 1)
        else:
            tag, width = (head >> 2) & 0x0F, (1, 2, 4, 0)[head & 3]
            if not width:
                raise ValueError("a packet has no length")
            at += 1
            size = int.from_bytes(data[at : at + width], "big")
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
    raise ValueError("a packet has a partial length, which keys and signatures never have")


def _header(tag: int, size: int) -> bytes:
    """Return a packet header: the old format where the tag fits, which every version of rpm and gpg reads."""
    if tag > 15:
        return bytes((0xC0 | tag, 255)) + size.to_bytes(4, "big")
    width = 4 if size > 0xFFFF else 2
    return bytes((0x80 | tag << 2 | width // 2,)) + size.to_bytes(width, "big")


# Signatures


def _issuer(body: bytes) -> str:
    version = body[0]
    if version not in (4, 6):
        raise ValueError(f"a signature has version {version}, expected 4 or 6")
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
        raise ValueError("it contains no issuer")
    return found


def _subpackets(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        at, size = _size(data, at)
        yield data[at] & 0x7F, data[at + 1 : at + size]
        at += size
