# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compare the simulator's nvidia-cuda-mps-control with Debian's package: the same output, exit codes, files, and log
lines.

NVIDIA's control daemon runs without a GPU. Its server does not start then, nor does the simulator's. The test runs as
root.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from driver_root import COMPUTE, driver_root

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
#: Memory sizes that administrators write, and some invalid ones.
LIMITS = [
    "0M",
    "1M",
    "512M",
    "1023M",
    "1024M",
    "1025M",
    "2047M",
    "4096M",
    "81559M",
    "80G",
    "4g",
    "4m",
    "4K",
    "5Q",
    "1GB",
    "2TB",
    "1.5G",
    "3.5M",
    "7xG",
    "xG",
    "G",
    "0",
    "8",
    "4096",
    "010M",
    "0x10M",
    "-1G",
    "18446744073709M",
    "99999999999999999999M",
    "1G,1=2G",
]
COMMANDS = [
    "get_server_list",
    "get_server_list x",
    "start_server",
    "start_server -uid",
    "start_server -uid x",
    "start_server 0",
    "get_default_active_thread_percentage",
    " \tget_default_active_thread_percentage ",
    "get_default_active_thread_percentage x",
    "get_default_active_thread_percentagex",
    *(
        f"set_default_active_thread_percentage {value}".rstrip()
        for value in ("50", "33.36", "33.34", "0.01", "50x", "1e1", "33.5 60", "nan", "inf", "150", "0", "-1", "x", "")
    ),
    "get_default_active_thread_percentage",
    "get_default_device_pinned_mem_limit",
    "get_default_device_pinned_mem_limit 0",
    *(
        command
        for value in LIMITS
        for command in (
            f"set_default_device_pinned_mem_limit 0 {value}",
            "get_default_device_pinned_mem_limit 0",
        )
    ),
    *(
        command
        for device in ("", "0", "x", "1", "1x", "31", "32", "99", "-1", "GPU-11111111-2222-3333-4444-555555555555")
        for command in (
            f"set_default_device_pinned_mem_limit {device} 3G",
            f"get_default_device_pinned_mem_limit {device}",
            "set_default_device_pinned_mem_limit 0 2G",
            f"set_default_device_pinned_mem_limit {device}",
            f"get_default_device_pinned_mem_limit {device}",
            "get_default_device_pinned_mem_limit",
        )
    ),
    *(
        f"{command} {words}".rstrip()
        for command in (
            "get_client_list",
            "get_device_client_list",
            "get_active_thread_percentage",
            "set_active_thread_percentage",
            "get_device_pinned_mem_limit",
            "set_device_pinned_mem_limit",
            "shutdown_server",
            "terminate_client",
        )
        for words in ("", "1", "x", "1 2", "1 0 1G", "1 -f")
    ),
    *(f"ps {words}".rstrip() for words in ("", "1", "-p", "-p 1", "-p x", "-x", "-q 4")),
    "get_default_client_priority",
    *(
        command
        for value in ("1", "7", "-1", "x", "")
        for command in (f"set_default_client_priority {value}".rstrip(), "get_default_client_priority")
    ),
    "frobnicate",
    "frobnicate with words",
    "GET_SERVER_LIST",
    "help",
    "lspart",
    "",
    "   ",
]
FROM_ANOTHER_USER = [
    "get_server_list",
    "set_default_active_thread_percentage 20",
    "get_default_active_thread_percentage",
    "start_server -uid 0",
    "shutdown_server",
    "quit",
]


