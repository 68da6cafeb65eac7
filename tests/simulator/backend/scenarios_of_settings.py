# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The knobs of a GPU: read with the range that the board has, set, and set back."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from dra_driver.core.documents import Choice, Record, Several, Truth, Whole
from dra_driver.core.errors import AcceleratorError, DeviceFaulty, Unsupported
from dra_driver.core.layout_rules import Match, Rule
from dra_driver.core.settings_record import Noted, SettingsRecord, record_path, write_record
from dra_driver.core.system import System

from tests.simulator.backend.stage import Stage, on, refused

ALL = ("powerLimit", "graphicsClocks", "memoryClocks", "computeMode", "timeSlice")
PROFILES = ("max-p", "max-q", "compute", "memory-bound", "balanced", "llm-inference", "llm-training", "hpc")


def now(uuid: str) -> dict[str, Any]:
    """What NVML and nvidia-smi say of the GPU, asked by a program of their own."""
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
    """Between which clocks the first GPU's memory is locked: NVML has no question for it, the silicon knows."""
    gpu = json.loads(stage.control("show", "--json"))["gpus"][0]
    return gpu["locked_memory_clock_minimum_mhz"], gpu["locked_memory_clock_maximum_mhz"]


@on("8xH100")
def settings_are_read_set_and_set_back(stage: Stage) -> None:
    gpu, other = stage.gpus()[:2]
    before, untouched = now(gpu.uuid), now(other.uuid)
    knobs = stage.backend.knobs(gpu.uuid, ALL)
    assert tuple(knobs) == ALL
    assert (knobs["powerLimit"].value, knobs["powerLimit"].allowed) == (700.0, Whole(200, 700, "W"))
    assert isinstance(knobs["computeMode"].allowed, Choice) and knobs["computeMode"].value == "Default"
    assert isinstance(knobs["graphicsClocks"].allowed, Record)
    assert knobs["graphicsClocks"].allowed.fields["maximum"] == Whole(345, 1980, "MHz")
    assert (knobs["graphicsClocks"].value, knobs["timeSlice"].value) == (None, None)
    stage.backend.set_knobs(
        gpu.uuid,
        {
            "timeSlice": "Long",
            "powerLimit": 250.5,
            "computeMode": "ExclusiveProcess",
            "graphicsClocks": {"minimum": 900, "maximum": 1200},
            "memoryClocks": {"minimum": 2619, "maximum": 2619},
        },
    )
    assert now(gpu.uuid) == {"powerLimit": 250_500, "computeMode": 3, "clock": 900, "timeSlice": "Long"}
    assert memory_lock(stage) == (2619, 2619)
    assert stage.backend.knobs(gpu.uuid, ["powerLimit"])["powerLimit"].value == 250.5
    assert now(other.uuid) == untouched
    stage.backend.set_knobs(gpu.uuid, dict.fromkeys(ALL))
    assert (now(gpu.uuid), memory_lock(stage)) == (before, (0, 0))


def requested(uuid: str, *options: str) -> list[str]:
    """The workload profiles of a GPU that are requested, as nvidia-smi prints them."""
    words = ["nvidia-smi", "power-profiles", *(options or ("-gr",)), "-i", uuid]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()


@on("8xB200")
def workload_profiles_are_requested_and_those_of_before_are_again(stage: Stage) -> None:
    gpu, other = stage.gpus()[:2]
    knob = stage.backend.knobs(gpu.uuid, ["workloadProfiles"])["workloadProfiles"]
    assert (knob.value, knob.allowed) == ([], Several(Choice(PROFILES), most=len(PROFILES)))
    stage.backend.set_knobs(gpu.uuid, {"workloadProfiles": ["max-p", "compute"]})
    stage.backend.set_knobs(gpu.uuid, {"workloadProfiles": ["llm-training", "max-q"]})
    assert requested(gpu.uuid) == ["1. Max-Q", "7. LLM Training"] == requested(gpu.uuid, "-ge")
    assert requested(other.uuid) == ["No profiles are currently requested."]
    assert stage.backend.knobs(gpu.uuid, ["workloadProfiles"])["workloadProfiles"].value == ["llm-training", "max-q"]
    stage.backend.set_knobs(gpu.uuid, {"workloadProfiles": None})
    assert requested(gpu.uuid) == ["No profiles are currently requested."]


@on("8xH100")
def a_board_without_workload_profiles(stage: Stage) -> None:
    gpu = stage.first()
    assert stage.backend.knobs(gpu.uuid, ["workloadProfiles", "powerLimit"]).keys() == {"powerLimit"}
    refused(Unsupported, stage.backend.set_knobs, gpu.uuid, {"workloadProfiles": ["max-q"]})


@on("8xH100")
def settings_beyond_the_board_are_refused_by_it(stage: Stage) -> None:
    gpu = stage.first()
    before = now(gpu.uuid)
    refused(AcceleratorError, stage.backend.set_knobs, gpu.uuid, {"powerLimit": 900})
    refused(AcceleratorError, stage.backend.set_knobs, gpu.uuid, {"graphicsClocks": {"minimum": 345, "maximum": 9000}})
    assert now(gpu.uuid) == before


