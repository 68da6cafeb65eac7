# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run test suites by name: lint, release, unit, simulator, cluster, molecule, prove, bench; molecule=NAME runs one scenario.

A suite is a list of steps (steps.py). All requested steps run, even after failures. Suites with a cluster run in parallel
with the others, which have a lower priority: a cluster mostly waits, a linter never does. At the end are a table, the ten
slowest tests, and one summary line. The exit status is 0 only if everything passed.

With the suite `prove`, the tests with the marker `prove` (long and exhaustive ones) run in all requested suites.

--resume skips steps that have passed with the same files, for example after an interrupted run (passed_records.py).
--part 2/3 runs the second of three parts, one for each machine (parts.py).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gates import gates, release_gates
from parts import Part
from passed_records import RECORDS_VARIABLE, RESUME_VARIABLE, PassedRecord, PassedRecords
from steps import (
    ROOT,
    Counts,
    Result,
    Step,
    cache,
    duration,
    print_failed,
    print_lines,
    print_slowest,
    print_table,
    run_steps,
    tool_environment,
    total,
)

#: Usual times of steps with the long tests, to divide a run and to inform the user.
USUAL_TIMES_WITH_LONG_TESTS = {"cluster": "100 min", "simulator": "8 min", "unit": "40 min"}
#: One test process per processor, for tests that share only the sources.
PARALLEL = ("-n", "auto", "--dist", "worksteal")
#: One process more than processors, for tests that often wait.
PARALLEL_WAITING = ("-n", str((os.cpu_count() or 1) + 1), "--dist", "worksteal")
#: Replaces the selection in pyproject.toml, which excludes the tests marked `prove`.
ALL_TESTS = ("-m", "")
#: The heading of the measurements in the output of a benchmark.
FIGURES_HEADING = "Figures of this run"
#: Steps of one lane run one after the other. The lane of machines has the oracles, molecule, and the steps of
#: `make prove` with separate worlds. Chaos tests have a lane because their time is fixed, so that no suite waits for them.
BUILD_LANE, CLUSTER_LANE, MACHINES_LANE, CHAOS_LANE = "build", "cluster", "machines", "chaos"
#: The command prefix of steps that run in parallel with a cluster. They compute without pause, so with normal priority
#: they would use the processor time that the cluster needs.
LOW_PRIORITY = (ROOT / "tests/tools/low_priority",)
#: Steps with normal priority in parallel with a cluster: the clusters, the build that they need, and the importer,
#: which limits its linters to three minutes.
NORMAL_PRIORITY = frozenset({"world build", "cluster", "prove", "galaxy-importer"})
CHAOS_COMMAND = (sys.executable, "-m", "tests.chaos")
#: The minimum numbers of kills of each kind and of requests in `make prove`. The time limit (seconds) is for a slow
#: machine in parallel with the other suites, on which 900 s were enough for 107 kills of daemons.
CHAOS_MINIMUMS = (
    *("--vendor", "nvidia", "--runs", "200", "--least", "200", "--requests", "100000", "--least-requests", "100000"),
    *("--seconds", "2400", "--fuzz-seconds", "2700", "--parallel", "2"),
)
#: Molecule scenarios that take two minutes or more. Only `make prove` runs them.
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
#: Scenarios with programs that only the oracle build provides.
SCENARIOS_WITH_ORACLES = frozenset({"ascend_runtime", "container_runtime"})


def pytest_step(
    name: str,
    usual_time: str,
    path: str,
    work: Path,
    *,
    remedy: str = "read the log.",
    options: Sequence[str] = (),
    lane: str = "",
) -> Step:
    """Return the step that runs the tests of a directory or file with pytest. Its JUnit report is below ``work``."""
    report = work / "reports" / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", path, "-v", "--tb=short", f"--junitxml={report}", *options]
    return Step(name, usual_time, command, junit_report=report, remedy=remedy, lane=lane)


def benchmark_step(
    name: str, usual_time: str, path: str, work: Path, *, remedy: str = "read the log.", lane: str = ""
) -> Step:
    """Return the step that runs benchmarks with pytest and prints their measurements."""
    step = pytest_step(name, usual_time, path, work, remedy=remedy, options=["-s"], lane=lane)
    return replace(step, shown_heading=FIGURES_HEADING)


def unit(work: Path) -> list[Step]:
    """Return the tests without a cluster."""
    remedy = "run one test alone with `<cache>/venv/bin/python -m pytest tests/unit -k NAME`."
    return [pytest_step("unit", "15 min alone", "tests/unit", work, remedy=remedy, options=PARALLEL_WAITING)]


