# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read manifests and other YAML or JSON data from files, directories, and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import missing_required_lib
from ansible.module_utils.common.yaml import yaml_load_all

from ..core.decoding import MAX_LEVELS, decode, describe_skipped
from ..core.errors import AcceleratorError

try:
    import yaml
except ImportError:
    HAS_YAML = False
else:
    HAS_YAML = True

UNREADABLE = "manifest-unreadable"
_ENDINGS = (".yaml", ".yml", ".json")


def documents_of(given: Any, where: str, warn: Callable[[str], None] | None = None) -> list[Any]:
    """Return the documents of a YAML or JSON text; a mapping or a list is returned unchanged.

    Objects of a JSON list that cannot be decoded are skipped, and ``warn`` is called with their names. Raises
    AcceleratorError for any other text that cannot be decoded, and for these objects if ``warn`` is None.
    """
    if isinstance(given, dict):
        return [given]
    if isinstance(given, list):
        return given
    if not HAS_YAML:
        raise AcceleratorError(missing_required_lib("PyYAML"), code="missing-package")
    text = str(given)
    if text.lstrip().startswith("{"):
        found = _json_documents(text, where, warn)
        if found is not None:
            return found
    try:
        check_nesting(text)
        return list(yaml_load_all(text))
    except ValueError as error:
        raise AcceleratorError(f"{where} is not valid YAML: {error}", code=UNREADABLE) from error
    except Exception as error:
        # The base class of PyYAML's errors cannot be named if PyYAML is missing.
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise AcceleratorError(
            f"{where} is not valid YAML: {error}", hint="Correct the YAML.", code=UNREADABLE
        ) from error


def _json_documents(text: str, where: str, warn: Callable[[str], None] | None) -> list[Any] | None:
    """Return the one document of a JSON text; None for text that is not JSON. Raises AcceleratorError."""
    try:
        # No caller reads opaque parameters.
        decoded = decode(text.encode(), opaque_of=())
    except AcceleratorError as error:
        raise AcceleratorError(f"{where}: {error.message}", hint=error.hint, code=UNREADABLE) from error
    except ValueError:
        return None
    if decoded.skipped and warn is None:
        raise AcceleratorError(f"{where}: {describe_skipped(decoded.skipped)}", code=UNREADABLE)
    if decoded.skipped and warn is not None:
        warn(f"{where}: {describe_skipped(decoded.skipped)}")
    return [decoded.value]


def check_nesting(text: str) -> None:
    """Raise ValueError for YAML that is nested too deep, because libyaml's loader would crash with a segmentation fault."""
    levels = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            levels += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            levels -= 1
        if levels > MAX_LEVELS:
            line = event.start_mark.line + 1 if event.start_mark is not None else 0
            raise ValueError(
                f"line {line} is nested more than {MAX_LEVELS} levels deep. Remove that object, or write the file "
                "with kubectl get -o json. In a JSON file, only that object is skipped"
            )


def read(path: str) -> str:
    """Return the text of a file. Raises AcceleratorError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AcceleratorError(f"{path} cannot be read: {error}", code=UNREADABLE) from error


def read_all(paths: Iterable[str], warn: Callable[[str], None] | None = None) -> list[Any]:
    """Return the documents of files, and of all manifest files in directories. Raises AcceleratorError.

    For ``warn`` see ``documents_of``.
    """
    found = []
    for path in paths:
        root = Path(path)
        files = sorted(each for each in root.rglob("*") if each.suffix in _ENDINGS) if root.is_dir() else [root]
        if not files:
            raise AcceleratorError(
                f"{path} is a directory without manifests",
                hint=f"Expected files that end with {', '.join(_ENDINGS)}.",
                code=UNREADABLE,
            )
        for each in files:
            found += documents_of(read(str(each)), str(each), warn)
    return found


def objects_of(documents: Iterable[Any], namespace: str) -> Iterator[dict[str, Any]]:
    """Return the objects of documents and of lists in them. ``namespace`` applies to objects without one. Raises AcceleratorError."""
    for document in documents:
        if document is None:
            continue
        items = document.get("items") if isinstance(document, dict) else None
        if isinstance(items, list):
            yield from objects_of(items, namespace)
            continue
        metadata = document.get("metadata") if isinstance(document, dict) else None
        if not isinstance(metadata, dict) or not metadata.get("name") or not document.get("kind"):
            kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
            raise AcceleratorError(
                f"found {kind} among the manifests, expected objects with kind and metadata.name",
                hint="Correct the manifest.",
                code=UNREADABLE,
            )
        yield {**document, "metadata": {"namespace": namespace, **metadata}}
