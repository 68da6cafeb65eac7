# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A reset is refused while any process has the GPU open, so the caller of a reset closes it first."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from dra_driver.core.errors import AcceleratorError, InUse
from dra_driver.core.host.device_users import find_located_users
from dra_driver.core.host.system import DeviceNumber, System
from dra_driver.core.settings.knobs import POWER_LIMIT
from dra_driver.core.vendors.nvidia import gpu_reader, gpu_reset
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend
from dra_driver.core.vendors.nvidia.board_facts import BoardFacts, DriverFacts
from dra_driver.core.vendors.nvidia.nvml import Nvml
from dra_driver.core.vendors.nvidia.settings.gpu_settings import GpuSettings
from dra_driver.core.vendors.nvidia.vendor import FACTS


@pytest.mark.parametrize("refused", [False, True])
def test_reset_closes_own_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(Nvml, "open", lambda nvml: opened.append(True))
    monkeypatch.setattr(Nvml, "close", lambda nvml: opened.append(False))
    monkeypatch.setattr(gpu_reader, "read_driver", lambda nvml: DriverFacts("580.95.05", "13.0"))
    backend = NvidiaBackend(System(str(tmp_path)))
    during: list[bool] = []

    def reset(
        system: System, uuids: Sequence[str], nodes: Sequence[str], persistent: Sequence[str], restore_record: object
    ) -> None:
        during.append(opened[-1])
        if refused:
            raise InUse("another process has it open")

    monkeypatch.setattr(gpu_reset, "reset", reset)
    backend.open()
    if refused:
        with pytest.raises(InUse):
            backend.reset(["GPU-1"])
    else:
        backend.reset(["GPU-1"])
    assert (during, opened[-1]) == ([False], True)
    backend.close()


@pytest.mark.parametrize("change", ["reset", "partitioning", "default"])
def test_set_knobs_unreadable_record_is_rejected(tmp_path: Path, change: str) -> None:
    """An unreadable record is refused before any change. Afterwards the node's values would be lost."""
    record = tmp_path / "var/lib/dra-accelerators/settings-nvidia.json"
    record.mkdir(parents=True)  # reading it is an OSError
    system = System(str(tmp_path))
    backend = NvidiaBackend(system)
    board = BoardFacts(None, 0, 0, "GPU-1", "H100", "0000:18:00.0", 0, 0, None, None, 0, False, {})
    with pytest.raises(AcceleratorError, match=r"settings-nvidia.json, .* cannot be read for device GPU-1"):
        if change == "reset":
            backend.reset(["GPU-1"])
        elif change == "partitioning":
            backend.set_partitioning("GPU-1", enabled=True)
        else:
            GpuSettings(Nvml(), system, "/var/lib/dra-accelerators/settings-nvidia.json").set(
                board, {POWER_LIMIT: None}
            )


REFUSES = 'echo "GPU 00000000:18:00.0 is being used by one or more other processes" >&2; exit 1'


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a node whose nvidia-smi resets no GPU while nvidia_drm is loaded, and whose rmmod fails while the file `used` exists."""
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


def test_reset_unloads_unused_nvidia_drm(node: Path) -> None:
    gpu_reset.reset(System(str(node)), ["GPU-1"])
    ran = [line.split()[0] for line in (node / "log").read_text().splitlines()]
    assert ran == ["nvidia-smi", "rmmod", "nvidia-smi", "modprobe"]
    assert (node / "sys/module/nvidia_drm/parameters/modeset").exists()


def test_reset_names_nvidia_drm_that_cannot_be_unloaded(node: Path) -> None:
    (node / "used").touch()
    with pytest.raises(
        InUse, match=r"kernel module nvidia_drm keeps the GPU open.*Module nvidia_drm is in use"
    ) as caught:
        gpu_reset.reset(System(str(node)), ["GPU-1"])
    assert "rmmod nvidia_drm" in caught.value.hint and "modprobe nvidia_drm" in caught.value.hint


def test_reset_keeps_nvidia_drm_without_mode_setting(node: Path) -> None:
    (node / "sys/module/nvidia_drm/parameters/modeset").write_text("N\n")
    with pytest.raises(InUse, match="is being used") as caught:
        gpu_reset.reset(System(str(node)), ["GPU-1"])
    assert "End the processes" in caught.value.hint
    assert "rmmod" not in (node / "log").read_text()


@pytest.mark.parametrize("modprobe", ["echo 'Key was rejected by service' >&2; exit 1", "sleep 30"])
@pytest.mark.parametrize("resets", [True, False])
def test_reset_reports_nvidia_drm_that_cannot_be_reloaded(
    node: Path, monkeypatch: pytest.MonkeyPatch, modprobe: str, resets: bool
) -> None:
    """If nvidia_drm cannot be loaded again, the reset is still reported, because the driver has to know about it."""
    monkeypatch.setattr(gpu_reset, "MODULE_TIMEOUT", 1.0)
    (node / "bin/modprobe").write_text(f"#!/bin/sh\n{modprobe}\n")
    if not resets:
        (node / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{REFUSES}\n")
    noted: list[str] = []
    monkeypatch.setattr(gpu_reset, "note_resets", noted.extend)
    expected = "cannot be loaded again: (Key was rejected|modprobe nvidia_drm did not end)"
    with pytest.raises(AcceleratorError, match=expected) as caught:
        gpu_reset.reset(System(str(node)), ["GPU-1"])
    assert noted == (["GPU-1"] if resets else [])
    assert caught.value.code == ("module-not-loaded" if resets else "in-use")


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a node whose nvidia-smi resets no GPU while the file `open` exists. Disabling persistence mode deletes the file."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "open").touch()
    text = f"""#!/bin/sh
