# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The file of device health is written in a thread, in the order of the changes."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.core.health import repair_marks
from dra_driver.core.health import tracker as health_tracker
from dra_driver.core.health.conditions import Ends, Severity, Sign
from dra_driver.core.host.system import System
from dra_driver.core.model import Notice
from dra_driver.supervisors.driver_state import Shared, Snapshot
from dra_driver.supervisors.health import FILE, HardwareState, HealthSupervisor

from tests.unit.crash_steps import kill_before

LOST = Sign("error", Severity.FAILED, "It reported error 9.", "Reset it.", Ends.RESET, "9")


class SlowDisk(System):
    """A disk on which a write lasts until the test ends it. Some writes fail."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.failures = 0
        self.writes = 0

    def write_atomic(self, path: str, data: bytes, **options: Any) -> None:
        assert self.may_end.wait(10), "the write kept the event loop"
        self.writes += 1
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        super().write_atomic(path, data, **options)


class NoObserver:
    def report_fault(self, *_about: object) -> None:
        pass

    report_recovery = report_fault


def health_of(directory: Path, disk: System, snapshots: Shared[Snapshot]) -> HealthSupervisor:
    return HealthSupervisor(
        driver="gpu.nvidia.com",
        directory=str(directory),
        system=disk,
        boot_id="boot-1",
        effects=health_tracker.DEFAULT_EFFECTS,
        snapshots=snapshots,
        hardware_states=Shared(HardwareState()),
        scan_requested=asyncio.Event(),
        reporter=NoObserver(),
        claims=tuple,
    )


def faults_in(directory: Path) -> set[str]:
    return set(json.loads((directory / FILE).read_text())["devices"])


def test_slow_disk_does_not_block_the_event_loop(tmp_path: Path) -> None:
    async def main() -> None:
        disk, snapshots = SlowDisk(), Shared(Snapshot())
        health = health_of(tmp_path, disk, snapshots)
        work = asyncio.ensure_future(health.run())
        await asyncio.sleep(0)
        health.record_events([Notice("GPU-1", "error 9", LOST)])
        await asyncio.sleep(0.05)  # the loop runs while the disk writes
        health.record_events([Notice("GPU-2", "error 9", LOST)])
        health.end_reset_faults("GPU-2")
        disk.may_end.set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert faults_in(tmp_path) == {"GPU-1"}, "the last content is there when the supervisor has ended"

    asyncio.run(main())


def test_write_that_failed_is_repeated(tmp_path: Path) -> None:
    async def main() -> None:
        disk, snapshots = SlowDisk(), Shared(Snapshot())
        disk.failures = 1
        disk.may_end.set()
        health = health_of(tmp_path, disk, snapshots)
        work = asyncio.ensure_future(health.run())
        await asyncio.sleep(0)
        health.record_events([Notice("GPU-1", "error 9", LOST)])
        while disk.writes < 1 or not health._write_task or not health._write_task.done():
            await asyncio.sleep(0.01)
        snapshots.put(Snapshot())  # the next scan
        while disk.writes < 2:
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert faults_in(tmp_path) == {"GPU-1"}

    asyncio.run(asyncio.wait_for(main(), 20))


def known_in(health: HealthSupervisor) -> set[str]:
    return set(health._faults)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_mark_is_removed_after_the_change_is_on_disk(tmp_path: Path) -> None:
    async def main() -> None:
        disk, snapshots = SlowDisk(), Shared(Snapshot())
        disk.may_end.set()
        health = health_of(tmp_path, disk, snapshots)
        work = asyncio.ensure_future(health.run())
        await asyncio.sleep(0)
        health.record_events([Notice("GPU-1", "error 9", LOST)])
        await until((tmp_path / FILE).exists)
        disk.may_end.clear()
        repair_marks.mark(str(tmp_path), ["GPU-1"], repair_marks.RESET)
        health.apply_repair_marks()
        health.apply_repair_marks()
        await asyncio.sleep(0.05)
        assert len(repair_marks.read(str(tmp_path))) == 1, "a power cut now would lose the reset"
        assert known_in(health) == set() and faults_in(tmp_path) == {"GPU-1"}
        disk.failures = 1
        disk.may_end.set()
        await until(lambda: disk.writes == 2)
        assert len(repair_marks.read(str(tmp_path))) == 1, "the write has failed"
        health.apply_repair_marks()
        await until(lambda: not repair_marks.read(str(tmp_path)))
        assert faults_in(tmp_path) == set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_mark_that_cannot_be_removed_neither_ends_new_faults_nor_stops_other_marks(tmp_path: Path) -> None:
    """A mark that cannot be removed has no further effects, not even after a restart."""

    async def main() -> None:
        health = health_of(tmp_path, System(), Shared(Snapshot()))
        work = asyncio.ensure_future(health.run())
        await asyncio.sleep(0)
        health.record_events([Notice("GPU-1", "error 9", LOST), Notice("GPU-2", "error 9", LOST)])
        obstacle = tmp_path / repair_marks.FOLDER / "GPU-1.reset.0a"
        obstacle.mkdir(parents=True)  # unlink fails
        repair_marks.mark(str(tmp_path), ["GPU-2"], repair_marks.RESET)
        health.apply_repair_marks()
        assert known_in(health) == set()
        await until(lambda: len(repair_marks.read(str(tmp_path))) == 1)
        health.record_events([Notice("GPU-1", "error 9", LOST)])
        health.apply_repair_marks()
        assert known_in(health) == {"GPU-1"}, "the applied mark has ended a fault that was reported after it"
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        restarted = health_of(tmp_path, System(), Shared(Snapshot()))
        restarted.apply_repair_marks()
        assert known_in(restarted) == {"GPU-1"}
        obstacle.rmdir()
        obstacle.touch()
        restarted.apply_repair_marks()
        assert not repair_marks.read(str(tmp_path)) and known_in(restarted) == {"GPU-1"}
        repair_marks.mark(str(tmp_path), ["GPU-1"], repair_marks.RESET)
        restarted.apply_repair_marks()
        assert known_in(restarted) == set()

    asyncio.run(asyncio.wait_for(main(), 20))


class UnreadableDisk(System):
    """A disk on which the health file cannot be read at first."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = True
        self.reads = 0

    def read_text(self, path: str) -> str:
        self.reads += 1
        if self.is_broken:
            raise OSError(5, "Input/output error", path)
        return super().read_text(path)