def simulator(work: Path) -> list[Step]:
    """Return the tests of the simulated library under sanitizers, and of programs and the backend that use it."""
    remedy = "they need gcc and root; run one alone with `<cache>/venv/bin/python -m pytest tests/simulator -k NAME`."
    return [pytest_step("simulator", "6 min alone", "tests/simulator", work, remedy=remedy, options=PARALLEL)]


def build_step(part: str, usual_time: str, needs: tuple[str, ...] = ()) -> Step:
    """Return the step that builds a part of the test world: ``world`` or ``oracle``."""
    return Step(
        f"{part} build",
        usual_time,
        [ROOT / "tests/world/world", "build", "--only", f"{part}s"],
        remedy="read the log. Run `tests/world/world build` to continue.",
        needs=needs,
        lane=BUILD_LANE,
        runs_always=True,
    )


#: Builds the worlds, in parallel with steps that do not need them.
WORLD_BUILD = build_step("world", "10 min cold, a few seconds warm")
#: Builds the oracle programs. No world needs them.
ORACLE_BUILD = build_step("oracle", "4 min cold, a second warm", needs=(WORLD_BUILD.name,))


def cluster(work: Path) -> list[Step]:
    """Return the tests on the real cluster."""
    tests = pytest_step(
        "cluster",
        "20 min alone, 30 in parallel",
        "tests/cluster",
        work,
        remedy="keep the world with DRA_ACCELERATORS_KEEP_WORLD=1 and inspect it with `tests/world/world status`.",
        lane=CLUSTER_LANE,
    )
    remedy = "they need root and unshare; read the log."
    oracles = pytest_step("oracles", "2 min alone", "tests/oracles", work, remedy=remedy, lane=MACHINES_LANE)
    return [WORLD_BUILD, *(replace(step, needs=(WORLD_BUILD.name,)) for step in (oracles, tests))]


def scenarios() -> list[str]:
    """Return the molecule scenarios. `default` only creates and destroys the shared instance."""
    return sorted(
        path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml") if path.parent.name != "default"
    )


def molecule(_work: Path) -> list[Step]:
    """Return the steps of all short molecule scenarios."""
    return molecule_steps([name for name in scenarios() if name not in LONG_SCENARIOS])


def molecule_steps(names: Sequence[str]) -> list[Step]:
    """Return one step for each scenario in ``names``, and the steps that they need.

    The first of them removes the shared instance, because a killed run does not.
    """
    removal = Step(
        "molecule destroy",
        "5 s",
        ["molecule", "destroy", "--scenario-name", "default"],
        remedy="find the instance in the output of `docker ps --all`.",
        needs=(WORLD_BUILD.name,),
        lane=MACHINES_LANE,
        runs_always=True,
    )
    steps = [WORLD_BUILD, ORACLE_BUILD] if SCENARIOS_WITH_ORACLES.intersection(names) else [WORLD_BUILD]
    steps.append(removal)
    for scenario in names:
        oracles = (WORLD_BUILD.name, ORACLE_BUILD.name) if scenario in SCENARIOS_WITH_ORACLES else ()
        steps.append(
            Step(
                f"molecule {scenario}",
                "2 min",
                ["molecule", "test", "--scenario-name", scenario],
                remedy=f"run `molecule converge -s {scenario}`, and inspect the instance with `molecule login -s {scenario}`.",
                needs=(removal.name, *oracles),
                lane=MACHINES_LANE,
            )
        )
    return steps


def prove(work: Path) -> list[Step]:
    """Return long tests that no other suite has: separate worlds, other versions, and long runs."""
    tests = pytest_step(
        "prove",
        "4 h",
        "tests/prove",
        work,
        remedy="read the log. RESUME=1 skips the modules that have passed.",
        options=("-p", "tests.tools.pytest_passed_modules"),
        lane=MACHINES_LANE,
    )
    modules = tuple(f"tests/prove/{path.name}" for path in (ROOT / "tests/prove").glob("test_*.py"))
    breaks = Step(
        "breaks",
        "10 min",
        [sys.executable, ROOT / "tests/tools/break_product.py"],
        remedy="a test that passes with a broken product proves nothing: correct the test, or the list in break_product.py.",
    )
    return [
        WORLD_BUILD,
        breaks,
        *chaos_steps(),
        *molecule_steps([name for name in scenarios() if name in LONG_SCENARIOS]),
        replace(tests, test_modules=modules, needs=(WORLD_BUILD.name,)),
        *prove_benchmarks(work),
    ]


