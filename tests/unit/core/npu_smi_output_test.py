# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The output of npu-smi is parsed by the names of its columns. The outputs here are invented, in its layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import chip_model
import pytest
from dra_driver.core.errors import AcceleratorError, NotPermitted, Unsupported
from dra_driver.core.vendors.ascend.npu_smi import npu_smi_output, npu_smi_tables
from dra_driver.core.vendors.ascend.templates import SHARED
from hypothesis import given
from hypothesis import strategies as st

WIDTHS = (19, 9, 9, 9, 14, 14, 10)


def keyed(*pairs: tuple[str, object]) -> str:
    return "".join(f"\t{key:<30} : {value}\n" for key, value in pairs)


def boxed(width: int, *lines: str, rule: str = "|") -> str:
    """Return lines in a box. ``=`` and ``-`` stand for rules."""
    drawn = []
    for line in lines:
        if line in ("=", "-"):
            edge = rule if line == "=" else "+"
            drawn.append(edge + line * width + edge)
        else:
            drawn.append(f"|{line:<{width}}|")
    return "\n".join(drawn) + "\n"


def spread(cells: Sequence[object], widths: Sequence[int]) -> str:
    return " ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths))


def template_box(kind: str, rule: str = "|", extra: bool = False) -> str:
    widths = (*WIDTHS, 8) if extra else WIDTHS
    lines = ["-", " Templates of this chip", "-"]
    lines.append(spread(("Name", "AICORE", "Memory", "AICPU", "VPC", "VENC", "JPEGD", "FOO"), widths))
    lines.append(spread(("", "", "GB", "", "PNGD", "VDEC", "JPEGE", ""), widths))
    lines.append("=")
    for name, (cores, memory, helpers, vpc, venc, vdec, jpegd, jpege) in chip_model.CHIPS[kind].rows.items():
        lines.append(spread((name, cores, memory, helpers, vpc, venc, jpegd, "7"), widths))
        lines.append(spread(("", "", "", "", "NA", vdec, jpege, ""), widths))
        lines.append("-")
    return boxed(90 + 9 * extra, *lines, rule=rule)


def slice_box(rows: Sequence[Sequence[object]], *, units: bool = False, helpers: str = "3/7", bars: bool = True) -> str:
    widths = (9, 11, 8, 8, 7, 8, 8, 8, 8)
    names = ("AICORE", "Memory(GB)", "AICPU", "VPC", "VENC", "VDEC", "JPEGD", "JPEGE", "PNGD")
    if units:
        names = ("AICORE", "Memory", *names[2:])
    pairs = ("4/8", "10/21", helpers, "6/12", "2/3", "6/12", "8/16", "4/8", "NA/NA")
    lines = ["-", " What this chip has", " Format: Free/Total", "-", spread(names, widths)]
    if units:
        lines.append(spread(("", "GB"), widths))
    lines += ["=", spread(pairs, widths), "-", f" Slices: {len(rows)}", "-"]
    between = " | " if bars else "   "
    cells = ("Vnpu ID", "Vgroup ID", "Container ID", "Status", "Template Name")
    lines.append(between.join(f"{cell:<14}" for cell in cells))
    for each in rows:
        lines += ["-", between.join(f"{cell!s:<14}" for cell in each)]
    return boxed(90, *lines, "-")


@pytest.mark.parametrize("kind", sorted(chip_model.CHIPS))
@pytest.mark.parametrize("rule", ["|", "+"])
@pytest.mark.parametrize("extra", [False, True])
def test_templates_are_read_from_two_lines(kind: str, rule: str, extra: bool) -> None:
    assert npu_smi_output.parse_templates(template_box(kind, rule, extra)) == chip_model.templates_and_totals(kind)[0]


