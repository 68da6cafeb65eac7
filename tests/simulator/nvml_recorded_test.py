# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the simulated boards with recordings of real ones: every answer that tests/silicon/record.py has recorded.

The real boards were passed through to virtual machines with one GPU and no NVLink, with driver 580.159.04. Each
difference is listed below with its reason. A listed answer without a difference is an error too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.backend.gpu_machine import Machine
from tests.simulator.nvml_builds import build
from tests.simulator.nvml_support import NOT_SUPPORTED

SILICON = Path(__file__).resolve().parents[1] / "silicon"
MACHINES = {"h100-80": "8xH100", "h200-141": "8xH200"}
#: Answers of both that differ, with the reason.
DIFFERENT = {
    r"nvmlSystemGet(DriverVersion|NVMLVersion|DriverBranch)|nvmlDeviceGetGspFirmwareVersion": "another version of the driver",
    r"nvmlDeviceGet(BoardPartNumber|VbiosVersion)": "boards of one model have several",
    r"nvmlDeviceGetModuleId": "another place in the machine",
    r"nvmlDeviceGetVirtualizationMode|nvmlSystemGetConfComputeCapabilities": "a virtual machine, and its processor",
    r"nvmlDeviceGetNvLinkState \d+|nvmlDeviceGetGpuFabricInfoV|field (90|91|147|164|165|166|170)": "no NVLink in that machine",
    r"nvmlDeviceGetMemoryInfo(_v2)?|nvmlDeviceGetBAR1MemoryInfo": "the simulator counts reserved memory in whole MiB, and reserves no BAR1 memory",
    r"nvmlDeviceGetGpuInstanceProfileInfo \d+ 2": "the real library writes no version in the answer (another test compares the rest)",
    r"nvmlDeviceGetSupportedEventTypes": "no event of a change of the power source",
    r"nvmlDeviceGetAPIRestriction 0": "the simulator has application clocks to restrict",
    r"nvmlDeviceGetDisplayMode": "a display as the real driver takes it, which has no connector",
    r"field (11|12|22|23)": "the simulator reports errors of device memory separately, as boards before Hopper do",
}
#: Answers of the real boards (a value or another error) that the simulator lacks, because the product does not use
#: them.
UNANSWERED = (
    r"field (95|193|194|195|196|228|229)",
    r"nvmlDeviceGetAPIRestriction 1",
    r"nvmlDeviceGet(AccountingPids|AdaptiveClockInfoStatus|BBXTimeData_v1|CurrentClockFreqs|DynamicPstatesInfo|PerformanceModes)",
    r"nvmlDeviceGet(ConfCompute\w+|EncoderSessions|EncoderStats|FBCSessions|FBCStats|FanSpeedRPM|MinMaxFanSpeed)",
    r"nvmlDeviceGet(GpcClk\w+|MemClk\w+|GridLicensableFeatures\w*|Inforom\w+( \d)?|MinMaxClockOfPState \d 0)",
    r"nvmlDeviceGet(SupportedPerformanceStates|UnrepairableMemoryFlag_v1)",
    r"nvmlDeviceGetGpuInstanceProfileInfo 17 [12]",
    r"nvmlSystemGet(ConfComputeGpusReadyState|ConfComputeKeyRotationThresholdInfo|NvlinkBwMode)",
)


def read(path: Path) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return recorded


@pytest.fixture(scope="module", params=sorted(MACHINES))
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """Return the recording of a real board, and the answers of the simulated one with its name."""
    folder = tmp_path_factory.mktemp("recorded")
    machine = Machine(folder / "root", MACHINES[request.param], build().folder)
    words = [sys.executable, SILICON / "record.py", folder / "answers"]
    subprocess.run(words, env=machine.environment, check=True, timeout=120)
    return read(SILICON / f"recorded/{request.param}.json"), read(folder / "answers")


def unlike(real: dict[str, Any], simulated: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the names of the answers that differ, and of those that the simulator lacks."""
    names = {name for name in real if simulated[name] != real[name]}
    missing = {name for name in names if simulated[name] == {"error": NOT_SUPPORTED}}
    return names - missing, missing


def test_every_recording_has_a_machine() -> None:
    assert {path.stem for path in (SILICON / "recorded").iterdir()} == set(MACHINES)


def test_recording_and_simulator_contain_the_same_calls(answers: tuple[dict[str, Any], ...]) -> None:
    real, simulated = answers
    assert set(real) == set(simulated) and len(real) > 400


def test_every_difference_is_listed(answers: tuple[dict[str, Any], ...]) -> None:
    different, missing = unlike(*answers)
    for names, known in ((different, DIFFERENT), (missing, UNANSWERED)):
        unknown = [name for name in sorted(names) if not any(re.fullmatch(each, name) for each in known)]
        assert not unknown, {name: [each[name] for each in answers] for name in unknown}
        idle = [each for each in known if not any(re.fullmatch(each, name) for name in names)]
        assert not idle, f"nothing differs any more of {idle}"


def test_profiles_are_equal_except_the_version(answers: tuple[dict[str, Any], ...]) -> None:
    real, simulated = answers
    names = [name for name in real if re.fullmatch(r"nvmlDeviceGetGpuInstanceProfileInfo \d+ [12]", name)]
    found = {name for name in names if "id" in real[name]}
    assert len(found) == 2 * 7
    for name in found:
        assert {**real[name], "version": 0} == {**simulated[name], "version": 0}, name
    for name in set(names) - found:
        assert "error" in simulated[name], name


def test_memory_is_equal_when_rounded_to_mebibytes(answers: tuple[dict[str, Any], ...]) -> None:
    real, simulated = answers
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        assert real[name]["total"] == simulated[name]["total"]
        for part in ("free", "used"):
            assert abs(real[name][part] - simulated[name][part]) < 1024**2, (name, part)
    assert real["nvmlDeviceGetBAR1MemoryInfo"]["bar1Total"] == simulated["nvmlDeviceGetBAR1MemoryInfo"]["bar1Total"]


def test_recordings_do_not_identify_the_board() -> None:
    for path in (SILICON / "recorded").iterdir():
        text = path.read_text("utf-8")
        assert not re.search(r"(GPU|MIG)-[0-9a-f]{8}-|nvmlDeviceGet(UUID|Serial|Pdi)\b", text), path.name
