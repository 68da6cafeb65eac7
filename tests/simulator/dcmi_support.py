# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A machine with NPUs in a directory, and processes that use it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from accelerator_simulator.hardware import load_catalogue, load_machine
from accelerator_simulator.npu_description import NpuSettings, render_npus

from tests.simulator.nvml_builds import ROOT, SANITIZERS, Build, build
from tests.simulator.nvml_processes import start

DATA = ROOT / "roles/simulator/files"
SOURCES = DATA / "dcmi"
CATALOGUE = load_catalogue(DATA)
WORKER = Path(__file__).with_name("dcmi_worker.py")
LIBRARY = "libdcmi.so"
STATE = "libdcmi-sim.so.25.2.0"
ANY = 0xFFFFFFFF
SUCCESS, INVALID, NOT_PERMITTED, INTERNAL, NO_DEVICE, MISSING = 0, -8001, -8002, -8005, -8007, -8008
NOT_READY, IN_CONTAINER, BUSY, OCCUPIED, NOT_SUPPORTED = -8012, -8013, -8013, -8020, -8255


class NpuClient:
    """A separate process that calls DCMI."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = start(environment, WORKER, LIBRARY)

    def send(self, call: str, *arguments: Any) -> None:
        """Send a request without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"call": call, "arguments": list(arguments)}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Return the answer to the oldest request."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)["result"]

    def own(self, call: str, *arguments: Any) -> Any:
        """Call a function of the worker."""
        self.send(call, *arguments)
        return self.receive()

    def call(self, name: str, *places: Any) -> tuple[int, list[Any]]:
        """Return the return code and the values of the output parameters."""
        answer = self.own("dcmi", name, *places)
        return answer["code"], answer["out"]

    def get(self, name: str, *places: Any) -> Any:
        """Return the value of the last output parameter of a call that must succeed."""
        code, out = self.call(name, *places)
        assert code == SUCCESS, f"{name}: {code}"
        return out[-1]

    def code(self, name: str, *places: Any) -> int:
        """Return the return code."""
        return self.call(name, *places)[0]

    def create(self, card: int, chip: int, template: str, vid: int = ANY, group: int = ANY) -> tuple[int, Any]:
        """Return the return code and the created vNPU."""
        asked = {"vdev_id": vid, "vfg_id": group, "template_name": template}
        code, out = self.call(
            "dcmi_create_vdevice", card, chip, ["struct", "create_vdev_res_stru", asked], ["struct", "create_vdev_out"]
        )
        return code, out[1]

    def make(self, card: int, chip: int, template: str, vid: int = ANY, group: int = ANY) -> int:
        """Create a vNPU and return its virtual ID; assert success."""
        code, made = self.create(card, chip, template, vid, group)
        assert code == SUCCESS, f"{template}: {code}"
        return int(made["vdev_id"])

    def destroy(self, card: int, chip: int, vid: int) -> int:
        """Destroy a vNPU and return the return code."""
        return self.code("dcmi_set_destroy_vdevice", card, chip, vid)

    def resources(self, card: int, chip: int, free: bool = False) -> Any:
        """Return the total or the free resources of a chip."""
        name = "soc_free_resource" if free else "soc_total_resource"
        return self.information(card, chip, 52, 2 if free else 1, name)

    def slice(self, card: int, chip: int, vid: int, activity: bool = False) -> Any:
        """Return the resources of a vNPU."""
        return self.information(card, chip, 52, 5 if activity else 0, "vdev_query_stru", {"vdev_id": vid})["query_info"]

    def information(
        self, card: int, chip: int, main: int, sub: int, name: str, fields: dict[str, Any] | None = None
    ) -> Any:
        """Call `dcmi_get_device_info`."""
        return self.call("dcmi_get_device_info", card, chip, main, sub, ["struct", name, fields or {}], ["u32", 4096])[
            1
        ][0]

    def vids(self, card: int, chip: int) -> list[int]:
        """Return the virtual IDs of the chip's vNPUs."""
        total = self.resources(card, chip)
        return list(total["vdev_id"][: total["vdev_num"]])

    def close(self) -> int:
        """End the process; return its exit code."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        code = self.process.wait()
        self.process.stdout.close()
        return code


@dataclass
class NpuMachine:
    """The library with its state in one directory, and the trees that define the devices."""

    build: Build
    folder: Path
    clients: list[NpuClient] = field(default_factory=list)
    operator: NpuClient | None = None

    @property
    def dev(self) -> Path:
        return self.folder / "dev"

    @property
    def configuration(self) -> Path:
        return self.folder / "etc/vnpu.cfg"

    def client(self, initialize: str = "dcmi_init") -> NpuClient:
        """Return a new process, which ends with the test."""
        self.clients.append(NpuClient(self.build.environment(self.folder / "lib")))
        if initialize:
            assert self.clients[-1].code(initialize) == SUCCESS
        return self.clients[-1]

    def container(self, *nodes: str) -> NpuClient:
        """Return an uninitialized process as in a pod: without administrator rights, with only these device nodes."""
        client = self.client(initialize="")
        client.own("give_administration_up")
        for path in self.dev.glob("davinci[0-9]*"):
            path.unlink()
        self.nodes(*nodes)
        return client

    def nodes(self, *names: str) -> None:
        """Create device nodes."""
        for name in names:
            (self.dev / name).touch()

    def control(self, command: str) -> dict[str, Any]:
        """Send one control command from a process that does nothing else."""
        if self.operator is None:
            self.operator = self.client(initialize="")
        return dict(self.operator.own("control", command))

    def show(self) -> dict[str, Any]:
        """Return the whole state."""
        return self.control("show")

    def load(self, name: str, **library: Any) -> None:
        """Load a machine of the data with its roots in this directory, and create its device nodes."""
        machine = load_machine(DATA, name, CATALOGUE)
        settings = NpuSettings(
            identity="test",
            driver_version="25.2.0",
            dev_root=str(self.dev),
            sys_root=str(self.folder / "sys"),
            etc_root=str(self.folder / "etc"),
            library={key.replace("_", "-"): value for key, value in library.items()},
        )
        path = self.folder / "machine.txt"
        path.write_text(render_npus(machine, CATALOGUE, settings))
        answer = self.control(f"load {path}")
        assert answer["ok"], answer
        self.nodes("davinci_manager", "devmm_svm", "hisi_hdc")
        self.nodes(*(f"davinci{npu['physical']}" for npu in self.show()["npus"]))

    def smi(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        """Run npu-smi of this build."""
        environment = self.build.environment(self.folder / "lib")
        program = [str(self.folder / "lib/npu-smi"), *arguments]
        return subprocess.run(program, capture_output=True, text=True, env=environment, input=answer, check=False)

    def close(self) -> None:
        """End all processes and assert that they succeed. A sanitizer's finding changes the exit code."""
        codes = [client.close() for client in self.clients if client.process.poll() is None]
        assert set(codes) <= {0}


@pytest.fixture(scope="session", params=[SANITIZERS], ids=["sanitized"])
def dcmi_build(request: pytest.FixtureRequest) -> Build:
    """Return the library build. Tests of programs that use the library request the plain build."""
    return build(request.param, sources=SOURCES)


@pytest.fixture
def npus(dcmi_build: Build) -> Iterator[NpuMachine]:
    """Yield the library in its own directory, without a loaded machine."""
    with tempfile.TemporaryDirectory(prefix="dcmi-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "lib").mkdir()
        for file in (LIBRARY, "npu-smi"):
            shutil.copy(dcmi_build.folder / file, folder / "lib" / file)
        for tree in ("dev", "sys", "etc"):
            (folder / tree).mkdir()
        machine = NpuMachine(dcmi_build, folder)
        yield machine
        machine.close()
