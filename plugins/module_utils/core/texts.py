# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Limit the length of texts with external values: a small input must not cause a large error."""

from __future__ import annotations

from collections.abc import Iterable

#: The maximum number of problems in one text, and the maximum length of each.
MOST_PROBLEMS = 20
LONGEST_PROBLEM = 300
#: The maximum length of a text that ends with a remedy.
LONGEST_CAUSE = 2048
#: The maximum length of an error message: a full list of problems fits.
LONGEST_MESSAGE = 8192
#: The maximum size of an error in an answer to the kubelet, in bytes.
LONGEST_ANSWER = 4096


def shorten(text: str, longest: int) -> str:
    """Return a text with at most ``longest`` characters; a longer one ends with an ellipsis."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def shorten_bytes(text: str, longest: int = LONGEST_ANSWER) -> str:
    """Return a text with at most ``longest`` bytes of UTF-8; unpaired surrogates are replaced."""
    data = text[: longest + 1].encode("utf-8", "replace")
    return data.decode() if len(data) <= longest else data[: longest - 3].decode("utf-8", "ignore") + "…"


def cut_bytes(text: str, longest: int) -> str:
    """Return the beginning of a text that has at most ``longest`` bytes of UTF-8."""
    return text.encode("utf-8", "replace")[:longest].decode("utf-8", "ignore")


def join_problems(problems: Iterable[object], separator: str = "; ", longest: int = LONGEST_PROBLEM) -> str:
    """Return the texts of problems as one text: at most MOST_PROBLEMS, each with at most ``longest`` characters."""
    listed = list(problems)
    texts = [shorten(str(each), longest) for each in listed[:MOST_PROBLEMS]]
    if len(listed) > len(texts):
        texts.append(f"and {len(listed) - len(texts)} more")
    return separator.join(texts)
