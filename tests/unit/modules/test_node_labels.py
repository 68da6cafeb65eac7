# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module node_labels against a model API server with field managers, server-side apply, merge, and versions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import managed_labels as labels
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import ApiError
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.modules import node_labels

Json = dict[str, Any]
COUNT, PRODUCT, CHIP = "nvidia.com/gpu.count", "nvidia.com/gpu.product", "node.kubernetes.io/npu.chip.name"
BUS = "feature.node.kubernetes.io/pci-0302_10de.present"
WANTED = labels.DesiredLabels({COUNT: "8", PRODUCT: "H100"})
NODE = "/api/v1/nodes/n"
NFD = f"/apis/{labels.GROUP}"
WORKER = {
    "metadata": {
        "namespace": "nfd",
        "name": "nfd-worker",
        "labels": {"app.kubernetes.io/name": "node-feature-discovery"},
    },
    "status": {"currentNumberScheduled": 3},
}


class Server:
    """One Node, and the model of NFD."""

    def __init__(self, **present: str) -> None:
        self.version = 1
        self.metadata: Json = {"name": "n", "labels": {}, "annotations": {}}
        # Owned labels and annotations: (manager, operation) to names.
        self.owned: dict[tuple[str, str], set[tuple[str, str]]] = {}
        # Managers that applied an empty map: they own the map itself, and their entry stays.
        self.empty: dict[tuple[str, str], set[str]] = {}
        self.requests: list[tuple[str, str, Json]] = []
        self.conflicts = 0
        self.lists: dict[str, list[Json]] = {}
        self.patch("kubelet", {"kubernetes.io/os": "linux", **present})

    def patch(self, manager: str, changed: Mapping[str, str | None], kind: str = "labels") -> None:
        """Patch as another manager, which then owns the changed fields."""
        self._write((manager, "Update"), kind, changed)

    def apply(self, manager: str, wanted: Mapping[str, str], kind: str = "labels") -> None:
        former = {name for each, name in self.owned.get((manager, "Apply"), set()) if each == kind}
        self.owned.setdefault((manager, "Apply"), set())
        self.empty.setdefault((manager, "Apply"), set()).discard(kind)
        for name in former - set(wanted):
            self.owned[manager, "Apply"].discard((kind, name))
            if not any((kind, name) in names for names in self.owned.values()):
                self.metadata[kind].pop(name, None)
        self._write((manager, "Apply"), kind, wanted)
        self.owned[manager, "Apply"] |= {(kind, name) for name in wanted}

    def _write(self, who: tuple[str, str], kind: str, changed: Mapping[str, str | None]) -> None:
        for name, value in changed.items():
            if self.metadata[kind].get(name) == value:
                continue
            for names in self.owned.values():
                names.discard((kind, name))
            if value is None:
                self.metadata[kind].pop(name, None)
            else:
                self.metadata[kind][name] = value
                self.owned.setdefault(who, set()).add((kind, name))
        self.version += 1

    def node(self) -> Json:
        fields = [
            {
                "manager": manager,
                "operation": verb,
                "fieldsV1": {
                    "f:metadata": {
                        f"f:{kind}": {f"f:{name}": {} for each, name in names if each == kind}
                        for kind in ("labels", "annotations")
                    }
                },
            }
            for (manager, verb), names in self.owned.items()
            if names or self.empty.get((manager, verb))
        ]
        return copy.deepcopy(
            {"metadata": {**self.metadata, "resourceVersion": str(self.version), "managedFields": fields}}
        )

    def request(self, method: str, path: str, *, query: Any = None, body: Any = None, content_type: str = "") -> Json:
        self.requests.append((method, path, {**(query or {}), "type": content_type}))
        if method == "GET" and path == NODE:
            return self.node()
        if method == "GET" and path == NFD and self.lists:
            return {"versions": [{"version": "v1alpha1"}]}
        if method == "GET" and path == f"{NFD}/v1alpha1" and self.lists:
            return {"resources": [{"name": "nodefeatures"}]}
        if method == "GET" and path == "/apis":
            return {"kind": "APIGroupList", "groups": []}
        if method == "GET":
            raise ApiError("not found", status=404, reason="NotFound")
        assert path == NODE and query["fieldManager"] == labels.MANAGER
        if self.conflicts:
            self.conflicts -= 1
            self.version += 1  # the kubelet wrote first
        if str(self.version) != body["metadata"]["resourceVersion"]:
            raise ApiError("the object has been modified", status=409)
        before = copy.deepcopy((self.version, self.metadata, self.owned, self.empty))
        for kind in ("labels", "annotations"):
            changed = body["metadata"].get(kind, {})
            if content_type.startswith("application/apply-patch"):
                assert query["force"] == "true"
                self.apply(labels.MANAGER, changed, kind)
                if kind in body["metadata"] and not changed:
                    self.empty[labels.MANAGER, "Apply"].add(kind)
            else:
                assert content_type.startswith("application/merge-patch")
                self.patch(labels.MANAGER, changed, kind)
        answer = self.node()
        if query.get("dryRun"):
            self.version, self.metadata, self.owned, self.empty = before
        return answer

    def list_all(self, path: str, query: Any, keep: Callable[[Json], Any] = lambda item: item) -> list[Json]:
        self.requests.append(("LIST", path, dict(query)))
        return [kept for kept in map(keep, self.lists[path]) if kept is not None]

    @property
    def writes(self) -> int:
        return sum(method == "PATCH" for method, _path, _query in self.requests)

    def bring(self, wanted: labels.DesiredLabels, way: str = labels.API, **more: Any) -> labels.LabelResult:
        return labels.NodeLabels(self, "n").apply(wanted, way, **more)  # type: ignore[arg-type]

    @property
    def present(self) -> dict[str, str]:
        return {name: value for name, value in self.metadata["labels"].items() if name != "kubernetes.io/os"}


