# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A machine with real rpm, dnf, or zypper: the host's files with the tools' packages in an overlay, in a separate
mount namespace.

Its writes do not reach the host. Only its os-release and systemd are simulated, because systemd does not run in such a
root.
"""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpm_parts import Rpm, spec

from tests import debian

ROOT = Path(__file__).resolve().parents[2]
#: Debian packages of each tool. dnf and zypper conflict in Debian.
TOOLS = {"dnf": "dnf dnf-plugins-core createrepo-c rpm", "zypper": "zypper createrepo-c rpm"}
OS_RELEASE = {
    "dnf": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\nPRETTY_NAME="Rocky Linux 9.6"\n',
    "zypper": 'ID="sles"\nID_LIKE="suse"\nVERSION_ID="15.6"\nPRETTY_NAME="SUSE Linux Enterprise Server 15 SP6"\n',
}
ENTER = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {top}
mkdir {top}/tools {top}/above {top}/work {top}/root
cp -a {tools}/. {top}/tools/
mount -t overlay overlay -o lowerdir={top}/tools:/,upperdir={top}/above,workdir={top}/work {top}/root
cd {top}/root
# Nothing of this collection's that the machine beneath has.
rm -rf var/lib/dra-accelerators
mount --rbind /proc proc; mount --rbind /dev dev
mount -t tmpfs tmpfs tmp
for path in {shown}; do mkdir -p .$path; mount --rbind $path .$path; done
exec chroot . {python} -B -c '{serve}'
"""
SERVE = """
import json, subprocess, sys
for line in sys.stdin:
    asked = json.loads(line)
    done = subprocess.run(asked["argv"], input=asked["input"], capture_output=True, text=True)
    print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
"""
MODULE = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.load(sys.stdin)):
    importlib.import_module(f"ansible_collections.dra.accelerators.plugins.modules.{sys.argv[1]}").main()
"""
#: Units are files of packages, as for systemd. A file per unit records whether it is enabled or running.
SYSTEMCTL = """#!/bin/sh
state=/run/stand-in-units; mkdir -p $state
verb=$1; for unit in "$@"; do :; done
exists() { [ -e /usr/lib/systemd/system/$unit ]; }
mask=/etc/systemd/system/$unit; masked() { [ -L $mask ]; }
case $verb in
show) case $2 in
    --property=LoadState) masked && echo masked || { exists && echo loaded || echo not-found; };;
    --property=UnitFileState) if masked; then echo masked; elif exists; then [ -e $state/$unit.on ] && echo enabled || echo disabled; fi;;
    --property=ActiveState) [ -e $state/$unit.runs ] && echo active || echo inactive;;
    *) echo 0;; esac;;
