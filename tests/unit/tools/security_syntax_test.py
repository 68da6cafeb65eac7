# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The security rules that read syntax find each class of violation, and accept the correct form."""

from __future__ import annotations

from pathlib import Path

import pytest
from security_syntax import syntax_problems

CASES = [
    ("plugins/a.py", 'x = {"hookName": "createContainer", "path": "/bin/x"}', "hook-environment"),
    ("plugins/a.py", "yaml.load(text)", "safe-yaml"),
    ("plugins/a.py", "yaml.load(text, Loader=yaml.Loader)", "safe-yaml"),
    ("plugins/a.py", "yaml.unsafe_load(text)", "safe-yaml"),
    ("plugins/module_utils/_scheduling/cel_x.py", "re.search(pattern, text)", "cel-without-backtracking"),
    ("roles/a/tasks/b.yml", "- copy: {dest: /etc/a/kubeconfig, content: x}", "secret-files"),
    ("roles/a/vars/main.yml", "a: [{path: /etc/a/kubeconfig, state: absent, marker: x}]", "secret-files"),
    ("roles/a/vars/main.yml", "a: [{path: /etc/a/tls.key, content: x, secret: false}]", "secret-files"),
]
CORRECT = [
    ("plugins/a.py", 'x = {"hookName": "createContainer", "path": "/bin/x", "env": ["A=b"]}'),
    ("plugins/a.py", "yaml.load(text, Loader=yaml.CSafeLoader)"),
    ("plugins/a.py", "yaml.safe_load(text)"),
    ("plugins/module_utils/_scheduling/cel_x.py", 're.search("a+", text)'),
    ("plugins/module_utils/_scheduling/cel_x.py", 'P = re.compile(rf"{_PART}+")'),
    ("plugins/other.py", "re.search(pattern, text)"),
    ("roles/a/tasks/b.yml", "- copy: {dest: /etc/a/kubeconfig, content: x}\n  no_log: true"),
    ("roles/a/vars/main.yml", "a: [{path: /etc/a/kubeconfig, state: absent, secret: true, marker: x}]"),
]


@pytest.mark.parametrize(("path", "text", "rule"), CASES)
def test_violation_is_found(path: str, text: str, rule: str) -> None:
    (problem,) = syntax_problems(Path(path), text)
    assert f" {rule}: " in problem


@pytest.mark.parametrize(("path", "text"), CORRECT)
def test_correct_form_is_accepted(path: str, text: str) -> None:
    assert syntax_problems(Path(path), text) == []
