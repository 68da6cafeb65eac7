# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A small input does not become a large error."""

from __future__ import annotations

import base64
import json

import pytest
from dra_driver.core import errors
from dra_driver.core.dra.opaque_config import ConfigKind, ConfigRefused, decode_configuration
from dra_driver.core.schema import Integer, InvalidDocument, Record, decode
from dra_driver.core.texts import join_problems, shorten, shorten_bytes
from hypothesis import given
from hypothesis import strategies as st

FIELDS = {f"field{number}": Integer(0, 5) for number in range(50)}
#: 20 problems of 300 characters, the separators, and the number of further problems.
MOST = 20 * 302 + 40


@given(st.lists(st.text(max_size=400), max_size=60))
def test_join_problems_any_list_is_bounded(problems: list[str]) -> None:
    text = join_problems(problems)
    assert len(text) <= MOST
    assert ("and" in text and text.endswith(" more")) or len(problems) <= 20


@given(st.text(), st.integers(4, 50))
def test_shorten_any_text_is_bounded(text: str, longest: int) -> None:
    assert len(shorten(text, longest)) <= longest
    assert len(shorten_bytes(text + "\ud800", longest).encode()) <= longest


@pytest.mark.parametrize(
    "document",
    [
        {f"unknown{number}": 1 for number in range(100_000)},
        {"x" * 1_000_000: 1},
        dict.fromkeys(FIELDS, "y" * 100_000),
        {"field0": {"a": "z" * 1_000_000}},
    ],
    ids=["many fields", "long name", "wrong values", "nested"],
)
def test_decode_large_document_gives_a_small_error(document: dict[str, object]) -> None:
    record = Record(FIELDS)
    with pytest.raises(InvalidDocument) as found:
        decode(record, document)
    assert len(str(found.value)) <= MOST and len(found.value.problems) <= len(FIELDS) + 21
    kind = ConfigKind("v1", "Kind", "gpu", record)
    with pytest.raises(ConfigRefused) as refused:
        decode_configuration([kind], {"apiVersion": "v1", "kind": "Kind", **document})
    assert len(str(refused.value)) <= MOST + 60


@pytest.mark.parametrize("kind", [errors.AcceleratorError, errors.InUse, errors.DoesNotFit, errors.LayoutFailed])
def test_error_of_any_kind_is_bounded(kind: type[errors.AcceleratorError]) -> None:
    error = kind("m" * 1_000_000, hint="h" * 1_000_000)
    assert len(str(error)) <= 2 * 8192 + 2 and len(error.to_dict()["message"]) == 8192


def test_rejected_token_error_keeps_command_at_its_end() -> None:
    """The status shows 300 characters: a refusal keeps the command at its end, which was cut off before."""
    from dra_driver.api.token import refusal
    from dra_driver.core.texts import LONGEST_CAUSE, join_problems

    node = "n" * 253
    content = {
        "sub": f"system:serviceaccount:dra-accelerators:driver-{node}",
        "exp": 2_000_000_000,
        "iat": 1_900_000_000,
        "kubernetes.io": {"node": {"name": node, "uid": "0" * 36}},
    }
    body = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    text = refusal(f"e30.{body}.x", 1_950_000_000)
    assert join_problems([text], longest=LONGEST_CAUSE).endswith(f"dra.accelerators.site --limit {node}")
