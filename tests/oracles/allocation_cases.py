# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Random inventories with random claims. Each case has its own nodes, slices, classes, rules, and claims, so that one
cluster holds many cases.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
MODELS = ("alpha", "beta")
NOBODY = "nobody"
ROOT = "resource.kubernetes.io/pcieRoot"
READY = {
    "capacity": {"pods": "10", "cpu": "8", "memory": "8Gi"},
    "allocatable": {"pods": "10", "cpu": "8", "memory": "8Gi"},
}


@dataclass
class Case:
    """One inventory, its existing allocations, and a pod with its claims."""

    name: str
    nodes: list[Json] = field(default_factory=list)
    slices: list[Json] = field(default_factory=list)
    classes: list[Json] = field(default_factory=list)
    rules: list[Json] = field(default_factory=list)
    held: list[Json] = field(default_factory=list)
    wanted: list[Json] = field(default_factory=list)
    pod: Json = field(default_factory=dict)

    @property
    def driver(self) -> str:
        return f"{self.name}.example.com"

    def objects(self) -> list[Json]:
        return [*self.nodes, *self.slices, *self.classes, *self.rules, *self.held, *self.wanted, self.pod]


def make_case(seed: int) -> Case:
    """Return the case of a seed, always the same."""
    return _Maker(seed).make()


