# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The picture of a fleet as data, and the page that is made of it: what is on it, and that no name becomes markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
from ansible_collections.dra.accelerators.plugins.module_utils import _claim_explanations, _report
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Clique
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.waiting import waiting
from ansible_collections.dra.accelerators.plugins.modules import accelerator_report

from tests.fleets import BROKEN, Fleet, boards, large
from tests.report_page import TEMPLATES, page
from tests.unit.core import board_model, chip_model
from tests.unit.json_server import JsonHandler, JsonServer

Json = dict[str, Any]
SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs/report.schema.json").read_text(encoding="utf-8"))
SMALL, LARGE = 19, 9
MIG_CLASS = {
    "metadata": {"name": "mig.nvidia.com"},
    "spec": {"selectors": [{"cel": {"expression": "device.attributes['gpu.nvidia.com'].type == 'mig'"}}]},
}
TAINT = {"key": "example.com/firmware", "value": "update", "effect": "NoSchedule"}


def published(fleet: Fleet, node: str, start: str) -> str:
    """The one name on a node that begins so."""
    (name,) = [
        each["name"]
        for one in fleet.slices
        if one["spec"]["pool"]["name"] == node
        for each in one["spec"].get("devices", ())
        if each["name"] == start
    ]
    return str(name)


def device(picture: Json, node: str, index: int) -> Json:
    (found,) = [each for each in picture["nodes"] if each["name"] == node]
    (one,) = [each for each in found["devices"] if each["index"] == index]
    jsonschema.validate(picture, SCHEMA)
    return dict(one)


def test_who_has_what_of_a_device() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(2))
    fleet.claim("training", "node-1", "gpu-0", pods=("trainer",))
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-1-mig-3g40gb-9-4"))
    picture = fleet.picture()
    whole, part = device(picture, "node-1", 0), device(picture, "node-1", 1)
    assert (whole["state"], whole["claims"], whole["fits"]) == ("full", ["research/training"], {})
    assert whole["used_bytes"] == picture["models"][0]["memory_bytes"]
    assert part["state"] == "partly" and part["claims"] == []
    (held,) = part["partitions"]
    assert (held["profile"], held["start"], held["size"], held["claims"]) == ("3g.40gb", 4, 4, ["research/notebook"])
    assert part["used_bytes"] == held["memory_bytes"] > 0
    # Four of the small ones, or one more large one, fit into the other half.
    assert part["fits"]["3g.40gb"] == 1 and part["fits"]["1g.10gb"] == 4 and "" not in part["fits"]
    assert picture["claims"][0]["pods"] == ["trainer"]
    assert picture["totals"]["full"] == picture["totals"]["partly"] == 1


def test_what_a_node_says_of_a_partition_and_what_the_cluster_says_are_one() -> None:
    first, made = boards(1)[0], board_model.device("h100-80", places=((LARGE, 0), (SMALL, 4)))
    cut = replace(first, partitions=made.partitions, partitioning=made.partitioning)
    fleet = Fleet()
    fleet.node("node-1", [cut])
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-0-mig-3g40gb-9-0"))
    found = device(fleet.picture(), "node-1", 0)
    assert [(each["profile"], each["start"], each["claims"]) for each in found["partitions"]] == [
        ("3g.40gb", 0, ["research/notebook"]),
        ("1g.10gb", 4, []),
    ]
    assert found["partitions"][0]["uuid"] == cut.partitions[0].uuid
    assert found["partitions"][1]["owner"] == "administrator" and found["state"] == "partly"


def test_a_silent_node_is_drawn_by_what_is_published_of_it() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(2))
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-1-mig-1g10gb-19-2"))
    told = fleet.picture()
    fleet.answers["node-1"] = {}
    silent = fleet.picture()
    assert silent["nodes"][0]["source"] == "cluster" and silent["totals"]["silent"] == 1
    for index in (0, 1):
        mine, theirs = device(silent, "node-1", index), device(told, "node-1", index)
        same = ("uuid", "pci", "root", "numa", "partitions", "used_bytes", "state", "fits", "published")
        assert {key: mine[key] for key in same} == {key: theirs[key] for key in same}
    assert {key: silent["models"][0][key] for key in ("product", "memory_bytes", "slices")} == {
        key: told["models"][0][key] for key in ("product", "memory_bytes", "slices")
    }
    fleet.slices.clear()
    fleet.claims.clear()
    assert fleet.picture()["nodes"][0]["source"] == "none"


