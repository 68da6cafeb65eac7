# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The script that sends settings to MPS daemons and checks them, and the units that run it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from dra_driver.core.host.companions import SharedDevice
from dra_driver.core.vendors.nvidia import mps

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_driver"
TEMPLATES = ROLE / "templates"
SCRIPT = ROLE / "files/mps-settings.sh"
PERCENTAGE, LIMIT = "get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0"
MEBIBYTE = 1024**2
DAEMON = """#!/bin/sh
while read -r line; do
  printf '%s\\n' "$line" >> {directory}/asked
  case $line in
{cases}
  esac
done
exit $(cat {directory}/code)
"""


def run(
    directory: Path, mode: str, answers: dict[str, str], code: int = 0, **sharing: int
) -> tuple[int, str, list[str]]:
    """Return the script's exit code and message, and the commands that it sent to a daemon with these answers."""
    cases = "\n".join(f"    '{requested}') printf '%b\\n' '{answer}' ;;" for requested, answer in answers.items())
    control = directory / "nvidia-cuda-mps-control"
    control.write_text(DAEMON.format(directory=directory, cases=cases), encoding="utf-8")
    control.chmod(0o755)
    (directory / "code").write_text(str(code), encoding="ascii")
    (directory / "asked").write_text("", encoding="ascii")
    device = SharedDevice("c", "gpu-0", "r", "GPU-a", False, {"strategy": "MPS", **sharing})
    (companion,) = mps.companions("0uid", [device])
    (directory / "commands").write_text(companion.commands_text, encoding="ascii")
    environment = {"PATH": f"{directory}:{os.environ['PATH']}"}
    words = ["sh", str(SCRIPT), mode, str(directory / "commands")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=60)
    return done.returncode, done.stderr.strip(), (directory / "asked").read_text("utf-8").splitlines()


@pytest.mark.parametrize("held", ["4G", "4500M"])
@pytest.mark.parametrize("percentage", ["50.0", "50", "50.000"])
def test_apply_daemon_holds_its_settings_passes(tmp_path: Path, held: str, percentage: str) -> None:
    settings = {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": 4500 * MEBIBYTE}
    answers = {PERCENTAGE: percentage, LIMIT: held}
    code, message, requested = run(tmp_path, "apply", answers, **settings)
    assert (code, message) == (0, "")
    assert requested[0] == PERCENTAGE and requested[1:3] == [
        "set_default_device_pinned_mem_limit 0 4500M",
        "set_default_active_thread_percentage 50",
    ]
    code, message, requested = run(tmp_path, "check", answers, **settings)
    assert (code, message) == (0, "") and not any(line.startswith("set_") for line in requested)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({PERCENTAGE: "100.0", LIMIT: "4G"}, "the active thread percentage is '100.0', expected 50"),
        ({PERCENTAGE: "50.0", LIMIT: "5G"}, "device 0 has the memory limit '5G', expected 4096M"),
        ({PERCENTAGE: "50.0"}, "device 0 has the memory limit '', expected 4096M"),
        ({PERCENTAGE: "", LIMIT: "4G"}, "the active thread percentage is '', expected 50"),
        ({PERCENTAGE: "$(reboot)`x`;*", LIMIT: "4G"}, "the active thread percentage is '$(reboot)`x`;*', expected 50"),
        ({PERCENTAGE: "50.0", LIMIT: "4G\\n4096M\\033[2J"}, "memory limit '4G4096M[2J', expected 4096M"),
        ({PERCENTAGE: r"\\033[2J", LIMIT: "4G"}, r"the active thread percentage is '\033[2J', expected 50"),
        ({PERCENTAGE: "1" * 5000, LIMIT: "4G"}, f"the active thread percentage is '{'1' * 200}', expected 50"),
    ],
)
def test_check_daemon_holds_other_settings_fails(tmp_path: Path, answers: dict[str, str], message: str) -> None:
    settings = {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": 4096 * MEBIBYTE}
    code, found, _asked = run(tmp_path, "check", answers, **settings)
    assert code == 1 and message in found and found.isprintable()


@pytest.mark.prove
@pytest.mark.parametrize(
    ("percentage", "message"),
    [
        ("100.0", "the active thread percentage is '100.0', expected 50"),
        ("no daemon", "the active thread percentage is 'no daemon', expected a number"),
    ],
)
def test_apply_daemon_holds_other_settings_fails(tmp_path: Path, percentage: str, message: str) -> None:
    code, found, _asked = run(tmp_path, "apply", {PERCENTAGE: percentage}, defaultActiveThreadPercentage=50)
    assert code == 1 and message in found


def test_check_daemon_without_settings_has_to_answer(tmp_path: Path) -> None:
    assert run(tmp_path, "check", {PERCENTAGE: "100.0"})[:2] == (0, "")
    code, message, _asked = run(tmp_path, "check", {})
    assert code == 1 and "the active thread percentage is '', expected a number" in message


def test_check_output_without_end_is_cut(tmp_path: Path) -> None:
    """Containers of the claim can control the daemon's answer: an output without end is cut."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\nexec yes 50.0\n", encoding="ascii")
    control.chmod(0o755)
    (tmp_path / "commands").write_text(f"{PERCENTAGE}\n", encoding="ascii")
    words = ["sh", str(SCRIPT), "check", str(tmp_path / "commands")]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=30)
    assert done.returncode == 1 and len(done.stderr) < 400


def lines(unit: str) -> list[str]:
    return (TEMPLATES / unit).read_text("utf-8").splitlines()


def test_daemon_unit_uses_version_2_of_the_interface() -> None:
    """The settings are commands of version 2, which the environment of the node can replace (NVIDIA's documentation of MPS)."""
    assert "UnsetEnvironment=CUDA_MPS_PROTOCOL_VERSION" in lines("dra-accelerators-mps@.service.j2")


def test_units_keep_local_users_out_of_the_directories_of_companions() -> None:
    driver, memory = lines("dra-accelerators-driver.service.j2"), lines("dra-accelerators-memory@.service.j2")
    assert "RuntimeDirectoryMode=0700" in driver
    mounts = [line for line in memory if "mount " in line and line.startswith("ExecStart=")]
    assert len(mounts) == 1 and "mode=0700" in mounts[0] and "nosymfollow" in mounts[0]
    assert "d {{ __dra_driver_companions }} 0700 root root -" in lines("tmpfiles.conf.j2")
    assert "ExecStart=/bin/chmod 0700 {{ __dra_driver_companions }}" in memory


@pytest.mark.parametrize(("fails", "options"), [(False, 1), (True, 2)])
def test_memory_unit_without_nosymfollow_mounts_with_a_warning(tmp_path: Path, fails: bool, options: int) -> None:
    (line,) = [each for each in lines("dra-accelerators-memory@.service.j2") if "/bin/sh -c" in each]
    found = re.fullmatch(r"ExecStart=/bin/sh -c '(.*)'", line)
    assert found is not None
    text = found[1].replace("$$", "$").replace("{{ dra_driver_mps_memory }}", "1G")
    program = tmp_path / "mount"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/called\ncase "$*" in *nosymfollow*) exit {int(fails)} ;; esac\n', "ascii"
    )
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False, env=environment)
    called = (tmp_path / "called").read_text("ascii").splitlines()
    assert done.returncode == 0 and len(called) == options
    assert all("nosuid,nodev,noexec,mode=0700,size=1G" in each for each in called)
    assert ("without nosymfollow" in done.stderr) == fails
