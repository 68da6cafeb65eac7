# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare each number of the shipped boards with independent figures."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from accelerator_simulator.boards import BRANDS, NVLINK_VERSIONS, WORKLOAD_PROFILES
from accelerator_simulator.description import Settings, parse, render
from accelerator_simulator.hardware import load_catalogue, load_machine

from tests.simulator import nvml_boards
from tests.unit.simulator.board_figures import FIGURES, UNKNOWN, UNKNOWN_OF_ALL, UNKNOWN_OF_PROFILES

FILES = Path(__file__).resolve().parents[3] / "roles" / "simulator" / "files"
CATALOGUE = load_catalogue(FILES)
TABLES = {
    "a30": "A30",
    "a100-40": "A100-40",
    "a100-80": "A100-80",
    "h100-80": "H100-80",
    "h200-141": "H200-141",
    "b200-180": "B200",
    "gb200-186": "GB200",
    "rtx-pro-6000": "RTX-PRO-6000",
}
ENGINES = {
    "copy_engines": "copy",
    "decoders": "decoder",
    "encoders": "encoder",
    "jpeg_engines": "jpeg",
    "optical_flow_engines": "ofa",
}
# -lgip rounds to hundredths of a GiB, and some drivers to eighths
MEMORY_TOLERANCE = 8


