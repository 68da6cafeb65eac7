# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What can be wrong with a driver, or with what it was to keep; each is a column of the table."""

from __future__ import annotations


class Broken(AssertionError):
    """The driver, or what it was to keep, is not as it has to be. The text says what was found and what was expected."""

    column = "other"


class CrashLoop(Broken):
    """The driver ended by itself."""

    column = "crash loops"


class Leaked(Broken):
    """Something is left that no claim has."""

    column = "leaked"


class Lost(Broken):
    """A claim lacks what the kubelet was told that it has."""

    column = "lost"
