# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The driver's configuration file (YAML): what may be in it, what it means, and clear refusal of everything else."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .core.backend import BACKENDS, BY_RUNTIME, vendors_there
from .core.errors import AcceleratorError
from .core.health import DEFAULT_EFFECTS, EFFECTS
from .core.layout_rules import Rule, parse_rules
from .core.signs import Severity
from .logs import FORMATS, LEVELS

DEFAULT_PATH = "/etc/dra-accelerators/driver.yaml"
# What a driver in a pod is told; on a node whose driver is one, commands read it.
POD_PATH = "/etc/dra-accelerators/driver-pod.yaml"
# The environment variable that tells an instance of the driver from another one beside it: in a pod, the pod's UID.
INSTANCE_VARIABLE = "DRA_DRIVER_INSTANCE"
# How the kubelet has the node's devices given to pods: for claims, or as resources that a device plugin offers.
DRA, DEVICE_PLUGIN = "dra", "device-plugin"
INTERFACES = (DRA, DEVICE_PLUGIN)


class InvalidConfiguration(AcceleratorError):
    """The configuration file has a key or a value that the driver does not know."""

    default_code = "invalid-configuration"


@dataclass(frozen=True)
class LogConfiguration:
    """How the driver logs."""

    level: str = "info"
    format: str = "text"


@dataclass(frozen=True)
class Configuration:
    """Everything the node driver is told.

    Paths are absolute. ``kubeconfig`` "" means the service account of the pod that the driver runs in.
    ``metrics_address`` is "host:port" or "" for no listener. ``metrics_certificate`` and ``metrics_key`` are PEM files for TLS, "" for
    none. With ``metrics_authorization`` callers need a token that the API server authorizes. With ``read_pods`` the driver reads pods to
    find the containers of devices. In seconds are ``inventory_interval`` between scans of what
    changes of the devices, ``full_inventory_interval`` between looks at everything, and ``token_lifetime``, which the
    driver asks for when it renews its token. ``health_effects`` is what a published device's taint does, by the severity of
    what is wrong with it; "" for no taint. ``health_reset`` says that devices which ask for a reset get one while they are idle.
    ``kubelet_interface`` is how devices are given to pods, one of INTERFACES.
    ``vendor_runtimes`` are the backends whose devices the vendor's own container runtime brings into containers.
    ``instance`` tells this process from another driver of the same name beside it; "" where none is to be expected.
    ``device_rules`` is the digest of the device rules of the pod's container, which keeps those that it was created with.
    ``digest`` is that of the file's text.
    """

    node_name: str
    kubeconfig: str = ""
    driver_name: str = ""
    kubelet_root: str = "/var/lib/kubelet"
    cdi_directory: str = "/var/run/cdi"
    state_directory: str = ""
    pool_name: str = ""
    backends: tuple[str, ...] = tuple(BACKENDS)
    vendor_runtimes: tuple[str, ...] = ()
    kubelet_interface: str = DRA
    layout: tuple[Rule, ...] = ()
    layout_rules: tuple[Mapping[str, Any], ...] = ()
    metrics_address: str = ""
    metrics_certificate: str = ""
    metrics_key: str = ""
    metrics_authorization: bool = False
    read_pods: bool = False
    inventory_interval: float = 30.0
    full_inventory_interval: float = 300.0
    token_lifetime: int = 2592000
    health_reset: bool = False
    health_effects: Mapping[Severity, str] = field(default_factory=lambda: dict(DEFAULT_EFFECTS))
    log: LogConfiguration = field(default_factory=LogConfiguration)
    device_rules: str = ""
    instance: str = ""
    digest: str = ""

    def needing_restart(self, other: Configuration) -> tuple[str, ...]:
        """Return the settings in which another configuration differs and which a running process cannot take over."""
        return tuple(
            each.name
            for each in fields(self)
            if each.name not in RELOADABLE and getattr(self, each.name) != getattr(other, each.name)
        )

    def state_directory_of(self, driver_name: str) -> str:
        """Return the folder of one driver's state and DRA socket."""
        return self.state_directory or f"{self.kubelet_root}/plugins/{driver_name}"

    @property
    def serves_claims(self) -> bool:
        """Whether devices are given to claims; else a device plugin offers them."""
        return self.kubelet_interface == DRA

    @property
    def plugins_directory(self) -> str:
        """The folder of the kubelet's socket for device plugins, and of theirs."""
        return f"{self.kubelet_root}/device-plugins"

    @property
    def registry_directory(self) -> str:
        """The folder that the kubelet watches for plugins."""
        return f"{self.kubelet_root}/plugins_registry"


