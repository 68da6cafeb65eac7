# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Values: versions, placements, quantities, PCI addresses, and profile names. Also the permitted imports of the core."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import board_model
import pytest
from board_model import board_names
from dra_driver.core import quantity
from dra_driver.core.errors import AcceleratorError, BackendUnavailable, DoesNotFit, InUse, InvalidLayout, LayoutFailed
from dra_driver.core.host import pci
from dra_driver.core.model import Placement, Version
from dra_driver.core.vendors.nvidia import profiles
from hypothesis import given
from hypothesis import strategies as st

PLACEMENTS = st.builds(Placement, st.integers(0, 12), st.integers(1, 12))


@given(PLACEMENTS, PLACEMENTS)
def test_placements_overlap_if_they_share_a_slice(left: Placement, right: Placement) -> None:
    assert left.overlaps(right) == bool(set(left.slices) & set(right.slices)) == right.overlaps(left)


@pytest.mark.parametrize(
    ("spelled", "text"),
    [
        ("580.95.05", "580.95.5"),
        ("13.0", "13.0.0"),
        ("9", "9.0.0"),
        ("v1.2.3-rc1", "1.2.3"),
        ("535.104.05.01", "535.104.5"),
    ],
)
def test_version_coerce_returns_semantic_version(spelled: str, text: str) -> None:
    assert Version.coerce(spelled) == Version(text)


@pytest.mark.parametrize("text", ["1.2", "01.2.3", "v1.2.3", "1.2.3.4", "", "1.2.3-", "a.b.c", "1.2.3+" + "x" * 64])
def test_version_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="semantic version"):
        Version(text)


@given(st.integers(0, 2**63 - 1))
def test_quantity_of_bytes_round_trips(value: int) -> None:
    text = quantity.format_bytes(value)
    assert quantity.parse(text) == value
    assert quantity.parse(str(value)) == value


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1023, "1023"), (1024, "1Ki"), (81559 * 1024**2, "81559Mi"), (80 * 1024**3, "80Gi")]
)
def test_quantity_of_bytes_uses_largest_exact_suffix(value: int, text: str) -> None:
    assert quantity.format_bytes(value) == text


@pytest.mark.parametrize("power", range(7))
def test_quantity_parse_binary_suffixes(power: int) -> None:
    assert quantity.parse(quantity.format_bytes(7 * 1024**power)) == 7 * 1024**power


@given(
    st.decimals(min_value=-(10**9), max_value=10**9, places=3, allow_nan=False),
    st.sampled_from(
        [
            ("", 0),
            ("k", 3),
            ("M", 6),
            ("G", 9),
            ("T", 12),
            ("P", 15),
            ("E", 18),
            ("m", -3),
            ("u", -6),
            ("n", -9),
            ("e2", 2),
            ("E-1", -1),
            ("E1", 1),
        ]
    ),
)
def test_quantity_parse_decimal_is_exact(number: Decimal, suffix: tuple[str, int]) -> None:
    assert quantity.parse(f"{number:f}{suffix[0]}") == Fraction(number) * Fraction(10) ** suffix[1]


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("1Gi", "1073741824", True),
        ("1000m", "1", True),
        ("1e3", "1k", True),
        (".5", "500m", True),
        ("1G", "1Gi", False),
        ("2", "1.5", False),
    ],
)
def test_quantity_equality_is_by_value(left: str, right: str, equal: bool) -> None:
    assert quantity.equal(left, right) == equal


@pytest.mark.parametrize(
    "text", ["", "1 Gi", "Gi", "1gi", "1KiB", "0x10", "1e", "--1", "1.2.3", "٣٣Mi", True, 1.5, None]
)
def test_quantity_invalid_is_rejected(text: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity.parse(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spelled", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3B:00.0", "0000:3b:00.0"),
        ("00010000:01:1F.7", "10000:01:1f.7"),
        ("0009:01:00", "0009:01:00.0"),
    ],
)
def test_pci_address_has_kernel_spelling(spelled: str, address: str) -> None:
    assert pci.normalize_address(spelled) == address


