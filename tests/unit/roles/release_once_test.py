# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The role python_environment packs the release once for all hosts, also if one of them fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from playing import play

FILES = Path(__file__).resolve().parents[3] / "roles/python_environment/files"


@pytest.mark.prove
def test_release_is_packed_once_for_all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, packer, temporary = tmp_path / "packed", tmp_path / "pack.py", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    packer.write_text(
        f"import runpy, sys\nopen({str(log)!r}, 'a').write('packed\\n')\n"
        f"sys.argv[0] = {str(FILES / 'pack_release.py')!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / "no-directory").write_text("")
    hosts = {name: {"releases": str(tmp_path / name)} for name in ("a", "c", "d")}
    hosts["b"] = {"releases": str(tmp_path / "no-directory")}
    task = {
        "ansible.builtin.include_role": {"name": "dra.accelerators.python_environment", "tasks_from": "release"},
        "vars": {
            "__python_environment_pack": [sys.executable, str(packer), "--collection", str(FILES.parents[2])],
            "__python_environment_release": "1.2.3-00000000",
            "__python_environment_releases": "{{ releases }}",
            "__python_environment_venv": str(tmp_path),
        },
    }
    played = play(tmp_path, [task], dict(sorted(hosts.items())))
    assert set(played.failed) == {"b"}, played.output
    for name in ("a", "c", "d"):
        assert (tmp_path / name / "1.2.3-00000000/dra_driver/core/host/system.py").is_file(), played.output
        assert (tmp_path / name / "1.2.3-00000000/complete").is_file(), played.output
    assert log.read_text() == "packed\n" and list(temporary.glob("dra-accelerators.*")) == []
