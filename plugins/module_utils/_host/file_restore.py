# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Restore several files after a failed change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..core.errors import AcceleratorError
from ..core.texts import LONGEST_MESSAGE, shorten


def restore_all(steps: Iterable[tuple[str, Callable[[], object]]]) -> dict[str, str]:
    """Call all functions, also after a failed one. Return the reasons of the failures by path, in the order of the calls.

    OSError and AcceleratorError are not raised, because the caller reports the error of the change first.
    """
    problems: dict[str, str] = {}
    for path, function in steps:
        try:
            function()
        except (OSError, AcceleratorError) as error:
            problems[path] = reason(error)
    return problems


def describe_not_restored(problems: Mapping[str, str]) -> str:
    """Return a sentence with the paths that could not be restored, or ""."""
    listed = "; ".join(f"{path} ({text})" for path, text in problems.items())
    return f"These paths could not be restored: {listed}" if listed else ""


def describe_restored_state(problems: Mapping[str, str], restart_problem: str) -> str:
    """Return the state of the container runtime, after its files were restored and its service was restarted."""
    files = describe_not_restored(problems) or "The previous files were restored"
    current = "the present files" if problems else "its previous files"
    if restart_problem:
        return f"{files}. It does not run with {current} either: {restart_problem}"
    return f"{files}. It runs with {current}"


def call_for_problem(function: Callable[[], str]) -> str:
    """Call a function that returns a problem, or "". Return its problem, also for a raised OSError or AcceleratorError.

    It is used for a restart with changed files: the files must be restored also if the restart raises an error.
    """
    try:
        return function()
    except (OSError, AcceleratorError) as error:
        return reason(error)


def add_texts(error: AcceleratorError, texts: Iterable[str]) -> None:
    """Add later problems to the message of an error that does not contain them yet."""
    for text in texts:
        if text and text not in error.message:
            error.message = shorten(f"{error.message.rstrip('.')}. {text}", LONGEST_MESSAGE)
            error.args = (error.message,)


def not_undone(problems: Mapping[str, str]) -> str:
    """Return a sentence with the failed steps of a rollback, or ""."""
    listed = "; ".join(f"{step} ({text.rstrip('.')})" for step, text in problems.items())
    return f"Not undone: {listed}" if listed else ""


def reason(error: BaseException) -> str:
    """Return the text of an error, without the number and the path of an OSError."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
