# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CDI in Docker's configuration: nothing else changes, containers stop only with consent, and the removal restores it byte for byte.

The Docker Engine here is a model: the tests show the actions of the module, and prove nothing about Docker.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker.config import (
    document_of,
    excludes_cdi,
    has_cdi,
    read_info,
    refuse_old,
    text_with,
    text_without,
    version_in,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.docker.runtimes import DockerError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from hypothesis import given
from hypothesis import strategies as st

SITE = '{\n  "log-driver": "json-file",\n  "features": {"buildkit": true},\n  "proxies": {"http-proxy": "http://user:hidden-word@proxy"}\n}\n'
SYSTEMCTL = """#!/bin/sh
echo "$*" >> {directory}/asked
case $1 in
is-active) cat {directory}/cri-dockerd ;;
show) [ "$2" != --property=MainPID ] || {{ cat {directory}/pid; exit; }}; echo ActiveState=$(cat {directory}/state); echo MainPID=$(cat {directory}/pid) ;;
restart)
  [ ! -e {directory}/broken ] || {{ grep -q cdi {config} && exit 1; }}
  [ ! -e {directory}/dead ] || exit 1
  rm -f {directory}/known; cp {config} {directory}/known 2> /dev/null; echo active > {directory}/state ;;
esac
exit 0
"""
JOURNALCTL = "#!/bin/sh\necho unable to configure the Docker daemon\n"
DOCKER = """#!/usr/bin/env python3
import json, os, sys
here = "{directory}/"
version, live, containers = open(here + "engine").read().split()
if open(here + "state").read().strip() != "active":
    sys.exit("Cannot connect to the Docker daemon")
if sys.argv[1] == "ps":
    print("\\n".join("pod-%d" % number for number in range(int(containers))))
    sys.exit()
known = json.load(open(here + "known")) if os.path.exists(here + "known") else {{}}
on = known.get("features", {{}}).get("cdi", version.split(".") >= ["28", "2"])
if os.path.exists(here + "flag"):
    on = False
print(json.dumps({{"ServerVersion": version, "LiveRestoreEnabled": live == "True", "ContainersRunning": int(containers),
    "CDISpecDirs": known.get("cdi-spec-dirs", ["/etc/cdi", "/var/run/cdi"]) if on else []}}))
"""
DAEMON = """#!/bin/sh
[ "$1" = --version ] && {{ echo "Docker version $(cut -d' ' -f1 {directory}/engine), build 1"; exit; }}
[ ! -e {directory}/refuses ] || {{ echo "invalid: $3" >&2; exit 1; }}
echo "$*" > {directory}/tried
"""


class Docker:
    """A node with a Docker Engine model."""

    def __init__(
        self, directory: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.directory, self.config, self._run = directory, directory / "etc/daemon.json", run_here
        self.folders = [str(directory / "cdi"), str(directory / "run")]
        self.config.parent.mkdir()
        (directory / "bin").mkdir()
        programs = (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL), ("docker", DOCKER), ("dockerd", DAEMON))
        for name, text in programs:
            path = directory / "bin" / name
            path.write_text(text.format(directory=directory, config=self.config))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory / 'bin'}:/usr/bin:/bin")
        (directory / "state").write_text("active\n")
        (directory / "cri-dockerd").write_text("inactive\n")
        (directory / "pid").write_text("0")
        self.engine("27.1.0")

    def engine(self, version: str, *, live: bool = False, containers: int = 0) -> None:
        (self.directory / "engine").write_text(f"{version} {live} {containers}")

    def write(self, text: str) -> None:
        self.config.write_text(text)
        (self.directory / "known").write_text(text)

    def run(self, *, check: bool = False, stop: bool = False, **options: Any) -> dict[str, Any]:
        docker = {"config": str(self.config), "timeout": 1, "stop_containers": stop}
        given = {
            "runtime": "docker",
            "cdi_directories": self.folders,
            "records": str(self.directory / "records"),
            "docker": docker,
        }
        return self._run("runtime_cdi", {**given, **options}, check=check, diff=True)

    def calls(self) -> list[str]:
        path = self.directory / "asked"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def docker(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Docker:
    return Docker(tmp_path, run_here, monkeypatch)


def test_cdi_is_enabled_and_removed_byte_for_byte(docker: Docker) -> None:
    docker.write(SITE)
    foretold = docker.run(check=True)
    assert docker.config.read_text() == SITE and "restart" not in docker.calls()
    done = docker.run()
    assert (done["files"], done["restarted"], done["runtime"]) == ([str(docker.config)], True, "docker")
    assert not foretold["up_to_date"] and foretold["stops"] == 0 and docker.run(check=True)["up_to_date"]
    assert foretold["diff"] == done["diff"] and "hidden-word" not in json.dumps(done)
    document = json.loads(docker.config.read_text())
    assert list(document) == ["log-driver", "features", "proxies", "cdi-spec-dirs"]
    assert document["features"] == {"buildkit": True, "cdi": True}
    assert document["cdi-spec-dirs"] == ["/etc/cdi", "/var/run/cdi", *docker.folders]
    assert not docker.run()["changed"]
    assert docker.calls().count("restart") == 1
    back = docker.run(state="absent", runtime="auto")
    assert back["restarted"] and docker.config.read_text() == SITE
    assert not (docker.directory / "records").exists() and not (docker.directory / "cdi").exists()
    assert not docker.run(state="absent")["changed"]


def test_validation_uses_options_of_the_process(docker: Docker) -> None:
    options = ["-c", "read line", "--userland-proxy=false"]
    files = ["--config-file", "/etc/a", "--config-file=/etc/b"]
    # The first argument is the process title, not the program.
    for called, expected in (("/usr/bin/dockerd", " ".join(options)), ("cri-dockerd", "")):
        with subprocess.Popen([called, *options, *files], executable="/bin/sh", stdin=subprocess.PIPE) as process:
            (docker.directory / "pid").write_text(f"{process.pid}\n")
            docker.run(check=True)
        tried = (docker.directory / "tried").read_text().strip().split(" ", 3)
        assert tried[:2] == ["--validate", "--config-file"] and " ".join(tried[3:]) == expected


def test_file_is_the_one_the_process_was_started_with(docker: Docker) -> None:
    docker.write(SITE)
    unused = docker.directory / "etc/unused.json"
    command = ["/usr/bin/dockerd", "-c", "read line", "--config-file", str(docker.config)]
    with subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE) as process:
        (docker.directory / "pid").write_text(f"{process.pid}\n")
        options = {"docker": {"config": str(unused), "timeout": 1}}
        done = docker.run(**options)
        assert (done.get("files"), done.get("enabled")) == ([str(docker.config)], True), done
        assert docker.run(state="absent", **options)["files"] == [str(docker.config)]
    assert docker.config.read_text() == SITE and not unused.exists()