def with_discovery(server: Server, *, reports_node: bool = True, pods: bool = True) -> Server:
    features = [{"metadata": {"name": "n"}}] if reports_node else [{"metadata": {"name": "nvidia-features-for-n"}}]
    server.lists = {
        f"{NFD}/v1alpha1/nodefeatures": features,
        "/apis/apps/v1/daemonsets": [WORKER] if pods else [{**WORKER, "status": {"currentNumberScheduled": 0}}],
    }
    return server


def test_labels_are_written_updated_and_removed() -> None:
    server = Server()
    done = server.bring(WANTED)
    assert done.changed and server.present == dict(WANTED.labels) and done.after == dict(WANTED.labels)
    assert server.metadata["annotations"] == {labels.WRITTEN: f"{COUNT},{PRODUCT}"}
    once = server.writes
    assert not server.bring(WANTED).changed and server.writes == once
    assert server.bring(labels.DesiredLabels({COUNT: "7", PRODUCT: "H100"})).changed and server.present[COUNT] == "7"
    done = server.bring(labels.DesiredLabels({COUNT: "7"}))
    assert done.changed and server.present == {COUNT: "7"} and done.before == {COUNT: "7", PRODUCT: "H100"}
    assert server.bring(labels.DesiredLabels({})).changed and server.present == {}
    assert server.metadata["annotations"] == {} and not server.bring(labels.DesiredLabels({})).changed
    assert server.metadata["labels"] == {"kubernetes.io/os": "linux"}


def test_empty_label_value_is_written() -> None:
    server = Server()
    wanted = labels.DesiredLabels({"nvidia.com/cuda.driver.rev": ""})
    assert server.bring(wanted).changed and server.present == dict(wanted.labels) and not server.bring(wanted).changed


@pytest.mark.parametrize("value", ["4", "8"])
@pytest.mark.parametrize("verb", ["patch", "apply"])
def test_labels_of_other_managers_are_kept_and_named(verb: str, value: str) -> None:
    server = Server()
    getattr(server, verb)("gpu-feature-discovery", {COUNT: value})
    done = server.bring(WANTED)
    assert done.plan is not None and done.plan.left == {COUNT: ("gpu-feature-discovery",)}
    assert server.present == {COUNT: value, PRODUCT: "H100"} and not server.bring(WANTED).changed
    assert server.bring(labels.DesiredLabels({})).changed and server.present == {COUNT: value}


def test_labels_changed_by_other_managers_are_released() -> None:
    server = Server()
    server.bring(WANTED)
    server.patch("kubectl-label", {COUNT: "2"})
    done = server.bring(WANTED)
    assert done.plan is not None and done.plan.left == {COUNT: ("kubectl-label",)} and server.present[COUNT] == "2"
    server.bring(labels.DesiredLabels({}))
    assert server.present == {COUNT: "2"}


def test_labels_shared_with_other_managers_are_kept() -> None:
    server = Server()
    server.bring(WANTED)
    server.apply("helm", {COUNT: "8"})
    done = server.bring(labels.DesiredLabels({COUNT: "7"}))
    assert done.plan is not None and done.plan.left == {COUNT: ("helm",)}
    assert server.present == {COUNT: "8"} and not server.bring(labels.DesiredLabels({COUNT: "7"})).changed


