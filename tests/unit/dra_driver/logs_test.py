# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Log lines: one event is one line, whatever text it contains."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata
from typing import Any

import pytest
from dra_driver import logs
from hypothesis import given
from hypothesis import strategies as st

FORMATTERS = [logs.TextFormatter(), logs.JsonFormatter()]
FORGED = "fine\nerror: forged claim=ns/other\r\x1b[2J\x9b31m\x7f\u2028\u202e"


def line(formatter: logging.Formatter, message: str, exception: str = "", **values: Any) -> str:
    error = None
    if exception:
        try:
            raise ValueError(exception)
        except ValueError:
            error = sys.exc_info()
    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", (message,), error)
    record.__dict__.update(logs.fields(**values))
    return formatter.format(record)


def controls(text: str) -> list[str]:
    return [
        each for each in text if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") or "\u202a" <= each <= "\u202e"
    ]


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_format_control_characters_are_escaped(formatter: logging.Formatter) -> None:
    found = line(formatter, FORGED, FORGED, claim=FORGED, tokens=[FORGED], none="")
    assert controls(found) == []
    assert "\\n" in found and "\\u001b" in found
    if isinstance(formatter, logs.JsonFormatter):
        decoded = json.loads(found)
        assert (decoded["message"], decoded["claim"], decoded["tokens"]) == (FORGED, FORGED, [FORGED])
        assert decoded["exception"].endswith(FORGED)


@pytest.mark.parametrize("formatter", FORMATTERS)
@given(message=st.text(), value=st.text(), exception=st.text())
def test_format_any_text_is_one_printable_line(
    formatter: logging.Formatter, message: str, value: str, exception: str
) -> None:
    found = line(formatter, message, exception, value=value, values={"a": value})
    assert controls(found) == [] and len(found.splitlines()) == 1


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_format_long_text_keeps_its_beginning_and_end(formatter: logging.Formatter) -> None:
    """journald splits a line above 48 KiB into separate lines: a long text keeps its start and its end."""
    long = f"begin{'x' * 1_000_000}end"
    found = line(formatter, long, long, value=long, values=[long])
    assert len(found) < 40_000
    assert found.count("begin") >= 3 and found.count("end") >= 3
