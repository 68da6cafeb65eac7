# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Project rules for classes of vulnerabilities that ruff's ``S`` rules do not find. docs/threat-model.md has the attacks."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from files import close, project_files, read
from security_syntax import syntax_problems


@dataclass(frozen=True)
class Rule:
    """Lines that match ``forbidden`` but not ``allowed`` are problems, in files that match one of ``paths`` and none of ``except_for``."""

    name: str
    paths: tuple[str, ...]
    forbidden: re.Pattern[str]
    remedy: str
    allowed: re.Pattern[str] = re.compile(r"(?!)")
    except_for: tuple[str, ...] = ()


PRODUCT = ("plugins/*", "roles/*", "playbooks/*")
SIMULATOR = ("roles/simulator/*",)
RULES = (
    Rule(
        "isolated-python",
        PRODUCT,
        # A command line, a YAML list, or a Python list in which -m follows an interpreter.
        re.compile(r"(?:python[\w.]*|interpreter|executable)\b[^\n#]*?[\s\"',\[]-m[\s\"',\]]"),
        "Python imports modules from the working directory first: add -I, or use dra_driver/run.py",
        allowed=re.compile(r"[\s\"',\[]-I[A-Za-z]*[\s\"',\]]"),
        except_for=(*SIMULATOR, "*/protocol/generate.py", "*.md"),
    ),
    Rule(
        "one-decoder",
        ("roles/dra_driver/files/dra_driver/api/*.py", "roles/dra_driver/files/dra_driver/controller/*.py"),
        re.compile(r"\bjson\.loads?\(|\.json\(\)"),
        "one deeply nested object must not end a watch: decode answers of the API server with core/decoding.py",
        except_for=("*/controller/webhook.py", "*/controller/facts.py", "*/api/token.py"),
    ),
    Rule(
        "no-facts-from-answers",
        ("roles/*/tasks/*.yml", "playbooks/*.yml"),
        re.compile(r"^\s+__?\w+:.*\bhostvars\[(?!inventory_hostname)[^\]]+\][^\n]*\.(stdout|stderr|msg|content)\b"),
        "ansible-core before 2.19 evaluates templates in stored answers of nodes: use a filter on the registered result",
    ),
    Rule(
        "no-shell-of-answers",
        ("plugins/*.py", "roles/dra_driver/files/*"),
        re.compile(r"shell=True|os\.system\(|os\.popen\("),
        "run a list of arguments through core/host/system.py",
    ),
    Rule(
        "no-privileged-pod",
        PRODUCT,
        re.compile(r"\bprivileged:\s*(true|yes)\b"),
        "grant the capabilities and mounts that are needed, with a reason in docs/security.md",
        except_for=SIMULATOR,
    ),
    Rule(
        "no-token-in-log",
        ("roles/dra_driver/files/dra_driver/*.py", "roles/dra_driver/files/dra_driver/*/*.py"),
        re.compile(r"LOG\.\w+\([^)]*\b(token|password|private_key)\b(?!_)[^)]*\{(token|password|key)\}"),
        "log the name of the secret, never its content",
    ),
)


def problems_in(path: Path, text: str, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Return a line for each violation in a file."""
    name = path.as_posix()
    found = []
    for rule in rules:
        if not any(fnmatch(name, each) for each in rule.paths) or any(fnmatch(name, each) for each in rule.except_for):
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if line.lstrip().startswith(("#", "{#")):
                continue
            if rule.forbidden.search(line) and not rule.allowed.search(line):
                found.append(f"{name}:{number}: {rule.name}: {rule.remedy}: {line.strip()[:120]}")
    return found


def main() -> int:
    """Check each file of the project and return the exit status."""
    problems, seen = [], 0
    for path in project_files():
        if path.parts[0] in ("plugins", "roles", "playbooks"):
            seen += 1
            text = read(path) or ""
            problems += problems_in(path, text) + syntax_problems(path, text)
    return close(problems, seen, "files")


if __name__ == "__main__":
    sys.exit(main())
