# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run modules as Ansible does, on a node with GPUs or with an API server."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ansible
import pytest
from ansible.module_utils.common import warnings as collected_warnings
from ansible.module_utils.testing import patch_module_args

from tests.unit.ansible_process import run_ansible

sys.path.insert(0, str(Path(__file__).resolve().parent))

from api_server import ApiServer

if TYPE_CHECKING:
    from typing import Self

ROOT = Path(__file__).resolve().parents[3]
SIMULATOR = ROOT / "roles" / "simulator" / "files"
MODULES = "ansible_collections.dra.accelerators.plugins.modules"

# The program of a module's process on a node: read the arguments and run.
PROGRAM = f"""
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.load(sys.stdin)):
    importlib.import_module("{MODULES}." + sys.argv[1]).main()
"""

Result = dict[str, Any]


def arguments(options: dict[str, Any], *, check: bool, diff: bool) -> dict[str, Any]:
    return {**options, "_ansible_check_mode": check, "_ansible_diff": diff}


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs a module in this process and returns its result."""

    def run(name: str, options: dict[str, Any], *, check: bool = False, diff: bool = False) -> Result:
        module = importlib.import_module(f"{MODULES}.{name}")
        collected_warnings._global_warnings.clear()  # of a module that an earlier test ran in this process
        with patch_module_args(arguments(options, check=check, diff=diff)), pytest.raises(SystemExit):
            module.main()
        answer: Result = json.loads(capsys.readouterr().out)
        return answer

    return run


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the simulated library, built once."""
    directory = tmp_path_factory.mktemp("nvml")
    subprocess.run(
        ["make", "-s", "-C", SIMULATOR / "nvml", f"OUT={directory}"], check=True, capture_output=True, text=True
    )
    return directory


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an interpreter with Ansible's library only, without the NVML binding."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "ansible").symlink_to(Path(ansible.__file__).parent)
    return directory / "bin" / "python"


def parse(name: str, output: str) -> Result:
    try:
        answer: Result = json.loads(output)
    except ValueError:
        raise AssertionError(f"The module {name} did not answer, but said: {output}") from None
    return answer


