# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Opaque configurations of claims and classes, decoded strictly by the kinds that the vendor's folder names.

A manifest written for the vendor's driver is understood; what it asks for beyond the defaults and this version does not
do is refused by name, never silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.model import ConfigKind
from .allocation import ClaimError, OpaqueConfig


def check_configs(
    kinds: Sequence[ConfigKind], configs: Iterable[OpaqueConfig], *, request: str, device_kind: str
) -> None:
    """Check all configurations that apply to one device. Raises ClaimError with code config-refused.

    A configuration that names the request must fit its kind of device; one for all requests passes by the devices that
    it is not made for.
    """
    for config in configs:
        kind = _kind(kinds, config, request)
        if kind.device_kind != device_kind:
            if config.requests:
                raise _refused(
                    request,
                    f"{kind.name} is for a {kind.device_kind}, and the request was given a {device_kind}",
                    "Use the kind that fits the request's DeviceClass.",
                )
            continue
        _check_fields(kind, config.parameters, request)


def _kind(known: Sequence[ConfigKind], config: OpaqueConfig, request: str) -> ConfigKind:
    api_version, name = config.parameters.get("apiVersion"), config.parameters.get("kind")
    for kind in known:
        if (kind.api_version, kind.name) == (api_version, name):
            return kind
    names = ", ".join(f"{kind.api_version} {kind.name}" for kind in known) or "none"
    raise _refused(request, f"its kind is {api_version} {name}", f"This version knows {names}.")


def _check_fields(kind: ConfigKind, parameters: Mapping[str, Any], request: str) -> None:
    for field, value in parameters.items():
        if field in ("apiVersion", "kind"):
            continue
        if field not in kind.refused_fields:
            raise _refused(request, f"{kind.name} has no field {field!r}", "Correct the configuration.")
        if value is None:
            continue
        strategy = value.get("strategy", "no strategy") if isinstance(value, Mapping) else value
        raise _refused(
            request, kind.refused_fields[field].format(strategy=strategy), f"Leave {field} out of the configuration."
        )


def _refused(request: str, found: str, hint: str) -> ClaimError:
    return ClaimError(
        f"The opaque configuration for request {request!r} cannot be used: {found}", hint=hint, code="config-refused"
    )
