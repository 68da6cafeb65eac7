# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Opaque configurations: strict decoding, all errors in one message, and equal results for equivalent inputs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dra_driver.core.dra.opaque_config import ConfigRefused, Configuration, decode_configuration
from dra_driver.core.schema import (
    Choice,
    Entries,
    Integer,
    InvalidDocument,
    MemorySize,
    Record,
    UniqueStrings,
    any_of,
    decode,
    value_text,
)
from dra_driver.core.settings.knobs import Knob, clocks, fit_to_device, settings_of
from dra_driver.core.vendors.nvidia.configs import CONFIG_KINDS
from hypothesis import given
from hypothesis import strategies as st

VERSION = "resource.nvidia.com/v1beta1"
WHAT = Record(
    {
        "mode": Choice(("one", "two")),
        "share": Integer(1, 100, "percent"),
        "memory": MemorySize(1024**2),
        "each": Entries(r"[0-9]+", "a number", MemorySize()),
        "inner": Record({"mode": Choice(("one",))}, required=frozenset({"mode"})),
    },
    defaults={"mode": "one"},
)

#: Any JSON value, with the names of this API more often than by chance.
NAMES = [
    "maximum",
    "minimum",
    "Prohibited",
    "sharing",
    "strategy",
    "mpsConfig",
    "timeSlicingConfig",
    "interval",
    "apiVersion",
    "kind",
    "defaultActiveThreadPercentage",
    "defaultPinnedDeviceMemoryLimit",
    "defaultPerDevicePinnedMemoryLimit",
    "TimeSlicing",
    "MPS",
    "Long",
    "GpuConfig",
    "0",
    "1Gi",
    "1Ei",
    "1e400",
    "-1",
]
WORDS = st.sampled_from([*NAMES, VERSION])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300) | WORDS
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


def gpu(**sharing: Any) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": "GpuConfig", "sharing": sharing}


@pytest.mark.parametrize(
    ("document", "decoded"),
    [
        ({}, {"mode": "one"}),
        ({"mode": None}, {"mode": "one"}),
        ({"memory": "1Gi", "mode": "two"}, {"mode": "two", "memory": 1024**3}),
        ({"memory": 1048576.0}, None),
        ({"memory": "1048576500m"}, {"mode": "one", "memory": 1048577}),
        ({"share": 5.0}, {"mode": "one", "share": 5}),
        ({"each": {"1": "1Ki", "0": "1"}}, {"mode": "one", "each": {"0": 1, "1": 1024}}),
    ],
)
def test_decode_equivalent_documents_are_equal(document: dict[str, Any], decoded: dict[str, Any] | None) -> None:
    if decoded is None:
        with pytest.raises(InvalidDocument):
            decode(WHAT, document)
    else:
        assert decode(WHAT, document) == decoded


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the document is a list; expected a mapping with mode, share, "),
        ({"mode": "three"}, "mode is 'three'; expected one or two"),
        ({"mode": ["one"]}, "mode is a list; expected one or two"),
        ({"share": True}, "share is true; expected a whole number from 1 to 100 percent"),
        ({"share": 101}, "share is 101; expected"),
        ({"share": 1.5}, "share is 1.5; expected"),
        ({"memory": "1 Gi"}, "memory is '1 Gi'; expected an amount of memory such as 4Gi or 500M, 1Mi at least"),
        ({"memory": "1Ki"}, "memory is '1Ki'; expected"),
        ({"memory": "8Ei"}, "memory is '8Ei'; expected"),
        ({"each": {"a": "1"}}, "each is a mapping with the key 'a'; expected a number"),
        ({"each": {"0": {}}}, "each.0 is a mapping; expected an amount"),
        ({"each": {str(number): 1 for number in range(200)}}, "each is a mapping; expected .* 128 at most"),
        ({"inner": {}}, "inner.mode is missing; expected one"),
        ({"inner": {"mode": "one", "more": 1}}, "inner.more is unknown; expected mode"),
        ({"Mode": "one"}, "Mode is unknown; expected mode, share, memory, each or inner"),
    ],
)
def test_decode_error_is_named(document: Any, message: str) -> None:
    with pytest.raises(InvalidDocument, match=message):
        decode(WHAT, document)


