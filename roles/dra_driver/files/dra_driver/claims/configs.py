# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Select the opaque configurations of a claim, and decide which settings it changes on whole devices.

Facts: the API server does not merge configurations. A configuration applies to the requests that it names, or to all
requests. A configuration of the claim has precedence over one of the class, and a later one over an earlier one of the
same kind. Configurations of different kinds apply together.

Before a setting changes, its previous value is written to the store's meta table. It is deleted after the setting was
restored. So an entry of a setting that no claim changes is a pending cleanup. Settings do not survive a reboot.
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
    decode_previous_value,
    encode_previous_value,
    fit_to_device,
    setting_key,
    settings_of,
    values_before_claims,
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
    ``refuse_unsuitable_configs`` checks that it fits at least one. Raises ClaimError with code config-refused.
    """
    chosen: dict[str, Configuration] = {}
    with _ConfigErrorsOfRequest(request):
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


def refuse_unsuitable_configs(kinds: Sequence[ConfigKind], devices: Sequence[tuple[AllocatedDevice, str]]) -> None:
    """Refuse a configuration for all requests that fits no device of the claim, because it would have no effect.

    ``devices`` are all devices, each with its kind. If a request has alternatives, the configuration may be for one that
    was not chosen, and is accepted. Raises ClaimError with code config-refused.
    """
    if any("/" in device.request for device, _kind in devices):
        return
    given = any_of(sorted({f"a {kind}" for _device, kind in devices}))
    for config in devices[0][0].configs if devices else ():
        if config.requests:
            continue
        with _ConfigErrorsOfRequest(devices[0][0].request):
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
    with _ConfigErrorsOfRequest(request):
        return settings_of(configurations, admin=admin)


def refuse_other_profile(
    configurations: Iterable[Configuration], *, request: str, name: str, profile: str | None
) -> None:
    """Refuse a partition whose profile differs from the configurations.

    ``name`` is its published name. Raises ClaimError with code config-refused.
    """
    with _ConfigErrorsOfRequest(request):
        for each in configurations:
            wanted = each.kind.profile(each.values)
            if wanted and wanted != profile:
                raise ConfigRefused(
                    f"{each.kind.name} requires the profile {wanted}, but the request has {name} with {profile}",
                    hint="The scheduler does not read configurations: select the same profile by the DeviceClass or by a selector.",
                )


def passthrough_interface(configurations: Iterable[Configuration]) -> tuple[bool, bool]:
    """Return two booleans for passthrough: whether iommufd is preferred, and whether its device node is needed.

    See core/dra/opaque_config.py.
    """
    found = [each.kind.passthrough(each.values) for each in configurations]
    return found[-1] if found else (False, False)


def sharing_for(
    configurations: Iterable[Configuration],
    *,
    request: str,
    admin: bool,
    consumed: Mapping[str, int],
    totals: Mapping[str, int],
    peer_uuids: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Return the configuration of the daemon that shares one device, for example of an MPS daemon.

    The capacity that the claim has ``consumed`` of the device limits the values. ``peer_uuids`` are the UUIDs of all
    devices with the same configuration. Raises ClaimError with code config-refused.
    """
    with _ConfigErrorsOfRequest(request):
        return sharing_of(configurations, admin=admin, consumed=consumed, totals=totals, alongside=peer_uuids)


def uuids_by_sharing_config(
    kinds: Sequence[ConfigKind], devices: Sequence[tuple[AllocatedDevice, Offer]]
) -> tuple[tuple[str, ...], ...]:
    """Return, for each whole device of a claim, the UUIDs of all devices that have the same sharing configuration.

    The entry is empty for a device without such a configuration, and for partitions, whose UUIDs are not known yet.
    """
    configs = [_sharing_config(kinds, allocated, offer) for allocated, offer in devices]
    return tuple(
        tuple(
            sorted(
                {
                    offer.device_uuid
                    for (_allocated, offer), other in zip(devices, configs)
                    if config is not None and other is config
                }
            )
        )
        for config in configs
    )


def _sharing_config(kinds: Sequence[ConfigKind], allocated: AllocatedDevice, offer: Offer) -> OpaqueConfig | None:
    """Return the last configuration that defines how a whole device is shared; None for other devices."""
    found = None
    for config in allocated.configs if offer.kind == DEVICE else ():
        with _ConfigErrorsOfRequest(allocated.request):
            configuration = decode_configuration(kinds, config.parameters)
        if configuration.kind.suits(offer.kind) and configuration.kind.sharing(configuration.values):
            found = config
    return found


