# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Runs apt and dpkg. A view lets apt plan with sources and pins that are not on the node yet, so that check mode sees what a run would do."""

from __future__ import annotations

import abc
import contextlib
import posixpath
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from . import _apt
from ._package_port import LOOK_SECONDS, MARK, OWN_FILES, Change, PackageProblem, Packages, Places, Source, View
from .core.system import LONGEST_INSTALLATION, Completed, System

LISTS, SOURCES, PREFERENCES = "/var/lib/apt/lists", "/etc/apt/sources.list.d", "/etc/apt/preferences.d"
KEYS, LOGINS = "/etc/apt/keyrings", "/etc/apt/auth.conf.d"
SOURCES_FILE = "/etc/apt/sources.list"
_STATUS = "${Package}\\t${Architecture}\\t${Version}\\t${db:Status-Status}\\n"
_QUIET = {"DEBIAN_FRONTEND": "noninteractive", "DEBCONF_NONINTERACTIVE_SEEN": "true", "NEEDRESTART_MODE": "l"}
#: What was there before keeps its configuration; another run of apt is waited for.
_ACTING = (
    "-y",
    "-o=Dpkg::Options::=--force-confdef",
    "-o=Dpkg::Options::=--force-confold",
    "-o=DPkg::Lock::Timeout=300",
)
#: What an exact version takes: older ones, and packages that are held.
OVER_HOLDS = ("--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages")
#: What is recommended or suggested alone keeps no package that was installed for a driver.
_NOT_NEEDED = ("-o=APT::AutoRemove::RecommendsImportant=false", "-o=APT::AutoRemove::SuggestsImportant=false")


