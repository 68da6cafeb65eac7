# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Check the language of documents, docstrings, comments, module documentation, argument specs, and task names with Vale.

Vale reads Markdown. Text of Python and YAML files is copied into Markdown files with a paragraph for each docstring,
comment, and description, and the lines of Vale's messages are mapped to those of the sources.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

import yaml
from files import ROOT, close, project_files

CONFIG = ROOT / "tests/tools/vale/vale.ini"
#: Keys of YAML mappings whose values are prose.
PROSE_KEYS = frozenset(
    {
        "description",
        "fail_msg",
        "hint",
        "msg",
        "name",
        "notes",
        "short_description",
        "success_msg",
        "summary",
    }
)
#: Constants of modules with documentation in YAML.
DOCUMENTS = frozenset({"DOCUMENTATION", "RETURN"})
MARKUP = re.compile(r"\b[A-Z]{1,2}\(((?:[^()]|\([^()]*\))*)\)")
COMMENT = re.compile(r"^\s*#+\s?(.*)$")
LEGAL = re.compile(r"SPDX-License-Identifier|Copyright \(c\)|GNU General Public License")
Fragment = tuple[int, str]


def yaml_fragments(text: str, first: int = 1) -> Iterator[Fragment]:
    """Yield the comments and the prose of a YAML text as pairs of line and text. ``first``: the line of its beginning."""
    for number, line in enumerate(text.splitlines()):
        if (found := COMMENT.match(line)) and not LEGAL.search(line):
            yield first + number, found[1]
    for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
        if document is not None:
            yield from ((first + line, value) for line, value in prose_of(document))


def prose_of(node: yaml.Node, prose: bool = False) -> Iterator[Fragment]:
    """Yield the prose below a node as pairs of line (from 0) and text. ``prose``: whether the node is the value of such a key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from prose_of(value, key.value in PROSE_KEYS and not isinstance(value, yaml.MappingNode))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from prose_of(value, prose)
    elif isinstance(node, yaml.ScalarNode) and prose and " " in node.value:
        # The text of a block scalar begins on the line after its indicator.
        yield node.start_mark.line + (1 if node.style in ("|", ">") else 0), node.value


def python_fragments(text: str) -> Iterator[Fragment]:
    """Yield the docstrings, the comments, and the documentation of a Python text as pairs of line and text."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.lineno, first.value.value
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = {each.id for each in statement.targets if isinstance(each, ast.Name)}
            if names & DOCUMENTS and isinstance(statement.value.value, str):
                yield from yaml_fragments(statement.value.value, statement.value.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not LEGAL.search(token.string):
            yield token.start[0], token.string.lstrip("#: ")


def fragments(path: Path, text: str) -> list[Fragment]:
    """Return the prose of a file as pairs of line and text. The text of several lines is on as many lines of the file."""
    if path.suffix == ".md":
        return [(1, text)]
    if path.suffix == ".py":
        return sorted(python_fragments(text))
    try:
        return sorted(yaml_fragments(text))
    except yaml.YAMLError:
        # Inventories and templates with tags of Ansible: their comments only.
        lines = enumerate(text.splitlines(), 1)
        return [(number, found[1]) for number, line in lines if (found := COMMENT.match(line))]


def markdown(path: Path, text: str) -> tuple[str, list[int]]:
    """Return the prose of a file as Markdown, and by line of it the line of the file."""
    lines: list[str] = []
    numbers: list[int] = []
    for number, fragment in fragments(path, text):
        own = fragment.splitlines()
        if path.suffix != ".md":
            own = [MARKUP.sub(r"`\1`", line).strip() for line in own]
        lines += [*own, ""]
        numbers += [number + offset for offset in range(len(own) + 1)]
    return "\n".join(lines), numbers


def vale() -> Path:
    """Build Vale unless it is in the cache, and return the path of the program."""
    done = subprocess.run(
        [ROOT / "tests/world/world", "build", "--only", "linters"], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(dict(line.split(" ", 1) for line in done.stdout.splitlines())["vale"])


def problems(program: Path, sources: dict[Path, str]) -> list[str]:
    """Return the messages of Vale about the prose of files, by path, with the lines of the files."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        numbers: dict[Path, list[int]] = {}
        for path, text in sources.items():
            copy = directory / (path if path.suffix == ".md" else path.with_name(f"{path.name}.md"))
            copy.parent.mkdir(parents=True, exist_ok=True)
            content, numbers[copy] = markdown(path, text)
            copy.write_text(content, encoding="utf-8")
        command = [str(program), "--config", str(CONFIG), "--output", "JSON", "--no-exit", "."]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise SystemExit(f"{program} failed: {done.stdout}{done.stderr}")
        for copied, messages in json.loads(done.stdout or "{}").items():
            copy = directory / copied
            path = copy.relative_to(directory)
            source = path if path in sources else path.with_name(path.name.removesuffix(".md"))
            for each in messages:
                line = numbers[copy][min(each["Line"], len(numbers[copy])) - 1]
                found.append(f"{source}:{line}: {each['Message']} ({each['Check']})")
    return sorted(found)


def main() -> int:
    """Check all files, or those named on the command line, and return the exit status."""
    paths = [Path(name) for name in sys.argv[1:]] or [
        path for path in project_files() if path.suffix in (".md", ".py", ".yml", ".yaml")
    ]
    paths = [path for path in paths if path.name != "CONTRIBUTING.md" and "_pb2" not in path.name]
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    return close(problems(vale(), sources), len(sources), "files")


if __name__ == "__main__":
    sys.exit(main())
