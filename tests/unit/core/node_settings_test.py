# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Persistent settings of a node: plans, the record, and the restore, on devices in memory. Some settings cannot be read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import board_model
import pytest
from dra_driver.core.errors import AcceleratorError, InUse, InvalidSettings, SettingsFailed, Unsupported
from dra_driver.core.host.system import System
from dra_driver.core.model import Device, Finding, Process
from dra_driver.core.schema import Boolean, Choice, Integer
from dra_driver.core.settings.knobs import (
    COMPUTE_MODE,
    COMPUTE_MODES,
    ECC,
    GRAPHICS_CLOCKS,
    POWER_LIMIT,
    Knob,
    clocks,
)
from dra_driver.core.settings.settings_execute import Asked, Decision, decide, execute, update_record
from dra_driver.core.settings.settings_plan import ClaimedKnob, Seen, SettingsPlan, parse_settings, plan_settings
from dra_driver.core.settings.settings_record import (
    RecordedValues,
    SettingsRecord,
    parse_record,
    read_record,
    recorded_values,
    write_record,
)
from dra_driver.core.vendors.protocol import Backend
from hypothesis import given
from hypothesis import strategies as st

BY_DEFAULT: dict[str, Any] = {POWER_LIMIT: 700.0, COMPUTE_MODE: "Default", GRAPHICS_CLOCKS: None, ECC: True}
RECORD = "/var/lib/dra-accelerators/settings-test.json"
BOOT = "/proc/sys/kernel/random/boot_id"


class Killed(BaseException):
    """Simulated end of the process."""


class Silicon:
    """Devices whose settings survive the process. ``left`` changing calls succeed, and the next one fails."""

    cdi_kind = "k8s.example.com/claim"

    def __init__(self, system: System, devices: Sequence[Device]) -> None:
        self.system = system
        self.devices = {device.uuid: device for device in devices}
        self.knobs_now = {device.uuid: dict(BY_DEFAULT) for device in devices}
        self.pending = dict.fromkeys(self.devices, True)
        self.calls: list[tuple[str, ...]] = []
        self.left: int | None = None
        self.error: BaseException = Killed()

    def add_detached(self, devices: Iterable[Device]) -> None:
        assert not list(devices)

    def discover(self) -> tuple[Finding, ...]:
        return tuple(Finding(each.index, each.describe(), each.uuid, each) for each in self.devices.values())

    def knobs(self, uuid: str, names: Collection[str]) -> Mapping[str, Knob]:
        now, noted = self.knobs_now[uuid], recorded_values(self.system, RECORD, uuid)
        blocked = "it is partitioned" if self.devices[uuid].partitioning.enabled else ""
        return {
            POWER_LIMIT: Knob(now[POWER_LIMIT], Integer(200, 700, "W")),
            COMPUTE_MODE: Knob(now[COMPUTE_MODE], Choice(COMPUTE_MODES), blocked=blocked),
            GRAPHICS_CLOCKS: Knob(noted.get(GRAPHICS_CLOCKS), clocks(345, 1980, defaults={"minimum": 345})),
            ECC: Knob(now[ECC], Boolean(), pending=self.pending[uuid]),
        }

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        self._called("set", uuid, *values)
        for name, value in values.items():
            meant = recorded_values(self.system, RECORD, uuid).get(name) if value is None else value
            if name == ECC:
                self.pending[uuid] = True if meant is None else meant
            else:
                self.knobs_now[uuid][name] = BY_DEFAULT[name] if meant is None else meant

    def reset(self, uuids: Sequence[str]) -> None:
        self._called("reset", *uuids)
        for uuid in uuids:
            kept = recorded_values(self.system, RECORD, uuid)
            self.knobs_now[uuid].update({**BY_DEFAULT, **kept, ECC: self.pending[uuid]})

    def _called(self, *what: str) -> None:
        if self.left == 0:
            raise self.error
        if self.left is not None:
            self.left -= 1
        self.calls.append(what)


