# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read short texts of the host: files of the kernel that can disappear at any time, and the output of programs."""

from __future__ import annotations

from ..host.system import Completed, System


def text_or_empty(system: System, path: str) -> str:
    """Return a file's text without surrounding space; "" if the file cannot be read.

    Not for state of this collection, which an unreadable file must not replace.
    """
    try:
        return system.read_text(path).strip()
    except OSError:
        return ""


def one_line(done: Completed) -> str:
    """Return the output and the errors of a program as one line."""
    return " ".join(f"{done.stdout} {done.stderr}".split())
