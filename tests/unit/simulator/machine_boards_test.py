# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare each board file with the published tables and rules, and verify that invalid files are refused."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from accelerator_simulator.boards import Board, parse_board, profile_name
from accelerator_simulator.description import compute_profiles
from accelerator_simulator.errors import DescriptionError
from accelerator_simulator.hardware import load_catalogue

FILES = Path(__file__).resolve().parents[3] / "roles" / "simulator" / "files"
CATALOGUE = load_catalogue(FILES)
BOARDS = sorted(CATALOGUE.boards)
PARTITIONED = [key for key in BOARDS if CATALOGUE.boards[key].mig]

# (id, GiB in listings) by name: `nvidia-smi mig -lgip` of each board in public reports
PUBLISHED = {
    "a100-40": {"1g.5gb": (19, 4.75), "1g.5gb+me": (20, 4.75), "1g.10gb": (15, 9.75), "2g.10gb": (14, 9.75),
                "3g.20gb": (9, 19.62), "4g.20gb": (5, 19.62), "7g.40gb": (0, 39.50)},
    "a100-80": {"1g.10gb": (19, 9.50), "1g.10gb+me": (20, 9.50), "1g.20gb": (15, 19.50), "2g.20gb": (14, 19.50),
                "3g.40gb": (9, 39.25), "4g.40gb": (5, 39.25), "7g.80gb": (0, 78.75)},
    "h100-80": {"1g.10gb": (19, 9.75), "1g.10gb+me": (20, 9.75), "1g.20gb": (15, 19.62), "2g.20gb": (14, 19.62),
                "3g.40gb": (9, 39.50), "4g.40gb": (5, 39.50), "7g.80gb": (0, 79.25)},
    # As a real one with driver 580.159.04 lists it. Listings of other ones have 0.25 less from 1g.35gb on.
    "h200-141": {"1g.18gb": (19, 16.00), "1g.18gb+me": (20, 16.00), "1g.35gb": (15, 32.50), "2g.35gb": (14, 32.50),
                 "3g.71gb": (9, 69.75), "4g.71gb": (5, 69.75), "7g.141gb": (0, 140.00)},
    "b200-180": {"1g.23gb": (19, 20.50), "1g.23gb+me": (20, 20.50), "1g.45gb": (15, 44.25), "2g.45gb": (14, 44.25),
                 "3g.90gb": (9, 89.00), "4g.90gb": (5, 89.00), "7g.180gb": (0, 178.50)},
    "gb200-186": {"1g.23gb": (19, 22.00), "1g.23gb+me": (20, 22.00), "1g.47gb": (15, 45.50), "2g.47gb": (14, 45.50),
                  "3g.93gb": (9, None), "4g.93gb": (5, None), "7g.186gb": (0, None)},
    "a30": {"1g.6gb": (14, 5.81), "1g.6gb+me": (21, 5.81), "2g.12gb": (5, 11.69), "2g.12gb+me": (6, 11.69), "4g.24gb": (0, 23.44)},
    "rtx-pro-6000": {"1g.24gb": (14, 23.62), "1g.24gb+me": (21, 23.62), "1g.24gb+gfx": (47, 23.62), "1g.24gb+me.all": (65, 23.62),
                     "1g.24gb-me": (67, 23.62), "2g.48gb": (5, 47.38), "2g.48gb+gfx": (35, 47.38), "2g.48gb+me.all": (64, 47.38),
                     "2g.48gb-me": (66, 47.38), "4g.96gb": (0, 95.12), "4g.96gb+gfx": (32, 95.12)},
}  # fmt: skip


def read(board: str) -> dict[str, Any]:
    return json.loads((FILES / "boards" / f"{board}.json").read_text(encoding="utf-8"))


def test_every_required_board_is_there() -> None:
    assert set(BOARDS) == {*PUBLISHED, "l4", "t4"}
    assert set(PARTITIONED) == set(PUBLISHED)


@pytest.mark.parametrize("key", PARTITIONED)
def test_profiles_equal_the_published_listing(key: str) -> None:
    mig = CATALOGUE.boards[key].mig
    assert mig is not None
    found = {profile.name: profile for profile in mig.profiles}
    assert set(found) == set(PUBLISHED[key])
    for name, (identifier, gibibytes) in PUBLISHED[key].items():
        assert found[name].id == identifier, name
        if gibibytes is not None:
            assert found[name].memory_mib / 1024 == pytest.approx(gibibytes, abs=0.006), name


@pytest.mark.parametrize("key", PARTITIONED)
def test_names_follow_the_naming_rule(key: str) -> None:
    board = CATALOGUE.boards[key]
    assert board.mig is not None
    total = board.memory["total_mib"]
    for profile in board.mig.profiles:
        eighths = math.ceil(Fraction(profile.memory_mib * 8, total))
        shown = Fraction(eighths, 8) * math.ceil(Fraction(total, 1024))
        gigabytes = math.floor(shown + Fraction(1, 2))
        assert re.fullmatch(rf"{profile.slices}g\.{gigabytes}gb(\+me|\+me\.all|\+gfx|-me)?", profile.name)


@pytest.mark.parametrize("key", PARTITIONED)
def test_placements_stay_on_the_board_and_offered_ones_fit_together(key: str) -> None:
    mig = CATALOGUE.boards[key].mig
    assert mig is not None
    for profile in mig.profiles:
        spans = [range(start, start + profile.size) for start in profile.starts]
        assert all(span.start >= 0 and span.stop <= mig.memory_slices for span in spans)
        # The maximum number that the driver states fits without overlap
        taken: set[int] = set()
        fitted = 0
        for span in spans:
            if taken.isdisjoint(span):
                taken.update(span)
                fitted += 1
        assert fitted >= profile.instances
        assert profile.instances * profile.slices <= mig.compute_slices or profile.instances == fitted


