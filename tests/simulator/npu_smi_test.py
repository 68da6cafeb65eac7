# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test npu-smi with the library: its commands, output formats, and exit statuses, with a parser of the formats."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.simulator.dcmi_model import TEMPLATES
from tests.simulator.dcmi_support import NpuMachine
from tests.simulator.npu_smi_reader import pairs, slices, summary, table_of_map, templates

pytestmark = pytest.mark.parametrize("dcmi_build", [""], indirect=True, ids=["plain"])
WRONG = -9001 & 0xFF
UNSUPPORTED = -9255 & 0xFF


def good(npus: NpuMachine, *words: str) -> str:
    run = npus.smi(*words)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def made(npus: NpuMachine, *words: str) -> None:
    """Run a setting and assert that its printed status is OK, not only the exit status."""
    assert dict(pairs(good(npus, "set", "-t", *words)))["Status"] == "OK"


def test_list_and_map_of_npus(npus: NpuMachine) -> None:
    npus.load("4x300I-Duo")
    listed = pairs(good(npus, "info", "-l"))
    assert listed[0] == ("Total Count", "4")
    assert [key for key, _value in listed[1:5]] == ["NPU ID", "Product Name", "Serial Number", "Chip Count"]
    assert [value for key, value in listed if key == "Chip Count"] == ["2"] * 4
    rows = table_of_map(good(npus, "info", "-m"))
    # The management controller of each card follows its chips.
    assert [row["Chip Name"] for row in rows] == ["Ascend 310P3", "Ascend 310P3", "Mcu"] * 4
    assert (rows[2]["Chip ID"], rows[2]["Chip Logic ID"]) == ("2", "-")
    assert rows[4] == {"NPU ID": "1", "Chip ID": "1", "Chip Logic ID": "3", "Chip Name": "Ascend 310P3"}
    npus.load("8xA3")
    rows = table_of_map(good(npus, "info", "-m"))
    assert (len(rows), rows[15]["Chip Phy-ID"], rows[15]["NPU ID"], rows[15]["Chip ID"]) == (16, "15", "7", "1")
    assert "Serial Number" not in dict(pairs(good(npus, "info", "-l")))


def test_the_summary(npus: NpuMachine) -> None:
    npus.load("8x910B3")
    assert good(npus, "info").startswith("Warning")
    (npus.folder / "etc/ascend_install.info").write_text("UserName=HwHiAiUser\nDriver_Install_Status=complete\n")
    npus.control("fault 5 error 0x80E01801 critical")
    npus.control(f"fault 5 process {os.getpid()} memory 1000")
    text = good(npus, "info")
    assert not text.startswith("Warning")
    rows = summary(text)
    assert rows[2]["first"] == ["2", "910B3"]
    # The values of DDR memory are zero for chips with HBM.
    assert rows[2]["usages"] == [("0", "0"), ("3350", "65536")]
    assert (rows[5]["health"], rows[5]["usages"][1][0]) == ("Critical", "4350")
    assert f" {os.getpid()} " in text
    assert text.count("No running processes found in NPU") == 7
    health = dict(pairs(good(npus, "info", "-t", "health", "-i", "5", "-c", "0")))
    assert (health["Health Status"], health["Error Code"]) == ("Critical", "80E01801")
    npus.load("8xA3")
    rows = summary(good(npus, "info"))
    assert (rows[1]["first"], rows[1]["second"]) == (["0", "Ascend910"], ["1", "1"])
    # Both dies of a module have one power value.
    assert [row["power"] for row in rows[:4]] == ["175.0", "-", "175.0", "-"]


