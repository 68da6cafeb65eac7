# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Access to the system: files below a root, device nodes, and commands."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.host import pci, temporary_files
from dra_driver.core.host.system import DeviceNumber, System

from tests.unit.crash_steps import at_each_step


def tree(root: Path, address: str, parents: str, numa: str | None) -> System:
    device = root / "sys/devices" / parents / address
    device.mkdir(parents=True)
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    (links / address).symlink_to(os.path.relpath(device, links))
    if numa is not None:
        (device / "numa_node").write_text(numa)
    return System(str(root))


def test_pcie_root_and_numa_node_are_read(tmp_path: Path) -> None:
    system = tree(tmp_path, "0000:3b:00.0", "pci0000:3a/0000:3a:00.0", "1\n")
    assert pci.pcie_root(system, "0000:3b:00.0") == "pci0000:3a"
    assert pci.numa_node(system, "0000:3b:00.0") == 1
    assert pci.pcie_root(system, "0000:ff:00.0") is None
    assert pci.numa_node(system, "0000:ff:00.0") is None


@pytest.mark.parametrize("text", ["-1\n", "", "x", "4096\n"])
def test_numa_node_unknown_returns_nothing(tmp_path: Path, text: str) -> None:
    assert pci.numa_node(tree(tmp_path, "0000:3b:00.0", "pci0000:3a", text), "0000:3b:00.0") is None


def test_pcie_root_below_other_bus_returns_nothing(tmp_path: Path) -> None:
    system = tree(tmp_path, "0000:3b:00.0", "platform/vmd", None)
    assert pci.pcie_root(system, "0000:3b:00.0") is None


def test_paths_are_resolved_below_the_root(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/real").write_text("text")
    (tmp_path / "etc/link").symlink_to("real")
    assert system.read_text("/etc/link") == "text" and system.exists("/etc/link")
    assert system.real_path("/etc/link") == "/etc/real"
    assert system.is_link("/etc/link") and not system.is_link("/etc/real") and not system.is_socket("/etc/real")
    assert system.list_directory("/etc") == ("link", "real")
    assert system.list_directory("/absent") == () == system.list_directory("/etc/real")
    assert System().real_path("/") == "/"


def test_device_number_of_files_returns_nothing(tmp_path: Path) -> None:
    assert System().device_number("/dev/null") == DeviceNumber("c", 1, 3)
    (tmp_path / "file").write_text("")
    system = System(str(tmp_path))
    assert system.device_number("/file") is None and system.device_number("/absent") is None


def test_run_returns_code_and_output() -> None:
    system = System()
    program = "import sys; sys.stdout.write(sys.stdin.read().upper()); sys.stderr.write('e'); raise SystemExit(3)"
    done = system.run([sys.executable, "-c", program], timeout=30, input="abc")
    assert (done.returncode, done.stdout, done.stderr) == (3, "ABC", "e")


def test_run_missing_or_hung_command_is_an_error() -> None:
    with pytest.raises(AcceleratorError, match=r"no-such-command.*was not found") as missing:
        System().run(["no-such-command"], timeout=1)
    assert missing.value.code == "command-missing"
    with pytest.raises(AcceleratorError, match=r"within 0\.2 s") as hangs:
        System().run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
    assert hangs.value.code == "command-timeout"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_run_output_above_limit_ends_command_and_children(tmp_path: Path, stream: str) -> None:
    """The second process would write forever: it is ended too."""
    pids = tmp_path / "pids"
    program = (
        "import os, sys\n"
        f"os.fork(); open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\n"
        f"while True: sys.{stream}.write('x' * 65536)"
    )
    with pytest.raises(AcceleratorError, match="wrote more than 1048576 bytes and was ended") as found:
        System().run([sys.executable, "-c", program], timeout=30)
    assert found.value.code == "command-output-too-large"
    for pid in pids.read_text().split():
        for _attempt in range(100):
            if not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text():
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"process {pid} still runs")


