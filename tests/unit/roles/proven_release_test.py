# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rollback restores the last release with which the driver or the controller became ready, also after a killed run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import Played, play, tasks_of_file

ROLES = Path(__file__).resolve().parents[3] / "roles"
#: The release and the environment, by a letter. The driver and the controller do not start from B and C.
PAIRS = {letter: (f"0.1.0-{number}0000000", f"{number}00000000000") for number, letter in enumerate("ABC", 1)}
STARTS = "A"
UNIT = "DRA_ACCELERATORS_FINGERPRINT={fingerprint}"
SYSTEMCTL = """#!/bin/sh
case $* in
*MainPID*) echo {process} ;;
show*) printf 'LoadState=loaded\\nActiveState=active\\nUnitFileState=enabled\\n' ;;
esac
"""


def tasks_of(path: str, *names: str) -> list[dict[str, Any]]:
    """Return the tasks of a task file with these names, or all."""
    return [task for task in tasks_of_file(ROLES / path) if task["name"] in names or not names]


def variables_of(role: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROLES / role / "vars/main.yml").read_text("utf-8")))


def links(root: Path) -> tuple[str, str]:
    """Return the release and the environment in use, as letters."""
    names = ((root / name).readlink().name for name in ("current", "venv"))
    return tuple(letter for name in names for letter, pair in PAIRS.items() if name in pair)  # type: ignore[return-value]


def existing(root: Path) -> str:
    """Return the letters for which both the release and the environment exist."""
    both = {a: (root / "releases" / pair[0], root / "venvs" / pair[1]) for a, pair in PAIRS.items()}
    return "".join(letter for letter, paths in both.items() if all(path.is_dir() for path in paths))


def message(played: Played) -> str:
    """Return the message of the task that failed."""
    found = played.failed["node"]["msg"]
    return found if isinstance(found, str) else " ".join(found)