@pytest.mark.parametrize("text", ["", "zz:00.0", "0000:3b:00.8", "3b", "0000:3b:00.0 x"])
def test_pci_address_invalid_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a PCI address"):
        pci.normalize_address(text)


@given(
    st.integers(1, 8).flatmap(lambda slices: st.tuples(st.integers(1, slices), st.just(slices))),
    st.integers(1, 400),
    st.lists(st.sampled_from(["+me", "+me.all", "+gfx", "-me"]), unique=True),
)
def test_profile_name_round_trips(counts: tuple[int, int], gigabytes: int, suffixes: list[str]) -> None:
    compute, slices = counts
    text = f"{compute}c.{slices}g.{gigabytes}gb{''.join(suffixes)}"
    parsed = profiles.parse_name(text)
    assert profiles.parse_name("MIG " + text) == parsed == profiles.parse_name(str(parsed))
    assert parsed.fills == (compute == slices) == (not str(parsed).startswith(f"{compute}c."))


@pytest.mark.parametrize(
    "text", ["", "1g", "1g.5", "g.5gb", "2c.1g.5gb", "1g.5gb+xx", "1g.5gb+me+me", "0c.1g.5gb", "3g.20GB", " 1g.5gb x"]
)
def test_profile_name_invalid_is_rejected(text: str) -> None:
    with pytest.raises(InvalidLayout, match=r"profile|slices"):
        profiles.parse_name(text)


@pytest.mark.parametrize("name", board_names())
def test_computed_name_matches_names_of_each_board(name: str) -> None:
    """The rule is for drivers without profile names. Its input are the values that NVML reports."""
    total = board_model.board(name)["memory"]["total_mib"] * board_model.MIB
    for entry in board_model.board(name)["mig"]["profiles"]:
        suffix = str(profiles.parse_name(entry["name"])).partition("gb")[2]
        number = {"": 0, "+me": 7, "+gfx": 0xA, "-me": 0xD, "+me.all": 0xF}[suffix]
        assert profiles.computed_name(number, entry["slices"], entry["memory_mib"], total) == entry["name"]


@pytest.mark.parametrize("name", board_names())
def test_maximum_of_profile_matches_each_board(name: str) -> None:
    pci_id = board_model.device(name).pci_device_id
    for profile, entry in zip(board_model.profiles(name), board_model.board(name)["mig"]["profiles"]):
        for reported in (entry["instances"], 0) if name == "a30" else (entry["instances"],):
            limit = profiles.maximum_of(profile.profile_id, reported, profile.placements, pci_id)
            assert limit == entry["instances"]


def test_error_text_and_data_have_remedy() -> None:
    error = InUse("GPU 0 is held by 12 (python)", pids=[12], claims=["a/b"], hint="End it.")
    assert str(error) == "GPU 0 is held by 12 (python). End it."
    assert error.to_dict() == {
        "code": "in-use",
        "message": "GPU 0 is held by 12 (python)",
        "hint": "End it.",
        "pids": [12],
        "claims": ["a/b"],
    }
    assert DoesNotFit("No room", blockers=("3g.40gb",)).to_dict()["blockers"] == ["3g.40gb"]
    assert LayoutFailed("Failed", undone=["x"]).to_dict()["undone"] == ["x"]
    assert BackendUnavailable("No driver").code == "backend-unavailable"
    assert issubclass(InUse, AcceleratorError) and str(AcceleratorError("Plain")) == "Plain"


def test_core_import_loads_only_standard_library() -> None:
    program = """
import json, pkgutil, sys
import dra_driver.core
for found in pkgutil.walk_packages(dra_driver.core.__path__, "dra_driver.core."):
    __import__(found.name)
names = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(names - set(sys.stdlib_module_names) - {"dra_driver", "__main__", "__mp_main__"})))
"""
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
