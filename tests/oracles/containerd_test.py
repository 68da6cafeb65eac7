# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test our changes to containerd's files with the containerd 1.7 and 2.x that the test world pins.

Each case is a set of files as found on sites. The assertions use the daemon's own dump of the files afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.config import (
    Settings,
    differences,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.daemon import Daemon
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.plan import (
    BACKUP,
    Record,
    plan_absent,
    plan_present,
    recorded,
    refuse_other_changes,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.k3s_rke2 import (
    place_of,
    ready_daemon,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

FOLDERS = ["/etc/cdi", "/var/run/cdi"]
OLD_TABLE = 'plugins."io.containerd.grpc.v1.cri"'
NEW_TABLE = "plugins.'io.containerd.cri.v1.runtime'"
DEBIAN = """\
# What Debian's package writes.
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd"
"""
OPTIONS = f"""\
version = 2
# The table of the plugin itself has no header here: the switch must not land in the runtime's options.
[{OLD_TABLE}.containerd.runtimes.runc.options]
  SystemdCgroup = true
"""


@dataclass
class Site:
    """A node's files below a directory, and the daemon that reads them."""

    folder: Path
    command: Path

    def __post_init__(self) -> None:
        self.config = str(self.folder / "config.toml")
        self.drop_ins = str(self.folder / "conf.d")
        self.daemon = Daemon(
            System(), command=str(self.command), config=self.config, service="containerd.service", timeout=10
        )

    def write(self, files: Mapping[str, str]) -> None:
        """Write the files with {drop_ins} and {directory} replaced."""
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text.replace("{drop_ins}", self.drop_ins).replace("{directory}", str(self.folder)))

    def texts(self) -> dict[str, str]:
        """Return all files by their paths below the directory."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_text() for path in found}

    def plan(self) -> list[Any]:
        """Return the changes that enable CDI."""
        settings = self.daemon.settings()
        return plan_present(self.daemon, settings, self.daemon.imported(), FOLDERS, self.drop_ins)

    def make(self, changes: list[Any]) -> None:
        """Write the changes like the module."""
        for each in changes:
            path = Path(each.path)
            if each.before is not None and each.after is not None and not Path(each.path + BACKUP).exists():
                Path(each.path + BACKUP).write_text(each.before)
            if each.after is None:
                path.unlink()
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_text(each.after)

    def switch_on(self) -> tuple[Settings, list[str], Record]:
        """Enable CDI; return the daemon's settings, the names of the changed files, and the record."""
        changes = self.plan()
        self.make(changes)
        names = [str(Path(each.path).relative_to(self.folder)) for each in changes]
        return self.daemon.settings(), names, recorded(Record(), changes)

    def take_back(self, record: Record) -> list[Any]:
        """Revert the changes; return the reverting changes."""
        settings = self.daemon.settings()
        changes = plan_absent(self.daemon, record, [self.drop_ins])
        refuse_other_changes(self.daemon, settings, self.daemon.imported(), changes)
        self.make(changes)
        for path in record.files:
            Path(path + BACKUP).unlink(missing_ok=True)
        return changes


@pytest.fixture
def old_site(old_containerd: Path, tmp_path: Path) -> Site:
    """Return a site with containerd 1.7."""
    return Site(tmp_path, old_containerd)


@pytest.fixture
def new_site(containerd: Path, tmp_path: Path) -> Site:
    """Return a site with containerd 2.x."""
    return Site(tmp_path, containerd)


OFF = {
    "Debian's file": ({"config.toml": DEBIAN}, ["config.toml"]),
    "no file": ({}, ["config.toml"]),
    "a file that says nothing": ({"config.toml": "version = 2\n"}, ["config.toml"]),
    "an empty file of version 1": ({"config.toml": ""}, ["config.toml"]),
    "a file of version 1": ({"config.toml": '[plugins.cri]\n  sandbox_image = "mine"\n'}, ["config.toml"]),
    "the options of runc alone": ({"config.toml": OPTIONS}, ["config.toml"]),
    "off by hand": (
        {"config.toml": f"version = 2\n[{OLD_TABLE}]\n  enable_cdi = false # no\n  sandbox_image = 'mine'\n"},
        ["config.toml"],
    ),
    "imports and nothing of the plugin": (
        {"config.toml": 'version = 2\nimports = ["{drop_ins}/*.toml"]\n'},
        ["conf.d/60-dra-accelerators.toml"],
    ),
    "imports of another directory": (
        {
            "config.toml": 'version = 2\nimports = ["{directory}/certs.d/*.toml"]\n',
            "certs.d/10-a.toml": "version = 2\n",
        },
        ["certs.d/60-dra-accelerators.toml"],
    ),
    "imports and the plugin's table": (
        {"config.toml": f'version = 2\nimports = ["{{drop_ins}}/*.toml"]\n[{OLD_TABLE}]\n  sandbox_image = "mine"\n'},
        ["config.toml"],
    ),
    "a drop-in that has the whole table": (
        {
            "config.toml": f'version = 2\nimports = ["{{drop_ins}}/*.toml"]\n[{OLD_TABLE}]\n  sandbox_image = "mine"\n',
            "conf.d/99-nvidia.toml": f'version = 2\n[{OLD_TABLE}]\n  sandbox_image = "mine"\n'
            f'[{OLD_TABLE}.containerd]\n  default_runtime_name = "nvidia"\n'
            f'[{OLD_TABLE}.containerd.runtimes.nvidia]\n  runtime_type = "io.containerd.runc.v2"\n',
        },
        ["conf.d/99-nvidia.toml"],
    ),
}
OFF_IN_NEW = {
    "off by hand, version 3": (
        {"config.toml": f"version = 3\n[{NEW_TABLE}]\n  enable_cdi = false\n  restrict_oom_score_adj = true\n"},
        ["config.toml"],
    ),
    "off by hand, version 2": (
        {"config.toml": f"version = 2\n[{OLD_TABLE}]\n  enable_cdi = false\n  sandbox_image = 'mine'\n"},
        ["config.toml"],
    ),
    "off in the main file, imports": (
        {
            "config.toml": f'version = 3\nimports = ["{{drop_ins}}/*.toml"]\n[{NEW_TABLE}]\n  enable_cdi = false\n'
            "  restrict_oom_score_adj = true\n"
        },
        ["conf.d/60-dra-accelerators.toml"],
    ),
    "off in a later drop-in": (
        {
            "config.toml": 'version = 3\nimports = ["{drop_ins}/*.toml"]\n',
            "conf.d/99-site.toml": f"version = 3\n[{NEW_TABLE}]\n  enable_cdi = false\n",
        },
        ["conf.d/99-site.toml"],
    ),
    "other directories": (
        {"config.toml": f'version = 3\n[{NEW_TABLE}]\n  cdi_spec_dirs = [\n    "/srv/cdi", # ours\n  ]\n'},
        ["config.toml"],
    ),
}


def prove(site: Site, files: Mapping[str, str], expected: list[str]) -> None:
    site.write(files)
    before, texts = site.daemon.settings(), site.texts()
    assert not before.reads(FOLDERS)
    after, changed, record = site.switch_on()
    assert after.reads(FOLDERS)
    assert changed == expected
    assert list(differences(before.rest, after.rest)) == []
    assert set(before.folders) <= set(after.folders)
    assert site.plan() == []
    site.take_back(record)
    assert site.texts() == texts
    assert site.daemon.settings() == before


@pytest.mark.parametrize("case", list(OFF))
def test_containerd_1_is_enabled_by_one_file_and_nothing_else_changes(old_site: Site, case: str) -> None:
    prove(old_site, *OFF[case])


@pytest.mark.parametrize("case", list(OFF_IN_NEW))
def test_containerd_2_with_disabled_cdi_is_enabled(new_site: Site, case: str) -> None:
    prove(new_site, *OFF_IN_NEW[case])


@pytest.mark.parametrize("text", [None, "version = 3\n", "version = 2\n", DEBIAN, OPTIONS])
def test_containerd_2_has_cdi_enabled_by_default(new_site: Site, text: str | None) -> None:
    new_site.write({} if text is None else {"config.toml": text})
    assert new_site.plan() == []


@pytest.mark.parametrize("place", ["config.toml", "conf.d/10-site.toml"])
def test_enabled_cdi_is_unchanged(old_site: Site, place: str) -> None:
    old_site.write({"config.toml": 'version = 2\nimports = ["{drop_ins}/*.toml"]\n'})
    old_site.write({place: f"version = 2\n[{OLD_TABLE}]\n  enable_cdi = true\n"})
    assert old_site.plan() == []


def test_setting_in_another_table_is_ignored(old_site: Site) -> None:
    old_site.write({"config.toml": OPTIONS + "  enable_cdi = true\n"})
    after, changed, _record = old_site.switch_on()
    assert changed == ["config.toml"]
    assert after.enabled
    assert old_site.texts()["config.toml"].startswith(OPTIONS + "  enable_cdi = true\n")


@pytest.mark.parametrize(
    "text",
    [
        'disabled_plugins = ["cri"]\n',
        "version = 2\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n",
        "version = 3\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n",
        "version = 3\ndisabled_plugins = ['io.containerd.cri.v1.images']\n",
        "version = 3\ndisabled_plugins = ['io.containerd.cri.v1.runtime']\n",
    ],
)
def test_containerd_2_with_a_disabled_kubelet_plugin_is_rejected(new_site: Site, text: str) -> None:
    new_site.write({"config.toml": text})
    with pytest.raises(AcceleratorError, match=r"disabled_plugins in .* contains") as caught:
        new_site.plan()
    assert caught.value.code == "no-cdi"


#: The parts of MicroK8s' generated config (from containerd-template.toml) that concern the kubelet plugin.
MICROK8S = f"""\
version = 2
oom_score = 0
[grpc]
  uid = 0
  gid = 0
[metrics]
  address = "127.0.0.1:1338"
[{OLD_TABLE}]
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  sandbox_image = "registry.k8s.io/pause:3.10"
{{more}}
  [{OLD_TABLE}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
"""


def test_containerd_of_microk8s_is_queried_and_its_template_named(old_containerd: Path, tmp_path: Path) -> None:
    unit, generated = "snap.microk8s.daemon-containerd.service", tmp_path / "containerd.toml"
    program = tmp_path / "containerd"
    program.symlink_to(old_containerd)
    place = replace(place_of("microk8s"), program=str(program), generated=str(generated))
    generated.write_text(MICROK8S.format(more=""))
    with pytest.raises(AcceleratorError, match=f"in {generated} CDI is disabled") as caught:
        ready_daemon(System(), place, unit, FOLDERS, 10)
    assert "/var/snap/microk8s/current/args/containerd-template.toml" in caught.value.hint
    assert caught.value.code == "distribution" and f"systemctl restart {unit}" in caught.value.hint
    generated.write_text(MICROK8S.format(more="  enable_cdi = true"))
    daemon = ready_daemon(System(), place, unit, FOLDERS, 10)
    assert daemon.generated and daemon.settings().reads(FOLDERS)


def test_main_file_for_manual_edits_does_not_prevent_a_drop_in(new_site: Site) -> None:
    inline = "version = 3\nimports = ['{drop_ins}/*.toml']\n[plugins]\n'io.containerd.cri.v1.runtime' = { enable_cdi = false }\n"
    new_site.write({"config.toml": inline})
    after, changed, _record = new_site.switch_on()
    assert after.reads(FOLDERS) and changed == ["conf.d/60-dra-accelerators.toml"]


def test_manual_changes_are_kept_and_own_keys_are_removed(old_site: Site) -> None:
    site = old_site
    site.write({"config.toml": f'version = 2\n[{OLD_TABLE}]\n  enable_cdi = false\n  sandbox_image = "mine"\n'})
    _after, changed, record = site.switch_on()
    assert changed == ["config.toml"]
    text = site.texts()["config.toml"]
    (site.folder / "config.toml").write_text(text.replace("mine", "theirs") + "\n# a remark\n")
    site.take_back(record)
    text = site.texts()["config.toml"]
    assert 'sandbox_image = "theirs"' in text
    assert "# a remark" in text
    assert not site.daemon.settings().enabled


def test_own_file_with_foreign_content_is_kept_without_own_keys(old_site: Site) -> None:
    _after, changed, record = old_site.switch_on()
    assert changed == ["config.toml"]
    path = old_site.folder / "config.toml"
    path.write_text(path.read_text() + "\n[debug]\n  level = 'info'\n")
    old_site.take_back(record)
    assert "enable_cdi" not in path.read_text()
    assert "level = 'info'" in path.read_text()


def test_own_drop_in_is_recognized_without_a_record(old_site: Site) -> None:
    old_site.write({"config.toml": 'version = 2\nimports = ["{drop_ins}/*.toml"]\n'})
    before = old_site.texts()
    old_site.switch_on()
    assert old_site.texts() != before
    old_site.take_back(Record())
    assert old_site.texts() == before


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.toml": f"version = 2\n[{OLD_TABLE}\n  enable_cdi = true\n"}, "rejects its current configuration"),
        (
            {
                "config.toml": 'version = 2\nimports = ["{drop_ins}/*.toml"]\n',
                "conf.d/10-site.toml": f"version = 2\n[{OLD_TABLE}]\n  sandbox_image = = 3\n",
            },
            "rejects its current configuration",
        ),
        (
            {"config.toml": 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'},
            "disabled_plugins in .* contains io.containerd.grpc.v1.cri",
        ),
        (
            {"config.toml": "version = 2\n[plugins]\n  'io.containerd.grpc.v1.cri' = { sandbox_image = 'mine' }\n"},
            "requires manual editing",
        ),
    ],
)
def test_configuration_that_cannot_be_changed_safely_is_rejected(
    old_site: Site, files: dict[str, str], words: str
) -> None:
    old_site.write(files)
    before = old_site.texts()
    with pytest.raises(AcceleratorError, match=words):
        old_site.plan()
    assert old_site.texts() == before
