# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The meaning of chips' health and error codes, as data.

The groups of codes are the defaults of the device plugin of Ascend/mind-cluster (faultCode.json). If a code is in two
groups, the more severe one counts. Codes are a state: a chip reports all codes that apply at the moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ....health.conditions import Ends, Severity, Sign

HEALTH = "health"
ERROR_CODE = "error-code"
NETWORK = "network"

_RESET = "The chip has to be reset (npu-smi set -t reset) once nothing uses it."
_LOOK_UP = "Look the code up in the vendor's list of health management fault definitions."


@dataclass(frozen=True)
class Kind:
    """The effect of a group of codes on a chip, and the remedy."""

    severity: Severity
    remedy: str
    is_mended_by_reset: bool = False


NOTHING = Kind(Severity.INFORMATIVE, "Nothing has to be done.")
AILING = Kind(Severity.INFORMATIVE, "It works with reduced performance. Check it when possible.")
REQUEST = Kind(Severity.INFORMATIVE, "Repeat the computations of that moment.")
APPLICATION = Kind(Severity.INFORMATIVE, "Restart the application.")
RESET_WHEN_FREE = Kind(Severity.DEGRADED, _RESET, is_mended_by_reset=True)
RESET = Kind(Severity.FAILED, _RESET, is_mended_by_reset=True)
REPLACE = Kind(Severity.FAILED, "Let the vendor check the board. A replacement may be necessary.")

#: In increasing severity. A later group overrides earlier ones.
_GROUPS: tuple[tuple[Kind, str], ...] = (
    (
        NOTHING,
        """
        4C1F8608 80818200 80818201 80818202 80818203 80818204 80818205 80A18005 80A18006 80A38003 80A38006 80A58003 80A58006
        80B78005 80B78006 80B98006 80BD8006 80C98006 80CB8006 80CD8003 80CD8006 80D38009 80DD8007 80DD8008 80DE0200 80DE1803
        80DE1805 80DF8006 80DF8400 80DF8401 80E00209 80E01805 80E01809 80E18006 80E1800F 80E18400 80E18401 80E21007 80E38003
        80F18003 80F18006 80F38003 80F38006 80F38009 80F78006 80FB8000 81078603 81318006 81338004 81338006 813B8004 813B8006
        81478004 81478006 814D8006 814F8004 814F8006 81578004 81578006 815F8004 815F8006 816F8004 816F8006 817F8004 817F8006
        81938004 81938006 81958004 81958006 81978004 81978006 81998006 819B8003 819B8006 819B800D 819D8000 8C1F8608 8C1F8609
        8C1F860B 8C2FA009 A2140007 A2140008 A2140009 A214000A A214000B A214000D A4025021 A4025041 A4025061 A4025081 A40250E1
        A4025101 A4028801 A4140007 A4140008 A4140009 A414000A A414000B A414000C A414000D A4303002 A60250C1
        """,
    ),
    (
        AILING,
        """
        80818C06 80DE0207 80E18405 80E20207 81078605 819B8605 81A3880C 81AD8605 8C1F860A 8C2FA001
        """,
    ),
    (
        REQUEST,
        """
        80BB8000 80BB8003 80BB8008 80BB8009 80BB800A 80BD8000 80BD8003 80BD8009 80C98000 80C98002 80C98003 80C98008 80C98009
        80C9800A 80CB8002 80CB8008 80CB8009 80CB800A 80CF8003 80D58000 80D58009 80D98008 80DB8000 80DB800A 80DD8000 80DD8003
        81318008 81AB8003 81AB8008 81AB800D
        """,
    ),
    (
        APPLICATION,
        """
        80E01801 81B38004 81B38009 8C204E00 A2301001 A2301002 A2303001 A4302003 A4302004 A4302005 A4302006 A4302009 A430200A
        A60250A1 A6301002 A8028802 B4060006 B4060007 B4060008 B4060009 B406000D B406000E B4060010 B4060011 B4060014 B406009C
        """,
    ),
    (
        RESET_WHEN_FREE,
        """
        8C044E00 8C064E00 8C084E00 8C0A4E00 8C0C4E00 8C0E4E00 8C104E00 8C124E00 8C17A005 8C19A005 8C1DA005 8C464E00 A4193217
        A4193218 A42A0000 A42F3917 A42F3918
        """,
    ),
    (
        RESET,
        """
        40F84E00 80A18008 80A38008 80A58008 80B58000 80B78000 80B98000 80B98008 80BD8008 80C78008 80C98001 80CB8001 80CD8008
        80CF8000 80CF8008 80CF8009 80DE1801 80DF8000 80DF8008 80DF8009 80DF800A 80E18000 80E18005 80E18008 80E1800A 80E18404
        80E21008 80E2120D 80E21E01 80E24E00 80E38008 80E39200 80E3A202 80E3A203 80E3A207 80E44E00 80E58005 80E58009 80E58E02
        80E58E03 80E78000 80E78008 80F18000 80F18008 80F1800A 80F2180D 80F38008 80F78003 80F78008 80F78009 80F78C02 80F78C03
        80F78C04 80FA4E00 80FB8005 812E4E00 812F8000 81338002 81338008 8139800A 813B8002 813B8008 813F800A 8145800A 81478002
        81478008 81498004 814F8008 81578002 81578008 815F8002 815F8008 816F8008 817F8008 81938002 81938008 81958002 81958008
        81978002 81978008 81998008 81998009 819B800A 81B38008 81C5800A 81C7800A 81C9800A 8C03A000 8C1FA006 8C4BA00C A2141004
        A2141006 A2142004 A2142006 A2145004 A4183200 A6023001 A6023002 A6023003 A6023004 A6060000 A6060001 A6060002 A6060003
        A6060004 A6060005 A606000A A606000B A606000C A606000F A606009D A6060FFF A607FFFF A6140001 A6140002 A6140003 A6140004
        A6140005 A6140006 A6141003 A6142003 A6143003 A6144003 A6145003 A6192D15 A6193206 A6193215 A6193248 A62F3905 A62FFFFF
        A6303003 A6303004 A6360000 A6361000 A6362000 A8021004 A8060FFF A807FFFF A82A0000
        """,
    ),
    (
        REPLACE,
        """
        4C4BA00C 80818C00 80818C05 80DF8402 80E0020B 80E18402 80E3A201 814F8002 816F8002 817F8002 9419321B A2301000 A2301001
        A2302001 A4192C1A A4193216 A419321B A419321C A42F390F A42F3916 A42F391A A6183207 A62F3934 A8028801 A819320F A8193234
        A8193235
        """,
    ),
)
#: The group of each code.
KINDS: Mapping[int, Kind] = MappingProxyType({int(word, 16): kind for kind, words in _GROUPS for word in words.split()})