def test_patched_labels_of_earlier_releases_are_adopted() -> None:
    """Earlier releases patched labels and noted their names on the Node: the module takes them over and removes them."""
    server = Server()
    server.patch("OpenAPI-Generator", {COUNT: "6", PRODUCT: "H100"})
    server.patch("OpenAPI-Generator", {labels.WRITTEN: f"{COUNT},{PRODUCT}"}, "annotations")
    assert server.bring(WANTED).changed and server.present == dict(WANTED.labels)
    assert not server.bring(WANTED).changed
    # The label that had the right value also belongs to the other manager, and is removed.
    assert server.bring(labels.DesiredLabels({COUNT: "8"})).changed and server.present == {COUNT: "8"}
    server.bring(labels.DesiredLabels({}))
    assert server.present == {} and server.metadata["annotations"] == {}


def test_patched_labels_of_earlier_releases_are_removed() -> None:
    server = Server()
    server.patch("OpenAPI-Generator", dict(WANTED.labels))
    server.patch("OpenAPI-Generator", {labels.WRITTEN: f"{COUNT},{PRODUCT}"}, "annotations")
    assert server.bring(labels.DesiredLabels({})).changed
    assert server.present == {} and server.metadata["annotations"] == {}


def test_removal_leaves_nothing_and_earlier_versions_work() -> None:
    server = Server()
    server.bring(WANTED)
    server.bring(labels.DesiredLabels({}))
    assert [each["manager"] for each in server.node()["metadata"]["managedFields"]] == ["kubelet"]
    # A remaining entry without labels does not cover labels that were noted later.
    server.empty[labels.MANAGER, "Apply"] = {"labels", "annotations"}
    server.patch("OpenAPI-Generator", {COUNT: "8", PRODUCT: "gone"})
    server.patch("OpenAPI-Generator", {labels.WRITTEN: f"{COUNT},{PRODUCT}"}, "annotations")
    done = server.bring(WANTED)
    assert done.changed and done.plan is not None and not done.plan.left and server.present == dict(WANTED.labels)
    # Applied labels are noted too. The note does not claim a label that another manager has changed since.
    server.patch("kubectl-label", {PRODUCT: "theirs"})
    assert server.bring(labels.DesiredLabels({})).changed and server.present == {PRODUCT: "theirs"}


def test_check_mode_queries_and_writes_nothing() -> None:
    server = Server()
    done = server.bring(WANTED, dry=True)
    assert done.changed and done.after == dict(WANTED.labels) and server.present == {} and server.writes == 1
    server.bring(WANTED)
    done = server.bring(labels.DesiredLabels({COUNT: "8"}), dry=True)
    assert done.changed and server.present == dict(WANTED.labels)
    assert {query.get("dryRun") for method, _path, query in server.requests[-2:] if method == "PATCH"} == {"All"}


def test_node_changed_during_write_is_read_again() -> None:
    server = Server()
    server.conflicts = 2
    assert server.bring(WANTED).changed and server.present == dict(WANTED.labels)
    server.conflicts = 3
    with pytest.raises(ApiError):
        server.bring(labels.DesiredLabels({}))


def test_missing_node_changes_nothing() -> None:
    server = Server()
    done = labels.NodeLabels(server, "other").apply(WANTED, labels.API)  # type: ignore[arg-type]
    assert done.plan is None and not done.changed and server.writes == 0


def test_nfd_absent_reads_only_api_groups() -> None:
    server = Server()
    wanted = labels.DesiredLabels({COUNT: "8"}, {BUS: "true"})
    done = server.bring(wanted, labels.AUTO)
    assert done.plan is not None and done.plan.way == labels.API and server.present == {COUNT: "8", BUS: "true"}
    assert [path for method, path, _query in server.requests if method != "PATCH"] == [NODE, NFD, "/apis"]


@pytest.mark.parametrize(("reports_node", "pods"), [(False, True), (True, False)])
def test_nfd_on_other_nodes_or_removed_is_not_used(reports_node: bool, pods: bool) -> None:
    server = with_discovery(Server(), reports_node=reports_node, pods=pods)
    done = server.bring(WANTED, labels.AUTO)
    assert done.plan is not None and done.plan.way == labels.API and server.present == dict(WANTED.labels)


def test_nfd_older_version_is_detected_by_annotations() -> None:
    server = with_discovery(Server(), reports_node=False)
    server.patch("nfd-master", {"nfd.node.kubernetes.io/feature-labels": "x"}, "annotations")
    done = server.bring(WANTED, labels.AUTO)
    assert done.plan is not None and done.plan.way == labels.FILE