def test_run_output_at_the_limit_is_returned_whole() -> None:
    program = "import sys; sys.stdout.write('x' * 1048570); sys.stderr.write('y' * 6)"
    done = System().run([sys.executable, "-c", program], timeout=30)
    assert (len(done.stdout), done.stderr) == (1048570, "yyyyyy")


def test_run_timeout_ends_children_holding_the_output() -> None:
    program = "import os, time\nif os.fork() == 0: time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(AcceleratorError, match=r"within 0\.5 s"):
        System().run([sys.executable, "-c", program], timeout=0.5)
    assert time.monotonic() - began < 20


def test_run_unread_input_and_binary_output() -> None:
    program = "import sys; sys.stdin.close(); sys.stdout.buffer.write(b'a\\xff\\r\\nb')"
    done = System().run([sys.executable, "-c", program], timeout=30, input="x" * 1_000_000)
    assert (done.returncode, done.stdout) == (0, "a\ufffd\nb")


def test_run_large_input_is_written_whole() -> None:
    program = "import sys; print(len(sys.stdin.read()))"
    assert System().run([sys.executable, "-c", program], timeout=30, input="x" * 3_000_000).stdout == "3000000\n"


def test_run_command_being_written_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    with (
        program.open("ab"),
        pytest.raises(AcceleratorError, match=r"program cannot be started: Text file busy") as busy,
    ):
        System().run([str(program)], timeout=5)
    assert busy.value.code == "command-unusable"


def test_boot_id_is_read() -> None:
    assert len(System().boot_id()) == 36