def chaos_steps() -> list[Step]:
    """Return the chaos tests: a complete run for GPUs, and shorter ones for other drivers and faults."""
    complete = Step(
        "chaos",
        "2 h in parallel",
        [*CHAOS_COMMAND, *CHAOS_MINIMUMS],
        remedy="each failed case prints the command that repeats it. `short of` means that the time limit came before the minimum.",
        shown_heading="Chaos of seed",
        lane=CHAOS_LANE,
    )
    # Other vendors have other kinds of devices, so a short run of each kind and fault is enough.
    by_name: dict[str, tuple[str, Sequence[str]]] = {
        # Ten minutes under load, with one driver that runs for all of them and one that restarts in the middle.
        "chaos without an API server": (
            "11 min",
            ("--faults", "api-away", "--cases", "2", "--away", "600", "--seconds", "900"),
        ),
        "chaos of NPUs": ("25 min", ("--vendor", "ascend", "--seconds", "60", "--fuzz-seconds", "300")),
        # A vNPU of these has a number instead of a placement and a group.
        "chaos of numbered NPUs": ("10 min", ("--vendor", "ascend-910a", "--seconds", "20", "--fuzz-seconds", "30")),
        "chaos of an older NPU driver": (
            "6 min",
            ("--vendor", "ascend-older", "--seconds", "10", "--fuzz-seconds", "15"),
        ),
    }
    return [
        complete,
        *(
            replace(complete, name=name, usual_time=usual_time, command=[*CHAOS_COMMAND, *options])
            for name, (usual_time, options) in by_name.items()
        ),
    ]


def prove_benchmarks(work: Path) -> list[Step]:
    """Return the benchmarks that `make prove` runs. Only the one of the fleet needs a world."""
    remedy = "reduce the number of nodes with DRA_ACCELERATORS_FLEET_NODES, and read the log."
    fleet = benchmark_step(
        *("fleet", "6 min alone, 20 in parallel", "tests/bench/test_fleet.py", work), remedy=remedy, lane=MACHINES_LANE
    )
    return [
        replace(fleet, needs=(WORLD_BUILD.name,)),
        benchmark_step("planner", "4 min", "tests/bench/test_planner.py", work),
        benchmark_step("order", "1 min", "tests/bench/test_order.py", work),
        benchmark_step("report", "10 min alone", "tests/bench/test_report.py", work, remedy=remedy),
    ]


def bench(work: Path) -> list[Step]:
    """Return the benchmarks of the node driver."""
    return [benchmark_step("bench", "40 min", "tests/bench", work)]


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


def find_suite(name: str) -> Callable[[Path], list[Step]] | None:
    """Return the function for a suite, or for the scenario in ``molecule=NAME``. Return None for an unknown name."""
    before, equals, scenario = name.partition("=")
    if not equals:
        return SUITES.get(name)
    return (lambda _work: molecule_steps([scenario])) if before == "molecule" and scenario in scenarios() else None


def steps_of_suites(names: Sequence[str], work: Path) -> list[Step]:
    """Return the steps of all suites without duplicates. A step follows the steps that it needs."""
    functions = [function for name in names if (function := find_suite(name))]
    steps = list({step.name: step for function in functions for step in function(work)}.values())
    if "prove" in names:
        steps = [_with_long_tests(step) if step.junit_report else step for step in steps]
    if any(step.lane == CLUSTER_LANE for step in steps):
        steps = [
            step if step.name in NORMAL_PRIORITY else replace(step, command=[*LOW_PRIORITY, *step.command])
            for step in steps
        ]
    return steps


def _with_long_tests(step: Step) -> Step:
    usual_time = USUAL_TIMES_WITH_LONG_TESTS.get(step.name, step.usual_time)
    return replace(step, command=[*step.command, *ALL_TESTS], usual_time=usual_time)


