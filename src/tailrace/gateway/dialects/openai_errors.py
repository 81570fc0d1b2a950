"""Errors in the form of OpenAI's interfaces."""

from __future__ import annotations

from tailrace.gateway.dialects.protocol import Failure
from tailrace.records import Json

_KINDS = {401: "authentication_error", 410: "rollout_ended", 429: "insufficient_quota"}


def openai_error(failure: Failure) -> dict[str, Json]:
    """The body of an error response, and the event of an error in a stream of chat completions.

    >>> openai_error(Failure(status=400, message="n = 2 is not supported", parameter="n"))["error"]["param"]
    'n'
    """
    kind = error_kind(failure)
    code = kind if failure.status == 429 else failure.code
    return {"error": {"message": failure.message, "type": kind, "param": failure.parameter, "code": code}}


def error_kind(failure: Failure) -> str:
    """What a program may tell an error by."""
    return _KINDS.get(failure.status, "server_error" if failure.status >= 500 else "invalid_request_error")
