# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test the report page in a real browser: a small fleet and one of 1,000 nodes, by keyboard, in dark mode, in a narrow
window, and in print.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, browser
from tests.fleets import BROKEN, Fleet, boards, generate_fleet
from tests.report_page import page

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
NODES, FEWER = 1000, 100
#: Maximum ratio of the time per device between the large fleet and a tenth of it. Work for each pair of devices would
#: give ten.
MOST = 2.0
#: Checks pages by the WCAG rules. Its wheel contains the program as one file.
AXE = "axe-playwright-python==0.1.8"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


def small() -> Json:
    fleet = Fleet()
    for number, name in enumerate(("gpu-a", "gpu-b", "gpu-c")):
        devices = boards(number=number)
        if number == 1:
            devices[3] = replace(devices[3], health=BROKEN)
        # Two machines with NVSwitches, and one with bridges between pairs.
        pairs = [(devices[each.index ^ 1].pci_address,) for each in devices] if number == 1 else [()] * 8
        devices = [replace(each, linked=pairs[each.index], switched=number != 1) for each in devices]
        wanted = [{"match": {"index": 5}, "mode": "static", "partitions": {"3g.40gb": 2}}] if number == 1 else None
        fleet.node(name, devices, wanted)
    fleet.claim("training", "gpu-a", "gpu-0", pods=("trainer-0",))
    fleet.claim("notebook", "gpu-a", "gpu-1-mig-3g40gb-9-4", pods=("notebook-0",))
    fleet.pending_pod("late-0", "late", "0/3 nodes are available: 3 cannot allocate all claims.")
    fleet.answers["gpu-c"] = {}
    taint = {"key": "example.com/firmware", "value": "update", "effect": "NoSchedule"}
    fleet.rules = [{"metadata": {"name": "r"}, "spec": {"deviceSelector": {"pool": "gpu-c"}, "taint": taint}}]
    return fleet.picture()


def many(few: Json, nodes: int) -> Json:
    """Return a fleet of ``nodes`` nodes: copies of a smaller fleet's nodes with other names."""
    times = nodes // len(few["nodes"])
    found = {**copy.deepcopy(few), "nodes": [], "claims": [], "waiting": []}
    for number in range(times):
        # Copies differ in the text before the numbers of names and UUIDs.
        text = json.dumps({key: few[key] for key in ("nodes", "claims", "waiting")})
        text = text.replace('"gpu-0', f'"gpu-{number:02d}-0').replace("research/", f"team-{number:02d}/")
        for key, value in json.loads(text.replace("GPU-0", f"GPU-{number:02x}")).items():
            found[key] += value
    found["totals"] = {key: value * times for key, value in few["totals"].items()}
    return found


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    few = generate_fleet(50, seed=2).picture()
    for name, picture in (("small", small()), ("hundred", many(few, FEWER)), ("thousand", many(few, NODES))):
        found[name] = folder / f"{name}.html"
        found[name].write_text(page(picture), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, AXE], check=True, timeout=300
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [each for each in opened.namelist() if each.endswith("axe.min.js")]
        return opened.read(name).decode()


def look(window: Browser, path: Path, *, width: int = 1280, **media: Any) -> None:
    window.set_size(width, 900)
    window.set_media(**media)
    window.open(path)
    assert window.run("return document.documentElement.dataset.ready") == "true"
    assert window.console_messages() == []


def test_small_fleet_is_expanded_initially(window: Browser, files: dict[str, Path]) -> None:
    look(window, files["small"])
    assert window.run("return document.querySelectorAll('article.device').length") == 24
    text = window.run("return document.body.innerText")
    for word in (
        "faulty or silent",
        "It has fallen off the bus.",
        "0/3 nodes are available",
        "+ 3g.40gb at 0",
        "silent",
    ):
        assert word in text, word
    # To scale: half of the placements take half of the bar.
    ratio = window.run(
        "const bar = [...document.querySelectorAll('.scale')].find((each) => each.textContent.includes('notebook'));"
        "return bar.querySelector('.taken').getBoundingClientRect().width / bar.getBoundingClientRect().width"
    )
    assert 0.45 < ratio < 0.55
    # The page sends no request.
    assert window.run("return performance.getEntriesByType('resource').length") == 0


