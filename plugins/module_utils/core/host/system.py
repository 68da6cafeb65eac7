# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Access a host: run commands, and read and write files below a root directory, which is different in tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import AcceleratorError
from .file_reads import DeviceNumber, Stamp
from .file_writes import HostWrites
from .paths import path_exists
from .processes import OutputTooLarge, run_bounded

__all__ = (
    "LONGEST_INSTALLATION",
    "LONGEST_OUTPUT",
    "Completed",
    "DeviceNumber",
    "Stamp",
    "System",
    "path_exists",
    "text_or_none",
)

#: The most that a command may write to both outputs together, in bytes; one that writes more is ended.
LONGEST_OUTPUT = 1024 * 1024
#: The same for installers and package managers: one that is killed leaves a half-installed system.
LONGEST_INSTALLATION = 64 * LONGEST_OUTPUT


@dataclass(frozen=True)
class Completed:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


def _decode_output(output: bytes) -> str:
    """Return the output of a command as text with line feeds only, as the standard library's text mode reads it."""
    return output.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


class System(HostWrites):
    """The host: its commands, in addition to its files."""

    def run(
        self,
        argv: Sequence[str],
        timeout: float,
        input: str | None = None,  # noqa: A002
        environment: Mapping[str, str] | None = None,
        longest: int = LONGEST_OUTPUT,
    ) -> Completed:
        """Run a command without a shell and return its exit code and output.

        ``environment`` is added to the environment of this process. Output that is not UTF-8 is replaced. A command that writes
        more than ``longest`` bytes, or runs longer than ``timeout`` seconds, is killed with the processes that it started.

        Raises AcceleratorError with code command-missing, command-unusable, command-timeout or command-output-too-large. A
        non-zero exit code is not an error.
        """
        variables = {**os.environ, "LC_ALL": "C", **(environment or {})}
        try:
            code, output, errors = run_bounded(
                argv, timeout=timeout, most_bytes=longest, data=(input or "").encode(), environment=variables
            )
        except FileNotFoundError as error:
            raise AcceleratorError(
                f"The command {argv[0]} was not found",
                hint="Install the package that contains it, or add its directory to PATH.",
                code="command-missing",
            ) from error
        except OSError as error:
            raise AcceleratorError(
                f"The command {argv[0]} cannot be started: {error.strerror}",
                hint="It may be about to be installed, or be for another machine.",
                code="command-unusable",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise AcceleratorError(
                f"{' '.join(argv)} did not end within {timeout:g} s", code="command-timeout"
            ) from error
        except OutputTooLarge as error:
            raise AcceleratorError(
                f"{' '.join(argv)} wrote more than {longest} bytes and was ended",
                hint="Run the command manually and check its output.",
                code="command-output-too-large",
            ) from error
        return Completed(code, _decode_output(output), _decode_output(errors))

    def finds(self, program: str) -> bool:
        """Return whether ``run`` would find a program."""
        return shutil.which(program) is not None


def text_or_none(system: System, path: str) -> str | None:
    """Return a file's text, or None if the file does not exist."""
    try:
        return system.read_text(path)
    except FileNotFoundError:
        return None
