# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``layout plan`` and ``layout apply``: create the partitions that the layout requests on this node's devices.

The commands run at boot or on request. They do not change a partition or a device that a claim uses. A device that
would need such a change is reported and not changed. The other devices are changed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import config
from .core.discovery.device_locks import DeviceLocks, library_alone
from .core.errors import AcceleratorError, BackendUnavailable, DoesNotFit, InUse, InvalidLayout
from .core.host.system import System, path_exists
from .core.model import Device, healthy_devices
from .core.partitioning.layout_execute import execute, wait_for_restored
from .core.partitioning.layout_plan import LayoutPlan, ResetDevice, plan_layout, plan_layouts
from .core.partitioning.rules import Rule, WantedPartition, parse_rules, wanted_for
from .core.store.prepared_claims import (
    ClaimFiles,
    PreparedClaim,
    PreparedPartition,
    observe,
    prepared_claims,
    prepared_partitions,
    wake_driver,
)
from .core.vendors.protocol import Backend
from .core.vendors.registry import BACKENDS, create, vendors_there

RETRY_SECONDS = 2.0
# Seconds to wait for claims of a device to end, and for the driver to release the library.
LOCK_SECONDS = 60.0


@dataclass
class DeviceResult:
    """The result of a layout for one device: the plan or the error, and whether the steps were executed."""

    device: Device
    wanted: str
    plan: LayoutPlan | None = None
    error: AcceleratorError | None = None
    done: bool = False
    steps: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a mapping for JSON."""
        return {
            "vendor": self.device.vendor,
            "index": self.device.index,
            "uuid": self.device.uuid,
            "product": self.device.product,
            "wanted": self.wanted,
            "steps": self.steps,
            "done": self.done,
            "error": self.error.to_dict() if self.error else None,
        }


def run_layout(
    file: str, config_path: str, *, apply: bool, wait: float, as_json: bool, vendors: Sequence[str] = ()
) -> int:
    """Run the command and return its exit status: 0 if every matched device has, or would have, the layout, else 1.

    ``vendors`` limits the command to the devices of these vendors. The default is the backends of the driver's
    configuration. Without a configuration file, the vendors are those of the rules and of the node's devices.
    """
    rules = _read_rules(file)
    configured = config.load(config_path) if path_exists(config_path) else None
    configuration = configured or config.parse({"node_name": "none"})
    results: list[DeviceResult] = []
    for vendor in vendors or (configured.backends if configured is not None else _vendors(rules)):
        try:
            backend = create(vendor, System())
        except ValueError as error:
            raise AcceleratorError(str(error), code="unknown-vendor") from error
        try:
            open_when_available(backend, wait)
        except BackendUnavailable:
            if not any(rule.match.vendor is None or vendor in rule.match.vendor for rule in rules):
                continue
            raise
        try:
            directory = configuration.state_directory_of(configuration.driver_name or backend.driver_name)
            backend.use_number_file(directory)
            files = ClaimFiles(configuration.cdi_directory, backend.cdi_kind)
            if apply:
                wait_for_restored_partitions(backend, wait)
            results += plan_or_apply(
                backend, rules, f"{directory}/state.db", System().boot_id(), apply=apply, files=files
            )
        finally:
            backend.close()
    if as_json:
        sys.stdout.write(json.dumps([result.to_dict() for result in results], indent=2) + "\n")
    else:
        sys.stdout.write(_table(results, apply=apply))
    return 1 if any(result.error for result in results) else 0


def wait_for_restored_partitions(backend: Backend, seconds: float) -> None:
    """Wait up to ``seconds`` for partitions that the vendor's driver restores, then continue with a message."""
    missing = wait_for_restored(backend, seconds, lambda text: _print_progress(f"waiting: {text}"))
    if missing:
        _print_progress(f"the layout is applied without them: {missing}")


def _print_progress(text: str) -> None:
    sys.stderr.write(f"dra-driver: {text}\n")


def plan_or_apply(
    backend: Backend,
    rules: tuple[Rule, ...],
    state: str,
    boot_id: str,
    *,
    apply: bool,
    seconds: float = LOCK_SECONDS,
    files: ClaimFiles | None = None,
) -> list[DeviceResult]:
    """Plan the layout of all devices and, with ``apply``, apply it. Devices that change are locked while they are read and changed.

    ``files`` are the CDI files of the driver's claims.
    """

    def plan_devices(locked: frozenset[str] | None) -> list[DeviceResult]:
        backend.add_detached(device for claim in prepared_claims(state, files) for device in claim.away)
        findings, claims = observe(state, backend.discover, files)
        for finding in findings:
            if finding.fault is not None and locked is None:
                sys.stderr.write(f"dra-driver: one device keeps what it has: {finding.describe()}\n")
        return plan_or_apply_devices(backend, healthy_devices(findings), rules, claims, boot_id, locked=locked)

    results = plan_devices(None)
    changing = frozenset(uuid for result in results if result.plan is not None for uuid in changed_uuids(result.plan))
    if not apply or not changing:
        for result in results:
            result.done = apply and result.error is None
        return results
    directory = str(Path(state).parent)
    locks = DeviceLocks(directory, "the layout command")

    def wake() -> bool:
        return wake_driver(directory)

    resets = any(isinstance(step, ResetDevice) for result in results if result.plan for step in result.plan.steps)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(locks.hold(changing, seconds))
            if resets:
                stack.enter_context(library_alone(locks, wake, seconds))
            return plan_devices(changing)
    finally:
        wake()