class AptForm(abc.ABC):
    """How apt's files and words are made of what is the same for all package managers. What it needs beyond that a class of its own adds."""

    system: System
    title = "apt"

    @abc.abstractmethod
    def sources(self) -> list[Source]:
        """Return which package sources apt knows."""

    @abc.abstractmethod
    def foresee(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return what apt would do by these words of apt-get's."""

    @abc.abstractmethod
    def act(self, verb: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
        """Run apt-get; return what it said."""

    def places(self, name: str) -> Places:
        """Return where apt has a source, its key and its pins."""
        own = f"{OWN_FILES}{name}"
        return Places(f"{SOURCES}/{own}.sources", f"{KEYS}/{own}.asc", f"{PREFERENCES}/{own}", f"{LOGINS}/{own}.conf")

    def login_text(self, source: Source | None) -> str:
        """Return the text of a file for apt's auth.conf.d, which only root can read (apt_auth.conf(5))."""
        if source is None or source.login is None:
            return ""
        login = source.login
        lines = [f"machine {uri} login {login.username} password {login.password}" for uri in source.uris]
        return "".join(f"{line}\n" for line in [MARK, *lines])

    def plan_source(self, wanted: Source) -> Source | None:
        """Decide what is to be written so that apt has a source."""
        return _apt.plan_source(wanted, self.sources())

    def source_text(self, source: Source) -> str:
        """Return a source as a stanza."""
        return source.stanza()

    def pins(self, pattern: str, versions: Sequence[str]) -> str:
        """Return preferences that hold all packages whose names match a pattern to these versions."""
        return _apt.pins(pattern, versions)

    def named(self, path: str) -> tuple[str, str] | None:
        """Return the package and the version that a file's name says."""
        return _apt.name_of_file(path)

    def kept_in(self, folder: str) -> dict[tuple[str, str], str]:
        """Return the files of packages in a folder, by package and version."""
        names = self.system.list_directory(folder)
        return {named: f"{folder}/{name}" for name in names if (named := _apt.name_of_file(name))}

    def cannot_hold(self) -> str:
        """apt holds packages by itself."""
        return ""

    def trust(self, places: Places) -> None:  # noqa: B027  nothing to do
        """apt is told in each source's definition which key is its own."""

    def distrust(self, places: Places) -> None:  # noqa: B027  nothing to do
        """A key goes with its file."""

    def forget_lists(self, before: Mapping[str, str]) -> None:
        """Remove what apt has kept of sources that are gone; ``before`` are its lists as they were with them."""
        for path in _apt.unneeded_lists(before, self.lists()) if before else ():
            for name in (path, *(f"{path}.{ending}" for ending in ("lz4", "xz", "gz", "zst"))):
                if path.startswith(f"{LISTS}/"):
                    self.system.remove(name)

    @abc.abstractmethod
    def lists(self) -> dict[str, str]:
        """Return the files of all indexes that the sources have, each with its name in the repository."""

    def foresee_install(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return what apt would do to install packages, over holds and to older versions as well."""
        return self.foresee(["install", *OVER_HOLDS, *words], view)

    def foresee_removal(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return what apt would do to remove packages."""
        return self.foresee(["--allow-change-held-packages", "purge", *names])

    def install(self, words: Sequence[str], *, keep: str = "", purge: bool = False) -> None:
        """Install packages; apt leaves in the folder ``keep`` what it fetches. Raises PackageProblem."""
        options = [f"-o=Dir::Cache::Archives={self.system.path(keep)}/", "-o=APT::Sandbox::User=root"] if keep else []
        self.act("install", [*(["--purge"] if purge else []), *OVER_HOLDS, *words], options)

    def remove(self, names: Sequence[str]) -> None:
        """Remove packages with their configuration. Raises PackageProblem."""
        self.act("purge", names)


class Apt(AptForm):
    """apt and dpkg of a node."""

    def __init__(self, system: System, *, timeout: float) -> None:
        self.system = system
        self.timeout = timeout

    # What is there

    def kept_in(self, folder: str) -> dict[tuple[str, str], str]:
        """Return the complete files of packages in a folder, by package and version."""
        found = super().kept_in(folder)
        return {named: path for named, path in found.items() if _apt.is_whole(self.system.path(path))}

    def packages(self) -> Packages:
        """Return what is installed. Raises PackageProblem."""
        architecture = self._said(["dpkg", "--print-architecture"]).strip()
        installed, broken = _apt.parse_status(self._said(["dpkg-query", "-W", f"--showformat={_STATUS}"]), architecture)
        held = frozenset(self._said(["apt-mark", "showhold"]).split())
        return Packages(installed, broken, held, frozenset(self._said(["apt-mark", "showauto"]).split()))

    def sources(self) -> list[Source]:
        """Return which package sources apt knows."""
        names = [f"{SOURCES}/{name}" for name in self.system.list_directory(SOURCES)]
        paths = [path for path in (SOURCES_FILE, *names) if path.endswith((".list", ".sources"))]
        return [
            each
            for path in paths
            if self.system.exists(path)
            for each in _apt.read_sources(path, self.system.read_text(path))
        ]

    def available(self, names: Sequence[str], view: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return which versions of packages the sources have, the newest first."""
        if not names:
            return {}
        return _apt.parse_available(self._said(["apt-cache", *view, "madison", *names]))

    def foresee(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return what apt would do. Raises PackageProblem with its own reasons where it cannot."""
        done = self.system.run(["apt-get", *view, "-s", *words], LOOK_SECONDS)
        if done.returncode:
            raise PackageProblem(
                f"apt finds no way to {' '.join(words)}: {_apt.errors_of(done.stdout + chr(10) + done.stderr)}",
                hint="Nothing was changed.",
                code="no-way",
            )
        return _apt.parse_foreseen(done.stdout)

    def orphans(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return what would go with these packages: they themselves, and what was installed for others' sake and nobody needs any more."""
        return (
            self.foresee([*_NOT_NEEDED, "--allow-change-held-packages", "--purge", "autoremove", *names])
            if names
            else ()
        )

    def lists(self) -> dict[str, str]:
        """Return the files of all indexes that the sources have, each with its name in the repository."""
        text = self._said(["apt-get", "indextargets", "--format", "$(FILENAME)|$(METAKEY)"])
        return dict(line.split("|", 1) for line in text.splitlines() if "|" in line)

    @contextlib.contextmanager
    def view(
        self, *, pin_path: str, source: Source | None = None, key: str = "", refresh: bool = False
    ) -> Iterator[View]:
        """Yield how apt sees a source as if it were in place, and the pins that it is given; ``refresh`` also asks the source.

        Nothing of apt's own is written: lists and caches of the view lie in a folder that goes afterwards.
        """
        with tempfile.TemporaryDirectory(prefix="dra-accelerators-") as name:
            folder = Path(name)
            preferences = self._copied(folder / "preferences.d", PREFERENCES, leave_out=pin_path)
            options = [
                f"-o=Dir::Etc::PreferencesParts={preferences}",
                "-o=Dir::Cache::pkgcache=",
                "-o=Dir::Cache::srcpkgcache=",
            ]
            if source is not None:
                if key:
                    (folder / "key.asc").write_text(key)
                    source = replace(source, signed_by=str(folder / "key.asc"))
                parts = self._copied(folder / "sources.d", SOURCES, leave_out=source.path)
                (parts / posixpath.basename(source.path)).write_text(source.with_login_in_uris().stanza())
                options.append(f"-o=Dir::Etc::SourceParts={parts}")
            if refresh:
                lists = self._copied(folder / "lists", LISTS, leave_out=f"{LISTS}/lock")
                (lists / "partial").mkdir()
                options += [f"-o=Dir::State::Lists={lists}", "-o=APT::Sandbox::User=root"]
                own = [] if source is None else self._only(str(folder / "sources.d" / posixpath.basename(source.path)))
                self.update([*options, *own])
            yield View(options, preferences / "dra-accelerators-pins")

    def _copied(self, target: Path, folder: str, leave_out: str = "") -> Path:
        target.mkdir()
        for name in self.system.list_directory(folder):
            path = self.system.path(f"{folder}/{name}")
            if f"{folder}/{name}" != leave_out and path.is_file():
                (target / name).symlink_to(path)
        return target

    @staticmethod
    def _only(path: str) -> list[str]:
        return [f"-o=Dir::Etc::SourceList={path}", "-o=Dir::Etc::SourceParts=-", "-o=APT::Get::List-Cleanup=0"]

    # What is done

    def update(self, options: Sequence[str] = (), *, only: str = "") -> None:
        """Ask the sources what they have, or the one of this file alone. Raises PackageProblem where one does not answer, or is not signed."""
        words = [*options, *(self._only(only) if only else [])]
        done = self._act(["apt-get", *words, "-o=APT::Update::Error-Mode=any", "-q", "update"])
        if done.returncode:
            said = _apt.errors_of(f"{done.stdout}\n{done.stderr}")
            raise PackageProblem(
                f"A package source cannot be used: {said}",
                hint="Look at its address, its key, and the way there (proxies are apt's own setting).",
                code="source",
            )

    def act(self, verb: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
        """Run apt-get; return what it said. Raises PackageProblem."""
        done = self._act(["apt-get", *options, *_ACTING, verb, *words])
        said = f"{done.stdout}\n{done.stderr}"
        if done.returncode:
            raise PackageProblem(
                f"apt-get {verb} has failed: {_apt.errors_of(said)}",
                hint="/var/log/apt/term.log has all that was said.",
                code="apt-failed",
            )
        return said

    def download(self, words: Sequence[str], folder: str) -> None:
        """Fetch packages into a folder, and install none. Raises PackageProblem where a source no longer has one of them."""
        done = self._act(
            [
                "sh",
                "-c",
                'cd "$1" && shift && exec apt-get -o=APT::Sandbox::User=root -q download "$@"',
                "sh",
                folder,
                *words,
            ]
        )
        if done.returncode:
            raise PackageProblem(
                f"apt-get download has failed: {_apt.errors_of(done.stdout + chr(10) + done.stderr)}", code="download"
            )

    def finish(self) -> None:
        """Have dpkg finish what was cut short. Raises PackageProblem."""
        done = self._act(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"])
        if done.returncode:
            raise PackageProblem(
                f"dpkg cannot finish what was cut short: {_apt.errors_of(done.stdout + chr(10) + done.stderr)}",
                hint="Run `dpkg --configure -a`, and this again.",
                code="half-configured",
            )

    def mend(self, files: Sequence[str], purge: Sequence[str]) -> None:
        """Bring what was cut short to an end: these packages take the place of what is half there, and these go. Raises PackageProblem."""
        keep = ("--force-depends", "--force-confdef", "--force-confold")
        calls = [
            *([["dpkg", *keep, "--install", *files]] if files else []),
            *([["dpkg", *keep, "--force-remove-reinstreq", "--purge", *purge]] if purge else []),
            ["dpkg", *keep, "--configure", "-a"],
            ["apt-get", *_ACTING, "--allow-change-held-packages", "--allow-downgrades", "--fix-broken", "install"],
        ]
        for call in calls:
            done = self._act(call)
            if done.returncode:
                raise PackageProblem(
                    f"What was cut short cannot be brought to an end: {_apt.errors_of(done.stdout + chr(10) + done.stderr)}",
                    hint="Run `apt-get --fix-broken install`, and this again.",
                    code="half-configured",
                )

    def mark(self, verb: str, names: Sequence[str]) -> None:
        """Mark packages as hold, unhold, auto or manual."""
        if names:
            self._said(["apt-mark", verb, *sorted(names)])

    def _act(self, argv: Sequence[str]) -> Completed:
        return self.system.run(argv, self.timeout, input="", environment=_QUIET, longest=LONGEST_INSTALLATION)

    def _said(self, argv: Sequence[str]) -> str:
        done = self.system.run(argv, LOOK_SECONDS, environment=_QUIET)
        if done.returncode:
            raise PackageProblem(
                f"{' '.join(argv[:2])} ended with {done.returncode}: {_apt.errors_of(done.stdout + chr(10) + done.stderr)}"
            )
        return done.stdout
