"""An OpenAI-compatible endpoint: `POST {url}/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from typing_extensions import override

from tailrace.errors import ChatFailed
from tailrace.records import Message
from tailrace.rollouts.scoring.http_client import HttpClient
from tailrace.rollouts.scoring.judge.chat import Chat, ChatAnswer
from tailrace.urls import without_user

_NEWER_LIMIT = "max_completion_tokens"
"""What OpenAI's models that think take in place of `max_tokens`, which other servers may know alone."""
_REFUSES_OLDER = ("unsupported_parameter", "'max_tokens' is not supported")
"""Says so, beside the newer name; an error that names both may be about something else, as too long a question is."""


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
        self._limit = "max_tokens"
        """How the endpoint calls the limit of an answer, as far as it said."""
        self._client = HttpClient(api_key_variable, setting="environment.judge.api_key_variable")

    @override
    async def __call__(self, messages: Sequence[Message], *, max_tokens: int, temperature: float) -> ChatAnswer:
        limit = self._limit
        body = {"model": self._model, "messages": list(messages), "temperature": temperature}
        try:
            answer = await self._client.post(self._url, {**body, limit: max_tokens})
        except ChatFailed as error:
            if error.may_recover or limit == _NEWER_LIMIT or not _asks_for_newer_limit(str(error)):
                raise
            answer = await self._client.post(self._url, {**body, _NEWER_LIMIT: max_tokens})
            self._limit = _NEWER_LIMIT
        return self._read(answer)

    @override
    async def close(self) -> None:
        await self._client.close()

    def _read(self, body: bytes) -> ChatAnswer:
        try:
            response = _decode(body)
            content = response.choices[0].message.content
        except (msgspec.MsgspecError, IndexError) as error:
            what = f"{without_user(self._url)} answered something else than a chat completion"
            raise ChatFailed(what, may_recover=True) from error
        usage = response.usage or _Usage()
        return ChatAnswer(content or "", usage.prompt_tokens, usage.completion_tokens)


def _asks_for_newer_limit(told: str) -> bool:
    return _NEWER_LIMIT in told and any(words in told for words in _REFUSES_OLDER)
