# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Locks between processes: one holder at a time, each wait ends, and dead holders leave no lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dra_driver.core.discovery.device_locks import LIBRARY, REQUEST, DeviceLocks, library_alone
from dra_driver.core.errors import AcceleratorError, InUse


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_lock_has_one_holder_named_in_rejection(tmp_path: Path) -> None:
    driver, module = DeviceLocks(str(tmp_path), "the driver"), DeviceLocks(str(tmp_path), "a layout")
    clock = Clock()
    assert driver.take("GPU-1")
    assert not driver.take("GPU-1")
    assert not module.take("GPU-1")
    assert module.take("GPU-2")
    module.drop("GPU-2")
    assert module.is_taken("GPU-1")
    waiting = module.hold(["GPU-2", "GPU-1"], 5, sleep=clock.sleep, clock=clock)
    # Two statements, because a name between two items on one line looks like a tuple.
    with pytest.raises(InUse, match=rf"GPU-1.*the driver \(pid {os.getpid()}\).*5 s") as refused:  # noqa: SIM117
        with waiting:
            raise AssertionError("it was not to be had")
    assert refused.value.code == "device-locked"
    assert clock.now >= 5
    assert not driver.is_taken("GPU-2")  # the attempt leaves no lock
    driver.drop("GPU-1")
    with module.hold(["GPU-2", "GPU-1"], 5, sleep=clock.sleep, clock=clock):
        assert driver.is_taken("GPU-1") and driver.is_taken("GPU-2")
    assert not driver.is_taken("GPU-1")


def test_hold_opposite_orders_does_not_deadlock(tmp_path: Path) -> None:
    held: list[str] = []

    def work(name: str, order: list[str]) -> None:
        for _round in range(50):
            with DeviceLocks(str(tmp_path), name).hold(order, 30):
                held.append(name)
                assert held == [name]
                held.remove(name)

    workers = [threading.Thread(target=work, args=(str(n), ["A", "B", "C"][:: 1 - 2 * (n % 2)])) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from dra_driver.core.discovery.device_locks import DeviceLocks\n"
        "assert DeviceLocks(sys.argv[1], 'the dead').take('GPU-1')\n"
        "print('taken', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"taken\n"
    locks = DeviceLocks(str(tmp_path), "the living")
    assert locks.is_taken("GPU-1")
    assert "the dead" in locks.holder_of("GPU-1")
    process.kill()
    process.wait()
    assert locks.take("GPU-1")


def test_hold_without_driver_directory_creates_nothing(tmp_path: Path) -> None:
    locks = DeviceLocks(str(tmp_path / "none"), "a layout")
    with locks.hold(["GPU-1"], 0):
        assert not (tmp_path / "none").exists()


def test_take_recreated_file_is_locked(tmp_path: Path) -> None:
    old, new = DeviceLocks(str(tmp_path), "old"), DeviceLocks(str(tmp_path), "new")
    assert old.take("GPU-1")
    (tmp_path / "locks/GPU-1.lock").unlink()
    assert new.take("GPU-1")
    third = DeviceLocks(str(tmp_path), "third")
    assert not third.take("GPU-1")
    assert third.holder_of("GPU-1").startswith("new")


def test_take_open_file_is_reused_until_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver locks a device with each claim: the file is opened once and stays correct after changes by other programs."""
    opened: list[str] = []
    real = os.open

    def seen(path: str, *rest: int, **more: int) -> int:
        opened.append(Path(path).name)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", seen)
    driver, module = DeviceLocks(str(tmp_path), "the driver", keeps_open=True), DeviceLocks(str(tmp_path), "a layout")
    for _claim in range(3):
        assert driver.take("GPU-1") and not module.take("GPU-1")
        assert driver.holder_of("GPU-1").startswith("the driver")
        driver.drop("GPU-1")
        assert module.take("GPU-1") and not driver.take("GPU-1")
        assert driver.holder_of("GPU-1").startswith("a layout")
        module.drop("GPU-1")
    assert opened.count("GPU-1.lock") == 2 + 2 * 3  # the first one created the directory in between
    shutil.rmtree(tmp_path / "locks")
    assert module.take("GPU-1") and not driver.take("GPU-1")
    module.drop("GPU-1")
    assert driver.take("GPU-1") and module.is_taken("GPU-1")
    driver.drop_all()
    assert not module.is_taken("GPU-1")
    descriptors = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}
    assert not any(str(tmp_path) in each for each in descriptors)


def _is_open(descriptor: str) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").is_symlink()


def test_take_again_writes_nothing(tmp_path: Path) -> None:
    holders = {name: DeviceLocks(str(tmp_path), name) for name in ("the driver of this node", "a layout")}
    driver, module = holders
    path = tmp_path / "locks/GPU-1.lock"
    times = []
    for name in (driver, driver, module, driver):
        holder = holders[name]
        os.utime(path, (0, 0)) if path.exists() else None
        assert holder.take("GPU-1")
        assert holder.holder_of("GPU-1") == f"{name} (pid {os.getpid()})"
        holder.drop("GPU-1")
        times.append(path.stat().st_mtime == 0)
    assert times == [False, True, False, False]


def test_is_taken_creates_and_writes_nothing(tmp_path: Path) -> None:
    module, driver = DeviceLocks(str(tmp_path), "a layout"), DeviceLocks(str(tmp_path), "the driver")
    assert not driver.is_taken("request") and list(tmp_path.iterdir()) == []
    assert module.take("request") and driver.is_taken("request")
    module.drop("request")
    assert not driver.is_taken("request") and not driver.is_taken("library")
    (path,) = tmp_path.glob("*/*")
    assert path.read_text().startswith("a layout")
    assert module.take("request"), "is_taken holds nothing"


def test_take_path_not_a_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file")
    with pytest.raises(AcceleratorError, match="locks") as refused:
        DeviceLocks(str(tmp_path), "a layout").take("GPU-1")
    assert refused.value.code == "lock-unusable"


def test_library_alone_driver_releases_on_request(tmp_path: Path) -> None:
    driver, module = DeviceLocks(str(tmp_path), "the driver"), DeviceLocks(str(tmp_path), "a layout")
    calls: list[str] = []
    assert driver.take(LIBRARY)

    def wake() -> None:
        if driver.is_taken(REQUEST):
            calls.append("let go")
            driver.drop(LIBRARY)
        else:
            calls.append("take up")
            assert driver.take(LIBRARY)

    with library_alone(module, wake, 5):
        assert calls == ["let go"]
        assert driver.is_taken(LIBRARY)
    assert calls == ["let go", "take up"]


def test_library_alone_driver_without_release_is_named(tmp_path: Path) -> None:
    driver, module = DeviceLocks(str(tmp_path), "the driver"), DeviceLocks(str(tmp_path), "a layout")
    assert driver.take(LIBRARY)
    with pytest.raises(InUse, match=r"library.*the driver"), library_alone(module, lambda: None, 0.2):
        raise AssertionError("it was not to be had")
    assert not driver.is_taken(REQUEST)