def is_engine_running() -> bool:
    """Return whether Docker Engine is running."""
    try:
        return subprocess.run(["docker", "version"], capture_output=True, check=False, timeout=60).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def stop_engine() -> None:
    """Stop the Docker Engine that a suite has started, unless a world still uses it."""
    done = subprocess.run([ROOT / "tests/world/world", "engine", "stop"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print_lines(f"Docker Engine was not stopped: {done.stderr.strip() or done.stdout.strip()}")


def exit_on_signals() -> None:
    """Exit on signals that end a run, so that its steps end too. A terminal does not reach their sessions."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))


@dataclass(frozen=True)
class EarlierRuns:
    """The steps and the test modules that passed in earlier runs and are skipped in this run."""

    steps: Mapping[str, PassedRecord] = field(default_factory=dict)
    modules: Mapping[str, PassedRecord] = field(default_factory=dict)


def find_earlier_runs(records: PassedRecords | None, *, resume: bool) -> EarlierRuns:
    """Return the steps and modules to skip. Without ``resume`` or records, return nothing."""
    if resume and records is None:
        print_lines("This directory is not a git checkout, so earlier results are unknown. All steps run.")
    if not resume or records is None:
        return EarlierRuns()
    return EarlierRuns(records.passed_steps(), records.passed_modules())


def records_environment(records: PassedRecords | None, *, resume: bool) -> dict[str, str]:
    """Return the environment variables for pytest_passed_modules.py."""
    if records is None:
        return {}
    return {RECORDS_VARIABLE: str(records.directory)} | ({RESUME_VARIABLE: "1"} if resume else {})


def add_earlier_tests(results: Sequence[Result], modules: Mapping[str, PassedRecord]) -> list[Result]:
    """Add the tests of skipped modules to the results, because no report of this run has them."""
    return [
        result
        if result.earlier_run
        else replace(result, counts=result.counts + Counts(_tests_of(result.step, modules)))
        for result in results
    ]


def _tests_of(step: Step, modules: Mapping[str, PassedRecord]) -> int:
    return sum(modules[name].tests for name in step.test_modules if name in modules)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("suites.py", description="Run suites of tests.")
    parser.add_argument("names", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}, or molecule=SCENARIO")
    parser.add_argument("--resume", action="store_true", help="skip steps that have passed with the same files")
    parser.add_argument("--part", type=Part.parse, metavar="K/N", help="run one machine's part of N")
    return parser


def problem_of_names(names: Sequence[str]) -> str:
    """Return the error message for unknown or missing suites, or ""."""
    unknown = [name for name in names if find_suite(name) is None]
    for name in unknown:
        if name.startswith("molecule="):
            scenario = name.removeprefix("molecule=")
            return f"There is no molecule scenario {scenario!r}; expected SCENARIO=NAME with one of {', '.join(scenarios())}"
    if unknown or not names:
        return f"suites.py: unknown suites {unknown}; expected some of {', '.join(SUITES)}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Run the requested suites and return the exit status."""
    options = argument_parser().parse_args(arguments)
    names: list[str] = options.names
    part: Part | None = options.part
    problem = problem_of_names(names)
    if problem:
        print_lines(problem)
        return 2
    started = time.monotonic()
    work = cache() / "results"
    environment = tool_environment(Path(sys.prefix))
    os.environ["PATH"] = environment["PATH"]
    was_engine_running = is_engine_running()
    exit_on_signals()
    steps = steps_of_suites(names, work)
    title = ", ".join(names)
    if part is not None:
        steps = part.select_steps(steps)
        title += f", part {part.number} of {part.parts}"
    print_lines(f"{title}: {len(steps)} steps, logs under {work}")
    records = PassedRecords.open(ROOT, work)
    earlier = find_earlier_runs(records, resume=options.resume)
    environment |= records_environment(records, resume=options.resume)
    results = run_steps(steps, work / "logs", environment, earlier.steps, records)
    if not was_engine_running and is_engine_running():
        stop_engine()
    print_summary(title, add_earlier_tests(results, earlier.modules), earlier, work, time.monotonic() - started)
    return 1 if any(result.problem for result in results) else 0


def print_summary(title: str, results: Sequence[Result], earlier: EarlierRuns, work: Path, seconds: float) -> None:
    """Print the results, and write their last line to the file ``summary``, which .ci/run reads."""
    print_lines()
    print_table(results)
    print_lines()
    print_slowest(results)
    print_lines()
    print_lines(f"{title}: {duration(seconds)}; logs are under {work}")
    print_failed(results)
    steps = sum(1 for result in results if result.earlier_run)
    modules = sum(1 for result in results for name in result.step.test_modules if name in earlier.modules)
    if steps or modules:
        print_lines(f"{steps} steps and {modules} modules of tests have passed in earlier runs with the same files")
    counts = total(results)
    summary = f"{counts.passed} passed, {counts.failed} failed"
    (work / "summary").write_text(f"{summary}\n", encoding="utf-8")
    print_lines(summary)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