class _ConfigErrorsOfRequest:
    """A context manager that adds the request to configuration errors.

    A class is faster than ``contextlib.contextmanager``, and the driver uses it for every device of a claim.
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


def settings_by_uuid(record: ClaimRecord) -> dict[str, Mapping[str, Any]]:
    """Return the settings that a claim changes, by device. Devices without changes are left out."""
    return {
        uuid: device_record.settings
        for device_record in record.devices
        if device_record.settings
        for uuid in device_record.device_uuids
    }


def fit_settings(record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]]) -> ClaimRecord:
    """Validate a claim's settings against its devices, and return the record with values within the devices' limits.

    Raises ClaimError with the device, each invalid field, and its valid values.
    """
    fitted = []
    for device_record in record.devices:
        for uuid in device_record.device_uuids if device_record.settings else ():
            available = knobs[uuid]
            # The driver itself adds persistence. It stays unchanged if the device does not support it or must keep it.
            wanted = {
                name: value
                for name, value in device_record.settings.items()
                if name != PERSISTENCE or (name in available and not available[name].blocked)
            }
            values, problems = fit_to_device(wanted, available)
            if problems:
                raise ClaimError(
                    f"Claim {record.describe()} cannot set device {device_record.name} ({uuid}): "
                    + join_problems(problems),
                    hint="Correct the configuration in the claim or its DeviceClass.",
                    code="config-refused",
                )
            device_record = replace(device_record, settings=values)
        fitted.append(device_record)
    return replace(record, devices=tuple(fitted))


def previous_setting_entries(
    record: ClaimRecord, knobs: Mapping[str, Mapping[str, Knob]], meta: Mapping[str, str], boot_id: str
) -> dict[str, str]:
    """Return the previous values as changes of the meta table. Existing entries of this boot are kept."""
    found = {}
    for uuid, values in settings_by_uuid(record).items():
        for name in values:
            key = setting_key(uuid, name)
            if key not in meta or decode_previous_value(meta[key])[0] != boot_id:
                found[key] = encode_previous_value(boot_id, knobs[uuid][name].value)
    return found


def default_setting_entries(records: Iterable[ClaimRecord], meta: Mapping[str, str], boot_id: str) -> dict[str, str]:
    """Return entries with the device's default as previous value, for claims of this boot whose entries were lost.

    Without them, the driver would later read the claims' own values as the previous values.
    """
    return {
        key: encode_previous_value(boot_id, None)
        for record in records
        if record.boot_id == boot_id
        for uuid, values in settings_by_uuid(record).items()
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
        for uuid, values in settings_by_uuid(other).items():
            for name, value in settings_by_uuid(record).get(uuid, {}).items():
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
    """Return the settings to restore when a claim ends, because it has changed them and no other claim needs them.

    A setting without a recorded previous value (a lost store) gets the device's default.
    """
    recorded = {(each.device_uuid, each.name): each for each in _recorded_restorations(meta, boot_id)}
    return tuple(
        recorded.get((device_uuid, name)) or Restoration(device_uuid, name, None)
        for device_uuid, name in sorted(
            _changed_settings([record]) - _changed_settings(other for other in records if other.uid != record.uid)
        )
    )


def pending_restorations(
    meta: Mapping[str, str], boot_id: str, records: Iterable[ClaimRecord]
) -> tuple[Restoration, ...]:
    """Return the settings that were changed in this boot and that no claim needs any more."""
    needed = _changed_settings(records)
    return tuple(each for each in _recorded_restorations(meta, boot_id) if (each.device_uuid, each.name) not in needed)


def _changed_settings(records: Iterable[ClaimRecord]) -> set[tuple[str, str]]:
    """Return the settings that claims change, as device and name."""
    return {(uuid, name) for record in records for uuid, values in settings_by_uuid(record).items() for name in values}


def restorations_to_meta(failed: Iterable[Restoration], boot_id: str) -> dict[str, str]:
    """Return the settings that could not be restored, as changes of the meta table."""
    return {each.key: encode_previous_value(boot_id, each.before) for each in failed}


def obsolete_setting_entries(meta: Mapping[str, str], boot_id: str) -> dict[str, None]:
    """Return changes of the meta table that remove the entries of previous boots, because a reboot resets all settings."""
    return {
        key: None
        for key, value in meta.items()
        if key.startswith(SETTING_KEY) and decode_previous_value(value)[0] != boot_id
    }


def _recorded_restorations(meta: Mapping[str, str], boot_id: str) -> Iterable[Restoration]:
    """Return the previous values that were recorded in this boot."""
    return [Restoration(uuid, name, before) for (uuid, name), before in values_before_claims(meta, boot_id).items()]