def test_devices_are_grouped_by_numa_node_and_pcie_root(window: Browser, files: dict[str, Path]) -> None:
    look(window, files["small"])
    inside = "const box = document.getElementById(`inside-${arguments[0]}`);"
    titles = "return [...box.querySelectorAll(arguments[1])].map((each) => each.textContent)"
    for node in (0, 1):
        assert window.run(inside + titles, node, "h3") == ["NUMA node 0", "NUMA node 1"]
        roots = [f"PCIe root pci0000:{number}0" for number in (1, 2, 3, 4)]
        assert window.run(inside + titles, node, "h4") == roots
        assert window.run(inside + titles, node, ".numa:first-of-type .root:first-child h5") == [
            f"{index} · H100 80GB HBM3{state}"
            for index, state in enumerate(("full", "partly used") if node == 0 else ("free",) * 2)
        ]
    said = [window.run(inside + titles, node, ".links li span") for node in (0, 1)]
    assert said == [["NVLink links 0, 1, 2, 3, 4, 5, 6, 7"], ["NVLink links 0, 1; 2, 3; 4, 5; 6, 7"]]
    # A line below the numbers connects each group, from its first to its last member.
    lines = (
        "const middle = (each) => { const at = each.getBoundingClientRect(); return at.left + at.width / 2; };"
        "const numbers = [...box.querySelectorAll('.links text')].map(middle);"
        "return [...box.querySelectorAll('.links .link')].map((each) => { const at = each.getBoundingClientRect();"
        "return [at.left, at.right].map((x) => numbers.findIndex((number) => Math.abs(number - x) < 4)); })"
    )
    assert window.run(inside + lines, 0) == [[0, 7]]
    assert window.run(inside + lines, 1) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # The slices of a node without facts do not contain the links.
    assert window.run(inside + titles, 2, ".links") == []


