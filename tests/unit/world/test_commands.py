# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The command line, the inventory, the feature gates, and the report of failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from world_cli import cli, cluster, commands, gates, inventory, state
from world_cli.errors import WorldError
from world_cli.state import Node, World


@pytest.mark.parametrize(
    "words",
    [
        ["--name", "dev", "run", "node1", "--", "ls", "--name", "x"],
        ["run", "--name", "dev", "node1", "--", "ls", "--name", "x"],
        ["run", "node1", "--name=dev", "--", "ls", "--name", "x"],
    ],
)
def test_parse_accepts_the_world_name_anywhere_before_the_command(words: list[str]) -> None:
    arguments = cli.parse(words)
    assert (arguments.name, arguments.node, arguments.command) == ("dev", "node1", ["ls", "--name", "x"])


def test_parse_passes_kubectl_arguments_unchanged() -> None:
    arguments = cli.parse(["--name", "dev", "kubectl", "run", "x", "--", "ls", "-l"])
    assert arguments.arguments == ["run", "x", "--", "ls", "-l"]
    arguments = cli.parse(["kubectl", "--name", "dev", "--", "get", "pods", "-A"])
    assert arguments.name == "dev"
    assert arguments.arguments in (["get", "pods", "-A"], ["--", "get", "pods", "-A"])


def test_unknown_machine_profile_is_rejected_with_the_known_ones() -> None:
    assert cli.machine_profiles("8xH100,8x910A") == ["8xH100", "8x910A"]
    with pytest.raises(WorldError, match=r"no machine 3xH100\. Use one of .*8xH100"):
        cli.machine_profiles("8xH100,3xH100")


def test_parse_run_without_a_command_is_rejected() -> None:
    with pytest.raises(WorldError, match=r"world run node1 -- COMMAND"):
        cli.parse(["run", "node1"])


def test_main_error_is_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--name", "nowhere"]) == 1
    assert capsys.readouterr().err == (
        "world: world 'nowhere' does not exist (existing worlds: none): create it with `world up --name nowhere`.\n"
    )


def test_execute_failed_command_shows_its_last_lines() -> None:
    script = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit(3)"
    with pytest.raises(WorldError) as caught:
        commands.execute([sys.executable, "-c", script])
    assert "ended with status 3" in str(caught.value)
    assert str(caught.value).splitlines()[-1] == "99"
    assert len(str(caught.value).splitlines()) < 20


