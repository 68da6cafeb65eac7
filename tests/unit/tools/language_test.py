# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The texts that the language check reads, and the lines that its messages name."""

from __future__ import annotations

from pathlib import Path

import language

MODULE = '''# SPDX-License-Identifier: Apache-2.0
"""First line.

Second paragraph.
"""
DOCUMENTATION = r"""
---
short_description: Set a value
options:
  name:
    description:
      - The O(name) of
        the node.
    type: str
"""
EXAMPLES = "- name: Not a text of the documentation"


def read() -> str:
    """a value"""
    return "not a docstring"  # A comment.
'''
SPECS = """\
# A comment of the file.
argument_specs:
  main:
    description: >-
      One text
      in two lines.
    options:
      path: {type: str, description: [First entry., Second entry.]}
"""


def test_module_texts_are_docstrings_comments_and_documentation() -> None:
    assert language.fragments(Path("module.py"), MODULE) == [
        (2, "First line.\n\nSecond paragraph.\n"),
        (8, "Set a value"),
        (12, "The O(name) of the node."),
        (20, "a value"),
        (21, "A comment."),
    ]


def test_argument_spec_texts_are_comments_and_descriptions() -> None:
    assert language.fragments(Path("argument_specs.yml"), SPECS) == [
        (1, "A comment of the file."),
        (5, "One text in two lines."),
        (8, "First entry."),
        (8, "Second entry."),
    ]


def test_semantic_markup_becomes_code() -> None:
    content, lines = language.markdown(Path("module.py"), MODULE)
    assert "The `name` of the node." in content.splitlines()
    assert lines[content.splitlines().index("a value")] == 20


def test_documents_are_read_as_they_are() -> None:
    assert language.fragments(Path("README.md"), "# Title\n\nText\n") == [(1, "# Title\n\nText\n")]


def test_yaml_with_unknown_tags_has_its_comments_read() -> None:
    assert language.fragments(Path("secrets.yml"), "# Encrypted.\nvalue: !vault |\n  aa\n") == [(1, "Encrypted.")]
