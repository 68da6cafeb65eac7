# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Decoding of API answers: one undecodable object affects that object only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from dra_driver.core import decoding
from dra_driver.core.decoding import (
    MAX_DIGITS,
    MAX_LEVELS,
    MAX_NAMED,
    SkippedObject,
    UndecodableObject,
    decode,
    describe_skipped,
    loads,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.undecodable import MARK, OTHER, OWN, VALUES, claim, dumps

Json = dict[str, Any]
VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
# Texts that the json module accepts and rejects, in any nesting.
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["items", "type", "object"]), inner),
)


def listed(*items: Json) -> Json:
    return {"kind": "ResourceClaimList", "metadata": {"resourceVersion": "9", "continue": "next"}, "items": list(items)}


def names(value: Json) -> list[str]:
    return [each["metadata"]["name"] for each in value["items"]]


@VALUE
def test_list_with_undecodable_object_skips_that_object(value: bytes) -> None:
    items = [claim("a", opaque=OTHER), claim("bad", spec=MARK), claim("z")]
    found = decode(dumps(listed(*items), value), opaque_of=())
    assert names(found.value) == ["a", "z"]
    assert found.value["metadata"] == {"resourceVersion": "9", "continue": "next"}
    assert [each.name for each in found.skipped] == ["ResourceClaim default/bad"]
    assert found.skipped[0].reason.startswith("spec.devices.unknown") or "spec.unknown" in found.skipped[0].reason
    assert "ResourceClaim default/bad" in describe_skipped(found.skipped)


@VALUE
@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_watch_event_with_undecodable_object_keeps_its_metadata(value: bytes, kind: str) -> None:
    found = decode(dumps({"type": kind, "object": claim("bad", spec=MARK)}, value), opaque_of=())
    assert found.value == {
        "type": kind,
        "object": {
            "kind": "ResourceClaim",
            "apiVersion": "resource.k8s.io/v1",
            "metadata": {"name": "bad", "namespace": "default", "uid": "uid-bad", "resourceVersion": "7"},
        },
    }
    assert [each.name for each in found.skipped] == ["ResourceClaim default/bad"]


@VALUE
def test_single_undecodable_object_raises_error_with_its_name(value: bytes) -> None:
    with pytest.raises(UndecodableObject, match="ResourceClaim default/bad"):
        decode(dumps(claim("bad", spec=MARK), value))


@VALUE
def test_opaque_parameters_of_other_drivers_are_not_decoded(value: bytes) -> None:
    found = decode(dumps(listed(claim("a", opaque=OTHER)), value), opaque_of=(OWN,))
    assert not found.skipped
    for place in (found.value["items"][0]["spec"], found.value["items"][0]["status"]["allocation"]):
        assert place["devices"]["config"][0]["opaque"] == {"driver": OTHER, "parameters": {}}


@pytest.mark.parametrize("indent", [None, 2])
def test_decodable_parameters_of_other_drivers_are_not_decoded_either(indent: int | None) -> None:
    text = json.dumps(claim("a", opaque=OTHER), indent=indent).encode()
    assert decode(text, opaque_of=(OWN,)).value["spec"]["devices"]["config"][0]["opaque"]["parameters"] == {}
    assert decode(text, opaque_of=(OTHER,)).value["spec"]["devices"]["config"][0]["opaque"]["parameters"] == {"a": MARK}
    assert decode(text).value == claim("a", opaque=OTHER)


def test_parameters_before_the_driver_are_removed() -> None:
    item = claim("a", opaque=OTHER)
    for place in (item["spec"], item["status"]["allocation"]):
        opaque = place["devices"]["config"][0]["opaque"]
        opaque["driver"] = opaque.pop("driver")
    found = decode(dumps(listed(item)), opaque_of=(OWN,))
    assert not found.skipped
    assert found.value["items"][0]["spec"]["devices"]["config"][0]["opaque"] == {"parameters": {}, "driver": OTHER}


@VALUE
def test_own_undecodable_parameters_skip_the_claim(value: bytes) -> None:
    found = decode(dumps(listed(claim("a", opaque=OWN), claim("z")), value), opaque_of=(OWN,))
    assert names(found.value) == ["z"]
    assert "opaque.parameters" in found.skipped[0].reason


@VALUE
def test_managed_fields_and_status_data_do_not_hide_the_claim(value: bytes) -> None:
    found = decode(dumps(listed(claim("a", managed=True, data=OTHER)), value), opaque_of=(OWN,))
    assert not found.skipped
    item = found.value["items"][0]
    assert item["metadata"]["managedFields"] == [{"manager": "someone", "fieldsV1": {}}]
    assert item["status"]["devices"][0]["data"] == {}


