# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the settings of a GPU: read with their range, set, and restored."""

from __future__ import annotations

import ctypes
import json
import subprocess
from typing import Any

from dra_driver.core.errors import AcceleratorError, DeviceFaulty, Unsupported
from dra_driver.core.host.system import System
from dra_driver.core.partitioning.rules import Match, Rule
from dra_driver.core.schema import Boolean, Choice, Integer, Record, UniqueStrings
from dra_driver.core.settings.settings_record import RecordedValues, SettingsRecord, record_path, write_record
from dra_driver.core.vendors.nvidia.backend import NvidiaBackend

from tests.simulator.backend.scenarios_of_fabric import fabric_manager
from tests.simulator.backend.stage import Stage, assert_refused, on

ALL = ("powerLimit", "graphicsClocks", "memoryClocks", "computeMode", "timeSlice")
PROFILES = ("max-p", "max-q", "compute", "memory-bound", "balanced", "llm-inference", "llm-training", "hpc")


def now(uuid: str) -> dict[str, Any]:
    """Return the settings that NVML and nvidia-smi report for the GPU."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    shown = subprocess.run(
        ["nvidia-smi", "compute-policy", "-l", "-i", uuid], check=True, capture_output=True, text=True
    ).stdout
    return {
        "powerLimit": pynvml.nvmlDeviceGetPowerManagementLimit(handle),
        "computeMode": pynvml.nvmlDeviceGetComputeMode(handle),
        "clock": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_GRAPHICS),
        "timeSlice": shown.split()[-1],
    }


def memory_lock(stage: Stage) -> tuple[int, int]:
    """Return the locked memory clocks of the first GPU from the simulator, because NVML cannot query them."""
    gpu = json.loads(stage.control("show", "--json"))["gpus"][0]
    return gpu["locked_memory_clock_minimum_mhz"], gpu["locked_memory_clock_maximum_mhz"]


@on("8xA100-40")
def settings_are_read_set_and_restored(stage: Stage) -> None:
    gpu, other = stage.gpus()[:2]
    before, untouched = now(gpu.uuid), now(other.uuid)
    knobs = stage.backend.knobs(gpu.uuid, ALL)
    assert tuple(knobs) == ALL
    assert (knobs["powerLimit"].value, knobs["powerLimit"].allowed) == (400.0, Integer(100, 400, "W"))
    assert isinstance(knobs["computeMode"].allowed, Choice) and knobs["computeMode"].value == "Default"
    assert isinstance(knobs["graphicsClocks"].allowed, Record)
    assert knobs["graphicsClocks"].allowed.fields["maximum"] == Integer(210, 1410, "MHz")
    assert (knobs["graphicsClocks"].value, knobs["timeSlice"].value) == (None, None)
    stage.backend.set_knobs(
        gpu.uuid,
        {
            "timeSlice": "Long",
            "powerLimit": 250.5,
            "computeMode": "ExclusiveProcess",
            "graphicsClocks": {"minimum": 900, "maximum": 1200},
            "memoryClocks": {"minimum": 1215, "maximum": 1215},
        },
    )
    assert now(gpu.uuid) == {"powerLimit": 250_500, "computeMode": 3, "clock": 900, "timeSlice": "Long"}
    assert memory_lock(stage) == (1215, 1215)
    assert stage.backend.knobs(gpu.uuid, ["powerLimit"])["powerLimit"].value == 250.5
    assert now(other.uuid) == untouched
    stage.backend.set_knobs(gpu.uuid, dict.fromkeys(ALL))
    assert (now(gpu.uuid), memory_lock(stage)) == (before, (0, 0))


def requested(uuid: str, *options: str) -> list[str]:
    """Return the requested workload profiles of a GPU as nvidia-smi prints them."""
    words = ["nvidia-smi", "power-profiles", *(options or ("-gr",)), "-i", uuid]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()


@on("8xB200")
def workload_profiles_are_requested_and_previous_ones_restored(stage: Stage) -> None:
    gpu, other = stage.gpus()[:2]
    knob = stage.backend.knobs(gpu.uuid, ["workloadProfiles"])["workloadProfiles"]
    assert (knob.value, knob.allowed) == ([], UniqueStrings(Choice(PROFILES), most=len(PROFILES)))
    stage.backend.set_knobs(gpu.uuid, {"workloadProfiles": ["max-p", "compute"]})
    stage.backend.set_knobs(gpu.uuid, {"workloadProfiles": ["llm-training", "max-q"]})
    assert requested(gpu.uuid) == ["1. Max-Q", "7. LLM Training"] == requested(gpu.uuid, "-ge")
    assert requested(other.uuid) == ["No profiles are currently requested."]
    assert stage.backend.knobs(gpu.uuid, ["workloadProfiles"])["workloadProfiles"].value == ["llm-training", "max-q"]
    stage.backend.set_knobs(gpu.uuid, {"workloadProfiles": None})
    assert requested(gpu.uuid) == ["No profiles are currently requested."]


@on("8xH100")
def a_board_without_workload_profiles(stage: Stage) -> None:
    gpu = stage.first_gpu()
    assert stage.backend.knobs(gpu.uuid, ["workloadProfiles", "powerLimit"]).keys() == {"powerLimit"}
    assert_refused(Unsupported, stage.backend.set_knobs, gpu.uuid, {"workloadProfiles": ["max-q"]})


@on("8xH100")
def settings_outside_the_board_range_are_rejected(stage: Stage) -> None:
    gpu = stage.first_gpu()
    before = now(gpu.uuid)
    assert_refused(AcceleratorError, stage.backend.set_knobs, gpu.uuid, {"powerLimit": 900})
    assert_refused(
        AcceleratorError, stage.backend.set_knobs, gpu.uuid, {"graphicsClocks": {"minimum": 345, "maximum": 9000}}
    )
    assert now(gpu.uuid) == before


@on("8xH100")
def settings_of_a_gpu_that_is_lost(stage: Stage) -> None:
    gpu = stage.first_gpu()
    stage.control("fault", "0", "lost")
    error = assert_refused(DeviceFaulty, stage.backend.set_knobs, gpu.uuid, {"powerLimit": 300})
    assert error.code == "gpu-lost"
    assert_refused(DeviceFaulty, stage.backend.knobs, gpu.uuid, ["powerLimit"])


@on("1xT4")
def memory_clocks_are_not_locked_before_ampere(stage: Stage) -> None:
    no_memory_lock(stage)


@on("8xH100")
def memory_clocks_are_not_locked_on_hopper(stage: Stage) -> None:
    no_memory_lock(stage)


def no_memory_lock(stage: Stage) -> None:
    gpu = stage.first_gpu()
    assert stage.backend.knobs(gpu.uuid, ["powerLimit", "memoryClocks", "fan"]).keys() == {"powerLimit"}
    assert_refused(Unsupported, stage.backend.set_knobs, gpu.uuid, {"memoryClocks": {"minimum": 405, "maximum": 1593}})
    stage.backend.set_knobs(gpu.uuid, {"memoryClocks": None})  # the rollback of a claim whose setting was rejected


@on("mixed")
def acceptance_program_passes_on_simulated_gpus(stage: Stage) -> None:
    from tests.silicon import acceptance

    answers = {question.name: (question.expected, said) for question, said in acceptance.answers(stage.backend, True)}
    said = answers.pop("nvidia: GPU of the persistence daemon, after persistence mode is off")[1]
    assert said.startswith(acceptance.NOT_ASKED), "no daemon runs"
    said = answers.pop("nvidia: multiprocessors of MPS servers with percentages")[1]
    assert said.startswith(acceptance.NOT_ASKED), "no daemon is installed"
    said = answers.pop("nvidia: changes of a GPU that the persistence daemon has open")[1]
    assert said.startswith(acceptance.NOT_ASKED), "no daemon runs"
    assert answers and all(expected == said for expected, said in answers.values()), answers


def noted(stage: Stage, uuid: str = "", **values: Any) -> None:
    """Write a record that the node has set these values on a GPU (the first by default) in this boot."""
    boot = stage.root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True, exist_ok=True)
    if not boot.exists():
        boot.write_text("this boot\n")
    note = RecordedValues(values, dict.fromkeys(values))
    record = SettingsRecord(System(str(stage.root)).boot_id(), {uuid or stage.first_gpu().uuid: note})
    write_record(System(str(stage.root)), record_path("nvidia"), record)


@on("8xH100")
def claim_starts_from_node_settings_and_restores_them(stage: Stage) -> None:
    """NVML reports neither locked clocks nor the time slice. The node's record has them, so they are restored after a
    claim.
    """
    gpu = stage.first_gpu()
    node = {"graphicsClocks": {"minimum": 345, "maximum": 1410}, "timeSlice": "Long", "powerLimit": 500}
    stage.backend.set_knobs(gpu.uuid, node)
    noted(stage, **node)
    knobs = stage.backend.knobs(gpu.uuid, ALL)
    assert {name: knobs[name].value for name in node} == node
    claim = {"graphicsClocks": {"minimum": 900, "maximum": 900}, "timeSlice": "Short", "powerLimit": 300}
    stage.backend.set_knobs(gpu.uuid, claim)
    stage.backend.set_knobs(gpu.uuid, {name: knobs[name].value for name in claim})
    assert now(gpu.uuid)["timeSlice"] == "Long" and graphics_lock(stage) == (345, 1410)
    # A driver without its store does not know the previous values. Then the node's record is the default.
    stage.backend.set_knobs(gpu.uuid, claim)
    stage.backend.set_knobs(gpu.uuid, dict.fromkeys(claim))
    assert (now(gpu.uuid)["powerLimit"], now(gpu.uuid)["timeSlice"]) == (500_000, "Long")
    assert graphics_lock(stage) == (345, 1410)


def graphics_lock(stage: Stage) -> tuple[int, int]:
    gpu = json.loads(stage.control("show", "--json"))["gpus"][0]
    return gpu["locked_clock_minimum_mhz"], gpu["locked_clock_maximum_mhz"]


@on("8xA100-40")
def node_settings_survive_a_reset_and_a_mode_change(stage: Stage) -> None:
    with fabric_manager(stage, 0):
        verify_node_settings_after_a_reset(stage)


def verify_node_settings_after_a_reset(stage: Stage) -> None:
    gpu = stage.first_gpu()
    node = {"graphicsClocks": {"minimum": 210, "maximum": 1095}, "computeMode": "ExclusiveProcess", "powerLimit": 300}
    stage.backend.set_knobs(gpu.uuid, node)
    noted(stage, **node)
    stage.lay_out(Rule(Match(), "static"))  # needs a reset on these boards
    assert stage.backend.device(gpu.uuid).partitioning.enabled
    assert (graphics_lock(stage), now(gpu.uuid)["powerLimit"]) == ((210, 1095), 300_000)
    blocked = stage.backend.knobs(gpu.uuid, ALL)
    assert {name: knob.blocked for name, knob in blocked.items() if knob.blocked} == {
        "computeMode": "MIG is on",
        "timeSlice": "MIG is on",
    }
    stage.lay_out(Rule(Match(), "whole"))
    assert (graphics_lock(stage), now(gpu.uuid)["computeMode"]) == ((210, 1095), 3)


@on("8xA100-40")
def setting_that_cannot_be_restored_blocks_no_other_setting(stage: Stage) -> None:
    with fabric_manager(stage, 0):
        other_settings_are_restored(stage)


def other_settings_are_restored(stage: Stage) -> None:
    """A change of the MIG mode or a reset succeeds although one setting cannot be restored. The other settings are
    restored.
    """
    gpu = stage.first_gpu()
    node = {"powerLimit": 300, "graphicsClocks": {"minimum": 210, "maximum": 1095}}
    stage.backend.set_knobs(gpu.uuid, node)
    noted(stage, **node)
    stage.control("fault", "0", "call", "nvmlDeviceSetPowerManagementLimit", "fail", "4")
    stage.lay_out(Rule(Match(), "static"))  # needs a reset on these boards
    assert stage.backend.device(gpu.uuid).partitioning.enabled
    assert graphics_lock(stage) == (210, 1095), "a reset also clears locked clocks, which are set after the power limit"
    stage.control("fault", "0", "call", "nvmlDeviceSetGpuLockedClocks", "fail", "4")
    stage.backend.reset([gpu.uuid])
    assert graphics_lock(stage) == (0, 0)


def silicon(uuid: str) -> dict[str, Any]:
    """Return the settings of a GPU from the simulator, because NVML would be a client of the GPU."""
    reply = ctypes.create_string_buffer(1 << 20)
    assert ctypes.CDLL("libnvidia-ml.so.1").acceleratorSimulatorControl(b"show", reply, len(reply)) == 0
    (gpu,) = [each for each in json.loads(reply.value)["gpus"] if each["uuid"] == uuid]
    return {
        "powerLimit": gpu["power_limit_mw"] // 1000,
        "computeMode": gpu["compute_mode"],
        "clocks": gpu["locked_clock_maximum_mhz"],
        "timeSlice": gpu["time_slice"],
    }


CLAIM = {
    "powerLimit": 300,
    "computeMode": "ExclusiveProcess",
    "graphicsClocks": {"minimum": 900, "maximum": 900},
    "timeSlice": "Long",
}
OF_CLAIM = {"powerLimit": 300, "computeMode": 3, "clocks": 900, "timeSlice": 3}
NODE = {"powerLimit": 500, "graphicsClocks": {"minimum": 345, "maximum": 1410}}
OF_NODE = {"powerLimit": 500, "computeMode": 0, "clocks": 1410, "timeSlice": 0}
INITIAL = {"powerLimit": 700, "computeMode": 0, "clocks": 0, "timeSlice": 0}


def without_persistence(stage: Stage) -> tuple[str, str, str]:
    """Return a GPU with settings of a claim, one with settings of the node, and one with initial settings, without
    persistence mode.
    """
    gpus = stage.gpus()
    claimed, noted_on, initial = gpus[1].uuid, gpus[0].uuid, gpus[2].uuid
    for gpu in gpus[:3]:
        stage.backend.set_knobs(gpu.uuid, {"persistence": False})
    stage.backend.set_knobs(claimed, CLAIM)
    stage.backend.set_knobs(noted_on, NODE)
    noted(stage, **NODE)
    return claimed, noted_on, initial


@on("8xH100")
def settings_of_all_gpus_survive_a_close_of_nvml(stage: Stage) -> None:
    """Without persistence mode a GPU loses its settings with its last client, which is this process."""
    claimed, noted_on, initial = without_persistence(stage)
    stage.backend.close()
    assert [silicon(uuid) for uuid in (claimed, noted_on)] == [INITIAL, INITIAL]
    stage.backend.open()
    assert [silicon(uuid) for uuid in (claimed, noted_on, initial)] == [OF_CLAIM, OF_NODE, INITIAL]
    stage.backend.reopen()
    assert [silicon(uuid) for uuid in (claimed, noted_on, initial)] == [OF_CLAIM, OF_NODE, INITIAL]
    stage.backend.reset([initial])
    assert [silicon(uuid) for uuid in (claimed, noted_on, initial)] == [OF_CLAIM, OF_NODE, INITIAL]
    stage.backend.set_knobs(claimed, dict.fromkeys(CLAIM))
    stage.backend.reopen()
    assert [silicon(uuid) for uuid in (claimed, noted_on)] == [INITIAL, OF_NODE]


@on("8xH100")
def settings_changed_by_another_program_are_kept(stage: Stage) -> None:
    """The role sets other values while the driver has released NVML. A manually set value differs from the initial one
    and stays.
    """
    claimed, noted_on, _initial = without_persistence(stage)
    stage.backend.close()
    noted(stage, noted_on, powerLimit=400)
    subprocess.run(["nvidia-smi", "-i", claimed, "-pm", "1"], check=True)
    subprocess.run(["nvidia-smi", "-i", claimed, "-pl", "650"], check=True)
    stage.backend.open()
    assert silicon(noted_on) == {**INITIAL, "powerLimit": 400}
    assert silicon(claimed) == {**OF_CLAIM, "powerLimit": 650}


@on("8xH100")
def driver_restores_settings_lost_before_its_start(stage: Stage) -> None:
    _claimed, noted_on, _initial = without_persistence(stage)
    stage.backend.close()
    module = NvidiaBackend(System(str(stage.root)))
    module.open()
    module.discover()
    module.close()
    assert silicon(noted_on) == INITIAL, "a program that only reads sets nothing"
    driver = NvidiaBackend(System(str(stage.root)))
    driver.use_number_file("/driver", writes=True)
    driver.open()
    assert silicon(noted_on) == OF_NODE
    driver.close()


@on("8xH100")
def ecc_is_read_set_and_in_force_after_a_reset(stage: Stage) -> None:
    gpu = stage.first_gpu()
    knob = stage.backend.knobs(gpu.uuid, ["ecc"])["ecc"]
    assert (knob.value, knob.pending, knob.allowed) == (True, True, Boolean())
    stage.backend.set_knobs(gpu.uuid, {"ecc": False})
    knob = stage.backend.knobs(gpu.uuid, ["ecc"])["ecc"]
    assert (knob.value, knob.pending) == (True, False)
    stage.backend.reset([gpu.uuid])
    knob = stage.backend.knobs(gpu.uuid, ["ecc"])["ecc"]
    assert (knob.value, knob.pending) == (False, False)
    stage.backend.set_knobs(gpu.uuid, {"ecc": None})
    assert stage.backend.knobs(gpu.uuid, ["ecc"])["ecc"].pending is True
