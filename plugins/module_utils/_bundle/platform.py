# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Define the common part of downloading apt and RPM packages: the tools, and the packages for the plan of a platform."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._nvidia_host.driver_catalog import not_offered
from ..core.host.system import System
from .bundle_manifest import BundleError, Item
from .requirements import DriverNeed, PlatformPlan


@dataclass(frozen=True)
class Means:
    """The tools of a download: the interpreter for pip, distribution mirrors, image files by name, and a function that downloads a key."""

    interpreter: str
    fetch: Callable[[str], str]
    mirrors: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    pip_environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 3600.0


class PlatformGatherer(ABC):
    """Download the packages of one platform. Subclasses implement one package format."""

    def __init__(self, system: System, folder: str, means: Means, plan: PlatformPlan) -> None:
        self.system = system
        self.means = means
        self.plan = plan
        self.path = f"packages/{plan.platform.key}"
        self.files = Path(folder, self.path)

    @abstractmethod
    def gather(self) -> list[Item]:
        """Return the items of the platform, the index last. Raises BundleError, KeyProblem, or OSError."""

    @abstractmethod
    def _available(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the available versions of packages, newest first."""

    def _groups(self) -> tuple[list[list[str]], dict[str, tuple[str, ...]]]:
        """Return the groups of packages to install together, as ``name=version`` or ``name``, and the available versions. Raises BundleError."""
        asked = {name: None for group in self.plan.groups for name in group}
        asked.update({name: None for driver in self.plan.drivers for name in driver.names()})
        available = self._available(asked)
        lacking = [name for group in self.plan.groups for name in group if name not in available]
        lacking += [name for driver in self.plan.drivers for name in driver.header_words(available)[1]]
        if lacking:
            raise BundleError(
                f"No source of {self.plan.platform} has {', '.join(dict.fromkeys(lacking))}",
                hint="For headers, the kernel of accelerator_platform has to be one that the sources still have.",
                code="not-offered",
            )
        groups = [list(group) for group in self.plan.groups]
        versions: list[str] = []
        for driver in self.plan.drivers:
            groups += self._driver_groups(driver, available, versions)
        return groups + self._companion_groups(versions), available

    def _companion_groups(self, of_drivers: Sequence[str]) -> list[list[str]]:
        """Return the groups of packages with one version, which can be the version of the chosen drivers."""
        found = []
        for need in self.plan.companions:
            for version in need.versions(of_drivers):
                available = self._available(need.names(version))
                words = need.words(version, available)
                if not words:
                    has = "; ".join(f"{name}: {', '.join(each[:4])}" for name, each in available.items())
                    raise BundleError(
                        f"No source of {self.plan.platform} has {need} {version}".rstrip()
                        + f"; there is {has or 'none'}",
                        hint=f"Check the variables of the role {need.of}.",
                        code="not-offered",
                    )
                found.append(words)
        return found

    def _driver_groups(
        self, driver: DriverNeed, available: Mapping[str, Sequence[str]], versions: list[str]
    ) -> list[list[str]]:
        choices = driver.choices(available)
        if not choices:
            raise not_offered(driver.offers(), driver.wanted, available)
        versions += [choice.version for choice in choices]
        headers, _none = driver.header_words(available)
        return [
            [*(f"{name}={version}" if version else name for name, version in choice.packages.items()), *headers]
            for choice in choices
        ]