def test_keys_of_opaque_parameters_do_not_imitate_other_fields() -> None:
    trick = {'x"opaque': {"driver": OTHER, "parameters": {"kept": 1}}, "metadata.managedFields[0].fieldsV1": MARK}
    item = claim("a", opaque=OWN)
    item["spec"]["devices"]["config"][0]["opaque"]["parameters"] = trick
    found = decode(dumps(item, b"1"), opaque_of=(OWN,))
    assert found.value["spec"]["devices"]["config"][0]["opaque"]["parameters"]['x"opaque']["parameters"] == {"kept": 1}
    assert decode(dumps(listed(item)), opaque_of=(OWN,)).skipped


def test_text_that_looks_like_parameters_stays() -> None:
    item = claim("a")
    item["metadata"]["annotations"] = {"note": '{"opaque":{"driver":"d","parameters":{"a":[1,2]}}}'}
    assert decode(dumps(item), opaque_of=()).value == item


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    found = decode(dumps(listed(claim("a", opaque=OWN), claim("z")), b'"\xff\xfe"'), opaque_of=(OWN,))
    assert names(found.value) == ["a", "z"] and not found.skipped


def test_levels_up_to_the_limit_are_decoded() -> None:
    for levels, skipped in ((MAX_LEVELS - 8, False), (MAX_LEVELS + 8, True)):
        value = b"[" * levels + b"]" * levels
        assert bool(decode(dumps(listed(claim("a", spec=MARK)), value)).skipped) is skipped


@pytest.mark.parametrize("text", ["", "[", "{", '{"a":', "nope", "[1,", "NaN", '{"a":Infinity}', "[" * 5000, '"a'])
def test_text_that_is_not_json_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError) as found:
        decode(text.encode())
    assert not isinstance(found.value, UndecodableObject) or "NaN" in text or "Infinity" in text
    with pytest.raises(ValueError):
        loads(text)


@VALUE
def test_loads_raises_value_error_for_undecodable_text(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"levels deep|digits|surrogate|range of a float"):
        loads(value.decode())


def test_integers_up_to_the_limit_are_decoded() -> None:
    assert loads("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert float(loads("9" * MAX_DIGITS)) > 0, "programs can compute with it"


@pytest.mark.parametrize("text", ["1e400", "-1e400", "[1.0E999]", "9" * (MAX_DIGITS + 1)])
def test_numbers_beyond_the_limit_are_rejected(text: str) -> None:
    for document in (text, f'{{"b": "\\ud800", "a": {text}}}'):
        with pytest.raises(ValueError, match=r"range of a float|digits"):
            loads(document)


def test_floats_within_the_range_are_decoded() -> None:
    assert loads('[1.5e308, -1.5e308, 1e-400, 0.5, {"a": 1.25}]') == [1.5e308, -1.5e308, 0.0, 0.5, {"a": 1.25}]


def test_error_names_the_field_of_a_number_that_is_too_large() -> None:
    text = dumps(claim("c1", opaque=OWN), b"1e400")
    with pytest.raises(
        UndecodableObject, match=r"ResourceClaim default/c1.*parameters\.a is a number beyond the range"
    ):
        decode(text, opaque_of=[OWN])


def test_warning_names_at_most_some_objects() -> None:
    text = describe_skipped([SkippedObject("x" * 5000, "y" * 5000)] * 500)
    assert len(text) < MAX_NAMED * 700 and f"and {500 - MAX_NAMED} more" in text


@given(DOCUMENTS)
def test_decoding_agrees_with_the_json_module(document: Any) -> None:
    text = json.dumps(document)
    found = decode(text.encode(), opaque_of=None)
    assert found.value == json.loads(text) and not found.skipped
    assert loads(text) == json.loads(text)


class CountedTokens:
    """The pattern of a token, which counts the matched characters."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.characters = 0

    def finditer(self, text: str, *place: int) -> Iterator[re.Match[str]]:
        for found in self._pattern.finditer(text, *place):
            self.characters += len(found[0])
            yield found


@pytest.mark.parametrize("end", ["", "\\", "a", '\\"'])
def test_string_without_end_is_one_token(end: str) -> None:
    """A string without an end is one token. Trying each escaped quote as a start takes quadratic time and blocks the event loop for minutes."""
    text = '"' + '\\"' * 50 + end
    assert [token.span() for token in decoding._TOKEN.finditer(text)] == [(0, len(text))]
    with pytest.raises(ValueError, match="Unterminated string"):
        loads(f'{{"a": {text}')


def test_parameters_without_end_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedTokens(decoding._TOKEN)
    monkeypatch.setattr(decoding, "_TOKEN", counted)
    text = '{"opaque":{"driver":"x","parameters":[' * 100
    with pytest.raises(ValueError, match="an array or object has no end"):
        decode(text.encode(), opaque_of=[OWN])
    assert counted.characters < 3 * len(text)