class ModuleServer:
    """A process that runs modules."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("module_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.communicate()

    def run(self, name: str, parameters: dict[str, Any], library: str | None) -> Result:
        """Run a module with the library in this directory and return its result."""
        request = {"module": name, "arguments": parameters, "library": library}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return parse(name, json.loads(self.process.stdout.readline()))


class Node:
    """A node with its own GPUs, whose state survives each process."""

    def __init__(self, root: Path, nvml: Path, machine: str, server: ModuleServer) -> None:
        self.root = root
        self.server = server
        self.driver = True
        self.folder = root / "usr/lib/x86_64-linux-gnu"
        self.folder.mkdir(parents=True)
        for file in nvml.iterdir():
            if file.is_file():
                (self.folder / file.name).symlink_to(file.readlink()) if file.is_symlink() else os.link(
                    file, self.folder / file.name
                )
        # Modules end, so no program keeps a GPU open between two of them. Without persistence mode it would lose its
        # settings.
        configuration = root / "etc/accelerator-simulator/machine.json"
        configuration.parent.mkdir(parents=True)
        configuration.write_text(json.dumps({"library": {"idle-gpus-keep-settings": True}}))
        self.simulator("power-on", "--machine", machine)

    def simulator(self, *words: str) -> str:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))",
                "--root",
                str(self.root),
                "--library-folder",
                str(self.folder),
                *words,
            ],
            env={**os.environ, "PYTHONPATH": str(SIMULATOR)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"accelerator-simulator {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def fabric_manager(self) -> Iterator[None]:
        """A fabric manager in its mode for bare metal, for a while."""
        socket = self.root / "fm.socket"
        configuration = self.root / "usr/share/nvidia/nvswitch/fabricmanager.cfg"
        configuration.parent.mkdir(parents=True, exist_ok=True)
        configuration.write_text(f"FABRIC_MODE=0\nFM_CMD_UNIX_SOCKET_PATH={socket}\n")
        program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
        options = ("--root", self.root, "--library-folder", self.folder)
        process = subprocess.Popen(
            [sys.executable, "-c", program, *options, "fabric-manager"],
            env={**os.environ, "PYTHONPATH": str(SIMULATOR)},
        )
        try:
            while not socket.is_socket():
                assert process.poll() is None, "the fabric manager does not listen"
                time.sleep(0.02)
            yield
        finally:
            process.terminate()
            process.wait(30)
            socket.unlink(missing_ok=True)

    def edit_boards(self, old: str, new: str) -> None:
        """Change statements about the boards, which are new then."""
        description = self.root / "var/lib/accelerator-simulator/nvidia.txt"
        text = description.read_text()
        assert old in text
        description.write_text(text.replace(old, new))
        self._control(f"load {description}")

    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "PATH": f"{self.folder}:{os.environ['PATH']}"}

    def module(self, name: str, options: dict[str, Any], *, check: bool = False, diff: bool = False) -> Result:
        """Run a module in its own process, as on the node."""
        library = str(self.folder) if self.driver else None
        return self.server.run(name, arguments(options, check=check, diff=diff), library)

    def module_of(self, python: Path, name: str, options: dict[str, Any]) -> Result:
        """Run a module with another interpreter."""
        done = subprocess.run(
            [python, "-c", PROGRAM, name],
            input=json.dumps(arguments(options, check=False, diff=False)),
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return parse(name, done.stdout + done.stderr)

    def ansible(self, name: str, options: dict[str, Any], python: Path) -> Result:
        """Let Ansible pack a module and run it with ``python``. This interpreter has the binding."""
        options = {**options, "interpreter": sys.executable}
        done = run_ansible(
            [
                *(Path(sys.executable).with_name("ansible"), "localhost", "--inventory", "localhost,"),
                *("--connection", "local", "--extra-vars", f"ansible_python_interpreter={python}"),
                *("--module-name", f"dra.accelerators.{name}", "--args", json.dumps(options)),
            ],
            env={
                **self.environment(),
                "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.oneline",
                "ANSIBLE_LOCAL_TEMP": str(self.root / "local"),
                "ANSIBLE_REMOTE_TEMP": str(self.root / "remote"),
                # The module may import only the files that Ansible packs.
                "PYTHONPATH": "",
            },
        )
        _host, _arrow, answer = done.stdout.partition(" => ")
        if not answer:
            raise AssertionError(f"Ansible said nothing of {name}: {done.stdout}{done.stderr}")
        result: Result = json.loads(answer)
        return result

    def layout(
        self,
        *rules: dict[str, Any],
        check: bool = False,
        diff: bool = False,
        **more: Any,
    ) -> Result:
        options = {"layout": list(rules), "state_path": str(self.root / "state.db"), **more}
        return self.module("nvidia_mig", options, check=check, diff=diff)

    def reboot(self) -> None:
        """Reboot: power-cycle the boards."""
        self._control("power-cycle")

    def _control(self, command: str) -> None:
        """Send an operator command to the library.

        This needs a separate process: nodes use one library file with several names, and the loader returns the first
        one for all.
        """
        program = """
import ctypes, sys
library, reply = ctypes.CDLL(sys.argv[1]), ctypes.create_string_buffer(65536)
if library.acceleratorSimulatorControl(sys.argv[2].encode(), reply, len(reply)):
    sys.exit(reply.value.decode())
"""
        subprocess.run([sys.executable, "-c", program, self.folder / "libnvidia-ml.so.1", command], check=True)

    def partitions(self) -> dict[int, list[tuple[str, int]]]:
        """Return the partitions of each GPU as profile and start."""
        devices = self.module("accelerator_info", {"fail_without_driver": True})["devices"]
        return {
            device["index"]: sorted((one["profile"], one["placement"]["start"]) for one in device["partitions"])
            for device in devices
        }


@pytest.fixture(scope="session")
def module_server() -> Iterator[ModuleServer]:
    with ModuleServer() as server:
        yield server


@pytest.fixture
def make_node(tmp_path: Path, nvml: Path, module_server: ModuleServer) -> Callable[..., Node]:
    return lambda machine, name="node": Node(tmp_path / name, nvml, machine, module_server)


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory, nvml: Path, module_server: ModuleServer) -> Node:
    """Return a node with eight H100 for read-only tests. Its fourth GPU is partitioned."""
    node = Node(tmp_path_factory.mktemp("shared"), nvml, "8xH100", module_server)
    node.layout({"match": {"index": 3}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 4}})
    return node


@pytest.fixture
def node(make_node: Callable[[str], Node]) -> Node:
    """Return a node with eight H100."""
    return make_node("8xH100")


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def publish(run_here: Callable[..., Result], api: ApiServer) -> SimpleNamespace:
    """Return a function that runs the module resource_slices with the API server."""

    def run(*, check: bool = False, **options: Any) -> Result:
        connection = {"host": api.url, "api_key": "let-me-in"}
        return run_here("resource_slices", {**connection, **options}, check=check, diff=True)

    return SimpleNamespace(run=run, api=api)
