# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keys of package repositories: only pinned keys reach a file that a package manager trusts, whatever else the key file contains."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._packages.argspec import read_source
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import Places
from ansible_collections.dra.accelerators.plugins.module_utils._packages.openpgp import (
    KeyProblem,
    checked_key,
    fingerprints,
    signers,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages"))

import nvidia

BEGIN = "-----BEGIN PGP PUBLIC KEY BLOCK-----"
FINISH = "-----END PGP PUBLIC KEY BLOCK-----"
HEAD, END = f"{BEGIN}\n\n", f"\n{FINISH}\n"
#: The sample keys of RFC 9580, A.1 and A.3. Of the second one, only the primary key.
FOURTH = f"{HEAD}xjMEU/NfCxYJKwYBBAHaRw8BAQdAPwmJlL3ZFu1AUxl5NOSofIBzOhKA1i+AEJku\nQ+47JAY={END}"
SIXTH = f"{HEAD}xioGY4d/4xsAAAAg+U2nu0jWCmHlZ3BqZYfQMxmZu52JGggkLq2EVD34laM={END}"
FOURTH_PRINT = "C959BDBAFA32A2F89A153B678CFDE12197965A9A"
SIXTH_PRINT = "CB186C4F0609A697E4D52DFA6C722B0C1F1E27C18A56708F6525EC27BAD9ACC9"
KEY, OTHER = (
    {"n": (1 << 2047) + step, "e": 65537, "d": 3, "made": 1700000000} for step in (12345, 98765)
)  # no primes: nothing here verifies a signature
GOOD, EVIL = nvidia.public_key(KEY), nvidia.public_key(OTHER)
GOOD_PRINT, EVIL_PRINT = (nvidia._fingerprint(key).hex().upper() for key in (KEY, OTHER))


def data(text: str) -> bytes:
    """Return the packets of an armored key."""
    lines = text.splitlines()
    body = lines[lines.index("") + 1 : lines.index(FINISH)]
    return base64.b64decode("".join(line for line in body if not line.startswith("=")))


def armor(packets: bytes) -> str:
    """Return packets as a key file."""
    return f"{HEAD}{base64.encodebytes(packets).decode().strip()}{END}"


def packet(tag: int, body: bytes) -> bytes:
    """Return a packet with a length field of five bytes."""
    return bytes((0xC0 | tag, 255)) + len(body).to_bytes(4, "big") + body


SUBKEY = packet(14, nvidia._public(OTHER)) + nvidia._signature(KEY, 0x18, b"binding")
MALFORMED = {
    "blank after the BEGIN line": EVIL.replace(BEGIN, f"{BEGIN} ") + GOOD,
    "tab after the BEGIN line": EVIL.replace(BEGIN, f"{BEGIN}\t") + GOOD,
    "blank before the BEGIN line": f" {EVIL}{GOOD}",
    "blank after the END line": GOOD + EVIL.replace(FINISH, f"{FINISH} "),
    "blank in the empty line": EVIL.replace(f"{BEGIN}\n\n", f"{BEGIN}\n \n") + GOOD,
    "no empty line": EVIL.replace(f"{BEGIN}\n\n", f"{BEGIN}\n") + GOOD,
    "header without a colon": EVIL.replace(f"{BEGIN}\n\n", f"{BEGIN}\nComment\n\n") + GOOD,
    "header without a blank": EVIL.replace(f"{BEGIN}\n\n", f"{BEGIN}\nComment:x\n\n") + GOOD,
    "one dash less": EVIL.replace(BEGIN, BEGIN[:-1]) + GOOD,
    "carriage returns alone": EVIL.replace("\n", "\r") + GOOD,
    "form feed": EVIL.replace(f"{BEGIN}\n\n", f"{BEGIN}\n\f\n") + GOOD,
    "message armor": EVIL.replace("PUBLIC KEY BLOCK", "MESSAGE") + GOOD,
    "private key armor": EVIL.replace("PUBLIC KEY BLOCK", "PRIVATE KEY BLOCK") + GOOD,
    "two pinned blocks": GOOD + GOOD,
    "second block": GOOD + EVIL,
    "block within a block": GOOD.replace(END, f"\n{EVIL}{FINISH}\n"),
    "text before": f"The key of the vendor:\n{GOOD}",
    "text after": f"{GOOD}The key of the vendor\n",
    "byte order mark": f"\ufeff{GOOD}",
    "binary key behind the block": GOOD + data(EVIL).decode("latin-1"),
    "key in a header": GOOD.replace(f"{BEGIN}\n\n", f"{BEGIN}\nComment: x\rComment: y\n\n"),
    "data behind the padding": f"{HEAD}{FOURTH.splitlines()[2]}\nQ+47JAY=\n{base64.b64encode(data(EVIL)).decode()}{END}",
    "wrong checksum": GOOD.replace(END, f"\n=AAAA{END}"),
    "no data": f"{HEAD}{END}",
    "not base64": GOOD.replace("\n\n", "\n\n!"),
    "not a packet": f"{HEAD}AAAA{END}",
    "cut short": armor(data(GOOD)[:-1]),
    "second key in the block": armor(data(GOOD) + data(EVIL)),
    "key without a length": armor(data(GOOD) + b"\x9b" + nvidia._public(OTHER)),
    "key in parts": armor(data(GOOD) + b"\xc6\xe1" + nvidia._public(OTHER)),
    "compressed data": armor(data(GOOD) + packet(8, b"\x00" + data(EVIL))),
    "literal data": armor(data(GOOD) + packet(11, b"b\x00\x00\x00\x00\x00" + data(EVIL))),
    "secret key": armor(data(GOOD) + packet(5, nvidia._public(OTHER))),
    "subkey first": armor(SUBKEY + data(GOOD)),
    "key of version 3": armor(data(GOOD) + packet(6, b"\x03" + nvidia._public(OTHER)[1:])),
    "huge key": armor(data(GOOD) + packet(6, nvidia._public(OTHER).ljust(70_000, b"x"))),
    "endless": GOOD + "\n" * 2_000_000,
    "no key": "not a key",
    "nothing": "",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_armor_is_rejected(text: str) -> None:
    with pytest.raises(KeyProblem) as caught:
        checked_key(text, [GOOD_PRINT, FOURTH_PRINT], "https://vendor")
    assert caught.value.code == "repository-key" and caught.value.hint


@pytest.mark.parametrize(("text", "expected"), [(GOOD, ["0" * 40]), (GOOD, []), (GOOD, [GOOD_PRINT[-16:]])])
def test_key_not_pinned_is_rejected(text: str, expected: list[str]) -> None:
    with pytest.raises(KeyProblem, match=f"the fingerprint {GOOD_PRINT}, expected"):
        checked_key(text, expected, "https://vendor")


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.replace("\n", "\r\n"),
        f"\n\n{GOOD}\n\n",
        GOOD.replace(f"{BEGIN}\n", f"{BEGIN}\nVersion: GnuPG v1.4.5 (GNU/Linux)\nComment: \n"),
        armor(data(GOOD)),
        armor(data(GOOD) + SUBKEY),
    ],
    ids=["plain", "crlf", "empty-lines", "headers", "no-checksum", "subkey"],
)
def test_pinned_key_is_written_the_same_way(text: str) -> None:
    written = checked_key(text, [GOOD_PRINT.lower()], "https://vendor")
    assert written == checked_key(GOOD, [GOOD_PRINT], "https://vendor") == checked_key(written, [GOOD_PRINT], "again")
    assert fingerprints(written) == (GOOD_PRINT,) and nvidia._public(OTHER) not in data(written)


