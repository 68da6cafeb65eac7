# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Power on and off: the decision for each state, and its execution in a directory."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from accelerator_simulator.cli import main, parser, run, table
from accelerator_simulator.entries import File
from accelerator_simulator.errors import DescriptionError, LibraryError, SimulatorError
from accelerator_simulator.library import Library, find_library
from accelerator_simulator.power import Configuration, Plan, Power, capability_files, plan_power_on, read_configuration

RECORD = {"fingerprint": "f", "description": "d", "boot_id": "b"}


@pytest.mark.parametrize(
    ("previous", "boot_id", "placed", "loaded", "place", "withdraw", "library"),
    [
        ({}, "b", False, False, True, False, "load"),
        (RECORD, "b", True, True, False, False, None),
        (RECORD, "b", False, True, True, False, None),
        (RECORD, "c", False, True, True, False, "power-cycle"),
        (RECORD, "c", True, True, True, True, "power-cycle"),
        (RECORD, "b", True, False, False, False, "load"),
        ({**RECORD, "fingerprint": "old"}, "b", True, True, True, True, None),
        ({**RECORD, "description": "old"}, "b", True, True, False, False, "load"),
        ({**RECORD, "description": "old"}, "c", False, True, True, False, "load"),
    ],
)
def test_power_on_plan_for_each_state(
    previous: dict[str, Any], boot_id: str, placed: bool, loaded: bool, place: bool, withdraw: bool, library: str | None
) -> None:
    plan = plan_power_on(previous, "f", "d", boot_id, placed, loaded)
    assert (plan.place, plan.withdraw, plan.library) == (place, withdraw, library)
    assert plan.changes == (place or library is not None)


def test_a_second_power_on_changes_nothing_and_another_machine_replaces_the_first(tmp_path: Path) -> None:
    def on(machine: str) -> Plan:
        return Power(Configuration(machine=machine, identity="n"), tmp_path, use_library=False).power_on()

    assert on("8xH100").place
    assert not on("8xH100").changes
    plan = on("mixed")
    assert (plan.place, plan.withdraw) == (True, True)
    devices = sorted(path.name for path in (tmp_path / "sys/bus/pci/devices").iterdir())
    assert "0000:98:00.0" in devices
    assert "0000:ca:00.0" not in devices
    power = Power(Configuration(machine="mixed", identity="n"), tmp_path, use_library=False)
    assert power.power_off()
    assert power.forget()
    assert not power.power_off()
    assert not list(tmp_path.rglob("*nvidia*"))


def test_boot_removes_the_nodes_of_nvidia_uvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    power, node = Power(Configuration(identity="n"), tmp_path, use_library=False), tmp_path / "dev/nvidia-uvm"
    power.power_on()
    assert not node.exists()
    node.touch()
    power.power_on()
    assert node.exists()
    monkeypatch.setattr(Power, "boot_id", lambda _power: "the next boot")
    power.power_on()
    assert not node.exists()


def test_check_reports_the_steps_and_changes_nothing(tmp_path: Path) -> None:
    power = Power(Configuration(machine="1xT4"), tmp_path, use_library=False)
    assert power.power_on(check=True).place
    assert not list(tmp_path.iterdir())


def test_command_line_overrides_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": "4xA30", "identity": "n7", "cluster_uuid": "", "clique": None}))
    assert read_configuration(path, {"machine": None}) == Configuration(machine="4xA30", identity="n7")
    assert read_configuration(path, {"machine": "1xL4"}).machine == "1xL4"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ('{"machines": 1}', "unknown keys machines, expected some of .*machine")]
)
def test_a_wrong_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(DescriptionError, match=message):
        read_configuration(path, {})


def test_a_missing_or_foreign_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"libnvidia-ml\.so\.1 does not exist: run the role"):
        find_library(tmp_path)
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    with pytest.raises(LibraryError, match="not the simulated library"):
        Library(find_library(tmp_path))


def test_capability_files_of_living_instances() -> None:
    directory = "/proc/driver/nvidia/capabilities/gpu2/mig"
    compute = {"id": 1, "capability": f"{directory}/gi7/ci1/access", "capability_minor": 338}
    instance = {
        "id": 7,
        "capability": f"{directory}/gi7/access",
        "capability_minor": 336,
        "compute_instances": [compute],
    }
    gpus = [
        {"minor": 2, "mig": "immediate", "gpu_instances": [instance]},
        {"minor": 3, "mig": "none", "gpu_instances": []},
    ]
    tree = capability_files({"proc_root": "/proc/driver/nvidia", "gpus": gpus})
    contents = {path: entry.content.decode().split() for path, entry in tree.items() if isinstance(entry, File)}
    assert {path: (words[1], words[3]) for path, words in contents.items()} == {
        f"{directory}/config": ("1", "256"),
        f"{directory}/monitor": ("2", "292"),
        f"{directory}/gi7/access": ("336", "292"),
        f"{directory}/gi7/ci1/access": ("338", "292"),
    }