class Scene:
    """A node with two devices, and a directory for the record."""

    def __init__(self, root: Path, *devices: Device) -> None:
        self.system = System(str(root))
        self.system.path(BOOT).parent.mkdir(parents=True, exist_ok=True)
        self.system.path(BOOT).write_text("this\n")
        self.silicon = Silicon(self.system, devices or [board_model.device("h100-80", index) for index in range(2)])
        self.backend: Backend = cast("Any", self.silicon)

    def decide(
        self, *rules: dict[str, Any], reset: str | None = None, restore: bool = True, absent: bool = False
    ) -> Decision:
        store = str(self.system.path("/state/state.db"))
        request = Asked(parse_settings(list(rules)), store, RECORD, reset, restore, absent)
        return decide(self.backend, self.system, request)

    def run(self, *rules: dict[str, Any], **more: Any) -> Decision:
        decision = self.decide(*rules, **more)
        assert decision.errors == ()
        if decision.plan.concerned:
            execute(self.backend, self.system, RECORD, decision.record, decision.plan)
        else:
            update_record(self.system, RECORD, decision)
        return decision

    def now(self, index: int = 0) -> dict[str, Any]:
        """Return the settings of a device that differ from its defaults."""
        uuid = tuple(self.silicon.devices)[index]
        return {name: value for name, value in self.silicon.knobs_now[uuid].items() if value != BY_DEFAULT[name]}

    def noted(self) -> bool:
        return self.system.exists(RECORD)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


CLOCKS = {"minimum": 345, "maximum": 1410}
FIRST = {"match": {"index": 0}, "power_limit": 300, "graphics_clocks": {"maximum": 1410}}


def test_run_again_changes_nothing_with_unreadable_settings(scene: Scene) -> None:
    scene.run(FIRST)
    assert scene.now() == {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS} and scene.now(1) == {}
    before = list(scene.silicon.calls)
    assert not scene.run(FIRST).plan.concerned
    assert scene.silicon.calls == before


def test_run_removed_rules_restore_values_and_delete_record(scene: Scene) -> None:
    scene.run(FIRST)
    scene.run({"match": {}, "power_limit": 300})
    assert (scene.now(), scene.now(1)) == ({POWER_LIMIT: 300}, {POWER_LIMIT: 300})
    scene.run({"match": {"index": 1}}, absent=True)
    assert (scene.now(), scene.now(1)) == ({POWER_LIMIT: 300}, {})
    scene.run({"match": {}}, absent=True)
    assert scene.now() == {} and not scene.noted() and not scene.system.exists("/var/lib/dra-accelerators")


def test_run_without_restore_affects_only_its_settings(scene: Scene) -> None:
    scene.run(FIRST)
    assert scene.run({"match": {"index": 1}, "power_limit": 400}, restore=False).plan.concerned
    assert not scene.run({"match": {"index": 0}, "power_limit": 300}, restore=False).plan.concerned
    assert scene.now() == {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS}


def test_run_after_reboot_applies_volatile_settings_again(scene: Scene) -> None:
    scene.run({**FIRST, "ecc": False}, reset="when_needed")
    scene.system.path(BOOT).write_text("the next\n")
    uuid = next(iter(scene.silicon.devices))
    scene.silicon.knobs_now[uuid] = {**BY_DEFAULT, POWER_LIMIT: 650.0, ECC: False}
    decision = scene.decide({**FIRST, "ecc": False})
    assert [change.name for each in decision.plan.devices for change in each.changes] == [POWER_LIMIT, GRAPHICS_CLOCKS]
    scene.run({**FIRST, "ecc": False})
    scene.run({"match": {}}, absent=True, reset="never")
    # The power limit that an administrator set before the first run of this boot, and the original ECC mode.
    assert scene.now() == {POWER_LIMIT: 650.0, ECC: False} and scene.silicon.pending[uuid] is True
    assert not scene.noted()


def test_run_reset_precedes_settings_that_it_clears(scene: Scene) -> None:
    scene.run({**FIRST, "ecc": False}, reset="when_needed")
    uuid = next(iter(scene.silicon.devices))
    assert scene.silicon.calls == [
        ("set", uuid, ECC),
        ("reset", uuid),
        ("set", uuid, POWER_LIMIT, GRAPHICS_CLOCKS),
    ]
    assert scene.now() == {POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS, ECC: False}


