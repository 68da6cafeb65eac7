# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run npu-smi: for the templates of a chip, which the library does not report, and for all queries without a library."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable
from typing import Callable

from ....errors import AcceleratorError
from ....host.system import Stamp, System
from ..dcmi.dcmi import Spot
from ..driver_files import PROGRAM, PROGRAM_FOLDERS, library_path, program
from ..health.faults import code_of_exit, error_of
from ..templates import Template
from . import npu_smi_output

LOG = logging.getLogger(__name__)

# Seconds. The timeout of npu-smi.
SECONDS = 20.0
# Seconds. How long a chip waits for the query of another chip of its kind.
OTHERS_SECONDS = 5.0
_UNSUPPORTED = ("not support", "does not support")


class Tool:
    """The vendor's program npu-smi."""

    def __init__(self, system: System) -> None:
        self._system = system

    def ask(self, *words: str, doing: str) -> str | None:
        """Return the output of ``npu-smi info`` with these arguments; None if the chip does not support it.

        Raises AcceleratorError.
        """
        status, output = self.run("info", *words)
        if any(text in output.lower() for text in _UNSUPPORTED):
            return None
        if status:
            code = code_of_exit(status)
            if code is None:
                raise AcceleratorError(f"{doing} failed: npu-smi exited with {status}: {output.strip()[:300]}")
            raise error_of(code, doing)
        return output

    def run(self, *words: str, answer: str = "") -> tuple[int, str]:
        """Run npu-smi, and return its exit status and its output. Raises AcceleratorError if it cannot be started."""
        path = ":".join(filter(None, (os.environ.get("LD_LIBRARY_PATH", ""), library_path(self._system))))
        done = self._system.run(
            [program(self._system), *words], SECONDS, input=answer, environment={"LD_LIBRARY_PATH": path}
        )
        return done.returncode, done.stdout + done.stderr

    def template_table(self, spot: Spot) -> str | None:
        """Return the table of a card's templates; None if the card does not support templates. Raises AcceleratorError."""
        return self.ask("-t", "template-info", "-i", str(spot.card), doing=f"Reading the templates of card {spot.card}")

    def stamp(self) -> tuple[Stamp, ...]:
        """Return a value that changes when the program is installed, replaced, or removed."""
        return self._system.fingerprint(f"{folder}/{PROGRAM}" for folder in PROGRAM_FOLDERS)


class Templates:
    """The templates of chips, read once for each kind of chip. Safe for threads.

    ``table`` returns the table of the templates of the card at a position, as npu-smi prints it.
    """

    def __init__(self, system: System, table: Callable[[Spot], str | None]) -> None:
        self._tool = Tool(system)
        self._table = table
        self._lock = threading.Lock()
        self._known: dict[Hashable, tuple[Template, ...]] = {}
        self._failed: dict[Spot, tuple[Stamp, ...]] = {}
        self._said = ""
        self._asking: dict[Hashable, threading.Event] = {}

    def of(self, kind: Hashable, spot: Spot) -> tuple[Template, ...] | None:
        """Return the templates of a kind of chip, read from the chip at a position; None while they are unknown.

        After a failure they are read again when npu-smi was replaced, or when the chip's facts are read again. Without
        templates the chip is published whole.
        """
        while True:
            stamp = self._tool.stamp()
            with self._lock:
                if kind in self._known:
                    return self._known[kind]
                if self._failed.get(spot) == stamp:
                    return None
                asked = self._asking.get(kind)
                if asked is None:
                    asked = self._asking[kind] = threading.Event()
                    break
            if not asked.wait(OTHERS_SECONDS):
                break  # the query of another chip takes too long: that chip may be faulty
        try:
            return self._ask(kind, spot, stamp)
        finally:
            with self._lock:
                self._asking.pop(kind, None)
            asked.set()

    def retry(self, spot: Spot) -> None:
        """Read the templates of the chip at a position again, if the last attempt failed."""
        with self._lock:
            self._failed.pop(spot, None)

    def forget(self) -> None:
        """Delete all templates, so that they are read again."""
        with self._lock:
            self._known.clear()
            self._failed.clear()

    def _ask(self, kind: Hashable, spot: Spot, stamp: tuple[Stamp, ...]) -> tuple[Template, ...] | None:
        try:
            table = self._table(spot)
            found = npu_smi_output.parse_templates(table) if table is not None else ()
        except (AcceleratorError, ValueError) as error:
            with self._lock:
                self._failed[spot] = stamp
                said, self._said = self._said, str(error)
            if said != str(error):
                LOG.warning("%s is published whole, its templates are not known: %s", spot, error)
            return None
        with self._lock:
            self._known[kind] = found
        return found
