# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Secrets in texts: tokens, private keys, and passwords are masked, and all other text stays."""

from __future__ import annotations

import time

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._host.secret_masking import (
    MASK,
    changed_lines,
    find_secrets,
    mask_secrets,
)
from hypothesis import given
from hypothesis import strategies as st

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJkcml2ZXItbm9kZS0xIn0.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
SECRET = "s3cr3t-value-1"
TEXTS = {
    "kubeconfig YAML": f"users:\n- user:\n    token: {TOKEN}\n",
    "kubeconfig JSON": f'{{"user": {{"token": "{SECRET}"}}}}',
    "client key": f"    client-key-data: {SECRET}\n",
    "containerd TOML": f'[plugins."x".registry.configs."r".auth]\n  password = "{SECRET}"\n',
    "containerd auth": f"  auth = '{SECRET}'\n",
    "identity token": f'identitytoken = "{SECRET}"\n',
    "proxy": f'http-proxy = "http://user:{SECRET}@proxy.example.com:3128"\n',
    "pip": f"index-url = https://user:{SECRET}@index.example.com/simple\n",
    "header": f"Authorization: Bearer {SECRET}\n",
    "private key": f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----\n",
}
HARMLESS = (
    "token_lifetime: 2592000\n",
    "ExecStart=/opt/x/bin/python -m dra_driver.renew_token --kubeconfig /etc/x/kubeconfig --lifetime 3600\n",
    "secret_content is hidden\n",
    "https://example.com:8443/path\n",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
    'runtime_type = "io.containerd.runc.v2"\n',
)


@pytest.mark.parametrize("kind", TEXTS)
def test_secret_is_masked(kind: str) -> None:
    text = TEXTS[kind]
    masked = mask_secrets(text)
    assert MASK in masked and SECRET not in masked and TOKEN not in masked
    assert any(each in (SECRET, TOKEN) or SECRET in each for each in find_secrets(text))


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_is_unchanged(text: str) -> None:
    assert mask_secrets(text) == text
    assert not find_secrets(text)


@given(st.text(), st.sampled_from(sorted(TEXTS)), st.text())
def test_secret_lines_are_masked_in_any_context(before: str, kind: str, after: str) -> None:
    masked = mask_secrets(f"{before}\n{TEXTS[kind]}\n{after}")
    assert SECRET not in masked.removeprefix(before).removesuffix(after) or SECRET in before + after
    assert TOKEN not in masked or TOKEN in before + after


@pytest.mark.parametrize(
    "part", ["eyJ", "password=", "password: '", "://a:", "-----BEGIN PRIVATE KEY-----", "Bearer ", "auth", '"\\', "a"]
)
def test_masking_time_is_linear(part: str) -> None:
    def seconds(length: int) -> float:
        text = part * (length // len(part))
        began = time.process_time()
        mask_secrets(text)
        return time.process_time() - began

    assert seconds(400_000) < 12 * max(seconds(100_000), 0.05)


def test_changed_lines_have_no_context_and_no_secret() -> None:
    before = f'[a]\nx = 1\n[registry.auth]\nheader = ["Basic dXNlcjpwYXNz"]\npassword = "{SECRET}"\ny = 2\n'
    after = before.replace("y = 2", "y = 3\nz = 4").replace("x = 1", f'x = {{v = 1, password = "{SECRET}"}}')
    shown = changed_lines("/c.toml", before, after)
    assert [line for line in shown.splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")] == [
        "-x = 1",
        f'+x = {{v = 1, password = "{MASK}"}}',
        "-y = 2",
        "+y = 3",
        "+z = 4",
    ]
    assert SECRET not in shown and "dXNlcjpwYXNz" not in shown
    assert "--- /dev/null" in changed_lines("/c.toml", None, after)
    assert changed_lines("/c.toml", before, before) == ""
    only = changed_lines("/c.toml", before, before.replace(SECRET, "other-value-2"))
    assert "secret values change" in only and "other-value-2" not in only