def test_faults_outlive_a_read_error(tmp_path: Path) -> None:
    """Only a reset or a repair ends these faults: after a read error the device must not be offered again."""

    async def main() -> None:
        before = health_of(tmp_path, System(), Shared(Snapshot()))
        work = asyncio.ensure_future(before.run())
        await asyncio.sleep(0)
        before.record_events([Notice("GPU-1", "error 9", LOST)])
        await until((tmp_path / FILE).exists)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

        disk, snapshots = UnreadableDisk(), Shared(Snapshot())
        repair_marks.mark(str(tmp_path), ["GPU-3"], repair_marks.RESET)
        health = health_of(tmp_path, disk, snapshots)
        health.apply_repair_marks()
        work = asyncio.ensure_future(health.run())
        await until(lambda: disk.reads > 1)
        health.record_events([Notice("GPU-2", "error 9", LOST)])
        snapshots.put(Snapshot())
        await until(lambda: disk.reads > 2)
        assert faults_in(tmp_path) == {"GPU-1"}, "the file is not replaced"
        assert repair_marks.read(str(tmp_path)), "marks wait for the faults that they end"
        disk.is_broken = False
        snapshots.put(Snapshot())  # the next scan
        await until(lambda: faults_in(tmp_path) == {"GPU-1", "GPU-2"})
        assert known_in(health) == {"GPU-1", "GPU-2"}
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_damaged_file_is_kept_next_to_the_new_one(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / FILE).write_text("{")
        health = health_of(tmp_path, System(), Shared(Snapshot()))
        work = asyncio.ensure_future(health.run())
        await asyncio.sleep(0)
        health.record_events([Notice("GPU-1", "error 9", LOST)])
        await until(lambda: (tmp_path / FILE).read_text() != "{")
        assert faults_in(tmp_path) == {"GPU-1"}
        assert (tmp_path / f"{FILE}.damaged").read_text() == "{"
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_driver_killed_before_any_step_of_a_reset_next_start_ends_the_fault(tmp_path: Path) -> None:
    """The fault ends once: a mark exists until the file without the fault is on the disk."""

    def start(directory: Path, *, has_fault: bool) -> None:
        async def main() -> None:
            health = health_of(directory, System(), Shared(Snapshot()))
            work = asyncio.ensure_future(health.run())
            await asyncio.sleep(0)
            if has_fault:
                health.record_events([Notice("GPU-1", "error 9", LOST)])
                await until((directory / FILE).exists)
            else:
                health.apply_repair_marks()
                assert known_in(health) == set()
                await until(lambda: not repair_marks.read(str(directory)))
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

        asyncio.run(asyncio.wait_for(main(), 20))

    for number in itertools.count():
        directory = tmp_path / str(number)
        directory.mkdir()
        start(directory, has_fault=True)
        repair_marks.mark(str(directory), ["GPU-1"], repair_marks.RESET)
        step = kill_before(number, lambda directory=directory: start(directory, has_fault=False), directory)
        if not step:
            assert number > 2
            return
        assert len(repair_marks.read(str(directory))) == 1 or faults_in(directory) == set(), step
        start(directory, has_fault=False)
        assert faults_in(directory) == set() and repair_marks.read(str(directory)) == (), step
