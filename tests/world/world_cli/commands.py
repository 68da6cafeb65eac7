# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run programs of the host. An error contains the command and the end of its output."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import WorldError

_TAIL_LINES = 15
#: Messages about the network after which another attempt can succeed. A busy machine can miss the 10 s of a TLS handshake.
NETWORK_ERRORS = re.compile(
    r"TLS handshake timeout|i/o timeout|connection (?:reset|refused|timed out)|unexpected EOF|no such host"
    r"|Temporary failure in name resolution|: (?:429|50[0234]) [A-Z]|stream error|Client\.Timeout"
)


def tail(text: str, lines: int = _TAIL_LINES) -> str:
    """Return the last lines of a program's output."""
    return "\n".join(text.strip().splitlines()[-lines:])


def execute(
    command: Sequence[str],
    *,
    input_text: str | None = None,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout: float = 1800,
    standard_input: Any = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output as text.

    ``environment`` is added to the environment of this process. Raises :class:`WorldError` if the program is missing, takes longer
    than ``timeout`` seconds, or (with ``check``) has an exit status other than 0.
    """
    keywords: dict[str, Any] = (
        {"input": input_text} if input_text is not None else {"stdin": standard_input or subprocess.DEVNULL}
    )
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            timeout=timeout,
            **keywords,
        )
    except FileNotFoundError as error:
        raise WorldError(
            f"{command[0]} was not found on this machine: install it, or run the world as root, which installs it."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise WorldError(f"{' '.join(command)} did not end within {timeout:.0f} s.") from error
    if check and done.returncode != 0:
        raise WorldError(f"{' '.join(command)} ended with status {done.returncode}:\n{tail(done.stdout + done.stderr)}")
    return done


def execute_with_retries(
    command: Sequence[str], *, attempts: int = 5, pause: float = 10, **keywords: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command that downloads. After a network error repeat it, up to ``attempts`` times with ``pause`` seconds between.

    ``keywords`` are those of execute(). Raises the :class:`WorldError` of the last attempt, or of another error.
    """
    for attempt in range(1, attempts):
        try:
            return execute(command, **keywords)
        except WorldError as error:
            if not NETWORK_ERRORS.search(str(error)):
                raise
            print(f"network error, attempt {attempt} of {attempts}: {tail(str(error), 1)}", flush=True)
            time.sleep(pause)
    return execute(command, **keywords)


def wait_until(
    what: str, probe: Callable[[], bool], seconds: float, pause: float = 0.3, remedy: Callable[[], str] | None = None
) -> None:
    """Call ``probe`` until it is true. After ``seconds`` raise a :class:`WorldError` with ``what`` and ``remedy()``."""
    deadline = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > deadline:
            raise WorldError(f"{what} did not happen within {seconds:.0f} s." + (f"\n{remedy()}" if remedy else ""))
        time.sleep(pause)
