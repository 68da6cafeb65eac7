# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Exchange raw JSON with the Kubernetes API, over the connection of the ``kubernetes`` Python package.

Objects stay the dictionaries that the server sent, because the package's generated classes drop unknown fields.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from ansible.module_utils.basic import AnsibleModule, env_fallback, missing_required_lib

from ..core.decoding import Decoded, UndecodableObject, decode, describe_skipped, status_reason
from ..core.errors import AcceleratorError
from ..core.times import seconds_of

try:
    import kubernetes
    import urllib3
    import yaml
except ImportError:
    HAS_KUBERNETES = False
    KUBERNETES_IMPORT_ERROR = traceback.format_exc()
else:
    HAS_KUBERNETES = True
    KUBERNETES_IMPORT_ERROR = ""

TIMEOUT_SECONDS = 30
#: Seconds for which a request is retried while the API server is overloaded, restarts, or becomes unreachable.
RETRY_SECONDS = 60.0
#: The first and the longest pause between two attempts, in seconds. Each pause is twice the previous one.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
#: The largest number of objects in one answer.
OBJECTS_PER_PAGE, SLICES_PER_PAGE = "500", "100"
#: A list whose continue token has expired is read again this many times.
LIST_RESTARTS = 3
#: A read is repeated after these statuses. The API server can answer 500 for a temporary error of etcd (kubernetes/kubernetes#112152).
_TRANSIENT_STATUSES = (429, 500, 502, 503, 504)
#: For this time after a new taint, the scheduler can allocate devices by their earlier state. A list shows the moment when its first
#: page was requested.
SETTLE_SECONDS = 4.0
#: The server's cause if a PodDisruptionBudget does not allow an eviction (k8s.io/api/policy/v1 DisruptionBudgetCause).
DISRUPTION_BUDGET = "DisruptionBudget"


def _option(environment: str, **more: Any) -> dict[str, Any]:
    return {"fallback": (env_fallback, [environment]), **more}


API_OPTIONS: dict[str, dict[str, Any]] = {
    "kubeconfig": _option("K8S_AUTH_KUBECONFIG", type="path"),
    "context": _option("K8S_AUTH_CONTEXT", type="str"),
    "host": _option("K8S_AUTH_HOST", type="str"),
    "api_key": _option("K8S_AUTH_API_KEY", type="str", no_log=True),
    "ca_cert": _option("K8S_AUTH_SSL_CA_CERT", type="path", aliases=["ssl_ca_cert"]),
    "client_cert": _option("K8S_AUTH_CERT_FILE", type="path", aliases=["cert_file"]),
    "client_key": _option("K8S_AUTH_KEY_FILE", type="path", aliases=["key_file"], no_log=False),
    "validate_certs": _option("K8S_AUTH_VERIFY_SSL", type="bool", aliases=["verify_ssl"]),
}
API_REQUIRED_TOGETHER: list[tuple[str, ...]] = [("client_cert", "client_key")]


class ApiError(AcceleratorError):
    """The API server refused a request, or could not be reached (status 0).

    ``reason`` and ``causes`` come from the server (metav1.Status: ``reason`` and ``details.causes[].reason``).
    """

    default_code = "api-error"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        reason: str = "",
        causes: Sequence[str] = (),
        hint: str = "",
        code: str = "",
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.status = status
        self.reason = reason
        self.causes = tuple(causes)

    @property
    def is_not_found(self) -> bool:
        """Return whether the API server reports that the object does not exist, with a Status that names the object.

        A load balancer, or a server that does not serve the path, also answers with status 404, but without such a Status. The
        object can then exist.
        """
        return self.status == 404 and self.reason == "NotFound"

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the HTTP status and the server's reason."""
        return {**super().to_dict(), "status": self.status, "reason": self.reason}


