# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CEL as Kubernetes evaluates it for devices. tests/oracles compares selectors of the same kinds with the real scheduler."""

from __future__ import annotations

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._scheduling import cel
from ansible_collections.dra.accelerators.plugins.module_utils.core.allocation.objects import (
    Device,
    NotJudged,
    SelectorFailed,
)

DRIVER = "gpu.example.com"
OWN, SIZE = f"device.attributes['{DRIVER}']", f"device.capacity['{DRIVER}']"
DEVICE = Device(
    DRIVER,
    "n",
    {
        "name": "gpu-0",
        "attributes": {
            "model": {"string": "H100"},
            "index": {"int": 3},
            "linked": {"bool": True},
            "driverVersion": {"version": "1.10.0"},
            "numa": {"ints": [0, 1]},
            "apis": {"versions": ["1.0.0", "2.0.0"]},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:10"},
        },
        "capacity": {"memory": {"value": "80Gi"}, f"{DRIVER}/cores": {"value": "1500m"}},
    },
)


@pytest.fixture(scope="module")
def judge() -> cel.CelJudge:
    return cel.CelJudge()


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        (f"device.driver == '{DRIVER}'", True),
        (f"{OWN}.model == 'H100' && {OWN}.index in [2, 3]", True),
        (f"{OWN}['model'].lowerAscii().startsWith('h')", True),
        (f"{OWN}.linked", True),
        ("device.allowMultipleAllocations", False),
        (f"{OWN}.index < 3.5", True),
        ("device.attributes['resource.kubernetes.io'].pcieRoot.endsWith(':10')", True),
        ("device.attributes[device.driver].index == 3", True),
        # Optional values.
        (f"has({OWN}.nothing)", False),
        (f"{OWN}.?nothing.orValue('x') == 'x'", True),
        (f"{OWN}[?'model'].hasValue()", True),
        (f"{OWN}.?index.optMap(one, one > 2).orValue(false)", True),
        ("has(device.attributes['other.example.com'].thing)", False),
        ("'other.example.com' in device.attributes", True),
        ("device.attributes.exists(domain, domain == 'resource.kubernetes.io')", True),
        (f"cel.bind(own, {OWN}, own.index == 3 && own.model != 'A100')", True),
        # Quantities.
        (f"{SIZE}.memory.compareTo(quantity('40Gi')) >= 0", True),
        (f"{SIZE}.memory == quantity('81920Mi')", True),
        (f"{SIZE}.memory.isLessThan(quantity('80G'))", False),
        (f"{SIZE}.memory.asInteger() == {80 << 30}", True),
        (f"{SIZE}.cores.isInteger()", False),
        (f"{SIZE}.cores.asApproximateFloat() > 1.4", True),
        (f"{SIZE}.memory.sub(quantity('80Gi')).sign() == 0", True),
        (f"{SIZE}.memory.add(1).isGreaterThan({SIZE}.memory)", True),
        ("isQuantity('1.5Gi') && !isQuantity('200K')", True),
        # Versions.
        (f"{OWN}.driverVersion.isGreaterThan(semver('1.9.0'))", True),
        (f"{OWN}.driverVersion == semver('1.10.0+build')", True),
        (f"{OWN}.driverVersion.compareTo(semver('1.10.0-rc.1')) == 1", True),
        ("semver('1.0.0-rc.2').isLessThan(semver('1.0.0-rc.10'))", True),
        ("semver('1.0.0-alpha').isLessThan(semver('1.0.0-alpha.1'))", True),
        ("semver('1.0.0-1').isLessThan(semver('1.0.0-a'))", True),
        (f"{OWN}.driverVersion.major() == 1 && {OWN}.driverVersion.minor() == 10", True),
        ("semver('v1.2', true) == semver('1.2.0') && semver('01.02.03', true).patch() == 3", True),
        ("isSemver('1.0') || isSemver('01.0.0') || isSemver('v1.0.0')", False),
        ("isSemver('v1.0', true)", True),
        (f"'1.10.0' == {OWN}.driverVersion", False),
        # Lists and sets.
        (f"{OWN}.numa.includes(1) && !{OWN}.numa.includes(2) && {OWN}.index.includes(3)", True),
        (f"{OWN}.apis.includes(semver('2.0.0'))", True),
        (f"{OWN}.numa.all(node, node < 2) && size({OWN}.numa) == 2", True),
        ("sets.contains(['a', 'b'], ['a']) && sets.intersects([1, 2], [2, 3]) && sets.equivalent([1, 1], [1])", True),
        ("[3, 1, 2].max() == 3 && [3, 1, 2].min() == 1 && [1, 2].sum() == 3 && [1, 2].isSorted()", True),
        ("[1, 1, 2].distinct() == [1, 2] && [[1], [2]].flatten() == [1, 2] && [2, 1].sort() == [1, 2]", True),
        ("[1, 2, 3].slice(1, 3) == [2, 3] && lists.range(2) == [0, 1]", True),
        ("'gpu-12'.find('[0-9]+') == '12' && 'a1b2'.findAll('[0-9]') == ['1', '2']", True),
        ("'%s-%d'.format(['a', 1]) == 'a-1' && 'a,b'.split(',')[1] == 'b' && ' a '.trim() == 'a'", True),
        # An error that does not change the result is ignored.
        (f"true || {OWN}.nothing", True),
        (f"{OWN}.nothing == 'x' || {OWN}.index == 3", True),
        (f"{OWN}.index == 4 && {OWN}.nothing", False),
    ],
)
def test_matches_returns_result_of_expression(judge: cel.CelJudge, expression: str, answer: bool) -> None:
    assert judge.matches(expression, DEVICE) is answer and judge.problem(expression) == ""