def known_before() -> tuple[Fleet, Json]:
    """A node with a sick device and one that differs, and the picture of it three hours before everything is asked again."""
    fleet, devices = Fleet(), boards(3)
    devices[1] = replace(devices[1], health=BROKEN)
    fleet.node("node-1", devices, [{"match": {"index": 2}, "mode": "static", "partitions": {"3g.40gb": 2}}])
    fleet.claim("training", "node-1", "gpu-0", pods=("trainer",))
    return fleet, fleet.picture(generated="2026-11-24T07:00:00Z")


def test_of_a_silent_node_its_health_and_what_differs_are_shown_with_their_age() -> None:
    fleet, former = known_before()
    assert "as_of" not in device(former, "node-1", 1)
    fleet.answers["node-1"] = {}
    found = fleet.picture(former=former)
    well, sick, other = (device(found, "node-1", index) for index in range(3))
    assert {"at": "2026-11-24T07:00:00Z", "seconds": 3 * 3600} == well["as_of"] == sick["as_of"] == other["as_of"]
    assert sick["state"] == "sick" and sick["health"] == device(former, "node-1", 1)["health"] != []
    assert other["drift"] is not None and other["drift"] == device(former, "node-1", 2)["drift"]
    assert well["claims"] == ["research/training"] and found["nodes"][0]["source"] == "cluster"
    assert (found["totals"]["sick"], found["totals"]["drifting"], found["totals"]["silent"]) == (1, 1, 1)
    # However often nobody has answered since, it is as old as it is.
    later = fleet.picture(former=found, generated="2026-11-25T07:00:00Z")
    assert device(later, "node-1", 1)["as_of"] == {"at": "2026-11-24T07:00:00Z", "seconds": 24 * 3600}
    text = page(later)
    assert "As its node told 24 h ago (2026-11-24 07:00:00 UTC)" in text
    # Once it answers nothing is from before.
    fleet.node("node-1", boards(3), publish=False)
    assert "as_of" not in device(fleet.picture(former=later), "node-1", 1)


def test_of_a_silent_node_that_publishes_nothing_its_devices_are_those_of_before() -> None:
    fleet, former = known_before()
    fleet.answers["node-1"] = {}
    fleet.slices.clear()
    found = fleet.picture(former=former)
    assert found["nodes"][0]["source"] == "none" and len(found["nodes"][0]["devices"]) == 3
    whole, sick = device(found, "node-1", 0), device(found, "node-1", 1)
    # Nobody can have it, and who has it the cluster knows: not who had it then.
    assert (whole["state"], whole["claims"], whole["fits"], sick["state"]) == ("withheld", [], {}, "sick")
    assert found["models"][0] == former["models"][0]
    alone = fleet.picture(cluster=False, former=former)
    assert device(alone, "node-1", 1)["state"] == "sick"


def test_of_a_vendor_whose_driver_is_away_as_well() -> None:
    fleet, former = known_before()
    away = _report.Answer("nvidia", "gpu.nvidia.com", None, (), "no library")
    fleet.answers["node-1"] = _report.node_report([away], None, "", {"kernel": "", "release": "", "drivers": {}})
    found = fleet.picture(former=former)
    assert found["nodes"][0]["source"] == "node" and found["totals"]["silent"] == 0
    assert device(found, "node-1", 0)["claims"] == ["research/training"]
    assert device(found, "node-1", 1)["state"] == "sick" and device(found, "node-1", 1)["as_of"]["seconds"] == 3 * 3600
    # Without a former report it is drawn by what is published of it, as a silent node is.
    assert len(fleet.picture()["nodes"][0]["devices"]) == 3
    # A device that is gone from a node that answers is not brought back.
    fleet.answers["node-1"] = {}
    fleet.slices.clear()
    fleet.node("node-1", boards(2))
    assert len(fleet.picture(former=former)["nodes"][0]["devices"]) == 2


