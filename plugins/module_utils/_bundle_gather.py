# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Gathers what a plan names into a folder: packages by apt or dnf, wheels by pip, files. What is there already is not fetched again."""

from __future__ import annotations

import posixpath
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import _apt, _bundle_packages, _bundle_wheels, _openpgp
from ._apt import errors_of
from ._bundle_manifest import FILE, IMAGE, INDEX, PACKAGE, WHEEL, BundleError, Item, digest_of_text
from ._bundle_needs import Plan, PlatformPlan, WheelsPlan, redacted
from ._bundle_packages import Archive, Stanza
from ._bundle_platform import Means, PlatformGatherer
from ._bundle_rpm_gather import RpmGatherer
from ._bundle_wheels import Wheel
from ._driver_install import digest_of, last_words
from ._package_port import Change
from .core.system import Completed, System

#: How often pip is asked once more because of what its markers have left out.
_ROUNDS = 6


@dataclass(frozen=True)
class Gathered:
    """What was gathered: items with paths below the folder, and by Python the digests of the lists that its wheels are for."""

    items: tuple[Item, ...]
    wheelhouses: Mapping[str, tuple[str, ...]]


class Gatherer:
    """Fills a folder with what a plan names."""

    def __init__(self, system: System, folder: str, means: Means) -> None:
        self.system = system
        self.folder = folder
        self.means = means

    def gather(self, plan: Plan) -> Gathered:
        """Gather all of a plan. Raises BundleError, KeyProblem or OSError; what is there by then is kept for the next time."""
        items: list[Item] = []
        for platform in plan.platforms:
            kind = RpmGatherer if platform.platform.uses_rpm else AptGatherer
            items += kind(self.system, self.folder, self.means, platform).gather()
        wheels: dict[str, Item] = {}
        for each in plan.wheels:
            self._wheels(each, wheels)
        items += wheels.values()
        if plan.image:
            items.append(self._image(plan.image))
        items += [self._file(path, checksum) for path, checksum in plan.files]
        houses = {each.key: tuple(digest_of_text(text) for text in each.requirements) for each in plan.wheels}
        return Gathered(tuple(items), houses)

    # Wheels

    def _wheels(self, plan: WheelsPlan, items: dict[str, Item]) -> None:
        folder = Path(self.folder, "wheels")
        folder.mkdir(parents=True, exist_ok=True)
        target = _bundle_wheels.target_words(plan.python, plan.machine)
        for text in plan.requirements:
            for wheel in self._fetched(self._resolved(plan, text, target), target, folder):
                path = f"wheels/{wheel.file}"
                digest = digest_of(self.system, str(folder / wheel.file))
                places = items[path].places if path in items else ()
                items[path] = Item(
                    path,
                    WHEEL,
                    wheel.name,
                    wheel.version,
                    (folder / wheel.file).stat().st_size,
                    digest,
                    tuple(dict.fromkeys((*places, plan.key))),
                    wheel.source,
                    (),
                    "the SHA-256 digest of the index",
                )

    def _resolved(self, plan: WheelsPlan, text: str, target: Sequence[str]) -> tuple[Wheel, ...]:
        """Have pip say what it would install; what its own Python's markers have left out is asked for by name."""
        marks = _bundle_wheels.environment(plan.python, plan.machine)
        asked = _bundle_wheels.applying(_bundle_wheels.requirement_lines(text), marks)
        report = f"{self.folder}/pip-report.json"
        for _round in range(_ROUNDS):
            done = self._pip(
                ["install", "--dry-run", "--ignore-installed", f"--report={report}", f"--target={self.folder}/none"],
                [*target, *asked],
            )
            if done.returncode:
                raise BundleError(
                    f"pip finds no wheels for Python {plan.python} on {plan.machine}: {last_words(done.stderr)}",
                    hint="Look at the index that pip is configured with, and at accelerator_bundle_pip_environment.",
                    code="pip",
                )
            wheels = _bundle_wheels.read_report(self.system.read_text(report))
            self.system.remove(report)
            lacking = _bundle_wheels.still_lacking(wheels, marks)
            if not lacking:
                _bundle_wheels.check_digests(wheels, text)
                return wheels
            asked += lacking
        raise BundleError(
            f"pip leaves out {', '.join(lacking)} for Python {plan.python}, also when it is asked for them by name",
            hint=f"Name an interpreter of that version in accelerator_bundle_interpreter, in place of {self.means.interpreter}.",
            code="pip",
        )

    def _fetched(self, wheels: Sequence[Wheel], target: Sequence[str], folder: Path) -> Sequence[Wheel]:
        """Have all these wheels in a folder, each with the digest that the index gives."""

        def is_there(wheel: Wheel) -> bool:
            path = folder / wheel.file
            return path.is_file() and digest_of(self.system, str(path)) == wheel.sha256

        lacking = [wheel for wheel in wheels if not is_there(wheel)]
        for wheel in lacking:
            self.system.remove(str(folder / wheel.file))
        if lacking:
            words = [f"{wheel.name}=={wheel.version}" for wheel in lacking]
            done = self._pip(["download", "--no-deps", f"--dest={folder}"], [*target, *words])
            if done.returncode:
                raise BundleError(f"pip cannot fetch the wheels: {last_words(done.stderr)}", code="pip")
        for wheel in lacking:
            path = folder / wheel.file
            if not path.is_file():
                raise BundleError(f"pip was to fetch {wheel.file}, and has fetched another file", code="pip")
            if digest_of(self.system, str(path)) != wheel.sha256:
                raise BundleError(f"{wheel.file} has another SHA-256 digest than the index gives", code="checksum")
        return wheels

    def _pip(self, verb: Sequence[str], words: Sequence[str]) -> Completed:
        argv = [
            self.means.interpreter,
            "-I",
            "-m",
            "pip",
            *verb,
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
        ]
        return self.system.run([*argv, *words], self.means.timeout, environment=self.means.pip_environment)

    # What comes as a file

    def _image(self, reference: str) -> Item:
        if not self.means.image or not self.system.exists(self.means.image):
            raise BundleError(
                f"The image {reference} is wanted, and there is no file of it",
                hint="The playbook bundle.yml builds and saves it.",
                code="image",
            )
        path = self._taken(self.means.image, "images/image.tar")
        name, _colon, tag = reference.rpartition(":")
        return self._item(
            path, IMAGE, reference, tag if name else "", "built on this machine", "nothing: it was built here"
        )

    def _file(self, source: str, checksum: str) -> Item:
        name = posixpath.basename(source)
        if not self.system.exists(source):
            raise BundleError(
                f"{source} is not on this machine",
                hint="Fetch it from its vendor; it is named in the fleet's variables.",
                code="file-missing",
            )
        if checksum and digest_of(self.system, source) != checksum:
            raise BundleError(f"{source} has another SHA-256 digest than the one that was given", code="checksum")
        path = self._taken(source, f"files/{name}")
        verified = "the SHA-256 digest of the fleet's variables" if checksum else "nothing: no digest was given"
        return self._item(path, FILE, name, "", source, verified)

    def _taken(self, source: str, path: str) -> str:
        target = Path(self.folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or digest_of(self.system, str(target)) != digest_of(self.system, source):
            aside = target.with_name(f"{target.name}.partial")
            shutil.copyfile(source, aside)
            aside.replace(target)
        return path

    def _item(self, path: str, kind: str, name: str, version: str, source: str, verified: str) -> Item:
        place = Path(self.folder, path)
        digest = digest_of(self.system, str(place))
        return Item(path, kind, name, version, place.stat().st_size, digest, (), source, (), verified)


class AptGatherer(PlatformGatherer):
    """Gathers the packages of one platform, by an apt whose root is a folder of its own."""

    def __init__(self, system: System, folder: str, means: Means, plan: PlatformPlan) -> None:
        super().__init__(system, folder, means, plan)
        self.root = f"{folder}/apt/{plan.platform.key}"
        self.archives: tuple[Archive, ...] = ()

    def gather(self) -> list[Item]:
        """Return the items of the platform, the index last. Raises BundleError, KeyProblem or OSError."""
        if not self.system.finds("apt-get"):
            raise BundleError(
                f"Packages for {self.plan.platform} are wanted, and this machine has no apt",
                hint="Make the bundle on Debian or Ubuntu, of any release.",
                code="no-apt",
            )
        self.archives = _bundle_packages.archives(self.plan, self.means.mirrors)
        self._make_root()
        self._said(
            ["apt-get", "-q", "-o=APT::Update::Error-Mode=any", "update"],
            "A package source cannot be used",
            "Its signature, its address and the way there count.",
        )
        signers = self._signers()
        groups, available = self._groups()
        found: dict[str, None] = {}
        for group in groups:
            found.update(dict.fromkeys(_bundle_packages.wanted_words(self._foreseen(group), group, available)))
        words = sorted(found)
        stanzas = self._stanzas(words)
        self.files.mkdir(parents=True, exist_ok=True)
        self._download(stanzas)
        uris = _bundle_packages.parse_uris(
            self._said(["apt-get", "--print-uris", "download", *words], "apt does not say where packages come from")
        )
        items = [self._item(each, uris, signers) for each in stanzas]
        index = self.files / "Packages"
        index.write_text(_bundle_packages.index_text(stanzas), encoding="utf-8")
        digest = digest_of(self.system, str(index))
        place = self.plan.platform.key
        verified = "made of the signed indexes of the sources"
        path = f"{self.path}/Packages"
        return [
            *items,
            Item(path, INDEX, "Packages", "", index.stat().st_size, digest, (place,), "made here", (), verified),
        ]

    def _make_root(self) -> None:
        root, platform = Path(self.root), self.plan.platform
        # Addresses of sources can have passwords.
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        etc = root / "etc/apt"
        # What an earlier plan had of sources and keys goes.
        shutil.rmtree(etc, ignore_errors=True)
        for name in ("sources.list.d", "preferences.d", "keyrings", "trusted.gpg.d"):
            (etc / name).mkdir(parents=True)
        for name in ("var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg", "var/log/apt"):
            (root / name).mkdir(parents=True, exist_ok=True)
        status = self.system.read_text(self.plan.status) if self.plan.status else ""
        (root / "var/lib/dpkg/status").write_text(status, encoding="utf-8")
        (root / "apt.conf").write_text(_bundle_packages.root_settings(self.root, platform.architecture))
        for number, archive in enumerate(self.archives):
            if archive.keyring:
                signed_by = archive.keyring
                if not self.system.exists(signed_by):
                    raise _bundle_packages.keyring_problem(archive, platform)
            else:
                key = archive.key or self.means.fetch(archive.key_url)
                signed_by = str(etc / "keyrings" / f"{number}.asc")
                Path(signed_by).write_text(_openpgp.checked_key(key, archive.fingerprints, ", ".join(archive.uris)))
            (etc / "sources.list.d" / f"{number}.sources").write_text(archive.stanza(signed_by))

    def _signers(self) -> dict[Archive, tuple[str, ...]]:
        """Return by source whose keys have signed it; apt has verified that. Raises BundleError where others were pinned."""
        lists = f"{self.root}/var/lib/apt/lists"
        found: dict[Archive, tuple[str, ...]] = {}
        for archive in self.archives:
            prefixes = tuple(_bundle_packages.list_prefix(uri) for uri in archive.uris)
            names = [
                name
                for name in self.system.list_directory(lists)
                if name.startswith(prefixes) and name.endswith(("InRelease", "Release.gpg"))
            ]
            keys = {key: None for name in names for key in _openpgp.signers(self.system.read_text(f"{lists}/{name}"))}
            found[archive] = tuple(keys)
            pinned = {each.replace(" ", "").upper() for each in archive.fingerprints}
            if archive.keyring and pinned and not pinned & set(keys):
                raise BundleError(
                    f"{', '.join(archive.uris)} is signed by {', '.join(keys) or 'nobody'}, expected {' or '.join(sorted(pinned))}",
                    hint="Nothing was taken from it.",
                    code="repository-key",
                )
        return found

    def _available(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return which versions of packages the sources have, the newest first."""
        asked = list(names)
        if not asked:
            return {}
        return _apt.parse_available(self._said(["apt-cache", "madison", *asked], "apt-cache has failed"))

    def _foreseen(self, words: Sequence[str]) -> tuple[Change, ...]:
        said = self._said(
            ["apt-get", "-s", "--no-install-recommends", "install", *words],
            f"apt finds no way to {' '.join(words)} for {self.plan.platform}",
        )
        return _apt.parse_foreseen(said)

    def _stanzas(self, words: Sequence[str]) -> list[Stanza]:
        found = _bundle_packages.parse_stanzas(self._said(["apt-cache", "show", *words], "apt-cache has failed"))
        # Two sources may have the same package; apt takes the first.
        by_word: dict[str, Stanza] = {}
        for stanza in found:
            by_word.setdefault(f"{stanza.name}={stanza.version}", stanza)
        lacking = [word for word in words if self._bare(word) not in by_word]
        if lacking:
            raise BundleError(f"apt-cache does not show {', '.join(lacking)}", code="not-offered")
        return [by_word[self._bare(word)] for word in words]

    @staticmethod
    def _bare(word: str) -> str:
        name, _equals, version = word.partition("=")
        return f"{name.partition(':')[0]}={version}"

    def _download(self, stanzas: Sequence[Stanza]) -> None:
        """Have the files of packages, each with the digest that the signed index has."""

        def is_there(each: Stanza) -> bool:
            path = self.files / _bundle_packages.file_name(each)
            return path.is_file() and digest_of(self.system, str(path)) == each.sha256

        lacking = [each for each in stanzas if not is_there(each)]
        if lacking:
            words = [f"{each.name}={each.version}" for each in lacking]
            fetch = 'cd "$1" && shift && exec apt-get -q download "$@"'
            self._said(["sh", "-c", fetch, "sh", str(self.files), *words], "Packages cannot be fetched")
        for each in lacking:
            if not is_there(each):
                raise BundleError(
                    f"{_bundle_packages.file_name(each)} is not the file that the signed index names",
                    hint="Run this again; a mirror may be about to change.",
                    code="checksum",
                )

    def _item(self, each: Stanza, uris: Mapping[str, str], signers: Mapping[Archive, tuple[str, ...]]) -> Item:
        name = _bundle_packages.file_name(each)
        uri = uris.get(name, "")
        archive = _bundle_packages.archive_of(uri, self.archives)
        size = (self.files / name).stat().st_size
        verified = "apt: the signature of the source, its index, and the SHA-256 digest"
        return Item(
            f"{self.path}/{name}",
            PACKAGE,
            each.name,
            each.version,
            size,
            each.sha256,
            (self.plan.platform.key,),
            redacted(uri),
            signers.get(archive, ()) if archive else (),
            verified,
        )

    def _said(self, argv: Sequence[str], what: str, hint: str = "") -> str:
        environment = {"APT_CONFIG": f"{self.root}/apt.conf", "DEBIAN_FRONTEND": "noninteractive"}
        done = self.system.run(argv, self.means.timeout, input="", environment=environment)
        if done.returncode:
            raise BundleError(f"{what}: {errors_of(done.stdout + chr(10) + done.stderr)}", hint=hint, code="packages")
        return done.stdout
