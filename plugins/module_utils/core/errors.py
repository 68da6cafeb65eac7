# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the error types of the core. Each error text states the found value, the expected value, and the remedy."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from .texts import LONGEST_MESSAGE, shorten


class AcceleratorError(Exception):
    """Base of all errors of the core. ``hint`` is the remedy, ``code`` a stable identifier for programs.

    A message has at most LONGEST_MESSAGE characters, because it can contain texts from users or vendor libraries.
    """

    default_code = "accelerator-error"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        self.message = shorten(message, LONGEST_MESSAGE)
        super().__init__(self.message)
        self.hint = shorten(hint, LONGEST_MESSAGE)
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"{self.message.rstrip('.')}. {self.hint}".strip() if self.hint else self.message

    def to_dict(self) -> dict[str, Any]:
        """Return the error as data for a module's result or a log line."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


class NotFound(AcceleratorError):
    """A named device or partition does not exist."""

    default_code = "not-found"


class NotPermitted(AcceleratorError):
    """The caller lacks a privilege."""

    default_code = "not-permitted"


class InUse(AcceleratorError):
    """Processes or prepared claims use a device or partition that would have to change."""

    default_code = "in-use"

    def __init__(
        self,
        message: str,
        *,
        pids: Iterable[int] = (),
        claims: Iterable[str] = (),
        blockers: Sequence[Any] = (),
        hint: str = "",
        code: str = "",
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.pids: tuple[int, ...] = tuple(pids)
        self.claims: tuple[str, ...] = tuple(claims)
        self.blockers: tuple[Any, ...] = tuple(blockers)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the PIDs and claims."""
        return {**super().to_dict(), "pids": list(self.pids), "claims": list(self.claims)}


class Unsupported(AcceleratorError):
    """The device or its driver cannot do this."""

    default_code = "unsupported"


class InvalidLayout(AcceleratorError):
    """A layout is invalid: unknown key, profile, or value."""

    default_code = "invalid-layout"


class InvalidSettings(AcceleratorError):
    """Device settings are invalid, or the device does not accept them."""

    default_code = "invalid-settings"


class DoesNotFit(AcceleratorError):
    """The partitions do not fit. ``blockers`` names the obstacles."""

    default_code = "does-not-fit"

    def __init__(self, message: str, *, blockers: Sequence[Any] = (), hint: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint, code=code)
        self.blockers: tuple[Any, ...] = tuple(blockers)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the obstacles."""
        return {**super().to_dict(), "blockers": [str(blocker) for blocker in self.blockers]}


class BackendUnavailable(AcceleratorError):
    """The vendor library or driver is missing, or not ready yet."""

    default_code = "backend-unavailable"


class FabricRejected(AcceleratorError):
    """The node's fabric manager rejected a change of a fabric partition."""

    default_code = "fabric-rejected"


class DeviceFaulty(AcceleratorError):
    """One physical device is faulty; other devices are not affected.

    ``code`` is the cause of its fault, see model.Fault.
    """

    default_code = "unknown-error"


class LayoutFailed(AcceleratorError):
    """A step of a layout change failed. ``undone`` and ``not_undone`` describe the results of the rollback."""

    default_code = "layout-failed"

    def __init__(
        self,
        message: str,
        *,
        undone: Sequence[str] = (),
        not_undone: Sequence[str] = (),
        hint: str = "",
        code: str = "",
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.undone: tuple[str, ...] = tuple(undone)
        self.not_undone: tuple[str, ...] = tuple(not_undone)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the undone changes and those that could not be undone."""
        return {**super().to_dict(), "undone": list(self.undone), "not_undone": list(self.not_undone)}


class SettingsFailed(LayoutFailed):
    """A change of settings failed. ``undone`` and ``not_undone`` describe the results of the rollback."""

    default_code = "settings-failed"


def unexpected(error: Exception, doing: str) -> AcceleratorError:
    """Return the error for an exception that indicates a defect: its type, its text, and the source line that raised it.

    ``doing`` is the beginning of the sentence: the failed action and its object.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""  # noqa: PTH119
    return AcceleratorError(
        f"{doing} failed with an unexpected {type(error).__name__}{where}: {error}",
        hint="This is a defect of the driver: report it with the output of `dra-driver collect`.",
        code="unexpected-error",
    )


def as_failure(error: AcceleratorError | OSError) -> AcceleratorError:
    """Return an error of the operating system as an AcceleratorError with code os-error, and any other error unchanged."""
    if isinstance(error, AcceleratorError):
        return error
    return AcceleratorError(f"The operating system refused an operation: {error}", code="os-error")


def to_error(error: Exception, doing: str) -> AcceleratorError:
    """Return any exception as an AcceleratorError. ``doing`` is the beginning of the sentence, as for ``unexpected``."""
    if isinstance(error, AcceleratorError):
        return error
    if isinstance(error, OSError):
        return AcceleratorError(f"{doing} failed: {error}")
    return unexpected(error, doing)
