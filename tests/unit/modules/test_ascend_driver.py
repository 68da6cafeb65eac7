# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ascend driver and firmware: package order, blocked upgrades, and interrupted runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.driver_packages import (
    COMPLETE,
    Choices,
    Installed,
    Package,
    PackageError,
    Record,
    Step,
    plan,
    plan_removal,
    problems,
    read_package,
    read_record,
    refusal,
    wants_restart,
    words,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import DeviceNumber, System
from ansible_collections.dra.accelerators.plugins.modules import ascend_driver
from driver_store import claim
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages"))

from make import make

KEPT = "var/lib/dra-accelerators/ascend"
BOTH = {"driver": "24.1.rc1", "firmware": "7.3.0.1"}
NEWER = {"driver": "24.1.rc2", "firmware": "7.5.0.1"}


class Folder(System):
    """A system in a temporary directory. A test ends its boot. Device nodes are files."""

    boot = "boot-1"

    def boot_id(self) -> str:
        return self.boot

    def sync_all(self) -> None:
        """Skip the sync, so that the file systems of this machine are not synced."""

    def device_number(self, path: str) -> DeviceNumber | None:
        return DeviceNumber("c", 1, 3) if self.exists(path) else None


class Node:
    """A node in a temporary directory on which packages run."""

    def __init__(
        self, directory: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.root = directory / "root"
        self.system = Folder(str(self.root))
        self._run = run_here
        for path in ("etc", "packages"):
            (self.root / path).mkdir(parents=True)
        (self.root / "etc/passwd").write_text("HwHiAiUser:x:990:990::/:/bin/false\nnpu:x:991:991::/:/bin/false\n")
        (self.root / "etc/group").write_text("HwHiAiUser:x:990:\nnpus:x:991:\nmore:x:992:games,HwHiAiUser\n")
        monkeypatch.setattr(ascend_driver, "System", lambda: self.system)
        monkeypatch.setenv("FAKE_ROOT", str(self.root))
        self.monkeypatch = monkeypatch

    def package(self, kind: str, version: str, **values: str) -> str:
        return f"/packages/{make(self.root / 'packages', kind, version, **values).name}"

    def run(self, versions: dict[str, str] | None = None, *, check: bool = False, **options: Any) -> dict[str, Any]:
        named = {kind: self.package(kind, version) for kind, version in (versions or {}).items()}
        fixed = {"accept_eula": True, "services": [], "build": False, "state_path": ""}
        return self._run("ascend_driver", {**named, **fixed, **options}, check=check, diff=True)

    def versions(self) -> dict[str, str]:
        found = {}
        for kind in BOTH:
            path = self.root / "usr/local/Ascend" / kind / "version.info"
            if path.exists():
                found[kind] = path.read_text().partition("Version=")[2].split()[0]
        return found

    def status(self) -> str:
        info = self.root / "etc/ascend_install.info"
        return info.read_text().partition("Driver_Install_Status=")[2].split()[0] if info.exists() else ""

    def log(self) -> list[str]:
        return [
            line.split()[1]
            for line in (self.root / "var/log/ascend_seclog/ascend_install.log").read_text().splitlines()
        ]

    def kept(self) -> list[str]:
        directory = self.root / KEPT
        return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.fixture
def node(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, run_here, monkeypatch)


REPLACE = 'test "$1" = --check && echo "touch \'{}\'" > "{}"\n'


def test_package_replaced_after_verification_is_not_run(node: Node, tmp_path: Path) -> None:
    """A user replaces the package between its verification and its run: the verified copy runs."""
    path = node.root / node.package("driver", BOTH["driver"]).lstrip("/")
    evil = tmp_path / "evil"
    text = path.read_text()
    head, _newline, rest = text.partition("\n")
    path.write_text(f"{head}\n{REPLACE.format(evil, path)}{rest}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    seen: list[str] = []
    run = node.system.run

    def spy(argv: Sequence[str], *words: Any, **options: Any) -> Any:
        if argv[0] == "bash":
            seen.append(argv[1])
            assert stat.S_IMODE(Path(argv[1]).parent.stat().st_mode) == 0o700
        return run(argv, *words, **options)

    node.monkeypatch.setattr(node.system, "run", spy)
    given = {"driver": f"/packages/{path.name}", "driver_checksum": digest}
    done = node.run(**given)
    assert done.get("changed") and node.versions() == {"driver": BOTH["driver"]}, done
    assert path.read_text().startswith("touch") and not evil.exists()
    assert seen and not any(each == str(path) for each in seen)
    assert "ascend-verified" not in {each.name for each in (node.root / "var/lib/dra-accelerators").iterdir()}
    kept = node.root / KEPT / path.name
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == digest


def test_copies_of_a_killed_run_are_removed(node: Node) -> None:
    left = node.root / "var/lib/dra-accelerators/ascend-verified/firmware/left.run"
    left.parent.mkdir(parents=True)
    left.write_text("left")
    assert "msg" not in node.run(driver=node.package("driver", BOTH["driver"]))
    assert not left.parent.parent.exists()


def test_check_mode_leaves_no_copy_of_a_package(node: Node) -> None:
    assert node.run(BOTH, check=True)["changed"]
    assert not (node.root / "var/lib/dra-accelerators").exists()


def test_first_installation_is_driver_first_upgrade_firmware_first(node: Node) -> None:
    dry_run = node.run(BOTH, check=True)
    assert dry_run["changed"] and dry_run["reboot_required"] and not node.versions()
    done = node.run(BOTH)
    assert done["steps"] == dry_run["steps"] == ["install the driver 24.1.rc1", "install the firmware 7.3.0.1"]
    assert done["reboot_required"] and node.versions() == BOTH and node.status() == COMPLETE
    assert done["before"]["driver"] == "" and done["after"] == {
        **dry_run["after"],
        **BOTH,
        "user": "HwHiAiUser",
        "group": "HwHiAiUser",
        "type": "full",
    }
    again = node.run(BOTH)
    assert not again["changed"] and again["steps"] == [] and again["reboot_required"], "the service is still stopped"
    node.system.boot = "boot-2"
    assert not node.run(BOTH)["reboot_required"]

    done = node.run(NEWER)
    assert done["steps"] == [
        "install the firmware 7.5.0.1 in place of 7.3.0.1",
        "install the driver 24.1.rc2 in place of 24.1.rc1",
    ]
    assert node.versions() == NEWER and "-driver: 24.1.rc1" not in str(done["diff"])
    assert done["diff"]["before"] == "driver: 24.1.rc1\nfirmware: 7.3.0.1\ncomplete: True\n"


def test_previous_version_is_restored_without_package_files(node: Node) -> None:
    node.run(BOTH)
    refused = node.run(state="previous")
    assert refused["failed"] and refused["error_code"] == "no-former"
    node.run(NEWER)
    for path in (node.root / "packages").iterdir():
        path.unlink()
    back = node.run(state="previous")
    assert node.versions() == BOTH and len(back["steps"]) == 2 and back["reboot_required"]
    assert node.run(state="previous")["changed"] and node.versions() == NEWER
    assert len([name for name in node.kept() if name.endswith(".run")]) == 4
    node.run({"driver": "24.1.rc3"})
    assert [name for name in node.kept() if "rc1" in name] == [], "two of a kind are kept"


def test_absent_removes_own_packages_firmware_first(node: Node) -> None:
    node.run(BOTH)
    done = node.run(state="absent")
    assert done["steps"] == ["remove the firmware 7.3.0.1", "remove the driver 24.1.rc1"] and done["reboot_required"]
    assert node.versions() == {} and node.kept() == ["record.json"]
    assert not (node.root / "usr/local/Ascend").exists()
    again = node.run(state="absent")
    assert not again["changed"] and again["reboot_required"]
    node.system.boot = "boot-2"
    assert not node.run(state="absent")["reboot_required"] and node.kept() == []

    node.run(BOTH)
    (node.root / KEPT / "record.json").unlink()
    refused = node.run(state="absent")
    assert refused["error_code"] == "foreign" and node.versions() == BOTH
    assert node.run(state="absent", remove_unmanaged=True)["changed"] and node.versions() == {}


@pytest.mark.parametrize("place", ["driver", "driver-late", "firmware"])
@pytest.mark.parametrize("from_versions", [None, BOTH])
def test_killed_run_is_resumed(node: Node, place: str, from_versions: dict[str, str] | None) -> None:
    if from_versions:
        node.run(from_versions)
    node.monkeypatch.setenv("FAKE_STOP", place)
    killed = node.run(NEWER)
    assert (killed["failed"] and node.versions() != NEWER) or node.status() != COMPLETE
    node.monkeypatch.delenv("FAKE_STOP")
    if not from_versions and place == "driver-late":
        assert node.run(state="absent", check=True)["steps"] == ["remove the driver 24.1.rc2"], (
            "an interrupted installation belongs to the module"
        )
    done = node.run(NEWER)
    assert done["changed"] and node.versions() == NEWER and node.status() == COMPLETE
    assert not node.run(NEWER)["changed"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"accept_eula": False}, "licence"),
        ({"driver_checksum": "0" * 64}, "checksum"),
        ({"user": "somebody", "gid": 990}, "not-ready"),
        ({"group": "npus"}, "not-ready"),
        ({"group": "nobodys"}, "not-ready"),
        ({"build": True}, "not-ready"),
        ({"driver": "/packages/driver.run"}, "package-name"),
        ({"driver": None, "firmware": None}, "no-package"),
    ],
)
def test_impossible_installation_is_rejected_before_any_change(node: Node, options: dict[str, Any], code: str) -> None:
    named = {kind: node.package(kind, version) for kind, version in BOTH.items()}
    for check in (True, False):
        result = node.run(check=check, **{**named, **options})
        if check and code == "not-ready":
            (lacking,) = {"user", "group"} & options.keys() or {"headers"}
            assert result["missing_requirements"] == [lacking]  # it may still appear
            continue
        assert result["failed"] and result["error_code"] == code, result
    assert not node.versions()
    # The run creates and deletes its lock in this directory.
    assert [path for path in node.root.glob("var/**/*") if path != node.root / "var/lib"] == []


