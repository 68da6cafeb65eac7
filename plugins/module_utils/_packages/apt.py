# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Run apt and dpkg.

A view lets apt plan with sources and pins that the node does not have yet, so that check mode reports the same changes.
"""

from __future__ import annotations

import abc
import contextlib
import posixpath
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.host.system import LONGEST_INSTALLATION, Completed, System
from . import apt_output
from .interface import MARK, OWN_FILES, QUERY_SECONDS, Change, PackageProblem, Packages, Places, Source, View

LISTS, SOURCES, PREFERENCES = "/var/lib/apt/lists", "/etc/apt/sources.list.d", "/etc/apt/preferences.d"
KEYS, LOGINS = "/etc/apt/keyrings", "/etc/apt/auth.conf.d"
SOURCES_FILE = "/etc/apt/sources.list"
STATUS = "/var/lib/dpkg/status"
_FIELDS = "${Package}\\t${Architecture}\\t${Version}\\t${db:Status-Status}\\n"
_QUIET = {"DEBIAN_FRONTEND": "noninteractive", "DEBCONF_NONINTERACTIVE_SEEN": "true", "NEEDRESTART_MODE": "l"}
#: Existing configuration files stay. apt waits up to 300 s for the lock of another package operation.
_ACTING = (
    "-y",
    "-o=Dpkg::Options::=--force-confdef",
    "-o=Dpkg::Options::=--force-confold",
    "-o=DPkg::Lock::Timeout=300",
)
#: An exact version can require a downgrade or a change of held packages.
OVER_HOLDS = ("--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages")
#: Autoremove ignores recommendations and suggestions: they do not keep a package that was installed as a driver's
#: dependency.
_NOT_NEEDED = ("-o=APT::AutoRemove::RecommendsImportant=false", "-o=APT::AutoRemove::SuggestsImportant=false")


class AptForm(abc.ABC):
    """Create apt's files and commands from the common package interface. Subclasses run the commands."""

    system: System
    title = "apt"

    @abc.abstractmethod
    def sources(self) -> list[Source]:
        """Return the package sources of apt."""

    @abc.abstractmethod
    def foresee(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return the changes that these arguments of apt-get would make."""

    @abc.abstractmethod
    def act(self, verb: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
        """Run apt-get and return its output."""

    def places(self, name: str) -> Places:
        """Return the paths of apt's source, key, pin, and login files."""
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
        """Return the source to write, or None if apt already has it."""
        return apt_output.plan_source(wanted, self.sources())

    def source_text(self, source: Source) -> str:
        """Return a source as a deb822 stanza."""
        return source.stanza()

    def pins(self, pattern: str, versions: Sequence[str]) -> str:
        """Return preferences that pin all packages with a matching name to these versions."""
        return apt_output.pins(pattern, versions)

    def named(self, path: str) -> tuple[str, str] | None:
        """Return the package and version in a file's name."""
        return apt_output.name_of_file(path)

    def kept_in(self, folder: str) -> dict[tuple[str, str], str]:
        """Return the paths of the package files in a directory, by package and version."""
        names = self.system.list_directory(folder)
        return {named: f"{folder}/{name}" for name in names if (named := apt_output.name_of_file(name))}

    def cannot_hold(self) -> str:
        """Return an empty string: apt always supports holds."""
        return ""

    def trust(self, places: Places) -> None:  # noqa: B027  nothing to do
        """Do nothing: the definition of each source names its key file."""

    def distrust(self, places: Places) -> None:  # noqa: B027  nothing to do
        """Do nothing: apt trusts a key only while its file exists."""

    def forget_lists(self, before: Mapping[str, str]) -> None:
        """Remove the package lists of deleted sources. ``before`` are the lists before the deletion."""
        for path in apt_output.unneeded_lists(before, self.lists()) if before else ():
            for name in (path, *(f"{path}.{ending}" for ending in ("lz4", "xz", "gz", "zst"))):
                if path.startswith(f"{LISTS}/"):
                    self.system.remove(name)

    @abc.abstractmethod
    def lists(self) -> dict[str, str]:
        """Return the index files of all sources, each with its name in the repository."""

    def foresee_install(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return the changes that apt would make to install packages. Holds are ignored, and downgrades are allowed."""
        return self.foresee(["install", *OVER_HOLDS, *words], view)

    def foresee_removal(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return the changes that apt would make to remove packages."""
        return self.foresee(["--allow-change-held-packages", "purge", *names])

    def install(self, words: Sequence[str], *, keep: str = "", purge: bool = False) -> None:
        """Install packages. Downloaded files stay in the directory ``keep``. Raises PackageProblem."""
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

    # Queries

    def kept_in(self, folder: str) -> dict[tuple[str, str], str]:
        """Return the paths of the complete package files in a directory, by package and version."""
        found = super().kept_in(folder)
        return {named: path for named, path in found.items() if apt_output.is_whole(self.system.path(path))}

    def packages(self) -> Packages:
        """Return the installed packages. Raises PackageProblem."""
        installed, broken = read_installed(self.system)
        held = frozenset(self._said(["apt-mark", "showhold"]).split())
        return Packages(installed, broken, held, frozenset(self._said(["apt-mark", "showauto"]).split()))

    def sources(self) -> list[Source]:
        """Return the package sources of apt."""
        names = [f"{SOURCES}/{name}" for name in self.system.list_directory(SOURCES)]
        paths = [path for path in (SOURCES_FILE, *names) if path.endswith((".list", ".sources"))]
        return [
            each
            for path in paths
            if self.system.exists(path)
            for each in apt_output.read_sources(path, self.system.read_text(path))
        ]

    def available(self, names: Sequence[str], view: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return the available versions of packages, newest first."""
        if not names:
            return {}
        return apt_output.parse_available(self._said(["apt-cache", *view, "madison", *names]))

    def foresee(self, words: Sequence[str], view: Sequence[str] = ()) -> tuple[Change, ...]:
        """Return the changes that apt would make. Raises PackageProblem with apt's reasons if there is no solution."""
        done = self.system.run(["apt-get", *view, "-s", *words], QUERY_SECONDS)
        if done.returncode:
            raise PackageProblem(
                f"apt cannot find a solution for {' '.join(words)}: {apt_output.errors_of(done.stdout + chr(10) + done.stderr)}",
                hint="Nothing was changed.",
                code="no-way",
            )
        return apt_output.parse_foreseen(done.stdout)

    def orphans(self, names: Sequence[str]) -> tuple[Change, ...]:
        """Return the removals for these packages and for the dependencies that no other package needs."""
        return (
            self.foresee([*_NOT_NEEDED, "--allow-change-held-packages", "--purge", "autoremove", *names])
            if names
            else ()
        )

    def lists(self) -> dict[str, str]:
        """Return the index files of all sources, each with its name in the repository."""
        text = self._said(["apt-get", "indextargets", "--format", "$(FILENAME)|$(METAKEY)"])
        return dict(line.split("|", 1) for line in text.splitlines() if "|" in line)

    @contextlib.contextmanager
    def view(
        self, *, pin_path: str, source: Source | None = None, key: str = "", refresh: bool = False
    ) -> Iterator[View]:
        """Yield a view of apt as if the source were configured, with a file for pins. ``refresh`` also downloads the index.

        The view does not change apt's files. Its lists and caches are in a temporary directory.
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

    # Actions

    def update(self, options: Sequence[str] = (), *, only: str = "") -> None:
        """Download the index of all sources, or only of the source in ``only``. Raises PackageProblem if a source is unavailable or unsigned."""
        words = [*options, *(self._only(only) if only else [])]
        done = self._act(["apt-get", *words, "-o=APT::Update::Error-Mode=any", "-q", "update"])
        if done.returncode:
            output = apt_output.errors_of(f"{done.stdout}\n{done.stderr}")
            raise PackageProblem(
                f"A package source cannot be used: {output}",
                hint="Check its address, its key, and the network connection (apt has its own proxy settings).",
                code="source",
            )

    def act(self, verb: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
        """Run apt-get and return its output. Raises PackageProblem."""
        done = self._act(["apt-get", *options, *_ACTING, verb, *words])
        output = f"{done.stdout}\n{done.stderr}"
        if done.returncode:
            raise PackageProblem(
                f"apt-get {verb} has failed: {apt_output.errors_of(output)}",
                hint="/var/log/apt/term.log contains the complete output.",
                code="apt-failed",
            )
        return output

    def download(self, words: Sequence[str], folder: str) -> None:
        """Download packages to a directory without installing them. Raises PackageProblem if a source no longer has one of them."""
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
                f"apt-get download has failed: {apt_output.errors_of(done.stdout + chr(10) + done.stderr)}",
                code="download",
            )

    def finish(self) -> None:
        """Finish interrupted package operations with ``dpkg --configure``. Raises PackageProblem."""
        done = self._act(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"])
        if done.returncode:
            raise PackageProblem(
                f"dpkg cannot finish an interrupted operation: {apt_output.errors_of(done.stdout + chr(10) + done.stderr)}",
                hint="Run `dpkg --configure -a`, and then run this again.",
                code="half-configured",
            )

    def mend(self, files: Sequence[str], purge: Sequence[str]) -> None:
        """Repair an interrupted installation: install these files over broken packages, and purge the packages in ``purge``. Raises PackageProblem."""
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
                    f"An interrupted package operation cannot be finished: {apt_output.errors_of(done.stdout + chr(10) + done.stderr)}",
                    hint="Run `apt-get --fix-broken install`, and then run this again.",
                    code="half-configured",
                )

    def mark(self, verb: str, names: Sequence[str]) -> None:
        """Mark packages. The verb is ``hold``, ``unhold``, ``auto``, or ``manual``."""
        if names:
            self._said(["apt-mark", verb, *sorted(names)])

    def _act(self, argv: Sequence[str]) -> Completed:
        return self.system.run(argv, self.timeout, input="", environment=_QUIET, longest=LONGEST_INSTALLATION)

    def _said(self, argv: Sequence[str]) -> str:
        return _said(self.system, argv)


def read_installed(system: System) -> tuple[dict[str, str], list[str]]:
    """Return the installed packages with their versions, and the incomplete packages. Raises PackageProblem."""
    architecture = _said(system, ["dpkg", "--print-architecture"]).strip()
    database = [] if system.root == "/" else [f"--admindir={system.path(posixpath.dirname(STATUS))}"]
    return apt_output.parse_status(
        _said(system, ["dpkg-query", *database, "-W", f"--showformat={_FIELDS}"]), architecture
    )


def _said(system: System, argv: Sequence[str]) -> str:
    done = system.run(argv, QUERY_SECONDS, environment=_QUIET)
    if done.returncode:
        raise PackageProblem(
            f"{' '.join(argv[:2])} ended with {done.returncode}: {apt_output.errors_of(done.stdout + chr(10) + done.stderr)}"
        )
    return done.stdout
