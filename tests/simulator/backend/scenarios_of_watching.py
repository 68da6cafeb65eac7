# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the calls of a scan when nothing has changed, and the events that GPUs send."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.health.conditions import Severity
from dra_driver.core.model import Device, Notice, Placement
from dra_driver.core.vendors.nvidia.health import condition
from dra_driver.core.vendors.nvidia.health.watch import OWN_CHANGE_SECONDS

from tests.simulator.backend.stage import Stage, assert_refused, on, record_calls

LONG = 120.0
# A scan makes these calls once per GPU: whether it responds, its condition, its mode, and its processes.
OF_EACH = {
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
}
LISTING = "nvmlDeviceGetGpuInstances"
WAITING = "nvmlEventSetWait_v2"


def asked(stage: Stage) -> Counter[str]:
    """Return the calls of one scan by function, without those of a concurrent event wait."""
    calls = record_calls(stage)
    stage.gpus()
    found = Counter(function for function, _argument in calls if function != WAITING)
    stage.backend._nvml.call = type(stage.backend._nvml).call.__get__(stage.backend._nvml)  # type: ignore[method-assign]
    return found


def another_process(program: str) -> None:
    head = "from dra_driver.core.vendors.registry import create\nfrom dra_driver.core.model import Placement\n"
    head += 'backend = create("nvidia")\nbackend.open()\n'
    subprocess.run([sys.executable, "-c", head + program], check=True)


