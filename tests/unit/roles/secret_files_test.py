# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Roles mark every file that holds a token, a key, or a password, so that no diff and no result shows its content."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

ROOT = Path(__file__).resolve().parents[3]
SECRET_NAMES = re.compile(r"(kubeconfig|pip\.conf|install\.json|netrc|auth\.conf|token|[.-]key|key\.pem)[\"'}\s]*$")
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJkcml2ZXItbm9kZS0xIn0.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping of a document."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(each)


def documents() -> Iterator[tuple[Path, Any]]:
    """Yield each file with variables or tasks of roles and playbooks; the simulator has no secrets of a cluster."""
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
        # Entries that an expression returns as a whole.
        for text in re.findall(r"\{'path':[^{}]*\}", path.read_text("utf-8")):
            name = re.match(r"\{'path': ([^,]*)", text)
            if name and SECRET_NAMES.search(name[1]):
                marked += 1
                if "'secret': true" not in text and "secret_content" not in text:
                    unmarked.append(f"{path.relative_to(ROOT)}: {text}")
    assert not unmarked
    assert marked >= 5


def test_tasks_that_write_secrets_hide_arguments_and_diff() -> None:
    """Of copy and template both are shown otherwise; slurp returns the content."""
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
    """Remove the entries of the role named absent_files, with its own variables, from a directory with a kubeconfig."""
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