def changed_uuids(plan: LayoutPlan) -> frozenset[str]:
    """Return the UUIDs of the devices that a plan changes."""
    return frozenset(
        uuid
        for step in plan.steps
        for uuid in (step.device_uuids if isinstance(step, ResetDevice) else (step.device_uuid,))
    )


def open_when_available(
    backend: Backend,
    seconds: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Open a backend, waiting up to ``seconds`` for the vendor's driver. Raises BackendUnavailable after that time."""
    deadline = clock() + seconds
    last_error = ""
    while True:
        try:
            backend.open()
        except BackendUnavailable as error:
            if clock() + RETRY_SECONDS > deadline:
                raise
            if str(error) != last_error:
                last_error = str(error)
                sys.stderr.write(f"dra-driver: waiting: {last_error}\n")
            sleep(RETRY_SECONDS)
        else:
            return


def plan_or_apply_devices(
    backend: Backend,
    devices: Sequence[Device],
    rules: tuple[Rule, ...],
    claims: Sequence[PreparedClaim],
    boot_id: str,
    *,
    locked: Collection[str] | None,
) -> list[DeviceResult]:
    """Plan the layout of every matched device, and apply a plan if the caller has locked all devices that it changes.

    With ``locked`` None no plan is applied. A failure of one device does not stop the others.

    Claims prepared in this boot hold their partitions. The partitions of claims from a previous boot no longer exist,
    but their pods can restart. New partitions for these claims get the previous placements.
    """
    holding = prepared_partitions(claim for claim in claims if claim.boot_id == boot_id)
    previous = prepared_partitions(claim for claim in claims if claim.boot_id != boot_id)
    results = []
    wanted = [(device, wanted_for(device, rules)) for device in devices]
    aimed = [(device, _rule_with_previous_placements(device, rule, holding, previous)) for device, rule in wanted]
    for (device, rule), outcome in zip(wanted, plan_layouts(aimed, prepared=holding)):
        if rule is None:
            continue
        result = DeviceResult(device, rule.describe())
        results.append(result)
        try:
            if isinstance(outcome, AcceleratorError):
                raise outcome
            result.plan = outcome
            result.steps = [step.describe() for step in result.plan.steps]
            if locked is not None:
                if not changed_uuids(result.plan) <= set(locked):
                    raise InUse(
                        f"{device.describe()} changed while this run waited for the locks. This run does not change it",
                        hint="Apply the layout again.",
                        code="changed-meanwhile",
                    )
                execute(backend, result.plan)
                result.done = True
        except AcceleratorError as error:
            result.error = error
    return results


def _rule_with_previous_placements(
    device: Device,
    rule: Rule | None,
    holding: Sequence[PreparedPartition],
    previous: Sequence[PreparedPartition],
) -> Rule | None:
    """Return the rule with the placements of the previous boot, or the rule itself if these do not fit the layout."""
    if rule is None:
        return None
    restoring = at_previous_placements(device, rule, previous)
    if restoring != rule:
        try:
            plan_layout(device, restoring, prepared=holding, refuse=False)
        except (DoesNotFit, InvalidLayout):
            return rule
    return restoring


def at_previous_placements(device: Device, rule: Rule, previous: Sequence[PreparedPartition]) -> Rule:
    """Return a rule that fixes its partitions at the placements that claims had before a reboot.

    Partitions without such a placement stay unchanged.
    """
    places: list[tuple[str, int]] = []
    for held in previous:
        profile = device.profile(held.profile_id) if held.profile_id is not None else None
        if held.device_uuid == device.uuid and profile is not None and held.placement is not None:
            places.append((profile.name, held.placement.start))
    wanted: list[WantedPartition] = []
    for entry in rule.partitions:
        mine = sorted({start for name, start in places if name == entry.profile})[: entry.count]
        if entry.start is not None or not mine:
            wanted.append(entry)
            continue
        wanted += [WantedPartition(entry.profile, 1, start) for start in mine]
        if entry.count > len(mine):
            wanted.append(WantedPartition(entry.profile, entry.count - len(mine)))
    return replace(rule, partitions=tuple(wanted))


def _read_rules(file: str) -> tuple[Rule, ...]:
    try:
        document = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AcceleratorError(
            f"The layout file {file} could not be read: {error}", hint="Expected a JSON list of rules."
        ) from error
    rules = document.get("layout") if isinstance(document, dict) else document
    if not isinstance(rules, list):
        raise AcceleratorError(f"The layout file {file} does not hold a list of rules")
    return parse_rules(rules)


def _vendors(rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """Return the vendors to query on a node without a driver configuration: those named in the rules and those with devices.

    If the node has no device yet, devices can still appear, and all vendors are returned.
    """
    named = {vendor for rule in rules for vendor in rule.match.vendor or ()}
    there = vendors_there()
    return tuple(vendor for vendor in BACKENDS if vendor in named or vendor in there or not there)


def _table(results: Sequence[DeviceResult], *, apply: bool) -> str:
    if not results:
        return "no rule matches a device of this node: nothing to do\n"
    lines = []
    for result in results:
        head = f"{result.device.vendor} {result.device.index} {result.device.product}: {result.wanted}"
        if result.error is not None:
            lines.append(f"{head}: FAILED: {result.error}")
        elif not result.steps:
            lines.append(f"{head}: as wanted")
        else:
            lines.append(f"{head}: {'done' if apply else 'would'}")
            lines.extend(f"  {step}" for step in result.steps)
    return "\n".join(lines) + "\n"
