# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Possible faults of a driver or of the state that it manages. Each is a column of the table."""

from __future__ import annotations


class Broken(AssertionError):
    """The driver, or the state that it manages, is wrong. The text has the found and the expected state."""

    column = "other"


class CrashLoop(Broken):
    """The driver ended without a request."""

    column = "crash loops"


class Leaked(Broken):
    """Resources without a claim are left."""

    column = "leaked"


class Lost(Broken):
    """A claim lacks resources that the driver reported to the kubelet."""

    column = "lost"
