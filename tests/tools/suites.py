# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run test suites by name: lint, release, unit, simulator, cluster, molecule, prove, bench; molecule=NAME runs one scenario.

All requested suites run to their end, even after failures. Suites with a cluster run in parallel with the others, which
get a lower priority: a cluster mostly waits, a linter never does. The run ends with a table, the ten slowest tests, and
one summary line. The exit status is 0 only if everything passed.

With the suite `prove`, the tests with the marker `prove` (long and exhaustive ones) run in all requested suites.

Passed steps are recorded with the content of all files (ledger.py). With --go-on, steps that passed with the same files
do not run again, for example after an interrupted run. The table marks these steps. With --part 2/3 only the second of
three parts runs, for a run on several machines. Together the parts are the complete run (parts.py).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gates import gates, release_gates
from ledger import FOLDER_VARIABLE, GO_ON_VARIABLE, Ledger, Passed
from parts import Part
from steps import (
    ROOT,
    Counts,
    Result,
    Step,
    cache,
    duration,
    print_failed,
    print_slowest,
    print_table,
    run_steps,
    say,
    tool_environment,
    total,
)

#: Usual times with the long tests, used to divide a run and to inform the user.
LONG_USUAL = {"cluster": "100 min", "simulator": "8 min", "unit": "40 min"}
#: One test process per processor, for tests that share only the sources.
PARALLEL = ("-n", "auto", "--dist", "worksteal")
#: One process more than processors, for tests of which many wait.
WAITING = ("-n", str((os.cpu_count() or 1) + 1), "--dist", "worksteal")
#: Cancels the selection in pyproject.toml, which leaves out the tests marked `prove`.
EVERYTHING = ("-m", "")
#: The heading of a run's figures, which are shown at its end.
FIGURES = "Figures of this run"
#: Separate lanes. One has the oracles, molecule, and the steps of `make prove` with their own worlds. Chaos has the
#: last one, because most of it takes a fixed time and no other suite should wait for it.
BUILD_LANE, CLUSTER_LANE, MACHINES_LANE, CHAOS_LANE = "build", "cluster", "machines", "chaos"
#: The command prefix of steps that run in parallel with a cluster. They never wait, so they would use all processor
#: time that the cluster needs.
GIVING_WAY = (ROOT / "tests/tools/give_way",)
#: Steps with normal priority: clusters, the build that they need, and the importer, which limits its linters to three
#: minutes.
FIRST = frozenset({"world build", "cluster", "prove", "galaxy-importer"})
CHAOS = (sys.executable, "-m", "tests.chaos")
#: The minimum numbers of kills of each kind and of requests for a proof of the node driver. The time limit (seconds) is
#: longer than a slow machine needs in parallel with the other suites: it reached 107 kills of daemons in 900 s.
CHAOS_FLOORS = (
    *("--vendor", "nvidia", "--runs", "200", "--least", "200", "--requests", "100000", "--least-requests", "100000"),
    *("--seconds", "2400", "--fuzz-seconds", "2700", "--parallel", "2"),
)
#: Molecule scenarios of two minutes or more, which `make test` leaves to `make prove`.
LONG_SCENARIOS = frozenset(
    {
        "ascend_driver",
        "ascend_runtime",
        "ascend_vnpu",
        "container_runtime",
        "device_classes",
        "device_plugin_migration",
        "dra_controller",
        "dra_driver",
        "driver_image",
        "machine_restart",
        "monitoring",
        "node_features",
        "nvidia_container_toolkit",
        "nvidia_driver",
        "nvidia_fabric_manager",
        "nvidia_mig",
        "nvidia_settings",
        "offline",
        "preflight",
        "python_environment",
    }
)
#: Scenarios with programs that are not part of any world.
NEED_ORACLES = frozenset({"ascend_runtime", "container_runtime"})


def pytest_step(
    name: str, usual: str, folder: str, remedy: str, reports: Path, options: Sequence[str] = (), lane: str = ""
) -> Step:
    """Return the step that runs the tests below a directory with pytest."""
    report = reports / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", folder, "-v", "--tb=short", f"--junitxml={report}"]
    command += options
    return Step(name, usual, command, junit=report, remedy=remedy, lane=lane)