@pytest.mark.parametrize(
    ("passwd", "group", "reason"),
    [
        ("ubuntu:x:1000:1000::/:/bin/sh\n", "ubuntu:x:1000:\n", "UID 1000 belongs to the user ubuntu"),
        ("", "staff:x:1000:\n", "GID 1000 belongs to the group staff"),
        ("", "HwHiAiUser:x:990:\n", "The group HwHiAiUser has the GID 990, expected 1000"),
    ],
)
def test_missing_user_whose_numbers_are_taken_is_refused(node: Node, passwd: str, group: str, reason: str) -> None:
    (node.root / "etc/passwd").write_text(passwd)
    (node.root / "etc/group").write_text(group)
    for check in (True, False):
        result = node.run(BOTH, check=check)
        assert result["failed"] and result["error_code"] == "id-taken" and reason in result["msg"], result
    assert not node.versions()
    free = node.run(BOTH, check=True, uid=2000, gid=990 if "990" in group else 2000)
    assert free["missing_requirements"] == ["user"], free


def test_damaged_package_is_not_run(node: Node) -> None:
    path = node.package("driver", "24.1.rc1")
    file = node.root / path.lstrip("/")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    text = file.read_text()
    file.write_text(text[:-40] + text[-40:].replace("A", "B").replace("a", "b"))
    assert node.run(driver=path, driver_checksum=digest)["error_code"] == "checksum"
    assert node.run(driver=path)["error_code"] == "package-damaged" and not node.versions()
    file.unlink()
    assert node.run(driver=path)["error_code"] == "package-missing"
    assert node.run(driver=path, check=True)["changed"], "a package that is not copied yet is checked by its name"


