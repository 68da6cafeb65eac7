# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Check the output of Ansible runs for tokens and keys."""

from __future__ import annotations

import re

#: A JSON web token, such as that of a service account.
TOKEN = re.compile(r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}")
#: A private key in PEM, as text or in base64: PRIVATE KEY, EC PRIVATE KEY, RSA PRIVATE KEY.
KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY|LS0tLS1CRUdJTiB(?:QUklWQVRF|FQyBQUklWQVRF|SU0EgUFJJVkFUR)")


def check_no_secret(output: str, *tokens: str) -> None:
    """Assert that an output contains none of these tokens or their signatures, nor any other token or private key."""
    for token in tokens:
        assert token not in output
        assert token.split(".")[2] not in output
    for pattern in (TOKEN, KEY):
        found = pattern.search(output)
        assert found is None, output[max(0, found.start() - 2000) : found.start() + 40]