@pytest.mark.parametrize(
    ("machine", "chip", "factor"),
    [("8x310P-Pro", "310P", 1), ("4x300I-Duo", "310P", 2), ("8x910A", "910A", 1), ("8x910B4", "910B4", 1)]
    + [
        (f"8x{name}", name, 1)
        for name in ("910A-30", "910A-16", "910B1", "910B2", "910B3", "910B4-1", "A3", "A3-infer")
    ]
    + [("16x910B", "910B2C", 1)],
)
@pytest.mark.parametrize("plus", [False, True])
def test_templates(npus: NpuMachine, machine: str, chip: str, factor: int, plus: bool) -> None:
    npus.load(machine, plus_rules=plus)
    text = good(npus, "info", "-t", "template-info", "-i", "0")
    assert ("+=" in text) == plus
    shown = templates(text)
    assert set(shown) == set(TEMPLATES[chip])
    order = ("AICORE", "Memory", "AICPU", "VPC", "VENC", "VDEC", "JPEGD", "JPEGE")
    for name, amounts in TEMPLATES[chip].items():
        expected = [str(int(amount) * (factor if key == "Memory" else 1)) for key, amount in zip(order, amounts)]
        assert [shown[name][key] for key in order] == expected
    # The command accepts no chip.
    assert npus.smi("info", "-t", "template-info", "-i", "0", "-c", "0").returncode == WRONG


