# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The identity of the machine whose driver wrote a state directory, so that a copy of a node's disk does not act as that node.

The driver stores the product UUID of the firmware (SMBIOS) and the machine ID of the operating system in ``machine.json``. A different
product UUID means a different machine: the disk was copied or moved, or the mainboard was replaced. A different machine ID alone does not,
because a reinstallation changes it. Only if neither the stored nor the current identity has a product UUID, as on boards without SMBIOS,
the machine IDs are compared. A machine ID that can change at each start counts as unknown: that of a container, and that of a system that
stores it in memory only.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .core.errors import AcceleratorError
from .core.host.system import System
from .core.store.state_files import STATE, STORE
from .logs import fields

LOG = logging.getLogger(__name__)

PART = "machine"
FILE = "machine.json"
VERSION = 1
PRODUCT_UUID, MACHINE_ID = "/sys/class/dmi/id/product_uuid", "/etc/machine-id"
#: One of these files exists if the machine ID can change at each start. systemd writes /run/machine-id if it cannot write /etc/machine-id
#: (machine-id(5)). The others exist in containers of systemd, Docker, and Podman.
TRANSIENT = ("/run/machine-id", "/run/systemd/container", "/.dockerenv", "/run/.containerenv")
#: Values that firmware vendors leave in boards without an own UUID. The first two are one value in both byte orders.
PLACEHOLDERS = (
    "03000200-0400-0500-0006-000700080009",
    "00020003-0004-0005-0006-000700080009",
    "12345678-1234-5678-90ab-cddeefaabbcc",
    "fefefefe-fefe-fefe-fefe-fefefefefefe",
    "4c4c4544-0000-2010-8020-80c04f202020",
)


class ForeignState(AcceleratorError):
    """A state directory was written on another machine, or it is unknown on which one."""

    default_code = "machine-changed"


@dataclass(frozen=True)
class Machine:
    """One machine. ``product_uuid`` is "" if the firmware has none, ``machine_id`` if the operating system has none."""

    product_uuid: str
    machine_id: str

    def is_other(self, stored: Machine) -> bool:
        """Return whether the stored identity is that of another machine."""
        if self.product_uuid or stored.product_uuid:
            same = (self.product_uuid, _with_other_byte_order(self.product_uuid))
            return "" not in (self.product_uuid, stored.product_uuid) and stored.product_uuid not in same
        return "" not in (self.machine_id, stored.machine_id) and self.machine_id != stored.machine_id

    def merged(self, stored: Machine) -> Machine:
        """Return the identity to store for the same machine. A value that cannot be read now keeps its stored value."""
        return Machine(self.product_uuid or stored.product_uuid, self.machine_id or stored.machine_id)

    def describe(self) -> str:
        """Return the identity as text."""
        return f"product UUID {self.product_uuid or 'unknown'}, machine ID {self.machine_id or 'unknown'}"


def _with_other_byte_order(product_uuid: str) -> str:
    """Return a product UUID with its first three fields in the other byte order.

    Since SMBIOS 2.6, these fields are little-endian. A firmware update can change the SMBIOS version, and so the text of the same UUID.
    """
    try:
        return str(uuid.UUID(bytes=uuid.UUID(product_uuid).bytes_le))
    except ValueError:
        return ""


def current_machine(system: System, stored: Machine | None = None) -> Machine:
    """Return the identity of this machine. Raises ForeignState if it cannot be compared with ``stored`` because of a read error."""
    product = _line(system, PRODUCT_UUID, stored.product_uuid if stored else "")
    is_own = re.fullmatch(r"[0-9a-f-]{36}", product) and len(set(product) - {"-"}) > 1 and product not in PLACEHOLDERS
    product = product if is_own else ""
    # Without product UUIDs the machine IDs are compared.
    machine_id = stored.machine_id if stored and not product and not stored.product_uuid else ""
    return Machine(product, "" if _is_transient(system, machine_id) else _line(system, MACHINE_ID, machine_id))


def _is_transient(system: System, stored: str) -> bool:
    """Return whether the machine ID can change at each start. After a read error it counts as unknown. Raises ForeignState."""
    try:
        return any(map(system.exists, TRANSIENT))
    except OSError as error:
        if not stored:
            return True
        raise _unknown(str(error.filename or TRANSIENT[0]), error, stored) from error


def _line(system: System, path: str, stored: str = "") -> str:
    try:
        return system.read_text(path).strip().lower()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""  # no SMBIOS, or no file
    except OSError as error:
        if not stored:
            return ""
        raise _unknown(path, error, stored) from error


def _unknown(path: str, error: OSError, stored: str) -> ForeignState:
    return ForeignState(
        f"{path} cannot be read: {error.strerror}. So it is unknown whether the state belongs to this machine, expected {stored}. "
        "The driver publishes no device and serves no claim, and tries again",
        hint="Run the driver as root, and check why the file cannot be read.",
        code="machine-unknown",
    )


def stored_machine(directory: str) -> Machine | None:
    """Return the identity in a state directory, or None if no identity was stored. Raises ForeignState if it cannot be read."""
    path = Path(directory) / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Machine(str(content["product_uuid"]), str(content["machine_id"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ForeignState(
            f"The machine's identity in {path} cannot be read: {error!r}. So it is unknown which machine wrote the state. The driver publishes "
            "no device and serves no claim, and tries again",
            hint="Check the disk. If this machine is a copy of a node, run `dra-driver machine reset`, then dra.accelerators.site for this "
            "machine under its own name. Otherwise run `dra-driver machine accept`.",
            code="machine-unknown",
        ) from error


def store_machine(directory: str, machine: Machine) -> None:
    """Store the identity of this machine in a state directory. Raises OSError."""
    document: Mapping[str, object] = {"version": VERSION, **vars(machine)}
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    System().write_atomic(f"{directory}/{FILE}", text.encode(), mode=0o600, directory_mode=0o750)


def check_machine(system: System, directory: str) -> None:
    """Store the identity of this machine, or verify that the state directory is its own. Raises ForeignState."""
    stored = stored_machine(directory)
    machine = current_machine(system, stored)
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


def remaining_problem(system: System, directory: str) -> str:
    """Return why the stored identity is still not that of this machine, or "". Raises ForeignState if a reset deleted the identity."""
    try:
        stored = stored_machine(directory)
        if stored is not None:
            refuse_other(current_machine(system, stored), stored, directory)
            return ""
    except ForeignState as error:
        return str(error)
    raise ForeignState(
        f"The state of another machine in {directory} was deleted. This process has the other node's configuration and ends",
        hint="Run dra.accelerators.site for this machine under its own name.",
        code="machine-reset",
    )


def delete_state(directory: str) -> tuple[str, ...]:
    """Delete the driver's state, and return the deleted paths. Sockets and locks of a running driver stay. Raises OSError.

    The identity is deleted last, after the other deletions are on the disk: until then the remaining state belongs to the other machine.
    """
    deleted = []
    system = System()
    for entry in sorted(Path(directory).iterdir(), key=lambda each: (each.name == FILE, each.name)):
        if not STATE.fullmatch(entry.name) and not entry.name.startswith(STORE):  # also copies of the store
            continue
        if entry.name == FILE:
            system.sync(directory)
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
        deleted.append(str(entry))
    system.sync(directory)
    return tuple(deleted)


def delete_file(path: str) -> bool:
    """Delete a file, and return whether it existed. The deletion is on the disk afterwards, also that of an earlier run. Raises OSError."""
    file = Path(path)
    existed = file.exists()
    file.unlink(missing_ok=True)
    if file.parent.is_dir():
        System().sync(str(file.parent))
    return existed
