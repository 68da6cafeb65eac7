# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: final_result
version_added: 0.1.0
short_description: Check whether another attempt cannot change the result of a task of kubernetes.core
description:
  - Is true if a task of the collection C(kubernetes.core) succeeded, or failed with an error that another attempt does not correct. Use it with the
    keyword C(until).
  - Is false after all other failures, for example HTTP status 429, 500, or 503, a conflict of writes, and a lost connection.
  - Is false if the API server serves no such kind, because C(kubernetes.core) ignores status 503 when it reads the list of kinds.
  - Is false if the object to patch was not found, because C(kubernetes.core) then succeeds, also if a load balancer answered with status 404.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: The registered result of the task.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Patch a Node, also while the API server restarts
  kubernetes.core.k8s:
    state: patched
    kind: Node
    name: gpu-node-1
    definition: {metadata: {labels: {tier: gpu}}}
  register: patched
  until: patched is dra.accelerators.final_result
  retries: 12
  delay: 5
"""

RETURN = r"""
_value:
  description: Whether the result is final.
  type: bool
  sample: true
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

#: HTTP status codes of requests that the API server always rejects, and the reason phrases of results without a status code.
PERMANENT_STATUS = (400, 401, 403, 404, 405, 406, 413, 415, 422)
PERMANENT_REASONS = ("Bad Request", "Unauthorized", "Forbidden", "Not Found", "Method Not Allowed")
#: The status in the text of a kubernetes.client.ApiException, and in a Status object of the API server.
STATUS = re.compile(r"\b(?P<code>\d{3})\)?\s+Reason: |\"code\":\s?(?P<body>\d{3})\b")
#: The warning of a successful patch of a missing object. Status 404 of a load balancer has the same result.
NOT_PATCHED = "was not found but will not be created"
#: Errors of the modules themselves: a missing Python package, no usable kubeconfig, an unreadable definition, and a timeout.
PERMANENT_TEXTS = re.compile(
    r"Failed to import the required Python library|Could not create API client|Failed to load resource definition|Timed out waiting on resource"
)


def final_result(result: Any) -> bool:
    """Return whether another attempt cannot change a result of kubernetes.core. Raises AnsibleFilterError."""
    if not isinstance(result, Mapping):
        raise AnsibleFilterError(
            f"final_result: found {type(result).__name__}, expected the registered result of a task"
        )
    if not result.get("failed"):
        return result.get("api_found") is not False and not any(
            NOT_PATCHED in str(each) for each in result.get("warnings") or ()
        )
    message = str(result.get("msg", ""))
    if PERMANENT_TEXTS.search(message):
        return True
    # The object was deleted between the read and the delete of the module. The next attempt finds that it is absent.
    if message.startswith("Failed to delete object") and _is_permanent(message, result.get("reason"), (404,)):
        return False
    # An error while the module connects has only a traceback, in ansible-core 2.18 on the error output.
    text = "\n".join([message, str(result.get("module_stderr", "")), str(result.get("exception", ""))])
    return _is_permanent(text, result.get("reason"), PERMANENT_STATUS)


def _is_permanent(text: str, reason: Any, codes: tuple[int, ...]) -> bool:
    """Return whether the first HTTP status of an error is one of ``codes``."""
    found = STATUS.search(text)
    if found is None:
        return reason in PERMANENT_REASONS
    return int(found["code"] or found["body"]) in codes


class TestModule:
    """The test plugin."""

    def tests(self) -> dict[str, Callable[..., Any]]:
        """Return the test by its name."""
        return {"final_result": final_result}