def test_recorded_file_is_restored_with_other_configuration(docker: Docker) -> None:
    docker.write(SITE)
    assert docker.run()["changed"]
    other = {"docker": {"config": str(docker.directory / "etc/other.json"), "timeout": 1}}
    assert docker.run(state="absent", **other)["files"] == [str(docker.config)]
    assert docker.config.read_text() == SITE


def test_enabled_by_default_is_not_changed(docker: Docker) -> None:
    docker.engine("28.2.0", containers=3)
    docker.write('{"cdi-spec-dirs": ' + json.dumps(docker.folders) + "}")
    for directory in docker.folders:
        Path(directory).mkdir()
    done = docker.run()
    assert not done["changed"] and "restart" not in docker.calls()


def test_restart_stopping_containers_is_rejected(docker: Docker) -> None:
    docker.engine("27.1.0", containers=2)
    for check in (True, False):
        failed = docker.run(check=check)
        assert failed["error_code"] == "containers-run", failed
        assert "pod-0, pod-1" in failed["msg"] and "live-restore" in failed["msg"]
    assert not docker.config.exists() and not (docker.directory / "records").exists()
    docker.engine("27.1.0", containers=2, live=True)
    foretold = docker.run(check=True)
    assert foretold["restarted"] and foretold["stops"] == 0
    docker.engine("27.1.0", containers=2)
    assert docker.run(check=True, stop=True)["stops"] == 2
    assert docker.run(stop=True)["restarted"]
    assert docker.run(state="absent")["error_code"] == "containers-run"
    assert docker.run(state="absent", stop=True)["changed"] and not docker.config.exists()


