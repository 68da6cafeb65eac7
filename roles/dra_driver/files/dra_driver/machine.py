# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The identity of the machine whose driver wrote a state directory, so that a copy of a node's disk does not act as that node.

The driver stores the product UUID of the firmware (SMBIOS) and the machine ID of the operating system in ``machine.json``. A different
product UUID means a different machine: the disk was copied or moved, or the mainboard was replaced. A different machine ID alone does not:
a reinstallation changes the ID, and container-based nodes can get a new one at each start. Without a product UUID, as on boards without
SMBIOS, nothing is compared.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .core.errors import AcceleratorError
from .core.system import System
from .logs import fields

LOG = logging.getLogger(__name__)

PART = "machine"
FILE = "machine.json"
VERSION = 1
PRODUCT_UUID, MACHINE_ID = "/sys/class/dmi/id/product_uuid", "/etc/machine-id"
#: Values that firmware vendors leave in boards without an own UUID. The first two are one value in both byte orders.
PLACEHOLDERS = (
    "03000200-0400-0500-0006-000700080009",
    "00020003-0004-0005-0006-000700080009",
    "12345678-1234-5678-90ab-cddeefaabbcc",
    "fefefefe-fefe-fefe-fefe-fefefefefefe",
    "4c4c4544-0000-2010-8020-80c04f202020",
)
#: The driver's state below its state directory. Sockets and locks are not state.
_STATE = re.compile(r"\.?(state\.db|repartition|health|device-plugin|numbers|machine).*|handed-over|metadata")


class ForeignState(AcceleratorError):
    """A state directory was written on another machine."""

    default_code = "machine-changed"


@dataclass(frozen=True)
class Machine:
    """One machine. ``product_uuid`` is "" if the firmware has none, ``machine_id`` if the operating system has none."""

    product_uuid: str
    machine_id: str

    def is_other(self, stored: Machine) -> bool:
        """Return whether the stored identity is that of another machine."""
        return "" not in (self.product_uuid, stored.product_uuid) and self.product_uuid != stored.product_uuid

    def merged(self, stored: Machine) -> Machine:
        """Return the identity to store for the same machine. An identifier that cannot be read now keeps its stored value."""
        return Machine(self.product_uuid or stored.product_uuid, self.machine_id or stored.machine_id)

    def describe(self) -> str:
        """Return the identity as text."""
        return f"product UUID {self.product_uuid or 'unknown'}, machine ID {self.machine_id or 'unknown'}"


def current_machine(system: System) -> Machine:
    """Return the identity of this machine."""
    product = _line(system, PRODUCT_UUID)
    is_own = re.fullmatch(r"[0-9a-f-]{36}", product) and len(set(product) - {"-"}) > 1 and product not in PLACEHOLDERS
    return Machine(product if is_own else "", _line(system, MACHINE_ID))


def _line(system: System, path: str) -> str:
    try:
        return system.read_text(path).strip().lower()
    except (OSError, ValueError):
        return ""  # no SMBIOS, or no file


def stored_machine(directory: str) -> Machine | None:
    """Return the identity in a state directory, or None without a readable one."""
    path = Path(directory) / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, expected {VERSION}")
        return Machine(str(content["product_uuid"]), str(content["machine_id"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning(
            "the machine's identity cannot be read and is stored again: %s", error, extra=fields(path=str(path))
        )
        return None


def store_machine(directory: str, machine: Machine) -> None:
    """Store the identity of this machine in a state directory. Raises OSError."""
    document: Mapping[str, object] = {"version": VERSION, **vars(machine)}
    Path(directory).mkdir(mode=0o750, parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    System().write_atomic(f"{directory}/{FILE}", text.encode(), mode=0o600)


def check_machine(system: System, directory: str) -> None:
    """Store the identity of this machine, or verify that the state directory is its own. Raises ForeignState."""
    machine, stored = current_machine(system), stored_machine(directory)
    if stored is not None:
        refuse_other(machine, stored, directory)
        machine = machine.merged(stored)
    if machine != stored:
        try:
            store_machine(directory, machine)
        except OSError as error:
            LOG.warning("the machine's identity cannot be stored: %s", error, extra=fields(directory=directory))


def refuse_other(machine: Machine, stored: Machine, directory: str) -> None:
    """Raise ForeignState if the stored identity is that of another machine."""
    if machine.is_other(stored):
        raise ForeignState(
            f"The state in {directory} was written on another machine ({stored.describe()}), this one has {machine.describe()}. "
            "The driver publishes no device and serves no claim",
            hint="If this machine is a copy of a node, run `dra-driver machine reset`, then dra.accelerators.site for this machine under its "
            "own name. If it is the same node with a new mainboard or in another chassis, run `dra-driver machine accept`.",
        )


def is_accepted(system: System, directory: str) -> bool:
    """Return whether the stored identity is now that of this machine. Raises ForeignState if the identity was deleted by a reset."""
    stored = stored_machine(directory)
    if stored is None:
        raise ForeignState(
            f"The state of another machine in {directory} was deleted. This process has the other node's configuration and ends",
            hint="Run dra.accelerators.site for this machine under its own name.",
            code="machine-reset",
        )
    return not current_machine(system).is_other(stored)


def delete_state(directory: str) -> tuple[str, ...]:
    """Delete the driver's state, and return the deleted paths. Sockets and locks of a running driver stay. Raises OSError.

    The identity is deleted last: until then the remaining state belongs to the other machine.
    """
    deleted = []
    for entry in sorted(Path(directory).iterdir(), key=lambda each: (each.name == FILE, each.name)):
        if not _STATE.fullmatch(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
        deleted.append(str(entry))
    return tuple(deleted)
