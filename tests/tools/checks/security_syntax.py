# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Security rules that need the syntax of a file: calls and dictionaries in Python, tasks and file entries in YAML."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SECRET_FILE = re.compile(r"(kubeconfig|\.key|/pip\.conf|/install\.json)$")
UNSAFE_YAML = frozenset({"full_load", "full_load_all", "unsafe_load", "unsafe_load_all"})
WRITERS = frozenset({"copy", "template", "blockinfile", "lineinfile"})


def problems_in_python(path: Path, text: str) -> Iterator[str]:
    """Yield a line for each unsafe call or dictionary in a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if {"hookName", "path"} <= keys and "env" not in keys:
                yield f"{path}:{node.lineno}: hook-environment: a CDI hook without env inherits the variables of the image: add env"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            module, function = node.func.value.id, node.func.attr
            if module == "yaml" and (
                function in UNSAFE_YAML or (function in ("load", "load_all") and not _has_safe_loader(node))
            ):
                yield f"{path}:{node.lineno}: safe-yaml: YAML tags can create any object: use SafeLoader or safe_load"
            is_cel = path.parent.name == "_scheduling"
            if module == "re" and is_cel and not (node.args and _is_written_here(node.args[0])):
                yield f"{path}:{node.lineno}: cel-without-backtracking: a tenant's pattern can take exponential time: use re2"


def _is_written_here(pattern: ast.expr) -> bool:
    """Return whether a pattern consists of literals and constants of the module (upper case), not of input."""
    names = (each.id for each in ast.walk(pattern) if isinstance(each, ast.Name))
    return all(name.isupper() for name in names) and not any(isinstance(each, ast.Call) for each in ast.walk(pattern))


def _has_safe_loader(node: ast.Call) -> bool:
    loaders = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "Loader")]
    return any("Safe" in ast.unparse(loader) for loader in loaders)


def problems_in_yaml(path: Path, text: str) -> Iterator[str]:
    """Yield a line for each file of secrets that a role writes or removes with its content in diffs or results."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    yield from _entries(path, content)


def _entries(path: Path, value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _entries(path, each)
    if not isinstance(value, dict):
        return
    target = value.get("path")
    is_entry = "content" in value or (value.get("state") == "absent" and ("marker" in value or "secret" in value))
    if isinstance(target, str) and SECRET_FILE.search(target) and is_entry and value.get("secret") is not True:
        yield f"{path}: secret-files: the entry of {target} lacks `secret: true`"
    for name, arguments in value.items():
        if str(name).rpartition(".")[2] in WRITERS and isinstance(arguments, dict):
            written = str(arguments.get("dest", arguments.get("path", "")))
            if SECRET_FILE.search(written) and value.get("no_log") is not True:
                yield f"{path}: secret-files: the task that writes {written} lacks `no_log: true`"
        yield from _entries(path, arguments)


def syntax_problems(path: Path, text: str) -> list[str]:
    """Return a line for each violation in a Python or YAML file."""
    if path.suffix == ".py":
        return list(problems_in_python(path, text))
    return list(problems_in_yaml(path, text)) if path.suffix in (".yml", ".yaml") else []