def unit(work: Path) -> list[Step]:
    """Return the tests without a cluster."""
    remedy = "run one test alone with `<cache>/venv/bin/python -m pytest tests/unit -k NAME`."
    return [pytest_step("unit", "15 min alone", "tests/unit", remedy, work / "reports", WAITING)]


def simulator(work: Path) -> list[Step]:
    """Return the tests of the simulated library under sanitizers, and of programs and the backend that use it."""
    remedy = "they need gcc and root; run one alone with `<cache>/venv/bin/python -m pytest tests/simulator -k NAME`."
    return [pytest_step("simulator", "6 min alone", "tests/simulator", remedy, work / "reports", PARALLEL)]


def build_step(what: str, usual: str, after: Sequence[str] = ()) -> Step:
    """Return the step that builds a part of the test world: ``world`` or ``oracle``."""
    return Step(
        f"{what} build",
        usual,
        [ROOT / "tests/world/world", "build", "--only", f"{what}s"],
        remedy="read the log. Run `tests/world/world build` to continue.",
        after=tuple(after),
        lane=BUILD_LANE,
        always=True,
    )


def world_build() -> Step:
    """Return the step that builds the worlds. It runs in parallel with steps that do not need them."""
    return build_step("world", "10 min cold, a few seconds warm")


def oracle_build() -> Step:
    """Return the step that builds the oracle programs. No world needs them."""
    return build_step("oracle", "4 min cold, a second warm", after=["world build"])


def cluster(work: Path) -> list[Step]:
    """Return the tests on the real cluster."""
    build = world_build()
    remedy = "keep the world with DRA_ACCELERATORS_KEEP_WORLD=1 and look around with `tests/world/world status`."
    run = pytest_step(
        "cluster", "20 min alone, 30 in parallel", "tests/cluster", remedy, work / "reports", lane=CLUSTER_LANE
    )
    remedy = "they need root and unshare; read the log."
    oracles = pytest_step("oracles", "2 min alone", "tests/oracles", remedy, work / "reports", lane=MACHINES_LANE)
    return [build, *(replace(each, after=(build.name,)) for each in (oracles, run))]


def scenarios() -> list[str]:
    """Return the molecule scenarios. `default` only creates and destroys the shared instance."""
    return sorted(
        path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml") if path.parent.name != "default"
    )


def molecule(_work: Path) -> list[Step]:
    """Return one step for each short molecule scenario, after the removal of the instance that a killed run left behind."""
    return molecule_steps([name for name in scenarios() if name not in LONG_SCENARIOS])


def molecule_steps(names: Sequence[str]) -> list[Step]:
    """Return the steps that the scenarios in ``names`` need, and one step for each of them."""
    needed = [world_build()]
    if NEED_ORACLES.intersection(names):
        needed.append(oracle_build())
    removal = Step(
        "molecule destroy",
        "5 s",
        ["molecule", "destroy", "--scenario-name", "default"],
        remedy="see what `docker ps --all` says of the instance.",
        after=(needed[0].name,),
        lane=MACHINES_LANE,
        always=True,
    )
    return [*needed, removal] + [
        Step(
            f"molecule {scenario}",
            "2 min",
            ["molecule", "test", "--scenario-name", scenario],
            remedy=f"run `molecule converge -s {scenario}` and `molecule login -s {scenario}` to look at the instance.",
            after=(removal.name, *(step.name for step in needed if scenario in NEED_ORACLES)),
            lane=MACHINES_LANE,
        )
        for scenario in names
    ]