@pytest.mark.parametrize("content", ["no json", "[]", '{"version": 0}', '{"version": 1, "nodes": [{}]}'])
def test_a_former_report_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "former.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(AcceleratorError, match="former") as refused:
        accelerator_report.read_former(str(file))
    assert refused.value.code == "former-unreadable"


def test_a_former_report_may_be_missing(tmp_path: Path) -> None:
    assert accelerator_report.read_former(str(tmp_path / "none.json")) is None
    assert accelerator_report.read_former(None) is None
    (tmp_path / "former.json").write_text(json.dumps(known_before()[1]), encoding="utf-8")
    assert accelerator_report.read_former(str(tmp_path / "former.json")) == known_before()[1]


def test_what_is_sick_and_what_is_withheld() -> None:
    fleet, devices = Fleet(), boards(3)
    devices[1] = replace(devices[1], health=BROKEN)
    fleet.node("node-1", devices)
    fleet.rules = [
        {
            "metadata": {"name": "one"},
            "spec": {"deviceSelector": {"pool": "node-1", "device": "gpu-2"}, "taint": TAINT},
        },
        {"metadata": {"name": "told"}, "spec": {"deviceSelector": {}, "taint": {**TAINT, "effect": "None"}}},
    ]
    picture = fleet.picture()
    assert device(picture, "node-1", 1)["state"] == "sick"
    partly = device(picture, "node-1", 2)
    assert partly["state"] == "free" and partly["kept_away"] == 1 and "" not in partly["fits"]
    assert [each["rule"] for each in partly["taints"]] == ["one"]
    assert device(picture, "node-1", 0)["taints"] == []
    fleet.rules[0]["spec"]["deviceSelector"] = {"pool": "node-1"}
    assert device(fleet.picture(), "node-1", 2)["state"] == "withheld"
    fleet.rules.clear()
    fleet.slices.clear()
    assert device(fleet.picture(), "node-1", 0)["state"] == "withheld", "nobody publishes it"
    assert device(fleet.picture(cluster=False), "node-1", 0)["state"] == "free"


def test_what_differs_is_told_as_steps() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(2), [{"match": {"index": 1}, "mode": "static", "partitions": {"3g.40gb": 2}}])
    picture = fleet.picture()
    assert device(picture, "node-1", 0)["drift"] is None
    assert device(picture, "node-1", 1)["drift"]["steps"] == ["partitioning on", "+ 3g.40gb at 0", "+ 3g.40gb at 4"]
    assert picture["totals"]["drifting"] == picture["totals"]["drifting_nodes"] == 1


def test_what_is_scattered() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(4))
    for index in range(4):
        fleet.claim(f"half-{index}", "node-1", published(fleet, "node-1", f"gpu-{index}-mig-3g40gb-9-0"))
    room = {each["profile"]: each for each in fleet.picture()["room"]}
    assert (room[""]["now"], room[""]["at_most"], room[""]["of"]) == (0, 2, 4)
    assert (room["3g.40gb"]["now"], room["3g.40gb"]["devices"], room["3g.40gb"]["nodes"]) == (4, 4, 1)


def test_groups_are_named_as_people_call_them() -> None:
    fleet = Fleet()
    fleet.node("node-1", [replace(boards(1)[0], clique=Clique("f00d", 3))])
    assert device(fleet.picture(), "node-1", 0)["groups"] == {"fabric": "f00d.3"}
    chip = chip_model.device("910B3", attributes={"hccsRing": "node-1-ring-0", "cardID": "node-1-card-0"})
    fleet = Fleet()
    fleet.node("node-1", [chip], publish=False)
    assert device(fleet.picture(cluster=False), "node-1", 0)["groups"] == {
        "HCCS ring": "node-1-ring-0",
        "card": "node-1-card-0",
    }


