# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The output of nvidia-smi about a node's GPUs and their fabric."""

from __future__ import annotations

OLDER, NEWER = "575.57.08", "580.95.05"
QUERY = """
==============NVSMI LOG==============
Driver Version                            : 580.95.05
GPU 00000000:1B:00.0
    GPU UUID                              : GPU-1
    GPU Recovery Action                   : None
    ECC Mode
        State                             : Enabled
    Fabric
        State                             : {state}
        Status                            : {status}
        CliqueId                          : 0
        Health
{health}
    Processes                             : None
"""
#: The program's output about a GPU's health in its fabric: rows that differ from those of a healthy GPU.
WELL = {
    "Summary": "Healthy",
    "Bandwidth": "Full",
    "Route Recovery in progress": "False",
    "Route Unhealthy": "False",
    "Access Timeout Recovery": "False",
    "Incorrect Configuration": "None",
}


def query(state: str, status: str, **health: str) -> str:
    """Return the output of nvidia-smi -q for one GPU. Keys are rows of its health, with _ instead of a space."""
    rows = {**WELL, **{name.replace("_", " "): value for name, value in health.items()}}
    return QUERY.format(
        state=state, status=status, health="\n".join(f"            {name:30}: {rows[name]}" for name in rows)
    )
