# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The runtime handler of containerd: what is written, and that nothing else is."""

from __future__ import annotations

import json
import posixpath
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._containerd import Change, File, read_dump
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_handler import (
    base_specification,
    candidates,
    handlers,
    text_before,
    wanted_handler,
    without_block,
)
from ansible_collections.dra.accelerators.plugins.module_utils._containerd_plan import shown
from ansible_collections.dra.accelerators.plugins.module_utils._toml import parse
from ansible_collections.dra.accelerators.plugins.module_utils._vendors import device_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import DeviceNumber, System
from ansible_collections.dra.accelerators.plugins.modules.containerd_handler import diff_of

NAME, SPECIFICATION = "dra-accelerators-driver", "/etc/containerd/dra-accelerators-driver.json"
DUMP = """
version = {version}
[plugins.'{plugin}']
  enable_cdi = true
  cdi_spec_dirs = ['/etc/cdi']
[plugins.'{plugin}'.containerd]
  default_runtime_name = 'runc'
[plugins.'{plugin}'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  pod_annotations = ['a', "b'"]
[plugins.'{plugin}'.containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
PLUGINS = [(3, "io.containerd.cri.v1.runtime"), (2, "io.containerd.grpc.v1.cri")]


def runtimes(text: str, plugin: str) -> Any:
    return parse(text, "test")["plugins"][plugin]["containerd"]["runtimes"]


@pytest.mark.parametrize(("version", "plugin"), PLUGINS)
def test_the_handler_is_the_default_one_but_for_the_specification(version: int, plugin: str) -> None:
    text = DUMP.format(version=version, plugin=plugin)
    settings = read_dump(text)
    wanted = wanted_handler(settings, SPECIFICATION)
    assert {**handlers(settings)["runc"], "base_runtime_spec": SPECIFICATION} == wanted
    drop_in, main = candidates(settings, NAME, wanted, File("/c.toml", text), "/c.toml", "/conf.d")
    assert drop_in.path == "/conf.d/61-dra-accelerators-driver.toml" and drop_in.after is not None
    assert runtimes(drop_in.after, plugin) == {NAME: wanted}
    assert main.after is not None and main.after.startswith(text)
    assert runtimes(main.after, plugin) == {"runc": handlers(settings)["runc"], NAME: wanted}
    assert without_block(main.after, NAME) == text, "the way back is byte for byte"
    (again,) = candidates(settings, NAME, wanted, File("/c.toml", main.after), "/c.toml", None)
    assert again.after == main.after


def test_another_program_is_told_what_the_default_one_is_told() -> None:
    text = DUMP.format(version=2, plugin=PLUGINS[1][1])
    settings = read_dump(text)
    wanted = wanted_handler(settings, options={"BinaryName": "/opt/bin/other"})
    assert "base_runtime_spec" not in wanted and "BinaryName" not in handlers(settings)["runc"]["options"]
    assert wanted["options"] == {"SystemdCgroup": True, "BinaryName": "/opt/bin/other"}
    (drop_in, _main) = candidates(settings, "other", wanted, File("/c.toml", text), "/c.toml", "/conf.d")
    assert drop_in.path == "/conf.d/61-other.toml" and drop_in.after is not None
    assert runtimes(drop_in.after, PLUGINS[1][1]) == {"other": wanted}


def test_hidden_handlers_of_others_are_written_too() -> None:
    plugin = PLUGINS[1][1]
    settings = read_dump(DUMP.format(version=2, plugin=plugin))
    wanted, site = wanted_handler(settings, SPECIFICATION), File("/c.toml", "# words\nversion = 2\n")
    (main,) = candidates(settings, NAME, wanted, site, "/c.toml", None, others=handlers(settings))
    assert main.after is not None and runtimes(main.after, plugin) == {"runc": handlers(settings)["runc"], NAME: wanted}
    assert text_before(main.after, NAME) == site.text


def test_without_a_main_file_one_is_made_and_without_a_default_handler_it_is_refused() -> None:
    text = DUMP.format(version=3, plugin=PLUGINS[0][1])
    settings = read_dump(text)
    (made,) = candidates(settings, NAME, wanted_handler(settings, SPECIFICATION), None, "/c.toml", None)
    assert made.before is None and made.after is not None and parse(made.after, "test")["version"] == 3
    assert text_before(made.after, NAME) is None, "a file that was made for it goes with it"
    assert text_before("version = 3\n", NAME) == "version = 3\n"
    with pytest.raises(AcceleratorError, match="no runtime handler crun"):
        wanted_handler(read_dump(text.replace("default_runtime_name = 'runc'", "default_runtime_name = 'crun'")), "/s")


RULES = [
    {"allow": True, "type": "c", "major": 195, "access": "rwm"},
    {"allow": True, "type": "c", "major": 10, "minor": 77, "access": "rwm"},
]


def test_base_specification_allows_the_given_devices_only() -> None:
    said = {
        "process": {"rlimits": [1], "noNewPrivileges": True, "capabilities": {"bounding": []}},
        "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}, "maskedPaths": ["/proc/kcore"]},
    }
    found = json.loads(base_specification(json.dumps(said), RULES))
    assert found["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}, *RULES]
    assert found["process"] == {"noNewPrivileges": True, "capabilities": {"bounding": []}}
    assert found["linux"]["maskedPaths"] == ["/proc/kcore"]
    for wrong in ("no JSON", "{}", "[]"):
        with pytest.raises(AcceleratorError, match="no OCI specification"):
            base_specification(wrong, RULES)


class Host(System):
    """A host with these lines in /proc/devices and these device nodes."""

    def __init__(self, devices: str, nodes: dict[str, tuple[str, int, int]]) -> None:
        super().__init__("/nonexistent")
        self.devices, self.nodes = devices, nodes

    def read_text(self, path: str) -> str:
        if path != "/proc/devices" or not self.devices:
            raise FileNotFoundError(path)
        return self.devices

    def list_directory(self, path: str) -> tuple[str, ...]:
        return tuple(posixpath.basename(node) for node in self.nodes if posixpath.dirname(node) == path)

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber(*self.nodes[path]) if path in self.nodes else None


PROC_DEVICES = """Character devices:
  1 mem
 10 misc
 21 sg
