# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Which opaque configuration of a claim's and its class's holds for one device.

Facts: the API server merges nothing. A configuration holds for the requests that it names, or for all; one of the claim goes before
one of the class, a later one before an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.configuration import (
    ConfigKind,
    ConfigRefused,
    Configuration,
    decode_configuration,
    refuse_what_is_not_offered,
)
from .allocation import ClaimError, OpaqueConfig


def configuration_of(
    kinds: Sequence[ConfigKind], configs: Iterable[OpaqueConfig], *, request: str, device_kind: str
) -> Configuration | None:
    """Return the configuration that holds for one device, of those that apply to it from lowest to highest precedence.

    All of them have to be right, also those that another one goes before; that one alone has to be offered. One that names the request must fit its kind of
    device; one for all requests passes by the devices that it is not made for. Raises ClaimError with code config-refused.
    """
    chosen = None
    try:
        for config in configs:
            found = decode_configuration(kinds, config.parameters)
            if found.kind.device_kind == device_kind:
                chosen = found
            elif config.requests:
                raise ConfigRefused(
                    f"{found.kind.name} is for a {found.kind.device_kind}, and the request was given a {device_kind}",
                    hint="Use the kind that fits the request's DeviceClass.",
                )
        if chosen is not None:
            refuse_what_is_not_offered(chosen)
    except ConfigRefused as error:
        raise ClaimError(
            f"The opaque configuration for request {request!r} cannot be used: {error.message}",
            hint=error.hint,
            code=error.code,
        ) from error
    return chosen
