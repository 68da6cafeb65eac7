# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Validate opaque configurations in manifests before an allocation, without access to a cluster or a device.

The check finds every error that the driver would report, except for values outside a device's own limits. Source:
resource.k8s.io/v1, v1beta2, and v1beta1. A request of v1beta1 contains the fields of ``exactly`` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..host.companions import sharing_of
from ..model import DEVICE, PARTITION, PASSTHROUGH
from ..model import GROUP as GROUPED
from ..schema import any_of, below, value_text
from ..settings.knobs import settings_of
from .opaque_config import ConfigKind, ConfigRefused, Configuration, decode_configuration

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
CLAIM, TEMPLATE, CLASS = "ResourceClaim", "ResourceClaimTemplate", "DeviceClass"


@dataclass(frozen=True)
class ManifestProblem:
    """One problem: the object (kind, namespace, and name), the field, and the message."""

    object: str
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.object}: {self.path}: {self.message}"


@dataclass(frozen=True)
class Checked:
    """The result of a check, and the number of checked configurations, which are those of known drivers.

    ``doubts`` are valid, but probably not intended.
    """

    configurations: int
    problems: tuple[ManifestProblem, ...]
    doubts: tuple[ManifestProblem, ...] = ()


@dataclass(frozen=True)
class _Request:
    """A request or subrequest by its full name, with its class, and whether it has admin access."""

    name: str
    device_class: str
    admin: bool


@dataclass(frozen=True)
class _Found:
    """A configuration of a known driver, its path in the object, and the requests that it names."""

    path: str
    requests: tuple[str, ...]
    parameters: Any
    kinds: Sequence[ConfigKind]


class _Malformed(Exception):
    """Stop the check of one object."""

    def __init__(self, path: str, found: Any, expected: str) -> None:
        super().__init__(f"{value_text(found)} instead of {expected}")
        self.path = path


def check_manifest(
    document: Any, config_kinds: Mapping[str, Sequence[ConfigKind]], device_kinds: Mapping[str, str]
) -> Checked:
    """Validate the configurations of one manifest, or of all objects in a List. Other objects have no configurations.

    ``config_kinds`` maps drivers to their known kinds. ``device_kinds`` maps classes to the kind of their devices
    (Offer.kind). Other classes can have any kind.
    """
    if not isinstance(document, Mapping):
        return Checked(0, ())
    if document.get("kind") == "List" or isinstance(document.get("items"), list):
        each = [check_manifest(item, config_kinds, device_kinds) for item in document.get("items") or ()]
        return Checked(
            sum(one.configurations for one in each),
            tuple(problem for one in each for problem in one.problems),
            tuple(doubt for one in each for doubt in one.doubts),
        )
    group, _slash, version = str(document.get("apiVersion")).partition("/")
    if group != GROUP or document.get("kind") not in (CLAIM, TEMPLATE, CLASS):
        return Checked(0, ())
    name = _name_of(document)
    if version not in VERSIONS:
        versions = any_of([f"{GROUP}/{each}" for each in VERSIONS])
        return Checked(0, (ManifestProblem(name, "apiVersion", f"it is {value_text(version)}; expected {versions}"),))
    try:
        requests, found = _read(document, config_kinds)
    except _Malformed as error:
        return Checked(0, (ManifestProblem(name, error.path, str(error)),))
    doubts: list[tuple[str, str]] = []
    problems = [ManifestProblem(name, path, message) for path, message in _check(requests, found, device_kinds, doubts)]
    return Checked(len(found), tuple(problems), tuple(ManifestProblem(name, *doubt) for doubt in doubts))


