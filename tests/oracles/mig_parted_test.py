# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that NVIDIA's nvidia-mig-parted partitions simulated boards and accepts their state, including with our
exported files.

The program runs in a root directory of the simulator's trees, because it reads /proc/modules and sysfs at fixed paths
and resets GPUs with nvidia-smi. The test needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_driver.core.model import Device

from tests.bench.layout_model import Layout, Outcome, disturbances_of_mig_parted
from tests.bench.layouts import Change, random_changes, typical_changes

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/simulator/files"
CONFIGURATION = """
version: v1
mig-configs:
  disabled:
  - {{devices: all, mig-enabled: false}}
  smallest:
  - {{devices: all, mig-enabled: true, mig-devices: {{"{small}": 7}}}}
  mixed:
  - {{devices: all, mig-enabled: true, mig-devices: {{"{large}": 1, "{middle}": 1, "{small}": 2}}}}
  some:
  - {{devices: [0, 1], mig-enabled: true, mig-devices: {{"{whole}": 1}}}}
  - {{devices: [2, 3, 4, 5, 6, 7], mig-enabled: false}}
"""
# Configuration names and the number of MIG devices that each creates on eight GPUs.
MACHINES = {
    "8xH100": {"small": "1g.10gb", "middle": "2g.20gb", "large": "3g.40gb", "whole": "7g.80gb"},
    "8xA100-40": {"small": "1g.5gb", "middle": "2g.10gb", "large": "3g.20gb", "whole": "7g.40gb"},
}
#: The machine of every run. The other one is tested in `make prove`.
SHORT = "8xH100"
EXPECTED = {"smallest": 56, "mixed": 32, "some": 2, "disabled": 0}
#: A simulated machine in its own root directory, with the program inside.
ON_A_MACHINE = """
set -eu
mount --make-rprivate /
simulator() {{ PYTHONPATH={files} {python} -c 'import sys; from accelerator_simulator.cli import main; sys.exit(main())' "$@"; }}
simulator --root {root} --library-folder {library} power-on --machine {machine} >&2
for name in usr etc tmp; do mkdir -p {root}/$name; mount --rbind /$name {root}/$name; done
ln -s usr/bin {root}/bin; ln -s usr/lib {root}/lib; ln -s usr/lib64 {root}/lib64
mkdir -p {root}/proc/self {root}/oracle; mount --bind {binary} {root}/oracle
touch {root}/dev/null; mount --bind /dev/null {root}/dev/null
export LD_LIBRARY_PATH={library} PATH={library}:/usr/sbin:/usr/bin:/sbin:/bin
"""
IN_ITS_ROOT = (
    ON_A_MACHINE
    + """for configuration in {configurations}; do
    chroot {root} /oracle/nvidia-mig-parted apply -f {file} -c $configuration >&2
    chroot {root} /oracle/nvidia-mig-parted assert -f {file} -c $configuration >&2
    echo $configuration $(nvidia-smi -L | grep -c '^  MIG ' || true)
done
"""
)


@pytest.mark.parametrize(
    "machine", [name if name == SHORT else pytest.param(name, marks=pytest.mark.prove) for name in MACHINES]
)
def test_layout_applied_by_mig_parted_exists(mig_parted: Path, tmp_path: Path, machine: str) -> None:
    library = tmp_path / "library"
    library.mkdir()
    subprocess.run(["make", "-s", "-C", FILES / "nvml", f"OUT={library}"], check=True)
    (tmp_path / "root").mkdir()
    (tmp_path / "config.yaml").write_text(CONFIGURATION.format(**MACHINES[machine]))
    script = IN_ITS_ROOT.format(
        files=FILES,
        python=sys.executable,
        root=tmp_path / "root",
        library=library,
        machine=machine,
        binary=mig_parted,
        file=tmp_path / "config.yaml",
        configurations=" ".join(EXPECTED),
    )
    run = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert dict(line.split() for line in run.stdout.splitlines()) == {
        name: str(count) for name, count in EXPECTED.items()
    }