def test_run_reset_needs_consent_and_leaves_no_pending_change(scene: Scene) -> None:
    (error,) = scene.decide({"match": {}, "ecc": False}).errors
    assert isinstance(error, Unsupported) and error.code == "reset-needs-consent"
    decision = scene.run({"match": {}, "ecc": False}, reset="never")
    assert decision.plan.waiting == tuple(scene.silicon.devices) and decision.plan.resets == ()
    assert set(scene.silicon.pending.values()) == {False} and scene.now() == {}
    # The change is already pending: only a reset is left.
    decision = scene.run({"match": {"index": 0}, "ecc": False}, reset="when_needed", restore=False)
    assert [step["step"] for step in decision.plan.steps()] == ["reset"]
    assert (scene.now(), scene.now(1)) == ({ECC: False}, {})


def seen_device(**changes: Any) -> Seen:
    seen = Seen(
        board_model.device("h100-80"),
        {
            POWER_LIMIT: Knob(700.0, Integer(200, 700, "W")),
            COMPUTE_MODE: Knob("Default", Choice(COMPUTE_MODES)),
            ECC: Knob(True, Boolean(), pending=True),
        },
    )
    return replace(seen, **changes)


def refusal(seen: Seen, *others: Seen, noted: RecordedValues | None = None, **wanted: Any) -> AcceleratorError:
    record = SettingsRecord("this", {seen.device.uuid: noted} if noted else {})
    rules = parse_settings([{"match": {"index": 0}, **wanted}])
    plan, errors = plan_settings([seen, *others], rules, record, restore=True, reset="when_needed")
    (error,) = errors
    assert plan.concerned == frozenset()
    return error


BUSY = replace(board_model.device("h100-80"), processes=(Process(4711, "train"),))


@pytest.mark.parametrize(
    ("seen", "wanted", "words"),
    [
        (seen_device(claims=("a/one",)), {"compute_mode": "Prohibited"}, "used by claim a/one"),
        (seen_device(device=BUSY), {"compute_mode": "ExclusiveProcess"}, "used by process 4711 (train)"),
        (seen_device(device=BUSY), {"ecc": False}, "would end what uses it: process 4711 (train)"),
        (seen_device(claims=("a/one",)), {"ecc": False}, "would end what uses it: claim a/one"),
        (
            seen_device(claimed_knobs={POWER_LIMIT: ClaimedKnob(700.0, ("a/one", "a/two"))}),
            {"power_limit": 500},
            "claims a/one, a/two have set it for the time of the claim",
        ),
        (
            seen_device(device=board_model.device("h100-80", places=((19, 0),))),
            {"ecc": False},
            "partitions along: 1g.10gb",
        ),
    ],
)
def test_plan_settings_process_or_claim_in_use_is_named(seen: Seen, wanted: dict[str, Any], words: str) -> None:
    error = refusal(seen, **wanted)
    assert isinstance(error, InUse) and words in str(error)


def test_plan_settings_linked_device_in_use_blocks_reset() -> None:
    linked = (board_model.device("h100-80", 1).pci_address,)
    first = seen_device(device=replace(board_model.device("h100-80"), linked=linked))
    busy = seen_device(device=replace(board_model.device("h100-80", 1), processes=(Process(4711),)))
    assert cast("InUse", refusal(first, busy, ecc=False)).pids == (4711,)


def test_plan_settings_blocked_reset_is_rejected() -> None:
    blocked = seen_device(
        device=replace(board_model.device("h100-80"), reset_blocked="nothing connects it. Connect it")
    )
    error = refusal(blocked, ecc=False)
    assert error.code == "reset-blocked" and blocked.device.uuid in str(error) and "Connect it" in str(error)