def test_failed_start_is_rolled_back(docker: Docker) -> None:
    docker.write(SITE)
    (docker.directory / "broken").touch()
    failed = docker.run()
    assert failed["error_code"] == "restart-failed", failed
    assert "unable to configure" in failed["msg"] and "It runs with its previous files" in failed["msg"]
    assert docker.config.read_text() == SITE and not (docker.directory / "records").exists()


def test_cri_dockerd_must_run_after_restart(docker: Docker) -> None:
    (docker.directory / "cri-dockerd").write_text("active\n")
    text = (docker.directory / "bin/systemctl").read_text()
    (docker.directory / "bin/systemctl").write_text(
        text.replace("restart)", f"restart) echo failed > {docker.directory}/cri-dockerd")
    )
    failed = docker.run()
    assert (
        failed["error_code"] == "restart-failed" and "cri-docker.service was active before the restart" in failed["msg"]
    ), failed


def test_stopped_docker_is_restarted_by_next_run(docker: Docker) -> None:
    (docker.directory / "dead").touch()
    failed = docker.run()
    assert "It does not run with its previous files either" in failed["msg"], failed
    (docker.directory / "dead").unlink()
    (docker.directory / "state").write_text("failed\n")
    done = docker.run()
    assert done["restarted"] and done["files"], done
    assert not docker.run()["changed"]
    # Only the record is outdated. Check mode does not change it, but reports it.
    record = docker.directory / "records/docker_cdi.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "restart": True}))
    pending = docker.run(check=True)
    assert not pending["changed"] and not pending["up_to_date"] and json.loads(record.read_text())["restart"]
    assert not docker.run()["changed"] and docker.run(check=True)["up_to_date"]