# The module nvidia_mig creates a layout, and nvidia_mig_info exports it. The program reads the file and accepts the layout without
# changes.
EXPORTED_ROOT = """
set -eu
mount --make-rprivate /
simulator() {{ PYTHONPATH={files} {python} -c 'import sys; from accelerator_simulator.cli import main; sys.exit(main())' "$@"; }}
simulator --root {root} --library-folder {library} power-on --machine {machine} >&2
export LD_LIBRARY_PATH={library} PATH={library}:$PATH
disturbances_of_collection() {{ {python} -c "$PROGRAM" "$1" $2; }}
if [ {machine} = 8xA100-40 ]; then
    printf 'FABRIC_MODE=0\nFM_CMD_UNIX_SOCKET_PATH={directory}/fm.socket\n' > {directory}/fm.cfg
    PYTHONPATH={files} {python} -c 'import sys; from accelerator_simulator.cli import main; sys.exit(main())' \
        --root {root} --library-folder {library} fabric-manager -c {directory}/fm.cfg > {directory}/fm.log 2>&1 &
    trap "kill $!" EXIT
    until [ -S {directory}/fm.socket ]; do sleep 0.1; done
fi
ours "$LAYOUT" nvidia_mig >&2
ours "$EXPORT" nvidia_mig_info > {directory}/exported.json
{python} -c 'import json, sys; json.dump(json.load(open(sys.argv[1]))["exported"]["config"], open(sys.argv[2], "w"))' \
    {directory}/exported.json {directory}/config.yaml
for name in usr etc tmp; do mkdir -p {root}/$name; mount --rbind /$name {root}/$name; done
ln -s usr/bin {root}/bin; ln -s usr/lib {root}/lib; ln -s usr/lib64 {root}/lib64
mkdir -p {root}/proc/self {root}/oracle; mount --bind {binary} {root}/oracle
touch {root}/dev/null; mount --bind /dev/null {root}/dev/null
export PATH={library}:/usr/sbin:/usr/bin:/sbin:/bin
theirs() {{ chroot {root} /oracle/nvidia-mig-parted "$@"; }}
theirs assert --valid-config -f {directory}/config.yaml -c current >&2
theirs assert -f {directory}/config.yaml -c current >&2
theirs export > {directory}/theirs.yaml
theirs apply -f {directory}/config.yaml -c current >&2
theirs assert -f {directory}/config.yaml -c current >&2
nvidia-smi -L | grep '^  MIG ' > {directory}/after || true
theirs export > {directory}/theirs-after.yaml
"""
PROGRAM = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.loads(sys.argv[1])):
    importlib.import_module("ansible_collections.dra.accelerators.plugins.modules." + sys.argv[2]).main()
"""
WAYS = {
    "mixed": [
        {"match": {"index": [0, 3]}, "mode": "static", "partitions": {"{large}": 1, "{small}": 2}},
        {"match": {"index": 5}, "mode": "static", "partitions": {}},
        {"match": {}, "mode": "whole"},
    ],
    "off": [{"match": {}, "mode": "whole"}],
}


@pytest.mark.parametrize(
    ("machine", "way"),
    [
        ("8xH100", "mixed"),
        *(
            pytest.param(machine, way, marks=pytest.mark.prove)
            for machine, way in (("8xH100", "off"), ("8xA100-40", "mixed"))
        ),
    ],
)
def test_mig_parted_accepts_the_exported_layout(mig_parted: Path, tmp_path: Path, machine: str, way: str) -> None:
    library = tmp_path / "library"
    library.mkdir()
    subprocess.run(["make", "-s", "-C", FILES / "nvml", f"OUT={library}"], check=True)
    (tmp_path / "root").mkdir()
    names = MACHINES[machine]
    rules = [
        {**rule, "partitions": {name.format(**names): count for name, count in rule["partitions"].items()}}
        if rule["mode"] == "static"
        else rule
        for rule in WAYS[way]
    ]
    common = {"state_path": str(tmp_path / "none.db")}
    environment = {
        **os.environ,
        "PROGRAM": PROGRAM,
        "LAYOUT": json.dumps({**common, "layout": rules, "reset": "when_needed"}),
        "EXPORT": json.dumps(common),
    }
    script = EXPORTED_ROOT.format(
        files=FILES,
        python=sys.executable,
        root=tmp_path / "root",
        library=library,
        machine=machine,
        binary=mig_parted,
        directory=tmp_path,
    )
    run = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    exported = json.loads((tmp_path / "exported.json").read_text())["exported"]["config"]["mig-configs"]["current"]
    theirs = yaml.safe_load((tmp_path / "theirs.yaml").read_text())["mig-configs"]["current"]
    assert by_gpu(exported) == by_gpu(theirs)
    assert by_gpu(theirs) == by_gpu(
        yaml.safe_load((tmp_path / "theirs-after.yaml").read_text())["mig-configs"]["current"]
    )
    assert len((tmp_path / "after").read_text().splitlines()) == (6 if way == "mixed" else 0)


def by_gpu(entries: list[dict[str, Any]]) -> dict[int, tuple[bool, dict[str, int]]]:
    """Return a configuration's entries for each of eight GPUs of one kind."""
    found = {}
    for entry in entries:
        for number in range(8) if entry["devices"] == "all" else entry["devices"]:
            found[number] = (entry["mig-enabled"], entry.get("mig-devices") or {})
    return found


