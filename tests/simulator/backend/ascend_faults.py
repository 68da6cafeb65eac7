# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that a fault of one chip affects only that chip, and is reported with its cause."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dra_driver.core.errors import DeviceFaulty, NotFound
from dra_driver.core.health.conditions import Severity
from dra_driver.core.model import Device, Finding, healthy_devices
from dra_driver.core.vendors.ascend.backend import AscendBackend

from tests.simulator.backend.ascend_stage import Stage, faults, on, until
from tests.simulator.backend.stage import assert_refused

SICK = 3
SOON = 3.0  # a deadline that a hanging call always exceeds
ALWAYS_READ = ("dcmi_get_device_die_v2", "dcmi_get_device_health", "dcmi_get_device_info")
READ_ONCE = (
    "dcmi_get_device_logic_id",
    "dcmi_get_device_pcie_info_v2",
    "dcmi_get_device_chip_info_v2",
    "dcmi_get_device_board_info",
)
CAUSES = {
    "-8005": "internal-error",
    "-8007": "npu-lost",
    "-8008": "npu-lost",
    "-8003": "internal-error",
    "-8006": "no-answer",
    "-8011": "no-answer",
    "-8012": "not-ready",
    "-8013": "unknown-error",
    "-8014": "unknown-error",
    "-8017": "not-ready",
    "-8002": "no-permission",
    "-8022": "unknown-error",
    "-7": "unknown-error",
}


def assert_only_one_is_faulty(findings: tuple[Finding, ...], cause: str, what: object = None) -> Finding:
    assert [finding.index for finding in findings] == list(range(8)), (what, findings)
    assert faults(findings) == {SICK: cause}, (what, faults(findings))
    return findings[SICK]


def works(backend: AscendBackend, npu: Device) -> None:
    """Assert that a chip creates a vNPU as usual."""
    profile = npu.profiles[0]
    made = backend.create_partition(npu.uuid, profile.profile_id, profile.placements[0])
    assert backend.device(npu.uuid).partitions == (made,)
    backend.destroy_partition(npu.uuid, made.instance_id)


@on("8x310P-Pro")
def faulty_chip_affects_no_other_chip(stage: Stage) -> None:
    npus = stage.npus()
    for full, functions in ((False, ALWAYS_READ), (True, READ_ONCE)):
        for function in functions:
            asked = function if stage.has(function) else function.removesuffix("_v2")
            stage.control("fault", str(SICK), "call", asked, "fail", "-8005")
            sick = assert_only_one_is_faulty(stage.backend.discover(full), "internal-error", asked)
            assert (sick.name, sick.uuid) == (npus[SICK].describe(), npus[SICK].uuid)
            assert sick.device is not None and sick.device.health.causes == ("internal-error",)
            assert sick.device.profiles == npus[SICK].profiles
            stage.control("clear", str(SICK))
            assert stage.npus() == npus
    stage.control("fault", str(SICK), "call", "dcmi_get_device_info", "fail", "-8005")
    assert_only_one_is_faulty(stage.backend.discover(), "internal-error")
    assert assert_refused(DeviceFaulty, stage.backend.device, npus[SICK].uuid).code == "internal-error"
    for npu in (*npus[:SICK], *npus[SICK + 1 :]):
        works(stage.backend, npu)


@on("8x310P-Pro")
def each_error_has_its_cause(stage: Stage) -> None:
    npus = stage.npus()
    for code, cause in CAUSES.items():
        stage.control("fault", str(SICK), "call", "dcmi_get_device_die_v2", "fail", code)
        assert_only_one_is_faulty(stage.backend.discover(), cause, code)
        sick = assert_only_one_is_faulty(stage.fresh().discover(), cause, code)
        # The PCI bus identifies the chip that could not be read.
        assert sick.device is None and npus[SICK].pci_address in sick.name
        stage.control("clear", str(SICK))


@on("8x310P-Pro")
def transient_error_code_causes_one_retry(stage: Stage) -> None:
    npus = stage.npus()
    for code in ("-8006", "-8010", "-8011", "-8012", "-8017"):
        stage.control("fault", str(SICK), "call", "dcmi_get_device_health", "fail", code, "nth", "1")
        assert stage.npus() == npus, code
        stage.control("fault", str(SICK), "call", "dcmi_create_vdevice", "fail", code, "nth", "1")
        works(stage.backend, npus[SICK])
        stage.control("clear", str(SICK))


