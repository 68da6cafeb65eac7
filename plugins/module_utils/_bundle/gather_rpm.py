# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Download the packages of an RPM platform with dnf in a separate root directory, and create their index."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .._host.driver_installation import digest_of, last_words
from .._packages import openpgp, rpm_output
from ..core.host.system import Completed, System
from . import rpm_repository
from .bundle_manifest import INDEX, PACKAGE, BundleError, Item
from .platform import Means, PlatformGatherer
from .requirements import PlatformPlan, redacted
from .rpm_repository import Repository

_BY_INDEX = "dnf: the signature of the repository's index, and the digest in it"
_BY_PACKAGE = "rpm: the package's own signature, by a key whose fingerprint is pinned"
_BY_BOTH = "dnf: the signature of the repository's index, and the digest in it; rpm: the package's own signature"


class RpmGatherer(PlatformGatherer):
    """Download the packages of one platform, for dnf and for zypper."""

    def __init__(self, system: System, folder: str, means: Means, plan: PlatformPlan) -> None:
        super().__init__(system, folder, means, plan)
        self.root = str(Path(folder, "rpm", plan.platform.key).absolute())
        self.repositories: tuple[Repository, ...] = ()

    def gather(self) -> list[Item]:
        """Return the items of the platform, those of the index last. Raises BundleError, KeyProblem, or OSError."""
        missing = [package for program, package in rpm_repository.PROGRAMS.items() if not self.system.finds(program)]
        if missing:
            raise BundleError(
                f"Packages for {self.plan.platform} are required, but this host lacks {', '.join(missing)}",
                hint="Debian, Ubuntu, Fedora, and the Red Hat distributions have these packages. Create the bundle on one of them.",
                code="no-dnf",
            )
        self.repositories = rpm_repository.repositories(self.plan, self.means.mirrors)
        self._make_root()
        self._output_of(
            ["-q", "-y", "makecache", "--refresh"],
            "A repository cannot be used",
            "Check its signature, its address, and the network connection. If only the packages are signed, set index_signed: false in the entry of "
            "accelerator_bundle_mirrors.",
        )
        groups, _available = self._groups()
        self.files.mkdir(parents=True, exist_ok=True)
        wanted: dict[tuple[str, str], str] = {}
        for group in groups:
            wanted.update(self._download_packages(group))
        paths = self._paths(wanted)
        places = self._addresses(wanted)
        items = [self._item(named, wanted[named], path, places) for named, path in sorted(paths.items())]
        return [*items, *self._index(sorted(path.name for path in paths.values()))]

    def _make_root(self) -> None:
        root = Path(self.root)
        # URIs of repositories can contain passwords.
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        # Remove the repositories and keys of an earlier plan, and the indexes that those keys signed.
        for name in ("repositories", "keys", "rpm", "system", "cache", "state", "log"):
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(parents=True)
        for each in self.repositories:
            key = each.key or (
                self.system.read_text(each.key_file) if each.key_file else self.means.fetch(each.key_url)
            )
            path = root / "keys" / f"{each.name}.asc"
            path.write_text(openpgp.checked_key(key, each.fingerprints, ", ".join(each.uris)), encoding="ascii")
            (root / "repositories" / f"{each.name}.repo").write_text(each.text(str(path)), encoding="utf-8")
            if each.packages_signed:
                # Each repository has its own keyring, so that a vendor's key is not valid for other vendors' packages.
                ring = root / "rpm" / each.name
                ring.mkdir()
                done = self._run(["rpmkeys", f"--dbpath={ring}", "--import", str(path)])
                if done.returncode:
                    raise BundleError(
                        f"rpm cannot read the key of {', '.join(each.uris)}: {last_words(done.stderr)}",
                        code="repository-key",
                    )

    def _available(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        requested = list(names)
        if not requested:
            return {}
        words = ["-q", "repoquery", "--available", "--showduplicates", "--qf", "%{name}\t%{evr}", *requested]
        return rpm_output.parse_versions(self._output_of(words, "dnf does not list the packages of the repositories"))

    def _download_packages(self, group: Sequence[str]) -> dict[tuple[str, str], str]:
        """Download the packages that an empty system would install. Files that match the index are not downloaded again."""
        specs = [rpm_repository.spec(word) for word in group]
        foreseen = self._dnf(["--assumeno", "install", *specs])
        reason = rpm_output.dnf_errors(f"{foreseen.stdout}\n{foreseen.stderr}")
        found = rpm_repository.files_of(rpm_output.parse_transaction(foreseen.stdout, {}))
        if reason or not found:
            raise BundleError(
                f"dnf cannot install {' '.join(group)} for {self.plan.platform}: {reason or last_words(foreseen.stderr)}",
                hint="Add the repositories of the distribution that have the dependencies to accelerator_bundle_mirrors.",
                code="packages",
            )
        self._output_of(
            ["-q", "-y", "install", "--downloadonly", f"--downloaddir={self.files}", *specs],
            "Packages cannot be downloaded",
        )
        return found

    def _paths(self, wanted: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], Path]:
        found = {
            named: path for path in self.files.glob("*.rpm") if (named := rpm_output.name_of_file(path.name)) in wanted
        }
        missing = [f"{name}-{version}" for name, version in wanted if (name, version) not in found]
        if missing:
            raise BundleError(f"dnf did not download {', '.join(missing)}", code="packages")
        return {named: path for named, path in found.items() if named}

    def _addresses(self, wanted: Mapping[tuple[str, str], str]) -> dict[str, str]:
        specs = [f"{name}-{version}" for (name, _file), version in wanted.items()]
        if not specs:
            return {}
        return rpm_repository.addresses(
            self._output_of(
                ["-q", "repoquery", "--available", "--location", *specs], "dnf does not list the URLs of packages"
            )
        )

    def _item(self, named: tuple[str, str], version: str, path: Path, places: Mapping[str, str]) -> Item:
        """Return a package after verifying its signature. Raises BundleError if it is not valid."""
        address = places.get(path.name, "")
        source = rpm_repository.repository_of(address, self.repositories)
        if source is None:
            raise BundleError(
                f"No repository contains {path.name}",
                hint="Run this again. The mirror may have been in the middle of an update.",
                code="packages",
            )
        signed_by: tuple[str, ...] = tuple(each.replace(" ", "").upper() for each in source.fingerprints)
        verified = _BY_INDEX
        if source.packages_signed:
            signed_by = self._signers(source, path, signed_by)
            verified = _BY_BOTH if source.index_signed else _BY_PACKAGE
        place = self.plan.platform.key
        size, digest = path.stat().st_size, digest_of(self.system, str(path))
        return Item(
            f"{self.path}/{path.name}",
            PACKAGE,
            named[0],
            version,
            size,
            digest,
            (place,),
            redacted(address),
            signed_by,
            verified,
        )

    def _signers(self, source: Repository, path: Path, trusted: Sequence[str]) -> tuple[str, ...]:
        argv = [
            "rpmkeys",
            f"--dbpath={self.root}/rpm/{source.name}",
            "--define=_pkgverify_level all",
            "--checksig",
            "--verbose",
            str(path),
        ]
        done = self._run(argv)
        found = rpm_repository.signers(done.stdout, trusted)
        if done.returncode or not found:
            path.unlink()
            problems = " | ".join(
                line.strip() for line in done.stdout.splitlines()[1:] if not line.rstrip().endswith("OK")
            )
            raise BundleError(
                f"{path.name} of {', '.join(source.uris)} has no valid signature by {' or '.join(trusted)}: {problems or 'it is not signed'}",
                hint="The package was deleted. If the vendor signs only the index, set packages_signed: false.",
                code="signature",
            )
        return found

    def _index(self, names: Sequence[str]) -> list[Item]:
        """Create the index of these files. Equal files yield an equal index."""
        shutil.rmtree(self.files / "repodata", ignore_errors=True)
        for name in names:
            os.utime(self.files / name, (0, 0))
        list_path = Path(self.root, "packages")
        list_path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        words = ["--quiet", "--no-database", "--simple-md-filenames", "--revision=1", "--set-timestamp-to-revision"]
        done = self._run(["createrepo_c", *words, f"--pkglist={list_path}", str(self.files)])
        if done.returncode:
            raise BundleError(f"createrepo_c did not create an index: {last_words(done.stderr)}", code="packages")
        place = (self.plan.platform.key,)
        return [
            Item(
                f"{self.path}/repodata/{path.name}",
                INDEX,
                path.name,
                "",
                path.stat().st_size,
                digest_of(self.system, str(path)),
                place,
                "made here",
                (),
                "made of the packages that were verified",
            )
            for path in sorted((self.files / "repodata").iterdir())
        ]

    # Commands

    def _dnf(self, words: Sequence[str]) -> Completed:
        return self._run(["dnf", *rpm_repository.options(self.root, self.plan.platform), *words])

    def _output_of(self, words: Sequence[str], what: str, hint: str = "") -> str:
        done = self._dnf(words)
        if done.returncode:
            reason = rpm_output.dnf_errors(f"{done.stdout}\n{done.stderr}") or last_words(
                f"{done.stdout}\n{done.stderr}"
            )
            raise BundleError(f"{what}: {reason}", hint=hint, code="packages")
        return done.stdout

    def _run(self, argv: Sequence[str]) -> Completed:
        return self.system.run(argv, self.means.timeout, input="")