def places(picture: Json) -> list[tuple[int | None, str, Json]]:
    (node,) = picture["nodes"]
    jsonschema.validate(picture, SCHEMA)
    return [(each["numa"], each["root"], each["groups"]) for each in node["devices"]]


def test_where_devices_are_on_their_machine_and_what_links_them() -> None:
    fleet = Fleet()
    fleet.node("node-1", [replace(each, switched=True) for each in boards(8)])
    assert places(fleet.picture()) == [
        (numa, root, {"NVLink": "0-7"})
        for numa, root in zip(
            [0] * 4 + [1] * 4,
            [each for each in ("pci0000:10", "pci0000:20", "pci0000:30", "pci0000:40") for _twice in (0, 1)],
        )
    ]
    # One that has not joined reaches nobody, and what joins a machine with others says what its fabric is called.
    devices = boards(4)
    devices = [replace(each, switched=each.index != 1) for each in devices]
    devices[3] = replace(devices[3], switched=False, clique=Clique("f00d", 3))
    fleet = Fleet()
    fleet.node("node-1", devices)
    assert [groups for _numa, _root, groups in places(fleet.picture())] == [
        {"NVLink": "0, 2"},
        {},
        {"NVLink": "0, 2"},
        {"fabric": "f00d.3"},
    ]


def test_gpus_with_direct_links_are_a_group_over_others_as_well() -> None:
    pairs = boards(6, "a30")
    joined = {0: (1,), 1: (0,), 2: (3,), 3: (2, 4), 4: (3,)}
    fleet = Fleet()
    fleet.node(
        "node-1",
        [
            replace(each, linked=tuple(pairs[other].pci_address for other in joined.get(each.index, ())))
            for each in pairs
        ],
    )
    found = places(fleet.picture())
    assert [groups for _numa, _root, groups in found] == [{"NVLink": "0-1"}] * 2 + [{"NVLink": "2-4"}] * 3 + [{}]
    assert [numa for numa, _root, _groups in found] == [0, 0, 0, 1, 1, 1]
    fleet = Fleet()
    fleet.node("node-1", [replace(boards(1)[0], switched=True)])
    assert places(fleet.picture())[0][2] == {}, "one alone is no group"


# ---- who waits


def test_why_a_claim_waits() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(1))
    fleet.waits("later-0", "later", "0/1 nodes are available", "2026-11-24T09:30:00Z")
    fleet.waits("early-0", "early", "0/1 nodes are available", "2026-11-24T08:30:00Z")
    fleet.claim("nobodys")
    reasons = {"research/later": {"message": "Its quota is used up.", "remedy": "Ask for more."}}
    first, second = fleet.picture(reasons=reasons)["waiting"]
    assert (first["claim"], first["pods"], first["since"]) == ("research/early", ["early-0"], "2026-11-24T08:30:00Z")
    assert first["reason"]["source"] == "scheduler" and first["reason"]["code"] == "Unschedulable"
    assert second["reason"] == {
        "source": "given",
        "code": "",
        "message": "Its quota is used up.",
        "remedy": "Ask for more.",
    }
    assert fleet.picture()["totals"]["waiting"] == 2, "a claim that no pod wants waits for nobody"


def test_a_pod_whose_claim_has_not_been_made_waits_too() -> None:
    pod = {
        "metadata": {"name": "p", "namespace": "n", "creationTimestamp": "2026-11-24T08:00:00Z"},
        "spec": {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "t"}]},
    }
    (found,) = waiting([], [pod], {})
    assert (found["claim"], found["pods"], found["reason"]["source"]) == ("", ["p"], "nobody")
    for made, claims in (("c", ["n/c"]), (None, [])):
        status = {"resourceClaimStatuses": [{"name": "a", **({"resourceClaimName": made} if made else {})}]}
        facts = {"namespace": "n", "name": "c", "allocated": False, "deleting": False, "pods": []}
        facts |= {"device_classes": [], "created": "2026-11-24T08:00:00Z"}
        assert [each["claim"] for each in waiting([facts], [{**pod, "status": status}], {})] == claims
    assert accelerator_report.checked_reasons({"n/c": {"message": "m"}})
    with pytest.raises(accelerator_report.AcceleratorError, match="a message"):
        accelerator_report.checked_reasons({"n/c": {}})


