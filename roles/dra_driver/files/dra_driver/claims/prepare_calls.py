# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The calls of Prepare that have not ended, by claim. A successful Unprepare ends those that arrived before it.

A Prepare can wait for the driver to become ready. If the kubelet gives up in the meantime, deletes the pod, and unprepares the claim,
the Prepare would block the devices of a claim that has no pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.errors import AcceleratorError
from .records import ClaimReference


class CallOutdated(AcceleratorError):
    """A claim was unprepared after the Prepare call for it had arrived."""

    default_code = "call-outdated"


class PrepareCall:
    """One Prepare call for one claim."""

    def __init__(self, reference: ClaimReference) -> None:
        self._reference = reference
        self.is_outdated = False

    def refuse_outdated(self) -> None:
        """Raise CallOutdated if the claim was unprepared since the call. The lock of the claim is held."""
        if self.is_outdated:
            raise CallOutdated(
                f"Claim {self._reference.describe()} is not prepared: it was unprepared after this call had arrived",
                hint="If a pod still needs the claim, the kubelet calls again.",
            )


class PrepareCalls:
    """The calls of Prepare that have not ended, in any order."""

    def __init__(self) -> None:
        self._calls: dict[str, set[PrepareCall]] = {}

    @contextmanager
    def begin(self, reference: ClaimReference) -> Iterator[PrepareCall]:
        """Register a call from its arrival, before its first wait, to its end."""
        call = PrepareCall(reference)
        calls = self._calls.setdefault(reference.uid, set())
        calls.add(call)
        try:
            yield call
        finally:
            calls.discard(call)
            if not calls:
                self._calls.pop(reference.uid, None)

    @contextmanager
    def ending_earlier(self, uid: str) -> Iterator[None]:
        """Unprepare a claim within this context: if it succeeds, the calls that had arrived before it are outdated."""
        earlier = tuple(self._calls.get(uid, ()))
        yield
        for call in earlier:
            call.is_outdated = True

    def __len__(self) -> int:
        return len(self._calls)