def shipped(board: str) -> dict[str, Any]:
    return dict(json.loads((FILES / "boards" / f"{board}.json").read_text()))


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each number, and each numeric text, by its path, without profiles."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("sources", "profiles", "part", "board"):
                yield from numbers(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(item, f"{path}[{index}]")
    elif not isinstance(value, bool) and re.fullmatch(r"0x[0-9a-f]+|[0-9.]+", str(value)):
        yield path, value


def differences(board: str, data: dict[str, Any]) -> list[str]:
    """Return the differences from the figures, and the numbers that are neither known nor listed as unknown."""
    known = dict(FIGURES[board])
    table = nvml_boards.BOARDS.get(TABLES.get(board, ""))
    if table:
        known["mig.memory_slices"] = table["memory_slices"]
        known["mig.compute_slices"] = table["compute_slices"]
        for name in ("copy", "decoder", "encoder", "jpeg"):
            known[f"mig.engines.{name}"] = table["engines"].get(name, 0)
        known["mig.engines.optical_flow"] = table["engines"]["ofa"]
    unknown = UNKNOWN_OF_ALL | UNKNOWN.get(board, set())
    found = []
    for path, value in numbers(data):
        if path in unknown:
            continue
        if path not in known:
            found.append(f"{path} {value}: neither known nor named unknown")
        elif known[path] != value:
            found.append(f"{path} {value}: {known[path]} by the figures")
    return found


def profile_differences(board: str, profiles: list[dict[str, Any]]) -> list[str]:
    """Return the differences of a board's profiles."""
    rows = {row["name"]: (enum, row) for enum, row in nvml_boards.BOARDS[TABLES[board]]["profiles"].items()}
    found = []
    if [profile["name"] for profile in profiles] != [
        profile["name"] for profile in profiles if profile["name"] in rows
    ]:
        found.append(f"profiles {[profile['name'] for profile in profiles]}: {list(rows)} by the figures")
    for profile in profiles:
        _enum, row = rows[profile["name"]]
        wanted = {
            "id": row["id"],
            "slices": row["slices"],
            "memory_mib": row["memory"],
            "multiprocessors": row["multiprocessors"],
            "instances": row["maximum"],
            "placements": {"starts": row["starts"], "size": row["size"]},
            **{number: row["engines"].get(engine, 0) for number, engine in ENGINES.items()},
        }
        assert set(wanted) == set(profile) - {"name", "profile"}
        for number, value in wanted.items():
            if f"{profile['name']} {number}" in UNKNOWN_OF_PROFILES.get(board, {}):
                continue
            tolerance = MEMORY_TOLERANCE if number == "memory_mib" else 0
            if value != profile[number] and not (tolerance and abs(value - profile[number]) <= tolerance):
                found.append(f"{profile['name']} {number} {profile[number]}: {value} by the figures")
    return found


def test_every_board_has_figures() -> None:
    assert set(FIGURES) == set(CATALOGUE.boards)
    assert set(TABLES) == {key for key, board in CATALOGUE.boards.items() if board.mig}


@pytest.mark.parametrize("board", sorted(FIGURES))
def test_every_number_is_the_figures_or_named_unknown(board: str) -> None:
    assert differences(board, shipped(board)) == []


@pytest.mark.parametrize("board", sorted(TABLES))
def test_every_number_of_the_profiles_is_the_figures_or_named_unknown(board: str) -> None:
    assert profile_differences(board, shipped(board)["mig"]["profiles"]) == []


@pytest.mark.parametrize("board", sorted(FIGURES))
def test_names_of_unknown_figures_exist(board: str) -> None:
    """An unknown name without a number would hide a later number with that name."""
    paths = {path for path, _value in numbers(shipped(board))}
    assert UNKNOWN.get(board, set()) <= paths
    names = {profile["name"] for profile in shipped(board)["mig"].get("profiles", ())}
    assert {entry.split()[0] for entry in UNKNOWN_OF_PROFILES.get(board, {})} <= names


def test_no_number_changes_unnoticed() -> None:
    """A change by one in any known number of a board is a difference."""
    for board in FIGURES:
        unknown = UNKNOWN_OF_ALL | UNKNOWN.get(board, set())
        for path, value in numbers(shipped(board)):
            if path in unknown or not isinstance(value, int):
                continue
            changed = copy.deepcopy(shipped(board))
            place: Any = changed
            *folders, last = path.replace("[", ".").replace("]", "").split(".")
            for directory in folders:
                place = place[int(directory)] if directory.isdigit() else place[directory]
            place[int(last) if last.isdigit() else last] = value + 1
            assert differences(board, changed), f"{board} {path}"
    profiles = copy.deepcopy(shipped("h100-80")["mig"]["profiles"])
    next(profile for profile in profiles if profile["name"] == "3g.40gb")["multiprocessors"] = 48
    assert profile_differences("h100-80", profiles) == ["3g.40gb multiprocessors 48: 60 by the figures"]


def test_enumerations_are_the_header_s() -> None:
    assert {
        "quadro": pynvml.NVML_BRAND_QUADRO,
        "tesla": pynvml.NVML_BRAND_TESLA,
        "quadro-rtx": pynvml.NVML_BRAND_QUADRO_RTX,
        "nvidia-rtx": pynvml.NVML_BRAND_NVIDIA_RTX,
        "nvidia": pynvml.NVML_BRAND_NVIDIA,
    } == BRANDS
    assert {
        0: pynvml.NVML_NVLINK_VERSION_INVALID,
        3: pynvml.NVML_NVLINK_VERSION_3_0,
        4: pynvml.NVML_NVLINK_VERSION_4_0,
        5: pynvml.NVML_NVLINK_VERSION_5_0,
    } == NVLINK_VERSIONS


def described(machine: str) -> list[dict[str, Any]]:
    settings = Settings("n", "580.95.05", "13.0")
    return parse(render(load_machine(FILES, machine, CATALOGUE), CATALOGUE, settings))[1]


def test_board_figures_are_in_the_library_configuration() -> None:
    grace = described("4xGB200")
    assert [gpu["coherent-numa-node"] for gpu in grace] == ["2", "10", "18", "26"]
    assert {gpu["addressing-mode"] for gpu in grace} == {"ats"}
    assert {(link["version"], link["speed"]) for gpu in grace for link in gpu["nvlink"]} == {("7", "53125")}
    for machine, version in (("8xA100-40", "4"), ("8xH100", "6"), ("8xB200", "7")):
        gpu = described(machine)[0]
        assert {link["version"] for link in gpu["nvlink"]} == {version}
        assert "coherent-numa-node" not in gpu
        assert "addressing-mode" not in gpu
        assert ("workload-profile" in gpu) == (machine == "8xB200")
    profiles = {each["number"]: each["conflicts"] for each in grace[0]["workload-profile"]}
    names = {name: str(number) for number, name in enumerate(WORKLOAD_PROFILES)}
    assert profiles == {
        **{
            names[name]: "0x0"
            for name in ("COMPUTE", "MEMORY_BOUND", "BALANCED", "LLM_INFERENCE", "LLM_TRAINING", "HPC")
        },
        names["MAX_P"]: "0x2",
        names["MAX_Q"]: "0x1",
    }
    for name, number in names.items():
        assert getattr(pynvml, f"NVML_POWER_PROFILE_{name}") == int(number)
    assert described("8xA100-40")[0]["application-clocks"] == "graphics=1095 memory=1215"
    assert described("8xH100")[0]["row-remapper-banks"] == "2560"
    assert "row-remapper-banks" not in described("1xT4")[0]
