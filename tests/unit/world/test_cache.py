# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The cache: a finished directory is complete, whatever happened during its creation or since."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from world_cli import cache


def maker(text: str = "content", calls: list[Path] | None = None) -> Callable[[Path], None]:
    def make(target: Path) -> None:
        if calls is not None:
            calls.append(target)
        (target / "bin").mkdir()
        (target / "bin/program").write_text(text)

    return make


def test_ensure_complete_entry_is_built_once(tmp_path: Path) -> None:
    calls: list[Path] = []
    assert cache.ensure(tmp_path / "x", maker(calls=calls)) is True
    assert cache.ensure(tmp_path / "x", maker(calls=calls)) is False
    assert len(calls) == 1
    assert (tmp_path / "x/bin/program").read_text() == "content"
    assert cache.damage(tmp_path / "x", thorough=True) is None


def test_ensure_failed_build_leaves_no_valid_entry(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError):
        cache.ensure(tmp_path / "x", fail)
    assert not (tmp_path / "x").exists()
    assert cache.ensure(tmp_path / "x", maker()) is True
    assert not (tmp_path / "x/half").exists()
    assert [path.name for path in tmp_path.glob(".*.partial")] == []


def test_ensure_removes_files_of_a_killed_build(tmp_path: Path) -> None:
    left = tmp_path / ".x.partial"
    (left / "bin").mkdir(parents=True)
    (left / "bin/old").write_text("old")
    cache.ensure(tmp_path / "x", maker())
    assert sorted(path.name for path in (tmp_path / "x/bin").iterdir()) == ["program"]
    assert not left.exists()


def remove_stamp(directory: Path) -> None:
    (directory / cache.STAMP).unlink()


def cut_stamp(directory: Path) -> None:
    (directory / cache.STAMP).write_text('{"files": {"bin/program"')


def stamp_of_another_form(directory: Path) -> None:
    (directory / cache.STAMP).write_text("[]")


def remove_file(directory: Path) -> None:
    (directory / "bin/program").unlink()


def cut_file(directory: Path) -> None:
    (directory / "bin/program").write_text("con")


def change_file(directory: Path) -> None:
    (directory / "bin/program").write_text("CONTENT")
    os.utime(directory / "bin/program", ns=(1, 1))


@pytest.mark.parametrize("spoil", [remove_stamp, cut_stamp, stamp_of_another_form, remove_file, cut_file, change_file])
def test_damage_is_noticed_and_repaired(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    cache.ensure(tmp_path / "x", maker())
    spoil(tmp_path / "x")
    assert cache.damage(tmp_path / "x")
    assert cache.ensure(tmp_path / "x", maker()) is True
    assert (tmp_path / "x/bin/program").read_text() == "content"


def test_change_with_the_old_time_is_found_by_a_full_read(tmp_path: Path) -> None:
    cache.ensure(tmp_path / "x", maker())
    program = tmp_path / "x/bin/program"
    times = program.stat()
    program.write_text("CONTENT")
    os.utime(program, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.damage(tmp_path / "x") is None
    assert cache.damage(tmp_path / "x", thorough=True) == "has a changed bin/program"


def test_new_time_alone_is_no_damage(tmp_path: Path) -> None:
    cache.ensure(tmp_path / "x", maker())
    os.utime(tmp_path / "x/bin/program", ns=(1, 1))
    assert cache.damage(tmp_path / "x") is None


def test_ensure_parallel_runs_build_once(tmp_path: Path) -> None:
    calls: list[Path] = []
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: cache.ensure(tmp_path / "x", maker(calls=calls)), range(8)))
    assert made.count(True) == 1
    assert len(calls) == 1


def test_write_atomically_replaces_the_whole_file_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder/state.json"
    cache.write_atomically(path, "first", 0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UnicodeEncodeError):
        cache.write_atomically(path, "second\ud800")
    assert path.read_text() == "first"
    assert [each.name for each in path.parent.iterdir()] == ["state.json"]


def test_digest_depends_on_the_boundaries_of_its_parts() -> None:
    assert cache.digest("ab", "c") != cache.digest("a", "bc")
    assert cache.digest("a", b"b") == cache.digest(b"a", "b")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DRA_ACCELERATORS_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/dra-accelerators"),
        ({"HOME": "/h"}, "/h/.cache/dra-accelerators"),
    ],
)
def test_cache_directory_follows_the_environment(environment: dict[str, str], expected: str) -> None:
    assert str(cache.cache_root(environment)) == expected
