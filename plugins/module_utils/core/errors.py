# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What can go wrong, as types. The text of each error is a full sentence: found, expected, what to do."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from .texts import LONGEST_MESSAGE, shorten


class AcceleratorError(Exception):
    """Base of all errors of the core. ``hint`` is the remedy, ``code`` a stable identifier for programs.

    A message has at most LONGEST_MESSAGE characters, because it can contain texts of others.
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
    """A device or partition that was named is not there."""

    default_code = "not-found"


class NotPermitted(AcceleratorError):
    """The caller lacks a privilege."""

    default_code = "not-permitted"


class InUse(AcceleratorError):
    """Processes or prepared claims hold what would have to change."""

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
        """Return the error with the pids and claims."""
        return {**super().to_dict(), "pids": list(self.pids), "claims": list(self.claims)}


class Unsupported(AcceleratorError):
    """The device or its driver cannot do this."""

    default_code = "unsupported"


class InvalidLayout(AcceleratorError):
    """A layout is wrong in itself: unknown key, profile or value."""

    default_code = "invalid-layout"


class InvalidSettings(AcceleratorError):
    """Settings of devices are wrong in themselves, or not what the device takes."""

    default_code = "invalid-settings"


class DoesNotFit(AcceleratorError):
    """There is no room. ``blockers`` names what is in the way."""

    default_code = "does-not-fit"

    def __init__(self, message: str, *, blockers: Sequence[Any] = (), hint: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint, code=code)
        self.blockers: tuple[Any, ...] = tuple(blockers)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with what is in the way."""
        return {**super().to_dict(), "blockers": [str(blocker) for blocker in self.blockers]}


class BackendUnavailable(AcceleratorError):
    """The vendor's library or driver is not there, or not there yet."""

    default_code = "backend-unavailable"


class FabricRejected(AcceleratorError):
    """The machine's fabric manager answers, and rejects a change of a partition of the fabric."""

    default_code = "fabric-rejected"


class DeviceFaulty(AcceleratorError):
    """One physical device is ill, and its neighbours are not. ``code`` is the cause of its fault, see model.Fault."""

    default_code = "unknown-error"


class LayoutFailed(AcceleratorError):
    """A step of a layout change failed. ``undone`` and ``not_undone`` say what became of the steps before it."""

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
        """Return the error with what was and was not undone."""
        return {**super().to_dict(), "undone": list(self.undone), "not_undone": list(self.not_undone)}


class SettingsFailed(LayoutFailed):
    """A change of settings failed. ``undone`` and ``not_undone`` say what became of the changes before it."""

    default_code = "settings-failed"


def unexpected(error: Exception, doing: str) -> AcceleratorError:
    """Return an exception that no code expects as an error with its type, its text, and the source line that raised it.

    ``doing`` is the beginning of the sentence: what failed, for which object.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""  # noqa: PTH119
    return AcceleratorError(
        f"{doing} failed with an unexpected {type(error).__name__}{where}: {error}",
        hint="This is a defect of the driver: report it with the output of `dra-driver collect`.",
        code="unexpected-error",
    )


def to_error(error: Exception, doing: str) -> AcceleratorError:
    """Return any exception as an AcceleratorError. ``doing`` is the beginning of the sentence, as for ``unexpected``."""
    if isinstance(error, AcceleratorError):
        return error
    if isinstance(error, OSError):
        return AcceleratorError(f"{doing} failed: {error}")
    return unexpected(error, doing)
