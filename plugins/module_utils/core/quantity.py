# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse Kubernetes quantities, compare them by value, and write them in the API server's canonical form."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache

_QUANTITY = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_FACTORS = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    **{suffix: Fraction(1024**power) for power, suffix in enumerate(_BINARY) if suffix},
}


def parse(text: str | int) -> Fraction:
    """Return the exact value of a quantity such as ``80Gi``, ``500m``, ``1e3`` or a plain number.

    Raises ValueError for anything else.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"{text!r:.200} is not a quantity: expected a number with an optional suffix")  # noqa: TRY004
    return Fraction(text) if isinstance(text, int) else _parse_text(text)


# The slices of a whole fleet contain the same few amounts thousands of times.
@lru_cache(maxsize=4096)
def _parse_text(text: str) -> Fraction:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r:.200} is not a quantity: expected a number with an optional suffix such as Gi, G or m"
        )
    sign, digits, suffix = found.groups()
    suffix = suffix or ""
    # E and Ei are units; any other text that begins with an e is an exponent.
    factor = _FACTORS[suffix] if suffix in _FACTORS else Fraction(10) ** int(suffix[1:])
    value = Fraction("0" + digits if digits.startswith(".") else digits) * factor
    return -value if sign == "-" else value


def parse_rounded_up(text: str | int) -> int:
    """Return the value of a quantity as an integer. Fractions are rounded up, as in the API server. Raises ValueError."""
    return math.ceil(parse(text))


def equal(left: str | int, right: str | int) -> bool:
    """Return whether two quantities are equal by value: 1Gi equals 1073741824."""
    return parse(left) == parse(right)


def format_bytes(value: int) -> str:
    """Return a number of bytes with the largest binary suffix that divides it, like the API server."""
    power = 0
    while value and value % 1024 == 0 and power < len(_BINARY) - 1:
        value //= 1024
        power += 1
    return f"{value}{_BINARY[power]}"
