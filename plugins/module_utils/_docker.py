# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""A runtime among those of Docker: what its configuration file has to say, and what is ours of that. No side effects."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _record
from .core.errors import AcceleratorError

RUNTIMES = "runtimes"


class DockerError(AcceleratorError):
    """Docker does not take its settings, or does not work by them."""

    default_code = "docker"


def read(text: str | None, path: str) -> dict[str, Any]:
    """Return what a configuration file says; nothing for one that is not there or empty. Raises DockerError."""
    if text is None or not text.strip():
        return {}
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DockerError(
            f"{path} is not JSON: {error}", hint="Mend the file; nothing was changed.", code="invalid-json"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get(RUNTIMES, {}), dict):
        raise DockerError(
            f"{path} is no object with an object of runtimes",
            hint="Mend the file; nothing was changed.",
            code="invalid-json",
        )
    return document


def entry(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a runtime as the file has it."""
    return {"path": program, **({"runtimeArgs": list(arguments)} if arguments else {})}


def text_with(text: str | None, path: str, name: str, wanted: Mapping[str, Any] | None) -> str | None:
    """Return the file's text with the runtime so, or without it; None for a file that would say nothing. Raises DockerError.

    Keys keep their order, and the file its indentation.
    """
    document = read(text, path)
    if document.get(RUNTIMES, {}).get(name) == wanted:
        return text
    runtimes = {key: value for key, value in document.get(RUNTIMES, {}).items() if key != name or wanted is not None}
    if wanted is not None:
        runtimes[name] = dict(wanted)
    if runtimes:
        document[RUNTIMES] = runtimes
    else:
        document.pop(RUNTIMES, None)
    if not document:
        return None
    return json.dumps(document, indent=indentation(text), ensure_ascii=False) + "\n"


def forgetting(text: str | None, path: str) -> str | None:
    """Return what the file has to say for a moment so that Docker forgets runtimes; None where it forgets them by the text as it is.

    A reload takes runtimes from a file that has the word for them alone: without it Docker goes on to know those of before, until it is
    restarted. Raises DockerError.
    """
    document = read(text, path)
    if RUNTIMES in document:
        return None
    return json.dumps({**document, RUNTIMES: {}}, indent=indentation(text), ensure_ascii=False) + "\n"


def indentation(text: str | None) -> int | str:
    """Return what a file's lines are indented by: four blanks where that cannot be seen."""
    found = re.search(r"^([ \t]+)\S", text or "", re.MULTILINE)
    return 4 if found is None else found[1]


def fingerprint(text: str) -> str:
    """Return the digest by which a text is known."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """What was changed: the text before (None: no file), and the digest of what was written. It goes with the change."""

    before: str | None
    written: str

    def to_text(self) -> str:
        """Return the record as it is written."""
        return _record.to_text({"before": self.before, "written": self.written})


def read_record(text: str | None, path: str) -> Record | None:
    """Read a record. Raises AcceleratorError."""
    if text is None:
        return None
    hint = "Take the runtime out of Docker's file by hand if it is to go, and remove the record."
    return _record.read(text, path, _record_of, of="changed for Docker", hint=hint)


def _record_of(content: Any) -> Record:
    return Record(None if content["before"] is None else str(content["before"]), str(content["written"]))


def text_before(text: str, path: str, name: str, record: Record) -> str | None:
    """Return the file's text without what was changed: byte for byte where nobody has changed it since, else without the runtime."""
    return record.before if fingerprint(text) == record.written else text_with(text, path, name, None)


def known_runtimes(said: str) -> dict[str, str]:
    """Return the programs of the runtimes that a running Docker knows, by its answer to ``docker info``. Raises DockerError."""
    try:
        return {str(name): str(found.get("path", "")) for name, found in json.loads(said).items()}
    except (ValueError, AttributeError) as error:
        raise DockerError(f"What `docker info` says of runtimes is not understood: {said[:200]!r}") from error
