# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A runtime in Docker's configuration: nothing else in the file changes, and the removal restores it byte for byte."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker.runtimes import (
    DockerError,
    Record,
    entry,
    fingerprint,
    read_record,
    text_before,
    text_with,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from hypothesis import given
from hypothesis import strategies as st

SITE = """{
  "log-driver": "json-file",
  "runtimes": {"crun": {"path": "/usr/bin/crun"}},
  "default-runtime": "crun",
  "proxies": {"http-proxy": "http://user:hidden-word@proxy"}
}
"""
PROGRAM = "/opt/ascend-docker-runtime"
# A Docker model with the runtimes from the file at its last reload. A file without the key "runtimes" removes none of
# them.
SYSTEMCTL = """#!/bin/sh
echo "$*" >> {directory}/asked
case $1 in
is-active) cat {directory}/state ;;
reload) [ ! -e {directory}/broken ] || exit 0; ! grep -qs '"runtimes"' {config} || cp {config} {directory}/known ;;
esac
"""
DOCKER = """#!/usr/bin/env python3
import json
print(json.dumps({{"runc": {{"path": "runc"}}, **json.load(open("{directory}/known")).get("runtimes", {{}})}}))
"""
DAEMON = """#!/bin/sh
[ ! -e {directory}/refuses ] || {{ echo "invalid: $3" >&2; exit 1; }}
"""


class Docker:
    """A node with a Docker model."""

    def __init__(
        self, directory: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder = directory
        self.config = directory / "daemon.json"
        self._run = run_here
        (directory / "bin").mkdir()
        for name, text in (("systemctl", SYSTEMCTL), ("docker", DOCKER), ("dockerd", DAEMON)):
            path = directory / "bin" / name
            path.write_text(text.format(directory=directory, config=self.config))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory / 'bin'}:/usr/bin:/bin")
        (directory / "state").write_text("active\n")
        (directory / "known").write_text("{}")

    def run(self, *, check: bool = False, **options: Any) -> dict[str, Any]:
        fixed = {"name": "ascend", "config": str(self.config), "records": str(self.folder / "records"), "timeout": 1}
        program = {} if options.get("state") == "absent" else {"program": PROGRAM}
        return self._run("docker_runtime", {**fixed, **program, **options}, check=check, diff=True)

    def known(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "known").read_text()).get("runtimes", {}))


