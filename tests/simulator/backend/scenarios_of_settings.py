# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The knobs of a GPU: read with the range that the board has, set, and set back."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from dra_driver.core.documents import Choice, Record, Several, Whole
from dra_driver.core.errors import AcceleratorError, DeviceFaulty, Unsupported

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
    assert stage.backend.knobs(gpu.uuid, ["powerLimit", "ecc"]).keys() == {"powerLimit"}
    refused(Unsupported, stage.backend.set_knobs, gpu.uuid, {"memoryClocks": {"minimum": 405, "maximum": 5001}})
