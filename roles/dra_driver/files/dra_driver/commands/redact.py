# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Takes secrets out of text: what is known to be one, and what looks like one. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

MARK = "[redacted]"
# Shorter ones would take words out of the text.
SHORTEST = 6
_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z0-9 ]{1,40}-----.{0,20000}?-----END [A-Z0-9 ]{1,40}-----", re.DOTALL),
    # One that was cut off: what is left of its lines.
    re.compile(r"-----BEGIN [A-Z0-9 ]{1,40}-----(?:(?:\s|\\n){0,9}[A-Za-z0-9+/=]{16,80})*"),
    re.compile(r"eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)?"),  # a JSON web token
    re.compile(r"LS0tLS1CRUdJTi[A-Za-z0-9+/=\s\\]{20,}"),  # PEM in base64
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(r"(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)"),  # who somebody is to a proxy
)
# A value behind a name that says what it is, in YAML, JSON, or an environment.
_NAMED = re.compile(
    r"(?i)(?P<name>(?:token|password|passwd|secret|credential|api[_-]?key|client-key-data|client-certificate-data|private[_-]?key)"
    r"[\w.-]{0,40}[\"']?\s{0,9}[:=]\s{0,9})(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,}\]\"']+)"
)
# Names that have one of these words and hold no secret.
_HARMLESS = re.compile(r"(?i)token_?(lifetime|expiry\w*|file)|secret_content")


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text without secrets: those that are given, also in base64, and all that look like one."""
    for secret in sorted({form for each in secrets for form in _forms(each)}, key=len, reverse=True):
        text = text.replace(secret, MARK)
    for pattern in _PATTERNS:
        text = pattern.sub(MARK, text)
    return _NAMED.sub(_named, text)


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
