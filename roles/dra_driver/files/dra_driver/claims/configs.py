# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Select the opaque configurations of a claim, and decide which settings it changes on whole devices.

Facts: the API server merges nothing. A configuration applies to the requests that it names, or to all. One of the claim
has precedence over one of the class, and a later one over an earlier one. This is so for each kind: a power limit of a
class also applies to claims that share devices.

The previous value of a setting is in the store's meta table before the setting changes, and is deleted after the
restore. So entries without a claim are pending cleanups. Settings do not survive a reboot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.dra.opaque_config import ConfigKind, ConfigRefused, Configuration, decode_configuration
from ..core.errors import InUse
from ..core.host.companions import sharing_of
from ..core.model import DEVICE, Offer
from ..core.schema import any_of
from ..core.settings.knobs import (
    PERSISTENCE,
    SETTING_KEY,
    Knob,
    fit_to_device,
    noted_before,
    noting,
    read_noting,
    setting_key,
    settings_of,
)
from ..core.texts import join_problems
from .allocation import AllocatedDevice, ClaimError, OpaqueConfig
from .store.records import ClaimRecord


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


@dataclass(frozen=True)
class Restoration:
    """A setting of a device to restore. ``before`` is the previous value, or None for the device's default."""

    device_uuid: str
    name: str
    before: Any

    @property
    def key(self) -> str:
        """Return the key of the previous value in the meta table."""
        return setting_key(self.device_uuid, self.name)


def wanted_of(record: ClaimRecord) -> dict[str, Mapping[str, Any]]:
    """Return the settings that a claim changes, by device. Devices without changes are left out."""
    return {uuid: held.settings for held in record.devices if held.settings for uuid in held.device_uuids}


def fit_settings(record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]]) -> ClaimRecord:
    """Validate a claim's settings against its devices, and return the record with values within the devices' limits.

    Raises ClaimError with the device, each invalid field, and its valid values.
    """
    fitted = []
    for held in record.devices:
        for uuid in held.device_uuids if held.settings else ():
            there = knobs[uuid]
            # No claim requests persistence. It stays unchanged if the device does not support it or must keep it.
            wanted = {
                name: value
                for name, value in held.settings.items()
                if name != PERSISTENCE or (name in there and not there[name].blocked)
            }
            values, problems = fit_to_device(wanted, there)
            if problems:
                raise ClaimError(
                    f"Claim {record.describe()} cannot set device {held.name} ({uuid}): " + join_problems(problems),
                    hint="Correct the configuration in the claim or its DeviceClass.",
                    code="config-refused",
                )
            held = replace(held, settings=values)
        fitted.append(held)
    return replace(record, devices=tuple(fitted))


def previous_setting_entries(
    record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]], meta: Mapping[str, str], boot_id: str
) -> dict[str, str]:
    """Return the previous values as changes of the meta table. Existing entries of this boot are kept."""
    found = {}
    for uuid, values in wanted_of(record).items():
        for name in values:
            key = setting_key(uuid, name)
            if key not in meta or read_noting(meta[key])[0] != boot_id:
                found[key] = noting(boot_id, knobs[uuid][name].value)
    return found


def forgotten(records: Iterable[ClaimRecord], meta: Mapping[str, str], boot_id: str) -> dict[str, str]:
    """Return entries for claims of this boot whose previous values were lost with a store: the device's default.

    Without them, the driver would later read the claims' own values as the previous ones.
    """
    return {
        key: noting(boot_id, None)
        for record in records
        if record.boot_id == boot_id
        for uuid, values in wanted_of(record).items()
        for name in values
        if (key := setting_key(uuid, name)) not in meta
    }


def refuse_contradiction(record: ClaimRecord, records: Iterable[ClaimRecord]) -> None:
    """Refuse a claim that needs another value of a setting than a claim that shares the device.

    Raises InUse, naming that claim.
    """
    for other in records:
        if other.uid == record.uid:
            continue
        for uuid, values in wanted_of(other).items():
            for name, value in wanted_of(record).get(uuid, {}).items():
                if name in values and values[name] != value:
                    raise InUse(
                        f"Claim {record.describe()} wants {name} of device {uuid} to be {value}, and claim {other.describe()}, "
                        f"which shares it, has set {values[name]}",
                        claims=(other.describe(),),
                        hint="Ask for the same, or for another device.",
                    )


def restorations(
    record: ClaimRecord, records: Iterable[ClaimRecord], meta: Mapping[str, str], boot_id: str
) -> tuple[Restoration, ...]:
    """Return the settings to restore when a claim ends: those that it changed and that no other claim needs.

    A setting without a recorded previous value (a lost store) gets the device's default.
    """
    before = {(each.device_uuid, each.name): each for each in _noted(meta, boot_id)}
    return tuple(
        before.get(knob) or Restoration(*knob, None)
        for knob in sorted(_turned([record]) - _turned(other for other in records if other.uid != record.uid))
    )


def pending_restorations(
    meta: Mapping[str, str], boot_id: str, records: Iterable[ClaimRecord]
) -> tuple[Restoration, ...]:
    """Return the settings that were changed in this boot and that no claim needs any more."""
    turned = _turned(records)
    return tuple(each for each in _noted(meta, boot_id) if (each.device_uuid, each.name) not in turned)


def _turned(records: Iterable[ClaimRecord]) -> set[tuple[str, str]]:
    """Return the settings that claims change, as device and name."""
    return {(uuid, name) for record in records for uuid, values in wanted_of(record).items() for name in values}


def restorations_to_meta(left: Iterable[Restoration], boot_id: str) -> dict[str, str]:
    """Return the settings that could not be restored, as changes of the meta table."""
    return {each.key: noting(boot_id, each.before) for each in left}


def void_settings(meta: Mapping[str, str], boot_id: str) -> dict[str, None]:
    """Return the removal of entries of previous boots, as changes of the meta table, because the reboot reset these settings."""
    return {
        key: None for key, value in meta.items() if key.startswith(SETTING_KEY) and read_noting(value)[0] != boot_id
    }


def _noted(meta: Mapping[str, str], boot_id: str) -> Iterable[Restoration]:
    return [Restoration(uuid, name, before) for (uuid, name), before in noted_before(meta, boot_id).items()]
