# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Objects that the role dra_controller writes for its two forms: pods, webhook clients, permissions, and removed objects."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.module_utils._host.secret_masking import find_secrets
from cryptography.x509 import DNSName, SubjectAlternativeName
from dra_driver.controller.admission import answer, rules_for
from dra_driver.controller.controller_config import NAME_VARIABLE, load
from dra_driver.controller.reader_authorization import PATH
from dra_driver.controller.serving_certificate import utc_now
from dra_driver.core.certificates import create_ca, create_serving_certificate
from playing import play

from tests.unit.ansible_process import PYTHON, run_ansible

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_controller"
NAME, NAMESPACE = "dra-accelerators-controller", "dra-accelerators-controller"
SERVICE = f"{NAME}.{NAMESPACE}.svc"
WANTED = {
    "objects": "__dra_controller_pod_objects",
    "not_wanted": "__dra_controller_unneeded_lists | map(attribute='kind') | list",
    "rights": "__dra_controller_objects",
    "webhook": "__dra_controller_webhook_object",
    "elsewhere": "__dra_controller_webhook_moved",
    "wrong": "__dra_controller_wrong_class",
    "settings": "__dra_controller_settings",
}
Written = dict[str, Any]


def deployment(**more: Any) -> dict[str, Any]:
    """Return the variables of a site with a Deployment."""
    return {"dra_controller_deploy_as": "deployment", "dra_controller_image": "registry.example.com/driver:1", **more}


def node(name: str, address: str) -> dict[str, Any]:
    """Return a Node as the API server returns it."""
    return {"metadata": {"name": name}, "status": {"addresses": [{"type": "InternalIP", "address": address}]}}


def services(**more: Any) -> dict[str, Any]:
    """Return the variables of a site with services on both hosts, and the hosts' Nodes from the API server."""
    found = [("a", [node("a", "10.0.0.1")]), ("b", [node("node-b", "fd00::2")])]
    nodes = [{"__dra_controller_peer": host, "resources": resources} for host, resources in found]
    programs = {"release": "1", "environment": "2"}
    return {"__dra_controller_nodes": {"results": nodes}, "__dra_controller_host": {"programs": programs}, **more}


