# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Convert a fleet plan to module results, to a table, and to a variables file for the playbooks. No side effects."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..core.errors import AcceleratorError
from ..core.planner.claims import Wish
from ..core.planner.plan import DevicePlan, Plan, layouts_of
from ..core.planner.problem import Problem
from .optimization import Solved

Json = dict[str, Any]
VARIABLE = "accelerator_layouts"
HEAD = "# Layouts of the playbook dra.accelerators.plan. Show their changes with: ansible-playbook … dra.accelerators.repartition -e @FILE --check"
_TEMPLATE_MARKS = ("{{", "{%", "{#")
#: Special characters of Ansible host patterns.
_PATTERN_MARKS = frozenset("*?[]:,&!~")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def duration(text: str) -> int:
    """Return the seconds of a duration such as 90m, 1d or 1d12h. Raises AcceleratorError."""
    found = re.findall(r"(\d+)([smhdw])", text)
    if not found or "".join(number + unit for number, unit in found) != text:
        raise AcceleratorError(
            f"pending_for is {text!r}, expected a duration such as 90m, 12h, 1d, or 1d12h",
            hint="Write numbers with the units s, m, h, d, or w.",
            code="invalid-duration",
        )
    return sum(int(number) * _UNITS[unit] for number, unit in found)


def plan_facts(
    problem: Problem,
    solved: Solved,
    plan: Plan,
    *,
    hosts: Mapping[str, str],
    users: Mapping[str, Sequence[str]],
    refused: Iterable[tuple[Wish, str]] = (),
    why: Mapping[str, str] | None = None,
) -> Json:
    """Return a plan as a module result.

    ``hosts`` are the inventory names of nodes with a different name. ``users`` are the pods of claims. ``refused`` are
    requests that cannot be planned. ``why`` are the current obstacles of a demand.
    """
    moves = [
        {
            "claim": each.claim,
            "pods": list(users.get(each.claim, ())),
            "item": each.item,
            "from": {"node": each.source.node, "index": each.source.device.index, "uuid": each.source.device.uuid},
            "to": {"node": each.target.node, "index": each.target.device.index, "uuid": each.target.device.uuid},
        }
        for each in plan.moves
    ]
    unplaceable = [
        {
            "name": each.demand.name,
            "count": each.count,
            "code": each.code,
            "message": each.message,
            "why": (why or {}).get(each.demand.name, ""),
        }
        for each in plan.unplaceable
    ]
    unplaceable += [
        {"name": wish.name, "count": wish.count, "code": "not-planned", "message": reason, "why": ""}
        for wish, reason in refused
    ]
    return {
        "devices": [_device(each) for each in plan.devices],
        "wanted": [
            {
                "name": each.name,
                "priority": each.priority,
                "wants": each.describe(),
                "count": each.count,
                "served": plan.served[each.name],
            }
            for each in problem.demands
        ],
        "moves": moves,
        "pods": sorted({pod for each in moves for pod in each["pods"]}),
        "unplaceable": unplaceable,
        "solver": {
            "most_served": solved.most_served,
            "least_changed": solved.least_changed,
            "remark": solved.remark,
            "bounds": [
                {"priority": priority, "served": most - gap, "at_most": most, "gap": gap}
                for priority, most, gap in zip(problem.priorities, plan.bounds, plan.gaps)
            ],
        },
        "destroyed": plan.destroyed,
        "touched": plan.touched,
        "layouts": layouts_of(plan, hosts),
    }


def _device(each: DevicePlan) -> Json:
    device = each.device.device
    gone = {one.uuid for one in each.destroyed}
    return {
        "node": each.device.node,
        "index": device.index,
        "uuid": device.uuid,
        "vendor": device.vendor,
        "product": device.product,
        "changed": each.changed,
        "fixed": each.device.fixed,
        "mode_today": each.device.mode,
        "mode": each.rule["mode"] if each.rule is not None else each.device.mode,
        "goes": counted([one.profile for one in each.destroyed]),
        "comes": counted([profile.name for profile, _place in each.created]),
        "stays": counted([one.profile for one in device.partitions if one.uuid not in gone]),
        "claims_that_leave": list(each.leaving),
        "given": dict(each.given),
    }


def counted(names: Iterable[str]) -> dict[str, int]:
    """Return how often each name occurs, in the order of the names."""
    return dict(sorted(Counter(names).items()))


