# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Edit a runtime in Docker's configuration file, and keep the record of the change. This module has no side effects."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..._host import change_record
from ...core.errors import AcceleratorError

RUNTIMES = "runtimes"


class DockerError(AcceleratorError):
    """Docker rejects its settings, or does not work with them."""

    default_code = "docker"


def read(text: str | None, path: str) -> dict[str, Any]:
    """Return the parsed configuration file, empty for a missing or empty file. Raises DockerError."""
    if text is None or not text.strip():
        return {}
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DockerError(
            f"{path} is not JSON: {error}", hint="Fix the file. Nothing was changed.", code="invalid-json"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get(RUNTIMES, {}), dict):
        raise DockerError(
            f"{path} is not a JSON object, or its key runtimes is not an object",
            hint="Fix the file. Nothing was changed.",
            code="invalid-json",
        )
    return document


def entry(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the file's entry for a runtime."""
    return {"path": program, **({"runtimeArgs": list(arguments)} if arguments else {})}


def text_with(text: str | None, path: str, name: str, wanted: Mapping[str, Any] | None) -> str | None:
    """Return the file's text with the runtime, or without it for None. Return None if nothing is left. Raises DockerError.

    The order of keys and the indentation stay.
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


def text_without_runtimes(text: str | None, path: str) -> str | None:
    """Return a temporary text that makes Docker remove runtimes, or None if the current text already does.

    A reload updates the runtimes only if the file has the key ``runtimes``. Without it, Docker keeps the previous
    runtimes until a restart. Raises DockerError.
    """
    document = read(text, path)
    if RUNTIMES in document:
        return None
    return json.dumps({**document, RUNTIMES: {}}, indent=indentation(text), ensure_ascii=False) + "\n"


def indentation(text: str | None) -> int | str:
    """Return the indentation of a file's lines. The default is four spaces."""
    found = re.search(r"^([ \t]+)\S", text or "", re.MULTILINE)
    return 4 if found is None else found[1]


def fingerprint(text: str) -> str:
    """Return the SHA-256 digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """A change: the previous text (None: no file), and the digest of the written text. It is deleted with the change.

    ``replaced`` is the digest of the file at the time of the record. A run that was killed then has not written the
    file.
    """

    before: str | None
    written: str
    replaced: str = ""

    def to_text(self) -> str:
        """Return the text of the record."""
        return change_record.to_text({"before": self.before, "written": self.written, "replaced": self.replaced})


def read_record(text: str | None, path: str) -> Record | None:
    """Read a record. Raises AcceleratorError."""
    if text is None:
        return None
    hint = "To remove the runtime, delete it from Docker's file manually. Then delete the record."
    return change_record.read(text, path, _record_of, of="changes for Docker", hint=hint)


def _record_of(content: Any) -> Record:
    return Record(
        None if content["before"] is None else str(content["before"]),
        str(content["written"]),
        str(content.get("replaced", "")),
    )


def text_before(text: str, path: str, name: str, record: Record) -> str | None:
    """Return the file's text without the change: the exact previous text if the file was not edited since, otherwise the text without the runtime."""
    is_ours = fingerprint(text) in (record.written, record.replaced)
    return record.before if is_ours else text_with(text, path, name, None)


def known_runtimes(output: str) -> dict[str, str]:
    """Return the programs of the running Docker's runtimes by name, from the output of ``docker info``. Raises DockerError."""
    try:
        return {str(name): str(found.get("path", "")) for name, found in json.loads(output).items()}
    except (ValueError, AttributeError) as error:
        raise DockerError(f"Cannot parse the runtimes in the output of `docker info`: {output[:200]!r}") from error