def test_different_cards_show_a_hint(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    assert good(npus, "info", "-t", "template-info").startswith("+")
    path = npus.folder / "machine.txt"
    before, name, after = path.read_text().rpartition("name 310P3\n")
    path.write_text(f"{before}name 310P1\n{after}")
    assert name and npus.control(f"load {path}")["ok"]
    hint, _newline, rest = good(npus, "info", "-t", "template-info").partition("\n")
    assert "NPU 0" in hint
    assert templates(rest) == templates(good(npus, "info", "-t", "template-info", "-i", "7"))


def test_unsupported_query_exits_with_zero(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    for words in (
        ["hccs", "-i", "0", "-c", "0"],
        ["sio-info"],
        ["work-mode", "-i", "0"],
        ["multi-die-policy"],
        ["topo"],
    ):
        assert "not support" in good(npus, "info", "-t", *words), words
    npus.load("1x950")
    assert npus.smi("info", "-t", "vnpu-mode").returncode == WRONG
    assert "not known" in npus.smi("info", "-t", "vnpu-mode").stdout


def test_vnpus_are_created_listed_and_destroyed(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    run = good(npus, "set", "-t", "create-vnpu", "-i", "1", "-c", "0", "-f", "vir02", "-g", "3")
    assert dict(pairs(run)) == {"Status": "OK", "Message": "Create vnpu success"}
    assert "116" not in run
    made(npus, "create-vnpu", "-i", "1", "-c", "0", "-f", "vir01", "-v", "120")
    npus.control(f"fault 1 process {os.getpid()} 120")
    amounts, listed = slices(good(npus, "info", "-t", "info-vnpu", "-i", "1", "-c", "0"))
    assert (amounts["AICORE"], amounts["AICPU"], amounts["VPC"], amounts["PNGD"]) == (
        ("5", "8"),
        ("4", "7"),
        ("8", "12"),
        ("NA", "NA"),
    )
    assert listed == [
        {"Vnpu ID": "116", "Vgroup ID": "3", "Container ID": "0" * 12, "Status": "0", "Template Name": "vir02"},
        {"Vnpu ID": "120", "Vgroup ID": "0", "Container ID": "f" * 12, "Status": "1", "Template Name": "vir01"},
    ]
    run = good(npus, "set", "-t", "destroy-vnpu", "-i", "1", "-c", "0", "-v", "120")
    assert dict(pairs(run)) == {"Status": "OK", "Message": "Destroy vnpu 120 success"}
    gone = npus.smi("set", "-t", "destroy-vnpu", "-i", "1", "-c", "0", "-v", "120")
    assert (gone.returncode, "Status" in gone.stdout) == (WRONG, False)


def test_chip_without_vnpus_has_unknown_totals(npus: NpuMachine) -> None:
    npus.load("8x910A")
    amounts, listed = slices(good(npus, "info", "-t", "info-vnpu", "-i", "0", "-c", "0"))
    assert (amounts["AICPU"], amounts["Memory(GB)"], listed) == (("NA", "NA"), ("32", "32"), [])
    npus.load("8x910B4")
    amounts, _listed = slices(good(npus, "info", "-t", "info-vnpu", "-i", "0", "-c", "0"))
    assert amounts["AICPU"] == ("6", "6")
    made(npus, "create-vnpu", "-i", "0", "-c", "0", "-f", "vir05_1c_8g")
    amounts, listed = slices(good(npus, "info", "-t", "info-vnpu", "-i", "0", "-c", "0"))
    assert (amounts["AICPU"], amounts["Memory(GB)"][1], listed[0]["Vgroup ID"]) == (("6", "7"), "32", "NA")


def test_rejected_commands_report_their_reason_and_status(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    create = ("set", "-t", "create-vnpu", "-i", "0", "-c", "0")
    made(npus, "create-vnpu", "-i", "0", "-c", "0", "-f", "vir04_4c_dvpp")
    full = npus.smi(*create, "-f", "vir01")
    assert (full.returncode, "Insufficient number of DVPP" in full.stdout, "VPC 0," in full.stdout) == (
        UNSUPPORTED,
        True,
        True,
    )
    for words in (
        [],
        ["-f", "vir03"],
        ["-f", "vir01", "-v", "x"],
    ):
        assert npus.smi(*create, *words).returncode == WRONG, words
    for words in (["-v", "99"], ["-g", "4"]):
        assert npus.smi("set", "-t", "create-vnpu", "-i", "2", "-c", "0", "-f", "vir01", *words).returncode == WRONG, (
            words
        )
    sentences = {npus.smi(*create, *words).stdout for words in ([], ["-f", "vir03"], ["-f", "vir01", "-v", "x"])}
    assert len(sentences) == 3
    assert npus.smi("set", "-t", "vnpu-config-recover", "-d", "0").returncode == WRONG
    assert npus.smi("info", "-t", "board", "-i", "9").returncode == WRONG
    fault = npus.smi("set", "-t", "vnpu-mode", "-d", "1")
    assert dict(pairs(fault.stdout))["Status"] == "Fail"
    assert "occupied" in fault.stdout
    # A busy chip: the free resources suffice, and only the library's code shows the reason.
    npus.control(f"fault 1 process {os.getpid()}")
    busy = npus.smi("set", "-t", "create-vnpu", "-i", "1", "-c", "0", "-f", "vir01")
    assert (busy.returncode, "Status" in busy.stdout) == (-9013 & 0xFF, False)
    npus.control("clear 1")
    # A call that is rejected because of the mode exits with 0 and has no effect.
    made(npus, "destroy-vnpu", "-i", "0", "-c", "0", "-v", "100")
    made(npus, "vnpu-mode", "-d", "1")
    assert pairs(good(npus, "info", "-t", "vnpu-mode"))[0][1] == "VM"
    run = npus.smi(*create, "-f", "vir01")
    assert (run.returncode, "Status" in run.stdout) == (0, False)
    assert npus.show()["npus"][0]["slices"] == []


def test_npu_smi_in_a_container_sees_only_its_device(npus: NpuMachine) -> None:
    npus.load("8x310P-Pro")
    made(npus, "create-vnpu", "-i", "1", "-c", "0", "-f", "vir02")
    for path in npus.dev.glob("davinci[0-9]*"):
        path.unlink()
    npus.nodes("davinci116")
    before = npus.show()["npus"]

    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        command = [
            "setpriv",
            "--bounding-set=-sys_admin",
            "--inh-caps=-sys_admin",
            str(npus.folder / "lib/npu-smi"),
            *words,
        ]
        environment = npus.build.environment(npus.folder / "lib")
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    (row,) = summary(inside("info").stdout)
    assert (row["first"], row["usages"]) == (["1", "310Pvir02"], [("0", "5381")])
    for words in (("create-vnpu", "-f", "vir01"), ("destroy-vnpu", "-v", "116")):
        run = inside("set", "-t", words[0], "-i", "1", "-c", "0", *words[1:])
        assert (run.returncode, "container" in run.stdout, "Status" in run.stdout) == (0, True, False)
    assert npus.show()["npus"] == before
    # A container whose vNPU was destroyed has no device.
    npus.nodes("davinci1")
    made(npus, "destroy-vnpu", "-i", "1", "-c", "0", "-v", "116")
    (npus.dev / "davinci1").unlink()
    assert summary(inside("info").stdout) == []
    (npus.dev / "davinci_manager").unlink()
    run = inside("info")
    assert (run.returncode, "-8005" in run.stdout) == (-9005 & 0xFF, True)


def test_recovery_setting_and_commands_with_a_confirmation(npus: NpuMachine) -> None:
    npus.load("8x910B3")
    assert pairs(good(npus, "info", "-t", "vnpu-cfg-recover"))[0][1] == "Enable"
    made(npus, "vnpu-cfg-recover", "-d", "0")
    assert pairs(good(npus, "info", "-t", "vnpu-cfg-recover"))[0][1] == "Disable"
    share = ("set", "-t", "device-share", "-i", "1", "-c", "0", "-d", "1")
    assert npus.smi(*share, answer="N\n").returncode == 0
    assert not npus.show()["npus"][1]["device_share"]
    assert "OK" in npus.smi(*share, answer="Y\n").stdout
    assert npus.show()["npus"][1]["device_share"]
    npus.control("fault 1 error 0x80E01801")
    assert "OK" in npus.smi("set", "-t", "reset", "-i", "1", "-c", "0", "-m", "1", answer="Y\n").stdout
    assert npus.show()["npus"][1]["health"] == 0
    npus.load("8x910A")
    assert dict(pairs(good(npus, "info", "-t", "work-mode", "-i", "0")))["Work Mode"] == "AMP"
    npus.control("work-mode smp")
    assert npus.smi("set", "-t", "create-vnpu", "-i", "0", "-c", "0", "-f", "vir16").returncode == UNSUPPORTED
    assert good(npus, "info", "-t", "info-vnpu", "-i", "0", "-c", "0")


def test_topology_and_numbers(npus: NpuMachine) -> None:
    npus.load("16x910B")
    lines = [line.split() for line in good(npus, "info", "-t", "topo").split("\n\n")[0].splitlines()]
    assert lines[0][:2] == ["NPU0", "NPU1"]
    assert (lines[1][1], lines[1][8], lines[1][9]) == ("X", "HCCS", "SYS")
    npus.load("8xA3")
    lines = [line.split() for line in good(npus, "info", "-t", "topo").split("\n\n")[0].splitlines()]
    assert (lines[0][1], lines[1][2], lines[1][3]) == ("Phy-ID1", "SIO", "HCCS_SW")
    assert good(npus, "info", "-t", "phyid-remap", "-p", "5").splitlines() == [
        "\tChip Physical ID:5",
        "\tChip Logic ID:5",
        "\tNPU ID:2",
        "\tChip ID:1",
    ]
    pod = dict(pairs(good(npus, "info", "-t", "spod-info", "-i", "2", "-c", "1")))
    assert (pod["SDID"], pod["Super Pod ID"], pod["Server Index"]) == (str(2 << 18 | 1 << 16 | 5), "1", "0")
    npus.load("8x910A")
    if os.uname().machine == "x86_64":
        assert "not support" in good(npus, "info", "-t", "topo")


def test_second_command_line_syntax(npus: NpuMachine) -> None:
    npus.load("1x950")
    assert list(table_of_map(good(npus, "info", "-m"))[0]) == [
        "NPU ID",
        "Slot ID",
        "Chip ID",
        "Chip Phy-ID",
        "Chip Name",
    ]
    assert "Chip Count" not in dict(pairs(good(npus, "info", "-l")))
    (row,) = summary(good(npus, "info"))
    assert (row["first"], row["second"], "NPU Util(%)" in row["heads"][1]) == (["0", "Ascend950PR"], [], True)
    assert npus.smi("info", "-t", "board", "-i", "0", "-c", "0").returncode == WRONG
    assert dict(pairs(good(npus, "info", "-t", "board", "-i", "0")))["PCI Device ID"] == "0xD806"
    for words in (["info", "-t", "info-vnpu", "-i", "0"], ["set", "-t", "create-vnpu", "-i", "0", "-f", "vir01"]):
        assert npus.smi(*words).returncode == WRONG
    assert good(npus, "info", "-t", "phyid-remap", "-p", "0").startswith("\tChip Phy-ID:0\n")