@pytest.fixture
def docker(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Docker:
    return Docker(tmp_path, run_here, monkeypatch)


@pytest.mark.parametrize("before", [None, "{}", SITE, json.dumps(json.loads(SITE))])
def test_runtime_is_added_and_removed(docker: Docker, before: str | None) -> None:
    if before is not None:
        docker.config.write_text(before)
        docker.config.chmod(0o600)
    dry_run = docker.run(check=True)
    assert dry_run["changed"] and dry_run["reloaded"] and docker.config.exists() == (before is not None)
    done = docker.run()
    assert done["file"] == dry_run["file"] == str(docker.config)
    assert docker.known()["ascend"] == {"path": PROGRAM}
    assert "hidden-word" not in str(done) and PROGRAM in done["diff"]["after"] and PROGRAM not in done["diff"]["before"]
    document = json.loads(docker.config.read_text())
    assert document["runtimes"].pop("ascend") and document == {"runtimes": {}, **json.loads(before or "{}")}
    if before is not None:
        assert docker.config.stat().st_mode & 0o777 == 0o600
    assert not docker.run()["changed"]

    gone = docker.run(state="absent")
    assert gone["changed"] and "ascend" not in docker.known()
    assert (docker.config.read_text() if docker.config.exists() else None) == before
    assert not docker.run(state="absent")["changed"] and not (docker.folder / "records").exists()


def test_runtime_changes_by_others_are_kept(docker: Docker) -> None:
    docker.config.write_text(SITE)
    docker.run()
    docker.config.write_text(docker.config.read_text().replace("json-file", "journald"))
    docker.run(program="/opt/other")
    assert docker.known()["ascend"] == {"path": "/opt/other"}
    docker.run(state="absent")
    assert json.loads(docker.config.read_text()) == {**json.loads(SITE), "log-driver": "journald"}


def test_runtime_of_another_owner_is_not_removed(docker: Docker) -> None:
    docker.config.write_text(json.dumps({"runtimes": {"ascend": {"path": "/site"}}}))
    assert not docker.run(state="absent")["changed"]
    before = docker.config.read_text()
    docker.run()
    docker.run(state="absent")
    assert docker.config.read_text() == before


def test_rejected_file_is_restored(docker: Docker) -> None:
    docker.config.write_text(SITE)
    (docker.folder / "broken").touch()
    refused = docker.run()
    assert refused["error_code"] == "not-taken" and "previous files were restored" in refused["msg"]
    assert docker.known() == {}
    assert docker.config.read_text() == SITE and not (docker.folder / "records").exists()
    (docker.folder / "broken").unlink()
    (docker.folder / "refuses").touch()
    assert docker.run()["error_code"] == "not-taken" and docker.config.read_text() == SITE
    docker.config.write_text("{")
    assert docker.run()["error_code"] == "invalid-json"


def test_failed_restore_is_reported_after_the_cause_and_docker_reloads(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.config.write_text(SITE)
    (docker.folder / "broken").touch()
    replace_text, written = System.replace_text, []

    def replace(system: System, path: str, text: str | None, **options: Any) -> None:
        written.extend([path] if path == str(docker.config) else [])
        if len(written) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_text(system, path, text, **options)

    monkeypatch.setattr(System, "replace_text", replace)
    failed = docker.run()
    assert failed["error_code"] == "not-taken", failed
    cause, left = (
        failed["msg"].index("the running Docker uses the program none"),
        failed["msg"].index("could not be restored"),
    )
    assert cause < left and "No space left on device" in failed["msg"]
    assert (docker.folder / "asked").read_text().count("reload") == 2
    # The record stays, so that the next run removes the runtime.
    monkeypatch.setattr(System, "replace_text", replace_text)
    (docker.folder / "broken").unlink()
    assert docker.run(state="absent")["changed"] and docker.config.read_text() == SITE


def test_failed_second_reload_does_not_hide_the_cause(docker: Docker) -> None:
    docker.config.write_text(SITE)
    systemctl = docker.folder / "bin/systemctl"
    systemctl.write_text(
        systemctl.read_text().replace("reload)", "reload) printf '#!/bin/sh\\nyes\\n' > $0; exit ;;\nother)")
    )
    failed = docker.run()
    assert failed["error_code"] == "not-taken", failed
    assert failed["msg"].index("the running Docker uses the program none") < failed["msg"].index("wrote more than")
    assert docker.config.read_text() == SITE and not (docker.folder / "records").exists()


def test_file_is_the_one_the_process_was_started_with(docker: Docker) -> None:
    docker.config.write_text(SITE)
    systemctl = docker.folder / "bin/systemctl"
    command = ["/usr/bin/dockerd", "-c", "read line", f"--config-file={docker.config}"]
    with subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE) as process:
        systemctl.write_text(
            systemctl.read_text().replace("is-active)", f"show) echo MainPID={process.pid} ;;\nis-active)")
        )
        unused = docker.folder / "unused.json"
        assert docker.run(config=str(unused))["file"] == str(docker.config)
        assert docker.run(config=str(unused), state="absent")["changed"]
    assert docker.config.read_text() == SITE and not unused.exists()


def test_linked_file_stays_a_link(docker: Docker) -> None:
    target = docker.folder / "dotfiles.json"
    target.write_text(SITE)
    docker.config.symlink_to(target)
    assert docker.run()["changed"] and docker.config.is_symlink() and PROGRAM in target.read_text()
    assert docker.run(state="absent")["changed"] and docker.config.is_symlink() and target.read_text() == SITE


def test_changed_configuration_keeps_owner_mode_and_attributes(docker: Docker) -> None:
    docker.config.write_text(SITE)
    os.chown(docker.config, 1234, 1235)
    docker.config.chmod(0o640)
    os.setxattr(docker.config, "user.site", b"kept")
    for state in ("present", "absent"):
        before = docker.config.read_text()
        docker.run(state=state)
        status = docker.config.stat()
        assert docker.config.read_text() != before
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1234, 1235, 0o640)
        assert os.getxattr(docker.config, "user.site") == b"kept"


def test_docker_without_response_after_reload_is_queried_again(docker: Docker) -> None:
    docker.config.write_text(SITE)
    program = docker.folder / "bin/docker"
    text = program.read_text().replace(
        "import json\n",
        f"import json, os\nif os.path.exists('{docker.folder}/busy'): os.unlink('{docker.folder}/busy'); exit(1)\n",
    )
    program.write_text(text)
    systemctl = docker.folder / "bin/systemctl"
    systemctl.write_text(systemctl.read_text().replace("reload)", f"reload) touch {docker.folder}/busy;"))
    # The second query succeeds. The timeout only has to exceed the duration of a query on a busy machine.
    done = docker.run(timeout=600)
    assert done.get("changed"), done
    assert docker.known()["ascend"] == {"path": PROGRAM}
    assert docker.run(state="absent", timeout=600)["changed"] and docker.config.read_text() == SITE


