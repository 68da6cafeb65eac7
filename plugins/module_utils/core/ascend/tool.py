# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Runs npu-smi: for the templates of a chip, which the library does not tell, and for all else where there is no library."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable

from ..errors import AcceleratorError
from ..system import Stamp, System
from . import smi
from .dcmi import Spot
from .driver_files import PROGRAM, PROGRAM_FOLDERS, library_path, program
from .faults import code_of_exit, error_of
from .templates import Template

LOG = logging.getLogger(__name__)

# How long npu-smi may take.
SECONDS = 20.0
# How long a chip waits for what another chip of its kind is being asked for.
OTHERS_SECONDS = 5.0
_UNSUPPORTED = ("not support", "does not support")


class Tool:
    """The vendor's program."""

    def __init__(self, system: System) -> None:
        self._system = system

    def ask(self, *words: str, doing: str) -> str | None:
        """Return what ``npu-smi info`` prints for these words; None for what the chip does not support. Raises AcceleratorError."""
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
        """Run npu-smi, and return its exit status with all that it printed. Raises AcceleratorError where it cannot be run."""
        path = ":".join(filter(None, (os.environ.get("LD_LIBRARY_PATH", ""), library_path(self._system))))
        done = self._system.run(
            [program(self._system), *words], SECONDS, input=answer, environment={"LD_LIBRARY_PATH": path}
        )
        return done.returncode, done.stdout + done.stderr

    def stamp(self) -> tuple[Stamp, ...]:
        """Return what tells whether the program has come or gone."""
        return self._system.fingerprint(f"{folder}/{PROGRAM}" for folder in PROGRAM_FOLDERS)


class Templates:
    """The templates of chips, asked for once for each kind of chip. Safe for threads."""

    def __init__(self, system: System) -> None:
        self._tool = Tool(system)
        self._lock = threading.Lock()
        self._known: dict[Hashable, tuple[Template, ...]] = {}
        self._failed: dict[Spot, tuple[Stamp, ...]] = {}
        self._said = ""
        self._asking: dict[Hashable, threading.Event] = {}

    def of(self, kind: Hashable, spot: Spot) -> tuple[Template, ...] | None:
        """Return the templates of a kind of chip, of which one is at a spot; None while nobody can tell.

        What cannot tell is asked again when it was exchanged, or when the chip is met anew: without templates it is whole.
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
                break  # what another one of them was asked for does not come: it may be ill
        try:
            return self._ask(kind, spot, stamp)
        finally:
            with self._lock:
                self._asking.pop(kind, None)
            asked.set()

    def retry(self, spot: Spot) -> None:
        """Ask the chip at a spot again, if it could not tell."""
        with self._lock:
            self._failed.pop(spot, None)

    def forget(self) -> None:
        """Ask again from now on."""
        with self._lock:
            self._known.clear()
            self._failed.clear()

    def _ask(self, kind: Hashable, spot: Spot, stamp: tuple[Stamp, ...]) -> tuple[Template, ...] | None:
        doing = f"Reading the templates of card {spot.card}"
        try:
            told = self._tool.ask("-t", "template-info", "-i", str(spot.card), doing=doing)
            found = smi.templates(told) if told is not None else ()
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