def test_nfd_labels_are_written_to_file() -> None:
    server = with_discovery(Server())
    wanted = labels.DesiredLabels({**WANTED.labels, CHIP: "910"}, {BUS: "true"})
    done = server.bring(wanted, labels.AUTO)
    assert done.plan is not None and done.plan.in_file == dict(WANTED.labels) and not done.had_file
    # Labels that NFD does not accept from files are applied directly. Labels that NFD writes itself are not written.
    assert server.present == {CHIP: "910"}
    assert server.metadata["annotations"] == {labels.WRITTEN: CHIP, labels.IN_FILE: f"{COUNT},{PRODUCT}"}
    # NFD reads the file and writes these labels: this module owns them, and not NFD's labels from other sources.
    server.patch("nfd-master", {**WANTED.labels, "nvidia.com/gpu.family": "hopper"})
    done = server.bring(labels.DesiredLabels({**wanted.labels, "nvidia.com/gpu.family": "x"}), labels.AUTO)
    assert done.had_file and not done.changed and done.plan is not None
    assert done.plan.in_file == dict(WANTED.labels) and list(done.plan.left) == ["nvidia.com/gpu.family"]


def test_nfd_switch_from_file_to_api_and_back() -> None:
    server = with_discovery(Server())
    server.bring(WANTED, labels.AUTO)
    server.lists = {}
    # The note stays until the file is removed, so that the run after an interrupted run finds it.
    done = server.bring(WANTED, labels.AUTO)
    assert done.had_file and labels.IN_FILE in server.metadata["annotations"] and server.present == dict(WANTED.labels)
    assert server.bring(WANTED, labels.AUTO, file_gone=True).changed
    assert list(server.metadata["annotations"]) == [labels.WRITTEN]
    with_discovery(server)
    assert server.bring(WANTED, labels.AUTO).changed and server.present == {}


def test_nfd_removal_deletes_file_and_labels() -> None:
    server = with_discovery(Server())
    server.bring(labels.DesiredLabels({COUNT: "8", CHIP: "910"}), labels.AUTO)
    done = server.bring(labels.DesiredLabels({}), labels.API, file_gone=True)
    assert done.had_file and server.present == {} and server.metadata["annotations"] == {}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        (COUNT, True),
        (BUS, True),
        ("vendor.feature.node.kubernetes.io/x", True),
        ("profile.node.kubernetes.io/x", True),
        (CHIP, False),
        ("kubernetes.io/x", False),
        ("myfeature.node.kubernetes.io/x", False),
    ],
)
def test_nfd_accepted_label_names(name: str, taken: bool) -> None:
    assert labels.is_accepted_by_nfd(name) is taken


def test_file_content_is_sorted() -> None:
    assert labels.file_content({"b/x": "", "a/y": "1"}) == "a/y=1\nb/x=\n"


def test_label_without_value_is_rejected(run_here: Callable[..., Json]) -> None:
    labels = {"nvidia.com/gpu.present": None, "nvidia.com/gpu.count": 8}
    answer = run_here("node_labels", {"host": "http://127.0.0.1:9", "api_key": "k", "node": "n", "labels": labels})
    assert answer["error_code"] == "invalid-label" and "nvidia.com/gpu.present" in answer["msg"]
    assert "gpu.count" not in answer["msg"]


def test_empty_node_name_is_rejected(run_here: Callable[..., Json]) -> None:
    answer = run_here("node_labels", {"host": "http://127.0.0.1:9", "api_key": "k", "node": "", "labels": {}})
    assert answer["error_code"] == "empty-name", answer