def test_execute_missing_or_slow_command_raises_world_error() -> None:
    with pytest.raises(WorldError, match="was not found on this machine"):
        commands.execute(["/no/such/program"])
    with pytest.raises(WorldError, match="did not end within"):
        commands.execute([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)


def test_wait_until_timeout_has_the_remedy() -> None:
    answers = iter([False, False, True])
    commands.wait_until("it", lambda: next(answers), 10, pause=0)
    with pytest.raises(WorldError, match=r"it did not happen within 0 s\.\nthe log"):
        commands.wait_until("it", lambda: False, 0, pause=0, remedy=lambda: "the log")


def test_parallel_step_reports_every_failure() -> None:
    done: list[int] = []

    def fail(name: str) -> None:
        raise WorldError(f"{name} failed")

    with pytest.raises(WorldError, match=r"(?s)a failed.*b failed"):
        cluster.in_parallel([lambda: fail("a"), lambda: done.append(1), lambda: fail("b")])
    assert done == [1]


def test_inventory_yaml_parses_to_the_same_data() -> None:
    world = World("w", 215, (Node("w-node1", 1, "8xH100"), Node("w-node2", 2)))
    text = inventory.as_yaml(inventory.inventory(world, '/a "quoted"\\path'))
    read = yaml.safe_load(text)
    assert read == inventory.inventory(world, '/a "quoted"\\path')
    group = read["all"]["children"]["accelerator_nodes"]
    assert group["vars"]["ansible_connection"] == "community.docker.docker"
    assert group["hosts"]["w-node1"]["simulator_machine"] == "8xH100"
    assert "simulator_machine" not in group["hosts"]["w-node2"]


def test_inventory_without_nodes_is_valid() -> None:
    read = yaml.safe_load(inventory.as_yaml(inventory.inventory(World("w", 215), "/k")))
    assert read["all"]["children"]["accelerator_nodes"]["hosts"] == {}


def test_gates_of_the_file() -> None:
    described = json.loads(gates.GATES_FILE.read_text())
    names = [gate["name"] for gate in described["gates"]]
    assert len(names) == len(set(names))
    for gate in described["gates"]:
        level = gates.maturity(gate["matures"], described["kubernetes"])
        assert level != "absent", gate["name"]
        # A locked gate cannot be disabled, and an enabled gate has a row of the mission.
        assert gate["on"] or level != "locked", gate["name"]
        assert bool(gate["mission"]) is gate["on"], gate["name"]


def test_gates_as_a_flag() -> None:
    assert gates.as_flag({"B": False, "A": True}) == "A=true,B=false"


@pytest.mark.parametrize(
    ("version", "expected"), [("1.8", "absent"), ("1.9", "alpha"), ("1.34", "beta"), ("1.100", "stable")]
)
def test_maturity_counts_versions_as_numbers(version: str, expected: str) -> None:
    assert gates.maturity({"1.9": "alpha", "1.34": "beta", "1.36": "stable"}, version) == expected


def test_gates_that_differ_from_the_component(tmp_path: Path) -> None:
    path = tmp_path / "gates.json"
    described = [
        {"name": name, "on": True, "matures": {"1.36": "alpha"}} for name in ("Same", "Unknown", "Off", "Older")
    ]
    path.write_text(json.dumps({"kubernetes": "1.37", "gates": described}))
    metrics = (
        "# TYPE kubernetes_feature_enabled gauge\n"
        'kubernetes_feature_enabled{name="Same",stage="ALPHA"} 1\n'
        'kubernetes_feature_enabled{name="Off",stage="ALPHA"} 0\n'
        'kubernetes_feature_enabled{name="Older",stage=""} 1\n'
    )
    assert gates.differences(metrics, path) == [
        "Unknown is unknown to the component",
        "Off is off, expected on",
        "Older has the stage stable, expected alpha",
    ]


def test_main_list_prints_the_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    state.save(World("b", 216))
    state.save(World("a", 215))
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out == "a\nb\n"


def test_readiness_applies_to_one_boot() -> None:
    def node(name: str, status: dict[str, object]) -> dict[str, object]:
        return {"metadata": {"name": name}, "status": status}

    ready = {"conditions": [{"type": "Ready", "status": "True"}], "nodeInfo": {"bootID": "b1"}}
    unknown = {"conditions": [{"type": "Ready", "status": "Unknown"}], "nodeInfo": {"bootID": "b2"}}
    listed = json.dumps({"items": [node("a", ready), node("b", unknown), node("c", {})]})
    assert cluster.read_ready(listed) == {"a": (True, "b1"), "b": (False, "b2"), "c": (False, "")}


def test_download_with_network_errors_is_repeated(tmp_path: Path) -> None:
    script = f"""
        echo x >>{tmp_path}/attempts
        test "$(wc -l <{tmp_path}/attempts)" -ge 3 || {{ echo 'net/http: TLS handshake timeout' >&2; exit 1; }}
        echo done
    """
    assert commands.execute_with_retries(["sh", "-c", script], pause=0).stdout == "done\n"
    assert (tmp_path / "attempts").read_text() == "x\n" * 3


@pytest.mark.parametrize(("text", "attempts"), [("i/o timeout", 2), ("undefined: name", 1)])
def test_download_fails_after_its_attempts_or_another_error(tmp_path: Path, text: str, attempts: int) -> None:
    script = f"echo x >>{tmp_path}/attempts; echo '{text}'; exit 1"
    with pytest.raises(WorldError, match=text):
        commands.execute_with_retries(["sh", "-c", script], attempts=2, pause=0)
    assert (tmp_path / "attempts").read_text() == "x\n" * attempts