@dataclass
class Mps:
    """One of the two programs, with its own directories."""

    command: list[str]
    path: Path
    folder: Path
    answered: int = 0

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.path}:/usr/bin:/bin",
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }

    def run(self, text: str, *options: str, user: int = 0, **variables: str) -> tuple[str, str, int]:
        """Run the program; return its output, its errors, and its exit code."""
        done = subprocess.run(
            [*self.command, *options],
            input=text,
            capture_output=True,
            text=True,
            env=self.environment | variables,
            user=user,
            check=False,
            timeout=SECONDS,
        )
        self.answered += not options and done.returncode == 0
        return self.neutral(done.stdout), self.neutral(done.stderr), done.returncode

    def neutral(self, text: str) -> str:
        """Return the text without times, process IDs, and the directory."""
        text = re.sub(r"^\[\d+-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (\w+) +\d+\]", r"[\1]", text, flags=re.MULTILINE)
        return re.sub(r"([Ss]erver) \d{2,}", r"\1 N", text.replace(str(self.folder), "FOLDER"))

    def files(self) -> list[tuple[str, str]]:
        """Return the contents of the directories, with types and modes."""
        found = sorted([*self.folder.glob("*"), *self.folder.glob("*/*")])
        return [(str(path.relative_to(self.folder)), stat.filemode(path.lstat().st_mode)) for path in found]

    def after_the_end(self) -> list[tuple[str, str]]:
        """Return the files after the daemon has ended. NVIDIA's daemon removes its log pipe after it has answered."""
        end = time.monotonic() + SECONDS
        while (self.folder / "pipe/log").exists():
            assert time.monotonic() < end, "pipe/log is still there"
            time.sleep(0.01)
        return self.files()

    def log(self, name: str) -> str:
        return self.neutral((self.folder / "log" / name).read_text())

    def settled_log(self) -> str:
        """Return the control daemon's log with all requests so far. NVIDIA's daemon writes it with a delay."""
        end = time.monotonic() + SECONDS
        while (text := self.log("control.log")).count("UI closed\n") < self.answered:
            assert time.monotonic() < end, f"{self.answered} commands were answered, and the log contains: {text}"
            time.sleep(0.01)
        return text

    def until(self, wanted: str, name: str = "control.log") -> None:
        """Wait for a line of a log."""
        end = time.monotonic() + SECONDS
        while wanted not in self.log(name):
            assert time.monotonic() < end, f"{name} has no {wanted!r}: {self.log(name)}"
            time.sleep(0.01)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], Path]]:
    """Return the commands of both programs and the directories of their servers, which every user of the host can
    reach.
    """
    root, _version = driver_root(COMPUTE)
    built, real = tmp_path_factory.mktemp("simulated"), tmp_path_factory.mktemp("real")
    subprocess.run(["make", "-s", "-C", ROOT / "roles/simulator/files/nvml", f"OUT={built}"], check=True)
    # The cache is often below /root, where no other user has access.
    for file in ("lib64/ld-linux-x86-64.so.2", "usr/bin/nvidia-cuda-mps-control", "usr/sbin/nvidia-cuda-mps-server"):
        shutil.copy(root / file, real)
    command = [str(real / "ld-linux-x86-64.so.2"), "--library-path"]
    control = str(real / "nvidia-cuda-mps-control")
    places = f"{root}/lib/x86_64-linux-gnu:{root}/usr/lib/x86_64-linux-gnu"
    listed = subprocess.run([*command, places, "--list", control], check=True, capture_output=True, text=True).stdout
    for library in re.findall(r"^\s*lib\S+ => (\S+)", listed, flags=re.MULTILINE):
        shutil.copy(library, real)
    for folder in (built, real, *built.parents):
        if folder.owner() == "root" and folder.is_relative_to(tmp_path_factory.getbasetemp().parent.parent):
            folder.chmod(folder.stat().st_mode | 0o755)
    return {
        "real": ([*command, str(real), control], real),
        "simulated": ([str(built / "nvidia-cuda-mps-control")], built),
    }


def both(
    programs: dict[str, tuple[list[str], Path]], tmp_path: Path, observe: Callable[[Mps], Sequence[object]]
) -> Sequence[object]:
    """Return the observations of both programs after asserting that they are equal."""
    seen: dict[str, Sequence[object]] = {}
    for name, (command, path) in programs.items():
        folder = tmp_path / name
        folder.mkdir(mode=0o755)
        mps = Mps(command, path, folder)
        try:
            seen[name] = observe(mps)
        finally:
            mps.run("quit\n")
    assert seen["simulated"] == seen["real"]
    return seen["real"]


@pytest.mark.prove
def test_every_command_has_the_same_answer(programs: dict[str, tuple[list[str], Path]], tmp_path: Path) -> None:
    def observe(mps: Mps) -> Sequence[object]:
        answers: list[object] = [mps.run("", "-d")]
        for command in COMMANDS:
            answers.append((command, mps.run(f"{command}\n")))
        answers += [mps.run("get_server_list"), mps.run("get_default_client_priority\nfrobnicate\n"), mps.run("")]
        return [*answers, mps.files(), mps.log("server.log"), *mps.settled_log().splitlines()]

    seen = both(programs, tmp_path, observe)
    assert ("set_default_device_pinned_mem_limit 0 4096M", ("", "", 0)) in seen