def test_module_check_mode_equals_run(run_here: Callable[..., Json], monkeypatch: pytest.MonkeyPatch) -> None:
    server = with_discovery(Server(), pods=False)
    server.patch("nfd-master", {PRODUCT: "x"})
    monkeypatch.setattr(node_labels, "connect", lambda _module: server)
    options = {"node": "n", "labels": {COUNT: 8, PRODUCT: "H100"}, "labels_without_nfd": {BUS: "true"}}
    rehearsed = run_here("node_labels", options, check=True, diff=True)
    done = run_here("node_labels", options, diff=True)
    assert rehearsed["diff"] == done["diff"] == {"before": {}, "after": {COUNT: "8", BUS: "true"}}
    assert rehearsed["coming"] == done["coming"] == {COUNT: "8", BUS: "true"} and not rehearsed["up_to_date"]
    assert run_here("node_labels", {**options, "labels": {COUNT: 7}}, check=True)["changing"] == {COUNT: "7"}
    assert (
        done["changed"]
        and done["labels"] == {COUNT: "8", BUS: "true"}
        and done["unmanaged"] == {PRODUCT: ["nfd-master"]}
    )
    assert PRODUCT in str(done["warnings"]) and done["nfd"] == {"served": True, "daemons": [], "knows_node": True}
    again = run_here("node_labels", options, check=True)
    assert (
        not again["changed"]
        and again["up_to_date"]
        and (again["coming"], again["changing"], again["going"]) == ({}, {}, [])
    )
    by_file = run_here("node_labels", {**options, "way": "file"})
    assert by_file["file_content"] == f"{COUNT}=8\n" and by_file["way"] == "file" and server.present == {PRODUCT: "x"}
    assert (by_file["coming"], by_file["going"]) == ({}, [BUS]), (
        "one that has moved into the file neither comes nor goes"
    )
    gone = run_here("node_labels", {"node": "n", "state": "absent", "file_gone": True})
    assert gone["going"] == [COUNT] and gone["coming"] == {}
    assert gone["changed"] and gone["had_file"] and server.metadata["annotations"] == {}
    assert not run_here("node_labels", {"node": "n", "state": "absent", "file_gone": True})["changed"]
    missing = run_here("node_labels", {**options, "node": "m"})
    assert not missing["exists"] and not missing["changed"] and "The Node m does not exist" in str(missing["warnings"])


HOSTILE = {
    "node-restriction.kubernetes.io/x": "trusted",
    "node-role.kubernetes.io/control-plane": "",
    "topology.kubernetes.io/zone": "a",
    "kubernetes.io/hostname": "other",
    "dra.accelerators/release": "1",
    "nvidia.com/gpu.deploy.device-plugin": "false",
    "nvidia.com/mig-1g.10gb.count.x": "1",
    "nvidia.com/gpu.count\nnode-role.kubernetes.io/master": "1",
    "feature.node.kubernetes.io/cpu-hardware_multithreading": "true",
}
PROFILE = "nvidia.com/mig-1g.10gb.me.all.count"


@pytest.mark.parametrize("name", HOSTILE)
def test_label_outside_vendor_names_is_rejected(name: str) -> None:
    allowed, rejected = labels.split_allowed({COUNT: "8", PROFILE: "1", BUS: "true", name: HOSTILE[name]}, ["nvidia"])
    assert allowed == {COUNT: "8", PROFILE: "1", BUS: "true"} and list(rejected) == [name]


def test_label_of_another_vendor_is_rejected() -> None:
    assert labels.split_allowed({CHIP: "910"}, ["nvidia"])[0] == {}
    assert labels.split_allowed({CHIP: "910"}, ["ascend", "nvidia"])[0] == {CHIP: "910"}


@pytest.mark.parametrize("value", ["x" * 64, "a b", "-", "8\nnode-role.kubernetes.io/master=", "{{ 1 }}"])
def test_value_not_a_label_value_is_rejected(value: str) -> None:
    assert labels.split_allowed({PRODUCT: value}, ["nvidia"])[0] == {}


def test_too_many_labels_are_rejected() -> None:
    many = {f"nvidia.com/mig-1g.{number}gb.count": "1" for number in range(labels.MOST_LABELS + 1)}
    with pytest.raises(AcceleratorError, match="at most 256"):
        labels.split_allowed(many, ["nvidia"])


@pytest.mark.parametrize("state", ["present", "absent"])
@pytest.mark.parametrize("way", ["annotation", "managed fields"])
def test_label_with_a_forged_owner_is_not_removed(way: str, state: str) -> None:
    """A node writes annotations or applies a label under a forged manager name: the module does not remove that label."""
    server = Server()
    server.patch("kubectl", HOSTILE)
    if way == "annotation":
        noted = {labels.WRITTEN: ",".join(HOSTILE), labels.IN_FILE: ",".join(HOSTILE)}
        server.patch("kubelet", noted, "annotations")
    else:
        server.apply(labels.MANAGER, HOSTILE)
    server.bring(WANTED if state == "present" else labels.DesiredLabels({}))
    assert HOSTILE.items() <= server.present.items()
    assert not any(name in str(server.metadata["annotations"].get(labels.WRITTEN)) for name in HOSTILE)


def test_module_reports_rejected_labels(run_here: Callable[..., Json], monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setattr(node_labels, "connect", lambda _module: server)
    done = run_here("node_labels", {"node": "n", "vendors": ["nvidia"], "way": "api", "labels": {COUNT: 8, **HOSTILE}})
    assert server.present == {COUNT: "8"} and done["labels"] == {COUNT: "8"}
    assert set(done["rejected"]) == set(HOSTILE)
    assert all(repr(name) in str(done["warnings"]) or "\n" in name for name in HOSTILE)
