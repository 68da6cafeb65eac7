# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define a runtime handler of containerd as a copy of the default handler with a few changes. This module has no side effects.

The handler can use another program, or allow unprivileged containers to open the devices of some vendors. An
unprivileged container is created from the handler's ``base_runtime_spec``, an OCI specification in a file. The device
rules in it stay, and containerd adds the rules that the kubelet requests (containerd's
internal/cri/server/container_create.go). Pods select the handler with a RuntimeClass. Kubernetes itself cannot allow a
pod to open devices that appear and disappear.
"""

from __future__ import annotations

import copy
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import AcceleratorError
from ..toml_edit import look_up
from .config import MARK, Change, File, Settings, table_of

#: The first device rule of an OCI specification: the rules after it are exceptions.
DENY_ALL = {"allow": False, "access": "rwm"}
_BEGIN, _END = "# BEGIN {name} of dra.accelerators", "# END {name} of dra.accelerators"


def base_specification(text: str, allowed: Sequence[Mapping[str, Any]]) -> str:
    """Return the OCI specification of the handler's containers as JSON, from the output of ``ctr oci spec``.

    ``allowed`` are the device rules of the vendors (_vendors.device_rules). Raises AcceleratorError.
    """
    try:
        document = json.loads(text)
        # The limits in it are those of ctr, not those of the kubelet's other containers.
        document["process"].pop("rlimits", None)
        document["linux"]["resources"]["devices"] = [DENY_ALL, *allowed]
    except (ValueError, KeyError, TypeError) as error:
        raise AcceleratorError(f"The output of `ctr oci spec` is not an OCI specification: {error!r}") from error
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def handlers(settings: Settings) -> Mapping[str, Any]:
    """Return containerd's runtime handlers by name."""
    found = look_up(settings.rest, (*_table(settings), "containerd", "runtimes"))
    return found if isinstance(found, Mapping) else {}


def wanted_handler(
    settings: Settings, specification: str = "", options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the handler: a copy of the default handler with a specification and with options for its program.

    Raises AcceleratorError if there is no default handler.
    """
    default = look_up(settings.rest, (*_table(settings), "containerd", "default_runtime_name")) or "runc"
    found = handlers(settings).get(default)
    if not isinstance(found, Mapping):
        raise AcceleratorError(
            f"containerd has no runtime handler {default}, although this is its default handler",
            hint="Expected containerd 1.7 or newer, whose `containerd config dump` contains its handlers.",
        )
    handler = copy.deepcopy(dict(found))
    if specification:
        handler["base_runtime_spec"] = specification
    if options:
        handler["options"] = {**handler.get("options", {}), **options}
    return handler


def candidates(
    settings: Settings,
    name: str,
    handler: Mapping[str, Any],
    main: File | None,
    path: str,
    folder: str | None,
    others: Mapping[str, Any] | None = None,
) -> list[Change]:
    """Return the changes that can add the handler, the least intrusive one first.

    ``others`` are handlers to write in addition, because containerd before 2.0 drops its default handlers if a file defines
    any handler.
    """
    handlers_to_write = {**{key: value for key, value in (others or {}).items() if key != name}, name: handler}
    found = []
    version = min(max(settings.version, 2), 3)
    block = _block(table_of(version), name, handlers_to_write)
    if folder is not None:
        found.append(Change(posixpath.join(folder, drop_in_name(name)), None, f"version = {version}\n{block}"))
    if main is None:
        found.append(Change(path, None, f"version = {version}\n{block}"))
    else:
        text = without_block(main.text, name)
        own = _block(main.table(), name, handlers_to_write)
        found.append(Change(path, main.text, (text if text.endswith("\n") or not text else text + "\n") + own))
    return found


def drop_in_name(name: str) -> str:
    """Return the name of the drop-in file of a handler."""
    return f"61-{name}.toml"


def without_block(text: str, name: str) -> str:
    """Return the text of a file without the lines of a handler."""
    begin, end = (re.escape(each.format(name=name)) for each in (_BEGIN, _END))
    return re.sub(rf"(?ms)^{begin}$.*?^{end}$\n?", "", text)


def text_before(text: str, name: str) -> str | None:
    """Return the text of a main file without a handler, or None for a file that was created for it."""
    left = without_block(text, name)
    return None if left != text and re.fullmatch(r"version = \d+\n", left) else left


def _table(settings: Settings) -> tuple[str, ...]:
    return table_of(settings.version)


def _block(table: Sequence[str], name: str, handlers_to_write: Mapping[str, Any]) -> str:
    lines = [_BEGIN.format(name=name), f"# Written by {MARK} (module containerd_handler)."]
    for key, handler in handlers_to_write.items():
        lines += _tables((*table, "containerd", "runtimes", key), handler)
    return "\n".join([*lines, _END.format(name=name), ""])


def _tables(path: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    lines = ["[" + ".".join(json.dumps(key) for key in path) + "]"]
    nested = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            nested.append((key, value))
        else:
            lines.append(f"{json.dumps(key)} = {json.dumps(value)}")
    for key, value in nested:
        lines += _tables((*path, key), value)
    return lines
