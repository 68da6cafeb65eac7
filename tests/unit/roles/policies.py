# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Evaluate a ValidatingAdmissionPolicy as the API server does, without a cluster."""

from __future__ import annotations

import functools
from typing import Any

from cel_expr_python import cel  # type: ignore[import-not-found, import-untyped, unused-ignore]
from cel_expr_python.ext import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    ext_optional,
    ext_strings,
)

NAMES = ("object", "oldObject", "request", "variables")


@functools.cache
def _environment() -> Any:
    return cel.NewEnv(
        variables=dict.fromkeys(NAMES, cel.Type.DYN),
        extensions=[ext_optional.ExtOptional(), ext_strings.ExtStrings()],
    )


def evaluate(expression: str, values: dict[str, Any]) -> Any:
    """Return the value of a CEL expression. Raises AssertionError for an error, which denies a request."""
    found = (
        _environment()
        .compile(expression, disable_check=True)
        .eval(data={**dict.fromkeys(NAMES), "variables": {}, **values})
    )
    assert found.type() not in (cel.Type.ERROR, cel.Type.UNKNOWN), (expression, str(found.value()))
    return found.plain_value()


def denials(policy: dict[str, Any], **values: Any) -> list[str]:
    """Return the messages with which a policy denies a request. ``values`` are ``request``, ``object``, and ``oldObject``."""
    spec = policy["spec"]
    assert spec["failurePolicy"] == "Fail"
    if not all(evaluate(each["expression"], values) for each in spec.get("matchConditions", ())):
        return []
    variables: dict[str, Any] = {}
    values = {**values, "variables": variables}
    for each in spec.get("variables", ()):
        variables[each["name"]] = evaluate(each["expression"], values)
    return [
        str(evaluate(each["messageExpression"], values)) if "messageExpression" in each else each["message"]
        for each in spec["validations"]
        if not evaluate(each["expression"], values)
    ]


def matches(policy: dict[str, Any], group: str, resource: str, operation: str) -> bool:
    """Return whether a policy matches requests of this kind."""
    return any(
        group in rule["apiGroups"] and resource in rule["resources"] and operation in rule["operations"]
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
    )
