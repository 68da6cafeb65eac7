# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Create container edits and CDI files, always with the lowest CDI version that supports their content.

Source: Container Device Interface specification 1.1.0 and the checks of its library.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .system import System

_KIND_PART = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_HOOK_NAMES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_DEVICE_TYPES = ("", "b", "c", "u", "p")
_Version = tuple[int, int, int]
_OLDEST: _Version = (0, 3, 0)
COMMON = "containerEdits"  # the key of the edits for all devices of a file
#: The environment of a hook that needs no variables. A hook without one inherits the environment of the container image in crun and in runc
#: before 1.3, so that LD_PRELOAD of an image runs code as root on the node (the class of CVE-2025-23266).
HOOK_ENVIRONMENT = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin",)

Edit = TypeVar("Edit")


@dataclass(frozen=True)
class DeviceNode:
    """A device node in the container. Without ``major`` the runtime reads type and numbers from the host's node."""

    path: str
    host_path: str = ""
    type: str = ""
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the node in the CDI file format."""
        return _without_empty(
            {
                "path": self.path,
                "hostPath": self.host_path if self.host_path != self.path else "",
                "type": self.type,
                "major": self.major,
                "minor": self.minor,
                "fileMode": self.file_mode,
                "permissions": self.permissions,
                "uid": self.uid,
                "gid": self.gid,
            }
        )


@dataclass(frozen=True)
class Mount:
    """A host file or directory that is mounted in the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "bind")
    type: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the mount in the CDI file format."""
        return _without_empty(
            {
                "hostPath": self.host_path,
                "containerPath": self.container_path,
                "options": list(self.options),
                "type": self.type,
            }
        )


@dataclass(frozen=True)
class Hook:
    """A program that the runtime calls. ``args`` begins with the program's name. ``env`` is never empty."""

    name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = HOOK_ENVIRONMENT
    timeout: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the hook in the CDI file format."""
        return _without_empty(
            {
                "hookName": self.name,
                "path": self.path,
                "args": list(self.args),
                "env": list(self.env),
                "timeout": self.timeout,
            }
        )


@dataclass(frozen=True)
class ContainerEdits:
    """The changes to a container that gets a device.

    ``lists`` are environment variables that contain device names, with their values. If a container gets several
    devices, the values are joined. For a variable in ``env`` the last value wins. A variable with an empty list is not
    set.
    """

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @staticmethod
    def merge(*edits: ContainerEdits) -> ContainerEdits:
        """Concatenate edits. Duplicates are kept once, and for a variable the last value wins."""
        variables: dict[str, str] = {}
        lists: dict[str, tuple[str, ...]] = {}
        for each in edits:
            for entry in each.env:
                variables[entry.partition("=")[0]] = entry
            for name, values in each.lists:
                lists[name] = _unique((*lists.get(name, ()), *values))
        return ContainerEdits(
            env=tuple(variables.values()),
            device_nodes=_unique(node for each in edits for node in each.device_nodes),
            mounts=_unique(mount for each in edits for mount in each.mounts),
            hooks=_unique(hook for each in edits for hook in each.hooks),
            additional_gids=_unique(gid for each in edits for gid in each.additional_gids),
            lists=tuple(lists.items()),
        )

    def __bool__(self) -> bool:
        plain = self.env or self.device_nodes or self.mounts or self.hooks or self.additional_gids
        return bool(plain) or any(values for _name, values in self.lists)

    @functools.cached_property
    def checked(self) -> tuple[dict[str, Any], _Version]:
        """Return the edits in the CDI file format, and the lowest CDI version that supports them.

        Do not change the result. The edits are validated once and cached, since the edits that claims share are equal
        for all claims. Raises ValueError, as ``validate_spec`` does.
        """
        edits = self.to_dict()
        _validate_edits(edits)
        return edits, _version_of_edits(edits)

    @functools.cached_property
    def text(self) -> str:
        """Return the edits in the CDI file format as JSON. Cached, like ``checked``. Raises ValueError."""
        return json.dumps(self.checked[0])

    def to_dict(self) -> dict[str, Any]:
        """Return the edits in the CDI file format, without validation."""
        return _without_empty(
            {
                "env": [*self.env, *(f"{name}={','.join(values)}" for name, values in self.lists if values)],
                "deviceNodes": [node.to_dict() for node in self.device_nodes],
                "mounts": [mount.to_dict() for mount in self.mounts],
                "hooks": [hook.to_dict() for hook in self.hooks],
                "additionalGids": list(self.additional_gids),
            }
        )

    @staticmethod
    def from_dict(edits: Mapping[str, Any]) -> ContainerEdits:
        """Parse edits that another program wrote in the CDI file format.

        A hook without an environment gets HOOK_ENVIRONMENT, because older vendor tools write such hooks. Raises
        ValueError for an unknown key or a value of the wrong type: edits are either used completely or rejected.
        """
        _check_types(edits)
        read = ContainerEdits(
            env=tuple(edits.get("env") or ()),
            device_nodes=tuple(_parse_edit(DeviceNode, _NODE_KEYS, node) for node in edits.get("deviceNodes") or ()),
            mounts=tuple(_parse_edit(Mount, _MOUNT_KEYS, mount) for mount in edits.get("mounts") or ()),
            hooks=tuple(_with_environment(_parse_edit(Hook, _HOOK_KEYS, hook)) for hook in edits.get("hooks") or ()),
            additional_gids=tuple(edits.get("additionalGids") or ()),
        )
        unknown = {str(key) for key in edits} - {"env", "deviceNodes", "mounts", "hooks", "additionalGids"}
        if unknown:
            raise ValueError(f"Container edits with unknown keys: {', '.join(sorted(unknown))}")
        _validate_edits(read.to_dict())
        return read


_NODE_KEYS = {
    "path": "path",
    "hostPath": "host_path",
    "type": "type",
    "major": "major",
    "minor": "minor",
    "fileMode": "file_mode",
    "permissions": "permissions",
    "uid": "uid",
    "gid": "gid",
}
_MOUNT_KEYS = {"hostPath": "host_path", "containerPath": "container_path", "options": "options", "type": "type"}
_HOOK_KEYS = {"hookName": "name", "path": "path", "args": "args", "env": "env", "timeout": "timeout"}
_STRINGS = "a list of strings"
_KNOWN_FIELDS = frozenset((*_NODE_KEYS, *_MOUNT_KEYS, *_HOOK_KEYS))
#: The type of each field of container edits, where it is not a string (CDI specification 1.1.0).
_FIELD_TYPES = {
    "major": "an integer",
    "minor": "an integer",
    "fileMode": "an integer",
    "uid": "an integer",
    "gid": "an integer",
    "timeout": "an integer",
    "options": _STRINGS,
    "args": _STRINGS,
    "env": _STRINGS,
}


def _check_types(edits: Any) -> None:
    """Raise ValueError, which names the field, if the type of a field differs from the CDI specification."""
    if not isinstance(edits, Mapping):
        raise ValueError(f"These are no container edits: {type(edits).__name__} instead of a mapping")  # noqa: TRY004
    for key, value in edits.items():
        if key == "env":
            _check_type("container edits", key, value)
        elif value is not None and not isinstance(value, list):
            raise ValueError(f"Container edits: {str(key)[:40]} is {type(value).__name__} instead of a list")
        elif key == "additionalGids":
            for gid in value or ():
                _check_type("container edits", "gid", gid)
        else:
            for entry in value or ():
                if not isinstance(entry, Mapping):
                    found = type(entry).__name__
                    raise ValueError(f"Container edits: {str(key)[:40]} has {found} instead of a mapping")  # noqa: TRY004
                for name, each in entry.items():
                    if name in _KNOWN_FIELDS:
                        _check_type(str(key)[:40], name, each)


def _check_type(where: str, name: Any, value: Any) -> None:
    """Raise ValueError unless a field's value has its type; null is the same as a field that is not set."""
    expected = _FIELD_TYPES.get(name, "a string")
    if expected == _STRINGS:
        valid = isinstance(value, list) and all(isinstance(each, str) for each in value)
    elif expected == "an integer":
        valid = isinstance(value, int) and not isinstance(value, bool)
    else:
        valid = isinstance(value, str)
    if value is not None and not valid:
        raise ValueError(f"Container edits, {where}: {str(name)[:40]} is {type(value).__name__} instead of {expected}")


