# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Parse and validate the driver's configuration file (YAML)."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .core.errors import AcceleratorError
from .core.health.conditions import Severity
from .core.health.tracker import DEFAULT_EFFECTS, EFFECTS
from .core.host.system import path_exists
from .core.partitioning.rules import Rule, parse_rules
from .core.vendors.registry import BACKENDS, BY_RUNTIME, WITH_NETWORK_TOOLS, vendors_there
from .logs import FORMATS, LEVELS

DEFAULT_PATH = "/etc/dra-accelerators/driver.yaml"
# The configuration of a driver in a pod. Commands on the node read it too, if the driver runs in a pod.
POD_PATH = "/etc/dra-accelerators/driver-pod.yaml"
# The environment variable that identifies one of several instances of the driver on a node. In a pod it is the pod's
# UID.
INSTANCE_VARIABLE = "DRA_DRIVER_INSTANCE"
# How pods get the node's devices through the kubelet: by claims, or as resources of a device plugin.
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
    """The settings of the node driver.

    Paths are absolute. ``kubeconfig`` "" means the service account of the pod that the driver runs in.
    ``metrics_address`` is "host:port" or "" for no listener. ``metrics_certificate`` and ``metrics_key`` are PEM files
    for TLS, "" for none. With ``metrics_authorization`` callers need a token that the API server authorizes. With
    ``read_pods`` the driver reads pods to find the containers of devices. ``inventory_interval`` is the time between
    scans of the devices' changing facts, and ``full_inventory_interval`` between scans of all facts. ``token_lifetime``
    is the lifetime that the driver requests when it renews its token. All three are in seconds. ``health_effects`` maps
    the severity of a fault to the effect of the device's taint; "" means no taint. With ``health_reset`` the driver
    resets idle devices that need a reset. ``kubelet_interface`` is one of INTERFACES. ``vendor_runtimes`` are the
    backends whose devices the vendor's own container runtime adds to containers. ``network_tools`` are the backends
    whose containers get the tool and the addresses of the devices' network ports. ``instance`` identifies this process
    among drivers of the same name on the node; "" if there is only one. ``device_rules`` is the digest of the device
    rules of the pod's container. A container keeps the rules that it was created with. ``digest`` is the digest of the
    file's text. ``namespace`` is where the controller writes the list of claims that the node prepares before pods are
    bound.
    """

    node_name: str
    namespace: str = "dra-accelerators"
    kubeconfig: str = ""
    driver_name: str = ""
    kubelet_root: str = "/var/lib/kubelet"
    cdi_directory: str = "/var/run/cdi"
    state_directory: str = ""
    pool_name: str = ""
    backends: tuple[str, ...] = tuple(BACKENDS)
    vendor_runtimes: tuple[str, ...] = ()
    network_tools: tuple[str, ...] = ()
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
        """Return the settings that differ in another configuration and that need a restart of the process."""
        return tuple(
            each.name
            for each in fields(self)
            if each.name not in RELOADABLE and getattr(self, each.name) != getattr(other, each.name)
        )

    def state_directory_of(self, driver_name: str) -> str:
        """Return the directory of one driver's state and DRA socket."""
        return self.state_directory or f"{self.kubelet_root}/plugins/{driver_name}"

    @property
    def serves_claims(self) -> bool:
        """Return whether the driver serves claims. Otherwise a device plugin offers the devices."""
        return self.kubelet_interface == DRA

    @property
    def plugins_directory(self) -> str:
        """Return the directory of the device-plugin sockets of the kubelet and of the plugins."""
        return f"{self.kubelet_root}/device-plugins"

    @property
    def registry_directory(self) -> str:
        """Return the directory in which the kubelet watches for plugins."""
        return f"{self.kubelet_root}/plugins_registry"


#: The settings that a running process can change. The others are its identity, or paths of its files and sockets.
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
_TEXTS = ("node_name", "namespace", "driver_name", "pool_name", "metrics_address", "device_rules")
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
    """Return the path of the configuration file that a command reads by default."""
    return POD_PATH if not path_exists(DEFAULT_PATH) and path_exists(POD_PATH) else DEFAULT_PATH


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse(document: Any, *, source: str = "the configuration") -> Configuration:
    """Validate a parsed document and return its Configuration. Raises InvalidConfiguration, naming the key."""
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
            "network_tools",
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
        if values.get(key) and not os.path.isabs(values[key]):  # noqa: PTH117  only the string is tested, no file is read
            raise InvalidConfiguration(f"{key} in {source} is {values[key]!r}; expected an absolute path")
        if key in values:
            values[key] = values[key].rstrip("/") if key != "kubeconfig" else values[key]
    values["node_name"] = (values.get("node_name") or socket.gethostname()).lower()
    # The default is the vendors with devices on this node, so that one file fits different nodes.
    values["backends"] = (
        _backends(document["backends"], source) if "backends" in document else vendors_there() or tuple(BACKENDS)
    )
    values["vendor_runtimes"] = _vendors(document, "vendor_runtimes", BY_RUNTIME, source)
    values["network_tools"] = _vendors(document, "network_tools", WITH_NETWORK_TOOLS, source)
    both = sorted({*values["vendor_runtimes"]} & {*values["network_tools"]})
    if both:
        raise InvalidConfiguration(
            f"{source} names {', '.join(both)} in vendor_runtimes and in network_tools",
            hint="The vendor's runtime has separate mount lists. Remove the vendor from one of the two options.",
        )
    values["kubelet_interface"] = _interface(document.get("kubelet_interface"), source)
    if len(values["backends"]) > 1 and (values.get("driver_name") or values.get("state_directory")):
        raise InvalidConfiguration(
            f"{source} sets driver_name or state_directory with {len(values['backends'])} backends",
            hint="Each backend has a separate driver name and directory. Remove both options.",
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
    return {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean"}.get(type(value), repr(value))


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


def _vendors(document: Mapping[str, Any], key: str, known: Collection[str], source: str) -> tuple[str, ...]:
    value = document.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name in known for name in value):
        raise InvalidConfiguration(
            f"{key} in {source} is {value!r}; expected a list of any of {', '.join(sorted(known))}"
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
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidConfiguration(f"metrics_address in {source} is {value!r}; expected host:port, or nothing")
