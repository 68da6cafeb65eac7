# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare `nvidia-ctk runtime configure` with our own changes, setting by setting, as the engines read them.

Both start from the same site files and add the runtime `nvidia` and CDI devices. Compared are containerd's `config
dump`, CRI-O's `config`, and Docker Engine's file. Every difference is listed in an EXPLAINED mapping with the wording
of docs/container-edits.md. An unused explanation is an error too.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd import (
    config as containerd_config,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd import (
    handler as containerd_handler,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.config import (
    Change,
    File,
    Settings,
    differences,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.crio import config as crio_config
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.crio.daemon import Crio
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker import (
    config as docker_config,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker import (
    runtimes as docker_runtimes,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

PROGRAM = "/usr/bin/nvidia-container-runtime"
FOLDERS = ["/etc/cdi", "/var/run/cdi"]
#: A site's file for each containerd generation: drop-in files are read, and the main file has a table of the plugin.
SITES = {
    "1.7": """version = 2
imports = ["{directory}/conf.d/*.toml"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = true
""",
    "2": """version = 3
imports = ["{directory}/conf.d/*.toml"]
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "localhost/pause:1"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  SystemdCgroup = true
""",
}
#: Explained differences between the dumps of nvidia-ctk's files and of ours, by release.
EXPLAINED: dict[str, dict[str, str]] = {
    "1.7": {},
    "2": {
        "options that are empty": "which has the empty options",
        "plugins.io.containerd.cri.v1.runtime.containerd.runtimes.nvidia.sandboxer": "and the sandboxer of the default handler",
    },
}
EXPLAINED_OF_DOCKER = {
    "runtimes.nvidia.args": "an empty list has no effect",
    "runtimes.nvidia.path": "a service can have another PATH than an operator",
}
#: Site files for CRI-O, by their setting of CDI directories.
SITES_OF_CRIO = {
    "names no directories": "",
    "names one": 'cdi_spec_dirs = ["/etc/cdi"]\n',
    "names a different one": 'cdi_spec_dirs = ["/srv/cdi"]\n',
}
SITE_OF_CRIO = """# The site's own words.
[crio.runtime]
{directories}default_runtime = "runc"
[crio.runtime.runtimes.runc]
runtime_path = "/usr/bin/runc"
monitor_path = "/usr/libexec/crio/conmon"
"""
EXPLAINED_OF_CRIO = {
    "crio.runtime.runtimes.nvidia": "claims do not need the vendor's runtime",
    "crio.runtime.cdi_spec_dirs": "CRI-O enables CDI by default and reads the configured directories",
}


class Containerd:
    """One containerd release, its files below a directory, and its view of them."""

    def __init__(self, program: Path, folder: Path, site: str) -> None:
        self.program, self.folder, self.main = program, folder, folder / "config.toml"
        (folder / "conf.d").mkdir(parents=True)
        self.main.write_text(site.format(directory=folder))

    def settings(self) -> Settings:
        """Return the settings that containerd reads from the files."""
        command = [self.program, "--config", self.main, "config", "dump"]
        return containerd_config.read_dump(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def file(self) -> File:
        return File(str(self.main), self.main.read_text())

    def imported(self) -> list[File]:
        return [File(str(path), path.read_text()) for path in sorted((self.folder / "conf.d").glob("*.toml"))]

    def take(self, changes: Sequence[Change], good: Callable[[Settings], bool]) -> None:
        """Apply the first of these changes that containerd reads as required, like the modules."""
        for each in changes:
            Path(each.path).write_text(each.after or "")
            if good(self.settings()):
                return
            Path(each.path).unlink() if each.before is None else Path(each.path).write_text(each.before)
        raise AssertionError([each.path for each in changes])

    def by_us(self) -> None:
        """Enable CDI like runtime_cdi, and add the handler like containerd_handler."""
        before = self.settings()
        if not before.reads(FOLDERS):
            switches = containerd_config.candidates(
                before, self.file(), str(self.main), self.imported(), str(self.folder / "conf.d"), FOLDERS
            )
            self.take(switches, lambda now: now.reads(FOLDERS) and not list(differences(before.rest, now.rest)))
        before = self.settings()
        handler = containerd_handler.wanted_handler(before, options={"BinaryName": PROGRAM})
        offers = containerd_handler.candidates(
            before, "nvidia", handler, self.file(), str(self.main), str(self.folder / "conf.d"), {}
        )
        path = ".".join((*containerd_config.table_of(before.version), "containerd.runtimes.nvidia"))
        self.take(
            offers,
            lambda now: (
                now.reads(FOLDERS)
                and {name.rpartition(" would")[0] for name in differences(before.rest, now.rest)} == {path}
            ),
        )

    def by_them(self, nvidia_ctk: Path) -> None:
        command = [nvidia_ctk, "--quiet", "runtime", "configure", "--runtime=containerd", f"--config={self.main}"]
        command += [f"--drop-in-config={self.folder}/conf.d/99-nvidia.toml", "--cdi.enabled"]
        subprocess.run(command, capture_output=True, text=True, check=True)


def differing_options(theirs: Settings, ours: Settings) -> set[str]:
    """Return the names of the differences. An empty option that is missing in the other file counts under one common
    name.
    """
    found = set()
    for name in (each.rpartition(" would")[0] for each in differences(theirs.rest, ours.rest)):
        place, option, key = name.rpartition(".options.")
        handlers = [containerd_handler.handlers(each) for each in (theirs, ours)]
        values = [each.get(place.rpartition(".")[2], {}).get("options", {}).get(key) for each in handlers]
        found.add("options that are empty" if option and not any(values) else name)
    return found


@pytest.mark.parametrize("release", SITES)
def test_containerd_configuration_equals_nvidia_ctk_except_documented_differences(
    nvidia_ctk: Path, containerd: Path, old_containerd: Path, tmp_path: Path, release: str
) -> None:
    program = containerd if release == "2" else old_containerd
    ours, theirs = (Containerd(program, tmp_path / name, SITES[release]) for name in ("ours", "theirs"))
    ours.by_us()
    theirs.by_them(nvidia_ctk)
    both = ours.settings(), theirs.settings()
    assert [each.enabled for each in both] == [True, True]
    assert [set(each.folders) for each in both] == [set(FOLDERS)] * 2
    assert all("nvidia" in containerd_handler.handlers(each) for each in both)
    assert differing_options(both[1], both[0]) == set(EXPLAINED[release])


def test_page_documents_every_difference() -> None:
    words = (Path(__file__).parents[2] / "docs/container-edits.md").read_text()
    for explained in (*EXPLAINED.values(), EXPLAINED_OF_DOCKER, EXPLAINED_OF_CRIO):
        assert all(why in words for why in explained.values())


def test_docker_file_equals_nvidia_ctk_except_documented_differences(nvidia_ctk: Path, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text('{"log-opts": {"max-size": "8m"}}\n')
    before = path.read_text()
    subprocess.run(
        [nvidia_ctk, "--quiet", "runtime", "configure", "--runtime=docker", f"--config={path}", "--cdi.enabled"],
        capture_output=True,
        text=True,
        check=True,
    )
    theirs: dict[str, Any] = json.loads(path.read_text())
    text = docker_runtimes.text_with(before, str(path), "nvidia", docker_runtimes.entry(PROGRAM, ()))
    text = docker_config.text_with(text, str(path), (25, 0, 0), FOLDERS)
    ours: dict[str, Any] = json.loads(text or "")
    assert {name.rpartition(" would")[0] for name in differences(theirs, ours)} == set(EXPLAINED_OF_DOCKER)
    assert next(iter(ours)) == "log-opts", "keys keep their order"


class CrioSite:
    """A site's files for CRI-O below a directory, and CRI-O's view of them."""

    def __init__(self, crio: Path, folder: Path, site: str) -> None:
        self.main, self.drop_ins = folder / "crio.conf", folder / "crio.conf.d"
        self.drop_ins.mkdir(parents=True)
        self.main.write_text(site)
        places = {"command": str(crio), "config": str(self.main), "drop_ins": str(self.drop_ins)}
        self.crio = Crio(System(), service="crio.service", timeout=30, **places)

    def by_us(self) -> None:
        """Make CRI-O read the CDI directories like runtime_cdi. Other tests cover the restart and its check."""
        for each in self.crio.plan(FOLDERS):
            Path(each.path).write_text(each.after or "")

    def by_them(self, nvidia_ctk: Path) -> None:
        command = [nvidia_ctk, "--quiet", "runtime", "configure", "--runtime=crio", f"--config={self.main}"]
        command += [f"--drop-in-config={self.drop_ins}/99-nvidia.toml", "--cdi.enabled"]
        subprocess.run(command, capture_output=True, text=True, check=True)


def differences_of_crio(theirs: crio_config.Settings, ours: crio_config.Settings) -> set[str]:
    """Return the names of the differences."""
    found = {name.rpartition(" would")[0] for name in differences(theirs.rest, ours.rest)}
    return found | ({"crio.runtime.cdi_spec_dirs"} if set(theirs.folders) != set(ours.folders) else set())


# CRI-O is built for such tests only.
@pytest.mark.prove
@pytest.mark.parametrize("site", SITES_OF_CRIO)
def test_crio_configuration_equals_nvidia_ctk_except_documented_differences(
    nvidia_ctk: Path, crio: Path, tmp_path: Path, site: str
) -> None:
    text = SITE_OF_CRIO.format(directories=SITES_OF_CRIO[site])
    untouched, ours, theirs = (CrioSite(crio, tmp_path / name, text) for name in ("untouched", "ours", "theirs"))
    ours.by_us()
    theirs.by_them(nvidia_ctk)
    before, mine, vendor = (each.crio.settings() for each in (untouched, ours, theirs))
    # Our file only adds missing directories. nvidia-ctk's adds the runtime whatever the CDI options are.
    assert mine.reads(FOLDERS) and set(before.folders) <= set(mine.folders)
    assert not list(differences(before.rest, mine.rest))
    assert vendor.folders == before.folders and vendor.reads(FOLDERS) == (site == "names no directories")
    runtimes = vendor.rest["crio"]["runtime"]["runtimes"]
    assert runtimes["nvidia"]["runtime_path"] == PROGRAM
    assert runtimes["nvidia"]["monitor_path"] == "/usr/libexec/crio/conmon", "it is copied from the default runtime"
    expected = set(EXPLAINED_OF_CRIO) - ({"crio.runtime.cdi_spec_dirs"} if site == "names no directories" else set())
    assert differences_of_crio(vendor, mine) == expected
    assert theirs.main.read_text() == ours.main.read_text() == text
    assert bool(list(ours.drop_ins.iterdir())) == (site != "names no directories")
