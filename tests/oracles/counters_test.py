# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the dry run of cluster_info on real API servers: with the counters of ResourceSlices, without them, and without
permissions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import API_OPTIONS, connection
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.cluster_facts import check_counters

from tests.bench.api_server import ApiServer

#: The gates of counters, and those that depend on them.
GATES = ("DRAPartitionableDevices", "DRAPartitionableDevicesType", "DRADeviceTaints", "DRADeviceTaintRules")


def counters(server: ApiServer, **options: Any) -> dict[str, Any]:
    authority = str(server.kubeconfig.parent / "certificates/apiserver.crt")
    given = {**dict.fromkeys(API_OPTIONS), "ca_cert": authority, **options}
    return check_counters(connection(given))


@pytest.mark.parametrize(("off", "kept"), [((), True), (GATES, False)])
def test_real_api_server_reports_counter_support(tmp_path: Path, off: tuple[str, ...], kept: bool) -> None:
    server = ApiServer(tmp_path, off)
    with server.running():
        answer = counters(server, kubeconfig=str(server.kubeconfig))
        assert answer["kept"] is kept, answer
        rejected = counters(server, host=server.url, api_key=server.guest_token)
        assert rejected["kept"] is None and "HTTP status 403" in rejected["problem"], rejected
        unknown = counters(server, host=server.url, api_key="nobody")
        assert unknown["kept"] is None and "HTTP status 401" in unknown["problem"], unknown