def test_templates_fractions_are_exact_and_missing_values_absent() -> None:
    lines = [
        spread(("Name", "AICORE", "Memory", "AICPU", "VPC", "VENC", "JPEGD"), WIDTHS),
        spread(("", "", "GB", "", "PNGD", "VDEC", "JPEGE"), WIDTHS),
        "=",
        spread(("virxx", "1", "1.5", "0.1", "NA", "0", "2"), WIDTHS),
        spread(("", "", "", "", "0.5", "1", "NA"), WIDTHS),
    ]
    (found,) = npu_smi_output.parse_templates(boxed(90, *lines))
    assert found.memory == Fraction(3, 2) and found.amounts["aiCPU"] == Fraction(1, 10)
    assert set(SHARED) - set(found.amounts) == {"vpc", "jpege"}


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("bars", [False, True])
def test_slices_and_free_amounts_are_read(units: bool, bars: bool) -> None:
    rows = [
        (100, 0, "00ab12cd34ef", 1, "vir02_1c"),
        (101, 1, "000000000000", 0, "vir01"),
        (104, "NA", "ffffffffffff", 1, "vir01"),
    ]
    found = npu_smi_output.parse_vnpus(slice_box(rows, units=units, bars=bars))
    assert found.slices == (
        npu_smi_output.VnpuRow(100, "vir02_1c", 0, True, "00ab12cd34ef"),
        npu_smi_output.VnpuRow(101, "vir01", 1, False),
        npu_smi_output.VnpuRow(104, "vir01", None, True),
    )
    assert found.totals == {
        "aiCores": 8,
        "memory": 21,
        "aiCPU": 7,
        "vpc": 12,
        "venc": 3,
        "vdec": 12,
        "jpegd": 16,
        "jpege": 8,
    }
    assert found.free["aiCores"] == 4 and found.free["memory"] == 10


def test_slices_empty_table_or_no_table() -> None:
    found = npu_smi_output.parse_vnpus(slice_box([], helpers="NA/NA"))
    assert found.slices == () and "aiCPU" not in found.totals
    assert npu_smi_output.parse_vnpus(slice_box([]).partition(" Slices")[0]).slices == ()


def mapped(names: Sequence[str], *rows: Sequence[object]) -> str:
    return "".join("\t" + "".join(f"{cell!s:<30}" for cell in each).rstrip() + "\n" for each in (names, *rows))


@pytest.mark.parametrize(
    ("names", "rows", "expected"),
    [
        (
            ("NPU ID", "Chip ID", "Chip Logic ID", "Chip Name"),
            [(1, 0, 0, "Ascend 310P3"), (1, 1, 1, "Ascend 310P3"), (1, 2, "-", "Mcu")],
            [npu_smi_output.MappedChip(1, 0, "Ascend 310P3", 0), npu_smi_output.MappedChip(1, 1, "Ascend 310P3", 1)],
        ),
        (
            ("NPU ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name"),
            [(0, 1, 1, 1, "Ascend910")],
            [npu_smi_output.MappedChip(0, 1, "Ascend910", 1, 1)],
        ),
        (
            ("NPU ID", "Slot ID", "Chip ID", "Chip Phy-ID", "Chip Name"),
            [(3, 7, 0, 5, "Ascend950")],
            [npu_smi_output.MappedChip(3, 0, "Ascend950", None, 5)],
        ),
    ],
)
def test_chips_are_listed_by_number(names: Sequence[str], rows: list[Sequence[object]], expected: list[object]) -> None:
    assert list(npu_smi_output.parse_chips(mapped(names, *rows))) == expected


def test_board_numbers_of_one_chip() -> None:
    old = "\tChip Physical ID:4\n\tChip Logic ID:3\n\tNPU ID:2\n\tChip ID:1\n"
    assert npu_smi_output.parse_chip_numbers(old) == {"physical": 4, "logic": 3, "card": 2, "chip": 1}
    assert npu_smi_output.parse_chip_numbers("\tPhy-ID:4\n\tNPU ID:2\n\tSlot ID:9\n\tChip ID:0\n") == {
        "physical": 4,
        "card": 2,
        "chip": 0,
    }


@pytest.mark.parametrize("key", ["Health", "Health Status"])
def test_health_is_read(key: str) -> None:
    found = npu_smi_output.parse_health(
        keyed(
            ("NPU ID", 0), (key, "Alarm"), ("Error Code", "0x80E01801, 80CB8009"), ("Error Information", "two: of them")
        )
    )
    assert found == npu_smi_output.ChipHealth("Alarm", (0x80E01801, 0x80CB8009))
    assert npu_smi_output.parse_health(keyed((key, "OK"), ("Error Code", "NA"))) == npu_smi_output.ChipHealth("OK", ())


