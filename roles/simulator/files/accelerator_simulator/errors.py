# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What can go wrong, as one family of exceptions."""

from __future__ import annotations


class SimulatorError(Exception):
    """Says what was found, what was expected and what to do, naming the object."""


class DescriptionError(SimulatorError):
    """A board, component or machine file breaks a rule."""


class LibraryError(SimulatorError):
    """The simulated library refused a command or cannot be loaded."""