# Compares the disturbances that the model of its steps in tests/bench predicts with the real ones. The module creates
# each initial state.
CHANGES = (
    ON_A_MACHINE
    + """look() {{
    simulator --root {root} --library-folder {library} show --json > $1.json
    find {root}/proc/driver/nvidia/capabilities -path '*/gi*/access' -not -path '*/ci*' -printf '%P %i %T@\n' > $1.instances
}}
for number in $(seq 0 {last}); do
    {python} -c "$PROGRAM" "$(cat {directory}/$number.before)" nvidia_mig >&2
    nvidia-smi -lgc 300,600 >&2
    look {directory}/$number-before
    chroot {root} /oracle/nvidia-mig-parted apply -f {directory}/$number.yaml -c wanted >&2
    look {directory}/$number-after
done
"""
)


def seen(folder: Path, number: int) -> Outcome:
    """Return the observed effects of a change: destroyed partitions, changed GPUs, and processes that would block it.

    A partition's file below /proc exists as long as the partition. Its UUID depends on its placement only. A reset GPU
    has no locked clocks.
    """
    looks = []
    for when in ("before", "after"):
        gpus = json.loads((folder / f"{number}-{when}.json").read_text())["gpus"]
        instances = set((folder / f"{number}-{when}.instances").read_text().splitlines())
        looks.append((gpus, instances))
    (before, had), (after, has) = looks
    assert all(gpu["locked_clock_minimum_mhz"] == 300 for gpu in before)
    switched = {old["index"] for old, new in zip(before, after) if old["mig_mode_current"] != new["mig_mode_current"]}
    reset = {gpu["index"] for gpu in after if gpu["locked_clock_minimum_mhz"] != 300}
    changed = {gpu["index"] for gpu in before for each in had ^ has if each.startswith(f"gpu{gpu['minor']}/")}
    whole = {gpu["index"] for gpu in before if not gpu["mig_mode_current"]} & (switched | reset)
    gone = len(had - has)
    return Outcome(gone, len(changed | switched | reset), gone + len(whole))


def as_rule(device: Device) -> dict[str, Any]:
    """Return the layout of a GPU including placements."""
    rule: dict[str, Any] = {"match": {"index": device.index}, "mode": "whole"}
    if device.partitioning.enabled:
        places = [{"profile": each.profile, "placement": each.placement.start} for each in device.partitions]
        rule |= {"mode": "static", "partitions": places}
    return rule


def as_entry(index: int, layout: Layout) -> dict[str, Any]:
    """Return the desired layout of a GPU as an entry of the program's configuration."""
    entry: dict[str, Any] = {"devices": [index], "mig-enabled": layout is not None}
    return entry if layout is None else {**entry, "mig-devices": dict(layout)}


SITES = typical_changes()
BESIDE: dict[str, tuple[str, list[Change]]] = {
    "sites": ("8xH100", [change for name, change in SITES.items() if "H100" in name]),
    "resets": ("4xA30", [change for name, change in SITES.items() if "A30" in name]),
    **{
        f"random-{changing}": ("8xH100", [one for seed in (1, 2, 3) for one in random_changes(changing, 3, seed)])
        for changing in (1, 2, 8)
    },
}


@pytest.mark.parametrize(
    "name", [name if name == "sites" else pytest.param(name, marks=pytest.mark.prove) for name in BESIDE]
)
def test_mig_parted_changes_the_predicted_gpus(mig_parted: Path, tmp_path: Path, name: str) -> None:
    machine, changes = BESIDE[name]
    library = tmp_path / "library"
    library.mkdir()
    subprocess.run(["make", "-s", "-C", FILES / "nvml", f"OUT={library}"], check=True)
    (tmp_path / "root").mkdir()
    for number, (gpus, wanted) in enumerate(changes):
        options = {"layout": [as_rule(each) for each in gpus], "reset": "when_needed", "state_path": "/none.db"}
        (tmp_path / f"{number}.before").write_text(json.dumps(options))
        entries = [as_entry(index, layout) for index, layout in enumerate(wanted)]
        configuration = {"version": "v1", "mig-configs": {"wanted": entries}}
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(configuration))
    script = CHANGES.format(
        files=FILES,
        python=sys.executable,
        root=tmp_path / "root",
        library=library,
        machine=machine,
        binary=mig_parted,
        directory=tmp_path,
        last=len(changes) - 1,
    )
    run = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PROGRAM": PROGRAM},
    )
    assert run.returncode == 0, run.stderr
    found = [seen(tmp_path, number) for number in range(len(changes))]
    assert found == [disturbances_of_mig_parted(*change) for change in changes]
