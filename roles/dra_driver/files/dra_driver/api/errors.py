# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Errors of requests to the API server."""

from __future__ import annotations

from ..core.errors import AcceleratorError


class ApiUnreachable(AcceleratorError):
    """The API server did not answer."""

    default_code = "api-unreachable"


class ApiError(AcceleratorError):
    """The API server returned an error.

    ``status`` is the HTTP status, ``reason`` the reason of the Kubernetes Status, and ``retry_after`` the Retry-After
    in seconds, or None.
    """

    default_code = "api-error"

    def __init__(
        self, message: str, *, status: int, reason: str = "", hint: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after

    @property
    def is_not_found(self) -> bool:
        """Return whether the API server reports that the object does not exist, with a Status that names the object.

        A server that does not serve the path also returns status 404, but without such a Status. Examples are a load
        balancer, and an older server during an upgrade of the control plane. That does not mean that the object is
        missing. Facts: k8s.io/apiserver/pkg/server/mux/pathrecorder.go (NotFoundHandler),
        k8s.io/apimachinery/pkg/api/errors (NewNotFound).
        """
        return self.status == 404 and self.reason == "NotFound"

    @property
    def is_of_server(self) -> bool:
        """Return whether the same request for other objects fails too, because of the identity, its rights, or the server."""
        return self.status in (401, 403, 429) or self.status >= 500 or (self.status == 404 and not self.is_not_found)


class ResourceApiMissing(AcceleratorError):
    """The cluster does not serve dynamic resource allocation."""

    default_code = "resource-api-missing"


class TooLarge(ApiError):
    """The response of the API server exceeds the client's limit. A page of a list can be read again with fewer objects."""

    default_code = "answer-too-large"
