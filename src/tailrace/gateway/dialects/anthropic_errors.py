"""Errors in the form of Anthropic's interfaces."""

from __future__ import annotations

from tailrace.gateway.dialects.protocol import Failure
from tailrace.records import Json

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

THREAD = "thread"
"""Field by which Anthropic's runner of tools asks the server to keep the conversation."""
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
"""Told so, it goes on without."""


def anthropic_error(failure: Failure) -> dict[str, Json]:
    """The body of an error response, and the event of an error in a stream.

    >>> anthropic_error(Failure(status=410, message="this rollout has ended"))["error"]
    {'type': 'not_found_error', 'message': 'this rollout has ended'}
    """
    kind = _KINDS.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    error: dict[str, Json] = {"type": kind, "message": failure.message}
    if failure.parameter == THREAD:
        error["details"] = _NO_THREADS
    return {"type": "error", "error": error}