class PartlyWritten(AcceleratorError):
    """The server refused a write after other writes had succeeded.

    ``steps`` are the successful writes. ``consequence`` continues the message with their effect.
    """

    default_code = "partly-written"

    def __init__(self, cause: ApiError, steps: Sequence[Mapping[str, Any]], consequence: str = "") -> None:
        super().__init__(
            f"{cause} This was after {len(steps)} writes{consequence}",
            hint="Correct the cause and run the module again.",
        )
        self.cause = cause
        self.steps = tuple(dict(step) for step in steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the successful writes and the server's refusal."""
        return {
            **super().to_dict(),
            "status": self.cause.status,
            "reason": self.cause.reason,
            "steps": list(self.steps),
        }


_NOT_OF_API_SERVER = "Check the address of the API server. If a load balancer is in front of it, check that an API server behind it is healthy."
_HINTS = {
    401: "Check that the token or the certificate is valid for this API server.",
    403: "Grant the user the permission that the message names.",
}


class Api:
    """A connection to one API server that sends and returns plain dictionaries.

    Lists skip objects that cannot be decoded, and ``warn`` is called with their names. Requests are repeated until
    ``retry_seconds`` after the creation of this object, and each request for at least RETRY_SECONDS.
    """

    def __init__(
        self, client: Any, warn: Callable[[str], None] = lambda _text: None, retry_seconds: float = 0.0
    ) -> None:
        self._warn = warn
        self._end = time.monotonic() + retry_seconds
        self._configuration = client.configuration
        self._pool = client.rest_client.pool_manager
        self._has_answered = False

    def expect_server(self) -> None:
        """Also repeat the first request if it does not reach a server, because the caller knows that the address is correct."""
        self._has_answered = True

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        content_type: str = "application/json",
        repeat: bool = True,
    ) -> dict[str, Any]:
        """Send one request and return the answer. ``content_type`` is the type of a patch. Raises ApiError for every answer without success.

        A request that the server has not executed is repeated, which is after 429, after 503 with a Retry-After header, and
        without a connection. A GET is also repeated after 500, 502, 503, 504, and a lost connection. If the first request does
        not reach a server, it is not repeated, because the address can be wrong. Without ``repeat`` no request is repeated.
        """
        if path.endswith("/"):
            # The API server would answer with the list of all objects.
            raise ApiError(
                f"{method} {path}: the name of the object is empty",
                status=0,
                hint="Set the name of the object, for example the name of the node.",
                code="empty-name",
            )
        url = self._configuration.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        headers = self._headers()
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = json.dumps(body).encode("utf-8")
        now = time.monotonic()
        # ``retry_seconds`` apply to all requests together, because the waits of many requests must not add up.
        deadline = max(now + RETRY_SECONDS, self._end) if repeat else now
        pause = FIRST_PAUSE
        while True:
            try:
                response = self._pool.request(
                    method, url, body=data, headers=headers, timeout=TIMEOUT_SECONDS, retries=False
                )
            except urllib3.exceptions.HTTPError as error:
                is_repeatable = method == "GET" or isinstance(error, urllib3.exceptions.ConnectTimeoutError)
                if not (is_repeatable and self._has_answered) or time.monotonic() + pause > deadline:
                    raise ApiError(
                        f"The API server at {self._configuration.host} cannot be reached: {error}",
                        status=0,
                        hint="Check the address, the certificates, and the network.",
                        code="api-unreachable",
                    ) from error
                wait = pause
            else:
                self._has_answered = True
                wait = max(_retry_after(response.headers), pause)
                try:
                    return self._read(method, path, response.status, response.data)
                except ApiError as error:
                    if not _is_worth_repeating(method, error, response.headers) or time.monotonic() + wait > deadline:
                        raise
            time.sleep(wait)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Accept-Encoding": "gzip", "User-Agent": "dra.accelerators"}
        for setting in self._configuration.auth_settings().values():
            if setting["value"]:
                headers[setting["key"]] = setting["value"]
        return headers

    def _read(self, method: str, path: str, status: int, data: bytes) -> dict[str, Any]:
        try:
            # No module reads opaque parameters of claims; those of DeviceClasses are written back.
            decoded = decode(data, opaque_of=() if "/resourceclaim" in path else None)
        except UndecodableObject as error:
            raise ApiError(f"{method} {path}: {error.message}", status=status, hint=error.hint) from error
        except ValueError:
            decoded = Decoded(None)
        answer = decoded.value
        if decoded.skipped:
            self._warn(describe_skipped(decoded.skipped))
        if not isinstance(answer, dict):
            answer = {"message": data.decode("utf-8", "replace").strip()[:500]}
            if 200 <= status < 300:
                raise ApiError(
                    f"{method} {path}: {self._configuration.host} answered with something other than JSON: "
                    f"{answer['message']!r}",
                    status=status,
                    hint="Check that this is the address of a Kubernetes API server.",
                )
        if 200 <= status < 300:
            return answer
        message = answer.get("message") or f"HTTP status {status}"
        hint = _HINTS.get(status, "")
        if status == 404 and answer.get("kind") != "Status":
            url = f"{self._configuration.host.rstrip('/')}{path}"
            message, hint = f"{message}. The answer of {url} is not from an API server", _NOT_OF_API_SERVER
        raise ApiError(
            f"{method} {path} was refused with HTTP status {status}: {message}",
            status=status,
            reason=status_reason(answer, path),
            causes=_causes(answer),
            hint=hint,
        )

    def list_all(
        self, path: str, query: Mapping[str, str], keep: Callable[[dict[str, Any]], Any] = lambda item: item
    ) -> list[Any]:
        """Return all objects of a list. Raises ApiError.

        The list is read page by page. ``keep`` returns the part of an object that is kept in memory, or None to leave the object out.
        A continue token expires after about five minutes (status 410). Then the list is read again from its first page.
        """
        items: list[Any] = []
        # A slice is up to 100 times as large as other objects.
        page = {**query, "limit": SLICES_PER_PAGE if path.endswith("/resourceslices") else OBJECTS_PER_PAGE}
        restarts = 0
        while True:
            try:
                answer = self.request("GET", path, query=page)
            except ApiError as error:
                if error.status != 410 or "continue" not in page or restarts == LIST_RESTARTS:
                    raise
                restarts += 1
                items.clear()
                del page["continue"]
                continue
            items += [kept for kept in map(keep, entries(answer, path, "items")) if kept is not None]
            token = (answer.get("metadata") or {}).get("continue")
            if not token:
                return items
            page["continue"] = token