def stored_webhook(trusted: str, *clients: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a webhook configuration as the API server returns it."""
    webhooks = [{"name": name, "clientConfig": {**client, "caBundle": trusted}} for name, client in clients]
    return {"resources": [{"webhooks": webhooks}]}


def rollout(**status: int) -> dict[str, Any]:
    """Return a Deployment with two desired replicas as the API server returns it."""
    return {"resources": [{"metadata": {"generation": 3}, "spec": {"replicas": 2}, "status": status}]}


BY_SERVICE = ("pods.controller.dra.accelerators", {"service": {"name": NAME}})
BY_HOSTS = (
    ("a.controller.dra.accelerators", {"url": "https://10.0.0.1:9443/validate"}),
    ("node-b.controller.dra.accelerators", {"url": "https://[fd00::2]:9443/validate"}),
)
DONE = {"observedGeneration": 3, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}
ROLLOUTS = {
    "all": (rollout(**DONE), True),
    "not seen yet": (rollout(**{**DONE, "observedGeneration": 2}), False),
    "one of before": (rollout(**{**DONE, "replicas": 3}), False),
    "one not updated": (rollout(**{**DONE, "updatedReplicas": 1}), False),
    "one not ready": (rollout(**{**DONE, "availableReplicas": 1}), False),
    "nothing": (rollout(), False),
    "none": ({"resources": []}, False),
}
DENIED = 'b\'{"message":"admission webhook \\"%s.controller.dra.accelerators\\" denied the request: x"}\''
REFUSALS = {
    DENIED % "pods": True,
    'failed calling webhook "pods.controller.dra.accelerators": no endpoints available': False,
    DENIED % "node-1": False,
    "": False,
}
UNREADY = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
WAITING = [{"state": {"waiting": {"reason": "ErrImageNeverPull"}}, "lastState": {}}]
PODS = [
    {"metadata": {"name": "p1"}, "status": {"phase": "Pending", "conditions": [UNREADY]}},
    {"metadata": {"name": "p2"}, "status": {"phase": "Pending", "containerStatuses": WAITING}},
    {"metadata": {"name": "p3"}, "status": {}},
]
OTHER = {
    "dra_controller_grace": 7,
    "dra_controller_address": "127.0.0.1:9999",
    "dra_controller_device_classes": {"mine": "device"},
    "dra_controller_image_pull_secrets": ["one"],
    "dra_controller_webhook_failure_policy": "Fail",
    "dra_controller_replicas": 1,
    "dra_controller_pod_metrics_peers": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}],
    "__dra_controller_api_endpoints": {"resources": [{"ports": [{"name": "https", "port": 6443}]}]},
    "dra_controller_pod_nodes": [],
    "dra_controller_pod_control_plane": False,
    "dra_controller_pod_node_selector": {"site.example.com/zone": 3},
}
ANYWHERE = {
    "dra_controller_pod_nodes": [],
    "dra_controller_pod_control_plane": False,
    "dra_controller_pod_node_selector": {},
    "dra_controller_webhook": False,
}
ISSUER = {"dra_controller_certificate_issuer": {"name": "internal-ca", "kind": "ClusterIssuer"}}
CERTIFICATE = {"certificate": "__dra_controller_certificate"}
ASKED = {key: WANTED[key] for key in ("webhook", "elsewhere", "not_wanted")}
#: The variables and the expressions to evaluate, for each site.
SITES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "pods": (deployment(__dra_controller_configured={"resources": []}), WANTED),
    "again": (deployment(__dra_controller_configured=stored_webhook("QUJD", BY_SERVICE)), ASKED),
    "other": (deployment(__dra_controller_configured={"resources": []}, **OTHER), WANTED),
    "anywhere": (deployment(**ANYWHERE), {key: WANTED[key] for key in ("objects", "rights")}),
    "control plane": (deployment(dra_controller_pod_nodes=[]), {"objects": WANTED["objects"]}),
    "cert-manager": (
        deployment(__dra_controller_configured={"resources": []}, **ISSUER),
        {**{key: WANTED[key] for key in ("webhook", "rights", "settings")}, **CERTIFICATE},
    ),
    "cert-manager for services": (services(**ISSUER), CERTIFICATE),
    "authority": (
        deployment(
            __dra_controller_configured=stored_webhook("QUJD", BY_SERVICE),
            __dra_controller_authority={"ca_bundle": "TkVX"},
        ),
        {"webhook": WANTED["webhook"]},
    ),
    "report": (deployment(dra_controller_report=True), {key: WANTED[key] for key in ("rights", "settings")}),
    "services": (services(__dra_controller_configured={"resources": []}), {**ASKED, "rights": WANTED["rights"]}),
    "to pods": (deployment(__dra_controller_configured=stored_webhook("QUJD", *BY_HOSTS)), ASKED),
    "to services": (services(__dra_controller_configured=stored_webhook("QUJD", BY_SERVICE)), ASKED),
    **{
        f"rollout {name}": (
            deployment(__dra_controller_deployment=reported),
            {"done": "__dra_controller_rolled_out | bool"},
        )
        for name, (reported, _done) in ROLLOUTS.items()
    },
    **{
        f"refusal {reported}": (
            deployment(__dra_controller_refusal={"msg": reported} if reported else {}),
            {"refused": "__dra_controller_refused | bool"},
        )
        for reported in REFUSALS
    },
    "lines": (
        deployment(__dra_controller_pods={"resources": PODS}),
        {"lines": "__dra_controller_pod_lines"},
    ),
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Return the values of the role's expressions for each site, evaluated by Ansible in an inventory with two hosts."""
    directory = tmp_path_factory.mktemp("sites")
    (directory / "templates").symlink_to(ROLE / "templates")
    tasks: list[dict[str, Any]] = []
    for number, (variables, expressions) in enumerate(SITES.values()):
        each = ", ".join(f"'{key}': {expression}" for key, expression in expressions.items())
        text = "{{ {" + each + "} | to_json | b64encode }}"
        tasks.append({"ansible.builtin.set_fact": {f"site_{number}": text}, "vars": variables})
    every = "{{ [" + ", ".join(f"site_{number}" for number in range(len(SITES))) + "] | to_json }}"
    tasks.append({"ansible.builtin.copy": {"content": every, "dest": str(directory / "out.json"), "mode": "0600"}})
    files = [str(ROLE / "defaults/main.yml"), str(ROLE / "vars/main.yml")]
    play = {"hosts": "a", "gather_facts": False, "vars_files": files, "tasks": tasks}
    (directory / "play.yml").write_text(yaml.safe_dump([play]))
    here = {"ansible_connection": "local", "ansible_python_interpreter": str(PYTHON)}
    hosts: dict[str, Any] = {"a": here, "b": {"accelerator_node_name": "node-b"}}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"accelerator_controllers": {"hosts": hosts}}))
    done = run_ansible(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", directory / "hosts.yml", directory / "play.yml"],
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(directory / "local")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(base64.b64decode(each)) for each in json.loads((directory / "out.json").read_text())]
    return dict(zip(SITES, found, strict=True))