def test_npus_in_use_block_the_upgrade(node: Node, tmp_path: Path) -> None:
    node.run(BOTH)
    store = tmp_path / "state.db"
    claim(store, "NPU-1")
    refused = node.run(NEWER, state_path=str(store))
    assert refused["error_code"] == "in-use" and refused["claims"] and "team-a/training" in refused["msg"]

    (node.root / "dev").mkdir()
    (node.root / "dev/davinci3").touch()
    (node.root / "proc/4711/fd").mkdir(parents=True)
    (node.root / "proc/4711/comm").write_text("training\n")
    (node.root / "proc/4711/fd/5").symlink_to("/dev/null")  # the device numbers of the simulated node
    refused = node.run(NEWER)
    assert refused["error_code"] == "in-use" and refused["pids"] == [4711] and node.versions() == BOTH
    assert node.run(state="absent")["error_code"] == "in-use"
    (node.root / "proc/4711/fd/5").unlink()

    # The package refuses because of a use that this module did not find: the interrupted run resumes.
    (node.root / "run").mkdir()
    (node.root / "run/npus-in-use").touch()
    refused = node.run(NEWER)
    assert refused["error_code"] == "package-0x0094" and "Done before that: install the firmware" in refused["msg"]
    (node.root / "run/npus-in-use").unlink()
    assert node.run(NEWER)["steps"] == ["install the driver 24.1.rc2 in place of 24.1.rc1"] and node.versions() == NEWER


