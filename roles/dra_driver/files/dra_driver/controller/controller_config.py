# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse and validate the controller's configuration file (YAML)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import InvalidConfiguration
from ..core.model import OFFER_KINDS
from ..core.schema import Boolean, Choice, Integer, InvalidDocument, Problem, Record, any_of, decode, value_text
from ..core.vendors.registry import BACKENDS, create
from ..logs import FORMATS, LEVELS

DEFAULT_PATH = "/etc/dra-accelerators/controller.yaml"
#: The environment variable with the controller's name, because the pods of a Deployment share one configuration.
NAME_VARIABLE = "DRA_CONTROLLER_NAME"


@dataclass(frozen=True)
class Text:
    """A string. With ``address`` it must be host:port, or empty."""

    address: bool = False

    @property
    def expected(self) -> str:
        """Return a description of the expected value."""
        return "host:port, or nothing" if self.address else "a text"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the string."""
        good = isinstance(value, str) and (not self.address or not value or _is_address(value))
        if not good:
            problems.append(Problem(path, value_text(value), self.expected))
        return value


@dataclass(frozen=True)
class Texts:
    """A list of strings."""

    expected: str = "a list of texts"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the strings without duplicates."""
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            problems.append(Problem(path, value_text(value), self.expected))
            return ()
        return tuple(dict.fromkeys(value))


def _is_address(value: str) -> bool:
    host, colon, port = value.rpartition(":")
    return bool(colon and host) and port.isdecimal() and 0 < int(port) < 65536


@dataclass(frozen=True)
class WebhookSettings:
    """The admission webhook. ``address`` is "" for none; ``names`` are the host names and addresses in its certificate.

    ``report`` is whether it also serves the fleet report to authorized readers. With ``metrics`` the metrics are
    served here, to those who may read them, and no longer at the address of the status.
    """

    address: str = ""
    names: tuple[str, ...] = ()
    secret_name: str = "dra-accelerators-controller-authority"  # noqa: S105  the Secret's name
    certificate_seconds: int = 30 * 86400
    device_classes: Mapping[str, str] = field(default_factory=dict)
    report: bool = False
    metrics: bool = False


@dataclass(frozen=True)
class ControllerSettings:
    """The settings of the controller. Times are in seconds.

    ``grace`` is how long a Node object must be absent before its node counts as gone. ``drifting`` is how long a
    finding, such as an incomplete pool, must last before it is reported. ``lift_drains_after`` is how long a drain may
    last without a renewal before its rules are removed, 0 for no limit. ``driver_namespace`` is the namespace of the
    node drivers, for the lists of waiting claims; "" for no lists.
    """

    name: str
    kubeconfig: str = ""
    namespace: str = "dra-accelerators-controller"
    lease: str = "dra-accelerators-controller"
    drivers: tuple[str, ...] = ()
    driver_namespace: str = ""
    address: str = ""
    grace: int = 120
    interval: int = 30
    drifting: int = 600
    lift_drains_after: int = 0
    lease_seconds: int = 15
    token_lifetime: int = 2592000
    dry_run: bool = False
    log_level: str = "info"
    log_format: str = "text"
    webhook: WebhookSettings = field(default_factory=WebhookSettings)


@dataclass(frozen=True)
class Classes:
    """The kinds of devices of the configured DeviceClasses."""

    expected: str = f"a mapping of names to {any_of(OFFER_KINDS)}"

    def decode(self, value: Any, path: str, problems: list[Problem]) -> Any:
        """Return the mapping."""
        if not isinstance(value, dict) or not all(
            isinstance(name, str) and kind in OFFER_KINDS for name, kind in value.items()
        ):
            problems.append(Problem(path, value_text(value), self.expected))
        return value


WEBHOOK = Record(
    {
        "address": Text(address=True),
        "names": Texts(),
        "secret_name": Text(),
        "certificate_seconds": Integer(30, 365 * 86400, "seconds"),
        "device_classes": Classes(),
        "report": Boolean(),
        "metrics": Boolean(),
    }
)
SETTINGS = Record(
    {
        "name": Text(),
        "kubeconfig": Text(),
        "namespace": Text(),
        "lease": Text(),
        "drivers": Texts(),
        "driver_namespace": Text(),
        "address": Text(address=True),
        "grace": Integer(1, 86400, "seconds"),
        "interval": Integer(1, 3600, "seconds"),
        "drifting": Integer(1, 86400, "seconds"),
        "lift_drains_after": Integer(0, 30 * 86400, "seconds"),
        "lease_seconds": Integer(3, 300, "seconds"),
        "token_lifetime": Integer(600, 2**31, "seconds"),
        "dry_run": Boolean(),
        "log_level": Choice(LEVELS),
        "log_format": Choice(FORMATS),
        "webhook": WEBHOOK,
    },
    required=frozenset({"name"}),
)


def load(path: str) -> ControllerSettings:
    """Read a configuration file. NAME_VARIABLE has precedence over its ``name``.

    Raises InvalidConfiguration with the file and all errors.
    """
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfiguration(
            f"The configuration {path} could not be read: {error}", hint="The role dra_controller writes it."
        ) from error
    name = os.environ.get(NAME_VARIABLE, "")
    if name and isinstance(document, dict):
        document = {**document, "name": name}
    return parse(document, source=path)


def parse(document: Any, *, source: str = "the configuration") -> ControllerSettings:
    """Validate a parsed document and return the settings. Raises InvalidConfiguration."""
    try:
        values = dict(decode(SETTINGS, document or {}))
    except InvalidDocument as error:
        raise InvalidConfiguration(f"{source}: {error}") from None
    if "webhook" in values:
        values["webhook"] = WebhookSettings(**values["webhook"])
    if not values.get("drivers"):
        values["drivers"] = tuple(create(vendor).driver_name for vendor in BACKENDS)
    return ControllerSettings(**values)