def test_plan_settings_value_before_claim_counts() -> None:
    rules = parse_settings([{"match": {}, "power_limit": 500}])
    for before, noted in ((500.0, RecordedValues()), (None, RecordedValues({POWER_LIMIT: 500}, {POWER_LIMIT: 700.0}))):
        seen = seen_device(claimed_knobs={POWER_LIMIT: ClaimedKnob(before, ("a/one",))})
        record = SettingsRecord("this", {seen.device.uuid: noted})
        plan, errors = plan_settings([seen], rules, record, restore=True, reset=None)
        assert (plan.concerned, errors) == (frozenset(), ())


def test_plan_settings_harmless_setting_during_prepare_is_applied() -> None:
    seen = seen_device(claims=("a/one",), device=BUSY)
    rules = parse_settings([{"match": {}, "power_limit": 500, "compute_mode": "Default"}])
    plan, errors = plan_settings([seen], rules, SettingsRecord("this"), restore=True, reset=None)
    assert not errors and [change.name for change in plan.devices[0].changes] == [POWER_LIMIT]


def test_plan_settings_absent_device_is_skipped() -> None:
    seen = seen_device(away=True)
    rules = parse_settings([{"match": {}, "power_limit": 5}])
    plan, errors = plan_settings([seen], rules, SettingsRecord("this"), restore=True, reset=None)
    assert (plan, errors) == (SettingsPlan(), ())


def test_run_blocked_setting_is_withheld_without_change(tmp_path: Path) -> None:
    scene = Scene(tmp_path, board_model.device("h100-80", enabled=True))
    decision = scene.run({"match": {}, "compute_mode": "ExclusiveProcess", "power_limit": 300})
    assert decision.plan.devices[0].withheld == {COMPUTE_MODE: "it is partitioned"}
    assert scene.now() == {POWER_LIMIT: 300}


@pytest.mark.parametrize("error", [AcceleratorError("the board said no", code="no"), OSError("the board said no")])
def test_execute_failure_restores_other_settings(scene: Scene, error: Any) -> None:
    scene.run(FIRST)
    kept = scene.system.read_text(RECORD)
    scene.silicon.left, scene.silicon.error = 1, error
    decision = scene.decide({"match": {}, "power_limit": 500})
    scene.silicon.calls.clear()
    with pytest.raises(SettingsFailed, match="the board said no"):
        execute(cast("Any", Failing(scene.silicon)), scene.system, RECORD, decision.record, decision.plan)
    assert (scene.now(), scene.now(1)) == ({POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS}, {})
    assert scene.system.read_text(RECORD) == kept


def test_execute_failure_restores_values_without_writable_record(scene: Scene) -> None:
    scene.run(FIRST)
    scene.silicon.left, scene.silicon.error = 1, AcceleratorError("the board said no", code="no")
    decision = scene.decide({"match": {}, "power_limit": 500})
    directory = scene.system.path(RECORD).parent

    class Blocking(Failing):
        """Silicon whose failing call also removes the record's directory."""

        def failed(self) -> None:
            directory.rename(directory.with_name("moved"))
            directory.write_text("no directory")

    with pytest.raises(SettingsFailed, match="the board said no") as caught:
        execute(cast("Any", Blocking(scene.silicon)), scene.system, RECORD, decision.record, decision.plan)
    assert (scene.now(), scene.now(1)) == ({POWER_LIMIT: 300, GRAPHICS_CLOCKS: CLOCKS}, {})
    assert any(RECORD in each for each in caught.value.not_undone), caught.value.not_undone
    directory.unlink()
    directory.with_name("moved").rename(directory)
    scene.run()
    assert (scene.now(), scene.now(1)) == ({}, {}), "the next run restores the values of before the first run"


def test_execute_failure_keeps_record_of_unrestored_device(scene: Scene) -> None:
    scene.silicon.left, scene.silicon.error = 1, AcceleratorError("the board said no", code="no")
    decision = scene.decide({"match": {}, "power_limit": 500})
    with pytest.raises(SettingsFailed) as caught:
        execute(scene.backend, scene.system, RECORD, decision.record, decision.plan)
    assert caught.value.not_undone and scene.now() == {POWER_LIMIT: 500}
    scene.silicon.left = None
    scene.run()
    assert (scene.now(), scene.now(1), scene.noted()) == ({}, {}, False)