def test_claims_delay_the_run_and_are_reported_in_check_mode(node: Node, tmp_path: Path) -> None:
    node.run(BOTH)
    store = tmp_path / "state.db"
    claim(store, "NPU-1")
    dry_result = node.run(NEWER, state_path=str(store), claims_timeout=60, check=True)
    assert dry_result["changed"] and dry_result["blocked_by"]["claims"] == ["team-a/training"], dry_result
    refused = node.run(NEWER, state_path=str(store), check=True)
    assert refused["error_code"] == "in-use"
    store.unlink()
    done = node.run(NEWER, state_path=str(store), claims_timeout=60)
    assert done["changed"] and done["blocked_by"]["claims"] == [] and node.versions() == NEWER


@pytest.mark.parametrize("place", ["driver", "driver-late", "firmware"])
def test_partly_installed_package_can_be_rolled_back(node: Node, place: str) -> None:
    node.run(BOTH)
    node.monkeypatch.setenv("FAKE_STOP", place)
    assert node.run(NEWER)["failed"]
    node.monkeypatch.delenv("FAKE_STOP")
    back = node.run(state="previous", driver_version=BOTH["driver"], firmware_version=BOTH["firmware"])
    assert back["changed"] and node.versions() == BOTH and node.status() == COMPLETE
    again = node.run(state="previous", driver_version=BOTH["driver"], firmware_version=BOTH["firmware"])
    assert not again["changed"]
    unknown = node.run(state="previous", driver_version="23.0")
    assert unknown["error_code"] == "no-former" and "23.0" in unknown["msg"]


def test_failed_removal_keeps_driver_until_next_run(node: Node) -> None:
    node.run(BOTH)
    (node.root / "run").mkdir()
    (node.root / "run/npus-in-use").touch()
    refused = node.run(state="absent")
    assert refused["error_code"] == "package-0x0090" and "could not remove" in refused["msg"]
    assert "Done before that: remove the firmware 7.3.0.1" in refused["msg"] and "ascend_install.log" in refused["hint"]
    assert node.versions() == {"driver": "24.1.rc1"} and node.status() == COMPLETE
    (node.root / "run/npus-in-use").unlink()
    assert node.run(state="absent")["steps"] == ["remove the driver 24.1.rc1"] and node.versions() == {}