@pytest.mark.parametrize(
    ("expression", "reason", "hint"),
    [
        (f"{OWN}.nothing == 'x'", "no such key: nothing", ".?nothing.orValue("),
        ("device.attributes['other.example.com'].thing == 'x'", "no such key: thing", ".?thing"),
        (f"{OWN}.driverVersion == '1.10.0'", "a version is not a text", "semver("),
        (f"{OWN}.driverVersion != '1.10.0'", "a version is not a text", "semver("),
        (f"{OWN}.model.isGreaterThan(semver('1.0.0'))", "no such overload", ""),
        (f"{OWN}.driverVersion.isGreaterThan(quantity('1'))", "no such overload", ""),
        (f"{SIZE}.cores.asInteger() > 0", "cannot convert value to integer", ""),
        (f"{OWN}.?nothing.orValue(semver('x')).major() == 1", "is no semantic version", ""),
        ("quantity('10GB').sign() == 1", "is not a quantity", ""),
        ("[1].slice(0, 4) == [1]", "cannot slice", ""),
        (f"{OWN}.index", "it gives a number, expected true or false", ""),
        (f"{SIZE}.memory", "it gives a quantity, expected true or false", ""),
        ("device.", "no valid CEL, at 1:8", ""),
    ],
)
def test_matches_error_equals_error_of_scheduler(judge: cel.CelJudge, expression: str, reason: str, hint: str) -> None:
    with pytest.raises(SelectorFailed) as error:
        judge.matches(expression, DEVICE)
    assert reason in error.value.reason and hint in error.value.hint
    with pytest.raises(SelectorFailed, match="selector"):
        judge.matches(expression, DEVICE)  # and again, from the cache


@pytest.mark.parametrize(
    "expression",
    [
        "ip('10.0.0.1').family() == 4",
        "[1, 2].sortBy(x, -x) == [2, 1]",
        "{'a': 1}.all(key, value, value > 0)",
        "[1].indexOf(1) == 0",
    ],
)
def test_matches_unsupported_expression_is_not_evaluated(judge: cel.CelJudge, expression: str) -> None:
    with pytest.raises(NotJudged):
        judge.matches(expression, DEVICE)


def test_value_derived_attributes_and_errors(judge: cel.CelJudge) -> None:
    assert judge.value(f"{OWN}.model + '!'", DEVICE) == {"string": "H100!"}
    assert judge.value(f"{OWN}.driverVersion", DEVICE) == {"version": "1.10.0"}
    assert judge.value(f"{OWN}.numa", DEVICE) == {"ints": [0, 1]}
    assert judge.value(f"{OWN}.linked", DEVICE) == {"bool": True}
    with pytest.raises(SelectorFailed, match="a derived attribute gives a quantity"):
        judge.value(f"{SIZE}.memory", DEVICE)
    assert "Syntax error" in judge.problem("a b")
    assert "10240 are the most" in judge.problem(" " * 10241)