def test_remove_returns_whether_file_existed(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    system.write_atomic("/a/b/c", b"x", directory_mode=0o700)
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    assert system.remove("/a/b/c") and not system.remove("/a/b/c")


def test_make_file_creates_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(str(tmp_path))
    former = os.umask(0o077)
    try:
        assert system.make_file("/a/b/c", b"first", mode=0o644)
    finally:
        os.umask(former)
    assert not system.make_file("/a/b/c", b"second")
    assert (tmp_path / "a/b/c").read_bytes() == b"first"
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o644

    def full(_descriptor: int, _mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(OSError, match="No space left"):
        system.make_file("/a/b/d", b"x")
    assert not (tmp_path / "a/b/d").exists()


def test_write_atomic_skips_leftovers_of_killed_writer(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    system.write_atomic("/file", b"first")
    # In a container each driver has the same process ID, and its counter restarts.
    number = next(temporary_files._NUMBERS)
    left = [tmp_path / f".file.{os.getpid()}-{number + step}.tmp" for step in (1, 2)]
    for path in left:
        path.write_bytes(b"a part")
    system.write_atomic("/file", b"second", durable=False)
    assert (tmp_path / "file").read_bytes() == b"second"
    assert [path.read_bytes() for path in left] == [b"a part"] * 2


def test_make_file_directory_created_concurrently_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, real = System(str(tmp_path)), os.mkdir

    def overtaken(path: str, mode: int = 0o777) -> None:
        real(path, mode)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "mkdir", overtaken)
    assert system.make_file("/claim/request.json", b"x")
    assert (tmp_path / "claim/request.json").read_bytes() == b"x"


def test_remove_tree_removes_directory_with_content(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    for file in ("flat/a", "flat/b", "deep/a", "deep/folder/b"):
        system.make_file(f"/{file}", b"x")
    (tmp_path / "deep/link").symlink_to(tmp_path / "flat")
    for directory in ("deep", "flat"):
        assert system.remove_tree(f"/{directory}") and not system.remove_tree(f"/{directory}")
        assert not (tmp_path / directory).exists()
        assert (tmp_path / "flat/a").exists() == (directory == "deep")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        system.remove_tree("/file")


def test_remove_missing_file_on_read_only_disk_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "unlink", refuse)
    system = System(str(tmp_path))
    assert system.remove("/nothing") is False
    with pytest.raises(OSError, match="Read-only"):
        system.remove("/file")


def test_remove_unproven_missing_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        patch.setattr(os, "lstat", refuse)
        with pytest.raises(OSError, match="Input/output"):
            System(str(tmp_path)).remove("/file")


ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@pytest.mark.parametrize("number", [*ABSENT, errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOTCONN])
def test_is_missing_only_after_error_that_proves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A record that temporarily cannot be read must not count as missing."""

    def fail(_path: str) -> str:
        raise OSError(number, os.strerror(number))

    system = System(str(tmp_path))
    expected = contextlib.nullcontext() if number in ABSENT else pytest.raises(OSError, match=os.strerror(number))
    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "unlink", "listdir", "readlink"):
            patch.setattr(os, name, fail)
        with expected:
            assert system.exists("/record.json") is False
        with expected:
            assert system.remove("/record.json") is False
        with expected:
            assert system.link_target("/link") == ""


def test_remove_tree_unproven_missing_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: str) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    def refuse(_path: str, **_options: object) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", missing)
        patch.setattr(os, "lstat", refuse)
        with pytest.raises(OSError, match="Input/output"):
            System(str(tmp_path)).remove_tree("/folder")


WRITER = """
import os, sys, time
from dra_driver.core.host.system import System
def hang(*paths):
    print("written", flush=True)
    time.sleep(600)
os.replace = hang
System(sys.argv[1]).write_atomic("/file", b"new")
"""


def test_write_removes_temporary_files_of_killed_writers_only(tmp_path: Path) -> None:
    """A running writer keeps its file, also in another PID namespace. Files of killed writers are removed."""
    system, file = System(str(tmp_path)), tmp_path / "file"

    def temporaries() -> list[Path]:
        return sorted(tmp_path.glob(".file.*.tmp"))

    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"written\n"
        (left,) = temporaries()
        (tmp_path / ".file.1-0.tmp").write_bytes(b"of a killed writer")
        (tmp_path / ".file.2.tmp").symlink_to("target")
        others = [tmp_path / name for name in (".other.1-0.tmp", ".file.new.tmp", ".file.1-0.old.tmp")]
        for other in others:
            other.touch()
        system.write_atomic("/file", b"first")
        assert temporaries() == sorted([left, *others[1:]]) and file.read_bytes() == b"first"
        writer.kill()
    system.write_atomic("/file", b"second", durable=False)
    assert left.exists(), "no directory is read at each claim"
    system.write_atomic("/file", b"third")
    assert not left.exists() and file.read_bytes() == b"third"
    assert all(other.exists() for other in others)


def test_write_temporary_file_removed_before_lock_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = temporary_files.fcntl.flock
    removed: list[Path] = []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.glob(".file.*.tmp"))
            removed[0].unlink()
        flock(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(temporary_files.fcntl, "flock", late)
        System(str(tmp_path)).write_atomic("/file", b"content")
    assert removed and (tmp_path / "file").read_bytes() == b"content"


def test_remove_temporary_file_of_killed_writer_holds_its_lock(tmp_path: Path) -> None:
    """A writer creates its file before its lock. Without this lock it could lock the file, and lose it afterwards."""
    left = tmp_path / ".file.1-0.tmp"
    left.touch()

    def lock(_number: int) -> None:
        descriptor = os.open(left, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)

    steps = at_each_step(lambda: System(str(tmp_path)).remove_temporaries("/file"), tmp_path, lock)
    assert steps == [f"os.remove {left.name}"] and not left.exists()


def test_copy_failure_leaves_no_temporary_file(tmp_path: Path) -> None:
    """A partial copy would keep a full disk full: it is removed."""
    system = System(str(tmp_path))
    (tmp_path / "package").write_bytes(b"x" * 100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            system.copy("/package", "/kept")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.name for each in tmp_path.iterdir()] == ["package"]
