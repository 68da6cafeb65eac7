# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Fuzz external input of modules: bundle manifests, key files, outputs of package managers, and TOML files.

Each parser raises its documented errors only, within bounded memory and processor time (tests/unit/bounded.py).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._bundle import bundle_manifest
from ansible_collections.dra.accelerators.plugins.module_utils._packages import apt_output, openpgp, rpm_output
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.bounded import run_bounded

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=30)
    | st.sampled_from(["../../etc/x", "a" * 64, "wheel"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
ITEM_FIELDS = ("path", "kind", "name", "version", "size", "sha256", "for", "from", "signed_by", "verified")
ITEM = st.fixed_dictionaries({}, optional=dict.fromkeys(ITEM_FIELDS, JSON))
MANIFEST = st.fixed_dictionaries(
    {"format": st.just(bundle_manifest.FORMAT) | JSON},
    optional={"items": st.lists(ITEM, max_size=3) | JSON, "needs": JSON, "wheelhouses": JSON, "collection": JSON},
)


@given(st.one_of(MANIFEST.map(json.dumps), JSON.map(json.dumps), st.text(max_size=200)))
@example("[" * 100_000)
@example('{"format": ' + "9" * 10_000 + "}")
def test_bundle_manifest_any_text_raises_bundle_error(text: str) -> None:
    run_bounded(bundle_manifest.read, text, "the bundle", errors=(bundle_manifest.BundleError,), size=len(text))


def armor(data: bytes, kind: str = "PUBLIC KEY BLOCK") -> str:
    body = base64.encodebytes(data).decode()
    return f"-----BEGIN PGP {kind}-----\n\n{body}-----END PGP {kind}-----\n"


@given(
    st.one_of(
        st.binary(max_size=300).map(armor),
        st.binary(max_size=300).map(lambda data: armor(data, "SIGNATURE")),
        st.lists(
            st.sampled_from(["-----BEGIN PGP PUBLIC KEY BLOCK-----", "\n", "\r\n", " ", "A: b", "=abcd", "xsBN"])
        ).map("".join),
        st.text(max_size=200),
    )
)
@example("-----BEGIN PGP PUBLIC KEY BLOCK-----\n" + "A: b\n" * 20_000)
@example("-----BEGIN PGP PUBLIC KEY BLOCK-----" * 5000)
@example(armor(b"\xc6\xff\xff\xff\xff\xff" + b"x" * 10))
@example(armor(b"\xc2\x05\x04\x00\x00\x00\x00", "SIGNATURE"))
def test_key_file_any_text_raises_key_problem(text: str) -> None:
    run_bounded(openpgp.checked_key, text, ["0" * 40], "a repository", errors=(openpgp.KeyProblem,), size=len(text))
    run_bounded(openpgp.signers, text, errors=(openpgp.KeyProblem,), size=len(text))


WORDS = st.sampled_from(
    [
        "Installing:", "Removing:", "Upgrading:", "Transaction Summary", "replacing", "Error:", "nvidia-driver", "3:580.1-1.el9", "x86_64",
        "\t", "|", "installed", "Inst", "Remv", "E:", "deb", "[signed-by=/x]", "Types: deb", "URIs: https://a", "enabled=1", "[repo]",
        "<solvable", 'name="a"', 'type="package"', "/>", "<install>", "</install>", "<message", "&#x110000;", "Packages", "~", "^", "-", ":",
    ]
)  # fmt: skip
LINES = st.lists(WORDS | st.text(max_size=10), max_size=8).map(" ".join)
OUTPUTS = st.lists(LINES, max_size=10).map("\n".join) | st.text(max_size=200)


@pytest.mark.parametrize(
    "parse",
    [
        lambda text: rpm_output.parse_installed(text, "x86_64"), rpm_output.parse_versions, lambda text: rpm_output.parse_transaction(text, {}),
        rpm_output.dnf_errors, rpm_output.parse_locks, rpm_output.parse_summary, rpm_output.parse_search,
        rpm_output.zypper_errors, rpm_output.parse_zypper_locks,
        lambda text: apt_output.parse_status(text, "amd64"), apt_output.parse_available, apt_output.parse_foreseen, apt_output.errors_of,
        lambda text: apt_output.read_sources("a.sources", text), lambda text: apt_output.read_sources("a.list", text),
        lambda text: rpm_output.read_repositories("a.repo", text), rpm_output.os_names, rpm_output.whole_version,
    ],
    ids=[
        "rpm-installed", "rpm-versions", "dnf-transaction", "dnf-errors", "dnf-locks", "zypper-summary", "zypper-search", "zypper-errors",
        "zypper-locks", "dpkg-status", "apt-available", "apt-simulation", "apt-errors", "apt-sources", "apt-list", "rpm-repositories",
        "os-names", "rpm-version",
    ],
)  # fmt: skip
@given(output=OUTPUTS)
@example(output="Installing:\n one two\n")
@example(output="a-" * 20_000)
@example(output="<solvable " * 5000)
@example(output="Inst " * 10_000)
@example(output="9" * 10_000)
def test_package_manager_output_any_text_is_read(parse: Callable[[str], Any], output: str) -> None:
    run_bounded(parse, output, errors=(), size=len(output))