def _is_worth_repeating(method: str, error: ApiError, headers: Mapping[str, str]) -> bool:
    """Return whether a refused request can succeed later and has certainly not been processed."""
    if method == "GET":
        return error.status in _TRANSIENT_STATUSES
    if error.status == 503:
        return "Retry-After" in headers
    return error.status == 429 and DISRUPTION_BUDGET not in error.causes


def _causes(answer: Mapping[str, Any]) -> list[str]:
    details = answer.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return [str(each.get("reason", "")) for each in causes or [] if isinstance(each, dict)]


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds in the header Retry-After; 0 without one."""
    text = headers.get("Retry-After") or ""
    return float(text) if text.isdecimal() else 0.0


def _apply_options(configuration: Any, params: Mapping[str, Any]) -> None:
    if params["host"]:
        configuration.host = params["host"]
    if params["api_key"]:
        configuration.api_key = {"authorization": f"Bearer {params['api_key']}"}
    if params["ca_cert"]:
        configuration.ssl_ca_cert = params["ca_cert"]
    if params["client_cert"]:
        configuration.cert_file = params["client_cert"]
        configuration.key_file = params["client_key"]
    if params["validate_certs"] is not None:
        configuration.verify_ssl = params["validate_certs"]


def _load(configuration: Any, params: Mapping[str, Any]) -> None:
    """Fill in the configuration from a kubeconfig file, or inside a pod from its service account."""
    config: Any = kubernetes.config
    try:
        config.load_kube_config(
            config_file=params["kubeconfig"], context=params["context"], client_configuration=configuration
        )
    except config.ConfigException as error:
        if params["kubeconfig"] or params["context"]:
            raise ApiError(
                f"The kubeconfig {params['kubeconfig'] or 'file'} cannot be used: {error}",
                status=0,
                hint="Check that the file exists and contains the context, its cluster, and its user.",
                code="kubeconfig",
            ) from error
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException as second:
            raise ApiError(
                "No access to the Kubernetes API is configured: there is no kubeconfig file, and this process does not run in a pod",
                status=0,
                hint="Set kubeconfig, or host with api_key or client_cert.",
                code="kubeconfig",
            ) from second


def connect(module: AnsibleModule, retry_seconds: float = 0.0) -> Api:
    """Return the connection of the module's options. Ends the module if the Python package is missing.

    Requests are repeated for ``retry_seconds`` from now on. After that each is repeated for RETRY_SECONDS. Raises ApiError
    with code kubeconfig for invalid options. Sends no request.
    """
    if not HAS_KUBERNETES:
        module.fail_json(msg=missing_required_lib("kubernetes"), exception=KUBERNETES_IMPORT_ERROR)
    return connection(module.params, module.warn, retry_seconds)


def connection(
    params: Mapping[str, Any],
    warn: Callable[[str], None] = lambda _text: None,
    retry_seconds: float = 0.0,
) -> Api:
    """Return the connection of options such as ``API_OPTIONS``, for a plugin.

    ``warn`` is called with the names of skipped objects; ``retry_seconds`` is as in ``connect``. Raises ApiError with code
    kubeconfig for invalid options or a missing Python package. Sends no request.
    """
    if not HAS_KUBERNETES:
        raise ApiError(missing_required_lib("kubernetes"), status=0, code="kubeconfig")
    configuration = kubernetes.client.Configuration()
    if not (params["host"] and (params["api_key"] or params["client_cert"])):
        try:
            _load(configuration, params)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
            raise ApiError(
                f"The kubeconfig {params['kubeconfig'] or 'file'} cannot be read: {error}", status=0, code="kubeconfig"
            ) from error
    _apply_options(configuration, params)
    for path in (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file):
        _check_readable(path)
    return Api(kubernetes.client.ApiClient(configuration), warn, retry_seconds)


def _check_readable(path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb"):  # noqa: PTH123 only to check that it can be read
            return
    except OSError as error:
        raise ApiError(
            f"{path}, needed to reach the API server, cannot be read: {error.strerror}", status=0, code="kubeconfig"
        ) from error


def without_managed_fields(item: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its ``managedFields``, which can be half of the object. For ``list_all``."""
    (item.get("metadata") or {}).pop("managedFields", None)
    return item