is-active) [ -e $state/$unit.runs ] && echo active || { echo inactive; exit 3; };;
mask) mkdir -p ${mask%/*}; ln -s /dev/null $mask;; unmask) rm -f $mask;;
enable) ! masked || exit 1; touch $state/$unit.on;; disable) rm -f $state/$unit.on;;
start|restart) exists && ! masked || exit 5; touch $state/$unit.runs;; stop) rm -f $state/$unit.runs;;
esac
exit 0
"""


@dataclass(frozen=True)
class Key:
    """A signing key of this run, like that of a repository's vendor."""

    text: str
    fingerprint: str
    mail: str


class RpmMachine:
    """One machine. ``tool`` is dnf or zypper. ``work`` is a directory that the machine shares, with the repositories
    below it.
    """

    def __init__(self, tool: str, work: Path) -> None:
        self.tool, self.work = tool, work
        self.top = work / "machine"
        self.top.mkdir()
        self.web = work / "web"
        self.web.mkdir()
        shown = {
            str(path)
            for path in (ROOT, work, Path(sys.prefix), Path(sys.base_prefix), *map(Path, filter(None, sys.path)))
            if path.is_dir()
        }
        shown = {
            path
            for path in shown
            if not any(path != other and path.startswith(f"{other}/") for other in shown) and path != "/usr"
        }
        script = ENTER.format(
            top=self.top,
            tools=debian.unpacked_packages(TOOLS[tool]),
            shown=" ".join(sorted(shown)),
            python=sys.executable,
            serve=SERVE,
        )
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.write("/etc/os-release", OS_RELEASE[tool])
        self.write("/etc/rpm/macros", "%_dbpath /var/lib/rpm\n")
        self.write("/usr/bin/systemctl", SYSTEMCTL, 0o755)
        self.did(
            "sh", "-c", "rm -rf /etc/dnf/plugins/local.conf; mkdir -p /etc/yum.repos.d /etc/zypp/repos.d; rpm --initdb"
        )
        if tool == "dnf":
            self.write("/etc/dnf/vars/releasever", "9\n")

    def run(self, *argv: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program on the machine."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"argv": argv, "input": given}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the machine has ended while it ran {argv}"
        return subprocess.CompletedProcess(argv, *json.loads(line))

    def did(self, *argv: str, given: str = "") -> str:
        """Run a program on the machine, assert that it succeeds, and return its output."""
        done = self.run(*argv, given=given)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file on the machine."""
        self.did("sh", "-c", f'mkdir -p "$(dirname {path})" && cat > {path} && chmod {mode:o} {path}', given=text)

    def read(self, path: str) -> str:
        """Return a file's text on the machine; empty if it does not exist."""
        return self.run("cat", path).stdout

    def module(
        self, name: str, *, check: bool = False, environment: Mapping[str, str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Run a module on the machine and return its result."""
        more = [f"{key}={value}" for key, value in (environment or {}).items()]
        given = {"_ansible_check_mode": check, **options}
        path = os.environ.get("PYTHONPATH", "")
        command = ["env", f"PYTHONPATH={path}", "HOME=/root", *more, sys.executable, "-B", "-c", MODULE, name]
        done = self.run(*command, given=json.dumps(given))
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, f"{done.stdout}{done.stderr}"
        return json.loads(lines[-1])

    def packages(self) -> list[str]:
        """Return the installed packages of rpm, including keys."""
        return sorted(self.did("rpm", "-qa", "--queryformat", "%{NAME} %{EVR}\\n").splitlines())

    # Repositories

    def key(self, mail: str) -> Key:
        """Create a signing key."""
        home = self.work / "gnupg"
        home.mkdir(mode=0o700, exist_ok=True)
        gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--no-tty", "--pinentry-mode", "loopback"]
        subprocess.run(
            [*gpg, "--passphrase", "", "--quick-generate-key", mail, "rsa2048", "sign", "never"],
            check=True,
            capture_output=True,
        )
        text = subprocess.run([*gpg, "--armor", "--export", mail], check=True, capture_output=True, text=True).stdout
        shown = subprocess.run(
            [*gpg, "--with-colons", "--fingerprint", mail], check=True, capture_output=True, text=True
        ).stdout
        fingerprint = next(line.split(":")[9] for line in shown.splitlines() if line.startswith("fpr"))
        return Key(text, fingerprint, mail)

    def repository(self, name: str, sets: Iterable[Iterable[Rpm]], key: Key) -> str:
        """Build and sign packages and their index; return the repository's name."""
        folder = self.web / name
        folder.mkdir()
        for number, packages in enumerate(sets):
            path = self.work / f"{name}-{number}.spec"
            path.write_text(spec(packages, f"{name}-{number}"))
            top = f"{self.work}/rpmbuild"
            options = [
                f"_topdir {top}",
                f"_rpmdir {folder}",
                "_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
                "_build_id_links none",
                "debug_package %{nil}",
            ]
            self.did(
                "rpmbuild", "--quiet", "-bb", *[word for each in options for word in ("--define", each)], str(path)
            )
        home = f"{self.work}/gnupg"
        signing = [f"_gpg_name {key.mail}", f"_gpg_path {home}", "__gpg /usr/bin/gpg"]
        names = sorted(str(path) for path in folder.glob("*.rpm"))
        self.did("rpmsign", *[word for each in signing for word in ("--define", each)], "--addsign", *names)
        self.index(name, key)
        return name

    def has(self, packages: Iterable[Rpm], key: Key) -> None:
        """Install packages in advance."""
        name = self.repository("base", [packages], key)
        self.did("rpm", "-i", *(str(path) for path in (self.web / name).glob("*.rpm")))

    def index(self, name: str, key: Key) -> None:
        """Create a repository's index, signed with a key."""
        folder = self.web / name
        self.did("createrepo_c", "--quiet", str(folder))
        index = f"{folder}/repodata/repomd.xml"
        gpg = [
            "gpg",
            "--homedir",
            f"{self.work}/gnupg",
            "--batch",
            "--yes",
            "--quiet",
            "--no-tty",
            "--local-user",
            key.mail,
        ]
        subprocess.run([*gpg, "--armor", "--detach-sign", index], check=True, capture_output=True)
        Path(f"{index}.key").write_text(key.text)

    def end(self) -> None:
        """Stop the machine, which removes its mounts."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    login = ""

    def do_GET(self) -> None:
        """Serve a file, if the request has the user name and password."""
        expected = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if not self.login or self.headers.get("Authorization") == expected:
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="repository"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Log nothing."""


@contextmanager
def served(folder: Path, login: str = "") -> Iterator[str]:
    """Yield the address of an HTTP server for a directory, with an optional login ``user:password``."""
    handler = type("Handler", (_Quiet,), {"login": login})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def catalog(family: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """Return a role's catalog from its variables."""
    return list(family["__nvidia_driver_catalogs"][source])


def machine_name() -> str:
    """Return the machine's architecture as rpm names it."""
    return platform.machine()