def test_driver_keeps_its_group(node: Node) -> None:
    node.run(BOTH)
    # An incomplete driver is installed again. The package refuses a group that differs from the recorded one.
    info = node.root / "etc/ascend_install.info"
    info.write_text(info.read_text().replace("Status=complete", "Status=start"))
    refused = node.run(NEWER, group="more")
    assert refused["error_code"] == "package-0x0096" and "UserGroup" in refused["hint"]
    assert node.versions() == BOTH and node.status() == "start"
    assert node.run(NEWER)["after"]["group"] == "HwHiAiUser" and node.versions() == NEWER
    node.run(state="absent")
    # A supplementary group of the user is also accepted.
    assert node.run(BOTH, group="more")["after"]["group"] == "more"


def test_package_with_immediate_effect_needs_no_reboot(node: Node) -> None:
    path = node.package("driver", "24.1.rc1", EFFECT="It takes effect immediately.")
    done = node.run(driver=path)
    assert done["changed"] and not done["reboot_required"]


def test_unexpected_version_name_is_rejected(node: Node) -> None:
    path = node.root / node.package("driver", "24.1.rc1").lstrip("/")
    other = path.with_name(path.name.replace("24.1.rc1", "24.1.0"))
    path.rename(other)
    name = f"/packages/{other.name}"
    assert node.run(driver=name)["error_code"] == "not-proved"
    assert node.run(driver=name, driver_version="24.1.rc1")["changed"]
    assert not node.run(driver=name, driver_version="24.1.rc1")["changed"]


# Pure functions


def package(kind: str, version: str) -> Package:
    return Package(kind, f"/{kind}-{version}", "310p", version)


VERSIONS = st.sampled_from(["", "1", "2"])


@given(VERSIONS, VERSIONS, st.booleans(), st.sampled_from(["", "driver", "firmware"]), VERSIONS, VERSIONS)
def test_plan_installs_each_package_once_if_needed(
    driver: str, firmware: str, complete: bool, unfinished: str, wanted_driver: str, wanted_firmware: str
) -> None:
    installed = Installed(driver, firmware, complete)
    wanted = [
        package(kind, version)
        for kind, version in (("driver", wanted_driver), ("firmware", wanted_firmware))
        if version
    ]
    if wanted_firmware and not wanted_driver and not driver:
        with pytest.raises(PackageError):
            plan(installed, wanted, unfinished)
        return
    steps = plan(installed, wanted, unfinished)
    assert len({step.kind for step in steps}) == len(steps)
    for step in steps:
        assert step.package is not None
        is_same = step.before == step.package.version
        assert not is_same or step.kind == unfinished or not complete
        assert step.verb != "upgrade" or (step.before and step.kind != unfinished)
        assert step.verb != "upgrade" or step.kind == "firmware" or complete
    for each in wanted:
        assert installed.version(each.kind) == each.version or each.kind in {step.kind for step in steps}
    order = [step.kind for step in steps]
    if len(order) == 2:
        assert order == (["firmware", "driver"] if driver and complete else ["driver", "firmware"])


def test_plan_removal_is_firmware_first() -> None:
    assert [step.kind for step in plan_removal(Installed("1", "2"))] == ["firmware", "driver"]
    assert [step.kind for step in plan_removal(Installed("", "", complete=False))] == ["driver"]
    assert plan_removal(Installed()) == ()


@pytest.mark.parametrize(
    ("name", "kind", "chip", "version", "machine"),
    [
        ("Ascend-hdk-310p-npu-driver_24.1.rc2_linux-x86-64.run", "driver", "310p", "24.1.rc2", "x86_64"),
        ("Ascend-hdk-910b-npu-driver_25.2.0_linux-aarch64.run", "driver", "910b", "25.2.0", "aarch64"),
        ("Ascend-hdk-310P-npu-firmware_7.5.0.1.129.run", "firmware", "310p", "7.5.0.1.129", ""),
        ("Ascend-hdk-910-npu-driver_23.0.3_linux-x86_64.run", "driver", "910", "23.0.3", "x86_64"),
        ("Atlas-A3-hdk-npu-driver_25.3.rc1_linux-x86-64.run", "driver", "a3", "25.3.rc1", "x86_64"),
        ("Atlas-A3-hdk-npu-firmware_7.8.0.2.212.run", "firmware", "a3", "7.8.0.2.212", ""),
        ("Ascend310P-hdk-npu-firmware_6.3.0.run", "firmware", "310p", "6.3.0", ""),
        ("Other-hdk-npu-driver_25.2.0_linux-aarch64.run", "driver", "other", "25.2.0", "aarch64"),
    ],
)
def test_package_name_is_parsed(name: str, kind: str, chip: str, version: str, machine: str) -> None:
    found = read_package(kind, f"/root/{name}")
    assert (found.kind, found.chip, found.version, found.machine) == (kind, chip, version, machine)
    with pytest.raises(PackageError):
        read_package("firmware" if kind == "driver" else "driver", name)


