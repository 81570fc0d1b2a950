"""An OpenAI-compatible endpoint: `POST {url}/chat/completions`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

from tailrace.errors import ChatFailed, SettingsError
from tailrace.records import Message
from tailrace.rollouts.scoring.judge.chat import Chat, ChatAnswer

if TYPE_CHECKING:
    import httpx

_LONGEST_PAUSE_S = 30.0
"""At most, whatever a server requests by `retry-after`."""
_MAY_RECOVER = (408, 409, 425, 429)
"""Besides all of 500 and above."""


class _AnswerMessage(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _AnswerMessage


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Response(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Response).decode


class EndpointChat(Chat):
    """Answers come from an endpoint. Connections are kept and reused; `close` it when done."""

    def __init__(self, url: str, model: str, *, api_key_variable: str | None = None) -> None:
        """`api_key_variable` names the environment variable that holds the key; raises `SettingsError` without it."""
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._headers = _authorization(api_key_variable)
        self._client: httpx.AsyncClient | None = None

    @override
    async def __call__(self, messages: Sequence[Message], *, max_tokens: int, temperature: float) -> ChatAnswer:
        body = {"model": self._model, "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        return self._read(await self._post(body))

    @override
    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _post(self, body: Mapping[str, Any]) -> bytes:
        import httpx

        if self._client is None:  # callers have a deadline, and bound how many call at once
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits)
        try:
            response = await self._client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise ChatFailed(f"{self._url}: {type(error).__name__}: {error}", may_recover=True) from error
        status = response.status_code
        if status != 200:
            raise ChatFailed(
                f"{self._url} answered {status}: {response.text:.300}",
                may_recover=status >= 500 or status in _MAY_RECOVER,
                pause_s=_pause_s(response.headers.get("retry-after", "")),
            )
        return response.content

    def _read(self, body: bytes) -> ChatAnswer:
        try:
            response = _decode(body)
            content = response.choices[0].message.content
        except (msgspec.MsgspecError, IndexError) as error:
            raise ChatFailed(f"{self._url} answered something else than a chat completion", may_recover=True) from error
        usage = response.usage or _Usage()
        return ChatAnswer(content or "", usage.prompt_tokens, usage.completion_tokens)


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        raise SettingsError(f"environment.judge.api_key_variable is {variable!r}, and no such variable is set")
    return {"Authorization": f"Bearer {key}"}


def _pause_s(retry_after: str) -> float:
    """Seconds that a server wants callers to wait.

    >>> _pause_s("2"), _pause_s("Wed, 21 Oct 2026 07:28:00 GMT")
    (2.0, 0.0)
    """
    return min(float(retry_after), _LONGEST_PAUSE_S) if retry_after.isdecimal() else 0.0