def was_just_written(item: Mapping[str, Any], manager: str, now: str) -> bool:
    """Return whether a field manager changed an object less than SETTLE_SECONDS before ``now``, also in a run that was killed since.

    The API server records the time of the change by its own clock, without parts of a second.
    """
    fields = item["metadata"].get("managedFields") or ()
    times = [seconds_of(str(each.get("time"))) for each in fields if each.get("manager") == manager]
    present = seconds_of(now) or 0.0
    return any(present - each < SETTLE_SECONDS + 1 for each in times if each is not None)


def group_versions(api: Api, group: str) -> list[str]:
    """Return the versions of an API group that the server serves, none if it does not serve the group. Raises ApiError.

    A load balancer can also answer with status 404. Therefore a 404 is confirmed with the list of all groups.
    """
    path = f"/apis/{group}"
    try:
        return [str(one["version"]) for one in entries(api.request("GET", path), path, "versions")]
    except ApiError as error:
        if error.status != 404:
            raise
        not_found = error
    answer = api.request("GET", "/apis")
    groups = entries(answer if answer.get("kind") == "APIGroupList" else {}, "/apis", "groups")
    if any(one.get("name") == group for one in groups):
        raise not_found
    return []


def first_serving(api: Api, group: str, wanted: Sequence[str], resource: str) -> str:
    """Return the first of the wanted versions of an API group in which the server serves a resource; empty if none. Raises ApiError."""
    served = group_versions(api, group)
    return next((each for each in wanted if each in served and serves(api, group, each, resource)), "")


def serves(api: Api, group: str, version: str, resource: str) -> bool:
    """Return whether the server serves a resource in a version of an API group. Raises ApiError."""
    path = f"/apis/{group}/{version}"
    return any(one.get("name") == resource for one in entries(api.request("GET", path), path, "resources"))


def entries(answer: Mapping[str, Any], path: str, key: str) -> list[dict[str, Any]]:
    """Return the list under ``key`` of an answer to ``GET path``. Raises ApiError if the answer has none."""
    check_answer(answer, path, key)
    return answer[key] or []


def check_answer(answer: Mapping[str, Any], path: str, key: str) -> None:
    """Raise ApiError if an answer to ``GET path`` has no ``key``. Every answer of an API server has it."""
    if key not in answer:
        raise ApiError(
            f"GET {path}: the answer is not from an API server: found no {key} in {json.dumps(answer)[:200]}",
            status=200,
            hint=_NOT_OF_API_SERVER,
        )


def served_version(api: Api, group: str, wanted: Sequence[str]) -> str:
    """Return the first of the wanted versions of an API group that the server serves. Raises ApiError if none."""
    served = group_versions(api, group)
    for version in wanted:
        if version in served:
            return version
    raise ApiError(
        f"The API server serves {', '.join(served) if served else 'no version'} of {group}, expected "
        f"{' or '.join(wanted)}",
        status=404,
        hint="Dynamic Resource Allocation requires Kubernetes 1.34 or newer, or Kubernetes 1.33 with this API group enabled.",
        code="api-version",
    )
