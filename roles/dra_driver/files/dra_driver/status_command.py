# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``status``: print the status that each driver reports, the answer of its registration service, and the prepared claims."""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import config
from .config import Configuration
from .core.errors import AcceleratorError
from .core.host.companions import LIST_UNITS, claim_of, parse_unit_list
from .core.host.system import System
from .core.store.prepared_claims import ClaimFiles, PreparedClaim, prepared_claims
from .core.vendors.registry import create
from .kubelet.sockets import PATH_BYTES, paths_of, status_paths
from .supervisors.status import Role, Status

ANSWER_SECONDS = 2.0
UNITS_SECONDS = 10.0


def run_status(config_path: str, *, as_json: bool) -> int:
    """Run the command and return its exit status: 0 if every driver is ready, else 1."""
    configuration = config.load(config_path)
    found: list[dict[str, Any]] = []
    programs: dict[str, list[dict[str, str]]] | None = None
    for vendor in configuration.backends:
        backend = create(vendor, System())
        driver = configuration.driver_name or backend.driver_name
        directory = configuration.state_directory_of(driver)
        status = instance_status(configuration, driver)
        paths = paths_of(directory, configuration.registry_directory, driver, status["instance"])
        claims = prepared_claims(f"{directory}/state.db", ClaimFiles(configuration.cdi_directory, backend.cdi_kind))
        if claims and programs is None:
            programs = companion_units(System())
        found.append(
            {
                **status,
                "state": f"{directory}/state.db",
                "socket": paths.service,
                "answer": query_registration(paths.registration),
                "claims": [_claim(claim, (programs or {}).get(claim.uid, [])) for claim in claims],
            }
        )
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if as_json else "".join(_table(entry) for entry in found))
    return 0 if all(entry["ready"] for entry in found) else 1


def instance_status(configuration: Configuration, driver: str) -> dict[str, Any]:
    """Return the status of a driver on this node.

    If the environment names an instance, this is the status of that instance. Otherwise it is that of the serving
    instance, or of any running instance.
    """
    directory = configuration.state_directory_of(driver)
    own = paths_of(directory, configuration.registry_directory, driver, configuration.instance).status
    if configuration.instance:
        return query_status(driver, own)
    found = {path: query_status(driver, path) for path in status_paths(directory)}
    serving = [status for status in found.values() if status["role"] == Role.SERVING]
    alive = [status for status in found.values() if status["pid"]]
    return next(iter(serving or alive or [found.get(own) or query_status(driver, own)]))


def query_status(driver: str, path: str) -> dict[str, Any]:
    """Return the status that a driver reports at its status socket. A driver that does not answer is not ready."""
    none = Status(
        driver=driver,
        ready=False,
        problems=(),
        pid=0,
        version="",
        boot_id="",
        looked_at=0.0,
        published=False,
        registered=False,
        devices=(),
    ).to_dict()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(path)
            with connection.makefile("rb") as answer:
                # A release without instances runs one process only, which serves.
                status: dict[str, Any] = {**none, "role": Role.SERVING, **json.loads(answer.read())}
                # A process in a pod can report a PID of the pod's PID namespace. The kernel returns the PID of this
                # namespace.
                return {**status, "pid": _peer_pid(connection) or status["pid"]}
    except (OSError, ValueError) as error:
        return {**none, "problems": (f"the driver does not answer at {path}: {error}",)}


def _peer_pid(connection: socket.socket) -> int:
    """Return the PID of the process that listens at the other end, in this PID namespace; 0 if it is not visible here."""
    process, _user, _group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(process)


