# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Raw JSON to and from the Kubernetes API, over the connection that the ``kubernetes`` Python package sets up.

Objects stay the dictionaries that the server sent: its generated classes would lose every field that they do not know.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from ansible.module_utils.basic import AnsibleModule, env_fallback, missing_required_lib

from .core.decoding import Decoded, UndecodableObject, decode, describe_skipped
from .core.errors import AcceleratorError

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
#: Seconds for which a request is retried while the API server is overloaded, restarts, or becomes unreachable. Each pause is twice the last.
RETRY_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
_OVERLOADED = (429, 502, 503, 504)
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
        """Return whether the API server says that the object does not exist.

        A load balancer, or a server that does not serve the path, answers with status 404 and no reason: the object can exist.
        """
        return self.status == 404 and self.reason == "NotFound"

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the HTTP status and the server's reason."""
        return {**super().to_dict(), "status": self.status, "reason": self.reason}


class PartlyWritten(AcceleratorError):
    """The server refused a write after others had been made; ``steps`` are those, ``consequence`` what that leaves, as a clause."""

    default_code = "partly-written"

    def __init__(self, cause: ApiError, steps: Sequence[Mapping[str, Any]], consequence: str = "") -> None:
        super().__init__(
            f"{cause} This was after {len(steps)} writes{consequence}",
            hint="Correct the cause and run the module again.",
        )
        self.cause = cause
        self.steps = tuple(dict(step) for step in steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the error with the writes that were made, and the server's refusal."""
        return {
            **super().to_dict(),
            "status": self.cause.status,
            "reason": self.cause.reason,
            "steps": list(self.steps),
        }


_HINTS = {
    401: "See that the token or the certificate is valid for this API server.",
    403: "Grant the user the permission that the message names.",
}


class Api:
    """A connection to one API server that sends and returns plain dictionaries.

    Objects that cannot be decoded are left out of lists; ``warn`` is called with a sentence that names them. ``retry_seconds`` is how long
    from now on requests are repeated; after that each is repeated for RETRY_SECONDS.
    """

    def __init__(
        self, client: Any, warn: Callable[[str], None] = lambda _text: None, retry_seconds: float = 0.0
    ) -> None:
        self._warn = warn
        self._end = time.monotonic() + retry_seconds
        self._configuration = client.configuration
        self._pool = client.rest_client.pool_manager
        self._has_answered = False

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
        """Send one request and return the answer; ``content_type`` is the kind of patch of a body. Raises ApiError for every answer other than success.

        A request that the server has not carried out is repeated: one that it answered with 429, or with 503 and a Retry-After header, and
        one for which no connection could be made. A GET is also repeated after 502, 503, 504, and a lost connection. If the first
        request finds no server, it is not repeated, because the address can be wrong. Without ``repeat`` no request is repeated.
        """
        if path.endswith("/"):
            # The API server would answer with the list of all objects.
            raise ApiError(
                f"{method} {path}: the name of the object is empty",
                status=0,
                hint="Give the name of the object, for example that of the node.",
                code="empty-name",
            )
        url = self._configuration.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "User-Agent": "dra.accelerators"}
        for setting in self._configuration.auth_settings().values():
            if setting["value"]:
                headers[setting["key"]] = setting["value"]
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = json.dumps(body).encode("utf-8")
        now = time.monotonic()
        # ``retry_seconds`` are for all requests together: many requests that wait must not add up.
        deadline = max(now + RETRY_SECONDS, self._end) if repeat else now
        pause = FIRST_PAUSE
        while True:
            try:
                response = self._pool.request(
                    method, url, body=data, headers=headers, timeout=TIMEOUT_SECONDS, retries=False
                )
            except urllib3.exceptions.HTTPError as error:
                again = method == "GET" or isinstance(error, urllib3.exceptions.ConnectTimeoutError)
                if not (again and self._has_answered) or time.monotonic() + pause > deadline:
                    raise ApiError(
                        f"The API server at {self._configuration.host} cannot be reached: {error}",
                        status=0,
                        hint="See that the address, the certificates and the network are right.",
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
                    hint="See that this is the address of a Kubernetes API server.",
                )
        if 200 <= status < 300:
            return answer
        message = answer.get("message") or f"HTTP status {status}"
        raise ApiError(
            f"{method} {path} was refused with HTTP status {status}: {message}",
            status=status,
            reason=str(answer.get("reason", "")),
            causes=_causes(answer),
            hint=_HINTS.get(status, ""),
        )

    def list_all(self, path: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return all objects of a list, page by page. Raises ApiError.

        A continue token expires after about five minutes (status 410). Then the list is read again, in one page.
        """
        items: list[dict[str, Any]] = []
        page = {**query, "limit": "500"}
        while True:
            try:
                answer = self.request("GET", path, query=page)
            except ApiError as error:
                if error.status != 410 or "continue" not in page:
                    raise
                items, page = [], {**query}
                continue
            items.extend(answer.get("items") or [])
            token = (answer.get("metadata") or {}).get("continue")
            if not token:
                return items
            page["continue"] = token


def _is_worth_repeating(method: str, error: ApiError, headers: Mapping[str, str]) -> bool:
    """Return whether a refused request can succeed later and has certainly not been processed."""
    if method == "GET":
        return error.status in _OVERLOADED
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
                hint="See that the file is there and names the context, its cluster and its user.",
                code="kubeconfig",
            ) from error
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException as second:
            raise ApiError(
                "Nothing says how to reach the Kubernetes API: there is no kubeconfig file, and this is not a pod",
                status=0,
                hint="Set kubeconfig, or host with api_key or client_cert.",
                code="kubeconfig",
            ) from second


def connect(module: AnsibleModule, retry_seconds: float = 0.0) -> Api:
    """Return the connection that the module's options describe. Ends the module if the Python package is missing.

    For ``retry_seconds`` from now on requests are repeated; after that each is repeated for RETRY_SECONDS.

    Raises ApiError with code kubeconfig for options that lead nowhere. Sends nothing yet.
    """
    if not HAS_KUBERNETES:
        module.fail_json(msg=missing_required_lib("kubernetes"), exception=KUBERNETES_IMPORT_ERROR)
    return connection(module.params, module.warn, retry_seconds)


def connection(
    params: Mapping[str, Any],
    warn: Callable[[str], None] = lambda _text: None,
    retry_seconds: float = 0.0,
) -> Api:
    """Return the connection that options such as ``API_OPTIONS`` describe, for a plugin.

    ``warn`` is called with the names of skipped objects; ``retry_seconds`` is as in ``connect``.

    Raises ApiError with code kubeconfig for options that lead nowhere or where the Python package is missing. Sends nothing yet.
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
        _see_readable(path)
    return Api(kubernetes.client.ApiClient(configuration), warn, retry_seconds)


def _see_readable(path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb"):  # noqa: PTH123 only to see that it can be read
            return
    except OSError as error:
        raise ApiError(
            f"{path}, needed to reach the API server, cannot be read: {error.strerror}", status=0, code="kubeconfig"
        ) from error


def served_version(api: Api, group: str, wanted: Sequence[str]) -> str:
    """Return the first of the wanted versions of an API group that the server serves. Raises ApiError if none."""
    try:
        answer = api.request("GET", f"/apis/{group}")
    except ApiError as error:
        if error.status != 404:
            raise
        answer = {}
    served = [version["version"] for version in answer.get("versions") or []]
    for version in wanted:
        if version in served:
            return version
    raise ApiError(
        f"The API server serves {', '.join(served) if served else 'no version'} of {group}, expected "
        f"{' or '.join(wanted)}",
        status=404,
        hint="Dynamic Resource Allocation needs Kubernetes 1.33 with this API group switched on, or 1.34 or newer.",
        code="api-version",
    )