def test_decode_all_errors_are_in_one_message() -> None:
    with pytest.raises(InvalidDocument) as found:
        decode(WHAT, {"mode": 1, "share": 0, "other": 2, "inner": {"mode": "x"}})
    assert [problem.path for problem in found.value.problems] == ["other", "mode", "share", "inner.mode"]


def test_message_formatting_of_values() -> None:
    assert (any_of(["a", "b", "c"]), any_of(["a"]), any_of([])) == ("a, b or c", "a", "nothing")
    assert (value_text({}), value_text(None), value_text("x" * 1000)) == ("a mapping", "null", "'" + "x" * 38 + "…")
    assert (value_text(-(10**38)), value_text(10**5000)) == (f"-1{'0' * 38}", "a number of more than 39 digits")


def mig(**sharing: Any) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": "MigDeviceConfig", "sharing": sharing}


def vfio(**iommu: Any) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": "VfioDeviceConfig", "iommu": iommu}


#: Facts: the kinds, fields, and values of the manifests in kubernetes-sigs/dra-driver-nvidia-gpu (demo/specs,
#: tests/bats/specs and the sharing pages of its site), those of NVIDIA's KubeVirt guide, and the other fields of its
#: API. The decoded values are this project's.
@pytest.mark.parametrize(
    ("parameters", "values"),
    [
        ({"apiVersion": VERSION, "kind": "GpuConfig"}, {}),
        (gpu(strategy="TimeSlicing"), {"sharing": {"strategy": "TimeSlicing"}}),
        (
            gpu(strategy="TimeSlicing", timeSlicingConfig={}),
            {"sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Default"}}},
        ),
        *(
            (
                gpu(strategy="TimeSlicing", timeSlicingConfig={"interval": interval}),
                {"sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}},
            )
            for interval in ("Default", "Short", "Medium", "Long")
        ),
        (gpu(strategy="MPS"), {"sharing": {"strategy": "MPS"}}),
        *(
            (
                make(strategy="MPS", mpsConfig=given),
                {"sharing": {"strategy": "MPS", "mpsConfig": {**given, **read}}},
            )
            for make in (gpu, mig)
            for given, read in (
                ({}, {}),
                ({"defaultActiveThreadPercentage": 50}, {}),
                (
                    {
                        "defaultActiveThreadPercentage": 50,
                        "defaultPinnedDeviceMemoryLimit": "10Gi",
                        "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi"},
                    },
                    {
                        "defaultPinnedDeviceMemoryLimit": 10 * 1024**3,
                        "defaultPerDevicePinnedMemoryLimit": {"0": 5 * 1024**3},
                    },
                ),
                ({"defaultPinnedDeviceMemoryLimit": "500M"}, {"defaultPinnedDeviceMemoryLimit": 500_000_000}),
                ({"defaultActiveThreadPercentage": 20, "multiUser": True}, {}),
                ({"multiUser": False}, {}),
                ({"sharedDaemon": True}, {}),
            )
        ),
        ({"apiVersion": VERSION, "kind": "MigDeviceConfig"}, {}),
        (mig(strategy="TimeSlicing"), {"sharing": {"strategy": "TimeSlicing"}}),
        ({"apiVersion": VERSION, "kind": "VfioDeviceConfig"}, {}),
        (vfio(backendPolicy="LegacyOnly"), {"iommu": {"backendPolicy": "LegacyOnly", "enableAPIDevice": False}}),
        *(
            (vfio(**iommu), {"iommu": iommu})
            for policy in ("LegacyOnly", "PreferIommuFD")
            for iommu in ({"backendPolicy": policy, "enableAPIDevice": True},)
        ),
    ],
)
def test_decode_vendor_manifests_are_accepted(parameters: dict[str, Any], values: dict[str, Any]) -> None:
    assert decode_configuration(CONFIG_KINDS, parameters).values == values


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (gpu(), "sharing.strategy is missing; expected TimeSlicing or MPS"),
        (
            gpu(strategy="MPS", timeSlicingConfig={"interval": "Long"}),
            "sharing.timeSlicingConfig is given with strategy MPS; expected strategy TimeSlicing",
        ),
        (
            gpu(strategy="TimeSlicing", timeSlicingConfig={"interval": "long"}),
            "interval is 'long'; expected Default, Short, Medium or Long",
        ),
        (
            gpu(strategy="MPS", mpsConfig={"multiUser": "yes"}),
            "sharing.mpsConfig.multiUser is 'yes'; expected true or false",
        ),
        (
            gpu(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 0}),
            "defaultActiveThreadPercentage is 0; expected a whole number from 1 to 100 percent",
        ),
        (
            gpu(strategy="MPS", mpsConfig={"defaultPerDevicePinnedMemoryLimit": {"gpu0": "1Gi"}}),
            "a mapping with the key 'gpu0'; expected a device's index or UUID",
        ),
        (
            {"apiVersion": VERSION, "kind": "MigDeviceConfig", "sharing": {"strategy": "MPS", "timeSlicingConfig": {}}},
            "sharing.timeSlicingConfig is unknown; expected strategy or mpsConfig",
        ),
        (
            {"apiVersion": VERSION, "kind": "Gpuconfig"},
            "its kind is '.*' 'Gpuconfig'. This version knows .* GpuConfig, ",
        ),
        ({"kind": "GpuConfig"}, "its kind has no apiVersion"),
    ],
)
def test_decode_vendor_rejected_values_are_rejected(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        decode_configuration(CONFIG_KINDS, parameters)


def test_decode_multi_user_is_optional() -> None:
    enabled, disabled, absent = (
        decode_configuration(CONFIG_KINDS, gpu(strategy="MPS", mpsConfig=given))
        for given in ({"multiUser": True}, {"multiUser": False}, {})
    )
    assert [each.kind.sharing(each.values) for each in (enabled, disabled, absent)] == [
        {"strategy": "MPS", "multiUser": True},
        {"strategy": "MPS"},
        {"strategy": "MPS"},
    ]


FIELDS = st.sampled_from([(kind, field) for kind in CONFIG_KINDS for field in kind.record.fields])


@given(JSON.filter(lambda content: content is not None), FIELDS)
def test_decode_any_document_succeeds_or_has_short_error(content: Any, kind_and_field: Any) -> None:
    kind, field = kind_and_field
    identity = {"apiVersion": kind.api_version, "kind": kind.name}
    try:
        configuration = decode_configuration(CONFIG_KINDS, {**identity, field: content})
    except ConfigRefused as error:
        assert error.problems and all(len(str(problem)) < 400 for problem in error.problems)
    else:
        again = {**identity, **configuration.values}
        assert decode_configuration(CONFIG_KINDS, again) == Configuration(configuration.kind, configuration.values)


SETTINGS = {"apiVersion": "dra.accelerators/v1alpha1", "kind": "DeviceSettings"}
KNOBS = {
    "powerLimit": Knob(700.0, Integer(200, 700, "W")),
    "graphicsClocks": Knob(None, clocks(345, 1980, defaults={"minimum": 345})),
    "workloadProfiles": Knob([], UniqueStrings(Choice(("max-p", "max-q", "compute")), most=3)),
}


def wanted(**fields: Any) -> dict[str, Any]:
    return settings_of([decode_configuration(CONFIG_KINDS, {**SETTINGS, **fields})])


def test_fit_to_device_adds_device_bounds() -> None:
    fields = {
        "powerLimit": 200.0,
        "graphicsClocks": {"maximum": 1980},
        "workloadProfiles": ["max-q", "compute"],
    }
    assert fit_to_device(wanted(**fields), KNOBS) == (
        {
            "powerLimit": 200,
            "graphicsClocks": {"minimum": 345, "maximum": 1980},
            "workloadProfiles": ["compute", "max-q"],
        },
        [],
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"powerLimit": 199}, "powerLimit is 199; expected a whole number from 200 to 700 W"),
        ({"powerLimit": 701}, "powerLimit is 701; expected a whole number from 200 to 700 W"),
        (
            {"graphicsClocks": {"minimum": 300, "maximum": 900}},
            "graphicsClocks.minimum is 300; expected a whole number from 345 to 1980 MHz",
        ),
        (
            {"memoryClocks": {"maximum": 900}},
            "memoryClocks is not supported by this device; expected powerLimit, graphicsClocks or workloadProfiles",
        ),
        (
            {"workloadProfiles": ["max-q", "hpc"]},
            "workloadProfiles[0] is 'hpc'; expected max-p, max-q or compute",
        ),
    ],
)
def test_fit_to_device_unsupported_settings_name_the_range(fields: dict[str, Any], problem: str) -> None:
    assert [str(each) for each in fit_to_device(wanted(**fields), KNOBS)[1]] == [problem]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"powerLimit": 0}, "powerLimit is 0; expected a whole number from 1 to 100000 W"),
        ({"powerLimit": "300W"}, "powerLimit is '300W'; expected"),
        ({"graphicsClocks": 900}, "graphicsClocks is 900; expected a mapping with minimum or maximum"),
        ({"graphicsClocks": {"minimum": 900}}, "graphicsClocks.maximum is missing"),
        (
            {"memoryClocks": {"minimum": 901, "maximum": 900}},
            "memoryClocks.minimum is 901; expected no more than the maximum, 900 MHz",
        ),
        ({"computeMode": "Exclusive"}, "expected Default, ExclusiveProcess or Prohibited"),
        (
            {"ecc": True},
            "ecc is unknown; expected powerLimit, graphicsClocks, memoryClocks, computeMode or workloadProfiles",
        ),
        ({"workloadProfiles": "max-q"}, "workloadProfiles is 'max-q'; expected a list with 1 to 32 different ones of"),
        ({"workloadProfiles": []}, "workloadProfiles is a list of 0; expected a list with 1 to 32"),
        ({"workloadProfiles": ["max-q"] * 2}, "workloadProfiles is a list with 'max-q' more than once"),
        ({"workloadProfiles": ["hpc", "Max Q"]}, r"workloadProfiles\[1\] is 'Max Q'; expected the name of a workload"),
        ({"workloadProfiles": [None]}, r"workloadProfiles\[0\] is null; expected the name of a workload profile"),
    ],
)
def test_decode_settings_outside_all_devices_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        wanted(**fields)


