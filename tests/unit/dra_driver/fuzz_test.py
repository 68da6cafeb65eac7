# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Fuzz the daemons' input from files, the API server, and the network: kubeconfigs, allocated claims, and admission reviews.

Each reader raises its documented errors only, within bounded memory and processor time (tests/unit/bounded.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from dra_driver.api.kubeconfig import InvalidKubeconfig, load_access
from dra_driver.claims.allocation import POD_CLAIM_ANNOTATION, ClaimError, decode_allocation
from dra_driver.claims.store.records import ClaimReference
from dra_driver.commands.redact import redact
from dra_driver.controller.admission import API_VERSION, NoReview, answer, rules_for
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.bounded import run_bounded

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=30) | st.sampled_from(["a", "https://a:6443", "YQ=="])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "server", "certificate-authority", "certificate-authority-data", "client-certificate-data", "client-key", "token",
        "tokenFile", "exec", "proxy-url", "insecure-skip-tls-verify", "tls-server-name", "cluster", "user", "namespace",
    ]
)  # fmt: skip
SECTION = st.dictionaries(FIELDS, JSON, max_size=5) | JSON
ENTRY = st.fixed_dictionaries(
    {"name": JSON | st.just("a")}, optional={"context": SECTION, "cluster": SECTION, "user": SECTION}
)
KUBECONFIG = st.fixed_dictionaries(
    {},
    optional={
        "current-context": JSON | st.just("a"),
        "contexts": st.lists(ENTRY, max_size=3) | JSON,
        "clusters": st.lists(ENTRY, max_size=3) | JSON,
        "users": st.lists(ENTRY, max_size=3) | JSON,
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(KUBECONFIG.map(yaml.safe_dump), JSON.map(yaml.safe_dump), st.text(max_size=200)))
@example("a: " + "[" * 5000)
@example("a: " + "[" * 900)
@example("a: &a [x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\ncurrent-context: *c\n")
@example("current-context: [a]\ncontexts: 5\n")
def test_kubeconfig_any_text_raises_invalid_kubeconfig(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    run_bounded(load_access, str(path), errors=(InvalidKubeconfig,), size=len(text))


DRIVER = "gpu.nvidia.com"
REFERENCE = ClaimReference(namespace="team", name="claim", uid="1")
RESULT = st.fixed_dictionaries(
    {
        "driver": st.sampled_from([DRIVER, "other"]),
        "request": st.text(max_size=8),
        "pool": st.text(max_size=8),
        "device": st.text(max_size=8),
    },
    optional={"shareID": st.text(max_size=8), "adminAccess": st.booleans(), "consumedCapacity": JSON},
)
CONFIG = st.fixed_dictionaries(
    {"opaque": st.fixed_dictionaries({"driver": st.sampled_from([DRIVER, "other"]), "parameters": JSON})},
    optional={
        "source": st.sampled_from(["FromClass", "FromClaim", "FromElsewhere"]),
        "requests": st.lists(st.text(max_size=8), max_size=3),
    },
)
CLAIM = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"uid": st.just("1")},
            optional={"annotations": st.fixed_dictionaries({POD_CLAIM_ANNOTATION: st.text(max_size=80)})},
        ),
        "spec": st.fixed_dictionaries({"devices": st.fixed_dictionaries({"config": st.lists(CONFIG, max_size=3)})}),
        "status": st.fixed_dictionaries(
            {
                "allocation": st.fixed_dictionaries(
                    {
                        "devices": st.fixed_dictionaries(
                            {"results": st.lists(RESULT, max_size=3), "config": st.lists(CONFIG, max_size=3)}
                        )
                    }
                )
            }
        ),
    }
)


@given(CLAIM)
def test_allocated_claim_any_tenant_value_raises_claim_error(claim: dict[str, Any]) -> None:
    run_bounded(decode_allocation, claim, REFERENCE, DRIVER, errors=(ClaimError,), size=len(repr(claim)))


REVIEW = st.fixed_dictionaries(
    {
        "apiVersion": st.just(API_VERSION),
        "request": st.fixed_dictionaries(
            {"uid": st.just("1"), "operation": st.sampled_from(["CREATE", "UPDATE"]), "object": CLAIM | JSON},
            optional={"oldObject": JSON},
        ),
    }
)


@given(REVIEW | JSON)
def test_admission_review_any_value_raises_no_review(review: Any) -> None:
    run_bounded(answer, review, RULES, errors=(NoReview,), size=len(repr(review)))


RULES = rules_for([DRIVER, "npu.huawei.com"], {})


@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from(["-----BEGIN A-----", "token: ", "eyJ", "bearer ", "://", '"', "\\"])).map("".join)
)
@example("token" * 20_000)
@example("-----BEGIN A-----" * 4000)
@example('password: "' + "\\" * 50_000)
def test_redact_any_text_ends(text: str) -> None:
    run_bounded(redact, text, errors=(), size=len(text))
