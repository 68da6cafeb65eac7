# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The transport that gRPC uses in the daemon."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
from dra_driver.kubelet import select_transport

VARIABLE = "GRPC_EXPERIMENTS"
#: Prints the value that gRPC would read at its first import.
WATCH = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("{VARIABLE}", "nothing"))
sys.meta_path.insert(0, Watch())
import dra_driver.node
"""


def test_transport_is_chosen_before_grpc_is_imported() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", WATCH], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "-event_engine_listener"


def test_transport_is_set_for_the_tested_grpc_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    select_transport(importlib.metadata.version("grpcio"))
    assert os.environ[VARIABLE]


def test_transport_of_other_releases_or_an_existing_choice_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    select_transport("1.99.0")
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "work_stealing")
    select_transport("1.85.1")
    assert os.environ[VARIABLE] == "work_stealing"
