# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Report the pending conditions of a node during a wait: the module waits in intervals, and the action repeats the call."""

from __future__ import annotations

import types
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.action import node_driver as node_driver_action
from ansible_collections.dra.accelerators.plugins.action.node_driver import ActionModule
from ansible_collections.dra.accelerators.plugins.module_utils._driver_service.service_plan import ServiceState
from ansible_collections.dra.accelerators.plugins.module_utils._host.node_facts import DRIVER_UNIT
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.modules.node_driver import NotStarted, Service, argument_spec


class Waiting(Service):
    """A service that returns the states of a list, and then repeats the last one."""

    def __init__(self, states: list[ServiceState], **params: Any) -> None:
        given = {name: option.get("default") for name, option in argument_spec().items()}
        super().__init__(System(), {**given, "fingerprint": "a", **params})
        self.states = states

    def read_state(self, _name: str = DRIVER_UNIT, _instance: str = "") -> ServiceState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def fingerprint_of(self, pid: int) -> str:
        return "a"

    def journal(self, unit: str = DRIVER_UNIT) -> list[str]:
        return ["its last word"]

    def wait_for_it(self) -> tuple[ServiceState, tuple[str, ...]]:
        return self.wait(self.missing_conditions, DRIVER_UNIT)


def observed_status(published: bool) -> ServiceState:
    status = {"driver": "gpu.nvidia.com", "ready": True, "published": published, "pid": 411, "problems": []}
    return ServiceState(411, 60.0, 0, "active", [status])


def test_call_waits_up_to_patience_and_total_timeout() -> None:
    lacks = ("gpu.nvidia.com has not published its devices",)
    assert Waiting([observed_status(False), observed_status(True)], timeout=60.0).wait_for_it() == (
        observed_status(True),
        (),
    )
    assert Waiting([observed_status(False)], timeout=60.0, patience=0.0).wait_for_it() == (
        observed_status(False),
        lacks,
    )
    with pytest.raises(NotStarted, match="not started within 60 s: gpu") as failed:
        Waiting([observed_status(False)], timeout=60.0, patience=0.0, waited=60.0).wait_for_it()
    assert failed.value.journal == ["its last word"]


class ScriptedAction(ActionModule):
    """The action with a list of module results instead of a node. ``calls`` has the arguments of each call."""

    def __init__(self, arguments: dict[str, Any], answers: list[dict[str, Any]], *, check: bool = False) -> None:
        task = types.SimpleNamespace(
            args=arguments,
            check_mode=check,
            async_val=0,
            diff=False,
            environment=None,
            action="node_driver",
            no_log=False,
        )
        self._task, self._answers, self.calls = task, answers, []
        self._connection = self._play_context = self._loader = self._templar = self._shared_loader_obj = None
        self._cleanup_remote_tmp = False

    def _execute_module(self, module_name: str, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]:
        self.calls.append(module_args)
        return self._answers.pop(0)


def run_action(action: ScriptedAction, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[str]]:
    """Return the result of the task and the messages during it."""
    messages: list[str] = []
    monkeypatch.setattr(node_driver_action.ActionBase, "run", lambda *_all: {})
    monkeypatch.setattr(
        node_driver_action.Display, "display", lambda _self, text, *_all, **_more: messages.append(text)
    )
    return action.run(None, {"inventory_hostname": "gpu-node-1"}), messages


def test_action_reports_pending_conditions_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"action": "restart", "unit": DRIVER_UNIT, "reason": "another release"}
    first = {"changed": True, "steps": [step], "diff": {"after": "restart"}, "waiting": ["it is not ready"]}
    later = {"changed": False, "steps": [], "diff": {"after": ""}}
    action = ScriptedAction(
        {"timeout": "60", "fingerprint": "a"}, [first, {**later, "waiting": ["x"]}, {**later, "waiting": []}]
    )
    result, messages = run_action(action, monkeypatch)
    assert result == {**first, "waiting": []}
    assert [call["waited"] > 0 for call in action.calls] == [False, True, True], "one command is sent to systemd"
    assert all(call["fingerprint"] == "a" and call["timeout"] == 60 for call in action.calls)
    assert [text.partition(": ")[2] for text in messages] == ["it is not ready", "x"]
    assert all(text.startswith("[gpu-node-1] waits for its driver (") for text in messages)


@pytest.mark.parametrize(
    ("arguments", "check"), [({"state": "absent"}, False), ({"fingerprint": "a"}, True), ({"timeout": "soon"}, False)]
)
def test_action_without_wait_calls_module_once(
    arguments: dict[str, Any], check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = ScriptedAction(arguments, [{"changed": True}], check=check)
    assert run_action(action, monkeypatch) == ({"changed": True}, [])
    assert action.calls == [arguments]


def test_action_failure_returns_module_result(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = {"failed": True, "msg": "it has not started", "journal": ["its last word"]}
    action = ScriptedAction({}, [{"changed": True, "waiting": ["x"]}, failure])
    assert run_action(action, monkeypatch)[0] == failure