# ---- the page


class Page(HTMLParser):
    """What a browser would make of the page: its elements, what hangs on them, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.data = ""
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "what is opened is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag not in ("meta", "br", "input", "link", "img"):
            self._open.append(f"{tag}#data" if ("id", "data") in attrs else tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().removesuffix("#data") == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script#data":
            self.data += data
        elif self._open and self._open[-1] not in ("script", "style"):
            self.text += data


HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(2)>" onmouseover='x' {{ 7*7 }} <!--"""


def hostile(value: Any) -> Any:
    """The same with every text that comes from somebody else made hostile."""
    if isinstance(value, dict):
        return {
            key: each if key in ("state", "source", "generated", "since") else hostile(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return HOSTILE if value and isinstance(value, str) else value


def everything() -> Json:
    fleet, devices = Fleet(), boards()
    devices[3] = replace(devices[3], health=BROKEN)
    fleet.node("node-1", devices, [{"match": {"index": 1}, "mode": "static", "partitions": {"3g.40gb": 2}}])
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-2-mig-1g10gb-19-2"))
    fleet.waits("p", "c", "0/1 nodes are available")
    fleet.answers["away"] = {}
    fleet.rules = [{"metadata": {"name": "r"}, "spec": {"deviceSelector": {"device": "gpu-5"}, "taint": TAINT}}]
    picture = fleet.picture()
    picture["nodes"][1]["unread"].append("GPU 9: It does not answer")
    picture["nodes"][1]["refused"].append({"message": "It is in use", "hint": "Wait"})
    return picture


def test_no_name_becomes_markup() -> None:
    picture = everything()
    plain, bad = Page(page(picture)), Page(page(hostile(picture)))
    assert bad.tags == plain.tags
    assert {name for name, _value in bad.attributes} == {name for name, _value in plain.attributes}
    assert json.loads(bad.data) == hostile(picture) and json.loads(plain.data) == picture
    assert bad.text.count(HOSTILE) > 20 and "{{ 7*7 }}" in bad.text


def test_the_page_stands_alone_and_says_the_most_without_scripts() -> None:
    picture = everything()
    text = page(picture)
    found = Page(text)
    assert not re.search(r"""(src|href)="(?!#)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", text)
    assert len(found.ids) == len(set(found.ids))
    for word in (
        "node-1",
        "away",
        "It has fallen off the bus.",
        "0/1 nodes are available",
        "+ 3g.40gb at 0",
        "1g.20gb",
    ):
        assert word in found.text, word
    links = [str(value)[1:] for name, value in found.attributes if name == "href"]
    assert len(links) == 5 and set(links) <= set(found.ids)
    assert [tag for tag in found.tags if tag in ("header", "main", "footer", "h1")] == [
        "header",
        "h1",
        "main",
        "footer",
    ]
    assert found.tags.count("table") == found.tags.count("caption")
    # What is included goes through the template engine as well.
    assert not any(re.search(r"\{[{%#]", (TEMPLATES / name).read_text()) for name in ("report.css", "report.js"))


def test_a_fleet_on_which_all_is_well_says_so() -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(1))
    text = Page(page(fleet.picture())).text
    assert "All devices are well and all nodes have answered." in text and "Nothing waits for devices." in text
    assert "No node has a layout that it could differ from." in text
    assert "The cluster was not asked." in Page(page(fleet.picture(cluster=False))).text
    assert Page(page(Fleet().picture())).ids


def test_generated_fleets_are_as_the_schema_says() -> None:
    picture = large(6, seed=3).picture()
    jsonschema.validate(picture, SCHEMA)
    assert Page(page(picture)).tags.count("tr") > 20
    total = picture["totals"]
    assert sum(total[state] for state in ("sick", "withheld", "full", "partly", "free")) == total["devices"] == 48


# ---- the module at an API server


class Cluster(JsonServer):
    """Gives the lists of a fleet, as an API server does; ``forbidden`` are parts of paths that may not be seen."""

    def __init__(self, fleet: Fleet) -> None:
        base = "/apis/resource.k8s.io"
        resources = {"resources": [{"name": "devicetaintrules"}]}
        self.found: dict[str, Json] = {
            base: {"versions": [{"version": "v1"}]},
            f"{base}/v1": resources,
            f"{base}/v1/resourceclaims": {"items": fleet.claims},
            f"{base}/v1/resourceslices": {"items": fleet.slices},
            f"{base}/v1/devicetaintrules": {"items": fleet.rules},
            f"{base}/v1/resourceclaimtemplates": {"items": []},
            f"{base}/v1/deviceclasses": {"items": [MIG_CLASS]},
            "/api/v1/nodes": {"items": [{"metadata": {"name": name}} for name in fleet.answers]},
            "/api/v1/pods": {"items": fleet.pending},
            "/api/v1/namespaces/research/pods": {"items": []},
        }
        self.forbidden = "nothing"
        self.asked: list[str] = []
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                server.asked.append(self.path)
                if server.forbidden in path:
                    self.answer(403, {"kind": "Status", "message": "forbidden", "reason": "Forbidden"})
                elif path in server.found:
                    self.answer(200, server.found[path])
                else:
                    self.answer(404, {"kind": "Status", "message": f"{path} is not there", "reason": "NotFound"})

        super().__init__(Handler)


def test_the_module_asks_a_cluster(run_here: Callable[..., Json]) -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(2))
    fleet.claim("notebook", "node-1", published(fleet, "node-1", "gpu-1-mig-1g10gb-19-2"), pods=("writer",))
    fleet.waits("p", "c", "0/1 nodes are available")
    fleet.rules = [{"metadata": {"name": "r"}, "spec": {"deviceSelector": {"pool": "node-1"}, "taint": TAINT}}]
    with Cluster(fleet) as cluster:
        options = {"nodes": fleet.answers, "host": cluster.url, "api_key": "let-me-in", "explain": False}

        def ask(**more: Any) -> Json:
            return dict(run_here("accelerator_report", {**options, **more}))

        found = ask()["ansible_facts"]["accelerator_report"]["picture"]
        jsonschema.validate(found, SCHEMA)
        assert {**found, "generated": ""} == {**fleet.picture(), "generated": ""}
        assert found["totals"]["withheld"] == 2 and found["totals"]["waiting"] == 1
        assert any("/api/v1/pods" in each and "phase" in each for each in cluster.asked), "of all pods those that wait"
        cluster.forbidden = "devicetaintrules"
        found = ask()["ansible_facts"]["accelerator_report"]["picture"]
        assert found["totals"]["withheld"] == 0, "rules that may not be seen are not there"
        cluster.asked.clear()
        ask(health=False)
        assert not any("pods" in each for each in cluster.asked)
        cluster.forbidden = "/pods"
        assert ask()["status"] == 403


def wants(fleet: Fleet, pod: str, claim: str, profile: str, since: str) -> None:
    """A pod that waits for partitions of a profile."""
    fleet.waits(pod, claim, "0/1 nodes are available", since)
    selector = {"cel": {"expression": f"device.attributes['gpu.nvidia.com'].profile == '{profile}'"}}
    fleet.claims[-1]["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = [selector]


def test_why_claims_wait_is_worked_out(run_here: Callable[..., Json], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    fleet.node("node-1", boards(1))
    fleet.claim("training", "node-1", published(fleet, "node-1", "gpu-0-mig-3g40gb-9-0"), pods=("trainer",))
    wants(fleet, "large-0", "large", "7g.80gb", "2026-11-24T08:30:00Z")
    wants(fleet, "late-0", "late", "7g.80gb", "2026-11-24T09:30:00Z")
    wants(fleet, "small-0", "small", "1g.10gb", "2026-11-24T09:00:00Z")
    wants(fleet, "odd-0", "odd", "5g.50gb", "2026-11-24T09:10:00Z")
    reasons = {"research/odd": {"message": "Nobody has such boards."}}
    with Cluster(fleet) as cluster:
        options = {"nodes": fleet.answers, "host": cluster.url, "api_key": "let-me-in", "reasons": reasons}

        def ask(**more: Any) -> tuple[Json, list[str], list[str]]:
            found = run_here("accelerator_report", {**options, **more})["ansible_facts"]["accelerator_report"][
                "picture"
            ]
            jsonschema.validate(found, SCHEMA)
            notes = [each["message"] for each in found["attention"] if each["code"] == "not-explained"]
            assert not notes or notes[0] in Page(page(found)).text
            return {each["claim"]: each["reason"] for each in found["waiting"]}, notes, list(cluster.asked)

        said, notes, asked = ask()
        large, late = said["research/large"], said["research/late"]
        assert (large["source"], large["code"]) == ("explained", "free-claims")
        assert large["message"].startswith("No node has devices for it now. Request r: 0 of ")
        assert "1 for which claims leave too little of counters" in large["message"]
        assert large["remedy"] == "It fits when research/training ends (node node-1)."
        assert late == large, "what is alike is told in the same words"
        assert said["research/small"]["source"] == "scheduler", "there are devices for it: it waits for something else"
        assert said["research/odd"]["source"] == "given" and notes == []
        assert any("resourceslices?" in each and "driver%21%3Dgpu.nvidia.com" in each for each in asked), (
            "none are asked for twice"
        )

        monkeypatch.setattr(_claim_explanations, "MOST_EXPLAINED", 1)
        said, notes, _asked = ask(reasons={})
        assert [said[f"research/{name}"]["source"] for name in ("large", "late", "small", "odd")] == [
            *("explained", "explained", "scheduler", "scheduler")
        ]
        assert "of 2 pods more" in notes[0]

        cluster.asked.clear()
        cluster.forbidden = "/nodes"
        said, notes, _asked = ask()
        assert said["research/large"]["source"] == "scheduler" and "forbidden" in notes[0] and len(notes) == 1
        cluster.asked.clear()
        said, notes, asked = ask(explain=False)
        assert said["research/large"]["source"] == "scheduler" and notes == []
        assert not any("nodes" in each for each in asked)
        monkeypatch.setattr(accelerator_report, "HAS_CEL", False)
        cluster.asked.clear()
        said, notes, asked = ask()
        assert said["research/large"]["source"] == "scheduler" and "cel-expr-python" in notes[0] and len(notes) == 1
        assert not any("nodes" in each for each in asked)


def test_what_is_explained_has_an_end() -> None:
    fleet = Fleet()
    for number in range(30):
        fleet.node(f"node-{number:02d}", boards(1, number=number))
    wants(fleet, "odd-0", "odd", "5g.50gb", "2026-11-24T09:10:00Z")
    wants(fleet, "more-0", "more", "6g.60gb", "2026-11-24T09:20:00Z")
    objects = _claim_explanations.Objects()
    nodes = [{"metadata": {"name": name}} for name in (*fleet.answers, "without-devices")]
    for kind, documents in {
        "ResourceClaim": fleet.claims,
        "ResourceSlice": fleet.slices,
        "DeviceClass": [MIG_CLASS],
        "Node": nodes,
    }.items():
        for each in documents:
            objects.add(kind, each, "")
    found, left = _claim_explanations.reasons(objects, fleet.pending)
    assert left == 0 and set(found) == {"research/odd-0", "research/more-0"}
    assert "Looked at were 13 of 31 nodes that could be asked." in found["research/odd-0"]["message"]
    assert found["research/odd-0"]["code"] == "nothing" and found["research/odd-0"]["remedy"] == ""
    clock = iter((0.0, 1.0, _claim_explanations.MOST_SECONDS + 2))
    found, left = _claim_explanations.reasons(objects, fleet.pending, lambda: next(clock))
    assert set(found) == {"research/odd-0"} and left == 1