def test_pending_reload_is_performed(docker: Docker) -> None:
    docker.run()
    (docker.folder / "known").write_text("{}")
    again = docker.run()
    assert again["changed"] and again["reloaded"] and again["file"] == "" and docker.known()


@pytest.mark.parametrize("before", [None, '{"debug": true}'])
def test_interrupted_removal_is_resumed(docker: Docker, before: str | None) -> None:
    """Docker removes runtimes only after a reload with the key "runtimes", so such a file exists for a moment: the killed run left it."""
    if before is not None:
        docker.config.write_text(before)
    docker.run()
    systemctl = docker.folder / "bin/systemctl"
    whole = systemctl.read_text()
    systemctl.write_text(whole.replace("reload)", f"reload) cp {docker.config} {docker.folder}/left;"))
    records = docker.folder / "records/docker-ascend.json"
    systemctl.write_text(systemctl.read_text().replace("reload)", f"reload) cp {records} {docker.folder}/record;"))
    docker.run(state="absent")
    assert json.loads((docker.folder / "left").read_text()) == {**json.loads(before or "{}"), "runtimes": {}}
    systemctl.write_text(whole)

    docker.config.write_text((docker.folder / "left").read_text())
    records.parent.mkdir()
    records.write_text((docker.folder / "record").read_text())
    (docker.folder / "known").write_text(json.dumps({"runtimes": {"ascend": {"path": PROGRAM}}}))
    assert docker.run(state="absent")["changed"] and docker.known() == {}
    assert (docker.config.read_text() if docker.config.exists() else None) == before and not records.exists()
    assert not docker.run(state="absent")["changed"]


def test_stopped_docker_gets_only_the_file(docker: Docker) -> None:
    (docker.folder / "state").write_text("inactive\n")
    done = docker.run()
    assert done["changed"] and not done["reloaded"] and docker.known() == {}
    assert "reload" not in (docker.folder / "asked").read_text() and not docker.run()["changed"]


DOCUMENTS = st.dictionaries(st.sampled_from(["debug", "labels", "runtimes-x"]), st.text() | st.booleans(), max_size=3)
RUNTIMES = st.dictionaries(
    st.sampled_from(["crun", "ascend", "kata"]), st.fixed_dictionaries({"path": st.text()}), max_size=3
)


@given(DOCUMENTS, RUNTIMES, st.sampled_from([None, 2, "\t"]), st.lists(st.text(), max_size=2))
def test_text_with_changes_only_the_runtime(
    document: dict[str, Any], runtimes: dict[str, Any], indentation: Any, arguments: list[str]
) -> None:
    text = json.dumps({**document, **({"runtimes": runtimes} if runtimes else {})}, indent=indentation)
    wanted = entry(PROGRAM, arguments)
    changed = text_with(text, "/d", "ascend", wanted)
    assert changed is not None and text_with(changed, "/d", "ascend", wanted) == changed
    after = json.loads(changed)
    assert after["runtimes"] == {**runtimes, "ascend": wanted} and {key: after[key] for key in document} == document
    record = Record(text, fingerprint(changed))
    assert read_record(record.to_text(), "/r") == record
    assert text_before(changed, "/d", "ascend", record) == text
    # A run that replaces or removes the runtime's arguments can be killed between the record and the file.
    killed = Record(text, fingerprint("another text"), fingerprint(changed))
    assert read_record(killed.to_text(), "/r") == killed
    assert text_before(changed, "/d", "ascend", killed) == text
    others = {key: value for key, value in runtimes.items() if key != "ascend"}
    edited = text_before(changed + "\n", "/d", "ascend", record)
    assert json.loads(edited or "{}") == {**document, **({"runtimes": others} if others else {})}


@pytest.mark.parametrize("text", ["[]", '{"runtimes": []}', "x"])
def test_invalid_configuration_is_not_changed(text: str) -> None:
    with pytest.raises(DockerError):
        text_with(text, "/d", "ascend", entry(PROGRAM, []))
    with pytest.raises(AcceleratorError):
        read_record(text, "/r")
