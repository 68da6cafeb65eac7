# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Roles mark each file with a token, a key, or a password as secret, so that no diff and no result shows its content."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play
from token_server import TokenServer

ROOT = Path(__file__).resolve().parents[3]
SECRET_NAMES = re.compile(r"(kubeconfig|pip\.conf|install\.json|netrc|auth\.conf|token|[.-]key|key\.pem)[\"'}\s]*$")
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJkcml2ZXItbm9kZS0xIn0.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield each mapping of a document."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(each)


def documents() -> Iterator[tuple[Path, Any]]:
    """Yield each file with variables or tasks of roles and playbooks. The simulator has no secrets of a cluster."""
    for path in sorted([*ROOT.glob("roles/*/*/**/*.yml"), *ROOT.glob("playbooks/**/*.yml")]):
        if "simulator" not in path.parts and path.parent.name in ("tasks", "vars", "playbooks", "handlers"):
            yield path, yaml.safe_load(path.read_text("utf-8"))


def is_file_entry(entry: dict[str, Any]) -> bool:
    """Return whether a mapping is an entry of file_set's option files."""
    return "path" in entry and bool({"state", "content", "secret_content", "secret"} & set(entry))


def test_file_entries_with_secrets_are_marked() -> None:
    unmarked, marked = [], 0
    for path, document in documents():
        for entry in mappings(document):
            if is_file_entry(entry) and SECRET_NAMES.search(str(entry["path"])):
                marked += 1
                if not (entry.get("secret") is True or "secret_content" in entry):
                    unmarked.append(f"{path.relative_to(ROOT)}: {entry['path']}")
        # Entries that an expression returns completely.
        for text in re.findall(r"\{'path':[^{}]*\}", path.read_text("utf-8")):
            name = re.match(r"\{'path': ([^,]*)", text)
            if name and SECRET_NAMES.search(name[1]):
                marked += 1
                if "'secret': true" not in text and "secret_content" not in text:
                    unmarked.append(f"{path.relative_to(ROOT)}: {text}")
    assert not unmarked
    assert marked >= 5


def test_tasks_that_write_secrets_hide_arguments_and_diff() -> None:
    """copy and template would show arguments and diff, and slurp returns the content: such tasks hide them."""
    found = []
    for path, document in documents():
        for task in mappings(document):
            for module in ("copy", "template", "slurp"):
                options = task.get(f"ansible.builtin.{module}")
                if isinstance(options, dict) and SECRET_NAMES.search(str(options.get("dest", options.get("src")))):
                    found.append(path.name)
                    assert task.get("no_log") is True, f"{path.relative_to(ROOT)}: {task.get('name')}"
                    assert module == "slurp" or task.get("diff") is False, f"{path.relative_to(ROOT)}: {task['name']}"
    assert len(found) >= 2


@pytest.mark.parametrize("role", ["dra_driver", "dra_controller"])
@pytest.mark.parametrize("check", [("--check",), ()])
def test_removal_with_diff_and_verbosity_shows_no_token(tmp_path: Path, role: str, check: tuple[str, ...]) -> None:
    """Remove the entries of the role's variable absent_files from a directory with a kubeconfig: the output shows no token."""
    configuration = tmp_path / "etc"
    kubeconfig = configuration / ("controller/kubeconfig" if role == "dra_controller" else "kubeconfig")
    kubeconfig.parent.mkdir(parents=True)
    kubeconfig.write_text(f'{{"users": [{{"name": "driver-n1 controller", "user": {{"token": "{TOKEN}"}}}}]}}', "utf-8")
    variables = {
        **yaml.safe_load((ROOT / f"roles/{role}/defaults/main.yml").read_text("utf-8")),
        **yaml.safe_load((ROOT / f"roles/{role}/vars/main.yml").read_text("utf-8")),
        "dra_driver_node_name": "n1",
        "dra_driver_namespace": "x",
        "dra_driver_backends": [],
        f"__{role}_configuration": str(configuration),
        f"__{role}_units": f"{tmp_path}/units/",
    }
    files = f"{{{{ __{role}_absent_files | selectattr('path', 'match', '{tmp_path}') }}}}"
    tasks = [
        {"dra.accelerators.file_set": {"files": files}, "register": "removed"},
        {"ansible.builtin.debug": {"var": "removed"}},
    ]
    played = play(tmp_path, tasks, {"n1": variables}, "--diff", "-vvv", *check)
    assert played.status == 0, played.output
    assert str(kubeconfig) in played.output and TOKEN not in played.output
    assert kubeconfig.exists() == bool(check)


def hidden_blocks(role: str, file: str, module: str) -> dict[str, Any]:
    """Return the block with the task of a module that has no_log."""
    for item in yaml.safe_load((ROOT / "roles" / role / "tasks" / file).read_text("utf-8")):
        if any(module in task and task.get("no_log") for task in item.get("block", [item])):
            return {key: value for key, value in item.items() if key not in ("name", "when")}
    raise AssertionError(f"{role} has no such task")


@pytest.mark.parametrize(("role", "file"), [("dra_driver", "present.yml"), ("dra_controller", "service.yml")])
def test_failed_token_request_reports_message_and_code_and_no_secret(
    role: str, file: str, server: TokenServer, tmp_path: Path
) -> None:
    server.refuse_callers = True
    variables = {
        f"{role}_kubeconfig": str(server.kubeconfig(tmp_path / "operator", "operator-secret")),
        f"{role}_context": "",
        f"{role}_namespace": "dra-accelerators",
        f"{role}_node_name": "node-1",
        f"{role}_token_lifetime": 3600,
        f"__{role}_account": "driver-node-1",
        "__dra_controller_previous": {"users": [{"user": {"token": TOKEN}}]},
    }
    block = hidden_blocks(role, file, "dra.accelerators.service_account_token")
    played = play(tmp_path, [block], {"node-1": variables}, "-vvv")
    assert played.status != 0
    (reported,) = re.findall(r'"msg": "(Cannot get a token .*)"', played.output)
    assert reported.startswith(
        "Cannot get a token for the service account dra-accelerators/driver-node-1 of node node-1: "
    )
    assert "Unauthorized" in reported and re.search(r"Error code: [a-z-]+[.]", reported), reported
    assert TOKEN not in played.output and "operator-secret" not in played.output


def test_failed_read_of_a_kubeconfig_reports_the_message(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").mkdir()
    block = hidden_blocks("dra_controller", "service.yml", "ansible.builtin.slurp")
    played = play(tmp_path, [block], {"node-1": {"__dra_controller_directory": str(tmp_path)}})
    reported = played.failed["node-1"]["msg"]
    assert reported.startswith(f"Cannot read {tmp_path}/kubeconfig of node-1: ") and "directory" in reported, reported