@pytest.mark.parametrize("words", ["-uid 0", "-uid 65534", "-uid 0 extra"])
def test_server_that_cannot_start(programs: dict[str, tuple[list[str], Path]], tmp_path: Path, words: str) -> None:
    """Whether NVIDIA's user interface then exits with 0 or 1 depends on when the server ends."""

    def observe(mps: Mps) -> Sequence[object]:
        mps.run("", "-d")
        said, complained, _code = mps.run(f"start_server {words}\n")
        mps.until("Removed Shm file at")
        return [said, complained, mps.run("get_server_list\n"), sorted(mps.settled_log().splitlines())]

    both(programs, tmp_path, observe)


def test_another_user_can_query_and_cannot_quit_the_daemon(
    programs: dict[str, tuple[list[str], Path]], tmp_path: Path
) -> None:
    def observe(mps: Mps) -> Sequence[object]:
        for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            folder.chmod(0o755)
        mps.run("", "-d")
        return [(command, mps.run(f"{command}\n", user=65534)) for command in FROM_ANOTHER_USER]

    seen = both(programs, tmp_path, observe)
    assert ("quit", ("Not enough privilege to execute quit command\n", "", 0)) in seen


def test_daemon_start_and_end(programs: dict[str, tuple[list[str], Path]], tmp_path: Path) -> None:
    def observe(mps: Mps) -> Sequence[object]:
        seen: list[object] = [mps.run("get_server_list\n"), mps.files()]
        # The help text is our own. That one is printed, its stream, and the exit code match NVIDIA's.
        helped = [mps.run("", option) for option in ("-h", "--help")]
        seen += [(bool(said), complained, code) for said, complained, code in helped]
        seen.append(mps.run("", "-x"))
        seen += [mps.run("", "-d"), mps.files()]
        seen += [mps.run("", "-d"), mps.run("", "-f"), mps.run("get_server_list\n", "-d", "-f"), mps.files()]
        mps.until("Using log directory", "server.log")
        seen += [mps.run("quit\n"), mps.after_the_end()]
        seen += [mps.run("", "-d"), mps.run("quit -t 5\n"), mps.after_the_end()]
        seen += [mps.run("get_server_list\n"), mps.log("control.log")]
        return seen

    both(programs, tmp_path, observe)


def test_foreground_daemon_ends_on_a_signal_and_leaves_its_files(
    programs: dict[str, tuple[list[str], Path]], tmp_path: Path
) -> None:
    def observe(mps: Mps) -> Sequence[object]:
        answer = tmp_path / f"{mps.folder.name}.txt"

        def written(wanted: str) -> str:
            end = time.monotonic() + SECONDS
            while wanted not in (text := mps.neutral(answer.read_text())):
                assert time.monotonic() < end, f"it has not said {wanted!r}: {text}"
                time.sleep(0.01)
            return text

        command = [*mps.command, "-f"]
        with answer.open("w") as output, subprocess.Popen(command, env=mps.environment, stdout=output) as process:
            # NVIDIA's daemon opens its socket to all users after these lines.
            written("CUDA_MPS_PIPE_DIRECTORY=FOLDER/pipe\n")
            seen = [mps.run("frobnicate\n"), mps.files()]
            # The client has disconnected. A signal before the daemon has noticed that would end it without this line.
            written("UI closed\n")
            process.terminate()
            return [*seen, process.wait(SECONDS), mps.neutral(answer.read_text()), mps.files(), mps.run("")]

    both(programs, tmp_path, observe)


@pytest.mark.parametrize("value", ["50", "0", "150", "x", ""])
def test_percentage_in_the_environment(programs: dict[str, tuple[list[str], Path]], tmp_path: Path, value: str) -> None:
    def observe(mps: Mps) -> Sequence[object]:
        mps.run("", "-d", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=value)
        return [mps.run("get_default_active_thread_percentage\n"), mps.settled_log()]

    both(programs, tmp_path, observe)


def test_invalid_directories(programs: dict[str, tuple[list[str], Path]], tmp_path: Path) -> None:
    def observe(mps: Mps) -> Sequence[object]:
        (mps.folder / "file").touch()
        nowhere = {"CUDA_MPS_LOG_DIRECTORY": str(mps.folder / "no/log")}
        seen = [mps.run("", "-d", CUDA_MPS_PIPE_DIRECTORY=str(mps.folder / "file")), mps.run("", "-d", **nowhere)]
        return [*seen, mps.files(), mps.run("get_server_list\n")]

    both(programs, tmp_path, observe)
