# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""The containerd that k3s and RKE2 bring: where it lies, and what its generated settings say. No side effects.

Facts: at each start both write ``config.toml`` of their containerd from a template. With containerd 2.x, which k3s has from 1.31.6
and 1.32.2 on, CDI is on by default. From k3s pull request 13680 on (2026; RKE2 is built from the same code) the file imports
``config-v3.toml.d/*.toml`` beside it. A template of one's own that brings a second ``imports`` line would keep such a release from
starting, so that none is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._containerd import FOLDERS, SWITCH, File, patterns, table_of, version_of
from ._containerd_daemon import ContainerdError
from ._runtime_choice import K3S, RKE2
from ._toml import header_of, look_up

#: How people write the names, the folder of all that each of them keeps, and where its containerd lies below that.
_NAMES = {K3S: "k3s", RKE2: "RKE2"}
_DATA = {K3S: "/var/lib/rancher/k3s", RKE2: "/var/lib/rancher/rke2"}
_PROGRAMS = {K3S: "data/current/bin/containerd", RKE2: "bin/containerd"}


@dataclass(frozen=True)
class Place:
    """Where a distribution keeps its containerd and the settings that it writes."""

    name: str
    folder: str
    program: str

    @property
    def generated(self) -> str:
        """The file that is written at each start."""
        return f"{self.folder}/config.toml"

    @property
    def drop_ins(self) -> str:
        """The folder that releases of 2026 and later import."""
        return f"{self.folder}/config-v3.toml.d"


def place_of(runtime: str, data: str = "") -> Place:
    """Return where the containerd of k3s or RKE2 is; ``data`` is its ``--data-dir`` where that is another one."""
    top = (data or _DATA[runtime]).rstrip("/")
    return Place(_NAMES[runtime], f"{top}/agent/etc/containerd", f"{top}/{_PROGRAMS[runtime]}")


def settings_of(file: File) -> tuple[bool, tuple[str, ...]]:
    """Return whether the settings that k3s or RKE2 wrote have CDI on, and the folders that they name."""
    version = version_of(file.document())
    table = look_up(file.document(), table_of(version)) or {}
    enabled = bool(table.get(SWITCH, version >= 3))
    return enabled, tuple(table.get(FOLDERS) or ("/etc/cdi", "/var/run/cdi"))


def is_set_up_by_drop_ins(file: File | None) -> bool:
    """Whether a drop-in file would be read, and merged: containerd 2.x, and settings that import files."""
    return file is not None and version_of(file.document()) >= 3 and bool(patterns(file, file.path))


def refusal(unit: str, place: Place, file: File | None, wanted: Sequence[str]) -> ContainerdError:
    """Return why a node that runs k3s or RKE2 is refused, with what a person has to set, word for word."""
    found = (
        f"in {place.generated} CDI is {'on, but not for ' + ' and '.join(wanted) if settings_of(file)[0] else 'off'}"
        if file
        else f"{place.generated} was not found, so that it is not known whether CDI is on"
    )
    return ContainerdError(
        f"{unit} runs a containerd of its own, whose settings {place.name} writes anew at each start; {found}",
        hint=f"{_advice(unit, place, file, wanted)}. Then leave the role container_runtime out for this host "
        "(accelerator_container_runtime: false in playbooks/site.yml) or run it again; from containerd 2.0 on CDI is on by default, and "
        f"a {place.name} whose settings import {place.drop_ins} is set up by this role.",
        code="distribution",
    )


def _advice(unit: str, place: Place, file: File | None, wanted: Sequence[str]) -> str:
    version = version_of(file.document()) if file else 3
    template = f"{place.folder}/config-v3.toml.tmpl" if version >= 3 else f"{place.folder}/config.toml.tmpl"
    folders = "[" + ", ".join(f'"{each}"' for each in wanted) + "]"
    return (
        f"Copy {place.generated} to {template} if that file is not there yet, set `enable_cdi = true` and "
        f"`cdi_spec_dirs = {folders}` in its table {header_of(table_of(version))}, and run `systemctl restart {unit}`; {place.name} "
        f"then writes its settings from that template"
    )