@pytest.mark.parametrize("label", ["NPU", "Phy-ID"])
@pytest.mark.parametrize("affinity", [True, False])
def test_links_are_read(label: str, affinity: bool) -> None:
    tail = "CPU Affinity" if affinity else ""
    text = (
        f"\t       {label}0       {label}1       NIC0       {tail}\n"
        f"{label}0       X          HCCS       PHB        {'0-23,48-71' if affinity else ''}\n"
        f"{label}1       HCCS       X          SYS        {'24-47' if affinity else ''}\n"
        "NIC0       PHB        SYS        X\n\nLegend:\n  X = itself\n  HCCS = a link\n"
    )
    found = npu_smi_output.parse_links(text)
    assert found == {(0, 0): "X", (0, 1): "HCCS", (1, 0): "HCCS", (1, 1): "X"}


def test_modes_are_read() -> None:
    assert [npu_smi_output.parse_are_dies_separate(keyed(("Multi Die Policy", each))) for each in "01"] == [False, True]
    assert npu_smi_output.parse_is_container_mode(
        keyed(("vnpu-mode", "docker"))
    ) and not npu_smi_output.parse_is_container_mode(keyed(("vnpu-mode", "VM")))
    assert npu_smi_output.parse_is_shared(
        keyed(("Device-share Status", "True"))
    ) and not npu_smi_output.parse_is_shared(keyed(("x", "False")))
    assert npu_smi_output.parse_is_recovery_on(
        keyed(("vnpu-cfg-recover", "Enable"))
    ) and not npu_smi_output.parse_is_recovery_on(keyed(("x", "Disable")))


@pytest.mark.parametrize(
    "read",
    [
        npu_smi_output.parse_chips,
        npu_smi_output.parse_templates,
        npu_smi_output.parse_vnpus,
        npu_smi_output.parse_health,
        npu_smi_output.parse_links,
        npu_smi_output.parse_is_container_mode,
        npu_smi_output.parse_are_dies_separate,
        npu_smi_output.parse_is_recovery_on,
        npu_smi_output.parse_is_shared,
    ],
)
def test_readers_other_output_raises_unread_output(read: Callable[[str], object]) -> None:
    for text in ("", "This device does not support it.\n", keyed(("Status", "Fail"))):
        with pytest.raises(npu_smi_output.UnexpectedOutput, match="npu-smi"):
            read(text)


@given(st.text("|+-=:/ \n\tANPU ID0123456789", max_size=200))
def test_readers_any_text_raises_only_unread_output(text: str) -> None:
    for read in (
        npu_smi_output.parse_chip_numbers,
        npu_smi_output.parse_chips,
        npu_smi_output.parse_templates,
        npu_smi_output.parse_vnpus,
        npu_smi_output.parse_health,
        npu_smi_output.parse_links,
    ):
        try:
            read(text)
        except npu_smi_output.UnexpectedOutput:
            continue


@given(st.lists(st.sampled_from(["a", "b 1", "c(d)", "12", "x/y"]), min_size=1, max_size=6), st.booleans())
def test_row_value_belongs_to_column_at_its_start(names: list[str], bars: bool) -> None:
    names = [f"{name}{at}" for at, name in enumerate(names)]
    between = " | " if bars else "   "
    line = "|" + between.join(f"{name:<9}" for name in names) + "|"
    values = "|" + between.join(f"{at:<9}" for at in range(len(names))) + "|"
    assert npu_smi_tables.parse_row(npu_smi_tables.parse_header(line), values) == {
        name: [str(at)] for at, name in enumerate(names)
    }


def test_refuse_failure_requires_success_in_output() -> None:
    good = keyed(("Status", "OK"), ("Message", "it was made"))
    npu_smi_output.raise_failure(0, good, "Making a slice")
    with pytest.raises(AcceleratorError, match="the mode is wrong") as refused:
        npu_smi_output.raise_failure(0, "the mode is wrong\n", "Making a slice")
    assert refused.value.code == "refused"
    with pytest.raises(AcceleratorError, match="occupied"):
        npu_smi_output.raise_failure(
            0, keyed(("Status", "Fail"), ("Message", "resource occupied")), "Switching the mode"
        )
    with pytest.raises(Unsupported, match="does not support it"):
        npu_smi_output.raise_failure(217, good, "Making a slice")
    with pytest.raises(AcceleratorError) as refused:
        npu_smi_output.raise_failure(215, "", "Making a slice")
    assert refused.value.code == "invalid-argument"
    with pytest.raises(NotPermitted):
        npu_smi_output.raise_failure((-9002) & 0xFF, "", "Making a slice")
    with pytest.raises(AcceleratorError, match="exited with 3"):
        npu_smi_output.raise_failure(3, "", "Making a slice")