def of_kind(written: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the one object of a kind."""
    (found,) = (each for each in written["objects"] if each["kind"] == kind)
    return dict(found)


def template_of(written: Written) -> dict[str, Any]:
    """Return the pod template."""
    return dict(of_kind(written, "Deployment")["spec"]["template"])


@pytest.mark.prove
def test_pods_have_only_necessary_permissions_and_mounts(sites: dict[str, Written]) -> None:
    written = sites["pods"]
    names = {(each["metadata"]["name"], each["metadata"]["namespace"]) for each in written["objects"]}
    assert names == {(NAME, NAMESPACE)}
    pod = template_of(written)["spec"]
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]} and security["readOnlyRootFilesystem"] is True
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] >= 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [set(volume) for volume in pod["volumes"]] == [{"name", "configMap"}]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("controller", "system-cluster-critical")
    control_plane = {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["tolerations"] == [control_plane] and pod["imagePullSecrets"] == []
    assert {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }


def test_pods_read_the_written_configuration(
    sites: dict[str, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = sites["other"]
    pod = template_of(written)["spec"]
    (container,) = pod["containers"]
    path = tmp_path / "controller.yaml"
    path.write_text(of_kind(written, "ConfigMap")["data"]["controller.yaml"])
    assert container["env"] == [{"name": NAME_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    monkeypatch.setenv(NAME_VARIABLE, "pod-1")
    settings = load(str(path))
    assert (settings.name, settings.kubeconfig, settings.grace) == ("pod-1", "", 7)
    assert (settings.address, settings.webhook.address) == ("0.0.0.0:9999", "0.0.0.0:9443")
    assert settings.webhook.device_classes == {"mine": "device"}
    assert container["command"][-1] == f"{container['volumeMounts'][0]['mountPath']}/controller.yaml"
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"webhook": 9443, "metrics": 9999}
    service = of_kind(written, "Service")["spec"]
    ports = {port["name"]: (port["port"], port["targetPort"]) for port in service["ports"]}
    assert ports == {"webhook": (443, "webhook"), "metrics": (9999, "metrics")}
    assert service["selector"].items() <= template_of(written)["metadata"]["labels"].items()
    assert pod["imagePullSecrets"] == [{"name": "one"}]


def test_without_a_webhook_no_webhook_object_is_written(sites: dict[str, Written]) -> None:
    written = sites["anywhere"]
    assert "webhook" not in of_kind(written, "ConfigMap")["data"]["controller.yaml"]
    assert [port["name"] for port in of_kind(written, "Service")["spec"]["ports"]] == ["metrics"]
    assert "secrets" not in rules(written, "Role")


def test_api_server_calls_the_service_by_a_name_in_the_certificate(sites: dict[str, Written]) -> None:
    written = sites["other"]
    (webhook,) = written["webhook"]["webhooks"]
    client = webhook["clientConfig"]["service"]
    assert f"{client['name']}.{client['namespace']}.svc" == SERVICE
    assert (client["path"], client["port"], webhook["failurePolicy"]) == ("/validate", 443, "Fail")
    names = written["settings"]["webhook"]["names"]
    certificate = create_serving_certificate(create_ca(utc_now(), 900), names, now=utc_now(), seconds=60).parsed
    known = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
    assert known.get_values_for_type(DNSName) == [SERVICE]


def test_webhook_rejects_the_object_of_the_dry_run(sites: dict[str, Written]) -> None:
    request = {"uid": "1", "operation": "CREATE", "object": sites["pods"]["wrong"]}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    assert not answer(review, rules_for(["gpu.nvidia.com"], {}))["response"]["allowed"]


def test_changed_configuration_replaces_the_pods(sites: dict[str, Written]) -> None:
    one, other = (template_of(sites[site])["metadata"]["annotations"] for site in ("pods", "other"))
    assert one != other and list(one) == list(other)


def test_disruption_budget_exists_only_for_several_pods(sites: dict[str, Written]) -> None:
    several, one = sites["pods"], sites["other"]
    kinds = {"ConfigMap", "Service", "NetworkPolicy", "Deployment"}
    assert {each["kind"] for each in several["objects"]} == kinds | {"PodDisruptionBudget"}
    assert {each["kind"] for each in one["objects"]} == kinds
    assert (several["not_wanted"], one["not_wanted"]) == ([], ["PodDisruptionBudget"])
    assert of_kind(several, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    spec = of_kind(several, "Deployment")["spec"]
    assert (spec["replicas"], of_kind(one, "Deployment")["spec"]["replicas"]) == (2, 1)
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    affinity = spec["template"]["spec"]["affinity"]["podAntiAffinity"]
    (apart,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert apart["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert apart["podAffinityTerm"]["matchLabelKeys"] == ["pod-template-hash"]


def test_pods_run_on_the_nodes_of_the_group_or_on_chosen_nodes(sites: dict[str, Written]) -> None:
    def terms(site: str) -> Any:
        affinity = template_of(sites[site])["spec"]["affinity"]["nodeAffinity"]
        return affinity and affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    linux = {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
    named = [[{"key": "metadata.name", "operator": "In", "values": [name]}] for name in ("a", "node-b")]
    assert terms("pods") == [{"matchExpressions": [linux], "matchFields": fields} for fields in named]
    zone = {"key": "site.example.com/zone", "operator": "In", "values": ["3"]}
    assert terms("other") == [{"matchExpressions": [zone], "matchFields": []}]
    assert terms("anywhere") is None, "null removes a previous affinity"
    control_plane = {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}
    assert terms("control plane") == [{"matchExpressions": [linux, control_plane], "matchFields": []}]


def test_certificate_of_cert_manager_has_the_names_of_the_webhook(sites: dict[str, Written]) -> None:
    """Only the objects are checked. cert-manager itself does not run."""
    certificate = sites["cert-manager"]["certificate"]
    assert certificate["metadata"]["namespace"] == NAMESPACE and certificate["spec"]["dnsNames"] == [SERVICE]
    assert certificate["spec"]["issuerRef"] == {
        "group": "cert-manager.io",
        "kind": "ClusterIssuer",
        "name": "internal-ca",
    }
    assert certificate["spec"]["secretName"] == sites["cert-manager"]["settings"]["webhook"]["secret_name"]
    annotations = sites["cert-manager"]["webhook"]["metadata"]["annotations"]
    assert annotations == {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{NAME}"}
    role = rules(sites["cert-manager"], "Role")
    assert role["secrets"] == ["get"]
    of_services = sites["cert-manager for services"]["certificate"]["spec"]
    assert (of_services["dnsNames"], of_services["ipAddresses"]) == (["a", "node-b"], ["10.0.0.1", "fd00::2"])


def test_configuration_of_the_controller_is_shown_in_a_diff(sites: dict[str, Written]) -> None:
    """Module file_set hides the diff of files with secrets, such as a name under the key ``secret``: the config has none."""
    texts = {name: yaml.safe_dump(site["settings"]) for name, site in sites.items() if "settings" in site}
    assert any("secret_name" in text for text in texts.values())
    assert {name: find_secrets(text) for name, text in texts.items()} == dict.fromkeys(texts, frozenset())


def test_ca_bundle_comes_from_the_module(sites: dict[str, Written]) -> None:
    (webhook,) = sites["authority"]["webhook"]["webhooks"]
    assert webhook["clientConfig"]["caBundle"] == "TkVX"


def test_pods_have_a_memory_limit_and_connect_to_the_api_server_only(sites: dict[str, Written]) -> None:
    assert template_of(sites["pods"])["spec"]["containers"][0]["resources"]["limits"] == {"memory": "4Gi"}
    policy = of_kind(sites["other"], "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= template_of(sites["other"])["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ports = [{"port": port, "protocol": "TCP"} for port in (443, 6443)]
    assert policy["egress"] == [{"ports": ports}]
    webhook, metrics = policy["ingress"]
    assert webhook == {"ports": [{"port": "webhook", "protocol": "TCP"}]}
    assert metrics["from"] == OTHER["dra_controller_pod_metrics_peers"]
    assert metrics["ports"] == [{"port": "metrics", "protocol": "TCP"}]
    (metrics,) = of_kind(sites["anywhere"], "NetworkPolicy")["spec"]["ingress"]
    # An empty list of peers would change the object in each run, because the API server does not store it.
    assert metrics == {"ports": [{"port": "metrics", "protocol": "TCP"}]}


def rules(written: Written, kind: str) -> dict[str, list[str]]:
    """Return the verbs of a role of the controller by resource. A Role is the one in the controller's namespace."""
    found = [each for each in written["rights"] if each["kind"] == kind]
    (role,) = (each for each in found if kind == "ClusterRole" or each["metadata"]["name"] == "controller")
    return {resource: rule["verbs"] for rule in role["rules"] for resource in rule["resources"]}


def test_docs_give_the_reason_of_each_permission_and_of_no_other(sites: dict[str, Written]) -> None:
    """The documented permissions are those of services and pods with the report, each with a reason, and no others."""
    page = (ROLE.parents[1] / "docs/security.md").read_text(encoding="utf-8").partition("\n## The controller\n")[2]
    table = page.partition("\n### ")[0]
    output: dict[tuple[str, str], str] = {}
    for verbs, on, reason in re.findall(r"^\| ([a-z].*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)[1:]:
        resources = re.findall(r"[a-z]+(?:/[a-z]+)?", re.sub(r" (in|of|that) .*|: .*", "", on))
        for verb in re.findall(r"[a-z-]+(?::[a-z]+)?", re.sub("by name", "", verbs)):
            output.update({(resource, verb): reason for resource in resources})
    held = {
        (resource, verb)
        for site in ("services", "report")
        for each in sites[site]["rights"]
        if each["kind"] in ("ClusterRole", "Role")
        for rule in each["rules"]
        for resource in rule.get("resources", ())
        for verb in rule["verbs"]
    }
    assert set(output) == held
    assert all(output.values())


def test_pods_have_the_permissions_of_the_service_except_token_renewal(sites: dict[str, Written]) -> None:
    pods, service = sites["pods"], sites["services"]
    assert rules(pods, "ClusterRole") == rules(service, "ClusterRole")
    wanted = rules(service, "Role")
    assert wanted.pop("serviceaccounts/token") == ["create"]
    assert rules(pods, "Role") == wanted


def test_webhook_clients_and_trusted_cas_change_together(sites: dict[str, Written]) -> None:
    def clients(site: str) -> list[dict[str, Any]]:
        return [each["clientConfig"] for each in sites[site]["webhook"]["webhooks"]]

    hosts = [client for _name, client in BY_HOSTS]
    assert clients("services") == hosts and not sites["services"]["elsewhere"]
    assert sites["services"]["not_wanted"] == [
        "Deployment",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "Service",
        "ConfigMap",
    ]
    assert sites["to pods"]["elsewhere"], "the API servers have to learn of it before the services go"
    (client,) = clients("to pods")
    assert client["caBundle"] == "QUJD", "the Service is trusted from the first moment"
    assert not sites["again"]["elsewhere"] and clients("again") == [client]
    assert sites["to services"]["elsewhere"]
    assert clients("to services") == [{**each, "caBundle": "QUJD"} for each in hosts]


@pytest.mark.parametrize("name", ROLLOUTS)
def test_role_waits_for_all_pods_of_the_newest_template(sites: dict[str, Written], name: str) -> None:
    assert sites[f"rollout {name}"] == {"done": ROLLOUTS[name][1]}


def test_pods_that_are_not_ready_are_reported_with_the_reason(sites: dict[str, Written]) -> None:
    assert sites["lines"]["lines"] == [
        "pod p1: Pending; 0/2 nodes are available",
        "pod p2: Pending; ErrImageNeverPull",
        "pod p3: unknown",
    ]


@pytest.mark.parametrize("reported", REFUSALS)
def test_only_a_rejection_by_the_pods_shows_that_they_answer(sites: dict[str, Written], reported: str) -> None:
    assert sites[f"refusal {reported}"] == {"refused": REFUSALS[reported]}


REFUSED = {
    "image": ({"dra_controller_deploy_as": "deployment"}, "dra_controller_image is not set"),
    "report": (
        deployment(dra_controller_report=True, dra_controller_webhook=False),
        "dra_controller_report is true and dra_controller_webhook is false",
    ),
    "number": (deployment(dra_controller_replicas=0), "dra_controller_replicas is 0, expected 1 or more"),
}


def test_role_rejects_options_without_a_possible_deployment(tmp_path: Path) -> None:
    tasks = [{"ansible.builtin.include_role": {"name": "dra.accelerators.dra_controller"}}]
    # Each site has its own cluster, because the options of a cluster's controllers must be equal.
    hosts = {name: {**variables, "dra_controller_context": name} for name, (variables, _said) in REFUSED.items()}
    played = play(tmp_path, tasks, hosts, group="accelerator_controllers")
    assert set(played.failed) == set(REFUSED), played.output
    for name, (_variables, output) in REFUSED.items():
        assert output in played.failed[name]["msg"]


@pytest.mark.parametrize("site", ["pods", "report"])
def test_report_permissions_exist_only_with_the_report(sites: dict[str, Written], site: str) -> None:
    wanted, found = site == "report", sites[site]
    (acting,) = (each for each in found["rights"] if each["kind"] == "ClusterRole" and each["metadata"]["name"] == NAME)
    given = {(resource, verb) for rule in acting["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    more = {("tokenreviews", "create"), ("subjectaccessreviews", "create"), ("pods", "list")}
    assert given & more == (more if wanted else set())
    readers = [each["rules"] for each in found["rights"] if each["metadata"]["name"] == "dra-accelerators-report"]
    assert readers == ([[{"nonResourceURLs": [PATH], "verbs": ["get"]}]] if wanted else [])
    # By default no user can read the report.
    assert [each["metadata"]["name"] for each in found["rights"] if each["kind"] == "ClusterRoleBinding"] == [NAME]
    assert found["settings"]["webhook"]["report"] is wanted