@on("8x310P-Pro")
def process_that_ends_during_a_read_is_ignored(stage: Stage) -> None:
    npus = stage.npus()
    for code in ("-8005", "-8008", "-8009"):
        stage.control("fault", str(SICK), "call", "dcmi_get_device_resource_info", "fail", code, "nth", "1")
        assert stage.npus() == npus, code
        stage.control("fault", str(SICK), "call", "dcmi_get_device_resource_info", "fail", code, "nth", "1")
        assert stage.backend.device(npus[SICK].uuid).processes == (), code
        stage.control("clear", str(SICK))
    stage.control("fault", str(SICK), "call", "dcmi_get_device_resource_info", "fail", "-8005")
    assert_only_one_is_faulty(stage.backend.discover(), "internal-error")


@on("8x310P-Pro")
def hanging_chip_affects_no_other_chip(stage: Stage) -> None:
    backend = stage.fresh(scan=SOON, full_scan=60, change=60)
    npus = healthy_devices(backend.discover())
    stage.control("fault", str(SICK), "call", "dcmi_get_device_info", "hang")
    until(lambda: faults(backend.discover()) == {SICK: "no-answer"})
    before = threading.active_count()
    for _scan in range(3):
        assert_only_one_is_faulty(backend.discover(), "no-answer")
    assert threading.active_count() == before
    assert assert_refused(DeviceFaulty, backend.device, npus[SICK].uuid).code == "no-answer"
    for npu in (*npus[:SICK], *npus[SICK + 1 :]):
        works(backend, npu)
    stage.control("clear", str(SICK))
    until(lambda: len(healthy_devices(backend.discover())) == 8)
    works(backend, npus[SICK])


@on("8x310P-Pro")
def chip_without_a_successful_read_is_not_waited_for(stage: Stage) -> None:
    backend = stage.fresh(full_scan=3600)
    stage.control("fault", str(SICK), "call", "dcmi_get_device_die_v2", "hang")
    until(lambda: faults(backend.discover(patience=SOON)) == {SICK: "awaited"})
    findings = backend.discover(patience=0.1)
    assert findings[SICK].is_first_read_pending and findings[SICK].device is None
    for npu in healthy_devices(findings):
        works(backend, npu)
    stage.control("clear", str(SICK))
    until(lambda: len(healthy_devices(backend.discover(patience=0.1))) == 8)


@on("8x310P-Pro")
def vnpu_created_after_the_deadline_is_deleted(stage: Stage) -> None:
    backend = stage.fresh(change=SOON)
    npu = healthy_devices(backend.discover())[0]
    stage.control("fault", "0", "call", "dcmi_create_vdevice", "hang")
    profile = npu.profiles[0]
    error = assert_refused(DeviceFaulty, backend.create_partition, npu.uuid, profile.profile_id, profile.placements[0])
    assert error.code == "no-answer" and faults(backend.discover()) == {0: "no-answer"}
    stage.control("clear", "0")
    until(lambda: len(healthy_devices(backend.discover())) == 8)
    assert backend.device(npu.uuid).partitions == ()
    works(backend, npu)


@on("4x300I-Duo")
def lost_chip_is_listed_and_removed_chip_is_not(stage: Stage) -> None:
    npus = stage.npus()
    before = stage.backend.surroundings()
    stage.control("fault", str(SICK), "lost")
    sick = assert_only_one_is_faulty(stage.backend.discover(), "npu-lost")
    assert sick.device is not None and stage.backend.surroundings() == before
    assert [sign.severity for sign in sick.device.health.signs] == [Severity.FAILED]
    stage.control("clear", str(SICK))
    assert stage.npus() == npus
    stage.command("unplug", str(SICK))
    assert stage.backend.surroundings() != before
    stage.backend.reopen()
    findings = stage.backend.discover()
    assert [finding.index for finding in findings] == [each for each in range(8) if each != SICK]
    assert not faults(findings)
    # The others have their topology, except its neighbor, which has no ring.
    assert [finding.device.attributes.get("hccsRing") for finding in findings if finding.index == SICK - 1] == [None]  # type: ignore[union-attr]
    assert_refused(NotFound, stage.backend.device, npus[SICK].uuid)
    stage.command("plug", str(SICK))
    stage.backend.reopen()
    assert stage.npus() == npus
    # After a reboot nothing is known of it: a chip on the bus without other facts is reported as faulty.
    stage.control("unplug", str(SICK))
    stage.backend.reopen()
    assert_only_one_is_faulty(stage.backend.discover(), "npu-lost")