def linked_scene(root: Path) -> tuple[Scene, list[str]]:
    """Return a node with two GPUs that are reset together, and their UUIDs. An administrator has set a power limit on each manually."""
    both = [board_model.device("h100-80", index) for index in range(2)]
    scene = Scene(root, *(replace(each, linked=(other.pci_address,)) for each, other in zip(both, reversed(both))))
    for each in both:
        scene.silicon.knobs_now[each.uuid][POWER_LIMIT] = 600.0
    return scene, [each.uuid for each in both]


WITH_RESET = {"match": {"index": 0}, "ecc": False, "compute_mode": "Prohibited"}


# 0 calls succeed: ECC fails. 1: the reset fails. 2: the settings of the first GPU fail. 3: those of the linked GPU.
@pytest.mark.parametrize("calls", range(4))
def test_execute_failure_restores_values_cleared_by_reset(tmp_path: Path, calls: int) -> None:
    """A failed change restores the power limits of both GPUs, although no rule names them or matches the linked GPU."""
    scene, _uuids = linked_scene(tmp_path)
    decision = scene.decide(WITH_RESET, reset="when_needed")
    scene.silicon.left, scene.silicon.error = calls, AcceleratorError("the board said no", code="no")
    with pytest.raises(SettingsFailed, match="the board said no"):
        execute(cast("Any", Failing(scene.silicon)), scene.system, RECORD, decision.record, decision.plan)
    for uuid, now in scene.silicon.knobs_now.items():
        assert (now[POWER_LIMIT], now[COMPUTE_MODE], scene.silicon.pending[uuid]) == (600.0, "Default", True), uuid
    assert not scene.noted()


def test_execute_failed_reset_restores_cleared_values(tmp_path: Path) -> None:
    scene, _uuids = linked_scene(tmp_path)
    decision = scene.decide(WITH_RESET, reset="when_needed")

    class ResetFails(Failing):
        """Silicon that reports an error after the reset of the GPUs."""

        def reset(self, uuids: Sequence[str]) -> None:
            self.silicon.reset(uuids)
            raise AcceleratorError("the board said no", code="no")

    with pytest.raises(SettingsFailed, match=r"ecc of .* only after another reset"):
        execute(cast("Any", ResetFails(scene.silicon)), scene.system, RECORD, decision.record, decision.plan)
    assert [now[POWER_LIMIT] for now in scene.silicon.knobs_now.values()] == [600.0, 600.0]
    assert set(scene.silicon.pending.values()) == {True} and not scene.noted()


@pytest.mark.parametrize("raises", [False, True])
def test_execute_record_of_cleared_values_stays_until_restored(tmp_path: Path, raises: bool) -> None:
    """The linked GPU rejects its previous power limit, or accepts it without an effect. The next run restores it."""
    scene, uuids = linked_scene(tmp_path)
    decision = scene.decide(WITH_RESET, reset="when_needed")

    class Stubborn(Failing):
        """Silicon that rejects changes of the second GPU."""

        def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
            if uuid != uuids[1]:
                super().set_knobs(uuid, values)
            elif raises:
                raise AcceleratorError("the board said no", code="no")

    scene.silicon.left, scene.silicon.error = 2, AcceleratorError("the board said no", code="no")
    with pytest.raises(SettingsFailed) as caught:
        execute(cast("Any", Stubborn(scene.silicon)), scene.system, RECORD, decision.record, decision.plan)
    assert any(f"power_limit of {uuids[1]}" in each for each in caught.value.not_undone), caught.value.not_undone
    record = read_record(scene.system, RECORD, "this")
    assert set(record.devices) == {uuids[1]} and record.of(uuids[1]).before[POWER_LIMIT] == 600.0
    scene.run()
    assert scene.silicon.knobs_now[uuids[1]][POWER_LIMIT] == 600.0 and not scene.noted()