class Listening:
    """A thread that waits for changes all the time, like the driver."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.notices: list[Notice] = []
        self.some = threading.Condition()
        self.ended = False
        self.waits = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while not self.ended:
            self.waits += 1
            try:
                found = self.stage.backend.wait_for_change(LONG)
            except BackendUnavailable:
                break
            with self.some:
                self.notices += found
                self.some.notify_all()
        with self.some:
            self.ended = True
            self.some.notify_all()

    def until(self, words: str, gpu: Device | None = None) -> None:
        def heard() -> bool:
            return any(words in each.message and gpu in (None, each.uuid) for each in self.notices)

        gpu = gpu.uuid if gpu else None  # type: ignore[assignment]
        with self.some:
            assert self.some.wait_for(heard, LONG), (words, self.notices)

    def registered(self, gpus: tuple[Device, ...]) -> None:
        """Wait until all GPUs are registered for events, and scan them again."""
        watch = self.stage.backend._watch
        while any(watch.change_count(gpu.uuid) is None for gpu in gpus):
            threading.Event().wait(0.01)
        self.stage.backend.discover()


@on("8xH100")
def constant_facts_are_read_once(stage: Stage) -> None:
    stage.gpus()
    once = asked(stage)
    assert once == Counter({"nvmlDeviceGetCount": 1, **dict.fromkeys(OF_EACH, 8)})
    calls = record_calls(stage)
    stage.gpus(full=True)
    assert {"nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetHandleByIndex"} <= {
        call for call, _argument in calls
    }
    # A mode's profiles are read once, when the mode is first seen.
    gpu = stage.gpus()[0]
    for enabled, reads in ((True, True), (False, False), (True, False)):
        calls.clear()
        stage.backend.set_partitioning(gpu.uuid, enabled)
        assert stage.backend.device(gpu.uuid).profiles == gpu.profiles
        functions = {call for call, _argument in calls}
        assert ("nvmlDeviceGetGpuInstanceProfileInfo" in functions) == reads, (enabled, functions)
        assert "nvmlDeviceGetName" not in functions
    stage.backend.close()
    calls.clear()
    stage.backend.open()
    stage.gpus()
    assert "nvmlDeviceGetName" in {call for call, _argument in calls}


def scanned_without_lists(stage: Stage) -> None:
    """Wait for a scan that lists no partitions. On a slow host a scan can see a moment without an event wait."""
    deadline = time.monotonic() + 30
    while (calls := asked(stage)) != Counter({"nvmlDeviceGetCount": 1, **dict.fromkeys(OF_EACH, 8)}):
        assert time.monotonic() < deadline, calls
        time.sleep(0.05)


@on("8xH100")
def partitions_are_listed_only_after_possible_changes(stage: Stage) -> None:
    gpu = stage.enable_mig()
    made = stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    assert asked(stage)[LISTING] == len(gpu.profiles) == asked(stage)[LISTING]  # no event wait is active
    listening = Listening(stage)
    listening.registered((gpu,))
    scanned_without_lists(stage)
    assert stage.gpus()[0].partitions == (made,)
    stage.backend.destroy_partition(gpu.uuid, made.instance_id)
    assert stage.gpus()[0].partitions == ()
    stage.gpus()
    scanned_without_lists(stage)
    time.sleep(OWN_CHANGE_SECONDS)  # after a change by this process, events of that GPU are ignored for this time
    another_process(f"backend.create_partition({gpu.uuid!r}, 9, Placement(4, 4))")
    listening.until("MIG", gpu)
    assert [each.profile for each in stage.gpus()[0].partitions] == ["3g.40gb"]
    # Changes by this process are not reported.
    before = len(listening.notices)
    stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    stage.control("fault", "5", "xid", "31")
    listening.until("Xid 31")
    assert len(listening.notices) == before + 1


@on("8xH100")
def errors_are_reported_and_a_lost_gpu_hides_no_other_events(stage: Stage) -> None:
    gpus = stage.gpus()
    listening = Listening(stage)
    listening.registered(gpus)
    stage.control("fault", "2", "xid", "48")
    listening.until("Xid 48", gpus[2])
    stage.control("fault", "3", "lost")
    listening.until("Xid 79", gpus[3])
    listening.until(
        "the GPU is lost"
    )  # NVML ends the wait for all GPUs then; the others are registered again without it
    assert [finding.index for finding in stage.backend.discover() if finding.fault] == [3]
    listening.registered(gpus[:3])
    before = listening.waits
    stage.control("fault", "1", "xid", "63")
    listening.until("Xid 63", gpus[1])
    while listening.waits == before:
        time.sleep(0.01)
    # A recovered GPU is registered during a wait, which can be long.
    begun = listening.waits
    stage.control("clear", "3")
    stage.gpus()
    listening.registered(gpus)
    assert listening.waits == begun
    stage.control("fault", "3", "xid", "31")
    listening.until("Xid 31", gpus[3])


@on("8xH100")
def hardware_slowdown_is_reported_only_if_it_lasts(stage: Stage) -> None:
    stage.gpus()
    stage.control("fault", "1", "slowdown", "hardware")
    assert stage.gpus()[1].health.signs == ()
    board = stage.backend._boards.board(stage.gpus()[1].uuid)
    assert board.slowed_since is not None
    board.slowed_since -= condition.SLOWDOWN_SECONDS
    (slow,) = stage.gpus()[1].health.signs
    assert (slow.cause, slow.value) == ("slowdown", "hardware")
    stage.control("clear", "1")
    assert stage.gpus()[1].health.signs == () and board.slowed_since is None
    stage.control("fault", "1", "slowdown", "power-brake")
    assert [each.value for each in stage.gpus()[1].health.signs] == ["power-brake"]


@on("8xH100")
def a_machine_with_confidential_computing_is_not_ready_until_it_is_set(stage: Stage) -> None:
    stage.control("fault", "all", "confidential-computing", "on")
    for gpu in stage.gpus():
        (sign,) = gpu.health.signs
        assert (sign.cause, sign.value, sign.severity) == ("confidential-computing", "not-ready", Severity.DEGRADED)
        assert "nvidia-smi conf-compute -srs 1" in sign.remedy
    another_process("import pynvml; pynvml.nvmlInit(); pynvml.nvmlSystemSetConfComputeGpusReadyState(1)")
    assert [gpu.health.signs for gpu in stage.gpus()] == [()] * 8
    another_process("import pynvml; pynvml.nvmlInit(); pynvml.nvmlSystemSetConfComputeGpusReadyState(0)")
    assert len(stage.gpus()[0].health.signs) == 1


@on("8xH100")
def a_machine_in_the_mode_protected_pcie_is_not_ready_until_it_is_set(stage: Stage) -> None:
    stage.control("fault", "all", "confidential-computing", "protected-pcie")
    assert [[sign.value for sign in gpu.health.signs] for gpu in stage.gpus()] == [["not-ready"]] * 8
    another_process("import pynvml; pynvml.nvmlInit(); pynvml.nvmlSystemSetConfComputeGpusReadyState(1)")
    assert [gpu.health.signs for gpu in stage.gpus()] == [()] * 8


@on("8xH100")
def confidential_computing_is_read_with_a_driver_without_its_settings(stage: Stage) -> None:
    stage.control("fault", "all", "confidential-computing", "on")
    stage.control("fault", "all", "call", "nvmlSystemGetConfComputeSettings", "fail", "13")
    assert [sign.value for sign in stage.gpus()[0].health.signs] == ["not-ready"]


@on("8xH100")
def errors_of_confidential_computing_are_no_faults_of_gpus(stage: Stage) -> None:
    """The calls apply to the whole machine: their error would appear in each scan of each GPU."""
    for code in ("999", "29"):
        stage.control("clear", "all")
        stage.control("fault", "all", "confidential-computing", "on")
        stage.control("fault", "all", "call", "nvmlSystemGetConfComputeGpusReadyState", "fail", code)
        assert [gpu.health.signs for gpu in stage.gpus()] == [()] * 8


@on("8xH100")
def reasons_for_slow_clocks_are_read_by_their_older_name(stage: Stage) -> None:
    stage.control("fault", "3", "thermal")
    stage.control("fault", "all", "call", "nvmlDeviceGetCurrentClocksEventReasons", "fail", "13")
    assert [each.value for each in stage.gpus()[3].health.signs] == ["thermal"]


@on("8xH100")
def events_and_queries_determine_the_health_of_a_gpu(stage: Stage) -> None:
    gpus = stage.gpus()
    assert [(gpu.health.signs, gpu.health.needs_recovery) for gpu in gpus] == [((), False)] * 8
    listening = Listening(stage)
    listening.registered(gpus)
    stage.control("fault", "1", "xid", "95")
    listening.until("Xid 95", gpus[1])
    (answer,) = [each.sign for each in listening.notices if each.sign is not None]
    assert (answer.cause, answer.value, answer.severity, answer.instance) == ("xid", "95", Severity.FAILED, None)
    (asks,) = stage.gpus()[1].health.signs
    assert (asks.cause, asks.value, asks.severity) == ("recovery-action", "drain-and-reset", Severity.DEGRADED)
    stage.control("fault", "3", "thermal")
    (hot,) = stage.gpus()[3].health.signs
    assert (hot.cause, hot.value, hot.severity) == ("slowdown", "thermal", Severity.DEGRADED)
    stage.control("fault", "2", "row-remap", "pending")
    assert stage.gpus()[2].health.causes == ("recovery-action", "row-remap-pending")
    # Preparing a claim does not query the condition. It uses that of the last scan.
    calls = record_calls(stage)
    assert stage.backend.device(gpus[2].uuid).health.causes == ("recovery-action", "row-remap-pending")
    assert "nvmlDeviceGetFieldValues" not in {call for call, _argument in calls}
    gpu = stage.enable_mig()
    made = stage.backend.create_partition(gpu.uuid, 19, Placement(0, 1))
    stage.control("fault", "0", "xid", "31", str(made.instance_id), "0")
    listening.until("Xid 31", gpu)
    (of_partition,) = [each.sign for each in listening.notices if each.sign is not None and each.sign.value == "31"]
    assert (of_partition.severity, of_partition.instance) == (Severity.INFORMATIVE, made.instance_id)
    stage.control("clear")
    assert not any(gpu.health.signs for gpu in stage.gpus())


@on("1xL4")
def board_without_a_fabric_is_queried_for_it_once(stage: Stage) -> None:
    stage.gpus()
    assert "nvmlDeviceGetGpuFabricInfoV" not in asked(stage)
    assert stage.gpus()[0].health.needs_recovery is False


@on("8xH100")
def closing_ends_the_wait_and_a_reset_is_possible(stage: Stage) -> None:
    gpus = stage.gpus()
    listening = Listening(stage)
    listening.registered(gpus)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(stage.backend.close).result(LONG)
    with listening.some:
        assert listening.some.wait_for(lambda: listening.ended, LONG)
    assert_refused(BackendUnavailable, stage.backend.wait_for_change, 1.0)
    done = subprocess.run(["nvidia-smi", "--gpu-reset", "-i", "0"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    stage.backend.open()
    assert stage.gpus() == gpus
    again = Listening(stage)
    again.registered(gpus)
    stage.control("fault", "2", "xid", "48")
    again.until("Xid 48", gpus[2])
