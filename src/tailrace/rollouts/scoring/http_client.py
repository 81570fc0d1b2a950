"""POST of JSON to an HTTP endpoint, and what becomes of its failures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.errors import ChatFailed, SettingsError
from tailrace.urls import without_user

if TYPE_CHECKING:
    import httpx

_LONGEST_PAUSE_S = 30.0
"""At most, whatever a server requests by `retry-after`."""
_MAY_RECOVER = (408, 409, 425, 429)
"""Besides all of 500 and above."""


class HttpClient:
    """Connections to one endpoint, kept and reused; `close` it when done."""

    def __init__(self, api_key_variable: str | None, *, setting: str) -> None:
        """`api_key_variable` names the environment variable that holds the key, `setting` the setting that names it.

        Raises `SettingsError` where there is no such variable.
        """
        self._headers = {"Content-Type": "application/json", **_authorization(api_key_variable, setting)}
        self._client: httpx.AsyncClient | None = None

    async def post(self, url: str, body: Mapping[str, Any]) -> bytes:
        """The answer's content. Raises `ChatFailed`; has no time limit of its own."""
        import httpx

        if self._client is None:  # callers have a deadline, and bound how many call at once
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits)
        try:
            content = msgspec.json.encode(body)  # httpx's own takes ten times as long for token ids
            response = await self._client.post(url, content=content)
        except httpx.HTTPError as error:
            raise ChatFailed(f"{without_user(url)}: {type(error).__name__}: {error}", may_recover=True) from error
        status = response.status_code
        if status != 200:
            raise ChatFailed(
                f"{without_user(url)} answered {status}: {response.text:.300}",
                may_recover=status >= 500 or status in _MAY_RECOVER,
                pause_s=_pause_s(response.headers.get("retry-after", "")),
            )
        return response.content

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _authorization(variable: str | None, setting: str) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        raise SettingsError(f"{setting} is {variable!r}, and no such variable is set")
    return {"Authorization": f"Bearer {key}"}


def _pause_s(retry_after: str) -> float:
    """Seconds that a server wants callers to wait.

    >>> _pause_s("2"), _pause_s("Wed, 21 Oct 2026 07:28:00 GMT")
    (2.0, 0.0)
    """
    return min(float(retry_after), _LONGEST_PAUSE_S) if retry_after.isdecimal() else 0.0
