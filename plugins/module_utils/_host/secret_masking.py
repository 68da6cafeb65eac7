# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Find tokens, private keys, and passwords in texts, and mask them. No side effects.

Every pattern has a bounded length, so that the time grows linearly with the text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

MASK = "********"
#: Ansible masks each occurrence of a value in a result: shorter values would mask ordinary words.
SHORTEST = 8

#: Keys whose value is a secret, in kubeconfig files, container runtimes' files, pip.conf, and netrc-like files.
_KEYS = (
    r"token|password|passwd|auth|secret|identity_?token|(?:access|id|refresh|bearer)[-_]?token|client-key-data|"
    r"client[-_]secret|(?:api|secret|private)[-_]?key"
)
_PATTERNS = (
    # JSON Web Token
    re.compile(r"(?P<value>eyJ[A-Za-z0-9_-]{5,4000}\.[A-Za-z0-9_-]{5,8000}(?:\.[A-Za-z0-9_-]{0,4000})?)"),
    # Private key in PEM, plain or inside a JSON string
    re.compile(
        r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?P<value>(?:(?!-----).){1,20000})-----END [A-Z ]{0,30}PRIVATE KEY-----",
        re.DOTALL,
    ),
    re.compile(r"(?i)\bbearer (?P<value>[A-Za-z0-9._~+/=-]{8,8000})"),
    # Password in a URL
    re.compile(r"://[^/\s:@\"']{0,200}:(?P<value>[^/\s@\"']{1,2000})@"),
    # key: value, key = "value", "key": "value"
    re.compile(
        rf"(?i)(?<![\w.-])(?:{_KEYS})[\"']?[ \t]{{0,9}}[:=][ \t]{{0,9}}"
        r"(?:\"(?P<value>(?:[^\"\\\n]|\\.){1,8000})\"|'(?P<single>[^'\n]{1,8000})'|(?P<bare>[^\s,}\]\"'\[{]{1,8000}))"
    ),
)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in the text."""
    for pattern in _PATTERNS:
        for found in pattern.finditer(text):
            for name, value in found.groupdict().items():
                if value is not None:
                    yield found.span(name)
                    break


def find_secrets(text: str) -> frozenset[str]:
    """Return the tokens, private keys, and passwords in a text, without values that are shorter than SHORTEST."""
    return frozenset(text[start:end] for start, end in _spans(text) if end - start >= SHORTEST)


def mask_secrets(text: str) -> str:
    """Return the text with each token, private key, and password replaced by MASK."""
    parts: list[str] = []
    position = 0
    for start, end in sorted(_spans(text)):
        if end <= position:
            continue
        parts += [text[position : max(start, position)], MASK if start >= position else ""]
        position = end
    return "".join([*parts, text[position:]])


def contains_any(text: str, secrets: Iterable[str]) -> bool:
    """Return whether a text contains one of the secrets."""
    return any(secret in text for secret in secrets if secret)


def changed_lines(path: str, before: str | None, after: str | None) -> str:
    """Return the changed lines of a file as a unified diff without context, with secrets masked.

    The context lines are not from this collection, and can have a registry's password in a form that no pattern finds.
    ``before`` or ``after`` is None if the file does not exist.
    """
    old, new = (None if text is None else mask_secrets(text).splitlines() for text in (before, after))
    old_name, new_name = ("/dev/null" if text is None else path for text in (before, after))
    lines = list(difflib.unified_diff(old or [], new or [], old_name, new_name, lineterm="", n=0))
    if not lines and before != after:
        lines = [f"--- {path}", f"+++ {path}", "(secret values change)"]
    return "".join(f"{line}\n" for line in lines)
