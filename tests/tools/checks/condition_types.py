# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Rule for conditions of tasks: each operand is a boolean.

From ansible-core 2.19 on, a condition with a string, a list, or a number fails: ``when: name`` must be ``when: name | length > 0``.
The check knows the types of role options (``meta/argument_specs.yml``) and of variables in ``vars/main.yml`` and in the tasks' ``vars``. It accepts
names whose type it does not know, for example registered results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from files import ROOT
from jinja2 import Environment, nodes

CONDITIONS = ("when", "until", "failed_when", "changed_when")
#: Filters whose result is never a boolean.
NOT_BOOLEAN = frozenset(
    [
        "combine",
        "dict2items",
        "flatten",
        "int",
        "join",
        "length",
        "list",
        "map",
        "product",
        "select",
        "selectattr",
        "sort",
        "string",
        "to_json",
        "union",
        "unique",
    ]
)
TYPES = {bool: True, str: False, int: False, list: False, dict: False}
Known = Mapping[str, bool]


class _Anything(dict):  # type: ignore[type-arg]
    """Filters and tests of any name: parsing needs only that they exist."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> Any:
        return bool


_JINJA = Environment()
_JINJA.filters, _JINJA.tests = _Anything(_JINJA.filters), _Anything(_JINJA.tests)


def is_boolean(node: nodes.Node, known: Known) -> bool | None:
    """Return whether an expression is a boolean; None if that is not known."""
    if isinstance(node, (nodes.Compare, nodes.Not, nodes.Test)):
        return True
    if isinstance(node, (nodes.And, nodes.Or)):
        both = [is_boolean(each, known) for each in (node.left, node.right)]
        return False if False in both else True if all(both) else None
    if isinstance(node, nodes.Const):
        return isinstance(node.value, bool)
    if isinstance(node, nodes.Filter):
        return True if node.name in ("bool", "any", "all") else False if node.name in NOT_BOOLEAN else None
    if isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple, nodes.Concat, nodes.BinExpr)):
        return False
    if isinstance(node, nodes.Name):
        return known.get(node.name)
    return None


def operands(node: nodes.Node) -> list[nodes.Node]:
    """Return the operands of ``and`` and ``or`` of a condition. The result of ``not`` is a boolean."""
    return operands(node.left) + operands(node.right) if isinstance(node, (nodes.And, nodes.Or)) else [node]


def expression(text: str) -> nodes.Node:
    """Return the parsed expression."""
    (output,) = _JINJA.parse("{{ " + text + " }}").body
    assert isinstance(output, nodes.Output)
    return output.nodes[0]


def type_of_value(value: Any, known: Known) -> bool | None:
    """Return whether the value of a variable in YAML is a boolean: a constant, or a template."""
    if not isinstance(value, str) or "{" not in value:
        return TYPES.get(type(value))
    body = _JINJA.parse(value.strip()).body
    if len(body) == 1 and isinstance(body[0], nodes.Output):
        parts = body[0].nodes
        return is_boolean(parts[0], known) if len(parts) == 1 else False
    return None


def known_variables(values: Mapping[str, Any], known: Known) -> dict[str, bool]:
    """Return the variables whose type is known, with whether they are booleans. Templates can refer to each other."""
    found = dict(known)
    for _round in range(3):
        for name, value in values.items():
            kind = type_of_value(value, found)
            if kind is not None:
                found[name] = kind
    return found


def role_variables(role: Path) -> dict[str, bool]:
    """Return the types of a role's options and internal variables."""
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    options = {
        name: each["type"] == "bool" for spec in specs.values() for name, each in spec.get("options", {}).items()
    }
    path = role / "vars/main.yml"
    values = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known_variables(values or {}, options)


def condition_problems(path: Path, tasks: list[dict[str, Any]]) -> list[str]:
    """Return a message for each operand of a condition that is not a boolean."""
    role = ROOT / Path(*path.parts[:2])
    known = role_variables(role) if path.parts[0] == "roles" else {}
    problems = []
    for task in tasks:
        types = known_variables(task.get("vars") or {}, known)
        for keyword in CONDITIONS:
            stated = task.get(keyword)
            for text in stated if isinstance(stated, list) else [stated]:
                if not isinstance(text, str):
                    continue
                problems += [
                    f"{path}: {keyword} of {task.get('name')!r} is {text!r}: an operand is not a boolean. Compare it, for example with `| length > 0`."
                    for operand in operands(expression(text))
                    if is_boolean(operand, types) is False
                ]
    return problems
