# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Find the containerd of k3s, RKE2, and MicroK8s: its program, its generated settings, and the settings that a user must make.

At each start these distributions write the main file of their containerd from a template. With containerd 2.x, which
k3s has from 1.31.6 and 1.32.2 on, CDI is on by default, whatever the version of the template. From k3s pull request
13680 on (2026; RKE2 is built from the same code) the file imports ``config-v3.toml.d/*.toml`` in the same directory. A
template with a second ``imports`` line would prevent such a release from starting, so this collection writes no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.host.system import System
from .containerd.config import DIRECTORIES_KEY, File, Settings, drop_in_folder, patterns, table_of, version_of
from .containerd.daemon import ContainerdError, Daemon
from .detect import K3S, MICROK8S, RKE2
from .toml_edit import header_of

#: The display names of the distributions, the data directory of k3s and RKE2, and the path of containerd in it.
_NAMES = {K3S: "k3s", RKE2: "RKE2"}
_DATA = {K3S: "/var/lib/rancher/k3s", RKE2: "/var/lib/rancher/rke2"}
_PROGRAMS = {K3S: "data/current/bin/containerd", RKE2: "bin/containerd"}
_MICROK8S_ARGUMENTS = "/var/snap/microk8s/current/args"


@dataclass(frozen=True)
class Place:
    """The paths of a distribution's containerd and of its generated settings.

    ``templates`` are the templates for settings of version 3 and later, and of version 2.
    """

    name: str
    program: str
    generated: str
    drop_ins: str
    templates: tuple[str, str]


def place_of(runtime: str, data: str = "") -> Place:
    """Return the paths of a distribution's containerd. ``data`` is a non-default ``--data-dir`` of k3s or RKE2."""
    if runtime == MICROK8S:
        template = f"{_MICROK8S_ARGUMENTS}/containerd-template.toml"
        return Place(
            "MicroK8s",
            "/snap/microk8s/current/bin/containerd",
            f"{_MICROK8S_ARGUMENTS}/containerd.toml",
            f"{_MICROK8S_ARGUMENTS}/containerd.d",
            (template, template),
        )
    top = (data or _DATA[runtime]).rstrip("/")
    folder = f"{top}/agent/etc/containerd"
    return Place(
        _NAMES[runtime],
        f"{top}/{_PROGRAMS[runtime]}",
        f"{folder}/config.toml",
        f"{folder}/config-v3.toml.d",
        (f"{folder}/config-v3.toml.tmpl", f"{folder}/config.toml.tmpl"),
    )


def daemon_of(system: System, place: Place, unit: str, wanted: Sequence[str], timeout: float) -> Daemon:
    """Return the containerd of a distribution."""
    file = _generated(system, place)
    return Daemon(
        system,
        command=place.program,
        config=place.generated,
        service=unit,
        timeout=timeout,
        advice=_advice(unit, place, file, wanted),
    )


def ready_daemon(system: System, place: Place, unit: str, wanted: Sequence[str], timeout: float) -> Daemon:
    """Return the containerd of a distribution that has CDI on, or that imports drop-in files. Raises ContainerdError.

    The distribution's own containerd reads the files, because the default of CDI depends on the release.
    """
    file = _generated(system, place)
    missing = [path for path in (place.generated, place.program) if not system.exists(path)]
    if file is None or missing:
        raise refusal(
            unit, place, file, f"{missing[0]} does not exist, so the module cannot read whether CDI is enabled", wanted
        )
    daemon = daemon_of(system, place, unit, wanted, timeout)
    settings = daemon.settings()
    if (
        not settings.has_cdi_settings
        or settings.reads(wanted)
        or drop_in_folder(patterns(file, file.path), place.drop_ins)
    ):
        return daemon
    raise refusal(unit, place, file, state_of(place, settings, wanted), wanted)


def state_of(place: Place, settings: Settings, wanted: Sequence[str]) -> str:
    """Return a clause with the CDI setting."""
    enabled = f"enabled, but not for {' and '.join(each for each in wanted if each not in settings.folders)}"
    return f"in {place.generated} CDI is {enabled if settings.enabled else 'disabled'}"


def refusal(unit: str, place: Place, file: File | None, found: str, wanted: Sequence[str]) -> ContainerdError:
    """Return the error for a distribution that a user must configure, with the settings to make."""
    return ContainerdError(
        f"{unit} runs a bundled containerd, whose settings {place.name} writes again at each start, and {found}",
        hint=f"{_advice(unit, place, file, wanted)}. Then run the role container_runtime again, or disable it for this host "
        "(accelerator_container_runtime_enabled: false). CDI is enabled by default since containerd 2.0. If the settings import "
        f"{place.drop_ins}, the role can change them.",
        code="distribution",
    )


def _generated(system: System, place: Place) -> File | None:
    return File(place.generated, system.read_text(place.generated)) if system.exists(place.generated) else None


def _advice(unit: str, place: Place, file: File | None, wanted: Sequence[str]) -> str:
    version = version_of(file.document()) if file else 3
    template = place.templates[0 if version >= 3 else 1]
    directories = "[" + ", ".join(f'"{each}"' for each in wanted) + "]"
    return (
        f"Copy {place.generated} to {template} if that file does not exist, set `enable_cdi = true` and "
        f"`{DIRECTORIES_KEY} = {directories}` in its table {header_of(table_of(version))}, and run `systemctl restart {unit}`. {place.name} "
        f"then writes its settings from that template"
    )