def test_a_thousand_nodes(window: Browser, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    empty = files["thousand"].with_name("empty.html")
    empty.write_text("<!DOCTYPE html><title>empty</title>", encoding="utf-8")
    took = "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd - t.startTime"
    figures: dict[str, float] = {}
    # Alternating, so that other load on the host affects all of them.
    for _round in range(3):
        for name, path in (("empty", empty), ("hundred", files["hundred"]), ("thousand", files["thousand"])):
            window.open(path)
            figures[name] = min(float(window.run(took)), figures.get(name, float("inf")))
    size = {name: files[name].stat().st_size / 2**20 for name in ("hundred", "thousand")}
    of_one = (figures["thousand"] / NODES) / (figures["hundred"] / FEWER)
    with capsys.disabled():
        print(
            f"\nreport of {NODES} x 8: {size['thousand']:.1f} MiB, opens in {figures['thousand']:.0f} ms; of {FEWER} x 8:"
            f" {size['hundred']:.1f} MiB, {figures['hundred']:.0f} ms; an empty page: {figures['empty']:.0f} ms;"
            f" a node of the large one takes {of_one:.2f} times as long as one of the other"
        )
    assert of_one < MOST
    assert size["thousand"] / NODES < 1.2 * size["hundred"] / FEWER
    look(window, files["thousand"])
    assert window.run("return document.querySelectorAll('#nodes tr[data-node]').length") == NODES
    # Only visible parts are drawn: devices are added to the page when their node is opened.
    assert window.run("return document.querySelectorAll('article.device').length") == 0
    assert window.run("return document.querySelectorAll('#nodes tr[data-node]:not([hidden])').length") == 60
    assert window.run("return document.querySelectorAll('svg.map path').length") <= 8
    assert window.run("return document.querySelectorAll('*').length") < 20 * NODES
    found = (
        "const box = document.getElementById('find'); box.value = arguments[0]; box.dispatchEvent(new Event('input'));"
    )
    window.run(found, "gpu-07-0003")
    assert window.run("return document.getElementById('count').textContent") == f"1 of {NODES} nodes"
    window.run("document.querySelector('#nodes tr:not([hidden]) button.open').click()")
    assert window.run("return document.querySelectorAll('article.device').length") == 8
    window.run(found, "team-03/job-4-")
    assert window.run("return document.getElementById('count').textContent") == f"1 of {NODES} nodes"
    window.run(found, "")
    choose = (
        "const box = document.getElementById('show'); box.value = arguments[0]; box.dispatchEvent(new Event('change'));"
    )
    window.run(choose, "sick")
    sick = int(window.run("return document.getElementById('count').textContent").split()[0])
    assert 0 < sick < NODES
    window.run(choose, "")
    window.run("document.getElementById('more').click()")
    assert window.run("return document.querySelectorAll('#nodes tr[data-node]:not([hidden])').length") == NODES


def test_page_works_with_the_keyboard_only(window: Browser, files: dict[str, Path]) -> None:
    look(window, files["small"])
    answer = "const e = document.activeElement; return [e.tagName, e.getAttribute('href') || e.id || e.className, getComputedStyle(e).outlineStyle]"
    walked = []
    for _step in range(12):
        window.press("Tab")
        walked.append(window.run(answer))
    assert [name for _tag, name, _outline in walked][:9] == [
        *("#nodes", "#room", "#sick", "#waiting", "#drift", "find", "show", "order", "open-all"),
    ], "the order of the page"
    assert all(outline != "none" for _tag, _name, outline in walked), "the focus is visible"
    buttons = [name for _tag, name, _outline in walked[9:]]
    assert buttons[:3] == ["open"] * 3
    look(window, files["thousand"])
    window.press("Tab", "Enter")
    assert window.run("return document.activeElement.id") == "nodes", "the first link skips the controls"
    window.run("document.querySelector('button.open').focus()")
    said = "const e = document.activeElement; return [e.getAttribute('aria-expanded'), document.querySelectorAll('article.device').length]"
    assert window.run(said) == ["false", 0]
    window.press("Enter")
    assert window.run(said) == ["true", 8]
    window.press("Space")
    assert window.run(said)[0] == "false"


def heard(window: Browser) -> list[tuple[str, str, str]]:
    """Return role, name, and content of everything on the page that a screen reader announces, in order."""
    nodes = {each["nodeId"]: each for each in window.protocol("Accessibility.getFullAXTree")["nodes"]}

    def text(each: Json) -> str:
        if each["role"]["value"] == "StaticText":
            return str(each["name"]["value"])
        return "".join(text(nodes[one]) for one in each.get("childIds", ()) if one in nodes)

    return [
        (each["role"]["value"], each.get("name", {}).get("value", ""), " ".join(text(each).split()))
        for each in nodes.values()
        if not each["ignored"]
    ]


def test_screen_reader_gets_device_and_partition_names(window: Browser, files: dict[str, Path]) -> None:
    look(window, files["small"])
    answer = heard(window)
    articles = [(name, content) for role, name, content in answer if role == "article"]
    assert [name for name, _content in articles[:3]] == ["Device 0, full", "Device 1, partly used", "Device 2, free"]
    assert articles[8 + 3][0] == "Device 3, faulty" and "It has fallen off the bus." in articles[8 + 3][1]
    # Each fact once: the drawing is hidden from screen readers.
    part = articles[1][1]
    assert part.startswith("1 · H100 80GB HBM3partly used3g.40gb at 4: research/notebook (pod notebook-0)"), part
    assert part.count("notebook (") == part.count("3g.40gb at") == 1
    items = [content for role, _name, content in answer if role == "listitem"]
    assert "3g.40gb at 4: research/notebook (pod notebook-0)" in items
    assert "whole: research/training (pod trainer-0)" in items
    assert "NVLink links 0, 1; 2, 3; 4, 5; 6, 7" in items
    lists = [name for role, name, _content in answer if role == "list"]
    assert lists.count("Devices with direct links between them") == 2
    (drawing,) = [
        (role, name) for role, name, _content in answer if name.startswith("24 devices: 1 full, 1 partly used, ")
    ]
    assert drawing[0] == "image"
    assert ("heading", "NUMA node 1", "NUMA node 1") in answer and (
        "heading",
        "PCIe root pci0000:40",
        "PCIe root pci0000:40",
    ) in answer


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["small", "thousand"])
def test_page_has_no_accessibility_violations(
    window: Browser, files: dict[str, Path], axe: str, name: str, dark: bool
) -> None:
    look(window, files[name], dark=dark, reduced=True)
    back = window.run("return getComputedStyle(document.body).backgroundColor")
    assert (max(int(each) for each in re.findall(r"\d+", back)) < 64) == dark
    assert window.run("return getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    window.run("document.querySelector('button.open[aria-expanded=false]')?.click()")
    window.run(f"{axe}; window.axe = axe;")
    found = window.run_async(
        "const done = arguments[arguments.length - 1];"
        "axe.run(document, {runOnly: arguments[0], resultTypes: ['violations']}).then((said) => done(said.violations.map("
        "(each) => `${each.id}: ${each.help}: ${each.nodes.slice(0, 5).map((one) => one.html + ' ' + one.failureSummary).join(' | ')}`)))",
        RULES,
    )
    assert found == []


@pytest.mark.parametrize("width", [320, 420, 1280, 2560])
def test_content_fits_the_window_width(window: Browser, files: dict[str, Path], width: int) -> None:
    look(window, files["small"], width=width)
    assert window.run("return document.documentElement.scrollWidth <= window.innerWidth")


def test_printed_page(window: Browser, files: dict[str, Path]) -> None:
    look(window, files["small"], dark=True)
    window.set_media(dark=True, kind="print")
    shown = "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.getElementById('tools')).display]"
    assert window.run(shown) == ["rgb(255, 255, 255)", "none"], "paper is white and has no input fields"
    document = window.pdf()
    assert document.startswith(b"%PDF")
    objects = document + b"".join(
        zlib.decompressobj().decompress(each)
        for each in re.findall(rb"stream\r?\n(x\x9c.*?)endstream", document, re.DOTALL)
    )
    pages = len(re.findall(rb"/Type\s*/Page\b(?!s)", objects))
    assert 2 <= pages <= 12, pages


def test_page_without_scripts(window: Browser, files: dict[str, Path]) -> None:
    window.set_media()
    window.protocol("Emulation.setScriptExecutionDisabled", value=True)
    try:
        window.open(files["small"])
        tree = window.protocol("DOMSnapshot.captureSnapshot", computedStyles=["display"])
        text = " ".join(tree["strings"])
        for word in (
            "It has fallen off the bus.",
            "0/3 nodes are available",
            "+ 3g.40gb at 0",
            "gpu-a",
            "Without scripts",
        ):
            assert word in text, word
    finally:
        window.protocol("Emulation.setScriptExecutionDisabled", value=False)