def test_failed_restore_is_reported_after_the_cause_and_docker_restarts(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.write(SITE)
    (docker.directory / "broken").touch()
    replace_text, written = System.replace_text, []

    def replace(system: System, path: str, text: str | None, **options: Any) -> None:
        written.append(path)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_text(system, path, text, **options)

    monkeypatch.setattr(System, "replace_text", replace)
    failed = docker.run()
    assert failed["error_code"] == "restart-failed", failed
    cause, left = failed["msg"].index("unable to configure"), failed["msg"].index("could not be restored")
    assert cause < left and "No space left on device" in failed["msg"]
    assert docker.calls().count("restart") == 2
    # The record stays, so that the next run restores the file.
    monkeypatch.setattr(System, "replace_text", replace_text)
    (docker.directory / "broken").unlink()
    assert docker.run(state="absent")["changed"] and docker.config.read_text() == SITE


def test_failed_second_restart_does_not_hide_the_cause(docker: Docker) -> None:
    docker.write(SITE)
    systemctl = docker.directory / "bin/systemctl"
    systemctl.write_text(
        systemctl.read_text().replace("restart)", "restart) printf '#!/bin/sh\\nyes\\n' > $0; exit 1 ;;\nother)")
    )
    failed = docker.run()
    assert failed["error_code"] == "restart-failed", failed
    assert failed["msg"].index("unable to configure") < failed["msg"].index("wrote more than")
    assert docker.config.read_text() == SITE
    assert json.loads((docker.directory / "records/docker_cdi.json").read_text())["restart"]


def test_run_killed_before_restart_is_resumed_without_file_times(docker: Docker) -> None:
    """A clock that was set back, or coarse file times, make the changed file older than the process: the run resumes nevertheless."""
    docker.write(SITE)
    assert docker.run()["restarted"]
    record = docker.directory / "records/docker_cdi.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "restart": True}))
    (docker.directory / "known").write_text(SITE)
    (docker.directory / "pid").write_text(str(os.getpid()))
    os.utime(docker.config, (0, 0))
    resumed = docker.run()
    assert resumed.get("restarted"), resumed
    assert not docker.run()["changed"]


def test_rejected_file_is_not_written(docker: Docker) -> None:
    (docker.directory / "refuses").touch()
    assert docker.run()["error_code"] == "not-taken"
    assert not docker.config.exists() and "restart" not in docker.calls()


def test_unsupported_version_and_invalid_json_are_rejected(docker: Docker) -> None:
    docker.write("{")
    assert docker.run()["error_code"] == "invalid-json"
    docker.engine("20.10.24")
    failed = docker.run()
    assert failed["error_code"] == "too-old" and "20.10.24" in failed["msg"]
    (docker.directory / "state").write_text("inactive\n")
    assert docker.run()["error_code"] == "too-old"


def test_conflicting_flag_is_reported_without_repeated_restarts(docker: Docker) -> None:
    (docker.directory / "pid").write_text(str(os.getpid()))
    docker.write('{"features": {"cdi": true}, "cdi-spec-dirs": ' + json.dumps(docker.folders) + "}")
    os.utime(docker.config, (1, 1))
    (docker.directory / "flag").touch()
    failed = docker.run()
    assert failed["error_code"] == "no-proof" and "--cdi-spec-dir" in failed["msg"], failed
    assert "restart" not in docker.calls()
    # The file is newer: a killed run left a pending restart.
    (docker.directory / "flag").unlink()
    (docker.directory / "known").write_text("{}")
    os.utime(docker.config)
    done = docker.run()
    assert (done["files"], done["restarted"]) == ([], True), done


@pytest.mark.parametrize(
    "output", ["", "[]", "{}", '{"ServerVersion": "27.1.0", "LiveRestoreEnabled": true, "ContainersRunning": 1}']
)
def test_read_info_without_proof_is_rejected(output: str) -> None:
    with pytest.raises(DockerError) as caught:
        read_info(output)
    assert caught.value.code == "no-proof"


def test_versions_are_parsed_and_old_ones_rejected() -> None:
    assert version_in("Docker version 26.1.5+dfsg1, build a72d7cd") == (26, 1, 5)
    assert version_in("29.4.0") == (29, 4, 0)
    with pytest.raises(DockerError, match=r"24\.0\.9, expected 25\.0"):
        refuse_old((24, 0, 9))
    refuse_old((25, 0, 0))


FEATURES = st.dictionaries(st.sampled_from(["cdi", "buildkit", "other"]), st.booleans())
FOLDERS = st.lists(st.sampled_from(["/etc/cdi", "/var/run/cdi", "/a", ""]), unique=True)
OTHERS = st.dictionaries(st.sampled_from(["log-driver", "mtu", "runtimes"]), st.just({}), max_size=3)


@st.composite
def files(draw: st.DrawFn) -> str | None:
    """Draw a configuration file of an administrator, or none."""
    document: dict[str, Any] = dict(draw(OTHERS))
    if draw(st.booleans()):
        document["features"] = draw(FEATURES)
    if draw(st.booleans()):
        document["cdi-spec-dirs"] = draw(FOLDERS)
    return draw(
        st.sampled_from(
            [None, "", json.dumps(document), json.dumps(document, indent=2), json.dumps(document, indent="\t") + "\n"]
        )
    )


@given(text=files(), version=st.sampled_from([(25, 0, 0), (28, 1, 1), (28, 2, 0), (29, 0, 0)]), since=st.booleans())
def test_text_with_sets_only_missing_keys_and_reverts_exactly(
    text: str | None, version: tuple[int, ...], since: bool
) -> None:
    wanted = ["/etc/cdi", "/srv/cdi"]
    before = document_of(text, "f")
    after = text_with(text, "f", version, wanted)
    assert after is not None
    document = document_of(after, "f")
    assert has_cdi(document, version, wanted) and not excludes_cdi(document, wanted)
    assert text_with(after, "f", version, wanted) == after
    assert [key for key in document if key in before] == list(before)
    for key in before.keys() - {"features", "cdi-spec-dirs"}:
        assert document[key] == before[key]
    assert {k: v for k, v in document.get("features", {}).items() if k != "cdi"} == {
        k: v for k, v in before.get("features", {}).items() if k != "cdi"
    }
    more = {"since": 1} if since else {}
    left = text_without(json.dumps({**document, **more}), text, "f")
    assert document_of(left, "f") == {**before, **more}
