# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The controller's settings, and its commands that only print."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from controller_steps import DRIVER, cluster_of, run
from dra_driver.api.client import ApiClient
from dra_driver.config import InvalidConfiguration
from dra_driver.controller import commands
from dra_driver.controller.controller_config import NAME_VARIABLE, load, parse
from dra_driver.core.model import OFFER_KINDS
from object_server import ObjectServer


@pytest.mark.parametrize(
    ("document", "output"),
    [
        ({}, "name is missing"),
        ({"name": "a", "grace": 0}, "grace is 0; expected a whole number from 1 to 86400 seconds"),
        ({"name": "a", "address": "nowhere"}, "address is 'nowhere'; expected host:port, or nothing"),
        ({"name": "a", "webhook": {"names": "x"}}, "webhook.names is 'x'; expected a list of texts"),
        (
            {"name": "a", "webhook": {"device_classes": {"ours": "gpu"}}},
            "webhook.device_classes is .*; expected a mapping of names to device, partition, passthrough or group",
        ),
        ({"name": "a", "webhook": {"device_classes": {"ours": ["device"]}}}, "webhook.device_classes is "),
        ({"name": "a", "unheard": 1}, "unheard is unknown"),
    ],
)
def test_parse_invalid_settings_are_named(document: Any, output: str) -> None:
    with pytest.raises(InvalidConfiguration, match=output):
        parse(document)


def test_classes_of_the_site_may_have_devices_of_every_kind() -> None:
    classes = {f"our-{kind}": kind for kind in OFFER_KINDS}
    assert parse({"name": "a", "webhook": {"device_classes": classes}}).webhook.device_classes == classes


def test_settings_without_drivers_are_for_all_that_are_known() -> None:
    assert parse({"name": "a"}).drivers


def test_each_pod_has_its_own_name_over_one_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "controller.yaml"
    file.write_text("namespace: here\n")
    with pytest.raises(InvalidConfiguration, match="name is missing"):
        load(str(file))
    monkeypatch.setenv(NAME_VARIABLE, "controller-7f9c-x2")
    assert (load(str(file)).name, load(str(file)).namespace) == ("controller-7f9c-x2", "here")
    file.write_text("- a list\n")
    with pytest.raises(InvalidConfiguration, match=r"controller\.yaml"):
        load(str(file))


def test_drift_command_shows_the_current_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(server: ObjectServer, client: ApiClient) -> None:
        def shown() -> str:
            assert commands.main(["drift", "--config", str(file)]) == 0
            return capsys.readouterr().out

        file = tmp_path / "controller.yaml"
        settings = {"name": "here", "kubeconfig": str(tmp_path / "kubeconfig"), "drivers": [DRIVER]}
        file.write_text(json.dumps(settings))
        assert await asyncio.to_thread(shown) == "No drift found.\n"
        cluster_of(server)
        text = await asyncio.to_thread(shown)
        assert "Node gone has ResourceSlices but no Node object at this moment" in text
        assert {method for method, _path in server.log} == {"GET"}

    run(tmp_path, scenario)


def test_plan_command_reports_an_invalid_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
