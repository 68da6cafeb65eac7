# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Run dnf 4, the package manager of Red Hat distributions 8 to 10 and of openEuler.

The dnf plugin ``versionlock`` holds package versions. This collection's repositories set ``module_hotfixes``, because
it always requests an exact version. Therefore no module stream has to be enabled, and none has to be reset for a
different branch.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..core.host.system import Completed, System
from . import rpm_output
from .interface import OWN_FILES, Change, PackageProblem, Packages, Places, Source, View
from .rpm_base import RpmTool, wanted

_CACHE = "/var/cache/dnf"
_LOCKS, _LOCKS_CONFIG = "/etc/dnf/plugins/versionlock.list", "/etc/dnf/plugins/versionlock.conf"
_PLUGIN = "python3-dnf-plugin-versionlock"
#: The request is complete: dnf installs no recommended packages and removes no packages that the request does not name.
_EXACT = (
    "--disableplugin=versionlock",
    "--setopt=install_weak_deps=False",
    "--setopt=clean_requirements_on_remove=False",
    "--setopt=best=True",
)
_CHECKS_PACKAGES = re.compile(r"(?m)^gpgcheck=1$")
_MORE = {"skip_if_unavailable": "0", "module_hotfixes": "1"}


class Dnf(RpmTool):
    """dnf and rpm of a node."""

    title = "dnf"
    repositories = "/etc/yum.repos.d"
    keys = "/etc/pki/rpm-gpg"

    def __init__(self, system: System, *, timeout: float, bundle: str = "") -> None:
        super().__init__(system, timeout=timeout, bundle=bundle)
        # Only dnf knows which packages are dependencies, and the query takes seconds. Only the actions of this class
        # change the answer.
        self._automatic: frozenset[str] | None = None

    # Queries

    def packages(self) -> Packages:
        """Return the installed packages. Raises PackageProblem."""
        installed, broken = self.installed()
        if self._automatic is None:
            self._refuse_other_versions()
            words = ["repoquery", "--installed", "--qf", "%{name}\t%{reason}"]
            text = self.said(["dnf", "-q", "--disablerepo=*", *words])
            reasons = dict(line.split("\t", 1) for line in text.splitlines() if "\t" in line)
            self._automatic = frozenset(name for name, reason in reasons.items() if "dep" in reason)
        return Packages(installed, broken, frozenset(self._locked()), self._automatic)

    def _refuse_other_versions(self) -> None:
        output = self.said(["dnf", "--version"]).split()
        if not output or not output[0].startswith("4."):
            raise PackageProblem(
                f"dnf reports the version {' '.join(output[:3]) or '(none)'}, expected 4",
                hint="Red Hat Enterprise Linux 8 to 10, similar distributions, and openEuler have dnf 4.",
                code="no-package-manager",
            )

    def available(self, names: Sequence[str], view: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return the available versions of packages, newest first. Raises PackageProblem."""
        if not names:
            return {}
        words = ["repoquery", "--available", "--showduplicates", "--qf", "%{name}\t%{evr}", *names]
        done = self.run(["dnf", "-q", *view, "--disableplugin=versionlock", *words])
        if done.returncode:
            raise PackageProblem(
                f"dnf cannot list the packages of the repositories: {_reason(done)}",
                hint="Check their addresses, their keys, and the network connection (dnf has its own proxy settings).",
                code="source",
            )
        return {name: found for name, found in rpm_output.parse_versions(done.stdout).items() if name in names}

    def foresee_install(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return the changes that dnf would make to install packages. Raises PackageProblem with dnf's reasons if there is no solution."""
        with self._transaction(words, [*view, *_EXACT]) as command:
            return self._foreseen([*command[:1], "--assumeno", *command[1:]], words)

    def foresee_removal(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return the changes that dnf would make to remove packages."""
        return self._foreseen(["dnf", "--disablerepo=*", "--assumeno", *_EXACT, "remove", *names], names)

    def orphans(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return the removals for these packages and for the dependencies that no other package needs."""
        words = ["--disableplugin=versionlock", "--setopt=clean_requirements_on_remove=True", "remove", *names]
        return self._foreseen(["dnf", "--disablerepo=*", "--assumeno", *words], names) if names else ()

    def _foreseen(self, command: Sequence[str], words: Sequence[str]) -> tuple[Change, ...]:
        done = self.run(command)
        reason = rpm_output.dnf_errors(f"{done.stdout}\n{done.stderr}")
        if reason:
            raise PackageProblem(
                f"dnf cannot find a solution for {' '.join(words)}: {reason}",
                hint="Nothing was changed.",
                code="no-way",
            )
        return rpm_output.parse_transaction(done.stdout, self.installed()[0])

    @contextlib.contextmanager
    def view(
        self,
        *,
        pin_path: str,  # noqa: ARG002 (apt alone has pins)
        source: Source | None = None,
        key: str = "",
        refresh: bool = False,
    ) -> Iterator[View]:
        """Yield a view of dnf as if the repository were configured. Its downloaded metadata is removed afterwards, unless the repository exists."""
        with tempfile.TemporaryDirectory(prefix="dra-accelerators-") as name:
            folder = Path(name)
            options: list[str] = []
            if source is not None:
                for each in self.system.list_directory(self.repositories):
                    path = f"{self.repositories}/{each}"
                    if path != source.path and each.endswith(".repo"):
                        (folder / each).symlink_to(self.system.path(path))
                if key:
                    (folder / "key.asc").write_text(key)
                    source = replace(source, signed_by=str(folder / "key.asc"))
                (folder / posixpath.basename(source.path)).write_text(self.source_text(source))
                options = [f"--setopt=reposdir={folder}"]
            before = self.lists()
            try:
                if refresh and source is not None:
                    self._forget_other_keys(source.path, key)
                    self._make_cache(options, rpm_output.repository_of(source.path))
                yield View(options, folder / "pins")
            finally:
                if source is not None:
                    self.forget_lists({**self.lists(), **before})

    def _forget_other_keys(self, path: str, key: str) -> None:
        """Delete metadata that was downloaded with a different key: dnf stores the key with it and would still trust that key."""
        name = rpm_output.repository_of(path)
        place = self.places(name[len(OWN_FILES) :]).key
        if self.system.exists(place) and self.system.read_text(place) == key:
            return
        for each, found in self.lists().items():
            if self.is_of(found, name):
                self._drop(each)

    def source_text(self, source: Source) -> str:
        """Return the text of a repository file for dnf."""
        return rpm_output.repository_text(source, more=_MORE)

    def lists(self) -> dict[str, str]:
        """Return the cached data of this collection's repositories."""
        return {f"{_CACHE}/{name}": name for name in self.ours(_CACHE)}

    def forget_lists(self, before: Mapping[str, str]) -> None:
        """Remove the cached data of deleted repositories."""
        for path, name in {**before, **self.lists()}.items():
            if self.is_gone(name):
                self._drop(path)

    def _drop(self, path: str) -> None:
        (self.system.remove_tree if self.system.path(path).is_dir() else self.system.remove)(path)

    def cannot_hold(self) -> str:
        """Return the reason why packages cannot be locked, or an empty string if they can."""
        if self.system.exists(_LOCKS_CONFIG):
            return ""
        return f"dnf cannot hold packages at their version without its plugin versionlock, which the package {_PLUGIN} contains."

    # Keys

    def trust(self, places: Places) -> None:
        """Import the repository's key into rpm only if packages are signed. Raises PackageProblem.

        rpm accepts an imported key for packages of every repository. dnf verifies an index with a keyring of only that repository.
        """
        text = self.system.read_text(places.source) if self.system.exists(places.source) else ""
        if _CHECKS_PACKAGES.search(text):
            super().trust(places)
        else:
            self.forget_key(places.key)

    # Actions

    def update(self, options: Sequence[str] = (), *, only: str = "") -> None:
        """Download the metadata of all repositories, or only of the repository in ``only``. Raises PackageProblem."""
        self._make_cache(options, rpm_output.repository_of(only) if only else "")

    def _make_cache(self, options: Sequence[str], name: str) -> None:
        # dnf may accept a key (-y) only if the repository has a pinned key.
        words = ["-y", f"--repo={name}", "--refresh"] if name else ["--refresh"]
        done = self.run(["dnf", "-q", *options, "--disableplugin=versionlock", *words, "makecache"])
        if done.returncode:
            raise PackageProblem(
                f"A repository cannot be used: {_reason(done)}",
                hint="Check its address, its key, and the network connection (dnf has its own proxy settings).",
                code="source",
            )

    def install(self, words: Sequence[str], *, keep: str = "", purge: bool = False) -> None:  # noqa: ARG002 (dpkg alone keeps it)
        """Install packages, and move downloaded files to the directory ``keep``. Raises PackageProblem."""
        with self._transaction(words, [*_EXACT, *(["--setopt=keepcache=True"] if keep else [])]) as command:
            if "shell" in command:
                # The dnf shell continues after a command that fails, so plan the transaction first.
                self._foreseen([*command[:1], "--assumeno", *command[1:]], words)
            self._act([*command[:1], "-y", *command[1:]], "install")
        if keep:
            self._keep(keep)

    def _keep(self, folder: str) -> None:
        for repository in self.system.list_directory(_CACHE):
            packages = f"{_CACHE}/{repository}/packages"
            for name in self.system.list_directory(packages):
                if name.endswith(".rpm"):
                    self.system.write_atomic(f"{folder}/{name}", self.system.read_bytes(f"{packages}/{name}"))
                    self.system.remove(f"{packages}/{name}")

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages. Raises PackageProblem."""
        self._act(["dnf", "-y", "--disablerepo=*", *_EXACT, "remove", *names], "remove")

    def download(self, words: Sequence[str], folder: str) -> None:
        """Download packages to a directory without installing them. Raises PackageProblem if a repository no longer has one of them."""
        specs = {(name, rpm_output.without_epoch(version)): _spec(name, version) for name, version in wanted(words)[0]}
        asked = ["-q", "--disableplugin=versionlock", "repoquery", "--location", *specs.values()]
        addresses = self.run(["dnf", *asked]).stdout.split()
        # A node receives only those packages of a bundle that it needs.
        there = {
            named: each
            for each in addresses
            if (named := rpm_output.name_of_file(each)) in specs
            and (not each.startswith("file:") or self.system.exists(unquote(urlsplit(each).path)))
        }
        remote = [specs[named] for named, each in there.items() if not each.startswith("file:")]
        for address in there.values():
            if address.startswith("file:"):
                shutil.copyfile(unquote(urlsplit(address).path), f"{folder}/{posixpath.basename(address)}")
        if remote:
            # The plugin `download` is a separate package. These packages are installed, so `reinstall --downloadonly`
            # works without the plugin.
            options = ["--setopt=keepcache=True", "--downloadonly", f"--downloaddir={folder}"]
            self._act(["dnf", "-y", *_EXACT, *options, "reinstall", *remote], "download")
        missing = [spec for named, spec in specs.items() if named not in there]
        if missing:
            raise PackageProblem(f"No repository has {' '.join(missing)} any more", code="download")

    def mark(self, verb: str, names: Sequence[str]) -> None:
        """Lock or unlock packages at their installed versions, or mark them as dependencies. Raises PackageProblem."""
        if not names:
            return
        if verb == "auto":
            self._act(["dnf", "-y", "-q", "--disablerepo=*", "mark", "remove", *sorted(names)], "mark")
            return
        locks = self._locked()
        gone = [locks[name] for name in sorted(names) if name in locks]
        if gone:
            self._act(["dnf", "-q", "--disablerepo=*", "versionlock", "delete", *gone], "versionlock")
        if verb == "hold":
            installed = self.installed()[0]
            new = [rpm_output.lock_of(name, installed[name]) for name in sorted(names) if name in installed]
            self._act(["dnf", "-q", "--disablerepo=*", "versionlock", "add", "--raw", *new], "versionlock")

    def _locked(self) -> dict[str, str]:
        return rpm_output.parse_locks(self.system.read_text(_LOCKS)) if self.system.exists(_LOCKS) else {}

    # Commands

    def bundle_options(self) -> Sequence[str]:
        """Return options that restrict dnf to the repository of the offline bundle."""
        return (f"--setopt=reposdir={self.bundle}/repositories", f"--setopt=cachedir={self.bundle}/cache")

    @contextlib.contextmanager
    def _transaction(self, words: Sequence[str], options: Sequence[str]) -> Iterator[list[str]]:
        """Yield the dnf command for package specifications. It uses the dnf shell if packages are also removed in the same transaction."""
        names, files, gone = wanted(words)
        specs = [*(_spec(name, version) for name, version in names), *files]
        if not gone:
            yield ["dnf", *options, "install", *specs]
            return
        with tempfile.NamedTemporaryFile("w", prefix="dra-accelerators-", suffix=".dnf") as script:
            # The dnf shell accepts package files only in the first command.
            install = f"install {' '.join(specs)}\n" if specs else ""
            script.write(f"{install}remove {' '.join(gone)}\nrun\n")
            script.flush()
            yield ["dnf", *options, "shell", script.name]

    def _act(self, command: Sequence[str], what: str) -> None:
        if what != "versionlock":
            self._automatic = None
        done = self.run(command)
        # The dnf shell exits with 0 even if its commands fail.
        if done.returncode or rpm_output.dnf_errors(f"{done.stdout}\n{done.stderr}"):
            raise PackageProblem(
                f"dnf {what} has failed: {_reason(done)}",
                hint="/var/log/dnf.log contains the complete output.",
                code="not-installed",
            )


def _spec(name: str, version: str) -> str:
    return f"{name}-{version}" if version else name


def _reason(done: Completed) -> str:
    output = f"{done.stdout}\n{done.stderr}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return rpm_output.dnf_errors(output) or " | ".join(lines[-3:])[-500:] or "no output"