ABSENT = 0xFFFFFFFF
#: The health that a chip reports (dcmi_get_device_health), and npu-smi's word for it.
LEVELS: Mapping[int, str] = MappingProxyType({0: "OK", 1: "Warning", 2: "Alarm", 3: "Critical", ABSENT: "UNKNOWN"})
_SEVERITIES: Mapping[int, Severity] = MappingProxyType(
    {1: Severity.INFORMATIVE, 2: Severity.DEGRADED, 3: Severity.FAILED, ABSENT: Severity.DEGRADED}
)

#: The failures that the test of a chip's network port finds (dcmi_rdfx_detect_result). 0 is success, 6 means that it
#: has just begun, and 8 that no target is configured.
_NETWORK: Mapping[int, str] = MappingProxyType(
    {
        1: "its socket failed",
        2: "no response arrived in time",
        3: "the target cannot be reached",
        4: "responses arrived too late",
        5: "the test met a fault",
        7: "the test's thread failed",
    }
)


#: A whole chip next to a partitioned one, on a card whose chips must be used in the same way.
MIXED_CARD = Sign(
    "card-mixed",
    Severity.DEGRADED,
    "The other chip of its card is cut into slices, and both are to be used in one way.",
    "Remove those slices, or give both chips rules of mode static.",
)


def level_of(word: str) -> int:
    """Return the health level for a state that npu-smi prints; ABSENT for an unknown state."""
    return next((level for level, known in LEVELS.items() if known.lower() == word.strip().lower()), ABSENT)


def signs(level: int, errors: Iterable[int]) -> tuple[Sign, ...]:
    """Return the signs for a chip's health level and its error codes.

    The health level itself is a sign if no code is as severe, because otherwise the reason for the taint would be
    unknown. An unknown code has the severity of the health level.
    """
    of_level = _SEVERITIES.get(level, Severity.INFORMATIVE if level == 0 else Severity.DEGRADED)
    found = []
    for code in dict.fromkeys(errors):
        kind = KINDS.get(code, Kind(of_level, _LOOK_UP))
        found.append(
            Sign(
                ERROR_CODE,
                kind.severity,
                f"It reports error {code:#010x}.",
                kind.remedy,
                Ends.SCAN,
                value=f"{code:08x}",
                is_mended_by_reset=kind.is_mended_by_reset,
            )
        )
    if level != 0 and all(each.severity < of_level for each in found):
        word = LEVELS.get(level, str(level))
        message = "It does not report its health." if level == ABSENT else f"Its health is {word}."
        found.append(Sign(HEALTH, of_level, message, "Check npu-smi info -t health and the log.", value=word.lower()))
    return tuple(found)


def network_sign(result: int) -> Sign | None:
    """Return the sign for a result of the network port test; None for a healthy port, or one without a configured target."""
    if result not in _NETWORK:
        return None
    return Sign(
        NETWORK,
        Severity.INFORMATIVE,
        f"Its network port is not well: {_NETWORK[result]}.",
        "Check its link and its addresses (hccn_tool).",
        value=str(result),
    )