@on("8x910B3")
def chips_report_their_health(stage: Stage) -> None:
    npus = stage.npus()
    assert not any(npu.health.signs for npu in npus)
    stage.control("fault", "2", "error", "0x80E18402", "critical")
    (sign,) = stage.npus()[2].health.signs
    assert (sign.cause, sign.value, sign.severity) == ("error-code", "80e18402", Severity.FAILED)
    stage.control("fault", "4", "health", "warning")
    (sign,) = stage.npus()[4].health.signs
    assert (sign.cause, sign.severity) == ("health", Severity.INFORMATIVE)
    # Preparing a claim does not query the health. It uses that of the last scan.
    counted = stage.call_counts()
    assert stage.backend.device(npus[2].uuid).health.causes == ("error-code",)
    assert "dcmi_get_device_health" not in counted
    stage.control("clear")
    assert not any(npu.health.signs for npu in stage.npus())


@on("8x310P-Pro")
def vnpu_missing_from_one_failed_read_is_kept(stage: Stage) -> None:
    """If the driver considered it destroyed, the vNPU would stay on the chip forever."""
    backend, npu = stage.backend, stage.npus()[0]
    profile = npu.profiles[0]
    made = [backend.create_partition(npu.uuid, profile.profile_id, place) for place in profile.placements[:2]]
    there = tuple(sorted(each.instance_id for each in made))
    whole = tuple(sorted((each.instance_id, each.key) for each in made))
    for code in ("-8008", "-8255", "-8005"):  # no such device, not supported, internal error
        for nth in range(1, 6):
            stage.control("fault", "0", "call", "dcmi_get_device_info", "fail", code, "nth", str(nth))
            for _scan in range(2):
                try:
                    now = backend.device(npu.uuid)
                except DeviceFaulty:
                    continue
                found = tuple(sorted((each.instance_id, each.key) for each in now.partitions))
                assert found == whole, (code, nth)
            stage.control("clear", "0")
    for code in ("-8008", "-8255"):
        stage.control("fault", "0", "call", "dcmi_get_device_info", "fail", code)
        assert_refused(DeviceFaulty, backend.device, npu.uuid)
        assert_refused(DeviceFaulty, backend.destroy_partition, npu.uuid, there[0])
        stage.control("clear", "0")
    for each in there:
        backend.destroy_partition(npu.uuid, each)
    assert backend.device(npu.uuid).partitions == ()


@on("8x310P-Pro")
def unexpected_exception_in_one_chip_affects_no_other_chip(stage: Stage) -> None:
    npus = stage.npus()
    source, spot = stage.backend._source, stage.backend._chips.chip(npus[SICK].uuid).spot
    for full, method in (
        (False, "uuid"),
        (False, "condition"),
        (False, "slices"),
        (False, "processes"),
        (True, "identity"),
    ):
        original = getattr(source, method)

        def call(asked: object, *arguments: object, original: Callable[..., object] = original) -> object:
            if asked == spot:
                raise ValueError("invalid literal in an answer of the library")
            return original(asked, *arguments)

        setattr(source, method, call)
        sick = assert_only_one_is_faulty(stage.backend.discover(full), "unknown-error", method)
        assert sick.fault is not None and "unexpected ValueError" in sick.fault.message, sick
        setattr(source, method, original)
        stage.npus(full)
    # The topology concerns all chips: without it they are published as before.
    stage.backend._chips.update_topology = lambda: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    assert [npu.attributes for npu in stage.npus()] == [npu.attributes for npu in npus]