echo $* >> {tmp_path}/log
case "$*" in
  *"-pm 0") rm -f {tmp_path}/open;;
  *"-pm 1") touch {tmp_path}/open;;
  *) if test -e {tmp_path}/open; then {REFUSES}; fi;;
esac
"""
    (programs / "nvidia-smi").write_text(text)
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


def process(root: Path, pid: int, name: str, cgroup: str, number: DeviceNumber) -> None:
    """Add a process with an open /dev/nvidia0 below the root."""
    directory = root / f"proc/{pid}"
    (directory / "fd").mkdir(parents=True)
    (directory / "comm").write_text(f"{name}\n")
    (directory / "cgroup").write_text(f"{cgroup}\n")
    node = root / "dev/nvidia0"
    if not node.exists():
        node.parent.mkdir(exist_ok=True)
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(number.major, number.minor))
    (directory / "fd/7").symlink_to(node)


def test_reset_retries_without_persistence_mode(held: Path) -> None:
    gpu_reset.reset(System(str(held)), ["GPU-1", "GPU-2"], ["/dev/nvidia0"], ["GPU-2"])
    reset = "--gpu-reset -i GPU-1,GPU-2"
    assert (held / "log").read_text().splitlines() == [reset, "-i GPU-2 -pm 0", reset, "-i GPU-2 -pm 1"]


def test_reset_keeps_persistence_mode_if_other_process_has_gpu_open(held: Path) -> None:
    number = DeviceNumber("c", 195, 0)
    process(held, 41, FACTS.persistence_daemon, "0::/system.slice/nvidia-persistenced.service", number)
    process(held, 42, "nv-hostengine", "0::/system.slice/nvidia-dcgm.service", number)
    with pytest.raises(InUse) as caught:
        gpu_reset.reset(System(str(held)), ["GPU-1"], ["/dev/nvidia0"], ["GPU-1"])
    assert "42 (nv-hostengine, unit nvidia-dcgm.service)" in str(caught.value)
    assert caught.value.pids == (41, 42)
    assert "-pm" not in (held / "log").read_text()


UID = "0ee6a1c2-1111-2222-3333-444455556666"
CONTAINER = "0123456789ab" + 52 * "c"


@pytest.mark.parametrize(
    ("cgroup", "described"),
    [
        ("0::/system.slice/nvidia-dcgm.service", "42 (dcgm, unit nvidia-dcgm.service)"),
        ("1:name=systemd:/system.slice/nvidia-dcgm.service", "42 (dcgm, unit nvidia-dcgm.service)"),
        (f"0::/system.slice/docker-{CONTAINER}.scope", "42 (dcgm, container 0123456789ab)"),
        (
            f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-{CONTAINER}.scope",
            "42 (dcgm, pod ops/dcgm)",
        ),
        ("0::/user.slice/session-1.scope", "42 (dcgm)"),
    ],
)
def test_reset_names_holders_with_unit_container_or_pod(tmp_path: Path, cgroup: str, described: str) -> None:
    process(tmp_path, 42, "dcgm", cgroup, DeviceNumber("c", 195, 0))
    (tmp_path / f"var/log/pods/ops_dcgm_{UID}").mkdir(parents=True)
    (found,) = find_located_users(System(str(tmp_path)), ["/dev/nvidia0", "/dev/nvidia1"])
    assert str(found) == described
