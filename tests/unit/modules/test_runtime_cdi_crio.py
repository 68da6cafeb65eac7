# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings in CRI-O's files, and their removal. tests/oracles verifies them with CRI-O itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomllib
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.config import (
    Change,
    File,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.crio.config import (
    CrioError,
    candidates,
    read_settings,
    refuse_old,
    remove_own_changes,
    with_changes,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.crio.daemon import Crio
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.restore_record import (
    Entry,
    Record,
    read_record,
    recorded,
    revert_changes,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.systemd_unit import last_output_line
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed, System
from hypothesis import given
from hypothesis import strategies as st

FOLDER = "/etc/crio/crio.conf.d"
WANTED = ["/etc/cdi", "/var/run/cdi"]
SITE = '# Site file.\n[crio.runtime]\ncdi_spec_dirs = ["/srv/cdi"] # by hand\npids_limit = 12\n'


def folders_of(text: str | None) -> object:
    return tomllib.loads(text or "").get("crio", {}).get("runtime", {}).get("cdi_spec_dirs")


def test_settings_missing_in_crio_config_have_defaults() -> None:
    settings = read_settings("[crio.api]\n# listen = 1\n[crio.runtime]\n# cdi_spec_dirs = []\n", "crio config")
    assert settings.folders == ("/etc/cdi", "/var/run/cdi")
    assert settings.socket == "/var/run/crio/crio.sock"
    assert settings.reads(WANTED) and not settings.reads(["/srv/cdi"])
    assert not read_settings("[crio.runtime]\ncdi_spec_dirs = []\n", "crio config").reads(WANTED)


@pytest.mark.parametrize(
    "output", ["crio version 1.28.0\nVersion:  1.28.0\n", "crio version 1.34.0\n   GitCommit: x\n"]
)
def test_supported_versions_are_accepted(output: str) -> None:
    refuse_old(output, "crio")


@pytest.mark.parametrize(
    ("output", "words"),
    [("crio version 1.27.4\n", "CRI-O 1.27.4, expected 1.28.0"), ("", "without a known CRI-O version")],
)
def test_unsupported_versions_are_rejected(output: str, words: str) -> None:
    with pytest.raises(CrioError, match=words) as caught:
        refuse_old(output, "crio")
    assert caught.value.code == "too-old"


def test_candidates_smallest_change_first() -> None:
    settings = read_settings(SITE, "crio config")
    files = [File(f"{FOLDER}/70-a.conf", "[crio.runtime]\npids_limit = 1\n"), File(f"{FOLDER}/99-site.conf", SITE)]
    found = candidates(settings, File("/etc/crio/crio.conf", SITE), files, FOLDER, WANTED)
    names = ["60-dra-accelerators.conf", "99-dra-accelerators.conf", "99-site.conf", "crio.conf"]
    assert [each.path.rpartition("/")[2] for each in found] == names
    assert all(folders_of(each.after) == ["/srv/cdi", *WANTED] for each in found)
    assert found[2].after and found[2].after.startswith("# Site file.\n") and "pids_limit = 12\n" in found[2].after
    text, texts = with_changes(File("/etc/crio/crio.conf", "x = 1\n"), files, found[:1])
    assert text == "x = 1\n" and set(texts) == {each.path for each in [*files, found[0]]}


KEYS = st.sampled_from(["pids_limit", "default_env", "selinux"])
LINES = st.lists(st.tuples(KEYS, st.integers(0, 99)), unique_by=lambda pair: pair[0], max_size=3)


@given(
    before=LINES,
    folders=st.lists(st.sampled_from(["/a", "/b"]), unique=True),
    later_value=st.integers(0, 9),
    has_directories=st.booleans(),
)
def test_site_file_is_restored_and_later_changes_are_kept(
    before: list[tuple[str, int]], folders: list[str], later_value: int, has_directories: bool
) -> None:
    site_lines = "".join(f"{key} = {value}\n" for key, value in before)
    text = f"# Site file.\n[crio.runtime]\n{site_lines}" + (
        f"cdi_spec_dirs = {folders!r}\n".replace("'", '"') if has_directories else ""
    )
    file = File(f"{FOLDER}/99-site.conf", text)
    (change,) = [
        each for each in candidates(read_settings(text, "x"), None, [file], FOLDER, WANTED) if each.path == file.path
    ] or [Change(file.path, text, text)]

    def strip(current: str, original: str | None) -> str | None:
        return remove_own_changes(file.path, current, original)

    record = recorded(Record(), [change], strip)
    assert read_record(record.to_text(), "/record") == record
    after = change.after or ""
    if after == text:
        return
    (restored,) = revert_changes(record, {file.path: after}, strip)
    assert restored.after == text
    (restored,) = revert_changes(record, {file.path: f"{after}later = {later_value}\n"}, strip)
    assert tomllib.loads(restored.after or "") == tomllib.loads(f"{text}later = {later_value}\n")


def test_own_file_is_removed_unless_others_changed_it() -> None:
    (ours, *_rest) = candidates(read_settings("", "x"), None, [], FOLDER, ["/srv/cdi"])
    assert ours.after is not None
    assert remove_own_changes(ours.path, ours.after, None) is None
    left = remove_own_changes(ours.path, ours.after + "pids_limit = 3\n", None)
    assert left is not None and folders_of(left) is None and "pids_limit = 3" in left


def test_recorded_original_text_is_kept() -> None:
    def strip(current: str, original: str | None) -> str | None:
        return remove_own_changes("/f", current, original)

    first = recorded(Record(), [Change("/f", SITE, SITE.replace("/srv", "/one"))], strip)
    second = recorded(first, [Change("/f", SITE.replace("/srv", "/one"), SITE.replace("/srv", "/two"))], strip)
    assert second.files["/f"].before == SITE
    assert revert_changes(Record({"/f": Entry("x", "y")}, (), False), {}, strip) == []


def test_diff_has_no_password(tmp_path: Path) -> None:
    secret = 'default_env = ["HTTPS_PROXY=http://puller:s3cr3t-value-1@proxy.example.com"]'
    site = File(f"{FOLDER}/99-site.conf", SITE.replace("pids_limit = 12", f"{secret}\npids_limit = 12"))
    crio = Crio(System(), command="crio", config="", drop_ins=str(tmp_path), service="crio.service", timeout=1)
    changes = candidates(read_settings(site.text, "crio config"), site, [site], FOLDER, WANTED)
    diff = json.dumps(crio.diff(changes))
    assert "s3cr3t-value-1" not in diff and "+cdi_spec_dirs" in diff and site.path in diff


def test_rejection_has_no_password() -> None:
    """CRI-O quotes the rejected line in its error. The message of the module omits the password."""
    done = Completed(1, "", "level=fatal msg=\"near line 3: password = 's3cr3t-value-1' is not expected\"")
    assert "near line 3" in last_output_line(done) and "s3cr3t-value-1" not in last_output_line(done)
