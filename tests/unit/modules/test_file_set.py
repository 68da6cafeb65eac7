# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module file_set: write a set of files in one step, with a diff, without removing files of other owners."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._host import file_set
from ansible_collections.dra.accelerators.plugins.module_utils._host.file_writer import FileWriter, Unfinished
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def write(run_here: Run) -> Run:
    """Return a function that writes a set and returns the module's result."""

    def call(*files: dict[str, Any], check: bool = False) -> dict[str, Any]:
        return run_here("file_set", {"files": list(files)}, check=check, diff=True)

    return call


def a_set(folder: Path) -> list[dict[str, Any]]:
    return [
        {"path": str(folder / "etc"), "state": "directory", "mode": "0750"},
        {"path": str(folder / "etc/settings"), "content": "level: info\n", "mode": "0640"},
        {"path": str(folder / "etc/token"), "secret_content": "hidden-word\n", "mode": "0600"},
        {"path": str(folder / "current"), "state": "link", "target": "releases/2"},
    ]


def test_set_is_written_once(write: Run, tmp_path: Path) -> None:
    files = a_set(tmp_path)
    dry_run = write(*files, check=True)
    assert dry_run["changed"] and not list(tmp_path.iterdir())

    done = write(*files)
    assert done["changed_paths"] == dry_run["changed_paths"] == [one["path"] for one in files]
    assert done["diff"] == dry_run["diff"]
    assert (tmp_path / "etc").stat().st_mode & 0o7777 == 0o750
    assert (tmp_path / "etc/settings").read_text("utf-8") == "level: info\n"
    assert (tmp_path / "etc/settings").stat().st_mode & 0o7777 == 0o640
    assert (tmp_path / "etc/token").stat().st_mode & 0o7777 == 0o600
    assert str((tmp_path / "current").readlink()) == "releases/2"

    again = write(*files)
    assert not again["changed"] and again["diff"] == [] and again["previous"] == []


def test_duplicate_entry_is_written_once(write: Run, tmp_path: Path) -> None:
    """For example the directory of two files of a role: it is written once."""
    directory = {"path": str(tmp_path / "etc"), "state": "directory"}
    file = {"path": str(tmp_path / "etc/file"), "content": "text\n", "mode": "0600"}
    dry_run = write(directory, directory, file, check=True)
    done = write(directory, directory, file)
    assert dry_run["changed_paths"] == done["changed_paths"] == [directory["path"], file["path"]]
    assert [one["path"] for one in done["files"]] == [directory["path"], directory["path"], file["path"]]
    assert not write(directory, directory, file)["changed"]


def test_only_differences_are_written_and_shown(write: Run, tmp_path: Path) -> None:
    files = a_set(tmp_path)
    write(*files)
    files[1]["content"] = "level: debug\n"
    (tmp_path / "etc/token").chmod(0o644)
    result = write(*files)
    assert [(Path(one["path"]).name, one["what"]) for one in result["files"] if one["changed"]] == [
        ("settings", ["content"]),
        ("token", ["mode"]),
    ]
    settings, token = result["diff"]
    assert (settings["before"], settings["after"]) == ("level: info\n", "level: debug\n")
    assert token["before"].startswith("mode 0644") and token["after"].startswith("mode 0600")


def test_secret_is_neither_shown_nor_returned(write: Run, tmp_path: Path) -> None:
    for files in (a_set(tmp_path), [{"path": str(tmp_path / "etc/token"), "secret_content": "hidden-words\n"}]):
        assert "hidden-word" not in json.dumps(write(*files))
    assert (tmp_path / "etc/token").read_text("utf-8") == "hidden-words\n"