def _name_of(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    known = metadata if isinstance(metadata, Mapping) else {}
    name = known.get("name") or known.get("generateName") or "without a name"
    return f"{document['kind']} " + "/".join(str(part) for part in (known.get("namespace"), name) if part)


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _Malformed(path, value, "a mapping")
    return value


def _list(value: Any, path: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _Malformed(path, value, "a list")
    return value


def _read(
    document: Mapping[str, Any], config_kinds: Mapping[str, Sequence[ConfigKind]]
) -> tuple[list[_Request], list[_Found]]:
    """Return the requests of a claim or template, and the configurations of known drivers.

    A class counts as one request without a name.
    """
    spec, path = _mapping(document.get("spec"), "spec"), "spec"
    if document["kind"] == CLASS:
        metadata = _mapping(document.get("metadata"), "metadata")
        return [_Request("", str(metadata.get("name")), admin=False)], list(_configs(spec, path, config_kinds))
    if document["kind"] == TEMPLATE:
        spec, path = _mapping(spec.get("spec"), "spec.spec"), "spec.spec"
    path = f"{path}.devices"
    devices = _mapping(spec.get("devices"), path)
    requests: list[_Request] = []
    for number, entry in enumerate(_list(devices.get("requests"), f"{path}.requests")):
        requests += _requests(entry, f"{path}.requests[{number}]")
    return requests, list(_configs(devices, path, config_kinds))


def _requests(entry: Any, path: str) -> Iterator[_Request]:
    request = _mapping(entry, path)
    name = str(request.get("name"))
    alternatives = _list(request.get("firstAvailable"), f"{path}.firstAvailable")
    for number, alternative in enumerate(alternatives):
        each = _mapping(alternative, f"{path}.firstAvailable[{number}]")
        yield _Request(f"{name}/{each.get('name')}", str(each.get("deviceClassName")), admin=False)
    if not alternatives:
        exactly = _mapping(request.get("exactly"), f"{path}.exactly") or request
        yield _Request(name, str(exactly.get("deviceClassName")), admin=exactly.get("adminAccess") is True)


def _configs(
    holder: Mapping[str, Any], path: str, config_kinds: Mapping[str, Sequence[ConfigKind]]
) -> Iterator[_Found]:
    for number, entry in enumerate(_list(holder.get("config"), f"{path}.config")):
        here = f"{path}.config[{number}]"
        config = _mapping(entry, here)
        opaque = _mapping(config.get("opaque"), f"{here}.opaque")
        kinds = config_kinds.get(str(opaque.get("driver")))
        if kinds is not None:
            names = _list(config.get("requests"), f"{here}.requests")
            yield _Found(here, tuple(map(str, names)), opaque.get("parameters"), kinds)


def _check(
    requests: Sequence[_Request],
    found: Sequence[_Found],
    device_kinds: Mapping[str, str],
    doubts: list[tuple[str, str]],
) -> Iterator[tuple[str, str]]:
    applicable: dict[str, Configuration] = {}
    last_of_kind: dict[str, dict[str, tuple[str, Configuration]]] = {}
    for each in found:
        unknown = [name for name in each.requests if not any(_names_request(name, request) for request in requests)]
        if unknown:
            yield (
                f"{each.path}.requests",
                f"{any_of([value_text(name) for name in unknown])} is no request of this object",
            )
        try:
            configuration = _decoded(each)
        except ConfigRefused as error:
            for problem in error.problems:
                yield (
                    below(f"{each.path}.opaque.parameters", problem.path),
                    f"it is {problem.found}; expected {problem.expected}",
                )
            if not error.problems:
                yield f"{each.path}.opaque.parameters", str(error)
            continue
        named = [
            request
            for request in requests
            if not each.requests or any(_names_request(name, request) for name in each.requests)
        ]
        fitting = [request for request in named if _fits(configuration, request, device_kinds)]
        for request in [request for request in named if request not in fitting]:
            if each.requests or not fitting:
                yield each.path, _does_not_fit(configuration, request, device_kinds)
        if fitting:
            applicable[each.path] = configuration
        for request in fitting:
            last_of_kind.setdefault(request.name, {})[configuration.kind.name] = (each.path, configuration)
    # Only the last configuration of a kind applies. As in the driver, earlier ones are not checked for conflicts.
    effective = {path for kinds in last_of_kind.values() for path, _configuration in kinds.values()}
    doubts += [
        (path, f"it has no effect: of {configuration.kind.name} for the same requests a later one holds")
        for path, configuration in applicable.items()
        if path not in effective
    ]
    for request in requests:
        held = list(last_of_kind.get(request.name, {}).values())
        try:
            configurations = [configuration for _path, configuration in held]
            settings_of(configurations, admin=request.admin)
            sharing_of(configurations, admin=request.admin)
        except ConfigRefused as error:
            # A conflict requires a configuration, so there is a first one. The path is the list that contains it.
            path = held[0][0].rpartition("[")[0]
            yield path, f"{error} (request {request.name})" if request.name else str(error)


def _decoded(found: _Found) -> Configuration:
    if not isinstance(found.parameters, Mapping):
        raise ConfigRefused(
            f"it is {value_text(found.parameters)}", hint="Expected a mapping with apiVersion and kind."
        )
    return decode_configuration(found.kinds, found.parameters)


def _names_request(name: str, request: _Request) -> bool:
    return name in (request.name, request.name.partition("/")[0])


_ONE = {
    DEVICE: "a device",
    PARTITION: "a partition",
    PASSTHROUGH: "a device that is passed through",
    GROUPED: "a group",
}
_MANY = {DEVICE: "devices", PARTITION: "partitions", PASSTHROUGH: "devices that are passed through", GROUPED: "groups"}


def _fits(configuration: Configuration, request: _Request, device_kinds: Mapping[str, str]) -> bool:
    return configuration.kind.suits(device_kinds.get(request.device_class, configuration.kind.device_kind))


def _does_not_fit(configuration: Configuration, request: _Request, device_kinds: Mapping[str, str]) -> str:
    kind = configuration.kind
    given = f"the class {request.device_class} has {_MANY[device_kinds[request.device_class]]}"
    asked = f"; request {request.name} is for that class" if request.name else ""
    return f"{kind.name} is for {_ONE[kind.device_kind]}, and {given}{asked}"