def prove(work: Path) -> list[Step]:
    """Return long tests that no other suite has: separate worlds, other versions, and long runs."""
    build = world_build()
    step = pytest_step(
        *("prove", "4 h", "tests/prove", "read the log; GO_ON=1 leaves out the modules that have passed."),
        work / "reports",
        ("-p", "tests.tools.remembering"),
        lane=MACHINES_LANE,
    )
    step = replace(step, modules=tuple(f"tests/prove/{path.name}" for path in (ROOT / "tests/prove").glob("test_*.py")))
    breaks = Step(
        "breaks",
        "10 min",
        [sys.executable, ROOT / "tests/tools/break_product.py"],
        remedy="a test that stays green with the product broken proves nothing: mend it, or the list in break_product.py.",
    )
    chaos = Step(
        "chaos",
        "2 h in parallel",
        [*CHAOS, *CHAOS_FLOORS],
        remedy="each case that went wrong says how to see it again; `short of` says that there was too little time for a proof.",
        show="Chaos of seed",
        lane=CHAOS_LANE,
    )
    # Ten minutes under load, with one driver that runs for all of them and one that restarts in the middle.
    without_api = replace(
        chaos,
        name="chaos without an API server",
        usual="11 min",
        command=[*CHAOS, *("--faults", "api-away", "--cases", "2", "--away", "600", "--seconds", "900")],
    )
    of_npus = replace(
        chaos,
        name="chaos of NPUs",
        usual="25 min",
        command=[*CHAOS, "--vendor", "ascend", "--seconds", "60", "--fuzz-seconds", "300"],
    )
    # A vNPU with a number instead of a place and a group differs in each kind and fault: a short run of each is enough.
    of_numbers = replace(
        chaos,
        name="chaos of numbered NPUs",
        usual="10 min",
        command=[*CHAOS, "--vendor", "ascend-910a", "--seconds", "20", "--fuzz-seconds", "30"],
    )
    of_older = replace(
        of_numbers,
        name="chaos of an older NPU driver",
        usual="6 min",
        command=[*CHAOS, "--vendor", "ascend-older", "--seconds", "10", "--fuzz-seconds", "15"],
    )
    long = molecule_steps([name for name in scenarios() if name in LONG_SCENARIOS])
    fleet = pytest_step(
        *("fleet", "6 min alone, 20 in parallel", "tests/bench/test_fleet.py"),
        "make it smaller with DRA_ACCELERATORS_FLEET_NODES, and read the log.",
        work / "reports",
        lane=MACHINES_LANE,
    )
    fleet = replace(fleet, command=[*fleet.command, "-s"], show=FIGURES, after=(build.name,))
    # They need no world, because they generate fleets and traces of claims.
    planner = pytest_step("planner", "4 min", "tests/bench/test_planner.py", "read the log.", work / "reports")
    order = pytest_step("order", "1 min", "tests/bench/test_order.py", "read the log.", work / "reports")
    report = pytest_step(
        *("report", "10 min alone", "tests/bench/test_report.py"),
        "make it smaller with DRA_ACCELERATORS_FLEET_NODES, and read the log.",
        work / "reports",
    )
    return [
        build,
        breaks,
        chaos,
        without_api,
        of_npus,
        of_numbers,
        of_older,
        *long,
        replace(step, after=(build.name,)),
        fleet,
        *(replace(each, command=[*each.command, "-s"], show=FIGURES) for each in (planner, order, report)),
    ]


def bench(work: Path) -> list[Step]:
    """Return the benchmarks of the node driver. Their figures are printed together."""
    step = pytest_step("bench", "40 min", "tests/bench", "read the log.", work / "reports")
    return [replace(step, command=[*step.command, "-s"], show=FIGURES)]


def one_scenario(name: str) -> Callable[[Path], list[Step]]:
    """Return a function that returns the steps of one molecule scenario."""
    return lambda _work: molecule_steps([name])


SUITES: dict[str, Callable[[Path], list[Step]]] = {
    "lint": gates,
    "release": release_gates,
    "unit": unit,
    "simulator": simulator,
    "cluster": cluster,
    "molecule": molecule,
    "prove": prove,
    "bench": bench,
}


def suite(name: str) -> Callable[[Path], list[Step]] | None:
    """Return a function that returns the steps of a suite, or of the scenario in ``molecule=NAME``. Return None for an unknown name."""
    before, equals, scenario = name.partition("=")
    if equals:
        return one_scenario(scenario) if before == "molecule" and scenario in scenarios() else None
    return SUITES.get(name)


def graph(names: Sequence[str], work: Path) -> list[Step]:
    """Return the steps of all suites without duplicates. A step follows the steps that it needs."""
    made = [found for name in names if (found := suite(name))]
    steps = {step.name: step for make in made for step in make(work)}
    if "prove" in names:
        steps = {
            name: replace(step, command=[*step.command, *EVERYTHING], usual=LONG_USUAL.get(name, step.usual))
            if step.junit
            else step
            for name, step in steps.items()
        }
    if any(step.lane == CLUSTER_LANE for step in steps.values()):
        steps = {
            name: step if name in FIRST else replace(step, command=[*GIVING_WAY, *step.command])
            for name, step in steps.items()
        }
    return list(steps.values())