class _Maker:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.case = Case(f"case{seed}")

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def make(self) -> Case:
        case = self.case
        names = [f"{case.name}-{letter}" for letter in "ab"[: self.random.choice((1, 1, 2))]]
        for name in names:
            labels = {"case": case.name, "kubernetes.io/hostname": name}
            case.nodes.append(_object("Node", name, {"spec": {}, "status": READY}, labels))
            self.node_pool(name)
        if self.chance(0.3):
            self.network_pool()
        if self.chance(0.15):
            self.chosen_per_device(names)
        model = f"device.attributes['{case.driver}'].model == '{self.random.choice(MODELS)}'"
        for suffix, more in (("any", ""), ("model", model)):
            expressions = [f"device.driver == '{case.driver}'", *([more] if more else [])]
            selectors = [{"cel": {"expression": one}} for one in expressions]
            case.classes.append(_object("DeviceClass", f"{case.name}-{suffix}", {"spec": {"selectors": selectors}}))
        if self.chance(0.2):
            self.rule(names)
        self.hold()
        for number in range(self.random.choice((1, 1, 1, 2))):
            case.wanted.append(self.claim(f"{case.name}-{number}"))
        case.pod = self.pod()
        return case

    # ------------------------------------------------------------------ inventory

    def node_pool(self, node: str) -> None:
        kind = self.random.choice(("whole", "whole", "parts", "parts", "shares"))
        devices, counters = getattr(self, f"{kind}_devices")()
        contents: list[Json] = [{"sharedCounters": counters}] if counters else []
        cut = self.random.randint(1, len(devices))
        contents += [{"devices": part} for part in (devices[:cut], devices[cut:]) if part]
        count = len(contents) + (1 if self.chance(0.06) else 0)
        generation = self.random.choice((1, 4))
        for number, content in enumerate(contents):
            self.slice(f"{node}-{number}", {"nodeName": node}, node, generation, count, content)
        if self.chance(0.1):
            self.slice(f"{node}-old", {"nodeName": node}, node, 0, 1, {"devices": [self.device("old")]})

    def network_pool(self) -> None:
        requirement = {"key": "case", "operator": "In", "values": [self.case.name]}
        where = {"nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}}
        devices = [self.device(f"net-{number}") for number in range(self.random.randint(1, 2))]
        self.slice(f"{self.case.name}-net", where, f"{self.case.name}-net", 1, 1, {"devices": devices})

    def chosen_per_device(self, names: list[str]) -> None:
        devices = [{**self.device(f"own-{number}"), "nodeName": self.random.choice(names)} for number in range(3)]
        self.slice(f"{self.case.name}-own", {"perDeviceNodeSelection": True}, "own", 1, 1, {"devices": devices})

    def slice(self, name: str, where: Json, pool: str, generation: int, count: int, content: Json) -> None:
        spec = {
            "driver": self.case.driver,
            **where,
            "pool": {"name": pool, "generation": generation, "resourceSliceCount": count},
            **content,
        }
        self.case.slices.append(_object("ResourceSlice", name, {"spec": spec}))

    def device(self, name: str) -> Json:
        attributes: Json = {
            "model": {"string": self.random.choice(MODELS)},
            "index": {"int": self.random.randint(0, 3)},
            "driverVersion": {"version": self.random.choice(("1.9.0", "1.10.0", "2.0.0-rc.1", "2.0.0+5"))},
            ROOT: {"string": f"pci0000:{self.random.randint(0, 2)}"},
        }
        if self.chance(0.15):
            del attributes["model" if self.chance(0.2) else "driverVersion"]
        if self.chance(0.5):
            attributes["linked"] = {"bool": self.chance(0.5)}
        if self.chance(0.4):
            attributes["numa"] = {"ints": sorted(self.random.sample((0, 1, 2), self.random.randint(1, 2)))}
        device = {"name": name, "attributes": attributes}
        device["capacity"] = {"memory": {"value": self.random.choice(("16Gi", "40Gi", "80Gi"))}}
        if self.chance(0.15):
            device["taints"] = [self.taint()]
        return device

    def taint(self) -> Json:
        key, effect = self.random.choice(("hot", "worn")), self.random.choice(("NoSchedule", "NoExecute", "None"))
        return {"key": f"example.com/{key}", "value": "yes", "effect": effect}

    def whole_devices(self) -> tuple[list[Json], list[Json]]:
        devices = [self.device(f"dev-{number}") for number in range(self.random.randint(1, 6))]
        if self.chance(0.08):
            devices[-1].update(
                {"bindingConditions": ["example.com/up"], "bindingFailureConditions": ["example.com/down"]}
            )
        if len(devices) > 1 and self.chance(0.04):
            devices[-1] = {**devices[-1], "bindsToNode": True}
        return devices, []

    def parts_devices(self) -> tuple[list[Json], list[Json]]:
        devices, counters = [], []
        for board in range(self.random.randint(1, 2)):
            total = {"memory": {"value": "80Gi"}, "units": {"value": "7"}}
            counters.append({"name": f"board-{board}", "counters": total})
            forms = [
                ("whole", "80Gi", "7"),
                *[("big", "40Gi", "3")] * 2,
                *[("small", "20Gi", "2")] * 3,
            ]
            for number, (form, memory, units) in enumerate(forms):
                device = self.device(f"b{board}-{form}-{number}")
                device["attributes"].update({"form": {"string": form}, "board": {"int": board}})
                device["capacity"] = {"memory": {"value": memory}}
                drawn = {"memory": {"value": memory}, "units": {"value": units}}
                device["consumesCounters"] = [{"counterSet": f"board-{board}", "counters": drawn}]
                devices.append(device)
        return devices, counters

    def shares_devices(self) -> tuple[list[Json], list[Json]]:
        devices = []
        for number in range(self.random.randint(1, 3)):
            device = {**self.device(f"share-{number}"), "allowMultipleAllocations": True}
            policy: Json = {"default": "10Gi", "validRange": {"min": "5Gi", "step": "5Gi"}}
            if self.chance(0.3):
                policy = {"default": "10Gi", "validValues": ["10Gi", "16Gi"]}
            device["capacity"] = {
                "memory": {"value": "40Gi", **({"requestPolicy": policy} if self.chance(0.8) else {})}
            }
            devices.append(device)
        if self.chance(0.4):
            devices.append(self.device("alone"))
        return devices, []

    def rule(self, nodes: list[str]) -> None:
        selector: Json = {"driver": self.case.driver}
        if self.chance(0.6):
            selector["pool"] = self.random.choice(nodes)
        if self.chance(0.4):
            selector["device"] = "dev-0"
        spec = {"deviceSelector": selector, "taint": self.taint()}
        self.case.rules.append(_object("DeviceTaintRule", f"{self.case.name}-rule", {"spec": spec}))

    # ------------------------------------------------------------------ claims

    def hold(self) -> None:
        """Allocate devices or shares to other claims as long as there is room."""
        left: dict[tuple[str, str], int] = {}
        drawn: dict[tuple[str, str, str], int] = {}
        amount = {"80Gi": 80, "40Gi": 40, "20Gi": 20}
        for each in self.case.slices:
            for device in each["spec"].get("devices") or ():
                if not self.chance(0.15) or device["name"] == "old":
                    continue
                pool = each["spec"]["pool"]["name"]
                draws = device.get("consumesCounters") or ()
                room = all(
                    drawn.get((pool, one["counterSet"], "m"), 0) + amount[one["counters"]["memory"]["value"]] <= 80
                    and drawn.get((pool, one["counterSet"], "u"), 0) + int(one["counters"]["units"]["value"]) <= 7
                    for one in draws
                )
                if not room:
                    continue
                for one in draws:
                    for short, size in (
                        ("m", amount[one["counters"]["memory"]["value"]]),
                        ("u", int(one["counters"]["units"]["value"])),
                    ):
                        place = (pool, one["counterSet"], short)
                        drawn[place] = drawn.get(place, 0) + size
                shares = self.random.randint(1, 2) if device.get("allowMultipleAllocations") else 1
                for _share in range(shares):
                    taken = left.get((pool, device["name"]), 0) + 15
                    if device.get("allowMultipleAllocations") and taken > 40:
                        break
                    left[pool, device["name"]] = taken
                    self.held_claim(pool, device)

    def held_claim(self, pool: str, device: Json) -> None:
        number = len(self.case.held)
        result: Json = {"request": "it", "driver": self.case.driver, "pool": pool, "device": device["name"]}
        if device.get("allowMultipleAllocations"):
            result["shareID"] = f"0a7f6a1e-52ae-41de-9a3b-{self.random.randrange(16**12):012x}"
            result["consumedCapacity"] = {"memory": "15Gi"}
        elif self.chance(0.1):
            result["adminAccess"] = True
        request = {"name": "it", "exactly": {"deviceClassName": f"{self.case.name}-any"}}
        if result.get("adminAccess"):
            request["exactly"] = {**request["exactly"], "adminAccess": True}  # type: ignore[dict-item]
        name = f"{self.case.name}-held-{number}"
        content = {
            "spec": {"devices": {"requests": [request]}},
            "status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": NOBODY, "uid": NOBODY}],
            },
        }
        self.case.held.append(_object("ResourceClaim", name, content, namespace="default"))

    def claim(self, name: str) -> Json:
        requests = [self.request(f"r{number}") for number in range(self.random.choice((1, 1, 1, 2, 2, 3)))]
        names = [one["name"] for one in requests]
        constraints = []
        for _number in range(self.random.choice((0, 0, 0, 1, 1, 2))):
            attribute = self.random.choice(
                (ROOT, f"{self.case.driver}/model", f"{self.case.driver}/index", f"{self.case.driver}/numa")
            )
            kind = self.random.choice(("matchAttribute", "matchAttribute", "distinctAttribute"))
            chosen = (
                {} if self.chance(0.6) else {"requests": self.random.sample(names, self.random.randint(1, len(names)))}
            )
            constraints.append({kind: attribute, **chosen})
        devices = {"requests": requests, **({"constraints": constraints} if constraints else {})}
        return _object("ResourceClaim", name, {"spec": {"devices": devices}}, namespace="default")

    def request(self, name: str) -> Json:
        if self.chance(0.15):
            return {
                "name": name,
                "firstAvailable": [{"name": f"s{number}", **self.content(alone=False)} for number in range(2)],
            }
        return {"name": name, "exactly": self.content(alone=True)}

    def content(self, *, alone: bool) -> Json:
        content: Json = {"deviceClassName": f"{self.case.name}-{self.random.choice(('any', 'any', 'any', 'model'))}"}
        if self.chance(0.15):
            content["allocationMode"] = "All"
        else:
            content.update({"allocationMode": "ExactCount", "count": self.random.choice((1, 1, 1, 2, 2, 3))})
        if alone and self.chance(0.06):
            content["adminAccess"] = True
        if self.chance(0.55):
            content["selectors"] = [
                {"cel": {"expression": self.expression()}} for _number in range(self.random.choice((1, 1, 2)))
            ]
        if self.chance(0.3):
            content["tolerations"] = [self.toleration()]
        if self.chance(0.2):
            content["capacity"] = {"requests": {"memory": self.random.choice(("3Gi", "12Gi", "20Gi", "30Gi", "90Gi"))}}
        return content

    def toleration(self) -> Json:
        if self.chance(0.3):
            return {"operator": "Exists", **({"effect": "NoSchedule"} if self.chance(0.5) else {})}
        key = f"example.com/{self.random.choice(('hot', 'worn'))}"
        return (
            {"key": key, "operator": "Exists"}
            if self.chance(0.5)
            else {"key": key, "operator": "Equal", "value": "yes"}
        )

    def expression(self) -> str:
        domain = self.case.driver
        own, size = f"device.attributes['{domain}']", f"device.capacity['{domain}']"
        amount = self.random.choice(("16Gi", "20Gi", "40Gi", "81920Mi"))
        version = self.random.choice(("1.9.0", "1.10.0", "2.0.0", "2.0.0-rc.1"))
        forms = (
            f"{own}.model == '{self.random.choice(MODELS)}'",
            f"{own}.index {self.random.choice(('<', '>=', '!='))} {self.random.randint(0, 3)}",
            f"{size}.memory.compareTo(quantity('{amount}')) >= 0",
            f"{size}.memory.isGreaterThan(quantity('{amount}'))",
            f"{size}.memory == quantity('{amount}')",
            f"{size}.memory.asInteger() >= {20 << 30}",
            f"has({own}.driverVersion) && {own}.driverVersion.compareTo(semver('{version}')) >= 0",
            f"{own}.?driverVersion.orValue(semver('0.0.1')).isLessThan(semver('{version}'))",
            f"'driverVersion' in {own} && {own}.driverVersion == semver('{version}')",
            f"{own}.?linked.orValue(false)",
            f"has({own}.linked) && {own}.linked",
            f"cel.bind(own, {own}, own.index > 0 || own.?linked.orValue(false))",
            f"device.attributes['resource.kubernetes.io'].pcieRoot.endsWith('{self.random.randint(0, 2)}')",
            "!has(device.attributes['other.example.com'].thing)",
            "device.attributes['other.example.com'].?thing.orValue('none') == 'none'",
            f"{own}.?form.orValue('whole') in ['{self.random.choice(('whole', 'big', 'small'))}', 'none']",
            f"has({own}.numa) && {own}.numa.includes({self.random.randint(0, 2)})",
            f"{own}.model.lowerAscii().startsWith('a') || {own}.index == {self.random.randint(0, 3)}",
            f"sets.contains(['alpha', 'gamma'], [{own}.?model.orValue('beta')])",
            "device.allowMultipleAllocations",
            "!device.allowMultipleAllocations",
        )
        bad = (
            f"{own}.linked",
            f"{own}.driverVersion.isGreaterThan(semver('{version}'))",
            f"{own}.driverVersion == '{version}'",
            f"{own}.form == 'big'",
            f"{own}.index == 0 || {own}.linked",
            "device.attributes['other.example.com'].thing == 'x'",
            f"{own}.model.isGreaterThan(semver('1.0.0'))",
            f"{own}.index",
        )
        return self.random.choice(bad if self.chance(0.07) else forms)

    def pod(self) -> Json:
        references = [
            {"name": f"c{number}", "resourceClaimName": one["metadata"]["name"]}
            for number, one in enumerate(self.case.wanted)
        ]
        container = {
            "name": "main",
            "image": "none",
            "resources": {"claims": [{"name": one["name"]} for one in references]},
        }
        spec = {
            "automountServiceAccountToken": False,
            "nodeSelector": {"case": self.case.name},
            "containers": [container],
            "resourceClaims": references,
        }
        return _object("Pod", self.case.name, {"spec": spec}, namespace="default")


def _object(kind: str, name: str, content: Json, labels: Json | None = None, namespace: str = "") -> Json:
    version = "v1" if kind in ("Node", "Pod") else "resource.k8s.io/v1"
    metadata = {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        **({"labels": labels} if labels else {}),
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