def test_the_command_line_powers_on_and_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--root", str(tmp_path), "power-on", "--machine", "1xL4", "--no-library"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["changed"] is True
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["changed"] is False
    assert main(["--root", str(tmp_path), "power-off", "--forget"]) == 0
    assert json.loads(capsys.readouterr().out) == {"changed": True}


def test_errors_are_one_line_and_status_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path), "power-on", "--machine", "3xH100", "--no-library"]) == 1
    assert capsys.readouterr().err.startswith(
        "accelerator-simulator: machine profile '3xH100' is unknown, expected one of"
    )
    assert main(["--root", str(tmp_path), "show"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_machines_are_listed() -> None:
    output = io.StringIO()
    run(parser().parse_args(["machines", "--json"]), output)
    listed = {row["machine"]: row["gpus"] for row in json.loads(output.getvalue())}
    assert (listed["8xH100"], listed["mixed"]) == (8, 5)
    assert table([["A", "B"], ["longer", "x"]]) == "A       B\nlonger  x\n"


class Bare:
    """A host without an NVIDIA driver, in a directory."""

    module = "/lib/modules/6.1/updates/dkms/nvidia.ko"

    def __init__(self, root: Path) -> None:
        self.root = root

    def install(self, text: str) -> None:
        path = Path(f"{self.root}{self.module}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def power(self) -> Power:
        return Power(Configuration(identity="n", nvidia_module=self.module), self.root, use_library=False)

    def boot(self) -> Plan:
        Path(f"{self.root}/run/accelerator-simulator-nvidia").unlink(missing_ok=True)
        return self.power().power_on()

    def driver(self) -> str:
        """Return the visible version of the driver, or "" without one."""
        version = self.root / "sys/module/nvidia/version"
        shown = {
            (self.root / "proc/driver/nvidia/version").exists(),
            (self.root / "dev/nvidiactl").exists(),
            (self.root / "dev/nvidia0").exists(),
            (self.root / "sys/bus/pci/devices/0000:18:00.0/driver").is_symlink(),
            "nvidia-uvm" in (self.root / "proc/devices").read_text(),
            "nvidia_uvm " in (self.root / "proc/modules").read_text(),
            version.exists(),
        }
        assert len(shown) == 1, "half a driver"
        assert (self.root / "sys/bus/pci/devices/0000:18:00.0/vendor").read_text() == "0x10de\n"
        return version.read_text().strip() if version.exists() else ""


def test_driver_installed_separately_is_loaded_and_unloaded(tmp_path: Path) -> None:
    bare = Bare(tmp_path)
    assert bare.boot().place and bare.driver() == ""
    with pytest.raises(SimulatorError, match=r"nvidia\.ko does not exist: no kernel module is installed"):
        bare.power().load_driver()
    bare.install("version=580.95.05\nkind=open\nloads=yes\n")
    assert not bare.power().power_on().changes and bare.driver() == "", "it is installed and not loaded"
    assert bare.power().load_driver().changes and bare.driver() == "580.95.05"
    assert "580.95.05" in (tmp_path / "proc/driver/nvidia/version").read_text()
    assert not bare.power().load_driver().changes
    bare.install("version=580.105.08\nkind=open\nloads=yes\n")
    assert not bare.power().power_on().changes and bare.driver() == "580.95.05", "the one that is loaded stays"
    assert bare.power().unload_driver().changes and bare.driver() == ""
    assert not bare.power().unload_driver().changes
    assert bare.power().load_driver().changes and bare.driver() == "580.105.08"


def test_boot_loads_the_installed_driver(tmp_path: Path) -> None:
    bare = Bare(tmp_path)
    bare.install("version=580.95.05\nloads=yes\n")
    assert bare.power().power_on(check=True).place and not (tmp_path / "run").exists()
    bare.boot()
    assert bare.driver() == "580.95.05"
    bare.install("version=595.45.99\nloads=no\n")
    assert not bare.power().power_on().changes and bare.driver() == "580.95.05"
    bare.boot()
    assert bare.driver() == ""
    with pytest.raises(SimulatorError, match=r"the kernel does not take version 595\.45\.99"):
        bare.power().load_driver()
    bare.install("")
    with pytest.raises(SimulatorError, match=r"has no line version="):
        bare.power().load_driver()


def test_a_driver_that_is_always_loaded_is_not_unloaded(tmp_path: Path) -> None:
    power = Power(Configuration(machine="1xL4"), tmp_path, use_library=False)
    with pytest.raises(SimulatorError, match="is always loaded; name a kernel module with nvidia_module"):
        power.unload_driver()
