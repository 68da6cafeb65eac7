# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``settings plan`` and ``settings apply``: apply the requested settings to this node's devices, at boot or on request.

The commands do not reset a device. A setting that needs a reset is set and takes effect after the next reboot. A device
that does not support a setting, or that is in use by a workload that the change would disturb, is reported and not
changed. The other devices are changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import config
from .core.errors import AcceleratorError
from .core.host.system import System, path_exists
from .core.settings.settings_execute import Asked, Decision, decide, execute, lock_devices, update_record
from .core.settings.settings_plan import KEYS, DevicePlan, SettingsPlan, parse_settings
from .core.settings.settings_record import record_path
from .core.vendors.protocol import Backend
from .core.vendors.registry import create, vendors_there
from .layout_command import open_when_available


def run_settings(
    file: str,
    config_path: str,
    *,
    apply: bool,
    wait: float,
    as_json: bool,
    vendors: Sequence[str] = (),
    record: str = "",
) -> int:
    """Run the command and return its exit status: 0 if every device has, or would have, the settings of its rule, else 1.

    ``vendors`` limits the command to the devices of these vendors. The default is all vendors with devices on the node.
    ``record`` replaces the default path of the settings record.
    """
    rules = parse_settings(_read(file))
    configured = config.load(config_path) if path_exists(config_path) else None
    configuration = configured or config.parse({"node_name": "none"})
    results: list[dict[str, Any]] = []
    for vendor in vendors or vendors_there():
        try:
            backend = create(vendor, System())
        except ValueError as error:
            raise AcceleratorError(str(error), code="unknown-vendor") from error
        open_when_available(backend, wait)
        try:
            directory = configuration.state_directory_of(configuration.driver_name or backend.driver_name)
            backend.use_number_file(directory)
            path = record or record_path(vendor)
            store, files = f"{directory}/state.db", configuration.cdi_directory
            asked = Asked(rules, store, path, reset="never", restore=True, cdi_directory=files)
            results += plan_or_apply(backend, System(), asked, apply=apply)
        finally:
            backend.close()
    sys.stdout.write(json.dumps(results, indent=2) + "\n" if as_json else _text(results))
    return 1 if any(each["error"] for each in results) else 0


def plan_or_apply(backend: Backend, system: System, asked: Asked, *, apply: bool) -> list[dict[str, Any]]:
    """Plan the settings of all devices, apply them with ``apply`` one device at a time, and return a result for each device."""
    decision = decide(backend, system, asked)
    results = [_result(device=str(finding.name), error=str(finding.fault)) for finding in decision.faulty]
    results += [_result(device="", error=str(error)) for error in decision.errors]
    if apply and not decision.plan.concerned:
        update_record(system, asked.record, decision)
    for each in decision.plan.devices:
        error = ""
        if apply and each.changes:
            try:
                _apply_to_device(backend, system, asked, decision, each)
            except AcceleratorError as failed:
                error = str(failed)
        results.append(
            _device_result(each, waits=each.uuid in decision.plan.waiting, done=apply and not error, error=error)
        )
    return results


def _apply_to_device(backend: Backend, system: System, asked: Asked, decision: Decision, plan: DevicePlan) -> None:
    """Apply the settings of one device. The device is locked and read again before. Raises AcceleratorError."""
    alone = replace(decision, plan=SettingsPlan((plan,)))
    with lock_devices(asked, alone, "the settings command"):
        now = decide(backend, system, asked)
        again = [each for each in now.plan.devices if each.uuid == plan.uuid]
        execute(backend, system, asked.record, now.record, SettingsPlan(tuple(again)))


def _device_result(plan: DevicePlan, *, waits: bool, done: bool, error: str) -> dict[str, Any]:
    result = _result(device=plan.seen.device.describe(), error=error)
    steps = [change.describe() for change in plan.changes]
    withheld = {KEYS[name]: reason for name, reason in plan.withheld.items()}
    return {**result, "uuid": plan.uuid, "steps": steps, "withheld": withheld, "reset_required": waits, "done": done}


def _result(*, device: str, error: str) -> dict[str, Any]:
    return {
        "device": device,
        "uuid": "",
        "steps": [],
        "withheld": {},
        "reset_required": False,
        "done": False,
        "error": error,
    }


def _read(file: str) -> Any:
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AcceleratorError(
            f"The file of settings {file} could not be read: {error}", hint="Expected a JSON list of rules."
        ) from error


def _text(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as text, with a line for each device."""
    if not results:
        return "no rule matches a device of this node: nothing to do\n"
    lines = []
    for each in results:
        head = f"{each['device']}: " if each["device"] else ""
        if each["error"]:
            lines.append(f"{head}FAILED: {each['error']}")
            continue
        lines.append(f"{head}{'as wanted' if not each['steps'] else 'done' if each['done'] else 'would'}")
        lines += [f"  {step}" for step in each["steps"]]
        lines += [f"  {name} waits: {reason}" for name, reason in each["withheld"].items()]
        lines += ["  waits for the next start of the machine"] if each["reset_required"] else []
    return "\n".join(lines) + "\n"
