# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: csp_hash
version_added: 0.1.0
short_description: Allow one script or style sheet in a Content-Security-Policy
description:
  - Returns the source expression that allows exactly this text as a C(script) or C(style) element of a page. A page with such a policy
    needs no C('unsafe-inline'), so text from other sources cannot become a script.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: All text between the tags of the element, including spaces and line breaks.
    type: str
    required: true
seealso:
  - plugin: dra.accelerators.markdown_text
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show the policy of a page with one script
  ansible.builtin.debug:
    msg: "default-src 'none'; script-src {{ lookup('ansible.builtin.file', 'page.js', rstrip=false) | dra.accelerators.csp_hash }}"
"""

RETURN = r"""
_value:
  description: The source expression, in single quotes.
  type: str
  sample: "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""

import base64
import hashlib
from collections.abc import Callable
from typing import Any


def csp_hash(text: str) -> str:
    """Return the source expression of a Content-Security-Policy for an inline element with this text."""
    # Browsers hash the text as they parse it, with line feeds only.
    parsed = text.replace("\r\n", "\n").replace("\r", "\n")
    return f"'sha256-{base64.b64encode(hashlib.sha256(parsed.encode()).digest()).decode()}'"


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"csp_hash": csp_hash}
