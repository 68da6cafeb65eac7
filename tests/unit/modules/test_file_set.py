# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module file_set: a set of files in one step, with a diff, without removing what is somebody else's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def write(run_here: Run) -> Run:
    """Writes a set and returns the module's result."""

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


def test_a_set_is_written_once(write: Run, tmp_path: Path) -> None:
    files = a_set(tmp_path)
    said = write(*files, check=True)
    assert said["changed"] and not list(tmp_path.iterdir())

    done = write(*files)
    assert done["changed_paths"] == said["changed_paths"] == [one["path"] for one in files]
    assert done["diff"] == said["diff"]
    assert (tmp_path / "etc").stat().st_mode & 0o7777 == 0o750
    assert (tmp_path / "etc/settings").read_text("utf-8") == "level: info\n"
    assert (tmp_path / "etc/settings").stat().st_mode & 0o7777 == 0o640
    assert (tmp_path / "etc/token").stat().st_mode & 0o7777 == 0o600
    assert str((tmp_path / "current").readlink()) == "releases/2"

    again = write(*files)
    assert not again["changed"] and again["diff"] == [] and again["former"] == []


def test_only_what_differs_is_changed_and_shown(write: Run, tmp_path: Path) -> None:
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


def test_a_secret_is_neither_shown_nor_returned(write: Run, tmp_path: Path) -> None:
    for files in (a_set(tmp_path), [{"path": str(tmp_path / "etc/token"), "secret_content": "hidden-words\n"}]):
        assert "hidden-word" not in json.dumps(write(*files))
    assert (tmp_path / "etc/token").read_text("utf-8") == "hidden-words\n"


def test_a_set_can_be_taken_back(write: Run, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir(mode=0o755)
    (tmp_path / "etc/settings").write_text("old\n", "utf-8")
    (tmp_path / "current").symlink_to("releases/1")
    files = [one for one in a_set(tmp_path) if "secret_content" not in one]
    files.append({"path": str(tmp_path / "new/file"), "content": "x"})
    back = write(*files)["former"]
    write(*back)
    assert (tmp_path / "etc/settings").read_text("utf-8") == "old\n"
    assert str((tmp_path / "current").readlink()) == "releases/1"
    assert not (tmp_path / "new/file").exists()


def test_absent_removes_only_what_bears_the_mark(write: Run, tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("# made by us\n", "utf-8")
    (tmp_path / "theirs").write_text("# made by them\n", "utf-8")
    absent = [
        {"path": str(tmp_path / name), "state": "absent", "marker": "by us"} for name in ("ours", "theirs", "none")
    ]
    assert write(*absent)["changed_paths"] == [str(tmp_path / "ours")]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["theirs"]


def test_a_folder_is_removed_when_the_set_empties_it(write: Run, tmp_path: Path) -> None:
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


def test_what_is_in_the_way_is_named_and_nothing_is_written(write: Run, tmp_path: Path) -> None:
    (tmp_path / "settings").mkdir()
    result = write(
        {"path": str(tmp_path / "first"), "content": "x"}, {"path": str(tmp_path / "settings"), "content": "x"}
    )
    assert result["failed"] and "is a directory, expected a file" in result["msg"]
    assert not (tmp_path / "first").exists()


def test_a_link_is_replaced_and_not_followed(write: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("theirs", "utf-8")
    (tmp_path / "settings").symlink_to("elsewhere")
    write({"path": str(tmp_path / "settings"), "content": "ours"})
    assert not (tmp_path / "settings").is_symlink()
    assert (tmp_path / "elsewhere").read_text("utf-8") == "theirs"


def test_attributes_alone_of_a_file_that_is_not_there_are_refused(write: Run, tmp_path: Path) -> None:
    result = write({"path": str(tmp_path / "none"), "mode": "0600"})
    assert result["failed"] and "no content was given" in result["msg"]


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
    assert result["former"] == []


def test_secret_entry_of_a_plain_file_result_has_no_content(write: Run, tmp_path: Path) -> None:
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
    assert [one["path"] for one in result["former"]] == [str(other)]
    assert result["former"][0]["content"] == "level: info\n"


def test_entry_that_repeats_a_secret_is_left_out_of_former(write: Run, tmp_path: Path) -> None:
    """A restore would write the masked content."""
    (tmp_path / "notes").write_text("the word is hidden-word\n", "utf-8")
    secret = {"path": str(tmp_path / "token"), "secret_content": "hidden-word"}
    result = write(secret, {"path": str(tmp_path / "notes"), "state": "absent"}, check=True)
    assert "hidden-word" not in json.dumps(result) and result["former"] == []


def test_failure_message_has_no_secret(write: Run, tmp_path: Path) -> None:
    (tmp_path / TOKEN).mkdir()
    (tmp_path / "kubeconfig").write_text(KUBECONFIG, "utf-8")
    entry = {"path": str(tmp_path / "kubeconfig"), "secret": True, "state": "absent"}
    result = write(entry, {"path": str(tmp_path / TOKEN), "content": "x"})
    assert result["failed"] and "is a directory" in result["msg"]
    assert TOKEN not in result["msg"]
