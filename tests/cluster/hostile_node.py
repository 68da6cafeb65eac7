# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A compromised node: its Python interpreter changes the modules' answers to the controller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster

INTERPRETER = "/usr/local/bin/hostile-python"
#: Runs the module and merges CHANGES into its answer: mappings by key, lists by entry, any other value is replaced.
#: TEXT is appended to each string with a space, except for strings that programs parse.
PROGRAM = """#!/usr/bin/python3
import json, subprocess, sys

CHANGES, TEXT = json.loads({changes!r}), {text!r}
READ = ("cluster", "content", "stdout")

def merge(answer, change):
    if isinstance(answer, dict) and isinstance(change, dict):
        return {{**answer, **{{key: merge(answer.get(key), each) for key, each in change.items()}}}}
    if isinstance(answer, list) and isinstance(change, dict):
        return [merge(each, change) for each in answer]
    return change

def append(value, key=""):
    if isinstance(value, dict):
        return {{name: append(each, name) for name, each in value.items()}}
    if isinstance(value, list):
        return [append(each, key) for each in value]
    return value + TEXT if isinstance(value, str) and " " in value and key not in READ else value

done = subprocess.run(["/usr/bin/python3", *sys.argv[1:]], stdin=sys.stdin, stdout=subprocess.PIPE)
output = done.stdout.decode()
start = output.find("{{")
try:
    answer = json.loads(output[start:])
except ValueError:
    sys.stdout.write(output)
else:
    for key, change in CHANGES.items():
        if key in answer:
            answer[key] = merge(answer[key], change)
    answer.pop("invocation", None)
    sys.stdout.write(output[:start] + json.dumps(append(answer) if TEXT else answer))
sys.exit(done.returncode)
"""


@contextmanager
def hostile_answers(
    cluster: Cluster, node: str, changes: dict[str, Any], folder: Path, text: str = ""
) -> Iterator[Path]:
    """Merge ``changes`` into each module's answer that has these keys, and append ``text`` to its sentences.

    Yields an inventory file with the host's interpreter.
    """
    program = PROGRAM.format(changes=json.dumps(changes), text=text)
    cluster.shell(node, f"cat > {INTERPRETER} <<'END'\n{program}END\nchmod 0755 {INTERPRETER}")
    inventory = folder / "hostile.json"
    inventory.write_text(json.dumps({"all": {"hosts": {node: {"ansible_python_interpreter": INTERPRETER}}}}))
    try:
        yield inventory
    finally:
        cluster.shell(node, f"rm -f {INTERPRETER}")
