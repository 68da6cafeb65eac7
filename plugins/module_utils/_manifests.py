# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Manifests, and other data in YAML or JSON, from files, folders and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import missing_required_lib
from ansible.module_utils.common.yaml import HAS_YAML, yaml_load_all

from .core.errors import AcceleratorError

UNREADABLE = "manifest-unreadable"
_ENDINGS = (".yaml", ".yml", ".json")


def documents_of(given: Any, where: str) -> list[Any]:
    """Return the documents of a text, or what was given as such. Raises AcceleratorError for what is no YAML."""
    if isinstance(given, dict):
        return [given]
    if isinstance(given, list):
        return given
    if not HAS_YAML:
        raise AcceleratorError(missing_required_lib("PyYAML"), code="missing-package")
    try:
        return list(yaml_load_all(str(given)))
    except ValueError as error:
        raise AcceleratorError(f"{where} is no YAML: {error}", code=UNREADABLE) from error
    except Exception as error:
        # PyYAML's own errors have a base class that cannot be named where PyYAML is not installed.
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise AcceleratorError(f"{where} is no YAML: {error}", hint="Correct it.", code=UNREADABLE) from error


def read(path: str) -> str:
    """Return a file's text. Raises AcceleratorError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AcceleratorError(f"{path} cannot be read: {error}", code=UNREADABLE) from error


def read_all(paths: Iterable[str]) -> list[Any]:
    """Return the documents of files, and of all files of folders that end as manifests do. Raises AcceleratorError."""
    found = []
    for path in paths:
        place = Path(path)
        files = sorted(each for each in place.rglob("*") if each.suffix in _ENDINGS) if place.is_dir() else [place]
        if not files:
            raise AcceleratorError(
                f"{path} is a folder without manifests",
                hint=f"Expected are files that end with {', '.join(_ENDINGS)}.",
                code=UNREADABLE,
            )
        for each in files:
            found += documents_of(read(str(each)), str(each))
    return found


def objects_of(documents: Iterable[Any], namespace: str) -> Iterator[dict[str, Any]]:
    """Return the objects of documents, those of lists one by one; what does not say its namespace is of this one. Raises AcceleratorError."""
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
