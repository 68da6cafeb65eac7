# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What the modules that bring a vendor's devices to a layout share: look, plan, refuse, act, and say what was done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ._layout import (
    Assignment,
    apply,
    assign,
    concerned,
    difference,
    library_for_resets,
    report,
    state,
    touched,
    undisturbed,
)
from ._module import fail_all
from .core.backend import Backend
from .core.device_locks import DeviceLocks
from .core.errors import AcceleratorError
from .core.layout import Rule
from .core.model import Device, well
from .core.prepared import observe, prepared_claims, prepared_partitions, wake_driver


@dataclass(frozen=True)
class Layouts:
    """What one module does in its own way.

    ``name`` is the module's, ``word`` what its devices are called. ``rules`` reads the rules that the parameters stand for on these
    devices, of which those with the given numbers have a fault. ``agree`` says which steps are taken, by what the user has said, and
    raises AcceleratorError for what is not agreed. ``explain`` adds to an error what the module knows of the devices. ``before`` is
    done once it is certain that steps are taken, before the first one.
    """

    name: str
    word: str
    rules: Callable[[Sequence[Device], Sequence[int]], tuple[Rule, ...]]
    agree: Callable[[Sequence[Assignment]], tuple[Assignment, ...]] = tuple
    explain: Callable[[AcceleratorError, Sequence[Device]], AcceleratorError] = lambda error, _devices: error
    before: Callable[[], object] = lambda: None


Decision = tuple[tuple[Device, ...], tuple[Assignment, ...], list[str]]


def partition_devices(module: AnsibleModule, backend: Backend, layouts: Layouts) -> dict[str, Any]:
    """Bring the devices of a backend that is open to the layout, or say in check mode what would be done; returns the result."""
    devices, assignments, warnings = _decide(module, backend, layouts)
    answer = report(devices, assignments, layouts.word)
    if answer["changed"] and not module.check_mode:
        directory = str(Path(module.params["state_path"]).parent)
        locks = DeviceLocks(directory, f"the module {layouts.name}")
        with undisturbed(locks, concerned(assignments)) as check:
            devices, assignments, warnings = _decide(module, backend, layouts)
            check(assignments)
            answer = report(devices, assignments, layouts.word)
            if answer["changed"]:
                try:
                    layouts.before()
                    with library_for_resets(locks, assignments, lambda: wake_driver(directory)):
                        apply(backend, assignments)
                finally:
                    wake_driver(directory)
                answer["after"] = [state(backend.device(device.uuid)) for device in devices]
                answer["diff"] = difference(answer["before"], answer["after"], layouts.word)
    for text in warnings:
        module.warn(text)
    return answer


def _decide(module: AnsibleModule, backend: Backend, layouts: Layouts) -> Decision:
    """Look at the devices and plan; returns those that the layout is about, what each is to become, and warnings."""
    path = module.params["state_path"]
    backend.remember(device for claim in prepared_claims(path) for device in claim.away)
    findings, claims = observe(path, backend.discover)
    devices = well(findings)
    warnings = [
        f"One {layouts.word} keeps what it has: {each.describe()}" for each in findings if each.fault is not None
    ]
    rules = layouts.rules(devices, [each.index for each in findings if each.fault is not None])
    assignments, errors = assign(devices, rules, prepared_partitions(claims))
    if errors:
        fail_all(module, [layouts.explain(error, devices) for error in errors])
    assignments = layouts.agree(assignments)
    if not assignments:
        warnings.append(
            f"No rule of the layout matches any of the {len(devices)} {layouts.word}s of this node: nothing to do."
        )
    return touched(devices, assignments), assignments, warnings