def test_pinned_subkey_keeps_its_signature() -> None:
    written = checked_key(armor(data(GOOD) + SUBKEY), [GOOD_PRINT, EVIL_PRINT], "https://vendor")
    assert data(written).count(nvidia._public(OTHER)) == 1 and fingerprints(written) == (GOOD_PRINT,)
    assert len(data(written)) > len(data(GOOD)) + len(nvidia._public(OTHER)) + 200


def test_fingerprints_of_rfc_9580_samples_match() -> None:
    assert fingerprints(FOURTH) == (FOURTH_PRINT,)
    assert fingerprints(SIXTH) == (SIXTH_PRINT,)
    spaced = "c959 bdba fa32 a2f8 9a15  3b67 8cfd e121 9796 5a9a"
    assert fingerprints(checked_key(armor(data(FOURTH) + data(SIXTH)), [spaced, SIXTH_PRINT], "x")) == (
        FOURTH_PRINT,
        SIXTH_PRINT,
    )


def test_gpg_lists_only_the_pinned_key_in_the_installed_file(tmp_path: Path) -> None:
    """gpg finds a second key in the given file: the module rejects that file. From a valid one it writes only the pinned key."""

    def shown(text: str) -> list[str]:
        path, home = tmp_path / "key.asc", tmp_path / "gpg"
        path.write_text(text)
        home.mkdir(mode=0o700, exist_ok=True)
        words = [
            "gpg",
            "--homedir",
            home,
            "--batch",
            "--show-keys",
            "--with-colons",
            "--with-subkey-fingerprints",
            path,
        ]
        # The exit status of gpg for a file with other content does not matter, only the listed keys.
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        found = [line.split(":")[9] for line in done.stdout.splitlines() if line.startswith("fpr:")]
        assert found, f"gpg returned {done.returncode}: {done.stderr}"
        return found

    def installed(text: str) -> str:
        given = {"uris": ["https://vendor"], "suites": ["/"], "components": [], "packages_signed": True}
        places = Places("/etc/apt/sources.list.d/x.sources", "/etc/apt/keyrings/x.asc")
        return read_source({**given, "key": text, "fingerprints": [GOOD_PRINT]}, places)[1]

    evil = MALFORMED["blank after the BEGIN line"]
    assert EVIL_PRINT in shown(evil)
    with pytest.raises(KeyProblem):
        installed(evil)
    assert shown(installed(armor(data(GOOD) + SUBKEY))) == [GOOD_PRINT]


def test_signers_reads_the_last_block_only() -> None:
    def block(fingerprint: str) -> str:
        hashed = bytes([22, 33, 4]) + bytes.fromhex(fingerprint)
        body = b"\x04\x01\x01\x08" + len(hashed).to_bytes(2, "big") + hashed + b"\0\0"
        return armor(packet(2, body)).replace("PUBLIC KEY BLOCK", "SIGNATURE")

    assert signers(f"signed text\n{block(EVIL_PRINT)}more text\n{block(GOOD_PRINT)}") == (GOOD_PRINT,)
    assert signers(f"signed text\n> {block(EVIL_PRINT)}") == ()
    with pytest.raises(KeyProblem, match="Cannot read a signature: its last line is not"):
        signers(f"{block(GOOD_PRINT)}text\n")
