# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: markdown_text
version_added: 0.1.0
short_description: Escape a text for Markdown
description:
  - Nodes and users of the cluster choose texts that reports show. Without escapes such a text can add headings, links, images, tables, and HTML to a
    report in Markdown.
  - The result is one line that renders as the text itself, also in a cell of a table. URLs and mentions do not become links.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: The text. Other values are converted to text.
    type: raw
    required: true
seealso:
  - plugin: dra.accelerators.csp_hash
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Write the messages of the report as a list
  ansible.builtin.copy:
    content: |
      {% for one in ansible_facts.accelerator_report.attention %}
      * {{ one.message | dra.accelerators.markdown_text }}
      {% endfor %}
    dest: attention.md
    mode: "0644"
"""

RETURN = r"""
_value:
  description: The escaped text.
  type: str
  sample: 'a \| b'
"""

import re
from collections.abc import Callable
from typing import Any

# Characters that end a line, for any reader, and other control characters.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>|~#$!]")
# Where a line can begin a list, a rule, a table, or a heading underline.
_BEGINNING = re.compile(r"^([-+=:]|\d+(?=[.)](?:\s|$)))")
_AUTOLINK = re.compile(r"(?i)(?<=://)|(?<=www)(?=\.)|(?<=@)|(?<=mailto:)|(?<=xmpp:)")


def markdown_text(value: Any) -> str:
    """Return a text in one line of Markdown that renders as the text itself."""
    text = _CONTROL.sub(" ", str(value)).strip().replace("&", "&amp;")
    text = _SPECIAL.sub(r"\\\g<0>", text)
    text = _BEGINNING.sub(lambda found: found[1] + "&#8203;" if found[1].isdigit() else f"\\{found[1]}", text)
    # A zero-width space prevents an automatic link.
    return _AUTOLINK.sub("&#8203;", text)


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"markdown_text": markdown_text}