@on("8xH100")
def settings_of_a_gpu_that_is_lost(stage: Stage) -> None:
    gpu = stage.first()
    stage.control("fault", "0", "lost")
    error = refused(DeviceFaulty, stage.backend.set_knobs, gpu.uuid, {"powerLimit": 300})
    assert error.code == "gpu-lost"
    refused(DeviceFaulty, stage.backend.knobs, gpu.uuid, ["powerLimit"])


@on("1xT4")
def a_board_that_is_too_old_for_a_setting(stage: Stage) -> None:
    """Memory clocks can be locked from Ampere on: the board itself says so."""
    gpu = stage.first()
    assert stage.backend.knobs(gpu.uuid, ["powerLimit", "fan"]).keys() == {"powerLimit"}
    refused(Unsupported, stage.backend.set_knobs, gpu.uuid, {"memoryClocks": {"minimum": 405, "maximum": 5001}})


def noted(stage: Stage, **values: Any) -> None:
    """Have it noted that the node has set this on the first GPU in this boot."""
    boot = stage.root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True, exist_ok=True)
    if not boot.exists():
        boot.write_text("this boot\n")
    note = Noted(values, dict.fromkeys(values))
    record = SettingsRecord(System(str(stage.root)).boot_id(), {stage.first().uuid: note})
    write_record(System(str(stage.root)), record_path("nvidia"), record)


@on("8xH100")
def what_the_node_has_set_is_what_a_claim_finds_and_leaves(stage: Stage) -> None:
    """NVML tells neither locked clocks nor the time slice: the record of the node does, and so they come back after a claim."""
    gpu = stage.first()
    node = {"graphicsClocks": {"minimum": 345, "maximum": 1410}, "timeSlice": "Long", "powerLimit": 500}
    stage.backend.set_knobs(gpu.uuid, node)
    noted(stage, **node)
    knobs = stage.backend.knobs(gpu.uuid, ALL)
    assert {name: knobs[name].value for name in node} == node
    claim = {"graphicsClocks": {"minimum": 900, "maximum": 900}, "timeSlice": "Short", "powerLimit": 300}
    stage.backend.set_knobs(gpu.uuid, claim)
    stage.backend.set_knobs(gpu.uuid, {name: knobs[name].value for name in claim})
    assert now(gpu.uuid)["timeSlice"] == "Long" and graphics_lock(stage) == (345, 1410)
    # A driver whose store is lost knows nothing of before: the node's own is the default then.
    stage.backend.set_knobs(gpu.uuid, claim)
    stage.backend.set_knobs(gpu.uuid, dict.fromkeys(claim))
    assert (now(gpu.uuid)["powerLimit"], now(gpu.uuid)["timeSlice"]) == (500_000, "Long")
    assert graphics_lock(stage) == (345, 1410)


def graphics_lock(stage: Stage) -> tuple[int, int]:
    gpu = json.loads(stage.control("show", "--json"))["gpus"][0]
    return gpu["locked_clock_minimum_mhz"], gpu["locked_clock_maximum_mhz"]


@on("8xA100-40")
def what_the_node_has_set_is_there_after_a_reset_and_a_change_of_the_mode(stage: Stage) -> None:
    gpu = stage.first()
    node = {"graphicsClocks": {"minimum": 210, "maximum": 1095}, "computeMode": "ExclusiveProcess", "powerLimit": 300}
    stage.backend.set_knobs(gpu.uuid, node)
    noted(stage, **node)
    stage.lay_out(Rule(Match(), "static"))  # which takes a reset on these boards
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
def a_setting_that_does_not_come_back_is_in_nobodys_way(stage: Stage) -> None:
    """What changes the mode, or resets, has done what it was asked for; the others of the settings come back all the same."""
    gpu = stage.first()
    node = {"powerLimit": 300, "graphicsClocks": {"minimum": 210, "maximum": 1095}}
    stage.backend.set_knobs(gpu.uuid, node)
    noted(stage, **node)
    stage.control("fault", "0", "call", "nvmlDeviceSetPowerManagementLimit", "fail", "4")
    stage.lay_out(Rule(Match(), "static"))  # which takes a reset on these boards
    assert stage.backend.device(gpu.uuid).partitioning.enabled
    assert graphics_lock(stage) == (210, 1095), "a reset takes locked clocks along; they are set after the power limit"
    stage.control("fault", "0", "call", "nvmlDeviceSetGpuLockedClocks", "fail", "4")
    stage.backend.reset([gpu.uuid])
    assert graphics_lock(stage) == (0, 0)


@on("8xH100")
def ecc_is_read_set_and_in_force_after_a_reset(stage: Stage) -> None:
    gpu = stage.first()
    knob = stage.backend.knobs(gpu.uuid, ["ecc"])["ecc"]
    assert (knob.value, knob.pending, knob.allowed) == (True, True, Truth())
    stage.backend.set_knobs(gpu.uuid, {"ecc": False})
    knob = stage.backend.knobs(gpu.uuid, ["ecc"])["ecc"]
    assert (knob.value, knob.pending) == (True, False)
    stage.backend.reset([gpu.uuid])
    knob = stage.backend.knobs(gpu.uuid, ["ecc"])["ecc"]
    assert (knob.value, knob.pending) == (False, False)
    stage.backend.set_knobs(gpu.uuid, {"ecc": None})
    assert stage.backend.knobs(gpu.uuid, ["ecc"])["ecc"].pending is True
