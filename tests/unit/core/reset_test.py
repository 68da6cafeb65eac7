# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A reset is refused while any process has the GPU open, so whoever resets one lets go of it first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from dra_driver.core.errors import AcceleratorError, InUse
from dra_driver.core.nvidia import discover, partition
from dra_driver.core.nvidia.backend import NvidiaBackend
from dra_driver.core.nvidia.board_facts import DriverFacts
from dra_driver.core.nvidia.nvml import Nvml
from dra_driver.core.system import System


@pytest.mark.parametrize("refused", [False, True])
def test_no_handle_of_ours_is_open_during_a_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(Nvml, "open", lambda nvml: opened.append(True))
    monkeypatch.setattr(Nvml, "close", lambda nvml: opened.append(False))
    monkeypatch.setattr(discover, "read_driver", lambda nvml: DriverFacts("580.95.05", "13.0"))
    backend = NvidiaBackend(System(str(tmp_path)))
    during: list[bool] = []

    def reset(system: System, uuids: Sequence[str]) -> None:
        during.append(opened[-1])
        if refused:
            raise InUse("somebody else has it open")

    monkeypatch.setattr(partition, "reset", reset)
    backend.open()
    if refused:
        with pytest.raises(InUse):
            backend.reset(["GPU-1"])
    else:
        backend.reset(["GPU-1"])
    assert (during, opened[-1]) == ([False], True)
    backend.close()


REFUSES = 'echo "GPU 00000000:18:00.0 is being used by one or more other processes" >&2; exit 1'


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node whose nvidia-smi resets no GPU while nvidia_drm is loaded, and whose rmmod fails while the file `used` is there."""
    module, programs = tmp_path / "sys/module/nvidia_drm/parameters", tmp_path / "bin"
    module.mkdir(parents=True)
    (module / "modeset").write_text("Y\n")
    programs.mkdir()
    drm, log = module.parent, tmp_path / "log"
    texts = {
        "nvidia-smi": f"if test -e {drm}; then {REFUSES}; fi",
        "rmmod": f"if test -e {tmp_path}/used; then echo 'Module nvidia_drm is in use' >&2; exit 1; fi; rm -r {drm}",
        "modprobe": f"mkdir -p {module}; echo Y > {module}/modeset",
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\necho {name} $* >> {log}\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


def test_reset_unloads_nvidia_drm_that_nothing_uses(node: Path) -> None:
    partition.reset(System(str(node)), ["GPU-1"])
    ran = [line.split()[0] for line in (node / "log").read_text().splitlines()]
    assert ran == ["nvidia-smi", "rmmod", "nvidia-smi", "modprobe"]
    assert (node / "sys/module/nvidia_drm/parameters/modeset").exists()


def test_reset_names_nvidia_drm_that_cannot_be_unloaded(node: Path) -> None:
    (node / "used").touch()
    with pytest.raises(
        InUse, match=r"kernel module nvidia_drm keeps the GPU open.*Module nvidia_drm is in use"
    ) as caught:
        partition.reset(System(str(node)), ["GPU-1"])
    assert "rmmod nvidia_drm" in caught.value.hint and "modprobe nvidia_drm" in caught.value.hint


def test_reset_leaves_nvidia_drm_without_mode_setting_alone(node: Path) -> None:
    (node / "sys/module/nvidia_drm/parameters/modeset").write_text("N\n")
    with pytest.raises(InUse, match="is being used") as caught:
        partition.reset(System(str(node)), ["GPU-1"])
    assert "End the processes" in caught.value.hint
    assert "rmmod" not in (node / "log").read_text()


@pytest.mark.parametrize("modprobe", ["echo 'Key was rejected by service' >&2; exit 1", "sleep 30"])
@pytest.mark.parametrize("resets", [True, False])
def test_reset_reports_nvidia_drm_that_cannot_be_loaded_again(
    node: Path, monkeypatch: pytest.MonkeyPatch, modprobe: str, resets: bool
) -> None:
    """The reset itself counts: the driver has to know that it was made."""
    monkeypatch.setattr(partition, "MODULE_TIMEOUT", 1.0)
    (node / "bin/modprobe").write_text(f"#!/bin/sh\n{modprobe}\n")
    if not resets:
        (node / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{REFUSES}\n")
    noted: list[str] = []
    monkeypatch.setattr(partition, "note_resets", noted.extend)
    expected = "cannot be loaded again: (Key was rejected|modprobe nvidia_drm did not end)"
    with pytest.raises(AcceleratorError, match=expected) as caught:
        partition.reset(System(str(node)), ["GPU-1"])
    assert noted == (["GPU-1"] if resets else [])
    assert caught.value.code == ("module-not-loaded" if resets else "in-use")
