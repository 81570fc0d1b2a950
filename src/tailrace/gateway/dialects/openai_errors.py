"""Errors in the form of OpenAI's interfaces."""

from __future__ import annotations

from tailrace.gateway.dialects.protocol import Failure
from tailrace.records import Json

_CODES = {401: "invalid_api_key", 404: "not_found", 410: "gone", 429: "rate_limit_exceeded"}


def openai_error(failure: Failure) -> dict[str, Json]:
    """The body of an error response.

    >>> openai_error(Failure(status=400, message="'n' is not supported", parameter="n"))["error"]["param"]
    'n'
    """
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    code = error_code(failure)
    return {"error": {"message": failure.message, "type": kind, "param": failure.parameter, "code": code}}


def error_code(failure: Failure) -> str | None:
    """What a program may tell an error by."""
    return _CODES.get(failure.status, "server_error" if failure.status >= 500 else None)
