# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Unexpected exceptions in the calls of a vendor's library, in the driver's process.

A file has the name of the function, and whether the exception is raised before or after the call. After the call its
effect has happened, and only its answer is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

REQUEST_FILE = Path("/run/chaos-raise")
BEFORE, AFTER = "before", "after"


class UnexpectedError(ValueError):
    """An exception that no code of the driver expects."""


def with_exceptions(call: Any) -> Any:
    """Wrap a method whose first argument is the name of the library's function."""

    def wrapped(self: Any, function: str, *arguments: Any, **options: Any) -> Any:
        try:
            name, when = REQUEST_FILE.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return call(self, function, *arguments, **options)
        if not function.startswith(name):
            return call(self, function, *arguments, **options)
        if when == AFTER:
            call(self, function, *arguments, **options)
        raise UnexpectedError(f"invalid answer of {function}")

    return wrapped


def install() -> None:
    """Make the calls of all vendors raise on order."""
    from dra_driver.core.vendors.ascend.dcmi.dcmi import Dcmi
    from dra_driver.core.vendors.nvidia.nvml import Nvml

    Nvml.call = with_exceptions(Nvml.call)  # type: ignore[method-assign]
    Dcmi._code = with_exceptions(Dcmi._code)  # type: ignore[method-assign]
