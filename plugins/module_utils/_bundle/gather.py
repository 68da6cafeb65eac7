# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Download the contents of a plan to a directory: packages with apt or dnf, wheels with pip, and files. Existing files are kept."""

from __future__ import annotations

import posixpath
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._host.driver_installation import digest_of, last_words
from .._packages import apt_output, openpgp
from .._packages.apt_output import errors_of
from .._packages.interface import Change
from ..core.host.system import Completed, System
from . import apt_repository
from . import wheels as bundle_wheels
from .apt_repository import Archive, Stanza
from .bundle_manifest import FILE, IMAGE, INDEX, PACKAGE, WHEEL, BundleError, Item, digest_of_text
from .gather_rpm import RpmGatherer
from .platform import Means, PlatformGatherer
from .requirements import Plan, PlatformPlan, WheelsPlan, redacted
from .wheels import Wheel

#: Maximum number of pip runs to add requirements that pip's markers exclude.
_ROUNDS = 6


@dataclass(frozen=True)
class Gathered:
    """The gathered items with paths relative to the directory, and the digests of the requirement lists by wheelhouse key."""

    items: tuple[Item, ...]
    wheelhouses: Mapping[str, tuple[str, ...]]


class Gatherer:
    """Download the contents of a plan to a directory."""

    def __init__(self, system: System, folder: str, means: Means) -> None:
        self.system = system
        self.folder = folder
        self.means = means

    def gather(self, plan: Plan) -> Gathered:
        """Download all contents of a plan. Raises BundleError, KeyProblem, or OSError. Files that are complete by then stay for the next run."""
        items: list[Item] = []
        for platform in plan.platforms:
            kind = RpmGatherer if platform.platform.uses_rpm else AptGatherer
            items += kind(self.system, self.folder, self.means, platform).gather()
        wheels: dict[str, Item] = {}
        for each in plan.wheels:
            self._wheels(each, wheels)
        items += wheels.values()
        items += map(self._image, plan.images)
        items += [self._file(path, checksum) for path, checksum in plan.files]
        houses = {each.key: tuple(digest_of_text(text) for text in each.requirements) for each in plan.wheels}
        return Gathered(tuple(items), houses)

    # Wheels

    def _wheels(self, plan: WheelsPlan, items: dict[str, Item]) -> None:
        folder = Path(self.folder, "wheels")
        folder.mkdir(parents=True, exist_ok=True)
        target = bundle_wheels.target_options(plan.python, plan.machine)
        for text in plan.requirements:
            for wheel in self._download_wheels(self._resolved(plan, text, target), target, folder):
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
        """Return the wheels that pip would install. Requirements that the markers of pip's own Python exclude are added by name."""
        marker_environment = bundle_wheels.environment(plan.python, plan.machine)
        requested = bundle_wheels.select_requirements(bundle_wheels.requirement_lines(text), marker_environment)
        report = f"{self.folder}/pip-report.json"
        for _round in range(_ROUNDS):
            done = self._pip(
                ["install", "--dry-run", "--ignore-installed", f"--report={report}", f"--target={self.folder}/none"],
                [*target, *requested],
            )
            if done.returncode:
                raise BundleError(
                    f"pip finds no wheels for Python {plan.python} on {plan.machine}: {last_words(done.stderr)}",
                    hint="Check the index that pip is configured with and accelerator_bundle_pip_environment.",
                    code="pip",
                )
            wheels = bundle_wheels.read_report(self.system.read_text(report))
            self.system.remove(report)
            missing = bundle_wheels.find_missing_requirements(wheels, marker_environment)
            if not missing:
                bundle_wheels.check_digests(wheels, text)
                return wheels
            requested += missing
        raise BundleError(
            f"pip leaves out {', '.join(missing)} for Python {plan.python}, although they were requested by name",
            hint=f"Set accelerator_bundle_interpreter to an interpreter of that version, instead of {self.means.interpreter}.",
            code="pip",
        )

    def _download_wheels(self, wheels: Sequence[Wheel], target: Sequence[str], folder: Path) -> Sequence[Wheel]:
        """Download the wheels that are missing in a directory, and verify their digests against the index."""

        def is_downloaded(wheel: Wheel) -> bool:
            path = folder / wheel.file
            return path.is_file() and digest_of(self.system, str(path)) == wheel.sha256

        missing = [wheel for wheel in wheels if not is_downloaded(wheel)]
        for wheel in missing:
            self.system.remove(str(folder / wheel.file))
        if missing:
            words = [f"{wheel.name}=={wheel.version}" for wheel in missing]
            done = self._pip(["download", "--no-deps", f"--dest={folder}"], [*target, *words])
            if done.returncode:
                raise BundleError(f"pip cannot download the wheels: {last_words(done.stderr)}", code="pip")
        for wheel in missing:
            path = folder / wheel.file
            if not path.is_file():
                raise BundleError(f"pip did not download {wheel.file}, but another file", code="pip")
            if digest_of(self.system, str(path)) != wheel.sha256:
                raise BundleError(f"{wheel.file} has a different SHA-256 digest than in the index", code="checksum")
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

    # Images and files

    def _image(self, reference: str) -> Item:
        source = self.means.images.get(reference, "")
        if not source or not self.system.exists(source):
            raise BundleError(
                f"The image {reference} is required, but has no file",
                hint="The playbook bundle.yml builds the image and saves it as a file.",
                code="image",
            )
        path = self._copy_file(source, f"images/{reference.replace('/', '%')}.tar")
        name, _colon, tag = reference.rpartition(":")
        return self._item(
            path, IMAGE, reference, tag if name else "", "built on this machine", "nothing: it was built here"
        )

    def _file(self, source: str, checksum: str) -> Item:
        name = posixpath.basename(source)
        if not self.system.exists(source):
            raise BundleError(
                f"{source} does not exist on this host",
                hint="Download it from its vendor. The variables of the fleet contain its path.",
                code="file-missing",
            )
        if checksum and digest_of(self.system, source) != checksum:
            raise BundleError(f"The SHA-256 digest of {source} differs from the expected one", code="checksum")
        path = self._copy_file(source, f"files/{name}")
        verified = "the SHA-256 digest of the fleet's variables" if checksum else "nothing: there is no expected digest"
        return self._item(path, FILE, name, "", source, verified)

    def _copy_file(self, source: str, path: str) -> str:
        target = Path(self.folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or digest_of(self.system, str(target)) != digest_of(self.system, source):
            partial_path = target.with_name(f"{target.name}.partial")
            shutil.copyfile(source, partial_path)
            partial_path.replace(target)
        return path

    def _item(self, path: str, kind: str, name: str, version: str, source: str, verified: str) -> Item:
        place = Path(self.folder, path)
        digest = digest_of(self.system, str(place))
        return Item(path, kind, name, version, place.stat().st_size, digest, (), source, (), verified)


class AptGatherer(PlatformGatherer):
    """Download the packages of one platform with apt in a separate root directory."""

    def __init__(self, system: System, folder: str, means: Means, plan: PlatformPlan) -> None:
        super().__init__(system, folder, means, plan)
        self.root = f"{folder}/apt/{plan.platform.key}"
        self.archives: tuple[Archive, ...] = ()

    def gather(self) -> list[Item]:
        """Return the items of the platform, the index last. Raises BundleError, KeyProblem, or OSError."""
        if not self.system.finds("apt-get"):
            raise BundleError(
                f"Packages for {self.plan.platform} are required, but this host has no apt",
                hint="Create the bundle on any release of Debian or Ubuntu.",
                code="no-apt",
            )
        self.archives = apt_repository.archives(self.plan, self.means.mirrors)
        self._make_root()
        self._output_of(
            ["apt-get", "-q", "-o=APT::Update::Error-Mode=any", "update"],
            "A package source cannot be used",
            "Check its signature, its address, and the network connection.",
        )
        signers = self._signers()
        groups, available = self._groups()
        found: dict[str, None] = {}
        for group in groups:
            found.update(dict.fromkeys(apt_repository.wanted_words(self._foreseen(group), group, available)))
        words = sorted(found)
        stanzas = self._stanzas(words)
        self.files.mkdir(parents=True, exist_ok=True)
        self._download(stanzas)
        uris = apt_repository.parse_uris(
            self._output_of(["apt-get", "--print-uris", "download", *words], "apt does not list the URLs of packages")
        )
        items = [self._item(each, uris, signers) for each in stanzas]
        index = self.files / "Packages"
        index.write_text(apt_repository.index_text(stanzas), encoding="utf-8")
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
        # URIs of sources can contain passwords.
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        etc = root / "etc/apt"
        # Remove the sources and keys of an earlier plan.
        shutil.rmtree(etc, ignore_errors=True)
        for name in ("sources.list.d", "preferences.d", "keyrings", "trusted.gpg.d"):
            (etc / name).mkdir(parents=True)
        for name in ("var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg", "var/log/apt"):
            (root / name).mkdir(parents=True, exist_ok=True)
        status = self.system.read_text(self.plan.status) if self.plan.status else ""
        (root / "var/lib/dpkg/status").write_text(status, encoding="utf-8")
        (root / "apt.conf").write_text(apt_repository.root_settings(self.root, platform.architecture))
        for number, archive in enumerate(self.archives):
            if archive.keyring:
                signed_by = archive.keyring
                if not self.system.exists(signed_by):
                    raise apt_repository.keyring_problem(archive, platform)
            else:
                key = archive.key or self.means.fetch(archive.key_url)
                signed_by = str(etc / "keyrings" / f"{number}.asc")
                Path(signed_by).write_text(openpgp.checked_key(key, archive.fingerprints, ", ".join(archive.uris)))
            (etc / "sources.list.d" / f"{number}.sources").write_text(archive.stanza(signed_by))

    def _signers(self) -> dict[Archive, tuple[str, ...]]:
        """Return the key fingerprints that signed each source, which apt has verified. Raises BundleError if none of them is pinned."""
        lists = f"{self.root}/var/lib/apt/lists"
        found: dict[Archive, tuple[str, ...]] = {}
        for archive in self.archives:
            prefixes = tuple(apt_repository.list_prefix(uri) for uri in archive.uris)
            names = [
                name
                for name in self.system.list_directory(lists)
                if name.startswith(prefixes) and name.endswith(("InRelease", "Release.gpg"))
            ]
            keys = {key: None for name in names for key in openpgp.signers(self.system.read_text(f"{lists}/{name}"))}
            found[archive] = tuple(keys)
            pinned = {each.replace(" ", "").upper() for each in archive.fingerprints}
            if archive.keyring and pinned and not pinned & set(keys):
                raise BundleError(
                    f"{', '.join(archive.uris)} is signed by {', '.join(keys) or 'nobody'}, expected {' or '.join(sorted(pinned))}",
                    hint="No package was downloaded from it.",
                    code="repository-key",
                )
        return found

    def _available(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the available versions of packages, newest first."""
        requested = list(names)
        if not requested:
            return {}
        return apt_output.parse_available(self._output_of(["apt-cache", "madison", *requested], "apt-cache has failed"))

    def _foreseen(self, words: Sequence[str]) -> tuple[Change, ...]:
        output = self._output_of(
            ["apt-get", "-s", "--no-install-recommends", "install", *words],
            f"apt cannot install {' '.join(words)} for {self.plan.platform}",
        )
        return apt_output.parse_foreseen(output)

    def _stanzas(self, words: Sequence[str]) -> list[Stanza]:
        found = apt_repository.parse_stanzas(self._output_of(["apt-cache", "show", *words], "apt-cache has failed"))
        # If two sources have the same package, apt uses the first.
        by_word: dict[str, Stanza] = {}
        for stanza in found:
            by_word.setdefault(f"{stanza.name}={stanza.version}", stanza)
        missing = [word for word in words if self._bare(word) not in by_word]
        if missing:
            raise BundleError(f"apt-cache does not show {', '.join(missing)}", code="not-offered")
        return [by_word[self._bare(word)] for word in words]

    @staticmethod
    def _bare(word: str) -> str:
        name, _equals, version = word.partition("=")
        return f"{name.partition(':')[0]}={version}"

    def _download(self, stanzas: Sequence[Stanza]) -> None:
        """Download the missing package files, and verify their digests against the signed index."""

        def is_downloaded(each: Stanza) -> bool:
            path = self.files / apt_repository.file_name(each)
            return path.is_file() and digest_of(self.system, str(path)) == each.sha256

        missing = [each for each in stanzas if not is_downloaded(each)]
        if missing:
            words = [f"{each.name}={each.version}" for each in missing]
            fetch = 'cd "$1" && shift && exec apt-get -q download "$@"'
            self._output_of(["sh", "-c", fetch, "sh", str(self.files), *words], "Packages cannot be downloaded")
        for each in missing:
            if not is_downloaded(each):
                raise BundleError(
                    f"{apt_repository.file_name(each)} is not the file that the signed index names",
                    hint="Run this again. The mirror may have been in the middle of an update.",
                    code="checksum",
                )

    def _item(self, each: Stanza, uris: Mapping[str, str], signers: Mapping[Archive, tuple[str, ...]]) -> Item:
        name = apt_repository.file_name(each)
        uri = uris.get(name, "")
        archive = apt_repository.archive_of(uri, self.archives)
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

    def _output_of(self, argv: Sequence[str], what: str, hint: str = "") -> str:
        environment = {"APT_CONFIG": f"{self.root}/apt.conf", "DEBIAN_FRONTEND": "noninteractive"}
        done = self.system.run(argv, self.means.timeout, input="", environment=environment)
        if done.returncode:
            raise BundleError(f"{what}: {errors_of(done.stdout + chr(10) + done.stderr)}", hint=hint, code="packages")
        return done.stdout
