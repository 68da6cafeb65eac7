# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The project's security rules find each class of violation, and accept the correct form."""

from __future__ import annotations

from pathlib import Path

import pytest
from security_rules import problems_in

UNIT = "roles/dra_driver/templates/x.service.j2"
CASES = [
    (UNIT, "ExecReload={{ root }}/venv/bin/python -m dra_driver.cli reload", "isolated-python"),
    ("roles/a/tasks/b.yml", '    argv: ["{{ python_interpreter }}", -m, venv, "{{ x }}"]', "isolated-python"),
    ("plugins/module_utils/_x.py", '    argv = [self.interpreter, "-m", "pip", *verb]', "isolated-python"),
    ("roles/a/templates/Containerfile.j2", 'ENTRYPOINT ["python3", "-m", "dra_driver.pod"]', "isolated-python"),
    ("roles/dra_driver/files/dra_driver/api/client.py", "    return json.loads(text)", "one-decoder"),
    ("plugins/modules/x.py", "    subprocess.run(command, shell=True)", "no-shell-of-answers"),
    ("roles/a/templates/x.yaml.j2", "  privileged: true", "no-privileged-pod"),
]
CORRECT = [
    (UNIT, "ExecReload={{ root }}/venv/bin/python -IBu {{ root }}/current/dra_driver/run.py dra_driver.cli reload"),
    ("roles/a/tasks/b.yml", '    argv: ["{{ python_interpreter }}", -I, -m, venv, "{{ x }}"]'),
    ("plugins/module_utils/_x.py", '    argv = [self.interpreter, "-I", "-m", "pip", *verb]'),
    ("plugins/module_utils/_x.py", '    words = ["dkms", verb, "--force", "-m", name]'),
    ("roles/a/templates/x.yaml.j2", "  privileged: false"),
    ("roles/dra_driver/files/dra_driver/api/client.py", "    return decode(text)"),
    (UNIT, "# python -m imports from the working directory"),
]


@pytest.mark.parametrize(("path", "line", "rule"), CASES)
def test_violation_is_found(path: str, line: str, rule: str) -> None:
    (problem,) = problems_in(Path(path), f"first\n{line}\n")
    assert problem.startswith(f"{path}:2: {rule}: ")


@pytest.mark.parametrize(("path", "line"), CORRECT)
def test_correct_form_is_accepted(path: str, line: str) -> None:
    assert problems_in(Path(path), line) == []
