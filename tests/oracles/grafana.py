# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A dashboard read strictly by Grafana's own models, which Grafana Labs generate from Grafana's schemas (grafana-foundation-sdk).

The models take whatever they are given: they drop what they do not know, and do not look at types. So what is read is held against the
types that they declare, and what they write again against what was read: what is lost is unknown to Grafana.
"""

from __future__ import annotations

import enum
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

with warnings.catch_warnings():
    # Grafana reads dashboards of this schema, and would rather be given the next one: its models say so as they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.cog import plugins, runtime
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models import units

#: What Grafana calls its units.
UNITS = frozenset(value for name, value in vars(units).items() if name[0].isupper() and isinstance(value, str))


def problems(document: Mapping[str, Any]) -> list[str]:
    """Everything that Grafana would not take, or would leave out, by its path."""
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(dict(document))
    found = list(_misfits(read, "dashboard"))
    written = _plain(read)
    found += _lost(document, written, "dashboard")
    return found + [
        f"panel {panel['title']!r}: the type {panel['type']} is unknown"
        for panel in document.get("panels", ())
        if panel["type"] != "row" and runtime.panelcfg_config(panel["type"]) is None
    ]


def _plain(value: Any) -> Any:
    """A model as the JSON that it becomes."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (str, int, float)) else _plain(JSONEncoder().default(value))


def _lost(given: Any, written: Any, path: str) -> Iterator[str]:
    """What is in ``given`` and not in ``written``."""
    if isinstance(given, Mapping) and isinstance(written, Mapping):
        for key, value in given.items():
            if key in written:
                yield from _lost(value, written[key], f"{path}.{key}")
            elif value is not None:
                yield f"{path}.{key} is unknown"
    elif isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        for index, pair in enumerate(zip(given, written, strict=True)):
            yield from _lost(*pair, f"{path}[{index}]")
    elif given != written:
        yield f"{path} is {given!r} and becomes {written!r}"


def _misfits(model: Any, path: str) -> Iterator[str]:
    """Attributes of a model, and of the models in it, whose values are not of their declared types."""
    if isinstance(model, runtime.UnknownDataquery):
        yield f"{path} is a query of a type that is unknown"
        return
    hints = typing.get_type_hints(type(model))
    for name, hint in hints.items():
        value = getattr(model, name)
        if not _fits(value, hint):
            yield f"{path}.{name} is {value!r}; expected {hint}"
        yield from _inside(value, f"{path}.{name}")


def _inside(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _inside(each, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _inside(each, f"{path}.{key}")
    elif hasattr(value, "to_json"):
        yield from _misfits(value, path)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as far as it can be seen without looking into other models."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, arguments[1]) for each in value.values())
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [each.value for each in hint]
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, Mapping) and hasattr(hint, "from_json"):
        # Some models leave what is in them as it came.
        model = hint.from_json(dict(value))
        return not [*_misfits(model, ""), *_lost(value, _plain(model), "")]
    return isinstance(value, hint)