def engine_answers() -> bool:
    """Return whether Docker Engine is running."""
    try:
        return subprocess.run(["docker", "version"], capture_output=True, check=False, timeout=60).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def stop_engine() -> None:
    """Stop the Docker Engine that a suite has started, unless a world is still on it."""
    done = subprocess.run([ROOT / "tests/world/world", "engine", "stop"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        say(f"Docker Engine was not stopped: {done.stderr.strip() or done.stdout.strip()}")


def end_by_signal() -> None:
    """Make the signals that end a run also end its steps: each has its own session, which the terminal does not reach."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))


def remembered(ledger: Ledger | None, go_on: bool) -> tuple[Mapping[str, Passed], Mapping[str, Passed], dict[str, str]]:
    """Return the steps and the modules to skip, and the environment variables for test runs."""
    if ledger is None:
        if go_on:
            say("Git does not know these files, so that nothing is remembered of them: all is run.")
        return {}, {}, {}
    variables = {FOLDER_VARIABLE: str(ledger.folder)}
    if not go_on:
        return {}, {}, variables
    return ledger.steps(), ledger.modules(), {**variables, GO_ON_VARIABLE: "1"}


def with_modules(results: Sequence[Result], modules: Mapping[str, Passed]) -> list[Result]:
    """Return the results with the test counts of modules that passed in earlier runs, because no report of this run has them."""
    return [
        result if result.before else replace(result, counts=result.counts + Counts(passed=_tests_of(result, modules)))
        for result in results
    ]


def _tests_of(result: Result, modules: Mapping[str, Passed]) -> int:
    return sum(modules[name].tests for name in result.step.modules if name in modules)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("suites.py", description="Run suites of tests.")
    parser.add_argument("names", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}, or molecule=SCENARIO")
    parser.add_argument("--go-on", action="store_true", help="skip steps that have passed with the same files")
    parser.add_argument("--part", type=Part.parse, metavar="K/N", help="run one machine's part of N")
    return parser


def main(words: Sequence[str]) -> int:
    """Run the suites in ``words`` and return the exit status."""
    asked = arguments().parse_args(words)
    names: list[str] = asked.names
    part: Part | None = asked.part
    unknown = [name for name in names if suite(name) is None]
    strange = [name.partition("=")[2] for name in unknown if name.startswith("molecule=")]
    if strange:
        say(
            f"There is no molecule scenario {strange[0]!r}; say which one by SCENARIO=NAME, one of {', '.join(scenarios())}"
        )
        return 2
    if unknown or not names:
        say(f"suites.py: unknown suites {unknown}; expected some of {', '.join(SUITES)}")
        return 2
    started = time.monotonic()
    root = cache()
    work = root / "results"
    environment = tool_environment(Path(sys.prefix))
    os.environ["PATH"] = environment["PATH"]
    found_engine = engine_answers()
    end_by_signal()
    steps = graph(names, work)
    called = ", ".join(names)
    if part is not None:
        steps = part.of_steps(steps)
        called += f", part {part.number} of {part.parts}"
    say(f"{called}: {len(steps)} steps, logs under {work}")
    ledger = Ledger.of(ROOT, work)
    known, passed, variables = remembered(ledger, asked.go_on)
    modules = {name: passed[name] for step in steps for name in step.modules if name in passed}
    results = with_modules(run_steps(steps, work / "logs", {**environment, **variables}, known, ledger), modules)
    if not found_engine and engine_answers():
        stop_engine()
    say()
    print_table(results)
    say()
    print_slowest(results)
    counts = total(results)
    say()
    say(f"{called}: {duration(time.monotonic() - started)}; logs are under {work}")
    print_failed(results)
    before = [result.step.name for result in results if result.before]
    if before or modules:
        say(f"{len(before)} steps and {len(modules)} modules of tests have passed in runs before, with the same files")
    summary = f"{counts.passed} passed, {counts.failed} failed"
    (work / "summary").write_text(f"{summary}\n", encoding="utf-8")
    say(summary)
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
