# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Select the opaque configurations of a claim and its class that apply to one device, and return their settings.

Facts: the API server merges nothing. A configuration applies to the requests that it names, or to all. One of the claim
has precedence over one of the class, and a later one over an earlier one. This is so for each kind: a power limit of a
class also applies to claims that share devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.dra.opaque_config import ConfigKind, ConfigRefused, Configuration, decode_configuration
from ..core.host.companions import sharing_of
from ..core.model import DEVICE, Offer
from ..core.schema import any_of
from ..core.settings.knobs import settings_of
from .allocation import AllocatedDevice, ClaimError, OpaqueConfig


def configurations_of(
    kinds: Sequence[ConfigKind], configs: Iterable[OpaqueConfig], *, request: str, device_kind: str
) -> tuple[Configuration, ...]:
    """Return the configurations that apply to one device, at most one of each kind.

    ``configs`` are sorted from lowest to highest precedence. All of them must be valid, also those that are overridden.
    One that names the request must fit the kind of the device. One for all requests skips devices of other kinds;
    ``refuse_unfitting`` checks that it fits at least one. Raises ClaimError with code config-refused.
    """
    chosen: dict[str, Configuration] = {}
    with _Refusing(request):
        for config in configs:
            found = decode_configuration(kinds, config.parameters)
            if found.kind.suits(device_kind):
                chosen[found.kind.name] = found
            elif config.requests:
                raise ConfigRefused(
                    f"{found.kind.name} is for a {found.kind.device_kind}, but the request has a {device_kind}",
                    hint="Use the kind that fits the request's DeviceClass.",
                )
    return tuple(chosen.values())


def refuse_unfitting(kinds: Sequence[ConfigKind], devices: Sequence[tuple[AllocatedDevice, str]]) -> None:
    """Refuse a configuration for all requests that fits no device of the claim.

    ``devices`` are all devices, each with its kind. Otherwise it would be ignored silently. If a device was chosen
    among alternatives, the configuration may be for one that was not chosen. Raises ClaimError with code
    config-refused.
    """
    if any("/" in device.request for device, _kind in devices):
        return
    given = any_of(sorted({f"a {kind}" for _device, kind in devices}))
    for config in devices[0][0].configs if devices else ():
        if config.requests:
            continue
        with _Refusing(devices[0][0].request):
            kind = decode_configuration(kinds, config.parameters).kind
        if not any(kind.suits(device_kind) for _device, device_kind in devices):
            raise ClaimError(
                f"The opaque configuration for all requests cannot be used: {kind.name} is for a {kind.device_kind}, but the claim "
                f"has {given}",
                hint="Use the kind that fits the requests' DeviceClasses, or leave the configuration out.",
                code=ConfigRefused.default_code,
            )


def settings_for(configurations: Iterable[Configuration], *, request: str, admin: bool) -> dict[str, Any]:
    """Return the settings of configurations for one device. Raises ClaimError with code config-refused."""
    with _Refusing(request):
        return settings_of(configurations, admin=admin)


def refuse_other_profile(
    configurations: Iterable[Configuration], *, request: str, name: str, profile: str | None
) -> None:
    """Refuse a partition whose profile differs from the configurations.

    ``name`` is its published name. Raises ClaimError with code config-refused.
    """
    with _Refusing(request):
        for each in configurations:
            wanted = each.kind.profile(each.values)
            if wanted and wanted != profile:
                raise ConfigRefused(
                    f"{each.kind.name} requires the profile {wanted}, but the request has {name} with {profile}",
                    hint="The scheduler does not read configurations: select the same profile by the DeviceClass or by a selector.",
                )


def interface_of(configurations: Iterable[Configuration]) -> tuple[bool, bool]:
    """Return whether a virtual machine prefers iommufd, and whether it needs that interface's device node (see core/dra/opaque_config.py)."""
    found = [each.kind.passthrough(each.values) for each in configurations]
    return found[-1] if found else (False, False)


def sharing_for(
    configurations: Iterable[Configuration],
    *,
    request: str,
    admin: bool,
    consumed: Mapping[str, int],
    totals: Mapping[str, int],
    alongside: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Return the configuration of one device's companion, within the capacity that the claim has ``consumed`` of a shared device.

    ``alongside`` are the UUIDs of the devices with the same configuration. Raises ClaimError with code config-refused.
    """
    with _Refusing(request):
        return sharing_of(configurations, admin=admin, consumed=consumed, totals=totals, alongside=alongside)


def shared_alike(
    kinds: Sequence[ConfigKind], devices: Sequence[tuple[AllocatedDevice, Offer]]
) -> tuple[tuple[str, ...], ...]:
    """Return, for each whole device of a claim, the UUIDs of the devices whose sharing the same configuration defines.

    The result is empty for a device without such a configuration, and for partitions, whose UUIDs are not known yet.
    """
    said = [_saying(kinds, allocated, offer) for allocated, offer in devices]
    found = []
    for mine in said:
        alike = {
            offer.device_uuid for (_each, offer), other in zip(devices, said) if mine is not None and other is mine
        }
        found.append(tuple(sorted(alike)))
    return tuple(found)


def _saying(kinds: Sequence[ConfigKind], allocated: AllocatedDevice, offer: Offer) -> OpaqueConfig | None:
    """Return the last configuration that defines how a whole device is shared."""
    said = None
    for config in allocated.configs if offer.kind == DEVICE else ():
        with _Refusing(allocated.request):
            configuration = decode_configuration(kinds, config.parameters)
        if configuration.kind.suits(offer.kind) and configuration.kind.sharing(configuration.values):
            said = config
    return said


class _Refusing:
    """Add the claim's request to configuration errors.

    It is a class because it is used for each configuration, and generators are slower.
    """

    def __init__(self, request: str) -> None:
        self._request = request

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ConfigRefused):
            raise ClaimError(
                f"The opaque configuration for request {self._request!r} cannot be used: {error.message}",
                hint=error.hint,
                code=error.code,
            ) from error