def query_registration(path: str) -> dict[str, Any]:
    """Query the registration service for its information (GetInfo), as the kubelet does."""
    import grpc

    from .protocol import plugin_registration_pb2, plugin_registration_pb2_grpc

    if len(path) > PATH_BYTES:
        return {"ok": False, "message": f"the socket path {path} is longer than {PATH_BYTES} bytes"}
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = plugin_registration_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = stub.GetInfo(plugin_registration_pb2.InfoRequest(), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return {"ok": False, "message": f"{path} does not answer: {error.code().name}"}
    return {"ok": True, "message": f"{answer.name} serves {', '.join(answer.supported_versions)} at {answer.endpoint}"}


def fault_texts(device: Mapping[str, Any]) -> list[str]:
    """Return the faults of a device in a driver's status, each with its remedy.

    The device's ``fault`` is included unless one of its tracked faults has the same cause.
    """
    tracked = [
        " ".join(
            part
            for part in (each["cause"], each["value"], f"({each['severity']}):", each["message"], each["remedy"])
            if part
        )
        for each in device.get("ailments", ())
    ]
    fault = str(device["fault"])
    is_listed = any(fault.startswith(f"{each['cause']}:") for each in device.get("ailments", ()))
    return [*tracked, *([fault] if fault and not is_listed else [])]


def companion_units(system: System) -> dict[str, list[dict[str, str]]]:
    """Return the companion units that run for claims, by claim UID. Empty if systemd does not answer."""
    try:
        done = system.run(list(LIST_UNITS), timeout=UNITS_SECONDS)
    except AcceleratorError:
        return {}
    states = {line.split()[0]: line.split()[2] for line in done.stdout.splitlines() if len(line.split()) > 2}
    found: dict[str, list[dict[str, str]]] = {}
    for unit in parse_unit_list(done.stdout):
        uid = claim_of(unit.partition("@")[2].removesuffix(".service"))
        if uid:
            found.setdefault(uid, []).append({"unit": unit, "state": states.get(unit, "unknown")})
    return found


def _claim(claim: PreparedClaim, programs: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "namespace": claim.namespace,
        "name": claim.name,
        "uid": claim.uid,
        "state": claim.state,
        "companions": programs,
        "devices": [
            {
                "name": device.name,
                "request": device.request,
                "device_uuid": device.device_uuid,
                "partition_uuid": device.partition_uuid,
                "created": device.created,
            }
            for device in claim.devices
        ],
    }


def _table(entry: dict[str, Any]) -> str:
    lines = [f"{entry['driver']}: {_state(entry)}", *(f"  {problem}" for problem in entry["problems"])]
    if entry["refused"]:
        lines.append(f"  a later configuration is refused: {entry['refused']['problem']}")
    lines += [f"  {device['name']}: {said}" for device in entry["devices"] for said in fault_texts(device)]
    lines += [_resource(each) for each in entry["resources"]]
    # A driver of an earlier release does not report these.
    lines += [f"  {name} is not offered: {reason}" for name, reason in entry.get("not_offered", {}).items()]
    lines += [f"  pending cleanup: {each}" for each in entry.get("pending_cleanup", ())]
    if entry["kubelet_interface"] == config.DRA or entry["claims"]:
        lines.append(entry["answer"]["message"])
    rows = [("CLAIM", "STATE", "REQUEST", "DEVICE", "UUID")]
    for claim in entry["claims"]:
        name = f"{claim['namespace']}/{claim['name']}"
        rows += [
            (name, claim["state"], device["request"], device["name"], device["partition_uuid"] or device["device_uuid"])
            for device in claim["devices"]
        ] or [(name, claim["state"], "-", "-", "-")]
    if len(rows) == 1:
        return "\n".join([*lines, "no claim is prepared"]) + "\n"
    programs = [f"{each['unit']}: {each['state']}" for claim in entry["claims"] for each in claim["companions"]]
    return "\n".join([*lines, *_aligned(rows), *programs]) + "\n"


def _state(entry: dict[str, Any]) -> str:
    if not entry["pid"]:
        return "not running"
    words = ["ready" if entry["ready"] else "not ready", f"version {entry['version']}", f"pid {entry['pid']}"]
    words += [f"instance {entry['instance']}"] if entry["instance"] else []
    words.append(f"{len(entry['devices'])} devices")
    if entry["kubelet_interface"] == config.DRA:
        words.append("published" if entry["published"] else "not published")
    else:
        words.append("offered by the device plugin" if entry["published"] else "not offered")
    return ", ".join(words)


def _resource(resource: Mapping[str, Any]) -> str:
    connected = "the kubelet is connected" if resource["connected"] else "the kubelet is not connected"
    return f"  {resource['resource']}: {resource['healthy']} of {resource['devices']} can be allocated to pods, {connected}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