def _parse_edit(kind: type[Edit], keys: Mapping[str, str], data: Mapping[str, Any]) -> Edit:
    unknown = {str(key) for key in data if key not in keys}
    if unknown:
        raise ValueError(f"{kind.__name__} with unknown keys: {', '.join(sorted(unknown))}")
    given = {key: value for key, value in data.items() if value is not None}
    try:
        return kind(**{keys[key]: tuple(value) if isinstance(value, list) else value for key, value in given.items()})
    except TypeError as error:  # a required field is missing
        raise ValueError(f"{kind.__name__}: {error}") from error


def _with_environment(hook: Hook) -> Hook:
    return hook if hook.env else replace(hook, env=HOOK_ENVIRONMENT)


def build_spec(
    kind: str,
    devices: Mapping[str, ContainerEdits],
    common: ContainerEdits | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a CDI file as data, with the lowest ``cdiVersion`` that its content needs.

    ``common`` is applied once if any of the devices is used. Raises ValueError, which names the invalid field, for
    content that a runtime would reject.
    """
    spec: dict[str, Any] = {"cdiVersion": "", "kind": kind}
    if annotations:
        spec["annotations"] = dict(annotations)
    spec["devices"] = [{"name": name, "containerEdits": edits.checked[0]} for name, edits in devices.items()]
    if common:
        spec[COMMON] = common.checked[0]
    needed = max(each.checked[1] for each in (*devices.values(), common or ContainerEdits()))
    spec["cdiVersion"] = _version_text(max(needed, _version_without_edits(spec)))
    _validate_without_edits(spec)
    return spec


def minimum_version(spec: Mapping[str, Any]) -> str:
    """Return the lowest CDI version that supports every field of a file."""
    return _version_text(
        max(_version_without_edits(spec), *(_version_of_edits(edits) for edits in _all_edits(spec)), _OLDEST)
    )


def _version_text(version: _Version) -> str:
    return ".".join(str(number) for number in version)


def _version_without_edits(spec: Mapping[str, Any]) -> _Version:
    """Return the version that everything except the container edits needs."""
    needed = [_OLDEST]
    if "." in str(spec.get("kind", "")).partition("/")[2]:
        needed.append((0, 6, 0))
    if spec.get("annotations"):
        needed.append((0, 6, 0))
    for device in spec.get("devices", ()):
        if str(device.get("name", ""))[:1].isdigit():
            needed.append((0, 5, 0))
        if device.get("annotations"):
            needed.append((0, 6, 0))
    return max(needed)


def _version_of_edits(edits: Mapping[str, Any]) -> _Version:
    needed = [_OLDEST]
    if any(mount.get("type") for mount in edits.get("mounts", ())):
        needed.append((0, 4, 0))
    if any(node.get("hostPath") for node in edits.get("deviceNodes", ())):
        needed.append((0, 5, 0))
    rdt = edits.get("intelRdt") or {}
    if rdt or edits.get("additionalGids"):
        needed.append((0, 7, 0))
    if edits.get("netDevices") or rdt.get("schemata") or rdt.get("enableMonitoring"):
        needed.append((1, 1, 0))
    return max(needed)


def validate_spec(spec: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the field, if a runtime would reject the file."""
    _validate_without_edits(spec)
    for edits in _all_edits(spec):
        _check_types(edits)
        _validate_edits(edits)
    declared = tuple(
        int(number) for number in str(spec.get("cdiVersion", "")).lstrip("v").split(".") if number.isdigit()
    )
    if declared < tuple(int(number) for number in minimum_version(spec).split(".")):
        raise ValueError(f"CDI version {spec.get('cdiVersion')!r} is too low: {minimum_version(spec)} is needed")


def _validate_without_edits(spec: Mapping[str, Any]) -> None:
    """Raise ValueError for invalid content other than container edits and the version."""
    kind = str(spec.get("kind", ""))
    vendor, _slash, name = kind.partition("/")
    for part, what, longest in ((vendor, "vendor", 253), (name, "class", 63)):
        if not _KIND_PART.fullmatch(part) or len(part) > longest:
            raise ValueError(
                f"CDI kind {kind!r}: the {what} {part!r} must start with a letter, end with a letter or digit, and have "
                f"{longest} characters at most"
            )
    devices = spec.get("devices") or []
    if not devices:
        raise ValueError(f"CDI file of kind {kind}: at least one device is needed")
    names = [device.get("name", "") for device in devices]
    for device_name in names:
        if not _DEVICE_NAME.fullmatch(device_name):
            raise ValueError(f"CDI device name {device_name!r} must start and end with a letter or digit")
        if names.count(device_name) > 1:
            raise ValueError(f"CDI device {device_name!r} exists twice")
    for device in devices:
        if not device.get("containerEdits"):
            raise ValueError(f"CDI device {device['name']!r} has no container edits; at least one is needed")


def spec_path(directory: str, kind: str, claim_uid: str) -> str:
    """Return the path of a claim's CDI file: ``<vendor>-<class>_<claim uid>.json``."""
    return f"{directory.rstrip('/')}/{_file_prefix(kind)}{claim_uid.replace('/', '_')}.json"


def write_spec(system: System, path: str, spec: Mapping[str, Any], common: ContainerEdits | None = None) -> None:
    """Write a CDI file from ``build_spec`` with these ``common`` edits, atomically, as JSON with a stable order.

    The file is not synced to disk, for speed: it is written again after a reboot.
    """
    # Write one line: with line breaks Python's encoder takes ten times as long, for each claim.
    text = json.dumps({key: value for key, value in spec.items() if key != COMMON} if common else spec)
    if common:  # the encoded common edits are cached, because each claim's file contains them
        text = f'{text[:-1]}, "{COMMON}": {common.text}}}'
    system.write_atomic(path, f"{text}\n".encode(), mode=0o644, durable=False)


def remove_spec(system: System, path: str) -> bool:
    """Remove a CDI file; return False if it did not exist."""
    return system.remove(path)


def list_specs(system: System, directory: str, kind: str) -> tuple[str, ...]:
    """Return the claim UIDs that have a file of this kind in the directory."""
    prefix = _file_prefix(kind)
    return tuple(
        name[len(prefix) : -len(".json")]
        for name in system.list_directory(directory)
        if name.startswith(prefix) and name.endswith(".json")
    )


def list_invalid_specs(system: System, directory: str, kind: str) -> tuple[str, ...]:
    """Return the UIDs of claims with an unreadable or invalid CDI file, for example of an earlier release.

    A container that restarts uses the existing file, so the driver writes these files again when it starts.
    """
    return tuple(
        uid
        for uid in list_specs(system, directory, kind)
        if not _is_valid_file(system, spec_path(directory, kind, uid))
    )


def repair_hooks(system: System, directory: str, kind: str) -> tuple[str, ...]:
    """Give HOOK_ENVIRONMENT to the hooks without an environment in the files of this kind.

    Return the claim UIDs of the changed files. This works without the hardware and the store, also for claims that cannot
    be restored now. Raises OSError after it has tried all files.
    """
    changed = []
    failed: OSError | None = None
    for uid in list_invalid_specs(system, directory, kind):
        path = spec_path(directory, kind, uid)
        try:
            spec = json.loads(system.read_text(path))
            hooks = [hook for edits in _all_edits(spec) for hook in edits.get("hooks") or () if not hook.get("env")]
            for hook in hooks:
                hook["env"] = list(HOOK_ENVIRONMENT)
            validate_spec(spec)
        except (FileNotFoundError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            continue  # deleted since, or invalid in another way: the driver restores the claim
        except OSError as error:
            failed = error
            continue
        if hooks:
            try:
                write_spec(system, path, spec)
            except OSError as error:
                failed = error
            else:
                changed.append(uid)
    if failed is not None:
        raise failed
    return tuple(changed)


def _is_valid_file(system: System, path: str) -> bool:
    try:
        validate_spec(json.loads(system.read_text(path)))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return False
    return True


def remove_temporary_specs(system: System, directory: str, kind: str) -> int:
    """Remove the temporary files of killed writers of CDI files of this kind; return their number.

    Call it only while no process writes such files: it also removes temporary files that are not yet renamed.
    """
    prefix = f".{_file_prefix(kind)}"
    found = [name for name in system.list_directory(directory) if name.startswith(prefix) and name.endswith(".tmp")]
    return sum(system.remove(f"{directory.rstrip('/')}/{name}") for name in found)


def _file_prefix(kind: str) -> str:
    return kind.replace("/", "-", 1) + "_"


def _all_edits(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = [device.get("containerEdits") or {} for device in spec.get("devices", ())]
    return [*found, spec["containerEdits"]] if spec.get("containerEdits") else found


def _validate_edits(edits: Mapping[str, Any]) -> None:
    _validate_environment(edits.get("env", ()))
    for node in edits.get("deviceNodes", ()):
        for key in ("path", "hostPath"):
            if (key == "path" or node.get(key)) and not _is_absolute(node.get(key)):
                raise ValueError(f"CDI device node {node.get(key)!r}: an absolute path without '..' is needed as {key}")
        if node.get("type", "") not in _DEVICE_TYPES:
            raise ValueError(f"CDI device node {node['path']}: type {node['type']!r} is not one of b, c, u, p")
        permissions = node.get("permissions", "")
        if permissions != "none" and set(permissions) - set("rwm"):
            raise ValueError(f"CDI device node {node['path']}: permissions {permissions!r} may hold r, w and m only")
    for mount in edits.get("mounts", ()):
        if not (_is_absolute(mount.get("hostPath")) and _is_absolute(mount.get("containerPath"))):
            raise ValueError(
                f"CDI mount {mount!r}: absolute paths without '..' are needed as hostPath and containerPath"
            )
    for hook in edits.get("hooks", ()):
        if hook.get("hookName") not in _HOOK_NAMES:
            raise ValueError(f"CDI hook {hook.get('hookName')!r} is not one of {', '.join(_HOOK_NAMES)}")
        if not _is_absolute(hook.get("path")):
            raise ValueError(f"CDI hook {hook['hookName']}: an absolute path is needed, not {hook.get('path')!r}")
        if not hook.get("env"):
            raise ValueError(
                f"CDI hook {hook['hookName']} ({hook['path']}) has no environment: a runtime can run it with the variables of the "
                f"container image, as root. Set env, for example to {HOOK_ENVIRONMENT[0]}"
            )
        _validate_environment(hook["env"])
        if hook.get("timeout") is not None and hook["timeout"] <= 0:
            raise ValueError(f"CDI hook {hook['hookName']}: the timeout must be above 0 s, not {hook['timeout']}")


def _validate_environment(entries: Iterable[str]) -> None:
    for entry in entries:
        if "=" not in entry or entry.startswith("=") or "\0" in entry:
            raise ValueError(f"CDI environment entry {entry!r} must be NAME=value, without a NUL character")


def _is_absolute(path: Any) -> bool:
    """Return whether a value is an absolute path without ``..`` and control characters."""
    return isinstance(path, str) and path.startswith("/") and ".." not in path.split("/") and path.isprintable()


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value not in ("", [])}


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