def test_problems_name_packages_for_other_chips_and_machines() -> None:
    wanted = [Package("driver", "/d", "910b", "1", "aarch64"), Package("firmware", "/f", "310p", "1")]
    found = problems(wanted, machine="x86_64", families=["310P"])
    assert len(found) == 2 and "aarch64" in found[0] and "910B" in found[1]
    assert problems(wanted, machine="aarch64", families=[]) == []
    (unknown,) = problems([Package("driver", "/d", "new", "1")], machine=platform.machine(), families=["310P"])
    assert "the chip new, which is unknown" in unknown and "910c" in unknown


def test_command_line_options_are_passed_at_first_installation_only() -> None:
    first = Step("install", "driver", "", package("driver", "1"))
    later = Step("upgrade", "driver", "1", package("driver", "2"))
    firmware = Step("install", "firmware", "", package("firmware", "1"))
    plain = Choices()
    other = Choices("run", "/opt/ascend", "npu", "npus", for_all=True, build=False)
    assert words(first, plain) == ["bash", "/driver-1", "--full", "--quiet"]
    assert words(first, other)[2:] == [
        "--run",
        "--quiet",
        "--install-for-all",
        "--norebuild",
        "--install-path=/opt/ascend",
        "--install-username=npu",
        "--install-usergroup=npus",
    ]
    assert words(later, other)[2:] == ["--upgrade", "--quiet", "--install-for-all", "--norebuild"]
    assert words(firmware, other)[2:] == ["--full", "--quiet"]
    for step, choices in itertools.product((first, later, firmware), (plain, other)):
        assert "--quiet" in words(step, choices), "no user can answer"


def test_package_result_is_mapped_to_error() -> None:
    driver, firmware = (Step("install", kind, "", package(kind, "1")) for kind in ("driver", "firmware"))
    assert refusal(driver, 0, "") is None and refusal(firmware, 2, "current already") is None
    for code in ("0x0002", "0x0091", "0x0093", "0x0094", "0x0095", "0x0096"):
        error = refusal(driver, 1, f"[ERROR]ERR_NO:{code}; words")
        assert error is not None and error.code == f"package-{code}" and error.hint and "words" in str(error)
    error = refusal(driver, 2, "")
    assert error is not None and "said nothing" in str(error)
    assert (
        wants_restart("")
        and wants_restart("Reboot needed")
        and not wants_restart("The new version takes effect immediately.")
    )


NAMES = st.dictionaries(
    st.sampled_from(["driver", "firmware"]),
    st.fixed_dictionaries({"path": st.text(), "version": st.text(), "checksum": st.text()}),
)


@given(NAMES, NAMES, st.text(), st.text())
def test_record_round_trips(packages: Any, former: Any, boot: str, doing: str) -> None:
    record = Record(packages, former, boot, doing)
    assert read_record(record.to_text(), "/record") == record
    assert bool(record) == bool(packages or former or boot or doing)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"version": 2}), '{"version": 1, "packages": {"driver": 3}}']
)
def test_damaged_record_is_rejected(text: str) -> None:
    with pytest.raises(AcceleratorError) as caught:
        read_record(text, "/record")
    assert caught.value.code == "damaged-record"