@pytest.mark.parametrize("key", PARTITIONED)
def test_profile_id_is_the_fraction_of_the_board(key: str) -> None:
    mig = CATALOGUE.boards[key].mig
    assert mig is not None
    by_fraction = {
        Fraction(1): {0, 32},
        Fraction(1, 2): {5, 6, 9, 35, 64, 66},
        Fraction(1, 4): {14, 15, 21, 47, 65, 67},
        Fraction(1, 8): {19, 20},
    }
    for profile in mig.profiles:
        assert profile.id in by_fraction[Fraction(profile.size, mig.memory_slices)], profile.name


@pytest.mark.parametrize("key", PARTITIONED)
def test_compute_instances_follow_the_offer_rule(key: str) -> None:
    mig = CATALOGUE.boards[key].mig
    assert mig is not None
    counts = {
        1: {1: 1},
        2: {1: 2, 2: 1},
        3: {1: 3, 2: 1, 3: 1},
        4: {1: 4, 2: 2, 4: 1},
        7: {1: 7, 2: 3, 3: 2, 4: 1, 7: 1},
    }
    for profile in mig.profiles:
        offered = list(compute_profiles(mig, profile))
        plain = {entry["slices"]: len(entry["starts"]) for entry in offered if entry["enum"] != 7}
        assert plain == counts[profile.slices]
        for slices in plain:
            assert not (slices < profile.slices and 2 * slices > profile.slices + 1)
        # Exactly one profile fills the GPU instance, and only this one has no prefix
        whole = [
            entry
            for entry in offered
            if entry["multiprocessors"] == profile.multiprocessors and entry["slices"] == profile.slices
        ]
        assert [entry["name"] for entry in whole] == [profile.name]
        assert all(
            re.fullmatch(r"\dc\." + re.escape(profile.name), entry["name"]) for entry in offered if entry not in whole
        )
        for entry in offered:
            assert max(entry["starts"]) + entry["size"] <= profile.slices


def test_double_memory_on_hopper_is_filled_by_rev1_only() -> None:
    mig = CATALOGUE.boards["h100-80"].mig
    assert mig is not None
    double = next(profile for profile in mig.profiles if profile.name == "1g.20gb")
    assert [(entry["enum"], entry["name"], entry["multiprocessors"]) for entry in compute_profiles(mig, double)] == [
        (0, "1c.1g.20gb", 16),
        (7, "1g.20gb", 26),
    ]


@pytest.mark.parametrize("key", BOARDS)
def test_sources_name_fields_that_exist(key: str) -> None:
    data = read(key)
    assert data["sources"]["*"]
    for path in data["sources"]:
        if path == "*":
            continue
        value: Any = data
        for part in path.split("."):
            name, _bracket, position = part.partition("[")
            assert name in value, path
            value = value[name]
            if position:
                number = position.rstrip("]")
                value = value[int(number) if number else 0]


@pytest.mark.parametrize("key", BOARDS)
def test_power_and_clocks_are_in_order(key: str) -> None:
    board: Board = CATALOGUE.boards[key]
    assert 0 < board.power["idle_mw"] < board.power["default_mw"]
    assert board.power["minimum_mw"] <= board.power["default_mw"] <= board.power["maximum_mw"]
    assert (
        board.clocks["graphics_minimum_mhz"]
        <= board.clocks["graphics_idle_mhz"]
        <= board.clocks["graphics_maximum_mhz"]
    )
    assert board.memory["reserved_mib"] < board.memory["total_mib"] // 20
    assert board.memory["bar1_mib"] * 2**20 == next(
        region["size"] for region in board.pci["bars"] if region["index"] == 1
    )


def _first(data: dict[str, Any]) -> dict[str, Any]:
    return data["mig"]["profiles"][0]


MUTATIONS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a name that the rule does not give": (
        lambda data: _first(data).update(name="1g.11gb"),
        "naming rule gives 1g.10gb",
    ),
    "a placement beyond the board": (
        lambda data: _first(data)["placements"].update(starts=[0, 8]),
        "leave the 8 memory slices",
    ),
    "placements out of order": (lambda data: _first(data)["placements"].update(starts=[1, 0]), "ascending"),
    "an id twice": (lambda data: _first(data).update(id=0), "id occurs twice"),
    "more instances than placements": (lambda data: _first(data).update(instances=9), "9 instances"),
    "an unknown profile": (lambda data: _first(data).update(profile="5_SLICE"), "unknown profile '5_SLICE'"),
    "more decoders than the board": (lambda data: _first(data).update(decoders=8), "decoders 8, the board has 7"),
    "a text for a number": (
        lambda data: _first(data).update(multiprocessors="16"),
        "multiprocessors is '16', expected int",
    ),
    "an unknown architecture": (lambda data: data.update(architecture="fermi"), "architecture 'fermi'"),
    "an invalid PCI id": (lambda data: data["pci"].update(device="2330"), "pci.device is '2330'"),
    "no sources": (lambda data: data.update(sources={}), "sources has no \\* entry"),
    "an unknown way to change the mode": (
        lambda data: data["mig"].update(mode_change="later"),
        "mode_change is 'later'",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_invalid_board_is_rejected_with_its_reason(name: str) -> None:
    change, message = MUTATIONS[name]
    data = copy.deepcopy(read("h100-80"))
    change(data)
    with pytest.raises(DescriptionError, match=message):
        parse_board(data, "h100-80.json")


def test_the_naming_rule_on_the_boards_that_renamed_their_profiles() -> None:
    assert profile_name(3, 40192, 81251) == "3g.40gb"
    assert profile_name(1, 20480, 192000) == "1g.24gb"
    assert profile_name(2, 48512, 97887) == "2g.48gb"
