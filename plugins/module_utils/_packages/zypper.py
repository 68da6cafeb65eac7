# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Run zypper, the package manager of SUSE distributions.

zypper trusts the keys that rpm trusts. A view of a planned repository uses a temporary root directory for its key.
"""

from __future__ import annotations

import contextlib
import posixpath
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.host.system import Completed
from . import rpm_output
from .interface import OWN_FILES, Change, PackageProblem, Packages, Places, Source, View
from .rpm_base import RpmTool, wanted

_CACHE, _LOGINS = "/var/cache/zypp", "/etc/zypp/credentials.d"
_CACHES = (f"{_CACHE}/raw", f"{_CACHE}/solv", f"{_CACHE}/packages")
_CONFIG, _LOCKS, _AUTOMATIC = "/etc/zypp/zypp.conf", "/etc/zypp/locks", "/var/lib/zypp/AutoInstalled"
_CALL = ("zypper", "--xmlout", "--non-interactive")
#: Allow downgrades and vendor changes for exact versions, and install no recommended packages.
_EXACT = ("--no-recommends", "--oldpackage", "--allow-vendor-change", "--auto-agree-with-licenses")
#: Exit codes of success: 0, or a required reboot (102) or restart of zypper (103).
_WELL = (0, 102, 103)
_MORE = {"autorefresh": "1", "keeppackages": "1", "type": "rpm-md"}


class Zypper(RpmTool):
    """zypper and rpm of a node."""

    title = "zypper"
    repositories = "/etc/zypp/repos.d"
    keys = "/etc/zypp/keys"

    # Queries

    def packages(self) -> Packages:
        """Return the installed packages. Raises PackageProblem."""
        installed, broken = self.installed()
        held = rpm_output.parse_zypper_locks(self._text(_LOCKS))
        automatic = [line.strip() for line in self._text(_AUTOMATIC).splitlines() if not line.startswith("#")]
        return Packages(installed, broken, held, frozenset(name for name in automatic if name))

    def _text(self, path: str) -> str:
        return self.system.read_text(path) if self.system.exists(path) else ""

    def available(self, names: Sequence[str], view: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return the available versions of packages, newest first. Raises PackageProblem."""
        if not names:
            return {}
        words = ["search", "--details", "--match-exact", "--type", "package", *names]
        done = self.run([*_CALL, "--no-refresh", *view, *words])
        # 104: no match. 106: a repository, not this collection's, was skipped.
        if done.returncode not in (*_WELL, 104, 106):
            raise PackageProblem(
                f"zypper cannot say what the repositories have: {_reason(done)}",
                hint="Check their addresses, their keys, and the network connection (zypper has its own proxy settings).",
                code="source",
            )
        return {name: found for name, found in rpm_output.parse_search(done.stdout).items() if name in names}

    def foresee_install(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return the changes that zypper would make to install packages. Raises PackageProblem with zypper's reasons if there is no solution."""
        with self._without_locks() as environment:
            command = [*_CALL, "--no-refresh", *view, "install", "--dry-run", *_EXACT, "--", *_specs(words)]
            return self._foreseen(command, words, environment)

    def foresee_removal(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return the changes that zypper would make to remove packages."""
        with self._without_locks() as environment:
            return self._foreseen([*_CALL, "remove", "--no-clean-deps", "--dry-run", *names], names, environment)

    def orphans(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return the removals for these packages and for the dependencies that no other package needs."""
        if not names:
            return ()
        with self._without_locks() as environment:
            return self._foreseen([*_CALL, "remove", "--clean-deps", "--dry-run", *names], names, environment)

    def _foreseen(
        self, command: Sequence[str], words: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Change, ...]:
        done = self.run(command, environment=environment)
        if done.returncode not in _WELL:
            raise PackageProblem(
                f"zypper cannot find a solution for {' '.join(words)}: {_reason(done)}",
                hint="Nothing was changed.",
                code="no-way",
            )
        return rpm_output.parse_summary(done.stdout)

    @contextlib.contextmanager
    def _without_locks(self) -> Iterator[dict[str, str]]:
        """Yield an environment in which zypper ignores its locks, for which it has no option."""
        text = self._text(_CONFIG)
        lines = [line for line in text.splitlines() if not line.strip().startswith("locksfile.apply")]
        heads = [at for at, line in enumerate(lines) if line.strip() == "[main]"]
        own = ["locksfile.apply = no"] if heads else ["[main]", "locksfile.apply = no"]
        at = heads[0] + 1 if heads else 0
        lines[at:at] = own
        with tempfile.NamedTemporaryFile("w", prefix="dra-accelerators-", suffix=".conf") as file:
            file.write("\n".join([*lines, ""]))
            file.flush()
            yield {"ZYPP_CONF": file.name}

    @contextlib.contextmanager
    def view(
        self,
        *,
        pin_path: str,  # noqa: ARG002 (apt alone has pins)
        source: Source | None = None,
        key: str = "",
        refresh: bool = False,
    ) -> Iterator[View]:
        """Yield a view of zypper as if the repository were configured. Its downloaded metadata is removed afterwards, unless the repository exists."""
        with tempfile.TemporaryDirectory(prefix="dra-accelerators-") as name:
            folder = Path(name)
            options: list[str] = []
            if source is not None:
                (folder / "repos.d").mkdir()
                (folder / "root").mkdir()
                for each in self.system.list_directory(self.repositories):
                    path = f"{self.repositories}/{each}"
                    if path != source.path and each.endswith(".repo"):
                        (folder / "repos.d" / each).symlink_to(self.system.path(path))
                if key:
                    (folder / "key.asc").write_text(key)
                    source = replace(source, signed_by=str(folder / "key.asc"))
                (folder / "repos.d" / posixpath.basename(source.path)).write_text(
                    self.source_text(source.with_login_in_uris())
                )
                options = ["--reposd-dir", str(folder / "repos.d")]
            before = self.lists()
            try:
                if refresh:
                    self._refresh_view(folder, options, source)
                yield View(options, folder / "pins")
            finally:
                if source is not None:
                    self.forget_lists({**self.lists(), **before})

    def _refresh_view(self, folder: Path, options: Sequence[str], source: Source | None) -> None:
        if source is None:
            self.update()
            return
        name = rpm_output.repository_of(source.path)
        # zypper uses the keys of rpm in its root directory. This root directory contains only the key of the source.
        root = str(folder / "root")
        self.did(["rpm", "--root", root, "--initdb"])
        self.did(["rpm", "--root", root, "--import", source.signed_by])
        inner = f"{root}{_CACHE}"
        self._refresh(["--root", root, *options], name)
        for kind in ("raw", "solv"):
            target = self.system.path(f"{_CACHE}/{kind}/{name}")
            if Path(f"{inner}/{kind}/{name}").is_dir():
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(f"{inner}/{kind}/{name}", target, symlinks=True)

    def source_text(self, source: Source) -> str:
        """Return the text of a repository file for zypper."""
        if source.login is not None:
            # zypper reads the credentials from the file with this name (zypper(8), credentials).
            name = rpm_output.repository_of(source.path)
            uris = tuple(f"{uri}{'&' if '?' in uri else '?'}credentials={name}" for uri in source.uris)
            source = replace(source, uris=uris, login=None)
        return rpm_output.repository_text(source, more=_MORE)

    def places(self, name: str) -> Places:
        """Return the paths of the repository, key, and credentials files."""
        return replace(super().places(name), login=f"{_LOGINS}/{OWN_FILES}{name}")

    def login_text(self, source: Source | None) -> str:
        """Return the text of a file for zypper's credentials.d, which only root can read."""
        if source is None or source.login is None:
            return ""
        return f"username={source.login.username}\npassword={source.login.password}\n"

    def lists(self) -> dict[str, str]:
        """Return the cached data of this collection's repositories."""
        return {f"{folder}/{name}": name for folder in _CACHES for name in self.ours(folder)}

    def forget_lists(self, before: Mapping[str, str]) -> None:
        """Remove the cached data of deleted repositories."""
        for path, name in {**before, **self.lists()}.items():
            if self.is_gone(name):
                self.system.remove_tree(path)

    def cannot_hold(self) -> str:
        """Return an empty string: zypper always supports locks."""
        return ""

    # Actions

    def update(self, options: Sequence[str] = (), *, only: str = "") -> None:
        """Refresh all repositories, or only the repository in the file ``only``. Raises PackageProblem."""
        self._refresh(options, rpm_output.repository_of(only) if only else "")

    def _refresh(self, options: Sequence[str], name: str) -> None:
        done = self.run([*_CALL, *options, "refresh", *(["--force", name] if name else [])])
        # 6: no repository is defined, which is an error only for a named repository.
        if done.returncode not in (*_WELL, *(() if name else (6,))):
            raise PackageProblem(
                f"A repository cannot be used: {_reason(done)}",
                hint="Check its address, its key, and the network connection (zypper has its own proxy settings).",
                code="source",
            )

    def install(self, words: Sequence[str], *, keep: str = "", purge: bool = False) -> None:  # noqa: ARG002 (dpkg alone keeps it)
        """Install packages, and move downloaded files to the directory ``keep``. Raises PackageProblem."""
        # Local files have a verified digest, and their repository's key is possibly no longer trusted.
        alone = [] if wanted(words)[0] else ["--no-gpg-checks"]
        with self._without_locks() as environment:
            command = [*_CALL, *alone, "install", *_EXACT, "--", *_specs(words)]
            self._act(command, "install", environment)
        if keep:
            self._keep(keep)

    def _keep(self, folder: str) -> None:
        top = _CACHES[-1]
        for repository in self.ours(top):
            cache = self.system.path(f"{top}/{repository}")
            for path in sorted(cache.rglob("*.rpm")):
                fetched = f"{top}/{repository}/{path.relative_to(cache)}"
                self.system.copy(fetched, f"{folder}/{path.name}")
                self.system.remove(fetched)

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages. Raises PackageProblem."""
        with self._without_locks() as environment:
            self._act([*_CALL, "remove", "--no-clean-deps", *names], "remove", environment)
        self._mark_automatic((), without=names)

    def download(self, words: Sequence[str], folder: str) -> None:
        """Download packages to a directory without installing them. Raises PackageProblem if a repository no longer has one of them."""
        with tempfile.TemporaryDirectory(prefix="dra-accelerators-") as name:
            done = self.run([*_CALL, "--no-refresh", "--pkg-cache-dir", name, "download", *_specs(words)])
            found = sorted(Path(name).rglob("*.rpm"))
            for path in found:
                shutil.move(str(path), f"{folder}/{path.name}")
        if done.returncode not in _WELL or len(found) < len(words):
            raise PackageProblem(f"zypper has fetched not all of {' '.join(words)}: {_reason(done)}", code="download")

    def mark(self, verb: str, names: Sequence[str]) -> None:
        """Lock or unlock packages at their installed versions, or mark them as dependencies. Raises PackageProblem."""
        if not names:
            return
        if verb == "auto":
            self._mark_automatic(names)
            return
        locked = rpm_output.parse_zypper_locks(self._text(_LOCKS))
        names = [name for name in sorted(names) if (name in locked) == (verb == "unhold")]
        if names:
            self._act([*_CALL, "addlock" if verb == "hold" else "removelock", *names], verb, {})

    def bundle_options(self) -> Sequence[str]:
        """Return options that restrict zypper to the repository of the offline bundle."""
        return ("--reposd-dir", f"{self.bundle}/repositories", "--cache-dir", f"{self.bundle}/cache")

    def _mark_automatic(self, names: Sequence[str], *, without: Sequence[str] = ()) -> None:
        """Write the list of packages that were installed as dependencies, for which zypper has no command."""
        lines = self._text(_AUTOMATIC).splitlines()
        head = [line for line in lines if line.startswith("#")]
        there = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
        wanted_there = (there | {*names}) - {*without}
        if wanted_there != there:
            text = "".join(f"{line}\n" for line in [*head[:1], *sorted(wanted_there)])
            self.system.replace_text(_AUTOMATIC, text)

    def _act(self, command: Sequence[str], what: str, environment: Mapping[str, str]) -> None:
        done = self.run(command, environment=environment)
        if done.returncode not in _WELL:
            raise PackageProblem(
                f"zypper {what} has failed: {_reason(done)}",
                hint="/var/log/zypper.log and /var/log/zypp/history have all that was said.",
                code="not-installed",
            )


def _specs(words: Sequence[str]) -> list[str]:
    names, files, gone = wanted(words)
    specs = [f"{name}={version}" if version else name for name, version in names]
    return [*specs, *files, *(f"!{name}" for name in gone)]


def _reason(done: Completed) -> str:
    return rpm_output.zypper_errors(f"{done.stdout}\n{done.stderr}")
