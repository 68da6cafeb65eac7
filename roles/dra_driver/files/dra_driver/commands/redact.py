# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Remove secrets from text: known secrets, and text with the form of a secret.

This module has no side effects.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

MARK = "[redacted]"
# Replacing shorter secrets would remove ordinary text.
SHORTEST = 6
#: The longest PEM block, from the end of its first line to its last line, in characters.
_LONGEST_BLOCK = 20000
_BEGIN, _END = (re.compile(rf"-----{word} [A-Z0-9 ]{{1,40}}-----") for word in ("BEGIN", "END"))
_WEB_TOKEN_TEXT = re.compile(r"[A-Za-z0-9_.-]{12,}")
# Each pattern takes time in proportion to the length of the text, because no position starts a long rescan.
_PATTERNS = (
    # A PEM block without an end: the rest of its lines.
    re.compile(r"-----BEGIN [A-Z0-9 ]{1,40}-----(?:(?:\s|\\n){0,9}[A-Za-z0-9+/=]{16,80})*"),
    re.compile(r"LS0tLS1CRUdJTi[A-Za-z0-9+/=\s\\]{20,}"),  # PEM in base64
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(r"(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)"),  # credentials in a proxy URL
)
# A value after a name for secrets, in YAML, JSON, or environment variables.
_NAMED = re.compile(
    r"(?i)(?P<name>(?:token|password|passwd|secret|credential|api[_-]?key|client-key-data|client-certificate-data|private[_-]?key)"
    r"[\w.-]{0,40}[\"']?\s{0,9}[:=]\s{0,9})(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,}\]\"']+)"
)
# Names that match a pattern above but hold no secret.
_HARMLESS = re.compile(r"(?i)token_?(lifetime|expiry\w*|file)|secret_content")


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text without the given secrets, also in base64 form, and without text that has the form of a secret."""
    for secret in sorted({form for each in secrets for form in _forms(each)}, key=len, reverse=True):
        text = text.replace(secret, MARK)
    text = _WEB_TOKEN_TEXT.sub(_without_web_tokens, _without_blocks(text))
    for pattern in _PATTERNS:
        text = pattern.sub(MARK, text)
    return _NAMED.sub(_named, text)


def _without_blocks(text: str) -> str:
    """Replace PEM blocks in one pass over the text."""
    parts: list[str] = []
    done = 0
    end: re.Match[str] | None = None
    for begin in _BEGIN.finditer(text):
        if begin.start() < done:
            continue
        if end is None or end.start() < begin.end():
            end = _END.search(text, begin.end())
            if end is None:
                break
        if end.start() - begin.end() <= _LONGEST_BLOCK:
            parts += (text[done : begin.start()], MARK)
            done = end.end()
    return "".join((*parts, text[done:]))


def _without_web_tokens(found: re.Match[str]) -> str:
    """Replace JSON web tokens in a match: two or three parts, the first of which begins with eyJ."""
    parts = found[0].split(".")
    left: list[str] = []
    number = 0
    while number < len(parts):
        begin = parts[number].find("eyJ")
        if begin >= 0 and len(parts[number]) - begin >= 8 and number + 1 < len(parts) and len(parts[number + 1]) >= 5:
            left.append(parts[number][:begin] + MARK)
            number += 3
        else:
            left.append(parts[number])
            number += 1
    return ".".join(left)


def _named(found: re.Match[str]) -> str:
    if _HARMLESS.search(found["name"]) or found["value"].strip("\"'") in ("", MARK, "true", "false", "null"):
        return found[0]
    quote = found["value"][0] if found["value"][0] in "\"'" else ""
    return f"{found['name']}{quote}{MARK}{quote}"


def _forms(secret: str) -> list[str]:
    secret = secret.strip()
    if len(secret) < SHORTEST:
        return []
    encoded = base64.b64encode(secret.encode()).decode()
    return [secret, encoded, encoded.rstrip("="), *(line for line in secret.splitlines() if len(line) > 40)]