class Node:
    """A node with the releases A, B, and C, and A in use."""

    def __init__(self, directory: Path) -> None:
        self.folder, self.root, self.units = directory, directory / "opt", f"{directory}/units/"
        self.configuration = directory / "driver.yaml"
        for letter in PAIRS:
            self.unpack(letter)
        self.link("A")
        Path(self.units).mkdir()

    def unpack(self, letter: str) -> None:
        """Create the release and the environment, which an earlier play can have removed."""
        release, environment = PAIRS[letter]
        time = 1000 + list(PAIRS).index(letter)
        for path in (self.root / "releases" / release, self.root / "venvs" / environment):
            path.mkdir(parents=True, exist_ok=True)
            os.utime(path, (time, time))

    def link(self, letter: str) -> None:
        self.unpack(letter)
        for name, kind, target in zip(("current", "venv"), ("releases", "venvs"), PAIRS[letter], strict=True):
            (self.root / name).unlink(missing_ok=True)
            (self.root / name).symlink_to(f"{kind}/{target}")

    def environment(self, letter: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the tasks of the role python_environment that activate a release, with their variables."""
        self.unpack(letter)
        ask = {
            "dra.accelerators.node_info": {"root": str(self.root), "verify_identity": False},
            "register": "__python_environment_node_query",
        }
        names = (
            "Activate the environment and the release",
            "Remove releases and environments that are older than the kept ones",
        )
        values = {
            **variables_of("python_environment"),
            "python_environment_root": str(self.root),
            "python_environment_node_info": "",
            "python_environment_keep": 2,
            "__python_environment_release": PAIRS[letter][0],
            "__python_environment_key": PAIRS[letter][1],
        }
        return [ask, *tasks_of("python_environment/tasks/present.yml", *names)], values

    def play(self, letter: str) -> Played:
        """Run the role python_environment. No other role follows, as in a run that is killed after the links."""
        tasks, own = self.environment(letter)
        return play(self.folder, tasks, {"node": own}, path=self.programs())

    def programs(self, process: int = 0) -> Path:
        programs = self.folder / "programs"
        programs.mkdir(exist_ok=True)
        (programs / "systemctl").write_text(SYSTEMCTL.format(process=process))
        (programs / "systemctl").chmod(0o755)
        return programs

    def driver(self, letter: str, *, arguments: Sequence[str] = ()) -> Played:
        """Run the roles python_environment and dra_driver. The driver starts only from A, with the fingerprint of its unit."""
        unit = f"{self.units}dra-accelerators-driver.service"
        starts = f"readlink {self.root}/current | grep -q {PAIRS[STARTS][0]}"

        def with_driver(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
            found = []
            for task in tasks:
                one = {**task, "block": with_driver(task["block"])} if "block" in task else dict(task)
                requested = one.pop("dra.accelerators.node_driver", None)
                if requested:
                    one["ansible.builtin.shell"] = f"{starts} && grep -q FINGERPRINT={requested['fingerprint']} {unit}"
                    one["changed_when"] = False
                found.append(one)
            return found

        name = "Run the driver and restore the previous one on failure"
        (block,) = tasks_of("dra_driver/tasks/present.yml", name)
        kept = ("Write the units, the configuration, and the identity", "Start the driver and wait until it is ready")
        run = {
            "block": with_driver([task for task in block["block"] if task["name"] in kept]),
            "rescue": with_driver(
                [task for task in tasks_of("dra_driver/tasks/rollback.yml") if "kubernetes.core.k8s" not in str(task)]
            ),
        }
        record = tasks_of(
            "dra_driver/tasks/present.yml",
            "Record release, environment, units, and configuration of the driver that is ready",
        )
        tasks, own = self.environment(letter)
        values = {
            **variables_of("dra_driver"),
            **own,
            "dra_driver_root": str(self.root),
            "dra_driver_node_info": "",
            "dra_driver_release": PAIRS[letter][0],
            "dra_driver_environment": PAIRS[letter][1],
            "dra_driver_cli_path": "",
            "dra_driver_backends": [],
            "dra_driver_publish_timeout": 1,
            "__dra_driver_host": "{{ __python_environment_node_query | combine({'units': {__dra_driver_unit: {'managed': true}}}) }}",
            "__dra_driver_units": self.units,
            "dra_driver_deploy_as": "service",
            "__dra_driver_files": [
                {"path": unit, "content": UNIT.format(fingerprint="{{ __dra_driver_fingerprint }}")},
                {"path": str(self.configuration), "content": f"of {letter}"},
            ],
            "__dra_driver_fingerprint": letter.lower() * 16,
            "__dra_driver_npu_lock_files": [],
            "__dra_driver_kubeconfig_file": {"path": f"{self.folder}/kubeconfig", "state": "absent"},
            "__dra_driver_no_saved_kubeconfig": [],
            "__dra_driver_keeps_kubeconfig": False,
            "__dra_driver_ahead": False,
        }
        hosts = {"node": values}
        return play(self.folder, [*tasks, run, *record], hosts, *arguments, path=self.programs())

    def fingerprint(self) -> str:
        return Path(f"{self.units}dra-accelerators-driver.service").read_text().partition("=")[2]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_driver_is_rolled_back_to_the_release_before_a_killed_run(node: Node) -> None:
    assert node.driver("A").status == 0
    # The run is killed after the links.
    assert node.play("B").status == 0
    assert links(node.root) == ("B", "B")
    played = node.driver("B")
    assert (links(node.root), node.fingerprint()) == (("A", "A"), "a" * 16), played.output
    assert f"Release {PAIRS['A'][0]} is restored, and its driver is ready." in message(played)


@pytest.mark.prove
def test_driver_is_rolled_back_after_a_run_that_was_killed_before_the_restart(node: Node) -> None:
    """Units and configuration are those of the new release: the next run must not treat the rolled-back driver as the new one."""
    assert node.driver("A").status == 0
    assert node.play("B").status == 0
    Path(f"{node.units}dra-accelerators-driver.service").write_text(UNIT.format(fingerprint="b" * 16))
    node.configuration.write_text("of B")
    played = node.driver("B")
    assert (links(node.root), node.fingerprint()) == (("A", "A"), "a" * 16), played.output
    assert node.configuration.read_text() == "of A"
    assert f"Release {PAIRS['A'][0]} is restored, and its driver is ready." in message(played)


def test_driver_without_a_record_is_rolled_back_to_the_release_in_use(node: Node) -> None:
    Path(f"{node.units}dra-accelerators-driver.service").write_text(UNIT.format(fingerprint="a" * 16))
    played = node.driver("B")
    assert links(node.root) == ("A", "A"), played.output
    assert f"Release {PAIRS['A'][0]} is restored, and its driver is ready." in message(played)


def test_driver_without_a_previous_release_reports_no_rollback(node: Node) -> None:
    node.link("B")
    Path(f"{node.units}dra-accelerators-driver.service").write_text(UNIT.format(fingerprint="b" * 16))
    node.configuration.write_text("of B")
    played = node.driver("B")
    assert "There is no previous release to restore" in message(played), played.output


@pytest.mark.prove
def test_release_of_the_running_driver_is_kept_by_runs_that_are_killed(node: Node) -> None:
    assert node.driver("A").status == 0
    for letter in "BC":
        assert node.play(letter).status == 0
    assert existing(node.root) == "ABC"
    played = node.driver("C")
    assert links(node.root) == ("A", "A"), played.output


@pytest.mark.prove
def test_record_that_a_killed_run_did_not_write_is_written_by_the_next_run(node: Node) -> None:
    """The driver of A was ready, and the record still names B: the next run writes the record."""
    assert node.driver("A").status == 0
    node.unpack("B")
    record = node.root / "proven-driver"
    record.write_text(f"releases/{PAIRS['B'][0]}\nvenvs/{PAIRS['B'][1]}\n")
    played = node.driver("A")
    assert played.status == 0 and links(node.root) == ("A", "A"), played.output
    assert record.read_text().splitlines()[:2] == [f"releases/{PAIRS['A'][0]}", f"venvs/{PAIRS['A'][1]}"]


@pytest.mark.prove
def test_record_is_written_once_and_not_in_check_mode(node: Node) -> None:
    record = node.root / "proven-driver"
    checked = node.driver("A", arguments=["--check"])
    assert not record.exists(), checked.output
    assert node.driver("A").status == 0
    assert record.read_text().splitlines()[:2] == [f"releases/{PAIRS['A'][0]}", f"venvs/{PAIRS['A'][1]}"]
    again = node.driver("A")
    assert again.status == 0 and "changed=0" in again.output, again.output


@pytest.mark.parametrize("is_ours", [True, False])
def test_removal_deletes_the_records(node: Node, is_ours: bool) -> None:
    records = [node.root / "proven-driver", node.root / "proven-controller"]
    lists = ["__dra_driver_absent_files", "__dra_controller_absent_files"]
    for record in records:
        record.write_text(f"releases/{PAIRS['A'][0]}\nvenvs/{PAIRS['A'][1]}\n" if is_ours else "other")
    own = f"selectattr('path', 'match', '{node.root}')"
    remove = {"dra.accelerators.file_set": {"files": f"{{{{ ({' + '.join(lists)}) | {own} }}}}"}}
    values = {
        **variables_of("dra_driver"),
        **variables_of("dra_controller"),
        **{f"dra_{role}_root": str(node.root) for role in ("driver", "controller")},
        "dra_driver_node_name": "node",
    }
    played = play(node.folder, [remove], {"node": values}, path=node.programs())
    assert played.status == 0, played.output
    assert [record.exists() for record in records] == [not is_ours] * 2


@pytest.mark.parametrize("role", ["driver", "controller"])
def test_rollback_changes_the_links_after_the_files(node: Node, role: str) -> None:
    """After a crash in between, the new release reads the previous configuration. An earlier release rejects unknown keys."""
    own = f"__dra_{role}"
    values = {
        **variables_of(f"dra_{role}"),
        f"{own}_previous_links": [{"path": "/link"}],
        f"{own}_recorded_files": [{"path": "/recorded"}],
        f"{own}_written": {"previous": [{"path": "/former"}, {"path": "/recorded"}]},
        "__dra_controller_kubeconfig_path": "/kubeconfig",
        "__dra_controller_stat": {"stat": {"exists": False}},
    }
    show = {
        "ansible.builtin.debug": {
            "msg": f"{{{{ {own}_previous_files | map(attribute='path') | list | to_json | b64encode }}}}"
        }
    }
    played = play(node.folder, [show], {"node": values}, path=node.programs())
    assert played.messages["node"] == ["/former", "/recorded", "/link"], played.output


class Controller:
    """A controller that is ready only with A, with its address."""

    def __init__(self, root: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if links(root)[0] in STARTS else 503)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def address(node: Node) -> Iterator[str]:
    controller = Controller(node.root)
    yield controller.address
    controller.server.shutdown()
    controller.server.server_close()


def controller(node: Node, address: str, letter: str, *, process: int = os.getpid()) -> Played:
    """Run the roles python_environment and dra_controller, whose unit has the fingerprint of the release."""
    etc = node.folder / "etc"
    (etc / "controller").mkdir(parents=True, exist_ok=True)
    unit = {
        "path": f"{node.units}dra-accelerators-controller.service",
        "content": UNIT.format(fingerprint=letter.lower() * 16),
    }
    include = {
        "ansible.builtin.include_role": {"name": "dra.accelerators.dra_controller", "tasks_from": "restart"},
        "vars": {
            "__dra_controller_broken": [],
            "__dra_controller_files": [unit, {"path": str(etc / "controller.yaml"), "content": f"of {letter}"}],
            "__dra_controller_units": node.units,
            "__dra_controller_kubeconfig_file": {"path": str(etc / "controller/kubeconfig"), "state": "absent"},
            "__dra_controller_configuration": str(etc),
            "__dra_controller_fingerprint": letter.lower() * 16,
        },
    }
    tasks, own = node.environment(letter)
    again = {
        "dra.accelerators.node_info": {"root": str(node.root), "verify_identity": False},
        "register": "__dra_controller_host",
    }
    values = {
        **own,
        "dra_controller_root": str(node.root),
        "dra_controller_address": address,
        "dra_controller_ready_timeout": 1,
        "__dra_controller_host_record": {},
        "__dra_controller_stat": {"stat": {"exists": False}},
        "__dra_controller_token": {"token": ""},
    }
    return play(node.folder, [*tasks, again, include], {"node": values}, path=node.programs(process))


@pytest.mark.prove
def test_controller_is_rolled_back_to_the_release_before_a_killed_run(node: Node, address: str) -> None:
    assert controller(node, address, "A").status == 0
    assert node.play("B").status == 0
    played = controller(node, address, "B")
    unit = Path(f"{node.units}dra-accelerators-controller.service")
    assert (links(node.root), unit.read_text()) == (("A", "A"), UNIT.format(fingerprint="a" * 16)), played.output
    assert "The previous controller runs again and is ready." in message(played)


@pytest.mark.prove
def test_controller_whose_unit_a_killed_run_has_written_is_rolled_back(node: Node, address: str) -> None:
    assert controller(node, address, "A").status == 0
    assert node.play("B").status == 0
    unit = Path(f"{node.units}dra-accelerators-controller.service")
    unit.write_text(UNIT.format(fingerprint="b" * 16))
    (node.folder / "etc/controller.yaml").write_text("of B")
    played = controller(node, address, "B", process=0)
    assert (links(node.root), unit.read_text()) == (("A", "A"), UNIT.format(fingerprint="a" * 16)), played.output
    assert (node.folder / "etc/controller.yaml").read_text() == "of A"
    assert "The previous controller runs again and is ready." in message(played)


def test_controller_without_a_change_or_record_reports_no_rollback(node: Node, address: str) -> None:
    node.link("B")
    Path(f"{node.units}dra-accelerators-controller.service").write_text(UNIT.format(fingerprint="b" * 16))
    (node.folder / "etc").mkdir()
    (node.folder / "etc/controller.yaml").write_text("of B")
    played = controller(node, address, "B")
    assert "so nothing was restored" in message(played), played.output


@pytest.mark.prove
def test_rollback_of_the_controller_leaves_the_programs_of_the_driver(node: Node, address: str) -> None:
    """The driver of the host became ready with B, so the rollback of the controller keeps B's programs."""
    assert controller(node, address, "A").status == 0
    (node.root / "proven-driver").write_text(f"releases/{PAIRS['B'][0]}\nvenvs/{PAIRS['B'][1]}\n")
    node.link("B")
    played = controller(node, address, "B")
    assert links(node.root) == ("B", "B"), played.output
    assert "so the programs of the controller were not restored" in message(played)
    assert "runs again" not in message(played)
