# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the steps of a layout plan in order, and roll back to the previous layout if a step fails.

Before the plan, wait for partitions that the vendor's driver restores after a boot.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

from ..errors import AcceleratorError, LayoutFailed, as_failure
from ..model import Partition
from ..vendors.protocol import Backend
from .layout_plan import CreatePartition, DestroyPartition, LayoutPlan, ResetDevice, SetPartitioning, Step

#: The seconds between two reads while the vendor's driver restores partitions.
RESTORE_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class StepResult:
    """A completed step, the partition that it created, and its duration in seconds."""

    step: Step
    partition: Partition | None
    seconds: float


def wait_for_restored(
    backend: Backend,
    seconds: float,
    report: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Wait up to ``seconds`` until the vendor's driver has restored the partitions of the previous boot.

    ``report`` is called with the missing partitions at the start, and when they change. Return the partitions that are
    still missing at the end; "" without any. Without missing partitions there is no wait.
    """
    deadline = clock() + seconds
    reported = ""
    while missing := backend.describe_unrestored():
        if clock() + RESTORE_POLL_SECONDS > deadline:
            return missing
        if missing != reported:
            reported = missing
            report(missing)
        sleep(RESTORE_POLL_SECONDS)
    return ""


def execute(
    backend: Backend, plan: LayoutPlan, on_step: Callable[[StepResult], None] | None = None
) -> tuple[StepResult, ...]:
    """Run a plan's steps in order. If a step fails, roll back to the previous layout and raise LayoutFailed.

    The error contains the failed step and its cause, the undone steps, and the steps that could not be undone.
    """
    results: list[StepResult] = []
    for step in plan.steps:
        started = time.monotonic()
        try:
            partition = _run_step(backend, step, plan, results)
        except (AcceleratorError, OSError) as error:
            undone, not_undone = _roll_back(backend, results)
            raise _failed(step, as_failure(error), undone, not_undone) from error
        result = StepResult(step, partition, time.monotonic() - started)
        results.append(result)
        if on_step is not None:
            on_step(result)
    return tuple(results)


def _run_step(backend: Backend, step: Step, plan: LayoutPlan, results: Sequence[StepResult]) -> Partition | None:
    created = _apply(backend, step)
    if isinstance(step, SetPartitioning):
        try:
            _check_mode(backend, step, plan, results)
        except (AcceleratorError, OSError):
            with contextlib.suppress(AcceleratorError, OSError):
                backend.set_partitioning(step.device_uuid, not step.enabled)
            raise
    return created


def _check_mode(backend: Backend, step: SetPartitioning, plan: LayoutPlan, results: Sequence[StepResult]) -> None:
    """Raise AcceleratorError if a mode change did not take effect, or is not pending on a device that needs a reset."""
    state = backend.device(step.device_uuid).partitioning
    is_pending = state.needs_reset or any(isinstance(each, ResetDevice) for each in plan.steps[len(results) :])
    if (state.pending if is_pending else state.enabled) != step.enabled:
        raise AcceleratorError(
            f"Partitioning of {step.device_uuid} is still {'on' if state.enabled else 'off'} after the change",
            hint="Reset the device or reboot the machine.",
            code="mode-not-changed",
        )


def _roll_back(backend: Backend, results: Sequence[StepResult]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    undone: list[str] = []
    not_undone: list[str] = []
    resets: list[Step] = []  # run again after the mode changes that they had activated are undone
    modes_changed = False

    def run_inverse(steps: Sequence[Step]) -> None:
        for step in steps:
            try:
                _apply(backend, step)
                undone.append(step.describe())
            except (AcceleratorError, OSError) as error:
                not_undone.append(f"{step.describe()}: {error}")

    for result in reversed(results):
        step = result.step
        if isinstance(step, ResetDevice):
            resets.append(step)
            continue
        if modes_changed and not isinstance(step, SetPartitioning):
            run_inverse(resets)
            resets, modes_changed = [], False
        run_inverse(_inverse(step, result.partition))
        modes_changed = modes_changed or isinstance(step, SetPartitioning)
    if modes_changed:
        run_inverse(resets)
        resets = []
    not_undone.extend(f"{step.describe()}: the change that it activated was pending before" for step in resets)
    return tuple(undone), tuple(not_undone)


def _inverse(step: Step, created: Partition | None) -> tuple[Step, ...]:
    if isinstance(step, SetPartitioning):
        return (SetPartitioning(step.device_uuid, not step.enabled),)
    if isinstance(step, DestroyPartition):
        deleted = step.partition
        return (CreatePartition(step.device_uuid, deleted.profile, deleted.profile_id, deleted.placement),)
    if isinstance(step, CreatePartition) and created is not None:
        return (DestroyPartition(step.device_uuid, created),)
    return ()


def _apply(backend: Backend, step: Step) -> Partition | None:
    """Run one step, without a check of its result."""
    if isinstance(step, SetPartitioning):
        backend.set_partitioning(step.device_uuid, step.enabled)
    elif isinstance(step, ResetDevice):
        backend.reset(step.device_uuids)
    elif isinstance(step, DestroyPartition):
        backend.destroy_partition(step.device_uuid, step.partition.instance_id)
    else:
        return backend.create_partition(step.device_uuid, step.profile_id, step.placement)
    return None


def _failed(step: Step, error: AcceleratorError, undone: Sequence[str], not_undone: Sequence[str]) -> LayoutFailed:
    text = f"Could not {step.describe()}: {error}"
    if undone:
        text += f" Undone: {'; '.join(undone)}."
    if not_undone:
        text += f" Could not be undone: {'; '.join(not_undone)}."
    if not undone and not not_undone:
        text += " Nothing had been changed before."
    return LayoutFailed(text, undone=undone, not_undone=not_undone, code=error.code)
