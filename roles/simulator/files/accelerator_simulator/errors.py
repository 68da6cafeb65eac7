# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The exceptions of the simulator."""

from __future__ import annotations


class SimulatorError(Exception):
    """Base error. The message names the object, the found value, the expected value, and the remedy."""


class DescriptionError(SimulatorError):
    """A board, component, or machine file breaks a rule."""


class LibraryError(SimulatorError):
    """The simulated library rejected a command or cannot be loaded."""
