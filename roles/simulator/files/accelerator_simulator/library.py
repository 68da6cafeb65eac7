# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The simulated library's private entry: text commands in, JSON out (``nvml/MACHINE_FORMAT.md``)."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

from .errors import LibraryError

REPLY_SIZE = 4 << 20
DEFAULT_FOLDER = "/usr/lib/x86_64-linux-gnu"
SONAME = "libnvidia-ml.so.1"
STATE_NAME = "libnvidia-gpusim.so.%s"


class Library:
    """One loaded library. Its state file lies in the library's own folder."""

    def __init__(self, path: Path) -> None:
        try:
            self._function = ctypes.CDLL(str(path)).acceleratorSimulatorControl
        except (OSError, AttributeError) as error:
            raise LibraryError(
                f"{path}: not the simulated library ({error}); the role dra.accelerators.simulator installs it"
            ) from error
        self._function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint]
        self._function.restype = ctypes.c_int

    def command(self, text: str) -> dict[str, Any]:
        """Runs one command and returns its answer; a refusal is a LibraryError with the library's own words."""
        reply = ctypes.create_string_buffer(REPLY_SIZE)
        code = self._function(text.encode(), reply, REPLY_SIZE)
        try:
            answer = json.loads(reply.value.decode("utf-8"))
        except ValueError as error:
            raise LibraryError(f"{text!r}: the library answered {int(code)} and no JSON: {error}") from error
        if code != 0 or not answer.get("ok"):
            raise LibraryError(f"{text.split()[0]}: {answer.get('error', 'refused')} (NVML error {int(code)})")
        return dict(answer)

    def loaded(self) -> dict[str, Any] | None:
        """What ``show`` says, or None where no machine has been loaded."""
        try:
            answer = self.command("show")
        except LibraryError:
            return None
        return answer if answer.get("gpus") else None


def find_library(folder: Path) -> Path:
    """The library in a folder; a LibraryError says what to do where there is none."""
    path = folder / SONAME
    if not path.exists():
        raise LibraryError(
            f"{path} does not exist: run the role dra.accelerators.simulator, or name the folder with --library-folder"
        )
    return path