195 nvidia-frontend
234 nvidia-caps
239 devdrv-cdev
240 vdevdrv-cdev
241 vfio
246 watchdog
510 nvidia-uvm

Block devices:
  8 nvidia-not-a-character-device
"""


def majors(rules: list[dict[str, Any]]) -> list[tuple[int, int | None]]:
    assert all(rule["allow"] and rule["type"] == "c" for rule in rules)
    return [(rule["major"], rule.get("minor")) for rule in rules]


def test_device_rules_are_those_of_the_vendors() -> None:
    nodes = {
        "/dev/nvidia0": ("c", 195, 0),
        "/dev/nvidiactl": ("c", 195, 255),
        "/dev/davinci_manager": ("c", 10, 77),
        "/dev/sg0": ("c", 21, 0),
    }
    host = Host(PROC_DEVICES, nodes)
    assert majors(device_rules(host, ["nvidia"])) == [(195, None), (234, None), (510, None)]
    assert majors(device_rules(host, ["ascend"])) == [(239, None), (240, None), (10, 77)]
    assert majors(device_rules(host, ["nvidia", "ascend"])) == [
        (195, None),
        (234, None),
        (239, None),
        (240, None),
        (510, None),
        (10, 77),
    ]
    assert device_rules(host, []) == []


def test_device_rules_without_a_driver_allow_nothing() -> None:
    assert device_rules(Host("", {}), ["nvidia", "ascend"]) == []
    assert device_rules(Host("Character devices:\n  1 mem\n", {}), ["nvidia", "ascend"]) == []


@pytest.mark.parametrize("made_by", ["containerd_handler", "containerd_config and runtime_cdi"])
def test_diff_has_no_password_of_a_registry(made_by: str) -> None:
    registry = (
        "[plugins.'io.containerd.grpc.v1.cri'.registry.configs.'registry.example.com'.auth]\n"
        '  username = "puller"\n  password = "s3cr3t-value-1"\n  auth = "cHVsbGVyOnMzY3IzdC12YWx1ZS0x"\n'
        "[plugins.'io.containerd.grpc.v1.cri'.registry.headers]\n  X-Key = ['k3y-of-the-mirror']\n"
    )
    before = f"version = 2\n{registry}"
    changes = [
        Change("/c.toml", before, f"{before}[plugins.'io.containerd.grpc.v1.cri']\n  enable_cdi = true\n"),
        Change("/d.toml", None, "enable_cdi = true\n"),
        Change("/e.toml", 'password = "s3cr3t-value-1"\n', None),
    ]
    diff = json.dumps(diff_of(changes) if made_by == "containerd_handler" else shown(changes))
    assert "+  enable_cdi = true" in diff and "/d.toml" in diff and "/e.toml" in diff
    for secret in ("s3cr3t-value-1", "cHVsbGVyOnMzY3IzdC12YWx1ZS0x", "k3y-of-the-mirror"):
        assert secret not in diff