@given(st.dictionaries(WORDS, LEAVES, max_size=4))
def test_decode_any_kind_is_known_or_rejected(parameters: dict[str, Any]) -> None:
    try:
        kind = decode_configuration(CONFIG_KINDS, parameters).kind
    except ConfigRefused as error:
        assert error.hint
    else:
        assert (kind.api_version, kind.name) == (parameters["apiVersion"], parameters["kind"])


@pytest.mark.parametrize(
    ("given", "interface"),
    [
        ({}, (False, False)),
        ({"iommu": None}, (False, False)),
        ({"iommu": {"backendPolicy": "LegacyOnly"}}, (False, False)),
        ({"iommu": {"backendPolicy": "PreferIommuFD"}}, (True, False)),
        ({"iommu": {"backendPolicy": "PreferIommuFD", "enableAPIDevice": True}}, (True, True)),
    ],
)
def test_decode_passthrough_interface(given: dict[str, Any], interface: tuple[bool, bool]) -> None:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", **given}
    configuration = decode_configuration(CONFIG_KINDS, parameters)
    assert configuration.kind.device_kind == "passthrough"
    assert configuration.kind.passthrough(configuration.values) == interface


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"iommu": {}}, "iommu.backendPolicy is missing"),
        ({"iommu": {"backendPolicy": "RequireIommuFD"}}, "expected LegacyOnly or PreferIommuFD"),
        ({"iommu": {"backendPolicy": "LegacyOnly", "enableAPIDevice": 1}}, "iommu.enableAPIDevice is 1"),
        ({"sharing": {}}, "sharing is unknown"),
    ],
)
def test_decode_invalid_passthrough_is_rejected(given: dict[str, Any], message: str) -> None:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", **given}
    with pytest.raises(ConfigRefused, match=re.escape(message)):
        decode_configuration(CONFIG_KINDS, parameters)