class Failing:
    """Silicon with one call that fails once."""

    def __init__(self, silicon: Silicon) -> None:
        self.silicon = silicon

    def __getattr__(self, name: str) -> Any:
        return getattr(self.silicon, name)

    def reset(self, uuids: Sequence[str]) -> None:
        self._once(lambda: self.silicon.reset(uuids))

    def set_knobs(self, uuid: str, values: Mapping[str, Any]) -> None:
        self._once(lambda: self.silicon.set_knobs(uuid, values))

    def _once(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (AcceleratorError, OSError):
            self.silicon.left = None
            self.failed()
            raise

    def failed(self) -> None:
        """Run an action at the failing call."""


RULES = st.lists(
    st.fixed_dictionaries(
        {"match": st.sampled_from([{}, {"index": 0}, {"index": 1}])},
        optional={
            "power_limit": st.sampled_from([300, 500, 700]),
            "compute_mode": st.sampled_from(COMPUTE_MODES),
            "graphics_clocks": st.sampled_from([{"maximum": 1410}, {"minimum": 900, "maximum": 900}]),
            "ecc": st.booleans(),
        },
    ),
    min_size=1,
    max_size=3,
)


@given(runs=st.lists(st.tuples(RULES, st.none() | st.integers(0, 4)), max_size=5), data=st.data())
def test_run_any_history_with_kills_restores_original_values(
    runs: list[tuple[list[dict[str, Any]], int | None]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scene = Scene(tmp_path_factory.mktemp("scene"))
    for uuid in scene.silicon.devices:
        scene.silicon.knobs_now[uuid][POWER_LIMIT] = data.draw(st.sampled_from([600.0, 700.0]))
    began = copy.deepcopy(scene.silicon.knobs_now)
    for rules, killed_at in runs:
        scene.silicon.left = killed_at
        try:
            scene.run(*rules, reset="when_needed")
        except Killed:
            scene.silicon.left = None
            scene.run(*rules, reset="when_needed")
        scene.silicon.left = None
        assert not scene.run(*rules, reset="when_needed").plan.concerned
    scene.run({"match": {}}, reset="when_needed", absent=True)
    assert scene.silicon.knobs_now == began
    assert not scene.noted()


def test_read_record_round_trips_and_rejects_invalid(scene: Scene) -> None:
    record = SettingsRecord("this", {"one": RecordedValues({POWER_LIMIT: 300}, {POWER_LIMIT: 700.0})})
    write_record(scene.system, RECORD, record)
    assert read_record(scene.system, RECORD, "this") == record == parse_record(record.to_text(), RECORD)
    assert read_record(scene.system, RECORD, "another") == SettingsRecord("another")
    assert (
        recorded_values(scene.system, RECORD, "one") == {POWER_LIMIT: 300}
        and recorded_values(scene.system, RECORD, "two") == {}
    )
    for text in ("", "[]", '{"version": 2}', '{"version": 1, "boot_id": "this", "devices": {"one": {}}}'):
        scene.system.write_atomic(RECORD, text.encode())
        with pytest.raises(AcceleratorError, match="cannot be read") as caught:
            read_record(scene.system, RECORD, "this")
        assert caught.value.code == "damaged-record"
        # Claims continue without it.
        assert recorded_values(scene.system, RECORD, "one") == {}


def test_noted_values_unreadable_record_is_unknown(scene: Scene) -> None:
    assert recorded_values(scene.system, RECORD, "one") == {}  # no record
    scene.system.path(RECORD).mkdir(parents=True)  # reading it is an OSError
    with pytest.raises(AcceleratorError, match="cannot be read for device one") as caught:
        recorded_values(scene.system, RECORD, "one")
    assert caught.value.code == "unreadable-record"


def test_parse_settings_reports_all_errors_and_layout_keys() -> None:
    with pytest.raises(InvalidSettings) as caught:
        parse_settings([{"match": {}}, {"match": {}, "power_limit": 0, "ecc": "on"}])
    assert "Settings rule 2: power_limit is 0; expected" in str(caught.value) and "ecc is 'on'" in str(caught.value)
    with pytest.raises(InvalidSettings, match="Partitions, and the mode that they need, are a layout's"):
        parse_settings([{"match": {}, "partitions": {}}])
    with pytest.raises(InvalidSettings, match="list of rules"):
        parse_settings({})