#: What a process takes over while it runs. All else is who it is, or where its files and sockets are.
RELOADABLE = (
    "layout",
    "layout_rules",
    "inventory_interval",
    "full_inventory_interval",
    "token_lifetime",
    "health_reset",
    "health_effects",
    "log",
    "digest",
)
_PATHS = ("kubeconfig", "kubelet_root", "cdi_directory", "state_directory", "metrics_certificate", "metrics_key")
_TEXTS = ("node_name", "driver_name", "pool_name", "metrics_address", "device_rules")
_INTERVALS = ("inventory_interval", "full_inventory_interval")


def load(path: str) -> Configuration:
    """Read a configuration file. Raises InvalidConfiguration, naming the file and the key."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except FileNotFoundError:
        raise InvalidConfiguration(
            f"There is no configuration file {path}",
            hint="The dra_driver role writes it; name another one with --config.",
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfiguration(f"{path} could not be read as YAML: {error}") from error
    return replace(
        parse(document, source=path),
        instance=_instance(os.environ.get(INSTANCE_VARIABLE, "")),
        digest=_digest(text),
    )


def default_path() -> str:
    """Return the file that a command reads where none is named."""
    return POD_PATH if not Path(DEFAULT_PATH).exists() and Path(POD_PATH).exists() else DEFAULT_PATH


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse(document: Any, *, source: str = "the configuration") -> Configuration:
    """Make a Configuration out of a parsed document. Raises InvalidConfiguration, naming the key."""
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise InvalidConfiguration(f"{source} holds {_kind(document)}; expected a mapping of keys to values")
    known = (
        set(_PATHS)
        | set(_TEXTS)
        | {
            "backends",
            "vendor_runtimes",
            "kubelet_interface",
            "layout",
            *_INTERVALS,
            "token_lifetime",
            "health_effects",
            "health_reset",
            "metrics_authorization",
            "read_pods",
            "log",
        }
    )
    unknown = sorted(str(key) for key in document if key not in known)
    if unknown:
        raise InvalidConfiguration(
            f"{source} has unknown keys: {', '.join(unknown)}", hint=f"Known keys are {', '.join(sorted(known))}."
        )
    values: dict[str, Any] = {key: _text(document, key, source) for key in (*_PATHS, *_TEXTS) if key in document}
    for key in _PATHS:
        if values.get(key) and not os.path.isabs(values[key]):  # noqa: PTH117  a text is tested, no file is looked at
            raise InvalidConfiguration(f"{key} in {source} is {values[key]!r}; expected an absolute path")
        if key in values:
            values[key] = values[key].rstrip("/") if key != "kubeconfig" else values[key]
    values["node_name"] = (values.get("node_name") or socket.gethostname()).lower()
    # Who says nothing has the vendors of whose devices there are any: one text serves nodes that differ.
    values["backends"] = (
        _backends(document["backends"], source) if "backends" in document else vendors_there() or tuple(BACKENDS)
    )
    values["vendor_runtimes"] = _vendor_runtimes(document.get("vendor_runtimes"), source)
    values["kubelet_interface"] = _interface(document.get("kubelet_interface"), source)
    if len(values["backends"]) > 1 and (values.get("driver_name") or values.get("state_directory")):
        raise InvalidConfiguration(
            f"{source} sets driver_name or state_directory with {len(values['backends'])} backends",
            hint="Each backend has a driver name and a folder of its own; leave both out.",
        )
    rules = document.get("layout") or []
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise InvalidConfiguration(f"layout in {source} is {_kind(rules)}; expected a list of rules")
    try:
        values["layout"] = parse_rules(rules)
    except AcceleratorError as error:
        raise InvalidConfiguration(f"layout in {source}: {error}") from error
    values["layout_rules"] = tuple(rules)
    values.update({key: _interval(document, key, source) for key in _INTERVALS if key in document})
    if "token_lifetime" in document:
        values["token_lifetime"] = _lifetime(document["token_lifetime"], source)
    if "health_reset" in document:
        values["health_reset"] = _truth(document, "health_reset", source)
    for key in ("metrics_authorization", "read_pods"):
        if key in document:
            values[key] = _truth(document, key, source)
    if "health_effects" in document:
        values["health_effects"] = _effects(document["health_effects"], source)
    values["log"] = _log(document.get("log"), source)
    _check_address(values.get("metrics_address", ""), source)
    if bool(values.get("metrics_certificate")) != bool(values.get("metrics_key")):
        raise InvalidConfiguration(
            f"{source} has one of metrics_certificate and metrics_key",
            hint="Set both for TLS, or none.",
        )
    if values.get("metrics_authorization") and not values.get("metrics_certificate"):
        raise InvalidConfiguration(
            f"metrics_authorization in {source} is true without metrics_certificate, so that tokens would cross the network in clear text",
            hint="Set metrics_certificate and metrics_key as well.",
        )
    return Configuration(**values)


def _instance(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]{0,63}", value):
        raise InvalidConfiguration(
            f"{INSTANCE_VARIABLE} is {value!r}; expected letters, digits and hyphens, 63 at most",
            hint="In a pod it is the pod's UID (metadata.uid).",
        )
    return value


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "a text", bool: "a truth value"}.get(type(value), repr(value))


def _text(document: Mapping[str, Any], key: str, source: str) -> str:
    value = document[key]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidConfiguration(f"{key} in {source} is {value!r}; expected a text")
    return value


def _backends(value: Any, source: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise InvalidConfiguration(f"backends in {source} is {value!r}; expected a list of names")
    unknown = [name for name in value if name not in BACKENDS]
    if unknown:
        raise InvalidConfiguration(
            f"backends in {source} names {', '.join(unknown)}", hint=f"This version has {', '.join(sorted(BACKENDS))}."
        )
    return tuple(dict.fromkeys(value))


def _vendor_runtimes(value: Any, source: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name in BY_RUNTIME for name in value):
        raise InvalidConfiguration(
            f"vendor_runtimes in {source} is {value!r}; expected a list of any of {', '.join(sorted(BY_RUNTIME))}"
        )
    return tuple(dict.fromkeys(value))


def _interface(value: Any, source: str) -> str:
    if value is None:
        return DRA
    if value not in INTERFACES:
        raise InvalidConfiguration(
            f"kubelet_interface in {source} is {value!r}; expected {' or '.join(INTERFACES)}",
            hint="With dra pods have devices by claims, with device-plugin by resources in their limits.",
        )
    return str(value)


def _interval(document: Mapping[str, Any], key: str, source: str) -> float:
    value = document[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 3600:
        raise InvalidConfiguration(f"{key} in {source} is {value!r}; expected 1 to 3600 seconds")
    return float(value)


def _lifetime(value: Any, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 600:
        raise InvalidConfiguration(
            f"token_lifetime in {source} is {value!r}; expected a number of seconds, 600 at least",
            hint="The API server issues no token for less than ten minutes.",
        )
    return value


def _truth(document: Mapping[str, Any], key: str, source: str) -> bool:
    value = document[key]
    if not isinstance(value, bool):
        raise InvalidConfiguration(f"{key} in {source} is {value!r}; expected true or false")
    return value


def _effects(value: Any, source: str) -> Mapping[Severity, str]:
    words = {severity.word: severity for severity in Severity}
    if not isinstance(value, dict) or set(value) - set(words) or not all(each in EFFECTS for each in value.values()):
        raise InvalidConfiguration(
            f"health_effects in {source} is {value!r}; expected a mapping of {', '.join(words)} to NoExecute, NoSchedule, "
            'None or "" (no taint)'
        )
    return {**DEFAULT_EFFECTS, **{words[word]: effect for word, effect in value.items()}}


def _log(value: Any, source: str) -> LogConfiguration:
    if value is None:
        return LogConfiguration()
    if not isinstance(value, dict) or set(value) - {"level", "format"}:
        raise InvalidConfiguration(f"log in {source} is {value!r}; expected the keys level and format")
    level: str | None = value.get("level", "info")
    style: str | None = value.get("format", "text")
    if level not in LEVELS or style not in FORMATS:
        raise InvalidConfiguration(
            f"log in {source} has level {level!r} and format {style!r}; expected level {' or '.join(LEVELS)} and "
            f"format {' or '.join(FORMATS)}"
        )
    return LogConfiguration(level=level, format=style)


def _check_address(value: str, source: str) -> None:
    if not value:
        return
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidConfiguration(f"metrics_address in {source} is {value!r}; expected host:port, or nothing")
