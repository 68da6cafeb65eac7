# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Common functions of the collection's modules: select the Python interpreter, and convert errors to module failures."""

from __future__ import annotations

import importlib.util
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.respawn import has_respawned, probe_interpreters_for_module, respawn_module

from ._host.secret_masking import mask_secrets
from .core.errors import AcceleratorError
from .core.texts import join_problems

INTERPRETER = "/opt/dra-accelerators/venv/bin/python"

INTERPRETER_OPTION: dict[str, dict[str, Any]] = {"interpreter": {"type": "path", "default": INTERPRETER}}


def importable(name: str) -> bool:
    """Return whether this interpreter finds a top-level Python module of this name."""
    return importlib.util.find_spec(name) is not None


def find_binding(name: str, interpreter: str) -> str | None:
    """Ensure that the Python module ``name`` can be imported, if necessary by running this Ansible module with another interpreter.

    Returns None if the module can be imported here. If ``interpreter`` can import it, this call does not return: the
    Ansible module runs again with that interpreter, and this process ends with its result. Otherwise returns a sentence
    that names the missing module; the caller decides whether that is an error.
    """
    if importable(name):
        return None
    if not has_respawned() and probe_interpreters_for_module([interpreter], name):
        respawn_module(interpreter)
    return (
        f"The Python module {name} can be imported neither by the interpreter that Ansible uses on this node "
        f"nor by {interpreter}"
    )


def end(module: AnsibleModule, **result: Any) -> NoReturn:
    """End the module with a failure. Tokens and passwords in its text are masked: it can quote a tool's output."""
    text = mask_secrets(str(result.get("msg", "")))
    if os.geteuid() != 0 and re.search(r"(?i)permission denied|operation not permitted", text) and "become" not in text:
        text += " The module did not run as root. Set become: true for the task or the play."
    module.fail_json(**{**result, "msg": text})
    raise SystemExit(1)  # fail_json has ended the process; type checkers do not know this


def fail(module: AnsibleModule, error: AcceleratorError, **more: Any) -> NoReturn:
    """End the module with the error: its message, code, and facts (PIDs, claims, obstacles)."""
    facts = {key: value for key, value in error.to_dict().items() if key not in ("code", "message")}
    end(module, msg=str(error), error_code=error.code, **{**facts, **more})


def fail_all(module: AnsibleModule, errors: Sequence[AcceleratorError], **more: Any) -> NoReturn:
    """End the module with all errors at once. A single error keeps its own code and facts.

    The PIDs, claims, and obstacles of several errors are merged, in order.
    """
    if len(errors) == 1:
        fail(module, errors[0], errors=[errors[0].to_dict()], **more)
    codes = sorted({error.code for error in errors})
    facts: dict[str, Any] = {}
    for error in errors:
        for key, value in error.to_dict().items():
            if isinstance(value, list):
                facts[key] = list(dict.fromkeys([*facts.get(key, []), *value]))
    end(
        module,
        msg=f"{len(errors)} problems were found and nothing was changed: "
        + join_problems((f"({number}) {error}" for number, error in enumerate(errors, 1)), " "),
        error_code=codes[0] if len(codes) == 1 else "several",
        errors=[error.to_dict() for error in errors],
        **{**facts, **more},
    )


def run(module: AnsibleModule, work: Callable[[AnsibleModule], dict[str, Any]]) -> None:
    """Run ``work(module)``, which returns the result as a dictionary, and end the module with it or with its error."""
    try:
        result = work(module)
    except AcceleratorError as error:
        fail(module, error)
    except OSError as error:
        end(
            module,
            msg=f"The operating system refused an operation: {error}",
            error_code="os-error",
            exception=traceback.format_exc(),
        )
    module.exit_json(**result)