def test_restore_returns_previous_entries(write: Run, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir(mode=0o755)
    (tmp_path / "etc/settings").write_text("old\n", "utf-8")
    (tmp_path / "current").symlink_to("releases/1")
    files = [one for one in a_set(tmp_path) if "secret_content" not in one]
    files.append({"path": str(tmp_path / "new/file"), "content": "x"})
    back = write(*files)["previous"]
    write(*back)
    assert (tmp_path / "etc/settings").read_text("utf-8") == "old\n"
    assert str((tmp_path / "current").readlink()) == "releases/1"
    assert not (tmp_path / "new/file").exists()


def test_absent_removes_only_marked_files(write: Run, tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("# made by us\n", "utf-8")
    (tmp_path / "theirs").write_text("# made by them\n", "utf-8")
    absent = [
        {"path": str(tmp_path / name), "state": "absent", "marker": "by us"} for name in ("ours", "theirs", "none")
    ]
    assert write(*absent)["changed_paths"] == [str(tmp_path / "ours")]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["theirs"]


def test_empty_directory_is_removed(write: Run, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / name).write_text("", "utf-8")
    one, two, whole = ({"path": str(path), "state": "absent"} for path in (folder / "one", folder / "two", folder))
    assert write(one, whole, check=True)["changed_paths"] == [str(folder / "one")]
    assert write(one, two, whole, check=True)["changed_paths"] == [
        str(folder / "one"),
        str(folder / "two"),
        str(folder),
    ]
    write(one, two, whole)
    assert not folder.exists()


def test_obstacle_is_named_and_nothing_is_written(write: Run, tmp_path: Path) -> None:
    (tmp_path / "settings").mkdir()
    result = write(
        {"path": str(tmp_path / "first"), "content": "x"}, {"path": str(tmp_path / "settings"), "content": "x"}
    )
    assert result["failed"] and "is a directory, expected a file" in result["msg"]
    assert not (tmp_path / "first").exists()


def test_link_is_replaced_without_writing_its_target(write: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("theirs", "utf-8")
    (tmp_path / "settings").symlink_to("elsewhere")
    write({"path": str(tmp_path / "settings"), "content": "ours"})
    assert not (tmp_path / "settings").is_symlink()
    assert (tmp_path / "elsewhere").read_text("utf-8") == "theirs"


def test_attributes_of_missing_file_are_rejected(write: Run, tmp_path: Path) -> None:
    result = write({"path": str(tmp_path / "none"), "mode": "0600"})
    assert result["failed"] and "its entry has no content" in result["msg"]


TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJkcml2ZXItbm9kZS0xIn0.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
KUBECONFIG = json.dumps({"apiVersion": "v1", "users": [{"name": "driver-n1", "user": {"token": TOKEN}}]})
STATES: dict[str, dict[str, Any]] = {
    "absent": {"state": "absent"},
    "mode": {"mode": "0600"},
    "content": {"content": "new\n"},
    "secret_content": {"secret_content": KUBECONFIG.replace("driver-n1", "driver-n2")},
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("change", STATES)
def test_secret_entry_any_state_result_has_no_content(write: Run, tmp_path: Path, change: str, check: bool) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG, "utf-8")
    path.chmod(0o644)
    result = write({"path": str(path), "secret": True, **STATES[change]}, check=check)
    assert result["changed"] and result["changed_paths"] == [str(path)]
    assert TOKEN not in json.dumps(result) and "driver-n1" not in json.dumps(result)
    assert result["previous"] == []


def test_secret_entry_of_plain_file_result_has_no_content(write: Run, tmp_path: Path) -> None:
    (tmp_path / "pass").write_text("correct horse\n", "utf-8")
    result = write({"path": str(tmp_path / "pass"), "state": "absent", "secret": True}, check=True)
    assert "correct horse" not in json.dumps(result)


@pytest.mark.parametrize("change", ["absent", "content"])
def test_unmarked_entry_with_token_is_treated_as_secret(write: Run, tmp_path: Path, change: str) -> None:
    path, other = tmp_path / "kubeconfig", tmp_path / "settings"
    path.write_text(KUBECONFIG, "utf-8")
    other.write_text("level: info\n", "utf-8")
    result = write({"path": str(path), **STATES[change]}, {"path": str(other), "state": "absent"}, check=True)
    assert TOKEN not in json.dumps(result)
    assert [one["path"] for one in result["previous"]] == [str(other)]
    assert result["previous"][0]["content"] == "level: info\n"


def test_entry_repeating_a_secret_is_left_out_of_restore(write: Run, tmp_path: Path) -> None:
    """The removed file is not in ``former``, because a restore would write the masked content."""
    (tmp_path / "notes").write_text("the text is hidden-word\n", "utf-8")
    secret = {"path": str(tmp_path / "token"), "secret_content": "hidden-word"}
    result = write(secret, {"path": str(tmp_path / "notes"), "state": "absent"}, check=True)
    assert "hidden-word" not in json.dumps(result) and result["previous"] == []


def test_failure_message_has_no_secret(write: Run, tmp_path: Path) -> None:
    (tmp_path / TOKEN).mkdir()
    (tmp_path / "kubeconfig").write_text(KUBECONFIG, "utf-8")
    entry = {"path": str(tmp_path / "kubeconfig"), "secret": True, "state": "absent"}
    result = write(entry, {"path": str(tmp_path / TOKEN), "content": "x"})
    assert result["failed"] and "is a directory" in result["msg"]
    assert TOKEN not in result["msg"]


def tree(folder: Path) -> dict[str, tuple[int, str | bytes]]:
    """Return mode and content (of a link: its target) of all entries below a directory."""

    def content(path: Path) -> str | bytes:
        if path.is_symlink():
            return str(path.readlink())
        return path.read_bytes() if path.is_file() else ""

    return {str(path.relative_to(folder)): (path.lstat().st_mode & 0o7777, content(path)) for path in folder.rglob("*")}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """Return a directory on a file system that has no space for a large file."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_file_set_full_disk_restores_all_entries(write: Run, full: Path) -> None:
    (full / "settings").write_text("old\n")
    (full / "token").write_text(KUBECONFIG)
    (full / "token").chmod(0o640)
    (full / "current").symlink_to("releases/1")
    before = tree(full)
    result = write(
        {"path": str(full / "new/settings"), "content": "x"},
        {"path": str(full / "settings"), "content": "new\n", "mode": "0600"},
        {"path": str(full / "token"), "secret_content": KUBECONFIG.replace("n1", "n2"), "mode": "0600"},
        {"path": str(full / "current"), "state": "link", "target": "releases/2"},
        {"path": str(full / "other/large"), "content": "x" * 100_000},
    )
    assert result["failed"] and "other/large: No space left on device" in result["msg"]
    assert "Every path has its previous entry again" in result["msg"]
    assert (tree(full), result["changed"], result["previous"]) == (before, False, [])


def test_file_set_restoration_fails_returns_previous_entries(
    write: Run, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (full / "settings").write_text("old\n")
    (full / "kept").write_text("old\n")
    real = System.write_atomic

    def fill_after(system: System, path: str, *arguments: Any, **options: Any) -> None:
        real(system, path, *arguments, **options)
        if path == str(full / "settings"):
            with contextlib.suppress(OSError):
                (full / "filling").write_bytes(b"x" * 100_000)

    monkeypatch.setattr(System, "write_atomic", fill_after)
    result = write(
        {"path": str(full / "settings"), "content": "new\n"}, {"path": str(full / "kept"), "content": "new\n" * 1000}
    )
    assert result["failed"] and result["changed"] and "could not be restored" in result["msg"]
    assert [(one["path"], one["content"]) for one in result["previous"]] == [(str(full / "settings"), "old\n")]
    monkeypatch.undo()
    (full / "filling").unlink()
    write(*result["previous"])
    assert tree(full) == dict.fromkeys(("settings", "kept"), (420, b"old\n"))


def test_file_set_removes_leftovers_of_killed_runs(write: Run, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    names = [".token.a1b2c3d4.tmp", ".token.4194305-3.tmp", ".gone.4194305.tmp"]
    for name in names:
        (folder / name).write_text(KUBECONFIG)
    running = f".token.{os.getppid()}-0.tmp"
    kept = [running, ".token.new.tmp", ".other.a1b2c3d4.tmp"]
    for name in kept:
        (folder / name).write_text("of others")
    files = [{"path": str(folder / "token"), "content": "x"}, {"path": str(folder / "gone"), "state": "absent"}]
    with (folder / running).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a writer does
        dry_result = write(*files, check=True)
        done = write(*files)
        assert set(done["changed_paths"]) == {str(folder / name) for name in (*names, "token")}
        assert dry_result["changed_paths"] == done["changed_paths"] and TOKEN not in json.dumps(done)
        assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, "token"])
        assert not write(*files)["changed"]
    assert write(*files)["changed_paths"] == [str(folder / running)], "its writer was killed"


def test_file_set_replaces_link_by_file_without_a_gap(
    write: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings"
    path.symlink_to("elsewhere")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: pytest.fail("the link was removed before the file was there"))
    monkeypatch.setattr(os, "unlink", lambda *_, **__: pytest.fail("the link was removed before the file was there"))
    assert write({"path": str(path), "content": "x"})["changed_paths"] == [str(path)]
    assert path.read_text() == "x" and not path.is_symlink()


def test_restore_of_other_bytes(write: Run, tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_bytes(b"name=\xe9\x00\n")
    (back,) = write({"path": str(path), "content": "name=e\n"})["previous"]
    assert back["encoding"] == "base64"
    write(back)
    assert path.read_bytes() == b"name=\xe9\x00\n"
    refused = write({"path": str(path), "content": "no base64!", "encoding": "base64"})
    assert refused["failed"] and f"The content of {path} is not Base64" in refused["msg"]


@pytest.mark.parametrize("change", [{"content": "new\n", "mode": "0600"}, {"mode": "0600"}, {"state": "absent"}])
def test_file_set_keeps_other_hard_links(write: Run, tmp_path: Path, change: dict[str, Any]) -> None:
    path, backup = tmp_path / "settings", tmp_path / "backup"
    path.write_text("old\n")
    path.chmod(0o644)
    backup.hardlink_to(path)
    result = write({"path": str(path), **change})
    assert result["changed"] and not write({"path": str(path), **change})["changed"]
    assert (backup.read_text(), backup.stat().st_mode & 0o7777) == ("old\n", 0o644)
    assert not path.exists() or path.stat().st_mode & 0o7777 == 0o600
    write(*result["previous"])
    assert (path.read_text(), path.stat().st_mode & 0o7777) == ("old\n", 0o644)


def test_restore_removes_created_directories(write: Run, tmp_path: Path) -> None:
    files = [
        {"path": str(tmp_path / "one/two/three"), "content": "x"},
        {"path": str(tmp_path / "one/b"), "content": "x"},
    ]
    back = write(*files)["previous"]
    write(*back)
    assert not list(tmp_path.iterdir())
    back = write(*files)["previous"]
    (tmp_path / "one/two/theirs").touch()
    write(*back)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["one", "one/two", "one/two/theirs"]


def test_file_set_unknown_owner_changes_nothing(write: Run, tmp_path: Path) -> None:
    files = [
        {"path": str(tmp_path / "one"), "content": "x"},
        {"path": str(tmp_path / "two"), "content": "x", "owner": "nobody-of-that-name"},
    ]
    assert write(*files, check=True)["changed"]
    result = write(*files)
    assert result["failed"] and "has the owner 'nobody-of-that-name'" in result["msg"]
    assert not list(tmp_path.iterdir())


def test_file_set_owner_by_number_is_idempotent(write: Run, tmp_path: Path) -> None:
    entry = {"path": str(tmp_path / "one"), "content": "x", "owner": "0", "group": "4711"}
    assert write(entry)["changed"] and not write(entry)["changed"]
    assert (tmp_path / "one").stat().st_gid == 4711


@pytest.mark.parametrize("check", [False, True])
def test_file_set_parent_not_a_directory_changes_nothing(write: Run, tmp_path: Path, check: bool) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "not-mounted")
    (tmp_path / "file").write_text("theirs\n", "utf-8")
    for parent in (tmp_path / "link", tmp_path / "file"):
        result = write(
            {"path": str(tmp_path / "first"), "content": "x"},
            {"path": str(parent / "sub/settings"), "content": "x"},
            check=check,
        )
        assert result["failed"] and result["msg"].startswith(f"{parent} is "), result
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    assert (tmp_path / "file").read_text("utf-8") == "theirs\n"


def test_file_set_link_to_directory_of_the_same_set_is_a_parent(write: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "file").write_text("", "utf-8")
    result = write(
        {"path": str(tmp_path / "data"), "state": "directory"},
        {"path": str(tmp_path / "link/sub/settings"), "content": "x"},
        {"path": str(tmp_path / "file"), "state": "absent"},
        {"path": str(tmp_path / "file/settings"), "content": "y"},
    )
    assert result["changed"] and not result.get("failed"), result
    assert (tmp_path / "data/sub/settings").read_text("utf-8") == "x"
    assert (tmp_path / "file/settings").read_text("utf-8") == "y"


@pytest.mark.parametrize("theirs", ["new", "new/sub"])
def test_file_set_keeps_directory_that_appeared_after_the_plan(tmp_path: Path, theirs: str) -> None:
    wanted = file_set.DesiredEntry(str(tmp_path / "new/sub"), file_set.DIRECTORY)
    changes = file_set.with_parents(file_set.plan([wanted], {}))
    (tmp_path / theirs).mkdir(parents=True)
    with pytest.raises(Unfinished, match="File exists"):
        FileWriter(System(), lambda path: None).write(changes)
    assert (tmp_path / theirs).is_dir()
