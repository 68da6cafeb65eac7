# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A node in its own namespaces: simulated accelerators with the real file names, visible to this process and its children.

The process is the first one of a PID namespace (``enter`` starts it so). All processes of the node end with it, and all
mounts with its mount namespace. The host does not change, so several of these nodes can run in parallel, and
at the same time as a test cluster of tests/world.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from accelerator_simulator.power import CONFIGURATION

from tests.mounts import bind, mount

if TYPE_CHECKING:
    from tests.chaos.vendor import Vendor

ROOT = Path(__file__).resolve().parents[2]
SIMULATOR = ROOT / "roles/simulator/files"
#: Directories of the host with an overlay for all writes.
OVERLAID_DIRECTORIES = ("/etc", "/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/local", "/var/lib")
#: Device nodes that programs expect on each host: minor numbers of the major number 1.
NODES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
UNITS = Path("/etc/systemd/system")
#: The file with the simulated boot ID. It is mounted over /proc/sys/kernel/random/boot_id.
BOOT_ID_FILE = Path("/run/chaos-boot-id")
#: The environment variable that `enter` sets for the process in the namespaces.
INSIDE_VARIABLE = "DRA_ACCELERATORS_CHAOS_NODE"
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Run this program again as the first process of new namespaces, and exit with its status. Return at once inside them."""
    if os.environ.get(INSIDE_VARIABLE) == str(os.getpid()):
        return
    if os.geteuid() != 0:
        sys.exit("The node is made of mounts: run this as root.")
    folder = tempfile.mkdtemp(prefix="chaos-")
    words = [sys.executable, *sys.orig_argv[1:]]
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    environment = {**os.environ, INSIDE_VARIABLE: "1", "DRA_ACCELERATORS_CHAOS_FOLDER": folder}
    exit_on_signals()
    try:
        done = subprocess.run([*namespaces, *words], env=environment, check=False, preexec_fn=end_with_parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


def exit_on_signals() -> None:
    """Convert termination signals to an exit, so that cleanup runs and started processes end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends. Called in the child process between fork and exec."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def create_node(library: Path, vendor: Vendor) -> None:
    """Create the node: a vendor's devices and programs from the simulator, and a service manager. Called once in the namespaces."""
    work = Path(os.environ["DRA_ACCELERATORS_CHAOS_FOLDER"])
    mount("tmpfs", work, "mode=0755")
    for number, path in enumerate(OVERLAID_DIRECTORIES):
        upper, scratch = work / f"upper{number}", work / f"work{number}"
        upper.mkdir()
        scratch.mkdir()
        mount("overlay", path, f"lowerdir={path},upperdir={upper},workdir={scratch}", source="overlay")
    mount("tmpfs", "/run", "mode=0755")
    begin_boot()
    bind(BOOT_ID_FILE, "/proc/sys/kernel/random/boot_id")
    _devices()
    _programs(library, vendor)
    if vendor.library_settings:
        configuration = Path(CONFIGURATION)
        configuration.parent.mkdir(parents=True, exist_ok=True)
        configuration.write_text(
            json.dumps({f"{vendor.backend}_library": dict(vendor.library_settings)}), encoding="utf-8"
        )
    simulator("power-on", "--machine", vendor.machine, "--identity", "chaos")
    for path in ("/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/etc/dra-accelerators"):
        Path(path).mkdir(parents=True, exist_ok=True)
    Path("/run/dra-accelerators/companions").mkdir(parents=True)


def begin_boot(new_id: str = "") -> None:
    """Set a new boot id, or an earlier one."""
    BOOT_ID_FILE.write_text(f"{new_id or uuid.uuid4()}\n", encoding="ascii")


def boot_id() -> str:
    """Return the current boot id."""
    return BOOT_ID_FILE.read_text(encoding="ascii").strip()


def _devices() -> None:
    mount("tmpfs", "/dev", "mode=0755")
    for name, minor in NODES.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(1, minor))
        os.chmod(f"/dev/{name}", 0o666)
    os.mkdir("/dev/shm", 0o1777)
    os.symlink("/proc/self/fd", "/dev/fd")


def _programs(library: Path, vendor: Vendor) -> None:
    for file in library.iterdir():
        folder = vendor.install_directory(file.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.name).unlink(missing_ok=True)
        shutil.copy2(file, folder / file.name, follow_symlinks=False)
    manager = f"#!{sys.executable} -SB\n" + Path(__file__).with_name("service_manager.py").read_text(encoding="utf-8")
    for name in ("systemctl", "journalctl"):
        path = Path("/usr/bin") / name
        path.unlink(missing_ok=True)
        path.write_text(manager, encoding="utf-8")
        path.chmod(0o755)
    UNITS.mkdir(parents=True, exist_ok=True)
    for kind in ("mps", "memory"):
        text = (ROOT / f"roles/dra_driver/templates/dra-accelerators-{kind}@.service.j2").read_text(encoding="utf-8")
        text = text.replace("{{ __dra_driver_companions }}", "/run/dra-accelerators/companions")
        text = text.replace("{{ __dra_driver_mps_settings }}", str(ROOT / "roles/dra_driver/files/mps-settings.sh"))
        text = text.replace("{{ dra_driver_mps_memory }}", "1G")
        lines = [line for line in text.splitlines() if not line.startswith(("#", "{{"))]
        (UNITS / f"dra-accelerators-{kind}@.service").write_text("\n".join(lines), encoding="utf-8")


def simulator_command(*words: str) -> list[str]:
    """Return the simulator's command, as the role installs it."""
    program = "import sys; from accelerator_simulator.cli import main; raise SystemExit(main(sys.argv[1:]))"
    return [sys.executable, "-c", program, *words]


def simulator_environment() -> dict[str, str]:
    """Return the environment for that command."""
    return {**os.environ, "PYTHONPATH": str(SIMULATOR)}


def simulator(*words: str) -> str:
    """Run the simulator's command and return its output. Raises AssertionError."""
    done = subprocess.run(
        simulator_command(*words), env=simulator_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AssertionError(f"accelerator-simulator {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


def start_bus() -> subprocess.Popen[bytes]:
    """Start the simulator process that binds PCI devices to drivers as the kernel does, and return it."""
    return subprocess.Popen(simulator_command("bus"), env=simulator_environment())