def table(facts: Json) -> list[str]:
    """Return a plan as text lines: the changed devices, the served and unserved requests, the moved claims, and the quality."""
    rows = [("node", "device", "mode", "goes", "comes", "stays", "for")]
    for each in facts["devices"]:
        if each["changed"]:
            mode = each["mode"] if each["mode"] == each["mode_today"] else f"{each['mode_today']} → {each['mode']}"
            rows.append(
                (
                    each["node"],
                    str(each["index"]),
                    mode,
                    _amounts(each["goes"]),
                    _amounts(each["comes"]),
                    _amounts(each["stays"]),
                    _amounts(each["given"]),
                )
            )
    unchanged = sum(not each["changed"] for each in facts["devices"])
    said = _aligned(rows) if len(rows) > 1 else []
    said.append(f"{len(rows) - 1} of {len(facts['devices'])} devices change; {unchanged} are unchanged.")
    said += ["", *_aligned([("wanted", "priority", "claims", "served"), *map(_wanted, facts["wanted"])])]
    for each in facts["unplaceable"]:
        said.append(f"{each['count']} without a place: {each['name']}: {each['message'].rstrip('.')}.")
    for each in facts["moves"]:
        who = f" ({', '.join(each['pods'])})" if each["pods"] else ""
        said.append(
            f"{each['claim']}{who} moves from {each['from']['node']} {each['from']['index']} to {each['to']['node']} {each['to']['index']}."
        )
    fixed = Counter(each["fixed"] for each in facts["devices"] if each["fixed"])
    said += [f"{number} not changed: {reason}." for reason, number in fixed.most_common()]
    said.append(_quality(facts["solver"]))
    return said


def _wanted(each: Json) -> tuple[str, ...]:
    return (each["name"], str(each["priority"]), str(each["count"]), str(each["served"]))


def _quality(solver: Json) -> str:
    if solver["most_served"] and solver["least_changed"]:
        said = "No plan serves more, and none that serves as many changes less."
    elif solver["most_served"]:
        said = "No plan serves more; one that changes less may be there."
    else:
        gaps = [f"{each['gap']} of priority {each['priority']}" for each in solver["bounds"] if each["gap"]]
        said = f"Upper limit of what more could be served: {', '.join(gaps)}."
    return said + (f" Not proven: {solver['remark']}." if solver["remark"] else "")


def _amounts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]


def _refuse_templates(value: Any, hosts: Any) -> None:
    """Raise AcceleratorError for a string with a Jinja delimiter, in keys and values at any depth."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _refuse_templates(key, hosts)
            _refuse_templates(each, hosts)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _refuse_templates(each, hosts)
    elif isinstance(value, str) and any(mark in value for mark in _TEMPLATE_MARKS):
        raise AcceleratorError(
            f"The layout of {hosts} contains {value[:80]!r}, expected no Jinja template",
            hint="No file was written. The node reports UUIDs, profiles, and rules, and Ansible evaluates a template in a file of variables "
            "on the controller. Examine the node.",
            code="template-in-layout",
        )


def other_layouts(documents: Sequence[Any], planned: Collection[str], path: str) -> list[Json]:
    """Return the entries of a variables file for hosts that are not in the plan.

    Raises AcceleratorError for a file that ``variables_text`` cannot have written: the plan would overwrite its other content.
    """
    document = documents[0] if len(documents) == 1 else None
    entries = document.get(VARIABLE) if isinstance(document, dict) and len(document) == 1 else None
    if not isinstance(entries, list) or not all(_is_of_host(each) for each in entries):
        raise AcceleratorError(
            f"dest {path} exists, and is not a file of layouts by host: expected only the variable {VARIABLE}, a list of entries with hosts (the "
            "name of one host) and layout",
            hint="The file was not changed. Set another file.",
            code="file-foreign",
        )
    return [each for each in entries if each["hosts"] not in planned]


def _is_of_host(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"hosts", "layout"} or not isinstance(entry["hosts"], str):
        return False
    return not _PATTERN_MARKS.intersection(entry["hosts"])


def variables_text(layouts: Sequence[Json], dump: Any) -> str:
    """Return the text of the variables file. ``dump`` writes YAML; None writes JSON, which is valid YAML.

    Ansible evaluates templates in such a file. Raises AcceleratorError for a layout that contains a template.
    """
    for each in layouts:
        _refuse_templates(each, each["hosts"])
    document = {VARIABLE: list(layouts)}
    text = json.dumps(document, indent=2) + "\n" if dump is None else dump(document, sort_keys=False, width=120)
    return f"{HEAD}\n---\n{text}" if dump is not None else text
